"""The walker on fake graphs, against the definitions; views, labels, folding and queries on small graphs and models."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, note
from torch import nn

import gradlineage
from gradlineage.errors import LineageError, NameNotFound
from gradlineage.graph import CallRecord, Graph, Node, ValueRecord
from gradlineage.lineage import Call, Flow, Join, Lineage, Source
from gradlineage.walk import CONSTANT, DATA, LEAF, OPERATION, PASS, Ways
from tests.profiles import examples
from tests.strategies import Fake, fakes, passes

torch.set_num_threads(1)


# -- the definitions, word for word and slow -------------------------------------------------------------------------------------------


def plain(edge: int) -> int:
    return edge if edge >= 0 else ~edge


class ByDefinition:
    """What `Ways` should say. ``through`` are atoms to look through, for sources seen through joins."""

    def __init__(self, fake: Fake) -> None:
        self.roles, self.parents, self.grads = fake
        self.joins: list[int] = []
        meeting: list[set[int]] = []  # per node, the origins of which data comes
        for node, role in enumerate(self.roles):
            found = {node} if role == DATA else set()
            for edge in self.parents[node]:
                found |= meeting[plain(edge)]
            if role == OPERATION and len(found) > 1:
                self.joins.append(node)
                found = {node}
            meeting.append(found)
        self.origin = [next(iter(found), -1) for found in meeting]

    def atom(self, node: int) -> bool:
        return self.roles[node] >= DATA or node in self.joins

    def elements(self, node: int, end: Callable[[int], bool] | None = None) -> list[tuple[int, bool]]:
        """Depth first in operand order, each once; constants only where nothing else is."""
        end = end or self.atom
        order: list[int] = []
        seen: set[int] = set()

        def visit(here: int) -> None:
            if here in seen:
                return
            seen.add(here)
            if end(here):
                order.append(here)
                return
            for edge in self.parents[here]:
                visit(plain(edge))

        visit(node)
        named = [a for a in order if self.roles[a] != CONSTANT] or order
        return [(a, self.flows(node, a, end)) for a in named]

    def constant(self, elements: list[tuple[int, bool]]) -> bool:
        """Whether nothing but constants feeds a node; then one of them is named, and it is no matter which."""
        return all(self.roles[atom] == CONSTANT for atom, _ in elements)

    def flows(self, node: int, atom: int, end: Callable[[int], bool]) -> bool:
        """Whether gradient flows on some way: all edges let it through, and the atom takes it."""

        @cache
        def reach(here: int) -> bool:
            return here == atom or (not end(here) and any(edge >= 0 and reach(edge) for edge in self.parents[here]))

        return reach(node) and (self.roles[atom] < DATA or self.grads[atom])

    def ways(self, node: int, atom: int, end: Callable[[int], bool] | None = None) -> set[tuple[int, ...]]:
        """The operations of every shortest way, in running order."""
        stop = end or self.atom

        @cache
        def shortest(here: int) -> tuple[int, frozenset[tuple[int, ...]]]:
            if here == atom:
                return 0, frozenset({()})
            step = self.roles[here] == OPERATION
            found = [] if stop(here) else [shortest(plain(edge)) for edge in self.parents[here]]
            least = min((length for length, _ in found), default=10**6)
            tails = {way for length, ways in found if length == least for way in ways}
            return least + step, frozenset((*way, here) if step else way for way in tails)

        return set(shortest(node)[1])


@given(fakes())
@examples(300)
def test_joins_are_the_operations_where_data_of_two_origins_meets(fake: Fake) -> None:
    ways, truth = Ways(*fake), ByDefinition(fake)
    assert ways.joins == truth.joins
    assert ways.origin == truth.origin


@given(fakes())
@examples(300)
def test_elements_are_what_a_depth_first_search_meets_in_operand_order(fake: Fake) -> None:
    ways, truth = Ways(*fake), ByDefinition(fake)
    for node in range(len(fake.roles)):
        expected = truth.elements(node)
        if truth.constant(expected):
            ((found, _),) = ways.elements(node)
            assert found in {atom for atom, _ in expected}
        else:
            assert ways.elements(node) == expected


@given(fakes())
@examples(300)
def test_way_is_a_shortest_one_in_running_order(fake: Fake) -> None:
    ways, truth = Ways(*fake), ByDefinition(fake)
    for node in range(len(fake.roles)):
        for atom, _ in ways.elements(node):
            way = ways.way(node, atom)
            if fake.roles[atom] != CONSTANT:
                assert way in truth.ways(node, atom)
            assert ways.length(node, atom) == len(way)


def test_way_to_a_leaf_is_shortest_across_module_borders() -> None:
    """Borders of modules are no operations: the way over two of them is shorter than the one over an operation."""
    ways = Ways([LEAF, OPERATION, PASS, PASS, OPERATION], [(), (0,), (0,), (2,), (1, 3)])
    assert ways.way(4, 0) == (4,)
    ways = Ways([LEAF, OPERATION, OPERATION, PASS, OPERATION], [(), (0,), (1,), (1,), (2, 3)])
    assert ways.way(4, 0) == (1, 4)


@given(fakes())
@examples(200)
def test_asking_changes_no_answer(fake: Fake) -> None:
    ways = Ways(*fake)
    nodes = range(len(fake.roles))
    first = [[(e, ways.way(n, e[0])) for e in ways.elements(n)] for n in nodes]
    assert [[(e, ways.way(n, e[0])) for e in ways.elements(n)] for n in reversed(nodes)] == first[::-1]


# -- size ------------------------------------------------------------------------------------------------------------------------------


def chain(n: int) -> Fake:
    return Fake([DATA, *[OPERATION] * n], [(), *((i,) for i in range(n))], [True] * (n + 1))


def fan_out(n: int) -> Fake:
    """One origin, n operations that each read it, with a leaf of their own."""
    return Fake([DATA, LEAF, *[OPERATION] * n], [(), (), *[(0, 1)] * n], [True] * (n + 2))


def diamonds(n: int) -> Fake:
    """n diamonds on top of each other: 2**n ways."""
    roles, parents = [DATA], [()]
    for i in range(n):
        roles += [OPERATION] * 3
        parents += [(3 * i,), (3 * i,), (3 * i + 1, 3 * i + 2)]  # type: ignore[list-item]
    return Fake(roles, list(parents), [True] * len(roles))


def joined_diamonds(n: int) -> Fake:
    """The same where every diamond also takes a new origin in, so that each is a join."""
    roles, parents = [DATA], [()]
    for _ in range(n):
        top = len(roles) - 1
        roles += [OPERATION, OPERATION, DATA, OPERATION]
        parents += [(top,), (top,), (), (top + 1, top + 2, top + 3)]  # type: ignore[list-item]
    return Fake(roles, list(parents), [True] * len(roles))


def leaf_diamonds(n: int) -> Fake:
    """The same over a parameter alone."""
    fake = diamonds(n)
    return Fake([LEAF, *fake.roles[1:]], fake.parents, fake.grads)


def mixed_diamonds(n: int) -> Fake:
    """Diamonds in which a new parameter joins on each side, so that nothing ever comes together."""
    roles, parents = [DATA], [()]
    for _ in range(n):
        top = len(roles) - 1
        roles += [LEAF, LEAF, OPERATION, OPERATION, OPERATION]
        parents += [(), (), (top, top + 1), (top, top + 2), (top + 3, top + 4)]  # type: ignore[list-item]
    return Fake(roles, list(parents), [True] * len(roles))


def dense(n: int) -> Fake:
    """DenseNet: every origin comes from a concatenation of all before it."""
    roles, parents = [DATA], [()]
    made = [0]
    for _ in range(n):
        roles += [OPERATION, DATA]
        parents += [tuple(made), ()]  # type: ignore[list-item]
        made.append(len(roles) - 1)
    return Fake(roles, list(parents), [True] * len(roles))


@pytest.mark.parametrize("shape", [chain, fan_out, diamonds, joined_diamonds, leaf_diamonds])
def test_visits_grow_with_the_graph(shape: Callable[[int], Fake]) -> None:
    def visits(n: int) -> tuple[int, int]:
        fake = shape(n)
        ways = Ways(*fake)
        ways.elements(len(fake.roles) - 1)
        return ways.visits, sum(map(len, fake.parents))

    (small, _), (large, edges) = visits(60), visits(600)
    assert large <= 10.5 * small
    assert large <= 2 * edges


def test_elements_of_every_node_of_a_chain_take_one_visit_each() -> None:
    ways = Ways(*chain(1000))
    for node in range(1001):
        assert ways.elements(node) == [(0, True)]
    assert ways.visits <= 1001


def test_concatenations_of_all_before_take_one_visit_an_edge() -> None:
    fake = dense(100)
    ways = Ways(*fake)
    for join in ways.joins:
        for edge in fake.parents[join]:
            assert ways.elements(edge) == [(edge, True)]
    assert len(ways.joins) == 99  # the first has one operand
    assert ways.visits <= sum(map(len, fake.parents))


@pytest.mark.parametrize("shape", [diamonds, joined_diamonds, leaf_diamonds, mixed_diamonds])
def test_sixty_stacked_diamonds_end(shape: Callable[[int], Fake]) -> None:
    fake = shape(60)
    ways = Ways(*fake)
    top = len(fake.roles) - 1
    found = ways.elements(top)
    assert len(found) == (121 if shape is mixed_diamonds else 1)
    assert ways.visits < 2000
    assert len(ways.way(top, found[0][0])) in (0, 60, 120)


def test_chain_of_300_000_operations_needs_no_recursion() -> None:
    fake = chain(300_000)
    ways = Ways(*fake)
    assert ways.elements(300_000) == [(0, True)]
    assert ways.way(300_000, 0) == tuple(range(1, 300_001))
    assert ways.length(300_000, 0) == 300_000


def test_trunk_of_2000_operations_with_400_heads_is_walked_once() -> None:
    fake = chain(2000)
    roles, parents = fake.roles + [OPERATION] * 400, fake.parents + [(2000,)] * 400
    ways = Ways(roles, parents)
    for head in range(2001, 2401):
        assert ways.elements(head) == [(0, True)]
    assert ways.visits <= 2 * 2400


def test_trunk_with_a_parameter_in_front_is_walked_once_for_all_heads() -> None:
    roles = [DATA, LEAF, *[OPERATION] * 2400]
    parents: list[tuple[int, ...]] = [(), (), (0, 1), *((i,) for i in range(2, 2001)), *[(2001,)] * 400]
    ways = Ways(roles, parents)
    for head in range(2002, 2402):
        assert ways.elements(head) == [(0, True), (1, True)]
    assert ways.visits <= 4 * 2400


# -- single rules ----------------------------------------------------------------------------------------------------------------------


def test_parameters_and_constants_make_no_join() -> None:
    ways = Ways([DATA, LEAF, CONSTANT, OPERATION], [(), (), (), (0, 1, 2)])
    assert ways.joins == []
    assert ways.elements(3) == [(0, True), (1, True)]


def test_constant_is_named_where_nothing_else_feeds() -> None:
    ways = Ways([CONSTANT, CONSTANT, OPERATION, LEAF, OPERATION], [(), (), (0, 1), (), (2, 3)])
    assert ways.elements(2) == [(0, True)]
    assert ways.elements(4) == [(3, True)]


def test_one_origin_on_two_ways_is_no_join() -> None:
    ways = Ways([DATA, OPERATION, OPERATION], [(), (0,), (0, 1)])
    assert ways.joins == []
    assert ways.way(2, 0) == (2,)


def test_gradient_on_one_of_two_ways_is_enough() -> None:
    ways = Ways([DATA, OPERATION, OPERATION], [(), (~0,), (1, 0)])
    assert ways.elements(1) == [(0, False)]
    assert ways.elements(2) == [(0, True)]
    assert Ways([DATA, OPERATION], [(), (0,)], [False, True]).elements(1) == [(0, False)]


# -- the view, on graphs made by hand --------------------------------------------------------------------------------------------------


class Made:
    """Writes a graph down as a model would: a root container, layers that read values, operations."""

    def __init__(self) -> None:
        self.nodes: list[Node] = [Node("input", (), "x", 0, 0, grad=True)]
        self.calls: list[CallRecord] = [CallRecord("", 0, "Net", False, -1, "", 0, 0, True, False, (self.value(0),), ())]
        self.times = Counter([""])
        self.order = 0

    @staticmethod
    def value(node: int) -> ValueRecord:
        return ValueRecord("x", (1,), "float32", "cpu", node)

    def container(self, path: str, parent: int = 0) -> int:
        self.calls.append(CallRecord(path, self._nth(path), "Block", False, parent, "", 0, 0, True, False, (), ()))
        return len(self.calls) - 1

    def layer(self, path: str, *nodes: int, parent: int = 0) -> int:
        inputs = tuple(self.value(n) for n in nodes)
        self.calls.append(
            CallRecord(path, self._nth(path), "Linear", True, parent, "", 0, 0, True, False, inputs, (self.value(len(self.nodes)),))
        )
        self.nodes.append(Node("call", (), "", len(self.calls) - 1, 0, grad=True))
        return len(self.nodes) - 1

    def _nth(self, path: str) -> int:
        self.times[path] += 1
        return self.times[path] - 1

    def op(self, name: str, *parents: int, call: int = 0) -> int:
        self.order += 1
        self.nodes.append(Node("op", parents, name, call, order=self.order, grad=True))
        return len(self.nodes) - 1

    def leaf(self, kind: str, name: str) -> int:
        self.nodes.append(Node(kind, (), name, grad=kind == "parameter"))
        return len(self.nodes) - 1

    def lineage(self, *outputs: int) -> Lineage:
        return Lineage(Graph(tuple(self.nodes), tuple(self.calls), tuple(self.value(n) for n in outputs), "Net", 0, 0))


def rows(lineage: Lineage) -> dict[str, list[str]]:
    """Label of each layer and join -> what it is connected to, operations in front."""
    found = {}
    items: list[Call | Join] = [*lineage.layers, *lineage.joins]
    for item in items:
        found[item.label] = [" ".join([*reversed(link.ops), link.label]) for flow in item.inputs for link in flow.links]
    return found


def test_running_sum_folds_to_one_row_with_operands_in_order() -> None:
    made = Made()
    acc = made.layer("a", 0)
    for name in "bcd":
        acc = made.op("add", acc, made.layer(name, 0))
    made.layer("end", acc)
    assert rows(made.lineage())[":add"] == ["a", "b", "c", "d"]
    assert rows(made.lineage())["end"] == [":add"]


def test_sum_from_the_right_folds_with_operands_in_order_too() -> None:
    made = Made()
    a, b, c, d = (made.layer(name, 0) for name in "abcd")
    made.layer("end", made.op("add", a, made.op("add", b, made.op("add", c, d))))
    assert rows(made.lineage())[":add"] == ["a", "b", "c", "d"]


def test_scaled_running_sum_keeps_operands_in_order() -> None:
    """``acc = (acc + y) * w``: the parameter comes after what it scales."""
    made = Made()
    a, b, c = (made.layer(name, 0) for name in "abc")
    inner = made.op("mul", made.op("add", a, b), made.leaf("parameter", "w"))
    made.layer("end", made.op("add", inner, c))
    assert [f.links[0].label for f in made.lineage()[":add"].inputs] == ["a", "b", "w", "c"]
    assert [s.label for s in made.lineage()["end"].inputs[0].sources] == ["a", "b", "w", "c"]


def test_join_read_twice_is_not_folded() -> None:
    made = Made()
    a, b, c = (made.layer(name, 0) for name in "abc")
    inner = made.op("add", a, b)
    outer = made.op("mul", inner, c)
    made.layer("end", outer, inner)
    assert rows(made.lineage())[":mul"] == [":add", "c"]
    assert rows(made.lineage())["end"] == [":mul", ":add"]


def test_join_that_is_an_output_is_not_folded() -> None:
    made = Made()
    a, b, c = (made.layer(name, 0) for name in "abc")
    inner = made.op("add", a, b)
    lineage = made.lineage(made.op("add", inner, c), inner)
    assert rows(lineage) == {"a": ["input:x"], "b": ["input:x"], "c": ["input:x"], ":add[0]": ["a", "b"], ":add[1]": [":add[0]", "c"]}


def test_join_of_another_container_call_is_not_folded() -> None:
    made = Made()
    a, b, c = (made.layer(name, 0) for name in "abc")
    block = made.container("block")
    inner = made.op("add", a, b, call=block)
    made.layer("end", made.op("add", inner, c))
    assert rows(made.lineage())[":add"] == ["block:add", "c"]


def test_operand_of_both_sides_of_a_folded_join_stays_one_row() -> None:
    """``h = where(mask, h, 2 * h)`` in a loop: each step reads the one before it twice, and that must not double the row."""

    def operands(steps: int) -> int:
        made = Made()
        h = made.layer("a", 0)
        for step in range(steps):
            h = made.op("where", made.layer(f"m{step}", 0), h, made.op("mul", h))
        return sum(len(join.inputs) for join in made.lineage(h).joins)

    assert operands(10) <= 2.5 * operands(5)
    assert operands(60) <= 10 * operands(10)


def test_labels_count_within_one_container_call() -> None:
    made = Made()
    a, b, c = (made.layer(name, 0) for name in "abc")
    first, second = made.container("cell"), made.container("cell")
    one, two = made.op("add", a, b, call=first), made.op("add", b, c, call=first)
    three = made.op("mul", a, c, call=second)
    top = made.op("cat", a, b, c)
    lineage = made.lineage(one, two, three, top)
    assert [j.label for j in lineage.joins] == ["cell[0]:add[0]", "cell[0]:add[1]", "cell[1]:mul", ":cat"]
    assert [lineage[j.label] for j in lineage.joins] == list(lineage.joins)
    assert lineage[":cat"].container == lineage["Net"]
    assert lineage["cell[1]:mul"].container == lineage["cell", 1]


def test_join_outside_of_all_calls_has_a_label_of_its_own() -> None:
    made = Made()
    lineage = made.lineage(made.op("sub", made.layer("a", 0), made.layer("b", 0), call=-1))
    assert [j.label for j in lineage.joins] == ["(outside):sub"]
    assert lineage["(outside):sub"].container is None


def test_shared_module_gives_one_call_per_use() -> None:
    made = Made()
    one = made.layer("fc", 0)
    two = made.layer("fc", one)
    made.layer("fc", made.op("add", one, two))
    assert rows(made.lineage()) == {"fc[0]": ["input:x"], "fc[1]": ["fc[0]"], "fc[2]": [":add"], ":add": ["fc[0]", "fc[1]"]}
    lineage = made.lineage()
    assert lineage["fc"] == lineage["fc", 0] == lineage["fc[0]"] == lineage["fc[0][0]"]
    assert lineage["fc[2]"].nth == 2
    assert lineage["fc[1]"].inputs[0].sources[0] == Source("call", "fc[0]", path="fc", nth=0, port=0)


def test_queries_go_through_joins() -> None:
    made = Made()
    stem = made.layer("stem", 0)
    a, b = made.layer("a", stem), made.layer("b", stem)
    side = made.layer("side", stem)
    c = made.layer("c", made.op("relu", made.op("add", a, b)))
    made.layer("end", c, side)
    lineage = made.lineage()

    def labels(calls: tuple[Call, ...]) -> list[str]:
        return [call.label for call in calls]

    assert labels(lineage.predecessors("c")) == ["a", "b"]
    assert labels(lineage.predecessors(":add")) == ["a", "b"]
    assert labels(lineage.predecessors("end")) == ["c", "side"]
    assert labels(lineage.successors("stem")) == ["a", "b", "side"]
    assert labels(lineage.successors("a")) == ["c"]
    assert labels(lineage.successors(":add")) == ["c"]
    assert labels(lineage.ancestors("c")) == ["stem", "a", "b"]
    assert labels(lineage.descendants("a")) == ["c", "end"]
    assert labels(lineage.between("stem", "c")) == ["a", "b"]
    assert labels(lineage.between("stem", "end")) == ["a", "b", "side", "c"]
    assert labels(lineage.between("c", "stem")) == []
    assert labels(lineage.predecessors(lineage["c"].inputs[0].sources[0])) == ["stem"]
    assert labels(lineage.predecessors(lineage["c"])) == ["a", "b"]
    assert labels(lineage.find(type="Lin*", pattern="s*")) == ["stem", "side"]
    assert [j.label for j in lineage.find(op="add")] == [":add"]
    assert [x.label for x in lineage.find(pattern="*a*")] == ["a", ":add"]
    assert len(lineage.find()) == len(lineage.calls) + len(lineage.joins)


def test_wrong_names_list_the_nearest() -> None:
    made = Made()
    made.layer("layer1.0.conv1", made.op("add", made.layer("stem", 0), made.layer("side", 0)))
    lineage = made.lineage()
    with pytest.raises(NameNotFound, match=r"no call or join named 'layer1\.0\.conv' in this lineage; nearest: layer1\.0\.conv1"):
        lineage["layer1.0.conv"]
    for wrong in ("stem[1]", ":mul", ("stem", 1), ("stem", -1), "stem.", "STEM"):
        with pytest.raises(NameNotFound):
            lineage[wrong]
        assert wrong not in lineage
    for ask in (lineage.predecessors, lineage.successors, lineage.ancestors, lineage.descendants):
        with pytest.raises(NameNotFound):
            ask("nothing")
    with pytest.raises(NameNotFound):
        lineage.between("stem", "nothing")
    with pytest.raises(KeyError):  # as a mapping does
        lineage["nothing"]
    with pytest.raises(LineageError, match="neither a call nor a join"):
        lineage.predecessors(3)  # type: ignore[arg-type]


@given(passes())
@examples(200)
def test_sources_are_the_nearest_origins_whatever_is_folded(lineage: Lineage) -> None:
    view, graph = lineage._view, lineage._graph
    note(f"{graph.calls}\n{graph.nodes}\n{graph.outputs}")
    truth = ByDefinition(Fake(list(view.ways.roles), list(view.ways.parents), [n.grad for n in graph.nodes]))

    def end(node: int) -> bool:
        return truth.roles[node] >= DATA

    flows = [(f, v) for c in lineage.calls for f, v in zip(c.inputs, c._record.inputs, strict=True)]
    flows += list(zip(lineage.outputs, graph.outputs, strict=True))
    for flow, value in flows:
        expected = truth.elements(value.node, end)
        if truth.constant(expected):
            assert [source.kind for source in flow.sources] == ["constant"]
            continue
        assert {source.label for source in flow.sources} == {view.label(atom) for atom, _ in expected}
        assert {(source.label, source.differentiable) for source in flow.sources} == {(view.label(atom), diff) for atom, diff in expected}
        assert [source.label for source in flow.sources] == [view.label(atom) for atom, _ in expected]
        for source, (atom, _) in zip(flow.sources, expected, strict=True):
            shortest = truth.ways(value.node, atom, end)
            assert tuple(source.ops) in {tuple(graph.nodes[n].name for n in way if graph.nodes[n].name) for way in shortest}


@given(passes())
@examples(200)
def test_successors_are_predecessors_backwards(lineage: Lineage) -> None:
    pairs = {(before, call) for call in lineage.layers for before in lineage.predecessors(call)}
    assert pairs == {(call, after) for call in lineage.layers for after in lineage.successors(call)}
    for call in lineage.layers:
        assert set(lineage.ancestors(call)) == {before for before in lineage.layers if call in lineage.descendants(before)}


@given(passes())
@examples(200)
def test_every_join_in_the_table_is_read_twice_or_from_elsewhere(lineage: Lineage) -> None:
    """A join whose only consumer is an operand of another join of the same container call has no row, and every other one has."""
    readers: dict[str, list[object]] = {join.label: [] for join in lineage.joins}
    for flow in (f for call in lineage.layers for f in call.inputs):
        for label in {link.label for link in flow.links if link.label in readers}:
            readers[label].append(None)
    for flow in lineage.outputs:
        for label in {link.label for link in flow.links if link.label in readers}:
            readers[label].append(None)
    for join in lineage.joins:
        for label in [link.label for f in join.inputs for link in f.links if link.label in readers]:
            readers[label].append(join.container)
    for join in lineage.joins:
        assert readers[join.label]
        assert readers[join.label] != [join.container]


# -- on models -------------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add = nn.Linear(2, 2)  # named as the operation: the colon keeps them apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.add(x)
        return out


class Net(nn.Module):
    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.block = Block()
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        acc: torch.Tensor = self.stem(x)
        x = acc
        for _ in range(self.steps):
            x = self.block(x)
            acc = acc + x
        return acc


def test_accumulation_in_a_forward_is_one_row() -> None:
    lineage = gradlineage.trace(Net(), torch.ones(1, 2))
    assert rows(lineage) == {
        "stem": ["input:x"],
        "block.add[0]": ["stem"], "block.add[1]": ["block[0]:add"], "block.add[2]": ["block[1]:add"],
        "block[0]:add": ["stem", "block.add[0]"], "block[1]:add": ["block[0]:add", "block.add[1]"], "block[2]:add": ["block[1]:add", "block.add[2]"],
        ":add": ["stem", "block[0]:add", "block[1]:add", "block[2]:add"],
    }  # fmt: skip


def test_iteration_and_length_are_over_calls() -> None:
    lineage = gradlineage.trace(Net(1), torch.ones(1, 2))
    assert [c.label for c in lineage] == ["Net", "stem", "block", "block.add"]
    assert len(lineage) == 4
    assert "block.add" in lineage
    assert "block:add" in lineage


# -- values ----------------------------------------------------------------------------------------------------------------------------


def deep(joins: int) -> Lineage:
    """As many joins on top of each other, none folded: a layer reads each."""
    made = Made()
    h = made.layer("a", 0)
    for i in range(joins):
        h = made.op("add", h, made.layer(f"l{i}", h))
    return made.lineage(h)


def folded(joins: int) -> Lineage:
    """As many joins folded into one row."""
    made = Made()
    h = made.layer("a", 0)
    for i in range(joins):
        h = made.op("add", h, made.layer(f"l{i}", 0))
    return made.lineage(h)


def test_everything_is_frozen() -> None:
    lineage = deep(3)
    call, join = lineage["l1"], lineage[":add[0]"]
    flow = call.inputs[0]
    for thing, name in ((lineage, "model"), (lineage, "calls"), (lineage, "new"), (call, "path"), (call, "_index"), (join, "op"), (join, "new"),
                        (flow, "name"), (flow, "new"), (flow.links[0], "label"), (flow.links[0], "_reference"), (flow.sources[0], "label")):  # fmt: skip
        with pytest.raises((AttributeError, TypeError)):
            setattr(thing, name, 1)
    for thing, name in ((call, "_index"), (join, "_lineage"), (flow.sources[0], "label"), (flow, "name"), (lineage, "_graph")):
        with pytest.raises(AttributeError):
            delattr(thing, name)
    assert lineage == deep(3)


@pytest.mark.parametrize("make", [deep, folded])
def test_lineage_of_10_000_joins_is_plain_data(make: Callable[[int], Lineage]) -> None:
    lineage = make(10_000)
    assert len(lineage.joins) == (10_000 if make is deep else 1)
    for other in (pickle.loads(pickle.dumps(lineage)), copy.deepcopy(lineage), copy.copy(lineage)):
        assert other == lineage
        assert hash(other) == hash(lineage)
    assert lineage != make(9_999)
    assert "10001 layer calls" in repr(lineage)


@pytest.mark.parametrize("make", [deep, folded])
def test_handles_of_10_000_joins_are_plain_data(make: Callable[[int], Lineage]) -> None:
    lineage = make(10_000)
    flow = lineage.joins[-1].inputs[0]
    things = [lineage.joins[-1], lineage.layers[-1], flow, flow.links[0]]
    for thing, other, third in zip(things, pickle.loads(pickle.dumps(things)), copy.deepcopy(things), strict=True):
        assert type(other) is type(third) is type(thing)
        assert hash(other) == hash(third) == hash(thing)
        assert repr(other) == repr(third) == repr(thing)
        assert other == third == thing


def test_handles_are_equal_where_they_mean_the_same() -> None:
    lineage, same, other = deep(3), deep(3), deep(4)
    assert lineage["l1"] == same["l1"]
    assert lineage["l1"] != lineage["l2"]
    assert lineage["l1"] != other["l1"]
    assert lineage[":add[0]"] == same[":add[0]"] != lineage["l0"]
    assert lineage["l1"].inputs == same["l1"].inputs
    assert {lineage["l1"], same["l1"]} == {lineage["l1"]}
    assert lineage["l1"].inputs[0] != "l1"
    assert isinstance(lineage[":add[0]"], Join)
    assert isinstance(lineage["l1"].inputs[0], Flow)
