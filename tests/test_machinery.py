# mypy: disable-error-code="no-any-return,no-untyped-call,attr-defined,arg-type,call-overload"
"""Lineage through torch's machinery: control-flow operators, wrapper subclasses, transforms, distributed wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradlineage
from tests.nets import Net, data, fed, lin, names

grad_modes = pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])


def traced(grad: bool, net: nn.Module, *args: Any) -> gradlineage.Lineage:
    with torch.set_grad_enabled(grad):
        return gradlineage.trace(net, *args)


# -- control-flow operators ----------------------------------------------------------------------------------------------------------------


@grad_modes
def test_cond_is_followed_into_the_branch_that_ran_and_its_closure(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h, c = m.a(x), m.c(x)
        return m.b(torch.cond(h.sum() < 1e9, lambda t: m.inner(t) * c, lambda t: t - 1, (h,)))

    lineage = traced(grad, Net(run, a=lin(), b=lin(), c=lin(), inner=lin()), data())
    assert fed(lineage, "inner") == [["a"]]
    assert fed(lineage, "b") == [["a", "inner", "c"]]  # the condition is an operand too


@grad_modes
def test_while_loop_is_followed_turn_by_turn(grad: bool) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, m.cell(h)), (torch.tensor(0), m.a(x)))[1])

    lineage = traced(grad, Net(run, a=lin(), b=lin(), cell=lin()), data())
    assert fed(lineage, "b") == [["cell[1]"]]


@grad_modes
def test_scan_takes_its_closure_along(grad: bool) -> None:
    from torch._higher_order_ops.scan import scan

    def run(m: Any, x: Tensor) -> Tensor:
        h, c = m.a(x), m.c(x)[0]
        return m.b(scan(lambda k, v: (k + v + c, k * v), h[0].clone(), h, dim=0)[1])

    assert fed(traced(grad, Net(run, a=lin(), b=lin(), c=lin()), data()), "b") == [["a", "c"]]


def test_flex_attention_takes_the_closure_of_its_score_function() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x)[None, None] for part in (m.q, m.k, m.v))
        bias = m.bias(x)
        return m.out(flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[i, 0])[0, 0])

    wide = {name: nn.Linear(4, 16) for name in "qkv"}
    with pytest.warns(UserWarning, match="without torch.compile"):
        lineage = traced(False, Net(run, **wide, bias=lin(), out=nn.Linear(16, 4)), data())
    assert fed(lineage, "out") == [["q", "k", "v", "bias"]]


# -- kinds of tensors ----------------------------------------------------------------------------------------------------------------------


@grad_modes
def test_jagged_nested_tensors(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.nested.as_nested_tensor([m.a(x), m.c(x)[:1]], layout=torch.jagged)).to_padded_tensor(0.0)

    lineage = traced(grad, Net(run, a=lin(), b=lin(), c=lin()), data())
    assert fed(lineage, "b") == [["a", "c"]]
    assert [s.label for s in lineage.outputs[0].sources] == ["b"]


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@grad_modes
def test_strided_nested_tensors(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([m.a(x)[:1], m.b(x)]), 0.0)

    (flow,) = traced(grad, Net(run, a=lin(), b=lin()), data()).outputs
    assert names(flow) == ["a", "b"]


@grad_modes
def test_sparse_tensors(grad: bool) -> None:
    lineage = traced(grad, Net(lambda m, x: m.b(torch.sparse.mm(m.a(x).to_sparse(), m.c(torch.eye(4)))), a=lin(), b=lin(), c=lin()), data())
    assert fed(lineage, "b") == [["a", "c"]]


@grad_modes
def test_complex_numbers(grad: bool) -> None:
    lineage = traced(
        grad,
        Net(lambda m, x: m.b(torch.fft.ifft(torch.fft.fft(m.a(x)) * torch.complex(x, m.c(x))).real), a=lin(), b=lin(), c=lin()),
        data(),
    )
    assert fed(lineage, "b") == [["a", "input:args[0]", "c"]]


@grad_modes
def test_packed_sequences(grad: bool) -> None:
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    def run(m: Any, x: Tensor) -> Tensor:
        out, _ = m.rnn(pack_padded_sequence(m.a(x), [3, 2], batch_first=True))
        return m.b(pad_packed_sequence(out, batch_first=True)[0])

    lineage = traced(grad, Net(run, a=lin(), rnn=nn.GRU(4, 4, batch_first=True), b=lin()), data(2, 3, 4))
    assert fed(lineage, "rnn") == [["a"], ["a"]]
    assert {s.path for s in lineage["b"].inputs[0].sources} == {"rnn"}


@grad_modes
def test_parameter_made_from_a_tensor_keeps_its_source_without_gradient(grad: bool) -> None:
    lineage = traced(grad, Net(lambda m, x: m.b(nn.Parameter(m.a(x))), a=lin(), b=lin()), data())
    (source,) = lineage["b"].inputs[0].sources
    assert (source.label, source.differentiable) == ("a", False)


# -- several tensors at once -----------------------------------------------------------------------------------------------------------------


@grad_modes
def test_functions_on_several_tensors_relate_slot_to_slot(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        first, second = torch._foreach_add([m.a(x), m.b(x)], [m.c(x), x])
        left, right = torch.broadcast_tensors(m.a(x), m.b(x)[:1])
        return m.d(first) + m.e(second) + m.f(left) + m.g(right)

    lineage = traced(grad, Net(run, **{k: lin() for k in "abcdefg"}), data())
    assert fed(lineage, "d") == [["a[0]", "c"]]
    assert fed(lineage, "e") == [["b[0]", "input:args[0]"]]
    assert fed(lineage, "f") == [["a[1]"]]
    assert fed(lineage, "g") == [["b[1]"]]


# -- unseen writes and memory ------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_write_by_a_script_without_gradient_is_unknown_beside_what_was_there() -> None:
    @torch.jit.script
    def bump(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x) * 1
        bump(h, m.c(x))
        return m.b(h)

    (known, unknown) = traced(False, Net(run, a=lin(), b=lin(), c=lin()), data())["b"].inputs[0].sources
    assert known.label == "a"
    assert unknown.reason is not None
    assert unknown.reason.startswith("changed in place")


def test_memory_that_nobody_was_seen_to_fill_is_unknown_and_filled_memory_is_not() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        raw = torch.empty(2, 4)
        filled = torch.empty(2, 4)
        filled[:1], filled[1:] = m.a(x)[:1], m.c(x)[:1]
        return m.b(raw) + m.d(filled)

    lineage = traced(False, Net(run, a=lin(), b=lin(), c=lin(), d=lin()), data())
    assert [s.kind for s in lineage["b"].inputs[0].sources] == ["unknown"]
    assert fed(lineage, "d") == [["a", "c"]]


@grad_modes
def test_data_can_be_pointed_elsewhere(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).detach()
        h.data = m.b(x)
        return m.c(h)

    assert fed(traced(grad, Net(run, a=lin(), b=lin(), c=lin()), data()), "c") == [["b"]]


# -- lazy modules, autocast, state ----------------------------------------------------------------------------------------------------------------


def test_lazy_layer_is_initialised_once_and_keeps_its_values() -> None:
    net = Net(lambda m, x: m.b(m.a(x)), a=nn.LazyLinear(4), b=lin())
    assert fed(gradlineage.trace(net, data()), "b") == [["a"]]
    weight = net.a.weight.detach().clone()
    assert gradlineage.trace(net, data())["a"].parameters == (20, 20)
    assert torch.equal(weight, net.a.weight)


def test_autocast_casts_are_seen_through() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.b(m.a(x))

    lineage = gradlineage.trace(Net(run, a=lin(), b=lin()), data())
    assert fed(lineage, "b") == [["a"]]
    assert lineage["b"].inputs[0].dtype == "bfloat16"


def test_state_of_an_earlier_pass_is_unknown_and_says_so() -> None:
    net = Net(lambda m, x: m.cell(x, m.state), cell=nn.RNNCell(4, 4))
    net.state = net.cell(data())
    (source,) = gradlineage.trace(net, data())["cell"].inputs[1].sources
    assert source.kind == "unknown"
    assert source.reason is not None
    assert source.reason.startswith("computed before this recording")


# -- distributed wrappers, one process -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def two_branches() -> nn.Module:
    return Net(lambda m, x: m.c(torch.relu(m.a(x)) + m.b(x)), a=lin(), b=lin(), c=lin())


@grad_modes
def test_distributed_data_parallel(grad: bool, process_group: None) -> None:
    lineage = traced(grad, nn.parallel.DistributedDataParallel(two_branches()), data())
    assert fed(lineage, "module.c") == [["module.a", "module.b"]]
    assert [names(f) for f in lineage.outputs] == [["module.c"]]


@pytest.mark.filterwarnings("ignore")
@grad_modes
def test_fully_sharded_modules(grad: bool, process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    net = two_branches()
    for layer in (net.a, net.b, net.c):
        fully_shard(layer)
    fully_shard(net)
    assert fed(traced(grad, net, data()), "c") == [["a", "b"]]


@pytest.mark.filterwarnings("ignore")
@grad_modes
def test_tensor_parallel_layers(grad: bool, process_group: None) -> None:
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = parallelize_module(
        nn.Sequential(lin(), nn.ReLU(), lin()), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    lineage = traced(grad, net, data())
    assert [fed(lineage, k) for k in "012"] == [[["input:input"]], [["0"]], [["1"]]]


@pytest.mark.filterwarnings("ignore")
def test_distributed_tensors_made_and_unmade_in_the_forward(process_group: None) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    lineage = traced(True, Net(lambda m, x: m.b((DTensor.from_local(m.a(x), mesh, [Shard(0)]) * 2).to_local()), a=lin(), b=lin()), data())
    assert fed(lineage, "b") == [["a"]]


# -- custom Functions ----------------------------------------------------------------------------------------------------------------------------


def differentiable(lineage: gradlineage.Lineage, key: str) -> dict[str, bool]:
    return {s.label: s.differentiable for flow in lineage[key].inputs for s in flow.sources}


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, gate: Tensor) -> Tensor:
        return x * gate * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 1, b * 2

    @staticmethod
    def backward(ctx: Any, da: Tensor, db: Tensor) -> tuple[Tensor, Tensor]:
        return da, db


def test_straight_through_function_passes_gradient_over_a_comparison() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.b(_StraightThrough.apply(m.a(x))), a=lin(), b=lin()), data())
    assert differentiable(lineage, "b") == {"a": True}
    assert lineage.breaks == ()


def test_function_whose_backward_returns_none_for_an_operand_breaks_its_gradient() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.b(_HalfGradient.apply(m.a(x), 2.0, m.g(x))), a=lin(), g=lin(), b=lin()), data())
    assert differentiable(lineage, "b") == {"a": True, "g": False}
    assert [[s.label for s in b.before] for b in lineage.breaks] == [["g"]]


def test_outputs_of_one_function_keep_their_own_sources() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        one, two = _Pair.apply(m.a(x), m.b(x))
        return m.c(one) + m.d(two)

    lineage = gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin(), d=lin()), data())
    assert differentiable(lineage, "c") == {"a": True}
    assert differentiable(lineage, "d") == {"b": True}


def test_reentrant_checkpoint_loses_no_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    net = Net(lambda m, x: m.c(checkpoint(m.block, m.a(x), use_reentrant=True)), a=lin(), block=nn.Sequential(lin(), lin()), c=lin())
    lineage = gradlineage.trace(net, data())
    assert differentiable(lineage, "block.0") == {"a": True}
    assert differentiable(lineage, "c") == {"block.1": True}
    assert lineage.breaks == ()


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_function_that_writes_its_argument() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.b(_InPlace.apply(m.a(x) * 1)), a=lin(), b=lin()), data())
    assert differentiable(lineage, "b") == {"a": True}


@pytest.mark.parametrize(
    "inside", [lambda m, h: torch.func.vmap(lambda r: r.relu())(h), lambda m, h: torch.func.vmap(m.cell)(h)], ids=["relu", "layer"]
)
def test_gradient_flows_through_vmap(inside: Any) -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.b(inside(m, m.a(x))), a=lin(), b=lin(), cell=lin()), data())
    assert all(differentiable(lineage, "b").values())
    assert lineage.breaks == ()


@pytest.mark.filterwarnings("ignore")  # torch warns of its own parts
@grad_modes
def test_function_that_linearize_returns_keeps_what_it_captured(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.b(x)
        _, tangent = torch.func.linearize(lambda u: u * h, m.a(x))
        return tangent(m.c(x))

    module = traced(grad, Net(run, a=lin(), b=lin(), c=lin()), data()).layers[-1]
    assert [names(f) for f in module.inputs] == [["c"]]
    assert [names(f) for f in module.hidden] == [["b"]]


def test_layers_in_a_thread_pool_belong_to_the_call_that_waits_for_them() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def run(m: Any, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.cat(list(pool.map(lambda layer: layer(x), (m.a, m.b))))

    lineage = gradlineage.trace(Net(run, a=lin(), b=lin()), data())
    assert lineage.calls[0].kind == "container"
    assert [names(f) for f in lineage.outputs] == [["a", "b"]]
    assert [names(f) for f in lineage.inputs] == [["input:args[0]"]]


class _Box:
    """A class around a tensor that is none itself."""

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {})))


@grad_modes
def test_wrapper_that_is_no_tensor(grad: bool) -> None:
    lineage = traced(grad, Net(lambda m, x: m.c(torch.add(_Box(m.a(x)), m.b(x)).inner), a=lin(), b=lin(), c=lin()), data())
    assert fed(lineage, "c") == [["a", "b"]]


# -- the other reasons for an unknown --------------------------------------------------------------------------------------------------------------


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * mask.numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_operand_without_gradient_of_a_hidden_function_is_unknown_beside_the_others() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.b(_Masked.apply(m.a(x), m.c(x).detach())), a=lin(), b=lin(), c=lin()), data())
    known, unknown = lineage["b"].inputs[0].sources
    assert known.label == "a"
    assert unknown.reason is not None
    assert unknown.reason.startswith("an operand without gradient")


def test_gradient_left_by_a_backward_is_unknown_and_says_so() -> None:
    net = Net(lambda m, x: m.b(m.a.weight.grad), a=lin(), b=lin())
    net.a(data()).sum().backward()
    (source,) = gradlineage.trace(net, data())["b"].inputs[0].sources
    assert source.reason is not None
    assert source.reason.startswith("a gradient that a backward pass left")


# -- two processes -----------------------------------------------------------------------------------------------------------------------------------


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    with gradlineage.recording(net) as rec:
        loss = net(torch.randn(2, 4)).sum()
        loss.backward()
    lineage = rec.lineage(loss)
    assert [s.label for s in lineage.outputs[0].sources] == ["module.2"]
    assert [s.label for s in lineage["module.2"].inputs[0].sources] == ["module.1"]
    assert net.module[0].weight.grad is not None
    dist.destroy_process_group()


def test_two_processes_of_distributed_data_parallel(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)


class Shifted(nn.Module):
    """Takes its second argument by keyword as well."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.fc(x) if shift is None else self.fc(x) + shift


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))])
def test_compiled_script_is_one_layer(compiled: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 4))
    lineage = gradlineage.trace(model, torch.ones(2, 4))
    assert [c.label for c in lineage.layers] == ["0", "1", "2"]
    assert [[s.label for s in c.inputs[0].sources] for c in lineage.layers] == [["input:input"], ["0"], ["1"]]


class Calls(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.block = nn.Linear(4, 4), nn.Linear(4, 4), block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.a(x), shift=self.b(x))


def instance_forward() -> nn.Module:
    block = Shifted()
    block.forward = lambda *args, **kwargs: Shifted.forward(block, *args, **kwargs)  # type: ignore[method-assign]
    return block


def with_prehook() -> nn.Module:
    block = Shifted()
    block.register_forward_pre_hook(lambda m, args, kwargs: (args, {"shift": kwargs["shift"] * 2}), with_kwargs=True)
    return block


@pytest.mark.parametrize(("make", "ops"), [(Shifted, ()), (instance_forward, ()), (with_prehook, ("mul",))])
def test_arguments_by_keyword_are_inputs_however_the_forward_is_reached(make: Any, ops: tuple[str, ...]) -> None:
    call = gradlineage.trace(Calls(make()), torch.ones(2, 4))["block"]
    assert [(f.name.removeprefix("kwargs"), [s.label for s in f.sources]) for f in call.inputs][1][1] == ["b"]
    assert call.inputs[0].sources[0].label == "a" and call.inputs[1].links[0].ops == ops


def test_hooks_of_others_on_all_modules_run_after_what_is_noted() -> None:
    """A global hook of the user's that changes outputs shows as an operation behind the layer."""
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, output: output * 2 if isinstance(m, nn.Linear) else None)
    try:
        lineage = gradlineage.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4))
    finally:
        handle.remove()
    assert lineage["1"].inputs[0].links[0].ops == ("mul",) and lineage["1"].inputs[0].links[0].label == "0"
