"""Paths and decisions of models as people write them; what is expected is worked out by hand, or counted by plain hooks in plain passes."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import re
import shlex
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import gradlineage
from gradlineage import Decision, Runs
from gradlineage.cli import main

torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent
transformers: Any = importlib.import_module("transformers")


def counted(model: nn.Module, inputs: Iterable[tuple[Any, ...]]) -> list[Counter[str]]:
    """How often each module ran, for each input."""
    found: list[Counter[str]] = []

    def count(path: str) -> Any:
        return lambda *_: found[-1].update([path])

    hooks = [module.register_forward_pre_hook(count(path)) for path, module in model.named_modules()]
    for args in inputs:
        found.append(Counter())
        with torch.no_grad():
            model(*args)
    for hook in hooks:
        hook.remove()
    return found


def traced(model: nn.Module, inputs: Sequence[tuple[Any, ...]]) -> Runs:
    """The runs, after a look at what plain hooks say of how often what ran."""
    truth = counted(model, inputs)
    with torch.no_grad():
        runs = gradlineage.trace_many(model, inputs)
    assert runs.total == len(inputs)
    ran = {path for found in truth for path in found}
    assert runs.calls == {path: (min(found[path] for found in truth), max(found[path] for found in truth)) for path in ran}
    assert {(c.path, c.nth): c.count for c in runs.union().calls} == Counter(
        (path, n) for found in truth for path, times in found.items() for n in range(times)
    )
    for path in runs.paths:
        assert path.lineage is not None
        assert {tuple(sorted(truth[i].items())) for i in path.examples} == {tuple(sorted(Counter(c.path for c in path.lineage).items()))}
    return runs


def labels(decision: Decision) -> list[str]:
    return [source.label for source in decision.sources if source.kind != "constant"]


# -- early exit ------------------------------------------------------------------------------------------------------------------------


class Branchy(nn.Module):
    """Convolutions with an exit after each but the last; the answer is taken where it is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(1, 1, 1, bias=False) for _ in range(3)])
        self.exits = nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])
        for block, head in zip(self.blocks, self.exits, strict=True):
            nn.init.constant_(block.weight, 2.0)  # type: ignore[arg-type]  # twice as sure after each block
            nn.init.zeros_(head.bias)  # type: ignore[arg-type]
            head.weight.data = torch.tensor([[1.0, 0, 0, 0], [0.0, 0, 0, 0]])

    def forward(self, x: Tensor) -> Tensor:
        for block, head in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            y: Tensor = head(x.flatten(1))
            if y.softmax(-1).amax() > 0.9:
                break
        return y


def test_early_exit_network() -> None:
    # sure where the logit is above ln 9 = 2.197; the logits are 2x, 4x, 8x
    images = [torch.full((1, 1, 2, 2), x) for x in (1.5, 0.75, 0.3, 0.1, 2.0)]
    runs = traced(Branchy(), [(image,) for image in images])
    assert [(p.count, p.examples, p.length) for p in runs.paths] == [(2, (0, 4), 2), (2, (2, 3), 6), (1, (1,), 4)]
    assert runs.calls["blocks.1"] == (0, 1)
    third = runs.paths[1]
    assert third.lineage is not None
    assert [(d.kind, d.value, labels(d)) for d in third.lineage.decisions] == [
        ("bool", False, ["exits.0"]), ("bool", False, ["exits.1"]), ("bool", True, ["exits.2"]),
    ]  # fmt: skip
    assert third.difference is not None
    assert third.difference.added == ("blocks.1", "exits.1", "blocks.2", "exits.2")
    assert [str(r) for r in third.difference.rewired] == ["output: was exits.0, now exits.2"]

    union = runs.union()
    assert [(c.label, c.count) for c in union.layers] == [
        ("blocks.0", 5), ("exits.0", 5), ("blocks.1", 3), ("exits.1", 3), ("blocks.2", 2), ("exits.2", 2),
    ]  # fmt: skip
    assert {link.label: link.count for link in union.outputs[0].links} == {"exits.0": 2, "exits.1": 1, "exits.2": 2}
    (line,) = runs.coverage().decisions
    # input 3 is never sure: three times False
    assert (line.kind, line.call, line.sides.true, line.sides.false) == ("bool", "", 4, 0 + 1 + 2 + 3 + 0)
    assert not line.settled


def test_what_no_input_reached_is_told() -> None:
    coverage = traced(Branchy(), [(torch.ones(1, 1, 2, 2) * 2,)] * 3).coverage()
    assert coverage.never_called == ("blocks.1", "blocks.2", "exits.1", "exits.2")
    assert [(line.kind, str(line.sides)) for line in coverage.settled] == [("bool", "always True (×3)")]


# -- mixtures of experts -----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def route(weight: Tensor) -> None:
    """Token ``t`` goes to expert ``t % experts``, if ``t``'s embedding is the unit vector ``t``."""
    weight.zero_()
    for token in range(weight.shape[1]):
        weight[token % len(weight), token] = 1.0


def tokens(*ids: int) -> tuple[Tensor]:
    return (torch.tensor([ids]),)


def test_mixtral() -> None:
    config = transformers.MixtralConfig(
        vocab_size=8, hidden_size=8, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, num_experts_per_tok=1, max_position_embeddings=16, use_cache=False,
        experts_implementation="eager", attn_implementation="eager",
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    block: Any = model.model.layers[0]
    nn.init.eye_(model.model.embed_tokens.weight)
    nn.init.zeros_(block.self_attn.o_proj.weight)
    route(block.mlp.gate.weight)

    inputs = [tokens(0, 1), tokens(0, 4), tokens(3, 7, 3), tokens(0, 1, 2), tokens(5, 2)]  # experts 0 1, 0, 3, 0 1 2, 1 2
    runs = traced(model, inputs)
    assert [(p.count, p.examples) for p in runs.paths] == [(2, (0, 4)), (2, (1, 2)), (1, (3,))]
    experts, gate = "model.layers.0.mlp.experts", "model.layers.0.mlp.gate[0][2]"
    assert runs.calls[f"{experts}.act_fn"] == (1, 3)  # the experts are slices of one parameter: what runs for each is the activation
    for path, count in zip(runs.paths, (2, 1, 3), strict=True):
        assert path.lineage is not None
        read = [d for d in path.lineage.decisions if d.call is not None and d.call.path == experts]
        assert {tuple(labels(d)) for d in read} == {(gate,)}
        # which experts are hit; then for each: is it one, its slice, its tokens, two more slices
        assert Counter(d.kind for d in read) == {"shape": 1 + count, "bool": count, "index": 3 * count}
        assert {d.value for d in read if d.kind == "bool"} == {False}
    union = runs.union()
    assert [union[f"{experts}.act_fn", n].count for n in range(3)] == [5, 3, 1]
    assert union[f"{experts}:index_add"].count == 5
    lines = {(line.kind, line.call): line for line in runs.coverage().decisions}
    assert lines["bool", experts].sides.false == 2 + 1 + 1 + 3 + 2
    assert lines["bool", experts].settled


def test_switch_transformer_names_its_experts() -> None:
    config = transformers.SwitchTransformersConfig(
        vocab_size=8, d_model=8, d_kv=4, d_ff=4, num_layers=1, num_sparse_encoder_layers=1, num_heads=2, num_experts=4,
        expert_capacity=8, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.SwitchTransformersEncoderModel(config).eval()
    block: Any = model.encoder.block[0].layer
    nn.init.eye_(model.shared.weight)
    nn.init.zeros_(block[0].SelfAttention.o.weight)
    route(block[1].mlp.router.classifier.weight)

    inputs = [tokens(0, 4), tokens(1, 1), tokens(0, 0), tokens(2, 6), tokens(4, 0)]  # experts 0, 1, 0, 2, 0
    runs = traced(model, inputs)
    experts = "encoder.block.0.layer.1.mlp.experts"
    assert [(p.count, p.examples) for p in runs.paths] == [(3, (0, 2, 4)), (1, (1,)), (1, (3,))]
    assert runs.coverage().never_called == (f"{experts}.expert_3",)
    union = runs.union()
    counts = {n: union[f"{experts}.expert_{n}"].count for n in range(3)}
    assert counts == {0: 3, 1: 1, 2: 1}
    assert sum(counts.values()) == union.runs == 5  # one expert an input
    written = [link for flow in union[f"{experts}:index_add"].inputs for link in flow.links if link.label.endswith(".wo")]
    assert {link.label: link.count for link in written} == {f"{experts}.expert_{n}.wo": count for n, count in counts.items()}
    for path in runs.paths:
        assert path.lineage is not None
        assert [(d.kind, labels(d)) for d in path.lineage.decisions] == [
            (kind, ["encoder.block.0.layer.1.mlp.router.classifier"]) for kind in ("shape", "shape", "format")
        ]  # the expert's name is made with a text: self[f"expert_{index}"]

    mixed = gradlineage.trace_many(model, [tokens(0, 1), tokens(2, 0)]).union()  # experts 0 1 and 0 2
    assert {n: mixed[f"{experts}.expert_{n}"].count for n in range(3)} == {0: 2, 1: 1, 2: 1}


# -- detection -------------------------------------------------------------------------------------------------------------------------


class Detector(nn.Module):
    """Faster R-CNN that keeps boxes whose score is above a threshold of the call's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
            weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64, rpn_post_nms_top_n_test=20
        )

    def forward(self, image: Tensor, threshold: float) -> Any:
        self.net.roi_heads.score_thresh = threshold
        return self.net([image])[0]


def test_faster_rcnn_without_and_with_detections() -> None:
    torch.manual_seed(0)
    model, image = Detector().eval(), torch.rand(3, 64, 64)
    with torch.no_grad():
        assert len(model(image, 1.0)["boxes"]) == 0  # a score is never above 1; this pass also lets the pooler make its scales
        assert len(model(image, 0.0)["boxes"]) > 0
    runs = traced(model, [(image, 1.0), (image, 0.0), (image.flip(-1), 1.0)])
    none, some = runs.paths
    assert [(p.count, p.examples) for p in runs.paths] == [(2, (0, 2)), (1, (1,))]
    assert none.lineage is not None and some.lineage is not None and some.difference is not None

    def read(path: gradlineage.Path) -> list[tuple[str, str]]:
        assert path.lineage is not None
        assert {d.kind for d in path.lineage.decisions} == {"shape"}
        heads = [d for d in path.lineage.decisions if d.call is not None and d.call.path == "net.roi_heads"]
        return [(d.where.split("/")[-1].split(":")[0], d.sources[0].label) for d in heads]

    score, box = "net.roi_heads.box_predictor.cls_score", "net.roi_heads.box_predictor.bbox_pred"
    assert read(none) == [("roi_heads.py", score), ("boxes.py", box)]  # scores above the threshold, boxes that are not too small
    assert read(some) == [("roi_heads.py", score), ("boxes.py", box), ("boxes.py", box)]  # and non-maximum suppression

    # the same modules run; what is new is the suppression, and boxes, scores and labels picked by it
    assert some.difference.removed == ()
    picked = [f"net.roi_heads:getitem[{n}]" for n in (3, 4, 5)]
    assert some.difference.added == ("net.roi_heads:add[2]", "net.roi_heads:nms", *picked)  # boxes of other classes are moved away
    assert none.lineage["net.roi_heads:getitem[0]"].outputs[0].shape == (0, 4)
    lines = {(Path(line.where.split(":")[0]).name, line.call): line.sides.numbers for line in runs.coverage().decisions}
    assert lines["roi_heads.py", "net.roi_heads"] == lines["rpn.py", "net.rpn"] == 3
    assert sum(line.sides.numbers for line in runs.coverage().decisions if line.call == "net.roi_heads") == 2 + 3 + 2


# -- recursion -------------------------------------------------------------------------------------------------------------------------


class TreeLSTM(nn.Module):
    """A binary tree-LSTM over nested pairs of word numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.leaf, self.node = nn.Embedding(10, 4), nn.Linear(4, 8), nn.Linear(8, 20)

    def forward(self, tree: Any) -> Tensor:
        return self.fold(tree)[0]

    def fold(self, tree: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(tree, tuple):
            h, c = self.leaf(self.embed(tree)).chunk(2, 1)
            return h, c
        (h1, c1), (h2, c2) = self.fold(tree[0]), self.fold(tree[1])
        i, f1, f2, o, u = self.node(torch.cat([h1, h2], 1)).chunk(5, 1)
        c = i.sigmoid() * u.tanh() + f1.sigmoid() * c1 + f2.sigmoid() * c2
        return o.sigmoid() * c.tanh(), c


def test_tree_lstm_takes_a_path_for_each_shape_of_tree() -> None:
    a, b, c, d = (torch.tensor([n]) for n in range(4))
    trees = [(a, b), ((a, b), c), (a, (b, c)), (c, d), ((a, b), (c, d)), ((c, d), a)]
    runs = traced(TreeLSTM(), [(tree,) for tree in trees])
    assert [(p.count, p.examples) for p in runs.paths] == [(2, (0, 3)), (2, (1, 5)), (1, (2,)), (1, (4,))]
    assert runs.calls == {"": (1, 1), "embed": (2, 4), "leaf": (2, 4), "node": (1, 3)}
    assert runs.coverage().decisions == ()  # the tree's shape is Python's own
    assert all(path.lineage is not None and path.lineage.decisions == () for path in runs.paths)

    left, right, full = (path.lineage for path in runs.paths[1:])
    assert left is not None and right is not None and full is not None

    def fed(lineage: gradlineage.Lineage, nth: int) -> list[str]:
        return [call.label for call in lineage.predecessors(("node", nth))]

    assert fed(left, 0) == ["leaf[0]", "leaf[1]"] and fed(right, 0) == ["leaf[1]", "leaf[2]"]
    # h of the first node is its o times the tanh of a c, which the cells of what it is fed by are part of
    assert fed(left, 1) == ["node[0]", "leaf[0]", "leaf[1]", "leaf[2]"]
    assert fed(right, 1) == ["leaf[0]", "node[0]", "leaf[1]", "leaf[2]"]
    assert fed(full, 1) == ["leaf[2]", "leaf[3]"]
    assert [call.label for call in full.ancestors(("node", 2))] == [c.label for c in full.layers if c.label != "node[2]"]
    assert gradlineage.diff(left, right)  # as many calls of everything, fed in another way
    assert {call.label: call.count for call in runs.union().find(type="Linear")} == {
        "leaf[0]": 6, "leaf[1]": 6, "node[0]": 6, "leaf[2]": 4, "node[1]": 4, "leaf[3]": 1, "node[2]": 1,
    }  # fmt: skip


# -- generation ------------------------------------------------------------------------------------------------------------------------


def counting_gpt2() -> Any:
    """A GPT-2 that counts: after token n comes n + 1. Attention and MLP add nothing, the head looks one up."""
    config = transformers.GPT2Config(
        vocab_size=8, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=5, pad_token_id=0,
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    block: Any = model.transformer.h[0]
    for weight in (model.transformer.wpe.weight, block.attn.c_proj.weight, block.mlp.c_proj.weight):
        nn.init.zeros_(weight)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.eye(8))
        model.lm_head.weight.copy_(torch.eye(8).roll(1, 0))
    return model


@pytest.mark.parametrize(("limit", "ids"), [(8, [1, 2, 3, 4, 5]), (2, [1, 2, 3, 4])], ids=["by the end token", "by length"])
def test_gpt2_generate_stops(limit: int, ids: list[int]) -> None:
    model = counting_gpt2()
    prompt = torch.tensor([ids[:2]])
    with torch.no_grad(), gradlineage.recording(model) as recording:
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=limit)
    assert out.tolist() == [ids]
    lineage, turns = recording.lineage(out), len(ids) - 2
    assert [c.label for c in lineage.find(pattern="lm_head")] == [f"lm_head[{n}]" for n in range(turns)]

    made = [f"lm_head[{n}]" for n in range(turns)]
    stops = [d for d in lineage.decisions if d.call is None and {*labels(d)} & {*made}]
    assert [(d.kind, d.value) for d in stops] == [("bool", False)] * (turns - 1) + [("bool", True)]
    assert {d.where.rsplit(":")[0] for d in stops} == {"transformers/generation/utils.py"}
    assert [[label for label in labels(d) if label in made] for d in stops] == [made[: n + 1] for n in range(turns)]  # all tokens so far
    assert lineage.roll().unroll() == lineage


class Sliding(nn.Module):
    """Greedy generation over a window of fixed size, until the end token."""

    def __init__(self, net: nn.Module, end: int) -> None:
        super().__init__()
        self.net, self.end = net, end

    def forward(self, ids: Tensor) -> Tensor:
        while True:
            token = self.net(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids[:, 1:], token], 1)
            if token == self.end:
                return ids


def test_gpt2_in_a_loop_is_rolled_up() -> None:
    model = Sliding(counting_gpt2(), end=7)
    runs = traced(model, [(torch.tensor([ids]),) for ids in ([0, 1], [4, 5], [5, 6], [1, 2])])  # 6, 2, 1 and 5 turns
    assert [p.examples for p in runs.paths] == [(0,), (1,), (2,), (3,)]
    assert runs.calls["net.lm_head"] == (1, 6)
    longest = runs.paths[0].lineage
    assert longest is not None
    stops = [d for d in longest.decisions if d.where.startswith("tests/test_paths_real.py")]
    assert [(d.kind, d.value, labels(d)) for d in stops] == [("bool", n == 5, [f"net.lm_head[{n}]"]) for n in range(6)]

    rolled = longest.roll()
    assert rolled["net.lm_head", 5].inputs[0].sources == longest["net.lm_head", 5].inputs[0].sources
    turns = re.search(r"⟲ ×(\d)", str(rolled))
    assert turns is not None and int(turns[1]) >= 5  # the last one may end differently: nothing reads what it made
    rows = re.findall(r"^ *(net\.\S+) \(\w+\)", str(rolled), re.M)
    assert len(rows) <= 2 * len({*(call.path for call in longest.layers)}) < len(longest.layers) == 6 * 14

    difference = runs.paths[1].difference
    assert difference is not None
    assert {label.split("[")[0].rpartition(".")[2] for label in difference.removed} >= {"wte", "lm_head", "c_fc"}
    assert not (difference.added or difference.retyped or difference.reshaped)


# -- adaptive computation time -----------------------------------------------------------------------------------------------------------


class Ponder(nn.Module):
    """Halts when the halting probabilities add up to more than 1 - eps; the result is the mean of the states, weighted by them (Graves, 2016)."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.cell, self.halt, self.plain = nn.Linear(1, 1), nn.Linear(1, 1), plain
        for layer in (self.cell, self.halt):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, eps: float = 0.01) -> Tensor:
        h, out, rest = x, torch.zeros(1, 1), 1.0 if self.plain else torch.ones(())
        while True:
            h = self.cell(h)
            p = self.halt(h).sigmoid().squeeze()
            chance = float(p) if self.plain else p
            if rest - chance < eps:
                answer: Tensor = out + rest * h
                return answer
            out, rest = out + chance * h, rest - chance


@pytest.mark.parametrize("plain", [False, True], ids=["tensors", "numbers"])
def test_adaptive_computation_time(plain: bool) -> None:
    steps = {0.999: 1, 0.5: 2, 0.4: 3, 0.25: 4}  # probability: how often it takes to 1 - eps
    inputs = [(torch.full((1, 1), math.log(p / (1 - p))),) for p in (0.5, 0.25, 0.999, 0.5, 0.4)]
    runs = traced(Ponder(plain), inputs)
    assert runs.calls == {"": (1, 1), "cell": (1, 4), "halt": (1, 4)}
    assert [(p.count, p.examples, p.length) for p in runs.paths] == [(2, (0, 3), 4), (1, (1,), 8), (1, (2,), 2), (1, (4,), 6)]
    (line,) = runs.coverage().decisions
    total = 2 + 4 + 1 + 2 + 3
    if plain:  # what Python decides with its own numbers is not seen, but where it got them is
        assert (line.kind, line.sides.numbers, line.sides.true, line.sides.false) == ("float", total, 0, 0)
        assert [line.sides.least, line.sides.most] == pytest.approx([0.25, 0.999])
    else:
        assert (line.kind, line.sides.true, line.sides.false, line.sides.numbers) == ("bool", 5, total - 5, 0)
    assert not line.settled

    longest = runs.paths[1].lineage
    assert longest is not None and len(longest.find(pattern="halt")) == steps[0.25]
    for n, decision in enumerate(longest.decisions):
        assert {*labels(decision)} == {f"halt[{n}]"} if plain else {f"halt[{k}]" for k in range(n + 1)}
        assert decision.value == (pytest.approx(0.25) if plain else n == 3)
    assert runs.paths[1].difference is not None
    assert {label for label in runs.paths[1].difference.added if ":" not in label} == {"cell[2]", "cell[3]", "halt[2]", "halt[3]"}
    union = runs.union()
    assert [union["halt", n].count for n in range(4)] == [5, 4, 2, 1]
    assert re.search(r"calls per input: cell ×1–4, halt ×1–4", str(union))


# -- parts of a data set in several processes ------------------------------------------------------------------------------------------


def written(language: str) -> list[str]:
    """The blocks of a language in docs/paths.md."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "docs" / "paths.md").read_text(), re.S | re.M)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that docs/paths.md asks for."""
    (early,) = (block for block in written("python") if "class EarlyExit(nn.Module)" in block)
    (parts,) = (block for block in written("python") if "all_gather_object" in block)
    (tmp_path / "early.py").write_text(early)
    (tmp_path / "parts.py").write_text(parts)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("early", "parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch has no gloo")
def test_two_processes_find_what_one_does(page: Path) -> None:
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "parts.py")  # on a free port
    done = subprocess.run(launch, env={**os.environ, **settings}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    apart = Runs.load(page / "runs.json")

    early, parts = importlib.import_module("early"), importlib.import_module("parts")
    model = early.EarlyExit().eval()
    torch.distributed.init_process_group("gloo", init_method=f"file://{page}/store", rank=0, world_size=1)
    try:
        whole = parts.trace_parts(model, early.images)
    finally:
        torch.distributed.destroy_process_group()
    assert apart == whole
    assert apart.to_json() == whole.to_json()
    plain = gradlineage.trace_many(model, DataLoader(early.images, batch_size=1))
    assert (str(apart), str(apart.union())) == (str(plain), str(plain.union()))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_parts_merge_to_the_whole_whatever_their_number(page: Path, world: int) -> None:
    early = importlib.import_module("early")
    model, images = early.EarlyExit().eval(), early.images

    def part(rank: int, world: int) -> Runs:
        loader = DataLoader(images, batch_size=1, sampler=range(rank, len(images), world))
        return gradlineage.trace_many(model, loader, start=rank, step=world)

    parts = [part(rank, world) for rank in range(world)]
    assert parts[0].merge(*parts[1:]) == parts[-1].merge(*parts[-2::-1]) == part(0, 1)

    samplers: list[Any] = [DistributedSampler(images, world, rank, shuffle=False) for rank in range(world)]
    if len(images) % world == 0:
        assert [list(sampler) for sampler in samplers] == [list(range(rank, len(images), world)) for rank in range(world)]
    else:  # as the page says, some are repeated
        assert sum(map(len, samplers)) > len(images)


def test_commands_of_the_page_print_what_it_says(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks that show a prompt; those without are run with the other snippets."""
    namespace: dict[str, Any] = {"__name__": "snippet"}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in written("python"):
            exec(compile(block, "paths.py", "exec"), namespace)
    namespace["runs"].save("runs.json")  # torchrun has its own test
    statuses: defaultdict[str, list[int]] = defaultdict(list)
    for block in written("console"):
        for command, said in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block, re.M):
            name, *arguments = shlex.split(command)
            if name == "gradlineage":
                statuses[arguments[0]].append(main(arguments))
                assert capsys.readouterr().out.startswith(said), command
    assert statuses == {"diff": [1], "paths": [0, 0]}
