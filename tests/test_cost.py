"""What a trace costs, counted: edges, operations, hooks, calls of Python, bytes. No seconds; these are for ``benchmarks``."""

from __future__ import annotations

import cProfile
import gc
import pstats
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

import gradlineage
from benchmarks.kernels import computing, dispatched
from benchmarks.memory import held, stack_of
from benchmarks.models import build, read, same_kernels
from benchmarks.walk_scaling import SHAPES, chain, visits
from gradlineage.walk import Ways

# -- the walk -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_ten_times_the_graph_is_ten_times_the_edges_looked_at(name: str) -> None:
    shape, n = SHAPES[name]
    small, large = shape(n), shape(10 * n)
    assert visits(large) <= 10.5 * visits(small)
    assert visits(large) <= 2 * sum(map(len, large.parents))


class Heads(nn.Module):
    """A trunk of operations that every head reads."""

    def __init__(self, depth: int, heads: int) -> None:
        super().__init__()
        self.stem, self.depth = nn.Linear(4, 4), depth
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for _ in range(self.depth):
            h = torch.sin(h)
        return torch.cat([head(h) for head in self.heads], -1)


class Dense(nn.Module):
    """``x = cat([x, layer(x)])``: every concatenation is a join."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * i + 2, 2) for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x).relu()], -1)
        return x


@pytest.mark.parametrize(("make", "width"), [(lambda n: Heads(20 * n, 4 * n), 4), (lambda n: Dense(3 * n), 2)], ids=["heads", "dense"])
def test_reading_the_links_of_a_model_looks_at_each_edge_a_few_times(make: Callable[[int], nn.Module], width: int) -> None:
    def walked(n: int) -> tuple[int, int]:
        lineage = gradlineage.trace(make(n), torch.randn(1, width))
        read(lineage, sources=False)
        return lineage._view.ways.visits, sum(len(node.parents) for node in lineage._graph.nodes)

    (small, _), (large, edges) = walked(5), walked(50)
    assert large <= 10.5 * small
    assert large <= 4 * edges


def test_a_million_nodes_take_less_than_a_kilobyte_each() -> None:
    graph = chain(1_000_000)
    gc.collect()
    tracemalloc.start()
    try:
        ways = Ways(*graph[:2])
        assert ways.elements(1_000_000) == [(0, True)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 1000 * 1_000_000
    assert ways.visits == 1_000_000


# -- the pass -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("spec", ["resnet18@32x2", "mobilenet_v3_small@32", "transformer@4", "densenet121@32"])
def test_a_pass_that_writes_no_state_runs_the_operations_of_the_forward(spec: str, gradient: bool) -> None:
    model, args = build(spec)
    with same_kernels(), torch.set_grad_enabled(gradient):
        alone = computing(dispatched(lambda: model(*args)))
        traced = computing(dispatched(lambda: gradlineage.trace(model, *args)))
    assert traced == alone


def test_a_pass_that_writes_state_copies_no_more_than_the_model_has() -> None:
    model, args = build("resnet18@32x2")
    model.train()
    alone = computing(dispatched(lambda: model(*args)))
    traced = computing(dispatched(lambda: gradlineage.trace(model, *args)))
    more = traced - alone
    members = len([*model.parameters(), *model.buffers()])
    assert set(more) == {"clone", "copy_"}
    assert more["clone"] == more["copy_"] <= members


class Probe(nn.Module):
    """Notes how many hooks its call goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.seen: list[tuple[int, int, int, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, after = module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks
        self.seen.append((len(self._forward_pre_hooks), len(self._forward_hooks), len(before), len(after)))
        out: torch.Tensor = self.fc(x)
        return out


def test_a_module_call_goes_through_three_hooks_at_most() -> None:
    probe = Probe()
    gradlineage.trace(nn.Sequential(probe, probe), torch.randn(1, 2))
    assert len(probe.seen) == 2
    assert all(sum(hooks) <= 3 for hooks in probe.seen)


def calls_of_python(run: Callable[[], Any]) -> int:
    profiler = cProfile.Profile()
    profiler.runcall(run)
    return int(pstats.Stats(profiler).total_calls)  # type: ignore[attr-defined]


def residual(count: int) -> tuple[nn.Module, torch.Tensor]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.fc(x)
            return out

    return nn.Sequential(*(Block() for _ in range(count))), torch.randn(1, 2)


@pytest.mark.parametrize("make", [stack_of, residual])
def test_calls_of_python_grow_with_the_model(make: Callable[[int], tuple[nn.Module, torch.Tensor]]) -> None:
    def counted(n: int) -> int:
        model, x = make(n)
        return calls_of_python(lambda: read(gradlineage.trace(model, x), sources=False))

    counted(5)
    small, large = counted(50), counted(500)
    assert large <= 10.5 * small
    assert large <= 2_000 * 500


# -- what is kept -------------------------------------------------------------------------------------------------------------------------


def test_a_lineage_of_ten_thousand_calls_fits_in_twenty_megabytes() -> None:
    model, x = stack_of(1_000)
    few = held(gradlineage.trace(model, x))
    model, x = stack_of(10_000)
    lineage = gradlineage.trace(model, x)
    objects, size = held(lineage)
    assert len(lineage.calls) == 10_001
    assert size <= 20e6
    assert objects <= 10.5 * few[0]
    assert size <= 10.5 * few[1]
