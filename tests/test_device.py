"""On a GPU: the same answers, and the device's random state put back."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

import gradlineage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def test_answers_on_the_gpu_are_those_of_the_cpu() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    x = torch.randn(1, 3, 64, 64)
    on_cpu = gradlineage.trace(model, x)
    on_gpu = gradlineage.trace(model.cuda(), x.cuda())
    assert [c.label for c in on_cpu.layers] == [c.label for c in on_gpu.layers]
    for one, two in zip(on_cpu.layers, on_gpu.layers, strict=True):
        assert [f.sources for f in one.inputs] == [f.sources for f in two.inputs]
        assert [f.device for f in two.inputs] == ["cuda:0"]


def test_random_state_of_the_device_is_put_back() -> None:
    net = nn.Dropout().cuda().train()
    before = torch.cuda.get_rng_state()
    gradlineage.trace(net, torch.ones(8, device="cuda"))
    assert torch.equal(before, torch.cuda.get_rng_state())
