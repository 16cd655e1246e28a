"""The tracker against answers written by hand: what it is trusted with elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlineage
from tests.agreement import disagreements
from tests.tracker import track


class Net(nn.Module):
    """Linear layers ``a``, ``b`` and ``head``, a table, and a few layers that hand through or write; ``run`` says what becomes of them."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.idle, self.relu, self.split = nn.Identity(), nn.ReLU(inplace=True), nn.Unflatten(1, (2, 2))
        self.register_buffer("table", torch.randn(3, 4))
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def _written(n: Any, x: Tensor, *, index: Any) -> Any:
    y = n.a(x)
    y[index] = n.b(x)[index]
    return n.head(y)


def _relu_over(n: Any, x: Tensor, *, part: slice) -> Any:
    y = n.a(x)
    n.relu(y[:, part])
    return n.head(y)


def _seen_later(n: Any, x: Tensor) -> Any:
    y = n.a(x)
    view = y.view(-1, 4)
    y += n.b(x)
    return n.head(view)


def _handed_through(n: Any, x: Tensor) -> Any:
    y = n.a(x)
    n.b(n.idle(y))
    return n.head(y)


def _out(n: Any, x: Tensor) -> Any:
    result = n.a(x).detach()
    torch.add(n.b(x).detach(), 1.0, out=result)
    return n.head(result)


_ANSWERS: dict[str, tuple[Callable[[Any, Tensor], Any], set[str]]] = {
    "an index is a source": (lambda n, x: n.head(n.table[n.a(x).argmax(1).clamp(max=2)]), {"a", "buffer:table"}),
    "a condition is a source": (lambda n, x: n.head(torch.where(n.a(x) > 0, n.b(x), 0.0)), {"a", "b"}),
    "detached values are still values": (lambda n, x: n.head(n.a(x).detach()), {"a"}),
    "a shape is no source": (lambda n, x: n.head(torch.ones_like(n.a(x)) * n.b(x)), {"b"}),
    "a number that went through Python is a constant": (lambda n, x: n.head(torch.full((2, 4), n.a(x).max().item())), {"const"}),
    "a number adds nothing to a tensor": (lambda n, x: n.head(n.a(x) * n.b(x).max().item()), {"a"}),
    "memory shared with numpy is known": (lambda n, x: n.head(torch.from_numpy(n.a(x).detach().numpy())), {"a"}),
    "weights used by a function are parameters": (
        lambda n, x: n.head(nn.functional.linear(x, n.a.weight)), {"input:0", "param:a.weight"},
    ),
    "a part written adds": (lambda n, x: _written(n, x, index=(slice(None), slice(2))), {"a", "b"}),
    "the whole written replaces": (lambda n, x: _written(n, x, index=...), {"b"}),
    "out= replaces": (_out, {"b"}),
    "views see what was written later": (_seen_later, {"a", "b"}),
    "a layer that writes all of it is the producer": (lambda n, x: _relu_over(n, x, part=slice(None)), {"relu"}),
    "a layer that writes a part of it is one producer of two": (lambda n, x: _relu_over(n, x, part=slice(2)), {"a", "relu"}),
    "a layer that hands its input through is the producer for its reader": (lambda n, x: n.head(n.idle(n.a(x))), {"idle"}),
    "and for nobody else": (_handed_through, {"a"}),
    "a layer that returns a view is its producer": (lambda n, x: n.head(n.split(n.a(x)).flatten(1)), {"split"}),
    "vmap is seen through": (lambda n, x: n.head(torch.func.vmap(torch.sin)(n.a(x))), {"a"}),
}  # fmt: skip


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("rule", _ANSWERS)
def test_the_rule_holds(rule: str, grad: bool) -> None:
    run, expected = _ANSWERS[rule]
    with torch.set_grad_enabled(grad):
        assert track(Net(run), torch.randn(2, 4)).calls["head"] == [expected]


def test_slots_of_a_foreach_kernel_do_not_mix() -> None:
    answer = track(Net(lambda n, x: torch._foreach_add([n.a(x), n.b(x)], 1.0)), torch.randn(2, 4))
    assert answer.outputs == [{"a"}, {"b"}]


def test_a_block_that_skipped_its_children_is_a_layer() -> None:
    net = nn.Sequential(Net(lambda n, x: x @ n.a.weight), nn.Linear(4, 2))
    assert track(net, torch.randn(2, 4)).calls == {"0": [{"input:0"}], "1": [{"0"}]}


def test_hooks_are_gone_after_a_forward_that_raises() -> None:
    net = Net(lambda n, x: n.head(n.a(x)[:, :2]))
    with pytest.raises(RuntimeError):
        track(net, torch.randn(2, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_one_edge_that_differs_is_named() -> None:
    x = torch.randn(2, 4)
    lineage = gradlineage.trace(Net(lambda n, x: n.head(n.a(x) + n.b(x))), x)
    answer = track(Net(lambda n, x: n.head(n.a(x) + n.idle(x))), x)
    assert disagreements(lineage, answer) == [
        "b: a layer call for one side only", "idle: a layer call for one side only", "head[0]: missing ['idle'], extra ['b']",
    ]  # fmt: skip
