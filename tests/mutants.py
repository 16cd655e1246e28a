"""Real models with one wire moved: what a slip of the pen in somebody's forward does to torchvision's, transformers' and timm's models.

A mutant is made by editing the source of one block's method, or by exchanging or freezing a child. ``python -m tests.mutants`` prints what
gradlineage says of each.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import linecache
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

import gradlineage
from gradlineage.findings import Finding
from gradlineage.lineage import Lineage
from gradlineage.views.wiring import to_wiring
from tests import test_tracker_transformers

__all__ = ["BLIND", "BUILD", "MUTANTS", "Mutant", "Seen", "look"]

Change = Callable[[Any], object]


def _tv(name: str, size: int = 64, **settings: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model: nn.Module = models.get_model(name, weights=None, num_classes=4, **settings)
    return model, (torch.rand(1, 3, size, size),), {}


def _timm(name: str, size: int = 64, **settings: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return timm.create_model(name, pretrained=False, num_classes=4, **settings), (torch.rand(1, 3, size, size),), {}


def _hf(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, kwargs = test_tracker_transformers._MODELS[name]()
    return model, (), kwargs


BUILD: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "resnet18": lambda: _tv("resnet18"),
    "googlenet": lambda: _tv("googlenet", init_weights=False, aux_logits=False),
    "squeezenet1_1": lambda: _tv("squeezenet1_1"),
    "shufflenet_v2_x0_5": lambda: _tv("shufflenet_v2_x0_5"),
    "mobilenet_v3_small": lambda: _tv("mobilenet_v3_small"),
    "convnext_tiny": lambda: _tv("convnext_tiny"),
    "vit_b_32": lambda: _tv("vit_b_32", image_size=64),
    "bert": lambda: _hf("bert"),
    "gpt2": lambda: _hf("gpt2"),
    "llama": lambda: _hf("llama"),
    "t5": lambda: _hf("t5"),
    "vit": lambda: _hf("vit"),
    "timm vit": lambda: _timm("vit_small_patch14_reg4_dinov2", 56, img_size=56, depth=2, embed_dim=32, num_heads=2),
    "timm efficientnet": lambda: _timm("efficientnet_b0"),
}


# -- how to mutate ---------------------------------------------------------------------------------------------------------------------


def edit(path: str, old: str, new: str, method: str = "forward") -> Change:
    """In the source of a module's method, other text for what stands there once. ``old`` and ``new`` may have several lines."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        function = inspect.unwrap(getattr(type(module), method))
        source = textwrap.dedent(inspect.getsource(function))
        source = source[source.index("def ") :]
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {type(module).__name__}.{method}"
        source = source.replace(old, new)
        file = f"mutant/{type(module).__name__}.py"
        linecache.cache[file] = len(source), None, source.splitlines(True), file
        names = dict(vars(sys.modules[function.__module__]))
        exec(compile(source, file, "exec"), names)
        object.__setattr__(module, method, functools.partial(names[method], module))

    return change


def exchange(path: str, new: Callable[[nn.Module], nn.Module]) -> Change:
    """Another module in the place of one."""

    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, name, new(getattr(parent, name)))

    return change


def swap(first: str, second: str) -> Change:
    """Two modules in each other's place."""

    def change(model: nn.Module) -> None:
        one, other = model.get_submodule(first), model.get_submodule(second)
        exchange(first, lambda _: other)(model)
        exchange(second, lambda _: one)(model)

    return change


def freeze(path: str) -> Change:
    return lambda model: model.get_submodule(path).requires_grad_(False)


def unlisted(model: Any) -> None:
    """layer4 of a ResNet in a plain list."""
    model.hidden = [model.layer4]
    del model.layer4
    edit("", "self.layer4(x)", "self.hidden[0](x)", "_forward_impl")(model)


class Unbiased(nn.Module):
    """A linear layer that forgets its bias."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class Mutant:
    """``codes``: the findings of lint that are new, ``wiring``: whether the snapshot changes, ``place``: what one of both must name."""

    model: str
    change: Change
    codes: tuple[str, ...]
    wiring: bool
    place: str


CUT, DEAD, NEVER, AGAIN = "gradient-cut", "dead-call", "never-called", "called-again"
QUIET = "with torch.no_grad():\n        x = self.layer1(x)"
ENCODER = "encoder.layers.encoder_layer_"

MUTANTS: dict[str, Mutant] = {
    # torchvision
    "a skip is dropped": Mutant("resnet18", edit("layer1.0", "    out += identity\n", ""), (), True, "-layer1.0:add"),
    "a skip begins too late": Mutant("resnet18", edit("layer1.1", "out = self.bn1(out)", "out = identity = self.bn1(out)"), (), True, "layer1.1:add"),
    "a ReLU becomes Identity": Mutant("resnet18", exchange("layer2.0.relu", lambda _: nn.Identity()), (), True, "layer2.0.relu[1] (Identity)"),
    "a projection is detached": Mutant("resnet18", edit("layer2.0", "self.downsample(x)", "self.downsample(x).detach()"), (CUT,), True, "layer2.0.downsample.0.weight"),
    "a layer's forward is called": Mutant("resnet18", edit("layer3.0", "self.conv2(out)", "self.conv2.forward(out)"), ("forward-called",), True, "layer3.0.conv2"),
    "normalisation comes first": Mutant("resnet18", edit("layer4.1", "out = self.conv1(x)\n    out = self.bn1(out)", "out = self.conv1(self.bn1(x))"), (), True, "layer4.1.bn1"),
    "a stage runs twice": Mutant("resnet18", edit("", "self.layer1(x)", "self.layer1(self.layer1(x))", "_forward_impl"), (AGAIN,), True, "+layer1.0.conv1[1] (Conv2d) <- layer1.1.relu[1]"),
    "a stage is frozen": Mutant("resnet18", freeze("layer3"), ("frozen",), False, "layer3.0.conv1.weight"),
    "a stage runs without gradient": Mutant("resnet18", edit("", "x = self.layer1(x)", QUIET, "_forward_impl"), (CUT,), True, "layer1.0.conv1.weight"),
    "the output is detached": Mutant("resnet18", edit("", "self.fc(x)", "self.fc(x).detach()", "_forward_impl"), ("no-gradient", CUT), True, "output <- detach <- fc (no gradient)"),
    "a stage lies in a plain list": Mutant("resnet18", unlisted, ("not-registered",), True, "<Sequential at "),
    "a shared tensor is written": Mutant("resnet18", edit("layer2.0", "out = self.bn1(out)", "out = self.bn1(out)\n    x += 1"), ("write-between-reads",), True, "layer2.0.downsample.0"),
    "a result is forgotten": Mutant("resnet18", edit("layer1.0", "out = self.bn2(out)", "self.bn2(out)"), (DEAD, "write-between-reads"), True, "layer1.0.bn2"),
    "a bias is forgotten": Mutant("resnet18", exchange("fc", Unbiased), ("parameter-unused",), True, "fc.bias"),
    "branches are joined in another order": Mutant("googlenet", edit("inception3a", "[branch1, branch2,", "[branch2, branch1,", "_forward"), (), True, "inception3a:cat"),
    "a branch gets a detached input": Mutant("googlenet", edit("inception3b", "self.branch2(x)", "self.branch2(x.detach())", "_forward"), (), True, "inception3b.branch2.0.conv"),
    "zeros stand for a branch": Mutant("googlenet", edit("inception4a", "self.branch3(x)", "torch.zeros_like(self.branch3(x))", "_forward"), (DEAD,), True, "inception4a.branch3"),
    "an activation is left out": Mutant("squeezenet1_1", edit("features.3", "self.squeeze_activation(self.squeeze(x))", "self.squeeze(x)"), (NEVER,), True, "features.3.squeeze_activation"),
    "the wrong layer is called": Mutant("squeezenet1_1", edit("features.3", "self.expand3x3(x)", "self.expand1x1(x)"), (NEVER, AGAIN), True, "features.3.expand3x3"),
    "halves are joined the other way round": Mutant("shufflenet_v2_x0_5", edit("stage2.1", "(x1, self.branch2(x2))", "(self.branch2(x2), x1)"), (), True, "stage2.1:cat"),
    "a gate is not applied": Mutant("mobilenet_v3_small", edit("features.1.block.1", "return scale * input", "return input"), (DEAD,), True, "features.1.block.1"),
    "a scale is left out": Mutant("convnext_tiny", edit("features.1.0", "self.layer_scale * self.block(input)", "self.block(input)"), ("parameter-unused",), True, "features.1.0.layer_scale"),
    "a residual is taken from further up": Mutant("vit_b_32", edit(f"{ENCODER}0", "return x + y", "return input + y"), (), True, f"{ENCODER}0:add"),
    "keys are not normalised": Mutant("vit_b_32", edit(f"{ENCODER}1", "self.self_attention(x, x, x,", "self.self_attention(x, input, x,"), (), True, f"{ENCODER}1.self_attention"),
    "a block's second half is lost": Mutant("vit_b_32", edit(f"{ENCODER}2", "return x + y", "return x"), (DEAD,), True, f"{ENCODER}2.mlp"),
    "positions are not added": Mutant("vit_b_32", edit("encoder", "input = input + self.pos_embedding", "pass"), ("parameter-unused",), True, "encoder.pos_embedding"),
    # transformers
    "a residual is that of the first half": Mutant("llama", edit("model.layers.0", "residual = hidden_states\n    hidden_states = self.post", "hidden_states = self.post"), (), True, "model.layers.0:add"),
    "gate and value are exchanged": Mutant("llama", edit("model.layers.1.mlp", "self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.act_fn(self.up_proj(x)) * self.gate_proj(x)"), (), True, "model.layers.1.mlp.act_fn"),
    "a norm is left out": Mutant("gpt2", edit("transformer.h.1", "    hidden_states = self.ln_2(hidden_states)\n", ""), (NEVER,), True, "transformer.h.1.ln_2"),
    "a residual is not added": Mutant("bert", edit("bert.encoder.layer.0.attention.output", "hidden_states + input_tensor", "hidden_states"), ("argument-unused",), True, "bert.encoder.layer.0.attention.output"),
    "embedded positions are dropped": Mutant("bert", edit("bert.embeddings", "embeddings = embeddings + position_embeddings", "pass"), (DEAD,), True, "bert.embeddings.position_embeddings"),
    "a norm is used in both places": Mutant("vit", edit("vit.layers.0", "self.layernorm_after(", "self.layernorm_before("), (NEVER, AGAIN), True, "vit.layers.0.layernorm_after"),
    "an embedding is frozen": Mutant("t5", freeze("shared"), ("frozen",), False, "shared.weight"),
    "a head is no longer tied": Mutant("gpt2", lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.detach().clone())), (), True, "-lm_head (Linear) <- input: transformer.ln_f; hidden: [transformer.wte.weight]"),
    # timm
    "a block has no skip": Mutant("timm vit", edit("blocks.0", "x = x + self.drop_path2(", "x = self.drop_path2("), (), True, "-blocks.0:add[1]"),
    "a gate is detached": Mutant("timm efficientnet", edit("blocks.1.0.se", "self.gate(x_se)", "self.gate(x_se).detach()"), (CUT,), True, "blocks.1.0.se.conv_reduce.weight"),
    "a gate's result is dropped": Mutant("timm efficientnet", edit("blocks.1.0", "x = self.se(x)", "self.se(x)"), (DEAD,), True, "blocks.1.0.se"),
    "two layers are exchanged": Mutant("timm vit", swap("blocks.0.ls1", "blocks.0.norm1"), (), True, "blocks.0.ls1 (LayerNorm)"),
}  # fmt: skip

#: Slips that neither shows: a lineage says from which layer a tensor comes, not which part of it.
BLIND: dict[str, Mutant] = {
    "the other half goes on": Mutant("shufflenet_v2_x0_5", edit("stage2.1", "(x1, self.branch2(x2))", "(x2, self.branch2(x1))"), (), False, ""),
}  # fmt: skip


# -- what is seen ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """The findings that the unmodified model does not have, and the lines of the wiring that differ."""

    new: tuple[Finding, ...]
    changed: tuple[str, ...]

    @property
    def codes(self) -> list[str]:
        return sorted({f.code for f in self.new})

    @property
    def text(self) -> str:
        return "\n".join([*map(str, self.new), *self.changed])


def traced(name: str, change: Change = lambda model: None) -> Lineage:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        model, args, kwargs = BUILD[name]()
        model.eval()
        change(model)
        return gradlineage.trace(model, *args, **kwargs)


@functools.lru_cache(maxsize=1)  # mutants of one model stand together
def original(name: str) -> tuple[set[tuple[str, str, str]], list[str]]:
    lineage = traced(name)
    return {(f.code, f.call, f.message) for f in gradlineage.lint(lineage)}, to_wiring(lineage).splitlines()


@functools.cache
def look(mutant: Mutant) -> Seen:
    known, wiring = original(mutant.model)
    lineage = traced(mutant.model, mutant.change)
    new = tuple(f for f in gradlineage.lint(lineage) if (f.code, f.call, f.message) not in known)
    lines = list(difflib.unified_diff(wiring, to_wiring(lineage).splitlines(), lineterm="", n=0))
    return Seen(new, tuple(line for line in lines[2:] if not line.startswith("@@")))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for title, mutant in (MUTANTS | BLIND).items():
        print(f"\n== {title} ({mutant.model})\n{look(mutant).text or 'nothing'}")
