"""Exactly periodic runs of rows as loops: `roll` folds them, `unroll` gives the very same rows back, `reading` says how they read.

Rows are compared as what stays (paths, types, shapes, operations, names) and the numbers in their labels. A loop is a run in which what stays
repeats itself and every number grows by a constant step, so that its steady iterations are one iteration and the steps. The first iteration,
and as many more as the body looks back, may be fed by other things than the later ones; they are kept as they are.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from typing import NamedTuple

from gradlineage.lineage import Call, Lineage
from gradlineage.views.rows import Entry, Incoming, Row

__all__ = ["Item", "Loop", "Numbers", "Where", "containers_of", "feeding", "grown_by", "instances", "roll", "split_label", "unroll"]

_LEAST = 3  # iterations
_OFTEN = 8  # so many calls of one layer are told apart in a body; in one that calls every layer more often no loop is found
_BACK = 8  # iterations that a body may look back with more than its first iteration fed differently

_COUNTED = ("call", "join", "input")  # kinds of entries that have numbers

Numbers = tuple[int, ...]
Where = tuple[int, ...]  # see `instances`; without the iterations it is the place of a line


@dataclass(frozen=True, slots=True)
class Loop:
    """Three or more iterations of the same calls.

    Attributes:
        count: iterations in all.
        first: the items of the first iterations, at least one, as they are.
        body: the items of the next iteration.
        steps: for each item of ``body``, by how much each number in it grows from one iteration to the next.
    """

    count: int
    first: tuple[Item, ...]
    body: tuple[Item, ...]
    steps: tuple[Numbers, ...]

    @property
    def lead(self) -> int:
        """How many iterations ``first`` has."""
        return len(self.first) // len(self.body)


Item = Row | Loop


def roll(rows: Sequence[Row], containers: Sequence[tuple[str, ...]] = ()) -> list[Item]:
    """Fold what is exactly periodic, the shortest period first, then what is periodic in the result.

    Args:
        rows: as from `make_rows`.
        containers: for each row the container calls it ran in, as from `containers_of`; then every loop is one of whole calls within one
            container call.
    """
    level = _first_level(rows, containers or [()] * len(rows))
    while loops := _loops(level):
        level = _next_level(level, loops)
    return level.items


def unroll(items: Iterable[Item]) -> list[Row]:
    """The rows from which `roll` made the items."""
    return [row for _, row in instances(items)]


def instances(items: Iterable[Item]) -> Iterator[tuple[Where, Row]]:
    """Every row with its place: the number of its item; within a loop then the iteration and the number in the body, and so on inwards."""
    stack: list[Iterator[tuple[Where, Item, Numbers]]] = [iter([((n,), item, ()) for n, item in enumerate(items)])]
    while stack:
        for where, item, offset in stack[-1]:
            if isinstance(item, Loop):
                stack.append(_iterations(where, item, offset))
                break
            yield where, _counted_on(item, offset) if any(offset) else item
        else:
            stack.pop()


def containers_of(lineage: Lineage, rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """For each row the keys of the container calls in which it ran, outermost first; what is no call or join stays with the row before."""
    within: dict[Call | None, tuple[str, ...]] = {None: ()}
    for call in lineage.calls:  # containers begin before what is in them
        above = within[call.parent]
        within[call] = above if call.kind == "layer" else (*above, f"{call.path}[{call.nth}]")
    known = {f"{call.path}[{call.nth}]": within[call] for call in lineage.layers}
    known |= {join.label: within[join.container] for join in lineage.joins}
    places: list[tuple[str, ...]] = []
    for row in rows:
        places.append(known.get(row.key, places[-1] if places else ()))
    return places


# -- rows as what stays and numbers ------------------------------------------------------------------------------------------------------


class _Code(NamedTuple):
    """An item in numbers: ``head`` and ``full`` stand for what stays, without and with what feeds it."""

    head: int
    head_numbers: Numbers
    full: int
    numbers: Numbers
    fed: Numbers  # the rows that its entries refer to; negative for anything else


@functools.lru_cache(4096)
def split_label(text: str) -> tuple[str, ...]:
    """A label as text, number, text, …; only numbers in brackets count, as those of calls do."""
    return tuple(re.split(r"\[(0|[1-9][0-9]{0,17})\]", text))


def _texts(inputs: Iterable[Incoming]) -> list[str]:
    """All that has numbers in what feeds a row."""
    return [text for tensor in inputs for e in tensor.entries if e.kind in _COUNTED for text in (e.key, e.label)]


def feeding(inputs: Iterable[Incoming]) -> tuple[Hashable, Numbers]:
    """What stays of what feeds a row, and the numbers."""
    texts = [split_label(text) for text in _texts(inputs)]
    tensors = tuple((t.name, t.used, *map(_anonymous, t.entries)) for t in inputs)
    return (tensors, *(parts[::2] for parts in texts)), tuple(int(n) for parts in texts for n in parts[1::2])


def _counted_on(row: Row, offset: Numbers) -> Row:
    numbers = iter(offset)

    def moved(text: str) -> str:
        parts = list(split_label(text))
        parts[1::2] = [f"[{int(number) + next(numbers)}]" for number in parts[1::2]]
        return "".join(parts)

    key, label, inputs = moved(row.key), moved(row.label), []
    for tensor in row.inputs:
        entries = (e._replace(key=moved(e.key), label=moved(e.label)) if e.kind in _COUNTED else e for e in tensor.entries)
        inputs.append(tensor._replace(entries=tuple(entries)))
    return row._replace(key=key, label=label, inputs=tuple(inputs))


def _iterations(where: Where, loop: Loop, offset: Numbers) -> Iterator[tuple[Where, Item, Numbers]]:
    """The items of all iterations; ``offset`` is by how much the numbers of the loop itself have grown in the loop around it."""
    size, offsets = len(loop.body), iter(offset)
    ahead = [tuple(next(offsets) for _ in range(_width(item))) if offset else () for item in loop.first]
    for n, (item, grown) in enumerate(zip(loop.first, ahead, strict=True)):
        yield (*where, n // size, n % size), item, grown
    begin = [tuple(next(offsets) for _ in steps) if offset else (0,) * len(steps) for steps in loop.steps]
    for turn in range(loop.lead, loop.count):
        times = turn - loop.lead
        for n, item in enumerate(loop.body):
            grown = tuple(b + times * s for b, s in zip(begin[n], loop.steps[n], strict=True))
            yield (*where, turn, n), item, grown


def _width(item: Item) -> int:
    """How many numbers an item has."""
    total, stack = 0, [item]
    while stack:
        part = stack.pop()
        if isinstance(part, Loop):
            stack += part.first
            total += sum(map(len, part.steps))
        else:
            total += sum(len(split_label(text)) // 2 for text in (part.key, part.label, *_texts(part.inputs)))
    return total


def _code(row: Row, paths: tuple[str, ...], ids: dict[Hashable, int], number: dict[str, int]) -> _Code:
    labels = split_label(row.key), split_label(row.label)
    own = tuple(int(n) for parts in labels for n in parts[1::2])
    stays, numbers = feeding(row.inputs)
    path = _path(row.key) if row.type else ""
    rest = row._replace(key="", label="", inputs=(), shared=False)
    head = ids.setdefault(("row", rest, path, paths, *(parts[::2] for parts in labels)), len(ids))
    full = ids.setdefault((head, row.shared, stays), len(ids))
    fed = tuple(number.get(e.key or e.label, -1 - ids.setdefault(e.label, len(ids))) for e in row.entries)
    return _Code(head, own, full, own + numbers, fed)


def _path(key: str) -> str:
    """Of a call's key; its brackets, if it has any, count nothing."""
    return key.rpartition("[")[0]


def _anonymous(entry: Entry) -> tuple[str, Entry]:
    path = _path(entry.key) if entry.kind == "call" else ""
    return path, entry._replace(key="", label="") if entry.kind in _COUNTED else entry


# -- finding loops -----------------------------------------------------------------------------------------------------------------------


class _Level(NamedTuple):
    """Items with what is known of each. ``cuts``: in how many container calls both neighbours lie, at every border between items."""

    items: list[Item]
    codes: list[_Code]
    starts: list[int]  # numbers of the items' first rows
    cuts: list[int]
    ids: dict[Hashable, int]


def _first_level(rows: Sequence[Row], containers: Sequence[tuple[str, ...]]) -> _Level:
    ids: dict[Hashable, int] = {}
    number = {row.key: n for n, row in enumerate(rows) if row.key}
    codes = [_code(row, tuple(map(_path, above)), ids, number) for row, above in zip(rows, containers, strict=True)]
    cuts = [0, *(_common(a, b) for a, b in pairwise(containers)), 0]
    return _Level(list(rows), codes, list(range(len(rows) + 1)), cuts, ids)


def _next_level(level: _Level, loops: Iterable[tuple[int, int, Loop]]) -> _Level:
    items, codes, starts, cuts, at = [], [], [], [], 0
    for begin, end, loop in [*sorted(loops, key=lambda found: found[0]), (len(level.items), 0, None)]:
        items += level.items[at:begin]
        codes += level.codes[at:begin]
        starts += level.starts[at : begin + 1]
        cuts += level.cuts[at : begin + 1]
        if loop is not None:
            items.append(loop)
            codes.append(_loop_code(level, begin, loop))
            at = end
    return _Level(items, codes, starts, cuts, level.ids)


def _loop_code(level: _Level, begin: int, loop: Loop) -> _Code:
    parts = level.codes[begin : begin + len(loop.first) + len(loop.body)]
    once = parts[: len(loop.body)]
    head = level.ids.setdefault(("loop", loop.count, *(c.head for c in once)), len(level.ids))
    full = level.ids.setdefault((head, loop.lead, loop.steps, *(c.full for c in parts)), len(level.ids))
    numbers, fed = tuple(n for c in parts for n in c.numbers), tuple(n for c in parts for n in c.fed)
    return _Code(head, tuple(n for c in once for n in c.head_numbers), full, numbers, fed)


def _loops(level: _Level) -> list[tuple[int, int, Loop]]:
    """Loops that do not overlap, each with the items that it replaces."""
    seeds: defaultdict[int, list[int]] = defaultdict(list)  # per period: items that look like the one a period before
    recent: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_OFTEN))
    for n, code in enumerate(level.codes):
        for before in recent[code.full]:
            if (n - before) * _LEAST <= len(level.items):
                seeds[n - before].append(n)
        recent[code.full].append(n)
    taken = bytearray(len(level.items))
    found = []
    for period in sorted(seeds):
        for begin, end in _runs(level, period, seeds[period], taken):
            folded = _loop(level, period, begin, end, taken) if end - begin >= period else None
            if folded is not None:
                start, stop, _ = folded
                taken[start:stop] = b"\1" * (stop - start)
                found.append(folded)
    return found


def _runs(level: _Level, period: int, seeds: Iterable[int], taken: bytearray) -> Iterator[tuple[int, int]]:
    """Longest runs in which every item is the one a period before, counted on by what the one a period before was counted on by."""
    codes, cuts, end = level.codes, level.cuts, period

    def alike(n: int) -> bool:
        return codes[n].full == codes[n - period].full and not taken[n]

    for seed in seeds:
        if seed < end:
            continue
        low = seed
        while low > end and alike(low - 1):
            low -= 1
        begin, end, grown = low, low, []
        while end < len(codes) and alike(end):
            grown.append(grown_by(codes[end].numbers, codes[end - period].numbers))
            if end > begin and cuts[end] != cuts[end - period]:
                yield begin, end
                begin = end
            if end - period >= begin and grown[-1] != grown[-1 - period]:
                yield begin, end
                begin = end - period + 1
            end += 1
        yield begin, end
        end = max(end, seed + 1)


def _loop(level: _Level, period: int, begin: int, end: int, taken: bytearray) -> tuple[int, int, Loop] | None:
    """The loop that a run gives together with the first iterations before it, if it is one."""
    codes, starts, cuts = level.codes, level.starts, level.cuts
    if end - begin < 2 * period and _looks_back(level, period, end, starts[max(0, begin - (_BACK + 1) * period)])[1]:
        return None  # soon said, for rows that are alike but for what feeds them
    low = _fed_otherwise(level, period, begin)
    back, apart = _looks_back(level, period, end, starts[low])
    low = max(low, begin - (back + 1) * period, taken.rfind(1, low, end) + 1)
    if end - low < _LEAST * period:
        return None
    outer = min(cuts[low + 1 : low + period + 1])
    start = next((n for n in range(low, low + period) if cuts[n] <= outer == cuts[n + period]), end)
    count = (end - start) // period
    count -= count > 0 and cuts[start + count * period] > outer  # the last iteration goes on
    lead = max(1, -((start - begin) // period) - 1)
    if count < _LEAST or count - lead < 2 + apart:  # a step needs two iterations to be seen, a third to be confirmed
        return None
    steady = start + lead * period
    steps = tuple(grown_by(codes[n + period].numbers, codes[n].numbers) for n in range(steady, steady + period))
    return start, start + count * period, Loop(count, tuple(level.items[start:steady]), tuple(level.items[steady : steady + period]), steps)


def _fed_otherwise(level: _Level, period: int, begin: int) -> int:
    """How far down the iterations before a run have its calls, whatever feeds them."""
    codes, cuts, low = level.codes, level.cuts, begin
    while low > max(begin - _BACK * period, period) and cuts[low] == cuts[low - period]:
        before, own, after = codes[low - 1 - period], codes[low - 1], codes[low - 1 + period]
        grown = grown_by(own.head_numbers, before.head_numbers) if own.head == before.head else None
        if own.head != after.head or grown != grown_by(after.head_numbers, own.head_numbers):
            break
        low -= 1
    return low - period


def _looks_back(level: _Level, period: int, end: int, low: int) -> tuple[int, bool]:
    """How many iterations a body looks back, no further than to row ``low``, and whether it follows what counts up elsewhere."""
    codes, starts = level.codes, level.starts
    size, back = starts[end - 1] - starts[end - 1 - period], 1
    for n in range(end - period, end):
        for source, before in zip(codes[n].fed, codes[n - period].fed, strict=True):
            if source - before == size and before >= low:
                back = max(back, -((source - starts[n]) // size))
            elif source != before:
                return back, True
    return back, False


def grown_by(later: Numbers, earlier: Numbers) -> Numbers:
    """By how much each number has grown."""
    return tuple(map(sub, later, earlier))


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many of their first parts two places share."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
