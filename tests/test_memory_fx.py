"""Tensors that share memory, on small models: what `gradlineage.trace` says must be what torch.fx's graph of the same model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlineage
from tests.test_zoo_fx import differences, report
from tests.truth_fx import CONSTANT, Truth, layer_calls, truth


class Halves(nn.Module):
    """Two views of memory that it made, and wrote to where asked."""

    def __init__(self, write: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.weight, self.write = nn.Parameter(torch.ones(4)), write

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * self.weight
        if self.write is not None:
            self.write(y)
        return y[:2], y[2:]


class Shift(nn.Module):
    """Changes its argument, and returns what is asked of it."""

    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, x: Tensor) -> Any:
        x += 1
        return self.give(x)


class Net(nn.Module):
    """Layers by name and a function ``(net, x)`` as forward. ``probe`` is called with every tensor whose sources matter."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run, self.probe = run, nn.Linear(4, 4)
        self.fc, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.probe(tensor) for tensor in self.run(self, x)]


def flattened(net: Any, x: Tensor) -> Tensor:
    flat: Tensor = net.flat(net.fc(x).view(4, 2, 2))
    return flat


def flat_then_added(net: Any, x: Tensor) -> list[Tensor]:
    y = flattened(net, x)
    y += net.other(x)
    return [y]


def flat_then_set(net: Any, x: Tensor) -> list[Tensor]:
    y = flattened(net, x)
    y[:, 0] = net.other(x)[:, 0]
    return [y]


def identity_then_set(net: Any, x: Tensor) -> list[Tensor]:
    y = net.same(net.fc(x))
    y[:, 0] = 0
    return [y]


def written_under_the_first_name(net: Any, x: Tensor) -> list[Tensor]:
    a = net.fc(x)
    skip = net.same(a)
    a += net.other(x)
    return [skip, a]


def activated_under_the_first_name(net: Any, x: Tensor) -> list[Tensor]:
    a = net.fc(x)
    skip = net.same(a)
    net.act(a)
    return [skip, a]


def old_name_of_an_activated_tensor(net: Any, x: Tensor) -> list[Tensor]:
    a = net.fc(x)
    before = a + 0
    return [net.act(a), a, before]


def row_of_new_memory(net: Any, x: Tensor) -> list[Tensor]:
    memory = torch.zeros(4, 4)
    row = memory[0]
    memory[1] = net.fc(x)[1]
    return [row, memory]


def overwritten(net: Any, x: Tensor) -> list[Tensor]:
    a = net.fc(x)
    a[:] = net.other(x)
    return [a]


def one_half_changed(net: Any, x: Tensor) -> list[Tensor]:
    first, _ = net.halves(x)
    return [torch.relu_(first)]


def both_halves(net: Any, x: Tensor) -> list[Tensor]:
    return list(net.halves(x))


def argument_of_shift(net: Any, x: Tensor) -> list[Tensor]:
    a = net.fc(x)
    net.shift(a)
    return [a]


def functional(net: Any, x: Tensor) -> list[Tensor]:
    a = net.fc(x)
    F.relu(a, inplace=True)
    return [a, F.hardtanh_(net.other(x))]


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], dict[str, nn.Module]]]] = {
    "sum into what Flatten returned": (flat_then_added, lambda: {"flat": nn.Flatten()}),
    "write into a part of what Flatten returned": (flat_then_set, lambda: {"flat": nn.Flatten()}),
    "write into a part of what Identity returned": (identity_then_set, lambda: {"same": nn.Identity()}),
    "sum into what went through Identity": (written_under_the_first_name, lambda: {"same": nn.Identity()}),
    "activation of what went through Identity": (activated_under_the_first_name, lambda: {"same": nn.Identity(), "act": nn.ReLU(True)}),
    "old name of an activated tensor": (old_name_of_an_activated_tensor, lambda: {"act": nn.ReLU(True)}),
    "write into a part of new memory": (row_of_new_memory, dict),
    "write over a whole tensor": (overwritten, dict),
    "activation of one of two views": (one_half_changed, lambda: {"halves": Halves()}),
    "two views": (both_halves, lambda: {"halves": Halves()}),
    "two views of what was written to": (both_halves, lambda: {"halves": Halves(torch.relu_)}),
    "argument changed, returned": (argument_of_shift, lambda: {"shift": Shift(lambda x: x)}),
    "argument changed, returned with a view": (argument_of_shift, lambda: {"shift": Shift(lambda x: (x, x[:, :2]))}),
    "argument changed, not returned": (argument_of_shift, lambda: {"shift": Shift(lambda x: x.sum())}),
    "functional activations": (functional, dict),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("case", CASES)
def test_shared_memory_is_followed(case: str, grad: bool) -> None:
    run, layers = CASES[case]
    model = Net(run, **layers()).eval()
    inputs = {"x": torch.rand(4, 4)}
    expected = truth(model, inputs, layer_calls(model, inputs))
    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(model, *inputs.values())
    found = differences(lineage, expected)
    assert not found, report(found)


def pair(net: Any, x: Tensor) -> list[Tensor]:
    a, b = net.fc(x), net.other(x)
    b += net.scale
    return [a, b, torch.ones_like(x) + 1, b.expand_as(a)]


def small_truth() -> tuple[Net, Tensor, Truth]:
    model, x = Net(pair), torch.rand(4, 4)
    model.register_buffer("scale", torch.ones(4))
    return model, x, truth(model, {"x": x}, layer_calls(model, {"x": x}))


def test_truth_is_what_one_reads_off_the_code() -> None:
    fc, other, scale = ("call", "fc", 0, 0), ("call", "other", 0, 0), ("buffer", "scale")
    calls = small_truth()[2].calls
    assert [c.inputs for c in calls if c.path == "probe"] == [((fc,),), ((other, scale),), ((CONSTANT,),), ((other, scale),)]
    assert [(c.path, c.nth, c.layer) for c in calls][:4] == [("", 0, False), ("fc", 0, True), ("other", 0, True), ("probe", 0, True)]


def test_a_wrong_source_is_reported() -> None:
    model, x, expected = small_truth()
    lineage = gradlineage.trace(model, x)
    assert not differences(lineage, expected)
    assert len(differences(lineage, expected._replace(outputs=expected.outputs[::-1]))) == 4
    assert differences(lineage, expected._replace(calls=expected.calls[:-1]))
