"""Paths and coverage as text. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gradlineage.coverage import Coverage, Line
from gradlineage.runs import Path, Runs
from gradlineage.tables import share_of

__all__ = ["coverage_text", "to_text"]

_MOST = 20  # paths, and lines of what sets one apart
_LINES = 8


def to_text(runs: Runs) -> str:
    """A line a path, the commonest first, and below each what sets it apart from that; then what was not reached."""
    paths = runs.paths
    head = f"{runs.model}: {_number(runs.total, 'input')} took {_number(len(paths), 'path')}"
    return "\n".join([head, *_rows(paths), "", coverage_text(runs.coverage(), runs)])


def _rows(paths: Sequence[Path]) -> Iterator[str]:
    if not paths:
        return
    cells = [
        (f"path {n}", share_of(p.count, round(p.count / p.share)), f"×{p.count:,}", _number(p.length, "layer"), _examples(p))
        for n, p in enumerate(paths, 1)
    ]
    shown = cells[:_MOST]
    widths = [max(len(row[k]) for row in shown) for k in range(4)]
    for row, path in zip(shown, paths, strict=False):
        yield "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:4], widths[1:], strict=True)), row[4]])
        difference = path.difference
        if difference is not None:
            lines = str(difference).splitlines()[1:]
            yield from (f"    {line}" for line in lines[:_LINES])
            if len(lines) > _LINES:
                yield f"    … {len(lines) - _LINES} more"
        elif path.lineage is None:
            yield "    its lineage was not kept (max_paths)"
    if len(paths) > _MOST:
        rest = paths[_MOST:]
        yield f"and {len(rest):,} more paths of {_number(sum(p.count for p in rest), 'input')}"


def _examples(path: Path) -> str:
    shown = ", ".join(map(str, path.examples[:3]))
    return f"inputs {shown}{' …' if path.count > 3 else ''}" if path.count > 1 else f"input {shown}"


def coverage_text(coverage: Coverage, runs: Runs | None = None) -> str:
    """What was not reached, and how each decision fell; with ``runs`` also which paths it led to."""
    number = {path.key: n for n, path in enumerate(runs.paths, 1)} if runs is not None else {}
    lines = [f"never called: {', '.join(coverage.never_called)}"] if coverage.never_called else []
    if coverage.seen_once:
        shown = ", ".join(f"{reader} ← {source}" for reader, source in coverage.seen_once[:_MOST])
        lines.append(f"seen in one input only: {shown}{' …' if len(coverage.seen_once) > _MOST else ''}")
    lines += [_line(line, number) for line in coverage.decisions]
    return "\n".join(lines) or "no decisions, and every module was called"


def _line(line: Line, number: dict[str, int]) -> str:
    place = f"? {line.kind} at {line.where}{f' in {line.call}' if line.call else ''}: {line.sides}"
    if not line.sides.true or not line.sides.false:
        return place
    ways = []
    for side in ("true", "false"):
        led = [str(number[path.key]) for path, sides in line.paths if getattr(sides, side) and path.key in number]
        if led:
            ways.append(f"{side.capitalize()} on path{'s' * (len(led) != 1)} {_list(led)}")
    return f"{place}; {'; '.join(ways)}" if ways else place


def _list(items: Iterable[str]) -> str:
    found = list(items)
    return ", ".join(found[:_MOST]) + (" …" if len(found) > _MOST else "")


def _number(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"
