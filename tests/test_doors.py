"""What comes and goes by another door than arguments and return values, and memory of which only pieces were seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlineage
from gradlineage import Flow


def labels(flows: Any) -> list[str]:
    return [s.label for flow in flows for s in flow.sources]


def fc() -> nn.Linear:
    return nn.Linear(4, 4)


class Encoder(nn.Module):
    def __init__(self, store: list[Tensor]) -> None:
        super().__init__()
        self.fc, self.store = fc(), store

    def forward(self, x: Tensor) -> Tensor:
        self.store.append(self.fc(x))
        return self.store[-1]


class Decoder(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + self.store.pop())  # type: ignore[no-any-return]


class Skip(nn.Module):
    """A skip connection through a list that both ends hold."""

    def __init__(self) -> None:
        super().__init__()
        store: list[Tensor] = []
        self.enc, self.mid, self.dec = Encoder(store), fc(), Decoder(store)

    def forward(self, x: Tensor) -> Any:
        return self.dec(self.mid(self.enc(x)))


def test_what_enters_a_collapsed_container_by_another_door_is_hidden() -> None:
    lineage = gradlineage.trace(Skip(), torch.ones(2, 4))
    assert labels(lineage["dec.fc"].inputs) == ["mid", "enc.fc"]
    collapsed = lineage.collapse(depth=1)
    assert (labels(collapsed["dec"].inputs), labels(collapsed["dec"].hidden)) == (["mid"], ["enc"])
    assert [c.label for c in collapsed.predecessors("dec")] == ["mid", "enc"]
    assert [c.label for c in collapsed.successors("enc")] == ["mid", "dec"]
    assert labels(collapsed["enc"].hidden) == []
    assert "hidden: enc" in collapsed.to_table()


def test_state_kept_on_self_is_hidden_in_the_next_call_of_a_collapsed_cell() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(8, 4)
            self.h: Tensor | None = None

        def forward(self, x: Tensor) -> Any:
            h = self.h if self.h is not None else x.new_zeros(x.shape)
            self.h = self.w(torch.cat([x, h], -1)).tanh()
            return self.h

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()

        def forward(self, x: Tensor) -> Any:
            return [self.cell(part) for part in x][-1]

    lineage = gradlineage.trace(Loop(), torch.ones(3, 2, 4)).collapse(depth=1)
    assert [labels(c.hidden) for c in lineage.layers] == [[], ["cell[0]"], ["cell[1]"]]
    assert [c.label for c in lineage.ancestors("cell[2]")] == ["cell[0]", "cell[1]"]


@pytest.mark.parametrize("depth", [None, 1])
def test_container_says_which_of_its_arguments_it_used(depth: int | None) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = fc()
            self.kept: Tensor | None = None

        def forward(self, x: Tensor, mask: Tensor, aux: Tensor, dead: Tensor) -> Any:
            self.kept = aux * 2
            self.fc(dead)
            return self.fc(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), fc()

        def forward(self, x: Tensor) -> Any:
            return self.head(self.block(x, x > 0, x + 1, x - 1) + self.block.kept)

    lineage = gradlineage.trace(Net(), torch.ones(2, 4))
    lineage = lineage if depth is None else lineage.collapse(depth=depth)
    assert {f.name: f.used for f in lineage["block"].inputs} == {"x": True, "mask": False, "aux": True, "dead": False}


def test_layer_that_writes_an_argument_and_returns_something_else_used_what_it_wrote() -> None:
    class Writer(nn.Module):
        def forward(self, buffer: Tensor, x: Tensor, index: Tensor, unused: Tensor) -> Any:
            buffer.index_copy_(0, index, x)
            return x.sum()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.writer, self.fc = Writer(), fc()

        def forward(self, x: Tensor) -> Any:
            buffer = torch.zeros(3, 4)
            self.writer(buffer, x, torch.arange(3), x + 1)
            return self.fc(buffer)

    lineage = gradlineage.trace(Net(), torch.ones(3, 4))
    assert {f.name: f.used for f in lineage["writer"].inputs} == {"buffer": True, "x": True, "index": True, "unused": False}
    assert "writer" in labels(lineage["fc"].inputs)


# -- pieces of one memory ----------------------------------------------------------------------------------------------------------


class Program(nn.Module):
    def __init__(self, program: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.m, self.fc, self.program = fc(), fc(), fc(), program
        both = torch.ones(6, 4)
        self.k, self.v = both[:3], both[3:]

    def forward(self, *tensors: Tensor) -> Any:
        return self.fc(self.program(self, *tensors))


def first_of(value: Tensor, *_: object) -> Tensor:
    return value


PIECES: dict[str, tuple[Callable[..., Tensor], set[str]]] = {
    "other half overwritten": (lambda m, z, x: first_of(x, z.normal_()), {"input:tensors[1]"}),
    "other half written by a layer's result": (lambda m, z, x: first_of(x, z.copy_(m.m(x))), {"input:tensors[1]"}),
    "half overwritten": (lambda m, z, x: first_of(z, z.copy_(m.m(x))), {"m"}),
    "half overwritten in place": (lambda m, z, x: first_of(z, z.add_(m.m(x))), {"m", "input:tensors[0]"}),
    "cache on self": (lambda m, z, x: first_of(m.v, m.k.copy_(m.m(x))), {"constant"}),
    "written cache on self": (lambda m, z, x: first_of(m.k, m.k.copy_(m.m(x))), {"m"}),
    "imaginary part zeroed": (lambda m, z, x: first_of(w := torch.fft.fft(m.a(x)), w.imag.zero_()).real, {"a"}),
    "imaginary part copied": (lambda m, z, x: first_of(w := torch.fft.fft(m.a(x)), w.imag.copy_(m.m(x))).real, {"a", "m"}),
    "real part set": (lambda m, z, x: first_of(w := torch.fft.fft(m.a(x)), w.real.fill_(1.0)).imag, {"a"}),
    "empty filled by numbers": (lambda m, z, x: first_of(e := torch.empty(3, 4), e[:1].fill_(1.0), e[1:].fill_(2.0)), {"constant"}),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PIECES)
def test_write_to_a_piece_of_memory_leaves_the_others_what_they_were(name: str, mode: Any) -> None:
    program, expected = PIECES[name]
    with mode():
        both = torch.ones(6, 4)
        lineage = gradlineage.trace(Program(program), both[:3], both[3:])
    flow: Flow = lineage["fc"].inputs[0]
    assert {s.kind if s.kind == "constant" else s.label for s in flow.sources} - (
        {"constant"} if expected != {"constant"} else set()
    ) == expected


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_halves_that_a_layer_returns_are_told_apart_in_every_mode(mode: Any) -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y[:, :2], y[:, 2:]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves, self.a, self.b, self.m = Halves(), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            p, q = self.halves(x)
            with torch.no_grad():
                q.copy_(self.m(x))
            return self.a(p), self.b(q)

    with mode():
        lineage = gradlineage.trace(Net().requires_grad_(False), torch.ones(2, 4))
    assert sorted(labels(lineage["a"].inputs)) == ["halves[0][0]", "m"]
    assert "m" in labels(lineage["b"].inputs)


BANKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "bank": lambda m, x: m.same(first_of(m.fc.weight[:2], m.fc.weight[2:].mul_(0.9))),
    "row": lambda m, x: m.same(first_of(m.fc.weight[0], m.fc.weight.mul_(0.9))),
    "halves": lambda m, x: m.same(first_of((h := m.a(x).detach().requires_grad_())[2:], h[:2].mul_(0))),
}


@pytest.mark.parametrize("name", BANKS)
def test_view_without_gradient_whose_base_was_written_since_is_handed_on(name: str) -> None:
    """Torch raises where ``grad_fn`` of such a view is asked for, which the program itself never does."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.fc, self.same, self.out = fc(), fc(), nn.Identity(), fc()

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                return self.out(BANKS[name](self, x))

    model = Net()
    plain = Net()
    plain.load_state_dict(model.state_dict())
    lineage = gradlineage.trace(model, torch.ones(4, 4))
    assert labels(lineage["out"].inputs) == ["same"]
    plain(torch.ones(4, 4))
