"""The private parts of torch that are used, in one place; ``tests/test_private.py`` has a test for each that says what breaks without it.

Beside these: ``Tensor._base``, ``_is_view`` and ``_version``, ``UntypedStorage._cdata``, ``Node._sequence_nr``, and of modules ``_parameters``,
``_buffers``, ``_modules``, ``_forward_hooks`` and ``_forward_pre_hooks``, which torch's own documents speak of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import overrides
from torch.nn.modules import module as _module

__all__ = [
    "CALL", "HigherOrderOperator", "backward_task", "dense_kernel", "disabled", "dispatch_mode", "enabled", "forward_class", "functorch",
    "global_hook_first", "leave_mode", "level", "sequence_number", "unsafe_view",
]  # fmt: skip

disabled = torch._C.DisableTorchFunction
"""Context: neither modes nor subclasses see what is done to tensors. Hooks run under it, or each look at a tensor would be recorded."""

enabled = torch._C._EnableTorchFunction
"""Context: subclasses see again what is done to them, within `disabled`."""

sequence_number = torch._C._autograd._get_sequence_nr
"""How many nodes of autograd this thread has made: tells which operation a node belongs to."""

backward_task = torch._C._current_graph_task_id
"""-1 unless a backward runs in this thread: what checkpoints recompute there is no part of the pass."""

functorch = torch._C._functorch
"""``is_functorch_wrapped_tensor``, ``is_batchedtensor``, ``get_unwrapped``: what ``vmap`` and ``grad`` put around tensors."""

level = functorch.maybe_current_level
"""None unless a transform of ``torch.func`` runs."""

HigherOrderOperator = torch._ops.HigherOrderOperator
"""``cond``, ``while_loop``, ``scan``, ``flex_attention``."""

unsafe_view = torch.ops.aten._unsafe_view
"""A new tensor over the same memory that autograd does not call a view."""

CALL = torch.nn.Module._call_impl.__code__
"""Marks the frame in which a module is called, and so the end of torch's part of the stack."""


def dense_kernel(func: Any) -> Any:
    """The plain Python of a control-flow operator, None where torch has none."""
    return func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)


def dispatch_mode() -> Any:
    """The dispatch mode that runs, such as a fake tensor mode."""
    return torch.utils._python_dispatch._get_current_dispatch_mode()


def global_hook_first(key: int) -> None:
    """Let a hook on all modules run before all others."""
    _module._global_forward_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]


def leave_mode(mode: Any) -> None:
    """Take a function mode off this thread's stack, wherever in it it is; leaving it as a context takes off the one on top."""
    above = []
    while mode in overrides._get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        above.append(overrides._pop_mode())  # type: ignore[no-untyped-call]
    for other in reversed(above[:-1]):
        overrides._push_mode(other)  # type: ignore[no-untyped-call]


def forward_class(node: Any) -> Any:
    """The custom Function that made a node of autograd, None for others."""
    return getattr(node, "_forward_cls", None)
