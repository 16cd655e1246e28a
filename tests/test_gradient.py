"""Which parameters get a gradient: `lineage.gradient()` against what a real backward leaves in ``p.grad``, on models of all kinds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision import models

import gradlineage
from gradlineage.errors import LineageError, NameNotFound
from gradlineage.gradient import GradientReport
from gradlineage.lineage import Lineage
from tests import test_tracker_timm, test_tracker_torchvision, test_tracker_transformers
from tests.nets import Net, data, lin
from tests.profiles import examples
from tests.strategies import Program, Step, programs
from tests.test_programs import Pool, inputs

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")


# -- the truth -------------------------------------------------------------------------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested containers, each place once, in the order of the containers."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [t for item in items for t in tensors(item)]


def backward(model: nn.Module, outputs: list[Tensor]) -> set[str]:
    """Names of the parameters that a backward from the sum of these outputs leaves a gradient in."""
    model.zero_grad(set_to_none=True)
    sums = [t.abs().sum() if t.is_complex() else t.float().sum() for t in outputs if t.requires_grad]
    if sums:
        torch.autograd.backward(torch.stack(sums).sum(), retain_graph=True)
    return {name for name, p in model.named_parameters() if p.grad is not None}


def both(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[set[str], GradientReport]:
    """What backward reaches, and what gradlineage says, on the same random numbers."""
    torch.manual_seed(0)
    real = backward(model, tensors(model(*args, **kwargs)))
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    return real, gradlineage.trace(model, *args, **kwargs).gradient()


def agree(model: nn.Module, *args: Any, **kwargs: Any) -> GradientReport:
    real, report = both(model, *args, **kwargs)
    claimed = set(report.reached)
    assert claimed == real, f"claimed without reason {sorted(claimed - real)}, overlooked {sorted(real - claimed)}"
    assert [p.name for p in report] == [name for name, _ in model.named_parameters()]
    assert all(p.elements == q.numel() for p, q in zip(report, model.parameters(), strict=False))
    return report


def states(report: GradientReport) -> dict[str, str]:
    return {p.name: p.state for p in report if not p.reached}


# -- the zoos --------------------------------------------------------------------------------------------------------------------------

IMAGES = {
    "alexnet": 64, "convnext_tiny": 64, "densenet121": 64, "efficientnet_b0": 64, "googlenet": 64, "inception_v3": 299, "maxvit_t": 224,
    "mnasnet0_5": 64, "mobilenet_v2": 64, "mobilenet_v3_small": 64, "regnet_y_400mf": 64, "resnet18": 64, "shufflenet_v2_x0_5": 64,
    "squeezenet1_1": 64, "swin_t": 64, "swin_v2_t": 64, "vgg11": 64, "vit_b_32": 64,
}  # fmt: skip
BUILD: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}, "vit_b_32": {"image_size": 64},
}  # fmt: skip


def image_model(name: str) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        model: nn.Module = models.get_model(name, weights=None, num_classes=4, **BUILD.get(name, {}))
    return model


@pytest.mark.parametrize("name", IMAGES)
def test_torchvision_classifiers_in_training_get_gradient_where_backward_leaves_it(name: str) -> None:
    report = agree(image_model(name).train(), torch.rand(2, 3, IMAGES[name], IMAGES[name]))
    assert report.missing == ()


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_heads_get_none_in_eval_mode(name: str) -> None:
    report = agree(image_model(name).eval(), torch.rand(1, 3, IMAGES[name], IMAGES[name]))
    assert {p.state for p in report.missing} == {"never called"}
    assert {p.name.split(".")[0].lower() for p in report.missing} <= {"aux1", "aux2", "auxlogits"}
    assert report.missing


HEADS = {  # what a detector's boxes are cut off from; the one-stage ones keep all of it
    "fasterrcnn_mobilenet_v3_large_320_fpn": "rpn.", "maskrcnn_resnet50_fpn": "rpn.", "retinanet_resnet50_fpn": "", "fcos_resnet50_fpn": "",
    "ssdlite320_mobilenet_v3_large": "",
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_boxes_of_detectors_send_no_gradient_to_the_proposals(name: str) -> None:
    model, args, kwargs = test_tracker_torchvision._detector(name)()
    report = agree(model.eval(), *args, **kwargs)
    assert all(p.state == "cut" and p.name.startswith(HEADS[name]) and p.breaks for p in report.missing)
    assert bool(report.missing) == bool(HEADS[name])


def test_losses_of_a_detector_send_gradient_to_the_proposals_too() -> None:
    model, args, kwargs = test_tracker_torchvision._detector("fasterrcnn_mobilenet_v3_large_320_fpn", training=True)()
    assert agree(model, *args, **kwargs).missing == ()


TEXT = [
    "bert", "bigbird", "clip", "deberta_v2", "deepseek_v3", "detr", "deformable_detr", "funnel", "gpt2", "llama", "mamba", "mixtral", "switch_transformers",
    "t5", "vit_mae", "wav2vec2", "whisper", "xlnet",
]  # fmt: skip


@pytest.mark.parametrize("name", TEXT)
def test_transformers_in_training_get_gradient_where_backward_leaves_it(name: str) -> None:
    torch.manual_seed(0)
    model, kwargs = test_tracker_transformers._MODELS[name]()
    agree(model.train(), **kwargs)


@pytest.mark.xfail(
    strict=True, reason="a custom Function whose backward runs a backward of its own is taken for a break, see docs/limits.md"
)
def test_layers_that_a_custom_function_runs_backwards_itself_get_gradient() -> None:
    model, kwargs = test_tracker_transformers._MODELS["reformer"]()
    agree(model.train(), **kwargs)


@pytest.mark.parametrize(
    "name", ["cait_xxs24_224", "coat_tiny", "convit_tiny", "efficientnet_b0", "hrnet_w18_small", "levit_128s", "xcit_nano_12_p16_224"]
)
def test_timm_models_in_training_get_gradient_where_backward_leaves_it(name: str) -> None:
    model, args, kwargs = test_tracker_timm._image_model(name, training=True)()
    agree(model, *args, **kwargs)


# -- random programs -------------------------------------------------------------------------------------------------------------------


DROPS = {"wipe", "copy", "set_all", "wipe_"}
VIEWS = {"full_view", "part_view", "chunk"}


def doubtful(program: Program) -> bool:
    """Whether it does what two tests below say gradlineage is wrong about: drops what was written, or makes views without gradient."""

    def looked_at(steps: Iterable[Step], quiet: bool) -> bool:
        return any(
            (kind := program.specs[step.module].kind if step.kind == "layer" else step.kind) in DROPS
            or (quiet and kind in {*VIEWS, "flat", "first"})
            or looked_at(step.inner, quiet or step.kind == "no_grad")
            or (step.kind == "block" and looked_at(program.specs[step.module].steps, quiet))
            for step in steps
        )

    return looked_at(program.specs[0].steps, False)


def compare_program(program: Program) -> None:
    """All outputs together, and each of them alone."""
    assume(not doubtful(program))
    torch.manual_seed(0)
    model = Pool(program).modules[0].eval()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):  # so that writes spoil no backward
        found = tensors(model(*inputs(program, "grad")))
    torch.manual_seed(0)
    lineage = gradlineage.trace(Pool(program).modules[0].eval(), *inputs(program, "grad"))
    assert len(found) == len(lineage.outputs)
    assert set(lineage.gradient().reached) == backward(model, found)
    for number, output in enumerate(found):
        real, claimed = backward(model, [output]), set(lineage.gradient(number).reached)
        assert claimed == real, f"output {number}: claimed without reason {sorted(claimed - real)}, overlooked {sorted(real - claimed)}"


@given(program=programs(writes=False))
@examples(120)
def test_gradient_of_a_pure_program_is_that_of_a_backward_from_all_outputs_and_from_each(program: Program) -> None:
    compare_program(program)


@given(program=programs(writes=True))
@examples(120)
def test_gradient_of_a_program_that_writes_in_place_is_that_of_a_backward_from_all_outputs_and_from_each(program: Program) -> None:
    compare_program(program)


# -- by hand ---------------------------------------------------------------------------------------------------------------------------


class Half(torch.autograd.Function):
    """Passes gradient to its first operand only."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Weight(nn.Module):
    """A layer with a weight, and a bias that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def quiet(function: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return function()


def straight_through(x: Tensor) -> Tensor:
    return x + (torch.round(x) - x).detach()


def cached(net: Net, x: Tensor) -> Tensor:
    net.kept = net.b(net.a(x)).detach()
    return net.c(net.kept)  # type: ignore[no-any-return]


def inner_grad(net: Net, x: Tensor) -> Tensor:
    def run() -> Tensor:
        h = net.a(x)
        with torch.enable_grad():
            return net.b(h)  # type: ignore[no-any-return]

    return quiet(run)


A, B, C, E = "a.weight a.bias", "b.weight b.bias", "c.weight c.bias", "e.weight"
CASES: dict[str, tuple[Callable[[Net, Tensor], Any], str, str]] = {  # the forward, what is missed, and as what
    "all of it": (lambda n, x: n.b(n.a(x)), "", ""),
    "detach": (lambda n, x: n.b(n.a(x).detach()), A, "cut"),
    "data": (lambda n, x: n.b(n.a(x).data), A, "cut"),
    "a part detached": (lambda n, x: n.b(n.a(x)) + n.c(n.a(x).detach()), "", ""),
    "straight through": (lambda n, x: n.b(straight_through(n.a(x))), "", ""),
    "no_grad region": (lambda n, x: n.b(quiet(lambda: n.a(x) * 2)), A, "cut"),
    "no_grad around a layer": (lambda n, x: n.b(quiet(lambda: n.a(x))), A, "cut"),
    "gradient again within no_grad": (inner_grad, A, "cut"),
    "argmax": (lambda n, x: n.e(n.a(x).argmax(-1)), A, "cut"),
    "indices of topk": (lambda n, x: n.e(n.a(x).topk(2).indices), A, "cut"),
    "values of topk": (lambda n, x: n.b(n.a(x).topk(4).values), "", ""),
    "a condition": (lambda n, x: torch.where(n.a(x) > 0, n.b(x), x), A, "cut"),
    "rounding, which has gradient zero": (lambda n, x: n.b(torch.round(n.a(x))), "", ""),
    "times zero": (lambda n, x: n.a(x) * 0 + n.b(x), "", ""),
    "a result dropped": (lambda n, x: (n.a(x), n.b(x))[1], A, "dead"),
    "a result that only decides": (lambda n, x: n.b(x) if n.a(x).sum() < 1e9 else x, A, "dead"),
    "read by item": (lambda n, x: n.b(x) * n.a(x).sum().item(), A, "dead"),
    "one of two outputs without gradient": (lambda n, x: {"p": n.a(x), "q": n.b(x).argmax(-1)}, B, "cut"),
    "kept on the module": (cached, f"{A} {B}", "cut"),
    "half of a chunk": (lambda n, x: n.b(torch.cat([n.a(x).chunk(2, -1)[0]] * 2, -1)), "", ""),
    "an operand of a custom Function without gradient": (lambda n, x: Half.apply(n.a(x), n.b(x)), B, "cut"),
    "the other operand of a custom Function": (lambda n, x: Half.apply(n.b(x), n.a(x)), A, "cut"),
    "in place": (lambda n, x: n.b(n.a(x).mul_(2)), "", ""),
    "in place into a part": (lambda n, x: n.b(n.a(x).index_add_(0, torch.tensor([0]), n.c(x[:1]))), "", ""),
    "a parameter returned": (lambda n, x: (n.b(x), n.a.weight), "a.bias", "never called"),
    "a weight borrowed": (lambda n, x: n.b(F.linear(x, n.a.weight)), "a.bias", "never called"),
    "checkpoint": (lambda n, x: n.b(checkpoint(n.a, x, use_reentrant=False)), "", ""),
    "reentrant checkpoint of an input without gradient": (lambda n, x: n.b(checkpoint(n.a, x, use_reentrant=True)), A, "cut"),
    "reentrant checkpoint of a value with gradient": (lambda n, x: checkpoint(n.b, n.a(x), use_reentrant=True), "", ""),
    "called directly": (lambda n, x: n.b.forward(n.a.forward(x)), "", ""),
    "a leaf made on the way": (lambda n, x: n.b(n.a(x).detach().requires_grad_()), A, "cut"),
}  # fmt: skip


def called(model: nn.Module, x: Tensor) -> set[str]:
    """Owners of parameters that a plain call runs."""
    seen: set[str] = set()
    handles = [m.register_forward_hook(lambda *_, name=name: seen.add(name)) for name, m in model.named_modules()]
    model(x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("case", CASES)
def test_parameter_that_gets_none_says_why(case: str) -> None:
    run, missed, state = CASES[case]
    model = Net(run, a=lin(), b=lin(), c=lin(), e=nn.Embedding(4, 4))
    report = agree(model, data())
    ran = called(model, data())
    spared = {name for name in states(report) if name.split(".")[0] not in ran} - set(missed.split())
    assert {n: s for n, s in states(report).items() if n not in spared} == dict.fromkeys(missed.split(), state)
    assert {states(report)[n] for n in spared} <= {"never called"}


def test_frozen_backbone_is_told_apart_from_what_is_missing() -> None:
    report = agree(Net(lambda n, x: n.b(n.a(x)), a=lin().requires_grad_(False), b=lin()), data())
    assert states(report) == {"a.weight": "frozen", "a.bias": "frozen"}
    assert report.missing == ()
    assert str(report) == "gradient reaches 2 of 2 parameters that take one, 2 are frozen"


def test_frozen_layer_hands_gradient_on() -> None:
    assert agree(Net(lambda n, x: n.b(n.a(x)), a=lin(), b=lin().requires_grad_(False)), data()).missing == ()


def test_parameter_that_its_module_does_not_use_is_unused() -> None:
    report = agree(Net(lambda n, x: n.a(x), a=Weight()), data())
    assert states(report) == {"a.bias": "unused"}
    assert report["a.bias"].why == "not used, though its module ran"


@pytest.mark.parametrize(
    "which", [0, pytest.param(1, marks=pytest.mark.xfail(strict=True, reason="attention weights are taken to come from out_proj"))]
)
def test_output_of_attention_sends_gradient_to_what_it_was_computed_from(which: int) -> None:
    agree(Net(lambda n, x: n.m(x, x, x)[which], m=nn.MultiheadAttention(4, 2)), data(3, 1, 4))


@pytest.mark.parametrize("pick", [lambda out: out[0], lambda out: out[1][0], lambda out: out[1][1]])
@pytest.mark.parametrize("both_ways", [False, True])
def test_lstm_gets_gradient_from_each_of_its_outputs(pick: Callable[[Any], Tensor], both_ways: bool) -> None:
    agree(Net(lambda n, x: pick(n.m(x)), m=nn.LSTM(4, 4, 2, bidirectional=both_ways)), data(3, 2, 4))


def test_tied_weight_is_one_parameter_under_its_first_name() -> None:
    model = Net(lambda n, i: n.head(n.body(n.embed(i))), embed=nn.Embedding(4, 4), body=lin(), head=nn.Linear(4, 4, bias=False))
    model.head.weight = model.embed.weight
    assert agree(model, torch.tensor([0, 1])).reached == ("embed.weight", "body.weight", "body.bias")


def test_tied_weight_gets_gradient_by_its_second_owner_alone() -> None:
    model = Net(lambda n, i: n.head(n.embed(i).detach()), embed=nn.Embedding(4, 4), head=nn.Linear(4, 4, bias=False))
    model.head.weight = model.embed.weight
    assert agree(model, torch.tensor([0, 1])).reached == ("embed.weight",)


def test_embedding_of_padding_alone_gets_a_gradient_of_zeros() -> None:
    assert agree(Net(lambda n, i: n.e(i), e=nn.Embedding(4, 4, padding_idx=0)), torch.tensor([0, 0])).reached == ("e.weight",)


def test_parametrized_weight_sends_gradient_to_what_it_is_made_of() -> None:
    agree(Net(lambda n, x: n.a(x), a=nn.utils.parametrizations.weight_norm(lin())), data())


def test_pass_without_gradient_is_not_called_cut() -> None:
    with torch.no_grad():
        report = gradlineage.trace(Net(lambda n, x: n.a(x), a=lin()), data()).gradient()
    assert {p.state for p in report} == {"no grad"}
    assert report.reached == ()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Same(Reverse):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Sign(Reverse):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()


def through(function: Any, *args: Any) -> Tensor:
    return function.apply(*args)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "run",
    [
        lambda n, x: n.b(through(Reverse, n.a(x))),
        lambda n, x: n.b(through(Same, n.a(x))),
        lambda n, x: n.b(through(Product, n.a(x), n.b.weight)),
        lambda n, x: through(Product, through(Product, n.a(x), n.b.weight), n.b.weight),
        lambda n, x: through(Product, through(Product, through(Product, n.a(x), n.b.weight).relu(), n.b.weight), n.b.weight),
        lambda n, x: n.b(through(Sign, through(Sign, n.a(x)))),
        lambda n, x: n.b(through(Reverse, through(Sign, n.a(x)))[:1]),
        lambda n, x: n.b(through(Sign, n.a(x).detach())),
    ],
)
def test_gradient_goes_through_custom_functions_as_their_backward_sends_it(run: Callable[[Any, Tensor], Tensor]) -> None:
    agree(Net(run, a=lin(), b=lin()), data())


@pytest.mark.parametrize(
    "run",
    [
        lambda n, x: n.b(x) + torch.tensor([n.a(x).mean(), n.a(x).std(), 1.0, 2.0], requires_grad=True),
        lambda n, x: n.b(torch.as_tensor(n.a(x))),
        lambda n, x: n.b(n.a(x).new_tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)),
    ],
)
def test_leaf_made_of_values_hands_no_gradient_on(run: Callable[[Any, Tensor], Tensor]) -> None:
    agree(Net(run, a=lin(), b=lin()), data())


def test_lazy_layers_get_gradient_in_their_first_pass() -> None:
    assert agree(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2)), data()).missing == ()


class Late(nn.Module):
    """Makes its layer when it knows the size."""

    def __init__(self) -> None:
        super().__init__()
        self.fc: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fc is None:
            self.fc = nn.Linear(x.shape[1], 3)
        return self.fc(x)  # type: ignore[no-any-return]


def test_layer_made_and_registered_in_the_forward_is_one_of_the_model() -> None:
    lineage = gradlineage.trace(nn.Sequential(lin(), Late()), data())
    assert [c.label for c in lineage.layers] == ["0", "1.fc"] and lineage["1.fc"].registered
    assert lineage.gradient().reached == ("0.weight", "0.bias", "1.fc.weight", "1.fc.bias")
    assert gradlineage.lint(lineage) == ()


def test_forward_without_gradient_of_its_own_accord_cuts() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        return quiet(lambda: net.b(net.a(x)))

    report = gradlineage.trace(Net(run, a=lin(), b=lin()), data()).gradient()
    assert {p.state for p in report} == {"cut"}


@pytest.mark.parametrize(
    "view", [lambda h: h[:], lambda h: h.view(2, 4), lambda h: h[:, :4], lambda h: h.unsqueeze(0), lambda h: torch.cat(h.chunk(2))]
)
def test_view_made_without_gradient_stops_it(view: Callable[[Tensor], Tensor]) -> None:
    agree(Net(lambda n, x: n.b(quiet(lambda: view(h)) if (h := n.a(x)) is not None else h), a=lin(), b=lin()), data())


@pytest.mark.parametrize("drop", [lambda h, y: h.zero_(), lambda h, y: h.copy_(y), lambda h, y: h.__setitem__(slice(None), y)])
def test_overwritten_value_gets_a_gradient_of_zeros(drop: Callable[[Tensor, Tensor], Any]) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        drop(h, net.c(x))
        return net.b(h) + net.c(x)  # type: ignore[no-any-return]

    agree(Net(run, a=lin(), b=lin(), c=lin()), data())


# -- several models --------------------------------------------------------------------------------------------------------------------


def gan(detach: bool, freeze: bool) -> tuple[Lineage, set[str]]:
    parts: dict[str, nn.Module] = {"gen": nn.Sequential(lin(), lin()), "critic": nn.Sequential(lin(), nn.Linear(4, 1))}
    parts["critic"].requires_grad_(not freeze)
    with gradlineage.recording(parts) as rec:
        fake = parts["gen"](data())
        loss = parts["critic"](fake.detach() if detach else fake).mean() - parts["critic"](data()).mean()
    loss.backward()
    return rec.lineage(loss), {f"{k}.{n}" for k, m in parts.items() for n, p in m.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("detach", [False, True])
def test_gradient_goes_from_the_critic_into_the_generator_unless_it_is_stopped(detach: bool, freeze: bool) -> None:
    if detach and freeze:
        return
    lineage, real = gan(detach, freeze)
    report = lineage.gradient()
    assert set(report.reached) == real
    assert {p.state for p in report if p.name.startswith("gen.")} == {"cut" if detach else "reached"}
    assert {p.state for p in report if p.name.startswith("critic.")} == {"frozen" if freeze else "reached"}


# -- asking ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two() -> Lineage:
    return gradlineage.trace(Net(lambda n, x: {"p": n.a(x), "q": n.b(x).detach(), "r": n.a(x) + n.b(x)}, a=lin(), b=lin()), data())


def test_one_output_is_chosen_by_number_or_name(two: Lineage) -> None:
    assert two.gradient("p").reached == two.gradient("['p']").reached == two.gradient(0).reached == ("a.weight", "a.bias")
    assert two.gradient("['q']").reached == two.gradient(1).reached == ()
    assert two.gradient(2).reached == two.gradient().reached == ("a.weight", "a.bias", "b.weight", "b.bias")


def test_parameter_is_dead_for_an_output_that_another_layer_feeds(two: Lineage) -> None:
    assert states(two.gradient("['p']")) == {"b.weight": "dead", "b.bias": "dead"}
    assert states(two.gradient("['q']")) == {"a.weight": "dead", "a.bias": "dead", "b.weight": "cut", "b.bias": "cut"}


@pytest.mark.parametrize("output", [3, -1, "z"])
def test_output_that_is_not_there_is_told_with_those_that_are(two: Lineage, output: int | str) -> None:
    with pytest.raises(LineageError, match=r"there is no such output tensor; there are 0 \(\['p'\]\), 1 \(\['q'\]\), 2 \(\['r'\]\)"):
        two.gradient(output)


def test_report_is_looked_up_by_name_and_tells_the_nearest(two: Lineage) -> None:
    report = two.gradient()
    assert (report["a.bias"].reached, report["a.bias"].elements, len(report)) == (True, 4, 4)
    with pytest.raises(NameNotFound, match=r"no parameter named 'a.wieght' in this lineage; nearest: a.weight"):
        report["a.wieght"]


def test_collapsed_and_saved_lineages_say_the_same(two: Lineage) -> None:
    model = Net(lambda n, x: n.s(n.a(x).detach()), a=lin(), s=nn.Sequential(lin(), lin()))
    lineage = gradlineage.trace(model, data())
    for other in (lineage.collapse(depth=1), lineage.collapse(depth=0), Lineage.from_json(lineage.to_json()), lineage.roll()):
        assert [(p.name, p.state) for p in other.gradient()] == [(p.name, p.state) for p in lineage.gradient()]


def test_union_of_passes_is_refused() -> None:
    union = gradlineage.trace_many(lin(), [data(), data()]).union()
    if union.runs > 1:
        with pytest.raises(LineageError, match="gradient\\(\\) follows one pass; this is a union of several"):
            union.gradient()


def test_text_lists_what_is_missing_by_reason() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        net.b(x)
        return net.c(net.a(x).detach())  # type: ignore[no-any-return]

    text = str(gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin(), d=lin()), data()).gradient())
    line = run.__code__.co_firstlineno + 2
    assert text.replace("tests/", "") == (
        "gradient reaches 2 of 8 parameters that take one\n"
        f"the gradient stops on the way: detach at test_gradient.py:{line}:\n    a.weight\n    a.bias\n"
        "used, but nothing that was asked about depends on it:\n    b.weight\n    b.bias\n"
        "in a module that was never called:\n    d.weight\n    d.bias"
    )
