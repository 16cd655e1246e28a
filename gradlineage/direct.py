"""Modules whose ``forward`` was called without them, found by the places of what ran inside."""

from __future__ import annotations

import linecache
import re
from collections import defaultdict
from collections.abc import Container
from typing import Any

from torch import nn

from gradlineage.record import Recorder
from gradlineage.tape import LEAVES, OP

__all__ = ["called_directly"]

_CALL = re.compile(rb"[^()]*\.forward\s*\(")
_NAMED = re.compile(rb"\s*\w+((?:\.\w+|\[\s*\d+\s*\])+)\.forward\s*\(")
Place = tuple[Any, int, int]


def called_directly(recorder: Recorder) -> dict[str, Place]:
    """Path of every module that nobody called and whose forward ran all the same -> (code, instruction, call) of something that ran in it.

    The evidence is a line of the module's own ``forward`` at which something ran, or one that says ``name.forward(...)``.
    """
    modules = dict(recorder.registry.modules())
    called = {call.path for call in recorder.calls}
    silent: defaultdict[Any, list[str]] = defaultdict(list)  # forwards of modules that nobody called
    for path, module in modules.items():
        if path not in called and (code := _code_of(module)) is not None:
            silent[code].append(path)
    found: dict[str, Place] = {}
    for owner, code, at, call in _places(recorder, silent):
        above = recorder.calls[call].path if call >= 0 else ""
        named = _called_at(code, at)
        if owner:
            own = modules.get(owner)
            runs = (
                own is not None and code is _code_of(own) and (above not in modules or code is not _code_of(modules[above]))
            )  # or it is tied
            hit = owner not in called and own is not None and (runs or named is not None)
            path = owner
        elif named:
            path = f"{above}{named}".lstrip(".")
            hit = path in modules and path not in called
        else:
            below = silent.get(code, ()) if above in modules and _code_of(modules[above]) is not code else ()
            path, hit = below[0] if below else "", len(below) == 1
        if hit:
            found.setdefault(path, (code, at, call))
    return found


def _code_of(module: nn.Module) -> Any:
    return getattr(type(module).forward, "__code__", None)


def _places(recorder: Recorder, silent: Container[Any]) -> list[tuple[str, Any, int, int]]:
    """(path of the module that something belongs to, code, instruction, call) of operations and calls in code that may tell of a forward."""
    entries = recorder.tape.entries
    telling: dict[Any, bool] = {None: False}
    places = []

    def tells(code: Any) -> bool:
        found = telling.get(code)
        if found is None:
            found = telling[code] = code in silent or "forward" in code.co_names
        return found

    for kind, _, call, parents, _, code, at, *_ in list(entries.values()):
        if kind != OP or not tells(code):
            continue
        places.append(("", code, at, call))
        for edge in parents:
            leaf = entries[edge if edge >= 0 else ~edge]
            if leaf[0] == LEAVES and leaf[1] == "parameter":
                places.append((str(leaf[8]).rpartition(".")[0], code, at, call))
    for note in recorder.calls:
        if note.parent >= 0 and tells(note.code):
            places.append((note.path.rpartition(".")[0], note.code, note.code_at, note.parent))
    return places


_seen: dict[tuple[Any, int], str | None] = {}


def _called_at(code: Any, at: int) -> str | None:
    """Of an instruction whose source is ``name.attribute[0].forward(...)`` what follows the first name, ``""`` where it can't be told,
    ``None`` where it is no such call."""
    if "forward" not in code.co_names:
        return None
    if (code, at) not in _seen:
        if len(_seen) > 10_000:  # code made in a loop must not pile up
            _seen.clear()
        _seen[code, at] = _read(code, at)
    return _seen[code, at]


def _read(code: Any, at: int) -> str | None:
    line, last, first_column, end_column = list(code.co_positions())[at // 2]
    if line is None or last is None or first_column is None or end_column is None:
        return None
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(line, last + 1)]
    if not lines:
        return None
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][first_column:]
    source = b"".join(lines)
    if _CALL.match(source) is None:
        return None
    named = _NAMED.match(source)
    return re.sub(r"\[\s*(\d+)\s*\]", r".\1", named[1].decode()) if named else ""
