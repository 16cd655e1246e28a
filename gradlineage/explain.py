"""A call, or the way between two, in a few lines of words. Needs no torch."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from gradlineage.gradient import Walk
from gradlineage.lineage import Call, Flow, Join, Lineage
from gradlineage.reach import Item
from gradlineage.tables import REARRANGING

__all__ = ["explain"]

_MOST = 6


def explain(lineage: Lineage, first: Any, last: Any = None) -> str:
    """What feeds a call or join and what it feeds; with ``last``, the shortest way from ``first`` to that, or where it ends.

    Args:
        lineage: any lineage.
        first, last: labels, paths, (path, nth), calls or joins.

    Raises:
        NameNotFound: no such call or join.
    """
    items = [lineage._index(first), *([] if last is None else [lineage._index(last)])]
    whole = {i for kind, i in items if kind == "call" and not lineage._view.is_layer(i)}
    if whole:  # a container: as one layer
        lineage = Lineage(lineage._graph, lineage._view.outermost(lineage._collapsed | whole), lineage.rolled)
    start = items[0]
    lines = _about(lineage, start) if last is None else _between(lineage, start, items[1])
    return "\n".join(line.rstrip() for line in lines)


def _item(lineage: Lineage, item: Item) -> Call | Join:
    return Call(lineage, item[1]) if item[0] == "call" else Join(lineage, item[1])


def _about(lineage: Lineage, item: Item) -> Iterator[str]:
    thing = _item(lineage, item)
    kind = thing.type if isinstance(thing, Call) else f"a join of {len(thing.inputs)} tensors"
    yield f"{thing.label} ({kind}){f', at {thing.where}' if thing.where else ''}"
    if source := _source_line(thing.where):
        yield f"    {source}"
    yield "is fed by"
    flows = [(f.name if isinstance(thing, Call) else "", f) for f in thing.inputs]
    flows += [("hidden", f) for f in thing.hidden] if isinstance(thing, Call) else []
    for name, flow in flows:
        yield f"    {name}: {_words(flow)}{_unused(flow)}" if name and len(flows) > 1 else f"    {_words(flow)}{_unused(flow)}"
    if not flows:
        yield "    nothing"
    readers = [i for i in lineage._reach._edges[1].get(item, ()) if i[0] == "join" or lineage._view.is_layer(i[1])]
    readers.sort(key=lambda i: (i[0] != "call", i[1]))
    returned = item in _returned(lineage)
    yield f"feeds {_listed([_item(lineage, r).label for r in readers] + (['the output'] if returned else [])) or 'nothing'}"
    skips = [f"{a} → {b}" for a, b in _skips(lineage, item)]
    if skips:
        yield f"is gone around by {_listed(skips)}"
    yield from _near(lineage, item)


def _near(lineage: Lineage, item: Item) -> Iterator[str]:
    label = _item(lineage, item).label
    for stop in lineage.breaks:
        if label in stop.after:
            yield f"gradient stops before it: {stop.op} at {stop.where} cuts off {_listed([s.label for s in stop.before])}"
        elif any(s.label == label or s.label.startswith(f"{label}[") for s in stop.before):
            yield f"gradient stops after it: {stop.op} at {stop.where}, on the way to {_listed(list(stop.after))}"
    for decision in lineage.decisions:
        inside = decision.call is not None and decision.call.label == label
        if inside or any(s.label == label for s in decision.sources):
            value = "" if decision.value is None else f", was {decision.value}"
            yield f"{'decides within' if inside else 'decides'}: {decision.kind} at {decision.where}{value}"


def _returned(lineage: Lineage) -> set[Item]:
    view = lineage._view
    found: set[Item] = set()
    for value in lineage._graph.outputs:
        for reference in view.references(value.node):
            if view.is_join(reference.atom):
                found.add(("join", reference.atom))
            elif view.of_layer(reference.atom):
                found.add(("call", view.leaving(reference.atom)[0]))
    return found


def _skips(lineage: Lineage, item: Item) -> list[tuple[str, str]]:
    """Edges from something before it straight to something after it."""
    reach = lineage._reach
    before, after = reach.upstream(*item), reach.downstream(*item)
    found = []
    for reader in sorted(after):
        for source in sorted(reach._edges[0].get(reader, ())):
            if source in before:
                found.append((_item(lineage, source).label, _item(lineage, reader).label))
    return found


def _between(lineage: Lineage, first: Item, last: Item) -> Iterator[str]:
    names = _item(lineage, first).label, _item(lineage, last).label
    if first == last:
        yield f"{names[0]} is where the way begins and where it ends"
        return
    way = _shortest(lineage, first, last)
    if way is None:
        back = _shortest(lineage, last, first)
        yield f"there is no way from {names[0]} to {names[1]}" + (f"; there is one the other way round, from {names[1]}" if back else "")
        returned = _returned(lineage)
        ends = [i for i in lineage._reach.downstream(*first) if i in returned or not lineage._reach._edges[1].get(i)]
        told = [_item(lineage, i).label + (" (returned)" if i in returned else "") for i in sorted(ends)]
        yield (
            f"what {names[0]} feeds ends at {_listed(told)}"
            if told
            else f"{names[0]} feeds {'the output alone' if first in returned else 'nothing'}"
        )
        return
    steps = len(way) - 1
    yield f"from {names[0]} to {names[1]} in {steps} step{'s' * (steps != 1)}"
    yield f"    {names[0]}"
    for before, after in itertools.pairwise(way):
        yield f"    → {_step(lineage, before, after)}"
    nodes = lineage._graph.nodes
    starts = [v.node for v in lineage._graph.calls[last[1]].inputs] if last[0] == "call" else [last[1]]
    reached = Walk(lineage._graph).gradient(starts)
    flows = any(_belongs(lineage, n, first) for n in reached)
    stops = [s for s in lineage.breaks if any(p in s.after for p in (names[1], *(_item(lineage, i).label for i in way[1:])))]
    if flows:
        yield "gradient flows back"
    elif stops:
        yield f"no gradient flows back: {_listed([f'{s.op} at {s.where}' for s in stops])}"
    else:
        yield "no gradient flows back" + (
            "" if any(n.grad for n in nodes if n.kind not in ("parameter", "input")) else ": this pass ran without"
        )


def _belongs(lineage: Lineage, node: int, item: Item) -> bool:
    if item[0] == "join":
        return node == item[1]
    return lineage._view.of_layer(node) and lineage._view.leaving(node)[0] == item[1]


def _shortest(lineage: Lineage, first: Item, last: Item) -> list[Item] | None:
    down = lineage._reach._edges[1]
    came: dict[Item, Item] = {first: first}
    queue = deque([first])
    while queue:
        item = queue.popleft()
        if item == last:
            way = [item]
            while way[-1] != first:
                way.append(came[way[-1]])
            return way[::-1]
        if item[0] == "call" and not lineage._view.is_layer(item[1]):
            continue
        for reader in sorted(down.get(item, ())):
            if reader not in came:
                came[reader] = item
                queue.append(reader)
    return None


def _step(lineage: Lineage, before: Item, after: Item) -> str:
    """The reader of a link, with the operations on the way to it."""
    view = lineage._view
    for reference in view.incoming(*after):
        source = (
            ("join", reference.atom)
            if view.is_join(reference.atom)
            else ("call", view.leaving(reference.atom)[0] if view.of_layer(reference.atom) else -1)
        )
        if source == before:
            ops = [op for op in view.ops(reference) if op not in REARRANGING]
            arrow = "" if not view.stopped(reference.atom, reference.differentiable) else " (no gradient)"
            return " → ".join([*ops, _item(lineage, after).label]) + arrow
    return _item(lineage, after).label


def _words(flow: Flow) -> str:
    texts = []
    for link in flow.links:
        ops = [op for op in reversed(link.ops) if op not in REARRANGING]
        view = flow._lineage._view
        stopped = view.stopped(link._reference.atom, link.differentiable)
        texts.append(f"{' ← '.join(ops)} {'⇠ ' if stopped else '← ' if ops else ''}{link.label}".lstrip())
    return ", ".join(texts) or "nothing"


def _unused(flow: Flow) -> str:
    return " (not used)" if flow.used is False else ""


def _listed(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found[:_MOST]) + (f" and {len(found) - _MOST:,} more" if len(found) > _MOST else "")


def _source_line(where: str) -> str:
    """The line of code, if the file is where it was."""
    file, _, line = where.rpartition(":")
    if not line.isdigit():
        return ""
    for folder in ("", os.getcwd(), *sys.path):
        path = os.path.join(folder, file)
        if os.path.isfile(path):
            return linecache.getline(path, int(line)).strip()
    return linecache.getline(file, int(line)).strip()
