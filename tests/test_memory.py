# mypy: disable-error-code="no-any-return,no-untyped-call"
"""What a trace keeps alive, counted in bytes of live storages and not in the noise of a process's memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torchvision
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradlineage


class Meter(TorchDispatchMode):
    """The most bytes that storages made under it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        known = self.known.get(storage._cdata)
        if known is not None and known() is not None:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.live -= size

        self.known[storage._cdata] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def test_trace_holds_no_more_than_inference_does() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    x = torch.randn(4, 3, 64, 64)
    with torch.no_grad(), Meter() as inference:
        model(x)
    with Meter() as trace:
        lineage = gradlineage.trace(model, x)
    with Meter() as training:
        kept = model(x)
    assert trace.peak <= 1.02 * inference.peak
    assert training.peak > 2 * inference.peak  # the meter does see what autograd keeps
    assert trace.live <= inference.live
    assert len(lineage.layers) == 60
    assert kept.grad_fn is not None


def test_lineage_holds_no_tensor() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    x = torch.randn(2, 4)
    lineage = gradlineage.trace(net, x)
    gone = weakref.ref(x), weakref.ref(net[0].weight)
    del x, net
    assert [ref() for ref in gone] == [None, None]
    assert lineage["1"].inputs[0].shape == (2, 4)
