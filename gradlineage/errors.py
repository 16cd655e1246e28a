"""The errors gradlineage raises. One base, few kinds; an exception from the user's own forward is never one of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["FormatError", "LineageError", "NameNotFound", "TraceError", "UsageError", "WiringError", "a_kind"]


class LineageError(Exception):
    """Base of every error that gradlineage raises itself."""


class TraceError(LineageError):
    """The pass could not be recorded: wrong kind of model, recordings that overlap, a forward that needs what was dropped."""


def a_kind(value: object) -> str:
    """``an int``, ``a list``: what was found instead of what was expected."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


class NameNotFound(LineageError, KeyError):
    """A label or path that this lineage does not have. The message lists the nearest ones it has."""

    def __init__(self, name: object, known: Iterable[str], what: str = "call or join") -> None:
        names = list(known)
        near = difflib.get_close_matches(str(name), names, n=4, cutoff=0.5) or names[:4]
        hint = f"nearest: {', '.join(near)}" if near else "this lineage has none"
        self.message = f"no {what} named {name!r} in this lineage; {hint}"
        super().__init__(self.message)

    def __str__(self) -> str:  # KeyError would quote the message
        return self.message


class WiringError(LineageError, AssertionError):
    """A model that is not wired as a test expects."""


class FormatError(LineageError):
    """A saved lineage that cannot be read. The message starts with the place of the fault, such as ``$.calls[3].parent``."""


class UsageError(LineageError):
    """A command line, target or input specification that cannot be understood."""
