"""Small models for tests, and short ways to ask what feeds what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradlineage import Flow, Lineage


class Net(nn.Module):
    """A module around a function ``(self, *args)``; its layers are given by name."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def lin() -> nn.Linear:
    return nn.Linear(4, 4)


def data(*size: int) -> Tensor:
    return torch.randn(*(size or (2, 4)))


def names(flow: Flow) -> list[str]:
    return [source.label for source in flow.sources]


def fed(lineage: Lineage, key: str | tuple[str, int]) -> list[list[str]]:
    return [names(flow) for flow in lineage[key].inputs]


def out(lineage: Lineage) -> list[list[str]]:
    return [names(flow) for flow in lineage.outputs]
