"""In-place writes between two layers that read the same memory: who had read it before, and who after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from gradlineage.record import Recorder
from gradlineage.tables import REARRANGING
from gradlineage.tape import CALL, MEMORY, OP

__all__ = ["between_reads"]


def between_reads(recorder: Recorder, layer: list[bool]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(number of the write, layer calls that had read the memory it wrote, layer calls that read it after), in running order.

    A write of what the earlier readers made of it, as ``x += block(x)``, is left out: it cannot come before them.
    """
    tape, calls = recorder.tape, recorder.calls
    if not tape.overwrites:
        return
    content = _content_of(recorder)
    readers: defaultdict[int, list[int]] = defaultdict(list)
    told = {*tape.overwrites, *map(content, tape.overwrites.values())}
    for call in calls:
        for *_, value in call.inputs if layer[call.index] else ():
            held = content(value)
            # who hands a tensor on has not looked at it
            if held in told and all(content(out) != held for *_, out in call.outputs):
                readers[held].append(call.index)
    waiting: dict[int, list[int]] = {}  # what memory holds -> who read what it held before and was not told of
    for number, before in tape.overwrites.items():
        writer, old = tape.entries[number][2], content(before)
        earlier = [*waiting.pop(old, ()), *(c for c in readers[old] if c != writer and calls[c].start < number)]
        earlier = _without_makers(recorder, number, earlier)
        later = [c for c in readers[number] if c != writer]
        if earlier and later:
            yield number, tuple(dict.fromkeys(earlier)), tuple(dict.fromkeys(later))
        elif earlier:
            waiting[number] = earlier


def _content_of(recorder: Recorder) -> Callable[[int], int]:
    """What a value stands for: the write that left it, or the first value of its memory, seen through views and modules that hand it on."""
    entries, overwrites = recorder.tape.entries, recorder.tape.overwrites
    known: dict[int, int] = {}

    def content(value: int) -> int:
        way = []
        while value not in known:
            way.append(value)
            kind, name, _, parents, *_, last = entries[value]
            if value in overwrites or not parents:
                below = value
            elif kind == MEMORY:
                below = last if last >= 0 else parents[-1]
            elif kind == CALL or (kind == OP and name in REARRANGING and value in recorder.tape.shared):
                below = parents[0]
            else:
                below = value
            if _plain(below) == value:
                known[value] = value
            value = _plain(below)
        return known.setdefault(way[0], known[value]) if way else known[value]

    return content


def _without_makers(recorder: Recorder, number: int, readers: list[int]) -> list[int]:
    """The readers that had no part in what was written."""
    if not readers:
        return readers
    entries = recorder.tape.entries
    left = set(readers)
    first = min(recorder.calls[c].start for c in readers)
    seen: set[int] = set()
    stack = [_plain(p) for p in entries[number][3][1:]]
    while stack and left:
        value = stack.pop()
        if value in seen or value < first:
            continue
        seen.add(value)
        kind, _, call, parents, *_ = entries[value]
        if kind in (OP, CALL):
            left.discard(call)
        stack += [_plain(p) for p in parents]
    return [c for c in readers if c in left]


def _plain(edge: int) -> int:
    return edge if edge >= 0 else ~edge
