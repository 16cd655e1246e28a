"""What reaches what in a view: consumers of a value, neighbours, ancestors and descendants of calls and joins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from gradlineage.view import View
from gradlineage.walk import OPERATION, PASS

__all__ = ["Item", "Reach"]

Item = tuple[str, int]
"""``("call", number)`` or ``("join", number)``."""


class Reach:
    """Questions about a `View` that need its edges in both directions; worked out when first asked."""

    def __init__(self, view: View) -> None:
        self.view = view

    def readers_of(self, nodes: Iterable[int]) -> list[int]:
        """The layer calls that take in a value computed from one of these nodes and from no other call in between; -1 for the output."""
        children, flows = self._uses
        seen = set(nodes)
        stack = list(seen)
        found: set[int] = set()
        while stack:
            node = stack.pop()
            found.update(flows.get(node, ()))
            for child in children.get(node, ()):
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
        return sorted(found, key=lambda c: (c < 0, c))

    @cached_property
    def _uses(self) -> tuple[dict[int, list[int]], dict[int, set[int]]]:
        """Per node, the nodes computed from it in view, and the layer calls (-1: the output) that take it in."""
        children: defaultdict[int, list[int]] = defaultdict(list)
        for index, parents in enumerate(self.view.ways.parents):
            if self.view.ways.roles[index] in (OPERATION, PASS):
                for edge in parents:
                    children[edge if edge >= 0 else ~edge].append(index)
        flows: defaultdict[int, set[int]] = defaultdict(set)
        for index in self.view.shown:
            if self.view.is_layer(index):
                for node in (*(v.node for v in self.view.graph.calls[index].inputs), *self.view.hidden(index)):
                    flows[node].add(index)
        for value in self.view.graph.outputs:
            flows[value.node].add(-1)
        return children, flows

    @cached_property
    def _edges(self) -> tuple[dict[Item, set[Item]], dict[Item, set[Item]]]:
        up: defaultdict[Item, set[Item]] = defaultdict(set)
        down: defaultdict[Item, set[Item]] = defaultdict(set)
        items = [("join", j) for j in self.view.joins] + [("call", c) for c in self.view.shown]
        for item in items:
            for reference in self.view.incoming(*item):
                if self.view.is_join(reference.atom) or self.view.of_layer(reference.atom):
                    source = (
                        ("join", reference.atom) if self.view.is_join(reference.atom) else ("call", self.view.leaving(reference.atom)[0])
                    )
                    up[item].add(source)
                    down[source].add(item)
        return up, down

    def successors(self, kind: str, index: int) -> list[int]:
        down = self._edges[1]
        found: set[int] = set()
        seen = {(kind, index)}
        stack = [(kind, index)]
        while stack:
            for item in down.get(stack.pop(), ()):
                if item in seen:
                    continue
                seen.add(item)
                if item[0] == "join":
                    stack.append(item)
                elif self.view.is_layer(item[1]):
                    found.add(item[1])
        return sorted(found)

    def _reach(self, edges: dict[Item, set[Item]], start: Item) -> set[Item]:
        seen: set[Item] = set()
        stack = [start]
        while stack:
            for item in edges.get(stack.pop(), ()):
                if item not in seen and (item[0] == "join" or self.view.is_layer(item[1])):
                    seen.add(item)
                    stack.append(item)
        return seen

    def upstream(self, kind: str, index: int) -> set[Item]:
        return self._reach(self._edges[0], (kind, index))

    def downstream(self, kind: str, index: int) -> set[Item]:
        return self._reach(self._edges[1], (kind, index))
