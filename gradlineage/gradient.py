"""Which parameters gradient reaches, and what stops it on the way to the others. Needs no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from gradlineage.errors import LineageError, NameNotFound
from gradlineage.graph import Graph
from gradlineage.lineage import Break, Lineage

__all__ = ["GradientReport", "ParameterGradient", "Walk", "gradient_report"]

State = Literal["reached", "frozen", "never called", "unused", "dead", "cut", "no grad"]

_WORDS = {
    "reached": "gets a gradient",
    "frozen": "takes no gradient (requires_grad=False)",
    "never called": "in a module that was never called",
    "unused": "not used, though its module ran",
    "dead": "used, but nothing that was asked about depends on it",
    "cut": "the gradient stops on the way",
    "no grad": "nothing in this pass takes gradient: it ran without",
}


@dataclass(frozen=True, slots=True)
class ParameterGradient:
    """What becomes of one registered parameter in a backward from the outputs.

    Attributes:
        name: its first name, as of ``model.named_parameters()``.
        elements: how many numbers it has.
        state: ``reached``, or why not: ``frozen`` (``requires_grad`` is False), ``never called`` (its module was not), ``unused`` (its module ran
            without it), ``dead`` (what was computed from it reaches no output), ``cut`` (a break stops the gradient), ``no grad`` (the pass
            ran without gradient).
        breaks: for ``cut``, the breaks that stop it.
    """

    name: str
    elements: int
    state: State
    breaks: tuple[Break, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether ``parameter.grad`` is there after a backward from the outputs."""
        return self.state == "reached"

    @property
    def why(self) -> str:
        """The state in words."""
        stops = ", ".join(dict.fromkeys(f"{b.op} at {b.where}" if b.where else b.op for b in self.breaks))
        return f"{_WORDS[self.state]}{': ' if stops else ''}{stops}"


@dataclass(frozen=True, slots=True)
class GradientReport:
    """One `ParameterGradient` per registered parameter, in the order of ``model.named_parameters()``."""

    parameters: tuple[ParameterGradient, ...]

    @property
    def reached(self) -> tuple[str, ...]:
        """Names of the parameters that get a gradient."""
        return tuple(p.name for p in self.parameters if p.reached)

    @property
    def missing(self) -> tuple[ParameterGradient, ...]:
        """Those that take gradient and get none: what DDP calls unused parameters."""
        return tuple(p for p in self.parameters if not p.reached and p.state != "frozen")

    def __iter__(self) -> Iterator[ParameterGradient]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __getitem__(self, name: str) -> ParameterGradient:
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise NameNotFound(name, (p.name for p in self.parameters), "parameter")

    def __str__(self) -> str:
        frozen = sum(p.state == "frozen" for p in self.parameters)
        head = f"gradient reaches {len(self.reached):,} of {len(self.parameters) - frozen:,} parameters that take one"
        lines = [f"{head}{f', {frozen:,} are frozen' if frozen else ''}"]
        alike: defaultdict[str, list[str]] = defaultdict(list)
        for parameter in self.missing:
            alike[parameter.why].append(parameter.name)
        for why, names in alike.items():
            lines += [f"{why}:", *(f"    {name}" for name in names)]
        return "\n".join(lines)


def gradient_report(lineage: Lineage, output: int | str | None = None) -> GradientReport:
    """Follow the gradient from the outputs to every registered parameter.

    Args:
        lineage: of a pass of a whole model; collapsing changes nothing.
        output: the number or name of one output tensor, of ``['loss']`` also ``loss``; by default all of them together.

    Raises:
        LineageError: no such output, or a union of several passes.
    """
    graph = lineage._graph
    if lineage._view.is_union:
        raise LineageError("gradient() follows one pass; this is a union of several: ask the lineage of one of runs.paths")
    starts = _outputs(lineage, output)
    walk = Walk(graph)
    reached, used = walk.gradient(starts), walk.data(starts)[0]
    called = {call.path for call in graph.calls}
    borrowed = {name for name, _ in graph.bypassed}
    modules = {path for path, _ in graph.modules}
    flowing = any(node.grad for node in graph.nodes if node.kind != "parameter") or bool(lineage._stops)
    stops = [(stop, walk.gradient(record.before)) for record, stop in lineage._stops if used.intersection(record.after)] if flowing else []
    found = []
    for parameter in graph.registered:
        node = parameter.node
        breaks: tuple[Break, ...] = ()
        state: State
        if not parameter.trainable:
            state = "frozen"
        elif node in reached:
            state = "reached"
        elif node < 0:
            state = "unused" if _owner(parameter.name, modules) in called or parameter.name in borrowed else "never called"
        elif node not in used:
            state = "dead"
        else:
            breaks = tuple(stop for stop, below in stops if node in below)
            state = "cut" if flowing else "no grad"
        found.append(ParameterGradient(parameter.name, parameter.elements, state, breaks))
    return GradientReport(tuple(found))


def _owner(name: str, modules: set[str]) -> str:
    """The module that can be called and holds a parameter: not the list it lies in."""
    path = name.rpartition(".")[0]
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path


def _outputs(lineage: Lineage, output: int | str | None) -> list[int]:
    values = lineage._graph.outputs
    if output is None:
        return [v.node for v in values]
    chosen = [v.node for n, v in enumerate(values) if output in ((n,) if isinstance(output, int) else (v.name, v.name.strip("[]'\"")))]
    if not chosen:
        names = ", ".join(f"{n}{f' ({v.name})' if v.name else ''}" for n, v in enumerate(values)) or "none"
        raise LineageError(f"gradient(output={output!r}): there is no such output tensor; there are {names}")
    return chosen


class Walk:
    """Backwards from some nodes, through layers too."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def gradient(self, starts: Iterable[int]) -> set[int]:
        """All nodes that gradient from there reaches."""
        nodes, seen = self.graph.nodes, set[int]()
        stack = [s for s in starts if nodes[s].grad]
        while stack:
            index = stack.pop()
            if index not in seen:
                seen.add(index)
                node = nodes[index]
                stack += [p for p in (*node.parents, *node.gradient) if p >= 0 and nodes[p].grad]
        return seen

    def bare(self, starts: Iterable[int]) -> set[int]:
        """The parameters that something there was computed from otherwise than by a layer that used its own."""
        nodes = self.graph.nodes
        seen = self.data(starts)[0]
        return {p for i in seen for e in nodes[i].parents if nodes[p := e if e >= 0 else ~e].kind == "parameter"}

    def data(self, starts: Iterable[int]) -> tuple[set[int], set[int]]:
        """All nodes that something there was computed from, and the layer calls on the way."""
        nodes, calls, seen = self.graph.nodes, self.graph.calls, set[int]()
        entered: set[int] = set()
        stack = list(starts)
        while stack:
            index = stack.pop()
            if index in seen:
                continue
            seen.add(index)
            node = nodes[index]
            stack += [p if p >= 0 else ~p for p in node.parents]
            if node.call in entered or node.call < 0 or not calls[node.call].layer or node.kind == "input":
                continue
            entered.add(node.call)
            call = calls[node.call]
            stack += [v.node for v in (*call.inputs, *call.hidden) if v.used is not False]
            stack += call.uses
        return seen, entered
