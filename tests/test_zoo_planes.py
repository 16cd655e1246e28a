"""Autograd's graph alone against the full answer: what the pure walk names must be true, and all that is differentiable must be there."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import gradlineage
from gradlineage import Flow, Lineage
from tests.test_zoo_fx import arguments, build, plain

CASES = [
    ("classification", "densenet121"),
    ("classification", "googlenet"),
    ("classification", "mobilenet_v3_small"),
    ("classification", "convnext_tiny"),
    ("classification", "shufflenet_v2_x0_5"),
    ("classification", "swin_v2_t"),
    ("classification", "vit_b_32"),
    ("classification", "maxvit_t"),
    ("segmentation", "deeplabv3_resnet50"),
    ("segmentation", "lraspp_mobilenet_v3_large"),
    ("video", "mvit_v2_s"),
    ("video", "r2plus1d_18"),
    ("optical_flow", "raft_small"),
    ("quantization", "quantized_resnet18"),
]
#: Uses ``x`` once more after ``identity(x)``. A recording, which must not replace tensors, tells the two by time alone.
BY_TIME = {"maxvit_t"}
#: What the pure walk can tell. Whatever else carries no gradient, and is unknown to it.
NAMED = ("call", "input", "parameter")


def recorded(model: nn.Module, inputs: list[Tensor], *, shadow: bool) -> Lineage:
    with gradlineage.recording(model, shadow=shadow) as recording:
        model(*inputs)
    return recording.lineage()


def kinds(flow: Flow, *, differentiable_only: bool = False) -> set[tuple[Any, ...]]:
    return {plain(s) for s in flow.sources if s.differentiable or not differentiable_only}


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_gradient_plane_alone_is_true_and_has_all_that_is_differentiable(family: str, name: str) -> None:
    model = build(family, name).eval()
    inputs = [x.requires_grad_() for x in arguments(family, model)[0].values()]
    full = recorded(model, inputs, shadow=True) if name in BY_TIME else gradlineage.trace(model, *inputs)
    pure = recorded(model, inputs, shadow=False)
    assert [(c.path, c.nth) for c in pure.layers] == [(c.path, c.nth) for c in full.layers]
    wrong = []
    for mine, theirs in zip(pure.layers, full.layers, strict=True):
        for index, (walked, answered) in enumerate(zip(mine.inputs, theirs.inputs, strict=True)):
            named, flowing = kinds(walked), kinds(answered, differentiable_only=True)
            untrue = {s for s in named - kinds(answered) | kinds(walked, differentiable_only=True) - flowing if s[0] in NAMED}
            missing = flowing - named
            if untrue or missing:
                wrong.append(f"{mine.label} input[{index}]: untrue {sorted(untrue, key=str)}, missing {sorted(missing, key=str)}")
    assert not wrong, "\n".join(wrong[:5])


def test_most_of_the_zoo_flows_along_the_gradient() -> None:
    """The comparison above would be empty if nothing were differentiable."""
    model = build("classification", "densenet121").eval()
    lineage = gradlineage.trace(model, *arguments("classification", model)[0].values())
    flows = [flow for call in lineage.layers[1:] for flow in call.inputs]
    assert flows and all(source.differentiable for flow in flows for source in flow.sources)
