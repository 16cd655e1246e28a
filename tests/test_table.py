"""The table, as a reader sees it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import gradlineage
from gradlineage.errors import NameNotFound
from gradlineage.graph import CallRecord, Graph, Node, ValueRecord
from gradlineage.lineage import Lineage
from gradlineage.views.rows import make_rows

torch.set_num_threads(1)
Golden = Callable[[str, str], None]


class Tagger(nn.Module):
    """An LSTM that is handed its state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(50, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.zeros(1, ids.shape[0], 16)
        out, (h, _) = self.lstm(self.embed(ids), (state, torch.zeros_like(state)))
        return self.head(out[:, -1]), h


class EarlyExit(nn.Module):
    """Blocks with a head each; stops when a head is sure."""

    def __init__(self, sure: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])
        self.heads = nn.ModuleList([nn.Linear(8, 3) for _ in range(4)])
        self.sure = sure

    def forward(self, x: Tensor) -> Tensor:
        said = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x) + x
            said.append(head(x))
            if said[-1].softmax(-1).max() > self.sure:
                break
        return torch.stack(said).mean(0)


class Generator(nn.Module):
    """A conditional GAN's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.label, self.project = nn.Embedding(10, 16), nn.Linear(32, 64 * 4 * 4)
        self.up = nn.Sequential(nn.BatchNorm2d(64), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        joined = torch.cat([z, self.label(y)], 1)
        out: Tensor = self.up(self.project(joined).view(-1, 64, 4, 4))
        return out


class Experts(nn.Module):
    """Many equal layers, and one layer called many times."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.experts, self.cell = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)]), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([expert(x).relu() for expert in self.experts]).sum(0)
        states = []
        for _ in range(5):
            x = self.cell(x)
            states.append(x)
        return torch.cat(states)


class Cut(nn.Module):
    """One way detached, one through integers, one that gradient takes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.codes = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.b(h.relu().detach()) + self.codes(h.argmax(-1)) + self.c(h.tanh())
        return out


def _vit() -> nn.Module:
    vit: nn.Module = torchvision.models.VisionTransformer(32, 16, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=5)
    return vit


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, Any]]] = {
    "resnet18": (lambda: torchvision.models.resnet18(weights=None), (torch.ones(1, 3, 64, 64),), {}),
    "inception_block": (lambda: torchvision.models.inception.InceptionA(16, 4), (torch.ones(1, 16, 8, 8),), {}),
    "vit": (_vit, (torch.ones(1, 3, 32, 32),), {}),
    "vit_80": (_vit, (torch.ones(1, 3, 32, 32),), {"width": 80}),
    "vit_rearranging": (_vit, (torch.ones(1, 3, 32, 32),), {"rearranging": True, "joins": False, "layer": "encoder*"}),
    "lstm": (Tagger, (torch.zeros(2, 7, dtype=torch.int64),), {}),
    "early_exit": (lambda: EarlyExit(1.0), (torch.ones(1, 8),), {}),
    "gan": (Generator, (torch.ones(2, 16), torch.tensor([1, 2])), {}),
    "experts": (Experts, (torch.ones(2, 4),), {}),
    "cut": (Cut, (torch.ones(2, 4),), {}),
}


def trace(name: str) -> Lineage:
    make, inputs, _ = CASES[name]
    return gradlineage.trace(make().eval(), *inputs)


def cells(table: str) -> dict[str, str]:
    """The last cell of every row by its title."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.split("\n")]
    return {row[0]: row[-1] for row in rows if len(row) > 1}


@pytest.mark.parametrize("name", CASES)
def test_table_is_the_golden_one(name: str, golden: Golden) -> None:
    table = trace(name).to_table(**{"width": 120, **CASES[name][2]})
    golden(f"table_{name}.txt", re.sub(r"\S*(test_table\.py):\d+", r"\1", table))


def test_print_gives_the_table() -> None:
    lineage = trace("gan")
    assert str(lineage) == lineage.to_table(width=120)


# -- rows --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_everything_stands_below_what_feeds_it(name: str) -> None:
    rows = make_rows(trace(name))
    place = {row.key: i for i, row in enumerate(rows)}
    assert len(place) == len(rows)
    assert all(place[entry.key] < place[row.key] for row in rows for entry in row.entries if entry.key)


def test_layer_calls_keep_the_order_in_which_they_began() -> None:
    lineage = trace("early_exit")
    assert [row.label for row in make_rows(lineage) if row.type] == [call.label for call in lineage.layers]


def test_join_waits_for_joins_that_ran_before_it() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.a(x), self.b(x)
            product = self.c(x) * a
            total = a + b  # could stand above c, but ran after it
            return torch.cat([self.d(product), self.d(total)])

    labels = [row.label for row in make_rows(gradlineage.trace(Late(), torch.ones(2, 4)))]
    assert labels == ["a", "b", "c", ":mul", ":add", "d[0]", "d[1]", ":cat"]


def test_containers_have_no_row() -> None:
    labels = {row.label for row in make_rows(trace("resnet18"))}
    assert "layer1.0.conv1" in labels
    assert labels.isdisjoint({"layer1", "layer1.0", "ResNet"})


def test_collapsed_container_has_one_row_with_all_its_parameters() -> None:
    found = [row for row in make_rows(trace("resnet18").collapse(depth=1)) if row.label.startswith("layer1")]
    assert [(row.label, row.type, row.parameters[0]) for row in found] == [("layer1", "Sequential", 147_968)]


def test_without_joins_the_nearest_layers_stand_in_their_place() -> None:
    table = trace("resnet18").to_table(joins=False, width=200)
    assert ":add" not in table
    assert cells(table)["layer1.0.relu[1] (ReLU)"] == "add ← layer1.0.bn2, add ← maxpool"


def test_layer_picks_rows_by_path_container_and_join() -> None:
    lineage = trace("resnet18")

    def labels(pattern: str) -> list[str]:
        return [row.label for row in make_rows(lineage, layer=pattern)]

    assert labels("layer1.0.bn?") == ["layer1.0.bn1", "layer1.0.bn2"]
    assert labels("layer1.0:add") == ["layer1.0:add"]
    assert labels("layer1.0.relu[1]") == ["layer1.0.relu[1]"]
    assert labels("layer1.0")[-2:] == ["layer1.0:add", "layer1.0.relu[1]"] and len(labels("layer1.0")) == 7
    assert "7 of 68 rows shown" in lineage.to_table(layer="layer1.0")


def test_layer_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(NameNotFound, match=r"no layer, container or join named 'layer1\.0\.con1'.*layer1\.0\.conv1"):
        trace("resnet18").to_table(layer="layer1.0.con1")


# -- cells -------------------------------------------------------------------------------------------------------------------------


def test_operations_read_from_the_consumer_back() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    class Ops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = net

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x).relu().view(2, 2).tanh())
            return out

    lineage = gradlineage.trace(Ops(), torch.ones(2, 2))
    assert cells(lineage.to_table())["b (Linear)"] == "tanh ← relu ← a"
    assert cells(lineage.to_table(rearranging=True))["b (Linear)"] == "tanh ← view ← relu ← a"


def test_parameters_and_buffers_stand_in_brackets() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(4))
            self.scale: Tensor
            self.register_buffer("scale", torch.ones(4))
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(x * self.scale + self.position)
            return out

    cell = cells(gradlineage.trace(Positions(), torch.ones(2, 4)).to_table())["norm (LayerNorm)"]
    assert cell == "add ← mul ← input:x, add ← mul ← [scale], add ← [position]"


def test_several_arguments_are_named_and_those_fed_alike_stand_together() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.attention = nn.Linear(4, 4), attention

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            out: Tensor = self.attention(self.q(x), memory, memory)[0]
            return out

    lineage = gradlineage.trace(Cross(), torch.ones(1, 3, 4), torch.ones(1, 5, 4))
    assert cells(lineage.to_table())["attention (MultiheadAttention)"] == "query: q; key/value: input:memory"


def test_list_argument_needs_no_names() -> None:
    class Concat(nn.Module):
        def forward(self, tensors: list[Tensor]) -> Tensor:
            return torch.cat(tensors)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.concat = nn.Linear(4, 4), nn.Linear(4, 4), Concat()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.concat([self.a(x), self.b(x)])
            return out

    assert cells(gradlineage.trace(Two(), torch.ones(2, 4)).to_table())["concat (Concat)"] == "a, b"


def test_unused_argument_and_hidden_door_are_told() -> None:
    class Scale(nn.Module):
        weight: Tensor

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * self.weight

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.scale = nn.Linear(4, 4), Scale()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.scale.weight = self.make(x)
            out: Tensor = self.scale(x, mask)
            return out

    table = gradlineage.trace(Hyper(), torch.ones(2, 4), torch.ones(1)).to_table()
    assert cells(table)["scale (Scale)"] == "x: input:x; mask: input:mask (unused); hidden: make"


def test_every_output_shows_its_shape_and_no_output_a_dash() -> None:
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x.sum()

    class Log(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.log = Parts(), Log()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.parts(x)[0]
            self.log(x)
            return out

    lines = gradlineage.trace(Both(), torch.ones(2, 4)).to_table().split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("parts"))
    assert re.split(r"\s{2,}", lines[at]) == ["parts (Parts)", "(2, 4)", "0", "input:x"]
    assert lines[at + 1].strip() == "()"
    assert re.split(r"\s{2,}", next(line for line in lines if line.startswith("log")))[1] == "-"


def test_parameters_count_once_and_are_called_shared_then() -> None:
    lines = trace("experts").to_table().split("\n")
    assert [line.split()[4] for line in lines if line.startswith("cell")] == ["20", "shared", "shared", "shared", "shared"]
    assert "Params" in lines[1] and "11,689,512 parameters, all trainable" in trace("resnet18").to_table()


def test_frozen_parameters_lower_the_trainable_total() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    assert "2 layers in 2 calls, no joins; 30 parameters, 10 trainable" in gradlineage.trace(net, torch.ones(1, 4)).to_table()


def test_call_that_raised_is_marked() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 2))
    with gradlineage.recording(net) as recording, pytest.raises(RuntimeError):
        net(torch.ones(1, 4))
    table = recording.lineage().to_table()
    assert "1 (Linear) (raised)" in table and "0 (Linear) (raised)" not in table
    assert all(note in table for note in recording.lineage().notes) and recording.lineage().notes


def test_layer_without_children_at_the_root_is_one_row() -> None:
    assert cells(gradlineage.trace(nn.Linear(3, 1), torch.ones(2, 3)).to_table())["Linear"] == "input:input"


# -- folding -----------------------------------------------------------------------------------------------------------------------


def joined(*labels: str, ops: tuple[str, ...] = ()) -> Lineage:
    """A model whose last layer takes a list of the outputs of layers so named; ``ops[i]`` lies between."""
    nodes, calls, last = [Node("input", name="x", call=0)], [], []
    for index, path in enumerate(labels, 1):
        nodes.append(Node("call", call=index, port=0))
        value = ValueRecord("", (1,), "float32", "cpu", len(nodes) - 1)
        calls.append(_call(path, (ValueRecord("x", (1,), "float32", "cpu", 0),), (value,)))
        if ops and ops[index - 1]:
            nodes.append(Node("op", (len(nodes) - 1,), name=ops[index - 1], call=0, order=index))
        last.append(value._replace(name=f"xs[{index - 1}]", node=len(nodes) - 1))
    calls.append(_call("last", tuple(last), ()))
    return Lineage(Graph(tuple(nodes), (_call("", (), (), parent=-1), *calls), (), "Net", 0, 0))


def _call(path: str, inputs: tuple[ValueRecord, ...], outputs: tuple[ValueRecord, ...], parent: int = 0) -> CallRecord:
    return CallRecord(path, 0, "Layer", parent == 0, parent, "", 0, 0, True, False, inputs, outputs)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("e.0", "e.1", "e.2", "e.3"), "e.{0–3}"),
        (("e.0", "e.1", "e.2"), "e.0, e.1, e.2"),
        (("a", "e.8.fc", "e.9.fc", "e.10.fc", "e.11.fc", "e.12.fc", "b"), "a, e.{8–12}.fc, b"),
        (("e.0", "e.2", "e.4", "e.6"), "e.0, e.2, e.4, e.6"),
        (("e.3", "e.2", "e.1", "e.0"), "e.3, e.2, e.1, e.0"),
        (("e.07", "e.08", "e.09", "e.10"), "e.07, e.08, e.09, e.10"),
        (("s2.b0", "s2.b1", "s2.b2", "s2.b3", "s2.b4"), "s2.b{0–4}"),
    ],
)
def test_only_runs_of_four_or_more_consecutive_numbers_fold(labels: tuple[str, ...], expected: str) -> None:
    lineage = joined(*labels)
    assert cells(lineage.to_table())["last (Layer)"] == expected
    assert cells(lineage.to_table(full=True))["last (Layer)"] == ", ".join(labels)


def test_different_operations_do_not_fold() -> None:
    lineage = joined("e.0", "e.1", "e.2", "e.3", ops=("relu", "relu", "relu", "tanh"))
    assert cells(lineage.to_table())["last (Layer)"] == "relu ← e.0, relu ← e.1, relu ← e.2, tanh ← e.3"


def test_equal_operations_fold_with_their_layers() -> None:
    lineage = joined("e.0", "e.1", "e.2", "e.3", ops=("max_pool2d",) * 4)
    assert cells(lineage.to_table())["last (Layer)"] == "max_pool2d ← e.{0–3}"


def test_calls_of_one_layer_fold_inside_their_brackets() -> None:
    assert cells(trace("experts").to_table())[":cat"] == "cell[0–4]"


# -- gradient ----------------------------------------------------------------------------------------------------------------------


def test_ways_on_which_gradient_ends_are_marked_and_explained() -> None:
    table = trace("cut").to_table()
    assert cells(table)["b (Linear)"] == "detach ← relu ⇠ a"
    assert cells(table)["codes (Embedding)"] == "argmax ⇠ a"
    assert cells(table)["c (Linear)"] == "tanh ← a"
    assert re.fullmatch(
        r"⇠ no gradient flows back: detach at \S*test_table\.py:\d+, argmax at \S*test_table\.py:\d+", table.split("\n")[-1]
    )


def test_value_that_only_python_reads_starves_no_one() -> None:
    assert "gradient" not in trace("early_exit").to_table()


@pytest.mark.parametrize("name", ["resnet18", "vit", "cut"])
def test_pass_without_grad_has_no_marks(name: str) -> None:
    with torch.no_grad():
        assert "⇠" not in trace(name).to_table()


def test_layer_run_without_grad_is_marked_where_it_is_used() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.student, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                target = self.backbone(x)
            return self.head(target), self.student(x) - target

    table = gradlineage.trace(Teacher(), torch.ones(2, 4)).to_table()
    assert cells(table)["head (Linear)"] == "⇠ backbone"
    assert cells(table)[":sub"] == "student, ⇠ backbone"
    assert "no_grad at" in table


def test_frozen_layers_have_no_gradient_to_lose() -> None:
    net = Cut()
    net.a.requires_grad_(False)
    assert "⇠" not in gradlineage.trace(net, torch.ones(2, 4)).to_table()


def test_preprocessing_of_an_input_is_no_loss() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc((x - 1) / 2).relu()
            return out

    table = gradlineage.trace(Normalised(), torch.ones(2, 4)).to_table()
    assert cells(table)["fc (Linear)"] == "div ← sub ← input:x"
    assert "⇠" not in table


# -- below the table ---------------------------------------------------------------------------------------------------------------


def test_unknown_sources_are_counted_with_their_reasons() -> None:
    reasons = ("made by an earlier pass.", "made by another thread")
    nodes = (Node("unknown", name=reasons[0]), Node("unknown", name=reasons[1]), Node("call", call=1, port=0))
    value = ValueRecord("x", (2,), "float32", "cpu", 0)
    calls = (_call("", (), (), parent=-1), _call("a", (value,), (value._replace(node=2),)), _call("b", (value._replace(node=1), value), ()))
    lines = Lineage(Graph(nodes, calls, (), "Net", 0, 0, ("It ran twice.",))).to_table().split("\n")
    assert lines[-2:] == ["3 unknown sources: made by an earlier pass; made by another thread", "It ran twice."]


def test_heading_tells_inputs_and_last_lines_what_is_returned() -> None:
    lines = trace("lstm").to_table().split("\n")
    assert lines[0] == "Tagger(ids: (2, 7) int64)"
    assert "Returns [0] (2, 3) ← head; [1] (1, 2, 16) ← lstm[0][1]" in lines or "Returns (2, 3) ← head; (1, 2, 16) ← lstm[0][1]" in lines


# -- layout ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 60, 80, 100, 140, 400])
@pytest.mark.parametrize("name", ["vit", "resnet18", "inception_block", "lstm"])
def test_no_width_cuts_a_name(name: str, width: int) -> None:
    lineage = trace(name)
    table, widest = lineage.to_table(width=width), lineage.to_table(width=1000)
    assert Counter("".join(table.replace("─", "").split())) == Counter("".join(widest.replace("─", "").split()))
    assert all(label in table for label in (*(c.label for c in lineage.layers), *(j.label for j in lineage.joins)))
    if width >= 80:
        assert max(map(len, table.split("\n"))) <= width


def test_last_column_wraps_between_entries() -> None:
    lines = trace("inception_block").to_table(width=84).split("\n")
    at = next(i for i, line in enumerate(lines) if ":cat" in line)
    wrapped = [re.split(r"\s{2,}", line.strip())[-1] for line in lines[at : at + 4]]
    assert wrapped == ["relu ← branch1x1.bn,", "relu ← branch5x5_2.bn,", "relu ← branch3x3dbl_3.bn,", "relu ← branch_pool.bn"]


def test_wide_characters_keep_the_columns_straight() -> None:
    lines = joined("層.甲", "b").to_table().split("\n")
    column = [
        line.index("(1,)") + sum(ord(c) > 0x2E80 for c in line[: line.index("(1,)")])
        for line in lines
        if "(1,)" in line and "input" in line
    ]
    assert len(column) == 2 and column[0] == column[1]


def test_terminal_gives_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = trace("vit")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "90")
    assert lineage.to_table() == lineage.to_table(width=90) != lineage.to_table(width=120)


def test_colour_is_nothing_but_escapes_and_dims_joins() -> None:
    lineage = trace("resnet18")
    coloured = lineage.to_table(color=True)
    assert re.sub(r"\x1b\[\d+m", "", coloured) == lineage.to_table()
    dimmed = [line for line in coloured.split("\n") if line.startswith("\x1b[2m")]
    assert len(dimmed) == len(lineage.joins) and all(":add" in line for line in dimmed)


def test_ten_thousand_rows_take_seconds() -> None:
    nodes, calls = [Node("input", name="x", call=0)], [_call("", (), (), parent=-1)]
    last = 0
    for index in range(1, 5001):  # h = h + layer(h)
        nodes.append(Node("call", call=index, port=0))
        nodes.append(Node("op", (last, len(nodes) - 1), name="add", call=0, order=index, shape=(1,)))
        value = ValueRecord("x", (1,), "float32", "cpu", last)
        calls.append(_call(f"layers.{index}", (value,), (value._replace(node=len(nodes) - 2),)))
        last = len(nodes) - 1
    lineage = Lineage(Graph(tuple(nodes), tuple(calls), (value._replace(node=last),), "Deep", 0, 0))
    start = time.perf_counter()
    table = lineage.to_table()
    assert time.perf_counter() - start < 10  # 1 s on a free core; what grows with the square takes minutes
    assert "5,000 layers in 5,000 calls, 5,000 joins" in table
