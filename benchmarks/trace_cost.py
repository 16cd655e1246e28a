"""What does a trace cost beside the forward it watches?

Interleaved in every round, so that a noisy machine disturbs all alike: a plain forward without and with gradient; the floor, which is a forward
with no-op keyword hooks on every module, a no-op function mode and saved tensors dropped; a recording with hooks alone, and with the function
mode (what lies between is the cost of the mode); and `gradlineage.trace` until it returns. Medians and quartiles, as ratios to the floor and to
the plain forward.

    python benchmarks/trace_cost.py [--device cuda] [--rounds 15] [--models resnet18@64 ...] [--json out.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn
from torch.overrides import TorchFunctionMode

import gradlineage

MODELS = ("resnet18@64", "mobilenet_v3_small@64", "inception_v3@299")


class NoOpMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def build(spec: str, device: str) -> tuple[nn.Module, torch.Tensor]:
    name, _, size = spec.partition("@")
    options = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    model = torchvision.models.get_model(name, weights=None, **options).eval().to(device)
    return model, torch.randn(1, 3, int(size or 64), int(size or 64), device=device)


def plain(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def with_gradient(model: nn.Module, x: torch.Tensor) -> None:
    model(x)


def floor(model: nn.Module, x: torch.Tensor) -> None:
    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True, always_call=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: None, lambda t: None), NoOpMode():
        model(x)
    for handle in handles:
        handle.remove()


def recorded(model: nn.Module, x: torch.Tensor) -> None:
    with gradlineage.recording(model, drop_saved=True, restore=True):
        model(x)


def hooks_alone(model: nn.Module, x: torch.Tensor) -> None:
    with gradlineage.recording(model, drop_saved=True, shadow=False):
        model(x)


def traced(model: nn.Module, x: torch.Tensor) -> None:
    gradlineage.trace(model, x)


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], None]] = {
    "plain": plain, "grad": with_gradient, "floor": floor, "hooks": hooks_alone, "pass": recorded, "trace": traced,
}  # fmt: skip


def check(model: nn.Module, x: torch.Tensor) -> None:
    """The answers first: two traces agree, and every layer but the first knows its source."""
    one, two = gradlineage.trace(model, x), gradlineage.trace(model, x)
    assert one == two
    assert all(source.kind != "unknown" for call in one.layers for flow in call.inputs for source in flow.sources)


def measure(spec: str, device: str, rounds: int) -> dict[str, list[float]]:
    model, x = build(spec, device)
    check(model, x)
    synchronise = torch.cuda.synchronize if device.startswith("cuda") else contextlib.nullcontext
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            synchronise()
            start = time.perf_counter()
            way(model, x)
            synchronise()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def report(spec: str, times: dict[str, list[float]]) -> None:
    base, ground = statistics.median(times["plain"]), statistics.median(times["floor"])
    print(f"\n{spec}\n{'':8}{'median ms':>10}{'quartiles':>18}{'x plain':>9}{'x floor':>9}")
    for name, values in times.items():
        low, mid, high = statistics.quantiles(values, n=4)
        print(f"{name:8}{mid:10.1f}{f'{low:.1f}-{high:.1f}':>18}{mid / base:9.2f}{mid / ground:9.2f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--json", help="write all times there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, python {platform.python_version()}, {options.device}: {where}, one thread, {options.rounds} rounds")
    results = {}
    for spec in options.models:
        results[spec] = measure(spec, options.device, options.rounds)
        report(spec, results[spec])
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "device": where, "ms": results}, file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
