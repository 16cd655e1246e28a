"""Compress a graph of operations into links and joins.

The walker is handed what it walks: a *role* and a tuple of *parents* for every node, parents before children. It knows no
tensors, so it runs on recordings, on saved files and on fake graphs in tests alike.

Roles
-----
``OPERATION``  computes its value from its parents.
``PASS``       has its one parent's value (the border of a module that is not a layer in this view).
``DATA``       an origin: a layer call's output, a model input, something unknown. The walk ends there.
``LEAF``       a parameter or buffer: an origin, but one that never makes a join.
``CONSTANT``   as a leaf, and named only where nothing else feeds the tensor.
``EMPTY``      as a constant, and named only where no constant does: memory before anyone wrote to it.

An operation in which ways from two or more different origins meet is a *join* and becomes an origin itself; that is what keeps the
answer small: every node is visited once, also where 2**60 ways run between two layers.

A parent is written ``p`` where the gradient flows along the edge and ``~p`` where it does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["CONSTANT", "DATA", "EMPTY", "LEAF", "OPERATION", "PASS", "Ways"]

OPERATION, PASS, DATA, LEAF, CONSTANT, EMPTY = range(6)


class Ways:
    """The compressed graph.

    Args:
        roles: one role per node.
        parents: one tuple of (possibly inverted) node numbers per node, each smaller than the node's own number.
        grads: per node, whether it can take gradient at all; read for origins only. All can where it is left out.

    Attributes:
        origin: per node the one data origin all its data ways lead to, itself for origins and joins, -1 where only leaves feed it.
        joins: the operations that are joins, in running order.
        visits: edges looked at, for tests that count work instead of seconds.
    """

    __slots__ = ("_depth", "_diff", "_fork", "_forkdiff", "_toward", "joins", "origin", "parents", "roles", "visits")

    def __init__(self, roles: Sequence[int], parents: Sequence[tuple[int, ...]], grads: Sequence[bool] | None = None) -> None:
        self.roles, self.parents = roles, parents
        count = len(roles)
        self.origin = [-1] * count
        self.joins: list[int] = []
        self.visits = 0
        self._toward = [-1] * count  # the parent on the shortest way to the origin
        self._depth = [0] * count  # operations on that way
        self._diff = [True] * count  # whether gradient flows to the origin on some way
        self._fork = list(range(count))  # the nearest node below in which several kinds of origin come together
        self._forkdiff = [True] * count
        for node in range(count):
            if roles[node] >= DATA:
                self._diff[node] = self._forkdiff[node] = grads is None or grads[node]
                if roles[node] == DATA:
                    self.origin[node] = node
            elif roles[node] < DATA and parents[node]:
                self._meet(node)

    def _meet(self, node: int) -> None:
        parents = self.parents[node]
        self.visits += len(parents)
        origin, depth, diff, fork = self.origin, self._depth, self._diff, self._fork
        if len(parents) == 1:  # nearly all nodes: nothing meets here
            edge = parents[0]
            parent = edge if edge >= 0 else ~edge
            origin[node] = origin[parent]
            self._toward[node] = parent
            depth[node] = depth[parent] + (self.roles[node] == OPERATION)
            diff[node] = edge >= 0 and diff[parent]
            fork[node] = fork[parent]
            self._forkdiff[node] = edge >= 0 and self._forkdiff[parent]
            return
        edges = self.informative(node)
        origins = {origin[e if e >= 0 else ~e] for e in edges}
        origins.discard(-1)
        if len(origins) > 1:
            self.joins.append(node)
            origin[node] = node
            return
        step = self.roles[node] == OPERATION
        if origins:
            (origin[node],) = origins
            best = -1
            flows = False
            for edge in edges:
                parent = edge if edge >= 0 else ~edge
                if origin[parent] < 0:
                    continue
                if best < 0 or depth[parent] < depth[best]:
                    best = parent
                flows = flows or (edge >= 0 and diff[parent])
            self._toward[node], depth[node], diff[node] = best, depth[best] + step, flows
        forks = {fork[e if e >= 0 else ~e] for e in edges}
        if len(forks) == 1:
            (fork[node],) = forks
            self._forkdiff[node] = any(e >= 0 and self._forkdiff[e] for e in edges)

    def informative(self, node: int) -> tuple[int, ...]:
        """The node's parents without constants, or the first constant where there is nothing else."""
        parents = self.parents[node]
        ends = [self.roles[self._fork[e if e >= 0 else ~e]] for e in parents]
        if min(ends) >= CONSTANT:
            return (parents[ends.index(min(ends))],)
        return tuple(e for e, end in zip(parents, ends, strict=True) if end < CONSTANT)

    def atom(self, node: int) -> bool:
        """Whether ways end at this node: an origin, a leaf or a join."""
        return self.roles[node] >= DATA or self.origin[node] == node or not self.parents[node]

    def elements(self, node: int) -> list[tuple[int, bool]]:
        """What feeds ``node``, one step back: (origin, join or leaf; whether gradient flows), each once, in operand order."""
        first = self._fork[node]
        if self.atom(first):
            return [(first, self._forkdiff[node])]
        flowing = self._reached(first) if self._forkdiff[node] else frozenset()
        found: list[tuple[int, bool]] = []
        seen: set[int] = set()
        stack = [first]
        while stack:
            here = stack.pop()
            if here in seen:
                continue
            seen.add(here)
            if self.atom(here):
                found.append((here, here in flowing))
                continue
            edges = self.informative(here)
            self.visits += len(edges)
            stack.extend(self._fork[e if e >= 0 else ~e] for e in reversed(edges))
        return found

    def _reached(self, first: int) -> frozenset[int]:
        """The forks and atoms to which gradient flows from ``first``."""
        seen = {first}
        stack = [first]
        while stack:
            here = stack.pop()
            if self.atom(here):
                continue
            for edge in self.informative(here):
                if edge >= 0 and self._forkdiff[edge] and self._fork[edge] not in seen:
                    seen.add(self._fork[edge])
                    stack.append(self._fork[edge])
        return frozenset(seen)

    def length(self, node: int, atom: int) -> int:
        """How many operations lie on the shortest way from ``atom`` to ``node``."""
        return self._depth[node] if self.origin[node] == atom else len(self.way(node, atom))

    def way(self, node: int, atom: int) -> tuple[int, ...]:
        """The operations on the shortest way from ``atom`` to ``node``, in running order; ``node``'s own among them, ``atom``'s not."""
        steps: list[int] = []
        if self.origin[node] == atom:
            while node != atom:
                if self.roles[node] == OPERATION:
                    steps.append(node)
                node = self._toward[node]
            return tuple(reversed(steps))
        came: dict[int, int] = {}  # leaves lie aside of the recorded ways: look for the nearest use, borders of modules at no cost
        queue: deque[tuple[int, int]] = deque([(node, -1)])
        while queue:
            here, above = queue.popleft()
            if here in came:
                continue
            came[here] = above
            if here == atom:
                while came[here] >= 0:
                    here = came[here]
                    if self.roles[here] == OPERATION:
                        steps.append(here)
                return tuple(steps)
            if self.atom(here):
                continue
            near = self.roles[here] == PASS
            for edge in reversed(self.parents[here]) if near else self.parents[here]:
                below = (edge if edge >= 0 else ~edge), here
                if near:
                    queue.appendleft(below)
                else:
                    queue.append(below)
        return ()
