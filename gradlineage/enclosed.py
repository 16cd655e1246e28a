"""What goes on within containers: which of their arguments were used, and what came in by another door where they are collapsed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradlineage.view import View

__all__ = ["Enclosed"]

_MADE = frozenset(("op", "call", "memory"))


class Enclosed:
    """Questions about the inside of container calls, worked out when first asked."""

    def __init__(self, view: View) -> None:
        self.view, self.graph = view, view.graph
        self._used: dict[int, tuple[set[int], bool]] = {}

    @cached_property
    def hidden(self) -> dict[int, tuple[int, ...]]:
        """Per collapsed container, the nodes from outside that were read within it and are none of its arguments, nor leaves of its own."""
        owner, nodes = self.view.owner, self.graph.nodes
        found: defaultdict[int, dict[int, None]] = defaultdict(dict)
        given = {c: {v.node for v in self.graph.calls[c].inputs} for c in self.view.collapsed}
        for reader, node in self._reads(borders=False):
            container = owner[reader] if reader >= 0 else -1
            if container not in given or self.view.within(node) == container or node in given[container]:
                continue
            kind, name, path = nodes[node].kind, nodes[node].name, self.graph.calls[container].path
            if kind in ("constant", "empty") or (kind in ("parameter", "buffer") and (not path or name.startswith(f"{path}."))):
                continue
            found[container].setdefault(node)
        return {container: tuple(entered) for container, entered in found.items()}

    def used(self, container: int, node: int) -> bool | None:
        """Whether what a container call gave out depends on an argument; None where something within it was not seen."""
        found = self._used.get(container)
        if found is None:
            found = self._used[container] = self._reached(container)
        return True if node in found[0] else False if found[1] else None

    def _reads(self, borders: bool = True) -> Iterator[tuple[int, int]]:
        """(call, node) for every node that something in a call reads, -1 for what is outside of all calls. ``borders``: what it returns, too."""
        for index, call in enumerate(self.graph.calls):
            for value in (*call.inputs, *call.hidden):
                yield index, value.node
        for made in self.graph.nodes:
            if made.kind in _MADE and (borders or made.kind != "call"):
                for edge in made.parents:
                    yield made.call, edge if edge >= 0 else ~edge
        for value in self.graph.outputs:
            yield -1, value.node

    @cached_property
    def _readers(self) -> dict[int, tuple[int, int]]:
        """Per node, the first and the last call in which it is read."""
        found: dict[int, tuple[int, int]] = {}
        for call, node in self._reads():
            first, last = found.get(node, (call, call))
            found[node] = min(first, call), max(last, call)
        return found

    @cached_property
    def _last(self) -> list[int]:
        """Per call, the last one that began within it. Calls are numbered as they begin, so those in between are its own."""
        found = list(range(len(self.graph.calls)))
        for index in range(len(found) - 1, -1, -1):
            parent = self.graph.calls[index].parent
            if parent >= 0:
                found[parent] = max(found[parent], found[index])
        return found

    @cached_property
    def _made(self) -> dict[int, list[int]]:
        """Per call, the nodes made in it."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(self.graph.nodes):
            if node.kind in _MADE:
                found[node.call].append(index)
        return found

    def _reached(self, container: int) -> tuple[set[int], bool]:
        """The nodes from outside on which what left a container depends, and whether all of its inside was seen."""
        calls, nodes, last = self.graph.calls, self.graph.nodes, self._last[container]
        inner = [n for call in range(container, last + 1) for n in self._made.get(call, ())]
        leaving = [n for n in inner if n in self._readers and not container <= self._readers[n][0] <= self._readers[n][1] <= last]
        stack = [v.node for v in calls[container].outputs] + leaving or inner
        reached: set[int] = set()
        seen: set[int] = set()
        complete = True
        while stack:
            index = stack.pop()
            if index in seen:
                continue
            seen.add(index)
            node = nodes[index]
            if node.kind not in _MADE or not container <= node.call <= last:
                reached.add(index)
                complete = complete and node.kind != "unknown"
            elif calls[node.call].layer:
                taken = calls[node.call].inputs
                complete = complete and all(v.used is not None for v in taken)
                stack += [v.node for v in (*taken, *calls[node.call].hidden) if v.used is not False]
            else:
                stack += [p if p >= 0 else ~p for p in node.parents]
        return reached, complete
