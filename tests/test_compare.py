# mypy: disable-error-code="no-any-return"
"""What `diff` finds, on models small enough to see the answer, and its laws on random programs and graphs."""

from __future__ import annotations

import doctest
import pathlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradlineage
import gradlineage.compare
from gradlineage import Lineage, LineageError
from gradlineage.compare import Difference, Reshaped, Retyped, Rewired, diff
from gradlineage.graph import CallRecord, Graph, Node, ValueRecord
from gradlineage.tables import REARRANGING
from tests.nets import Net, data, lin
from tests.profiles import examples
from tests.strategies import Program, lineages, passes, programs
from tests.test_programs import traced

torch.set_num_threads(1)
Run = Callable[..., Any]


def between(before: Run, after: Run, names: str = "", **layers: nn.Module) -> Difference:
    """What changes where the same layers, ``lin()`` for each of the names, are put together in another way."""
    layers.update((name, lin()) for name in names.split())
    return diff(gradlineage.trace(Net(before, **layers), data()), gradlineage.trace(Net(after, **layers), data()))


# -- what is fed by what -----------------------------------------------------------------------------------------------------------------


class Inception(nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.pool, self.conv2 = nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 3, 1)
        self.branch3 = nn.Module()
        self.branch3.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Any:
        made = {"pool": self.pool(x), "conv2": self.conv2(x)}
        return self.branch3.conv(made[self.source])  # type: ignore[operator]


def test_layer_that_reads_another_one_is_rewired() -> None:
    before, after = (gradlineage.trace(Inception(source), data(1, 3, 4, 4)) for source in ("pool", "conv2"))
    found = diff(before, after)
    assert found == Difference(rewired=(Rewired("branch3.conv", "", ("pool",), ("conv2",)),))
    assert str(found) == "1 rewired\n~ branch3.conv: was pool, now conv2"
    assert found


def test_same_model_gives_no_difference() -> None:
    net = Inception("pool")
    found = diff(gradlineage.trace(net, data(1, 3, 4, 4)), gradlineage.trace(net, data(1, 3, 4, 4)))
    assert found == Difference()
    assert not found
    assert str(found) == "no difference"


def test_removed_skip_connection_is_a_removed_join_and_its_reader() -> None:
    found = between(lambda m, x: m.head((y := m.a(x)) + m.b(y)), lambda m, x: m.head(m.b(m.a(x))), "a b head")
    assert found == Difference(removed=(":add",), rewired=(Rewired("head", "", (":add",), ("b",)),))
    assert str(found) == "1 removed, 1 rewired\n- :add\n~ head: was :add, now b"


def test_swapped_operands_of_a_cat_are_seen() -> None:
    def net(*order: str) -> Run:
        return lambda m, x: m.head(torch.cat([m.get_submodule(name)(x) for name in order], 1))

    found = between(net("a", "b"), net("b", "a"), "a b", head=nn.Linear(8, 1))
    assert found == Difference(rewired=(Rewired(":cat", "", ("a", "b"), ("b", "a")),))


def test_swapped_tensors_of_a_list_argument_are_seen_as_one_change() -> None:
    class Concat(nn.Module):
        def forward(self, parts: list[Tensor], scale: Tensor) -> Tensor:
            return torch.cat(parts, 1) * scale

    found = between(
        lambda m, x: m.conc([m.a(x), m.b(x).relu()], x[:1, :1]),
        lambda m, x: m.conc([m.b(x).relu(), m.a(x)], x[:1, :1]),
        "a b",
        conc=Concat(),
    )
    assert found.rewired == (Rewired("conc", "parts", ("a", "relu ← b"), ("relu ← b", "a")),)
    assert str(found).endswith("~ conc(parts): was a, relu ← b, now relu ← b, a")


def test_another_function_between_two_layers_is_seen() -> None:
    found = between(lambda m, x: m.b(torch.relu(m.a(x))), lambda m, x: m.b(F.gelu(m.a(x))), "a b")
    assert found.rewired == (Rewired("b", "", ("relu ← a",), ("gelu ← a",)),)


def test_operations_that_only_rearrange_do_not_count() -> None:
    assert not between(lambda m, x: m.b(m.a(x)), lambda m, x: m.b(m.a(x).reshape(1, -1).view(2, 4).clone()), "a b")


def test_other_argument_order_of_one_call_is_no_change_but_other_arguments_are() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Tensor:
            return torch.stack([t for t in (x, y, z) if t is not None]).sum(0)

    assert not between(lambda m, x: m.two(x=m.a(x), y=m.b(x)), lambda m, x: m.two(y=m.b(x), x=m.a(x)), "a b", two=Two())
    found = between(lambda m, x: m.two(m.a(x), y=m.b(x)), lambda m, x: m.two(m.a(x), z=m.b(x)), "a b", two=Two())
    assert found.rewired == (Rewired("two", "y", ("b",), ()), Rewired("two", "z", (), ("b",)))
    assert "~ two(y): was b, now nothing\n~ two(z): was nothing, now b" in str(found)


def test_argument_that_is_no_longer_used_is_seen() -> None:
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.use = nn.Parameter(torch.ones(4)), True

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * self.w * mask if self.use else x * self.w

    net = Net(lambda m, x: m.maybe(m.a(x), m.b(x)), a=lin(), b=lin(), maybe=(maybe := Maybe()))
    before = gradlineage.trace(net, data())
    maybe.use = False
    assert diff(before, gradlineage.trace(net, data())).rewired == (Rewired("maybe", "mask", ("b",), ("b (unused)",)),)


def test_lost_gradient_is_seen() -> None:
    def silent(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = m.a(x)
        return m.b(y)

    def plain(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x))

    assert between(plain, lambda m, x: m.b(m.a(x).detach()), "a b").rewired == (Rewired("b", "", ("a",), ("detach ⇠ a",)),)
    assert between(plain, silent, "a b").rewired == (Rewired("b", "", ("a",), ("⇠ a",)),)


def test_pass_without_gradient_as_a_whole_is_wired_like_one_with_it() -> None:
    net = Net(lambda m, x: m.b(m.a(x)), a=lin(), b=lin())
    before = gradlineage.trace(net, data())
    with torch.no_grad():
        assert not diff(before, gradlineage.trace(net, data()))


def test_parameters_stand_in_brackets() -> None:
    net = Net(lambda m, x: m.b(m.a(x) + m.pos), a=lin(), b=lin())
    net.register_parameter("pos", nn.Parameter(torch.zeros(4)))
    before = gradlineage.trace(net, data())
    net.run = lambda m, x: m.b(m.a(x) + 1)
    assert diff(before, gradlineage.trace(net, data())).rewired == (Rewired("b", "", ("add ← a", "add ← [pos]"), ("add ← a",)),)


def test_swapped_outputs_are_seen() -> None:
    found = between(lambda m, x: (m.a(x), m.b(x)), lambda m, x: (m.b(x), m.a(x)), "a b")
    assert found == Difference(rewired=(Rewired("output", "", ("a", "b"), ("b", "a")),))


def test_output_of_another_name_is_seen() -> None:
    found = between(lambda m, x: {"y": m.a(x)}, lambda m, x: {"z": m.a(x)}, "a")
    assert found.rewired == (Rewired("output", "['y']", ("a",), ()), Rewired("output", "['z']", (), ("a",)))
    assert "~ output['y']: was a, now nothing" in str(found)


def test_hidden_door_is_compared() -> None:
    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.state  # type: ignore[operator]

    def net(name: str) -> Run:
        def run(m: Any, x: Tensor) -> Tensor:
            m.reader.state = m.get_submodule(name)(x)
            return m.reader(x)

        return run

    assert between(net("a"), net("b"), "a b", reader=Reader()).rewired == (Rewired("reader", "hidden", ("a",), ("b",)),)


def test_data_dependent_branch_differs_between_two_inputs() -> None:
    net = Net(lambda m, x: m.head(m.a(x) if x.sum() > 0 else m.b(x)), a=lin(), b=lin(), head=lin())
    found = diff(gradlineage.trace(net, torch.ones(2, 4)), gradlineage.trace(net, -torch.ones(2, 4)))
    assert found == Difference(("b",), ("a",), (Rewired("head", "", ("a",), ("b",)),))
    assert str(found) == "1 added, 1 removed, 1 rewired\n+ b (Linear)\n- a (Linear)\n~ head: was a, now b"


def test_one_port_more_does_not_rewire_who_reads_the_first() -> None:
    class Pair(nn.Module):
        two = False

        def forward(self, x: Tensor) -> Any:
            return (x * 2, x * 3) if self.two else x * 2

    pair = Pair()
    net = Net(lambda m, x: m.b(m.pair(x)[0] if m.pair.two else m.pair(x)), pair=pair, b=lin())
    before = gradlineage.trace(net, data())
    pair.two = True
    found = diff(before, gradlineage.trace(net, data()))
    assert found == Difference(reshaped=(Reshaped("pair", "(2, 4)", "(2, 4), (2, 4)"),))


# -- calls of a module that are not equally many --------------------------------------------------------------------------------------------


def loop(steps: int) -> Run:
    def run(m: Any, x: Tensor) -> Tensor:
        for _ in range(steps):
            x = x + m.norm(m.cell(x))
        return m.head(x)

    return run


def test_loop_that_runs_longer_is_some_added_calls_and_nothing_else() -> None:
    found = between(loop(3), loop(6), "cell norm head")
    added = ("cell[3]", "norm[3]", ":add[3]", "cell[4]", "norm[4]", ":add[4]", "cell[5]", "norm[5]", ":add[5]")
    assert found == Difference(added=added)


def test_long_runs_of_added_calls_are_folded() -> None:
    assert str(between(loop(3), loop(20), "cell norm head")).splitlines() == [
        "51 added",
        "+ cell[3–19] (Linear) ×17",
        "+ norm[3–19] (Linear) ×17",
        "+ :add[3–19] ×17",
    ]


@given(fewer=st.integers(1, 4), more=st.integers(1, 4), rest=st.integers(1, 3))
@examples(20)
def test_one_of_two_loops_over_one_cell_runs_longer(fewer: int, more: int, rest: int) -> None:
    def net(first: int) -> Run:
        def run(m: Any, x: Tensor) -> Tensor:
            for _ in range(first):
                x = m.cell(x)
            x = m.middle(x)
            for _ in range(rest):
                x = m.cell(x)
            return m.head(x)

        return run

    found = between(net(fewer), net(fewer + more), "cell middle head")
    assert found == Difference(added=tuple(f"cell[{i}]" for i in range(fewer, fewer + more)))


def shared(extra: bool) -> Run:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.relu(m.a(x))
        y = m.relu(m.b(x))
        if extra:
            y = m.relu(m.extra(y))
        z = m.relu(m.c(y))
        return m.relu(m.d(z)) + z

    return run


def test_one_more_use_of_a_shared_module_in_the_middle_leaves_the_later_ones_alone() -> None:
    found = between(shared(False), shared(True), "a b c d extra", relu=nn.ReLU())
    assert found == Difference(added=("extra", "relu[2]"))


def test_calls_that_changed_places_with_their_labels_are_told_apart() -> None:
    def net(extra: bool) -> Run:
        def run(m: Any, x: Tensor) -> Tensor:
            x = m.relu(m.a(x))
            if extra:
                x = m.relu(x)
            return m.relu(m.b(x)) + x

        return run

    found = between(net(False), net(True), "a b", relu=nn.ReLU())
    assert found.added == ("relu[1]",)
    was = "relu[1] (relu[2] in the other)", "relu[0]"
    now = "relu[2] (relu[1] in the other)", "relu[1] (not in the other)"
    assert found.rewired == (Rewired(":add", "", was, now),)


def test_second_use_that_reads_the_first_is_not_taken_for_it() -> None:
    """Both read the newest call of relu, and neither was added: the one before it is not the same."""

    def side(m: Any, x: Tensor) -> Any:
        y = m.relu(m.a(x))
        return m.head(y), m.relu(y)

    def chain(m: Any, x: Tensor) -> Any:
        y = m.relu(m.a(x))
        z = m.relu(y)
        return m.head(z), z

    assert between(side, chain, "a head", relu=nn.ReLU()).rewired == (Rewired("head", "", ("relu[0]",), ("relu[1]",)),)


def test_steps_that_go_on_alike_are_folded_with_all_their_numbers() -> None:
    def net(act: bool) -> Run:
        def run(m: Any, x: Tensor) -> Tensor:
            for _ in range(6):
                x = m.relu(m.cell(x)) if act else m.cell(x)
            return x

        return run

    assert str(between(net(False), net(True), "cell", relu=nn.ReLU())).splitlines() == [
        "6 added, 6 rewired",
        "+ relu[0–5] (ReLU) ×6",
        "~ cell[1–5]: was cell[0–4], now relu[0–4] ×5",
        "~ output: was cell[5], now relu[5]",
    ]


def test_call_that_is_gone_from_the_middle_of_more_calls_leaves_the_others_alone() -> None:
    """Of five calls of relu the second is gone, and two are new: one of those is taken for it."""

    def net(names: str) -> Run:
        return lambda m, x: [m.relu(m.get_submodule(name)(x)) for name in names]

    found = between(net("abcd"), net("acdef"), "a b c d e f", relu=nn.ReLU())
    assert (found.added, found.removed) == (("e", "f", "relu[4]"), ("b",))
    assert found.rewired[0] == Rewired("relu[3]", "", ("b",), ("e",))
    assert [change.label for change in found.rewired[1:]] == ["output"]


def test_folding_starts_anew_where_numbers_jump() -> None:
    def net(*extra: int) -> Run:
        def run(m: Any, x: Tensor) -> Tensor:
            for step in range(6):
                x = m.act(m.cell(x))
                x = m.act(x + 1) if step in extra else x
            return x

        return run

    # calls of act by then: 0 | 1 2+ | 3 4+ | 5 6+ | 7 8+ | 9
    assert str(between(net(), net(1, 2, 3, 4), "cell", act=nn.ReLU())).splitlines() == ["4 added", "+ act[2, 4 … 8] (ReLU) ×4"]
    layers: dict[str, Any] = {f"l{number}": lin() for number in (0, 2, 3, 4, 5)}
    found = between(lambda m, x: x * 1, lambda m, x: [layer(x) for name, layer in m.named_children() if name[0] == "l"], **layers)
    assert str(found).splitlines()[1:3] == ["+ l0 (Linear)", "+ l{2–5} (Linear) ×4"]


@pytest.mark.parametrize("owned", [True, False])
def test_calls_within_a_container_are_taken_for_the_same_where_the_container_is(owned: bool) -> None:
    """The layer runs in the second block only, then in the first and second of three: the one in the first is new."""

    class Some(nn.Module):
        def forward(self, x: Tensor, act: nn.Module | None, fc: nn.Module) -> Any:
            y = fc(x)
            return y if act is None else act(y)

    def net(*acts: int) -> Run:
        def run(m: Any, x: Tensor) -> Tensor:
            for act in acts:
                x = m.block(x, m.get_submodule(name) if act else None, m.fc)
            return x

        return run

    name = "block.act" if owned else "act"
    block = Some()
    act = nn.ReLU()
    if owned:
        block.act = act
    found = between(net(0, 1), net(1, 1, 0), "fc", block=block, **({} if owned else {"act": act}))
    assert sorted(found.added) == sorted(["block[2]", "fc[2]", f"{name}[0]"])


def test_parameter_named_like_a_port_is_no_call() -> None:
    net = Net(lambda m, x: m.b(m.a(x)), a=lin(), b=lin())
    net.register_parameter("0", nn.Parameter(torch.zeros(2, 4)))
    before = gradlineage.trace(net, data())
    net.run = lambda m, x: m.b(getattr(m, "0"))
    assert diff(before, gradlineage.trace(net, data())).rewired == (Rewired("b", "", ("a",), ("[0]",)),)


def test_tensor_by_a_side_door_of_a_layer_with_one_output_comes_from_the_layer_all_the_same() -> None:
    class Keeps(nn.Module):
        kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = x * 2
            return self.kept * 3

    def side(m: Any, x: Tensor) -> Tensor:
        m.keeps(x)
        return m.b(m.keeps.kept)

    assert not between(lambda m, x: m.b(m.keeps(x)), side, "b", keeps=Keeps())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = lin(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(self.act(x))) + x


def blocks(times: int) -> Run:
    def run(m: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = m.block(x)
        return m.head(x)

    return run


def test_added_container_is_one_line_that_names_what_is_in_it() -> None:
    found = between(blocks(0), blocks(1), "head", block=Block())
    assert found.added == ("block", "block.act[0]", "block.fc", "block.act[1]", "block:add")
    assert found.rewired == (Rewired("head", "", ("input:args[0]",), ("block:add",)),)
    assert "+ block (Block) with act ×2, fc, :add" in str(found).splitlines()
    assert "+ block[1–5] (Block) with act ×2, fc, :add ×5" in str(between(blocks(1), blocks(6), "head", block=Block())).splitlines()


def test_joins_are_counted_within_one_call_of_their_container() -> None:
    """The first block loses its addition and the second gets another: two adds before and after, but not the same."""

    class Adds(nn.Module):
        adds: tuple[int, ...] = ()

        def forward(self, x: Tensor) -> Any:
            self.adds, now = self.adds[1:], self.adds[0]
            y = self.fc(x)  # type: ignore[operator]
            sums = [y]
            for _ in range(now):
                sums.append(x + sums[-1])
            return sums

    def net(*adds: int) -> Run:
        def run(m: Any, x: Tensor) -> Tensor:
            m.block.adds = adds
            first = m.block(x)
            return first + m.block(first[-1])

        return run

    block = Adds()
    block.fc = lin()
    found = between(net(1, 1), net(0, 2), block=block)
    assert found.removed == ("block[0]:add",)
    assert found.added == ("block[1]:add[1]",)


# -- layers that are other ones ------------------------------------------------------------------------------------------------------------


def test_changed_width_changes_shapes_only() -> None:
    def net(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    found = diff(gradlineage.trace(net(10), data(1, 4)), gradlineage.trace(net(12), data(1, 4)))
    assert found == Difference(reshaped=(Reshaped("0", "(1, 10)", "(1, 12)"), Reshaped("1", "(1, 10)", "(1, 12)")))
    assert str(found).splitlines()[1:] == ["~ 0: output (1, 10) → (1, 12)", "~ 1: output (1, 10) → (1, 12)"]


def test_changed_dtype_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    before = gradlineage.trace(net, data(1, 4))
    after = gradlineage.trace(net.double(), data(1, 4).double())
    assert diff(before, after).reshaped == (Reshaped("0", "(1, 4) float32", "(1, 4) float64"),)


def test_many_layers_that_change_alike_are_one_line() -> None:
    net = nn.Sequential(*(lin() for _ in range(3)), nn.ReLU(), nn.Tanh(), nn.Linear(4, 3))
    found = str(diff(gradlineage.trace(net, data(1, 4)), gradlineage.trace(net, data(2, 4))))
    assert found == "6 reshaped\n~ {0–4}: output (1, 4) → (2, 4) ×5\n~ 5: output (1, 3) → (2, 3)"
    named = {"a": lin(), "b": lin(), "c": lin(), "d": lin()}
    chain = Net(lambda m, x: m.d(m.c(m.b(m.a(x)))), **named)
    found = str(diff(gradlineage.trace(chain, data(1, 4)), gradlineage.trace(chain, data(2, 4))))
    assert found == "4 reshaped\n~ a, b, c and 1 more: output (1, 4) → (2, 4)"


def test_layer_replaced_by_one_of_another_type_is_retyped() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    before = gradlineage.trace(net, data())
    net[1] = nn.GELU()
    found = diff(before, gradlineage.trace(net, data()))
    assert found == Difference(retyped=(Retyped("1", "ReLU", "GELU"),))
    assert str(found) == "1 retyped\n~ 1: ReLU → GELU"


def test_renamed_module_is_removed_and_added() -> None:
    before = Net(lambda m, x: m.head(m.fc(x)), fc=lin(), head=lin())
    after = Net(lambda m, x: m.head(m.proj(x)), proj=lin(), head=lin())
    found = diff(gradlineage.trace(before, data()), gradlineage.trace(after, data()))
    assert found == Difference(("proj",), ("fc",), (Rewired("head", "", ("fc",), ("proj",)),))


def test_root_of_another_class_and_order_of_independent_calls_do_not_count() -> None:
    class Other(Net):
        pass

    def early(m: Any, x: Tensor) -> Tensor:
        a = m.a(x)
        return torch.cat([a, m.b(x)])

    def late(m: Any, x: Tensor) -> Tensor:
        b = m.b(x)
        return torch.cat([m.a(x), b])

    first, second = Net(early, a=lin(), b=lin()), Other(late, a=lin(), b=lin())
    assert not diff(gradlineage.trace(first, data()), gradlineage.trace(second, data()))


def test_line_of_an_unregistered_module_does_not_count() -> None:
    loose = lin()

    def one(m: Any, x: Tensor) -> Tensor:
        return m.a(loose(x))

    def other(m: Any, x: Tensor) -> Tensor:
        return m.a(loose(x))

    assert not between(one, other, "a")


# -- what is in view -----------------------------------------------------------------------------------------------------------------------


def test_collapsed_containers_are_compared_as_layers() -> None:
    block = Block()
    net = Net(lambda m, x: m.head(m.block(x)), block=block, head=lin())
    before = gradlineage.trace(net, data())
    block.forward = lambda x: block.fc(x)  # type: ignore[method-assign]
    after = gradlineage.trace(net, data())
    assert diff(before, after)
    assert not diff(before.collapse(depth=1), after.collapse(depth=1))


def test_other_collapse_state_is_compared_by_what_is_in_view() -> None:
    lineage = gradlineage.trace(Net(lambda m, x: m.head(m.block(x)), block=Block(), head=lin()), data())
    found = diff(lineage, lineage.collapse("block"))
    assert found.removed == ("block.act[0]", "block.fc", "block.act[1]", "block:add")
    assert found.rewired == (Rewired("head", "", ("block:add",), ("block",)),)


def test_wrong_arguments_are_refused_with_what_to_do() -> None:
    lineage = gradlineage.trace(lin(), data())
    with pytest.raises(LineageError, match=r"diff\(\): b is a str, expected a Lineage: pass trace\(...\) or Lineage.load\(path\)"):
        diff(lineage, "net.json")  # type: ignore[arg-type]
    with pytest.raises(LineageError, match="a is a Linear"):
        diff(lin(), lineage)  # type: ignore[arg-type]


def test_saved_files_are_compared_without_torch(tmp_path: pathlib.Path) -> None:
    for name, steps in (("a", 3), ("b", 4)):
        gradlineage.trace(Net(loop(steps), cell=lin(), norm=lin(), head=lin()), data()).save(tmp_path / f"{name}.json")
    code = (
        "import sys; from gradlineage import Lineage; from gradlineage.compare import diff\n"
        "print(','.join(diff(*map(Lineage.load, sys.argv[1:])).added), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "cell[3],norm[3],:add[3] False"


def test_names_that_break_lines_stay_on_theirs() -> None:
    def net(name: str) -> Lineage:
        call = CallRecord(name, 0, "Linear", True, -1, "", 0, 0, True, False, (), ())
        return Lineage(Graph((), (call,), (), "Net", 0, 0))

    assert str(diff(net("a"), net("\x1b[31m\n"))) == "1 added, 1 removed\n+ \\x1b[31m\\n (Linear)\n- a (Linear)"


def chain(pattern: str, times: int) -> Lineage:
    """Layers named by letters, each fed by the one before; without torch."""
    nodes, calls, nth = [Node("input", (), "x", 0, 0)], [CallRecord("", 0, "Net", False, -1, "", 0, 0, True, False, (), ())], Counter[str]()
    for name in pattern * times + "z":
        read = ValueRecord("x", (1,), "float32", "cpu", len(nodes) - 1)
        made = ValueRecord("", (1,), "float32", "cpu", len(nodes))
        nodes.append(Node("call", (), "", len(calls), 0))
        calls.append(CallRecord(name, nth[name], "Linear", True, 0, "", 0, 0, True, False, (read,), (made,)))
        nth[name] += 1
    return Lineage(Graph(tuple(nodes), tuple(calls), (ValueRecord("", (1,), "float32", "cpu", len(nodes) - 1),), "Net", 0, 0))


def test_thousands_of_calls_are_compared_in_seconds() -> None:
    pairs = [
        (chain("ab", 2500), chain("ab", 2500)),
        (chain("ab", 2400), chain("ab", 2500)),
        (chain("ab", 1700), chain("abb", 1700)),
        (chain("abcb", 1000), chain("bacb", 1300)),
        (chain("a", 5000), chain("b", 5000)),
    ]
    start = time.perf_counter()
    found = [str(diff(*pair)) for pair in pairs]
    assert time.perf_counter() - start < 30  # each takes one or two on an idle machine; what is quadratic takes minutes
    assert found[0] == "no difference"
    assert found[1].splitlines() == ["200 added", "+ a[2400–2499] (Linear) ×100", "+ b[2400–2499] (Linear) ×100"]
    assert found[2].splitlines() == ["1,700 added", "+ b[1, 3 … 3399] (Linear) ×1700"]


def test_docstring_example_runs() -> None:
    assert doctest.testmod(gradlineage.compare) == (0, 5)


# -- laws ----------------------------------------------------------------------------------------------------------------------------------


def mirrored(a: Lineage, b: Lineage) -> None:
    there, back = diff(a, b), diff(b, a)
    assert (there.added, there.removed) == (back.removed, back.added)
    assert Counter((r.input, r.was, r.now) for r in there.rewired) == Counter((r.input, r.now, r.was) for r in back.rewired)
    for changes in ("retyped", "reshaped"):
        assert Counter((c.was, c.now) for c in getattr(there, changes)) == Counter((c.now, c.was) for c in getattr(back, changes))
    for found in (there, back):
        assert bool(found) == (str(found) != "no difference")
        assert all(line.isprintable() and line for line in str(found).split("\n"))


@given(lineages(), lineages())
@examples(200)
def test_difference_is_mirrored_and_none_to_itself_for_any_graphs(a: Lineage, b: Lineage) -> None:
    mirrored(a, b)
    assert not diff(a, a)
    assert not diff(b, Lineage.from_json(b.to_json()))


@given(passes(), passes())
@examples(200)
def test_difference_is_mirrored_for_passes(a: Lineage, b: Lineage) -> None:
    mirrored(a, b)
    assert not diff(a, Lineage.from_json(a.to_json()))


@given(programs(), programs())
@examples(60)
def test_difference_is_mirrored_for_programs(first: Program, second: Program) -> None:
    a, b = traced(first, "grad")[1], traced(second, "grad")[1]
    mirrored(a, b)
    mirrored(a, b.collapse(depth=1))


@given(programs())
@examples(60)
def test_second_trace_of_a_program_does_not_differ(program: Program) -> None:
    a, b = traced(program, "grad")[1], traced(program, "grad")[1]
    assert not diff(a, b)
    assert not diff(a.collapse(depth=1), b.collapse(depth=1))
    assert not diff(a, Lineage.from_json(b.to_json()))


def told(lineage: Lineage) -> Any:
    """All that `diff` compares, in a model whose paths are called equally often."""

    def links(flow: gradlineage.Flow) -> list[tuple[str, list[str]]]:
        return [(link.label, [op for op in link.ops if op not in REARRANGING]) for link in flow.links]

    layers = [(c.label, c.type, [(f.name, links(f)) for f in c.inputs], [(f.shape, f.dtype) for f in c.outputs]) for c in lineage.layers]
    joins = [
        (j.label, [(links(f), f._lineage._view.group(*f._key)) for f in j.inputs], [(f.shape, f.dtype) for f in j.outputs])
        for j in lineage.joins
    ]
    return [c.label for c in lineage.calls], layers, sorted(joins, key=repr), [(f.name, links(f)) for f in lineage.outputs]


@given(passes(), st.data())
@examples(300)
def test_nothing_differs_exactly_where_all_that_is_told_is_equal(a: Lineage, draw: st.DataObject) -> None:
    graph = a._graph
    readers = [i for i, call in enumerate(graph.calls) if call.inputs]
    kind = draw.draw(st.sampled_from(["wire", "output", "op"]))
    if kind == "wire" and readers:
        index = draw.draw(st.sampled_from(readers))
        call = graph.calls[index]
        most = next(i for i, node in enumerate(graph.nodes) if node.kind == "call" and node.call == index) - 1
        value = call.inputs[0]._replace(node=draw.draw(st.integers(0, most)))
        changed = call._replace(inputs=(value, *call.inputs[1:]))
        graph = graph._replace(calls=(*graph.calls[:index], changed, *graph.calls[index + 1 :]))
    elif kind == "output" and graph.outputs:
        value = graph.outputs[0]._replace(node=draw.draw(st.integers(0, len(graph.nodes) - 1)))
        graph = graph._replace(outputs=(value, *graph.outputs[1:]))
    else:
        index = draw.draw(st.integers(0, len(graph.nodes) - 1))
        node = graph.nodes[index]
        node = node._replace(name=draw.draw(st.sampled_from(["add", "sub", "view"]))) if node.kind == "op" and node.name else node
        graph = graph._replace(nodes=(*graph.nodes[:index], node, *graph.nodes[index + 1 :]))
    b = Lineage(graph)
    assert bool(diff(a, b)) == (told(a) != told(b))
