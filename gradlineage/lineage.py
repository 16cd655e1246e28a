"""The answer: frozen values that say, for every module call, where each of its input tensors came from.

A `Lineage` is a `Graph` seen through a choice of layers. `Call`, `Join`, `Flow` and `Link` are small handles into it: they refer to each
other by number, so that a graph of any size can be compared, hashed, pickled and printed without recursion.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from gradlineage.errors import LineageError, NameNotFound
from gradlineage.graph import CallRecord, Graph, Node, ValueRecord
from gradlineage.view import Reference, View

if TYPE_CHECKING:
    import os

__all__ = ["Break", "Call", "Flow", "Join", "Lineage", "Link", "Source"]

SourceKind = Literal["call", "input", "parameter", "buffer", "constant", "unknown"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor came from: a layer call, or a place where the search ends.

    Attributes:
        kind: ``call``, ``input``, ``parameter``, ``buffer``, ``constant`` or ``unknown``.
        label: as the table prints it: ``lstm[0][1]``, ``input:x``, ``fc.weight``, ``constant:zeros``, ``unknown``.
        ops: the operations on the shortest way, in running order, joins' own included.
        differentiable: whether gradient flows back along some way.
        path, nth, port: for calls; ``port`` is None where the tensor left by a side door (an attribute, an in-place write).
        index: for inputs, the position among the root call's input tensors.
        name: for inputs, parameters and buffers.
        reason: for unknowns, why, and what to do about it.
    """

    kind: SourceKind
    label: str
    ops: tuple[str, ...] = ()
    differentiable: bool = True
    path: str | None = None
    nth: int | None = None
    port: int | None = None
    index: int | None = None
    name: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Break:
    """A way on which the gradient stops.

    Attributes:
        op: what stopped it: ``detach``, ``argmax``, ``no_grad``, ``long`` ...
        where: ``file:line`` of it; of the first operation in a ``no_grad`` region.
        before: the sources that are cut off.
        after: labels of the layer calls that are starved on this way, and ``output`` if the result is.
    """

    op: str
    where: str
    before: tuple[Source, ...]
    after: tuple[str, ...]


class _Handle:
    """A number in a lineage. Equal where both are the same; never carries the values themselves."""

    __slots__ = ("_index", "_lineage")
    _lineage: Lineage
    _index: int

    def __init__(self, lineage: Lineage, index: int) -> None:
        object.__setattr__(self, "_lineage", lineage)
        object.__setattr__(self, "_index", index)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._index == other._index and self._lineage == other._lineage

    def __hash__(self) -> int:
        return hash((type(self), self._index))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._lineage, self._index)


class Call(_Handle):
    """One execution of a module. A *layer* call ran no other module; a *container* call did."""

    __slots__ = ()

    @property
    def _record(self) -> CallRecord:
        return self._lineage._graph.calls[self._index]

    path = property(lambda self: self._record.path, doc="Dotted path of the module in the model, ``''`` for the root.")
    nth = property(lambda self: self._record.nth, doc="How many calls of this path began before it.")
    type = property(lambda self: self._record.type, doc="Class name of the module.")
    where = property(lambda self: self._record.where, doc="``file:line`` of the first frame outside torch that made the call.")
    registered = property(lambda self: self._record.registered, doc="Whether the module is one of the model's own.")
    failed = property(lambda self: self._record.failed, doc="Whether the call raised.")

    @property
    def label(self) -> str:
        """``path``, with ``[nth]`` where the path was called more than once; the class name for the root."""
        return self._lineage._view.call_label(self._index)

    @property
    def kind(self) -> Literal["layer", "container"]:
        return "layer" if self._lineage._view.is_layer(self._index) else "container"

    @property
    def parent(self) -> Call | None:
        parent = self._record.parent
        return None if parent < 0 else Call(self._lineage, parent)

    @property
    def parameters(self) -> tuple[int, int]:
        """(elements, trainable elements) of the parameters that the module owns; for a collapsed container, of all within."""
        return self._lineage._view.parameters(self._index)

    @property
    def inputs(self) -> tuple[Flow, ...]:
        """One `Flow` per tensor its forward received: positional, then keywords as passed, nested containers in order."""
        return self._lineage._flows(self._record.inputs)

    @property
    def outputs(self) -> tuple[Flow, ...]:
        """One `Flow` per tensor it returned. Their sources are the call itself if it is a layer, else what it returned."""
        return self._lineage._flows(self._record.outputs)

    @property
    def hidden(self) -> tuple[Flow, ...]:
        """What entered a layer by another door than its arguments: an attribute, generated weights, another module's parameters."""
        return self._lineage._flows(self._record.hidden)

    def __repr__(self) -> str:
        return f"<Call {self.label} ({self.type}) at {self.where or 'unknown place'}>"


_FLOW_FACTS = ("name", "shape", "dtype", "device", "used")


class Flow:
    """One tensor at the border of a call or join, and what feeds it.

    ``used`` is False for an argument on which the call's outputs do not depend, None where that is not known. ``shape`` is a tuple of sizes (a
    ragged size of a nested tensor is a string), ``dtype`` and ``device`` are torch's names for them; all three are empty for operands of joins
    and hidden flows, which are not noted.
    """

    __slots__ = ("_lineage", "_references", "device", "dtype", "name", "shape", "used")
    _lineage: Lineage
    _references: tuple[Reference, ...]
    used: bool | None
    name: str
    shape: tuple[int | str, ...] | None
    dtype: str
    device: str

    def __init__(self, lineage: Lineage, references: tuple[Reference, ...], *facts: Any) -> None:
        for key, value in zip(("_lineage", "_references", *_FLOW_FACTS), (lineage, references, *facts), strict=True):
            object.__setattr__(self, key, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Flow is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Flow):
            return NotImplemented
        same = all(getattr(self, key) == getattr(other, key) for key in ("_references", *_FLOW_FACTS))
        return same and self._lineage == other._lineage

    def __hash__(self) -> int:
        return hash((self.name, self.shape, self.dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        return Flow, (self._lineage, self._references, *(getattr(self, key) for key in _FLOW_FACTS))

    @property
    def links(self) -> tuple[Link, ...]:
        """One step back: layer calls, leaves and joins."""
        return tuple(Link(self._lineage, r) for r in self._references)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The nearest layer calls and leaves, seen through joins, in operand order."""
        return tuple(self._lineage._source(atom, ops, diff) for atom, ops, diff in self._lineage._view.sources(self._references))

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape)) if self.shape is not None else "?"
        return f"<Flow {self.name or 'tensor'} {size} from {', '.join(link.label for link in self.links) or '-'}>"


@dataclass(frozen=True, slots=True)
class Link:
    """One step of the graph."""

    _lineage: Lineage
    _reference: Reference

    @property
    def source(self) -> Source | Join:
        """A `Source`, or the `Join` at which the ways met."""
        atom = self._reference.atom
        if self._lineage._view.is_join(atom):
            return Join(self._lineage, atom)
        return self._lineage._source(atom, self.ops, self.differentiable)

    @property
    def label(self) -> str:
        return self._lineage._view.label(self._reference.atom)

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations on the way, in running order, the join's own left out."""
        return self._lineage._view.ops(self._reference)

    @property
    def differentiable(self) -> bool:
        """Whether gradient flows back along it."""
        return self._reference.differentiable

    def __repr__(self) -> str:
        return f"<Link {' <- '.join((*reversed(self.ops), self.label))}>"


class Join(_Handle):
    """An operation in which data ways from two or more different origins meet: an ``add``, a ``cat``, a ``matmul``."""

    __slots__ = ()

    @property
    def _node(self) -> Node:
        return self._lineage._graph.nodes[self._index]

    @property
    def label(self) -> str:
        """``layer1.0:add``; ``:cat`` at the root; ``cell[3]:add[1]`` for the second one within the fourth call of ``cell``."""
        return self._lineage._view.label(self._index)

    op = property(lambda self: self._node.name, doc="Name of the operation.")
    where = property(lambda self: self._node.where, doc="``file:line`` at which it ran.")

    @property
    def container(self) -> Call | None:
        """The container call in which it ran; None outside of all calls."""
        return None if self._node.call < 0 else Call(self._lineage, self._node.call)

    @property
    def inputs(self) -> tuple[Flow, ...]:
        """One `Flow` per tensor operand, in order; those of the joins folded into it included."""
        return tuple(Flow(self._lineage, r, f"[{i}]", None, "", "", True) for i, r in enumerate(self._lineage._view.operands(self._index)))

    @property
    def outputs(self) -> tuple[Flow, ...]:
        node = self._node
        return (Flow(self._lineage, (Reference(self._index, True, self._index, None),), "", node.shape, node.dtype, node.device, True),)

    def __repr__(self) -> str:
        return f"<Join {self.label} at {self.where or 'unknown place'}>"


class Lineage:
    """What fed each layer in one recording. Immutable; made by `gradlineage.trace`, `Recorder.lineage`, `collapse` or `load`."""

    __slots__ = ("__dict__", "_collapsed", "_graph")
    _graph: Graph
    _collapsed: frozenset[int]

    def __init__(self, graph: Graph, collapsed: Iterable[int] = ()) -> None:
        object.__setattr__(self, "_graph", graph)
        object.__setattr__(self, "_collapsed", frozenset(collapsed))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Lineage is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lineage):
            return NotImplemented
        return self is other or (self._collapsed == other._collapsed and self._graph == other._graph)

    def __hash__(self) -> int:
        return hash((self._graph.model, len(self._graph.nodes), len(self._graph.calls), self._collapsed))

    def __reduce__(self) -> tuple[Any, ...]:
        return Lineage, (self._graph, self._collapsed)

    def __repr__(self) -> str:
        return f"<Lineage of {self.model}: {len(self.layers)} layer calls, {len(self.joins)} joins>"

    def __str__(self) -> str:
        return self.to_table()

    # -- what there is -------------------------------------------------------------------------------------------------------------

    @cached_property
    def _view(self) -> View:
        return View(self._graph, self._collapsed)

    @property
    def model(self) -> str:
        """Class name of the model (``gen=Generator, critic=Critic`` where several were recorded)."""
        return self._graph.model

    @property
    def parameters(self) -> tuple[int, int]:
        """(elements, trainable elements) of the whole model, shared parameters once."""
        return self._graph.parameters, self._graph.trainable

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
        return tuple(Flow(self, self._view.references(v.node), v.name, v.shape, v.dtype, v.device, v.used) for v in values)

    def _source(self, atom: int, ops: tuple[str, ...], differentiable: bool) -> Source:
        node, label = self._graph.nodes[atom], self._view.label(atom)
        kind = node.kind if node.kind != "op" else "call"
        if kind == "call":
            call, port = self._view.leaving(atom)
            record = self._graph.calls[call]
            return Source("call", label, ops, differentiable, path=record.path, nth=record.nth, port=port)
        if kind == "input":
            return Source("input", label, ops, differentiable, index=node.port, name=node.name)
        if kind == "parameter":
            return Source("parameter", label, ops, differentiable, name=node.name)
        if kind == "buffer":
            return Source("buffer", label, ops, differentiable, name=node.name)
        if kind == "constant":
            return Source("constant", label, ops, differentiable)
        return Source("unknown", label, ops, differentiable, reason=node.name)

    @cached_property
    def bypassed(self) -> tuple[tuple[str, tuple[Call, ...]], ...]:
        """Parameters used though their module was never called (``F.linear(x, self.a.weight)``, ``a.forward(x)``), with the calls that did."""
        return tuple((name, tuple(Call(self, c) for c in calls if c >= 0)) for name, calls in self._graph.bypassed)

    @cached_property
    def breaks(self) -> tuple[Break, ...]:
        """The places where gradient stops, once each, in running order. None in a pass that ran without gradient as a whole."""
        found = []
        for record in self._graph.breaks:
            sources: dict[Source, None] = {}
            for node in record.before:
                for atom, ops, diff in self._view.sources(self._view.references(node)):
                    if diff:
                        sources[self._source(atom, ops, diff)] = None
            after = [self._view.call_label(c) if c >= 0 else "output" for c in self._view.readers_of(record.after)]
            found.append(Break(record.op, record.where, tuple(sources), tuple(after)))
        return tuple(found)

    # -- looking things up ---------------------------------------------------------------------------------------------------------

    def __getitem__(self, key: str | tuple[str, int] | Source) -> Any:
        """``lineage["fc"]`` (its first call), ``lineage["fc", 1]``, ``lineage["fc[1]"]``, ``lineage["layer1.0:add"]``, ``lineage[source]``.

        Returns a `Call`, a `Join`, or for a source that is no call the `Source` itself.

        Raises:
            NameNotFound: no such call or join; the message has the nearest names.
        """
        if isinstance(key, Source):
            return self[key.path, key.nth] if key.path is not None and key.nth is not None else key
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
        return tuple(Call(self, i) for i in self._view.successors(*self._index(item)))

    def ancestors(self, item: str | tuple[str, int] | Source | Call | Join) -> tuple[Call, ...]:
        """All layer calls from which something reaches it, in running order."""
        return self._picked(self._view.upstream(*self._index(item)))

    def descendants(self, item: str | tuple[str, int] | Source | Call | Join) -> tuple[Call, ...]:
        """All layer calls that something of it reaches, in running order."""
        return self._picked(self._view.downstream(*self._index(item)))

    def between(
        self, first: str | tuple[str, int] | Source | Call | Join, last: str | tuple[str, int] | Source | Call | Join
    ) -> tuple[Call, ...]:
        """The layer calls on some way from ``first`` to ``last``, both left out, in running order."""
        return self._picked(self._view.downstream(*self._index(first)) & self._view.upstream(*self._index(last)))

    def _picked(self, items: set[tuple[str, int]]) -> tuple[Call, ...]:
        return tuple(Call(self, i) for kind, i in sorted(items) if kind == "call")

    def _layers(self, sources: Iterable[tuple[int, tuple[str, ...], bool]]) -> tuple[Call, ...]:
        found = {self._view.leaving(atom)[0]: None for atom, _, _ in sources if self._graph.nodes[atom].kind in ("call", "op")}
        return tuple(Call(self, i) for i in found)

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

    def to_table(self, **options: Any) -> str:
        """The table as text. Options as in `gradlineage.views.table.to_table`."""
        from gradlineage.views.table import to_table

        return to_table(self, **options)

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
