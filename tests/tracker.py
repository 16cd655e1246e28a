"""A second opinion: follow every tensor below autograd and say what fed each layer.

Nothing here knows of `gradlineage`. A dispatch mode sees each kernel that runs; the kernel's schema says what it writes. Every tensor seen is kept
alive until the answer is given, so that identities and addresses stay unique. What a call computed can only be told once it is known whether the
call is a layer, so a small graph of numbered steps is written first and turned into sets at the end.
"""

from __future__ import annotations

import dataclasses
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["Answer", "Tracker", "tensors", "track"]

#: In-place kernels that read nothing of what they write over.
_FORGETS = frozenset("zero_ fill_ copy_ normal_ uniform_ random_ exponential_ bernoulli_ cauchy_ geometric_ log_normal_ set_ eye_".split())
#: In place for the tensor's shape alone.
_RESHAPES = frozenset("t_ transpose_ squeeze_ unsqueeze_ swapaxes_ swapdims_ as_strided_ detach_ resize_".split())
#: What sparse tensors, wrappers, and parameters of lazy modules raise when asked for their storage.
_NO_MEMORY = (NotImplementedError, RuntimeError, ValueError)
_PLAIN = (str, bytes, int, float, complex, type(None), torch.device, torch.dtype, torch.Generator)
_OPAQUE = (*_PLAIN, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


@dataclasses.dataclass
class Answer:
    """``calls``: for each layer call (``path``, ``path@1`` for its second one) a set of source names per input tensor; ``outputs`` alike."""

    calls: dict[str, list[set[str]]]
    outputs: list[set[str]]


@dataclasses.dataclass
class _Call:
    path: str
    name: str
    start: int
    layer: bool = True
    inputs: list[int] = dataclasses.field(default_factory=list)
    outputs: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Step:
    """``call``: the call that computed it (-1: none). ``over``: the second parent was written over all of the first."""

    call: int
    parents: tuple[int, ...]
    name: str = ""  # of a leaf
    over: bool = False
    bare: bool = False  # made outside of all calls, from nothing that came out of one


@dataclasses.dataclass
class _Held:
    """What one tensor object holds: the step that made it, as of a moment, for as long as it points to the same memory."""

    tensor: Tensor
    memory: Any
    step: int
    when: int


def tensors(value: Any, above: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """The tensors in a container, in order; plain objects are looked into, modules are not."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _OPAQUE) or id(value) in above:
        return
    items: Iterable[Any]
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = value
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    else:
        slots = [s for cls in type(value).__mro__ for s, kind in vars(cls).items() if isinstance(kind, types.MemberDescriptorType)]
        items = [*getattr(value, "__dict__", {}).values(), *(getattr(value, s, None) for s in slots)]
    for item in items:
        yield from tensors(item, (*above, id(value)))


def _memory(tensor: Tensor) -> Any:
    """What two tensors over the same memory have in common; the address, so that a trip through numpy is seen too."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() or ("empty", storage._cdata)
    except _NO_MEMORY:
        return None


def _place(tensor: Tensor) -> Any:
    try:
        return tensor.storage_offset(), tensor.size(), tensor.stride()
    except _NO_MEMORY:
        return None


def _fills_memory(tensor: Tensor) -> bool:
    try:
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    except _NO_MEMORY:
        return True


def _plain(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of ``torch.func``, which is the one that kernels see."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


class _Kernels(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracker.kernel(func, args, kwargs or {})


class Tracker:
    """Open it around one or more calls of ``model``; ask for the `answer` before or after it closes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.steps: list[_Step] = []
        self.calls: list[_Call] = []
        self.stack: list[int] = []
        self.roots: list[_Call] = []
        self.times: defaultdict[str, int] = defaultdict(int)
        self.held: dict[int, _Held] = {}
        self.last_at: dict[Any, _Held] = {}  # (memory, place) -> the last object seen there
        self.first_in: dict[Any, _Held] = {}  # memory -> the first object seen in it
        self.writes: defaultdict[Any, list[tuple[int, bool, bool]]] = defaultdict(list)  # memory -> (step, covers all of it, forgets)
        self.kept: list[Any] = []
        self.undo = ExitStack()

    # -- around the pass

    def __enter__(self) -> Tracker:
        for name, tensor in self.members():
            self.hold(tensor, self.step((), name, call=-1))
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # the fused encoder calls no modules
        self.undo.callback(torch.backends.mha.set_fastpath_enabled, fast)
        inside: set[nn.Module] = set()
        for path, module in nn.Module.named_modules(self.model):
            if isinstance(module, ParametrizationList | torch.jit.ScriptModule):
                inside.update(m for m in nn.Module.modules(module) if m is not module or isinstance(m, ParametrizationList))
            if module not in inside:
                self.attach(path, module)
        self.undo.enter_context(_Kernels(self))
        return self

    def __exit__(self, *error: object) -> None:
        self.undo.close()

    def members(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"param:{name}", tensor) for name, tensor in self.model.named_parameters())
        yield from ((f"buffer:{name}", tensor) for name, tensor in self.model.named_buffers())

    def attach(self, path: str, module: nn.Module) -> None:
        before_hooks, hooks = module._forward_pre_hooks, module._forward_hooks

        def before(called: nn.Module, args: Any, kwargs: Any = None) -> None:
            if called is module or called._forward_hooks is hooks:  # not a deep copy that took the hooks along
                self.enter(path, [*tensors(args), *tensors(kwargs)])

        def after(called: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return self.leave(path, output) if called is module or called._forward_hooks is hooks else None

        if isinstance(module, torch.jit.ScriptModule):  # refuses the registering methods, but honours what is registered
            for table, hook in ((before_hooks, before), (hooks, lambda called, args, output: after(called, args, {}, output))):
                handle = torch.utils.hooks.RemovableHandle(table)
                table[handle.id] = hook
                self.undo.callback(handle.remove)
        else:
            self.undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self.undo.callback(module.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True).remove)

    # -- module calls

    def enter(self, path: str, found: list[Tensor]) -> None:
        name = f"{path}@{self.times[path]}" if self.times[path] else path
        self.times[path] += 1
        call = _Call(path, name, len(self.steps))
        if self.stack:
            self.calls[self.stack[-1]].layer = False
        else:
            new = {id(t): (i, t) for i, t in reversed(list(enumerate(map(_plain, found)))) if self.steps[self.value(t)].bare}
            for index, tensor in new.values():
                self.hold(tensor, self.step((), f"input:{index}", call=-1))
            self.roots.append(call)
        call.inputs = [self.value(t) for t in found]
        call.start = len(self.steps)
        self.stack.append(len(self.calls))
        self.calls.append(call)

    def leave(self, path: str, output: Any) -> Any:
        while self.calls[self.stack[-1]].path != path:  # left by an exception
            self.stack.pop()
        index = self.stack.pop()
        call = self.calls[index]
        replaced: dict[int, Tensor] = {}
        for tensor in tensors(output):
            claim = self.step((self.value(tensor),), call=index)
            call.outputs.append(claim)
            if self.held[id(_plain(tensor))].when > call.start:
                self.hold(_plain(tensor), claim)
            elif id(tensor) not in replaced and _plain(tensor) is tensor:
                # handed through: whoever uses the return value gets it from here, whoever holds the old object doesn't
                replaced[id(tensor)] = torch.ops.aten.alias.default(tensor)
                self.hold(replaced[id(tensor)], claim)
        return tree_map_only(Tensor, lambda t: replaced.get(id(t), t), output) if replaced else None

    # -- kernels

    def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        schema = getattr(func, "_schema", None)
        reads: list[int] = []
        written: list[Tensor] = []
        forgets = False
        if schema is None:  # a higher-order operation
            reads = [self.value(t) for t in tensors([args, kwargs])]
        elif schema.name.startswith("aten::_foreach_"):
            return self.foreach(func, args, kwargs, schema)
        else:
            name = schema.name.rpartition("::")[2]
            forgets = name in _FORGETS
            for i, argument in enumerate(schema.arguments):
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                info = argument.alias_info
                if info is not None and info.is_write and name not in _RESHAPES:
                    written.extend(tensors(given))
                    forgets = forgets or argument.is_out
                elif i > 0 or not (name.endswith("_like") or name.startswith("new_")):  # of which only the shape matters
                    reads.extend(self.value(t) for t in tensors(given))
        result = func(*args, **kwargs)
        for tensor in written:
            self.write(tensor, reads, forgets)
        given = {id(t) for t in tensors([args, kwargs])}
        made = [t for t in tensors(result) if id(t) not in given]
        if made:
            step = self.step(reads)
            for tensor in made:
                self.hold(tensor, step)
        return result

    def foreach(self, func: Any, args: Any, kwargs: Any, schema: Any) -> Any:
        """Many small kernels in one: slot i is made of the slots i."""
        lists = [found for a in [*args, *kwargs.values()] if (found := list(tensors(a)))]
        slots = [[self.value(found[i if len(found) > 1 else 0]) for found in lists] for i in range(len(lists[0]))]
        result = func(*args, **kwargs)
        info = schema.arguments[0].alias_info
        for i, reads in enumerate(slots):
            if info is not None and info.is_write:
                self.write(lists[0][i], reads, forgets=False)
        for i, tensor in enumerate(tensors(result)):
            self.hold(tensor, self.step(slots[i % len(slots)]))
        return result

    def write(self, tensor: Tensor, reads: list[int], forgets: bool) -> None:
        old, covers = self.value(tensor), _fills_memory(tensor)
        step = self.step(reads if forgets else [old, *reads])
        self.writes[_memory(tensor)].append((step, covers, forgets))
        self.hold(tensor, step if covers or not forgets else self.step([old, step], call=-1))

    # -- what a tensor holds

    def step(self, parents: Iterable[int], name: str = "", call: int | None = None, over: bool = False) -> int:
        parents = tuple(parents)
        call = call if call is not None else self.stack[-1] if self.stack else -1
        bare = call < 0 and not name.startswith("input") and all(self.steps[p].bare for p in parents)
        self.steps.append(_Step(call, parents, name, over, bare))
        return len(self.steps) - 1

    def hold(self, tensor: Tensor, step: int) -> None:
        memory = _memory(tensor)
        held = _Held(tensor, memory, step, len(self.steps))
        if memory is not None:
            if id(tensor) not in self.held:
                self.kept.append(tensor.untyped_storage())  # it may be swapped for another one
            self.last_at[memory, _place(tensor)] = held
            self.first_in.setdefault(memory, held)
        self.held[id(tensor)] = held

    def value(self, tensor: Tensor) -> int:
        """The step that made what the tensor holds now."""
        tensor = _plain(tensor)
        memory = _memory(tensor)
        held = self.held.get(id(tensor))
        if held is None or held.memory != memory:
            near = self.last_at.get((memory, _place(tensor))) or self.first_in.get(memory)
            if near is None:
                self.hold(tensor, self.step((), next((name for name, t in self.members() if t is tensor), ""), call=-1))
            else:  # made of another object by no kernel: ``.data``, a saved tensor, ``numpy`` and back
                self.hold(tensor, self.value(near.tensor) if _memory(near.tensor) == memory else near.step)
                self.held[id(tensor)].when = near.when
            held = self.held[id(tensor)]
        for step, covers, forgets in self.writes.get(memory, ()):
            if step >= held.when:
                held.step = step if covers and forgets else self.step((held.step, step), call=-1, over=covers)
                held.when = step + 1
        return held.step

    # -- the answer

    def answer(self, *outputs: Any) -> Answer:
        """Sets of names. ``outputs``: what to explain instead of what the model returned."""
        final = [self.value(t) for t in tensors(list(outputs))] if outputs else [s for call in self.roots for s in call.outputs]
        sets: list[frozenset[str]] = []
        for step in self.steps:
            name = step.name or self.layer_of(step)
            if name is not None:
                sets.append(frozenset((name,)))
            elif step.over and self.layer_of(self.steps[step.parents[1]]) is not None:
                sets.append(sets[step.parents[1]])  # a layer wrote all of it
            else:
                below = {sets[p] for p in step.parents}
                sets.append(below.pop() if len(below) == 1 else frozenset().union(*below))

        named = [set(found) or {"const"} for found in sets]
        return Answer({c.name: [named[s] for s in c.inputs] for c in self.calls if c.layer}, [named[s] for s in final])

    def layer_of(self, step: _Step) -> str | None:
        return self.calls[step.call].name if step.call >= 0 and self.calls[step.call].layer else None


def track(model: nn.Module, /, *args: Any, **kwargs: Any) -> Answer:
    """Run ``model(*args, **kwargs)`` once."""
    with Tracker(model) as tracker:
        model(*args, **kwargs)
    return tracker.answer()
