"""What the commands do: each takes the options it was given, and gives the process's exit status."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

from gradlineage.collapse import fitting
from gradlineage.errors import UsageError
from gradlineage.findings import CODES, SEVERITIES, lint
from gradlineage.lineage import Lineage
from gradlineage.running import MODEL, is_saved, lineage_of, no_model, runs_of, traced
from gradlineage.runs import Runs
from gradlineage.terminal import write

__all__ = ["add_commands"]

_ROWS = 400  # more than that no one reads
_SPOTS = 70  # nodes that fit on a screen

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


_DRAW = f"""examples:
  gradlineage draw torchvision.models:resnet50 --input 1x3x224x224 -o resnet50.svg
  gradlineage draw net.py:Net --input 1x3x32x32 -o net.html
  gradlineage draw net.json --collapse 'encoder.*' --shapes -o net.png
  gradlineage draw after.json --before before.json -o change.svg
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

    picture = add(
        "draw", _draw, "draw a model or a saved lineage", "Draw what feeds each layer, as a picture or a page that opens in a browser.", _DRAW,
    )  # fmt: skip
    _add_target(picture, "TARGET")
    look = picture.add_argument_group("the picture")
    look.add_argument("-o", "--output", metavar="FILE", required=True, help="net.svg, .png, .html, .dot, .mmd (Mermaid) or .json")
    look.add_argument("--depth", type=int, metavar="N", help="show containers N calls below the root as one node each")
    look.add_argument(
        "--collapse", action="append", default=[], metavar="PATTERN", help="show containers whose path matches as one node each"
    )
    look.add_argument("--full", action="store_true", help=f"all of it, however large (above {_SPOTS} nodes it is collapsed)")
    look.add_argument("--roll", action="store_true", help="loops as loops, cell ×500")
    look.add_argument("--shapes", action="store_true", help="with the shapes of what layers return")
    look.add_argument("--no-decisions", action="store_true", help="without the places where Python read a tensor's value")
    look.add_argument("--before", metavar="FILE", help="a saved lineage: mark what was added, removed or rewired since")

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
    lineage = lineage_of(options, options.target)
    if options.depth is not None:
        lineage = lineage.collapse(depth=options.depth)
    if options.roll:
        lineage = lineage.roll()
    if options.json:
        write(lineage.to_json(), options.output)
        return 0
    if not options.full and not options.roll and options.depth is None and options.layer is None:
        lineage, _ = _fitting(lineage, not options.no_joins, _ROWS)
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


def _fitting(lineage: Lineage, joins: bool, most: int) -> tuple[Lineage, int | None]:
    """The lineage itself if it is short enough, else collapsed, and told so; and the depth."""
    shown, depth = fitting(lineage, most, joins)
    if depth is not None:
        rows, now = (len(view.layers) + len(view.joins) * joins for view in (lineage, shown))
        largest = max(shown.layers, key=lambda call: (call._index in shown._collapsed, call.parameters[0]))
        told = f"gradlineage: {rows:,} rows, collapsed to {now:,} with --depth {depth}"
        print(f"{told}; open it with --full, --depth {depth + 1} or --layer '{largest.path}.*'", file=sys.stderr)
    return shown, depth


def _draw(options: argparse.Namespace) -> int:
    from gradlineage.views.dot import to_dot, to_png, to_svg
    from gradlineage.views.mermaid import to_mermaid

    kind = options.output.rpartition(".")[2].lower()
    if kind not in ("svg", "png", "dot", "html", "mmd", "json"):
        raise UsageError(f"-o {options.output}: the name says what to draw; expected .svg, .png, .html, .dot, .mmd or .json at its end")
    if options.before and kind not in ("svg", "png", "dot"):
        raise UsageError(f"--before marks changes in .svg, .png and .dot, not in .{kind}")
    if options.before and options.roll:
        raise UsageError("--before compares single calls and cannot go with --roll; leave one of them out")
    lineage = lineage_of(options, options.target)
    before = Lineage.load(options.before) if options.before else None
    if options.collapse or options.depth is not None:
        lineage = lineage.collapse(*options.collapse, depth=options.depth)
        known = [pattern for pattern in options.collapse if before is not None and before.find(pattern=pattern)]
        if before is not None and (known or options.depth is not None):
            before = before.collapse(*known, depth=options.depth)
    elif not options.full and kind in ("svg", "png", "dot"):
        lineage, depth = _fitting(lineage, True, _SPOTS)
        before = before.collapse(depth=depth) if before is not None and depth is not None else before
    lineage = lineage.roll() if options.roll else lineage
    look: dict[str, Any] = {"shapes": options.shapes, "decisions": not options.no_decisions}
    marked = look | {"before": before}
    if kind == "html":
        from gradlineage.views.page import to_html

        write(to_html(lineage, shapes=options.shapes), options.output)
    elif kind == "png":
        write(to_png(lineage, **marked), options.output)
    elif kind == "json":
        write(lineage.to_json(), options.output)
    else:
        write(to_mermaid(lineage, **look) if kind == "mmd" else (to_svg if kind == "svg" else to_dot)(lineage, **marked), options.output)
    return 0


# -- paths, diff and merge ---------------------------------------------------------------------------------------------------------


def _paths(options: argparse.Namespace) -> int:
    if is_saved(options.target):
        no_model(options, options.target, "runs", (*MODEL, "inputs", "random"))
        runs = Runs.load(options.target)
    else:
        runs = runs_of(options)
    if options.json and options.union:
        raise UsageError("--union prints a table and cannot go with --json; leave one of them out")
    write(runs.to_json() if options.json else str(runs.union() if options.union else runs), options.output)
    return 0


def _diff(options: argparse.Namespace) -> int:
    from gradlineage.compare import diff

    if is_saved(options.a) and is_saved(options.b):
        no_model(options, f"{options.a} and {options.b}", "lineages", MODEL)
    first, second = (Lineage.load(t) if is_saved(t) else traced(options, t) for t in (options.a, options.b))
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
    found = lint(lineage_of(options, options.target), select=options.select or "*", ignore=options.ignore)
    if options.format == "json":
        write(json.dumps([dataclasses.asdict(f) for f in found], indent=1), options.output)
    else:
        counts = [f"{n} {s}{'s' * (n != 1 and s != 'info')}" for s in SEVERITIES if (n := sum(f.severity == s for f in found))]
        write("\n".join([*map(str, found), ", ".join(counts) or "nothing found"]), options.output)
    worst = SEVERITIES.index(options.fail_on)
    return int(any(SEVERITIES.index(f.severity) <= worst for f in found))


def _grads(options: argparse.Namespace) -> int:
    name = options.output_tensor
    report = lineage_of(options, options.target).gradient(int(name) if name is not None and name.isascii() and name.isdigit() else name)
    write(str(report), options.output)
    return int(bool(report.missing))


def _explain(options: argparse.Namespace) -> int:
    write(lineage_of(options, options.target).explain(options.first, options.last), None)
    return 0
