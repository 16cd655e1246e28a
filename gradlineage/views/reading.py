"""How loops read: one line for all calls of a loop that are alike, sources named by how many iterations ago they were made."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from typing import NamedTuple

from gradlineage.views.loops import Item, Loop, Numbers, Where, feeding, grown_by, instances, split_label
from gradlineage.views.rows import Entry, Incoming, Row

__all__ = ["Line", "Reading"]

_Slot = tuple[str, int]  # name of an argument, and which one of that name


class Line(NamedTuple):
    """One line for all calls of a loop that are alike; a loop of several lines has one of its own above them, without a row.

    Attributes:
        row: labels of it and its entries as they read in the loop (``cell[previous]``, ``first constant:zeros``), and keys of first calls.
        times: iterations of the loop that this line stands for.
        depth: in how many loops of several lines it stands.
        back: for each of ``row.entries`` how many iterations before it was made: 0 for none, -1 for what feeds only the first iterations.
    """

    row: Row | None
    times: int = 1
    depth: int = 0
    back: Numbers = ()


class Reading:
    """How what `roll` gave reads, as ``lines``, and how what is fed by it does.

    A line's label has no number where there is one line of that name, else its first, second and last. A source in the same loop reads
    ``cell`` (this iteration; ``cell[this][1]`` for a port), ``cell[previous]``, ``cell[2 before]``; in one that is over ``cell[last]``, unless
    the same reader also takes other iterations of it.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        items = list(items)
        self._rows = dict(instances(items))
        self._wheres = {row.key: where for where, row in self._rows.items() if row.key}
        self._calls: defaultdict[Where, list[Row]] = defaultdict(list)  # by line, whose place is a `Where` without iterations
        for where, row in self._rows.items():
            self._calls[where[::2]].append(row)
        short = {place: _span([row.label for row in calls], brief=True) for place, calls in self._calls.items()}
        often = Counter(short.values())
        self._names = {p: short[p] if often[short[p]] == 1 else _span([r.label for r in calls]) for p, calls in self._calls.items()}
        self._loops: dict[Where, Loop] = {}
        plan = list(self._plan(items))
        self.lines = [self._line(found, depth) if isinstance(found, tuple) else Line(None, found.count, depth) for found, depth in plan]

    def entries(self, entries: Sequence[Entry]) -> list[Entry]:
        """What feeds something outside of the rows, such as a result, as it reads."""
        crowded = self._crowded(entries)
        return [self._entry(entry, (), {}, crowded)[0] for entry in entries]

    def _plan(self, items: Sequence[Item]) -> Iterator[tuple[Where | Loop, int]]:
        """Places of lines, and the loops that have several of them before these, each with its depth."""
        stack: list[tuple[Where, Item, int]] = [((n,), item, 0) for n, item in reversed(list(enumerate(items)))]
        while stack:
            place, item, depth = stack.pop()
            if isinstance(item, Row):
                yield place, depth
                continue
            self._loops[place] = item
            several = len(item.body) > 1 or isinstance(item.body[0], Loop)
            if several:
                yield item, depth
            stack += [((*place, n), part, depth + several) for n, part in enumerate(item.body)][::-1]

    def _line(self, place: Where, depth: int) -> Line:
        loops = [self._loops[place[:n]] for n in range(1, len(place))]
        lead, first = tuple(loop.lead for loop in loops), self._calls[place][0]
        tensors = {slot: t for turns in _up_to(lead) for slot, t in self._tensors(place, turns).items()}
        crowded = self._crowded([e for t in self._tensors(place, lead).values() for e in t.entries])
        read = [self._incoming(place, lead, slot, crowded) for slot in tensors]
        inputs = tuple(t._replace(entries=tuple(e for e, _ in found)) for t, found in zip(tensors.values(), read, strict=True))
        row = first._replace(label=self._names[place], inputs=inputs)
        times = loops[-1].count if loops and len(loops[-1].body) == 1 else 1
        return Line(row, times, depth, tuple(back for found in read for _, back in found))

    def _incoming(self, place: Where, turns: Where, slot: _Slot, crowded: set[Where]) -> list[tuple[Entry, int]]:
        """How the entries of one argument read: the steady ones with how many iterations they look back, then those of first iterations."""
        while turns and turns[-1] and self._goes_on(place, turns, slot):
            turns = (*turns[:-1], turns[-1] - 1)
        found = list(self._read(place, turns, turns, slot, crowded))
        first: dict[Entry, None] = {}
        for early in _up_to(turns)[:-1]:
            first.update((entry, None) for entry, _ in self._read(place, early, turns, slot, crowded))
        for entry, _ in found:
            first.pop(entry, None)
        return found + [(entry._replace(label=f"first {entry.label}"), -1) for entry in first]

    def _goes_on(self, place: Where, turns: Where, slot: _Slot) -> bool:
        """Whether the innermost loop's iteration before this one is already fed like this and the next."""
        near = [self._tensors(place, (*turns[:-1], turns[-1] + n)).get(slot) for n in (-1, 0, 1)]
        tensors = [tensor for tensor in near if tensor is not None]
        inside = [[self._wheres.get(e.key, ())[::2][: len(turns)] == place[:-1] for e in tensor.entries] for tensor in tensors]
        (one, a), (two, b), (three, c) = (feeding([t] if t is not None else []) for t in near)
        return len(tensors) == 3 and one == two == three and grown_by(b, a) == grown_by(c, b) and inside[0] == inside[1]

    def _read(self, place: Where, turns: Where, steady: Where, slot: _Slot, crowded: set[Where]) -> Iterator[tuple[Entry, int]]:
        tensor = self._tensors(place, turns).get(slot)
        if tensor is None:
            return

        def later(on: Iterable[int]) -> tuple[Entry, ...] | None:
            found = self._tensors(place, tuple(on)).get(slot)
            return found.entries if found is not None and feeding([found])[0] == feeding([tensor])[0] else None

        going = [n for n, turn in enumerate(turns) if turn == steady[n]]
        nexts = {2 * n + 1: entries for n in going if (entries := later(turn + (m == n) for m, turn in enumerate(turns))) is not None}
        last = later(self._loops[place[: n + 1]].count - 1 if n in going else turn for n, turn in enumerate(turns)) or tensor.entries
        for n, entry in enumerate(tensor.entries):
            yield self._entry(entry, _where(place, turns), {level: entries[n] for level, entries in nexts.items()}, crowded, last[n])

    def _entry(
        self, entry: Entry, where: Where, nexts: dict[int, Entry], crowded: set[Where], last: Entry | None = None
    ) -> tuple[Entry, int]:
        """How an entry at ``where`` reads; ``nexts`` is what stands there one iteration on, for each level of loops where that is known."""
        target = self._wheres.get(entry.key, ())
        shared = {n for n in range(1, min(len(where), len(target)), 2) if where[:n:2] == target[:n:2]}
        moving = {n for n in shared if n not in nexts and where[n] >= target[n]}
        for level, after in nexts.items():
            if after != entry:
                on = (*target[:level], target[level] + 1, *target[level + 1 :]) if level in shared else None
                if self._wheres.get(after.key) != on or on is None:
                    return self._named(entry, _span([entry.label, after.label, (last or after).label])), 0
                moving.add(level)
        gaps = {level: where[level] - target[level] for level in sorted(moving)}
        marks = []
        for level in range(1, len(target), 2):
            if level in moving:
                marks.append(_mark(gaps[level]))
            elif target[level] == self._loops[target[:level:2]].count - 1 and target[::2] not in crowded:
                marks.append("last")
            else:
                return self._named(entry, entry.label), 0
        if not marks:
            return entry, 0
        port = "" if entry.label == self._rows[target].label else entry.label[entry.label.rfind("[") :]
        while marks[:1] == ["this"] and (len(marks) > 1 or not port):  # it goes without saying, but where a port would read as a number
            del marks[0]
        text = f"[{', '.join(marks)}]" if marks else ""
        return self._named(entry, self._names[target[::2]] + text + port), next(filter(None, gaps.values()), 0)

    def _named(self, entry: Entry, label: str) -> Entry:
        where = self._wheres.get(entry.key)
        return entry._replace(label=label, key=self._calls[where[::2]][0].key if where is not None else entry.key)

    def _tensors(self, place: Where, turns: Where) -> dict[_Slot, Incoming]:
        """What feeds a line in these iterations of its loops; nothing where there are not so many."""
        row, count = self._rows.get(_where(place, turns)), Counter[str]()
        found = {}
        for tensor in row.inputs if row is not None else ():
            found[tensor.name, count[tensor.name]] = tensor
            count[tensor.name] += 1
        return found

    def _crowded(self, entries: Iterable[Entry]) -> set[Where]:
        """Lines of which several iterations are among the sources."""
        often = Counter(where[::2] for where in {self._wheres[e.key] for e in entries if e.key in self._wheres})
        return {place for place, number in often.items() if number > 1}


def _where(place: Where, turns: Where) -> Where:
    return (*chain.from_iterable(zip(place, turns, strict=False)), place[-1])


def _up_to(turns: Where) -> list[Where]:
    return list(product(*(range(n + 1) for n in turns)))


def _mark(gap: int) -> str:
    return {0: "this", 1: "previous"}.get(gap, f"{gap} before" if gap > 0 else f"{-gap} after")


def _span(labels: Sequence[str], brief: bool = False) -> str:
    """Labels that differ in numbers as one: ``relu[0,2…18]``; those numbers left out if it is to be brief."""
    first, second, last = (split_label(label) for label in (labels[0], labels[min(1, len(labels) - 1)], labels[-1]))
    parts = list(first)
    for n in range(1, len(parts), 2):
        if first[n] == last[n]:
            parts[n] = f"[{first[n]}]"
        else:
            step = int(second[n]) - int(first[n])
            parts[n] = "" if brief else f"[{first[n]}…{last[n]}]" if abs(step) < 2 else f"[{first[n]},{second[n]}…{last[n]}]"
    return "".join(parts)
