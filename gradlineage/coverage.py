"""What many passes of a model did not show: modules that never ran, edges seen once, decisions that always fell the same way. Needs no torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from gradlineage.runs import Path, Runs, Sides

__all__ = ["Coverage", "Line", "cover"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line on which Python read tensors' values, over all inputs.

    Attributes:
        where: ``file:line``.
        kind: as of `gradlineage.Decision`.
        call: path of the module in whose call it was read.
        sides: how often which way it fell.
        paths: per path that came by it, the same for that path alone.
    """

    where: str
    kind: str
    call: str
    sides: Sides
    paths: tuple[tuple[Path, Sides], ...]

    @property
    def settled(self) -> bool:
        """Whether it always fell the same way, so that the other way was never tried."""
        sides = self.sides
        return not sides.others and (bool(sides.true) + bool(sides.false) + (sides.numbers > 0) == 1) and sides.least == sides.most


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the inputs of some `Runs` reached.

    Attributes:
        inputs: how many there were.
        never_called: paths of modules that no input called, the outermost of nested ones. Those whose parameters were used all the same are none.
        seen_once: (reader, source) of edges that one input alone had, calls of one module taken together.
        decisions: the lines on which values were read, in the order of their places.
    """

    inputs: int
    never_called: tuple[str, ...]
    seen_once: tuple[tuple[str, str], ...]
    decisions: tuple[Line, ...]

    @property
    def settled(self) -> tuple[Line, ...]:
        """The decisions that always fell the same way."""
        return tuple(line for line in self.decisions if line.settled)

    def __str__(self) -> str:
        from gradlineage.views.paths import coverage_text

        return coverage_text(self)


def cover(runs: Runs) -> Coverage:
    """See `Runs.coverage`."""
    lines: defaultdict[tuple[str, str, str], list[tuple[Path, Sides]]] = defaultdict(list)
    for path in runs.paths:
        for place, sides in runs._trails[path.key].sides.items():
            lines[place].append((path, sides))
    decisions = [Line(*place, sum((s for _, s in seen), Sides()), tuple(seen)) for place, seen in sorted(lines.items(), key=_by_line)]
    once = sorted(edge for edge, count in runs._edges.items() if count == 1) if runs.total > 1 else []
    return Coverage(runs.total, tuple(_never_called(runs)), tuple(once), tuple(decisions))


def _by_line(item: tuple[tuple[str, str, str], object]) -> tuple[str, int, tuple[str, str, str]]:
    file, _, line = item[0][0].rpartition(":")
    return file, int(line) if line.isdigit() else 0, item[0]


def _never_called(runs: Runs) -> list[str]:
    found: dict[str, None] = {}
    for path, _ in runs._modules:
        parts = path.split(".")
        within = any(".".join(parts[:n]) in found for n in range(1, len(parts)))
        if path and path not in runs._reach and path not in runs._borrowed and not within:
            found[path] = None
    return list(found)
