"""How a lineage shows in a notebook: a small picture, collapsed until it fits, and the totals. Needs no torch."""

from __future__ import annotations

import html

from gradlineage.collapse import fitting
from gradlineage.errors import LineageError
from gradlineage.lineage import Lineage
from gradlineage.views.dot import to_svg

__all__ = ["to_fragment"]

_SPOTS = 40  # nodes that can be read in the width of a cell
_LINES = 40


def to_fragment(lineage: Lineage) -> str:
    """A fragment of HTML: the picture where there is a Graphviz, else the beginning of the table."""
    view, told = fitting(lineage, _SPOTS)[0], html.escape(repr(lineage).strip("<>"))
    if view is not lineage:
        told += f", shown as {len(view.layers):,}; <code>print(lineage)</code> for the table, <code>lineage.to_html()</code> for a page"
    try:
        svg = to_svg(view)
        body = svg[svg.index("<svg") :]
    except LineageError:
        lines = view.to_table(width=120).splitlines()
        more = f"\n… {len(lines) - _LINES:,} more lines" if len(lines) > _LINES else ""
        body = f"<pre>{html.escape(chr(10).join(lines[:_LINES]) + more)}</pre>"
    box = "max-height:36em;overflow:auto;background:#fff;color:#000;border:1px solid #ccc;border-radius:4px;padding:4px"
    return f'<div><p>{told}</p><div style="{box}">{body}</div></div>'
