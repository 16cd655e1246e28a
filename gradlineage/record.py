"""The one mutable object: hooks that note every module call, its inputs and its outputs, while a forward runs.

A call's inputs are what its forward receives after all pre-hooks, its outputs what it returned before the user's own forward hooks.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from gradlineage.containers import alias_of, rebuild, replaceable, tensors_in
from gradlineage.notes import CallNote, line_of, looks, own_parameters, place
from gradlineage.registry import Keeper, Registry
from gradlineage.shadow import ShadowMode
from gradlineage.tape import CALL, LEAVES, MEMORY, OP, Tape, Unknown
from gradlineage.tensors import inner_tensors, is_leaf, node_of, storage_of, takes_gradient

__all__ = ["Recorder"]

_disable = torch._C.DisableTorchFunction
_sequence = torch._C._autograd._get_sequence_nr
_backward = torch._C._current_graph_task_id
_functorch = torch._C._functorch
_open: list[Recorder] = []  # recordings under way, in any thread


class _Hook:
    """A hook. Pickled or deep-copied along with the module it is on, it becomes a callable of the standard library's that does nothing."""

    def __init__(self, method: Callable[..., Any], recorder: Recorder) -> None:
        self.method, self.recorder = method, recorder

    def __call__(self, *args: Any) -> Any:
        if _backward() != -1 or self.recorder not in _open:
            return None
        with _disable():
            return self.method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Recorder:
    """Hooks on models, a tape, and the calls noted so far.

    Args:
        models: by the first part of their paths; ``{"": model}`` for a single one.
        shadow: whether the function mode runs.
        alias: whether a module that hands its input through returns a fresh alias of it. Not where the caller keeps the graph.
        restore: whether what the pass writes to parameters and buffers is put back.
    """

    def __init__(self, models: Mapping[str, nn.Module], *, shadow: bool, alias: bool, restore: bool) -> None:
        self.shadow, self.alias = shadow, alias
        self.tape = Tape(self._adopt, lambda tensor: self.registry.name(tensor) is not None)
        self.registry = Registry(models, self.tape)
        self.keeper = Keeper(self.registry) if restore else None
        self.calls: list[CallNote] = []
        self.claims: dict[tuple[Any, int], list[tuple[int, int]]] = {}  # (autograd node, output) -> [(sequence number, value)]
        self.nodes: list[Any] = []  # autograd nodes touched, in running order: held to the end, see `release`
        self.first_sequence = 0
        self.threads: set[int] = set()
        self.failures: list[tuple[BaseException, CallNote]] = []  # innermost first, while the pass runs
        self._times: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._handles: list[Any] = []
        self._foreign: list[tuple[dict[int, Any], int]] = []  # entries of hook dicts that have no handle
        self._strangers: list[nn.Module] = []  # keeps their ids theirs
        self._stacks: dict[int, list[CallNote]] = {}
        self._pre, self._post = _Hook(self._before, self), _Hook(self._after, self)
        self._mode: ShadowMode | None = None
        self._thread = 0

    # -- attaching and detaching ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach hooks and enter the mode. `stop` undoes it, also after a failure half-way."""
        self._thread = threading.get_ident()
        self.first_sequence = _sequence()
        _open.append(self)
        for prefix, model in self.registry.models.items():
            self._attach(model, prefix, True)
        self._handles.append(module_hooks.register_module_forward_pre_hook(self._global))
        if self.keeper is not None and not self.shadow:
            self.keeper.keep_all()  # nothing will tell of writes
        if self.shadow:
            self._mode = ShadowMode(self.tape, self._stack(), self.keeper.before_write if self.keeper is not None else None)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Leave the mode, remove every hook, close calls that never came back."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None
        if self in _open:
            _open.remove(self)
        for handle in reversed(self._handles):
            handle.remove()
        for hooks, key in self._foreign:
            hooks.pop(key, None)
        self._handles.clear()
        self._foreign.clear()
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
        for module in self.registry.add(model, prefix, registered):
            if isinstance(module, torch.jit.ScriptModule):
                # it refuses the methods that register hooks, and runs the hooks all the same
                handle = torch.utils.hooks.RemovableHandle(module._forward_hooks)
                module._forward_hooks[handle.id] = lambda m, args, output: self._post(m, args, {}, output)
                self._foreign.append((module._forward_hooks, handle.id))
            else:
                self._handles.append(module.register_forward_pre_hook(self._pre, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._post, with_kwargs=True, always_call=True, prepend=True))

    # -- calls -----------------------------------------------------------------------------------------------------------------------

    def _stack(self) -> list[CallNote]:
        return self._stacks.setdefault(threading.get_ident(), [])

    def failing(self, error: BaseException) -> CallNote | None:
        """The innermost call that an exception came out of."""
        found = [call for seen, call in self.failures if seen is error]
        stack = self._stack()
        return found[0] if found else stack[-1] if stack else None

    def _ours(self) -> bool:
        """A thread's own recordings come first; a thread without one works for the only recording there is."""
        thread = threading.get_ident()
        return thread == self._thread or (len(_open) == 1 and all(r._thread != thread for r in _open))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        found = self.registry.paths.get(id(module))
        if found is None:
            path = self.registry.hook_dicts.get(id(module._forward_hooks))
            if path is None:
                return
            found = path, True
        if not self._ours():
            return
        stack = self._stack()
        path, registered = found
        nth = self._times.get(path, 0)
        self._times[path] = nth + 1
        code, at = place(sys._getframe(2), across_calls=True)
        script = isinstance(module, torch.jit.ScriptModule)
        name = str(module.original_name) if script else type(module).__name__
        above = stack or (self._stacks.get(self._thread, []) if threading.get_ident() != self._thread else [])
        call = CallNote(
            len(self.calls), path, nth, above[-1].index if above else -1, name, registered, id(module), len(module._modules) > 0,
            own_parameters(module), None if script else type(module).forward, code, at, sys.exc_info()[1], torch.is_grad_enabled(),
        )  # fmt: skip
        self.calls.append(call)
        for position, arg in itertools.chain(enumerate(args), kwargs.items()):
            for suffix, tensor in tensors_in(arg):
                value = self.value(tensor) if above else self._input(tensor, call)
                call.inputs.append(((position, suffix), *looks(tensor), value))
        if above:
            above[-1].children += 1
        self.threads.add(threading.get_ident())
        call.sequence, call.start = _sequence(), self.tape.next()
        stack.append(call)

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

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        stack = self._stack()
        wanted = id(module)
        if not stack or (stack[-1].module_id != wanted and all(call.module_id != wanted for call in stack)):
            return None
        while True:
            call = stack.pop()
            call.sequence_end = _sequence()
            if call.module_id == wanted:
                break
            call.failed = True  # left by an exception that no hook saw
        pending, call.pending = call.pending, None
        if output is None and (error := sys.exc_info()[1]) is not None and error is not pending:
            call.failed = True
            self.failures.append((error, call))
            return None
        leaving = tensors_in(output)
        fixed = replaceable(output)
        changed: dict[int, torch.Tensor] = {}
        written: list[tuple[torch.Tensor, int]] = []
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

    def _leave(
        self, call: CallNote, port: int, name: str, tensor: torch.Tensor, movable: bool, written: list[tuple[torch.Tensor, int]]
    ) -> torch.Tensor:
        """Claim an output for its call; returns the tensor, or the alias to hand out in its place. Those written in place join ``written``."""
        tape = self.tape
        inner = self.value(tensor)
        known = tape.known(tensor)
        since = known[2] if known is not None else inner
        store = tape.store(tensor) if tape.stores else None
        wrote = store is not None and store[1] >= call.start
        kind, leaf, *_ = tape.entries[inner]
        shared = not wrote and (since < call.start or (kind == LEAVES and leaf not in ("constant", "empty")))
        base = tensor._base if tensor._is_view() else None
        found = tape.known(base) if base is not None else None
        if shared and movable:
            tensor = alias_of(tensor) if self.alias else tensor
            tape.aliased.add(storage_of(tensor))
        shared = shared or (found is not None and found[2] < call.start) or tape.older(tensor, call.start)
        grad = takes_gradient(tensor)
        value = tape.next()
        edge = inner if grad else ~inner
        tape.entries[value] = (CALL, "", call.index, (edge,), grad, None, 0, port, _sequence(), shared)
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

    def _touch(self, tensor: torch.Tensor, value: int) -> None:
        """Claim a value on the gradient plane too, for what only autograd sees."""
        node = node_of(tensor)
        if node is None:
            return
        self.nodes.append(node)
        self.claims.setdefault((node, tensor.output_nr), []).append((_sequence(), value))
        base = tensor._base if tensor._is_view() else None
        entry = self.tape.entries[value]
        below = node_of(base) if base is not None else None
        if base is None or below is None or below is node or entry[0] != CALL:
            return
        # a 3-D Linear is a view of its addmm: an in-place write would go past the claim to the layer's own parameters
        key = (below, base.output_nr)
        if key not in self.claims and below._sequence_nr() >= self.calls[entry[2]].sequence:
            self.nodes.append(below)
            self.claims[key] = [(_sequence(), value)]

    def _claim(self, node: Any, output: int) -> int | None:
        found = self.claims.get((node, output))
        return found[-1][1] if found else None

    # -- modules that the models did not register ----------------------------------------------------------------------------------

    def _global(self, module: nn.Module, args: Any) -> None:
        """Global pre-hook, for modules kept in plain lists or made in the forward, and for script modules."""
        registry = self.registry
        if id(module) in registry.ignored or _backward() != -1:
            return
        script = isinstance(module, torch.jit.ScriptModule)
        if id(module) not in registry.paths and id(module._forward_hooks) not in registry.hook_dicts:
            if not self._ours():
                return
            with _disable():
                if next(nn.Module.parameters(module), None) is None:
                    return  # without parameters it is what its operations are
                self._strangers.append(module)
                self._attach(module, self._stranger_path(module), False)
                if not script:  # too late for this call's own pre-hook, and a global one is given no keyword arguments
                    kwargs = sys._getframe(1).f_locals.get("kwargs")
                    self._before(module, args, kwargs if isinstance(kwargs, dict) else {})
        if script:
            self._pre(module, args, {})

    def _stranger_path(self, module: nn.Module) -> str:
        code, at = place(sys._getframe(2), across_calls=True)
        spot = f"{code.co_filename.rsplit('/', 1)[-1]}:{line_of(code, at)}" if code is not None else "unknown place"
        label = f"{type(module).__name__} at {spot}"
        count = self._labels[label] = self._labels.get(label, 0) + 1
        return f"<{label}>" if count == 1 else f"<{label}>#{count}"

    # -- tensors that the tape does not know ----------------------------------------------------------------------------------------

    def value(self, tensor: torch.Tensor) -> int:
        """The value a tensor holds now; without the shadow plane, what autograd alone says."""
        if self.shadow:
            edge = self.tape.edge(tensor)
            return edge if edge >= 0 else ~edge
        known = self.tape.known(tensor)
        return self._identify(tensor) if known is None or node_of(tensor) is not None else known[1]

    def _adopt(self, tensor: torch.Tensor) -> int:
        with _disable():
            return self._identify(tensor)

    def _identify(self, tensor: torch.Tensor) -> int:
        tape = self.tape
        if _functorch.is_functorch_wrapped_tensor(tensor):
            inner = tape.value(_functorch.get_unwrapped(tensor))
            return self._step("vmap" if _functorch.is_batchedtensor(tensor) else "", inner, tensor)
        name = self.registry.name(tensor)
        if name is not None:
            return tape.leaf(*name, grad=tensor.requires_grad)
        node = node_of(tensor)
        if node is not None:
            claim = self._claim(node, tensor.output_nr)
            if claim is not None:
                return claim
            memory = tape.sharing(tensor) if self.shadow and node._sequence_nr() < _sequence() else None
            if memory is not None and tape.entries[memory][0] == OP and not tensor._is_view():
                return memory  # what a transform computed within its wrappers
            self.nodes.append(node)
            return tape.gradient(tensor)
        base = tensor._base if tensor._is_view() else None
        if base is not None and (not self.shadow or tape.known(base) is not None or base.requires_grad or tape.seen_part(tensor)):
            return self._step("view", tape.value(base), tensor)
        shared = tape.sharing(tensor) if self.shadow else None
        if shared is not None:
            return self._step("alias", shared, tensor)
        if (name := self.registry.name_since(tensor)) is not None:
            return tape.leaf(*name, grad=tensor.requires_grad)
        parts = inner_tensors(tensor)
        if parts:
            edges = tuple(map(tape.edge, parts))
            return tape.step(type(tensor).__name__, edges, self._stack()[-1].index if self._stack() else -1, tensor.requires_grad)
        if tensor.requires_grad:  # a leaf that no module registered
            return tape.leaf("constant", f"<{type(tensor).__name__} {'x'.join(map(str, tensor.shape))}>", grad=True)
        return tape.leaf("unknown", Unknown.UNSEEN if self.shadow else Unknown.NO_GRADIENT)

    def _step(self, name: str, parent: int, tensor: torch.Tensor) -> int:
        stack = self._stack()
        grad = tensor.requires_grad or (name != "alias" and self.tape.entries[parent][4])
        edge = ~parent if not grad or (tensor.requires_grad and is_leaf(tensor)) else parent
        return self.tape.step(name, (edge,), stack[-1].index if stack else -1, grad)
