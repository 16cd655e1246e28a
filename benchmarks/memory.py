"""Does a trace take more memory than inference does?

Each figure is the peak of a process of its own: what the forward under ``no_grad`` needs beyond what was there before it, and what the trace of
the same batch does. On a GPU it is what torch allocated there. The bound is 1.15 of inference and 30 MB on top.

Beside them stand the forward with gradient, and the same with its saved tensors dropped, which is what a trace cannot go below where torch takes
other kernels with gradient than without.

Then what a lineage holds: a model of n module calls, bytes of all Python objects that the lineage reaches, before and after all of it was read.

    python -m benchmarks.memory [--device cuda] [--rounds 3] [--json out.json] [--compare old.json]
"""

from __future__ import annotations

import gc
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import gradlineage
from benchmarks import harness
from benchmarks.harness import Figure, Options
from benchmarks.models import build, nothing, read, same_kernels

__all__ = ["held", "stack_of"]

MODELS = ("resnet50@224x16", "long@2048x8")
TABLE = "peak beyond what was there before"


def measure(options: Options) -> Iterator[Figure]:
    specs = options.models or (("resnet18@64x4",) if options.quick else MODELS)
    ways = tuple(WAYS)
    repeats = 1 if options.quick else min(options.rounds, 5)
    for spec in specs:
        answers = dict(
            zip(ways, harness.children("memory", repeats, [(spec, way, options.device) for way in ways], options.quick), strict=True)
        )
        wrong = next((a["error"] for each in answers.values() for a in each if "error" in a), None)
        if wrong is not None:
            yield Figure(TABLE, spec, "inference", None, note=wrong)
            continue
        peaks = {way: [a["peak"] for a in answers[way]] for way in ways}
        inference, trace = (statistics.median(peaks[way]) for way in ways[:2])
        bound = 1.15 * inference + 30
        for way in ways:
            yield Figure.of(TABLE, spec, way, peaks[way], "MB", bound if way == "trace" else None)
        yield Figure(TABLE, spec, "trace x inference", trace / max(inference, 1e-3), "x")
    for count in (1_000,) if options.quick else (1_000, 10_000):
        model, x = stack_of(count)
        lineage = gradlineage.trace(model, x)
        subject, calls = f"{count:,} calls", len(lineage.calls)
        objects, size = held(lineage)
        yield Figure("what a lineage holds", subject, "as traced", size / 1e6, "MB", bound=20 * count / 10_000)
        yield Figure("what a lineage holds", subject, "each call", size / calls, "bytes")
        yield Figure("what a lineage holds", subject, "objects each call", objects / calls)
        read(lineage)
        yield Figure("what a lineage holds", subject, "after reading", held(lineage)[1] / 1e6, "MB")


def stack_of(count: int) -> tuple[nn.Module, torch.Tensor]:
    """As many layers in a row, linear ones and activations."""
    layers: list[nn.Module] = []
    for i in range(count):
        layers.append(nn.ReLU() if i % 2 else nn.Linear(2, 2))
    return nn.Sequential(*layers), torch.randn(1, 2)


def held(value: Any) -> tuple[int, int]:
    """How many objects a value reaches and how many bytes they are; modules, classes and functions are not its own."""
    shared = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
    seen = {id(value)}
    stack, size = [value], 0
    while stack:
        item = stack.pop()
        size += sys.getsizeof(item)
        for other in gc.get_referents(item):
            if id(other) not in seen and not isinstance(other, shared):
                seen.add(id(other))
                stack.append(other)
    return len(seen), size


def child(spec: str, way: str, device: str) -> dict[str, float]:
    run = WAYS[way]
    with same_kernels():
        warm, args = build("resnet18@32", device)
        run(warm, *args)
        del warm, args
        model, args = build(spec, device)
        before = harness.reset_peak(device)
        kept = run(model, *args)
        found = harness.peak_memory(device) - before
        del kept
    return {"peak": found, "before": before}


def inferred(model: nn.Module, *args: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(*args)


def dropping(model: nn.Module, *args: torch.Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(nothing, nothing):
        return model(*args)


WAYS: dict[str, Callable[..., Any]] = {
    "inference": inferred,
    "trace": gradlineage.trace,
    "grad, nothing saved": dropping,
    "grad": lambda model, *args: model(*args),
}


def main(argv: list[str] | None = None) -> int:
    return harness.main("memory", argv, count=3, models=MODELS)


if __name__ == "__main__":
    raise SystemExit(main())
