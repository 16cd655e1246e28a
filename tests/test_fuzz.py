# mypy: disable-error-code="no-untyped-call,no-any-return"
"""Whatever comes in from outside: an answer or a LineageError. Never another exception, a hang, or code that runs."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import gradlineage
from gradlineage import Lineage, LineageError, Runs
from gradlineage.cli import main
from gradlineage.target import find, make_inputs, parse_input, parse_settings, parse_target, read_batches
from tests.nets import Net, data, lin
from tests.profiles import examples

torch.set_num_threads(1)


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = lin(), nn.Sequential(lin(), nn.ReLU()), lin()

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        if x.sum() > 0:
            h = h + self.b(h)
        return self.c(h), {"best": h.argmax(-1)}


NET = Gates()
LINEAGE = gradlineage.trace(NET, torch.ones(2, 4))
RUNS = gradlineage.trace_many(NET, [torch.ones(2, 4), -torch.ones(2, 4)])
LINEAGE_TEXT, RUNS_TEXT = LINEAGE.to_json(), RUNS.to_json()
TEXTS = {"lineage": LINEAGE_TEXT, "runs": RUNS_TEXT}
READERS: dict[str, Callable[[Any], Any]] = {"lineage": Lineage.from_json, "runs": Runs.from_json}

#: Values that break careless readers.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63 - 1, 2**63, 10**30, -(10**30), 0.0, 0.5, -0.5, float("nan"), float("inf"), 1e308, "", "x", "0", "op", "\0",
    "\udc80", "[bold]", [], [[]], [0], [-1], [None], {}, {"": 0}, {"key": "x"}, "gradlineage/1", "a" * 300,
]  # fmt: skip
CHARACTERS = st.text(max_size=30) | st.sampled_from(["", ":", "=", "@", "x", "<", "[", "]", ",", ".", "*", "(", ")"])


def everything_of(found: Any) -> None:
    """All that can be done with what was read: it was accepted, so it must be possible."""
    if isinstance(found, Lineage):
        (
            str(found),
            repr(found),
            found.to_json(),
            found.to_dot(),
            found.to_mermaid(),
            found.to_wiring(),
            found.collapse(depth=1),
            found.roll(),
        )
        gradlineage.lint(found), found.gradient(), gradlineage.diff(found, LINEAGE)
        for call in found.layers[:3]:
            found.explain(call)
        return
    str(found), repr(found), found.calls, hash(found)
    assert Runs.from_json(found.to_json()) == found
    for path in found.paths:
        assert repr(path)
        assert 0 <= path.share <= 1
        assert path.difference is None or str(path.difference) is not None
    assert found.coverage() is not None
    assert str(found.coverage()) is not None
    assert found.merge(found).total == 2 * found.total
    if any(path.lineage is not None for path in found.paths):
        assert str(found.union())


def read(what: str, text: str | bytes) -> Any:
    """The value, or None where it was refused as it should be."""
    try:
        found = READERS[what](text)
    except LineageError as error:
        assert str(error).startswith("$"), error
        assert len(str(error)) < 1000
        return None
    everything_of(found)
    return found


# -- saved files -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", READERS)
@given(data=st.binary(max_size=200) | st.text(max_size=200))
@examples(150)
def test_any_bytes_and_text_are_refused(what: str, data: bytes | str) -> None:
    assert read(what, data) is None


JSON = st.recursive(
    st.sampled_from(VALUES) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*json.loads(RUNS_TEXT), "nodes", "key"]), inner, max_size=5)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("what", READERS)
@given(document=JSON, named=st.booleans())
@examples(150)
def test_any_json_is_refused(what: str, document: Any, named: bool) -> None:
    if named and isinstance(document, dict):
        document = {**document, "schema": json.loads(TEXTS[what])["schema"]}
    assert read(what, json.dumps(document)) is None


def spots(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    if way:
        yield way
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key != "table":
            yield from spots(item, (*way, key))


SPOTS = {what: list(spots(json.loads(text))) for what, text in TEXTS.items()}
#: Of runs the lineages within are read by the same reader: most of the effort goes to the rest.
SPOTS["runs"] = [s for s in SPOTS["runs"] if "lineage" not in s] * 4 + [s for s in SPOTS["runs"] if "lineage" in s]


@pytest.mark.parametrize("what", ["lineage", "runs"])
@given(draw=st.data())
@examples(400)
def test_document_with_any_places_changed_is_refused_or_answers_all_questions(what: str, draw: st.DataObject) -> None:
    document = json.loads(TEXTS[what])
    for _ in range(draw.draw(st.integers(1, 3))):
        way = draw.draw(st.sampled_from(SPOTS[what]))
        change = draw.draw(st.sampled_from(["set", "set", "set", "drop", "double", "copy"]))
        try:
            holder = document
            for step in way[:-1]:
                holder = holder[step]
            if change == "set":
                holder[way[-1]] = copy.deepcopy(draw.draw(st.sampled_from(VALUES)))  # changed further on
            elif change == "drop":
                del holder[way[-1]]
            elif change == "double" and isinstance(holder, list):
                holder.insert(way[-1], copy.deepcopy(holder[way[-1]]))
            else:
                other: Any = document
                for step in draw.draw(st.sampled_from(SPOTS[what])):
                    other = other[step]
                holder[way[-1]] = copy.deepcopy(other)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    read(what, json.dumps(document))


@pytest.mark.parametrize("what", READERS)
@given(draw=st.data())
@examples(200)
def test_text_with_any_stretch_replaced_is_refused_or_answers(what: str, draw: st.DataObject) -> None:
    text = TEXTS[what]
    start, length = draw.draw(st.integers(0, len(text))), draw.draw(st.integers(0, 60))
    patch = draw.draw(st.text(max_size=8) | st.sampled_from(["[", "{", '"', "\\", "9" * 30, "-", "1e9", "NaN", "null", ",", "\udc80"]))
    if draw.draw(st.booleans()):
        length = 0 if draw.draw(st.booleans()) else length
    changed = text[:start] + patch + text[start + length :]
    read(what, changed)


HOSTILE: dict[str, Callable[[str], str | bytes]] = {
    "nested lists": lambda text: "[" * 200_000,
    "nested objects": lambda text: '{"a":' * 200_000,
    "nested within": lambda text: text.replace('"model": "Gates"', f'"model": {"[" * 100_000}{"]" * 100_000}'),
    "cut short": lambda text: text[:-20],
    "twice": lambda text: text + text,
    "huge number": lambda text: text.replace('"count": 1', f'"count": {"9" * 6000}').replace(
        '"nth": 0, "type"', f'"nth": {"9" * 6000}, "type"', 1
    ),
    "huge exponent": lambda text: text.replace('"count": 1', '"count": 1e400').replace('"nth": 0, "type"', '"nth": 1e400, "type"', 1),
    "not a number": lambda text: text.replace('"count": 1', '"count": NaN').replace('"nth": 0, "type"', '"nth": NaN, "type"', 1),
    "negative": lambda text: text.replace('"count": 1', '"count": -1').replace('"nth": 0, "type"', '"nth": -1, "type"', 1),
    "true for one": lambda text: text.replace('"count": 1', '"count": true').replace('"nth": 0, "type"', '"nth": false, "type"', 1),
    "text for a number": lambda text: text.replace('"count": 1', '"count": "1"').replace('"nth": 0, "type"', '"nth": "0", "type"', 1),
    "key that comes twice": lambda text: text.replace('"schema"', '"model": "Other", "schema"'),
    "dangling parent": lambda text: text.replace('"parents": [', '"parents": [99999, ', 1),
    "cycle": lambda text: text.replace('"parent": -1', '"parent": 0'),
    "no schema": lambda text: text.replace('"schema"', '"scheme"'),
    "newer schema": lambda text: text.replace('/1"', '/2"', 1),
    "other encoding": lambda text: text.encode("utf-16")[:-1],
    "half a character": lambda text: text.encode()[:50] + b"\xff" + text.encode()[50:],
    "of no pass": lambda text: text.replace('"runs": 1', '"runs": 0'),
    "pickle": lambda text: pickle.dumps(text),
    "zip": lambda text: b"PK\x03\x04" + text.encode(),
}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("what", READERS)
def test_hostile_file_is_refused_with_the_place_of_the_fault(what: str, how: str, tmp_path: Path) -> None:
    text = HOSTILE[how](TEXTS[what])
    assert read(what, text) is None
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    with pytest.raises(LineageError):
        (Lineage if what == "lineage" else Runs).load(path)


RUNS_BROKEN: dict[str, tuple[tuple[Any, ...], Any]] = {
    "no input took a path": (("paths", 0, "count"), 0),
    "count beyond all sizes": (("paths", 0, "count"), 10**400),
    "not a number in a decision": (("paths", 0, "decisions", 0, 6), float("nan")),
    "infinity in a decision": (("paths", 0, "decisions", 0, 7), float("inf")),
    "long text where a number is": (("max_paths",), "9" * 100_000),
    "calls that no input made": (("calls", 0, 3), 0),
    "more inputs than there were": (("calls", 0, 3), 10**6),
    "more examples than inputs": (("paths", 0, "examples"), [0, 1, 2, 3]),
    "schema that is half a document": (("schema",), [0] * 5000),
    "two paths of one key": (("paths", 1, "key"), json.loads(RUNS_TEXT)["paths"][0]["key"]),
}


@pytest.mark.parametrize("name", RUNS_BROKEN)
def test_runs_that_contradict_themselves_are_refused_with_the_place(name: str) -> None:
    (*way, last), value = RUNS_BROKEN[name]
    holder = document = json.loads(RUNS_TEXT)
    for step in way:
        holder = holder[step]
    holder[last] = value
    with pytest.raises(LineageError) as caught:
        Runs.from_json(json.dumps(document))
    assert str(caught.value).startswith("$." + ".".join(str(s) for s in (*way, last)[:1]))
    assert len(str(caught.value)) < 1000


# -- nothing runs ------------------------------------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def evil(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file whose unpickling makes another file appear, and that other file."""
    trap, sprung = tmp_path / "evil.pt", tmp_path / "sprung"
    torch.save({"x": Evil(sprung)}, trap)
    yield trap, sprung
    assert not sprung.exists(), "code ran"


def test_malicious_file_as_an_input_does_not_run(evil: tuple[Path, Path], run: Callable[[str], tuple[int, str, str]]) -> None:
    trap, _ = evil
    for command in (
        f"show net.py:Net --input @{trap}",
        f"paths net.py:Net --inputs {trap}",
        f"paths net.py:Net --inputs {trap.parent / 'batches'}",
    ):
        if "batches" in command:
            (trap.parent / "batches").mkdir()
            (trap.parent / "batches" / "a.pt").write_bytes(trap.read_bytes())
        status, out, err = run(command)
        assert (status, out) == (2, "")
        assert "cannot be read" in err


def test_malicious_file_as_a_saved_lineage_does_not_run(evil: tuple[Path, Path], tmp_path: Path) -> None:
    trap, sprung = evil
    plain = tmp_path / "plain.json"
    plain.write_bytes(pickle.dumps(Evil(sprung)))
    for path in (trap, plain):
        for load in (Lineage.load, Runs.load):
            with pytest.raises(LineageError):
                load(path)
        for command in ("show", "paths", "merge", "lint", "grads"):
            copied = tmp_path / "copied.json"
            copied.write_bytes(path.read_bytes())
            assert main([command, str(copied)]) == 2


def test_settings_are_literals_and_never_run() -> None:
    text = "__import__('os').system('touch sprung')"
    assert parse_settings([f"x={text}"]) == {"x": text}


def test_names_in_a_saved_lineage_do_not_run_on_the_page() -> None:
    name = "<img src=x onerror=alert(1)></script><script>alert(1)</script>"
    net = Net(lambda m, x: getattr(m, name.replace(".", ""))(x))
    net.add_module(name, lin())
    page = gradlineage.trace(net, data()).to_html()
    assert "<img src=x" not in page
    assert "<script>alert" not in page


NET_TEXT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a = nn.Linear(width, width)
    def forward(self, x):
        return self.a(x)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str, str]]:
    (tmp_path / "net.py").write_text(NET_TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(command: str) -> tuple[int, str, str]:
        sys.modules.pop("net", None)
        return main(command.split(" ")), *capsys.readouterr()

    return call


# -- files with inputs ---------------------------------------------------------------------------------------------------------------------


def archive() -> bytes:
    import io

    file = io.BytesIO()
    torch.save({"x": torch.ones(2, 4), "n": [1, "a", None]}, file)
    return file.getvalue()


ARCHIVE = archive()


def old_format() -> bytes:
    import io

    file = io.BytesIO()
    torch.save(torch.ones(2), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


OLD = old_format()


@pytest.mark.filterwarnings("ignore")
@given(draw=st.data())
@settings(parent=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_damaged_input_file_is_refused_or_read(tmp_path: Path, draw: st.DataObject) -> None:
    base = draw.draw(st.sampled_from([ARCHIVE, OLD, b"", b"PK\x05\x06" + b"\0" * 18, pickle.dumps([1]), pickle.dumps(print)]))
    start, length = draw.draw(st.integers(0, len(base))), draw.draw(st.integers(0, 40) | st.just(10**6))
    changed = base[:start] + draw.draw(st.binary(max_size=12)) + base[start + length :]
    path = tmp_path / "a.pt"
    path.write_bytes(changed)
    for task in (lambda: make_inputs([parse_input(f"@{path}")], NET, None), lambda: list(read_batches(path, NET, None))):
        try:
            task()
        except LineageError as error:
            assert "a.pt" in str(error)


def test_archive_with_odd_members_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for names in ([], ["x"], ["../../x"], ["archive/data.pkl"], ["archive/data.pkl", "archive/version"]):
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, b"\x80\x02.")
        with pytest.raises(LineageError, match=r"a\.pt"):
            make_inputs([parse_input(f"@{path}")], NET, None)


# -- the command line ------------------------------------------------------------------------------------------------------------------------

SPECS = st.text(max_size=20) | st.from_regex(
    r"([a-z_]{1,3}=)?((float32|int64|bool|uint8)\[[0-9,]{0,8}\]|[0-9x]{0,8})(<[0-9.e]{0,6})?", fullmatch=True
)


@given(SPECS)
@example("float32[1]<1.2.3")
@example("float32[1]<.")
@example("1x" + "9" * 5000)
@example("int64[1]<1e999")
@examples(300)
def test_any_input_specification_is_understood_or_refused(text: str) -> None:
    try:
        parse_input(text)
    except LineageError as error:
        assert len(str(error)) < 500 + len(text)


@pytest.mark.parametrize("text", ["99999999999999999999", "9999999999x9999999999", "bool[9999999999999]"])
def test_input_that_cannot_be_drawn_is_refused_in_our_own_words(text: str) -> None:
    with pytest.raises(LineageError):
        make_inputs([parse_input(text)], NET, None)


@pytest.mark.parametrize(
    "text",
    [
        "uint8[2]<1000",
        "int64[1]<99999999999999999999",
    ],
)
def test_bound_that_the_dtype_cannot_hold_is_refused_in_our_own_words(text: str) -> None:
    with pytest.raises(LineageError):
        make_inputs([parse_input(text)], NET, None)


@given(st.lists(st.text(max_size=20) | st.from_regex(r"[a-z]{1,2}=[\[\](){}0-9,:'\-+*a-z]{0,12}", fullmatch=True), max_size=3))
@example(["x={[]: 1}"])
@example(["x={[]}"])
@example(["x=" + "(" * 5000])
@example(["x=" + "9" * 5000])
@example(["x=\0"])
@examples(300)
def test_any_settings_are_understood_or_refused(texts: list[str]) -> None:
    with contextlib.suppress(LineageError):
        parse_settings(texts)


@given(st.text(max_size=30) | st.from_regex(r"[a-z./]{0,8}(\.py)?:[A-Za-z._]{0,8}", fullmatch=True))
@example("a" * 5000 + ":x")
@example("\0.py:x")
@example("\udc80.py:x")
@examples(300)
def test_any_target_is_understood_or_refused(text: str) -> None:
    try:
        parse_target(text)
    except LineageError as error:
        assert "TARGET" in str(error)


@pytest.mark.parametrize(
    "target",
    [
        "os.nothing:x", "nothing_of_this_name:x", "a..b:x", "os:path.nothing", "os:environ.nothing", "a b:x", "-:x", "1:x", "os.path.join:x", "é:x", "\0:x", "tests.nets:Nothing",
        ".nets:x", "..:x",
    ],
)  # fmt: skip
def test_target_that_is_not_there_is_refused_in_our_own_words(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(LineageError, match="TARGET"):
        find(target)


ARGUMENTS = st.sampled_from(
    """show paths diff merge draw lint grads explain saved.json runs.json net.py:Net net.py:Nothing missing.json --input 2x4 x=float32[2,4] --set width=4 width=x --depth
    -1 0 1 99 --layer * a [ --no-joins --roll --decisions --full --width -5 --json -o out.txt out.svg out.dot out.mmd out.nothing --output-tensor ² ① 0 7 -- --random 1
    --inputs --max-paths --union --collapse --shapes --before saved.json --select --ignore gradient-cut nothing --fail-on warning --format json --device cpu cpux meta
    --train a input:x x \x00 [bold] %s --help""".split()
) | st.text(max_size=6)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "saved.json").write_text(LINEAGE_TEXT)
    (folder / "runs.json").write_text(RUNS_TEXT)
    (folder / "net.py").write_text(NET_TEXT)
    return folder


@pytest.mark.filterwarnings("ignore")
@given(
    command=st.sampled_from(["show", "paths", "diff", "merge", "draw", "lint", "grads", "explain"]),
    given_=st.lists(ARGUMENTS, max_size=7),
    target=st.sampled_from(["saved.json", "runs.json", "net.py:Net", ""]),
)
@settings(parent=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_command_line_ends_with_a_status(
    command: str, given_: list[str], target: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("net", None)
    status = main([command, *([target] if target else []), *given_])
    out, err = capsys.readouterr()
    assert status in (0, 1, 2)
    assert "/gradlineage/" not in err, "a traceback of our own"
    assert status == 0 or out or err


def test_output_that_is_a_digit_and_no_number_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert main(["grads", "saved.json", "--output-tensor", "²"]) == 2


# -- questions -------------------------------------------------------------------------------------------------------------------------------

KEYS = st.text(max_size=12) | st.sampled_from(
    ["a", "b.0", "b", ":add", "*", "?", "[", "[!", "[]", "b[0]", "b.0[99]", "b[-1]", "input:x", "output", "a[" + "9" * 5000 + "]"]
)
ANYTHING = (
    KEYS
    | st.none()
    | st.integers()
    | st.floats()
    | st.tuples(KEYS, st.integers(-2, 2))
    | st.lists(KEYS, max_size=2)
    | st.binary(max_size=3)
)


QUESTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "item": lambda a, b, n: LINEAGE[a],
    "contains": lambda a, b, n: a in LINEAGE,
    "collapse": lambda a, b, n: LINEAGE.collapse(a),
    "collapse depth": lambda a, b, n: LINEAGE.collapse(depth=n),
    "collapse both": lambda a, b, n: LINEAGE.collapse(a, depth=n),
    "find pattern": lambda a, b, n: LINEAGE.find(pattern=a),
    "find type and op": lambda a, b, n: LINEAGE.find(type=a, op=b),
    "predecessors": lambda a, b, n: LINEAGE.predecessors(a),
    "descendants": lambda a, b, n: LINEAGE.descendants(a),
    "between": lambda a, b, n: LINEAGE.between(a, b),
    "explain": lambda a, b, n: LINEAGE.explain(a),
    "explain way": lambda a, b, n: LINEAGE.explain(a, b),
    "gradient": lambda a, b, n: LINEAGE.gradient(a),
    "lint select": lambda a, b, n: gradlineage.lint(LINEAGE, select=a),
    "lint ignore": lambda a, b, n: gradlineage.lint(LINEAGE, ignore=[b]),
    "table layer": lambda a, b, n: LINEAGE.to_table(layer=a),
    "table width": lambda a, b, n: LINEAGE.to_table(width=n),
    "union": lambda a, b, n: RUNS.union(a),
    "union depth": lambda a, b, n: RUNS.union(depth=n),
    "diff": lambda a, b, n: gradlineage.diff(LINEAGE, a),
    "merge": lambda a, b, n: RUNS.merge(a),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    QUESTIONS,
)
@given(ANYTHING, ANYTHING, st.integers(-3, 5) | st.none() | st.floats() | st.booleans())
@example("a[" + "9" * 5000 + "]", "a", 1)
@example("a", "b", 0.5)
@example(b"", b"", None)
@example([], [], None)
@examples(60)
def test_any_question_is_answered_or_refused(name: str, first: Any, last: Any, number: Any) -> None:
    try:
        QUESTIONS[name](first, last, number)
    except LineageError as error:
        assert str(error)


EXPRESSIONS = st.text(max_size=20) | st.from_regex(r"[ab*,() ]{0,16}", fullmatch=True) | st.recursive(
    st.sampled_from(["a", "b", "*", "c", "", "input:x"]), lambda inner: st.builds(lambda op, parts: f"{op}({', '.join(parts)})", st.sampled_from(["add", "relu", ""]), st.lists(inner, max_size=3)), max_leaves=6
)  # fmt: skip


@given(
    st.dictionaries(
        KEYS, EXPRESSIONS | ANYTHING | st.lists(EXPRESSIONS, max_size=2) | st.dictionaries(KEYS, EXPRESSIONS, max_size=2), max_size=2
    )
    | ANYTHING
)
@example({"c": "(" * 3000})
@example({"c": "add(" * 3000 + "a" + ")" * 3000})
@examples(300)
def test_any_expectation_holds_or_is_refused(wiring: Any) -> None:
    try:
        LINEAGE.expect(wiring)
    except LineageError as error:
        assert str(error)
