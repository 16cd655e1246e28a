"""Loops: what folds, what does not, how it reads, and that unrolling gives the rows back."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradlineage
from gradlineage.lineage import Lineage
from gradlineage.views.loops import Item, Loop, containers_of, instances, roll, unroll
from gradlineage.views.reading import Reading
from gradlineage.views.rows import Entry, Incoming, Row, make_rows
from tests.nets import Net, data, lin
from tests.profiles import examples
from tests.strategies import Program, lineages, programs
from tests.test_programs import traced

torch.set_num_threads(1)


def rolled(lineage: Lineage, **options: Any) -> list[Item]:
    rows = make_rows(lineage, **options)
    items = roll(rows, containers_of(lineage, rows))
    assert unroll(items) == rows
    return items


def fold(run: Callable[..., Any], *args: Any, **layers: nn.Module) -> list[Item]:
    return rolled(gradlineage.trace(Net(run, **layers), *args))


def shape(items: Iterable[Item]) -> list[Any]:
    """Labels; a loop as (count, what its body's first iteration holds)."""
    return [(item.count, *shape(item.first[: len(item.body)])) if isinstance(item, Loop) else item.label for item in items]


def text(items: Iterable[Item]) -> list[str]:
    """One text a line: ``label ×times ← entry, entry; entry``."""
    found = []
    for row, times, depth, _ in Reading(items).lines:
        count = f" ×{times}" if times > 1 else ""
        if row is None:
            found.append(f"{'  ' * depth}⟲{count}")
        else:
            fed = "; ".join(", ".join(" ← ".join((*e.ops[::-1], e.label)) for e in tensor.entries) for tensor in row.inputs)
            found.append(f"{'  ' * depth}{row.label}{count} ← {fed}")
    return found


# -- models ----------------------------------------------------------------------------------------------------------------------------


def test_lstm_cell_in_a_loop_is_one_line_with_its_state_from_the_previous_iteration() -> None:
    def run(self: Any, x: Tensor) -> Any:
        h, c = torch.zeros(2, 4), torch.zeros(2, 4)
        for t in range(5):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h)

    items = fold(run, data(2, 5, 4), cell=nn.LSTMCell(4, 4), head=lin())
    assert shape(items) == [(5, "cell[0]"), "head"]
    assert text(items) == [
        "cell ×5 ← getitem ← input:args[0]; cell[previous][0], first constant:zeros; cell[previous][1], first constant:zeros",
        "head ← cell[last][0]",
    ]
    cell, head = Reading(items).lines
    assert cell.row is not None and head.row is not None
    assert cell.back == (0, 1, -1, 1, -1) and head.back == (0,)
    assert [entry.key for entry in cell.row.entries] == ["", "cell[0]", "", "cell[0]", ""]
    assert (cell.row.key, cell.row.parameters, cell.row.shared) == ("cell[0]", (160, 160), False)
    assert head.row.inputs[0].entries[0].key == "cell[0]"


def test_two_layer_rnn_is_one_loop_of_two_lines() -> None:
    def run(self: Any, x: Tensor) -> Any:
        h = k = torch.zeros(2, 4)
        for t in range(4):
            h = self.low(x[:, t], h)
            k = self.high(h, k)
        return self.head(k)

    assert text(fold(run, data(2, 4, 4), low=nn.RNNCell(4, 4), high=nn.RNNCell(4, 4), head=lin())) == [
        "⟲ ×4",
        "  low ← getitem ← input:args[0]; low[previous], first constant:zeros",
        "  high ← low; high[previous], first constant:zeros",
        "head ← high[last]",
    ]


def test_a_loop_over_what_another_loop_made_counts_along_with_it() -> None:
    def run(self: Any, x: Tensor) -> Any:
        h = k = torch.zeros(2, 4)
        states = []
        for t in range(6):
            h = self.low(x[:, t], h)
            states.append(h)
        for state in reversed(states):
            k = self.high(state, k)
        return k

    items = fold(run, data(2, 6, 4), low=nn.RNNCell(4, 4), high=nn.RNNCell(4, 4))
    assert text(items) == [
        "low ×6 ← getitem ← input:args[0]; low[previous], first constant:zeros",
        "high ×6 ← low[5…0]; high[previous], first constant:zeros",
    ]


def test_a_list_of_inputs_is_counted_along() -> None:
    def run(self: Any, *steps: Tensor) -> Any:
        h = torch.zeros(2, 4)
        for step in steps:
            h = self.cell(step, h)
        return h

    items = fold(run, *(data() for _ in range(5)), cell=nn.RNNCell(4, 4))
    assert text(items) == ["cell ×5 ← input:args[0…4]; cell[previous], first constant:zeros"]


def test_a_body_that_calls_one_relu_twice_tells_the_calls_apart() -> None:
    def run(self: Any, x: Tensor) -> Any:
        for _ in range(3):
            y = self.relu(self.fc(x))
            x = self.relu(y + x)
        return x

    items = fold(run, data(), fc=lin(), relu=nn.ReLU())
    assert shape(items) == [(3, "fc[0]", "relu[0]", ":add[0]", "relu[1]")]
    assert text(items) == [
        "⟲ ×3",
        "  fc ← relu[1,3…5][previous], first input:args[0]",
        "  relu[0,2…4] ← fc",
        "  :add ← relu[0,2…4]; relu[1,3…5][previous], first input:args[0]",
        "  relu[1,3…5] ← :add",
    ]


def test_a_last_step_that_differs_stays_outside() -> None:
    def run(self: Any, x: Tensor) -> Any:
        h = torch.zeros(2, 4)
        for t in range(5):
            h = self.cell(x[:, t] if t < 4 else h, h)
        return h

    items = fold(run, data(2, 5, 4), cell=nn.RNNCell(4, 4))
    assert shape(items) == [(4, "cell[0]"), "cell[4]"]
    assert text(items)[1] == "cell[4] ← cell[last]; cell[last]"


@pytest.mark.parametrize("count", [2, 3])
def test_three_iterations_are_the_fewest(count: int) -> None:
    def run(self: Any, x: Tensor) -> Any:
        for _ in range(count):
            x = self.fc(x)
        return x

    assert shape(fold(run, data(), fc=lin())) == ([(3, "fc[0]")] if count == 3 else ["fc[0]", "fc[1]"])


class Block(nn.Module):
    def __init__(self, repeats: int = 1) -> None:
        super().__init__()
        self.fc, self.act, self.repeats = lin(), nn.Tanh(), repeats

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(self.repeats):
            y = self.fc(y)
        return x + torch.sigmoid(self.act(y))


def test_a_shared_block_called_six_times_is_a_loop_of_its_layers() -> None:
    def run(self: Any, x: Tensor) -> Any:
        for _ in range(6):
            x = self.block(x)
        return self.head(x)

    items = fold(run, data(), block=Block(), head=lin())
    assert shape(items) == [(6, "block.fc[0]", "block.act[0]", "block[0]:add"), "head"]
    assert text(items) == [
        "⟲ ×6",
        "  block.fc ← block:add[previous], first input:args[0]",
        "  block.act ← block.fc",
        "  block:add ← block:add[previous], first input:args[0]; sigmoid ← block.act",
        "head ← block:add[last]",
    ]


def test_a_loop_does_not_reach_from_one_container_call_into_the_next() -> None:
    def run(self: Any, x: Tensor) -> Any:
        return self.stack(self.stack(x))

    def thrice(self: Any, x: Tensor) -> Any:
        for _ in range(3):
            x = self.fc(x)
        return x

    items = fold(run, data(), stack=Net(thrice, fc=lin()))
    assert shape(items) == [(3, "stack.fc[0]"), (3, "stack.fc[3]")]
    assert text(items) == [
        "stack.fc[0…2] ×3 ← stack.fc[0…2][previous], first input:args[0]",
        "stack.fc[3…5] ×3 ← stack.fc[3…5][previous], first stack.fc[0…2][last]",
    ]


def test_a_loop_in_a_loop_folds_too() -> None:
    def run(self: Any, x: Tensor) -> Any:
        for _ in range(4):
            x = self.block(x)
        return self.head(x)

    items = fold(run, data(), block=Block(3), head=lin())
    assert shape(items) == [(4, (3, "block.fc[0]"), "block.act[0]", "block[0]:add"), "head"]
    assert text(items) == [
        "⟲ ×4",
        "  block.fc ×3 ← block.fc[previous], first input:args[0], first block:add[previous]",
        "  block.act ← block.fc[last]",
        "  block:add ← block:add[previous], first input:args[0]; sigmoid ← block.act",
        "head ← block:add[last]",
    ]


def test_different_modules_are_no_loop() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Sequential(*(Block() for _ in range(5)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer1(x)  # type: ignore[no-any-return]

    assert not any(isinstance(item, Loop) for item in rolled(gradlineage.trace(Residual(), data())))


@pytest.mark.parametrize("chained", [True, False])
def test_names_with_brackets_are_different_modules(chained: bool) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ModuleDict({f"a[{i}]": lin() for i in range(5)})

        def forward(self, x: Tensor) -> Tensor:
            found: list[Tensor] = []
            for layer in self.all.values():
                found.append(layer(found[-1] if chained and found else x))
            return torch.stack(found)

    assert not any(isinstance(item, Loop) for item in rolled(gradlineage.trace(Named(), data())))


def test_iterations_begin_where_container_calls_do() -> None:
    def step(self: Any, x: Tensor, whole: bool, more: bool) -> Any:
        x = self.act(self.fc(x) if whole else x)
        return self.more(x) if more else x

    def run(self: Any, x: Tensor) -> Any:
        for t in range(6):
            x = self.block(x, t > 0, t == 5)
        return x

    items = fold(run, data(), block=Net(step, fc=lin(), act=nn.Tanh(), more=lin()))
    assert shape(items) == ["block.act[0]", (4, "block.fc[0]", "block.act[1]"), "block.fc[4]", "block.act[5]", "block.more"]


@pytest.mark.parametrize(
    ("order", "folds"), [((0, 1, 2), False), ((0, 1, 4), False), ((0, 1, 2, 3), True), ((0, 2, 4, 6), True), ((0, 1, 2, 4), False)]
)
def test_what_counts_up_outside_must_be_seen_to_do_so(order: tuple[int, ...], folds: bool) -> None:
    """The first iteration may be fed by anything and two more would make any step a constant one."""

    def run(self: Any, x: Tensor) -> Any:
        states = [self.low(x)]
        for _ in range(6):
            states.append(self.low(states[-1]))
        h = torch.zeros(2, 4)
        for n in order:
            h = self.high(states[n], h)
        return h

    items = fold(run, data(), low=lin(), high=nn.RNNCell(4, 4))
    assert shape(items)[1:] == ([(4, "high[0]")] if folds else [f"high[{n}]" for n in range(len(order))])
    if folds:
        assert text(items)[1].startswith(f"high ×4 ← low[{order[0]}…3]" if order[1] == 1 else "high ×4 ← low[0,2…6]")


def test_a_body_that_calls_every_layer_twice_is_found() -> None:
    def run(self: Any, x: Tensor) -> Any:
        return torch.stack([layer(x) for _ in range(4) for layer in (self.a, self.b, self.b, self.a)])

    assert shape(fold(run, data(), a=lin(), b=lin())) == [(4, "a[0]", "b[0]", "b[1]", "a[1]"), ":stack"]


def test_two_loops_after_one_another_stay_two() -> None:
    def run(self: Any, x: Tensor) -> Any:
        for _ in range(3):
            x = self.fc(x)
        for _ in range(4):
            x = self.fc(torch.relu(x))
        return x

    items = fold(run, data(), fc=lin())
    assert shape(items) == [(3, "fc[0]"), (4, "fc[3]")]
    assert text(items) == [
        "fc[0…2] ×3 ← fc[0…2][previous], first input:args[0]",
        "fc[3…6] ×4 ← relu ← fc[3…6][previous], first relu ← fc[0…2][last]".replace("first relu ← ", "relu ← first "),
    ]


def test_a_skip_from_two_iterations_before_says_so() -> None:
    def run(self: Any, x: Tensor) -> Any:
        before, now = torch.zeros(2, 4), x
        for _ in range(6):
            before, now = now, self.cell(now, before)
        return now

    items = fold(run, data(), cell=nn.RNNCell(4, 4))
    assert shape(items) == [(6, "cell[0]")]
    assert isinstance(items[0], Loop) and items[0].lead == 2
    assert text(items) == ["cell ×6 ← cell[previous], first input:args[0]; cell[2 before], first constant:zeros, first input:args[0]"]
    (line,) = Reading(items).lines
    assert line.back == (1, -1, 2, -1, -1)


def test_an_irregular_call_in_the_middle_splits_the_run() -> None:
    def run(self: Any, x: Tensor) -> Any:
        for t in range(9):
            x = self.fc(x if t != 4 else torch.cat([x, x]))[:2]
        return x

    assert shape(fold(run, data(), fc=lin())) == [(4, "fc[0]"), "fc[4]", (4, "fc[5]")]


def test_a_call_in_the_middle_that_is_fed_otherwise_begins_a_loop() -> None:
    def run(self: Any, x: Tensor) -> Any:
        h = torch.zeros(2, 4)
        for t in range(9):
            h = self.cell(x[:, t].exp() if t == 4 else x[:, t], h)
        return h

    items = fold(run, data(2, 9, 4), cell=nn.RNNCell(4, 4))
    assert text(items)[1] == (
        "cell[4…8] ×5 ← getitem ← input:args[0], exp ← getitem ← first input:args[0]; cell[4…8][previous], first cell[0…3][last]"
    )


def test_a_reference_that_stays_at_the_first_iteration_keeps_its_label() -> None:
    def run(self: Any, x: Tensor) -> Any:
        anchor = h = self.fc(x, x)
        for _ in range(5):
            h = self.fc(h, anchor)
        return h

    assert text(fold(run, data(), fc=nn.RNNCell(4, 4))) == ["fc ×6 ← fc[previous], first input:args[0]; fc[0], first input:args[0]"]


def test_a_reader_of_every_iteration_keeps_their_labels() -> None:
    def run(self: Any, x: Tensor) -> Any:
        states = []
        for _ in range(4):
            x = self.fc(x)
            states.append(x)
        return torch.stack(states)

    lineage = gradlineage.trace(Net(run, fc=lin()), data())
    items = rolled(lineage)
    assert text(items)[1] == ":stack ← fc[0]; fc[1]; fc[2]; fc[3]"
    last = items[0].body[0] if isinstance(items[0], Loop) else None
    assert last is not None
    entries = [Entry("fc[3]", "call", (), True, "fc[3]"), Entry("fc[0]", "call", (), True, "fc[0]")]
    assert [e.label for e in Reading(items).entries(entries[:1])] == ["fc[last]"]
    assert [e.label for e in Reading(items).entries(entries)] == ["fc[3]", "fc[0]"]


class Generator(nn.Module):
    """A transformer block over a window of fixed size, or over all so far."""

    def __init__(self, window: bool) -> None:
        super().__init__()
        self.embed, self.position, self.norm, self.fc, self.head = (
            nn.Embedding(9, 4),
            nn.Embedding(8, 4),
            nn.LayerNorm(4),
            lin(),
            nn.Linear(4, 9),
        )
        self.window = window

    def step(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        q = self.norm(x)
        x = x + self.fc(torch.softmax(q @ q.mT, -1) @ q)
        return self.head(x[:, -1])  # type: ignore[no-any-return]

    def forward(self, ids: Tensor) -> Tensor:
        for _ in range(6):
            ids = torch.cat([ids, self.step(ids).argmax(-1, keepdim=True)], 1)
            if self.window:
                ids = ids[:, 1:]
        return ids


def test_generate_over_a_window_is_a_loop() -> None:
    items = rolled(gradlineage.trace(Generator(True), torch.tensor([[1, 2]])))
    assert text(items) == [
        "⟲ ×6",
        "  embed ← getitem ← :cat[previous], first input:ids",
        "  position ← constant:arange",
        "  :add[0,2…10] ← embed; position",
        "  norm ← :add[0,2…10]",
        "  fc ← matmul ← norm",
        "  :add[1,3…11] ← :add[0,2…10]; fc",
        "  head ← getitem ← :add[1,3…11]",
        "  :cat ← getitem ← :cat[previous], first input:ids; argmax ← head",
    ]


def test_generate_over_a_growing_text_is_none_since_its_shapes_grow() -> None:
    assert not any(isinstance(item, Loop) for item in rolled(gradlineage.trace(Generator(False), torch.tensor([[1, 2]]))))


def test_several_passes_in_one_recording_are_iterations() -> None:
    model = Net(lambda self, x: self.b(torch.relu(self.a(x))), a=lin(), b=lin())
    with gradlineage.recording(model) as rec:
        for _ in range(4):
            out = model(data())
    items = rolled(rec.lineage(out))
    assert text(items)[0] == "⟲ ×4" and [line.split(" ←")[0] for line in text(items)[1:]] == ["  a", "  b"]


# -- laws ------------------------------------------------------------------------------------------------------------------------------


@given(program=programs())
@examples(100)
def test_unrolling_gives_back_the_rows_of_any_program(program: Program) -> None:
    _, lineage = traced(program, "grad")
    for joins in (True, False):
        Reading(rolled(lineage, joins=joins))


@given(lineage=lineages())
@examples(150)
def test_unrolling_gives_back_the_rows_of_any_lineage(lineage: Lineage) -> None:
    items = rolled(lineage)
    lines = Reading(items).lines
    if not any(isinstance(item, Loop) for item in items):
        assert [line.row for line in lines] == items


class Writer:
    """Rows as a loop would leave them: calls of a path and joins of the root are counted."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.calls: Counter[str] = Counter()

    def add(self, path: str, references: Sequence[int], *, size: int = 4) -> None:
        """A call, or with a colon a join, fed by the rows at these numbers; what is below 0 is an input."""
        key = f"{path}[{self.calls[path]}]"
        kinds = {True: "join", False: "call"}
        entries = [
            Entry(self.rows[n].label, kinds[not self.rows[n].type], ("relu",), True, self.rows[n].key)
            if n >= 0
            else Entry("input:x", "input", (), False, "")
            for n in references
        ]
        inputs = tuple(Incoming(f"x{i}", (entry,)) for i, entry in enumerate(entries))
        self.rows.append(Row(key, key, "" if path.startswith(":") else "Linear", ((2, size),), inputs, (20, 20), self.calls[path] > 0))
        self.calls[path] += 1


def test_loops_of_different_steps_are_no_iterations_of_a_loop_around_them() -> None:
    writer = Writer()
    for n in range(6):
        writer.add("source", [], size=n)
    for order in ([0, 1, 2, 3], [0, 1, 3, 5], [0, 1, 2, 3], [0, 1, 3, 5], [0, 1, 2, 3]):
        for n in order:
            writer.add("fc", [n])
        writer.add("end", [])
    items = roll(writer.rows)
    assert unroll(items) == writer.rows
    assert Counter(item.count for item in items if isinstance(item, Loop)) == {4: 5}


Reference = tuple[str, int]  # "back" so many rows, or "at" the row of this number
Body = list[tuple[str, list[Reference]]]
PATHS = ["fc", "cell", ":add", "a.b", "relu"]


@st.composite
def bodies(draw: st.DrawFn, distinct: bool) -> Body:
    paths = draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=5 if distinct else 7, unique=distinct))
    references = st.tuples(st.sampled_from(["back", "back", "at"]), st.integers(1, len(paths)))
    return [(path, draw(st.lists(references, max_size=2))) for path in paths]


def write(writer: Writer, body: Body, count: int) -> None:
    begin = len(writer.rows)
    for _ in range(count):
        for path, references in body:
            here = len(writer.rows)
            writer.add(
                path,
                [
                    here - n if kind == "back" and here - n >= begin else n - 3 if kind == "at" and n < 3 + begin else -1
                    for kind, n in references
                ],
            )


@given(body=bodies(distinct=True), before=st.integers(0, 3), count=st.integers(3, 9), after=st.integers(0, 3))
@examples(300)
def test_a_loop_is_found_whole_wherever_it_stands(body: Body, before: int, count: int, after: int) -> None:
    writer = Writer()
    for n in range(before):
        writer.add(f"before{n}", [n - 1])
    write(writer, body, count)
    for n in range(after):
        writer.add(f"after{n}", [len(writer.rows) - 1])
    items = roll(writer.rows)
    assert unroll(items) == writer.rows
    assert [item.count if isinstance(item, Loop) else 1 for item in items] == [1] * before + [count] + [1] * after
    loop = items[before]
    assert isinstance(loop, Loop) and [row.key for row in loop.body if isinstance(row, Row)] == [f"{path}[1]" for path, _ in body]
    lines = [
        line for line in Reading(items).lines[before : len(items) + len(body)] if line.row is not None and line.row.label in dict(body)
    ]
    for here, ((_, references), line) in enumerate(zip(body, lines, strict=True)):
        expected = []  # a row so many rows before is of this iteration, or of the previous one
        for kind, n in references:
            name = body[(here - n) % len(body)][0] + ("[previous]" if n > here else "")
            expected.append(name if kind == "back" else f"before{n - 3}[0]" if 3 <= n < 3 + before else "input:x")
        assert line.row is not None
        assert [tensor.entries[0].label for tensor in line.row.inputs] == expected
    assert [where[::2] for where, _ in instances(items[before : before + 1])] == [(0, n) for _ in range(count) for n in range(len(body))]


@given(body=bodies(distinct=True), count=st.integers(3, 9), spoilt=st.integers(0, 44))
@examples(300)
def test_one_row_that_differs_takes_at_most_its_own_iteration_out(body: Body, count: int, spoilt: int) -> None:
    writer = Writer()
    write(writer, body, count)
    at = spoilt % len(writer.rows)
    writer.rows[at] = writer.rows[at]._replace(shapes=((7, 7),))
    items = roll(writer.rows)
    assert unroll(items) == writer.rows
    whole = [n // len(body) for n in (at, len(writer.rows) - at - 1)]
    assert [item.count for item in items if isinstance(item, Loop)] == [n for n in whole if n >= 3]


@given(
    parts=st.lists(st.tuples(bodies(distinct=False), st.integers(1, 5)), min_size=1, max_size=4),
    again=st.integers(1, 4),
    noise=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["label", "shared", "shapes", "inputs", "drop"])), max_size=3),
)
@examples(400)
def test_unrolling_gives_back_any_rows(parts: list[tuple[Body, int]], again: int, noise: list[tuple[int, str]]) -> None:
    writer = Writer()
    for body, count in parts * again:
        write(writer, body, count)
    rows = writer.rows
    for place, what in noise:
        if rows:
            n = place % len(rows)
            row = rows[n]
            changed = {
                "label": [row._replace(label=f"x[{place}]")], "shared": [row._replace(shared=not row.shared)],
                "shapes": [row._replace(shapes=(None,))], "inputs": [row._replace(inputs=())], "drop": [],
            }  # fmt: skip
            rows[n : n + 1] = changed[what]
    items = roll(rows)
    assert unroll(items) == rows
    Reading(items)


# -- pace ------------------------------------------------------------------------------------------------------------------------------


def _same(n: int) -> list[Row]:
    """One layer fed by anything."""
    writer, choose = Writer(), random.Random(1)
    for i in range(n):
        writer.add("fc", [choose.randrange(-1, i)] if i else [])
    return writer.rows


def _mixed(n: int) -> list[Row]:
    writer, choose = Writer(), random.Random(2)
    for i in range(n):
        writer.add(choose.choice(PATHS), [i - 1])
    return writer.rows


def _nearly(n: int) -> list[Row]:
    """A long body, which differs somewhere in every iteration."""
    writer, choose = Writer(), random.Random(3)
    body = [f"p{choose.randrange(n // 8)}" for _ in range(n // 4)]
    for _ in range(4):
        odd = choose.randrange(len(body))
        for i, path in enumerate(body):
            writer.add(path, [len(writer.rows) - 1], size=len(writer.rows) if i == odd else 4)
    return writer.rows


def _fibonacci(n: int) -> list[Row]:
    """Repeats itself everywhere, never three times."""
    word, longer = "a", "ab"
    while len(word) < n:
        word, longer = longer, longer + word
    writer = Writer()
    for i, letter in enumerate(word[:n]):
        writer.add(letter, [i - 1])
    return writer.rows


@pytest.mark.parametrize("make", [_same, _mixed, _nearly, _fibonacci])
def test_irregular_rows_take_time_in_proportion(make: Callable[[int], list[Row]]) -> None:
    took = []
    for n in (1_000, 10_000):
        rows = make(n)
        best = float("inf")
        for _ in range(2):
            begin = time.process_time()
            items = roll(rows)
            Reading(items)
            best = min(best, time.process_time() - begin)
        took.append(best)
        assert unroll(items) == rows
    assert took[1] < min(30 * took[0] + 0.5, 5), took


def test_ten_thousand_steps_fold_at_once() -> None:
    writer = Writer()
    write(writer, [("cell", [("back", 2), ("at", 1)]), ("fc", [("back", 1)])], 5_000)
    begin = time.process_time()
    items = roll(writer.rows)
    took = time.process_time() - begin
    assert shape(items) == [(5_000, "cell[0]", "fc[0]")]
    assert took < 3, took
