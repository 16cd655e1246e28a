# mypy: disable-error-code="no-any-return,func-returns-value,no-untyped-call,arg-type"
"""What `trace` and `recording` promise: one rule a test, on models small enough to see the answer."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlineage
from gradlineage import Lineage
from tests.nets import Net, data, fed, lin, names, out

# -- the founding question ---------------------------------------------------------------------------------------------------------------


class Concat(nn.Module):
    def forward(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, 1)


def test_layers_that_feed_a_concat_are_named_through_a_functional_relu() -> None:
    net = Net(
        lambda m, x: m.conc([torch.relu(m.bn1(x)), torch.relu(m.conv2(x))]),
        bn1=nn.BatchNorm2d(3), conv2=nn.Conv2d(3, 3, 1), conc=Concat(),
    )  # fmt: skip
    lineage = gradlineage.trace(net.eval(), data(1, 3, 4, 4))
    assert [(s.label, s.ops) for flow in lineage["conc"].inputs for s in flow.sources] == [("bn1", ("relu",)), ("conv2", ("relu",))]
    assert [flow.name for flow in lineage["conc"].inputs] == ["parts[0]", "parts[1]"]
    assert lineage.find(type="Concat") == (lineage["conc"],)


def test_a_functional_cat_is_a_join_with_its_operands_in_order() -> None:
    lineage = gradlineage.trace(
        Net(lambda m, x: m.head(torch.cat([m.b(x), torch.relu(m.a(x))], 1)), a=lin(), b=lin(), head=nn.Linear(8, 1)), data()
    )
    (join,) = lineage.joins
    assert join.label == ":cat"
    assert join.op == "cat"
    assert join.outputs[0].shape == (2, 8)
    assert [[repr(link) for link in flow.links] for flow in join.inputs] == [["<Link b>"], ["<Link relu <- a>"]]
    assert [s.ops for s in lineage["head"].inputs[0].sources] == [("cat",), ("relu", "cat")]
    assert lineage.find(op="cat") == (join,)


# -- calls and layers ----------------------------------------------------------------------------------------------------------------------


def test_shared_module_gives_one_call_per_use() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.fc(m.fc(m.fc(x))), fc=lin()), data())
    assert [c.label for c in lineage.layers] == ["fc[0]", "fc[1]", "fc[2]"]
    assert fed(lineage, ("fc", 2)) == [["fc[1]"]]
    assert lineage["fc"].nth == 0


def test_block_that_skipped_its_children_is_a_layer() -> None:
    block = Net(lambda m, x: x * 2 if x.shape[0] == 2 else m.fc(x), fc=lin())
    lineage = gradlineage.trace(Net(lambda m, x: m.head(m.block(x)), block=block, head=lin()), data())
    assert [(c.label, c.kind) for c in lineage.calls] == [("Net", "container"), ("block", "layer"), ("head", "layer")]
    assert fed(lineage, "head") == [["block"]]


def test_child_named_like_the_class_of_the_root_keeps_its_name() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: getattr(m, "Net")(x), Net=lin()), data())  # noqa: B009
    assert [c.label for c in lineage.calls] == ["(Net)", "Net"]
    assert [lineage[c.label] for c in lineage.calls] == list(lineage.calls)


def test_root_without_children_is_a_layer_with_an_empty_path() -> None:
    lineage = gradlineage.trace(nn.Linear(4, 2), data())
    assert [(c.path, c.label, c.kind) for c in lineage.layers] == [("", "Linear", "layer")]
    assert out(lineage) == [["Linear"]]


def test_unregistered_module_with_parameters_is_a_flagged_call() -> None:
    net = Net(lambda m, x: m.head(m.__dict__["spare"][0](x)), head=lin())
    net.__dict__["spare"] = [lin()]
    lineage = gradlineage.trace(net, data())
    call = lineage.layers[0]
    assert call.path.startswith("<Linear at test_trace.py:")
    assert not call.registered
    assert lineage["head"].registered
    assert fed(lineage, "head") == [[call.label]]
    assert names(call.inputs[0]) == ["input:args[0]"]


def test_unregistered_module_gets_keyword_arguments_on_its_first_call() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor, *, scale: Tensor | None = None) -> Tensor:
            return super().forward(input) * (1 if scale is None else scale)

    spare = Scaled(4, 4)
    net = Net(lambda m, x: spare(m.a(x), scale=m.b(x)), a=lin(), b=lin())
    lineage = gradlineage.trace(net, data())
    assert [names(f) for f in lineage.layers[-1].inputs] == [["a"], ["b"]]
    assert not spare._forward_hooks
    assert not spare._forward_pre_hooks


def test_unregistered_module_without_parameters_is_an_operation() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.b(nn.ReLU()(m.a(x))), a=lin(), b=lin()), data())
    assert [c.label for c in lineage.layers] == ["a", "b"]
    assert [s.ops for s in lineage["b"].inputs[0].sources] == [("relu",)]


def test_multihead_attention_is_a_layer_and_its_uncalled_child_is_bypassed() -> None:
    net = Net(lambda m, x: m.att(x, x, x)[0], att=nn.MultiheadAttention(4, 2))
    lineage = gradlineage.trace(net, data(3, 2, 4))
    assert [c.label for c in lineage.layers] == ["att"]
    assert {name for name, _ in lineage.bypassed} == {"att.out_proj.weight", "att.out_proj.bias"}
    assert lineage["att"].parameters == lineage.parameters


def test_ports_number_the_output_tensors() -> None:
    net = Net(lambda m, x: m.h(m.lstm(x)[1][0][0]), lstm=nn.LSTM(4, 5), h=nn.Linear(5, 1))
    (source,) = gradlineage.trace(net, data(3, 2, 4))["h"].inputs[0].sources
    assert (source.label, source.port) == ("lstm[0][1]", 1)


def test_call_says_where_in_the_users_code_it_was_made() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.seq(x), seq=nn.Sequential(lin())), data())
    assert lineage["seq"].where.startswith("test_trace.py:") or "/test_trace.py:" in lineage["seq"].where
    assert lineage["seq.0"].where == lineage["seq"].where  # nn.Sequential lies within torch
    assert lineage["seq.0"].parent == lineage["seq"]
    assert lineage["seq.0"].parameters == (20, 20)


def test_inputs_are_named_after_the_signature() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor, pair: Any, *rest: Tensor, mask: Tensor, extra: Any = None) -> Tensor:
            return x + pair["a"] + pair["b"][1] + rest[0] + mask

    lineage = gradlineage.trace(Many(), data(), {"a": data(), "b": (None, data())}, data(), extra=None, mask=data())
    assert [f.name for f in lineage.inputs] == ["x", "pair['a']", "pair['b'][1]", "rest[0]", "mask"]
    assert [s.index for f in lineage.inputs for s in f.sources] == [0, 1, 2, 3, 4]


def test_inputs_in_dataclasses_and_plain_objects_are_found() -> None:
    @dataclasses.dataclass
    class Batch:
        x: Tensor
        note: str = ""

    class Images:
        def __init__(self, tensors: Tensor) -> None:
            self.tensors = tensors
            self.me = self

    lineage = gradlineage.trace(Net(lambda m, b, i: m.a(b.x) + m.b(i.tensors), a=lin(), b=lin()), Batch(data()), Images(data()))
    assert [f.name for f in lineage.inputs] == ["args[0].x", "args[1].tensors"]
    assert fed(lineage, "b") == [["input:args[1].tensors"]]


# -- passthroughs and in-place writes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", [nn.Identity(), nn.Dropout(0.5).eval(), nn.Sequential()], ids=["identity", "dropout", "empty"])
@pytest.mark.parametrize("grad", [True, False])
def test_module_that_returns_its_input_produces_its_return_value_only(idle: nn.Module, grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.fc(x)
        tap = m.idle(h)
        return m.main(h) + m.aux(tap)

    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(Net(run, fc=lin(), idle=idle, main=lin(), aux=lin()), data())
    assert fed(lineage, "main") == [["fc"]]
    assert fed(lineage, "aux") == [["idle"]]


@pytest.mark.parametrize("grad", [True, False])
def test_write_to_a_tensor_that_was_handed_through_reaches_its_alias(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.fc(x) * 2
        skip = m.idle(y)
        y += m.c(x)
        return m.h(skip)

    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(Net(run, fc=lin(), idle=nn.Identity(), c=lin(), h=lin()), data())
    assert {"idle", "c"} <= set(names(lineage["h"].inputs[0]))


def test_alias_keeps_the_strides_of_channels_last() -> None:
    seen = []

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.idle(m.conv(x))
        seen.append(y.stride())
        return y

    net = Net(run, conv=nn.Conv2d(1, 3, 1).to(memory_format=torch.channels_last), idle=nn.Identity())
    image = data(1, 1, 5, 5).to(memory_format=torch.channels_last)
    net(image)
    gradlineage.trace(net, image)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("grad", [True, False])
def test_in_place_layer_produces_the_tensor_for_everyone_who_holds_it(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.conv(x)
        shortcut = h
        return m.head(m.conv2(m.relu(h)) + shortcut)

    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(Net(run, conv=lin(), relu=nn.ReLU(inplace=True), conv2=lin(), head=lin()), data())
    assert names(lineage["head"].inputs[0]) == ["conv2", "relu"]
    assert fed(lineage, "relu") == [["conv"]]


@pytest.mark.parametrize("grad", [True, False])
def test_three_dimensional_linear_written_in_place_stays_the_source(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(Net(lambda m, x: m.b(F.relu(m.a(x), inplace=True)), a=lin(), b=lin()), data(2, 3, 4))
    assert fed(lineage, "b") == [["a"]]


@pytest.mark.parametrize("grad", [True, False])
def test_write_through_a_view_is_seen_by_the_base_and_other_views(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.a(x) * 1
        other = h[:, 2:]
        h[:, :2].add_(m.b(x)[:, :2])
        return m.base(h), m.view(other.repeat(1, 2))

    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(Net(run, a=lin(), b=lin(), base=lin(), view=lin()), data())
    assert set(names(lineage["base"].inputs[0])) == {"a", "b"}
    assert set(names(lineage["view"].inputs[0])) == {"a", "b"}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "erase",
    [
        lambda h, c: h.zero_().add_(c),
        lambda h, c: h.copy_(c),
        lambda h, c: h.__setitem__(slice(None), c),
        lambda h, c: h.__setitem__(..., c),
    ],
    ids=["zero", "copy", "slice", "ellipsis"],
)
def test_write_that_covers_a_tensor_drops_what_was_there(erase: Callable[[Tensor, Tensor], Any], grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x) * 1
        erase(h, m.c(x))
        return m.b(h)

    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin()), data())
    assert fed(lineage, "b") == [["c"]]


def test_module_that_mutates_its_argument_becomes_its_producer() -> None:
    class Mutate(nn.Module):
        def forward(self, x: Tensor) -> None:
            x.add_(1)

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.fc(x)
        view = h[:]
        m.mut(h)
        return m.a(h) + m.b(view)

    lineage = gradlineage.trace(Net(run, fc=lin(), mut=Mutate(), a=lin(), b=lin()), data())
    assert fed(lineage, "a") == [["mut"]]
    assert fed(lineage, "b") == [["mut"]]
    assert lineage["a"].inputs[0].sources[0].port is None


def test_input_recorded_before_the_layer_writes_to_it() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.relu(m.fc(x)), fc=lin(), relu=nn.ReLU(inplace=True)), data())
    assert fed(lineage, "relu") == [["fc"]]


@pytest.mark.parametrize("grad", [True, False])
def test_layer_that_writes_a_part_leaves_the_rest_to_its_source(grad: bool) -> None:
    class Zero(nn.Module):
        def forward(self, x: Tensor) -> None:
            x[:, :2] = 0.5

    def run(m: Any, x: Tensor) -> Tensor:
        y, z = m.a(x), m.b(x)
        m.relu(y[:, :2])
        m.zero(z.view(4, 2).view(2, 4))
        return m.c(y) + m.d(z)

    net = Net(run, a=lin(), b=lin(), relu=nn.ReLU(inplace=True), zero=Zero(), c=lin(), d=lin())
    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(net, data())
    assert fed(lineage, "c") == [["a", "relu"]]
    assert fed(lineage, "d") == [["b", "zero"]]


@pytest.mark.parametrize("grad", [True, False])
def test_write_through_a_handed_through_alias_keeps_the_original_source(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        m.idle(y)[:, :2] = m.c(x)[:, :2]
        return m.b(y)

    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin(), idle=nn.Identity()), data())
    assert fed(lineage, "b") == [["a", "c"]]


def test_parameter_handed_through_stays_itself_for_others() -> None:
    net = Net(lambda m, x: m.b(x @ m.one(m.table)) + m.two(m.table), one=nn.Dropout(), two=nn.Dropout(), b=lin()).eval()
    net.table = nn.Parameter(data(4, 4))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            lineage = gradlineage.trace(net, data(4, 4))
        assert fed(lineage, "two") == [["table"]]
        assert fed(lineage, "b") == [["input:args[0]", "one"]]


@pytest.mark.parametrize(
    "change", [lambda y: y.t_(), lambda y: y.unsqueeze_(0), lambda y: y.transpose_(0, 1)], ids=["t", "unsqueeze", "transpose"]
)
def test_change_of_shape_in_place_is_no_write(change: Callable[[Tensor], Any]) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x) * 1
        view = y[:]
        change(y)
        return m.b(view)

    assert fed(gradlineage.trace(Net(run, a=lin(), b=lin()), data()), "b") == [["a"]]


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "write",
    [
        lambda h, t: h[0].data.copy_(t[0]),
        lambda h, t: h[:1].copy_(t[:1]),
        lambda h, t: h.view(8)[3:5].fill_(t[0, 0]),
        lambda h, t: h.diagonal().copy_(t[0, :2]),
    ],
    ids=["data", "slice", "view", "diagonal"],
)
def test_partial_write_keeps_the_rest_in_every_mode(write: Callable[[Tensor, Tensor], Any], context: Callable[[], Any]) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).clone()
        write(h, m.b(x))
        return m.c(h)

    with context():
        lineage = gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin()), data())
    assert fed(lineage, "c") == [["a", "b"]]


@pytest.mark.parametrize("alias", [lambda h: h.detach(), lambda h: h.data], ids=["detach", "data"])
def test_write_that_autograd_does_not_notice_leaves_it_its_gradient(alias: Callable[[Tensor], Tensor]) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x) * m.b(x)
        alias(h).clamp_(min=0.1)
        return h

    (flow,) = gradlineage.trace(Net(run, a=lin(), b=lin()), data()).outputs
    assert [(s.label, s.differentiable) for s in flow.sources] == [("a", True), ("b", True)]


def test_foreach_writes_that_cover_drop_what_was_there() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h, k = m.a(x) * 1, m.a(x) * 1
        torch._foreach_copy_([h, k], [m.b(x), m.c(x)])
        return m.d(h) + m.e(k)

    with torch.no_grad():
        lineage = gradlineage.trace(Net(run, **{name: lin() for name in "abcde"}), data())
    assert fed(lineage, "d") == [["b"]]
    assert fed(lineage, "e") == [["c"]]


# -- what autograd drops ------------------------------------------------------------------------------------------------------------------


def test_index_and_detach_carry_lineage_without_gradient() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.fc(x)
        return m.emb(h.argmax(-1)) + m.probe(h.detach())

    lineage = gradlineage.trace(Net(run, fc=lin(), emb=nn.Embedding(4, 4), probe=lin()), data())
    for layer in ("emb", "probe"):
        (source,) = lineage[layer].inputs[0].sources
        assert (source.label, source.differentiable) == ("fc", False)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_answers_are_the_same_in_every_grad_mode(context: Callable[[], Any]) -> None:
    net = Net(lambda m, x: m.c(torch.relu(m.a(x)) + m.b(x)[..., [3, 2, 1, 0]]), a=lin(), b=lin(), c=lin())
    with context():
        lineage = gradlineage.trace(net, data())
    assert fed(lineage, "c") == [["a", "b"]]
    assert [j.label for j in lineage.joins] == [":add"]


def test_only_a_shape_is_no_source() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        p = m.probe(x)
        return m.head(m.fc(x).expand_as(p) + torch.zeros_like(p) + p.new_ones(4))

    lineage = gradlineage.trace(Net(run, probe=lin(), fc=lin(), head=lin()), data())
    assert fed(lineage, "head") == [["fc"]]


def test_memory_shared_with_numpy_is_followed_and_new_memory_is_unknown() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x).detach()
        return m.b(torch.from_numpy(y.numpy())) + m.c(torch.from_numpy(y.numpy() * 2)) + m.d(torch.as_tensor(y.numpy()))

    lineage = gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin(), d=lin()), data())
    assert fed(lineage, "b") == [["a"]]
    assert fed(lineage, "d") == [["a"]]
    (source,) = lineage["c"].inputs[0].sources
    assert source.kind == "unknown"
    assert source.reason
    assert "from_numpy" in source.reason or "numpy" in source.reason


# -- machinery ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_are_seen_inside(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    net = Net(lambda m, x: m.c(checkpoint(m.block, m.a(x), use_reentrant=reentrant)), a=lin(), block=nn.Sequential(lin(), lin()), c=lin())
    lineage = gradlineage.trace(net, data())
    assert fed(lineage, "block.0") == [["a"]]
    assert fed(lineage, "c") == [["block.1"]]


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_autograd_sees_through_a_function_whose_inside_is_hidden() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.b(_Double.apply(torch.relu(m.a(x)))), a=lin(), b=lin()), data())
    (source,) = lineage["b"].inputs[0].sources
    assert (source.label, source.ops, source.differentiable) == ("a", ("relu", "~double"), True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_scripted_function_is_followed_by_its_gradient() -> None:
    @torch.jit.script
    def scripted(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x) * y

    lineage = gradlineage.trace(Net(lambda m, x: m.c(scripted(m.a(x), m.b(x))), a=lin(), b=lin(), c=lin()), data())
    assert fed(lineage, "c") == [["a", "b"]]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_scripted_module_is_one_layer() -> None:
    net = Net(lambda m, x: m.b(m.s(m.a(x))), a=lin(), s=torch.jit.script(nn.Sequential(lin(), nn.Tanh())), b=lin())
    lineage = gradlineage.trace(net, data())
    assert [c.label for c in lineage.layers] == ["a", "s", "b"]
    assert fed(lineage, "b") == [["s"]]


def test_gradient_taken_inside_the_forward_runs_twice_and_says_so() -> None:
    runs = []

    def run(m: Any, x: Tensor) -> Tensor:
        runs.append(1)
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(m.b(torch.tanh(m.a(x))).sum(), x)
        return force

    lineage = gradlineage.trace(Net(run, a=lin(), b=lin()), data())
    assert len(runs) == 2
    assert "second time" in lineage.notes[0]
    assert lineage.outputs[0].sources


def test_torch_func_transforms_inside_the_forward() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        g = torch.func.grad(lambda v: (v * v).sum())(h)
        return m.b(g) + m.c(torch.func.vmap(lambda r: m.cell(r).tanh())(h))

    lineage = gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin(), cell=lin()), data())
    assert fed(lineage, "b") == [["a"]]
    assert fed(lineage, "c") == [["cell"]]
    assert fed(lineage, "cell") == [["a"]]


@pytest.mark.parametrize("grad", [True, False])
def test_vmap_keeps_lineage_with_and_without_gradient(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(Net(lambda m, x: m.b(torch.func.vmap(lambda r: r.sin() * 2)(m.a(x))), a=lin(), b=lin()), data())
    assert fed(lineage, "b") == [["a"]]


def test_generated_weights_are_hidden_inputs() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        weight = m.hyper(x).mean(0).expand(4, 4)
        return torch.func.functional_call(m.fc, {"weight": weight}, (x,))

    lineage = gradlineage.trace(Net(run, hyper=lin(), fc=lin()), data())
    assert [names(f) for f in lineage["fc"].hidden] == [["hyper"]]


def test_argument_that_is_only_passed_is_not_used() -> None:
    class Pick(nn.Module):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return x * 2 + other.shape[0]

    lineage = gradlineage.trace(Net(lambda m, x: m.pick(m.a(x), m.b(x)), a=lin(), b=lin(), pick=Pick()), data())
    assert [f.used for f in lineage["pick"].inputs] == [True, False]


def test_parametrized_layer_is_one_layer_with_its_parameters() -> None:
    net = Net(lambda m, x: m.b(m.fc(x)), fc=nn.utils.parametrizations.weight_norm(lin()), b=lin())
    lineage = gradlineage.trace(net, data())
    assert [c.label for c in lineage.layers] == ["fc", "b"]
    assert lineage["fc"].parameters[0] == 4 + 16 + 4


def test_users_hooks_show_as_operations_around_the_layer() -> None:
    net = Net(lambda m, x: m.b(m.a(x)), a=lin(), b=lin(), up=lin())
    net.a.register_forward_hook(lambda module, args, output: output + net.up(output))
    net.b.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    lineage = gradlineage.trace(net, data())
    assert fed(lineage, "up") == [["a"]]
    assert fed(lineage, "b") == [["a", "up"]]
    assert len(net.a._forward_hooks) == 1
    assert len(net.b._forward_pre_hooks) == 1


def test_shallow_copy_counts_as_the_original() -> None:
    net = Net(lambda m, x: m.b(torch.cat([copy.copy(m.a)(part) for part in x.chunk(2)])), a=lin(), b=lin())
    lineage = gradlineage.trace(net, data())
    assert [c.label for c in lineage.layers] == ["a[0]", "a[1]", "b"]


def test_modules_called_from_a_worker_thread_are_recorded() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        box: list[Tensor] = []
        worker = threading.Thread(target=lambda: box.append(m.b(h)))
        worker.start()
        worker.join()
        return m.c(box[0])

    lineage = gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin()), data())
    assert fed(lineage, "b") == [["a"]]
    assert fed(lineage, "c") == [["b"]]


def test_compiled_part_runs_as_written() -> None:
    net = Net(lambda m, x: m.b(m.block(x)), block=nn.Sequential(lin(), nn.ReLU()), b=lin())
    net.block.compile(backend="eager")
    lineage = gradlineage.trace(net, data())
    assert fed(lineage, "b") == [["block.1"]]


# -- nothing left behind ----------------------------------------------------------------------------------------------------------------------


def hook_counts(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_exception_is_the_users_own_with_a_note_and_nothing_stays() -> None:
    def fail(m: Any, x: Tensor) -> Tensor:
        raise ValueError("one at a time")

    net = Net(lambda m, x: m.bad(m.a(x)), a=lin(), bad=Net(fail))
    before = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ValueError, match="one at a time") as caught:
        gradlineage.trace(net, data())
    assert "while tracing Net, in call bad at " in caught.value.__notes__[0]
    assert sum(hook_counts(net)) == 0
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert not torch.overrides._get_current_function_mode_stack()
    assert gradlineage.trace(Net(lambda m, x: m.a(x), a=net.a), data())


@pytest.mark.parametrize("fails", [False, True])
def test_statistics_and_random_state_are_put_back(fails: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.drop(m.bn(m.sn(x)))
        m.count += 1
        if fails:
            raise ValueError
        return y

    net = Net(run, sn=nn.utils.parametrizations.spectral_norm(lin()), bn=nn.BatchNorm1d(4), drop=nn.Dropout())
    net.register_buffer("count", torch.zeros(()))
    net.train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    try:
        gradlineage.trace(net, data())
    except ValueError:
        assert fails
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_embedding_that_renormalises_its_weight_is_put_back() -> None:
    net = nn.Embedding(4, 4, max_norm=0.1)
    before = net.weight.detach().clone()
    gradlineage.trace(net, torch.tensor([0, 1]))
    assert torch.equal(before, net.weight)


def test_restoring_works_without_the_shadow_plane_too() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4)).train()
    with gradlineage.recording(net, shadow=False, restore=True):
        net(data())
    assert torch.equal(net[0].running_mean, torch.zeros(4))
    assert net[0].num_batches_tracked == 0


def test_random_state_is_put_back() -> None:
    net = Net(lambda m, x: m.drop(x), drop=nn.Dropout())
    x = data()
    before = torch.get_rng_state()
    gradlineage.trace(net.train(), x)
    assert torch.equal(before, torch.get_rng_state())


def test_trace_in_eval_mode_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradlineage.registry import Keeper

    kept: list[Any] = []
    original = Keeper.restore
    monkeypatch.setattr(Keeper, "restore", lambda self: (kept.extend(self.saved), original(self)))
    gradlineage.trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval(), data(1, 3, 4, 4))
    assert not kept


def test_output_is_the_same_bit_for_bit() -> None:
    seen: list[Tensor] = []
    net = Net(
        lambda m, x: seen.append(m.seq(x)) or seen[-1], seq=nn.Sequential(lin(), nn.Identity(), nn.ReLU(inplace=True), nn.Dropout(), lin())
    )
    x = data()
    torch.manual_seed(3)
    net(x)
    torch.manual_seed(3)
    gradlineage.trace(net, x)
    assert torch.equal(*seen)


def test_recording_leaves_the_training_step_as_it_is() -> None:
    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(0)
    plain = Net(lambda m, x: m.b(torch.relu(m.idle(m.a(x)))), a=lin(), idle=nn.Identity(), b=lin())
    traced = copy.deepcopy(plain)
    x = data()
    sgd = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (plain, traced)]
    for _ in range(2):
        step(plain, sgd[0], x)
    with gradlineage.recording(traced) as rec:
        for _ in range(2):
            loss = step(traced, sgd[1], x)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), traced.parameters(), strict=True))
    assert names(rec.lineage(loss).outputs[0]) == ["b[1]"]
    assert names(rec.lineage()["a", 1].inputs[0]) == ["input:args[0]"]


def test_tensor_prepared_before_the_first_call_is_that_input_ever_after() -> None:
    net = Net(lambda m, ids: m.emb(ids), emb=nn.Embedding(9, 4))
    prompt = torch.tensor([[1, 2]])
    with gradlineage.recording(net, drop_saved=True) as rec:
        ids = prompt.clone()
        for _ in range(2):
            ids = torch.cat([prompt, net(ids).argmax(-1)[:, -1:]], 1)
    assert fed(rec.lineage(), ("emb", 0)) == [["input:args[0]"]]
    assert fed(rec.lineage(), ("emb", 1)) == [["input:args[0]", "emb[0]"]]


def test_several_models_are_recorded_under_their_names() -> None:
    gen = Net(lambda m, z: torch.tanh(m.fc(z)), fc=lin())
    critic = Net(lambda m, x: m.fc(x), fc=lin())
    with gradlineage.recording({"gen": gen, "critic": critic}) as rec:
        loss = critic(gen(data())).mean()
    lineage = rec.lineage(loss)
    assert fed(lineage, "critic.fc") == [["gen.fc"]]
    assert names(lineage.outputs[0]) == ["critic.fc"]
    assert lineage.model == "gen=Net, critic=Net"


def test_pure_walk_names_what_autograd_knows_and_calls_the_rest_unknown() -> None:
    net = Net(lambda m, x: m.c(torch.relu(m.a(x)) + m.b(x)) + m.d(m.a(x).detach()), a=lin(), b=lin(), c=lin(), d=lin())
    with gradlineage.recording(net, shadow=False) as rec:
        net(data())
    lineage = rec.lineage()
    assert fed(lineage, "c") == [["a[0]", "b"]]
    assert [s.kind for s in lineage["d"].inputs[0].sources] == ["unknown"]
    assert lineage["c"].inputs[0].links[0].ops == ()
    assert [j.label for j in lineage.joins] == [":~add[0]", ":~add[1]"]


def test_guarded_gradient_inside_the_forward_takes_its_usual_branch() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        try:
            (g,) = torch.autograd.grad(h.pow(2).sum(), h)
        except Exception:
            g = m.b(x)
        return m.c(g)

    lineage = gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin()), data())
    assert [c.label for c in lineage.layers] == ["a", "c"]
    assert fed(lineage, "c") == [["a"]]


def test_gradient_by_a_tensor_that_was_handed_through() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        y = m.idle(h)
        return torch.autograd.grad(m.b(h).sum(), y)[0]

    net = Net(run, a=lin(), b=lin(), idle=nn.Identity())
    net(data())
    assert any("once more" in note for note in gradlineage.trace(net, data()).notes)


def test_modules_copied_and_pickled_during_a_recording_take_nothing_along() -> None:
    net = Net(lambda m, x: m.a(x), a=lin())
    with gradlineage.recording(net):
        copied = copy.deepcopy(net.a)
        pickled = pickle.dumps(net.a)
    assert pickle.loads(pickle.dumps(copied))(data()).shape == (2, 4)
    assert pickle.loads(pickled)(data()).shape == (2, 4)


def test_replaced_buffer_is_put_back() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.ema = m.ema * 0.9 + x.mean(0)
        return m.a(x + m.ema)

    net = Net(run, a=lin())
    net.register_buffer("ema", torch.ones(4))
    before = net.ema
    gradlineage.trace(net, data())
    assert net.ema is before


def test_containers_without_end_are_entered_once() -> None:
    def run(m: Any, x: Tensor) -> Any:
        result: list[Any] = [m.a(x)]
        result.append(result)
        return result

    net = Net(run, a=lin())
    net.__dict__["config"] = {}
    net.__dict__["config"]["self"] = net.__dict__["config"]
    assert out(gradlineage.trace(net, data())) == [["a"]]


# -- bad input ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, 3, nn.Linear, lambda x: x])
def test_something_that_is_no_module_is_refused_by_name(model: Any) -> None:
    with pytest.raises(gradlineage.TraceError, match=r"trace\(\) needs a torch.nn.Module"):
        gradlineage.trace(model, data())


def test_a_model_may_have_arguments_of_any_name() -> None:
    class Odd(nn.Module):
        def forward(self, model: Tensor, *, shadow: Tensor, args: Tensor) -> Tensor:
            return model + shadow + args

    lineage = gradlineage.trace(Odd(), model=data(), shadow=data(), args=data())
    assert [f.name for f in lineage.inputs] == ["model", "shadow", "args"]


@pytest.mark.parametrize(
    "ask", [lambda x: x[3], lambda x: x[("a",)], lambda x: x.find(type=3), lambda x: x.collapse(depth="a"), lambda x: x["nope"]]
)
def test_odd_questions_are_refused_with_our_own_error(ask: Callable[[Lineage], Any]) -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.a(x), a=lin()), data())
    with pytest.raises(gradlineage.LineageError):
        ask(lineage)


def test_output_without_tensors_is_said() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: [3], a=lin()), data())
    assert lineage.outputs == ()
    assert "no tensor" in lineage.notes[0]


def test_recording_opens_once() -> None:
    rec = gradlineage.recording(lin())
    with rec:
        pass
    with pytest.raises(gradlineage.TraceError, match="opened once"), rec:
        pass


@pytest.mark.parametrize("count", [300_000])
def test_chain_of_many_operations(count: int) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        for _ in range(count):
            h = h + 1
        return m.b(h)

    lineage = gradlineage.trace(Net(run, a=lin(), b=lin()), data())
    (source,) = lineage["b"].inputs[0].sources
    assert source.label == "a"
    assert len(source.ops) == count


def test_sixty_stacked_diamonds() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h, s = m.a(x), m.s(x)
        for i in range(60):
            h = h + torch.sin(h)
            if i == 30:
                h = h + s
        return m.b(h)

    assert fed(gradlineage.trace(Net(run, a=lin(), s=lin(), b=lin()), data()), "b") == [["a", "s"]]


# -- breaks -------------------------------------------------------------------------------------------------------------------------------------


def broken(lineage: Lineage) -> list[tuple[str, list[str], list[str]]]:
    return [(b.op, [s.label for s in b.before], list(b.after)) for b in lineage.breaks]


def test_breaks_name_the_operation_what_it_cuts_off_and_what_it_starves() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.fc(x)
        code = m.score(h).argmax(-1)
        return m.head(h.detach() * 2) + m.emb(code) + m.last(torch.relu(h).long().float())

    lineage = gradlineage.trace(Net(run, fc=lin(), score=lin(), head=lin(), emb=nn.Embedding(4, 4), last=lin()), data())
    assert broken(lineage) == [("argmax", ["score"], ["emb"]), ("detach", ["fc"], ["head"]), ("long", ["fc"], ["last"])]
    assert all("test_trace.py:" in b.where for b in lineage.breaks)


def test_no_grad_region_is_one_break() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            f = m.backbone(m.stem(x)) * 2
        return m.head(f)

    lineage = gradlineage.trace(Net(run, stem=lin(), backbone=nn.Sequential(lin(), nn.ReLU(), lin()), head=lin()), data())
    (one,) = lineage.breaks
    assert one.op == "no_grad"
    assert "head" in one.after
    assert "stem.weight" in [s.label for s in one.before]


def test_layer_that_runs_without_gradient_is_a_break() -> None:
    class Frozen(nn.Module):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    lineage = gradlineage.trace(Net(lambda m, x: m.b(m.norm(m.a(x))), a=lin(), norm=Frozen(), b=lin()), data())
    assert broken(lineage) == [("no_grad", ["a"], ["b"])]


def test_pass_without_gradient_has_no_breaks() -> None:
    net = Net(lambda m, x: m.b(m.a(x).argmax(-1)), a=lin(), b=nn.Embedding(4, 4))
    with torch.no_grad():
        assert gradlineage.trace(net, data()).breaks == ()
    assert gradlineage.trace(net.requires_grad_(False), data()).breaks == ()


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return y[y > 0]


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_step_that_needs_values_is_named_where_there_are_none(kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Sequential(nn.Linear(2, 2), Picks())
    line = Picks.forward.__code__.co_firstlineno + 2
    with pytest.raises(Exception) as caught, FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else torch.device("meta"):
        gradlineage.trace(model.to("meta") if kind == "meta" else model, torch.ones(1, 2))
    notes = caught.value.__notes__
    assert notes[0] == f"while tracing Sequential, in call 1 at tests/test_trace.py:{line}"
    assert f"test_trace.py:{line} needs the values of tensors" in notes[1] and notes[1].endswith("trace with real inputs")


def test_failure_in_the_root_names_its_line_and_one_in_a_layer_of_torch_that_of_its_call() -> None:
    class Root(nn.Module):
        def __init__(self, wrong: int) -> None:
            super().__init__()
            self.fc, self.wrong = nn.Linear(wrong, 2), wrong

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return h.view(7)

    line = Root.forward.__code__.co_firstlineno
    for wrong, at, label in ((2, line + 2, "Root"), (3, line + 1, "fc")):
        with pytest.raises(RuntimeError) as caught:
            gradlineage.trace(Root(wrong), torch.ones(1, 2))
        assert caught.value.__notes__ == [f"while tracing Root, in call {label} at tests/test_trace.py:{at}"]
