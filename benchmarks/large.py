"""Do time and memory of a trace grow in proportion to the calls?

A loop of a recurrent cell over 10,000 steps, 1,200 residual blocks in a row, 16 layers of 256 experts, and an eighth, a quarter and a half of each.
Every size is a process of its own: seconds of ``trace`` and of reading all calls, joins and the links between them (not what is seen through joins,
which in a residual stack is the square of it), how much of both went to Python's garbage collector, and the peak beyond what was there before. A
line through the logarithms has the slope 1 where growth is linear, 2 where it is quadratic; the bound of 1.15 is on what gradlineage does itself
(``alone``): full collections, which also look through all that torch has made, begin at some size and make a step there.

    python -m benchmarks.large [--device cuda] [--rounds 3] [--json out.json] [--compare old.json]
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import gradlineage
from benchmarks import harness
from benchmarks.harness import Figure, Options
from benchmarks.models import read


class Recurrent(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.cell, self.head, self.steps = nn.RNNCell(4, 4), nn.Linear(4, 1), steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x)
        for _ in range(self.steps):
            h = self.cell(x, h)
        out: torch.Tensor = self.head(h)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.fc2(self.act(self.fc1(x)))
        return out


class Experts(nn.Module):
    """Sixteen layers; each sends every token to all its experts and adds what they say, weighted by a gate."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(4, count) for _ in range(16))
        self.experts: Any = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(count)) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights = gate(x).softmax(-1)
            parts = [weights[:, i, None] * expert(x) for i, expert in enumerate(experts)]
            x = x + torch.stack(parts).sum(0)
        return x


CASES: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "recurrent, steps": (Recurrent, 10_000),
    "residual, blocks": (lambda n: nn.Sequential(*(Block() for _ in range(n))), 1_200),
    "experts, each of 16 layers": (Experts, 256),
}
PARTS = {"trace": "s", "read": "s", "collector": "s", "peak": "MB"}
GROWING = ("trace", "read", "trace alone", "read alone", "peak")


def measure(options: Options) -> Iterator[Figure]:
    for name, (_, most) in CASES.items():
        sizes = [most // 64, most // 32] if options.quick else [most // 8, most // 4, most // 2, most]
        words = [(name, str(size), options.device) for size in sizes]
        answers = harness.children("large", 1 if options.quick else min(options.rounds, 5), words, options.quick)
        wrong = next((a["error"] for each in answers for a in each if "error" in a), None)
        if wrong is not None:
            yield Figure("at full size", name, "trace", None, note=wrong)
            continue
        middle = [{key: statistics.median(a[key] for a in each) for key in answers[0][0]} for each in answers]
        last = middle[-1]
        yield Figure("at full size", f"{name} {sizes[-1]:,}", "calls", last["calls"])
        for key, unit in PARTS.items():
            yield Figure("at full size", f"{name} {sizes[-1]:,}", key, last[key], unit)
        yield Figure("at full size", f"{name} {sizes[-1]:,}", "trace each call", last["trace"] / last["calls"] * 1e6, "µs")
        yield Figure("at full size", f"{name} {sizes[-1]:,}", "peak each call", last["peak"] / last["calls"] * 1e3, "kB")
        for key in GROWING:
            grown = harness.slope([m["calls"] for m in middle], [m[key] for m in middle])
            yield Figure(
                "at full size",
                f"{name} {sizes[-1]:,}",
                f"slope of {key}",
                grown,
                "x",
                bound=None if options.quick or key in ("trace", "read") else 1.15,
            )


def child(name: str, size: str, device: str) -> dict[str, Any]:
    make = CASES[name][0]
    x = torch.randn(2, 4, device=device)
    read(gradlineage.trace(make(2).to(device), x), sources=False)
    model = make(int(size)).to(device)
    before = harness.reset_peak()
    harness.synchronise(device)
    collecting: list[float] = []
    gc.callbacks.append(lambda phase, _: collecting.append(time.perf_counter()))
    start = time.perf_counter()
    lineage = gradlineage.trace(model, x)
    harness.synchronise(device)
    traced = time.perf_counter()
    read(lineage, sources=False)
    done = time.perf_counter()
    gc.callbacks.pop()
    pauses = list(zip(collecting[::2], collecting[1::2], strict=True))
    early, late = (sum(b - a for a, b in pauses if (a < traced) == first) for first in (True, False))
    return {
        "trace": traced - start,
        "read": done - traced,
        "trace alone": traced - start - early,
        "read alone": done - traced - late,
        "collector": early + late,
        "peak": harness.peak_memory() - before,
        "calls": len(lineage.calls),
    }


def main(argv: list[str] | None = None) -> int:
    return harness.main("large", argv, count=3)


if __name__ == "__main__":
    raise SystemExit(main())
