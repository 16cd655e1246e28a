"""What the command says and to whom: results to standard output, everything else to standard error."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

from gradlineage.errors import LineageError, UsageError
from gradlineage.exchange import write_text

__all__ = ["UserError", "complain", "report", "users", "write"]

_FRAMES = 5
_PLAIN = str.maketrans({"←": "<-", "⇠": "<~", "–": "-", "─": "-", "×": "x", "…": "...", "→": "->", "⟲": "loop"})


class UserError(Exception):
    """Code of the user's raised while the command did ``args[0]``; the error itself is the cause."""


@contextlib.contextmanager
def users(what: str, spinner: bool = True) -> Iterator[None]:
    """Around code of the user's: what it prints goes to standard error, what it raises is told from our own errors."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if spinner and sys.stderr.isatty():
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(f"{what} …"))
        stack.enter_context(warnings.catch_warnings())
        warnings.showwarning = _warn
        try:
            yield
        except LineageError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(what) from error


def _warn(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
    print(f"{category.__name__} at {filename}:{lineno}: {message}", file=sys.stderr)


def report(failure: UserError) -> int:
    """The end of the user's own traceback: neither our frames nor those in which torch only hands on."""
    error = failure.__cause__
    assert error is not None
    trail = traceback.TracebackException.from_exception(error)
    here: traceback.TracebackException | None = trail
    while here is not None:
        theirs = [frame for frame in here.stack if _is_users(frame)] or list(here.stack)  # none is theirs: the fault is ours
        here.stack = traceback.StackSummary.from_list(theirs[-_FRAMES:])
        here = here.__cause__ or here.__context__
    print("".join(trail.format()), end="", file=sys.stderr)
    return complain(f"{failure.args[0]} raised {type(error).__name__}, see above", 1)


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith((os.path.dirname(__file__), "<frozen")) and not frame.name.endswith("_call_impl")


def complain(message: object, status: int) -> int:
    print("\n".join((f"gradlineage: {message}", *getattr(message, "__notes__", ()))), file=sys.stderr)
    return status


# -- writing -----------------------------------------------------------------------------------------------------------------------


def write(text: str | bytes, output: str | None) -> None:
    """Text goes to a file or to standard output, bytes to a file."""
    text = text if isinstance(text, bytes) else text.rstrip("\n") + "\n"
    if output is None and isinstance(text, str):
        encoding = sys.stdout.encoding or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            text = text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing may be left for the flush at exit
            raise UsageError(f"cannot write to standard output: {error.strerror}") from None
        return
    try:
        write_text(text, output or os.devnull)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}; expected the name of a file, as in -o net.txt") from None
