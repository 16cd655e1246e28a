# mypy: disable-error-code="no-untyped-call,no-any-return,func-returns-value,misc"
"""Nothing is left behind: a model and a process are after a trace what they were before, bit for bit, whether or not it ended well."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo  # the first trace loads it, which is no switch
import torch.nn.utils.prune
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradlineage
from tests.nets import Net, data, lin
from tests.state import bits, changes, hooks_of, model_facts, process_facts, state_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
T: Any = pytest.importorskip("transformers")
torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # torch and transformers warn of parts of their own

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, Callable[[], Made]] = {}


def _model(make: Callable[[], Made]) -> Callable[[], Made]:
    MODELS[make.__name__] = make
    return make


def _image(size: int = 32, batch: int = 2) -> tuple[Tensor]:
    return (torch.randn(batch, 3, size, size),)


@_model
def conv_net() -> Made:
    return (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Identity(), nn.Dropout2d(), nn.InstanceNorm2d(4, track_running_stats=True),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.RReLU(), nn.Linear(4, 2),
        ),
        _image(8), {},
    )  # fmt: skip


@_model
def resnet18() -> Made:
    return torchvision.models.resnet18(weights=None), _image(), {}


@_model
def mobilenet_v3_small() -> Made:
    return torchvision.models.mobilenet_v3_small(weights=None), _image(), {}


@_model
def shufflenet_v2_x0_5() -> Made:
    return torchvision.models.shufflenet_v2_x0_5(weights=None), _image(), {}


@_model
def googlenet() -> Made:
    return torchvision.models.googlenet(weights=None, init_weights=False), _image(64), {}


_TEXT = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
}  # fmt: skip


def _ids() -> dict[str, Any]:
    return {"input_ids": torch.randint(5, 50, (2, 8)), "attention_mask": torch.tensor([[1] * 8, [1] * 6 + [0] * 2]), "use_cache": False}


@_model
def bert() -> Made:
    return T.BertForMaskedLM(T.BertConfig(**_TEXT)), (), {k: v for k, v in _ids().items() if k != "use_cache"}


@_model
def gpt2() -> Made:
    return T.GPT2LMHeadModel(T.GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2)), (), _ids()


@_model
def llama() -> Made:
    return T.LlamaForCausalLM(T.LlamaConfig(**_TEXT, num_key_value_heads=1)), (), _ids()


@_model
def t5() -> Made:
    config = T.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return T.T5ForConditionalGeneration(config), (), {**_ids(), "labels": torch.randint(5, 50, (2, 4))}


@_model
def lstm() -> Made:
    return (
        Net(lambda m, x: m.out(m.rnn(x)[0]), rnn=nn.LSTM(4, 4, 2, dropout=0.5, bidirectional=True), out=nn.Linear(8, 1)),
        (data(3, 2, 4),),
        {},
    )


@_model
def transformer() -> Made:
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True, norm_first=True), (data(2, 3, 8), data(2, 3, 8)), {}


@_model
def spectral_norm() -> Made:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(lin()), nn.utils.parametrizations.orthogonal(lin())), (data(),), {}


@_model
def weight_norm() -> Made:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(lin()), nn.LayerNorm(4)), (data(),), {}


@_model
def old_norms() -> Made:
    return nn.Sequential(nn.utils.spectral_norm(lin()), nn.utils.weight_norm(lin())), (data(),), {}


@_model
def pruned() -> Made:
    net = nn.Sequential(lin(), nn.GELU(), lin())
    nn.utils.prune.random_unstructured(net[0], "weight", 0.5)
    return net, (data(),), {}


@_model
def embeddings() -> Made:
    return Net(lambda m, i: m.bag(i).sum() + m.table(i).sum(), table=nn.Embedding(9, 4, max_norm=0.1), bag=nn.EmbeddingBag(9, 4, max_norm=0.2)), (
        torch.tensor([[1, 2], [3, 1]]),
    ), {}  # fmt: skip


@_model
def shared_norm() -> Made:
    """One BatchNorm in two places, under two names, and a buffer that the forward replaces."""

    def run(m: Any, x: Tensor) -> Tensor:
        m.ema = m.ema * 0.9 + x.mean(0)
        m.count += 1
        return m.b(m.bn(m.a(m.bn(x)))) + m.ema

    net = Net(run, bn=nn.BatchNorm1d(4), a=lin(), b=lin())
    net.register_buffer("ema", torch.ones(4))
    net.register_buffer("count", torch.zeros((), dtype=torch.int64))
    net.a.norm = net.bn
    return net, (data(),), {}


STORING = ("old_norms", "pruned")
"""Their own hooks store a tensor on the module in every pass, traced or not."""


def made(name: str, training: bool = True) -> Made:
    """A model on which everything is as particular as it can be: modes, gradients and hooks of its own."""
    torch.manual_seed(1)
    model, args, kwargs = MODELS[name]()
    model.train(training)
    for number, module in enumerate(model.modules()):
        module.register_forward_hook(lambda m, args, output: None)
        module.register_forward_pre_hook(lambda m, args, kwargs: None, with_kwargs=True)
        module.register_forward_hook(lambda m, args, kwargs, output: None, with_kwargs=True, always_call=True, prepend=number % 2 == 0)
        if number % 7 == 3:
            module.training = not module.training
    for number, parameter in enumerate(model.parameters()):
        if number % 3 == 0:
            parameter.grad = torch.full_like(parameter, 2.0)
        if number % 5 == 2:
            parameter.requires_grad_(False)
    return model, args, kwargs


def seen(name: str, before: dict[str, object], after: dict[str, object]) -> list[str]:
    return [line for line in changes(before, after) if not (name in STORING and " attribute values: " in line)]


# -- the model -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_trace_that_ends_well_leaves_everything_as_it_was(name: str, training: bool) -> None:
    model, args, kwargs = made(name, training)
    before = state_of(model)
    lineage = gradlineage.trace(model, *args, **kwargs)
    assert seen(name, before, state_of(model)) == []
    assert lineage.layers


@pytest.mark.parametrize("name", MODELS)
def test_trace_that_ends_badly_leaves_everything_as_it_was(name: str) -> None:
    def fail(module: nn.Module, args: Any, output: Any) -> None:
        raise ValueError("at the very end")

    model, args, kwargs = made(name)
    model.register_forward_hook(fail)
    before = state_of(model)
    with pytest.raises(ValueError, match="at the very end"):
        gradlineage.trace(model, *args, **kwargs)
    assert seen(name, before, state_of(model)) == []


@pytest.mark.parametrize("name", ["resnet18", "bert", "weight_norm", "lstm"])
def test_trace_without_gradient_of_a_model_that_writes_nothing_does_not_even_count_versions_up(name: str) -> None:
    model, args, kwargs = made(name, False)
    model.eval()
    before = state_of(model, versions=True)
    with torch.no_grad():
        gradlineage.trace(model, *args, **kwargs)
    assert changes(before, state_of(model, versions=True)) == []


@pytest.mark.parametrize("name", MODELS)
def test_restoring_recording_leaves_everything_as_it_was(name: str) -> None:
    model, args, kwargs = made(name)
    before = state_of(model)
    with gradlineage.recording(model, restore=True):
        model(*args, **kwargs)
    assert seen(name, before, state_of(model)) == []


@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_recording_changes_nothing_about_a_training_step(name: str, shadow: bool) -> None:
    """Outputs, gradients, parameters, buffers and random state after two steps with and without a recording: the same bits."""

    def step(model: nn.Module, args: Any, kwargs: Any, optimizer: torch.optim.Optimizer) -> list[object]:
        outputs = [t for t in tree_leaves(model(*args, **kwargs)) if isinstance(t, Tensor)]
        sum(t.float().square().mean() for t in outputs if t.requires_grad).backward()  # type: ignore[union-attr]
        optimizer.step()
        return [(bits(t), t.stride(), t.dtype, t.requires_grad) for t in outputs]

    def after(recorded: bool) -> list[object]:
        model, args, kwargs = made(name)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        torch.manual_seed(5)
        with gradlineage.recording(model, shadow=shadow) if recorded else contextlib.nullcontext():
            told = [step(model, args, kwargs, optimizer) for _ in range(2)]
        facts = model_facts(model)
        kept = {k: v for k, v in facts.items() if k.endswith((": values", ": looks", "attributes", "training"))}
        gradients = [None if p.grad is None else bits(p.grad) for p in model.parameters()]
        return [told, kept, gradients, bits(torch.get_rng_state())]

    assert after(True) == after(False)


@pytest.mark.parametrize("name", MODELS)
def test_traced_forward_computes_what_the_plain_one_does_with_the_same_strides(name: str) -> None:
    """Every module's output, as the user's own hooks see it."""
    model, args, kwargs = made(name, True)
    told: list[object] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        told.extend(
            (type(module).__name__, bits(t), t.shape, t.stride(), t.dtype, t.requires_grad)
            for t in tree_leaves(output)
            if isinstance(t, Tensor)
        )

    plain, *_ = made(name, True)
    for module in (*model.modules(), *plain.modules()):
        module.register_forward_hook(look)
    torch.manual_seed(6)
    plain(*args, **kwargs)
    expected = told.copy()
    told.clear()
    torch.manual_seed(6)
    gradlineage.trace(model, *args, **kwargs)
    assert told == expected


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("grad", [True, False])
def test_channels_last_stays_so_through_modules_that_hand_their_input_on(batch: int, grad: bool) -> None:
    net: nn.Module = nn.Sequential(
        nn.Identity(), nn.Conv2d(1, 4, 1), nn.Dropout(), nn.ReLU(), nn.Identity(), nn.Conv2d(4, 1, 3), nn.Identity()
    )
    net = net.to(memory_format=torch.channels_last).eval()
    image = torch.randn(batch, 1, 5, 5).to(memory_format=torch.channels_last)
    told: list[object] = []
    for module in net.modules():
        module.register_forward_hook(lambda m, args, output: told.append((output.stride(), bits(output))))
    with torch.set_grad_enabled(grad):
        net(image)
        expected = told.copy()
        told.clear()
        gradlineage.trace(net, image)
    assert told == expected


def test_lazy_modules_become_what_a_plain_call_makes_of_them() -> None:
    def lazy() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))

    def facts(net: nn.Module) -> dict[str, object]:
        return {k: v for k, v in model_facts(net).items() if k.endswith((": values", "training", "attributes", "_hooks"))}

    plain, traced, failed = lazy(), lazy(), lazy()
    plain.eval()(*_image(8))
    x = _image(8)
    torch.manual_seed(2)
    plain, random_before = lazy().eval(), torch.get_rng_state()
    plain(*x)
    traced.eval()
    torch.set_rng_state(random_before)
    gradlineage.trace(traced, *x)
    assert torch.equal(torch.get_rng_state(), random_before)
    assert facts(traced) == facts(plain)
    assert hooks_of(traced) == []
    failed.register_forward_hook(lambda m, args, output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradlineage.trace(failed, *x)
    assert len(hooks_of(failed)) == 1


# -- copies ------------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fastpath_off() -> Any:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


class Counts(TorchDispatchMode):
    """How often each kernel ran."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def extra_kernels(model: nn.Module, args: Any, kwargs: Any) -> Counter[str]:
    """What a trace runs beyond the plain forward, views aside, which move no data."""
    with fastpath_off(), Counts() as plain:
        model(*args, **kwargs)
    with Counts() as traced:
        gradlineage.trace(model, *args, **kwargs)
    views = ("detach", "alias", "_unsafe_view", "as_strided_", "slice", "select")
    return Counter({k: n for k, n in (traced.found - plain.found).items() if k not in views})


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("embeddings", "shared_norm")])  # these write in eval mode too
def test_trace_in_eval_mode_runs_no_kernel_of_its_own(name: str) -> None:
    model, args, kwargs = made(name)
    model.eval()
    with torch.no_grad():
        assert extra_kernels(model, args, kwargs) == Counter()


def test_what_is_written_is_copied_once_and_put_back_once() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1), bn := nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), bn, nn.BatchNorm2d(3))
    assert extra_kernels(net.train(), _image(4), {}) == {"clone": 6, "copy_": 6}  # two modules with three buffers each


def test_what_many_writes_change_is_copied_once() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        for _ in range(5):
            m.count.add_(1)
        return m.a(x)

    net = Net(run, a=lin())
    net.register_buffer("count", torch.zeros(()))
    net.register_buffer("large", torch.zeros(1000))
    assert extra_kernels(net, (data(),), {}) == {"clone": 1, "copy_": 1}


def test_copies_are_gone_after_the_trace() -> None:
    import gc
    import weakref

    kept: list[weakref.ref[Tensor]] = []
    original = Tensor.clone

    def clone(self: Tensor, **options: Any) -> Tensor:
        kept.append(weakref.ref(made := original(self, **options)))
        return made

    net = nn.Sequential(nn.BatchNorm1d(4)).train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "clone", clone)
        gradlineage.trace(net, data())
    gc.collect()
    assert len(kept) >= 3
    assert {ref() for ref in kept} == {None}


# -- changes of shape and place --------------------------------------------------------------------------------------------------------


def _under_inference(m: Any) -> None:
    with torch.inference_mode():
        m.buffer.add_(1)
        m.weight.mul_(2)


def _delete(m: Any) -> None:
    del m.buffer


WRITES: dict[str, Callable[[Any], object]] = {
    "added to": lambda m: m.buffer.add_(1),
    "filled through a row": lambda m: m.buffer[0].zero_(),
    "filled through a flat view": lambda m: m.weight.data.flatten().zero_(),
    "out": lambda m: torch.add(m.buffer, 1, out=m.buffer),
    "under inference mode": _under_inference,
    "foreach": lambda m: torch._foreach_add_([m.buffer, m.weight.data], 1),
    "by kernel": lambda m: torch.ops.aten.add_(m.buffer, 1),
    "data is another tensor": lambda m: setattr(m.weight, "data", m.weight.data + 1),
    "data is another, written then": lambda m: (setattr(m.weight, "data", m.weight.data + 1), m.weight.data.mul_(3)),
    "written, data is another then": lambda m: (m.weight.data.mul_(3), setattr(m.weight, "data", m.weight.data + 1)),
    "data of another dtype": lambda m: setattr(m.weight, "data", m.weight.data.half()),
    "replaced": lambda m: (setattr(m, "buffer", torch.zeros(3)), setattr(m, "weight", nn.Parameter(torch.zeros(1)))),
    "set to None": lambda m: (setattr(m, "buffer", None), setattr(m, "weight", None)),
    "state loaded": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "cast there and back": lambda m: m.half().float(),
    "vector": lambda m: nn.utils.vector_to_parameters(torch.zeros(28), m.parameters()),
    "deleted": _delete,
    "transposed in place": lambda m: m.buffer.t_(),
    "unsqueezed in place": lambda m: m.buffer.unsqueeze_(0),
    "resized": lambda m: m.buffer.resize_(3, 4),
    "out of another size": lambda m: torch.add(torch.zeros(1), 1, out=m.buffer),
    "data is its own transpose": lambda m: setattr(m.weight, "data", m.weight.data.t()),
    "data is its own row": lambda m: setattr(m.weight, "data", m.weight.data[:1]),
}  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_whatever_the_forward_does_to_a_parameter_or_buffer_is_undone(name: str, fails: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        WRITES[name](m)
        if fails:
            raise ValueError(name)
        return y

    net = Net(run, a=lin())
    net.register_buffer("buffer", torch.arange(8.0).view(2, 4))
    net.weight = nn.Parameter(torch.arange(8.0).view(2, 4))
    before = model_facts(net)
    with pytest.raises(ValueError, match=name) if fails else contextlib.nullcontext():
        gradlineage.trace(net, data())
    differ = [line for line in changes(before, model_facts(net)) if ": memory" not in line]  # memory may have grown
    assert differ == []


# -- the process -----------------------------------------------------------------------------------------------------------------------


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def wide_numbers() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64 by default": wide_numbers,
    "another device by default": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "a function mode": Passing,
    "a dispatch mode": Counts,
    "fast path off": fastpath_off,
    "a stance": lambda: torch.compiler.set_stance("eager_on_recompile"),
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "one thread for autograd": lambda: torch.autograd.set_multithreading_enabled(False),
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("ends", ["well", "badly"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_modes_and_switches_of_the_caller_hold_during_and_after_a_trace(context: str, ends: str) -> None:
    during: list[dict[str, object]] = []

    def run(m: Any, x: Tensor) -> Tensor:
        during.append(process_facts())
        y = m.c(m.drop(m.bn(m.a(x))))
        if ends == "badly":
            raise KeyError(context)
        return y

    net = Net(run, a=lin(), bn=nn.BatchNorm1d(4), drop=nn.Dropout(), c=lin())
    x = data()
    outside = process_facts()
    with CONTEXTS[context]():
        before = {**process_facts(), **model_facts(net)}
        with contextlib.nullcontext() if ends == "well" else pytest.raises(KeyError):
            gradlineage.trace(net, x)
        assert changes(before, {**process_facts(), **model_facts(net)}) == []
    assert changes(outside, process_facts()) == []
    ours = ("function modes", "saved tensor hooks", "attention", "stance", "_global_forward", "recursion limit", "dispatch modes")
    assert [c for c in changes({k: v for k, v in before.items() if k in during[0]}, during[0]) if not c.startswith(ours)] == []


@pytest.mark.parametrize("name", ["shadow", "restore", "drop_saved"])
@pytest.mark.parametrize("ends", ["well", "badly"])
def test_recording_puts_modes_and_switches_back(name: str, ends: str) -> None:
    net, x = Net(lambda m, x: m.a(x), a=lin()), data()
    before = process_facts()
    with pytest.raises(KeyError) if ends == "badly" else contextlib.nullcontext(), gradlineage.recording(net, **{name: name != "shadow"}):
        net(x)
        if ends == "badly":
            raise KeyError(name)
    assert changes(before, process_facts()) == []
    assert hooks_of(net) == []


def test_random_numbers_of_python_and_numpy_go_on_as_if_there_had_been_no_trace() -> None:
    model, args, kwargs = made("conv_net")
    random.seed(3), numpy.random.seed(3)
    expected = random.random(), numpy.random.rand()
    random.seed(3), numpy.random.seed(3)
    gradlineage.trace(model, *args, **kwargs)
    assert (random.random(), numpy.random.rand()) == expected


def test_trace_many_puts_back_what_its_passes_wrote_and_drew() -> None:
    model, args, _ = made("conv_net")
    before = state_of(model)
    gradlineage.trace_many(model, [args] * 3)
    assert changes(before, state_of(model)) == []

    def broken() -> Any:
        yield args
        raise KeyError("no more")

    with pytest.raises(KeyError):
        gradlineage.trace_many(model, broken())
    assert changes(before, state_of(model)) == []


def test_first_trace_of_a_process_leaves_its_switches_alone() -> None:
    """The first one imports parts of torch, which have effects of their own."""
    code = """
import torch, gradlineage, gradlineage.tracing
from tests.state import process_facts, changes
model = torch.nn.Linear(2, 2)
before = process_facts()
gradlineage.trace(model, torch.ones(1, 2))
print([c for c in changes(before, process_facts()) if not c.startswith(("stance came", "import path", "warnings"))])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
