"""Hugging Face models from tiny configurations, never from downloaded weights. Does every edge agree with what the kernels did?"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlineage
from tests.agreement import Build, Mode, disagreements, disagreements_on
from tests.tracker import Tracker

os.environ.setdefault("HF_HUB_OFFLINE", "1")
T: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

Made = tuple[nn.Module, dict[str, Any]]
_MODELS: dict[str, Callable[[], Made]] = {}
_TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
_VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32, "patch_size": 8}
_SPEECH = {
    **_TEXT, "vocab_size": 32, "conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (3, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2, "mask_time_prob": 0.5,
}  # fmt: skip
_SEQ2SEQ = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}


def _model(make: Callable[[], Made]) -> Callable[[], Made]:
    _MODELS[make.__name__] = make
    return make


def _ids(*shape: int) -> Tensor:
    return torch.randint(5, 50, shape)


def _padded(**more: Tensor) -> dict[str, Tensor]:
    return {"input_ids": _ids(2, 8), "attention_mask": torch.tensor([[1] * 8, [1] * 6 + [0] * 2]), **more}


def _pixels(size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.rand(2, 3, size, size)}


@_model
def bert() -> Made:
    return T.BertForMaskedLM(T.BertConfig(**_TEXT)), _padded(labels=_ids(2, 8))


@_model
def bigbird() -> Made:
    sparse = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    return T.BigBirdForMaskedLM(T.BigBirdConfig(**_TEXT, **sparse)), {"input_ids": _ids(2, 64)}


@_model
def clip() -> Made:
    config = T.CLIPConfig(text_config={**_TEXT, "eos_token_id": 2}, vision_config=_VISION, projection_dim=8)
    return T.CLIPModel(config), {"input_ids": _ids(2, 8), **_pixels(), "return_loss": True}


@_model
def deberta_v2() -> Made:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, "norm_rel_ebd": "layer_norm"}
    more = {"type_vocab_size": 0, "conv_kernel_size": 3, "conv_act": "gelu", "share_att_key": True}
    return T.DebertaV2ForMaskedLM(T.DebertaV2Config(**_TEXT, **relative, **more)), _padded()


@_model
def deepseek_v3() -> Made:
    experts = {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
    }
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 2}
    return T.DeepseekV3ForCausalLM(T.DeepseekV3Config(**_TEXT, **experts, **ranks)), _padded()


def _detr_like(config: Any, **more: Any) -> Any:
    stages = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "out_features": more.pop("stages")}
    sizes = {"num_queries": 5, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    backbone = {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": T.ResNetConfig(**stages)}
    return config(**sizes, **backbone, encoder_attention_heads=2, decoder_attention_heads=2, **more)


@_model
def detr() -> Made:
    return T.DetrForObjectDetection(_detr_like(T.DetrConfig, stages=["stage2"], d_model=16)), _pixels(64)


@_model
def deformable_detr() -> Made:
    options = {"d_model": 32, "num_feature_levels": 3, "two_stage": True, "with_box_refine": True}
    return T.DeformableDetrForObjectDetection(_detr_like(T.DeformableDetrConfig, stages=["stage1", "stage2"], **options)), _pixels(64)


@_model
def funnel() -> Made:
    config = T.FunnelConfig(vocab_size=50, block_sizes=[1, 1], num_decoder_layers=1, d_model=16, n_head=2, d_head=8, d_inner=24)
    return T.FunnelForMaskedLM(config), _padded()


@_model
def gpt2() -> Made:
    return T.GPT2LMHeadModel(T.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)), _padded()


@_model
def llama() -> Made:
    return T.LlamaForCausalLM(T.LlamaConfig(**_TEXT, num_key_value_heads=1)), _padded()


@_model
def longformer() -> Made:
    everywhere = torch.zeros(2, 8, dtype=torch.long)
    everywhere[:, 0] = 1
    return T.LongformerForMaskedLM(T.LongformerConfig(**_TEXT, attention_window=4)), _padded(global_attention_mask=everywhere)


@_model
def mamba() -> Made:
    config = T.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=4)
    return T.MambaForCausalLM(config), {"input_ids": _ids(2, 8)}


@_model
def mamba2() -> Made:
    config = T.Mamba2Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=4
    )
    return T.Mamba2ForCausalLM(config), _padded()


@_model
def mixtral() -> Made:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return T.MixtralForCausalLM(T.MixtralConfig(**_TEXT, **experts, num_key_value_heads=1)), _padded()


@_model
def perceiver() -> Made:
    blocks = {"num_blocks": 1, "num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    return T.PerceiverModel(T.PerceiverConfig(num_latents=4, d_latents=16, d_model=8, **blocks)), {"inputs": torch.rand(2, 6, 8)}


@_model
def reformer() -> Made:
    hashing = {"attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2, "hash_seed": 1}
    sizes = {"vocab_size": 50, "hidden_size": 16, "attention_head_size": 8, "num_attention_heads": 2, "feed_forward_size": 24}
    axial = {"axial_pos_shape": (2, 4), "axial_pos_embds_dim": (8, 8), "max_position_embeddings": 8, "is_decoder": True}
    return T.ReformerModelWithLMHead(T.ReformerConfig(**sizes, **hashing, **axial)), {"input_ids": _ids(2, 8)}


@_model
def segformer() -> Made:
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "decoder_hidden_size": 8}
    config = T.SegformerConfig(**sizes, patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2])
    return T.SegformerForSemanticSegmentation(config), _pixels()


@_model
def swin() -> Made:
    config = T.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
    return T.SwinForImageClassification(config), _pixels()


@_model
def switch_transformers() -> Made:
    config = T.SwitchTransformersConfig(**_SEQ2SEQ, num_decoder_layers=2, num_experts=3)
    return T.SwitchTransformersForConditionalGeneration(config), _padded(decoder_input_ids=_ids(2, 5))


@_model
def t5() -> Made:
    return T.T5ForConditionalGeneration(T.T5Config(**_SEQ2SEQ)), _padded(labels=_ids(2, 5))


@_model
def vit_mae() -> Made:
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 16}
    return T.ViTMAEForPreTraining(T.ViTMAEConfig(**_VISION, **decoder)), _pixels()


@_model
def vit() -> Made:
    return T.ViTForImageClassification(T.ViTConfig(**_VISION)), _pixels()


@_model
def wav2vec2() -> Made:
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 300:] = 0
    return T.Wav2Vec2ForCTC(T.Wav2Vec2Config(**_SPEECH)), {"input_values": torch.rand(2, 400), "attention_mask": mask}


@_model
def whisper() -> Made:
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16}
    widths = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    tokens = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    model = T.WhisperForConditionalGeneration(T.WhisperConfig(**sizes, **widths, **tokens))
    return model, {"input_features": torch.rand(2, 8, 32), "decoder_input_ids": _ids(2, 5)}


@_model
def xlnet() -> Made:
    order = torch.zeros(2, 8, 8)
    order[:, :, -1] = 1
    target = torch.zeros(2, 1, 8)
    target[:, 0, -1] = 1
    model = T.XLNetLMHeadModel(T.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=24, mem_len=4))
    return model, {"input_ids": _ids(2, 8), "perm_mask": order, "target_mapping": target, "use_mems": True}


def _build(name: str, *, training: bool = False) -> Build:
    def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        model, kwargs = _MODELS[name]()
        return model.train(training), (), kwargs

    return build


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("name", _MODELS)
def test_transformers_are_wired_as_the_kernels_ran(name: str, mode: Mode) -> None:
    assert disagreements_on(_build(name), mode) == []


@pytest.mark.parametrize("name", ["bert", "deformable_detr", "longformer", "mamba2", "mixtral", "reformer", "wav2vec2", "xlnet"])
def test_frozen_transformers_are_no_different(name: str) -> None:
    assert disagreements_on(_build(name), "frozen") == []


@pytest.mark.parametrize("name", ["deberta_v2", "funnel", "switch_transformers", "wav2vec2"])
def test_dropout_and_masking_in_training_change_nothing(name: str) -> None:
    assert disagreements_on(_build(name, training=True)) == []


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "top_k": 5, "top_p": 0.9}, {"num_beams": 2}], ids=["greedy", "sampled", "beams"]
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba", "t5"])
def test_each_generated_token_comes_from_the_steps_before_it(name: str, options: dict[str, Any]) -> None:
    answers: list[Any] = []
    for open_around in (gradlineage.recording, Tracker):
        torch.manual_seed(0)
        model: Any = _MODELS[name]()[0]
        with open_around(model.eval()) as side:
            prompt = torch.arange(5, 21).reshape(
                2, 8
            )  # made in here: a prompt from outside would be `unknown` to one side, `const` to the other
            tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, pad_token_id=0, **options)
        answers.append(side.lineage(tokens) if isinstance(side, gradlineage.Recording) else side.answer(tokens))
    assert disagreements(*answers) == []
    assert {"lm_head", "lm_head@1", "lm_head@2"} <= answers[1].outputs[0]
