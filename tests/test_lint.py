"""Faults of wiring: each code on a fault and on its nearest innocent neighbour, real models as they are, and the command ``lint``."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

import gradlineage
from gradlineage import Finding
from gradlineage.cli import main
from gradlineage.errors import LineageError
from gradlineage.findings import CODES, SEVERITIES
from gradlineage.lineage import Lineage
from tests import test_tracker_timm, test_tracker_torchvision, test_tracker_transformers
from tests.nets import Net, data, lin

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
Run = Callable[..., Any]


def found(model: nn.Module, *args: Any, **kwargs: Any) -> list[tuple[str, str, str]]:
    """(code, severity, call) of all findings."""
    torch.manual_seed(0)
    return [(f.code, f.severity, f.call) for f in gradlineage.lint(gradlineage.trace(model, *args, **kwargs))]


def only(model: nn.Module, code: str, *args: Any, **kwargs: Any) -> list[Finding]:
    return list(gradlineage.lint(gradlineage.trace(model, *args, **kwargs), select=code))


def net(run: Run, **layers: nn.Module) -> Net:
    return Net(run, **{"a": lin(), "b": lin(), **layers})


def quiet(function: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return function()


class Weight(nn.Module):
    """A weight, and a bias that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class First(nn.Module):
    """Uses the first of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(x)  # type: ignore[no-any-return]


class Ignores(Weight):
    """A layer of one piece that uses the first of two arguments."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x @ self.weight + self.bias


class Gate(nn.Module):
    """Looks at the second of two arguments to decide."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(x) if bool(y.sum() < 1e9) else x


class Reads(nn.Module):
    """A layer that reads a tensor twice, with a write to it in between, in place or not."""

    def __init__(self, write: Callable[[Tensor], Any], before: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last, self.write = before or nn.Softmax(-1), nn.Linear(4, 4), write

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        y = self.first(h)
        self.write(h)
        return y + self.last(h)  # type: ignore[no-any-return]


def unlisted(run: Run, module: nn.Module) -> Net:
    made = net(run)
    object.__setattr__(made, "kept", [module])
    return made


# -- every code, on a fault and beside one ---------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, str, str, Callable[[], nn.Module]]] = {  # code, severity, call, the model
    "a layer in a list": ("not-registered", "error", "<Linear at ", lambda: unlisted(lambda n, x: n.a(n.b(n.kept[0](x))), lin())),
    "a block in a list": ("not-registered", "error", "<Sequential at ", lambda: unlisted(lambda n, x: n.a(n.b(n.kept[0](x))), nn.Sequential(lin(), nn.ReLU()))),
    "all of it detached": ("no-gradient", "error", "output", lambda: net(lambda n, x: n.b(n.a(x)).detach())),
    "argmax of all": ("no-gradient", "error", "output", lambda: net(lambda n, x: n.b(n.a(x)).argmax(-1))),
    "a layer never called": ("never-called", "warning", "b", lambda: net(lambda n, x: n.a(x))),
    "a block never called": ("never-called", "warning", "c", lambda: net(lambda n, x: n.b(n.a(x)), c=nn.Sequential(lin(), lin()))),
    "one of a list never called": ("never-called", "warning", "c.1", lambda: net(lambda n, x: n.c[0](n.b(n.a(x))), c=nn.ModuleList([lin(), lin()]))),
    "an activation never called": ("never-called", "info", "c", lambda: net(lambda n, x: n.b(n.a(x)), c=nn.ReLU())),
    "a frozen layer never called": ("never-called", "warning", "c", lambda: net(lambda n, x: n.b(n.a(x)), c=lin().requires_grad_(False))),
    "a result dropped": ("dead-call", "warning", "b", lambda: net(lambda n, x: (n.b(x), n.a(x))[1])),
    "a result of a block dropped": ("dead-call", "warning", "c", lambda: net(lambda n, x: (n.c(x), n.b(n.a(x)))[1], c=nn.Sequential(lin(), nn.ReLU()))),
    "a result used for its shape": ("dead-call", "warning", "b", lambda: net(lambda n, x: n.a(x) + torch.zeros_like(n.b(x)))),
    "a result stored": ("dead-call", "warning", "b", lambda: net(lambda n, x: (n.__setattr__("kept", n.b(x)), n.a(x))[1])),
    "a result passed to a layer that ignores it": ("dead-call", "warning", "b", lambda: net(lambda n, x: n.c(n.a(x), n.b(x)), c=Ignores())),
    "the second of two calls dropped": ("dead-call", "warning", "b[1]", lambda: net(lambda n, x: [n.b(n.a(x)), n.b(x)][0])),
    "detach": ("gradient-cut", "warning", "detach", lambda: net(lambda n, x: n.b(n.a(x).detach()))),
    "no_grad": ("gradient-cut", "warning", "no_grad", lambda: net(lambda n, x: n.b(quiet(lambda: n.a(x))))),
    "argmax": ("gradient-cut", "warning", "argmax", lambda: net(lambda n, x: n.b(F.one_hot(n.a(x).argmax(-1), 4).float()))),
    "a parameter of its own unused": ("parameter-unused", "warning", "c", lambda: net(lambda n, x: n.c(n.b(n.a(x))), c=Weight())),
    "a parameter used for what is dropped": ("parameter-dead", "warning", "", lambda: with_weight(lambda n, x: (n.c(n.w * x), n.b(n.a(x)))[1], c=nn.ReLU())),
    "a mask ignored": ("input-unused", "warning", "args[1]", lambda: net(lambda n, x, mask=None: n.b(n.a(x)))),
    "forward of a layer": ("forward-called", "warning", "b", lambda: net(lambda n, x: n.b.forward(n.a(x)))),
    "a write between two layers": ("write-between-reads", "warning", "Reads", lambda: Reads(lambda h: h.add_(1))),
    "an argument passed on for nothing": ("argument-unused", "info", "c", lambda: net(lambda n, x: n.c(n.a(x), n.b(x)), c=First())),
    "a weight borrowed": ("borrowed", "info", "a", lambda: net(lambda n, x: n.b(F.linear(x, n.a.weight, n.a.bias)))),
    "a layer called twice": ("called-again", "info", "a", lambda: net(lambda n, x: n.b(n.a(n.a(x))))),
    "a frozen layer": ("frozen", "info", "", lambda: net(lambda n, x: n.b(n.a(x)), a=lin().requires_grad_(False))),
}  # fmt: skip


def with_weight(run: Run, **layers: nn.Module) -> Net:
    made = net(run, **layers)
    made.w = nn.Parameter(torch.ones(4))
    return made


@pytest.mark.parametrize("case", FAULTS)
def test_fault_is_found_where_it_is(case: str) -> None:
    code, severity, call, make = FAULTS[case]
    inputs = [data() for _ in range(2 if code == "input-unused" else 1)]
    findings = only(make(), code, *inputs)
    assert [f.severity for f in findings] == [severity], "\n".join(map(str, findings))
    assert findings[0].call.startswith(call) if call.startswith("<") else findings[0].call == call


def test_every_code_has_a_fault() -> None:
    assert {code for code, *_ in FAULTS.values()} == set(CODES)


INNOCENT: dict[str, tuple[str, Callable[[], nn.Module]]] = {  # the nearest thing that is right
    "a layer in a ModuleList": ("not-registered", lambda: net(lambda n, x: n.c[0](n.b(n.a(x))), c=nn.ModuleList([lin()]))),
    "a layer held twice, once registered": ("not-registered", lambda: held_twice()),
    "an activation in a list": ("not-registered", lambda: unlisted(lambda n, x: n.a(n.b(n.kept[0](x))), nn.ReLU())),
    "an activation made on the way": ("not-registered", lambda: net(lambda n, x: n.b(nn.ReLU()(n.a(x))))),
    "one of two outputs detached": ("no-gradient", lambda: net(lambda n, x: (n.a(x), n.b(x).detach()))),
    "all frozen": ("no-gradient", lambda: net(lambda n, x: n.b(n.a(x)).detach()).requires_grad_(False)),
    "a ModuleList, which cannot be called": ("never-called", lambda: net(lambda n, x: n.c[0](n.b(n.a(x))), c=nn.ModuleList([lin()]))),
    "Identity called": ("never-called", lambda: net(lambda n, x: n.c(n.b(n.a(x))), c=nn.Identity())),
    "projections of attention": ("never-called", lambda: net(lambda n, x: n.b(n.c(n.a(x), x, x)[0]), c=nn.MultiheadAttention(4, 2))),
    "a borrowed weight": ("never-called", lambda: net(lambda n, x: n.b(F.linear(x, n.a.weight, n.a.bias)))),
    "a result used in the end": ("dead-call", lambda: net(lambda n, x: [n.b(x), n.a(x)])),
    "a result used in place": ("dead-call", lambda: net(lambda n, x: (y := n.a(x), y.add_(n.b(x)))[0])),
    "a result with weight zero": ("dead-call", lambda: net(lambda n, x: n.a(x) + 0 * n.b(x))),
    "a result taken without gradient": ("dead-call", lambda: net(lambda n, x: n.a(x) + n.b(x).detach())),
    "detach of one way of two": ("gradient-cut", lambda: net(lambda n, x: n.b(h := n.a(x)) + h.detach())),
    "detach of an input": ("gradient-cut", lambda: net(lambda n, x: n.b(n.a(x.detach())))),
    "detach of what is frozen": ("gradient-cut", lambda: net(lambda n, x: n.b(n.a(x).detach()), a=lin().requires_grad_(False))),
    "straight through": ("gradient-cut", lambda: net(lambda n, x: n.b((h := n.a(x)) + (h.round() - h).detach()))),
    "detach for a record": ("gradient-cut", lambda: net(lambda n, x: (y := n.b(n.a(x)), n.__setattr__("kept", y.detach()))[0])),
    "no bias": ("parameter-unused", lambda: net(lambda n, x: n.b(n.a(x)), a=nn.Linear(4, 4, bias=False))),
    "a weight tied to one that is used": ("parameter-unused", lambda: tied()),
    "a parameter returned": ("parameter-dead", lambda: with_weight(lambda n, x: (n.w * 2, n.b(n.a(x))))),
    "forward of super": ("forward-called", lambda: net(lambda n, x: n.b(n.a(x)), a=Louder(4, 4))),
    "a weight borrowed by a function": ("forward-called", lambda: net(lambda n, x: n.b(F.linear(x, n.a.weight)))),
    "a copy written": ("write-between-reads", lambda: Reads(lambda h: h.clone().add_(1))),
    "another tensor made": ("write-between-reads", lambda: Reads(lambda h: h + 1)),
    "a write that nobody reads before": ("write-between-reads", lambda: net(lambda n, x: n.b(n.a(x).mul_(2)))),
    "a copy written whose original others read": ("write-between-reads", lambda: net(lambda n, x: (h := n.a(x), y := n.b(h), k := h.clone(), k.mul_(2), y + n.b(k))[-1])),
    "a written tensor whose copy others had read": ("write-between-reads", lambda: net(lambda n, x: (h := n.a(x), y := n.b(h.repeat(1, 1)), h.mul_(2), y + n.b(h))[-1])),
    "a module tied to one that runs": ("forward-called", lambda: tied_twins()),
    "a penalty on a gradient": ("dead-call", lambda: net(penalty)),
    "a teacher that learns nothing": ("no-gradient", lambda: unlisted(lambda n, x: n.a(n.b(x)) + quiet(lambda: n.kept[0](x)), lin().requires_grad_(False))),
    "a residual in place": ("write-between-reads", lambda: net(lambda n, x: n.b(n.c((h := n.a(x)).add_(n.c(h)))), c=nn.Softmax(-1))),
    "an activation handed through first": ("write-between-reads", lambda: net(lambda n, x: n.b(nn.Identity()(torch.relu_(n.c(n.a(x))))), c=nn.Dropout(0.0))),
    "a tensor of numbers in a plain list": ("not-registered", lambda: holding([torch.ones(4)], lambda n, x: n.b(n.a(x)) * n.kept[0])),
    "a leaf made on the way": ("not-registered", lambda: net(lambda n, x: n.b(n.a(x)) * torch.ones(4, requires_grad=True))),
    "forward of super in a layer": ("forward-called", lambda: net(lambda n, x: n.b(n.c(n.a(x))), c=Quieter())),
    "an activation in place": ("write-between-reads", lambda: net(lambda n, x: n.b(n.c(n.a(x))), c=nn.ReLU(inplace=True))),
    "an argument that is used": ("argument-unused", lambda: net(lambda n, x: n.c(n.a(x), n.b(x)), c=nn.Bilinear(4, 4, 4))),
    "an argument that decides": ("argument-unused", lambda: net(lambda n, x: n.c(n.a(x), n.b(x)), c=Gate())),
    "attention's projections": ("borrowed", lambda: net(lambda n, x: n.b(n.c(n.a(x), x, x)[0]), c=nn.MultiheadAttention(4, 2))),
    "an activation called twice": ("called-again", lambda: net(lambda n, x: n.c(n.b(n.c(n.a(x)))), c=nn.ReLU())),
    "two layers of one class": ("called-again", lambda: net(lambda n, x: n.b(n.a(x)))),
    "nothing frozen": ("frozen", lambda: net(lambda n, x: n.b(n.a(x)))),
}  # fmt: skip


class Louder(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def tied() -> Net:
    made = net(lambda n, x: n.c(n.b(n.a(x))), c=nn.Linear(4, 4, bias=False))
    made.c.weight = made.a.weight
    return made


def held_twice() -> Net:
    made = net(lambda n, x: n.kept[0](n.b(x)))
    object.__setattr__(made, "kept", [made.a])
    return made


@pytest.mark.parametrize("case", INNOCENT)
def test_nearest_innocent_thing_is_no_fault(case: str) -> None:
    code, make = INNOCENT[case]
    assert only(make(), code, data()) == []


@pytest.mark.parametrize(
    "run",
    [
        lambda n, x, y: n.b(n.a(x) * y),
        lambda n, x, y: n.b(n.a(x)) if bool((y < 9).all()) else x,
        lambda n, x, y: n.b(n.a(x))[y.bool()[:, 0]],
    ],
)
def test_input_that_feeds_or_decides_is_used(run: Run) -> None:
    assert only(net(run), "input-unused", data(), torch.ones(2, 4)) == []


def test_pass_without_gradient_is_not_blamed_for_it() -> None:
    with torch.no_grad():
        assert found(net(lambda n, x: n.b(n.a(x).detach())), data()) == []


def test_model_that_returns_no_tensor_is_not_called_dead() -> None:
    assert only(net(lambda n, x: n.b(n.a(x)).tolist()), "dead-call", data()) == []


HARDER: dict[str, tuple[str, Callable[[], nn.Module]]] = {  # code, model
    "a ReLU that writes between two layers": ("write-between-reads", lambda: Reads(nn.ReLU(inplace=True))),
    "a part written between two layers": ("write-between-reads", lambda: Reads(lambda h: h[:1].zero_())),
    "a view written between two layers": ("write-between-reads", lambda: Reads(lambda h: h.view(-1).zero_())),
    "a layer made on the way": ("not-registered", lambda: net(lambda n, x: nn.Linear(4, 4)(n.b(n.a(x))))),
    "forward of a layer in a list": ("not-registered", lambda: unlisted(lambda n, x: n.a(n.b(n.kept[0].forward(x))), lin())),
    "forward of a layer without parameters": ("forward-called", lambda: net(lambda n, x: n.b(n.c.forward(n.a(x))), c=nn.ReLU())),
    "forward of a block": ("forward-called", lambda: net(lambda n, x: n.b(n.c.forward(n.a(x))), c=nn.Sequential(lin(), lin()))),
    "a block called twice": ("called-again", lambda: net(lambda n, x: n.b(n.c(n.c(n.a(x)))), c=nn.Sequential(lin(), lin()))),
    "a parameter in a plain list": ("not-registered", lambda: holding([nn.Parameter(torch.ones(4))], lambda n, x: n.b(n.a(x)) * n.kept[0])),
    "a parameter in a plain list of a layer": ("not-registered", lambda: net(lambda n, x: n.b(n.c(n.a(x))), c=Listing())),
    "a parameter kept nowhere": ("not-registered", lambda: (w := nn.Parameter(torch.ones(4)), net(lambda n, x: n.b(n.a(x)) * w))[1]),
    "an activation between two layers with another in between": ("write-between-reads", lambda: Reads(lambda h: (h.relu_(), h.mul_(2)))),
    "a forward deep in a list": ("forward-called", lambda: net(lambda n, x: n.b(n.c[0].forward(n.a(x))), c=nn.ModuleList([nn.ReLU()]))),
    "a loss through item": ("parameter-dead", lambda: net(lambda n, x: n.a(x).mean() + n.b(x).mean().item())),
    "a gate that only decides": ("parameter-dead", lambda: net(lambda n, x: n.a(x) if bool(n.b(x).sum() < 1e9) else x)),
    "a forward through a list": ("no-gradient", lambda: net(lambda n, x: torch.tensor(n.b(n.a(x)).tolist()))),
    "a forward without gradient": ("no-gradient", lambda: net(lambda n, x: quiet(lambda: n.b(n.a(x))))),
    "a parameter of a list unused": ("parameter-unused", lambda: net(lambda n, x: n.b(n.a(x)) * n.c[0], c=nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)]))),
}  # fmt: skip


@pytest.mark.parametrize("case", HARDER)
def test_fault_is_found_as_well(case: str) -> None:
    code, make = HARDER[case]
    assert only(make(), code, data())


UNTRUE: dict[str, tuple[str, Callable[[], nn.Module]]] = {  # code, model: what might be said of it, and is not so
    "a Sequential run through by hand": ("never-called", lambda: by_hand()),
    "a Sequential whose weight is borrowed": ("never-called", lambda: net(lambda n, x: n.b(F.linear(n.a(x), n.c[0].weight, n.c[0].bias)), c=nn.Sequential(lin()))),
    "forward of a block": ("never-called", lambda: net(lambda n, x: n.b(n.c.forward(n.a(x))), c=Deep())),
    "a layer that decides": ("dead-call", lambda: net(lambda n, x: n.a(x) if bool(n.b(x).sum() < 1e9) else x)),
    "a parameter of a list": ("borrowed", lambda: net(lambda n, x: n.b(n.a(x)) * n.c[0], c=nn.ParameterList([nn.Parameter(torch.ones(4))]))),
}  # fmt: skip


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def tied_twins() -> Net:
    made = net(lambda n, x: n.d(n.b(n.a(x))), c=Twin(), d=Twin())
    made.d.w = made.c.w
    return made


def penalty(n: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(n.b(torch.tanh(n.a(x))).sum(), x, create_graph=True)
    return (grad.norm(2, 1) - 1).square().mean()  # type: ignore[no-any-return]


class Quieter(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [nn.Parameter(torch.ones(4))]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.kept[0]


def holding(kept: list[Any], run: Run) -> Net:
    made = net(run)
    object.__setattr__(made, "kept", kept)
    return made


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = lin()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + 1  # type: ignore[no-any-return]


def by_hand() -> Net:
    def run(n: Net, x: Tensor) -> Tensor:
        for layer in n.c:
            x = layer(x)
        return n.b(n.a(x))  # type: ignore[no-any-return]

    return net(run, c=nn.Sequential(lin(), lin()))


@pytest.mark.parametrize("case", UNTRUE)
def test_what_is_not_so_is_not_said(case: str) -> None:
    code, make = UNTRUE[case]
    assert only(make(), code, data()) == []


# -- words -----------------------------------------------------------------------------------------------------------------------------


class Muddle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.spare, self.gate, self.head = nn.Linear(4, 4), nn.Linear(4, 4), First(), nn.Linear(4, 4)
        self.odd, self.frozen = [nn.Linear(4, 4)], nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.odd[0](self.frozen(x))
        self.gate(h, x)
        h = self.stem(h).detach()
        return self.head(self.head.forward(h))  # type: ignore[no-any-return]


def test_findings_of_a_muddle_are_told_errors_first() -> None:
    line = Muddle.forward.__code__.co_firstlineno
    told = [
        (
            f"HERE:{int(f.where.rpartition(':')[2]) - line}" if f.where else "",
            f.severity,
            f.code,
            re.sub(r"test_lint\.py:\d+", "HERE", f.message),
        )
        for f in gradlineage.lint(gradlineage.trace(Muddle(), data(), torch.ones(2)))
    ]
    assert told == [
        ("HERE:1", "error", "not-registered", "<Linear at HERE> was called and is not registered: 2 tensors of its parameters are not in model.parameters()"),
        ("", "warning", "never-called", "spare (Linear) is registered and was never called, so its parameters were not used"),
        ("HERE:2", "warning", "dead-call", "what gate (First) computed reaches no output"),
        ("HERE:3", "warning", "gradient-cut", "detach stops the gradient, so stem.weight, stem.bias get no gradient"),
        ("", "warning", "input-unused", "no output depends on the input mask"),
        ("HERE:2", "info", "argument-unused", "gate (First) was given y and did not use it"),
        ("", "info", "frozen", "2 of 10 parameters are frozen: frozen.weight, frozen.bias"),
    ]  # fmt: skip


def test_finding_is_printed_with_its_place_code_and_hint() -> None:
    finding = Finding("dead-call", "warning", "b", "net.py:3", "what b computed reaches no output", "use it")
    assert str(finding) == "net.py:3: warning: what b computed reaches no output [dead-call]\n    use it"
    assert str(dataclasses.replace(finding, where="")).startswith("warning: what b")


def test_long_lists_of_names_are_cut_short() -> None:
    model = net(lambda n, x: n.b(n.c(n.a(x)).detach()), c=nn.Sequential(lin(), lin(), lin()))
    (finding,) = only(model, "gradient-cut", data())
    assert finding.message == "detach stops the gradient, so a.weight, a.bias, c.0.weight, c.0.bias and 4 more get no gradient"


def test_two_breaks_on_the_way_are_both_named() -> None:
    (finding,) = only(net(lambda n, x: n.b((h := n.a(x)).detach() + h.argmax(-1)[:, None])), "gradient-cut", data())
    assert re.fullmatch(r"the gradient stops at detach at \S+:\d+, argmax at \S+:\d+, so a.weight, a.bias get no gradient", finding.message)


# -- choosing --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def muddle() -> Lineage:
    return gradlineage.trace(Muddle(), data(), torch.ones(2))


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ({"select": "never-called"}, {"never-called"}),
        ({"select": ["*-unused"]}, {"input-unused", "argument-unused"}),
        ({"select": ["dead-*", "frozen"], "ignore": "frozen"}, {"dead-call"}),
        ({"ignore": ["[a-g]*", "n*"]}, {"input-unused"}),
        ({"ignore": "*"}, set()),
        ({"select": ()}, set()),
    ],
)
def test_codes_are_selected_and_ignored(muddle: Lineage, options: dict[str, Any], codes: set[str]) -> None:
    assert {f.code for f in gradlineage.lint(muddle, **options)} == codes


@pytest.mark.parametrize("options", [{"select": "dead"}, {"ignore": ["dead-call", "x*y"]}, {"select": [3]}])
def test_code_that_there_is_none_like_is_refused(muddle: Lineage, options: dict[str, Any]) -> None:
    with pytest.raises(LineageError, match=r"lint\(\): there is no code ('dead'|'x\*y'|3); there are not-registered, no-gradient"):
        gradlineage.lint(muddle, **options)


def test_what_is_no_lineage_of_one_pass_is_refused() -> None:
    union = gradlineage.trace_many(Gate(), [(data(), data()), (data(), data() + 1e10)]).union()
    with pytest.raises(LineageError, match=r"lint\(\) looks at the lineage of one pass, found a union of 2 passes"):
        gradlineage.lint(union)
    with pytest.raises(LineageError, match=r"found a Linear"):
        gradlineage.lint(lin())  # type: ignore[arg-type]


def test_collapsed_and_saved_lineages_have_the_same_findings(muddle: Lineage) -> None:
    findings = gradlineage.lint(muddle)
    for other in (muddle.collapse(depth=1), muddle.roll(), Lineage.from_json(muddle.to_json())):
        assert gradlineage.lint(other) == findings


def test_lineage_collapsed_to_one_layer_has_the_same_findings(muddle: Lineage) -> None:
    assert gradlineage.lint(muddle.collapse(depth=0)) == gradlineage.lint(muddle)


def test_parameter_used_for_what_is_dropped_at_once_was_used() -> None:
    assert [f.code for f in only(with_weight(lambda n, x: (n.w * 2, n.b(n.a(x)))[1]), "parameter-*", data())] == ["parameter-dead"]


# -- real models as they are -----------------------------------------------------------------------------------------------------------

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
SIZES = {"inception_v3": 299, "maxvit_t": 224}
SETTINGS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False},
    "vit_b_32": {"image_size": 64},
}
IMAGES = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small",
    "regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vit_b_32",
]  # fmt: skip
DETECTORS = ["fasterrcnn_mobilenet_v3_large_320_fpn", "maskrcnn_resnet50_fpn", "fcos_resnet50_fpn", "ssdlite320_mobilenet_v3_large"]
TIMM = [
    "cait_xxs24_224",
    "coat_tiny",
    "efficientnet_b0",
    "hrnet_w18_small",
    "levit_128s",
    "swinv2_tiny_window8_256",
    "xcit_nano_12_p16_224",
]
TEXT = [
    "bert", "bigbird", "clip", "deberta_v2", "deformable_detr", "detr", "gpt2", "llama", "longformer", "mamba", "mixtral", "perceiver", "swin", "t5", "vit",
    "vit_mae", "wav2vec2", "whisper", "xlnet",
]  # fmt: skip
ZOO = (
    [("torchvision", n) for n in IMAGES]
    + [("detection", n) for n in DETECTORS]
    + [("timm", n) for n in TIMM]
    + [("transformers", n) for n in TEXT]
)


def build(family: str, name: str) -> Built:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        if family == "torchvision":
            model = models.get_model(name, weights=None, num_classes=4, **SETTINGS.get(name, {}))
            return model, (torch.rand(2, 3, SIZES.get(name, 64), SIZES.get(name, 64)),), {}
        if family == "transformers":
            model, kwargs = test_tracker_transformers._MODELS[name]()
            return model, (), kwargs
        return (test_tracker_torchvision._detector if family == "detection" else test_tracker_timm._image_model)(name)()


WARNINGS: dict[str, list[tuple[str, str]]] = {  # all that is said of these models, in eval mode, and of no other
    "googlenet": [("never-called", "aux1"), ("never-called", "aux2")],
    "inception_v3": [("never-called", "AuxLogits")],
    "fasterrcnn_mobilenet_v3_large_320_fpn": [("gradient-cut", "detach"), ("gradient-cut", "detach")],  # boxes are proposed without gradient
    "maskrcnn_resnet50_fpn": [("gradient-cut", "detach"), ("gradient-cut", "detach")],
    "bigbird": [("dead-call", "bert.pooler"), ("dead-call", "bert.activation")],  # the language model does not use what is pooled
    "hrnet_w18_small": [("forward-called", f"downsamp_modules.{n}") for n in range(3)],
    "perceiver": [("dead-call", "encoder.self_attends.0.attention.self.layernorm2")],  # of inputs, which self-attention has none of
    "wav2vec2": [("parameter-unused", "wav2vec2")],  # what stands for masked frames, which training alone has
    "xlnet": [  # the last layer's own stream is left, as the output is that of the other; without segments nothing is said of them
        ("dead-call", "transformer.layer.1.rel_attn.dropout[0]"), ("dead-call", "transformer.layer.1.rel_attn.dropout[1]"),
        ("dead-call", "transformer.layer.1.rel_attn.layer_norm[0]"), ("dead-call", "transformer.layer.1.ff[1]"),
        ("parameter-unused", "transformer.layer.0.rel_attn"), ("parameter-unused", "transformer.layer.1.rel_attn"),
    ],
}  # fmt: skip
RUN_BY_HAND = {  # a Sequential whose layers are called one by one
    "detr": ["model.backbone.model.encoder.stages.0.layers", "model.backbone.model.encoder.stages.1.layers"],
    "deformable_detr": ["model.backbone.model.encoder.stages.0.layers", "model.backbone.model.encoder.stages.1.layers"],
    "hrnet_w18_small": ["downsamp_modules.0", "downsamp_modules.1", "downsamp_modules.2"],
    "ssdlite320_mobilenet_v3_large": ["backbone.features"],
}


def findings_of(built: Built) -> tuple[Finding, ...]:
    model, args, kwargs = built
    torch.manual_seed(0)
    return gradlineage.lint(gradlineage.trace(model.eval(), *args, **kwargs))


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [t for item in items for t in tensors(item)]


def spoiled(value: Any) -> Any:
    """The same with other values in its tensors."""
    if isinstance(value, Tensor):
        return torch.full_like(value, float("nan")) if value.is_floating_point() else torch.zeros_like(value)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(map(spoiled, value))
    return value


class Truth:
    """Whether a finding is so, by running the model with something spoiled: none of this asks gradlineage."""

    def __init__(self, built: Built) -> None:
        self.model, self.args, self.kwargs = built
        self.times: dict[str, int] = {}
        handles = [m.register_forward_hook(self._count(n)) for n, m in self.model.named_modules()]
        self.outputs = self.run()
        for handle in handles:
            handle.remove()
        self.model.zero_grad(set_to_none=True)
        sums = [t.float().sum() for t in self.outputs if t.requires_grad]
        torch.autograd.backward(torch.stack(sums).sum())
        self.parameters = dict(self.model.named_parameters())

    def _count(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            self.times[name] = self.times.get(name, 0) + 1

        return hook

    def run(self) -> list[Tensor]:
        torch.manual_seed(0)
        return tensors(self.model(*self.args, **self.kwargs))

    def same(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.outputs, self.run(), strict=False))

    def without_result(self, label: str) -> bool:
        """Whether the outputs are the same with NaN for what a call gives."""
        path, _, nth = label.rstrip("]").partition("[")
        calls = iter(range(10**6))

        def hook(_: nn.Module, args: Any, out: Any) -> Any:
            return spoiled(out) if not nth or next(calls) == int(nth) else None

        handle = self.model.get_submodule(path).register_forward_hook(hook)
        try:
            return self.same()
        finally:
            handle.remove()

    def without_values(self, names: list[str]) -> bool:
        kept = {name: self.parameters[name].detach().clone() for name in names}
        with torch.no_grad():
            for name in names:
                self.parameters[name].fill_(float("nan"))
        try:
            return self.same()
        finally:
            with torch.no_grad():
                for name, value in kept.items():
                    self.parameters[name].copy_(value)

    def without_argument(self, path: str, name: str) -> bool | None:
        """The same for an argument that is passed by name; None where it is not."""
        seen = []

        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            seen.append(name in kwargs)
            return args, {k: spoiled(v) if k == name else v for k, v in kwargs.items()}

        handle = self.model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
        try:
            same = self.same()
            return same if any(seen) else None
        finally:
            handle.remove()

    def holds(self, finding: Finding) -> bool:
        told = finding.message
        if finding.code == "never-called":
            paths = told.partition(" (")[0].split(" and ")[0].split(", ")
            bare = "without parameters of its own" in told
            first = {name.rpartition(".")[0] for name in self.parameters}  # a tied parameter goes by its first name
            return not any(p == path or p.startswith(f"{path}.") for p in self.times for path in paths) and all(
                bare != any(owner == path or owner.startswith(f"{path}.") for owner in first) for path in paths
            )
        if finding.code == "dead-call":
            return self.without_result(finding.call)
        if finding.code in ("parameter-unused", "parameter-dead"):
            listed = [n for n in self.parameters if re.search(rf"(^|[ ,]){re.escape(n)}($|[ ,])", told)]
            return bool(listed) and self.without_values(listed)
        if finding.code in ("gradient-cut", "frozen"):
            listed = [n for n in self.parameters if re.search(rf"(^|[ ,]){re.escape(n)}($|[ ,])", told)]
            return bool(listed) and all(
                self.parameters[n].grad is None and self.parameters[n].requires_grad == (finding.code != "frozen") for n in listed
            )
        if finding.code == "called-again":
            return self.times[finding.call] == int(told.split("was called ")[1].split()[0]) > 1
        if finding.code == "borrowed":
            listed = [n for n in self.parameters if re.search(rf"(^|[ ,]){re.escape(n)}($|[ ,])", told)]
            return self.times.get(finding.call, 0) == 0 and bool(listed)
        if finding.code == "argument-unused":
            names = re.search(r"given (.*) and did not use", told)
            assert names is not None
            path = finding.call.partition("[")[0]
            return all(self.without_argument(path, name) is not False for name in names[1].split(", ") if name.isidentifier())
        raise AssertionError(f"nothing is known of {finding.code}")


@pytest.mark.parametrize(("family", "name"), ZOO, ids=[f"{f}-{n}" for f, n in ZOO])
def test_real_model_as_it_is_has_no_error_and_these_warnings(family: str, name: str) -> None:
    findings = [f for f in findings_of(build(family, name)) if f.severity != "info"]
    assert [f for f in findings if f.severity == "error"] == []
    known = [("never-called", path) for path in RUN_BY_HAND.get(name, ())]
    assert [c for c in ((f.code, f.call) for f in findings) if c not in known] == WARNINGS.get(name, [])


@pytest.mark.parametrize("name", RUN_BY_HAND)
def test_sequential_whose_layers_are_called_one_by_one_was_used(name: str) -> None:
    family = next(f for f, n in ZOO if n == name)
    assert not {f.call for f in findings_of(build(family, name)) if f.code == "never-called"} & {*RUN_BY_HAND[name]}


TRUE = [pytest.param(f, n, id=f"{f}-{n}") for f, n in ZOO if n not in ("maskrcnn_resnet50_fpn", "fcos_resnet50_fpn")]


@pytest.mark.parametrize(("family", "name"), TRUE)
def test_what_is_said_of_a_real_model_is_so(family: str, name: str) -> None:
    """Of every finding: spoil what is said to be of no consequence, count what is said to be called, look for what gets no gradient."""
    built = build(family, name)
    findings = [f for f in findings_of(built) if f.call not in RUN_BY_HAND.get(name, ())]
    if findings:
        truth = Truth(built)
        assert [str(f) for f in findings if not truth.holds(f)] == []


# -- the command -----------------------------------------------------------------------------------------------------------------------

NET = """
import torch
from torch import nn

class Fine(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        return self.fc(x)

class Info(Fine):
    def forward(self, x):
        return self.fc(self.fc(x))

class Warn(Fine):
    def forward(self, x):
        self.fc(x)
        return self.fc(x)

class Error(Fine):
    def __init__(self):
        super().__init__()
        self.kept = [nn.Linear(4, 4)]
    def forward(self, x):
        return self.fc(self.kept[0](x))

class Mode(Fine):
    def forward(self, x):
        return self.fc(x).detach() if self.training else self.fc(x)
"""


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], tuple[int, str, str]]]:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)

    def call(text: str) -> tuple[int, str, str]:
        status = main(shlex.split(text))
        return status, *capsys.readouterr()

    yield call


def test_exit_status_is_one_from_the_severity_on_that_is_asked_for(command: Callable[[str], tuple[int, str, str]]) -> None:
    worst = {"Fine": None, "Info": "info", "Warn": "warning", "Error": "error"}
    for name, severity in worst.items():
        for fail in (None, *SEVERITIES):
            status, _, err = command(f"lint net.py:{name} --input 2x4" + (f" --fail-on {fail}" if fail else ""))
            limit = SEVERITIES.index(fail or "error")
            assert status == (severity is not None and SEVERITIES.index(severity) <= limit), (name, fail)
            assert err == ""


def test_text_is_that_of_the_findings_and_their_number(command: Callable[[str], tuple[int, str, str]]) -> None:
    assert command("lint net.py:Fine --input 2x4") == (0, "nothing found\n", "")
    status, out, _ = command("lint net.py:Warn --input 2x4")
    lines = out.splitlines()
    assert (status, lines[0], lines[-1]) == (
        0,
        "net.py:18: warning: what fc[0] (Linear) computed reaches no output [dead-call]",
        "1 warning, 1 info",
    )
    status, out, _ = command("lint net.py:Error --input 2x4")
    assert (
        status == 1
        and out.startswith("net.py:26: error: <Linear at net.py:26> was called and is not registered")
        and out.endswith("\n1 error\n")
    )


def test_json_is_a_list_with_all_that_a_finding_has(command: Callable[[str], tuple[int, str, str]]) -> None:
    status, out, _ = command("lint net.py:Warn --input 2x4 --format json --fail-on warning")
    read = json.loads(out)
    assert status == 1 and [sorted(f) for f in read] == [["call", "code", "hint", "message", "severity", "where"]] * 2
    assert [(f["code"], f["severity"], f["call"], f["where"]) for f in read] == [
        ("dead-call", "warning", "fc[0]", "net.py:18"), ("called-again", "info", "fc", "net.py:18"),
    ]  # fmt: skip
    assert json.loads(command("lint net.py:Fine --input 2x4 --format json")[1]) == []


def test_codes_are_selected_and_ignored_on_the_command_line(command: Callable[[str], tuple[int, str, str]]) -> None:
    def codes(options: str) -> list[str]:
        return [f["code"] for f in json.loads(command(f"lint net.py:Warn --input 2x4 --format json {options}")[1])]

    assert codes("--select dead-call") == ["dead-call"]
    assert codes("--select 'dead*' --select 'call*'") == ["dead-call", "called-again"]
    assert codes("--ignore dead-call") == ["called-again"]
    assert codes("--select '*' --ignore 'call*'") == ["dead-call"]
    assert command("lint net.py:Error --input 2x4 --ignore not-registered")[0] == 0


def test_ignored_error_does_not_fail(command: Callable[[str], tuple[int, str, str]]) -> None:
    assert command("lint net.py:Error --input 2x4 --select frozen") == (0, "nothing found\n", "")


@pytest.mark.parametrize("options", ["--select nope", "--ignore nope", "--fail-on fatal", "--format xml"])
def test_option_that_is_none_ends_with_two(command: Callable[[str], tuple[int, str, str]], options: str) -> None:
    status, out, err = command(f"lint net.py:Fine --input 2x4 {options}")
    assert (status, out) == (2, "")
    assert "there is no code 'nope'" in err or "invalid choice" in err


def test_mode_is_that_of_the_option(command: Callable[[str], tuple[int, str, str]]) -> None:
    assert command("lint net.py:Mode --input 2x4")[0] == 0
    status, out, _ = command("lint net.py:Mode --input 2x4 --train")
    assert status == 1 and "[no-gradient]" in out


def test_saved_lineage_is_linted_and_written_to_a_file(command: Callable[[str], tuple[int, str, str]], muddle: Lineage) -> None:
    muddle.save("muddle.json")
    status, out, err = command("lint muddle.json -o out.txt --format json")
    assert (status, out, err) == (1, "", "")
    assert [f["code"] for f in json.loads(Path("out.txt").read_text())] == [f.code for f in gradlineage.lint(muddle)]
    assert command("lint muddle.json --input 2x4")[0] == 2


def test_help_names_every_code(command: Callable[[str], tuple[int, str, str]]) -> None:
    text = command("lint --help")[1]
    assert all(f"  {code} " in text and told in text for code, told in CODES.items())


def test_command_grads_exits_with_one_where_a_parameter_gets_none(command: Callable[[str], tuple[int, str, str]]) -> None:
    assert command("grads net.py:Mode --input 2x4") == (0, "gradient reaches 2 of 2 parameters that take one\n", "")
    status, out, _ = command("grads net.py:Mode --input 2x4 --train")
    assert (
        status == 1
        and out.startswith("gradient reaches 0 of 2 parameters that take one\n")
        and out.endswith("    fc.weight\n    fc.bias\n")
    )
    assert command("grads net.py:Mode --input 2x4 --output-tensor 0")[0] == 0
    status, _, err = command("grads net.py:Mode --input 2x4 --output-tensor 7")
    assert status == 2 and "there is no such output tensor" in err
