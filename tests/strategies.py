"""What hypothesis makes: graphs that a file may hold, fake graphs for the walker."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

from gradlineage.graph import BreakRecord, CallRecord, Graph, Node, ValueRecord
from gradlineage.lineage import Lineage
from gradlineage.walk import CONSTANT, DATA, LEAF, OPERATION, PASS

__all__ = ["Fake", "fakes", "graphs", "lineages", "passes"]

Draw = st.DrawFn

#: Names that break careless writers: quotes, newlines, escapes, other alphabets, a half of a surrogate pair, nothing.
NAMES = st.sampled_from(["x", "conv", "layer1.0", "", 'say "hi"', "a\nb", "\\", "größe", "層", "\x00", "😀", "</script>", "\udc80"])
TEXTS = NAMES | st.text(max_size=5)
SIZES = st.integers(0, 2**63 - 1) | st.integers(0, 9) | st.just("j1")
SHAPES = st.lists(SIZES, max_size=3).map(tuple)


# -- graphs as a recording freezes them ------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: Draw) -> Graph:
    """Any graph that keeps the rules of `gradlineage.graph`, whether or not a model could have made it."""
    calls: list[dict[str, Any]] = []
    for index in range(draw(st.integers(0, 6))):
        above = [-1, *(i for i, c in enumerate(calls) if not c["layer"])]
        path = draw(TEXTS)
        calls.append(
            {
                "path": path, "nth": sum(c["path"] == path for c in calls), "type": draw(TEXTS), "layer": draw(st.booleans()),
                "parent": draw(st.sampled_from(above)), "where": draw(TEXTS), "parameters": draw(st.integers(0, 2**63 - 1)),
                "trainable": draw(st.integers(0, 9)), "registered": draw(st.booleans()), "failed": draw(st.booleans()),
                "inputs": draw(st.integers(0, 2)), "outputs": draw(st.integers(0, 2)), "hidden": draw(st.integers(0, 1)),
            }
        )  # fmt: skip
        assert index < len(calls)
    nodes: list[Node] = []
    for index in range(draw(st.integers(0, 14))):
        nodes.append(draw(_nodes(index, calls)))

    def values(count: int) -> tuple[ValueRecord, ...]:
        if not nodes:
            return ()
        return tuple(draw(_values(len(nodes))) for _ in range(count))

    if not nodes:  # then nothing can refer to one
        for call in calls:
            call.update(inputs=0, outputs=0, hidden=0)
    records = tuple(CallRecord(**{**call, **{side: values(call[side]) for side in ("inputs", "outputs", "hidden")}}) for call in calls)
    some_call = st.integers(-1, len(calls) - 1)
    users = st.lists(some_call, max_size=2).map(tuple)
    some = st.lists(st.integers(0, len(nodes) - 1), max_size=2).map(tuple) if nodes else st.just(())
    cuts = st.lists(st.builds(BreakRecord, TEXTS, TEXTS, some_call, some, some), max_size=1).map(tuple)
    return Graph(
        tuple(nodes), records, values(draw(st.integers(0, 2))), draw(TEXTS), draw(st.integers(0, 9)), draw(st.integers(0, 9)),
        tuple(draw(st.lists(TEXTS, max_size=2))), tuple(draw(st.lists(st.tuples(TEXTS, users), max_size=2))), draw(cuts),
    )  # fmt: skip


@st.composite
def _nodes(draw: Draw, index: int, calls: list[dict[str, Any]]) -> Node:
    leaving = [i for i, c in enumerate(calls) if c["layer"] or index]
    kinds = ["input", "parameter", "buffer", "constant", "unknown", "empty"]
    kinds += ["op"] * 5 * (index > 0) + ["call"] * 4 * bool(leaving)
    kind = draw(st.sampled_from(kinds))
    edge = st.integers(-index, index - 1)
    parents: tuple[int, ...] = ()
    name, call, port = draw(TEXTS), draw(st.integers(-1, len(calls) - 1)), -1
    if kind == "op":
        parents = tuple(draw(st.lists(edge, min_size=1, max_size=3 if name else 1)))
    elif kind == "call":
        call = draw(st.sampled_from(leaving))
        port = draw(st.integers(-1, calls[call]["outputs"] - 1))
        parents = () if calls[call]["layer"] else (draw(edge),)
    elif kind == "input":
        port = draw(st.integers(-1, calls[call]["inputs"] - 1)) if call >= 0 else draw(st.integers(-1, 3))
    order, shape = draw(st.integers(-1, 99)), draw(st.none() | SHAPES)
    return Node(kind, parents, name, call, port, draw(TEXTS), order, shape, draw(TEXTS), draw(TEXTS), draw(st.booleans()))


@st.composite
def _values(draw: Draw, nodes: int) -> ValueRecord:
    used = draw(st.sampled_from([True, False, None]))
    return ValueRecord(draw(TEXTS), draw(SHAPES), draw(TEXTS), draw(TEXTS), draw(st.integers(0, nodes - 1)), used)


@st.composite
def lineages(draw: Draw) -> Lineage:
    """A lineage of any graph, in part collapsed."""
    graph = draw(graphs())
    containers = [i for i, call in enumerate(graph.calls) if not call.layer]
    return Lineage(graph, draw(st.sets(st.sampled_from(containers))) if containers else ())


# -- fake graphs for the walker --------------------------------------------------------------------------------------------------------


class Fake(NamedTuple):
    """What `Ways` is given."""

    roles: list[int]
    parents: list[tuple[int, ...]]
    grads: list[bool]


@st.composite
def fakes(draw: Draw, most: int = 14) -> Fake:
    """Any graph of roles and edges, parents before children; edges lean to near nodes, so that ways grow long and meet again."""
    roles: list[int] = []
    parents: list[tuple[int, ...]] = []
    for index in range(draw(st.integers(1, most))):
        ends = [DATA, LEAF, CONSTANT]
        role = draw(st.sampled_from([*ends, OPERATION, OPERATION, OPERATION, OPERATION, PASS] if index else ends))
        node = st.integers(max(0, index - 4), index - 1) | st.integers(0, index - 1)
        edge = st.tuples(node, st.booleans()).map(lambda e: e[0] if e[1] else ~e[0])
        roles.append(role)
        parents.append(() if role >= DATA else tuple(draw(st.lists(edge, min_size=1, max_size=1 if role == PASS else 3))))
    return Fake(roles, parents, [draw(st.booleans()) for _ in roles])


@st.composite
def passes(draw: Draw) -> Lineage:
    """A lineage as a forward pass would leave it: layers that read values made before them, operations of two containers in between."""
    fake = draw(fakes(18))
    kinds = {LEAF: "parameter", CONSTANT: "constant", OPERATION: "op", PASS: "op"}
    calls = [CallRecord(p, 0, "Net", False, i - 1, "", 0, 0, True, False, (), ()) for i, p in enumerate(["", "block"])]
    nodes: list[Node] = []
    for number, (role, parents, grad) in enumerate(zip(*fake, strict=True)):
        if role != DATA:
            name = draw(st.sampled_from(["add", "add", "mul"])) if role == OPERATION else "" if role == PASS else f"leaf{number}"
            place = draw(st.sampled_from([0, 0, 1]))
            nodes.append(Node(kinds[role], parents, name, place, order=number, grad=grad or role < DATA))
            continue
        read = draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else []
        inputs = tuple(ValueRecord("x", (), "", "", node) for node in read)
        outputs = (ValueRecord("", (), "", "", number),)
        calls.append(CallRecord(f"l{number}", 0, "Linear", True, 0, "", 0, 0, True, False, inputs, outputs))
        nodes.append(Node("call", (), "", len(calls) - 1, 0, grad=grad))
    ends = draw(st.lists(st.integers(0, len(nodes) - 1), max_size=1)) + [len(nodes) - 1]
    return Lineage(Graph(tuple(nodes), tuple(calls), tuple(ValueRecord("", (), "", "", n) for n in ends), "Net", 0, 0))
