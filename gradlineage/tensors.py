"""What can be asked of a tensor without waking its own ``__torch_function__``, and where torch may refuse to answer."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from gradlineage.private import functorch, level

__all__ = [
    "address_of",
    "captured",
    "covers_storage",
    "extent",
    "gather",
    "inner_tensors",
    "is_leaf",
    "node_of",
    "storage_of",
    "takes_gradient",
    "unwrapped",
]

Tensor = torch.Tensor


def node_of(tensor: Tensor) -> Any:
    """``grad_fn``; None where torch refuses to say: for a view made under ``no_grad`` whose base was written since."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: Tensor) -> bool:
    """``Tensor.is_leaf``, which asks for ``grad_fn``."""
    return not tensor.requires_grad or node_of(tensor) is None


def storage_of(tensor: Tensor) -> int:
    """Address of the tensor's storage object, 0 where it has none (sparse, functorch wrappers)."""
    try:
        address: int = tensor.untyped_storage()._cdata
        return address
    except (NotImplementedError, RuntimeError):
        return 0


def takes_gradient(tensor: Tensor) -> bool:
    """``requires_grad``, also of what lies within functorch's wrappers."""
    return tensor.requires_grad or (level() is not None and unwrapped(tensor).requires_grad)


def unwrapped(tensor: Tensor) -> Tensor:
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper subclass, such as ``DTensor`` or a jagged nested tensor, is made of."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return []
    names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return [t for t in (getattr(tensor, name, None) for name in names) if isinstance(t, Tensor)]


def covers_storage(tensor: Tensor) -> bool:
    """Whether a tensor is all that its storage holds."""
    try:
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return True


def extent(tensor: Tensor) -> tuple[int, int, bool]:
    """First byte and the one after the last of a strided tensor in its storage, and whether it has every byte in between."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    if tensor.numel() == 0:
        return int(first), int(first), True
    last = first + size * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
    return int(first), int(last), tensor.numel() * size == last - first


def address_of(storage: Any) -> int:
    try:
        return int(storage.data_ptr())
    except RuntimeError:  # subclasses and fake tensors have a storage without memory
        return 0


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


def captured(value: Any, into: list[Tensor], depth: int = 4) -> None:
    """The tensors that the functions given to ``cond``, ``scan`` or ``flex_attention`` bring along in their closures."""
    if isinstance(value, list | tuple):
        for item in value:
            captured(item, into, depth)
    elif isinstance(value, torch.nn.Module):
        into += value.parameters()
    elif isinstance(value, types.FunctionType | types.MethodType | functools.partial) and depth:
        cells = getattr(getattr(value, "__func__", value), "__closure__", None) or ()
        held = [c.cell_contents for c in cells if c != types.CellType()]
        held += [getattr(value, name, None) for name in ("__self__", "func", "args", "__wrapped__")]
        for item in held:
            if isinstance(item, Tensor):
                into.append(item)
            else:
                captured(item, into, depth - 1)
