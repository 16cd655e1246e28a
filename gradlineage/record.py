"""The one mutable object: hooks that note every module call, its inputs and its outputs, while a forward runs.

A call's inputs are what its forward receives after all pre-hooks, its outputs what it returned before the user's own forward hooks.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from gradlineage.containers import alias_of, rebuild, replaceable, tensors_in
from gradlineage.identify import Identifier
from gradlineage.notes import CallNote, ModuleNote, line_of, looks, place_of_call
from gradlineage.private import backward_task, disabled, global_hook_first, leave_mode, level, sequence_number
from gradlineage.registry import Keeper
from gradlineage.shadow import ShadowMode
from gradlineage.tape import CALL, LEAVES, MEMORY
from gradlineage.tensors import node_of, storage_of, takes_gradient

__all__ = ["Recorder"]

get_ident = threading.get_ident
Tensor = torch.Tensor
_open: list[Recorder] = []  # recordings under way, in any thread


class _Hook:
    """A hook. Pickled or deep-copied along with the module it is on, it becomes a callable of the standard library's that does nothing."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method, self.on = method, False

    def __call__(self, *args: Any) -> Any:
        if not self.on or backward_task() != -1:
            return None
        with disabled():
            return self.method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Recorder(Identifier):
    """Hooks on models, a tape, and the calls noted so far.

    Args:
        models: by the first part of their paths; ``{"": model}`` for a single one.
        shadow: whether the function mode runs.
        alias: whether a module that hands its input through returns a fresh alias of it. Not where the caller keeps the graph.
        restore: whether what the pass writes to parameters and buffers is put back.
    """

    _on = False

    def __init__(self, models: Mapping[str, nn.Module], *, shadow: bool, alias: bool, restore: bool) -> None:
        super().__init__(models, shadow)
        self.alias = alias
        self.keeper = Keeper(self.registry) if restore else None
        self.first_sequence = 0
        self.threads: set[int] = set()
        self.failures: list[tuple[BaseException, CallNote]] = []  # innermost first, while the pass runs
        self._times: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._handles: list[Any] = []
        self._strangers: list[nn.Module] = []  # keeps their ids theirs
        self._pre = _Hook(self._before)
        self._mode: ShadowMode | None = None
        self._thread = 0

    # -- attaching and detaching ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach hooks and enter the mode. `stop` undoes it, also after a failure half-way."""
        self._thread = threading.get_ident()
        self.first_sequence = sequence_number()
        _open.append(self)
        self._pre.on = self._on = True
        for prefix, model in self.registry.models.items():
            self._attach(model, prefix, True)
        self._handles.append(module_hooks.register_module_forward_pre_hook(self._entering))
        self._handles.append(module_hooks.register_module_forward_hook(self._leaving, always_call=True))
        global_hook_first(self._handles[-1].id)
        if self.keeper is not None:
            self.keeper.begin()
            if not self.shadow:
                self.keeper.keep_all()  # nothing will tell of writes
        if self.shadow:
            mode = ShadowMode(self.tape, self._stack(), self.keeper.before_write if self.keeper is not None else None)
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._mode = mode

    def stop(self) -> None:
        """Leave the mode, remove every hook, close calls that never came back."""
        if self._mode is not None:
            self._mode.on = False
            leave_mode(self._mode)
            self._mode = None
        if self in _open:
            _open.remove(self)
        self._pre.on = self._on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.failures.clear()  # exceptions hold frames, and these tensors
        for stack in self._stacks.values():
            while stack:
                stack.pop().failed = True

    def release(self) -> None:
        """Let go of everything, autograd's nodes consumers first: a deep graph freed in any other order overruns the C stack."""
        self.claims.clear()
        entries = self.tape.entries
        for number in reversed(list(entries)):
            del entries[number]
        while self.nodes:
            self.nodes.pop()
        vars(self).clear()  # the hooks, the tape and this object refer to each other

    def _attach(self, model: nn.Module, prefix: str, registered: bool) -> None:
        """Take in a model's modules; those with pre-hooks of the user's get one of ours after them, for what their forward is given."""
        for note in self.registry.add(model, prefix, registered):
            if note.module._forward_pre_hooks and not note.script:
                note.hooked = True
                self._handles.append(note.module.register_forward_pre_hook(self._pre, with_kwargs=True))

    # -- calls -----------------------------------------------------------------------------------------------------------------------

    def failing(self, error: BaseException) -> CallNote | None:
        """The innermost call that an exception came out of."""
        found = [call for seen, call in self.failures if seen is error]
        stack = self._stack()
        return found[0] if found else stack[-1] if stack else None

    def _ours(self, thread: int) -> bool:
        """A thread's own recordings come first; a thread without one works for the only recording there is."""
        return thread == self._thread or (len(_open) == 1 and all(r._thread != thread for r in _open))

    def _entering(self, module: nn.Module, args: Any) -> None:
        """Global pre-hook. One on every module would cost more to put there and to take away than all that is noted of its call."""
        if not self._on:  # torch lists its hooks as a call begins, and one may be over before they run
            return
        registry = self.registry
        note = registry.notes.get(id(module))
        if (note is not None and note.hooked) or backward_task() != -1 or id(module) in registry.ignored:
            return
        with disabled():
            if note is None and (note := self._met(module)) is None:
                return
            # a global pre-hook is given no keyword arguments
            kwargs = None if note.takes <= len(args) else sys._getframe(1).f_locals.get("kwargs")
            self._before(module, args, kwargs if isinstance(kwargs, dict) else {}, note)

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Global hook, before all others."""
        if not self._on or backward_task() != -1:
            return None
        with disabled():
            return self._after(module, output)

    def _before(self, module: nn.Module, args: Any, kwargs: Any, note: ModuleNote | None = None) -> None:
        thread = get_ident()
        if thread != self._thread and not self._ours(thread):
            return
        if note is None:
            note = self.registry.notes[id(module)]
        stack = self._stacks.get(thread)
        if stack is None:
            stack = self._stack()
        above = stack or (self._stacks.get(self._thread, []) if thread != self._thread else [])
        parent = above[-1] if above else None
        nth = self._times.get(note.path, 0)
        self._times[note.path] = nth + 1
        spot = place_of_call(sys._getframe(2), parent)
        calls = self.calls
        call = CallNote(len(calls), note, nth, parent.index if parent is not None else -1, spot, sys.exc_info()[1], torch.is_grad_enabled())
        calls.append(call)
        inputs = call.inputs
        for position, arg in enumerate(args):
            if type(arg) is Tensor and parent is not None:
                inputs.append(((position, ""), *looks(arg), self.value(arg)))
            elif arg is not None:
                self._take(call, position, arg, parent is None)
        for key, arg in kwargs.items():
            if arg is not None:
                self._take(call, key, arg, parent is None)
        if parent is not None:
            parent.children += 1
        self.threads.add(thread)
        call.sequence, call.start = sequence_number(), self.tape.next()
        stack.append(call)

    def _take(self, call: CallNote, position: int | str, arg: Any, root: bool) -> None:
        for suffix, tensor in tensors_in(arg):
            value = self._input(tensor, call) if root else self.value(tensor)
            call.inputs.append(((position, suffix), *looks(tensor), value))

    def _input(self, tensor: torch.Tensor, call: CallNote) -> int:
        """A tensor that enters a root call and has no lineage in this recording is a model input."""
        known = self.tape.known(tensor)
        if known is not None:
            from_call, outside = self.tape.origins(known[1])
            if not from_call and len(outside) == 1:  # made of one tensor that the user brought along: that is the input
                (leaf,) = outside
                grad = self.tape.entries[leaf][4]
                self.tape.entries[leaf] = (LEAVES, "input", call.index, (), grad, None, 0, len(call.inputs), "", None)
            if from_call or len(outside) == 1:
                return self.value(tensor)
        node = node_of(tensor)
        if node is not None and (claim := self._claim(node, tensor.output_nr)) is not None:
            return claim
        value = self.tape.leaf("input", "", call.index, len(call.inputs), tensor.requires_grad)
        self.tape.know(tensor, value)
        if node is not None:
            self._touch(tensor, value)
        return value

    def _after(self, module: nn.Module, output: Any) -> Any:
        stack = self._stacks.get(get_ident())
        if not stack or (stack[-1].note.module is not module and all(call.note.module is not module for call in stack)):
            return None
        while True:
            call = stack.pop()
            call.sequence_end = sequence_number()
            if call.note.module is module:
                break
            call.failed = True  # left by an exception that no hook saw
        pending, call.pending = call.pending, None
        if output is None and (error := sys.exc_info()[1]) is not None and error is not pending:
            call.failed = True
            self.failures.append((error, call))
            return None
        if type(output) is Tensor:
            if self.shadow and self._leave_new(call, output):
                call.end = self.tape.next()
                return None
            written: list[tuple[Tensor, int]] = []
            left = self._leave(call, 0, "", output, True, written)
            if written:
                self._written_by(call, written)
            call.end = self.tape.next()
            return None if left is output else left
        leaving = tensors_in(output)
        fixed = replaceable(output)
        changed: dict[int, torch.Tensor] = {}
        written = []
        for port, (name, tensor) in enumerate(leaving):
            if id(tensor) in changed:  # the same object twice is known by its first place
                call.outputs.append((name, *looks(tensor), self.value(changed[id(tensor)])))
            else:
                changed[id(tensor)] = self._leave(call, port, name, tensor, id(tensor) in fixed, written)
        self._written_by(call, written)
        call.end = self.tape.next()
        if all(id(t) == key for key, t in changed.items()):
            return None
        return rebuild(output, lambda t: changed.get(id(t), t))

    def _leave_new(self, call: CallNote, tensor: Tensor) -> bool:
        """`_leave` for what most layers return: a tensor made within the call, all there is in its memory, which nobody wrote to since."""
        tape = self.tape
        found = tape.values.get(id(tensor))
        if found is None or found[2] < call.start or found[0]() is not tensor or level() is not None:
            return False
        entry = tape.entries[found[1]]
        if entry[0] == LEAVES or entry[0] == MEMORY or tensor._is_view():
            return False
        address = tensor.untyped_storage()._cdata
        memory = tape.memory.get(address)
        if memory is None or memory[1] < call.start or memory[2] is not None or address in tape.stores or found[3] < 0:
            return False
        grad = tensor.requires_grad
        first = tape.entries[memory[1]]
        if tensor._version != found[3] or first[0] == LEAVES or (grad and not entry[4]) or memory[0]() is None:
            return False
        value, sequence = tape.next(), sequence_number()
        tape.entries[value] = (CALL, "", call.index, (found[1] if grad else ~found[1],), grad, None, 0, 0, sequence, False)
        tape.values[id(tensor)] = (found[0], value, value, found[3])
        if first[0] != CALL or first[2] != call.index:
            tape.memory[address] = (memory[0], value, None)
        if grad and (node := node_of(tensor)) is not None:
            self.nodes.append(node)
            key = node, tensor.output_nr
            claims = self.claims.get(key)
            if claims is None:
                self.claims[key] = [(sequence, value)]
            else:
                claims.append((sequence, value))
        call.outputs.append(("", *looks(tensor), value))
        return True

    def _leave(
        self, call: CallNote, port: int, name: str, tensor: torch.Tensor, movable: bool, written: list[tuple[torch.Tensor, int]]
    ) -> torch.Tensor:
        """Claim an output for its call; returns the tensor, or the alias to hand out in its place. Those written in place join ``written``."""
        tape, start = self.tape, call.start
        inner = self.value(tensor)
        known = tape.values.get(id(tensor))
        since = known[2] if known is not None and known[0]() is tensor else inner
        store = tape.store(tensor) if tape.stores else None
        wrote = store is not None and store[1] >= start
        entry = tape.entries[inner]
        shared = not wrote and (since < start or (entry[0] == LEAVES and entry[1] not in ("constant", "empty")))
        base = tensor._base if tensor._is_view() else None
        found = tape.known(base) if base is not None else None
        if shared and movable:
            tensor = alias_of(tensor) if self.alias else tensor
            tape.aliased.add(storage_of(tensor))
        shared = shared or (found is not None and found[2] < start) or tape.older(tensor, start)
        grad = tensor.requires_grad or takes_gradient(tensor)
        value = tape.next()
        edge = inner if grad else ~inner
        tape.entries[value] = (CALL, "", call.index, (edge,), grad, None, 0, port, sequence_number(), shared)
        if self.shadow or (grad and node_of(tensor) is None):
            tape.know(tensor, value, fresh=not (shared or wrote))
        if base is not None and found is not None and not shared and not call.children and tape.entries[found[1]][0] != CALL:
            tape.know(base, value)  # made in here and handed out in parts: writes to these meet it again
        if wrote:
            written.append((tensor, value))
        if grad:
            self._touch(tensor, value)
        call.outputs.append((name, *looks(tensor), value))
        return tensor

    def _written_by(self, call: CallNote, written: list[tuple[torch.Tensor, int]]) -> None:
        """Outputs that were written in place: their call is the producer for all who hold the memory, beside what it left as it was.

        Once for every memory, by the first port; a container's child has seen to it already.
        """
        tape = self.tape
        done: set[int] = set()
        for tensor, value in written:
            store = tape.store(tensor)
            if store is None or store[0] in done or call.children:
                continue
            held = store[0]
            if tape.covers(tensor) and tape.entries[held][0] != MEMORY:
                tape.write(tensor, value, value, False)
            else:
                name = tape.entries[held][1]
                while tape.entries[held][0] == MEMORY and held > call.start:
                    edge = tape.entries[held][3][0]
                    held = edge if edge >= 0 else ~edge
                brought = value if tape.entries[value][4] else ~value
                tape.write(tensor, value, tape.part(name, held, (brought,), call.parent, tensor.requires_grad, (None, 0), -1), False)
            after = tape.store(tensor)
            if after is not None:
                done.add(after[0])
        for tensor, value in written:  # younger than the writes: each port stands for itself
            tape.know(tensor, value)
            tape.later(tensor)

    # -- modules that the models did not register ----------------------------------------------------------------------------------

    def _met(self, module: nn.Module) -> ModuleNote | None:
        """A module that the models do not have: a shallow copy of one of theirs, or one kept in a plain list or made in the forward."""
        path = self.registry.hook_dicts.get(id(module._forward_hooks))
        if path is not None:
            return ModuleNote(path, module, True)
        if not self._ours(get_ident()) or next(nn.Module.parameters(module), None) is None:
            return None  # without parameters it is what its operations are
        self._strangers.append(module)
        where = next((path for path, found in self.registry.modules() if found is module), None)
        if where is None:
            self._attach(module, self._stranger_path(module), False)
        else:  # made and registered on the way
            self.tape.forget(t for t in nn.Module.parameters(module) if not self.tape.origins(self.tape.value(t))[0])
            self._attach(module, where, True)
        return self.registry.notes.get(id(module))

    def _stranger_path(self, module: nn.Module) -> str:
        code, at, _ = place_of_call(sys._getframe(3))
        spot = f"{code.co_filename.rsplit('/', 1)[-1]}:{line_of(code, at)}" if code is not None else "unknown place"
        label = f"{type(module).__name__} at {spot}"
        count = self._labels[label] = self._labels.get(label, 0) + 1
        return f"<{label}>" if count == 1 else f"<{label}>#{count}"
