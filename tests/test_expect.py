"""Wiring as a test: `lineage.expect`, what it accepts, what it refuses and in which words; and the fixture ``lineage_snapshot``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlineage
from gradlineage.errors import LineageError, NameNotFound, WiringError
from gradlineage.lineage import Lineage
from tests.nets import Net, data, lin

torch.set_num_threads(1)


def net(run: Callable[..., Any]) -> Lineage:
    """Layers ``a`` to ``d``, a parameter ``w`` and a buffer ``buf`` of the model's own, and what ``run`` does with them."""
    model = Net(run, a=lin(), b=lin(), c=lin(), d=lin())
    model.w = nn.Parameter(torch.ones(4))
    model.register_buffer("buf", torch.ones(4))
    return gradlineage.trace(model, data())


def fits(lineage: Lineage, wiring: dict[str, Any]) -> bool:
    try:
        lineage.expect(wiring)
    except WiringError:
        return False
    return True


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 1)
        self.relu, self.fc = nn.ReLU(), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.relu(self.bn1(self.conv1(x)))
        b = self.relu(self.conv2(x))
        y = self.relu(torch.cat([a, b], 1) * self.scale)
        return self.fc(y.mean((2, 3))), a + b + x.mean()


@pytest.fixture(scope="module")
def small() -> Lineage:
    return gradlineage.trace(Small().eval(), torch.rand(1, 3, 4, 4))


# -- expressions -----------------------------------------------------------------------------------------------------------------------

RIGHT: dict[str, tuple[Callable[..., Any], list[str], list[str]]] = {  # the forward, what fits d's input, what does not
    "a layer": (lambda n, x: n.d(n.a(x)), ["a", "*", " a ", "a\n"], ["b", "w", "input:args[0]", "relu(a)", "d", "add(*)"]),
    "an operation": (lambda n, x: n.d(torch.relu(n.a(x))), ["relu(a)", "a", "relu(*)", " relu( a ) "], ["tanh(a)", "relu(b)", "relu", "relu(a, b)"]),
    "operations in order": (lambda n, x: n.d(torch.tanh(torch.relu(n.a(x)))), ["tanh(relu(a))", "tanh(*)", "tanh(a)"], ["relu(tanh(a))", "relu(a)"]),
    "a join": (lambda n, x: n.d(n.a(x) + n.b(x)), ["add(a, b)", ":add", "add(*, b)", "add(*, *)", "*"], ["add(b, a)", "add(a)", "add(a, b, c)", "mul(a, b)", "a", "add(*)", "add(w, a, b)"]),
    "a join behind an operation": (lambda n, x: n.d(torch.relu(n.a(x) + n.b(x))), ["relu(add(a, b))", "relu(:add)", ":add", "relu(*)"], ["add(a, b)", "relu(a, b)", "relu(a)", "add(relu(a), relu(b))"]),
    "operations before a join": (lambda n, x: n.d(torch.relu(n.a(x)) + n.b(x)), ["add(relu(a), b)", "add(a, b)"], ["add(a, relu(b))", "add(tanh(a), b)", "relu(add(a, b))"]),
    "order that matters": (lambda n, x: n.d(n.a(x) - n.b(x)), ["sub(a, b)"], ["sub(b, a)"]),
    "a chain of joins in one row": (
        lambda n, x: n.d(n.a(x) + n.b(x) + n.c(x)),
        ["add(add(a, b), c)", "add(a, b, c)", "add(a, add(b, c))", "add(add(a, *), c)", "add(*, *, *)"], ["add(add(a, c), b)", "add(a, b)", "add(add(a, b), b)", "add(a, b, c, c)"],
    ),
    "a join within another": (lambda n, x: n.d(torch.stack([n.a(x), n.b(x)]).sum(0)), ["sum(stack(a, b))", "sum(:stack)"], ["stack(a, b)", "sum(a, b)"]),
    "a condition": (lambda n, x: n.d(torch.where(n.a(x) > 0, n.b(x), n.c(x))), ["where(gt(a), b, c)", "where(a, b, c)"], ["where(b, c)", "where(gt(a), c, b)"]),
    "a join of another operation in the same row": (
        lambda n, x: n.d(n.a(x) * n.b(x) + n.c(x)),
        ["add(mul(a, b), c)", ":add", "add(*, c)", "add(mul(*, *), *)"],
        ["add(a, b, c)", "add(mul(a), mul(b), c)", "mul(a, b)", "add(mul(b, a), c)", "add(c, mul(a, b))", "mul(add(a, b), c)", "add(a, c)"],
    ),
    "a gate": (
        lambda n, x: n.d(n.a(x) * (g := torch.sigmoid(n.b(x))) + n.c(x) * (1 - g)),
        ["add(mul(a, sigmoid(b)), mul(c, sub(sigmoid(b))))"],
        ["add(mul(a, sigmoid(b)), mul(a, sub(sigmoid(b))))", "add(mul(a, sub(sigmoid(b))), mul(c, sigmoid(b)))"],
    ),
    "a number": (lambda n, x: n.d(n.a(x) + 1), ["add(a)", "add(*)", "a"], ["add(a, *)", "add(b)"]),
    "a constant beside a layer": (lambda n, x: n.d(n.a(x) + torch.ones(4)), ["add(a)", "a"], ["add(b)", "add(constant)"]),
    "a constant alone": (lambda n, x: n.d(torch.ones(2, 4)), ["constant", "constant:ones", "*"], ["constant:zeros", "a", "w"]),
    "a parameter beside a layer": (lambda n, x: n.d(n.a(x) * n.w), ["mul(a, w)", "mul(a)", "mul(a, *)", "a"], ["mul(w, a)", "mul(a, buf)", "mul(w)", "mul(b, w)", "mul(a, w, w)"]),
    "a layer beside a buffer": (lambda n, x: n.d(n.a(x) - n.buf), ["sub(a, buf)", "sub(a)"], ["sub(buf, a)", "sub(a, w)"]),
    "leaves of an operation": (lambda n, x: n.d(F.layer_norm(n.a(x), (4,), n.w, n.buf)), ["layer_norm(a)", "layer_norm(a, w, buf)"], ["layer_norm(a, buf, w)", "layer_norm(b)"]),
    "a parameter alone": (lambda n, x: n.d(n.w), ["w", "*"], ["buf", "a", "constant"]),
    "an input": (lambda n, x: n.d(torch.relu(x)), ["relu(input:args[0])", "input:args[0]"], ["args[0]", "relu(a)"]),
    "rearranged": (lambda n, x: n.d(n.a(x).view(-1).reshape(2, 4) + n.b(x).t().t()), ["add(a, b)", "add(view(a), permute(b))", "add(reshape(view(a)), b)"], ["add(view(b), a)", "add(view(a, b), b)"]),
    "rearranged between operations": (
        lambda n, x: n.d(torch.tanh(torch.relu(n.a(x).view(-1)).view(2, 4).t()).t()),
        ["tanh(relu(a))", "tanh(view(relu(flatten(a))))"],
        ["relu(tanh(a))", "tanh(a, relu)", "relu(a)"],
    ),
    "the second call": (lambda n, x: n.d(n.a(n.a(x))), ["a[1]"], ["a", "a[0]", "a[2]"]),
    "the first call of two": (lambda n, x: (n.d(n.a(x)), n.a(x)), ["a[0]"], ["a", "a[1]"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "text", "fit"), [(c, t, True) for c in RIGHT for t in RIGHT[c][1]] + [(c, t, False) for c in RIGHT for t in RIGHT[c][2]]
)
def test_expression_fits_what_the_forward_does_and_nothing_else(case: str, text: str, fit: bool) -> None:
    assert fits(net(RIGHT[case][0]), {"d": text}) == fit


GAPS: dict[str, tuple[Callable[..., Any], str]] = {
    "leaves of operations within operations": (lambda n, x: n.d(n.a(x) * n.w + n.buf), "add(mul(a, w), buf)"),
    "one leaf of two": (lambda n, x: n.d(F.layer_norm(n.a(x), (4,), n.w, n.buf)), "layer_norm(a, w)"),
    "the same tensor twice": (lambda n, x: n.d((h := n.a(x)) * h), "mul(a, a)"),
    "a constant as it was written": (lambda n, x: n.d(n.a(x) + torch.ones(4)), "add(a, constant)"),
}  # fmt: skip


@pytest.mark.parametrize("case", GAPS)
def test_expression_may_be_written_as_the_forward_is(case: str) -> None:
    run, text = GAPS[case]
    net(run).expect({"d": text})


def test_product_of_two_layers_is_told_from_their_multiples() -> None:
    expected = "add(mul(a), mul(b), c)"
    assert fits(net(lambda n, x: n.d(n.a(x) * 2 + n.b(x) * 2 + n.c(x))), {"d": expected})
    assert not fits(net(lambda n, x: n.d(n.a(x) * n.b(x) + n.c(x))), {"d": expected})


TWICE: dict[str, tuple[Callable[..., Any], list[str], list[str]]] = {  # one origin that goes two ways
    "a gate of itself": (
        lambda n, x: n.d(torch.tanh(h := n.a(x)) * torch.sigmoid(h)),
        ["mul(tanh(a), sigmoid(a))", "mul(a, a)", "mul(*, sigmoid(*))"], ["mul(a)", "mul(tanh(a))", "mul(sigmoid(a), tanh(a))", "mul(tanh(a), tanh(a))"],
    ),
    "less its own": (lambda n, x: n.d((h := n.a(x)) - torch.sigmoid(h)), ["sub(a, sigmoid(a))"], ["sub(a)", "sub(sigmoid(a), a)"]),
    "sums of sums": (
        lambda n, x: n.d((n.a(x) + n.b(x)) + torch.relu(n.c(x) + n.w)),
        ["add(a, b, relu(c))", "add(add(a, b), relu(add(c, w)))", "add(a, b, relu(add(c)))"], ["add(a, b, c, w)", "add(a, b)", "add(add(a, relu(c)), b)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "text", "fit"), [(c, t, True) for c in TWICE for t in TWICE[c][1]] + [(c, t, False) for c in TWICE for t in TWICE[c][2]]
)
def test_every_operand_that_is_no_parameter_has_to_be_there(case: str, text: str, fit: bool) -> None:
    assert fits(net(TWICE[case][0]), {"d": text}) == fit


def test_operation_twice_is_not_once() -> None:
    assert not fits(net(lambda n, x: n.d(torch.relu(n.a(x)))), {"d": "relu(relu(a))"})


def test_difference_of_a_difference_is_told_from_another() -> None:
    expected = "sub(sub(a, b), c)"
    assert fits(net(lambda n, x: n.d((n.a(x) - n.b(x)) - n.c(x))), {"d": expected})
    assert not fits(net(lambda n, x: n.d(n.a(x) - (n.b(x) - n.c(x)))), {"d": expected})


BROKEN = {
    "": "one expression with all brackets closed",
    "  ": "one expression with all brackets closed",
    "add(": "one expression with all brackets closed",
    "add(a, relu(b)": "one expression with all brackets closed",
    ")": "'(' before ')'",
    "a)": "'(' before ')'",
    "add(a))": "'(' before ')'",
    "(a)": "an operation before '('",
    "add((a))": "an operation before '('",
    "add(a)(b)": "an operation before '('",
    "relu()": "an operand before ')'",
    "add(a,)": "an operand before ')'",
    "a, b": "',' between operands only",
    "add(, a)": "',' between operands only",
    "add(a,, b)": "',' between operands only",
    ",": "',' between operands only",
    "add(a) b": "',' before 'b'",
    "add(relu(a) b)": "',' before 'b'",
}


@pytest.mark.parametrize("text", BROKEN)
def test_expression_that_cannot_be_read_says_what_was_expected(text: str) -> None:
    with pytest.raises(LineageError) as caught:
        net(lambda n, x: n.d(n.a(x))).expect({"d": text})
    assert str(caught.value) == f"expect(): cannot read {text!r}: expected {BROKEN[text]}; an example is 'add(a, relu(b))'"
    assert not isinstance(caught.value, WiringError)


def test_expression_too_deep_to_read_is_refused() -> None:
    with pytest.raises(LineageError):
        net(lambda n, x: n.d(n.a(x))).expect({"d": "f(" * 5000 + "a" + ")" * 5000})


@pytest.mark.parametrize("text", [3, pytest.param(2.5), object()])
def test_what_is_no_expression_is_refused_in_words(text: Any) -> None:
    with pytest.raises(LineageError, match="expression"):
        net(lambda n, x: n.d(n.a(x))).expect({"d": text})


def test_list_of_what_are_no_expressions_is_refused() -> None:
    with pytest.raises(LineageError, match="such as"):
        net(lambda n, x: n.d(n.a(x))).expect({"d": [3]})


# -- what is held against it -----------------------------------------------------------------------------------------------------------


def test_whole_model_fits_a_description_of_it(small: Lineage) -> None:
    small.expect({("bn1", 0): "conv1"})  # type: ignore[dict-item]
    small.expect(
        {
            "conv1": "input:x", "bn1": "conv1", "conv2": "input:x", "relu[0]": "conv2", ":cat": ["relu(bn1)", "relu[0]"],
            "relu[1]": "mul(cat(relu(bn1), relu[0]), scale)", "fc": "mean(relu[1])", ":add": [None, "relu[0]", "mean(input:x)"],
            "output": ["fc", "add(relu(bn1), relu[0], mean(input:x))"],
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    "expected",
    [["fc", ":add"], ("fc", None), [None, None], {"[0]": "fc"}, {"[1]": ":add", "[0]": None}, {}, ["*", "*"], None],
    ids=repr,
)
def test_outputs_are_given_by_place_or_by_name_or_left_out(small: Lineage, expected: Any) -> None:
    small.expect({"output": expected})


@pytest.mark.parametrize(
    "expected", [["conv1", None], [":add", "fc"], {"[0]": ":add"}, {"[2]": "fc"}, ["fc"], [], "fc", ["fc", ":add", None]], ids=repr
)
def test_outputs_that_are_others_do_not_fit(small: Lineage, expected: Any) -> None:
    assert not fits(small, {"output": expected})


def test_arguments_are_given_by_name() -> None:
    model = Net(lambda n, x: n.m(n.a(x), n.b(x), n.c(x)), a=lin(), b=lin(), c=lin(), m=nn.MultiheadAttention(4, 2))
    lineage = gradlineage.trace(model, data(3, 1, 4))
    lineage.expect({"m": {"query": "a", "value": "c"}, "output": [None, None]})
    lineage.expect({"m": ["a", "b", "c"]})
    assert not fits(lineage, {"m": {"query": "b"}})
    assert not fits(lineage, {"m": ["b", "a", "c"]})


def test_port_of_a_layer_with_several_outputs_is_named() -> None:
    lineage = gradlineage.trace(Net(lambda n, x: n.d((o := n.m(x))[1][1] + o[1][0]), m=nn.LSTM(4, 4), d=lin()), data(3, 4))
    lineage.expect({"d": "add(m[0][2], m[0][1])"})
    assert not fits(lineage, {"d": "add(m[0][1], m[0][2])"})
    assert not fits(lineage, {"d": "add(m[0][0], m[0][1])"})


def test_layer_named_output_comes_before_the_outputs() -> None:
    lineage = gradlineage.trace(Net(lambda n, x: n.last(n.output(x)), output=lin(), last=lin()), data())
    lineage.expect({"output": "input:args[0]"})
    assert not fits(lineage, {"output": "last"})


def test_collapsed_containers_are_layers() -> None:
    lineage = gradlineage.trace(Net(lambda n, x: n.d(torch.relu(n.s(x))), s=nn.Sequential(lin(), lin()), d=lin()), data())
    lineage.expect({"d": "relu(s.1)"})
    lineage.collapse(depth=1).expect({"d": "relu(s)", "s": "input:args[0]"})
    assert not fits(lineage.collapse(depth=1), {"d": "relu(s.1)"})


def test_tensor_that_two_layers_feed_in_turn_is_not_fed_by_one() -> None:
    """In a union of passes that went different ways."""
    model = Net(lambda n, x: n.d(n.a(x) if x.sum() > 0 else n.b(x)), a=lin(), b=lin(), d=lin())
    union = gradlineage.trace_many(model, [torch.ones(2, 4), -torch.ones(2, 4)]).union()
    assert not fits(union, {"d": "a"}) and not fits(union, {"d": "b"})
    with pytest.raises(WiringError, match="found    a and b"):
        union.expect({"d": "a"})
    union.expect({"a": "input:args[0]", "d": "*"})


def test_saved_lineage_fits_as_well(small: Lineage) -> None:
    Lineage.from_json(small.to_json()).expect({"fc": "mean(relu[1])"})


def test_label_that_is_not_there_is_told_with_the_nearest(small: Lineage) -> None:
    with pytest.raises(NameNotFound, match="no call or join named 'bn' in this lineage; nearest: bn1"):
        small.expect({"bn": "conv1"})


@pytest.mark.parametrize("wiring", [["fc"], "fc", None, 3])
def test_what_is_no_mapping_is_refused(small: Lineage, wiring: Any) -> None:
    with pytest.raises(LineageError, match=r"expect\(\) takes a mapping of labels to expressions, such as .*; found an? "):
        small.expect(wiring)


# -- words -----------------------------------------------------------------------------------------------------------------------------


def test_failure_says_for_every_tensor_what_was_found(small: Lineage) -> None:
    with pytest.raises(WiringError) as caught:
        small.expect(
            {
                "bn1": "conv2", "relu[1]": "mul(cat(relu[0], relu(bn1)))", "fc": {"input": "mean(relu[1])", "x": "conv1"}, "conv2": ["input:x", "conv1"],
                "output": ["conv1", "add(relu(bn1), relu[0])"],
            }
        )  # fmt: skip
    assert str(caught.value) == (
        "the model is not wired as expected:\n"
        "bn1 input\n    expected conv2\n    found    conv1\n"
        "relu[1] input\n    expected mul(cat(relu[0], relu(bn1)))\n    found    mul(cat(relu(bn1), relu[0]), scale)\n"
        "fc x\n    expected conv1\n    found    no such tensor; it has input\n"
        "conv2\n    expected 2 tensors\n    found    1: input: input:x\n"
        "output [0]\n    expected conv1\n    found    fc\n"
        "output [1]\n    expected add(relu(bn1), relu[0])\n    found    add(relu(bn1), relu[0], mean(input:x))"
    )


def test_name_that_is_none_of_this_lineage_is_told_with_the_nearest(small: Lineage) -> None:
    with pytest.raises(WiringError, match=r"found    mean\(relu\[1\]\)\n    \(no call, .* named 'cnv1' in this lineage; nearest: conv1"):
        small.expect({"fc": "mean(cnv1)"})


def test_name_of_a_layer_called_twice_is_told_to_be_two() -> None:
    with pytest.raises(WiringError, match=re.escape("(a was called 2 times: say a[0] or a[1])")):
        net(lambda n, x: n.d(n.a(n.a(x)))).expect({"d": "a"})


def test_failure_is_an_assertion_and_a_lineage_error(small: Lineage) -> None:
    with pytest.raises(WiringError) as caught:
        small.expect({"fc": "conv1"})
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, LineageError)


def test_what_was_found_is_shown_no_deeper_than_what_was_expected(small: Lineage) -> None:
    with pytest.raises(WiringError, match=re.escape("found    mul(:cat, scale)")):
        small.expect({"relu[1]": "conv1"})
    with pytest.raises(WiringError, match=re.escape("found    mul(cat(relu(bn1), relu[0]), scale)")):
        small.expect({"relu[1]": "mul(cat(conv1, conv2))"})


# -- snapshots -------------------------------------------------------------------------------------------------------------------------

TESTS = """
import pytest, torch, gradlineage
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, width, 1), nn.Conv2d(3, width, 1), nn.Linear(2 * width, 2)

    def forward(self, x):
        a = self.conv1(x)
        b = torch.relu(self.conv2(x))
        return self.fc(torch.cat([a, b], 1).mean((2, 3)))

class Moved(Net):
    def forward(self, x):
        a = self.conv1(x)
        b = torch.relu(self.conv2(a[:, :3]))
        return self.fc(torch.cat([a, b], 1).mean((2, 3)))

class Detached(Net):
    def forward(self, x):
        a = self.conv1(x)
        b = torch.relu(self.conv2(x))
        return self.fc(torch.cat([a, b.detach()], 1).mean((2, 3)))

def traced(net, size=4):
    return gradlineage.trace(net, torch.rand(1, 3, size, size))

def test_first(lineage_snapshot):
    lineage_snapshot(traced(Net()))

@pytest.mark.parametrize("way", ["a/b c"])
def test_names(lineage_snapshot, way):
    lineage_snapshot(traced(Net()))
    lineage_snapshot(traced(Net()), "my net")

def test_wider(lineage_snapshot):
    lineage_snapshot(traced(Net(6), 5).collapse(depth=1), "my net")

def test_moved(lineage_snapshot):
    lineage_snapshot(traced(Moved()), "my net")

def test_detached(lineage_snapshot):
    lineage_snapshot(traced(Detached()), "my net")
"""
WIRING = """conv1 (Conv2d) <- input:x
conv2 (Conv2d) <- input:x
:cat <- conv1, relu <- conv2
fc (Linear) <- mean <- :cat
output <- fc
"""


def run_pytest(folder: Path, *arguments: str) -> tuple[dict[str, list[str]], str]:
    """The tests that failed, with the lines of their errors, and all that was printed."""
    root = str(Path(gradlineage.__file__).parents[1])
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    env |= {"PYTHONPATH": root, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gradlineage.pytest_plugin", "--tb=short", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    failed: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if match := re.fullmatch(r"_+ (\S+|test_names\[.*\]) _+", line):
            failed[match[1]] = []
        elif line.startswith("E ") and failed:
            failed[next(reversed(failed))].append(line.removeprefix("E").strip())
    assert done.returncode == bool(failed), done.stdout + done.stderr
    return failed, done.stdout


def files(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder / "wiring")): f.read_text(encoding="utf-8") for f in sorted((folder / "wiring").rglob("*.txt"))}


def test_snapshot_fails_at_first_is_written_on_demand_then_passes_and_tells_what_moved(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_net.py").write_text(TESTS)
    error = "gradlineage.errors.WiringError: "

    failed, out = run_pytest(tmp_path, "-k", "first or names")
    file = tmp_path / "wiring" / "test_net" / "test_first.txt"
    advice = f"there is no wiring to compare with at {file}; run pytest --lineage-update once, and look at what it writes"
    assert failed["test_first"] == [f"{error}{advice}"]
    assert "2 failed" in out and files(tmp_path) == {}

    failed, out = run_pytest(tmp_path, "-k", "first or names", "--lineage-update")
    assert not failed and "2 passed" in out
    assert files(tmp_path) == dict.fromkeys(
        ["my_net-afc156.txt", "test_net/test_first.txt", "test_net/test_names_a_b_c-44899d.txt"], WIRING
    )

    failed, out = run_pytest(tmp_path)
    start = f"{error}the wiring differs from {tmp_path / 'wiring' / 'my_net-afc156.txt'}:"
    end = "if that is meant, run pytest --lineage-update"
    assert failed == {
        "test_moved": [start, "-conv2 (Conv2d) <- input:x", "+conv2 (Conv2d) <- conv1", end],
        "test_detached": [start, "-:cat <- conv1, relu <- conv2", "+:cat <- conv1, detach <- relu <- conv2 (no gradient)", end],
    }
    assert "2 failed, 3 passed" in out
    assert set(files(tmp_path).values()) == {WIRING}


def test_snapshots_of_tests_that_are_called_alike_lie_apart_and_two_in_one_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    head, tail = TESTS.split("def test_first")[0], "\n    lineage_snapshot(traced(%s()))\n"
    (tmp_path / "test_one.py").write_text(
        f"{head}def test_wiring(lineage_snapshot):{tail % 'Net'}\nclass TestNet:\n    def test_wiring(self, lineage_snapshot):\n        lineage_snapshot(traced(Moved()))\n"
    )
    (tmp_path / "test_two.py").write_text(f"{head}def test_wiring(lineage_snapshot):{tail % 'Detached'}")
    assert not run_pytest(tmp_path, "--lineage-update")[0]
    assert not run_pytest(tmp_path)[0]
    assert list(files(tmp_path)) == ["test_one/TestNet.test_wiring.txt", "test_one/test_wiring.txt", "test_two/test_wiring.txt"]

    (tmp_path / "test_two.py").write_text(
        f"{head}def test_twice(lineage_snapshot):{tail % 'Net'}{tail % 'Moved'}\ndef test_none(lineage_snapshot):\n    lineage_snapshot(None)\n"
    )
    failed, _ = run_pytest(tmp_path, "--lineage-update")
    assert "was written in this run with other wiring; give each its own" in failed["test_twice"][0]
    assert failed["test_none"] == [
        "gradlineage.errors.LineageError: lineage_snapshot() takes a lineage, as trace(...) gives it; found a NoneType"
    ]
