"""Where Python read a tensor's value: an ``if`` on it, ``int(t)``, ``.item()``, or a shape that hangs on it. On a GPU each waits for the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gradlineage.tables import Facts
from gradlineage.tape import LEAVES, OP, Tape

__all__ = ["ReadNote", "inner_ways", "kind_of_read", "plain_value", "size_of"]

Tensor = torch.Tensor

#: Functions that take sizes or positions as tensors of no dimension, and read them.
_SIZED = frozenset(
    """zeros ones empty full rand randn randint randperm arange linspace logspace eye view reshape expand repeat narrow select unflatten
    new_zeros new_ones new_empty new_full tile chunk split""".split()
)


class ReadNote(NamedTuple):
    """One reading, as it is noted. ``value`` is what Python saw, where that was one number; of a shape its first size."""

    kind: str
    order: int  # a number on the tape
    call: int
    value: bool | int | float | str | None
    operands: tuple[int, ...]  # values on the tape
    code: Any
    at: int
    waits: bool  # whether the device is one that has to be waited for


def kind_of_read(facts: Facts, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The kind of decision that a call of a function which may read values is, '' for none."""
    name = facts.name
    if name == "getitem":
        return _indexing(args[1]) if len(args) > 1 else ""
    if name == "where":
        return "shape" if len(args) + len(kwargs) == 1 else ""
    if name == "repeat_interleave":
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0] if args else None)
        return "shape" if isinstance(repeats, Tensor) and kwargs.get("output_size") is None else ""
    if name == "one_hot":
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        return "shape" if classes == -1 else ""
    if name in _SIZED:
        sizes = args if not args or not isinstance(args[0], Tensor) or args[0].dim() == 0 else args[1:]
        return "index" if any(_whole(s) or (isinstance(s, list | tuple) and any(map(_whole, s))) for s in sizes) else ""
    return facts.reads


def _whole(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and not value.dtype.is_floating_point and value.dtype != torch.bool


def _indexing(index: Any) -> str:
    """``x[mask]`` has a shape that hangs on the mask; ``x[:n]`` and ``x[n]`` read a number."""
    found = ""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
            return "shape"
        if _whole(part) or (isinstance(part, slice) and any(isinstance(p, Tensor) for p in (part.start, part.stop, part.step))):
            found = "index"
    return found


def size_of(result: Any) -> int | None:
    """The size that hung on the values: of the first dimension of the first tensor that came out."""
    while isinstance(result, tuple | list) and result:
        result = result[0]
    return int(result.shape[0]) if isinstance(result, Tensor) and result.dim() else None


def plain_value(value: Any) -> bool | int | float | str | None:
    """A number as it can be kept and compared: what is not finite by name."""
    if type(value) in (bool, int):
        return value  # type: ignore[no-any-return]
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    return None


def inner_ways(tape: Tape, note: ReadNote, inside: Callable[[int], bool]) -> dict[int, tuple[str, ...]]:
    """For a reading within a layer: the values from outside that it was computed from, with the operations on the shortest way from each.

    Values that the layer made of nothing are left out where there are others.
    """
    entries = tape.entries
    came: dict[int, int] = dict.fromkeys(note.operands, -1)
    queue = deque(note.operands)
    taken: list[int] = []
    while queue:
        number = queue.popleft()
        if not inside(number) or not entries[number][3]:
            taken.append(number)
            continue
        for edge in entries[number][3]:
            parent = edge if edge >= 0 else ~edge
            if parent not in came:
                came[parent] = number
                queue.append(parent)
    kept = [n for n in taken if entries[n][0] != LEAVES or entries[n][1] not in ("constant", "empty")] or taken
    return {number: tuple(_names(tape, came, number)) for number in kept}


def _names(tape: Tape, came: dict[int, int], number: int) -> Iterator[str]:
    while (number := came[number]) >= 0:
        kind, name, *_ = tape.entries[number]
        if kind == OP and name:
            yield name
