"""The tape: what every torch call of a recording made of what, in numbers.

A *value* is a number. Tensors are known by identity, with a weak reference, and never held. A write is remembered for the storage, so that
bases, views and aliases see it. Numbers grow with time and are the clock as well.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["CALL", "GRADIENT", "LEAVES", "OP", "Tape", "Unknown", "gather", "guard_of", "place", "storage_of"]

Tensor = torch.Tensor
_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

OP, CALL, GRADIENT, LEAVES = range(4)
"""Kinds of entries on the tape: an operation, a value as it left a call, a value that only autograd knows, an end of the search."""


class Unknown:
    """The closed list of reasons why a source can be unknown. ``docs/limits.md`` has a paragraph on each."""

    UNSEEN = (
        "made where neither autograd nor the function mode sees it (numpy, a C++ extension, a scripted function without gradient, "
        "another thread, or before the pass began); make it with torch calls inside the forward, or register it as a buffer"
    )
    BACKWARD = "a gradient that a backward pass left in .grad; the lineage of a backward is not recorded"
    EARLIER = "computed before this recording began; detach it between passes, or open the recording before the first of them"
    NO_GRADIENT = "autograd keeps no way through here and the shadow plane is off; record with shadow=True"
    LOST_OPERAND = "an operand without gradient of an operation that only autograd saw; its other operands are named"


class Tape:
    """Everything noted during one recording: entries by number, numbers by tensor, writes by storage."""

    def __init__(self, adopt: Callable[[Tensor], int]) -> None:
        self.adopt = adopt  # what to make of a tensor that was never seen
        self.entries: dict[int, tuple[Any, ...]] = {}
        self.next = itertools.count().__next__  # atomic under the interpreter lock, as is setting a key
        self.values: dict[int, tuple[Any, int, int]] = {}  # id(tensor) -> (weak reference, value, when)
        self.stores: dict[int, tuple[int, int, int, Any]] = {}  # storage -> (value, when, when last overwritten whole, guard)
        self.cuts: dict[int, bool] = {}  # operations that lost the gradient of an operand -> whether grad mode was on
        self.wrapped: dict[int, tuple[int, Any]] = {}  # storage inside a functorch wrapper -> (value, guard)

    def leaf(self, kind: str, name: str, call: int = -1, port: int = -1, grad: bool = False) -> int:
        number = self.next()
        self.entries[number] = (LEAVES, kind, call, (), grad, None, 0, port, name, None)
        return number

    def gradient(self, tensor: Tensor, through: bool = False) -> int:
        """A value that only autograd knows how it came about; the walk goes on in its graph.

        ``through``: what ``autograd.grad`` gave was computed from the insides of layers, so the walk goes through these too.
        """
        number = self.next()
        self.entries[number] = (GRADIENT, "", -1, (), True, None, 0, tensor.grad_fn, tensor.output_nr, through)
        return number

    def know(self, tensor: Tensor, value: int) -> None:
        self.values[id(tensor)] = (weakref.ref(tensor), value, value)

    def known(self, tensor: Tensor) -> tuple[Any, int, int] | None:
        found = self.values.get(id(tensor))
        return found if found is not None and found[0]() is tensor else None

    def value(self, tensor: Tensor) -> int:
        """The value that a tensor holds now."""
        found = self.values.get(id(tensor))
        if found is None or found[0]() is not tensor:
            value = self.adopt(tensor)
            if id(tensor) not in self.values or self.values[id(tensor)][0]() is not tensor:
                self.know(tensor, value)
            found = self.values[id(tensor)]
        if self.stores:
            store = self.stores.get(storage_of(tensor))
            if store is not None and store[1] > found[2]:
                return self._written(tensor, found, store)
        return found[1]

    def _written(self, tensor: Tensor, found: tuple[Any, int, int], store: tuple[int, int, int, Any]) -> int:
        """Someone wrote to the storage since: the last writer is the producer, beside the module that had handed the tensor out."""
        value = store[0]
        own = self.entries[found[1]]
        if own[0] == CALL and store[2] <= found[2] and own[7] >= 0 and own[9]:
            grad = tensor.requires_grad
            value = self.next()
            writer = self.entries[store[0]]
            parents = (found[1], store[0]) if grad else (~found[1], ~store[0])
            self.entries[value] = (OP, writer[1] or "write", writer[2], parents, grad, writer[5], writer[6], 0, 0, None)
        self.values[id(tensor)] = (found[0], value, self.next())
        return value

    def write(self, tensor: Tensor, value: int, whole: bool) -> None:
        """``tensor``'s memory holds ``value`` from now on."""
        self.know(tensor, value)
        storage = storage_of(tensor)
        if storage:
            old = self.stores.get(storage)
            guard = old[3] if old is not None else guard_of(tensor)
            self.stores[storage] = (value, value, value if whole else old[2] if old is not None else -1, guard)

    def base_value(self, tensor: Tensor) -> int:
        """What the whole memory behind ``tensor`` holds: a partial write leaves the rest of it as it was."""
        base = tensor._base if tensor._is_view() else None
        return self.value(tensor if base is None else base)


def storage_of(tensor: Tensor) -> int:
    """Address of the tensor's storage object, 0 where it has none (sparse, functorch wrappers)."""
    try:
        address: int = tensor.untyped_storage()._cdata
        return address
    except (NotImplementedError, RuntimeError):
        return 0


def guard_of(tensor: Tensor) -> Any:
    """Keeps the address of a storage from being used again, not its memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def gather(value: Any, into: list[Tensor]) -> None:
    """The tensors in an argument of a torch function, in order."""
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            gather(item, into)
    elif isinstance(value, dict):
        for item in value.values():
            gather(item, into)
    elif isinstance(value, slice):
        gather((value.start, value.stop, value.step), into)


def place(frame: Any, across_calls: bool = False) -> tuple[Any, int]:
    """(code, instruction) of the first frame outside torch and this package.

    (None, 0) within the forward of one of torch's own modules, where the call's own place says more, unless ``across_calls``.
    """
    for _ in range(64):
        if frame is None:
            break
        code = frame.f_code
        if not code.co_filename.startswith(_INSIDE):
            return code, frame.f_lasti
        if code.co_name == "_call_impl" and not across_calls:
            break
        frame = frame.f_back
    return None, 0
