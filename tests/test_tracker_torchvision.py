"""torchvision's detection models: image lists, anchors, top-k, suppression, losses. Does every edge agree with what the kernels did?"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import detection

from tests.agreement import Build, Mode, disagreements_on

_SMALL = {"min_size": 64, "max_size": 64}
_FEW_PROPOSALS = {
    "rpn_pre_nms_top_n_test": 20, "rpn_post_nms_top_n_test": 8, "rpn_pre_nms_top_n_train": 30, "rpn_post_nms_top_n_train": 16,
    "box_score_thresh": 0.0, "box_detections_per_img": 4, "box_batch_size_per_image": 16,
}  # fmt: skip
_FEW_ANCHORS = {"score_thresh": 0.0, "topk_candidates": 10, "detections_per_img": 5}
_OPTIONS: dict[str, dict[str, Any]] = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": {**_SMALL, **_FEW_PROPOSALS},
    "fasterrcnn_resnet50_fpn_v2": {**_SMALL, **_FEW_PROPOSALS},
    "maskrcnn_resnet50_fpn": {**_SMALL, **_FEW_PROPOSALS},
    "keypointrcnn_resnet50_fpn": {**_SMALL, **_FEW_PROPOSALS},
    "retinanet_resnet50_fpn": {**_SMALL, **_FEW_ANCHORS},
    "fcos_resnet50_fpn": {**_SMALL, **_FEW_ANCHORS},
    "ssd300_vgg16": _FEW_ANCHORS,  # large, and its size is fixed: once is enough
    "ssdlite320_mobilenet_v3_large": _FEW_ANCHORS,
}


def _detector(name: str, *, training: bool = False) -> Build:
    def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        make: Callable[..., nn.Module] = getattr(detection, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make(weights=None, weights_backbone=None, **_OPTIONS[name]).train(training)
        images = [torch.rand(3, 64, 64), torch.rand(3, 64, 48)]
        return model, (images, [_target(name, i) for i in images]) if training else (images,), {}

    return build


def _target(name: str, image: torch.Tensor) -> dict[str, torch.Tensor]:
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0], [10.0, 20.0, 30.0, 44.0]]), "labels": torch.ones(2, dtype=torch.int64)}
    if name.startswith("mask"):
        target["masks"] = torch.randint(0, 2, (2, *image.shape[1:]), dtype=torch.uint8)
    if name.startswith("keypoint"):
        target["keypoints"] = torch.cat([torch.rand(2, 17, 2) * 30 + 8, torch.ones(2, 17, 1)], -1)
    return target


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("name", [n for n in _OPTIONS if n != "ssd300_vgg16"])
def test_detections_come_from_where_the_kernels_took_them(name: str, mode: Mode) -> None:
    assert disagreements_on(_detector(name), mode) == []


@pytest.mark.parametrize("name", _OPTIONS)
def test_losses_come_from_where_the_kernels_took_them(name: str) -> None:
    assert disagreements_on(_detector(name, training=True)) == []


@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large"])
def test_frozen_detectors_are_no_different(name: str) -> None:
    assert disagreements_on(_detector(name), "frozen") == []
