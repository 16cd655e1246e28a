"""The values a lineage gives out: frozen, and small, for they are numbers in a `Lineage` and not copies of it.

They refer to each other by number, so that a graph of any size can be compared, hashed, pickled and printed without recursion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gradlineage.graph import CallRecord, Node
from gradlineage.steps import Reference, Way

if TYPE_CHECKING:
    from gradlineage.lineage import Lineage

__all__ = ["Break", "Call", "Decision", "Flow", "Join", "Link", "Source"]

SourceKind = Literal["call", "input", "parameter", "buffer", "constant", "unknown"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor came from: a layer call, or a place where the search ends.

    Attributes:
        kind: ``call``, ``input``, ``parameter``, ``buffer``, ``constant`` or ``unknown``.
        label: as the table prints it: ``lstm[0][1]``, ``input:x``, ``fc.weight``, ``constant:zeros``, ``unknown``.
        differentiable: whether gradient flows back along some way.
        path, nth, port: for calls; ``port`` is None where the tensor left by a side door (an attribute, an in-place write).
        index: for inputs, the position among the root call's input tensors.
        name: for inputs, parameters and buffers.
        reason: for unknowns, why, and what to do about it.
    """

    kind: SourceKind
    label: str
    differentiable: bool = True
    path: str | None = None
    nth: int | None = None
    port: int | None = None
    index: int | None = None
    name: str | None = None
    reason: str | None = None
    _way: Way = field(default=Way(()), repr=False, compare=False)

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations on the shortest way, in running order, joins' own included."""
        return self._way.names


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


@dataclass(frozen=True, slots=True)
class Decision:
    """A place where Python read a tensor's value.

    Attributes:
        kind: ``bool`` (an ``if``), ``int``, ``float``, ``index``, ``item``, ``list``, ``numpy``, ``equal`` (``torch.equal``, ``in``), ``format``
            (printing), or ``shape`` (a result whose size hangs on the values: ``nonzero``, a boolean mask, ``nms``).
        where: ``file:line``.
        call: the call in which it happened, None outside of all calls.
        value: what Python saw, where that was one number; for ``shape`` the first size of the result.
        sources: what the value was computed from; within a layer, what came into the layer.
        waits: whether the program had to wait for a device other than the CPU.
    """

    kind: str
    where: str
    call: Call | None
    value: bool | int | float | None
    sources: tuple[Source, ...]
    waits: bool = False


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

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be deleted")

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
    count = property(lambda self: self._record.seen, doc="In how many of the passes of a union it occurred; 1 in a lineage of one pass.")

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
        """(elements, trainable elements) of the parameters that the module owns.

        For a layer those of modules within it that are never called are its own too; for a collapsed container all within.
        """
        return self._lineage._view.parameters(self._index)

    @property
    def inputs(self) -> tuple[Flow, ...]:
        """One `Flow` per tensor its forward received: positional, then keywords as passed, nested containers in order."""
        record, view = self._record, self._lineage._view
        values = record.inputs
        if not record.layer and not view.is_union:
            values = tuple(v._replace(used=view.enclosed.used(self._index, v.node)) for v in values)
        return self._lineage._flows(values)

    @property
    def outputs(self) -> tuple[Flow, ...]:
        """One `Flow` per tensor it returned. Their sources are the call itself if it is a layer, else what it returned."""
        return self._lineage._flows(self._record.outputs)

    @property
    def hidden(self) -> tuple[Flow, ...]:
        """What entered a layer by another door than its arguments: an attribute, generated weights, another module's parameters."""
        nodes = self._lineage._view.hidden(self._index)
        return tuple(Flow(self._lineage, (node, -1), "", (), "", "", True) for node in nodes)

    def __repr__(self) -> str:
        return f"<Call {self.label} ({self.type}) at {self.where or 'unknown place'}>"


_FLOW_FACTS = ("name", "shape", "dtype", "device", "used")


class Flow:
    """One tensor at the border of a call or join, and what feeds it.

    ``used`` is False for an argument on which the call's outputs do not depend, None where that is not known. ``shape`` is a tuple of sizes (a
    ragged size of a nested tensor is a string), ``dtype`` and ``device`` are torch's names for them; all three are empty for operands of joins
    and hidden flows, which are not noted.
    """

    __slots__ = ("_key", "_lineage", "device", "dtype", "name", "shape", "used")
    _lineage: Lineage
    _key: tuple[int, int]  # (node, -1), or (join, number of its operand)
    used: bool | None
    name: str
    shape: tuple[int | str, ...] | None
    dtype: str
    device: str

    def __init__(self, lineage: Lineage, key: tuple[int, int], *facts: Any) -> None:
        for name, value in zip(("_lineage", "_key", *_FLOW_FACTS), (lineage, key, *facts), strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Flow is frozen: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Flow is frozen: {name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Flow):
            return NotImplemented
        same = all(getattr(self, name) == getattr(other, name) for name in ("_key", *_FLOW_FACTS))
        return same and self._lineage == other._lineage

    def __hash__(self) -> int:
        return hash((self.name, self.shape, self.dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        return Flow, (self._lineage, self._key, *(getattr(self, name) for name in _FLOW_FACTS))

    @property
    def _references(self) -> tuple[Reference, ...]:
        return self._lineage._view.feeding(self._key)

    @property
    def links(self) -> tuple[Link, ...]:
        """One step back: layer calls, leaves and joins."""
        return tuple(Link(self._lineage, self._key, i) for i in range(len(self._references)))

    @property
    def sources(self) -> tuple[Source, ...]:
        """The nearest layer calls and leaves, seen through joins, in operand order."""
        return tuple(self._lineage._source(*found) for found in self._lineage._view.sources(self._references))

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape)) if self.shape is not None else "?"
        return f"<Flow {self.name or 'tensor'} {size} from {', '.join(link.label for link in self.links) or '-'}>"


@dataclass(frozen=True, slots=True)
class Link:
    """One step of the graph."""

    _lineage: Lineage
    _key: tuple[int, int]
    _position: int

    @property
    def _reference(self) -> Reference:
        return self._lineage._view.feeding(self._key)[self._position]

    @property
    def source(self) -> Source | Join:
        """A `Source`, or the `Join` at which the ways met."""
        atom = self._reference.atom
        if self._lineage._view.is_join(atom):
            return Join(self._lineage, atom)
        return self._lineage._source(atom, Way(self.ops), self.differentiable)

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

    @property
    def count(self) -> int:
        """In how many of the passes of a union it was seen; 1 in a lineage of one pass."""
        return self._reference.seen

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
    count = property(
        lambda self: sum(self._node.counts) or 1, doc="In how many of the passes of a union it occurred; 1 in a lineage of one pass."
    )

    @property
    def container(self) -> Call | None:
        """The container call in which it ran; None outside of all calls."""
        call = self._lineage._view.call_of(self._index)
        return None if call < 0 else Call(self._lineage, call)

    @property
    def inputs(self) -> tuple[Flow, ...]:
        """One `Flow` per tensor operand, in order; those of the joins folded into it included."""
        count = len(self._lineage._view.operands(self._index))
        return tuple(Flow(self._lineage, (self._index, i), f"[{i}]", None, "", "", True) for i in range(count))

    @property
    def outputs(self) -> tuple[Flow, ...]:
        node = self._node
        return (Flow(self._lineage, (self._index, -1), "", node.shape, node.dtype, node.device, True),)

    def __repr__(self) -> str:
        return f"<Join {self.label} at {self.where or 'unknown place'}>"
