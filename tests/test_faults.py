# mypy: disable-error-code="no-untyped-call,no-any-return,func-returns-value,misc"
"""A forward that breaks off, anywhere and by anything: the error is the user's own, it says where, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first trace loads it, which is no switch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradlineage
from gradlineage.record import Recorder
from gradlineage.registry import Keeper, Registry
from gradlineage.shadow import ShadowMode
from tests.nets import Net, data, fed, lin
from tests.state import changes, hooks_of, state_of

torch.set_num_threads(1)


class Custom(Exception):
    """An exception with a life of its own: arguments of its own, notes of its own."""

    def __init__(self, a: int, *, b: int) -> None:
        super().__init__(a, b)
        self.add_note("the user's note")


KINDS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("mine"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "RecursionError": lambda: RecursionError("mine"),
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "StopIteration": lambda: StopIteration(1),
    "Custom": lambda: Custom(1, b=2),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("mine"),
}


class Early(nn.Module):
    """Goes another way where a layer fails, loops as often as a value says, and calls a layer by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cell, self.left, self.right = (
            lin(),
            nn.GRUCell(4, 4),
            nn.Sequential(lin(), nn.ReLU()),
            nn.Sequential(lin(), nn.Tanh()),
        )
        self.spare = [lin()]
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.seen += 1
        h = self.stem(x)
        for _ in range(int(x.shape[0]) + 1):
            h = self.cell(x, h)
        h = self.left(h) if h.sum().item() > -1e9 else self.right(h)
        h = self.spare[0](h)
        with torch.no_grad():
            best = h.argmax(-1)
        return {"h": h, "best": best}


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Identity()),
        nn.Dropout(), nn.Flatten(), nn.Linear(144, 2),
    )  # fmt: skip


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(
        nn.Embedding(9, 8),
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "cnn": (cnn, lambda: torch.randn(2, 3, 8, 8)),
    "transformer": (transformer, lambda: torch.tensor([[1, 2, 3], [4, 5, 6]])),
    "early": (Early, data),
}


class Points:
    """Raises at one point of a forward, and knows by itself which call that was in.

    Points are counted: as a module call begins (in the user's own pre-hook, before the call counts as one), as its forward begins, at every
    kernel, and as it ends (in the user's own hook).
    """

    def __init__(self, model: nn.Module) -> None:
        self.at, self.error, self.count = -1, BaseException(), 0
        self.calls: list[tuple[str, int]] = []  # under way
        self.began: list[tuple[str, int]] = []
        self.times: Counter[str] = Counter()
        self.inside: list[tuple[str, int]] = []
        self.kernels = False
        strangers = [(f"<{path}>", m) for path, m in (("spare", getattr(model, "spare", [None])[0]),) if m is not None]
        hidden = {id(m) for m in model.modules() if isinstance(m, nn.utils.parametrize.ParametrizationList) for m in m.modules()}
        for path, module in (*model.named_modules(), *strangers):
            if id(module) not in hidden and type(module).forward is not nn.Module.forward:
                self.watch(path, module)

    def watch(self, path: str, module: nn.Module) -> None:
        forward = module.forward

        def began(m: nn.Module, args: Any) -> None:
            self.point()

        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((path, self.times[path]))
            self.began.append(self.calls[-1])
            self.times[path] += 1
            self.point()
            result = forward(*args, **kwargs)
            self.calls.pop()
            return result

        def ended(m: nn.Module, args: Any, output: Any) -> None:
            self.point()

        if not path.startswith("<"):  # a module that no model registered is noted before its own pre-hooks
            module.register_forward_pre_hook(began)
        object.__setattr__(module, "forward", run)
        module.register_forward_hook(ended)

    def point(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.inside = self.calls.copy()
            raise self.error

    def start(self, at: int = -1, error: BaseException | None = None) -> None:
        self.at, self.error, self.count = at, error or BaseException(), 0
        self.calls, self.began, self.inside = [], [], []
        self.times.clear()


class Kernels(TorchDispatchMode):
    """Every kernel is a point too."""

    def __init__(self, points: Points) -> None:
        super().__init__()
        self.points = points

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.points.calls:
            self.points.point()
        return func(*args, **(kwargs or {}))


def where(call: tuple[str, int], model: nn.Module) -> str:
    path, nth = call
    return (path or type(model).__name__) + (f"[{nth}]" if nth else "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_trace_that_breaks_off_at_any_point_puts_all_back_and_says_where(name: str, kind: str) -> None:
    make, give = MODELS[name]
    torch.manual_seed(0)
    model, x = make().train(), give()
    points = Points(model)
    with Kernels(points):
        gradlineage.trace(model, x)
        total = points.count
        before = state_of(model)
        for at in range(1 + list(KINDS).index(kind) % 3, total + 1, 1 if kind == "ValueError" else 3):
            points.start(at, error := KINDS[kind]())
            notes = list(getattr(error, "__notes__", []))
            caught: BaseException | None = None
            try:
                gradlineage.trace(model, x)
            except BaseException as raised:
                caught = raised
            assert caught is error, at
            assert changes(before, state_of(model)) == [], at
            added = error.__notes__[len(notes) :] if points.inside else getattr(error, "__notes__", [])[len(notes) :]
            if points.inside and not points.inside[-1][0].startswith("<"):
                assert len(added) == 1, at
                assert f"while tracing {type(model).__name__}, in call {where(points.inside[-1], model)} at " in added[0] + " at ", at
    assert total > 20


@pytest.mark.parametrize("kind", ["ValueError", "KeyboardInterrupt"])
@pytest.mark.parametrize("name", MODELS)
def test_recording_that_breaks_off_tells_what_ran_until_then(name: str, kind: str) -> None:
    make, give = MODELS[name]
    torch.manual_seed(0)
    model, x = make().train(), give()
    points = Points(model)

    def source(flow: gradlineage.Flow) -> list[tuple[Any, ...]]:
        return [(s.kind, s.path, s.nth, s.index, s.name) for s in flow.sources]

    with Kernels(points):
        with gradlineage.recording(model) as whole:
            model(x)
        total, full = points.count, whole.lineage()
        hooks = hooks_of(model)
        for at in range(1, total + 1, 2):
            points.start(at, error := KINDS[kind]())
            with pytest.raises(type(error)) as caught, gradlineage.recording(model) as rec:
                model(x)
            assert caught.value is error
            lineage = rec.lineage()
            assert hooks_of(model) == hooks
            began = [c for c in points.began if not c[0].startswith("<")]
            assert [(c.path, c.nth) for c in lineage.calls if c.registered] == began, at
            assert [(c.path, c.nth) for c in lineage.calls if c.registered and c.failed][: len(points.inside)] == [
                c for c in points.inside if not c[0].startswith("<")
            ], at
            for call in lineage.layers:
                if call.failed or call.kind != full[call.path, call.nth].kind:
                    continue  # broke off before its parts ran
                assert list(map(source, call.inputs)) == list(map(source, full[call.path, call.nth].inputs)), (at, call)
            if points.inside and not points.inside[-1][0].startswith("<"):
                assert any(f"broke off in call {where(points.inside[-1], model)}" in note for note in lineage.notes), (at, lineage.notes)
            assert str(lineage)
            assert gradlineage.Lineage.from_json(lineage.to_json()) == lineage


# -- without end ---------------------------------------------------------------------------------------------------------------------


class Endless(nn.Module):
    def __init__(self, container: bool) -> None:
        super().__init__()
        self.norm, self.container = nn.BatchNorm1d(4), container

    def forward(self, x: Tensor) -> Tensor:
        return self(self.norm(x)) if self.container else self(x + 1)


@pytest.mark.parametrize("container", [True, False])
def test_recursion_without_end_is_a_recursion_error_and_nothing_stays(container: bool) -> None:
    model = Endless(container)
    x = data()
    before = state_of(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RecursionError):
            gradlineage.trace(model, x)
    assert changes(before, state_of(model)) == []
    assert [str(w.message) for w in told] == []
    assert gradlineage.trace(model.norm, x).layers


# -- generators ------------------------------------------------------------------------------------------------------------------------


def test_generator_that_holds_a_recording_open_and_is_closed_half_way_puts_all_back() -> None:
    net, x = Net(lambda m, x: m.a(x), a=nn.BatchNorm1d(4)), data()

    def steps(restore: bool) -> Iterator[gradlineage.Recording]:
        with gradlineage.recording(net, restore=restore, drop_saved=True) as rec:
            while True:
                net(x)
                yield rec

    before = state_of(net)
    running = steps(True)
    rec = [next(running) for _ in range(3)][-1]
    running.close()  # type: ignore[attr-defined]
    assert changes(before, state_of(net)) == []
    assert [c.label for c in rec.lineage().layers] == ["a[0]", "a[1]", "a[2]"]
    running = steps(True)
    next(running)
    del running  # collected
    assert changes(before, state_of(net)) == []


def test_generator_of_layers_that_is_closed_half_way_is_no_failure() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        def walk(h: Tensor) -> Iterator[Tensor]:
            for layer in (m.a, m.b, m.c):
                h = layer(h)
                yield h

        steps = walk(x)
        next(steps)
        h = next(steps)
        steps.close()  # type: ignore[attr-defined]
        return m.d(h)

    lineage = gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin(), d=lin()), data())
    assert [(c.label, c.failed) for c in lineage.calls] == [("Net", False), ("a", False), ("b", False), ("d", False)]
    assert fed(lineage, "d") == [["b"]]


def test_forward_that_is_a_generator_runs_after_the_trace_as_if_there_had_been_none() -> None:
    def run(m: Any, x: Tensor) -> Iterator[Tensor]:
        yield m.a(x)
        yield m.b(x)

    kept: list[Any] = []
    net, x = Net(run, a=lin(), b=lin()), data()
    net.register_forward_hook(lambda m, args, output: kept.append(output))
    before = state_of(net)
    assert "generator" in gradlineage.trace(net, x).notes[0]
    assert torch.equal(next(kept[0]), net.a(x))
    kept[0].close()
    assert changes(before, state_of(net)) == []


# -- failures that the model deals with itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "GeneratorExit"])
def test_failure_that_the_model_catches_is_a_failed_call_and_the_rest_goes_on(kind: str) -> None:
    def fail(m: Any, x: Tensor) -> Tensor:
        m.deep(x)
        raise KINDS[kind]()

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        try:
            h = m.bad(h)
        except BaseException:
            h = m.good(h)
        return m.head(h)

    net = Net(run, a=lin(), bad=Net(fail, deep=lin()), good=lin(), head=lin())
    lineage = gradlineage.trace(net, data())
    assert [(c.label, c.failed) for c in lineage.calls] == [
        ("Net", False), ("a", False), ("bad", True), ("bad.deep", False), ("good", False), ("head", False),
    ]  # fmt: skip
    assert (fed(lineage, "good"), fed(lineage, "head")) == ([["a"]], [["good"]])
    assert lineage.notes == ()


def test_call_made_while_an_exception_is_handled_has_not_failed() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        try:
            raise KeyError
        except KeyError:
            return m.silent(m.a(x)) or m.b(x)

    lineage = gradlineage.trace(Net(run, a=lin(), silent=Net(lambda m, x: None), b=lin()), data())
    assert [(c.label, c.failed) for c in lineage.layers] == [("a", False), ("silent", False), ("b", False)]


def test_error_raised_twice_is_told_of_once_a_trace() -> None:
    error = ValueError("the same object each time")

    def fail(m: Any, x: Tensor) -> Tensor:
        raise error

    net = Net(lambda m, x: m.bad(x), bad=Net(fail))
    for _ in range(2):
        with pytest.raises(ValueError, match="the same object"):
            gradlineage.trace(net, data())
    assert len(set(error.__notes__)) == 1


# -- within torch's own machinery -----------------------------------------------------------------------------------------------------------


def _boom(*_: Any) -> Any:
    raise ValueError("within")


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _boom()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Subclass(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _boom() if func is Tensor.add else super().__torch_function__(func, types, args, kwargs or {})


def _backward(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(_boom)
    return torch.autograd.grad(h.square().sum(), h)[0] if not h.sum().backward() else h


WITHIN: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda m, x: torch.func.vmap(lambda r: _boom(m.a(r)))(x),
    "grad": lambda m, x: torch.func.grad(lambda r: _boom(m.a(r)))(x),
    "jvp": lambda m, x: torch.func.jvp(lambda r: _boom(m.a(r)), (x,), (x,)),
    "functional_call": lambda m, x: torch.func.functional_call(m.bad, {}, (x,)),
    "checkpoint": lambda m, x: checkpoint(m.bad, m.a(x), use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(m.bad, m.a(x), use_reentrant=True),
    "cond": lambda m, x: torch.cond(x.sum() < 1e9, lambda t: _boom(m.a(t)), lambda t: t, (x,)),
    "custom Function": lambda m, x: _Function.apply(m.a(x)),
    "subclass": lambda m, x: m.a(x).as_subclass(_Subclass).add(1),
    "backward": _backward,
    "no_grad": torch.no_grad()(lambda m, x: _boom(m.a(x))),
    "autocast": torch.autocast("cpu", dtype=torch.bfloat16)(lambda m, x: _boom(m.a(x))),
    "in-place": lambda m, x: m.bn.running_mean.add_(torch.ones(7)),
    "shape": lambda m, x: m.a(x[:, :2]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITHIN)
def test_failure_within_torchs_machinery_leaves_nothing_behind(name: str) -> None:
    net = Net(lambda m, x: WITHIN[name](m, m.bn(x)), a=lin(), bn=nn.BatchNorm1d(4), bad=Net(_boom))
    x = data()
    before = {k: v for k, v in state_of(net).items() if ": gradient" not in k}  # a backward in the forward leaves its own
    with pytest.raises((ValueError, RuntimeError)) as caught:
        gradlineage.trace(net, x)
    assert any("while tracing Net, in call" in note for note in caught.value.__notes__)
    assert changes(before, {k: v for k, v in state_of(net).items() if ": gradient" not in k}) == []


# -- faults of our own, and of what we rely upon ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cleaned() -> Iterator[None]:
    """Where a fault of the library leaves a mess, the tests that follow must not suffer from it."""
    from gradlineage import record, tracing

    modes = torch.overrides._get_current_function_mode_stack()
    try:
        yield
    finally:
        while len(torch.overrides._get_current_function_mode_stack()) > len(modes):
            torch.overrides._pop_mode()
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for name, hooks in vars(module_hooks).items():
            if name.startswith("_global_forward"):
                hooks.clear()
        record._open.clear()
        if tracing._switches.count:
            tracing._switches.count = 1
            tracing._switches.reset()


@pytest.mark.parametrize(
    "method",
    [
        (ShadowMode, "_note"),
        (ShadowMode, "_entry"),
        (Recorder, "_before"),
        (Recorder, "_after"),
        (Recorder, "_entering"),
        (Recorder, "_leaving"),
    ],
)
def test_everything_is_put_back_where_the_fault_is_in_the_recording_itself(
    method: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = cnn().train(), torch.randn(2, 3, 8, 8)
    original, count = getattr(*method), [0, 0]

    def faulty(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == count[1]:
            raise MemoryError
        return original(*args, **kwargs)

    monkeypatch.setattr(*method, faulty)
    before = state_of(model)
    gradlineage.trace(model, x)
    total = count[0]
    assert total > 2
    for at in range(1, total + 1):
        count[:] = [0, at]
        with pytest.raises(MemoryError):
            gradlineage.trace(model, x)
        assert changes(before, state_of(model)) == []


STEPS: dict[str, tuple[Any, str]] = {
    "modules are taken in": (Registry, "add"),
    "a module gets a hook": (nn.Module, "register_forward_pre_hook"),
    "all modules get a hook before": (module_hooks, "register_module_forward_pre_hook"),
    "all modules get a hook after": (module_hooks, "register_module_forward_hook"),
    "tensors are noted": (Keeper, "begin"),
    "the mode is made": (ShadowMode, "__init__"),
    "the mode is entered": (ShadowMode, "__enter__"),
    "saved tensors are dropped": (torch.autograd.graph.saved_tensors_hooks, "__enter__"),
}


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "step",
    STEPS,
)
def test_recording_that_fails_while_it_opens_takes_back_what_it_did(
    step: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cnn()
    model.register_forward_pre_hook(lambda module, args: None)  # such a module gets a hook of its own
    before = state_of(model)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise kind

    with cleaned():
        monkeypatch.setattr(*STEPS[step], fails)
        with pytest.raises(kind), gradlineage.recording(model, restore=True, drop_saved=True):
            pytest.fail("it opened")
        monkeypatch.undo()
        assert changes(before, state_of(model)) == []


class Stubborn(Exception):
    """Takes no notes."""

    __notes__: Any = ()


def test_error_that_takes_no_notes_comes_through_and_nothing_stays() -> None:
    def fail(m: Any, x: Tensor) -> Tensor:
        raise Stubborn("mine")

    net, x = Net(lambda m, x: m.bad(m.a(x)), a=nn.BatchNorm1d(4), bad=Net(fail)), data()
    before = state_of(net)
    with cleaned():
        caught: BaseException | None = None
        try:
            gradlineage.trace(net, x)
        except BaseException as error:
            caught = error
        assert changes(before, state_of(net)) == []
        assert type(caught) is Stubborn


@pytest.mark.parametrize("fails", [False, True])
def test_trace_works_where_the_working_directory_is_gone(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        if fails:
            raise ValueError("mine")
        return m.a(x)

    net, x = Net(run, a=nn.BatchNorm1d(4)), data()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    before = hooks_of(net)
    with cleaned():
        try:
            with pytest.raises(ValueError, match="mine") if fails else contextlib.nullcontext():
                gradlineage.trace(net, x)
        finally:
            monkeypatch.undo()
            left = hooks_of(net)
        assert left == before


# -- the command -----------------------------------------------------------------------------------------------------------------------

NET = """
import torch
from torch import nn

class Bad(nn.Module):
    def __init__(self, kind="ValueError", at="fc"):
        super().__init__()
        self.stem, self.block = nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Fails(kind))
    def forward(self, x):
        return self.block(self.stem(x))

class Fails(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.fc, self.kind = nn.Linear(4, 4), kind
    def forward(self, x):
        y = self.fc(x)
        raise getattr(__import__("builtins"), self.kind)("no further")  # HERE

class Shape(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 4)
    def forward(self, x):
        return self.b(self.a(x))
"""


@pytest.mark.parametrize("command", ["show", "lint", "grads", "draw -o x.svg", "explain", "paths --random 2"])
def test_command_says_where_a_model_failed(command: str, run: Callable[[str], tuple[int, str, str]], tmp_path: Path) -> None:
    name, *more = command.split()
    status, out, err = run(f"{name} net.py:Bad {' '.join(more)} --input 2x4 {'stem' if name == 'explain' else ''}")
    assert (status, out) == (1, "")
    assert "ValueError: no further" in err
    assert "in call block.1 at" in err
    assert "# HERE" in err
    assert "/gradlineage/" not in err
    assert not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize(
    ("kind", "status"), [("KeyboardInterrupt", 130), ("SystemExit", 1), ("RecursionError", 1), ("StopIteration", 1), ("OSError", 1)]
)
def test_command_ends_with_a_status_whatever_a_model_raises(kind: str, status: int, run: Callable[[str], tuple[int, str, str]]) -> None:
    found, out, err = run(f"show net.py:Bad --set kind={kind} --input 2x4")
    assert (found, out) == (status, "")
    assert kind == "KeyboardInterrupt" or "in call block.1 at" in err


def test_command_says_in_which_layer_shapes_do_not_fit(run: Callable[[str], tuple[int, str, str]]) -> None:
    status, _, err = run("show net.py:Shape --input 2x4")
    assert status == 1
    assert "in call b at net.py:" in err
    assert "mat1 and mat2" in err
