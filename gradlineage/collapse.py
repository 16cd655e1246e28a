"""Containers as layers: another view of the same recording."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

from gradlineage.errors import LineageError, NameNotFound
from gradlineage.lineage import Call, Lineage

__all__ = ["collapse", "fitting", "shallower"]


def collapse(lineage: Lineage, *patterns: str, depth: int | None = None) -> Lineage:
    """Make layers of the container calls whose path matches a pattern, or that lie ``depth`` calls below the root.

    What was inside is left out; the containers' own inputs and outputs stand for it. A tensor that left one by a side door (an attribute, an
    in-place write) has it as its source with ``port=None``. The outermost choice wins, so collapsing twice is collapsing once to the coarser.

    Args:
        lineage: any lineage, a collapsed one too.
        patterns: paths with ``*`` (which crosses dots), ``?`` and ``[...]``, as in ``fnmatch``.
        depth: nesting depth of calls, 1 for the root's own children; a ``ModuleList`` is never called and adds none.

    Raises:
        LineageError: neither or a negative ``depth`` given, or a union of several passes.
        NameNotFound: a pattern that matches no call.
    """
    if not patterns and depth is None:
        raise LineageError("collapse() needs a path pattern or depth=, for example collapse('layer*.?') or collapse(depth=1)")
    if not all(isinstance(p, str) for p in patterns) or not (depth is None or isinstance(depth, int)):
        raise LineageError(f"collapse{patterns!r}, depth={depth!r}: expected path patterns as text and depth as a whole number")
    if depth is not None and depth < 0:
        raise LineageError(f"collapse(depth={depth}): depth counts calls below the root and cannot be negative")
    if lineage._view.is_union:
        raise LineageError("collapse(): a union of passes cannot be collapsed; unite collapsed ones instead: runs.union(depth=1)")
    graph = lineage._graph
    chosen = set(lineage._collapsed)
    for pattern in patterns:
        matches = [i for i, call in enumerate(graph.calls) if fnmatch.fnmatchcase(call.path, pattern)]
        if not matches:
            raise NameNotFound(pattern, dict.fromkeys(c.path for c in graph.calls if not c.layer), "call path matching")
        chosen.update(i for i in matches if not graph.calls[i].layer)
    if depth is not None:
        level: list[int] = []
        for index, call in enumerate(graph.calls):
            level.append(level[call.parent] + 1 if call.parent >= 0 else 0)
            if level[index] == depth and not call.layer:
                chosen.add(index)
    return Lineage(graph, lineage._view.outermost(chosen), lineage.rolled)


def shallower(lineage: Lineage) -> Iterator[tuple[int, Lineage]]:
    """The lineage collapsed at each depth, the deepest first; a union has none."""
    if lineage._view.is_union:
        return
    level: dict[Call | None, int] = {None: -1}
    for call in lineage.calls:
        level[call] = level[call.parent] + 1
    for depth in range(max(level.values()) - 1, 0, -1):
        yield depth, lineage.collapse(depth=depth)


def fitting(lineage: Lineage, most: int, joins: bool = True) -> tuple[Lineage, int | None]:
    """The lineage itself if it has no more rows than that, else collapsed at the greatest depth at which it has not, or to depth 1; and the depth.

    ``joins``: whether they count as rows.
    """

    def rows(view: Lineage) -> int:
        return len(view.layers) + (len(view.joins) if joins else 0)

    if rows(lineage) > most:
        for depth, shown in shallower(lineage):
            if (depth == 1 or (len(shown.layers) <= most and rows(shown) <= most)) and rows(shown) < rows(
                lineage
            ):  # joins cost a walk: last
                return shown, depth
    return lineage, None
