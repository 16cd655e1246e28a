"""The one mutable object: hooks that note every module call, its inputs and its outputs, while a forward runs.

A call's inputs are what its forward receives after all pre-hooks, its outputs what it returned before the user's own forward hooks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils.parametrize import ParametrizationList

from gradlineage.containers import rebuild, tensors_in
from gradlineage.shadow import CALL, LEAVES, ShadowMode, Tape, Unknown, _disable, _sequence, gather, place, storage_of

__all__ = ["CallNote", "Recorder"]

_OWN_KEYS = frozenset(nn.Module().__dict__)
_backward = torch._C._current_graph_task_id


class CallNote:
    """One call under way, then done."""

    __slots__ = (
        "children", "code", "code_at", "failed", "has_modules", "index", "inputs", "module_id", "nth", "outputs", "own", "parent", "path",
        "pending", "registered", "sequence", "sequence_end", "signature", "start", "type",
    )  # fmt: skip
    index: int
    path: str
    nth: int
    parent: int
    inputs: list[tuple[str, torch.Tensor | None, Any, int]]

    def __init__(self) -> None:
        self.children = 0
        self.failed = False
        self.outputs: list[tuple[str, Any, Any, Any, int]] = []


class _Thread(threading.local):
    stack: list[CallNote] | None = None


class Recorder:
    """Hooks on models, a tape, and the calls noted so far.

    Args:
        models: by the first part of their paths; ``{"": model}`` for a single one.
        shadow: whether the function mode runs.
        alias: whether a module that hands its input through returns a fresh alias of it. Not where the caller keeps the graph.
        restore: whether what the pass writes to parameters and buffers is put back.
    """

    def __init__(self, models: Mapping[str, nn.Module], *, shadow: bool, alias: bool, restore: bool) -> None:
        self.models = dict(models)
        self.shadow, self.alias = shadow, alias
        self.tape = Tape()
        self.tape.adopt = self._adopt
        self.calls: list[CallNote] = []
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = {} if restore else None
        self.claims: dict[tuple[Any, int], list[tuple[int, int]]] = {}  # (node, output number) -> [(sequence number, value)]
        self.nodes: list[Any] = []  # autograd nodes touched, in running order: kept to the end
        self.first_sequence = 0
        self.threads: set[int] = set()
        self._paths: dict[int, tuple[str, bool]] = {}  # id(module) -> (path, registered)
        self._dicts: dict[int, str] = {}  # id(hook dict) -> path, for shallow copies
        self._ignored: set[int] = set()
        self._names: dict[int, tuple[dict[str, Any], str, str, str]] = {}  # id(tensor) -> (its dict, key, full name, kind)
        self._storages: dict[int, list[torch.Tensor]] | None = None
        self._times: dict[str, int] = {}
        self._found: dict[str, int] = {}
        self._hooks: list[Any] = []
        self._script: list[tuple[dict[int, Any], int]] = []
        self._strangers: list[nn.Module] = []
        self._local = _Thread()
        self._mode: ShadowMode | None = None
        self._thread = 0

    # -- attaching and detaching ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach hooks and enter the mode. `stop` undoes it, also after a failure half-way."""
        self._thread = threading.get_ident()
        self.first_sequence = _sequence()
        for prefix, model in self.models.items():
            self._attach(model, prefix, True)
        self._hooks.append(module_hooks.register_module_forward_pre_hook(self._stranger))
        if self.shadow:
            self._mode = ShadowMode(self.tape, self._stack(), self._keep if self.saved is not None else None)
            self._mode.__enter__()

    def stop(self) -> None:
        """Leave the mode, remove every hook, close calls that never came back."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        for hook in reversed(self._hooks):
            hook.remove()
        for hooks, key in self._script:
            hooks.pop(key, None)
        self._hooks.clear()
        self._script.clear()
        stack = self._stack()
        while stack:
            stack.pop().failed = True

    def restore(self) -> None:
        """Put back what the pass wrote to parameters and buffers."""
        for tensor, copy in (self.saved or {}).values():
            with torch.no_grad():
                tensor.data.copy_(copy)
        if self.saved:
            self.saved.clear()

    def _attach(self, model: nn.Module, prefix: str, registered: bool) -> None:
        inside: set[int] = set()
        for path, module in nn.Module.named_modules(model, prefix=prefix):
            if id(module) in inside or isinstance(module, ParametrizationList):
                inside.update(id(m) for m in nn.Module.modules(module))
                self._ignored.update(inside)
                self._name(path, module)
                continue
            if id(module) in self._paths:
                continue
            self._paths[id(module)] = (path, registered)
            self._name(path, module)
            if isinstance(module, torch.jit.ScriptModule):
                for other in nn.Module.modules(module):
                    if other is not module:
                        inside.add(id(other))
                self._script_hooks(module)
                continue
            self._dicts[id(module._forward_hooks)] = path
            self._hooks.append(module.register_forward_pre_hook(self._before_hook, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after_hook, with_kwargs=True, always_call=True, prepend=True))

    def _script_hooks(self, module: nn.Module) -> None:
        """`ScriptModule` refuses the methods that register hooks, and runs the hooks all the same."""
        handle = torch.utils.hooks.RemovableHandle(module._forward_hooks)
        module._forward_hooks[handle.id] = lambda m, args, output: self._after_hook(m, args, {}, output)
        self._script.append((module._forward_hooks, handle.id))

    def _name(self, path: str, module: nn.Module) -> None:
        dot = f"{path}." if path else ""
        if isinstance(module, torch.jit.ScriptModule):
            return  # its parameters are made anew on every access
        for key, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in self._names:
                self._names[id(tensor)] = (module._parameters, key, dot + key, "parameter")
        for key, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in self._names:
                self._names[id(tensor)] = (module._buffers, key, dot + key, "buffer")
        for key, value in module.__dict__.items():
            if key not in _OWN_KEYS and not isinstance(value, int | float | str | nn.Module | type(None)):
                self._attributes(dot + key, value)

    def _attributes(self, name: str, value: Any) -> None:
        """Plain tensors that lie in a module when the pass begins: constants, unless an earlier pass computed them."""
        found: list[torch.Tensor] = []
        gather(value, found)
        for tensor in found:
            if id(tensor) not in self._names and self.tape.known(tensor) is None and (not tensor.requires_grad or tensor.is_leaf):
                self.tape.know(tensor, self.tape.leaf("constant", name, grad=tensor.requires_grad))

    # -- hooks ---------------------------------------------------------------------------------------------------------------------

    def _stack(self) -> list[CallNote]:
        stack = self._local.stack
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _before_hook(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _backward() == -1:
            with _disable():
                self._before(module, args, kwargs)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        found = self._paths.get(id(module))
        if found is None:
            path = self._dicts.get(id(module._forward_hooks))
            if path is None:
                return  # a deep copy made during the pass took our hooks along
            found = (path, True)
        stack = self._stack()
        call = CallNote()
        call.path, call.registered = found
        call.module_id = id(module)
        call.type = type(module).__name__ if not isinstance(module, torch.jit.ScriptModule) else module.original_name
        call.nth = self._times.get(call.path, 0)
        self._times[call.path] = call.nth + 1
        call.parent = stack[-1].index if stack else -1
        call.code, call.code_at = place(sys._getframe(2))
        call.has_modules = len(module._modules) > 0
        call.own = _own_parameters(module)
        call.signature = None if isinstance(module, torch.jit.ScriptModule) else type(module).forward
        call.pending = sys.exc_info()[1]
        values: list[tuple[Any, torch.Tensor]] = []
        for position, arg in enumerate(args):
            values.extend(((position, suffix), t) for suffix, t in tensors_in(arg))
        for key, arg in kwargs.items():
            values.extend(((key, suffix), t) for suffix, t in tensors_in(arg))
        top = not stack
        call.index = len(self.calls)
        self.calls.append(call)
        if stack:
            stack[-1].children += 1
        call.inputs = []
        for index, (where, tensor) in enumerate(values):
            value = self._input(tensor, call, index) if top else self.value(tensor)
            call.inputs.append((where, *_looks(tensor), value))  # type: ignore[arg-type]
        call.start = self.tape.next()
        call.sequence = _sequence()
        call.sequence_end = -1
        self.threads.add(threading.get_ident())
        stack.append(call)

    def _input(self, tensor: torch.Tensor, call: CallNote, index: int) -> int:
        """A tensor that enters a root call and has no lineage in this recording is a model input."""
        known = self.tape.known(tensor)
        if known is not None and self.tape.entries[known[1]][1] not in ("parameter", "buffer", "constant"):
            return self.tape.value(tensor)
        if tensor.grad_fn is not None and (found := self._claim(tensor.grad_fn, tensor.output_nr)) is not None:
            return found
        value = self.tape.leaf("input", "", call.index, index, tensor.requires_grad)
        self.tape.know(tensor, value)
        if tensor.requires_grad:
            self._touch(tensor, value)
        return value

    def _after_hook(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if _backward() == -1:
            with _disable():
                return self._after(module, output)
        return None

    def _after(self, module: nn.Module, output: Any) -> Any:
        stack = self._stack()
        wanted = id(module)
        if not any(call.module_id == wanted for call in stack):
            return None
        while True:
            call = stack.pop()
            if call.module_id == wanted:
                break
            call.failed = True  # left by an exception that no hook saw
        call.sequence_end = _sequence()
        if output is None and (error := sys.exc_info()[1]) is not None and error is not call.pending:
            call.failed = True
            return None
        changed: dict[int, torch.Tensor] = {}
        for port, (name, tensor) in enumerate(tensors_in(output)):
            self._leave(call, port, name, tensor, changed)
        if not changed:
            return None
        return rebuild(output, lambda t: changed.get(id(t), t))

    def _leave(self, call: CallNote, port: int, name: str, tensor: torch.Tensor, changed: dict[int, torch.Tensor]) -> None:
        tape = self.tape
        inner = self.value(tensor)
        known = tape.known(tensor) or (None, inner, inner)
        written = tape.stores.get(storage_of(tensor)) if tape.stores else None
        fresh = known[2] >= call.start and tape.entries[inner][0] != LEAVES or (written is not None and written[1] >= call.start)
        shared = False
        if not fresh:
            alias = self._alias(tensor)
            shared = True
            if alias is not None:
                changed[id(tensor)] = tensor = alias
        elif tensor._is_view() and tensor._base is not None:
            base = tape.known(tensor._base)
            shared = base is not None and base[2] < call.start
        value = tape.next()
        grad = tensor.requires_grad
        tape.entries[value] = (CALL, "", call.index, (inner if grad else ~inner,), grad, None, 0, port, None, shared)
        if self.shadow:
            tape.know(tensor, value)
        if written is not None and written[1] >= call.start:
            tape.stores[storage_of(tensor)] = (value, value, written[2], written[3])
        if grad:
            self._touch(tensor, value)
        call.outputs.append((name, *_looks(tensor), value))

    def _touch(self, tensor: torch.Tensor, value: int) -> None:
        """Claim a value on the gradient plane too, for what only autograd sees."""
        node = tensor.grad_fn
        if node is None:
            return
        self.nodes.append(node)
        self.claims.setdefault((node, tensor.output_nr), []).append((_sequence(), value))
        base = tensor._base if tensor._is_view() else None
        if base is not None and base.grad_fn is not None and base.grad_fn is not node:
            inside = self.calls[self.tape.entries[value][2]].start if self.tape.entries[value][0] == CALL else -1
            known = self.tape.known(base)
            key = (base.grad_fn, base.output_nr)
            if known is not None and known[2] > inside >= 0 and key not in self.claims:  # a 3-D Linear is a view of its addmm
                self.nodes.append(base.grad_fn)
                self.claims[key] = [(_sequence(), value)]

    def _claim(self, node: Any, output: int) -> int | None:
        found = self.claims.get((node, output))
        return found[-1][1] if found else None

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A new tensor over the same memory, at no kernel, or None where that would show."""
        if not self.alias or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.__dict__:
            return None
        if (tensor.requires_grad and tensor.is_leaf) or tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
            return None
        if torch._C._functorch.maybe_current_level() is not None:
            return None
        if not tensor.requires_grad:
            return tensor.detach()
        if not torch.is_grad_enabled():
            return None
        alias: torch.Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
        if alias.stride() != tensor.stride():  # sizes of 1: the next kernel's choice of layout may hang on their strides
            with torch.no_grad():
                alias.as_strided_(tensor.shape, tensor.stride())
        return alias

    # -- strangers -----------------------------------------------------------------------------------------------------------------

    def _stranger(self, module: nn.Module, args: Any) -> None:
        """Global pre-hook: modules that the models did not register, and script modules."""
        if id(module) in self._ignored or _backward() != -1:
            return
        known = id(module) in self._paths
        if known or id(module._forward_hooks) in self._dicts:
            if isinstance(module, torch.jit.ScriptModule):
                self._before_hook(module, args, {})
            return
        if not self._mine():
            return
        with _disable():
            if next(nn.Module.parameters(module), None) is None:
                return  # without parameters it is what its operations are
            self._strangers.append(module)  # keeps its id
            code, at = place(sys._getframe(1))
            spot = f"{code.co_filename.rsplit('/', 1)[-1]}:{_line(code, at)}" if code is not None else "unknown place"
            label = f"{type(module).__name__} at {spot}"
            count = self._found[label] = self._found.get(label, 0) + 1
            path = f"<{label}>" if count == 1 else f"<{label}>#{count}"
            self._attach(module, path, False)
            if not isinstance(module, torch.jit.ScriptModule):  # too late for this call's own pre-hook
                frame = sys._getframe(1)
                kwargs = frame.f_locals.get("kwargs")
                self._before(module, args, kwargs if isinstance(kwargs, dict) else {})
        if isinstance(module, torch.jit.ScriptModule):
            self._before_hook(module, args, {})

    def _mine(self) -> bool:
        return threading.get_ident() == self._thread or bool(self._stack())

    def value(self, tensor: torch.Tensor) -> int:
        """The value a tensor holds now; without the shadow plane, what autograd alone says."""
        if self.shadow:
            return self.tape.value(tensor)
        if tensor.grad_fn is not None or self.tape.known(tensor) is None:
            return self._identify(tensor)
        return self.tape.values[id(tensor)][1]

    # -- tensors that the tape does not know ----------------------------------------------------------------------------------------

    def _adopt(self, tensor: torch.Tensor) -> int:
        with _disable():
            return self._identify(tensor)

    def _identify(self, tensor: torch.Tensor) -> int:
        tape = self.tape
        functorch = torch._C._functorch
        if functorch.is_functorch_wrapped_tensor(tensor):
            inner = tape.value(functorch.get_unwrapped(tensor))
            return self._step("vmap" if functorch.is_batchedtensor(tensor) else "grad_level", inner, tensor)
        named = self._names.get(id(tensor))
        if named is not None and named[0].get(named[1]) is tensor:
            return tape.leaf(named[3], named[2], grad=tensor.requires_grad)
        if (name := self._registered_since(tensor)) is not None:
            return tape.leaf(*name, grad=tensor.requires_grad)
        node = tensor.grad_fn
        if node is not None:
            claim = self._claim(node, tensor.output_nr)
            if claim is not None:
                return claim
            self.nodes.append(node)
            return tape.gradient(tensor)
        base = tensor._base if tensor._is_view() else None
        if base is not None:
            return self._step("view", tape.value(base), tensor)
        if tensor.requires_grad:
            return tape.leaf("constant", f"<{type(tensor).__name__} {'x'.join(map(str, tensor.shape))}>", grad=True)
        shared = self._sharing(tensor)
        if shared is not None:
            return shared
        return tape.leaf("unknown", Unknown.UNSEEN if self.shadow else Unknown.NO_GRADIENT)

    def _step(self, name: str, parent: int, tensor: torch.Tensor) -> int:
        number = self.tape.next()
        call = self._stack()[-1].index if self._stack() else -1
        grad = tensor.requires_grad or self.tape.entries[parent][4]
        self.tape.entries[number] = (0, name, call, (parent if grad else ~parent,), grad, None, 0, 0, 0, None)
        return number

    def _registered_since(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """A parameter or buffer that a module got during the pass."""
        for path, module in self._modules():
            for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, value in members.items():
                    if value is tensor:
                        name = f"{path}.{key}" if path else key
                        self._names[id(tensor)] = (members, key, name, kind)
                        return kind, name
        return None

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for prefix, model in self.models.items():
            yield from nn.Module.named_modules(model, prefix=prefix)

    def _sharing(self, tensor: torch.Tensor) -> int | None:
        """The value of a live tensor over the same memory: what vmap hands back, ``Parameter(t)``, numpy there and back."""
        storage = storage_of(tensor)
        if not storage:
            return None
        wrapped = self.tape.wrapped.get(storage)
        if wrapped is not None:
            return wrapped[0]
        address = tensor.untyped_storage().data_ptr()
        for ref, value, _ in list(self.tape.values.values()):
            other = ref()
            if other is None or other is tensor:
                continue
            theirs = storage_of(other)
            if theirs and (theirs == storage or (address and other.device == tensor.device and other.untyped_storage().data_ptr() == address)):
                return self._step("alias", self.tape.value(other) if other.requires_grad is False else value, tensor)
        return None

    # -- putting back --------------------------------------------------------------------------------------------------------------

    def _keep(self, tensor: torch.Tensor) -> None:
        """Copy a parameter or buffer before it is first written."""
        saved = self.saved
        if saved is None or not tensor.is_leaf:
            return
        if self._storages is None:
            self._storages = {}
            for _, module in self._modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                for member in (*module._parameters.values(), *module._buffers.values()):
                    if member is not None and (storage := storage_of(member)):
                        self._storages.setdefault(storage, []).append(member)
        for member in self._storages.get(storage_of(tensor), ()):
            if id(member) not in saved:
                with torch.no_grad():
                    saved[id(member)] = (member, member.detach().clone())


def _own_parameters(module: nn.Module) -> tuple[int, int]:
    """(elements, trainable elements) of the module's own parameters, those behind parametrizations included."""
    own = list(module._parameters.values())
    if isinstance(module, torch.jit.ScriptModule):
        own = list(nn.Module.parameters(module))
    elif "parametrizations" in module._modules:
        own += list(nn.Module.parameters(module._modules["parametrizations"]))  # type: ignore[arg-type]
    total = trainable = 0
    for p in own:
        if p is not None and not isinstance(p, nn.parameter.UninitializedTensorMixin):
            total += p.numel()
            trainable += p.numel() * p.requires_grad
    return total, trainable


def _looks(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    """(shape, dtype, device), as they are."""
    try:
        return tensor.shape, tensor.dtype, tensor.device
    except RuntimeError:  # nested tensors of the strided layout have no shape
        return tuple(tensor.size(d) if d == 0 else f"j{d}" for d in range(tensor.dim())), tensor.dtype, tensor.device


def _line(code: Any, at: int) -> int:
    """The line of an instruction: what ``f_lineno`` gives, worked out only where it is read."""
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return int(line)
    return int(code.co_firstlineno)

