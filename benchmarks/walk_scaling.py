"""Does the walk over what was recorded grow with the graph, and what does it cost beside the barest walk there is?

Edges looked at, counted and not timed, on graphs of n and 10 n nodes: a chain, a fan-out, diamonds on top of each other (2^n ways), a trunk of
2,000 operations read by 400 heads, and DenseNet's concatenation of all before. Linear is 10; more than that is not.

Then seconds: the walk (``Ways`` over a lineage's nodes) beside a loop of plain Python over ``next_functions`` of autograd's graph of the same
model, each node once; and with it, making the lineage out of the recording. Last, a chain of a million nodes: time and memory for each.

    python -m benchmarks.walk_scaling [--rounds 15] [--json out.json] [--compare old.json]
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import gradlineage
from benchmarks import harness
from benchmarks.harness import Figure, Options, Way
from benchmarks.models import build
from gradlineage.walk import DATA, OPERATION, Ways

__all__ = ["SHAPES", "Drawn", "visits"]


TABLE = "beside a loop over next_functions"


class Drawn(NamedTuple):
    """A graph without a model: roles, parents, and the nodes whose origins are asked for."""

    roles: list[int]
    parents: list[tuple[int, ...]]
    asked: list[int]


def chain(n: int) -> Drawn:
    return Drawn([DATA, *[OPERATION] * n], [(), *((i,) for i in range(n))], [n])


def fan_out(n: int) -> Drawn:
    """Many that read one, and one that reads them all."""
    return Drawn([DATA, *[OPERATION] * (n + 1)], [(), *[(0,)] * n, tuple(range(1, n + 1))], [n + 1])


def diamonds(n: int) -> Drawn:
    """2^n ways from the first to the last."""
    parents: list[tuple[int, ...]] = [()]
    for _ in range(n):
        top = len(parents) - 1
        parents += [(top,), (top,), (top + 1, top + 2)]
    return Drawn([DATA, *[OPERATION] * (3 * n)], parents, [3 * n])


def trunk(n: int) -> Drawn:
    """n operations in a row, and n / 5 heads that read the last: 2,000 and 400."""
    heads = n // 5
    return Drawn([DATA, *[OPERATION] * (n + heads)], [(), *((i,) for i in range(n)), *[(n,)] * heads], list(range(n + 1, n + heads + 1)))


def dense(n: int) -> Drawn:
    """``x = cat([x, layer(x)])``, n times: what a layer reads is a join of two."""
    roles, parents, asked = [DATA], [()], []  # type: list[int], list[tuple[int, ...]], list[int]
    x = 0
    for _ in range(n):
        asked.append(x)
        roles += [DATA, OPERATION]
        parents += [(), (x, len(parents))]
        x = len(parents) - 1
    return Drawn(roles, parents, [*asked, x])


SHAPES: dict[str, tuple[Callable[[int], Drawn], int]] = {
    "chain": (chain, 1000),
    "fan-out": (fan_out, 1000),
    "diamonds": (diamonds, 1000),
    "trunk with heads": (trunk, 2000),
    "dense concatenation": (dense, 1000),
}


def visits(graph: Drawn) -> int:
    """How many edges the walk looks at to say what feeds the nodes that are asked for."""
    ways = Ways(graph.roles, graph.parents)
    for node in graph.asked:
        ways.elements(node)
    return ways.visits


def measure(options: Options) -> Iterator[Figure]:
    for name, (shape, n) in SHAPES.items():
        small, large = visits(shape(n)), visits(shape(10 * n))
        yield Figure("edges looked at", name, "nodes", len(shape(n).roles))
        yield Figure("edges looked at", name, "at n", small)
        yield Figure("edges looked at", name, "at 10 n", large)
        yield Figure("edges looked at", name, "growth", large / small, "x", bound=10.5)
    specs = options.models or (("resnet18@32",) if options.quick else ("resnet50@64", "densenet121@64", "trunk"))
    for spec in specs:
        yield from beside_the_loop(spec, options)
    yield from million(100_000 if options.quick else 1_000_000)


class Trunk(nn.Module):
    """A trunk of 2,000 operations under 400 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(400))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for _ in range(1000):
            h = torch.sin(h) + 1
        return torch.cat([head(h) for head in self.heads], -1)


def loop(start: Any) -> int:
    """The barest walk: every node of autograd's graph once."""
    seen = {start}
    stack = [start]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                stack.append(node)
    return len(seen)


def beside_the_loop(spec: str, options: Options) -> Iterator[Figure]:
    model: nn.Module
    model, args = (Trunk().eval(), (torch.randn(2, 4),)) if spec == "trunk" else build(spec)
    with gradlineage.recording(model) as recording:
        model(*args)
    lineage = recording.lineage()
    roles, parents, grads = _walked(lineage)
    ways = Ways(roles, parents, grads)
    assert len(ways.joins) >= len(lineage.joins)  # the same walk as the view's
    output = model(*args)
    times = harness.rounds(
        {
            "loop": lambda: loop(output.grad_fn),
            "walk": lambda: Ways(roles, parents, grads),
            "lineage": recording.lineage,
            "first answer": Way(lambda made: made.layers[-1].inputs[0].sources, recording.lineage),
        },
        options.rounds,
    )
    for name, values in times.items():
        yield Figure.of(TABLE, spec, name, values, "ms")
    for name, bound in (("walk", 3.0), ("lineage", None), ("first answer", None)):
        yield Figure.of(TABLE, spec, f"{name} x loop", harness.ratios(times[name], times["loop"]), "x", bound)
    yield Figure(TABLE, spec, "autograd's nodes", loop(output.grad_fn))
    yield Figure(TABLE, spec, "lineage's nodes", len(roles))


def _walked(lineage: gradlineage.Lineage) -> tuple[Any, Any, Any]:
    """What the view of a lineage hands to the walk."""
    ways = lineage._view.ways
    return ways.roles, ways.parents, [node.grad for node in lineage._graph.nodes]


def million(n: int) -> Iterator[Figure]:
    graph = chain(n)
    start = time.perf_counter()
    assert Ways(*graph[:2]).elements(n) == [(0, True)]
    seconds = time.perf_counter() - start
    tracemalloc.start()
    ways = Ways(*graph[:2])
    ways.elements(n)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    subject = f"chain of {n:,} nodes"
    yield Figure("one long chain", subject, "walk", seconds, "s")
    yield Figure("one long chain", subject, "walk each", seconds / n * 1e6, "µs")
    yield Figure("one long chain", subject, "peak each", peak / n, "bytes", bound=1000)
    found = harness.fresh("walk_scaling", str(n // 10), here=n < 1_000_000)
    subject = f"trace of {n // 10:,} operations"
    if "error" in found:
        yield Figure("one long chain", subject, "walk", None, note=found["error"])
        return
    yield Figure("one long chain", subject, "walk", found["seconds"], "s")
    yield Figure("one long chain", subject, "walk each", found["seconds"] / (n // 10) * 1e6, "µs")
    yield Figure("one long chain", subject, "peak each", found["bytes"] / (n // 10), "bytes")


class Long(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.last, self.count = nn.Linear(2, 2), nn.Linear(2, 2), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.first(x)
        for _ in range(self.count):
            h = h + 1
        out: torch.Tensor = self.last(h)
        return out


def child(count: str) -> dict[str, float]:
    """A traced chain of operations: seconds, and bytes at the peak beyond what was there before."""
    model, x = Long(int(count)), torch.randn(1, 2)
    gradlineage.trace(Long(10), x)
    before = harness.reset_peak()
    start = time.perf_counter()
    lineage = gradlineage.trace(model, x)
    assert lineage["last"].inputs[0].sources[0].label == "first"
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": (harness.peak_memory() - before) * 1e6}


def main(argv: list[str] | None = None) -> int:
    return harness.main("walk_scaling", argv, models=("resnet50@64", "densenet121@64", "trunk"))


if __name__ == "__main__":
    raise SystemExit(main())
