"""The tape: what every torch call of a recording made of what, in numbers.

A *value* is a number. Tensors are known by identity, with a weak reference, and never held. A write is remembered for the storage, so that
bases, views and aliases see it. Numbers grow with time and are the clock as well.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradlineage.private import level
from gradlineage.tensors import address_of, covers_storage, extent, inner_tensors, node_of, storage_of, takes_gradient, unwrapped

__all__ = ["CALL", "GRADIENT", "LEAVES", "MEMORY", "OP", "Tape", "Unknown"]

Tensor = torch.Tensor
_ORDINARY = (Tensor, torch.nn.Parameter)
_ref = weakref.ref
_MOST_PIECES = 64  # of one memory; of more only the ends are known

OP, CALL, GRADIENT, LEAVES, MEMORY = range(5)
"""Kinds of entries on the tape: an operation, a value as it left a call, a value that only autograd knows, an end of the search, and what
memory holds after a part of it was written: the value before, and what the write brought."""


class Unknown:
    """The closed list of reasons why a source can be unknown. ``docs/limits.md`` has a paragraph on each."""

    UNSEEN = (
        "made where neither autograd nor the function mode sees it (numpy, a C++ extension, a scripted function without gradient, "
        "another thread, or before the pass began); make it with torch calls inside the forward, or register it as a buffer"
    )
    WRITTEN = "changed in place by code that the function mode does not see; do that write with torch calls in the forward"
    EMPTY = (
        "memory from torch.empty that nothing which was seen has filled (a collective of torch.distributed, a C++ extension, or nobody); "
        "fill it with torch calls, or use torch.zeros"
    )
    BACKWARD = "a gradient that a backward pass left in .grad; the lineage of a backward is not recorded"
    EARLIER = "computed before this recording began; detach it between passes, or open the recording before the first of them"
    NO_GRADIENT = "autograd keeps no way through here and the shadow plane is off; record with shadow=True"
    LOST_OPERAND = "an operand without gradient of an operation that only autograd saw; its other operands are named"


class Tape:
    """Everything noted during one recording: entries by number, numbers by tensor, writes by storage."""

    def __init__(self, adopt: Callable[[Tensor], int], is_registered: Callable[[Tensor], bool]) -> None:
        self.adopt = adopt  # what to make of a tensor that was never seen
        self.is_registered = is_registered  # whether a tensor is a parameter or buffer
        self.entries: dict[int, tuple[Any, ...]] = {}
        self.next = itertools.count().__next__  # atomic under the interpreter lock, as is setting a key
        self.values: dict[int, tuple[Any, int, int, int]] = {}  # id(tensor) -> (weak reference, value, when, version then)
        # storage -> (weak reference, its first value, extents of what was seen of it, None where that is all)
        self.memory: dict[int, tuple[Any, int, set[tuple[int, int]] | None]] = {}
        self.stores: dict[int, tuple[Any, ...]] = {}  # storage -> what was written, see `store`
        self.harmless: dict[int, tuple[Any, int]] = {}  # storage -> (weak reference, version up to which nothing was written unseen)
        self.written: dict[int, int] = {}  # the value after an in-place write -> the one before
        self.lazy: set[int] = set()  # ids of parameters and buffers that have no shape yet
        self.shared: set[int] = set()  # values of tensors over memory that was there before them
        self.wiped: dict[int, int] = {}  # a write that left nothing of a tensor with gradient -> the value it wiped, which gets zeros
        self.overwrites: dict[int, int] = {}  # every write -> what the whole memory held before
        self.reads: list[Any] = []  # where Python read a value
        self.aliased: set[int] = set()  # storages over which a module handed out an alias
        self.regained: dict[int, Any] = {}  # values made without gradient whose tensor was given one: the autograd node that did
        self.cuts: dict[int, bool] = {}  # operations that lost the gradient of an operand -> whether grad mode was on

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

    def know(self, tensor: Tensor, value: int, fresh: bool = False) -> None:
        """``tensor`` holds ``value`` from now on. ``fresh``: so does its memory, whatever was known of that."""
        try:
            version = tensor._version if level() is None else -1  # a transform's wrappers change the version of what they wrap
        except RuntimeError:  # inference tensors have none
            version = -1
        self.values[id(tensor)] = (_ref(tensor), value, value, version)
        try:
            self._remember(tensor, tensor.untyped_storage(), value, fresh)
        except (NotImplementedError, RuntimeError):  # a wrapper of functorch's: what it holds comes out as a new object
            inner = unwrapped(tensor)
            if storage_of(inner):
                self._remember(inner, inner.untyped_storage(), value, False)
        if type(tensor) not in _ORDINARY:
            for inner in inner_tensors(tensor):
                if storage_of(inner):
                    self._remember(inner, inner.untyped_storage(), value, False)

    def _remember(self, tensor: Tensor, storage: Any, value: int, fresh: bool) -> None:
        address = storage._cdata
        found = self.memory.get(address)
        if found is None or found[0]() is None:
            whole = tensor.numel() * tensor.element_size() == storage.nbytes()
            self.memory[address] = (_ref(storage), value, None if whole else {extent(tensor)[:2]})
            return
        if not fresh:
            self.shared.add(value)
        if fresh or found[2] is not None:
            pieces = found[2]
            if pieces is not None:
                pieces = None if covers_storage(tensor) else pieces | {extent(tensor)[:2]}
                if pieces is not None and len(pieces) > _MOST_PIECES:
                    pieces = {(min(first for first, _ in pieces), max(last for _, last in pieces))}
            if fresh:  # of several outputs over one memory the first port stands for it
                now, before = self.entries[value], self.entries[found[1]]
                fresh = now[0] != CALL or before[0] != CALL or now[2] != before[2]
            self.memory[address] = (found[0], value if fresh else found[1], pieces)

    def _memory_of(self, tensor: Tensor) -> tuple[Any, int, set[tuple[int, int]] | None] | None:
        found = self.memory.get(storage_of(tensor))
        return found if found is not None and found[0]() is not None else None

    def _pieces(self, tensor: Tensor) -> set[tuple[int, int]] | None:
        found = self._memory_of(tensor)
        return found[2] if found is not None else None

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor is all that is known of its memory."""
        if covers_storage(tensor):
            return True
        pieces = self._pieces(tensor)
        if pieces is None:
            return False
        first, last, dense = extent(tensor)
        return dense and all(first <= f and last >= e for f, e in pieces)

    def alone(self, tensor: Tensor) -> bool:
        """Whether no larger tensor was seen around this one in its memory."""
        pieces = self._pieces(tensor)
        if pieces is None:
            return False
        first, last, dense = extent(tensor)
        return dense and all(e <= first or f >= last or (first <= f and last >= e) for f, e in pieces)

    def seen_part(self, tensor: Tensor) -> bool:
        """Whether a tensor that is new to us lies in what was seen of its memory, at least in part."""
        pieces = self._pieces(tensor)
        if pieces is None:
            return True
        first, last, _ = extent(tensor)
        return any(first < e and last > f for f, e in pieces)

    def held(self, tensor: Tensor) -> int | None:
        """The value of the whole memory behind a tensor, if it was ever seen."""
        store = self.store(tensor)
        if store is not None:
            return int(store[0])
        found = self._memory_of(tensor)
        return found[1] if found is not None else None

    def older(self, tensor: Tensor, start: int) -> bool:
        """Whether the memory behind a tensor was there at a time, or is the model's or an input's."""
        found = self._memory_of(tensor)
        if found is None:
            return False
        kind, name, *_ = self.entries[found[1]]
        return found[1] < start or (kind == LEAVES and name not in ("constant", "empty"))

    def known(self, tensor: Tensor) -> tuple[Any, int, int, int] | None:
        found = self.values.get(id(tensor))
        return found if found is not None and found[0]() is tensor else None

    def value(self, tensor: Tensor) -> int:
        """The value that a tensor holds now."""
        found = self.values.get(id(tensor))
        if found is None or found[0]() is not tensor:
            value = self.adopt(tensor)
            found = self.known(tensor)
            if found is None:
                self.know(tensor, value)
                found = self.values[id(tensor)]
        if self.stores and (store := self.stores.get(storage_of(tensor))) is not None and store[1] > found[2] and store[3]() is not None:
            return self._written(tensor, found, store)
        if found[3] >= 0 and tensor._version != found[3]:
            return self._changed(tensor, found)
        return found[1]

    def _written(self, tensor: Tensor, found: tuple[Any, int, int, int], store: tuple[Any, ...]) -> int:
        """Someone wrote to the storage since: the last writer is the producer, beside the modules that had handed the tensor out."""
        value: int = store[0]
        own: int = found[1]
        if self._apart(tensor, store):
            value = own
        elif store[2] <= found[2]:
            calls, parted = self._handed(own, value)
            # autograd knows nothing of a write to .data; to an alias that a module handed out in place of the tensor it would have known
            unnoticed = tensor.requires_grad and self.entries[own][4] and not self.entries[value][4]
            unnoticed = unnoticed and storage_of(tensor) not in self.aliased
            old: int = own if unnoticed or not parted else value
            for call in () if old == own else reversed(calls):  # what memory holds now, as it left each of them
                entry = self.entries[call]
                edge = old if self.entries[old][4] else ~old
                old = self.next()
                self.entries[old] = (*entry[:3], (edge,), *entry[4:])
            if old != value:
                writer, grad = self.entries[value], tensor.requires_grad
                value = self.part(writer[1], old, (value if grad and not unnoticed else ~value,), writer[2], grad, writer[5:7], -1)
        self.values[id(tensor)] = (found[0], value, self.next(), tensor._version if found[3] >= 0 else -1)
        return value

    def _handed(self, own: int, held: int) -> tuple[list[int], bool]:
        """The calls that handed a tensor out since it parted from what its memory held, the last one first, and whether it ever did.

        ``own`` is the tensor's value before its memory was written, ``held`` what the memory holds now.
        """
        line: set[int] = set()
        calls: list[int] = []
        at: int | None = own
        low: int | None = held
        while at is not None:
            while low is not None and low >= at:
                line.add(low)
                low = self._first(low)
            if at in line or at in self.written:  # a write went into what the memory holds, wherever it was made
                return calls, True
            kind, _, _, parents, *_ = self.entries[at]
            if kind == CALL:
                calls.append(at)
            elif kind != MEMORY and len(parents) > 1:
                break
            at = self._first(at)
        return calls, False

    def _first(self, number: int) -> int | None:
        """The first operand: of a write what was there before."""
        parents = self.entries[number][3]
        return None if not parents else parents[0] if parents[0] >= 0 else ~parents[0]

    def _apart(self, tensor: Tensor, store: tuple[Any, ...]) -> bool:
        """Whether a tensor lies aside of all that was written, in memory of which only pieces were seen: each from somewhere else."""
        if self._pieces(tensor) is None:
            return False
        first, last, _ = extent(tensor)
        return bool(last <= store[4] or first >= store[5])

    def _changed(self, tensor: Tensor, found: tuple[Any, int, int, int]) -> int:
        """The version counter says that something wrote to it which the mode did not see. A parameter stays itself."""
        entry = self.entries[found[1]]
        value = found[1]
        harmless = self.harmless.get(storage_of(tensor))
        if harmless is not None and harmless[1] == tensor._version and harmless[0]() is not None:
            pass
        elif node_of(tensor) is not None:  # in-place by a custom Function or a script: autograd saw it
            value = self.gradient(tensor)
        elif entry[0] != LEAVES or entry[1] not in ("parameter", "buffer"):
            old = value if tensor.requires_grad else ~value
            value = self.step("write", (old, ~self.leaf("unknown", Unknown.WRITTEN)), -1, tensor.requires_grad)
        self.values[id(tensor)] = (found[0], value, self.next(), tensor._version)
        return value

    def edge(self, tensor: Tensor) -> int:
        """The value of an operand, inverted where it does not require grad."""
        value = self.value(tensor)
        if not (tensor.requires_grad or (level() is not None and takes_gradient(tensor))):
            return ~value
        blank = not self.entries[value][4] or (self.cuts and self.cuts.get(value) is False)
        if blank and value not in self.regained and (node := node_of(tensor)) is not None:
            # what a custom Function returned was computed without gradient; where only Python still has its node, torch no longer answers
            self.regained[value] = node, node._sequence_nr(), node.next_functions
        return value

    def origins(self, value: int) -> tuple[bool, set[int]]:
        """Whether a call or input is among a value's ancestors, and the tensors from outside that are."""
        outside: set[int] = set()
        seen: set[int] = set()
        stack = [value]
        while stack:
            number = stack.pop()
            kind, name, _, parents, *_ = self.entries[number]
            if kind in (CALL, GRADIENT) or name == "input":
                return True, outside
            if kind == LEAVES and name == "unknown":
                outside.add(number)
            if number not in seen:
                seen.add(number)
                stack += [p if p >= 0 else ~p for p in parents]
        return False, outside

    def touched(self, tensor: Tensor) -> None:
        """``tensor`` was changed in place in what its value does not depend on, such as its shape."""
        found = self.known(tensor)
        if found is not None and found[3] >= 0:
            self.values[id(tensor)] = (*found[:3], tensor._version)
            storage = storage_of(tensor)
            if storage in self.memory:  # views and detached tensors share the version counter
                self.harmless[storage] = self.memory[storage][0], tensor._version

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """What is known of tensors and their memory: how parameters got their first values says nothing."""
        for tensor in tensors:
            self.values.pop(id(tensor), None)
            self.memory.pop(storage_of(tensor), None)
            self.stores.pop(storage_of(tensor), None)

    def step(self, name: str, parents: tuple[int, ...], call: int, grad: bool, code: Any = None, at: int = 0) -> int:
        """An operation that no function call shows."""
        number = self.next()
        self.entries[number] = (OP, name, call, parents, grad, code, at, 0, 0, None)
        return number

    def write(self, tensor: Tensor, value: int, held: int, whole: bool) -> None:
        """``tensor`` holds ``value`` and its memory ``held`` from now on; ``whole``: nothing is left of what was there."""
        old = self.store(tensor)
        self.know(tensor, value)
        storage = storage_of(tensor)
        if storage in self.memory:
            first, last = (0, -1) if self.memory[storage][2] is None else extent(tensor)[:2]
            if old is not None:
                first, last = min(first, old[4]), max(last, old[5])
            since = held if whole else old[2] if old is not None else -1
            self.stores[storage] = (held, self.next(), since, self.memory[storage][0], first, last)
            self.later(tensor)

    def later(self, tensor: Tensor) -> None:
        """What is known of a tensor is true now, whatever was written before."""
        ref, value, _, version = self.values[id(tensor)]
        self.values[id(tensor)] = ref, value, self.next(), version

    def part(self, name: str, old: int, brought: tuple[int, ...], call: int, grad: bool, where: tuple[Any, int], own: int) -> int:
        """What memory holds after a partial write: ``old`` and what the operation brought. ``own``: the writing operation's value."""
        number = self.next()
        edge = old if self.entries[old][4] else ~old
        self.entries[number] = (MEMORY, name, call, (edge, *brought), grad, *where, 0, 0, own)
        return number

    def store(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """What was last written to the tensor's memory: (value, when, when last overwritten as a whole, weak reference to the storage, extent).

        The extent is that of all writes so far: first byte and the one after the last.
        """
        found = self.stores.get(storage_of(tensor))
        return found if found is not None and found[3]() is not None else None

    def sharing(self, tensor: Tensor) -> int | None:
        """What the memory of a tensor that is new to us holds: ``Parameter(t)``, what vmap hands back, numpy there and back."""
        held = self.held(tensor)
        if held is not None:
            return held if self.seen_part(tensor) else None
        storage = storage_of(tensor)
        address = address_of(tensor.untyped_storage()) if storage else 0
        for number, (ref, value, *_) in list(self.memory.items()) if address else ():
            other = ref()
            if other is not None and address_of(other) == address and other.device == tensor.device:
                store = self.stores.get(number)
                return store[0] if store is not None and store[3]() is not None else value
        return None

    def base_value(self, tensor: Tensor) -> int:
        """What the whole memory behind ``tensor`` holds: a partial write leaves the rest of it as it was."""
        base = tensor._base if tensor._is_view() else None
        if base is not None and (self.known(base) is not None or self.is_registered(base)):
            return self.value(base)
        held = self.held(tensor)  # a view that torch does not call one (of .data, in inference mode), or of something from outside
        return self.value(tensor) if held is None or self.covers(tensor) else held
