"""Inside of layer calls: which arguments were used, what came in by another door, whose parameters were borrowed.

Each layer's operations are walked once, from what it returned, wrote or left somewhere back to the values made before it began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from gradlineage.notes import CallNote
from gradlineage.record import Recorder
from gradlineage.tape import CALL, GRADIENT, LEAVES, MEMORY, OP

__all__ = ["Inside", "bypassed", "flowing", "hidden_values", "look_inside", "stray"]


class Inside:
    """What one layer call took in: values from outside in order of first use, and whether all of it was seen.

    ``plain``: gradient flows on all ways within it.
    """

    __slots__ = ("complete", "plain", "taken")

    def __init__(self) -> None:
        self.taken: dict[int, None] = {}
        self.complete = self.plain = True


def look_inside(recorder: Recorder, layer: list[bool]) -> dict[int, Inside]:
    """For every layer call, what its outputs were computed from."""
    entries = recorder.tape.entries
    made: defaultdict[int, list[int]] = defaultdict(list)  # per layer call, its operations
    for number, entry in list(entries.items()):
        if entry[0] == OP and entry[2] >= 0 and layer[entry[2]]:
            made[entry[2]].append(number)
    left = _left_behind(recorder, layer)
    return {c.index: _inside(entries, c, left.get(c.index, []), made.get(c.index, [])) for c in recorder.calls if layer[c.index]}


def _left_behind(recorder: Recorder, layer: list[bool]) -> dict[int, list[int]]:
    """Per layer call, values made in it that something else reads though it did not return them."""
    entries = recorder.tape.entries
    found: defaultdict[int, list[int]] = defaultdict(list)

    def read(value: int, reader: int) -> None:
        kind, _, owner, *_ = entries[value]
        if owner >= 0 and owner != reader and kind in (OP, MEMORY) and layer[owner] and value < recorder.calls[owner].end:
            found[owner].append(value)

    for kind, _, reader, parents, *_ in list(entries.values()):
        if kind in (OP, MEMORY, CALL):
            for edge in parents:
                read(_plain(edge), reader)
    for call in recorder.calls:
        for *_, value in call.inputs:
            read(value, call.index)
    return found


def _inside(entries: dict[int, tuple[Any, ...]], call: CallNote, left: list[int], made: list[int]) -> Inside:
    found = Inside()
    starts = [*(_plain(entries[value][3][0]) for *_, value in call.outputs), *left] or made
    seen: set[int] = set()
    stack = list(reversed(starts))
    while stack:
        number = stack.pop()
        if number in seen:
            continue
        seen.add(number)
        kind, _, owner, parents, *_ = entries[number]
        if call.start < number < call.end and kind in (OP, MEMORY) and owner == call.index:
            for edge in reversed(parents):
                stack.append(_plain(edge))
                found.plain = found.plain and entries[number][4] and (edge >= 0 or not entries[~edge][4])
        elif number > call.start and kind == GRADIENT:
            found.complete = False  # autograd alone knows: scripts, C++
        elif number > call.start and kind == LEAVES and entries[number][1] == "unknown":
            found.complete = False
            found.taken.setdefault(number)
        else:
            found.taken.setdefault(number)
    return found


def flowing(entries: dict[int, tuple[Any, ...]], call: CallNote, inside: Inside, value: int, alone: bool) -> list[int]:
    """The values taken in by a layer to which gradient goes on from a value made in it. ``alone``: the layer made no other."""
    if alone and inside.plain:
        return [v for v in inside.taken if entries[v][4]]
    found: dict[int, None] = {}
    seen: set[int] = set()
    stack = [value]
    while stack:
        number = stack.pop()
        kind, _, owner, parents, grad, *_ = entries[number]
        if number in seen or not grad:
            continue
        seen.add(number)
        if call.start < number < call.end and kind in (OP, MEMORY) and owner == call.index:
            stack.extend(p for p in reversed(parents) if p >= 0)
        else:
            found.setdefault(number)
    return list(found)


def stray(entry: tuple[Any, ...]) -> bool:
    """Whether an end of the search is a leaf that requires gradient and that no module registered: one not made in this pass."""
    return bool(entry[0] == LEAVES and entry[1] == "constant" and entry[4] and entry[5] is None)


def _plain(edge: int) -> int:
    return edge if edge >= 0 else ~edge


def hidden_values(entries: dict[int, tuple[Any, ...]], call: CallNote, inside: Inside) -> list[int]:
    """What entered a layer neither as an argument nor as its own parameter, buffer or constant."""
    given = {value for *_, value in call.inputs}
    own = f"{call.path}." if call.path else ""
    hidden = []
    for value in inside.taken:
        kind, name, *_ = entries[value]
        if value in given or (value > call.start and (kind == CALL or name == "unknown")):
            continue
        if kind == LEAVES and (
            name in ("constant", "empty") or (name in ("parameter", "buffer") and str(entries[value][8]).startswith(own))
        ):
            continue
        hidden.append(value)
    return hidden


def bypassed(recorder: Recorder, layer: list[bool], insides: dict[int, Inside]) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Parameters used though the module that owns them was never called, with the calls that used them."""
    entries = recorder.tape.entries
    called = {call.path for call in recorder.calls}
    users: defaultdict[str, set[int]] = defaultdict(set)

    def use(value: int, call: int) -> None:
        kind, name, *_ = entries[value]
        if kind == LEAVES and name == "parameter":
            full = str(entries[value][8])
            owner = full.rpartition(".")[0].split(".parametrizations")[0]
            if owner not in called:
                users[full].add(call)

    for number, inside in insides.items():
        for value in inside.taken:
            use(value, number)
    for entry in list(entries.values()):
        if entry[0] == OP and (entry[2] < 0 or not layer[entry[2]]):
            for parent in entry[3]:
                use(_plain(parent), entry[2])
    return [(name, tuple(sorted(calls))) for name, calls in users.items()]
