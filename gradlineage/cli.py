"""The command: ``gradlineage show TARGET`` prints the table of a model or of a saved lineage.

A saved lineage is shown without importing torch. Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from gradlineage.errors import LineageError, TraceError, UsageError
from gradlineage.exchange import write_text
from gradlineage.lineage import Call, Lineage
from gradlineage.target import build, check_call, find, make_inputs, parse_input, parse_settings, parse_target

__all__ = ["main"]

_ROWS = 400  # more than that no one reads
_FRAMES = 5
_PLAIN = str.maketrans({"←": "<-", "⇠": "<~", "–": "-", "─": "-", "×": "x", "…": "..."})

_EXAMPLES = """examples:
  gradlineage show torchvision.models:resnet18 --input 1x3x224x224
  gradlineage show torchvision.models:inception_v3 --set weights=None --input 1x3x299x299 --depth 1
  gradlineage show path/to/net.py:Net --set width=64 --input 'x=float32[1,3,8,8]' --input 'mask=bool[1,16]'
  gradlineage show net.py:make --input 'ids=int64[1,16]<1000' --layer 'encoder.*'
  gradlineage show net.py:make --input @batch.pt --json -o net.json
  gradlineage show net.json

inputs:
  1x3x299x299              normally distributed float32, passed by position
  x=float32[1,3,8,8]       passed by name; with <1 at the end: uniform in [0, 1)
  ids=int64[1,16]<1000     integers in [0, 1000); without a bound 0 or 1
  mask=bool[1,16]          true or false
  @batch.pt                saved by torch.save: a tensor, a list or tuple by position, a dict by name
Random numbers start from the same seed in every run. Quote what has <, [ or * in it, or the shell takes it.

A TARGET that is no saved lineage is imported, which runs its code: show only what you would run.
Exit status: 0 done, 1 the model failed, 2 the command could not be understood."""


class _UserError(Exception):
    """Code of the user's raised while the command did ``args[0]``; the error itself is the cause."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own) and give its exit status: 0, 1 (the model failed) or 2 (usage)."""
    try:
        options = _parser().parse_args(argv)
        return _show(options)
    except SystemExit as stop:  # argparse has said it all
        return stop.code if isinstance(stop.code, int) else 2
    except _UserError as failure:
        return _report(failure)
    except TraceError as error:
        return _complain(error, 1)
    except LineageError as error:
        return _complain(error, 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough; nothing may be left for the flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("gradlineage", description="What feeds each layer of a PyTorch model.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser(
        "show", help="print the table of a model or of a saved lineage", epilog=_EXAMPLES, formatter_class=raw, allow_abbrev=False,
        description="Run a model once and print what feeds each of its layers, or print a saved lineage.",
    )  # fmt: skip
    show.add_argument(
        "target",
        metavar="TARGET",
        help="package.module:callable or path/file.py:callable (a model, its class or a function), or a saved .json",
    )
    model = show.add_argument_group("the model")
    model.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="argument of the callable: a Python literal, else text"
    )
    model.add_argument("--input", action="append", default=[], metavar="SPEC", help="an input tensor, see below; may be repeated")
    model.add_argument("--device", help="where to run, such as cuda or cpu; by default where the model is")
    model.add_argument("--train", action="store_true", help="run in training mode; by default in eval mode")
    view = show.add_argument_group("the view")
    view.add_argument("--depth", type=int, metavar="N", help="show containers N calls below the root as one layer each")
    view.add_argument("--layer", metavar="PATTERN", help="only layers, containers and joins whose path matches, as in 'layer3.*'")
    view.add_argument("--no-joins", action="store_true", help="no rows for joins: the nearest layers instead")
    view.add_argument(
        "--decisions", action="store_true", help="list where Python read a tensor's value below the table instead of within it"
    )
    view.add_argument("--rearranging", action="store_true", help="also name operations that only move values, such as view and permute")
    view.add_argument("--full", action="store_true", help=f"all rows, however many (above {_ROWS} they are collapsed), and no folded lists")
    view.add_argument("--width", type=int, metavar="N", help="columns of text; by default the terminal's, else 120")
    view.add_argument("--json", action="store_true", help="print the lineage as JSON, which 'show' reads again, instead of the table")
    view.add_argument("-o", "--output", metavar="FILE", help="write to a file, which appears only when it is complete")
    return parser


def _show(options: argparse.Namespace) -> int:
    if options.json and options.layer is not None:
        raise UsageError("--layer picks rows of the table and cannot go with --json; leave one of them out")
    lineage = _load(options) if options.target.lower().endswith(".json") else _trace(options)
    if options.depth is not None:
        lineage = lineage.collapse(depth=options.depth)
    if options.json:
        _write(lineage.to_json(), options.output)
        return 0
    if not options.full and options.depth is None and options.layer is None:
        lineage = _fitting(lineage, not options.no_joins)
    color = options.output is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    width = options.width if options.width is not None or options.output is None else 120
    table = lineage.to_table(
        joins=not options.no_joins,
        decisions=options.decisions,
        rearranging=options.rearranging,
        full=options.full,
        width=width,
        layer=options.layer,
        color=color,
    )
    _write(table, options.output)
    return 0


def _load(options: argparse.Namespace) -> Lineage:
    given = [name for name in ("set", "input", "device", "train") if getattr(options, name)]
    if given:
        raise UsageError(f"{options.target} is a saved lineage, no model runs: leave out --{', --'.join(given)}")
    return Lineage.load(options.target)


def _trace(options: argparse.Namespace) -> Lineage:
    settings = parse_settings(options.set)
    specs = [parse_input(text) for text in options.input]
    parse_target(options.target)  # complain before torch is imported, which takes seconds
    with _users(f"importing {options.target}"):
        import torch

        from gradlineage.tracing import trace

        torch.manual_seed(0)
        found = find(options.target)
    with _users("building the model"):
        model = build(found, options.target, settings, options.device).train(options.train)
    args, kwargs = make_inputs(specs, model, options.device)
    check_call(model, options.target, args, kwargs)
    with _users("running the model"):
        return trace(model, *args, **kwargs)


def _fitting(lineage: Lineage, joins: bool) -> Lineage:
    """The lineage itself if its table is short enough, else collapsed at the greatest depth at which it is."""

    def count(view: Lineage) -> int:
        return len(view.layers) + (len(view.joins) if joins else 0)

    rows = count(lineage)
    if rows <= _ROWS:
        return lineage
    level: dict[Call | None, int] = {None: -1}
    for call in lineage.calls:
        level[call] = level[call.parent] + 1
    for depth in range(max(level.values()) - 1, 0, -1):
        shown = lineage.collapse(depth=depth)
        if depth > 1 and (len(shown.layers) > _ROWS or count(shown) > _ROWS):  # joins cost a walk: count them last
            continue
        if count(shown) < rows:
            largest = max(shown.layers, key=lambda call: (call._index in shown._collapsed, call.parameters[0]))
            told = f"gradlineage: {rows:,} rows, collapsed to {count(shown):,} with --depth {depth}"
            print(f"{told}; open it with --full, --depth {depth + 1} or --layer '{largest.path}.*'", file=sys.stderr)
            return shown
    return lineage


# -- the user's code ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _users(what: str) -> Iterator[None]:
    """Around code of the user's: what it prints goes to standard error, what it raises is told from our own errors."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if sys.stderr.isatty():
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(f"{what} …"))
        stack.enter_context(warnings.catch_warnings())
        warnings.showwarning = _warn
        try:
            yield
        except LineageError:
            raise
        except (Exception, SystemExit) as error:
            raise _UserError(what) from error


def _warn(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
    print(f"{category.__name__} at {filename}:{lineno}: {message}", file=sys.stderr)


def _report(failure: _UserError) -> int:
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
    return _complain(f"{failure.args[0]} raised {type(error).__name__}, see above", 1)


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith((os.path.dirname(__file__), "<frozen")) and not frame.name.endswith("_call_impl")


def _complain(message: object, status: int) -> int:
    print("\n".join((f"gradlineage: {message}", *getattr(message, "__notes__", ()))), file=sys.stderr)
    return status


# -- writing -----------------------------------------------------------------------------------------------------------------------


def _write(text: str, output: str | None) -> None:
    text = text.rstrip("\n") + "\n"
    if output is None:
        encoding = sys.stdout.encoding or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            text = text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        write_text(text, output)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}; expected the name of a file, as in -o net.txt") from None
