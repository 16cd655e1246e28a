"""timm's image models at their smallest: windows, weight standardisation, talking heads, register tokens. Does every edge agree with the kernels?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.agreement import Build, Mode, disagreements_on

timm: Any = pytest.importorskip("timm")
pytestmark = pytest.mark.filterwarnings("ignore")

_TINY_SWIN = {"depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (1, 2, 3, 4)}
_SHALLOW = {"img_size": 64, "depth": 2}
_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (64, {**_SHALLOW, "embed_dim": 32, "num_heads": 2}),
    "cait_xxs24_224": (64, _SHALLOW),
    "coat_tiny": (64, {"img_size": 64, "serial_depths": (1,) * 4, "parallel_depth": 1, "embed_dims": (16,) * 4}),
    "convit_tiny": (64, {"img_size": 64, "depth": 3, "local_up_to_layer": 2}),
    "convnext_atto": (64, {}),
    "crossvit_tiny_240": (240, {}),
    "edgenext_xx_small": (64, {}),
    "efficientnet_b0": (64, {}),
    "gcvit_xxtiny": (224, {"img_size": 224}),
    "hrnet_w18_small": (64, {}),
    "lambda_resnet26t": (256, {}),
    "levit_128s": (224, {}),
    "maxvit_tiny_rw_224": (64, {"img_size": 64}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "nfnet_l0": (64, {}),
    "res2net50_26w_4s": (64, {}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, **_TINY_SWIN}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, **_TINY_SWIN}),
    "tnt_s_patch16_224": (64, _SHALLOW),
    "vit_small_patch14_reg4_dinov2": (56, {"img_size": 56, "depth": 2, "embed_dim": 32, "num_heads": 2}),
    "volo_d1_224": (64, {"img_size": 64}),
    "xcit_nano_12_p16_224": (64, _SHALLOW),
}


def _image_model(name: str, *, training: bool = False) -> Build:
    size, options = _MODELS[name]

    def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=5, **options)
        return model.train(training), (torch.rand(2, 3, size, size),), {}

    return build


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("name", _MODELS)
def test_image_models_are_wired_as_the_kernels_ran(name: str, mode: Mode) -> None:
    assert disagreements_on(_image_model(name), mode) == []


@pytest.mark.parametrize("name", ["coat_tiny", "convit_tiny", "nfnet_l0", "swin_tiny_patch4_window7_224", "vit_small_patch14_reg4_dinov2"])
def test_frozen_image_models_are_no_different(name: str) -> None:
    assert disagreements_on(_image_model(name), "frozen") == []


@pytest.mark.parametrize("name", ["edgenext_xx_small", "nfnet_l0", "res2net50_26w_4s", "xcit_nano_12_p16_224"])
def test_batch_statistics_and_dropped_paths_in_training_change_nothing(name: str) -> None:
    assert disagreements_on(_image_model(name, training=True)) == []
