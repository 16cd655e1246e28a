"""Where Python read a tensor's value, and what had decided it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import gradlineage
from gradlineage import Lineage


class Reads(nn.Module):
    """Two layers, a reading of what the second returned, and a layer after it."""

    def __init__(self, read: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.fc1, self.gate, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.read = read
        with torch.no_grad():
            self.gate.weight.fill_(0.0)
            self.gate.bias.copy_(torch.tensor([1.0, 0.0, 3.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        self.read(self.gate(h)[0])
        return self.fc2(h)  # type: ignore[no-any-return]


READINGS: dict[str, tuple[Callable[[Tensor], object], str, Any, tuple[str, ...]]] = {
    "if": (lambda g: "yes" if g.sum() > 5 else "no", "bool", True, ("getitem", "sum", "gt")),
    "not": (lambda g: not g[1], "bool", False, ("getitem", "getitem")),
    "is_nonzero": (lambda g: torch.is_nonzero(g[1]), "bool", False, ("getitem", "getitem")),
    "builtin max": (lambda g: max(g[0], g[2]), "bool", True, ("getitem", "getitem", "gt")),
    "int": (lambda g: int(g[2]), "int", 3, ("getitem", "getitem")),
    "float": (lambda g: float(g[2].detach()), "float", 3.0, ("getitem", "getitem", "detach")),
    "floor": (lambda g: math.floor(g[2].detach()), "float", 3.0, ("getitem", "getitem", "detach")),
    "range": (lambda g: list(range(g.argmax())), "index", 2, ("getitem", "argmax")),
    "list index": (lambda g: "abcd"[g.argmax()], "index", 2, ("getitem", "argmax")),
    "slice": (lambda g: torch.ones(9)[: g.argmax()], "index", None, ("getitem", "argmax")),
    "tensor index": (lambda g: torch.ones(9)[g.argmax()], "index", None, ("getitem", "argmax")),
    "size": (lambda g: torch.ones(9).view(3, 3).narrow(0, g.argmax(), 1), "index", None, ("getitem", "argmax")),
    "item": (lambda g: g[3].item(), "item", 2.0, ("getitem", "getitem")),
    "tolist": (lambda g: g.tolist(), "list", None, ("getitem",)),
    "numpy": (lambda g: g.detach().numpy(), "numpy", None, ("getitem", "detach")),
    "asarray": (lambda g: np.asarray(g.detach()), "numpy", None, ("getitem", "detach")),
    "equal": (lambda g: torch.equal(g, g), "equal", True, ("getitem",)),
    "allclose": (lambda g: torch.allclose(g, g + 1), "equal", False, ("getitem",)),
    "in": (lambda g: 3 in g, "equal", True, ("getitem",)),
    "format": (lambda g: f"{g.sum():.1f}", "format", None, ("getitem", "sum")),
    "print": (lambda g: str(g.sum()), "format", None, ("getitem", "sum")),
    "mask": (lambda g: torch.ones(4)[g > 1], "shape", 2, ("getitem", "gt")),
    "nonzero": (lambda g: g.nonzero(), "shape", 3, ("getitem",)),
    "where": (lambda g: torch.where(g > 1), "shape", 2, ("getitem", "gt")),
    "unique": (lambda g: torch.unique(g), "shape", 4, ("getitem",)),
    "repeats": (lambda g: torch.ones(4).repeat_interleave(g.long()), "shape", 6, ("getitem", "long")),
    "one_hot": (lambda g: F.one_hot(g.long()), "shape", 4, ("getitem", "long")),
    "nms": (lambda g: torchvision.ops.nms(torch.ones(4, 4), g, 0.5), "shape", 4, ("getitem",)),
}


@pytest.mark.parametrize("name", READINGS)
def test_reading_is_a_decision_with_kind_value_and_sources(name: str) -> None:
    read, kind, value, ops = READINGS[name]
    lineage = gradlineage.trace(Reads(read), torch.ones(1, 4))
    (found,) = lineage.decisions
    assert (found.kind, found.value, type(found.value), found.waits) == (kind, value, type(value), False)
    assert found.call is not None
    assert found.call.type == "Reads"
    assert found.where.split("/")[-1].startswith("boxes.py:" if name == "nms" else "test_decisions.py:")
    assert [s.ops for s in found.sources if s.label == "gate"] == [ops]
    assert {s.label for s in found.sources if s.kind != "constant"} == {"gate"}


PLAIN: dict[str, Callable[[Tensor], object]] = {
    "shape": lambda g: g.shape[0] if g.dim() == 1 and len(g) > 2 else None,
    "where with values": lambda g: torch.where(g > 1, g, 0.0),
    "index tensor": lambda g: torch.ones(9)[torch.arange(3)],
    "slice by numbers": lambda g: g[1:3],
    "one_hot with classes": lambda g: F.one_hot(g.long(), 9),
    "repeats of known length": lambda g: torch.ones(4).repeat_interleave(g.long(), output_size=6),
    "masked fill": lambda g: g.masked_fill(g > 1, 0.0),
    "is": lambda g: g is None,
    "cast": lambda g: g.bool().float(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_reads_no_value_is_no_decision(name: str) -> None:
    assert gradlineage.trace(Reads(PLAIN[name]), torch.ones(1, 4)).decisions == ()


def test_reading_within_a_layer_names_what_came_into_the_layer() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2 if (x.sigmoid().sum() + 1) > 0 else y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), Gate()

        def forward(self, x: Tensor) -> Any:
            return self.gate(self.a(x), self.b(x))

    lineage = gradlineage.trace(Net(), torch.ones(1, 4))
    (found,) = lineage.decisions
    assert (found.call, found.value) == (lineage["gate"], True)
    assert [(s.label, s.ops) for s in found.sources] == [("a", ("sigmoid", "sum", "add", "gt"))]
    assert [s.label for s in lineage.collapse(depth=0).decisions[0].sources] == ["Net"]


def test_input_and_constant_can_decide() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            for _ in range(int(n)):
                x = self.fc(x)
            return x * float(torch.rand(1))

    lineage = gradlineage.trace(Net(), torch.ones(1, 4), torch.tensor(3))
    assert [(d.kind, [s.label for s in d.sources]) for d in lineage.decisions] == [("int", ["input:n"]), ("float", ["constant:rand"])]
    assert len(lineage["fc"].inputs) == 1
    assert lineage.decisions[0].value == 3


def test_condition_of_cond_and_while_loop_is_a_decision() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            h = self.fc(x)
            return torch.cond(h.sum() > 1e9, lambda v: v * 2, lambda v: v - 1, (h,))

    (found,) = gradlineage.trace(Net().requires_grad_(False), torch.ones(1, 4)).decisions
    assert (found.kind, found.value, [s.label for s in found.sources]) == ("bool", False, ["fc"])


def test_value_that_is_not_finite_survives_saving() -> None:
    lineage = gradlineage.trace(Reads(lambda g: (g.sum() / 0).item()), torch.ones(1, 4))
    assert lineage.decisions[0].value == math.inf
    assert Lineage.from_json(lineage.to_json()) == lineage
    again = Lineage.from_json(lineage.to_json())
    assert again.decisions[0].value == math.inf
    assert "Infinity" not in lineage.to_json()


def test_table_has_a_note_where_it_happened_or_a_section() -> None:
    class Exit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.exit1, self.deep, self.exit2 = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Any:
            h = self.stem(x)
            early = self.exit1(h).softmax(-1)
            for _ in range(5):
                if early.max() > 1.5:
                    return early
            return self.exit2(self.deep(h))

    lineage = gradlineage.trace(Exit(), torch.ones(1, 4))
    lines = [" ".join(line.split()) for line in lineage.to_table(width=200).splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("?"))
    assert lines[at - 1].startswith("exit1 (Linear)")
    assert lines[at + 1].startswith("deep (Linear)")
    assert lines[at].endswith("is False ×5 gt ← max ← softmax ← exit1")
    section = " ".join(lineage.to_table(decisions=True, width=200).partition("5 decisions:")[2].split())
    assert section.endswith("in Exit is False: gt ← max ← softmax ← exit1 ×5")
    assert section.count("?") == 1
    assert "no decisions" in gradlineage.trace(nn.Linear(4, 4), torch.ones(1, 4)).to_table(decisions=True)


def test_decision_row_is_shown_with_the_container_in_which_it_fell() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            h = self.fc(x)
            return h if bool(h.sum() > 0) else -h

    lineage = gradlineage.trace(nn.Sequential(Block(), nn.Linear(4, 4), Block()), torch.ones(1, 4))
    assert lineage.to_table().count("? bool") == 2
    assert lineage.to_table(layer="2").count("? bool") == 1
    assert lineage.to_table(layer="1").count("? bool") == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_reading_on_a_gpu_is_marked_as_waiting() -> None:
    (found,) = gradlineage.trace(Reads(lambda g: g.sum().item()).cuda(), torch.ones(1, 4, device="cuda")).decisions
    assert found.waits
