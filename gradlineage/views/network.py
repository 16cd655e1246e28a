"""A lineage as a networkx graph, for whatever algorithm one wants to run on it. Needs no torch; networkx comes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradlineage.lineage import Lineage
from gradlineage.views.rows import entries_of

if TYPE_CHECKING:
    import networkx

__all__ = ["to_networkx"]


def to_networkx(lineage: Lineage) -> networkx.MultiDiGraph[str]:
    """A directed multigraph with one node per layer call, join, leaf and output tensor, and one edge per link.

    Nodes are named as the table labels them, outputs ``output:0``, each unknown ``unknown:0`` and so on. Their attributes: ``kind`` (``layer``,
    ``join``, ``input``, ``parameter``, ``buffer``, ``constant``, ``unknown``, ``output``), ``type`` (class of a layer, operation of a join),
    ``path``, ``nth``, ``where``, ``shapes`` (a tuple of shapes of what it returns), ``parameters`` (elements a layer owns), ``count`` (passes of a
    union that had it).

    Attributes of edges: ``port`` (which output tensor of a layer, None for others and side doors), ``argument`` (name of the tensor at the
    reader, ``[k]`` for the operands of joins, ``hidden``), ``position`` (its place there), ``ops`` (a tuple of operations in running order),
    ``differentiable``, ``count``.

    Example:
        >>> import torch, gradlineage
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> list(gradlineage.trace(net, torch.ones(2, 3)).to_networkx().edges())
        [('input:input', '0'), ('0', '1'), ('1', 'output:0')]
    """
    import networkx

    graph: networkx.MultiDiGraph[str] = networkx.MultiDiGraph(model=lineage.model)
    for call in lineage.layers:
        graph.add_node(
            call.label, kind="layer", type=call.type, path=call.path, nth=call.nth, where=call.where,
            shapes=tuple(f.shape for f in call.outputs), parameters=call.parameters[0], count=call.count,
        )  # fmt: skip
    for join in lineage.joins:
        shapes = tuple(f.shape for f in join.outputs)
        graph.add_node(join.label, kind="join", type=join.op, where=join.where, shapes=shapes, count=join.count)
    readers = [(c.label, [*((f.name, f) for f in c.inputs), *(("hidden", f) for f in c.hidden)]) for c in lineage.layers]
    readers += [(j.label, [(f.name, f) for f in j.inputs]) for j in lineage.joins]
    for number, flow in enumerate(lineage.outputs):
        graph.add_node(f"output:{number}", kind="output", shapes=(flow.shape,), name=flow.name)
        readers.append((f"output:{number}", [(flow.name, flow)]))
    names = {f"{c.path}[{c.nth}]": c.label for c in lineage.layers}
    unknown: dict[int, str] = {}  # two that nothing is known of are not one
    for reader, flows in readers:
        for position, (argument, flow) in enumerate(flows):
            for link, entry in zip(flow.links, entries_of(flow, True), strict=True):
                source = names.get(entry.key, entry.key) if entry.kind in ("call", "join") else entry.label
                if entry.kind == "unknown":
                    source = unknown.setdefault(link._reference.atom, f"unknown:{len(unknown)}")
                if source not in graph:
                    graph.add_node(source, kind=entry.kind, reason=entry.reason)
                found = link.source
                graph.add_edge(
                    source, reader, port=getattr(found, "port", None), argument=argument, position=position, ops=entry.ops,
                    differentiable=entry.differentiable, count=entry.seen,
                )  # fmt: skip
    return graph
