"""Models and saved files that a command line names, traced or loaded."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradlineage.errors import UsageError
from gradlineage.lineage import Lineage
from gradlineage.runs import Runs
from gradlineage.target import build, check_call, find, make_inputs, parse_input, parse_settings, parse_target, read_batches
from gradlineage.terminal import users

__all__ = ["MODEL", "is_saved", "lineage_of", "no_model", "runs_of", "traced"]

MODEL = ("set", "input", "device", "train")
"""Options that say how to run a model."""


def is_saved(target: str) -> bool:
    return target.lower().endswith(".json")


def no_model(options: argparse.Namespace, target: str, what: str, names: Sequence[str]) -> None:
    values = {name: getattr(options, name, None) for name in names}
    if given := [name for name, value in values.items() if value is not None and value is not False and value != []]:
        verb = "are" if " and " in target else "is a" if what == "lineage" else "holds"
        raise UsageError(f"{target} {verb} saved {what}, no model runs: leave out --{', --'.join(given)}")


def lineage_of(options: argparse.Namespace, target: str) -> Lineage:
    if not is_saved(target):
        return traced(options, target)
    no_model(options, target, "lineage", MODEL)
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


def traced(options: argparse.Namespace, target: str) -> Lineage:
    specs = [parse_input(text) for text in options.input]
    model = _model(options, target)
    from gradlineage.tracing import trace

    args, kwargs = make_inputs(specs, model, options.device)
    check_call(model, target, args, kwargs)
    with users("running the model"):
        return trace(model, *args, **kwargs)


def runs_of(options: argparse.Namespace) -> Runs:
    if (options.inputs is None) == (options.random is None):
        raise UsageError(f"paths {options.target} needs inputs: --inputs FOLDER_OR_FILE, or --random 100 with --input 1x3x224x224")
    if options.max_paths < 0:
        raise UsageError(f"--max-paths {options.max_paths}: expected a number from 0 on")
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

    with users("running the model", spinner=False):  # it has a bar
        return trace_calls(model, with_progress(checked(), options.random), max_paths=options.max_paths)
