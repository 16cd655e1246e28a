"""The answer: what fed each module call, as a frozen value with its queries.

A `Lineage` is a `Graph` seen through a choice of layers.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gradlineage.errors import LineageError, NameNotFound
from gradlineage.graph import BreakRecord, Graph, ValueRecord
from gradlineage.reach import Reach
from gradlineage.steps import Way
from gradlineage.values import Break, Call, Decision, Flow, Join, Link, Source
from gradlineage.view import View

if TYPE_CHECKING:
    import os

    from gradlineage.gradient import GradientReport

__all__ = ["Break", "Call", "Decision", "Flow", "Join", "Lineage", "Link", "Source"]


class Lineage:
    """What fed each layer in one recording. Immutable; made by `gradlineage.trace`, `Recorder.lineage`, `collapse` or `load`."""

    __slots__ = ("__dict__", "_collapsed", "_graph", "rolled")
    _graph: Graph
    _collapsed: frozenset[int]
    rolled: bool

    def __init__(self, graph: Graph, collapsed: Iterable[int] = (), rolled: bool = False) -> None:
        object.__setattr__(self, "_graph", graph)
        object.__setattr__(self, "_collapsed", frozenset(collapsed))
        object.__setattr__(self, "rolled", rolled)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Lineage is frozen: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Lineage is frozen: {name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lineage):
            return NotImplemented
        return self is other or (self._collapsed == other._collapsed and self.rolled == other.rolled and self._graph == other._graph)

    def __hash__(self) -> int:
        return hash((self._graph.model, len(self._graph.nodes), len(self._graph.calls), self._collapsed))

    def __reduce__(self) -> tuple[Any, ...]:
        return Lineage, (self._graph, self._collapsed, self.rolled)

    def __repr__(self) -> str:
        return f"<Lineage of {self.model}: {len(self.layers)} layer calls, {len(self.joins)} joins>"

    def __str__(self) -> str:
        return self.to_table()

    # -- what there is -------------------------------------------------------------------------------------------------------------

    @cached_property
    def _view(self) -> View:
        return View(self._graph, self._collapsed)

    @cached_property
    def _reach(self) -> Reach:
        return Reach(self._view)

    @property
    def model(self) -> str:
        """Class name of the model (``gen=Generator, critic=Critic`` where several were recorded)."""
        return self._graph.model

    @property
    def parameters(self) -> tuple[int, int]:
        """(elements, trainable elements) of the whole model, shared parameters once."""
        return self._graph.parameters, self._graph.trainable

    @property
    def runs(self) -> int:
        """How many passes this is the union of; 1 for a single one."""
        return self._graph.runs

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader should know of the recording: that it ran twice, that it broke off, that nothing came out."""
        return self._graph.notes

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """All calls, in the order in which they began; those within a collapsed container left out."""
        return tuple(Call(self, i) for i in self._view.shown)

    @cached_property
    def layers(self) -> tuple[Call, ...]:
        """The layer calls, in the order in which they began."""
        return tuple(c for c in self.calls if self._view.is_layer(c._index))

    @cached_property
    def joins(self) -> tuple[Join, ...]:
        """The joins that feed something, in running order."""
        return tuple(Join(self, i) for i in self._view.joins)

    @cached_property
    def inputs(self) -> tuple[Flow, ...]:
        """One `Flow` per input tensor of the root calls."""
        return tuple(flow for call in self.calls if call._record.parent < 0 for flow in call.inputs)

    @cached_property
    def outputs(self) -> tuple[Flow, ...]:
        """One `Flow` per output tensor: what the root call returned, or what ``rec.lineage(...)`` was asked about."""
        return self._flows(self._graph.outputs)

    def _flows(self, values: Sequence[ValueRecord]) -> tuple[Flow, ...]:
        return tuple(Flow(self, (v.node, -1), v.name, v.shape, v.dtype, v.device, v.used) for v in values)

    def _source(self, atom: int, way: Way, differentiable: bool) -> Source:
        node = self._graph.nodes[atom]
        facts: dict[str, Any] = {}
        kind = "call" if self._view.of_layer(atom) else "unknown" if node.kind == "empty" else node.kind
        if kind == "call":
            call, port = self._view.leaving(atom)
            facts = {"path": self._graph.calls[call].path, "nth": self._graph.calls[call].nth, "port": port}
        elif kind == "input":
            facts = {"index": node.port, "name": node.name}
        elif kind != "constant":
            facts = {"reason" if kind == "unknown" else "name": node.name}
        return Source(kind, self._view.label(atom), differentiable, **facts, _way=way)  # type: ignore[arg-type]

    @cached_property
    def bypassed(self) -> tuple[tuple[str, tuple[Call, ...]], ...]:
        """Parameters used though their module was never called (``F.linear(x, self.a.weight)``, ``a.forward(x)``), with the calls that did."""
        return tuple((name, tuple(Call(self, c) for c in calls if c >= 0)) for name, calls in self._graph.bypassed)

    @cached_property
    def breaks(self) -> tuple[Break, ...]:
        """The places where gradient stops, once each, in running order. None in a pass that ran without gradient as a whole."""
        return tuple(stop for _, stop in self._stops)

    @cached_property
    def _stops(self) -> tuple[tuple[BreakRecord, Break], ...]:
        found = []
        for record in self._graph.breaks:
            sources: dict[Source, None] = {}
            for node in record.before:
                found_here = self._view.sources(self._view.references(node))
                sources.update((self._source(*item), None) for item in found_here if item[2])
            after = [self._view.call_label(c) if c >= 0 else "output" for c in self._reach.readers_of(record.after)]
            if sources and after:  # what nobody uses starves nobody
                found.append((record, Break(record.op, record.where, tuple(sources), tuple(after))))
        return tuple(found)

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """The places where Python read a tensor's value, in running order: what decided which way the program went."""
        found = []
        for record in self._graph.decisions:
            shown = self._view.owner[record.call] if record.call >= 0 else -1
            call = shown if shown >= 0 else record.call
            sources: dict[Source, None] = {}
            for node, ops in zip(record.nodes, record.ops, strict=True):
                for atom, way, differentiable in self._view.sources(self._view.references(node)):
                    sources.setdefault(self._source(atom, Way((*way.names, *ops)) if ops else way, differentiable))
            value = float(record.value) if isinstance(record.value, str) else record.value
            found.append(Decision(record.kind, record.where, Call(self, call) if call >= 0 else None, value, tuple(sources), record.waits))
        return tuple(found)

    # -- looking things up ---------------------------------------------------------------------------------------------------------

    def __getitem__(self, key: str | tuple[str, int] | Source | Call | Join) -> Any:
        """``lineage["fc"]`` (its first call), ``lineage["fc", 1]``, ``lineage["fc[1]"]``, ``lineage["layer1.0:add"]``, ``lineage[source]``.

        Returns a `Call`, a `Join`, or for a source that is no call the `Source` itself, so that ``lineage[link.source]`` always answers.

        Raises:
            NameNotFound: no such call or join; the message has the nearest names.
        """
        if isinstance(key, Call | Join):
            return key
        if isinstance(key, Source):
            return self[key.path, key.nth] if key.path is not None and key.nth is not None else key
        if not isinstance(key, str) and not (isinstance(key, tuple) and len(key) == 2):
            raise LineageError(f"lineage[{key!r}]: expected a label or path, (path, nth), or a Source")
        found = self._view.find(key)
        if found is None:
            raise NameNotFound(key if isinstance(key, str) else f"{key[0]}[{key[1]}]", self._names())
        return Join(self, found[1]) if found[0] == "join" else Call(self, found[1])

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str | tuple) and self._view.find(key) is not None

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def _names(self) -> list[str]:
        return [*(c.label for c in self.calls), *(j.label for j in self.joins)]

    def find(self, *, type: str | None = None, op: str | None = None, pattern: str | None = None) -> tuple[Any, ...]:
        """Calls by class name and joins by operation, both restricted to paths that match a pattern.

        ``type`` and ``op`` may be patterns too. ``find(type="Concat")`` gives calls, ``find(op="cat")`` joins, ``find(pattern="layer*.conv?")``
        both. A ``*`` also crosses dots.
        """
        for name, value in (("type", type), ("op", op), ("pattern", pattern)):
            if value is not None and not isinstance(value, str):
                raise LineageError(f"find({name}={value!r}): expected text, such as find(type='Conv2d') or find(op='cat')")
        calls = [c for c in self.calls if type is None or fnmatch.fnmatchcase(c.type, type)] if type is not None or op is None else []
        joins = [j for j in self.joins if op is None or fnmatch.fnmatchcase(j.op, op)] if op is not None or type is None else []
        if pattern is not None:
            calls = [c for c in calls if fnmatch.fnmatchcase(c.path, pattern) or c.label == pattern]
            joins = [j for j in joins if fnmatch.fnmatchcase(j.label, pattern)]
        return (*calls, *joins)

    def _index(self, item: str | tuple[str, int] | Source | Call | Join) -> tuple[str, int]:
        if isinstance(item, str | tuple | Source):
            item = self[item]
        if isinstance(item, Call):
            return "call", item._index
        if isinstance(item, Join):
            return "join", item._index
        raise LineageError(f"{item!r} is neither a call nor a join; give a label, a path or (path, nth)")

    def predecessors(self, item: str | tuple[str, int] | Source | Call | Join) -> tuple[Call, ...]:
        """The layer calls that feed it directly, seen through joins, in operand order."""
        return self._layers(self._view.sources(self._view.incoming(*self._index(item))))

    def successors(self, item: str | tuple[str, int] | Source | Call | Join) -> tuple[Call, ...]:
        """The layer calls that it feeds directly, seen through joins, in running order."""
        return tuple(Call(self, i) for i in self._reach.successors(*self._index(item)))

    def ancestors(self, item: str | tuple[str, int] | Source | Call | Join) -> tuple[Call, ...]:
        """All layer calls from which something reaches it, in running order."""
        return self._picked(self._reach.upstream(*self._index(item)))

    def descendants(self, item: str | tuple[str, int] | Source | Call | Join) -> tuple[Call, ...]:
        """All layer calls that something of it reaches, in running order."""
        return self._picked(self._reach.downstream(*self._index(item)))

    def between(
        self, first: str | tuple[str, int] | Source | Call | Join, last: str | tuple[str, int] | Source | Call | Join
    ) -> tuple[Call, ...]:
        """The layer calls on some way from ``first`` to ``last``, both left out, in running order."""
        return self._picked(self._reach.downstream(*self._index(first)) & self._reach.upstream(*self._index(last)))

    def _picked(self, items: set[tuple[str, int]]) -> tuple[Call, ...]:
        return tuple(Call(self, i) for kind, i in sorted(items) if kind == "call")

    def _layers(self, sources: Iterable[tuple[int, Way, bool]]) -> tuple[Call, ...]:
        found = {self._view.leaving(atom)[0]: None for atom, _, _ in sources if self._view.of_layer(atom)}
        return tuple(Call(self, i) for i in found)

    def expect(self, wiring: Mapping[str, Any]) -> None:
        """Hold the wiring against what is expected of it; the expressions are explained in `gradlineage.expect`.

        ``lineage.expect({"conc": ["relu(bn1)", "relu(conv2)"], "fc": "avgpool", "head": "add(a, relu(b))"})``

        Raises:
            WiringError: an AssertionError that has what was found beside what was expected.
        """
        from gradlineage.expect import expect

        expect(self, wiring)

    def explain(
        self, first: str | tuple[str, int] | Source | Call | Join, last: str | tuple[str, int] | Source | Call | Join | None = None
    ) -> str:
        """In a few lines what feeds a call or join and what it feeds; with a second name, the shortest way from the first to that."""
        from gradlineage.explain import explain

        return explain(self, first, last)

    def gradient(self, output: int | str | None = None) -> GradientReport:
        """Which registered parameters gradient reaches from the outputs (or from one, by number or name), and what stops it elsewhere."""
        from gradlineage.gradient import gradient_report

        return gradient_report(self, output)

    # -- other views of the same recording -----------------------------------------------------------------------------------------

    def collapse(self, *patterns: str, depth: int | None = None) -> Lineage:
        """The same recording with containers as layers; no second forward.

        Args:
            patterns: paths, with ``*`` (which crosses dots) and ``?``; every container call whose path matches becomes a layer.
            depth: containers this many calls below the root become layers; ``depth=1`` keeps the root's own children.

        Collapsing twice is collapsing once to the coarser. See `gradlineage.collapse`.
        """
        from gradlineage.collapse import collapse

        return collapse(self, *patterns, depth=depth)

    def roll(self) -> Lineage:
        """The same with loops rolled up in every view: ``cell ×500``, ``hx ← cell[previous]``.

        A loop is an exactly periodic run of calls within one container call, three times at least. What is irregular stays as it is. Queries
        are the same as before: calls keep their numbers. See `gradlineage.views.loops`.
        """
        return Lineage(self._graph, self._collapsed, True)

    def unroll(self) -> Lineage:
        """What `roll` was called on."""
        return Lineage(self._graph, self._collapsed)

    def to_table(self, **options: Any) -> str:
        """The table as text. Options as in `gradlineage.views.table.to_table`."""
        from gradlineage.views.table import to_table

        return to_table(self, **options)

    def to_dot(self, **options: Any) -> str:
        """A picture in Graphviz's DOT language. Options as in `gradlineage.views.dot.to_dot`: ``shapes``, ``decisions``, ``before``."""
        from gradlineage.views.dot import to_dot

        return to_dot(self, **options)

    def to_svg(self, **options: Any) -> str:
        """A picture as SVG text, laid out by Graphviz. Options as of `to_dot`."""
        from gradlineage.views.dot import to_svg

        return to_svg(self, **options)

    def to_png(self, **options: Any) -> bytes:
        """A picture as the bytes of a PNG file, laid out by Graphviz. Options as of `to_dot`."""
        from gradlineage.views.dot import to_png

        return to_png(self, **options)

    def to_wiring(self) -> str:
        """The wiring alone, a line each, for files that are compared: see the pytest fixture ``lineage_snapshot``."""
        from gradlineage.views.wiring import to_wiring

        return to_wiring(self)

    def to_mermaid(self, **options: Any) -> str:
        """A flowchart for READMEs, collapsed to what Mermaid can show. Options as in `gradlineage.views.mermaid.to_mermaid`."""
        from gradlineage.views.mermaid import to_mermaid

        return to_mermaid(self, **options)

    def to_networkx(self) -> Any:
        """A ``networkx.MultiDiGraph``; its attributes are explained in `gradlineage.views.network`."""
        from gradlineage.views.network import to_networkx

        return to_networkx(self)

    def to_html(self, **options: Any) -> str:
        """One page for a browser, nothing loaded from elsewhere. Options as of `gradlineage.views.page.to_html`."""
        from gradlineage.views.page import to_html

        return to_html(self, **options)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """How it shows in a notebook."""
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        from gradlineage.views.notebook import to_fragment

        return to_fragment(self)

    def to_json(self) -> str:
        """The whole lineage as JSON, schema ``gradlineage/1``; `from_json` gives an equal one back."""
        from gradlineage.exchange import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Lineage:
        """Read what `to_json` wrote.

        Raises:
            FormatError: with the place of the fault.
        """
        from gradlineage.exchange import from_json

        return from_json(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file: to a temporary one first, then moved into place."""
        from gradlineage.exchange import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Lineage:
        """Read a file that `save` wrote. Needs no torch."""
        from gradlineage.exchange import load

        return load(path)
