"""Random models that come with their right answer: a program of steps over live tensors, carried out in torch and on paper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import nn

import gradlineage
from gradlineage.lineage import Call, Flow, Lineage, Source
from tests.profiles import examples
from tests.strategies import COARSE, FINE, ROWS, Content, Program, Spec, Step, Term, programs

torch.set_num_threads(1)
Tensor = torch.Tensor


# -- the model -------------------------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A layer of every kind in `LAYERS` that torch has none for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.w = nn.Parameter(torch.eye(4) + 0.1)
        self.v = nn.Parameter(torch.eye(4) - 0.1)

    def forward(self, *args: Any, x: Any = None, y: Any = None) -> Any:
        a, b = (args[0], args[-1]) if args else (x, y)
        if self.kind == "listed":
            return torch.stack(a).sum(0) @ self.w
        if self.kind == "ignores":
            return a @ self.w
        if self.kind == "pair":
            return a @ self.w, a @ self.v
        if self.kind == "nested":
            return {"first": [a @ self.w, None], "second": (a @ self.v,)}
        if self.kind == "dict":
            return {"p": a @ self.w + b, "q": b @ self.v}
        if self.kind == "top":
            scores = a @ self.w
            return scores, scores.argmax(-1)
        if self.kind == "half":
            return a, a @ self.w
        if self.kind == "second":
            return a @ self.w, a
        if self.kind == "flat":
            return a.view(a.shape)
        if self.kind == "first":
            return a[:2]
        if self.kind == "scale_":
            return a.mul_(0.5) @ self.w
        if self.kind == "silent_":
            a.add_(1.0)
            return None
        if self.kind == "wipe_":
            return a.fill_(0.5)
        return a @ self.w + b @ self.v


def make(spec: Spec, number: int, pool: Pool) -> nn.Module:
    made: dict[str, Callable[[], nn.Module]] = {
        "block": lambda: Block(spec, number, pool),
        "quiet": lambda: Block(spec, number, pool),
        "linear": lambda: nn.Linear(4, 4),
        "embedding": lambda: nn.Embedding(4, 4),
        "identity": nn.Identity,
        "dropout": nn.Dropout,
        "empty": nn.Sequential,
        "relu_": lambda: nn.ReLU(inplace=True),
    }
    return made.get(spec.kind, lambda: Own(spec.kind))()


class Pool:
    """All modules by number, where `nn.Module` does not look."""

    def __init__(self, program: Program) -> None:
        self.specs = program.specs
        self.modules: dict[int, nn.Module] = {}
        for number, spec in program.specs.items():
            self.modules[number] = make(spec, number, self)
            if spec.owner >= 0:
                self.modules[spec.owner].add_module(f"m{number}", self.modules[number])


class Block(nn.Module):
    """Runs its program."""

    def __init__(self, spec: Spec, number: int, pool: Pool) -> None:
        super().__init__()
        self.spec, self.pool = spec, pool
        for name in spec.parameters:
            self.register_parameter(name, nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4)))
        for name in spec.buffers:
            self.register_buffer(name, torch.linspace(0, 1, 16).view(4, 4).clone())

    def forward(self, *args: Tensor) -> Any:
        live = list(args)
        for step in self.spec.steps:
            self.run(step, live)
        found = [live[i] for i in self.spec.returns]
        if self.spec.style == 1:
            return {f"out{i}": t for i, t in enumerate(found)}
        if self.spec.style == 2:
            return [found[0], *found[1:]]
        return found[0] if len(found) == 1 else tuple(found)

    def run(self, step: Step, live: list[Tensor]) -> None:
        args = [live[i] for i in step.args]
        if step.kind == "no_grad":
            with torch.no_grad():
                for inner in step.inner:
                    self.run(inner, live)
        elif step.kind in ("layer", "block"):
            live += tensors(self.call(self.pool.specs[step.module].kind, self.pool.modules[step.module], args))
        elif step.kind in ("parameter", "buffer"):
            live.append(getattr(self, step.name))
        elif step.kind in WRITE:
            WRITE[step.kind](step.how, *args)
        else:
            weights = [getattr(self, name) for name in step.name.split()]
            live += tensors(MAKE[step.kind](step.how, *args, *weights))

    @staticmethod
    def call(kind: str, module: nn.Module, args: list[Tensor]) -> Any:
        if kind == "keywords":
            return module(x=args[0], y=args[1])
        return module(args) if kind == "listed" else module(*args)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [t for item in items for t in tensors(item)]


UNARY: list[Callable[[Tensor], Tensor]] = [
    F.relu, lambda x: x * 2, lambda x: 1 - x, torch.tanh, Tensor.clone, lambda x: x.softmax(-1), lambda x: F.gelu(x) + 1, lambda x: x.double().float(),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, lambda a, b: a * b, lambda a, b: a - b, torch.maximum, lambda a, b: torch.lerp(a, b, 0.5), lambda a, b: torch.addcmul(a, b, b),
]  # fmt: skip
NARY: list[Callable[..., Tensor]] = [
    lambda *xs: torch.cat(xs).view(len(xs), *xs[0].shape).mean(0), lambda *xs: torch.stack(xs).sum(0), lambda *xs: sum(xs[1:], xs[0] * 1),
    lambda *xs: torch.cat(xs, 1)[:, :4] * 1,
]  # fmt: skip
FULL: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[:], lambda x: x.view(x.shape), torch.detach, lambda x: x.t() if x.shape == (4, 4) else x[...], lambda x: x.unsqueeze(0).squeeze(0),
]  # fmt: skip
PART: list[Callable[[Tensor], Tensor]] = [lambda x: x[:2], lambda x: x[2:], lambda x: x.narrow(0, 1, 2)]
CONSTANTS: list[Callable[..., Tensor]] = [
    lambda *x: torch.ones(len(x[0]) if x else ROWS, 4), lambda x: torch.zeros_like(x), lambda x: x.new_full(x.shape, 2.0), lambda x: torch.eye(4)[: len(x)] + 1,
]  # fmt: skip
MAKE: dict[str, Callable[..., Any]] = {
    "unary": lambda how, x: UNARY[how](x),
    "binary": lambda how, a, b: BINARY[how](a, b),
    "nary": lambda how, *xs: NARY[how](*xs),
    "where": lambda how, a, b, c: torch.where(a > 0, b, c),
    "linear_f": lambda how, x, w, b: F.linear(x, w, b[0]),
    "weigh": lambda how, x, w: x + w[0],
    "stray": lambda how, x: nn.Tanh()(x),
    "constant": lambda how, *x: CONSTANTS[how](*x),
    "argmax": lambda how, x: x.argmax(-1),
    "take": lambda how, x, i: x[i.remainder(len(x))],
    "embed_f": lambda how, i, w: F.embedding(i, w),
    "same": lambda how, x: x.to(x.dtype),
    "full_view": lambda how, x: FULL[how](x),
    "part_view": lambda how, x: PART[how](x),
    "chunk": lambda how, x: x.chunk(2),
}


def set_part(how: int, x: Tensor, *value: Tensor) -> None:
    rows = (slice(2), slice(2, None), slice(1, 3))[how]
    x[rows] = value[0] if value else 3.0


def set_all(how: int, x: Tensor, value: Tensor) -> None:
    x[(slice(None), ...)[how]] = value


WRITE: dict[str, Callable[..., object]] = {
    "write_unary": lambda how, x: (torch.relu_, lambda x: x.mul_(2), lambda x: F.relu(x, inplace=True), lambda x: x.clamp_(-1, 1))[how](x),
    "write_binary": lambda how, x, y: (Tensor.add_, lambda x, y: x.__iadd__(y), lambda x, y: x.addcmul_(y, y))[how](x, y),
    "wipe": lambda how, x: (Tensor.zero_, lambda x: x.fill_(2.0), lambda x: x.uniform_())[how](x),
    "copy": lambda how, x, y: x.copy_(y),
    "set_all": set_all,
    "set_part": set_part,
    "out": lambda how, x, *ys: torch.add(ys[0], ys[-1], out=x),
}


# -- comparing -------------------------------------------------------------------------------------------------------------------------


class Names:
    """From what gradlineage says to the numbers of the program."""

    def __init__(self, program: Program, pool: Pool) -> None:
        root = pool.modules[0]
        found = dict(root.named_modules())
        self.numbers = {path: n for path, module in found.items() for n, m in pool.modules.items() if m is module}
        self.program = program

    def term(self, source: Source) -> Term:
        if source.kind == "call":
            assert source.path is not None
            assert source.nth is not None
            return Term("call", self.numbers[source.path], source.nth, source.port)
        if source.kind in ("parameter", "buffer"):
            owner, _, name = str(source.name).rpartition(".")
            return Term(source.kind, (self.numbers[owner], name))
        return Term("input", source.index or 0) if source.kind == "input" else Term(source.kind)

    def call(self, call: Call) -> tuple[int, int]:
        return self.numbers[call.path], call.nth


def fault(names: Names, flow: Flow, truth: Content) -> str | None:
    """What is wrong with the sources of a tensor; None for nothing."""
    found = [names.term(source) for source in flow.sources]
    if names.program.writes:  # by which port a written tensor left is not asked
        have, must = ({t._replace(port=None) for t in terms} for terms in (found, truth.must))
        may = must | {t._replace(port=None) for t in truth.may} | {Term("constant")}
        right = must - {Term("constant")} <= have <= may and (bool(have) or not must)
        return None if right else f"got {shown(have)}, must {shown(must)}, may {shown(may - must)}"
    return None if found == [*truth.must] else f"got {shown(found)}, expected {shown(truth.must)}"


def shown(terms: Iterable[Term]) -> str:
    return ", ".join(f"{t.kind}:{t.what}[{t.nth}][{t.port}]" if t.kind == "call" else f"{t.kind}:{t.what}" for t in terms) or "nothing"


def compare(program: Program, names: Names, lineage: Lineage, grain: int) -> None:
    visible = [truth for truth in program.calls if truth.visible[grain]]
    assert [names.call(c) for c in lineage.calls] == [(t.module, t.nth) for t in visible]
    faults = []
    for call, truth in zip(lineage.calls, visible, strict=True):
        if call.kind != ("layer" if truth.layer[grain] else "container"):
            faults.append(f"{call.label} is a {call.kind}")
        for side, flows, contents in (("input", call.inputs, truth.inputs), ("output", call.outputs, truth.outputs)):
            if len(flows) != len(contents[grain]):
                faults.append(f"{call.label}: {len(flows)} {side}s, expected {len(contents[grain])}")
                continue
            for k, (flow, content) in enumerate(zip(flows, contents[grain], strict=True)):
                if wrong := fault(names, flow, content):
                    faults.append(f"{side} {k} of {call.label}: {wrong}")
    for k, (flow, content) in enumerate(zip(lineage.outputs, program.outputs[grain], strict=True)):
        if wrong := fault(names, flow, content):
            faults.append(f"output {k}: {wrong}")
    assert not faults, "\n".join(["", *faults])


@contextlib.contextmanager
def frozen(model: nn.Module) -> Any:
    model.requires_grad_(False)
    yield


@contextlib.contextmanager
def views(model: nn.Module) -> Any:
    """Buffers that are parts of tensors made before the pass, as inputs are then too."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.cat([buffer, buffer])[4:])
    yield


MODES: dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[Any]]] = {
    "grad": lambda model: torch.enable_grad(),
    "no_grad": lambda model: torch.no_grad(),
    "frozen": frozen,
    "views": views,
}


def inputs(program: Program, mode: str) -> list[Tensor]:
    made = [torch.linspace(-1, 1, 32).view(8, 4) if kind == "float" else torch.arange(8) for kind in program.inputs]
    return [x[:4] if mode == "views" else x[:4].clone().remainder(4) if x.dtype == torch.int64 else x[:4].clone() for x in made]


def traced(program: Program, mode: str) -> tuple[Names, Lineage]:
    pool = Pool(program)
    model = pool.modules[0].eval()
    with MODES[mode](model):
        return Names(program, pool), gradlineage.trace(model, *inputs(program, mode))


# -- laws ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@given(program=programs(writes=False))
@examples(150)
def test_sources_of_a_pure_program_are_right_and_in_order(mode: str, program: Program) -> None:
    names, lineage = traced(program, mode)
    compare(program, names, lineage, FINE)


@pytest.mark.parametrize("mode", MODES)
@given(program=programs(writes=True))
@examples(150)
def test_sources_of_a_program_that_writes_in_place_are_right(mode: str, program: Program) -> None:
    names, lineage = traced(program, mode)
    compare(program, names, lineage, FINE)


@given(program=programs(writes=False))
@examples(150)
def test_collapsed_sources_are_those_of_containers_as_layers(program: Program) -> None:
    names, lineage = traced(program, "grad")
    compare(program, names, lineage.collapse(depth=1), COARSE)


@given(program=programs(writes=True))
@examples(150)
def test_collapsed_sources_of_a_program_that_writes_are_those_of_containers_as_layers(program: Program) -> None:
    names, lineage = traced(program, "grad")
    compare(program, names, lineage.collapse(depth=1), COARSE)


@given(program=programs())
@examples(100)
def test_collapsing_twice_is_collapsing_once(program: Program) -> None:
    _, lineage = traced(program, "no_grad")
    once = lineage.collapse(depth=1)
    assert once.collapse(depth=1) == once
    assert lineage.collapse(depth=2).collapse(depth=1) == once
    assert lineage.collapse(depth=2).collapse(depth=1).collapse(depth=2) == once
    assert lineage.collapse(depth=0).collapse(depth=1) == lineage.collapse(depth=0)
