"""A call, or the way between two, in words: what `lineage.explain` and the command ``explain`` say."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

import gradlineage
from gradlineage.cli import main
from gradlineage.errors import LineageError, NameNotFound
from gradlineage.lineage import Lineage
from gradlineage.views.wiring import to_wiring
from tests.nets import Net, data, lin

torch.set_num_threads(1)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 1)
        self.conc, self.fc, self.aux = nn.Identity(), nn.Linear(8, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.relu(self.bn1(self.conv1(x)))
        b = torch.relu(self.conv2(x))
        y = self.fc(self.conc(torch.cat([a, b], 1)).mean((2, 3)))
        if y.sum() > 100:
            y = y * 2
        return y, self.aux(y.detach())


LINE = Small.forward.__code__.co_firstlineno
TEXTS = {
    ("conc",): """conc (Identity), at HERE:3
    y = self.fc(self.conc(torch.cat([a, b], 1)).mean((2, 3)))
is fed by
    :cat
feeds fc""",
    (":cat",): """:cat (a join of 2 tensors), at HERE:3
    y = self.fc(self.conc(torch.cat([a, b], 1)).mean((2, 3)))
is fed by
    relu ← bn1
    relu ← conv2
feeds conc""",
    ("conv1",): """conv1 (Conv2d), at HERE:1
    a = torch.relu(self.bn1(self.conv1(x)))
is fed by
    input:x
feeds bn1""",
    ("fc",): """fc (Linear), at HERE:3
    y = self.fc(self.conc(torch.cat([a, b], 1)).mean((2, 3)))
is fed by
    mean ← conc
feeds aux, the output
gradient stops after it: detach at HERE:6, on the way to aux
decides: bool at HERE:4, was False""",
    ("aux",): """aux (Linear), at HERE:6
    return y, self.aux(y.detach())
is fed by
    detach ⇠ fc
feeds the output
gradient stops before it: detach at HERE:6 cuts off fc""",
    ("bn1", "fc"): """from bn1 to fc in 3 steps
    bn1
    → relu → :cat
    → conc
    → mean → fc
gradient flows back""",
    ("fc", "aux"): """from fc to aux in 1 step
    fc
    → detach → aux (no gradient)
no gradient flows back: detach at HERE:6""",
    ("conv1", "aux"): """from conv1 to aux in 5 steps
    conv1
    → bn1
    → relu → :cat
    → conc
    → mean → fc
    → detach → aux (no gradient)
no gradient flows back: detach at HERE:6""",
    ("aux", "fc"): """there is no way from aux to fc; there is one the other way round, from fc
aux feeds the output alone""",
}


@pytest.fixture(scope="module")
def small() -> Lineage:
    return gradlineage.trace(Small().eval(), torch.rand(1, 3, 4, 4))


def here(text: str) -> str:
    """With lines relative to the forward's first."""
    return re.sub(r"(?:[\w/]*/)?test_explain\.py:(\d+)", lambda m: f"HERE:{int(m[1]) - LINE}", text)


@pytest.mark.parametrize("names", TEXTS)
def test_call_or_way_is_told_in_these_words(small: Lineage, names: tuple[str, ...]) -> None:
    assert here(small.explain(*names)) == TEXTS[names]


def test_saved_lineage_says_the_same(small: Lineage) -> None:
    again = Lineage.from_json(small.to_json())
    assert all(again.explain(*names) == small.explain(*names) for names in TEXTS)


def test_call_may_be_named_by_path_and_number_or_given(small: Lineage) -> None:
    assert small.explain(("fc", 0)) == small.explain(small["fc"]) == small.explain("fc")
    assert small.explain(small["bn1"], ("fc", 0)) == small.explain("bn1", "fc")


def test_name_that_is_not_there_is_told_with_the_nearest(small: Lineage) -> None:
    for names in (("fcc",), ("fc", "fcc")):
        with pytest.raises(NameNotFound, match="no call or join named 'fcc' in this lineage; nearest: fc"):
            small.explain(*names)
    with pytest.raises(LineageError):
        small.explain(3)  # type: ignore[arg-type]


def test_arguments_are_named_and_unused_ones_marked() -> None:
    block = Net(lambda n, x, y: n.a(x), a=lin())
    lineage = gradlineage.trace(Net(lambda n, x: n.b(n.q(n.c(x), x * 2)), b=lin(), c=lin(), q=block), data())
    assert lineage.explain("q").splitlines()[2:5] == ["is fed by", "    args[0]: c", "    args[1]: mul ← input:args[0] (not used)"]


def test_hidden_inputs_are_told() -> None:
    kept: list[Tensor] = []

    class Peeks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + kept[0]

    def run(net: Net, x: Tensor) -> Any:
        kept.append(net.a(x))
        return net.p(x)

    assert gradlineage.trace(Net(run, a=lin(), p=Peeks()), data()).explain("p").splitlines()[2:-1] == [
        "is fed by",
        "    x: input:args[0]",
        "    hidden: a",
    ]


def test_layer_without_inputs_is_fed_by_nothing() -> None:
    class Source(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 4))

        def forward(self) -> Tensor:
            return self.w * 2

    text = gradlineage.trace(Net(lambda n, x: n.s() + x, s=Source()), data()).explain("s")
    assert "is fed by\n    nothing\nfeeds " in text


def test_skip_around_a_layer_is_told() -> None:
    lineage = gradlineage.trace(Net(lambda n, x: n.c(n.b(h := n.a(x)) + h), a=lin(), b=lin(), c=lin()), data())
    assert lineage.explain("b").splitlines()[-1] == "is gone around by a → :add"
    assert "gone around" not in lineage.explain("a") + lineage.explain("c")


def test_long_lists_are_cut_short() -> None:
    lineage = gradlineage.trace(
        Net(lambda n, x: [m(h) for h in [n.first(x)] for m in n.many], first=lin(), many=nn.ModuleList(lin() for _ in range(9))), data()
    )
    assert lineage.explain("first").splitlines()[-1] == "feeds many.0, many.1, many.2, many.3, many.4, many.5 and 3 more"


def test_collapsed_containers_are_told_as_layers() -> None:
    lineage = gradlineage.trace(Net(lambda n, x: n.b(n.s(n.a(x))), a=lin(), b=lin(), s=nn.Sequential(lin(), lin())), data()).collapse(
        depth=1
    )
    assert lineage.explain("s").splitlines()[2:] == ["is fed by", "    a", "feeds b"]
    assert lineage.explain("a", "b") == "from a to b in 2 steps\n    a\n    → s\n    → b\ngradient flows back"


# -- ways, against a search over the lines of the wiring ---------------------------------------------------------------------------------


def edges(lineage: Lineage) -> dict[str, set[str]]:
    """Who feeds whom, read from the text of the wiring."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for line in to_wiring(lineage).splitlines():
        title, _, rest = line.partition(" <- ")
        if not title.startswith("output"):
            for entry in re.split(r"[,;] ", rest):
                source = entry.removesuffix(" (no gradient)").split(" <- ")[-1].split(": ")[-1]
                found[source].add(title.partition(" (")[0])
    return found


def distances(graph: dict[str, set[str]], start: str) -> dict[str, int]:
    found, queue = {start: 0}, deque([start])
    while queue:
        name = queue.popleft()
        for reader in graph.get(name, ()):
            if reader not in found:
                found[reader] = found[name] + 1
                queue.append(reader)
    return found


ZOO: dict[str, dict[str, bool]] = {
    "resnet18": {},
    "squeezenet1_1": {},
    "googlenet": {"init_weights": False, "aux_logits": False},
    "densenet121": {},
}


@pytest.mark.parametrize("name", ZOO)
def test_way_between_two_layers_is_the_shortest_there_is(name: str) -> None:
    lineage = gradlineage.trace(models.get_model(name, weights=None, **ZOO[name]).eval(), torch.rand(1, 3, 64, 64))
    graph = edges(lineage)
    labels = [call.label for call in lineage.layers][:: max(1, len(lineage.layers) // 8)]
    for first, last in itertools.permutations(labels, 2):
        text, known = lineage.explain(first, last), distances(graph, first)
        if last not in known:
            back = f"; there is one the other way round, from {last}" if first in distances(graph, last) else ""
            assert text.splitlines()[0] == f"there is no way from {first} to {last}{back}"
            continue
        lines = text.splitlines()
        assert lines[0] == f"from {first} to {last} in {known[last]} step{'s' * (known[last] != 1)}"
        way = [line.split("→ ")[-1].strip() for line in lines[1:-1]]
        assert len(way) == known[last] + 1 and way[0] == first and way[-1] == last
        assert all(after in graph[before] for before, after in itertools.pairwise(way))


def flows(names: Iterable[str], run: Any) -> dict[tuple[str, str], bool]:
    """Whether autograd sends gradient from the input of one layer to the output of another, for every two."""
    layers = {name: lin() for name in names}
    model = Net(run, **layers)
    ins: dict[str, Tensor] = {}
    outs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            ins[name], outs[name] = args[0], out

        return hook

    for name, layer in layers.items():
        layer.register_forward_hook(note(name))
    model(data())
    found = {}
    for first, last in itertools.permutations(names, 2):
        grads = (
            torch.autograd.grad(ins[last].sum(), outs[first], retain_graph=True, allow_unused=True) if ins[last].requires_grad else (None,)
        )
        found[first, last] = grads[0] is not None
    return found


RUNS = {
    "plain": lambda n, x: n.c(n.b(n.a(x))),
    "detached": lambda n, x: n.c(n.b(n.a(x)).detach()),
    "detached on one way": lambda n, x: n.c(n.b(h := n.a(x)).detach() + h),
    "rounded": lambda n, x: n.c(torch.round(n.b(n.a(x).argsort(-1).float()))),
}


@pytest.mark.parametrize("case", RUNS)
def test_gradient_flows_back_on_a_way_where_autograd_sends_it(case: str) -> None:
    real = flows("abc", RUNS[case])
    lineage = gradlineage.trace(Net(RUNS[case], a=lin(), b=lin(), c=lin()), data())
    for (first, last), flowing in real.items():
        text = lineage.explain(first, last)
        if text.startswith("from"):
            assert text.splitlines()[-1].startswith("gradient flows back" if flowing else "no gradient flows back: "), text
        else:
            assert not flowing


# -- containers, ends and what is nowhere -------------------------------------------------------------------------------------------------------------------


def test_container_feeds_what_its_result_feeds() -> None:
    lineage = gradlineage.trace(Net(lambda n, x: n.b(n.s(x)), b=lin(), s=nn.Sequential(lin(), lin())), data())
    assert lineage.explain("s").splitlines()[-1] == "feeds b"
    assert lineage.explain("s", "b").startswith("from s to b in 1 step")


def test_layer_is_not_said_to_feed_a_container_and_what_lies_in_it() -> None:
    lineage = gradlineage.trace(Net(lambda n, x: n.s(n.a(x)), a=lin(), s=nn.Sequential(lin(), lin())), data())
    assert lineage.explain("a").splitlines()[-1] == "feeds s.0"


def test_ends_of_what_a_layer_feeds_have_what_is_returned(small: Lineage) -> None:
    assert "fc (returned)" in small.explain("conv1", "conv2")


def test_pass_without_gradient_is_the_reason_given() -> None:
    with torch.no_grad():
        lineage = gradlineage.trace(nn.Sequential(lin(), lin()), data())
    assert lineage.explain("0", "1").splitlines()[-1] == "no gradient flows back: this pass ran without"


def test_layer_that_feeds_nothing_does_not_feed_itself() -> None:
    lineage = gradlineage.trace(Net(lambda n, x: (n.b(x), n.a(x))[1], a=lin(), b=lin()), data())
    assert lineage.explain("b", "a").splitlines()[1] == "b feeds nothing"


# -- the command -------------------------------------------------------------------------------------------------------------------------


def test_command_prints_the_same_and_finds_no_wrong_name(small: Lineage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "net.json")
    small.save(path)
    assert main(["explain", path, "conc"]) == 0
    assert capsys.readouterr().out == small.explain("conc") + "\n"
    assert main(["explain", path, "bn1", "fc"]) == 0
    assert capsys.readouterr().out == small.explain("bn1", "fc") + "\n"
    assert main(["explain", path, "fcc"]) == 2
    assert "no call or join named 'fcc' in this lineage; nearest: fc" in capsys.readouterr().err
