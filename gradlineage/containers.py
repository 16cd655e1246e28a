"""Find the tensors in whatever a module is given or returns.

Order and contents follow ``torch.utils._pytree`` where that knows the container, and go on where it stops: dataclasses, attrs classes and plain
objects are looked into, key-value caches with their lists of layers too. Iterators are never consumed.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradlineage.private import level, unsafe_view

__all__ = ["alias_of", "rebuild", "replaceable", "tensors_in"]

_PLAIN = (str, bytes, int, float, complex, bool, type, type(None), torch.dtype, torch.device, torch.Size, torch.Generator, torch.nn.Module)
_PLAIN_EXACT = frozenset((*_PLAIN[:-1], types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, slice, range))
_NESTING = 100
_OBJECT_DEPTH = 3  # object -> list of layers -> object: a key-value cache; deeper things are machinery


def tensors_in(value: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in ``value`` with what to call them: ``x``, ``feats['low']``, ``images.tensors``, ``args[0]``.

    The same tensor in two places is listed twice; an object that contains itself is entered once.
    """
    found: list[tuple[str, torch.Tensor]] = []
    if isinstance(value, torch.Tensor):
        found.append((name, value))
    elif type(value) not in _PLAIN_EXACT:
        _collect(value, name, found, set(), 0)
    return found


def _collect(value: Any, name: str, found: list[tuple[str, torch.Tensor]], above: set[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found.append((name, value))
        return
    if type(value) in _PLAIN_EXACT or isinstance(value, _PLAIN) or id(value) in above or len(above) > _NESTING:
        return
    above.add(id(value))
    for part, item in _parts(value, depth):
        _collect(item, name + part, found, above, depth + (not isinstance(value, list | tuple | Mapping)))
    above.discard(id(value))


def _parts(value: Any, depth: int) -> list[tuple[str, Any]]:
    fields = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple):
        return [(f".{f}", item) for f, item in zip(fields, value, strict=False)]
    if isinstance(value, list | tuple):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if depth >= _OBJECT_DEPTH:
        return []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return [(f".{n}", getattr(value, n, None)) for n in names]
    members = getattr(value, "__dict__", None)
    parts = [(f".{n}", item) for n, item in members.items()] if isinstance(members, dict) else []
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if (
                isinstance(slot, str)
                and slot not in ("__dict__", "__weakref__")
                and isinstance(cls.__dict__.get(slot), types.MemberDescriptorType)
            ):
                parts.append((f".{slot}", getattr(value, slot, None)))
    return parts


def replaceable(value: Any, above: tuple[int, ...] = ()) -> set[int]:
    """The ids of the tensors that `rebuild` can replace."""
    if isinstance(value, torch.Tensor):
        return {id(value)}
    if type(value) not in (tuple, list, dict) or id(value) in above or len(above) > _NESTING:
        return set()
    items = value.values() if type(value) is dict else value
    return {i for item in items for i in replaceable(item, (*above, id(value)))}


def rebuild(value: Any, replace: Callable[[torch.Tensor], torch.Tensor], above: tuple[int, ...] = ()) -> Any:
    """``value`` with its tensors replaced; only where that leaves no trace: a tensor, or exact tuples, lists and dicts of such.

    Anything else comes back as it is, and a container none of whose tensors changed is the same object.
    """
    if isinstance(value, torch.Tensor):
        return replace(value)
    if type(value) not in (tuple, list, dict) or id(value) in above or len(above) > _NESTING:
        return value
    above = (*above, id(value))
    if type(value) is dict:
        mapped = {key: rebuild(item, replace, above) for key, item in value.items()}
        return value if all(mapped[key] is value[key] for key in value) else mapped
    items = [rebuild(item, replace, above) for item in value]
    return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor over the same memory, at no kernel, so that a module's output can be told from its input; the tensor itself where that would show.

    Not ``view_as``: a later in-place write would go through it to the base and past the module.
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.__dict__
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_nested or level() is not None:
        return tensor
    if not tensor.requires_grad:
        return tensor.detach()
    try:
        leaf = tensor.is_leaf
    except RuntimeError:  # a view made under no_grad whose base was written since
        return tensor
    if not torch.is_grad_enabled():
        return tensor.detach().requires_grad_() if leaf else tensor
    alias: torch.Tensor = unsafe_view(tensor, tensor.shape)
    if alias.stride() != tensor.stride():  # sizes of 1: the next kernel's choice of layout may hang on their strides
        with torch.no_grad():
            alias.as_strided_(tensor.shape, tensor.stride())
    return alias
