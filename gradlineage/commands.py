"""What the commands do: each takes the options it was given, and gives the process's exit status."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradlineage.errors import UsageError
from gradlineage.findings import CODES, SEVERITIES, lint
from gradlineage.lineage import Call, Lineage
from gradlineage.runs import Runs
from gradlineage.target import build, check_call, find, make_inputs, parse_input, parse_settings, parse_target, read_batches
from gradlineage.terminal import users, write

__all__ = ["add_commands"]

_ROWS = 400  # more than that no one reads
_MODEL = ("set", "input", "device", "train")

_INPUTS = """
inputs:
  1x3x299x299              normally distributed float32, passed by position
  x=float32[1,3,8,8]       passed by name; with <1 at the end: uniform in [0, 1)
  ids=int64[1,16]<1000     integers in [0, 1000); without a bound 0 or 1
  mask=bool[1,16]          true or false
  @batch.pt                saved by torch.save: a tensor, a list or tuple by position, a dict by name
Random numbers start from the same seed in every run. Quote what has <, [ or * in it, or the shell takes it.

A TARGET that is no saved file is imported, which runs its code: name only what you would run.
"""

_SHOW = f"""examples:
  gradlineage show torchvision.models:resnet18 --input 1x3x224x224
  gradlineage show torchvision.models:inception_v3 --set weights=None --input 1x3x299x299 --depth 1
  gradlineage show path/to/net.py:Net --set width=64 --input 'x=float32[1,3,8,8]' --input 'mask=bool[1,16]'
  gradlineage show net.py:make --input 'ids=int64[1,16]<1000' --layer 'encoder.*'
  gradlineage show net.py:make --input @batch.pt --json -o net.json
  gradlineage show net.json
{_INPUTS}Exit status: 0 done, 1 the model failed, 2 the command could not be understood."""

_PATHS = f"""examples:
  gradlineage paths net.py:EarlyExit --random 100 --input 1x3x32x32
  gradlineage paths net.py:EarlyExit --inputs batches/ --json -o runs.json
  gradlineage paths runs.json
{_INPUTS}Exit status: 0 done, 1 the model failed, 2 the command could not be understood."""

_DIFF = f"""examples:
  gradlineage diff before.json after.json
  gradlineage diff old.py:Net new.py:Net --input 1x3x32x32
  gradlineage diff before.json net.py:Net --input 1x3x32x32
{_INPUTS}Exit status: 0 no difference, 1 they differ, 2 the command could not be understood or a model failed."""


_LINT = f"""codes:
{"".join(f"  {code:<20} {told}" + chr(10) for code, told in CODES.items())}
examples:
  gradlineage lint net.py:Net --train --input 2x3x32x32
  gradlineage lint net.json --ignore argument-unused --fail-on warning
{_INPUTS}Exit status: 0 nothing as severe as --fail-on, 1 something is, or the model failed, 2 the command could not be understood."""

_GRADS = f"""examples:
  gradlineage grads net.py:Net --train --input 2x3x32x32
  gradlineage grads net.json --output-tensor 0
{_INPUTS}Exit status: 0 every parameter that takes gradient gets one, 1 one does not, or the model failed, 2 the command could not be understood."""

_EXPLAIN = f"""examples:
  gradlineage explain torchvision.models:resnet18 layer1.0.conv2 --input 1x3x64x64
  gradlineage explain net.json conv1 fc
{_INPUTS}Exit status: 0 done, 1 the model failed, 2 the command could not be understood."""


def add_commands(commands: Any) -> None:
    """The subcommands, each with its options and ``run``, the function that does it."""
    raw = argparse.RawDescriptionHelpFormatter

    def add(name: str, run: Any, help: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(
            name, help=help, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False
        )
        parser.set_defaults(run=run)
        return parser

    show = add(
        "show", _show, "print the table of a model or of a saved lineage",
        "Run a model once and print what feeds each of its layers, or print a saved lineage.", _SHOW,
    )  # fmt: skip
    _add_target(show, "TARGET")
    view = show.add_argument_group("the view")
    view.add_argument("--depth", type=int, metavar="N", help="show containers N calls below the root as one layer each")
    view.add_argument("--layer", metavar="PATTERN", help="only layers, containers and joins whose path matches, as in 'layer3.*'")
    view.add_argument("--no-joins", action="store_true", help="no rows for joins: the nearest layers instead")
    view.add_argument("--roll", action="store_true", help="one row for each call of a loop's body, as cell ×500")
    view.add_argument(
        "--decisions", action="store_true", help="where Python read a tensor's value: in a list below instead of notes within"
    )
    view.add_argument("--rearranging", action="store_true", help="also name operations that only move values, such as view and permute")
    view.add_argument("--full", action="store_true", help=f"all rows, however many (above {_ROWS} they are collapsed), and no folded lists")
    view.add_argument("--width", type=int, metavar="N", help="columns of text; by default the terminal's, else 120")
    view.add_argument("--json", action="store_true", help="print the lineage as JSON, which 'show' reads again, instead of the table")
    _add_output(view)

    paths = add(
        "paths", _paths, "trace many inputs and print the paths they took",
        "Run a model on many inputs and print which ways they took, how often, and what decided; or print saved runs.", _PATHS,
    )  # fmt: skip
    _add_target(paths, "TARGET")
    many = paths.add_argument_group("the inputs")
    many.add_argument(
        "--inputs", metavar="PATH", help="a folder of files saved by torch.save, one input each, or one file with a list of inputs"
    )
    many.add_argument("--random", type=int, metavar="N", help="draw what --input describes N times")
    many.add_argument(
        "--max-paths", type=int, default=100, metavar="N", help="keep the lineages of so many paths (100); counts go on beyond"
    )
    many.add_argument("--union", action="store_true", help="print the table of all paths in one, with shares, instead")
    many.add_argument("--json", action="store_true", help="print the runs as JSON, which 'paths' and 'merge' read again")
    _add_output(many)

    differ = add(
        "diff", _diff, "compare two models or saved lineages",
        "Print what one has to change in A's wiring to get B's: calls and joins, what feeds them, shapes.", _DIFF,
    )  # fmt: skip
    _add_target(differ, "A", "B")

    merge = add("merge", _merge, "put saved runs together", "Put runs of one model together that were traced in parts, in any order.")
    merge.add_argument("files", nargs="+", metavar="FILE", help="what 'paths --json' or Runs.save wrote")
    _add_output(merge)

    check = add(
        "lint", _lint, "look for faults of wiring", "Look for modules, parameters and tensors that go nowhere, and for gradient that stops.", _LINT,
    )  # fmt: skip
    _add_target(check, "TARGET")
    findings = check.add_argument_group("the findings")
    findings.add_argument("--select", action="append", metavar="CODE", help="only this code; * may stand in it, may be repeated")
    findings.add_argument("--ignore", action="append", default=[], metavar="CODE", help="not this code")
    findings.add_argument(
        "--fail-on", choices=SEVERITIES, default="error", help="exit with 1 at findings of this severity or above (error)"
    )
    findings.add_argument("--format", choices=("text", "json"), default="text", help="text, or a JSON list for other tools")
    _add_output(findings)

    grads = add(
        "grads", _grads, "say which parameters get a gradient", "Say which parameters the outputs send gradient to, and what stops it elsewhere.",
        _GRADS,
    )  # fmt: skip
    _add_target(grads, "TARGET")
    grads.add_argument("--output-tensor", metavar="NAME", help="from this output tensor alone, by number or name")
    _add_output(grads)

    tell = add(
        "explain", _explain, "say what feeds a layer and what it feeds, or the way between two",
        "Say in a few lines what feeds a layer and what it feeds; with a second one, the shortest way from the first to that.", _EXPLAIN,
    )  # fmt: skip
    _add_target(tell, "TARGET")
    tell.add_argument("first", metavar="LABEL", help="a call or join, as the table labels it")
    tell.add_argument("last", metavar="LABEL", nargs="?", help="another one")


def _add_target(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        told = "package.module:callable or path/file.py:callable (a model, its class or a function), or a saved .json"
        parser.add_argument(name.lower(), metavar=name, help=told)
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="argument of the callable: a Python literal, else text"
    )
    model.add_argument("--input", action="append", default=[], metavar="SPEC", help="an input tensor, see below; may be repeated")
    model.add_argument("--device", help="where to run, such as cuda or cpu; by default where the model is")
    model.add_argument("--train", action="store_true", help="run in training mode; by default in eval mode")


def _add_output(parser: Any) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write to a file, which appears only when it is complete")


# -- show --------------------------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    if options.json and options.layer is not None:
        raise UsageError("--layer picks rows of the table and cannot go with --json; leave one of them out")
    lineage = _lineage(options, options.target)
    if options.depth is not None:
        lineage = lineage.collapse(depth=options.depth)
    if options.roll:
        lineage = lineage.roll()
    if options.json:
        write(lineage.to_json(), options.output)
        return 0
    if not options.full and not options.roll and options.depth is None and options.layer is None:
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
    write(table, options.output)
    return 0


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


# -- paths, diff and merge ---------------------------------------------------------------------------------------------------------


def _paths(options: argparse.Namespace) -> int:
    if _is_saved(options.target):
        _no_model(options, options.target, "runs", (*_MODEL, "inputs", "random"))
        runs = Runs.load(options.target)
    else:
        runs = _trace_many(options)
    if options.json and options.union:
        raise UsageError("--union prints a table and cannot go with --json; leave one of them out")
    write(runs.to_json() if options.json else str(runs.union() if options.union else runs), options.output)
    return 0


def _trace_many(options: argparse.Namespace) -> Runs:
    if (options.inputs is None) == (options.random is None):
        raise UsageError(f"paths {options.target} needs inputs: --inputs FOLDER_OR_FILE, or --random 100 with --input 1x3x224x224")
    if options.random is not None and (options.random < 1 or not options.input):
        raise UsageError(f"--random {options.random} draws what --input describes: --random 100 --input 1x3x224x224")
    if options.inputs is not None and options.input:
        raise UsageError("--inputs names files and --input describes a tensor: give one of the two")
    specs = [parse_input(text) for text in options.input]
    model = _model(options, options.target)
    from gradlineage.many import trace_calls, with_progress

    def drawn() -> Iterator[tuple[list[Any], dict[str, Any]]]:
        for _ in range(options.random):
            yield make_inputs(specs, model, options.device)

    calls = read_batches(Path(options.inputs), model, options.device) if options.inputs is not None else drawn()

    def checked() -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
        for args, kwargs in calls:
            check_call(model, options.target, args, kwargs)
            yield args, kwargs

    with users("running the model"):
        return trace_calls(model, with_progress(checked(), options.random), max_paths=options.max_paths)


def _diff(options: argparse.Namespace) -> int:
    from gradlineage.compare import diff

    if _is_saved(options.a) and _is_saved(options.b):
        _no_model(options, f"{options.a} and {options.b}", "lineages", _MODEL)
    first, second = (Lineage.load(t) if _is_saved(t) else _traced(options, t) for t in (options.a, options.b))
    found = diff(first, second)
    write(str(found), None)
    return 1 if found else 0


def _merge(options: argparse.Namespace) -> int:
    first, *others = [Runs.load(file) for file in options.files]
    runs = first.merge(*others)
    write(runs.to_json() if options.output is not None else str(runs), options.output)
    return 0


# -- lint, grads and explain -------------------------------------------------------------------------------------------------------


def _lint(options: argparse.Namespace) -> int:
    found = lint(_lineage(options, options.target), select=options.select or "*", ignore=options.ignore)
    if options.format == "json":
        write(json.dumps([dataclasses.asdict(f) for f in found], indent=1), options.output)
    else:
        counts = [f"{n} {s}{'s' * (n != 1 and s != 'info')}" for s in SEVERITIES if (n := sum(f.severity == s for f in found))]
        write("\n".join([*map(str, found), ", ".join(counts) or "nothing found"]), options.output)
    worst = SEVERITIES.index(options.fail_on)
    return int(any(SEVERITIES.index(f.severity) <= worst for f in found))


def _grads(options: argparse.Namespace) -> int:
    name = options.output_tensor
    report = _lineage(options, options.target).gradient(int(name) if name is not None and name.isdigit() else name)
    write(str(report), options.output)
    return int(bool(report.missing))


def _explain(options: argparse.Namespace) -> int:
    write(_lineage(options, options.target).explain(options.first, options.last), None)
    return 0


# -- models and saved files --------------------------------------------------------------------------------------------------------


def _is_saved(target: str) -> bool:
    return target.lower().endswith(".json")


def _no_model(options: argparse.Namespace, target: str, what: str, names: Sequence[str]) -> None:
    if given := [name for name in names if getattr(options, name, None)]:
        verb = "are" if " and " in target else "is a" if what == "lineage" else "holds"
        raise UsageError(f"{target} {verb} saved {what}, no model runs: leave out --{', --'.join(given)}")


def _lineage(options: argparse.Namespace, target: str) -> Lineage:
    if not _is_saved(target):
        return _traced(options, target)
    _no_model(options, target, "lineage", _MODEL)
    return Lineage.load(target)


def _model(options: argparse.Namespace, target: str) -> Any:
    settings = parse_settings(options.set)
    parse_target(target)  # complain before torch is imported, which takes seconds
    with users(f"importing {target}"):
        import torch

        torch.manual_seed(0)
        found = find(target)
    with users("building the model"):
        return build(found, target, settings, options.device).train(options.train)


def _traced(options: argparse.Namespace, target: str) -> Lineage:
    specs = [parse_input(text) for text in options.input]
    model = _model(options, target)
    from gradlineage.tracing import trace

    args, kwargs = make_inputs(specs, model, options.device)
    check_call(model, target, args, kwargs)
    with users("running the model"):
        return trace(model, *args, **kwargs)
