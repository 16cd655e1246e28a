"""Many inputs: paths and their counts, unions, merging, coverage. Held against counting by hand over passes traced one by one."""

from __future__ import annotations

import doctest
import inspect
import json
import math
import pickle
import random
import sys
from collections import Counter, UserDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path as File
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gradlineage
import gradlineage.many
from gradlineage import Call, Flow, FormatError, Join, Lineage, LineageError, Link, Runs, TraceError, trace, trace_many
from tests.nets import Net, data, lin
from tests.profiles import examples

torch.set_num_threads(1)

Run = Callable[..., Any]


def taken(runs: Runs) -> list[tuple[int, tuple[int, ...]]]:
    """Of each path how often and by which inputs."""
    return [(path.count, path.examples) for path in runs.paths]


def labels(lineage: Lineage | None) -> list[str]:
    assert lineage is not None
    return [call.label for call in lineage.layers]


def line(source: Run | type[nn.Module], text: str) -> str:
    """``file:line`` of the one line of a function that has a text in it."""
    lines, start = inspect.getsourcelines(source)
    (found,) = (n for n, code in enumerate(lines, start) if text in code)
    return f"test_runs.py:{found}"


class Gates(nn.Module):
    """``a`` runs if the first value is positive, ``b`` if the second one is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = lin(), lin(), lin()

    def forward(self, x: Tensor) -> Tensor:
        h = x
        if x[0, 0] > 0:
            h = self.a(h)
        if x[0, 1] > 0:
            h = self.b(h)
        return self.c(h)  # type: ignore[no-any-return]


def gates(a: bool, b: bool) -> Tensor:
    return torch.tensor([[1.0 if a else -1.0, 1.0 if b else -1.0, 0.0, 0.0]])


class Steps(nn.Module):
    """A cell that runs as often as the first value says, a branch on the sign of the second, and a number read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.up, self.down = lin(), lin(), lin()

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(int(x[0, 0])):
            h = self.cell(h)
        h = self.up(h) if x[0, 1] > 0 else self.down(h)
        return h * x[0, 1].item()  # type: ignore[no-any-return]


def steps(count: int, sign: int = 1, rows: int = 1) -> Tensor:
    return torch.tensor([[float(count), float(sign), 0.0, 0.0]] * rows)


# -- what can be traced ----------------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = lin(), lin()

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        h = self.fc(a)
        return self.out(h if b is None else h + b)  # type: ignore[no-any-return]


X, Y = torch.ones(3, 4), torch.ones(3, 4)
FORMS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "tensor": (X, (X,), {}),
    "tuple": ((X, Y), (X, Y), {}),
    "list": ([X, Y], (X, Y), {}),
    "tuple of one": ((X,), (X,), {}),
    "mapping": ({"b": Y, "a": X}, (), {"b": Y, "a": X}),
    "mapping that is no dict": (UserDict(a=X), (), {"a": X}),
    "tuple with what is no tensor": ((X, None), (X, None), {}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("container", [list, tuple, iter, deque, lambda items: (item for item in items)])
def test_batch_is_passed_as_the_call_it_stands_for(form: str, container: Callable[[list[Any]], Iterable[Any]]) -> None:
    batch, args, kwargs = FORMS[form]
    model = Two()
    runs = trace_many(model, container([batch, batch]))
    alone = trace(model, *args, **kwargs)
    assert taken(runs) == [(2, (0, 1))] and len(runs) == runs.total == 2
    lineage = runs.paths[0].lineage
    assert lineage is not None and not gradlineage.diff(alone, lineage)
    assert [(f.name, f.shape) for f in lineage.inputs] == [(f.name, f.shape) for f in alone.inputs]


def test_loader_with_default_collate_gives_arguments_or_what_prepare_makes_of_them() -> None:
    loader = DataLoader(TensorDataset(torch.ones(7, 4), torch.ones(7, 4)), batch_size=3)
    both = trace_many(Two(), loader)
    assert taken(both) == [(3, (0, 1, 2))]
    assert both.paths[0].lineage is not None and [f.name for f in both.paths[0].lineage.inputs] == ["a", "b"]
    first = trace_many(Two(), loader, prepare=lambda batch: batch[0])
    assert first.paths[0].lineage is not None and [f.name for f in first.paths[0].lineage.inputs] == ["a"]
    named = trace_many(Two(), loader, prepare=lambda batch: {"b": batch[1], "a": batch[0]})
    assert named.paths[0].lineage is not None and [f.name for f in named.paths[0].lineage.inputs] == ["b", "a"]


def test_loader_of_dicts_gives_keywords() -> None:
    class Rows(Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, n: int) -> dict[str, Tensor]:
            return {"a": torch.ones(4)}

    runs = trace_many(Two(), DataLoader(Rows(), batch_size=2))
    lineage = runs.paths[0].lineage
    assert runs.total == 2 and lineage is not None and [(f.name, f.shape) for f in lineage.inputs] == [("a", (2, 4))]


def test_prepare_sees_every_item_once_and_in_order() -> None:
    seen: list[object] = []

    def prepare(item: int) -> Tensor:
        seen.append(item)
        return steps(item)

    runs = trace_many(Steps(), iter([2, 1, 2]), prepare=prepare)
    assert seen == [2, 1, 2] and taken(runs) == [(2, (0, 2)), (1, (1,))]


def test_inputs_are_drawn_one_at_a_time() -> None:
    log: list[str] = []

    def batches() -> Iterator[Tensor]:
        for n in range(3):
            log.append(f"drawn {n}")
            yield data()

    def run(m: Any, x: Tensor) -> Tensor:
        log.append("ran")
        return x

    trace_many(Net(run), batches())
    assert log == ["drawn 0", "ran", "drawn 1", "ran", "drawn 2", "ran"]


def test_nothing_to_iterate_over_gives_runs_of_nothing() -> None:
    runs = trace_many(Gates(), [])
    assert len(runs) == 0 and runs.paths == () and runs.calls == {}
    assert str(runs).startswith("Gates: 0 inputs took 0 paths") and runs.coverage().never_called == ("a", "b", "c")
    assert Runs.from_json(runs.to_json()) == runs
    some = trace_many(Steps(), [steps(1)])
    none = trace_many(Steps(), [])
    assert none.merge(some) == some == some.merge(none)
    with pytest.raises(LineageError):
        runs.union()


def test_example_in_the_docs_holds() -> None:
    assert doctest.testmod(gradlineage.many) == (0, 4)


# -- mistakes --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "told"), [(Gates, "the class Gates; make an instance"), (len, "torch.nn.Module"), ({"a": nn.ReLU()}, "torch.nn.Module")]
)
def test_what_is_no_model_is_told(model: Any, told: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace_many(model, [data()])
    assert "trace_many()" in str(caught.value) and told in str(caught.value)


@pytest.mark.parametrize(
    ("batches", "found"), [(data(), "Tensor"), ({"x": data()}, "dict"), ("text", "str"), (b"text", "bytes"), (3, "int"), (None, "NoneType")]
)
def test_what_is_no_list_of_inputs_is_told(batches: Any, found: str) -> None:
    with pytest.raises(LineageError) as caught:
        trace_many(Gates(), batches)
    assert f"batches is {'an' if found == 'int' else 'a'} {found}" in str(caught.value) and "a list of tensors, a DataLoader" in str(
        caught.value
    )


@pytest.mark.parametrize("wrong", ["text", 3, None, {1: data()}, {data()}])
def test_batch_that_is_no_call_is_told_with_its_number_and_the_way_out(wrong: Any) -> None:
    with pytest.raises(LineageError) as caught:
        trace_many(Gates(), [data(), wrong])
    told = str(caught.value)
    assert f"item 1 is {'an' if wrong == 3 else 'a'} {type(wrong).__name__}" in told and "prepare=" in told
    assert "tuple or list of arguments or a mapping of keywords" in told


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("max_paths", -1, 0), ("max_paths", 1.5, 0), ("max_paths", None, 0), ("start", -1, 0), ("step", 0, 1), ("step", "2", 1)],
)
def test_numbers_that_make_no_sense_are_told(name: str, value: Any, least: int) -> None:
    with pytest.raises(LineageError) as caught:
        trace_many(Gates(), [data()], **{name: value})
    assert f"{name}={value!r}" in str(caught.value) and f"from {least} on" in str(caught.value)


def test_what_the_model_raises_comes_through_with_the_number_of_the_input() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.fc(x)
        if x.sum() < 0:
            raise KeyError("mine")
        return h  # type: ignore[no-any-return]

    model = Net(run, fc=lin())
    with pytest.raises(KeyError, match="mine") as caught:
        trace_many(model, [torch.ones(1, 4), torch.ones(1, 4), -torch.ones(1, 4)], start=20, step=5)
    notes = caught.value.__notes__
    assert any("input 30" in note for note in notes) and any("while tracing Net" in note for note in notes)
    with pytest.raises(ZeroDivisionError) as broken:
        trace_many(model, (torch.ones(1, 4) / (1 // n) for n in (1, 0)))
    assert any("input 1" in note for note in broken.value.__notes__)


# -- nothing left behind ---------------------------------------------------------------------------------------------------------------


def everything(model: nn.Module) -> list[object]:
    """What of a model can be changed by a pass."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs")
    found: list[object] = []
    for module in model.modules():
        found += [module.training, *(list(getattr(module, name)) for name in hooks), sorted(vars(module))]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found += [name, id(tensor), tensor.tolist(), tensor.requires_grad, tensor.grad]
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_model_is_as_before(fails: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise ValueError("too small")
        m.counter.add_(1)
        return m.drop(m.norm(m.fc(x)))  # type: ignore[no-any-return]

    model = Net(run, fc=lin(), norm=nn.BatchNorm1d(4), drop=nn.Dropout(0.5))
    model.register_buffer("counter", torch.zeros(2))
    model.fc.bias.requires_grad_(False)
    model.drop.eval()
    model.fc.register_forward_hook(lambda module, args, out: out * 2)
    before, state = everything(model), torch.get_rng_state()
    if fails:
        with pytest.raises(ValueError, match="too small"):
            trace_many(model, [data(3, 4), data(1, 4)])
    else:
        trace_many(model, [data(3, 4), data(2, 4)])
        assert torch.equal(state, torch.get_rng_state()) is False  # data() drew
    assert everything(model) == before
    assert torch.backends.mha.get_fastpath_enabled()


def test_random_state_is_put_back_at_the_end_and_every_pass_draws_on() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        for layer in (m.a, m.b, m.c):
            if torch.rand(()) < 0.5:
                x = layer(x)
        return x

    model, x = Net(run, a=lin(), b=lin(), c=lin()), data()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    runs = trace_many(model, [x] * 24)
    assert torch.equal(torch.get_rng_state(), before)
    expected = Counter(tuple(n for n in "abc" if torch.rand(()) < 0.5) for _ in range(24))  # draws what the passes drew
    assert Counter({tuple(labels(p.lineage)[:]) if labels(p.lineage) != ["Net"] else (): p.count for p in runs.paths}) == expected
    assert len(expected) > 3


def test_random_state_is_put_back_when_a_pass_fails() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        torch.rand(5)
        raise ValueError("no")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="no"):
        trace_many(Net(run), [torch.ones(1)])
    assert torch.equal(torch.get_rng_state(), before)


def test_random_inputs_of_a_generator_differ() -> None:
    runs = trace_many(Steps(), (torch.randint(0, 4, (1, 4)).float() for _ in range(30)))
    assert len(runs.paths) > 3


# -- the bar ---------------------------------------------------------------------------------------------------------------------------


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def test_no_bar_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    trace_many(Steps(), [steps(1)] * 3)
    assert capsys.readouterr() == ("", "")


def test_bar_on_a_terminal_unless_declined(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    trace_many(Steps(), [steps(1)] * 3, progress=False)
    assert capsys.readouterr() == ("", "")
    trace_many(Steps(), [steps(1)] * 3)
    out, err = capsys.readouterr()
    assert out == "" and "tracing" in err and "3/3" in err
    trace_many(Steps(), (steps(1) for _ in range(3)))
    assert "3/?" in capsys.readouterr().err


class Bar:
    """In place of rich's: notes when it is opened, moves on and is closed."""

    log: list[str]

    def __init__(self, *_: object, **__: object) -> None:
        Bar.log = []

    def __enter__(self) -> Bar:
        self.log.append("open")
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("closed")

    def add_task(self, *_: object, total: int | None) -> None:
        self.log.append(f"of {total}")

    def advance(self, *_: object) -> None:
        self.log.append("on")


def test_bar_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.progress.Progress", Bar)
    Bar.log = []
    trace_many(Steps(), [steps(1)] * 3)
    assert Bar.log == []
    trace_many(Steps(), [steps(1)] * 3, progress=True)
    assert Bar.log == ["open", "of 3", "on", "on", "on", "closed"]


def test_bar_is_gone_when_a_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.progress.Progress", Bar)
    with pytest.raises(IndexError) as caught:
        trace_many(Steps(), [torch.ones(1)], progress=True)
    log = list(Bar.log)
    assert caught.value.__notes__ and log[-1] == "closed"


# -- paths -----------------------------------------------------------------------------------------------------------------------------


def one_path(run: Run, *batches: Any, **layers: nn.Module) -> bool:
    return len(trace_many(Net(run, **layers), batches).paths) == 1


def test_shapes_values_and_lines_make_no_other_path() -> None:
    assert len(trace_many(Steps(), [data(n, 4).abs() * 0.1 for n in (1, 2, 7)]).paths) == 1

    def lines(m: Any, x: Tensor, first: bool) -> Tensor:
        if first:
            return m.fc(x).relu()  # type: ignore[no-any-return]
        return m.fc(x).relu()  # type: ignore[no-any-return]

    assert one_path(lines, (data(), True), (data(), False), fc=lin())


def test_what_only_rearranges_makes_no_other_path() -> None:
    def run(m: Any, x: Tensor, turned: bool) -> Tensor:
        return m.fc((x.t().contiguous().t() if turned else x.view(-1, 4))[:1])  # type: ignore[no-any-return]

    assert one_path(run, (data(), True), (data(), False), fc=lin())


def extra_call(m: Any, x: Tensor, other: bool) -> Any:
    return m.a(m.a(x)) if other else m.a(x)


def lost_call(m: Any, x: Tensor, other: bool) -> Any:
    return (m.a(x), None if other else m.b(x))[0]  # nothing depends on b


def other_edge(m: Any, x: Tensor, other: bool) -> Any:
    a, b = m.a(x), m.b(x)
    return m.c(a if other else b), a, b


def other_operation(m: Any, x: Tensor, other: bool) -> Any:
    return m.a(x.relu() if other else x.tanh())


def one_more_operation(m: Any, x: Tensor, other: bool) -> Any:
    return m.a(x.relu().tanh() if other else x.tanh())


def operation_before_the_output(m: Any, x: Tensor, other: bool) -> Any:
    return m.a(x).exp() if other else m.a(x)


def other_operands(m: Any, x: Tensor, other: bool) -> Any:
    a, b = m.a(x), m.b(x)
    return torch.cat([b, a] if other else [a, b])


def other_join(m: Any, x: Tensor, other: bool) -> Any:
    a, b = m.a(x), m.b(x)
    return a * b if other else a + b


def other_argument(m: Any, x: Tensor, other: bool) -> Any:
    a, b = m.a(x), m.b(x)
    return m.two(b, a) if other else m.two(a, b)


def other_output(m: Any, x: Tensor, other: bool) -> Any:
    a, b = m.a(x), m.b(x)
    return (b, a) if other else (a, b)


def other_order(m: Any, x: Tensor, other: bool) -> Any:
    return (m.b(x), m.a(x))[::-1] if other else (m.a(x), m.b(x))


def child_skipped(m: Any, x: Tensor, other: bool) -> Any:
    return m.block(x, other)


def hidden_weight(m: Any, x: Tensor, other: bool) -> Any:
    a, b = m.a(torch.eye(4)), m.b(torch.eye(4))
    weight = a if other else b
    return torch.func.functional_call(m.c, {"weight": weight}, (x,))


class Maybe(nn.Module):
    """A block that skips its child for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.child = lin()

    def forward(self, x: Tensor, on: bool) -> Tensor:
        return self.child(x).relu() if on else x * 2


WAYS = [
    extra_call, lost_call, other_edge, other_operation, one_more_operation, operation_before_the_output, other_operands, other_join, other_argument,
    other_output, other_order, child_skipped, hidden_weight,
]  # fmt: skip


@pytest.mark.parametrize("run", WAYS, ids=lambda run: run.__name__)
def test_another_way_through_the_model_is_another_path(run: Run) -> None:
    model = Net(run, a=lin(), b=lin(), c=lin(), two=nn.Bilinear(4, 4, 4), block=Maybe())
    runs = trace_many(model, [(data(), flag) for flag in (False, True, False, False, True)])
    assert taken(runs) == [(3, (0, 2, 3)), (2, (1, 4))]


def test_counts_shares_and_examples() -> None:
    counts = [2, 0, 2, 1, 0, 2, 1, 2, 5, 5]
    runs = trace_many(Steps(), map(steps, counts), start=100, step=7)
    assert taken(runs) == [(4, (100, 114, 135, 149)), (2, (107, 128)), (2, (121, 142)), (2, (156, 163))]  # ties: who came first
    assert [path.share for path in runs.paths] == [0.4, 0.2, 0.2, 0.2]
    assert [path.length for path in runs.paths] == [3, 1, 2, 6]  # the cell so often, and up
    assert [labels(path.lineage) for path in runs.paths[:2]] == [["cell[0]", "cell[1]", "up"], ["up"]]
    assert runs.model == "Steps" and runs.calls == {"": (1, 1), "cell": (0, 5), "up": (1, 1)}


def test_examples_are_the_first_and_bounded() -> None:
    (path,) = trace_many(Steps(), [steps(1)] * 200, start=1, step=2).paths
    assert path.count == 200 and 3 <= len(path.examples) <= 20
    assert path.examples == tuple(range(1, 1 + 2 * len(path.examples), 2))


def test_lineage_of_a_path_is_that_of_its_first_input() -> None:
    runs = trace_many(Steps(), [steps(1, rows=2), steps(2, rows=3), steps(1, rows=5), steps(2, rows=7)])
    assert [path.lineage["up"].outputs[0].shape for path in runs.paths if path.lineage] == [(2, 4), (3, 4)]


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4])
def test_lineages_of_the_paths_seen_first_are_kept_and_all_are_counted(most: int) -> None:
    counts = [3, 0, 1, 0, 1, 1, 1]
    runs = trace_many(Steps(), map(steps, counts), max_paths=most)
    assert taken(runs) == [(4, (2, 4, 5, 6)), (2, (1, 3)), (1, (0,))]
    kept = {path.examples[0]: path.lineage is not None for path in runs.paths}
    assert kept == {0: most > 0, 1: most > 1, 2: most > 2}
    assert [path.length for path in runs.paths] == [2, 1, 4] and runs.calls["cell"] == (0, 3) and runs.max_paths == most
    (sides,) = {line.sides for line in runs.coverage().decisions if line.kind == "int"}
    assert (sides.numbers, sides.least, sides.most) == (7, 0, 3)


def test_text_says_what_is_beyond_max_paths() -> None:
    runs = trace_many(Steps(), map(steps, [0, 1, 2, 2]), max_paths=1)
    assert "its lineage was not kept (max_paths)" in str(runs)
    assert runs.paths[0].lineage is None and runs.paths[0].difference is None and all(path.difference is None for path in runs.paths)
    union = runs.union()
    assert labels(union) == ["up"] and any("3 inputs on 2 paths beyond max_paths=1" in note for note in union.notes)
    with pytest.raises(LineageError, match="max_paths of 1 or more"):
        trace_many(Steps(), [steps(0)], max_paths=0).union()


def test_text_has_a_line_a_path_and_what_sets_it_apart() -> None:
    runs = trace_many(Gates(), [gates(True, True)] * 6 + [gates(False, True)] * 3 + [gates(True, False)])
    place = line(Gates, "if x[0, 0] > 0"), line(Gates, "if x[0, 1] > 0")
    assert str(runs).replace("tests/", "") == "\n".join(
        [
            "Gates: 10 inputs took 3 paths",
            "path 1  60%  ×6  3 layers  inputs 0, 1, 2 …",
            "path 2  30%  ×3  2 layers  inputs 6, 7, 8",
            "    - a (Linear)",
            "    ~ b: was a, now input:x",
            "path 3  10%  ×1  2 layers  input 9",
            "    - b (Linear)",
            "    ~ c: was b, now a",
            "",
            "seen in one input only: c ← a",
            f"? bool at {place[0]}: True 70%, False 30%; True on paths 1, 3; False on path 2",
            f"? bool at {place[1]}: True 90%, False 10%; True on paths 1, 2; False on path 3",
        ]
    )


# -- what sets a path apart ------------------------------------------------------------------------------------------------------------


def test_commonest_path_has_no_difference() -> None:
    assert trace_many(Gates(), [gates(True, True)]).paths[0].difference is None


def test_difference_is_that_from_the_commonest_path() -> None:
    runs = trace_many(Gates(), [gates(False, False), *[gates(True, True)] * 3, gates(False, True)])
    common, none, second = runs.paths
    assert (common.count, none.examples, second.examples) == (3, (0,), (4,))
    assert none.difference is not None and none.difference.removed == ("a", "b") and none.difference.added == ()
    (rewired,) = none.difference.rewired
    assert (rewired.label, rewired.was, rewired.now) == ("c", ("b",), ("input:x",))
    assert second.difference is not None and second.difference.removed == ("a",)
    (rewired,) = second.difference.rewired
    assert (rewired.label, rewired.was, rewired.now) == ("b", ("a",), ("input:x",))


def test_longer_loop_is_some_added_calls() -> None:
    runs = trace_many(Steps(), map(steps, [2, 2, 4]))
    difference = runs.paths[1].difference
    assert difference is not None and difference.added == ("cell[2]", "cell[3]")
    assert not difference.removed and not difference.rewired and not difference.reshaped


def test_other_operation_is_a_rewired_reader() -> None:
    runs = trace_many(Net(other_operation, a=lin()), [(data(), False), (data(), False), (data(), True)])
    difference = runs.paths[1].difference
    assert difference is not None and not difference.added and not difference.removed
    (rewired,) = difference.rewired
    assert (rewired.label, rewired.was, rewired.now) == ("a", ("tanh ← input:args[0]",), ("relu ← input:args[0]",))


# -- the union, held against counting over passes traced one by one ------------------------------------------------------------------------


def call_key(call: Call | None) -> Hashable:
    return None if call is None else (call.path, call.nth, call.kind)


def join_keys(lineage: Lineage) -> dict[Join, Hashable]:
    """Container, operation, line, and which of them it is."""
    seen: Counter[Hashable] = Counter()
    found: dict[Join, Hashable] = {}
    for join in lineage.joins:
        group = call_key(join.container), join.op, join.where
        found[join] = (*group, seen[group])
        seen[group] += 1
    return found


def link_key(link: Link, joins: dict[Join, Hashable]) -> Hashable:
    source = link.source
    if isinstance(source, Join):
        return ("join", joins[source], link.ops)
    if source.kind == "call":
        return ("call", source.path, source.nth, source.port, link.ops)
    return (source.kind, source.label.partition("[")[0], link.ops)


def census(lineage: Lineage) -> Counter[Hashable]:
    """Each call, join and link by what it is, with its count."""
    joins = join_keys(lineage)
    found: Counter[Hashable] = Counter()

    def flows(place: Hashable, flows: Iterable[Flow]) -> None:
        for position, flow in enumerate(flows):
            for link in flow.links:
                found["link", place, position, link_key(link, joins)] += link.count

    for call in lineage.calls:
        found["call", call_key(call), call_key(call.parent)] += call.count
        flows((call_key(call), "in"), call.inputs)
        flows((call_key(call), "hidden"), call.hidden)
        if call.kind == "container":
            flows((call_key(call), "out"), call.outputs)
    for join, key in joins.items():
        found["join", key] += join.count
        flows((key, "operand"), join.inputs)
    flows("output", lineage.outputs)
    return found


def counted(lineages: Iterable[Lineage]) -> Counter[Hashable]:
    total: Counter[Hashable] = Counter()
    for lineage in lineages:
        total += census(lineage)
    return total


Script = tuple[tuple[str, int, int], ...]


class Scripted(nn.Module):
    """Steps, each with the bit that switches it on (-1: always) and how far back its second operand lies."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.layers = nn.ModuleList([lin() for _ in script])
        self.blocks = nn.ModuleList([Maybe() for _ in script])
        self.first, self.shared, self.two = lin(), lin(), nn.LSTMCell(4, 4)

    def forward(self, x: Tensor, bits: int) -> Any:
        live = [x, self.first(x)]
        for n, (kind, guard, back) in enumerate(self.script):
            if guard >= 0 and not bits >> guard & 1:
                continue
            h, other = live[-1], live[max(0, len(live) - 1 - back)]
            if kind == "layer":
                h = self.layers[n](h)
            elif kind == "shared":
                h = self.shared(h)
            elif kind == "block":
                h = self.blocks[n](h, bool(bits >> back & 1))
            elif kind == "add":
                h = h + other
            elif kind == "cat":
                h = torch.cat([other, h])[: len(x)]
            elif kind == "two":
                h = self.two(h, (other, other))[back % 2]
            elif kind == "hidden":
                h = torch.func.functional_call(self.layers[n], {"weight": torch.cat([h, other])}, (h,))
            elif kind == "detach":
                h = h.detach()
            else:
                h = torch.relu(h)
            live.append(h)
        return live[-1], live[-2]


KINDS = ["layer", "layer", "shared", "block", "add", "add", "cat", "two", "hidden", "detach", "relu"]
scripts = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(-1, 2), st.integers(0, 2)), min_size=1, max_size=8).map(tuple)
masks = st.lists(st.integers(0, 7), min_size=1, max_size=8)


def inputs(bits: Sequence[int]) -> list[tuple[Tensor, int]]:
    return [(torch.ones(2, 4), b) for b in bits]


@examples(60)
@given(script=scripts, bits=masks | st.permutations(range(8)))
def test_union_counts_what_single_passes_have(script: Script, bits: list[int]) -> None:
    model = Scripted(script)
    union = trace_many(model, inputs(bits)).union()
    assert union.runs == len(bits)
    singles = [trace(model, *batch) for batch in inputs(bits)]
    assert census(union) == counted(singles)


@examples(40)
@given(script=scripts, bits=masks)
def test_union_keeps_containers_before_what_is_in_them_and_the_commonest_path_in_order(script: Script, bits: list[int]) -> None:
    runs = trace_many(Scripted(script), inputs(bits))
    union, common = runs.union(), runs.paths[0].lineage
    assert common is not None
    place = {call_key(call): n for n, call in enumerate(union.calls)}
    assert len(place) == len(union.calls)
    assert all(call.parent is None or place[call_key(call.parent)] < n for n, call in enumerate(union.calls))
    order = [place[call_key(call)] for call in common.calls]
    assert order == sorted(order)
    number = {key: n for n, key in enumerate(join_keys(union).values())}
    order = [number[key] for key in join_keys(common).values()]
    assert order == sorted(order)


LINEAR = st.lists(st.tuples(st.sampled_from(["layer", "relu"]), st.integers(-1, 2), st.just(0)), min_size=1, max_size=6).map(tuple)


@settings(examples(40), phases=(Phase.generate,))
@given(script=LINEAR, bits=st.permutations(range(8)))
def test_union_keeps_the_running_order_of_every_pass(script: Script, bits: list[int]) -> None:
    """Every layer is called once and in the order of the script, whatever is left out."""
    union = trace_many(Scripted(script), inputs(bits)).union()
    order = [int(call.path.removeprefix("layers.")) for call in union.layers if call.path != "first"]
    assert order == sorted(order)


def test_union_puts_what_feeds_before_what_it_feeds() -> None:
    runs = trace_many(Gates(), [gates(True, False), gates(False, True), gates(True, True)])
    assert labels(runs.union()) == ["a", "b", "c"]


@examples(30)
@given(script=scripts, bits=st.integers(0, 7), count=st.integers(1, 3))
def test_union_of_one_path_is_wired_like_its_passes(script: Script, bits: int, count: int) -> None:
    model = Scripted(script)
    union, alone = trace_many(model, inputs([bits] * count)).union(), trace(model, *inputs([bits])[0])
    assert [call.label for call in union.calls] == [call.label for call in alone.calls]
    assert [join.label for join in union.joins] == [join.label for join in alone.joins]
    assert [call.where for call in union.layers if call.path] == [call.where for call in alone.layers if call.path]

    def wiring(lineage: Lineage) -> list[object]:
        items: tuple[Call | Join, ...] = (*lineage.layers, *lineage.joins)
        fed = [(item.label, f.name, f.shape, [(k.label, k.ops) for k in f.links]) for item in items for f in item.inputs]
        sources = [[(s.label, s.kind) for s in f.sources] for item in items for f in item.inputs]
        return [fed, sources, [[(k.label, k.ops) for k in f.links] for f in lineage.outputs]]

    assert wiring(union) == wiring(alone)
    assert {call.count for call in union.calls} == {count} and {join.count for join in union.joins} <= {count}
    assert ("detach" in {kind for kind, *_ in script}) or not gradlineage.diff(alone, union)


@examples(30)
@given(script=scripts, bits=masks)
def test_union_survives_saving_and_pickling(script: Script, bits: list[int]) -> None:
    union = trace_many(Scripted(script), inputs(bits)).union()
    for again in (Lineage.from_json(union.to_json()), pickle.loads(pickle.dumps(union))):
        assert again == union and census(again) == census(union) and again.runs == len(bits)
        assert again.to_table() == union.to_table() and again.roll().to_table() == union.roll().to_table()


@examples(40)
@given(script=scripts, bits=masks)
def test_collapsed_union_has_the_calls_of_collapsed_passes(script: Script, bits: list[int]) -> None:
    model = Scripted(script)
    union = trace_many(model, inputs(bits)).union(depth=1)
    assert all(call.kind == "layer" for call in union.calls if call.path) and "Returns" in union.to_table()
    singles = [trace(model, *batch).collapse(depth=1) for batch in inputs(bits)]

    def calls(lineage: Lineage) -> Counter[Hashable]:
        found: Counter[Hashable] = Counter()
        for call in lineage.calls:
            found[call.path, call.nth] += call.count  # a block that skipped its child has a row of its own, and both count here
        return found

    assert calls(union) == sum(map(calls, singles), Counter())


@settings(examples(40), phases=(Phase.generate,))
@given(script=scripts, bits=masks)
def test_collapsed_union_is_fed_like_collapsed_passes(script: Script, bits: list[int]) -> None:
    model = Scripted(script)
    union = trace_many(model, inputs(bits)).union(depth=1)
    assert census(union) == counted(trace(model, *batch).collapse(depth=1) for batch in inputs(bits))


def test_collapsed_container_of_a_union_keeps_its_inside_to_itself() -> None:
    def run(m: Any, x: Tensor, on: bool) -> Any:
        return m.fc(m.block(m.a(x), on))

    model = Net(run, a=lin(), block=Maybe(), fc=lin())
    union = trace_many(model, [(data(), True)] * 2).union("block")
    (link,) = union["fc"].inputs[0].links
    assert (link.label, link.ops, link.count) == ("block", (), 2) and union["block"].hidden == ()


def test_block_that_skips_its_child_is_layer_and_container() -> None:
    def run(m: Any, x: Tensor, on: bool) -> Any:
        return m.fc(m.block(x, on))

    union = trace_many(Net(run, block=Maybe(), fc=lin()), [(data(), on) for on in (True, True, False)]).union()
    found = {(call.label, call.kind): call.count for call in union.calls if call.parent is not None}
    assert found == {("block", "container"): 2, ("block.child", "layer"): 2, ("block", "layer"): 1, ("fc", "layer"): 3}
    assert {(link.label, link.ops): link.count for link in union["fc"].inputs[0].links} == {("block.child", ("relu",)): 2, ("block", ()): 1}
    assert [source.label for source in union["fc"].inputs[0].sources] == ["block.child", "block"]


def test_join_that_ran_alone_in_commoner_passes_still_feeds_one_that_did() -> None:
    def run(m: Any, x: Tensor, first: bool, second: bool) -> Any:
        a, b = m.a(x), m.b(x)
        h = a + b if first else a
        g = torch.cat([h, b]) if second else b
        return h, g

    model = Net(run, a=lin(), b=lin())
    batches = [(torch.ones(2, 4), first, second) for first, second in ((True, False), (False, True), (True, True))]
    union = trace_many(model, batches).union()
    assert census(union) == counted(trace(model, *batch) for batch in batches)
    assert [(join.op, join.count) for join in union.joins] == [("add", 2), ("cat", 2)]
    assert [(link.label, link.count) for link in union.joins[1].inputs[0].links] == [("a", 1), (":add", 1)]


def test_joins_are_matched_by_their_line() -> None:
    def run(m: Any, x: Tensor, both: bool) -> Any:
        a, b = m.a(x), m.b(x)
        if both:
            a = m.d(a + b)  # first
        return m.c(a + x)  # second

    model = Net(run, a=lin(), b=lin(), c=lin(), d=lin())
    union = trace_many(model, [(data(), both) for both in (False, True, False)]).union()
    assert {join.where.rpartition("/")[2]: join.count for join in union.joins} == {line(run, "# first"): 1, line(run, "# second"): 3}
    (second,) = (link.source for link in union["c"].inputs[0].links)
    assert isinstance(second, Join) and second.count == 3
    assert [(link.label, link.count) for link in second.inputs[0].links] == [("a", 2), ("d", 1)]
    assert [(link.label, link.count) for link in union["d"].inputs[0].links] == [(":add[0]", 1)]


def test_gradient_that_stops_in_some_passes_is_a_link_of_its_own() -> None:
    def run(m: Any, x: Tensor, stop: bool) -> Any:
        h = m.a(x)
        return m.b(h.detach() if stop else h)

    def links(*stops: bool) -> dict[tuple[tuple[str, ...], bool], int]:
        union = trace_many(Net(run, a=lin(), b=lin()), [(data(), stop) for stop in stops]).union()
        return {(link.ops, link.differentiable): link.count for link in union["b"].inputs[0].links}

    assert links(False, True, True) == {((), True): 1, (("detach",), False): 2}
    assert links(True, True) == {(("detach",), False): 2}


@pytest.mark.parametrize("count", [1, 2])
def test_stopped_gradient_is_marked_in_every_union(count: int) -> None:
    def run(m: Any, x: Tensor) -> Any:
        return m.b(m.a(x).detach())

    model, x = Net(run, a=lin(), b=lin()), data()
    alone, union = trace(model, x), trace_many(model, [x] * count).union()
    assert "detach ⇠ a" in alone.to_table()
    assert "detach ⇠ a" in union.to_table() and not gradlineage.diff(alone, union)


def test_table_of_a_union_has_shares_where_not_all_passes_agree() -> None:
    runs = trace_many(Steps(), [steps(3)] * 2 + [steps(5), steps(17, -1)])
    text = runs.union().to_table(width=200)
    assert "The union of 4 passes; calls per input: cell ×3–17" in text
    rows = {row.split(" (")[0]: row for row in text.splitlines() if "(Linear)" in row}
    assert "%" not in rows["cell[2]"] and "cell[3] (Linear) 50%" in rows["cell[3]"] and "cell[5] (Linear) 25%" in rows["cell[5]"]
    assert "up (Linear) 75%" in text and "down (Linear) 25%" in text
    assert rows["up"].endswith("cell[2] 50%, cell[4] 25%") and rows["down"].endswith("  cell[16]")
    assert "%" not in trace_many(Steps(), [steps(3)] * 2).union().to_table()
    rolled = runs.union().roll().to_table(width=200)
    assert "cell[0…2] ×3 (Linear)" in rolled and "calls per input: cell ×3–17" in rolled


# -- putting together --------------------------------------------------------------------------------------------------------------------

MODEL = Steps()
points = st.tuples(st.integers(0, 3), st.sampled_from([-2, -1, 1, 2]), st.integers(1, 2))
sets = st.lists(points, min_size=1, max_size=9)
bounds = st.sampled_from([0, 1, 2, 3, 100])


def go(items: Sequence[tuple[int, int, int]], **options: Any) -> Runs:
    return trace_many(MODEL, [steps(*item) for item in items], **options)


def single(point: tuple[int, int, int], number: int, most: int) -> Runs:
    return go([point], start=number, max_paths=most)


def merged(parts: list[Runs], rng: random.Random) -> Runs:
    """In any order and any shape of tree."""
    parts = list(parts)
    while len(parts) > 1:
        rng.shuffle(parts)
        taking = rng.randint(2, len(parts))
        parts = [parts[0].merge(*parts[1:taking]), *parts[taking:]]
    return parts[0]


@examples(60)
@given(items=sets, most=bounds, rng=st.randoms(use_true_random=False))
def test_parts_put_together_in_any_way_are_what_one_go_gives(items: list[tuple[int, int, int]], most: int, rng: random.Random) -> None:
    whole = go(items, max_paths=most)
    parts = [single(item, number, most) for number, item in enumerate(items)]
    assert merged(parts, rng) == whole
    assert str(merged(parts, rng)) == str(whole)


@examples(40)
@given(items=sets, most=bounds, step=st.integers(1, 4), rng=st.randoms(use_true_random=False))
def test_every_nth_input_traced_elsewhere_gives_the_same(
    items: list[tuple[int, int, int]], most: int, step: int, rng: random.Random
) -> None:
    parts = [go(items[k::step], start=k, step=step, max_paths=most) for k in range(step)]
    assert merged(parts, rng) == go(items, max_paths=most)


@examples(40)
@given(parts=st.tuples(*[st.tuples(st.lists(points, max_size=4), bounds)] * 3))
def test_merging_is_associative_and_commutative_also_where_numbers_clash(parts: Sequence[tuple[list[tuple[int, int, int]], int]]) -> None:
    a, b, c = (go(items, max_paths=most) for items, most in parts)
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c)) == a.merge(b, c) == c.merge(a, b)
    assert a.merge() == a
    together = a.merge(b, c)
    assert together.total == a.total + b.total + c.total and together.max_paths == min(most for _, most in parts)


@examples(60)
@given(items=sets, most=bounds)
def test_counts_are_those_of_counting_by_hand(items: list[tuple[int, int, int]], most: int) -> None:
    runs = go(items, max_paths=most)
    by_hand: dict[tuple[int, bool], list[int]] = {}
    for number, (count, sign, _) in enumerate(items):
        by_hand.setdefault((count, sign > 0), []).append(number)
    expected = sorted(((len(numbers), tuple(numbers)) for numbers in by_hand.values()), key=lambda way: (-way[0], way[1]))
    assert taken(runs) == expected
    assert [path.lineage is not None for path in sorted(runs.paths, key=lambda p: p.examples)] == [n < most for n in range(len(by_hand))]
    loops, ups = [count for count, _, _ in items], sum(sign > 0 for _, sign, _ in items)
    calls = {"": (1, 1)}
    if max(loops):
        calls["cell"] = min(loops), max(loops)
    if ups:
        calls["up"] = int(ups == len(items)), 1
    if ups < len(items):
        calls["down"] = int(ups == 0), 1
    assert runs.calls == calls
    edges = Counter[tuple[str, str]]()
    for count, sign, _ in items:
        end = "up" if sign > 0 else "down"
        edges.update({("cell", "input:x")} if count else set())
        edges.update({("cell", "cell")} if count > 1 else set())
        edges.update({(end, "cell" if count else "input:x"), ("output", end), ("output", "input:x")} - {("output", "input:x")})
    once = {edge for edge, n in edges.items() if n == 1} if len(items) > 1 else set()
    assert set(runs.coverage().seen_once) == once


@examples(40)
@given(items=sets, most=bounds)
def test_runs_survive_saving_and_pickling(items: list[tuple[int, int, int]], most: int) -> None:
    runs = go(items, max_paths=most)
    for again in (Runs.from_json(runs.to_json()), Runs.from_json(runs.to_json().encode()), pickle.loads(pickle.dumps(runs))):
        assert again == runs and hash(again) == hash(runs) and again.to_json() == runs.to_json()
        assert str(again) == str(runs) and taken(again) == taken(runs) and again.calls == runs.calls
        assert [path.lineage for path in again.paths] == [path.lineage for path in runs.paths]


def test_saved_file_is_read_again(tmp_path: File) -> None:
    runs = trace_many(Steps(), map(steps, [1, 2]))
    runs.save(tmp_path / "runs.json")
    assert Runs.load(tmp_path / "runs.json") == runs == Runs.load(str(tmp_path / "runs.json"))
    with pytest.raises(LineageError, match="No such file"):
        Runs.load(tmp_path / "none.json")
    with pytest.raises(LineageError, match="what was there before is unchanged"):
        runs.save(tmp_path / "no" / "runs.json")


def test_runs_that_differ_are_not_equal() -> None:
    runs = trace_many(Steps(), map(steps, [1, 2]))
    for other in ([2, 1], [1, 1], [1, 2, 2], [1]):
        assert trace_many(Steps(), map(steps, other)) != runs
    assert trace_many(Steps(), map(steps, [1, 2]), start=1) != runs and trace_many(Steps(), map(steps, [1, 2]), max_paths=7) != runs
    assert runs != "runs"


def test_runs_of_different_models_are_not_put_together() -> None:
    runs = trace_many(Steps(), [steps(1)])
    with pytest.raises(LineageError, match=r"runs of one model.*Steps with 4 modules.*Gates with 4 modules"):
        runs.merge(trace_many(Gates(), [steps(1)]))
    other = Steps()
    other.add_module("more", lin())
    with pytest.raises(LineageError, match="Steps with 5 modules"):
        runs.merge(runs, trace_many(other, [steps(1)]))
    retyped = Steps()
    retyped.up = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(LineageError, match="runs of one model"):
        runs.merge(trace_many(retyped, [steps(1)]))
    with pytest.raises(LineageError, match="found Lineage"):
        runs.merge(trace(Steps(), steps(1)))  # type: ignore[arg-type]


def test_of_two_passes_with_one_number_the_same_is_kept_in_any_order() -> None:
    a, b = (go([(1, 1, size)]) for size in (1, 2))
    kept = [runs.paths[0].lineage for runs in (a, b, a.merge(b), b.merge(a))]
    assert kept[0] != kept[1] and kept[2] == kept[3] and kept[2] in kept[:2]
    assert a.merge(b).paths[0].count == 2 and a.merge(b).paths[0].examples == (0,)


def test_line_that_had_them_traced_does_not_count() -> None:
    model = Steps()
    here = trace_many(model, [steps(1)])
    there = trace_many(model, [steps(1)])
    assert here == there and here.to_json() == there.to_json()


def test_more_inputs_than_are_merged_at_once() -> None:
    counts = [n % 5 for n in range(300)]
    runs = trace_many(Steps(), map(steps, counts))
    assert [path.count for path in runs.paths] == [60] * 5 and runs.calls["cell"] == (0, 4)
    assert [path.examples[:3] for path in runs.paths] == [(n, n + 5, n + 10) for n in range(5)]


def test_infinite_readings_survive_saving() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x

    runs = trace_many(Net(run), [torch.tensor([value]) for value in (1.0, math.inf, -math.inf)])
    assert Runs.from_json(runs.to_json()) == runs


DAMAGED = [
    "", "{", "[]", "null", "7", '"text"', "{}", '{"schema": "gradlineage/1"}', '{"schema": "gradlineage-runs/2"}', '{"schema": "gradlineage-runs/1"}',
    b"\xff\xfe", b"\x80abc",
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED, ids=repr)
def test_what_is_no_document_is_told(text: str | bytes) -> None:
    with pytest.raises(FormatError, match=r"^\$"):
        Runs.from_json(text)


def test_lineage_is_no_runs_and_runs_are_no_lineage() -> None:
    with pytest.raises(FormatError, match='expected "gradlineage-runs/1"'):
        Runs.from_json(trace(Steps(), steps(1)).to_json())
    with pytest.raises(FormatError):
        Lineage.from_json(trace_many(Steps(), [steps(1)]).to_json())


DOCUMENT = trace_many(Steps(), [steps(1), steps(2, -1), steps(1)]).to_json()


@examples(60)
@given(cut=st.integers(0, len(DOCUMENT) - 2))
def test_truncated_document_is_told(cut: int) -> None:
    with pytest.raises(FormatError):
        Runs.from_json(DOCUMENT[:cut])


@pytest.mark.parametrize("name", json.loads(DOCUMENT))
def test_missing_part_is_told(name: str) -> None:
    found = json.loads(DOCUMENT)
    del found[name]
    with pytest.raises(FormatError):
        Runs.from_json(json.dumps(found))


@pytest.mark.parametrize("name", json.loads(DOCUMENT)["paths"][0])
def test_missing_part_of_a_path_is_told(name: str) -> None:
    found = json.loads(DOCUMENT)
    del found["paths"][1][name]
    with pytest.raises(FormatError):
        Runs.from_json(json.dumps(found))


def places(value: Any, above: tuple[Any, ...] = (), depth: int = 4) -> Iterator[tuple[Any, ...]]:
    """The ways to what is in a document; lineages as a whole."""
    if above:
        yield above
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*above, key), depth - 1) if depth and "lineage" not in above else ()


WRONG: list[Any] = [None, -1, 1.5, "text", [], {}, True, [None], ["x", 1], 10**30]


def put(place: Sequence[Any], value: Any) -> str:
    found = json.loads(DOCUMENT)
    at = found
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    return json.dumps(found)


def usable(text: str) -> bool:
    """Whether a document is refused with a `FormatError`, or can be used."""
    try:
        runs = Runs.from_json(text)
    except FormatError:
        return True
    try:
        str(runs), runs.to_json(), runs.paths, runs.calls, runs.coverage(), hash(runs), runs.merge(runs)
    except Exception:
        return False
    return True


def test_damaged_document_is_refused_or_usable() -> None:
    wrong = {(*place, repr(value)) for place in places(json.loads(DOCUMENT)) for value in WRONG if not usable(put(place, value))}
    assert not wrong


def test_damaged_document_raises_nothing_but_format_errors() -> None:
    for place in places(json.loads(DOCUMENT)):
        for value in WRONG:
            try:
                Runs.from_json(put(place, value))
            except FormatError as error:
                assert str(error).startswith("$")


# -- coverage --------------------------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """``never`` and what is in it does not run; of ``part`` one child runs, though ``part`` itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.a = lin()
        self.never = nn.Sequential(lin(), nn.Sequential(lin(), nn.ReLU()))
        self.rare = Maybe()
        self.items = nn.ModuleList([lin(), lin()])
        self.twice = self.a
        self.attention = nn.MultiheadAttention(4, 2)
        self.borrowed, self.idle = lin(), lin()

    def forward(self, x: Tensor, on: bool) -> Tensor:
        h = self.items[0](self.a(x))
        h = self.rare(h, on)
        h = self.attention(h, h, h)[0]
        return nn.functional.linear(h, self.borrowed.weight)


def test_never_called_are_the_outermost_modules_that_no_input_reached() -> None:
    def coverage(*on: bool) -> tuple[str, ...]:
        return trace_many(Nested(), [(data(), flag) for flag in on]).coverage().never_called

    assert coverage(False) == ("never", "rare.child", "items.1", "idle")
    assert coverage(False, True) == ("never", "items.1", "idle")
    assert "never called: never, items.1, idle" in str(trace_many(Nested(), [(data(), True)]))


def test_coverage_does_not_hang_on_max_paths() -> None:
    few, many = (trace_many(Nested(), [(data(), on) for on in (True, True, False)], max_paths=most).coverage() for most in (0, 9))
    assert few.never_called == many.never_called


def test_part_that_one_input_reached_in_another_part_of_the_data_is_called() -> None:
    model = Nested()
    one, other = (trace_many(model, [(data(), on)], start=n) for n, on in enumerate((False, True)))
    assert "rare.child" in one.coverage().never_called and "rare.child" not in one.merge(other).coverage().never_called


def test_edges_seen_once() -> None:
    runs = trace_many(Gates(), [gates(True, True), gates(True, True), gates(True, False), gates(False, False), gates(False, False)])
    assert runs.coverage().seen_once == (("c", "a"),)
    assert trace_many(Gates(), [gates(True, True)]).coverage().seen_once == ()  # of one input all are
    assert trace_many(Gates(), [gates(True, True)] * 2).coverage().seen_once == ()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = lin(), lin()

    def forward(self, x: Tensor) -> Tensor:
        return self.p(x) + self.q(x)  # type: ignore[no-any-return]


def test_edges_of_joins_are_the_same_however_often_their_block_ran() -> None:
    def run(m: Any, x: Tensor, count: int) -> Any:
        for _ in range(count):
            x = m.block(x)
        return m.fc(x)

    runs = trace_many(Net(run, block=Block(), fc=lin()), [(data(), count) for count in (1, 2, 3)])
    assert runs.coverage().seen_once == ()


def test_decisions_say_how_they_fell_and_on_which_path() -> None:
    batches = [gates(True, True), gates(False, True), gates(True, True), gates(True, True)]
    runs = trace_many(Gates(), batches)
    both, second = runs.paths
    one, other = runs.coverage().decisions
    assert (one.kind, one.call, one.where.rpartition("/")[2]) == ("bool", "", line(Gates, "if x[0, 0] > 0"))
    assert (one.sides.true, one.sides.false, one.sides.numbers, one.sides.others) == (3, 1, 0, 0) and not one.settled
    assert [(path.key, sides.true, sides.false) for path, sides in one.paths] == [(both.key, 3, 0), (second.key, 0, 1)]
    assert (other.where.rpartition("/")[2], other.sides.true, other.sides.false) == (line(Gates, "if x[0, 1] > 0"), 4, 0)
    assert other.settled and runs.coverage().settled == (other,)
    assert "always True (×4)" in str(runs.coverage())


def test_numbers_that_never_changed_are_settled() -> None:
    def settled(*counts: int) -> set[str]:
        return {line.kind for line in trace_many(Steps(), map(steps, counts)).coverage().settled}

    assert settled(2, 2) == {"int", "bool", "item"} and settled(2, 3) == {"bool", "item"}
    (found,) = (d for d in trace_many(Steps(), map(steps, [3, 1, 2])).coverage().decisions if d.kind == "int")
    assert (found.sides.least, found.sides.most, found.sides.numbers, str(found.sides)) == (1, 3, 3, "1 to 3 (×3)")


def test_line_read_several_times_in_a_pass_counts_every_time() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        while x.sum() < 8:  # read
            x = m.more(x)
        return x

    double = lin()
    nn.init.constant_(double.bias, 0)
    with torch.no_grad():
        double.weight.copy_(2 * torch.eye(4))
    runs = trace_many(Net(run, more=double), [torch.tensor([[total, 0.0, 0.0, 0.0]]) for total in (1.0, 4.0, 9.0)])
    (found,) = runs.coverage().decisions
    assert (found.sides.true, found.sides.false) == (3 + 1, 3)
    assert [(path.examples, s.true, s.false) for path, s in found.paths] == [((0,), 3, 1), ((1,), 1, 1), ((2,), 0, 1)]


def test_reading_without_a_number_is_never_settled() -> None:
    def run(m: Any, x: Tensor) -> Any:
        return x.tolist(), x.sum().item()

    runs = trace_many(Net(run), [torch.tensor([math.nan]), torch.tensor([1.0])])
    assert {line.kind: (line.sides.numbers, line.sides.others) for line in runs.coverage().decisions} == {"list": (0, 2), "item": (1, 1)}
    assert runs.coverage().settled == ()


def test_coverage_of_all_that_ran_says_so() -> None:
    def run(m: Any, x: Tensor) -> Any:
        return m.fc(x)

    assert str(trace_many(Net(run, fc=lin()), [data()]).coverage()) == "no decisions, and every module was called"


# -- loops rolled up -----------------------------------------------------------------------------------------------------------------------


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 4), lin()

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x:
            state = self.cell(step, state)
        assert state is not None
        return self.head(state[0])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def unrolled() -> Lineage:
    return trace(Unrolled(), torch.ones(300, 2, 4))


def rows(text: str) -> list[str]:
    """Of a table, what stands between its two rules."""
    return text.split("─\n")[1].splitlines()[:-1]


def test_loop_of_300_steps_has_a_handful_of_rows(unrolled: Lineage) -> None:
    assert len(rows(str(unrolled))) > 300
    text = str(unrolled.roll())
    assert len(rows(text)) < 8 and "cell ×300 (LSTMCell)" in text and "cell[previous][0]" in text
    assert "head (Linear)" in text and "2 layers in 301 calls" in text


def test_unrolled_is_what_was_rolled(unrolled: Lineage) -> None:
    rolled = unrolled.roll()
    assert rolled.rolled and not unrolled.rolled and rolled != unrolled
    assert rolled.unroll() == unrolled and rolled.unroll().to_table() == unrolled.to_table() and rolled.roll() == rolled
    assert len(rolled.calls) == len(unrolled.calls) and rolled["cell", 299].label == "cell[299]"
    assert [c.label for c in rolled.predecessors("head")] == ["cell[299]"]
    assert not gradlineage.diff(unrolled, rolled)


def test_rolled_lineage_stays_so(unrolled: Lineage) -> None:
    rolled = unrolled.roll()
    for again in (Lineage.from_json(rolled.to_json()), pickle.loads(pickle.dumps(rolled))):
        assert again == rolled and again.rolled and str(again) == str(rolled) and again.unroll() == unrolled
    assert not Lineage.from_json(unrolled.to_json()).rolled

    def run(m: Any, x: Tensor) -> Any:
        for _ in range(40):
            x = m.block(x)
        return x

    looped = trace(Net(run, block=Block()), data())
    assert looped.roll().collapse("block") == looped.collapse("block").roll() and looped.roll().collapse(depth=1).rolled
    assert len(rows(str(looped.collapse("block")))) == 40 and len(rows(str(looped.roll().collapse("block")))) < 5
    assert not looped.collapse("block").rolled
