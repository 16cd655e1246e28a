"""What files, arguments and places are called."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import types
import weakref
from typing import Any

from gradlineage.notes import CallNote

__all__ = ["argument_names", "short_path", "snake_case"]


def short_path(file: str) -> str:
    """A file's name below the folder it is imported from: ``torchvision/models/resnet.py``."""
    best = ""
    for folder in (*sys.path, ""):
        try:
            folder = os.path.abspath(folder or ".") + os.sep
        except OSError:  # the working directory is gone
            continue
        if file.startswith(folder) and len(folder) > len(best):
            best = folder
    return file[len(best) :].replace(os.sep, "/")


#: By function, which refers to its class and closure, and so is not held.
_signatures: weakref.WeakKeyDictionary[Any, list[tuple[str, bool]]] = weakref.WeakKeyDictionary()


def _positions(forward: Any) -> list[tuple[str, bool]]:
    """(name, whether it takes all the rest) of a forward's positional parameters."""
    found = _signatures.get(forward) if isinstance(forward, types.FunctionType) else None
    if found is None:
        try:
            parameters = list(inspect.signature(forward).parameters.values())[1:]
        except (TypeError, ValueError):
            parameters = []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = [(p.name, False) for p in parameters if p.kind in positional]
        found += [(p.name, True) for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
        with contextlib.suppress(TypeError):  # what takes no weak references is not kept
            _signatures[forward] = found
    return found


def argument_names(call: CallNote) -> list[str]:
    """``x``, ``tensors[1]``, ``args[0]``: after the signature of the forward."""
    if not call.inputs:
        return []
    positions = _positions(call.forward)
    names = []
    for (place, suffix), *_ in call.inputs:
        if isinstance(place, str):
            names.append(place + suffix)
            continue
        plain = [name for name, rest in positions if not rest]
        if place < len(plain):
            names.append(plain[place] + suffix)
        else:
            star = next((name for name, rest in positions if rest), "args")
            names.append(f"{star}[{place - len(plain)}]{suffix}")
    return names


def snake_case(name: str) -> str:
    """``NativeBatchNorm`` as ``native_batch_norm``."""
    out = "".join("_" + c.lower() if c.isupper() and i and not name[i - 1].isupper() else c.lower() for i, c in enumerate(name))
    return out.strip("_") or name
