"""torchvision's zoo: what `gradlineage.trace` says of every call must be what torch.fx's graph of the same model says."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

import gradlineage
from gradlineage import Flow, Lineage, Source
from tests.truth_fx import CONSTANT, Truth, layer_calls, truth

FAMILIES: dict[str, Any] = {
    "classification": models,
    "segmentation": models.segmentation,
    "video": models.video,
    "optical_flow": models.optical_flow,
    "quantization": models.quantization,
}
OPTIONS: dict[str, dict[str, Any]] = {"segmentation": {"weights_backbone": None}, "quantization": {"quantize": False}}
NAMES = [(family, name) for family, module in FAMILIES.items() for name in models.list_models(module=module)]
MODES = ("eval", "train")
COMPARABLE = 218  # models times modes in torchvision 0.29, all of which fx can trace
SIZES = (64, 96, 128, 224, 299)  # the side of a square image; auxiliary heads of Inception in training want 299


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small pictures: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


skipped: dict[tuple[str, str], str] = {}


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Modules made within keep their parameters on the meta device. ``torch.device("meta")`` would take the builders' own arithmetic along."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad))

    with mock.patch.object(nn.Module, "register_parameter", on_meta):
        yield


def build(family: str, name: str) -> nn.Module:
    with weightless(), warnings.catch_warnings(action="ignore"):  # builders announce changes to come
        model: nn.Module = models.get_model(name, weights=None, **OPTIONS.get(family, {}))
    return model.to("meta")


@functools.lru_cache(maxsize=1)  # both modes of a model come one after the other
def zoo(family: str, name: str) -> nn.Module:
    return build(family, name)


def pictures(family: str, size: int) -> list[Tensor]:
    """Two of each, since batch normalisation in training wants more than one."""
    frames = (16,) if family == "video" else ()
    return [torch.rand(2, 3, *frames, size, size) for _ in range(2 if family == "optical_flow" else 1)]


def arguments(family: str, model: nn.Module, device: str = "meta") -> tuple[dict[str, Tensor], set[tuple[str, int]]]:
    """The smallest pictures with which the model runs, by the names of its arguments, and its layer calls on them."""
    for size in SIZES:
        inputs = {name: x.to(device) for name, x in zip(inspect.signature(model.forward).parameters, pictures(family, size), strict=False)}
        with contextlib.suppress(Exception):
            return inputs, layer_calls(model, inputs)
    raise AssertionError(f"{type(model).__name__} ran with no size of {SIZES}")


# -- comparing ------------------------------------------------------------------------------------------------------------------------


def plain(source: Source) -> tuple[Any, ...]:
    """A source in the words of `truth`."""
    if source.kind == "call":
        return "call", source.path, source.nth, source.port
    if source.kind == "input":
        return "input", source.index
    if source.kind in ("parameter", "buffer"):
        return source.kind, source.name
    return CONSTANT if source.kind == "constant" else ("unknown", source.reason)


def sources(flows: tuple[Flow, ...]) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    return tuple(tuple(plain(s) for s in flow.sources) for flow in flows)


def differences(lineage: Lineage, expected: Truth) -> list[str]:
    """One line per tensor that was answered differently, and per call that only one side knows."""
    found: list[str] = []
    for call, want in itertools.zip_longest(lineage.calls, expected.calls):
        if call is None or want is None or (call.path, call.nth, call.kind == "layer") != want[:3]:
            return [*found, f"call {call!r}, expected {want and want[:3]}"]
        for side, got, due in (("input", sources(call.inputs), want.inputs), ("output", sources(call.outputs), want.outputs)):
            found += unequal(f"{call.label or call.type} {side}", got, due)
    return found + unequal("model output", sources(lineage.outputs), expected.outputs)


def unequal(place: str, got: tuple[Any, ...], due: tuple[Any, ...]) -> list[str]:
    pairs = enumerate(itertools.zip_longest(got, due))
    return [f"{place}[{i}] from {mine}, expected {theirs}" for i, (mine, theirs) in pairs if mine != theirs]


def report(found: list[str]) -> str:
    return "\n".join([f"{len(found)} differences", *found[:5]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "name"), NAMES)
def test_trace_agrees_with_the_fx_graph(family: str, name: str, mode: str) -> None:
    model = zoo(family, name).train(mode == "train")
    inputs, layers = arguments(family, model)
    try:
        expected = truth(model, inputs, layers)
    except Exception as error:
        skipped[name, mode] = reason = f"fx cannot trace it: {error!r}"
        pytest.skip(reason)
    found = differences(gradlineage.trace(model, *inputs.values()), expected)
    assert not found, report(found)


def test_no_model_is_left_out_in_silence() -> None:
    compared = len(NAMES) * len(MODES) - len(skipped)
    print(f"{compared} compared, {len(skipped)} skipped: {skipped}")
    assert compared >= COMPARABLE, skipped


# -- other ways to run them -----------------------------------------------------------------------------------------------------------

SAMPLE = [("classification", "swin_t"), ("classification", "googlenet"), ("quantization", "quantized_shufflenet_v2_x0_5"), ("video", "s3d")]


@pytest.mark.parametrize(("family", "name"), SAMPLE)
def test_without_gradient_the_answer_is_the_same(family: str, name: str) -> None:
    model = zoo(family, name).eval()
    inputs, layers = arguments(family, model)
    with torch.no_grad():
        lineage = gradlineage.trace(model, *inputs.values())
    found = differences(lineage, truth(model, inputs, layers))
    assert not found, report(found)


@pytest.mark.parametrize(("family", "name"), SAMPLE)
def test_with_frozen_parameters_the_answer_is_the_same(family: str, name: str) -> None:
    model = build(family, name).train()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 == 0)
    inputs, layers = arguments(family, model)
    found = differences(gradlineage.trace(model, *inputs.values()), truth(model, inputs, layers))
    assert not found, report(found)


@pytest.mark.parametrize("name", ["swin_t", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_on_the_cpu_the_answer_is_the_same(name: str) -> None:
    model = models.get_model(name, weights=None).eval()
    inputs, layers = arguments("classification", model, "cpu")
    found = differences(gradlineage.trace(model, *inputs.values()), truth(model, inputs, layers))
    assert not found, report(found)


# -- detection: lists of images, boxes chosen by their values, masks pasted in place --------------------------------------------------

SMALL = {"min_size": 64, "max_size": 96}
FEW_PROPOSALS = {
    **SMALL, "box_score_thresh": 0.0, "box_detections_per_img": 5, "rpn_pre_nms_top_n_test": 50, "rpn_post_nms_top_n_test": 10,
    "rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 10, "rpn_batch_size_per_image": 16, "box_batch_size_per_image": 8,
}  # fmt: skip
FEW_ANCHORS = {"score_thresh": 0.0, "detections_per_img": 5, "topk_candidates": 20}
DETECTORS: list[str] = models.list_models(module=models.detection)
#: Not trained here: the first is large and its size fixed, the others are like one that is.
ONCE = ("ssd300_vgg16", "fasterrcnn_mobilenet_v3_large_fpn", "fasterrcnn_resnet50_fpn", *(n for n in DETECTORS if n.endswith("_v2")))


def detector(name: str) -> nn.Module:
    options = FEW_PROPOSALS if "rcnn" in name else FEW_ANCHORS if name.startswith("ssd") else FEW_ANCHORS | SMALL
    torch.manual_seed(0)
    model: nn.Module = models.get_model(name, weights=None, weights_backbone=None, num_classes=2, **options)
    return model


def scene(name: str, height: int, width: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A picture and what there is to find in it."""
    target = {"boxes": torch.tensor([[5.0, 5.0, 30.0, 40.0], [10.0, 8.0, 44.0, 30.0]]), "labels": torch.tensor([1, 1])}
    if name.startswith("mask"):
        target["masks"] = torch.ones(2, height, width, dtype=torch.uint8)
    if name.startswith("keypoint"):
        target["keypoints"] = torch.rand(2, 17, 3) * 30
    return torch.rand(3, height, width), target


@pytest.mark.parametrize(("name", "mode"), [*((n, "eval") for n in DETECTORS), *((n, "train") for n in DETECTORS if n not in ONCE)])
def test_detectors_agree_with_the_fx_graph(name: str, mode: str) -> None:
    model = detector(name).train(mode == "train")
    images, targets = zip(scene(name, 64, 64), scene(name, 48, 80), strict=True)
    inputs: dict[str, Any] = {"images": list(images)} | ({"targets": list(targets)} if mode == "train" else {})
    torch.manual_seed(1)  # training samples among the proposals
    layers = layer_calls(model, inputs)
    torch.manual_seed(1)
    expected = truth(model, inputs, layers)
    torch.manual_seed(1)
    lineage = gradlineage.trace(model, *inputs.values())
    assert all(flow.sources for call in lineage.calls for flow in call.inputs)
    found = differences(lineage, expected)
    assert not found, report(found)
