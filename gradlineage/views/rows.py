"""What every view shows, before any layout: one row a layer call, a join or a decision, in an order that reads from top to bottom.

Needs no torch.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gradlineage.errors import NameNotFound
from gradlineage.graph import DecisionRecord
from gradlineage.lineage import Call, Flow, Join, Lineage

__all__ = ["Entry", "Incoming", "Row", "entries_of", "make_rows"]


class Entry(NamedTuple):
    """One thing that a tensor came from; see `gradlineage.Source` for kinds, beside which there is ``join``.

    ``key`` is the `Row.key` of the row it refers to, empty where it refers to none. ``ops`` are in running order. ``stopped``: no gradient
    flows back on this way because something in the model stops it.
    """

    label: str
    kind: str
    ops: tuple[str, ...]
    differentiable: bool
    key: str
    reason: str = ""
    stopped: bool = False
    seen: int = 1  # in a union, in how many passes it was seen; 0 where that is not known
    group: tuple[int, ...] = ()  # of an operand, the folded joins in which it met others before, numbered within the row


class Incoming(NamedTuple):
    """A tensor that goes into a call or join. ``name`` is that of the argument, ``hidden`` for what came by another door, empty for operands."""

    name: str
    entries: tuple[Entry, ...]
    used: bool = True


class Row(NamedTuple):
    """A layer call, a join or a decision, of which only the first has a ``type``, and the last has no ``key``.

    ``shared``: an earlier row has the same parameters, (elements, trainable elements). ``times``: a decision that fell so often in a row.
    """

    key: str
    label: str
    type: str
    shapes: tuple[tuple[int | str, ...] | None, ...]
    inputs: tuple[Incoming, ...]
    parameters: tuple[int, int] = (0, 0)
    shared: bool = False
    failed: bool = False
    times: int = 1
    seen: int = 1  # in a union, in how many passes it occurred

    @property
    def entries(self) -> Iterator[Entry]:
        return (entry for tensor in self.inputs for entry in tensor.entries)


def make_rows(lineage: Lineage, *, joins: bool = True, decisions: bool = False, values: bool = True, layer: str | None = None) -> list[Row]:
    """Layer calls in the order in which they began; every join after what feeds it and the joins that ran before it, and before what it feeds.

    A decision stands after the layers that had begun before it.

    Args:
        lineage: any lineage.
        joins: False for no rows of joins; entries are the nearest sources then.
        decisions: rows for places where Python read a tensor's value; ``values``: with what it saw.
        layer: only rows whose path or label matches this pattern (``*`` crosses dots), or that lie in a container whose path does.

    Raises:
        NameNotFound: ``layer`` matches nothing.
    """
    rank: dict[str, tuple[int, int]] = {}  # (layers begun before, joins run before)
    rows: list[Row] = []
    owners: set[str] = set()
    for number, call in enumerate(lineage.layers):
        row = _layer_row(call, joins, call.path in owners)
        owners.add(call.path)
        rank[row.key] = number, 0
        rows.append(row)
    after = -1
    for number, join in enumerate(lineage.joins if joins else (), 1):
        operands = tuple(Incoming("", entries_of(f, True)) for f in join.inputs)
        row = Row(join.label, join.label, "", tuple(f.shape for f in join.outputs), operands, seen=join.count)
        before = [rank[e.key][0] for e in row.entries if e.key in rank]
        # in a union joins of different passes have no common order: each stands below what feeds it
        after = max((-1 if lineage._view.is_union else after, *before))
        rank[row.key] = after, number
        rows.append(row)
    rows.sort(key=lambda row: rank[row.key])
    rows = rows if layer is None else _matching(lineage, rows, layer)
    return _with_decisions(lineage, rows, joins, values) if decisions else rows


def entries_of(flow: Flow, joins: bool) -> tuple[Entry, ...]:
    """What feeds a tensor: one step back, or with ``joins=False`` its nearest sources."""
    graph, view = flow._lineage._graph, flow._lineage._view
    if joins:
        steps = [(r.atom, view.ops(r), r.differentiable, r.seen) for r in flow._references]
    else:
        steps = [(atom, way.names, differentiable, 0) for atom, way, differentiable in view.sources(flow._references)]
    entries = []
    join, operand = flow._key
    group = view.group(join, operand) if operand >= 0 else ()
    for atom, ops, differentiable, seen in steps:
        node, label, key = graph.nodes[atom], view.label(atom), ""
        kind = "join" if view.is_join(atom) else "call" if view.of_layer(atom) else {"empty": "unknown"}.get(node.kind, node.kind)
        if kind == "call":
            record = graph.calls[view.leaving(atom)[0]]
            key = f"{record.path}[{record.nth}]"
        key, reason = label if kind == "join" else key, node.name if kind == "unknown" else ""
        entries.append(Entry(label, kind, ops, differentiable, key, reason, view.stopped(atom, differentiable), seen, group))
    return tuple(entries)


def _with_decisions(lineage: Lineage, rows: list[Row], joins: bool, values: bool) -> list[Row]:
    """The rows, with decisions between them: after the last layer that had begun, and the joins in between that had run."""
    graph, order = lineage._graph, {j.label: j._node.order for j in lineage.joins}
    began = {f"{c.path}[{c.nth}]": c._index for c in lineage.layers}
    shown = {c for row in rows if row.key in began for c in _above(lineage, began[row.key])}
    records = iter(sorted(graph.decisions, key=lambda d: d.order))
    found: list[Row] = []
    record = next(records, None)
    for row in rows:
        while record is not None and (began[row.key] > record.after if row.key in began else order[row.key] > record.order):
            if record.call in shown or record.call < 0:
                found.append(_decision_row(lineage, record, joins, values))
            record = next(records, None)
        found.append(row)
    while record is not None:
        if record.call in shown or record.call < 0:
            found.append(_decision_row(lineage, record, joins, values))
        record = next(records, None)
    runs = [(row, len(list(run))) for row, run in itertools.groupby(found)]
    return [row._replace(times=times) if times > 1 else row for row, times in runs]


def _above(lineage: Lineage, call: int) -> Iterator[int]:
    while call >= 0:
        yield call
        call = lineage._graph.calls[call].parent


def _decision_row(lineage: Lineage, record: DecisionRecord, joins: bool, values: bool) -> Row:
    value = (
        "" if record.value is None or not values else f" is {record.value:.4g}" if type(record.value) is float else f" is {record.value}"
    )
    entries: dict[Entry, None] = {}
    for node, ops in zip(record.nodes, record.ops, strict=True):
        for entry in entries_of(Flow(lineage, (node, -1), "", None, "", "", True), joins):
            entries.setdefault(entry._replace(ops=(*entry.ops, *ops), stopped=False))  # Python takes no gradient
    label = f"? {record.kind} at {os.path.basename(record.where) or 'unknown place'}{value}"
    return Row("", label, "", (), (Incoming("", tuple(entries)),))


def _layer_row(call: Call, joins: bool, again: bool) -> Row:
    inputs = [Incoming(f.name, entries_of(f, joins), f.used is not False) for f in call.inputs]
    hidden = dict.fromkeys(e for f in call.hidden for e in entries_of(f, joins))
    inputs += [Incoming("hidden", tuple(hidden))] if hidden else []
    shapes, own = tuple(f.shape for f in call.outputs), call.parameters
    return Row(
        f"{call.path}[{call.nth}]", call.label, call.type, shapes, tuple(inputs), own, again and own[0] > 0, call.failed, 1, call.count
    )


def _matching(lineage: Lineage, rows: Iterable[Row], pattern: str) -> list[Row]:
    def places(item: Call | Join) -> Iterator[str]:
        yield item.label
        call = item if isinstance(item, Call) else item.container
        while call is not None:
            yield from (call.path, call.label)
            call = call.parent

    items: dict[str, Call | Join] = {f"{c.path}[{c.nth}]": c for c in lineage.layers} | {j.label: j for j in lineage.joins}
    kept = [row for row in rows if any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in places(items[row.key]))]
    if not kept:
        known = (*dict.fromkeys(c.path for c in lineage.calls), *(j.label for j in lineage.joins))
        raise NameNotFound(pattern, known, "layer, container or join")
    return kept
