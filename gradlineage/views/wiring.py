"""Wiring as plain lines, for files that are compared: a layer call, join or output each, without shapes. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gradlineage.lineage import Lineage
from gradlineage.steps import braced
from gradlineage.tables import REARRANGING
from gradlineage.views.rows import Entry, entries_of, make_rows

__all__ = ["to_wiring"]


def to_wiring(lineage: Lineage) -> str:
    """One line each: ``fc (Linear) <- relu <- bn1``; several arguments are named; operands that met before in a join that has no line of
    its own stand in braces.

    Example:
        >>> import torch, gradlineage
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> print(to_wiring(gradlineage.trace(net, torch.ones(2, 3))), end="")
        0 (Linear) <- input:input
        1 (ReLU) <- 0
        output <- 1
    """
    lines = []
    for row in make_rows(lineage):
        unnamed = len(row.inputs) == 1 or not row.type
        groups = [next((e.group for e in t.entries), ()) for t in row.inputs]
        parts = [("" if unnamed else f"{t.name}: ") + _entries(t.entries) + ("" if t.used else " (unused)") for t in row.inputs]
        parts = braced(parts, groups)
        title = f"{row.label} ({row.type})" if row.type and not row.label.startswith("<") else row.label
        lines.append(f"{title} <- {('; ' if row.type else ', ').join(parts) or 'nothing'}")
    for flow in lineage.outputs:
        lines.append(f"output {flow.name}".rstrip() + f" <- {_entries(entries_of(flow, True))}")
    return "\n".join(lines) + "\n"


def _entries(entries: Iterable[Entry]) -> str:
    texts = []
    for entry in entries:
        ops = [op for op in reversed(entry.ops) if op not in REARRANGING]
        label = f"[{entry.label}]" if entry.kind in ("parameter", "buffer") else entry.label
        texts.append(" <- ".join([*ops, label]) + (" (no gradient)" if entry.stopped else ""))
    return ", ".join(texts) or "nothing"
