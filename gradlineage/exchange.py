"""Lineages as JSON: schema ``gradlineage/1``.

A document has one record a line, and under ``table`` what other tools mostly want, labels already worked out::

    jq -r '.table.layers[] | [.label, .inputs[].connected_to[]] | @tsv' saved.json

``table`` is derived and ignored on reading; the facts are ``calls`` and ``nodes``, as in `gradlineage.graph`. A node's ``parents`` are
places in ``nodes`` before its own; ``without_grad`` lists which of them, by position, did not require grad. Keys of a node that would
hold a default are left out. Every document that is accepted can be printed, queried and collapsed. It is data, and never run.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from gradlineage.errors import FormatError, LineageError
from gradlineage.graph import BreakRecord, CallRecord, DecisionRecord, Graph, Node, ParameterRecord, ValueRecord, WriteRecord
from gradlineage.lineage import Flow, Lineage

__all__ = ["from_json", "load", "save", "to_json", "write_text"]
SCHEMA = "gradlineage/1"
_KINDS = ("op", "call", "input", "parameter", "buffer", "constant", "unknown", "empty", "memory", "union")
_NOT_FINITE = ("nan", "inf", "-inf")
_SIDES = ("inputs", "outputs", "hidden")


def to_json(lineage: Lineage) -> str:
    """The whole lineage as JSON text, ASCII only, the same for equal lineages.

    Example:
        >>> import torch, gradlineage
        >>> saved = to_json(gradlineage.trace(torch.nn.Linear(3, 1), torch.ones(2, 3)))
        >>> json.loads(saved)["table"]["layers"][0]["inputs"]
        [{'name': 'input', 'connected_to': ['input:input']}]
    """
    graph = lineage._graph
    facts = {key: getattr(graph, key) for key in ("model", "runs", "parameters", "trainable", "notes")}
    table = {
        "layers": [
            {"label": c.label, "type": c.type, "path": c.path, "nth": c.nth, "inputs": _connected(c.inputs), "hidden": _connected(c.hidden)}
            for c in lineage.layers
        ],
        "joins": [{"label": j.label, "op": j.op, "inputs": _connected(j.inputs)} for j in lineage.joins],
        "outputs": _connected(lineage.outputs),
    }
    rows = {
        "bypassed": [{"name": name, "calls": calls} for name, calls in graph.bypassed],
        "breaks": [b._asdict() for b in graph.breaks],
        "decisions": [d._asdict() for d in graph.decisions],
        "modules": graph.modules,
        "registered": [p._asdict() for p in graph.registered],
        "writes": [w._asdict() for w in graph.writes],
        "direct": graph.direct,
        "outputs": [v._asdict() for v in graph.outputs],
        "calls": [_call_row(c) for c in graph.calls],
        "nodes": [_node_row(n) for n in graph.nodes],
    }
    inner = ",\n".join(_lines(key, found, "  ") for key, found in table.items())
    parts = [
        f'"{key}": {json.dumps(value)}'
        for key, value in {"schema": SCHEMA, **facts, "collapsed": sorted(lineage._collapsed), "rolled": lineage.rolled}.items()
    ]
    parts += [f'"table": {{\n{inner}\n}}', *(_lines(key, found) for key, found in rows.items())]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(key: str, rows: Iterable[object], indent: str = "") -> str:
    """One row a line: to be looked through, and compared line by line."""
    body = ",\n".join(f"{indent}  {json.dumps(row)}" for row in rows)
    return f'{indent}"{key}": [\n{body}\n{indent}]' if body else f'{indent}"{key}": []'


def _connected(flows: Iterable[Flow]) -> list[dict[str, object]]:
    return [{"name": flow.name, "connected_to": [link.label for link in flow.links]} for flow in flows]


def _call_row(call: CallRecord) -> dict[str, object]:
    row = {**call._asdict(), **{side: [v._asdict() for v in getattr(call, side)] for side in _SIDES}}
    return row if call.seen != 1 else {key: value for key, value in row.items() if key != "seen"}


def _node_row(node: Node) -> dict[str, object]:
    row = {key: value for key, value in node._asdict().items() if value != Node._field_defaults.get(key)}
    if node.parents:
        row["parents"] = [p if p >= 0 else ~p for p in node.parents]
        if plain := [k for k, p in enumerate(node.parents) if p < 0]:
            row["without_grad"] = plain
    return row


def save(lineage: Lineage, path: str | os.PathLike[str]) -> None:
    """Write `to_json` to a file, all of it or nothing: a temporary file beside it is moved into its place when complete.

    Raises:
        LineageError: the file cannot be written: a directory, a full or read-only disk, no permission.
    """
    save_text(to_json(lineage), os.fsdecode(path))


def save_text(text: str, name: str) -> None:
    """`write_text`, with an error of our own."""
    try:
        write_text(text, name)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        told = getattr(error, "strerror", None) or error
        raise LineageError(f"cannot save to {name!r}: {told}; what was there before is unchanged") from error


def load_text(name: str) -> bytes:
    """What is in a file, or an error of our own."""
    try:
        with open(name, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise LineageError(f"cannot read {name!r}: {getattr(error, 'strerror', None) or error}") from error


def write_text(text: str | bytes, name: str) -> None:
    """Write a file, all of it or nothing: a temporary file beside it is moved into its place when complete. A link stays one, a pipe too."""
    target = os.path.realpath(name)
    temporary = os.path.join(os.path.dirname(target), f".gradlineage-{secrets.token_hex(6)}.tmp")
    mode = os.stat(target).st_mode if os.path.exists(target) else 0
    if mode and not stat.S_ISREG(mode):  # a pipe or /dev/stdout: written to, never replaced
        temporary = target
    try:
        with open(temporary, "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
        if temporary != target:
            os.chmod(temporary, stat.S_IMODE(mode or os.stat(temporary).st_mode))
            os.replace(temporary, target)
    finally:  # after an interrupt too
        if temporary != target and os.path.exists(temporary):
            os.unlink(temporary)


def load(path: str | os.PathLike[str]) -> Lineage:
    """Read a file that `save` wrote. Needs no torch.

    Raises:
        FormatError: the content is no lineage; with the place of the fault.
        LineageError: the file cannot be read.
    """
    text = load_text(os.fsdecode(path))
    try:
        return from_json(text)
    except FormatError as error:
        error.add_note(f"while reading {os.fsdecode(path)!r}")
        raise


def from_json(text: str | bytes) -> Lineage:
    """Read what `to_json` wrote; the result equals what was written.

    Raises:
        FormatError: the text is no such document. The message begins with the place of the fault: ``$.calls[3].parent: expected …``.
    """
    try:  # Python refuses to print the longest integers: what no field can hold becomes a float, which no field takes
        document = json.loads(text, object_pairs_hook=_pairs, parse_int=lambda digits: int(digits) if len(digits) < 20 else float(digits))
    except RecursionError:
        raise FormatError("$: expected a saved lineage, found lists or objects nested deeper than any has") from None
    except (ValueError, TypeError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise FormatError(f"$: expected JSON text, found something else: {error}") from None
    try:
        return _lineage(document)
    except _Fault as fault:
        raise FormatError(f"${fault.at}: expected {fault.fact}") from None


class _Fault(Exception):
    """What was expected and found; the place is put together on the way out."""

    def __init__(self, fact: str, at: str = "") -> None:
        self.fact, self.at = fact, at


def _fail(fact: str) -> Any:
    raise _Fault(fact)


class _Twice(dict[str, Any]):
    """An object with a key that came twice."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return found if len(found := dict(pairs)) == len(pairs) else _Twice(found)


def _shown(value: object) -> str:
    text = "an object" if isinstance(value, dict) else f"a list of {len(value)}" if isinstance(value, list) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_Read = Callable[[Any], Any]
_Fields = Mapping[str, _Read]


def _plain(expected: str, *kinds: type, allowed: Callable[[Any], bool] = lambda value: True) -> _Read:
    def read(value: Any) -> Any:
        if type(value) not in kinds or not allowed(value):  # exactly: to isinstance, true is an integer
            raise _Fault(f"{expected}, found {_shown(value)}")
        return value

    return read


def _each(read: _Read) -> _Read:
    def all_of(values: Any) -> tuple[Any, ...]:
        found: list[Any] = []
        try:
            for value in _list(values):
                found.append(read(value))
        except _Fault as fault:
            fault.at = f"[{len(found)}]{fault.at}" if isinstance(values, list) else fault.at
            raise
        return tuple(found)

    return all_of


def _record(make: Callable[..., Any], fields: _Fields, optional: Collection[str] = ()) -> _Read:
    needed = fields.keys() - optional

    def read(found: Any) -> Any:
        if not isinstance(found, dict) or isinstance(found, _Twice):
            raise _Fault("every key once, found one twice" if isinstance(found, dict) else f"an object, found {_shown(found)}")
        if not needed <= found.keys() <= fields.keys():
            missing = next((key for key in fields if key in needed and key not in found), None)
            unknown = next((key for key in found if key not in fields), None)
            raise _Fault(f'a key "{missing}", found none' if missing else f"no keys but {', '.join(fields)}, found {_shown(unknown)}")
        values, key = {}, ""
        try:
            for key, value in found.items():
                values[key] = fields[key](value)
        except _Fault as fault:
            fault.at = f".{key}{fault.at}"
            raise
        return make(**values)

    return read


def _make_node(parents: tuple[int, ...] = (), without_grad: tuple[int, ...] = (), **fields: Any) -> Node:
    _among(without_grad, len(parents), "parents", ".without_grad[*]")
    plain = frozenset(without_grad)
    return Node(parents=tuple(~p if k in plain else p for k, p in enumerate(parents)), **fields)


_list, _text = _plain("a list", list), _plain("a string", str)
_flag, _used = _plain("true or false", bool), _plain("true, false or null", bool, type(None))
_count = _plain("an integer from 0 to 2**63 - 1", int, allowed=lambda n: 0 <= n < 2**63)  # as wide as torch's sizes
_passes = _plain("a number of passes from 1 on", int, allowed=lambda value: value >= 1)
_number = _plain("an integer from -1 to 2**63 - 1", int, allowed=lambda n: -1 <= n < 2**63)
_counts = _each(_count)
_kind = _plain(f"one of {', '.join(_KINDS)}", str, allowed=lambda kind: kind in _KINDS)
_shape = _each(lambda size: size if type(size) is str else _count(size))
_VALUE: _Fields = {"name": _text, "shape": _shape, "dtype": _text, "device": _text, "node": _count, "used": _used}
_values = _each(_record(ValueRecord, _VALUE))
_CALL: _Fields = {
    "path": _text, "nth": _count, "type": _text, "layer": _flag, "parent": _number, "where": _text, "parameters": _count,
    "trainable": _count, "registered": _flag, "failed": _flag, "uses": _counts, "seen": _count, **dict.fromkeys(_SIDES, _values),
}  # fmt: skip
_NODE: _Fields = {
    "kind": _kind, "parents": _counts, "without_grad": _counts, "name": _text, "call": _number, "port": _number, "where": _text,
    "order": _number, "shape": _shape, "dtype": _text, "device": _text, "grad": _flag,
    "counts": _counts, "gradient": _counts,
}  # fmt: skip
_BREAK: _Fields = {"op": _text, "where": _text, "call": _number, "before": _counts, "after": _counts}
_seen = _plain(
    "a number, its name or null", bool, int, float, str, type(None), allowed=lambda v: v in _NOT_FINITE if type(v) is str else True
)
_DECISION: _Fields = {
    "kind": _text, "where": _text, "call": _number, "value": _seen, "nodes": _counts, "ops": _each(_each(_text)), "order": _number, "after": _number,
    "waits": _flag,
}  # fmt: skip
_PARAMETER: _Fields = {"name": _text, "elements": _count, "trainable": _flag, "node": _number}
_WRITE: _Fields = {"call": _number, "where": _text, "before": _counts, "after": _counts}
_pairs_of_text = _each(lambda pair: found if len(found := _each(_text)(pair)) == 2 else _fail(f"two strings, found {len(found)}"))
_DOCUMENT: _Fields = {
    "schema": _text, "model": _text, "runs": _passes, "parameters": _count, "trainable": _count, "notes": _each(_text), "collapsed": _counts,
    "rolled": _flag,
    "table": lambda table: None, "bypassed": _each(_record(lambda name, calls: (name, calls), {"name": _text, "calls": _each(_number)})),
    "breaks": _each(_record(BreakRecord, _BREAK)), "decisions": _each(_record(DecisionRecord, _DECISION)), "modules": _pairs_of_text,
    "registered": _each(_record(ParameterRecord, _PARAMETER)), "writes": _each(_record(WriteRecord, _WRITE)), "direct": _pairs_of_text,
    "outputs": _values,
    "calls": _each(_record(CallRecord, _CALL, {"seen"})),
    "nodes": _each(_record(_make_node, _NODE, _NODE.keys() - {"kind"})),
}  # fmt: skip


def _lineage(document: Any) -> Lineage:
    schema = document.get("schema") if isinstance(document, dict) else SCHEMA
    if schema != SCHEMA:
        newer = isinstance(schema, str) and (match := re.fullmatch(r"gradlineage/(\d{1,9})", schema)) and int(match[1]) > 1
        raise _Fault(f'"{SCHEMA}", found {_shown(schema)}{"; upgrade gradlineage to read this" if newer else ""}', ".schema")
    fields = _record(dict, _DOCUMENT, {"table"})(document)
    graph = Graph(**{key: fields[key] for key in Graph._fields})
    _check_calls(graph, fields["collapsed"])
    _check_nodes(graph)
    return Lineage(graph, fields["collapsed"], fields["rolled"])


def _among(numbers: Iterable[int], count: int, what: str, at: str) -> None:
    for k, number in enumerate(numbers):
        if number >= count:
            raise _Fault(f"the number of one of {count} {what}, found {number}", at.replace("*", str(k)))


def _check_calls(graph: Graph, collapsed: tuple[int, ...]) -> None:
    """What `view` relies upon: calls lie in earlier calls that are no layers, values refer to nodes."""
    calls, nodes = len(graph.calls), len(graph.nodes)
    for i, call in enumerate(graph.calls):
        _among((call.parent,), i, "earlier calls", f".calls[{i}].parent")
        if call.parent >= 0 and graph.calls[call.parent].layer:
            raise _Fault(f"the number of a container, found {call.parent}, a layer", f".calls[{i}].parent")
        for side in _SIDES:
            _among((v.node for v in getattr(call, side)), nodes, "nodes", f".calls[{i}].{side}[*].node")
        _among(call.uses, nodes, "nodes", f".calls[{i}].uses[*]")
    _among((v.node for v in graph.outputs), nodes, "nodes", ".outputs[*].node")
    for k, (_, users) in enumerate(graph.bypassed):
        _among(users, calls, "calls", f".bypassed[{k}].calls[*]")
    for k, cut in enumerate(graph.breaks):
        _among((cut.call,), calls, "calls", f".breaks[{k}].call")
        _among(cut.before, nodes, "nodes", f".breaks[{k}].before[*]")
        _among(cut.after, nodes, "nodes", f".breaks[{k}].after[*]")
    _among((p.node for p in graph.registered), nodes, "nodes", ".registered[*].node")
    for k, write in enumerate(graph.writes):
        _among((write.call, *write.before, *write.after), calls, "calls", f".writes[{k}]")
    for k, decision in enumerate(graph.decisions):
        _among((decision.call,), calls, "calls", f".decisions[{k}].call")
        _among((decision.after,), calls, "calls", f".decisions[{k}].after")
        _among(decision.nodes, nodes, "nodes", f".decisions[{k}].nodes[*]")
        if len(decision.ops) != len(decision.nodes):
            raise _Fault(f"as many lists as nodes, found {len(decision.ops)}", f".decisions[{k}].ops")
    _among(collapsed, calls, "calls", ".collapsed[*]")
    if list(collapsed) != sorted(set(collapsed)):
        raise _Fault("numbers in rising order, found others", ".collapsed")


def _check_nodes(graph: Graph) -> None:
    """Edges lead to earlier nodes, so there is no cycle; where nothing is computed, a value came from one node."""
    for index, node in enumerate(graph.nodes):
        at = f".nodes[{index}]"
        _among((p if p >= 0 else ~p for p in node.parents), index, "earlier nodes", f"{at}.parents[*]")
        _among(node.gradient, len(graph.nodes), "nodes", f"{at}.gradient[*]")
        _among((node.call,), len(graph.calls), "calls", f"{at}.call")
        call = graph.calls[node.call] if node.call >= 0 else None
        if call is None and node.kind == "call":
            raise _Fault("the number of a call, found -1", f"{at}.call")
        if call is not None and node.kind in ("call", "input"):
            _among((node.port,), len(call.outputs if node.kind == "call" else call.inputs), "tensors", f"{at}.port")
        least, most, what = 0, 0, f"no parents of {'a value that left a layer' if node.kind == 'call' else node.kind}"
        if node.kind == "op":
            least, most, what = 1, len(node.parents) if node.name else 1, "parents of an op, one where it has no name"
        elif node.kind == "union":
            least, most, what = len(node.counts), len(node.counts), "as many parents as counts"
        elif node.kind == "memory":
            least, most, what = 2, 2, "two parents of memory: what it held and what was written"
        elif call is not None and node.kind == "call" and not call.layer:
            least, most, what = 1, 1, "one parent of a value that left a container"
        if not least <= len(node.parents) <= most:
            raise _Fault(f"{what}, found {len(node.parents)}", f"{at}.parents")
