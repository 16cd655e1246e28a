"""What the checks of wiring look at, worked out once. Needs no torch."""

from __future__ import annotations

from functools import cached_property

from gradlineage.gradient import GradientReport, Walk
from gradlineage.lineage import Lineage

__all__ = ["Look"]


class Look:
    """One lineage, uncollapsed, and what reaches what in it."""

    def __init__(self, lineage: Lineage) -> None:
        self.graph = lineage._graph
        self.walk = Walk(self.graph)

    @cached_property
    def used(self) -> tuple[set[int], set[int]]:
        """The nodes that something returned was computed from, and the layer calls among them."""
        return self.walk.data(v.node for v in self.graph.outputs)

    @cached_property
    def deciding(self) -> tuple[set[int], set[int]]:
        """The nodes that something Python read was computed from, and the layer calls among them."""
        return self.walk.data(n for d in self.graph.decisions for n in d.nodes)

    @cached_property
    def whole(self) -> Lineage:
        """The lineage with nothing collapsed."""
        return Lineage(self.graph)

    @cached_property
    def modules(self) -> set[str]:
        return {path for path, _ in self.graph.modules}

    @cached_property
    def dead(self) -> set[str]:
        """Paths of layers none of whose calls had a part in what was returned."""
        alive = {self.graph.calls[c].path for c in self.used[1]}
        return {c.path for c in self.graph.calls if c.layer} - alive

    @cached_property
    def deciders(self) -> dict[str, set[str]]:
        """Paths of layers whose results reach no output and are read by Python, with the kinds of reading."""
        found: dict[str, set[str]] = {}
        for decision in self.graph.decisions:
            for call in self.walk.data(decision.nodes)[1]:
                found.setdefault(self.graph.calls[call].path, set()).add(decision.kind)
        return {path: kinds for path, kinds in found.items() if path in self.dead}

    @cached_property
    def gradient(self) -> GradientReport:
        return self.whole.gradient()

    @cached_property
    def strays(self) -> dict[int, list[int]]:
        """Nodes of leaves that take gradient and that no module registered, with the calls that use them."""
        nodes = self.graph.nodes
        found = {i for i, n in enumerate(nodes) if n.kind == "constant" and n.grad and not n.where and n.call < 0}
        users: dict[int, list[int]] = {}
        for node in nodes if found else ():
            for edge in node.parents:
                if node.call >= 0 and (edge if edge >= 0 else ~edge) in found:
                    users.setdefault(edge if edge >= 0 else ~edge, []).append(node.call)
        for index, record in enumerate(self.graph.calls if found else ()):
            for value in (*record.uses, *(v.node for v in record.inputs if record.layer)):
                if value in found:
                    users.setdefault(value, []).append(index)
        return users

    @cached_property
    def called(self) -> set[str]:
        return {call.path for call in self.graph.calls}
