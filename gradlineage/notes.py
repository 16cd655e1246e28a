"""What is noted of a call while it runs, and small facts about modules and tensors."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from gradlineage.private import CALL

__all__ = [
    "CallNote",
    "ModuleNote",
    "ValueNote",
    "callable_modules",
    "is_inside",
    "line_of",
    "looks",
    "named_modules",
    "own_parameters",
    "place",
    "place_of_call",
    "plain_shape",
    "plain_text",
]

_inside: dict[Any, bool] = {}
_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

#: What a tensor is called at the border (a name, or where it stands among the arguments), shape, dtype, device, value on the tape.
ValueNote = tuple[Any, Any, Any, Any, int]


_MANY = 1 << 30
_takes: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()  # classes made in a loop must not pile up


def _arguments_of(kind: type) -> int:
    """How many arguments a forward takes at most; given that many in a row, it is given none by keyword."""
    found = _takes.get(kind)
    if found is None:
        code = getattr(kind.forward, "__code__", None)  # type: ignore[attr-defined]
        found = _MANY if code is None or code.co_flags & inspect.CO_VARKEYWORDS else code.co_argcount + code.co_kwonlyargcount - 1
        _takes[kind] = found
    return found


class ModuleNote:
    """A module under its path. Held, so that its id stays its own."""

    __slots__ = ("hooked", "module", "path", "registered", "script", "takes")

    def __init__(self, path: str, module: nn.Module, registered: bool) -> None:
        self.path, self.module, self.registered = path, module, registered
        self.script = isinstance(module, torch.jit.ScriptModule)
        self.hooked = False  # whether a hook of its own notes its calls
        self.takes = _MANY if self.script or "forward" in module.__dict__ else _arguments_of(type(module))

    @property
    def type(self) -> str:
        return str(self.module.original_name) if self.script else type(self.module).__name__


class CallNote:
    """One call, under way or done. Shapes, names and lines are kept as torch and Python give them and made readable later."""

    __slots__ = (
        "children", "code", "code_at", "end", "failed", "frame", "grad_enabled", "index", "inputs", "note", "nth", "outputs", "parent", "pending",
        "sequence", "sequence_end", "start",
    )  # fmt: skip

    def __init__(
        self, index: int, note: ModuleNote, nth: int, parent: int, spot: tuple[Any, int, int], pending: BaseException | None, grad: bool
    ) -> None:
        self.index, self.note, self.nth, self.parent = index, note, nth, parent
        self.code, self.code_at, self.frame = spot
        self.pending = pending  # the exception being handled when it began
        self.grad_enabled = grad
        self.sequence, self.sequence_end = 0, -1
        self.start, self.end = 0, 1 << 62  # numbers on the tape between these were made during the call
        self.children, self.failed = 0, False
        self.inputs: list[ValueNote] = []
        self.outputs: list[ValueNote] = []

    @property
    def path(self) -> str:
        return self.note.path

    @property
    def type(self) -> str:
        return self.note.type

    @property
    def forward(self) -> Any:
        return None if self.note.script else type(self.note.module).forward


def own_parameters(module: nn.Module) -> tuple[int, int]:
    """(elements, trainable elements) of the parameters a module owns itself, those behind its parametrizations included."""
    if isinstance(module, torch.jit.ScriptModule):
        own: list[nn.Parameter | None] = list(nn.Module.parameters(module))
    else:
        own = list(module._parameters.values())
        hidden = module._modules.get("parametrizations")
        if hidden is not None:
            own += list(nn.Module.parameters(hidden))
    total = trainable = 0
    for parameter in own:
        if parameter is not None and not is_lazy(parameter):
            total += parameter.numel()
            trainable += parameter.numel() * parameter.requires_grad
    return total, trainable


def named_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """``nn.Module.named_modules``, whose generators within generators take their time in deep models."""
    seen: set[int] = set()
    stack = [(prefix, model)]
    while stack:
        path, module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            children = [(f"{path}.{name}" if path else name, child) for name, child in module._modules.items() if child is not None]
            stack += reversed(children)


def callable_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, class) of every module that can be called: parametrizations, what scripts consist of and mere lists left out."""
    hidden: set[int] = set()
    for path, module in named_modules(model, prefix):
        script = isinstance(module, torch.jit.ScriptModule)
        if script or isinstance(module, ParametrizationList):
            hidden.update(id(m) for m in nn.Module.modules(module) if m is not module or not script)
        if id(module) not in hidden and (script or type(module).forward is not nn.Module.forward):
            yield path, type(module).__name__


def looks(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    """(shape, dtype, device), as they are."""
    try:
        return tensor.shape, tensor.dtype, tensor.device
    except RuntimeError:  # nested tensors of the strided layout have no shape
        return (tensor.size(0), *(f"j{d}" for d in range(1, tensor.dim()))), tensor.dtype, tensor.device


def line_of(code: Any, at: int) -> int:
    """The line of an instruction: ``f_lineno`` costs a decoding of the line table, so it is worked out where it is read."""
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return int(line)
    return int(code.co_firstlineno)


def is_inside(code: Any) -> bool:
    """Whether code is torch's or this package's own."""
    found = _inside.get(code)
    if found is None:
        found = code.co_filename.startswith(_INSIDE)
        if len(_inside) < 10_000:
            _inside[code] = found
    return found


def place(frame: Any) -> tuple[Any, int]:
    """(code, instruction) of the first frame outside torch and this package.

    (None, 0) within the forward of one of torch's own modules, where the call's own place says more.
    """
    for _ in range(64):
        if frame is None:
            break
        code = frame.f_code
        found = _inside.get(code)
        if not (is_inside(code) if found is None else found):
            return (None, 0) if code.co_filename.startswith("<frozen") else (code, frame.f_lasti)
        if code is CALL:
            break
        frame = frame.f_back
    return None, 0


def place_of_call(frame: Any, parent: CallNote | None = None) -> tuple[Any, int, int]:
    """(code, instruction, id of the frame in which torch calls the module) of a module call; within torch's own containers that of their call."""
    own = 0
    for _ in range(64):
        if frame is None:
            break
        code = frame.f_code
        found = _inside.get(code)
        if not (is_inside(code) if found is None else found):
            return (None, 0, own) if code.co_filename.startswith("<frozen") else (code, frame.f_lasti, own)
        if code is CALL:
            if not own:
                own = id(frame)
            elif parent is not None and parent.frame == id(frame):
                return parent.code, parent.code_at, own
        frame = frame.f_back
    return None, 0, own


def plain_shape(shape: Any) -> tuple[int | str, ...]:
    if type(shape) is torch.Size and all(type(s) is int for s in shape):
        return tuple(shape)
    return tuple(s if type(s) is int else str(s) for s in shape)


@functools.cache
def plain_text(kind: torch.dtype | torch.device) -> str:
    return str(kind).removeprefix("torch.")
