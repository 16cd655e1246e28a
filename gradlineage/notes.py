"""What is noted of a call while it runs, and small facts about modules and tensors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

__all__ = ["CallNote", "ValueNote", "callable_modules", "line_of", "looks", "own_parameters", "place"]

_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

#: What a tensor is called at the border (a name, or where it stands among the arguments), shape, dtype, device, value on the tape.
ValueNote = tuple[Any, Any, Any, Any, int]


@dataclasses.dataclass(slots=True)
class CallNote:
    """One call, under way or done. Shapes, names and lines are kept as torch and Python give them and made readable later."""

    index: int
    path: str
    nth: int
    parent: int
    type: str
    registered: bool
    module_id: int
    has_modules: bool
    own: tuple[int, int]
    forward: Any
    code: Any
    code_at: int
    pending: BaseException | None  # the exception being handled when it began
    grad_enabled: bool
    sequence: int = 0
    sequence_end: int = -1
    start: int = 0  # numbers on the tape above this one were made during the call or later
    end: int = 1 << 62  # as were those below this one, if above the other
    children: int = 0
    failed: bool = False
    inputs: list[ValueNote] = dataclasses.field(default_factory=list)
    outputs: list[ValueNote] = dataclasses.field(default_factory=list)


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


def callable_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, class) of every module that can be called: parametrizations, what scripts consist of and mere lists left out."""
    hidden: set[int] = set()
    for path, module in nn.Module.named_modules(model, prefix=prefix):
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


def place(frame: Any, across_calls: bool = False) -> tuple[Any, int]:
    """(code, instruction) of the first frame outside torch and this package.

    (None, 0) within the forward of one of torch's own modules, where the call's own place says more, unless ``across_calls``.
    """
    for _ in range(64):
        if frame is None:
            break
        code = frame.f_code
        if not code.co_filename.startswith(_INSIDE):
            return (None, 0) if code.co_filename.startswith("<frozen") else (code, frame.f_lasti)
        if code.co_name == "_call_impl" and not across_calls:
            break
        frame = frame.f_back
    return None, 0
