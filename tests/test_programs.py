"""Random models that come with their right answer: a program of steps over live tensors, carried out in torch and on paper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, reject
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
    made = [torch.linspace(-1, 1, 16).view(4, 4) if kind == "float" else torch.arange(8)[:4] for kind in program.inputs]
    return made if mode == "views" else [x.clone() for x in made]


def traced(program: Program, mode: str) -> tuple[Names, Lineage]:
    pool = Pool(program)
    model = pool.modules[0].eval()
    with MODES[mode](model):
        try:
            return Names(program, pool), gradlineage.trace(model, *inputs(program, mode))
        except RuntimeError as error:  # torch has rules of its own for writes to views; a program that breaks them says nothing of a trace
            try:
                Pool(program).modules[0].eval()(*inputs(program, mode))
            except RuntimeError:
                reject()
            raise error


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


@given(program=programs(writes=False))
@examples(150)
def test_recording_says_the_same_where_no_module_hands_its_input_through(program: Program) -> None:
    """Where one does, only time tells them apart, since a recording leaves the user's tensors alone."""
    assume(not program.passes)
    pool = Pool(program)
    with gradlineage.recording(pool.modules[0].eval()) as rec:
        pool.modules[0](*inputs(program, "grad"))
    compare(program, Names(program, pool), rec.lineage(), FINE)


@given(program=programs())
@examples(100)
def test_collapsing_twice_is_collapsing_once(program: Program) -> None:
    _, lineage = traced(program, "no_grad")
    once = lineage.collapse(depth=1)
    assert once.collapse(depth=1) == once
    assert lineage.collapse(depth=2).collapse(depth=1) == once
    assert lineage.collapse(depth=2).collapse(depth=1).collapse(depth=2) == once
    assert lineage.collapse(depth=0).collapse(depth=1) == lineage.collapse(depth=0)


# -- single rules about memory that modules and operations share -----------------------------------------------------------------------


def linear() -> nn.Module:
    return nn.Linear(4, 4)


class Does(nn.Module):
    """A module that runs a function, with a linear layer at hand."""

    def __init__(self, does: Callable[[Any, Tensor], Any], container: bool = False) -> None:
        super().__init__()
        self.does, self.w = does, nn.Parameter(torch.eye(4))
        if container:
            self.inner, self.same = nn.Linear(4, 4), nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


def part(module: Any, x: Tensor) -> Tensor:
    x[:2] = 3.0
    return module.w * 2 if "inner" not in module._modules else module.inner(x)  # type: ignore[no-any-return]


def wipe(module: Any, x: Tensor) -> Tensor:
    kept = x * 1
    x.zero_()
    return module.w * 2 if "inner" not in module._modules else module.inner(kept)  # type: ignore[no-any-return]


def hand_on(module: Any, x: Tensor) -> Tensor:
    module.inner(x)
    return x


def hand_both(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return module.inner(x), x


class Net(nn.Module):
    """Modules ``m0``, ``m1`` … and a program; ``end`` reads what it returns."""

    def __init__(self, program: Callable[[Any, Tensor], Any], *modules: nn.Module) -> None:
        super().__init__()
        self.program, self.end = program, nn.Linear(4, 4)
        self.register_buffer("buffer", torch.ones(8, 4)[4:])
        self.register_buffer("whole", torch.ones(16).view(4, 4))
        for number, module in enumerate(modules):
            self.add_module(f"m{number}", module)

    def forward(self, x: Tensor) -> Any:
        return self.end(self.program(self, x))


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape)


def then(value: Tensor, *_: object) -> Tensor:
    """The first, after the others were worked out."""
    return value


def skip_then(
    change: Callable[[Any, Tensor, Tensor], object], look: Callable[[Any, Tensor, Tensor], Tensor]
) -> Callable[[Any, Tensor], Tensor]:
    """``y = m0(x); skip = m1(y)``, a change, and what is looked at."""

    def program(m: Any, x: Tensor) -> Tensor:
        y = m.m0(x)
        skip = m.m1(y)
        seen = look(m, y, skip)
        change(m, y, skip)
        return seen

    return program


def first(m: Any, y: Tensor, skip: Tensor) -> Tensor:
    return y


def second(m: Any, y: Tensor, skip: Tensor) -> Tensor:
    return skip


RULES: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[Callable[[], nn.Module]], str]] = {
    "original written since an identity": (skip_then(lambda m, y, s: y.add_(m.m2(y)), second), [linear, nn.Identity, linear], "m1 m0 m2"),
    "identity written": (skip_then(lambda m, y, s: s.add_(m.m2(y)), first), [linear, nn.Identity, linear], "m1 m2"),
    "view of an identity, original written": (
        skip_then(lambda m, y, s: y.add_(m.m2(y)), lambda m, y, s: s[:2]), [linear, nn.Identity, linear], "m0 m1 m2",
    ),
    "original written twice and read in between": (
        skip_then(lambda m, y, s: (y.add_(m.m2(y)), s.sum(), y.add_(m.m3(y))), second), [linear, nn.Identity, linear, linear], "m0 m1 m2 m3",
    ),
    "original mutated by a module": (skip_then(lambda m, y, s: m.m2(y), second), [linear, nn.Identity, lambda: nn.ReLU(inplace=True)], "m1 m2"),
    "original mutated by a module beside its flattening": (
        skip_then(lambda m, y, s: m.m2(y), second), [linear, Flat, lambda: nn.ReLU(inplace=True)], "m1 m2",
    ),
    "original wiped": (skip_then(lambda m, y, s: y.zero_(), second), [linear, nn.Identity], ""),
    "flattening written": (skip_then(lambda m, y, s: s.relu_(), second), [linear, Flat], "m1"),
    "identity of a slice overwritten": (lambda m, x: then(y := m.m0(x), m.m1(y[:2]).copy_(m.m2(x)[:2])), [linear, nn.Identity, linear], "m0 m2"),
    "identity of a slice written": (lambda m, x: then(y := m.m0(x), m.m1(y[:2]).relu_()), [linear, nn.Identity], "m0 m1"),
    "part out of an addition": (lambda m, x: then(y := m.m0(x).detach(), torch.add(x[:2], 1, out=y[:2])), [linear], "m0 input:x"),
    "part wiped after a write through a view of it": (
        lambda m, x: then(y := m.m0(x), (part := y[:2]).view(part.shape).relu_(), part.zero_()), [linear], "m0",
    ),
    "original mutated after a container handed it on beside another": (
        lambda m, x: (y := m.m0(x), h := m.m1(y), m.m2(y))[1][1] + h[0], [linear, lambda: Does(hand_both, True), lambda: nn.ReLU(inplace=True)],
        "m1.inner m2",
    ),
    "layer wipes": (lambda m, x: then(y := m.m0(x), m.m1(y)), [linear, lambda: Does(wipe)], "m1"),
    "layer writes a part": (lambda m, x: then(y := m.m0(x), m.m1(y)), [linear, lambda: Does(part)], "m0 m1"),
    "container handed its input on, which a module mutates": (
        skip_then(lambda m, y, s: m.m2(y), second), [linear, lambda: Does(hand_on, True), lambda: nn.ReLU(inplace=True)], "m2",
    ),
    "container handed its input on, which is written": (
        skip_then(lambda m, y, s: y.add_(m.m2(y)), second), [linear, lambda: Does(hand_on, True), linear], "m0 m2",
    ),
    "identity within a container, original written": (
        skip_then(lambda m, y, s: y.add_(m.m2(y)), second), [linear, lambda: nn.Sequential(nn.Identity()), linear], "m0 m1.0 m2",
    ),
    "input viewed by a module and written": (lambda m, x: then(m.m0(x), x.relu_()), [Flat], "m0 input:x"),
    "buffer viewed by a module and written": (lambda m, x: then(m.m0(m.buffer), m.buffer.relu_()), [Flat], "m0 buffer"),
    "buffer of another shape viewed by a module and written": (lambda m, x: then(m.m0(m.whole), m.whole.relu_()), [Flat], "m0 whole"),
}  # fmt: skip


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_shared_memory_says_who_wrote_it_last_and_who_handed_it_out(name: str, grad: bool) -> None:
    program, modules, expected = RULES[name]
    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(Net(program, *(make() for make in modules)), torch.ones(8, 4)[4:])
    found = [s.label for s in lineage["end"].inputs[0].sources if s.kind != "constant"]
    assert sorted(found) == sorted(expected.split())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("does", "expected"), [(part, ["m0", "m1"]), (wipe, ["m1"])])
def test_collapsed_container_that_writes_its_argument_is_its_producer(
    does: Callable[[Any, Tensor], Any], expected: list[str], grad: bool
) -> None:
    with torch.set_grad_enabled(grad):
        lineage = gradlineage.trace(Net(lambda m, x: then(y := m.m0(x), m.m1(y)), linear(), Does(does, True)), torch.ones(4, 4)).collapse(
            "m1"
        )
    assert sorted(s.label for s in lineage["end"].inputs[0].sources) == expected


def test_two_outputs_of_a_container_over_one_written_memory_are_told_apart() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.same = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.fc(x).relu_()
            return self.same(y), y

    lineage = gradlineage.trace(Two(), torch.ones(4, 4))
    assert [[s.label for s in flow.sources] for flow in lineage.outputs] == [["same"], ["fc"]]


def test_join_that_enters_a_layer_by_a_hidden_door_is_one_like_any_other() -> None:
    class Generated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.f = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            weight = self.a(x).mean(0) + self.b(x).mean(0)
            return torch.func.functional_call(self.f, {"weight": weight.view(4, 4)}, (x,))

    lineage = gradlineage.trace(Generated(), torch.ones(2, 4))
    assert [link.label for flow in lineage["f"].hidden for link in flow.links] == [":add"]
    assert [join.label for join in lineage.joins] == [":add"]
    assert ":add" in lineage
    assert [call.label for call in lineage.ancestors("f")] == ["a", "b"]
    assert [call.label for call in lineage.successors("a")] == ["f"]
