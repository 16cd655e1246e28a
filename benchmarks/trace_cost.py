"""What does a trace cost beside the forward it watches?

Interleaved in every round, so that a noisy machine disturbs all alike:

- plain, grad: a forward without and with gradient;
- floor: a forward with gradient, with no-op hooks before and after every module (keyword arguments, ``always_call``), a no-op function mode,
  and saved tensors dropped. Whatever watches a pass by these means costs this much;
- hooks: a recording without its function mode; pass: a recording with it. What lies between is the cost of the mode;
- trace: ``gradlineage.trace`` until it returns. What lies between it and the pass is the cost of the walk over what was recorded;
- links, read: all calls, joins and links asked of a lineage that was just traced; and every source seen through joins as well.

Times are those of the thread on the processor. Small models are bound by what happens between two kernels; there the bounds are in floors. Large
ones are bound by the kernels; there the bound is in forwards. ``each`` is what hooks, mode and walk add, by module call or torch function.

    python -m benchmarks.trace_cost [--device cuda] [--rounds 15] [--models resnet18@64 ...] [--json out.json] [--compare old.json]
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import gradlineage
from benchmarks import harness
from benchmarks.harness import Figure, Options, Way
from benchmarks.models import COMPUTE, LAUNCH, build, calls_and_operations, nothing, read, same_kernels

QUICK = ("mobilenet_v3_small@32",)


class NoOpMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def floor(model: nn.Module, args: tuple[Any, ...]) -> None:
    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True, always_call=True))
    with torch.autograd.graph.saved_tensors_hooks(nothing, nothing), NoOpMode():
        model(*args)
    for handle in handles:
        handle.remove()


def plain(model: nn.Module, args: tuple[Any, ...]) -> None:
    with torch.no_grad():
        model(*args)


def recorded(model: nn.Module, args: tuple[Any, ...], shadow: bool) -> None:
    with gradlineage.recording(model, drop_saved=True, restore=shadow, shadow=shadow):
        model(*args)


def check(model: nn.Module, args: tuple[Any, ...]) -> gradlineage.Lineage:
    """The answers first: two traces agree, every source is known, and the model computes what it computed before."""
    with torch.no_grad():
        before = model(*args)
    one, two = gradlineage.trace(model, *args), gradlineage.trace(model, *args)
    assert one == two
    assert all(source.kind != "unknown" for call in one.layers for flow in call.inputs for source in flow.sources)
    with torch.no_grad():
        assert torch.allclose(before, model(*args), rtol=1e-2, atol=1e-3)
    return one


def measure(options: Options) -> Iterator[Figure]:
    for spec in options.models or (QUICK if options.quick else LAUNCH):
        yield from launch_bound(spec, options)
    if not options.models and not options.quick:
        for spec in COMPUTE:
            yield from compute_bound(spec, options)


def launch_bound(spec: str, options: Options) -> Iterator[Figure]:
    model, args = build(spec, options.device)
    with same_kernels():
        check(model, args)
        calls, operations = calls_and_operations(model, args)
        times = harness.rounds(
            {
                "plain": lambda: plain(model, args),
                "grad": lambda: model(*args),
                "floor": lambda: floor(model, args),
                "hooks": lambda: recorded(model, args, False),
                "pass": lambda: recorded(model, args, True),
                "trace": lambda: gradlineage.trace(model, *args),
                "links": Way(lambda made: read(made, sources=False), lambda: gradlineage.trace(model, *args)),
                "read": Way(read, lambda: gradlineage.trace(model, *args)),
            },
            options.rounds,
            options.device,
        )
    for name, values in times.items():
        yield Figure.of("milliseconds", spec, name, values, "ms")
    bounds = {"plain": None, "grad": None, "hooks": None, "pass": 1.35, "trace": 1.7, "links": None, "read": 1.0}
    for name, bound in bounds.items():
        yield Figure.of("in floors", spec, f"{name} x floor", harness.ratios(times[name], times["floor"]), "x", bound)
    parts = {
        "hooks": (times["hooks"], times["grad"]),
        "mode": (times["pass"], times["hooks"]),
        "walk": (times["trace"], times["pass"]),
        "no-op hooks and mode": (times["floor"], times["grad"]),
    }
    for name, (more, less) in parts.items():
        value = statistics.median([a - b for a, b in zip(more, less, strict=True)])
        per, unit = (operations, "µs per op") if name == "mode" else (calls, "µs per call")
        yield Figure("what each part adds", spec, name, value, "ms")
        yield Figure("what each part adds", spec, f"{name} each", value * 1e3 / per, unit)
    yield Figure("what each part adds", spec, "module calls", calls)
    yield Figure("what each part adds", spec, "torch functions", operations)


def compute_bound(spec: str, options: Options) -> Iterator[Figure]:
    model, args = build(spec, options.device)
    with same_kernels():
        check(model, args)
        ways = {"plain": lambda: plain(model, args), "grad": lambda: model(*args), "trace": lambda: gradlineage.trace(model, *args)}
        times = harness.rounds(ways, options.rounds if options.device != "cpu" else min(options.rounds, 9), options.device)
    for name, values in times.items():
        yield Figure.of("compute-bound", spec, name, values, "ms")
    yield Figure.of("compute-bound", spec, "trace x grad", harness.ratios(times["trace"], times["grad"]), "x", 1.10)


def main(argv: list[str] | None = None) -> int:
    return harness.main("trace_cost", argv, models=(*LAUNCH, *COMPUTE))


if __name__ == "__main__":
    raise SystemExit(main())
