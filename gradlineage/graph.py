"""The frozen facts of a recording: a graph of values, and the calls whose inputs and outputs are values in it.

Plain tuples of plain data and no torch: what is pickled, saved, compared and collapsed. `Lineage` reads it through a choice of layers.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BreakRecord", "CallRecord", "DecisionRecord", "Graph", "Node", "ParameterRecord", "ValueRecord", "WriteRecord"]


class Node(NamedTuple):
    """One value and how it came about.

    ``kind`` is ``op``, ``call`` (a value as it left a module call), ``input``, ``parameter``, ``buffer``, ``constant``,
    ``unknown``, ``empty`` (an unknown that is named only where nothing else feeds the tensor), ``memory`` (of which a part was written:
    its parents are what it held, and what the writing operation or layer made of it) or ``union`` (in a union of several passes: all that was
    seen to feed a tensor, ``counts`` says in how many passes each).
    ``parents`` are node numbers, smaller than the node's own; ``~p`` where that operand did not require grad. ``grad`` says whether the value
    itself does: gradient flows along an edge where both hold, and an operation without ``grad`` that has a parent ``p >= 0`` breaks it off.
    """

    kind: str
    parents: tuple[int, ...] = ()
    name: str = (
        ""  # operation, '' for a mere hand-over; name of the input, parameter or buffer; factory of a constant; reason of an unknown
    )
    call: int = -1  # op, constant: the call it ran in; call: the call it left; input: the call it entered; -1 outside of all calls
    port: int = -1  # call: index among its output tensors, -1 for a side door; input: index among the input tensors
    where: str = ""  # op, constant and unknown: file:line
    order: int = -1  # running order of operations
    shape: tuple[int | str, ...] | None = None  # noted only where several tensors go in
    dtype: str = ""
    device: str = ""
    grad: bool = False
    counts: tuple[int, ...] = ()
    gradient: tuple[
        int, ...
    ] = ()  # what was made in a layer: the nodes, from outside of it and its own parameters, that gradient goes on to


class ValueRecord(NamedTuple):
    """A tensor that entered or left a call: what it is called there, what it looked like, and its node.

    ``used`` is False for an argument on which the call's outputs do not depend, None where that is not known.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    device: str
    node: int
    used: bool | None = True


class CallRecord(NamedTuple):
    """One execution of a module.

    ``parameters`` and ``trainable`` count elements the module owns itself; for a layer, also those of modules within it that are never called.
    ``hidden`` are the values that entered a layer by another door than its arguments.
    """

    path: str
    nth: int
    type: str
    layer: bool
    parent: int
    where: str
    parameters: int
    trainable: int
    registered: bool
    failed: bool
    inputs: tuple[ValueRecord, ...]
    outputs: tuple[ValueRecord, ...]
    hidden: tuple[ValueRecord, ...] = ()
    uses: tuple[int, ...] = ()  # the nodes of the parameters that a layer used
    seen: int = 1  # in how many passes it occurred


class BreakRecord(NamedTuple):
    """A place where gradient stops: what did it, in which call, the nodes whose gradient is cut off, the nodes without gradient after it."""

    op: str
    where: str
    call: int
    before: tuple[int, ...]
    after: tuple[int, ...]


class ParameterRecord(NamedTuple):
    """A parameter of the model, by its first name: elements, whether it takes gradient, its node, -1 where nothing used it."""

    name: str
    elements: int
    trainable: bool
    node: int


class WriteRecord(NamedTuple):
    """An in-place write: in which call and where, and the layer calls that read the memory before and after it."""

    call: int
    where: str
    before: tuple[int, ...]
    after: tuple[int, ...]


class DecisionRecord(NamedTuple):
    """A place where Python read a tensor's value: how, in which call, what it saw, and the nodes that the value was computed from.

    ``ops``: per node, the operations between it and the value, where that was computed within a layer.
    ``order`` as that of nodes; ``after`` is the
    call that had begun last.
    """

    kind: str
    where: str
    call: int
    value: bool | int | float | str | None
    nodes: tuple[int, ...]
    ops: tuple[tuple[str, ...], ...]
    order: int
    after: int
    waits: bool


class Graph(NamedTuple):
    """All of it. ``outputs`` are what the root calls returned, or what the user asked about."""

    nodes: tuple[Node, ...]
    calls: tuple[CallRecord, ...]
    outputs: tuple[ValueRecord, ...]
    model: str
    parameters: int  # elements in the whole model, each parameter once
    trainable: int
    notes: tuple[str, ...] = ()
    bypassed: tuple[tuple[str, tuple[int, ...]], ...] = ()  # parameters used by calls though their module was never called
    breaks: tuple[BreakRecord, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()  # path and class of every registered module that can be called
    registered: tuple[ParameterRecord, ...] = ()
    writes: tuple[WriteRecord, ...] = ()
    direct: tuple[tuple[str, str], ...] = ()  # path of a module whose forward was called directly, and where
    runs: int = 1  # passes that this is the union of
