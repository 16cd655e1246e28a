"""A graph seen through a choice of layers: what is a call's label, what feeds a value one step back, what feeds it nearest.

Everything is worked out when asked and kept. Only numbers here; `lineage` makes values of them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from gradlineage.enclosed import Enclosed
from gradlineage.graph import Graph
from gradlineage.labels import Labels
from gradlineage.steps import Chain, Outer, Reference, Way
from gradlineage.walk import CONSTANT, DATA, EMPTY, LEAF, OPERATION, PASS, Ways

__all__ = ["View"]

_ROLES = {"union": DATA, "input": DATA, "unknown": DATA, "parameter": LEAF, "buffer": LEAF, "constant": CONSTANT, "empty": EMPTY}


class View:
    """See the module's docstring. ``collapsed`` are the container calls that count as layers beside the recorded layers."""

    def __init__(self, graph: Graph, collapsed: frozenset[int]) -> None:
        self.graph = graph
        self.collapsed = collapsed
        self.owner: list[int] = []  # per call: the layer it is or lies in, -1 for the containers in view
        for index, call in enumerate(graph.calls):
            above = self.owner[call.parent] if call.parent >= 0 else -1
            self.owner.append(above if above >= 0 else index if call.layer or index in collapsed else -1)
        self.shown = [i for i, owner in enumerate(self.owner) if owner in (-1, i)]
        self._references: dict[int, tuple[Reference, ...]] = {}
        self._groups: dict[int, list[tuple[int, ...]]] = {}
        self._operands: dict[int, list[tuple[Reference, ...]]] = {}

    # -- calls ---------------------------------------------------------------------------------------------------------------------

    def is_layer(self, call: int) -> bool:
        return self.owner[call] == call

    def outermost(self, calls: Iterable[int]) -> frozenset[int]:
        """Those of the calls that lie in none of the others."""
        chosen, inside = set(calls), [False] * len(self.owner)
        for index, call in enumerate(self.graph.calls):
            inside[index] = call.parent >= 0 and (inside[call.parent] or call.parent in chosen)
        return frozenset(i for i in chosen if not inside[i])

    @cached_property
    def labels(self) -> Labels:
        return Labels(self)

    def call_label(self, call: int) -> str:
        return self.labels.call(call)

    def label(self, atom: int) -> str:
        return self.labels.atom(atom)

    def find(self, key: object) -> tuple[str, int] | None:
        return self.labels.find(key)

    def parameters(self, call: int) -> tuple[int, int]:
        record = self.graph.calls[call]
        if call not in self.collapsed:
            return record.parameters, record.trainable
        inside = {c.path: c for i, c in enumerate(self.graph.calls) if self.owner[i] == call}
        return sum(c.parameters for c in inside.values()), sum(c.trainable for c in inside.values())

    # -- the walk ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def ways(self) -> Ways:
        roles, parents, nodes = [], [], self.graph.nodes
        for index, node in enumerate(nodes):
            role = _ROLES.get(node.kind, OPERATION if node.kind == "op" and node.name else PASS)
            above = node.parents
            if node.kind == "memory":
                own = above[1] if above[1] >= 0 else ~above[1]
                if self.of_layer(own):  # a layer wrote a part, and the rest is as it was
                    role = OPERATION
                else:  # the operation that wrote read the rest as well
                    above = above[1:]
            roles.append(DATA if self.of_layer(index) else role)
            parents.append(above if node.grad else tuple(p if p < 0 else ~p for p in above))
        return Ways(roles, parents, [n.grad for n in nodes])

    @cached_property
    def _within(self) -> list[int]:
        """Per node, the layer call in which it was made, -1 for none."""
        found: list[int] = []
        for node in self.graph.nodes:
            owner = self.owner[node.call] if node.call >= 0 and node.kind in ("op", "call", "constant", "empty", "memory") else -1
            if node.kind == "memory" and found[node.parents[0] if node.parents[0] >= 0 else ~node.parents[0]] != owner:
                owner = -1
            found.append(owner)
        return found

    def call_of(self, join: int) -> int:
        """The container call in which a join ran."""
        call = self.graph.nodes[join].call
        return self.graph.calls[self.owner[call]].parent if call >= 0 and self.owner[call] >= 0 else call

    def within(self, node: int) -> int:
        """The layer call in which a node was made, -1 for none."""
        return self._within[node]

    def of_layer(self, node: int) -> bool:
        """Whether a value was made in a layer call, which is its source for all outside of it."""
        return self._within[node] >= 0

    def leaving(self, atom: int) -> tuple[int, int | None]:
        """The layer call that a node belongs to, and the port by which it left (None: a side door)."""
        node = self.graph.nodes[atom]
        owner = self.owner[node.call]
        return owner, node.port if node.kind == "call" and node.call == owner and node.port >= 0 else None

    def is_join(self, node: int) -> bool:
        return self.graph.nodes[node].kind in ("op", "memory") and self.ways.roles[node] == OPERATION

    @cached_property
    def folded(self) -> dict[int, int]:
        """The joins whose only consumer is an operand of another join of the same container call, and that join."""
        used: defaultdict[int, list[int]] = defaultdict(list)
        if self.is_union:  # what a union consists of was folded before
            return {}
        for reader, node in self._readers():
            for atom, _ in self.ways.elements(node):
                if self.is_join(atom):
                    used[atom].append(reader)
        folded = {}
        for join, readers in used.items():
            if len(readers) == 1:
                (reader,) = readers
                if reader >= 0 and self.call_of(reader) == self.call_of(join):
                    folded[join] = reader
        return folded

    def _readers(self) -> Iterable[tuple[int, int]]:
        """(join that reads, node read) and (negative number, node read) for what enters or leaves a call."""
        number = -1
        for index in self.shown:
            call = self.graph.calls[index]
            others = self.hidden(index) if self.is_layer(index) else [v.node for v in call.outputs]
            for node in (*(v.node for v in call.inputs), *others):
                number -= 1
                yield number, node
        for node in (*(v.node for v in self.graph.outputs), *(n for d in self.graph.decisions for n in d.nodes)):
            number -= 1
            yield number, node
        for join in self.ways.joins:
            for edge in self.ways.parents[join]:
                yield join, edge if edge >= 0 else ~edge

    @cached_property
    def joins(self) -> list[int]:
        """The joins that stand in a row of their own and feed something in view, in running order."""
        live: set[int] = set()
        stack: list[int] = []

        def mark(references: Iterable[Reference]) -> None:
            for reference in references:
                if self.is_join(reference.atom) and reference.atom not in live:
                    live.add(reference.atom)
                    stack.append(reference.atom)

        for reader, node in self._readers():
            if reader < 0:
                mark(self.references(node))
        while stack:
            for operand in self.operands(stack.pop()):
                mark(operand)
        return sorted(live, key=lambda n: (self.graph.nodes[n].order, n))

    def references(self, node: int) -> tuple[Reference, ...]:
        """What feeds a value one step back."""
        found = self._references.get(node)
        if found is None:
            found = tuple(r for atom, diff in self.ways.elements(node) for r in self._alternatives(Reference(atom, diff, node, None)))
            self._references[node] = found
        return found

    def _alternatives(self, reference: Reference) -> Iterable[Reference]:
        """What a union stands for, if that is what a reference leads to."""
        union = self.graph.nodes[reference.atom]
        if union.kind != "union":
            yield reference
            return
        length = self.ways.length(reference.at, reference.atom) + (reference.outer.length if reference.outer is not None else 0)
        outer = Outer(reference.atom, reference.at, reference.outer, length)
        for edge, count in zip(union.parents, union.counts, strict=True):
            flows, node = edge >= 0 and reference.differentiable, edge if edge >= 0 else ~edge
            for atom, diff in self.ways.elements(node):
                yield Reference(atom, flows and diff, node, outer, count)

    def feeding(self, key: tuple[int, int]) -> tuple[Reference, ...]:
        """What feeds a node, or with a number that operand of a join."""
        node, operand = key
        return self.references(node) if operand < 0 else self.operands(node)[operand]

    def operands(self, join: int) -> list[tuple[Reference, ...]]:
        """The same for each operand of a join, those of the joins folded into it spliced in."""
        found = self._operands.get(join)
        if found is not None:
            return found
        found = []
        stack: list[tuple[int, int, bool, Outer | None] | tuple[Reference, ...]] = [
            (e, join, True, None) for e in reversed(self.ways.parents[join])
        ]
        while stack:
            item = stack.pop()
            if isinstance(item[0], Reference):
                found.append(item)
                continue
            edge, reader, flows, outer = item
            node, flows = (edge, flows) if edge >= 0 else (~edge, False)
            parts: list[tuple[int, int, bool, Outer | None] | tuple[Reference, ...]] = []
            rest: list[Reference] = []
            for atom, diff in self.ways.elements(node):
                if self.folded.get(atom) == reader:
                    parts += [tuple(rest)] if rest else []
                    rest = []
                    within = Outer(atom, node, outer, 1 + self.ways.length(node, atom) + (outer.length if outer is not None else 0))
                    parts += [(e, atom, flows and diff, within) for e in self.ways.parents[atom]]
                elif self.ways.roles[atom] < CONSTANT:
                    rest += self._alternatives(Reference(atom, flows and diff, node, outer))
            parts += [tuple(rest)] if rest else []
            stack.extend(reversed(parts))
        self._operands[join] = found
        return found

    @cached_property
    def is_union(self) -> bool:
        return any(node.kind == "union" for node in self.graph.nodes)

    @cached_property
    def enclosed(self) -> Enclosed:
        return Enclosed(self)

    def hidden(self, call: int) -> list[int]:
        """The nodes that entered a layer call by another door than its arguments."""
        record = self.graph.calls[call]
        return [v.node for v in record.hidden] if record.layer else list(self.enclosed.hidden.get(call, ()))

    @cached_property
    def cut(self) -> frozenset[int]:
        """The values that left an operation or layer without gradient because that stopped it."""
        return frozenset(node for stop in self.graph.breaks for node in stop.after)

    def stopped(self, atom: int, differentiable: bool) -> bool:
        """Whether something in the model stops the gradient on a way from there. A pass without any gradient has no cuts."""
        if self.is_union:
            return not differentiable
        return not differentiable and (atom in self.cut or (self.graph.nodes[atom].grad and bool(self.cut)))

    def group(self, join: int, operand: int) -> tuple[int, ...]:
        """The joins of another operation in which an operand met others before it came here, the last first: ``(a + b) * c`` is one row.

        Those that are folded into one join are numbered as they appear.
        """
        found = self._groups.get(join)
        if found is None:
            numbers: dict[int, int] = {}
            found = self._groups[join] = []
            for references in self.operands(join):
                chain, outer = [], references[0].outer if references else None
                while outer is not None:
                    host = self.folded.get(outer.join)
                    if host is not None and self.graph.nodes[outer.join].name != self.graph.nodes[host].name:
                        chain.append(outer.join)
                    outer = outer.rest
                found.append(tuple(numbers.setdefault(j, len(numbers)) for j in reversed(chain)))
        return found[operand]

    def apart(self, join: int) -> list[tuple[Reference, ...]]:
        """The operands of a join as they are, those that are joins of their own kept together."""
        edges = ((e, True) if e >= 0 else (~e, False) for e in self.ways.parents[join])
        found = []
        for node, flows in edges:
            steps = [(a, d) for a, d in self.ways.elements(node) if self.ways.roles[a] < CONSTANT]
            found.append(tuple(r for a, d in steps for r in self._alternatives(Reference(a, flows and d, node, None))))
        return [operand for operand in found if operand]

    def incoming(self, kind: str, index: int) -> tuple[Reference, ...]:
        """All that enters a call or join, one step back."""
        if kind == "join":
            return tuple(r for operand in self.operands(index) for r in operand)
        entering = [v.node for v in self.graph.calls[index].inputs]
        entering += self.hidden(index) if self.is_layer(index) else []
        return tuple(r for node in entering for r in self.references(node))

    def ops(self, reference: Reference, every: bool = False) -> tuple[str, ...]:
        """Names of the operations on the way, in running order; of the joins folded on it only those of another operation, or every one."""
        nodes = self.graph.nodes
        names = [nodes[n].name for n in self.ways.way(reference.at, reference.atom)]
        outer = reference.outer
        last = outer
        while last is not None and last.rest is not None:
            last = last.rest
        host = nodes[self.folded[last.join]].name if last is not None and last.join in self.folded else ""
        while outer is not None:
            if nodes[outer.join].name and (every or nodes[outer.join].name != host):
                names.append(nodes[outer.join].name)
            names += [nodes[n].name for n in self.ways.way(outer.at, outer.join)]
            outer = outer.rest
        return tuple(names)

    def passed(self, reference: Reference) -> tuple[str, ...]:
        """Every operation on the way, that of the join it leads to first."""
        own = (self.graph.nodes[reference.atom].name,) if self.is_join(reference.atom) else ()
        return (*own, *self.ops(reference, every=True))

    def sources(self, references: Iterable[Reference]) -> list[tuple[int, Way, bool]]:
        """The nearest origins that are no joins: (node, operations on the shortest way, whether gradient flows on some way)."""
        references = tuple(references)
        if not any(self.is_join(r.atom) for r in references):
            return [(r.atom, Way(None, self, Chain(r, None)), r.differentiable) for r in references]
        order: dict[int, None] = {}
        seen: set[int] = set()
        stack = list(reversed(references))
        while stack:
            reference = stack.pop()
            if not self.is_join(reference.atom):
                order.setdefault(reference.atom)
            elif reference.atom not in seen:
                seen.add(reference.atom)
                stack.extend(r for operand in reversed(self.operands(reference.atom)) for r in reversed(operand))
        flowing: set[int] = set()
        stack = [r for r in references if r.differentiable]
        while stack:
            atom = stack.pop().atom
            if atom not in flowing:
                flowing.add(atom)
                if self.is_join(atom):
                    stack.extend(r for operand in self.operands(atom) for r in operand if r.differentiable)
        chains = self._shortest(references)
        kept = list(order)
        if any(self.ways.roles[a] < CONSTANT for a in kept):
            kept = [a for a in kept if self.ways.roles[a] < CONSTANT]
        return [(atom, Way(None, self, chains[atom]), atom in flowing) for atom in kept]

    def _shortest(self, references: tuple[Reference, ...]) -> dict[int, Chain]:
        """The shortest way to every origin: Dijkstra over joins, counting operations; ways are chains of back pointers."""
        heap: list[tuple[int, int, Chain]] = []
        found: dict[int, Chain] = {}

        def push(reference: Reference, length: int, back: Chain | None) -> None:
            length += self.ways.length(reference.at, reference.atom) + (reference.outer.length if reference.outer is not None else 0)
            heapq.heappush(heap, (length, next(number), Chain(reference, back)))

        number = itertools.count()
        for reference in references:
            push(reference, 0, None)
        while heap:
            length, _, chain = heapq.heappop(heap)
            atom = chain.reference.atom
            if atom not in found:
                found[atom] = chain
                for operand in self.operands(atom) if self.is_join(atom) else ():
                    for reference in operand:
                        push(reference, length + 1, chain)
        return found
