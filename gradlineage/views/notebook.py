"""How a lineage shows in a notebook: a small picture, collapsed until it fits, and the totals. Needs no torch."""

from __future__ import annotations

import html

from gradlineage.errors import LineageError
from gradlineage.lineage import Call, Lineage
from gradlineage.views.dot import to_svg

__all__ = ["fitting", "to_fragment"]

_SPOTS = 40  # nodes that can be read in the width of a cell
_LINES = 40


def to_fragment(lineage: Lineage) -> str:
    """A fragment of HTML: the picture where there is a Graphviz, else the beginning of the table."""
    view, told = fitting(lineage, _SPOTS), html.escape(repr(lineage).strip("<>"))
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


def fitting(lineage: Lineage, most: int, joins: bool = True) -> Lineage:
    """The lineage itself if it has no more rows than that, else collapsed at the greatest depth at which it has not, or to depth 1."""

    def rows(view: Lineage) -> int:
        return len(view.layers) + (len(view.joins) if joins else 0)

    if rows(lineage) <= most or lineage._view.is_union:
        return lineage
    level: dict[Call | None, int] = {None: -1}
    for call in lineage.calls:
        level[call] = level[call.parent] + 1
    for depth in range(max(level.values()) - 1, 0, -1):
        shown = lineage.collapse(depth=depth)
        if depth == 1 or (len(shown.layers) <= most and rows(shown) <= most):  # joins cost a walk: count them last
            return shown if rows(shown) < rows(lineage) else lineage
    return lineage
