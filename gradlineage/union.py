"""Several passes of one model in one lineage, in which every call and edge knows in how many of them it occurred."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from gradlineage.graph import CallRecord, Graph, Node, ValueRecord
from gradlineage.lineage import Lineage
from gradlineage.steps import Reference
from gradlineage.view import View

__all__ = ["unite"]

_K = TypeVar("_K")


class _CallKey(NamedTuple):
    path: str
    nth: int
    layer: bool  # a block that skipped its children for one input is a layer there and a container elsewhere


class _JoinKey(NamedTuple):
    container: _CallKey | None
    op: str
    where: str
    number: int  # among those of its container, operation and line


class _Atom(NamedTuple):
    """Where a way begins: a call's output, a join, or a leaf."""

    kind: str
    call: _CallKey | None = None
    port: int = -1
    name: str = ""
    join: _JoinKey | None = None


class _Way(NamedTuple):
    atom: _Atom
    ops: tuple[str, ...]
    flows: bool


_Ways = Counter[_Way]


class _Flows:
    """Tensors by position: what each was called and looked like first, and all that was seen to feed it."""

    def __init__(self) -> None:
        self.records: list[ValueRecord] = []
        self.ways: list[_Ways] = []

    def add(self, records: Sequence[ValueRecord], ways: Iterable[list[_Way]], count: int) -> None:
        for position, found in enumerate(ways):
            if position == len(self.ways):
                self.records.append(records[position] if position < len(records) else ValueRecord("", (), "", "", 0))
                self.ways.append(Counter())
            for way in dict.fromkeys(found):
                self.ways[position][way] += count


class _Call:
    def __init__(self, record: CallRecord, parent: _CallKey | None) -> None:
        self.record, self.parent, self.count = record, parent, 0
        self.inputs, self.outputs, self.hidden = _Flows(), _Flows(), _Flows()


class _Join:
    def __init__(self, node: Node) -> None:
        self.node, self.count = node, 0
        self.operands = _Flows()


class _Union:
    def __init__(self) -> None:
        self.calls: dict[_CallKey, _Call] = {}
        self.follows: dict[_CallKey | None, dict[_CallKey, None]] = defaultdict(dict)  # what came right after a call in some pass
        self.joins: dict[_JoinKey, _Join] = {}
        self.joins_follow: dict[_JoinKey | None, dict[_JoinKey, None]] = defaultdict(dict)
        self.outputs = _Flows()

    # -- taking in -------------------------------------------------------------------------------------------------------------------

    def add(self, lineage: Lineage, count: int) -> None:
        view = lineage._view
        keys = {i: _CallKey(c.path, c.nth, view.is_layer(i)) for i, c in enumerate(view.graph.calls) if view.owner[i] in (-1, i)}
        joins = _join_keys(view, keys)

        def ways(references: Iterable[Reference]) -> list[_Way]:
            return [_Way(_atom(view, keys, joins, r.atom), view.ops(r), not view.stopped(r.atom, r.differentiable)) for r in references]

        before: _CallKey | None = None
        for index, key in keys.items():
            record = view.graph.calls[index]
            if key not in self.calls:
                elements, trainable = view.parameters(index)
                own = record._replace(layer=key.layer, parameters=elements, trainable=trainable)
                self.calls[key] = _Call(own, keys.get(record.parent))
            self.follows[before][key] = None
            before = key
            call = self.calls[key]
            call.count += count
            call.inputs.add(record.inputs, (ways(view.references(v.node)) for v in record.inputs), count)
            call.outputs.add(record.outputs, (ways(view.references(v.node)) for v in record.outputs), count)
            if key.layer:
                call.hidden.add((), (ways(view.references(node)) for node in view.hidden(index)), count)
        last: _JoinKey | None = None
        for node, name in joins.items():
            if name not in self.joins:
                self.joins[name] = _Join(view.graph.nodes[node])
            self.joins_follow[last][name] = None
            last, join = name, self.joins[name]
            join.count += count
            join.operands.add((), map(ways, view.operands(node)), count)
        self.outputs.add(view.graph.outputs, (ways(view.references(v.node)) for v in view.graph.outputs), count)

    # -- putting together ------------------------------------------------------------------------------------------------------------

    def graph(self, like: Graph, runs: int, notes: Sequence[str], bypassed: Iterable[tuple[str, tuple[_CallKey | None, ...]]]) -> Graph:
        order = _ordered(self.follows, lambda key: [self.calls[key].parent])
        number = {key: i for i, key in enumerate(order)}
        made = _Nodes(number)
        for join in _ordered(self.joins_follow, self._needed):
            made.join(join, self.joins[join])
        calls = []
        for key in order:
            call = self.calls[key]
            above = number[call.parent] if call.parent is not None else -1
            inputs, outputs, hidden = map(made.values, (call.inputs, call.outputs, call.hidden))
            calls.append(call.record._replace(parent=above, seen=call.count, inputs=inputs, outputs=outputs, hidden=hidden))
        final = made.values(self.outputs)
        borrowed = tuple((name, tuple(sorted({number[k] if k is not None else -1 for k in keys}))) for name, keys in bypassed)
        return Graph(
            tuple(made.nodes), tuple(calls), final, like.model, like.parameters, like.trainable, tuple(notes), borrowed, runs=runs
        )  # fmt: skip

    def _needed(self, key: _JoinKey) -> list[_JoinKey | None]:
        """The joins that feed one, and that of its line which ran before it."""
        needed = [way.atom.join for ways in self.joins[key].operands.ways for way in ways]
        return needed + ([key._replace(number=key.number - 1)] if key.number else [])


def _ordered(follows: Mapping[_K | None, Mapping[_K, None]], needed: Callable[[_K], Iterable[_K | None]]) -> list[_K]:
    """Running order: what came before something in any pass, and what it needs, before it; where passes disagree, as they were first seen.

    Args:
        follows: per thing, what came right after it in some pass, None standing for the beginning.
        needed: what has to come before a thing.
    """
    keys = list(dict.fromkeys(key for after in follows.values() for key in after))
    rank = {key: n for n, key in enumerate(keys)}
    after = {key: dict(follows.get(key, {})) for key in keys}
    for key in keys:
        for before in needed(key):
            if before is not None:
                after[before][key] = None
    waiting = Counter(key for later in after.values() for key in later)
    ready = [rank[key] for key in keys if not waiting[key]]
    left = dict.fromkeys(keys)
    heapq.heapify(ready)
    found: list[_K] = []
    while left:
        if not ready:  # they go in a circle: passes disagree
            free = (k for k in left if all(n is None or n not in left for n in needed(k)))
            ready = [rank[next(free, next(iter(left)))]]
        key = keys[heapq.heappop(ready)]
        if key not in left:
            continue
        del left[key]
        found.append(key)
        for later in after[key]:
            waiting[later] -= 1
            if not waiting[later] and later in left:
                heapq.heappush(ready, rank[later])
    return found


class _Nodes:
    """The nodes of the new graph, made when first needed."""

    def __init__(self, number: dict[_CallKey, int]) -> None:
        self.number = number
        self.nodes: list[Node] = []
        self.atoms: dict[_Atom, int] = {}
        self.chains: dict[_Way, int] = {}

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def atom(self, atom: _Atom) -> int:
        found = self.atoms.get(atom)
        if found is None:
            call = self.number[atom.call] if atom.call is not None else -1
            found = self.atoms[atom] = self.add(Node(atom.kind, (), atom.name, call, atom.port, grad=True))
        return found

    def chain(self, way: _Way) -> int:
        found = self.chains.get(way)
        if found is None:
            found = self.atom(way.atom)
            for position, op in enumerate(way.ops):
                edge = found if way.flows or position else ~found
                found = self.add(Node("op", (edge,), op, grad=True))
            self.chains[way] = found
        return found

    def flow(self, ways: _Ways) -> int:
        parents = [(self.chain(way), way) for way in ways]
        edges = tuple(node if way.flows or way.ops else ~node for node, way in parents)
        return self.add(Node("union", edges, grad=True, counts=tuple(ways.values())))

    def values(self, flows: _Flows) -> tuple[ValueRecord, ...]:
        return tuple(record._replace(node=self.flow(ways)) for record, ways in zip(flows.records, flows.ways, strict=True))

    def join(self, key: _JoinKey, join: _Join) -> None:
        """A join, its operands first. One that is not there yet (two passes ran them in opposite orders) is left to its own row."""
        operands = []
        for ways in join.operands.ways:
            known = Counter({way: n for way, n in ways.items() if way.atom.join is None or way.atom in self.atoms})
            if known:
                operands.append(self.flow(known))
        call = self.number[key.container] if key.container is not None else -1
        made = join.node._replace(kind="op", parents=tuple(operands), call=call, order=len(self.nodes), grad=True, counts=(join.count,))
        self.atoms[_Atom("join", join=key)] = self.add(made)


def _join_keys(view: View, keys: dict[int, _CallKey]) -> dict[int, _JoinKey]:
    seen: Counter[tuple[_CallKey | None, str, str]] = Counter()
    found = {}
    for node in view.joins:
        group = keys.get(view.call_of(node)), view.graph.nodes[node].name, view.graph.nodes[node].where
        found[node] = _JoinKey(*group, seen[group])
        seen[group] += 1
    return found


def _atom(view: View, keys: dict[int, _CallKey], joins: dict[int, _JoinKey], atom: int) -> _Atom:
    node = view.graph.nodes[atom]
    if view.is_join(atom):
        return _Atom("join", join=joins[atom])
    if view.of_layer(atom):
        call, port = view.leaving(atom)
        return _Atom("call", keys[call], -1 if port is None else port)
    if node.kind == "input":
        return _Atom("input", keys.get(node.call), node.port, node.name)
    return _Atom(node.kind, name=node.name)


def unite(parts: Sequence[tuple[Lineage, int]], notes: Sequence[str] = ()) -> Lineage:
    """The union of lineages of one model.

    Calls are matched by path and number, joins by container, operation, line and number, tensors by position. Shapes and places are those of the
    first lineage that has them.

    Args:
        parts: lineages, and how many passes each stands for.
        notes: sentences for the reader.
    """
    union = _Union()
    bypassed: defaultdict[str, set[_CallKey | None]] = defaultdict(set)
    for lineage, count in parts:
        union.add(lineage, count)
        for name, calls in lineage.bypassed:
            bypassed[name].update(_CallKey(c.path, c.nth, c.kind == "layer") for c in calls)
    runs = sum(count for _, count in parts)
    return Lineage(union.graph(parts[0][0]._graph, runs, notes, [(name, tuple(calls)) for name, calls in bypassed.items()]))
