"""The models that are measured, by name, and what is done with a lineage to have read all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import gradlineage

__all__ = ["COMPUTE", "LAUNCH", "Transformer", "build", "calls_and_operations", "nothing", "read", "same_kernels"]

#: Bound by what happens between two kernels, and bound by the kernels.
LAUNCH = ("mobilenet_v3_small@64", "densenet121@64", "transformer@16")
COMPUTE = ("inception_v3@299", "resnet50@224x4", "vit_b_16@224")


class Transformer(nn.Module):
    """Encoder layers over token vectors."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.encoder(x)
        return out


def build(spec: str, device: str = "cpu") -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """``resnet50@224x4`` is four pictures of 224 x 224.

    ``transformer@16`` is twelve layers of width 16 over 16 tokens, ``long@2048x8`` four of width 512 over eight times 2,048.

    In eval mode. Whoever measures switches the encoder's fused path off with `same_kernels`.
    """
    name, _, size = spec.partition("@")
    side, _, batch = size.partition("x")
    edge, count = int(side or 224), int(batch or 1)
    torch.manual_seed(0)
    if name in ("transformer", "long"):
        layers, width, heads = (12, 16, 2) if name == "transformer" else (4, 512, 8)
        return _moved(Transformer(layers, width, heads).eval(), device), (torch.randn(count, edge, width, device=device),)
    import torchvision

    options = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return _moved(model.eval(), device), (torch.randn(count, 3, edge, edge, device=device),)


def _moved(model: nn.Module, device: str) -> nn.Module:
    return model if device == "cpu" else model.to(device)  # under a fake tensor mode nothing can be moved


def read(lineage: gradlineage.Lineage, sources: bool = True) -> int:
    """Ask for everything a lineage knows; returns how many links and sources that were.

    ``sources=False`` leaves out what is seen through joins: in a residual stack these are as many as the square of its layers.
    """
    flows = [flow for call in lineage.calls for flow in (*call.inputs, *call.outputs, *call.hidden)]
    flows += [flow for join in lineage.joins for flow in (*join.inputs, *join.outputs)]
    flows += [*lineage.inputs, *lineage.outputs]
    count = 0
    for flow in flows:
        for link in flow.links:
            count += 1
            _ = link.ops, link.label, link.differentiable
        for source in flow.sources if sources else ():
            count += 1
            _ = source.ops, source.label, source.differentiable
    _ = [call.label for call in lineage.calls], lineage.breaks, lineage.decisions, lineage.bypassed
    return count


def nothing(_: Any) -> Any:
    """Keeps nothing of a tensor that autograd wants to save."""
    return None


@contextlib.contextmanager
def same_kernels() -> Iterator[None]:
    """Without the encoder's fused path, which no watched forward takes."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def calls_and_operations(model: nn.Module, args: tuple[Any, ...]) -> tuple[int, int]:
    """How many modules are called and how many torch functions, as no-op hooks and a no-op mode count them."""
    calls = operations = 0

    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal operations
            operations += 1
            return func(*args, **(kwargs or {}))

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handles = [module.register_forward_pre_hook(count) for module in model.modules()]
    try:
        with Count():
            model(*args)
    finally:
        for handle in handles:
            handle.remove()
    return calls, operations
