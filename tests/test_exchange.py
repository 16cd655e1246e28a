"""Saved lineages: written, read back equal, and refused with the place of the fault when they are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradlineage
from gradlineage.errors import FormatError, LineageError
from gradlineage.exchange import from_json, load, save, to_json
from gradlineage.graph import BreakRecord, CallRecord, Graph, Node, ValueRecord
from gradlineage.lineage import Lineage
from tests.profiles import examples
from tests.strategies import graphs, lineages

torch.set_num_threads(1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.gate = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor, *, twice: bool = True) -> dict[str, torch.Tensor]:
        y = self.stem(x)
        y = y + self.block(y) * self.gate
        y = self.block(y) + y if twice else y
        with torch.no_grad():
            best = y.argmax(-1)
        return {"out": y * self.scale, "best": best, "zeros": torch.zeros(2)}


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module('say "hi"\n', nn.Linear(4, 4))
        self.add_module("größe 層 😀", nn.LSTM(4, 4, batch_first=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.children()
        out, (h, _) = second(first(x)[None])
        return torch.cat([out[0], h[0]])


MODELS: list[tuple[nn.Module, tuple[torch.Tensor, ...]]] = [
    (nn.Linear(3, 1), (torch.ones(2, 3),)),
    (nn.Sequential(), (torch.ones(2, 3),)),
    (Residual(), (torch.ones(2, 4),)),
    (Odd(), (torch.ones(2, 4),)),
    (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (torch.ones(1, 3, 8),)),
]


def document() -> dict[str, Any]:
    """A fresh valid document to break, of a model with joins, containers, a no_grad part and shared calls."""
    found: dict[str, Any] = json.loads(to_json(gradlineage.trace(Residual(), torch.ones(2, 4))))
    return found


DOCUMENT = document()


def everything(lineage: Lineage) -> None:
    """Ask a lineage all there is to ask."""
    asked: list[Any] = [repr(lineage), hash(lineage), lineage.inputs, lineage.bypassed, lineage.breaks, lineage.notes, lineage.parameters]
    for call in lineage.calls:
        asked += [lineage[call.label], call.kind, call.parent, call.parameters, repr(call)]
        asked += [lineage.predecessors(call), lineage.successors(call), lineage.ancestors(call), lineage.descendants(call)]
    for join in lineage.joins:
        asked += [lineage[join.label], join.container, repr(join), lineage.predecessors(join), lineage.successors(join)]
    flows = [f for call in lineage.calls for f in (*call.inputs, *call.outputs, *call.hidden)] + [*lineage.outputs]
    flows += [f for join in lineage.joins for f in (*join.inputs, *join.outputs)]
    for flow in flows:
        asked += [repr(flow), flow.links, flow.sources, [(k.label, k.ops, k.source, repr(k)) for k in flow.links]]
        for source in flow.sources:
            if source.path is not None:
                lineage[source]
    assert asked
    to_json(lineage)


# -- round trips ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "inputs"), MODELS, ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "")
def test_traced_lineage_comes_back_equal(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    lineage = gradlineage.trace(model, *inputs)
    assert from_json(to_json(lineage)) == lineage
    assert from_json(to_json(lineage).encode()) == lineage
    with torch.no_grad():
        lineage = gradlineage.trace(model, *inputs)
    assert from_json(to_json(lineage)) == lineage


def test_collapsed_lineage_comes_back_equal_and_collapsed() -> None:
    lineage = gradlineage.trace(Residual(), torch.ones(2, 4))
    for collapsed in (lineage.collapse("block"), lineage.collapse(depth=1), lineage.collapse(depth=0)):
        back = from_json(to_json(collapsed))
        assert back == collapsed
        assert back != lineage
        assert [c.label for c in back.layers] == [c.label for c in collapsed.layers]


@given(lineages())
@examples(150)
def test_any_graph_comes_back_equal(lineage: Lineage) -> None:
    text = to_json(lineage)
    assert from_json(text) == lineage
    assert to_json(from_json(text)) == text


@given(graphs())
@examples(100)
def test_any_graph_that_is_accepted_can_be_asked_everything(graph: Graph) -> None:
    everything(from_json(to_json(Lineage(graph))))
    if graph.calls:
        everything(from_json(to_json(Lineage(graph))).collapse(depth=0))


def test_every_field_of_the_graph_is_in_the_schema() -> None:
    call, node = DOCUMENT["calls"][1], {key for row in DOCUMENT["nodes"] for key in row}
    assert {*DOCUMENT} - {"schema", "collapsed", "rolled", "table"} == {*Graph._fields}
    assert [*call, "seen"] == [*CallRecord._fields]  # left out where it is 1
    assert [*call["inputs"][0]] == [*ValueRecord._fields]
    assert [*DOCUMENT["breaks"][0]] == [*BreakRecord._fields]
    assert node - {"without_grad"} <= {*Node._fields}


def test_output_is_the_same_each_time_and_plain_ascii() -> None:
    first, second = [to_json(gradlineage.trace(Odd(), torch.ones(2, 4))) for _ in range(2)]
    assert first == second
    assert first.isascii()


def test_one_call_and_one_node_stand_on_a_line() -> None:
    text = to_json(gradlineage.trace(Residual(), torch.ones(2, 4)))
    rows = [json.loads(line.strip().removesuffix(",")) for line in text.splitlines() if line.startswith("  {")]
    assert [r for r in rows if "kind" in r] == json.loads(text)["nodes"]
    assert [r for r in rows if "registered" in r] == json.loads(text)["calls"]


def test_table_says_what_each_layer_and_join_is_connected_to() -> None:
    table = DOCUMENT["table"]
    rows = {row["label"]: [label for flow in row["inputs"] for label in flow["connected_to"]] for row in table["layers"] + table["joins"]}
    assert rows == {
        "stem": ["input:x"], "block.0[0]": ["stem"], "block.1[0]": ["block.0[0]"], "block.2[0]": ["block.1[0]"],
        "block.0[1]": [":add[0]"], "block.1[1]": ["block.0[1]"], "block.2[1]": ["block.1[1]"],
        ":add[0]": ["stem", "block.2[0]", "gate"], ":add[1]": ["block.2[1]", ":add[0]"],
    }  # fmt: skip
    assert [(flow["name"], flow["connected_to"]) for flow in table["outputs"]] == [
        ("['out']", [":add[1]", "scale"]), ("['best']", [":add[1]"]), ("['zeros']", ["constant:zeros"]),
    ]  # fmt: skip
    assert table["layers"][1] | {"inputs": []} == {
        "label": "block.0[0]",
        "type": "Linear",
        "path": "block.0",
        "nth": 0,
        "inputs": [],
        "hidden": [],
    }


def test_table_follows_the_collapsed_layers() -> None:
    lineage = gradlineage.trace(Residual(), torch.ones(2, 4)).collapse("block")
    table = json.loads(to_json(lineage))["table"]
    assert [(row["label"], row["inputs"][0]["connected_to"]) for row in table["layers"]] == [
        ("stem", ["input:x"]), ("block[0]", ["stem"]), ("block[1]", [":add[0]"]),
    ]  # fmt: skip


@pytest.mark.parametrize("table", [None, 3, "x", [], {"layers": 7}])
def test_table_is_ignored_on_reading(table: object) -> None:
    found = document()
    found["table"] = table
    assert from_json(json.dumps(found)) == from_json(json.dumps(DOCUMENT))
    del found["table"]
    assert from_json(json.dumps(found)) == from_json(json.dumps(DOCUMENT))


def test_ten_thousand_calls_take_a_few_megabytes() -> None:
    value = ValueRecord("input", (8, 512, 28, 28), "float32", "cuda:0", 0)
    calls = tuple(
        CallRecord(
            f"layers.{i}.attention.proj", 0, "Linear", True, -1, "some/package/model.py:123", 10**6, 10**6, True, False, (value,), (value,)
        )
        for i in range(10_000)
    )
    nodes = tuple(Node("call", call=i, port=0, grad=True) for i in range(10_000))
    text = to_json(Lineage(Graph(nodes, calls, (), "Big", 0, 0)))
    assert len(text) < 8_000_000
    assert len(from_json(text).layers) == 10_000


# -- broken documents ----------------------------------------------------------------------------------------------------------------


def _set(*place: Any) -> Callable[[dict[str, Any]], None]:
    """A mutation: all but the last lead to where the last is put."""
    *way, key, value = place

    def change(found: Any) -> None:
        for step in way:
            found = found[step]
        found[key] = value

    return change


def _drop(*way: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: Any) -> None:
        for step in way[:-1]:
            found = found[step]
        del found[way[-1]]

    return change


def at(kind: str, **having: Any) -> int:
    """Number of the first node of a kind."""
    return next(i for i, n in enumerate(DOCUMENT["nodes"]) if n["kind"] == kind and all(n.get(k) == v for k, v in having.items()))


OP = at("op")
LAYER = next(i for i, c in enumerate(DOCUMENT["calls"]) if c["layer"])
CONTAINER = at("call", call=0) if any(n.get("call") == 0 and n["kind"] == "call" for n in DOCUMENT["nodes"]) else at("call", call=2)
LEFT = at("call", call=LAYER)
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "older schema": (_set("schema", "gradlineage/0"), '$.schema: expected "gradlineage/1", found "gradlineage/0"'),
    "newer schema": (_set("schema", "gradlineage/2"), "upgrade gradlineage"),
    "newest schema": (_set("schema", "gradlineage/" + "9" * 5000), "$.schema: expected"),
    "no schema": (_drop("schema"), '$.schema: expected "gradlineage/1", found null'),
    "schema of another kind": (_set("schema", ["gradlineage/1"]), "$.schema: expected"),
    "missing key": (_drop("calls", 3, "parent"), '$.calls[3]: expected a key "parent", found none'),
    "missing part": (_drop("nodes"), '$: expected a key "nodes", found none'),
    "missing kind": (_drop("nodes", 0, "kind"), '$.nodes[0]: expected a key "kind", found none'),
    "extra key": (_set("calls", 3, "code", "import os"), '$.calls[3]: expected no keys but path, nth'),
    "extra key of a value": (_set("outputs", 0, "grad", True), "$.outputs[0]: expected no keys but"),
    "extra part": (_set("exec", 1), '$: expected no keys but schema'),
    "text for a number": (_set("calls", 3, "parent", "0"), '$.calls[3].parent: expected an integer from -1 to 2**63 - 1, found "0"'),
    "true for a number": (_set("calls", 3, "nth", True), "$.calls[3].nth: expected an integer from 0 to 2**63 - 1, found true"),
    "number for a flag": (_set("calls", 3, "layer", 1), "$.calls[3].layer: expected true or false, found 1"),
    "null for a flag": (_set("calls", 3, "failed", None), "$.calls[3].failed: expected true or false, found null"),
    "number for used": (_set("calls", 3, "inputs", 0, "used", 0), "$.calls[3].inputs[0].used: expected true, false or null, found 0"),
    "float": (_set("calls", 3, "parameters", 2.0), "$.calls[3].parameters: expected an integer from 0 to 2**63 - 1, found 2.0"),
    "not a number": (_set("calls", 3, "parameters", float("nan")), "$.calls[3].parameters: expected an integer from 0 to 2**63 - 1, found NaN"),
    "infinity": (_set("parameters", float("inf")), "$.parameters: expected an integer from 0 to 2**63 - 1, found Infinity"),
    "huge": (_set("trainable", 2**63), "$.trainable: expected an integer"),
    "hugest": (_set("outputs", 0, "shape", 0, 10**4000), "$.outputs[0].shape[0]: expected an integer"),
    "negative": (_set("outputs", 0, "shape", 0, -1), "$.outputs[0].shape[0]: expected an integer from 0 to 2**63 - 1, found -1"),
    "list in a shape": (_set("outputs", 0, "shape", 0, [1]), "$.outputs[0].shape[0]: expected an integer from 0 to 2**63 - 1, found a list of 1"),
    "list for a text": (_set("model", []), "$.model: expected a string, found a list of 0"),
    "object for a list": (_set("calls", {}), "$.calls: expected a list, found an object"),
    "list for an object": (_set("calls", 3, []), "$.calls[3]: expected an object, found a list of 0"),
    "text for a list": (_set("notes", "note"), '$.notes: expected a list, found "note"'),
    "long text for a number": (_set("parameters", "9" * 500), f'$.parameters: expected an integer from 0 to 2**63 - 1, found "{"9" * 56}...'),
    "unknown kind": (_set("nodes", 0, "kind", "shell"), "$.nodes[0].kind: expected one of op, call, input, parameter, buffer, constant, unknown, empty"),
    "kind of another kind": (_set("nodes", 0, "kind", {}), "$.nodes[0].kind: expected one of op"),
    "call in itself": (_set("calls", 3, "parent", 3), "$.calls[3].parent: expected the number of one of 3 earlier calls, found 3"),
    "call in a later one": (_set("calls", 3, "parent", 4), "$.calls[3].parent: expected the number of one of 3 earlier calls, found 4"),
    "call in a layer": (_set("calls", LAYER + 1, "parent", LAYER), f"$.calls[{LAYER + 1}].parent: expected the number of a container"),
    "node its own parent": (_set("nodes", OP, "parents", 0, OP), f"$.nodes[{OP}].parents[0]: expected the number of one of {OP} earlier nodes"),
    "later parent": (_set("nodes", OP, "parents", 0, OP + 1), f"$.nodes[{OP}].parents[0]: expected the number of one of {OP} earlier nodes"),
    "negative parent": (_set("nodes", OP, "parents", 0, -1), f"$.nodes[{OP}].parents[0]: expected an integer from 0"),
    "dangling call": (_set("nodes", OP, "call", 99), f"$.nodes[{OP}].call: expected the number of one of {len(DOCUMENT['calls'])} calls, found 99"),
    "value of no call": (_drop("nodes", LEFT, "call"), f"$.nodes[{LEFT}].call: expected the number of a call, found -1"),
    "dangling input": (_set("calls", 3, "inputs", 0, "node", 999), "$.calls[3].inputs[0].node: expected the number of one of"),
    "dangling output": (_set("outputs", 1, "node", 999), "$.outputs[1].node: expected the number of one of"),
    "port too many": (_set("nodes", LEFT, "port", 1), f"$.nodes[{LEFT}].port: expected the number of one of 1 tensors, found 1"),
    "port of an input": (_set("nodes", at("input"), "port", 1), "].port: expected the number of one of 1 tensors, found 1"),
    "op without operands": (_set("nodes", OP, "parents", []), f"$.nodes[{OP}].parents: expected parents of an op, one where it has no name, found 0"),
    "op without parents": (_drop("nodes", OP, "parents"), f"$.nodes[{OP}].parents: expected parents of an op, one where it has no name, found 0"),
    "leaf with a parent": (_set("nodes", at("parameter"), "parents", [0]), "].parents: expected no parents of parameter, found 1"),
    "layer with a parent": (_set("nodes", LEFT, "parents", [0]), f"$.nodes[{LEFT}].parents: expected no parents of a value that left a layer, found 1"),
    "container without one": (_set("nodes", CONTAINER, "parents", []), "].parents: expected one parent of a value that left a container, found 0"),
    "container with two": (_set("nodes", CONTAINER, "parents", [0, 0]), "].parents: expected one parent of a value that left a container, found 2"),
    "gradient without parent": (_set("nodes", OP, "without_grad", [9]), f"$.nodes[{OP}].without_grad[0]: expected the number of one of"),
    "collapsed dangling": (_set("collapsed", [99]), "$.collapsed[0]: expected the number of one of"),
    "collapsed falling": (_set("collapsed", [2, 0]), "$.collapsed: expected numbers in rising order"),
    "collapsed twice": (_set("collapsed", [2, 2]), "$.collapsed: expected numbers in rising order"),
    "break dangling": (_set("breaks", 0, "before", [999]), "$.breaks[0].before[0]: expected the number of one of"),
    "break after nothing": (_set("breaks", 0, "after", [999]), "$.breaks[0].after[0]: expected the number of one of"),
    "break in no call": (_set("breaks", 0, "call", 99), "$.breaks[0].call: expected the number of one of"),
    "bypassed dangling": (_set("bypassed", [{"name": "w", "calls": [99]}]), "$.bypassed[0].calls[0]: expected the number of one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_document_is_refused_with_the_place_of_the_fault(name: str) -> None:
    change, message = BROKEN[name]
    found = document()
    change(found)
    with pytest.raises(FormatError) as caught:
        from_json(json.dumps(found))
    assert str(caught.value).startswith("$")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_unnamed_operation_of_several_operands_is_refused() -> None:
    found = document()
    join = next(i for i, n in enumerate(found["nodes"]) if len(n.get("parents", [])) > 1)
    found["nodes"][join]["name"] = ""
    with pytest.raises(FormatError, match=r"expected parents of an op, one where it has no name, found 2"):
        from_json(json.dumps(found))


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "3", '"gradlineage/1"', "NaN", "{'schema': 1}", "print()", "\x00", "[" * 100_000, '{"a":' * 100_000, "1" * 5000, "-" + "1" * 5000,
        "1e999999", "[1e999999]", '{"schema": "gradlineage/1"', b"", b"\xff\xfe", b"\x80\x81", b"\x00" * 8, b"\xef\xbb\xbf{}", b"PK\x03\x04", b"\x80\x04K\x01.",
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_text_that_is_no_document_is_refused(text: str | bytes) -> None:
    with pytest.raises(FormatError, match=r"^\$(\.schema)?: expected "):
        from_json(text)


@pytest.mark.parametrize("thing", [None, 3, ["x"]])
def test_what_is_no_text_at_all_is_refused(thing: Any) -> None:
    with pytest.raises(FormatError, match=r"^\$: expected JSON text"):
        from_json(thing)


def test_key_that_comes_twice_is_refused() -> None:
    text = to_json(gradlineage.trace(nn.Linear(3, 1), torch.ones(2, 3)))
    with pytest.raises(FormatError, match=r"^\$\.calls\[0\]: expected every key once"):
        from_json(text.replace('"parent": -1', '"parent": -1, "parent": 0'))
    with pytest.raises(FormatError, match=r"^\$: expected every key once"):
        from_json(text.replace('"schema"', '"schema": "gradlineage/1", "schema"'))


def test_lists_nested_deeply_within_a_field_are_refused() -> None:
    text = to_json(gradlineage.trace(nn.Linear(3, 1), torch.ones(2, 3)))
    for depth in (100, 100_000):
        with pytest.raises(FormatError, match=r"^\$"):
            from_json(text.replace('"notes": []', f'"notes": [{"[" * depth}{"]" * depth}]'))


PLACES: st.SearchStrategy[Any] = st.sampled_from(
    [0, 1, 2, 3, 5, 8, -1, 2**63, 10**30, True, False, None, 0.5, float("nan"), "", "op", "call", "x", [], [0], {}, [[]], [-1]]
)


def _spots(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([way] if way else []), *(spot for key, item in inner for spot in _spots(item, (*way, key)))]


SPOTS = _spots({key: value for key, value in DOCUMENT.items() if key != "table"})


@given(
    st.lists(
        st.tuples(st.sampled_from(SPOTS), st.sampled_from(["set", "drop", "copy"]), PLACES, st.sampled_from(SPOTS)), min_size=1, max_size=3
    )
)
@examples(500)
def test_mutated_document_is_refused_or_answers(changes: list[tuple[tuple[Any, ...], str, Any, tuple[Any, ...]]]) -> None:
    found: Any = document_copy()
    for way, what, value, other in changes:
        try:
            holder, source = found, found
            for step in way[:-1]:
                holder = holder[step]
            if what == "drop":
                del holder[way[-1]]
                continue
            if what == "copy":
                for step in other:
                    source = source[step]
                value = json.loads(json.dumps(source))
            holder[way[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    check(json.dumps(found))


def document_copy() -> Any:
    return json.loads(_TEXT)


_TEXT = json.dumps(DOCUMENT)


def check(text: str | bytes) -> None:
    try:
        lineage = from_json(text)
    except FormatError as error:
        assert str(error).startswith("$")
        return
    everything(lineage)
    everything(lineage.collapse(depth=1))
    assert from_json(to_json(lineage)) == lineage


@given(
    st.integers(0, len(_TEXT)),
    st.integers(0, 40),
    st.text(max_size=8) | st.sampled_from(["[", "{", '"', "\\", "9" * 30, "-", "1e9", "NaN"]),
)
@examples(300)
def test_text_changed_anywhere_is_refused_or_answers(start: int, length: int, patch: str) -> None:
    check(_TEXT[:start] + patch + _TEXT[start + length :])


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        from_json(data)


# -- files ---------------------------------------------------------------------------------------------------------------------------


def test_saved_file_is_read_back_equal(tmp_path: Path) -> None:
    lineage = gradlineage.trace(Residual(), torch.ones(2, 4))
    for path in (tmp_path / "größe.json", str(tmp_path / "b.json")):
        lineage.save(path)
        assert Lineage.load(path) == lineage
    assert sorted(os.listdir(tmp_path)) == ["b.json", "größe.json"]


def test_saving_again_replaces_the_file_and_keeps_its_mode_and_link(tmp_path: Path) -> None:
    first, second = (gradlineage.trace(nn.Linear(3, n), torch.ones(2, 3)) for n in (1, 2))
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    save(first, path)
    path.chmod(0o640)
    link.symlink_to(path)
    save(second, link)
    assert link.is_symlink()
    assert load(path) == second
    assert path.stat().st_mode & 0o777 == 0o640


def test_interrupted_save_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def interrupt(source: str, target: str) -> None:
        assert Path(source).parent == tmp_path
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(gradlineage.trace(nn.Linear(3, 1), torch.ones(2, 3)), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full disk at hand")
def test_full_disk_is_a_clear_error() -> None:
    with pytest.raises(LineageError, match=r"cannot save to '/dev/full': No space left on device"):
        save(gradlineage.trace(nn.Linear(3, 1), torch.ones(2, 3)), "/dev/full")
    assert not os.path.isfile("/dev/full")


def test_special_file_is_written_to_and_stays(tmp_path: Path) -> None:
    save(gradlineage.trace(nn.Linear(3, 1), torch.ones(2, 3)), os.devnull)
    assert not os.path.isfile(os.devnull)


def test_full_disk_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LineageError, match=r"cannot save to .*a\.json': No space left on device"):
        save(gradlineage.trace(nn.Linear(3, 1), torch.ones(2, 3)), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_unwritable_places_are_clear_errors(tmp_path: Path) -> None:
    lineage = gradlineage.trace(nn.Linear(3, 1), torch.ones(2, 3))
    with pytest.raises(LineageError, match=r"cannot save to .*: Is a directory"):
        save(lineage, tmp_path)
    with pytest.raises(LineageError, match=r"cannot save to .*: No such file or directory"):
        save(lineage, tmp_path / "missing" / "a.json")
    (tmp_path / "plain").write_text("")
    with pytest.raises(LineageError, match=r"cannot save to .*: Not a directory"):
        save(lineage, tmp_path / "plain" / "a.json")
    with pytest.raises(LineageError, match=r"cannot save to .*: File name too long"):
        save(lineage, tmp_path / ("a" * 300))
    with pytest.raises(LineageError, match=r"cannot save to"):
        save(lineage, "/proc/a.json")
    assert os.listdir(tmp_path) == ["plain"]


def test_unreadable_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(LineageError, match=r"cannot read .*: No such file or directory"):
        load(tmp_path / "missing.json")
    with pytest.raises(LineageError, match=r"cannot read .*: Is a directory"):
        load(tmp_path)
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(FormatError, match=r"^\$: expected JSON text") as caught:
        load(tmp_path / "empty.json")
    assert "empty.json" in caught.value.__notes__[0]


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    save(gradlineage.trace(Residual(), torch.ones(2, 4)), path)
    code = """
import sys
from gradlineage.lineage import Lineage
lineage = Lineage.load(sys.argv[1])
print([s.label for c in lineage.collapse("block").layers for f in c.inputs for s in f.sources])
lineage.save(sys.argv[1] + "2")
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['input:x', 'stem', 'stem', 'block[0]', 'gate']"
    assert (tmp_path / "a.json2").exists()
