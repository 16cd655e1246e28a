"""What hypothesis makes: graphs that a file may hold, fake graphs for the walker, models together with their right answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from hypothesis import strategies as st

from gradlineage.graph import BreakRecord, CallRecord, Graph, Node, ValueRecord
from gradlineage.lineage import Lineage
from gradlineage.walk import CONSTANT, DATA, LEAF, OPERATION, PASS

__all__ = [
    "COARSE", "FINE", "GRAINS", "LAYERS", "ROWS", "CallTruth", "Content", "Fake", "Program", "Spec", "Step", "Term",
    "fakes", "graphs", "lineages", "passes", "programs",
]  # fmt: skip

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
    roles = draw(st.lists(st.sampled_from([DATA, DATA, LEAF, CONSTANT]), min_size=1, max_size=4))
    parents: list[tuple[int, ...]] = [() for _ in roles]
    for index in range(len(roles), draw(st.integers(len(roles), most))):
        role = draw(st.sampled_from([OPERATION, OPERATION, OPERATION, OPERATION, PASS, DATA, LEAF, CONSTANT]))
        node = st.integers(max(0, index - 4), index - 1) | st.integers(0, index - 1)
        count = 0 if role >= DATA else 1 if role == PASS else draw(st.sampled_from([2, 1, 3]))
        nodes = [draw(node) for _ in range(count)]
        roles.append(role)
        parents.append(tuple(n if draw(st.sampled_from([True, True, False])) else ~n for n in nodes))
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
    read_already = {p if p >= 0 else ~p for node in nodes for p in node.parents} | {v.node for call in calls for v in call.inputs}
    ends = draw(st.lists(st.integers(0, len(nodes) - 1), max_size=1)) + [
        n for n in range(len(nodes)) if n not in read_already
    ]  # all of it is alive
    return Lineage(Graph(tuple(nodes), tuple(calls), tuple(ValueRecord("", (), "", "", n) for n in ends), "Net", 0, 0))


# -- programs, each with its right answer ----------------------------------------------------------------------------------------------
#
# A program is a list of steps over a list of live tensors, some of which call modules, some of which are programs themselves. While a step
# is drawn it is also carried out on paper: every tensor there has the sources that the rules say it has. Nothing here knows torch.

FINE, COARSE = 0, 1  # layers as recorded; the root's own children as layers
GRAINS = (FINE, COARSE)
ROWS = 4


class Term(NamedTuple):
    """A source: ``call`` of a module by number, ``input`` by place, ``parameter`` and ``buffer`` by module and name, ``constant``."""

    kind: str
    what: int | tuple[int, str] = 0
    nth: int = 0
    port: int | None = None


class Content(NamedTuple):
    """Sources of a tensor in order. ``may`` are those that the rules neither ask for nor forbid."""

    must: tuple[Term, ...]
    may: frozenset[Term] = frozenset()


class Step(NamedTuple):
    """One line of a program: what is done with which live tensors. What it makes is appended to them."""

    kind: str
    args: tuple[int, ...] = ()
    how: int = 0
    module: int = -1
    inner: tuple[Step, ...] = ()
    name: str = ""


@dataclass
class Spec:
    """A module of the model: what it is, which block registers it, and for a block its program."""

    kind: str
    owner: int
    steps: list[Step] = field(default_factory=list)
    returns: tuple[int, ...] = ()
    style: int = 0  # of what a block returns: tensor or tuple, dict, list
    parameters: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    again: bool = False  # may be called with other tensors


Grained = tuple[tuple[Content, ...], tuple[Content, ...]]


class CallTruth(NamedTuple):
    """What is true of one call, per grain where it is in view."""

    module: int
    nth: int
    layer: tuple[bool, bool]
    visible: tuple[bool, bool]
    inputs: Grained
    outputs: Grained


class Program:
    """A model as plain data, with the right answer.

    Attributes:
        specs: its modules by number, 0 the root.
        inputs: ``float`` or ``int`` for each.
        calls: what is true of every call, as they begin.
        outputs: per grain, the sources of what the root returns.
        writes: whether anything is written in place.
        passes: whether a module hands an input through.
    """

    def __init__(self, paper: Simulation, inputs: tuple[str, ...], outputs: Grained) -> None:
        self.specs, self.calls, self.inputs, self.outputs = paper.specs, paper.calls, inputs, outputs
        self.writes, self.passes = paper.writes, paper.passes

    def __repr__(self) -> str:
        """The program as it could be written."""
        found = [f"inputs {self.inputs}"]
        for number, spec in self.specs.items():
            found.append(f"module {number}: {spec.kind} in {spec.owner}")
            found += [f"    {line}" for line in _listing(spec.steps)]
            if spec.kind in ("block", "quiet"):
                found.append(f"    return {spec.returns} style {spec.style}")
        return "\n".join(found)


def _listing(steps: Iterable[Step]) -> list[str]:
    found = []
    for step in steps:
        module = f" module {step.module}" if step.module >= 0 else ""
        found.append(f"{step.kind}{step.args} how={step.how}{module} {step.name}".rstrip())
        found += [f"    {line}" for line in _listing(step.inner)]
    return found


class Memory:
    """What tensors that share storage share. ``locked`` memory is not written: torch refuses it or its graph would be unreadable."""

    def __init__(self, section: int) -> None:
        self.tensors: list[Paper] = []
        self.locked = False
        self.section = section


class Paper:
    """A tensor on paper. ``through``: per grain, the module calls that handed it out, one after the other, over memory that others hold too."""

    def __init__(self, memory: Memory, kind: str, rows: int, whole: bool, content: list[Content], section: int) -> None:
        self.memory, self.kind, self.rows, self.whole = memory, kind, rows, whole
        self.content, self.section = content, section
        self.through: list[tuple[Term, ...]] = [(), ()]
        self.handed = [False, False]  # whether it ever was
        self.leaf = False  # a parameter: not to be handed through, written or returned
        self.aside = False  # detached: autograd does not see what is written to it, and believes in what was there
        memory.tensors.append(self)


def _contents(tensors: Iterable[Paper]) -> Grained:
    found = [(t.content[FINE], t.content[COARSE]) for t in tensors]
    return tuple(fine for fine, _ in found), tuple(coarse for _, coarse in found)


def merge(*contents: Content) -> Content:
    """In order, each once; constants only where nothing else is."""
    must = dict.fromkeys(t for c in contents for t in c.must)
    named = tuple(t for t in must if t.kind != "constant") or tuple(must)
    return Content(named, frozenset(t for c in contents for t in c.may))


def _beyond(through: tuple[Term, ...], line: tuple[Term, ...]) -> tuple[Term, ...]:
    """The calls that handed a tensor out after it parted from the way that another one took."""
    common = 0
    while common < min(len(through), len(line)) and through[common] == line[common]:
        common += 1
    return through[common:]


CONSTANT_TERM = Content((Term("constant"),))

#: Layers: number of tensors they take, what they return (``new``, ``int``, or the number of the argument handed through or viewed).
LAYERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "linear": (1, ("new",)), "own": (1, ("new",)), "two": (2, ("new",)), "keywords": (2, ("new",)), "listed": (3, ("new",)), "ignores": (2, ("new",)),
    "pair": (1, ("new", "new")), "dict": (2, ("new", "new")), "top": (1, ("new", "int")), "nested": (1, ("new", "new")),
    "identity": (1, ("same",)), "dropout": (1, ("same",)), "empty": (1, ("same",)), "half": (1, ("same", "new")), "second": (1, ("new", "same")),
    "flat": (1, ("view",)), "first": (1, ("part",)),
}  # fmt: skip
WRITERS = {"relu_": False, "scale_": False, "wipe_": True, "silent_": False}  # in place: whether what was there is dropped
OPERATIONS = {"unary": 1, "binary": 2, "nary": 3, "where": 3, "linear_f": 1, "weigh": 1, "stray": 1}
HOWS = {
    "unary": 8,
    "binary": 6,
    "nary": 4,
    "full_view": 5,
    "part_view": 3,
    "write_unary": 4,
    "write_binary": 3,
    "wipe": 3,
    "set_all": 2,
    "set_part": 3,
    "constant": 4,
}


class Simulation:
    """Carries steps out on paper, by the rules."""

    def __init__(self, specs: dict[int, Spec]) -> None:
        self.specs = specs
        self.calls: list[CallTruth] = []
        self.times: Counter[int] = Counter()
        self.owner: list[Term | None] = [None, None]  # per grain, the layer call we are in
        self.depth = 0
        self.section = 0  # number of the no_grad part we are in, 0 outside
        self.sections = 0
        self.clock = 0
        self.written: dict[int, int] = {}  # id(memory) -> when it was last written
        self.made: dict[int, int] = {}  # id(paper) -> when it was made
        self.writes = self.passes = False

    # tensors

    def fresh(self, kind: str, rows: int, *operands: Content | Paper) -> Paper:
        """A tensor over memory of its own, computed from these."""
        content = [self._seen(g, [o.content[g] if isinstance(o, Paper) else o for o in operands]) for g in GRAINS]
        return self._note(Paper(Memory(self.section), kind, rows, True, content, self.section))

    def _seen(self, grain: int, operands: list[Content]) -> Content:
        owner = self.owner[grain]
        if owner is not None:
            return Content((owner,))
        found = merge(*operands)
        return found if found.must else CONSTANT_TERM

    def _note(self, paper: Paper) -> Paper:
        self.clock += 1
        self.made[id(paper)] = self.clock
        return paper

    def view(self, base: Paper, rows: int, whole: bool) -> Paper:
        content = [self._seen(g, [base.content[g]]) for g in GRAINS]
        if self.section and base.memory.section != self.section:
            base.memory.locked = True
        made = Paper(base.memory, base.kind, rows, base.whole and whole, content, self.section)
        made.through = [(*base.through[g], *(content[g].must if self.owner[g] is not None else ())) for g in GRAINS]
        made.handed = [bool(t) or h for t, h in zip(made.through, base.handed, strict=True)]
        made.aside = base.aside
        return self._note(made)

    def write(self, target: Paper, operands: list[Paper], drops: bool, part: bool = False) -> None:
        """The last writer is the producer; a write into part of a tensor adds to all of its memory; a full one drops what was there.

        A tensor that a module had handed out keeps that module beside what was written since.
        """
        self.writes = True
        whole = target.whole and not part
        for g in GRAINS:
            before = {id(t): t.content[g] for t in target.memory.tensors}
            line = target.through[g]
            everything = frozenset(t for c in before.values() for t in (*c.must, *c.may))
            owner = self.owner[g]
            new = merge(*(o.content[g] for o in operands)) if owner is None else Content((owner,))
            read = Content(()) if drops or owner is not None else before[id(target)]  # what the write itself read of the memory
            for tensor in target.memory.tensors:
                own = before[id(tensor)]
                if whole and drops:
                    found = new if new.must else CONSTANT_TERM
                elif whole:
                    found = merge(Content(_beyond(tensor.through[g], line)[-1:]), read, new)
                elif tensor is target and not part and (drops or owner is not None):
                    found = merge(new if new.must else CONSTANT_TERM)
                else:
                    found = merge(own, read, new)
                apart = (
                    len({frozenset(c.must) for c in before.values()}) > 1
                    or tensor.handed[g]
                    or (tensor is target and not whole)
                    or target.aside
                )
                tensor.content[g] = Content(found.must, found.may | everything) if apart and not (whole and drops) else found
                if whole:  # what it holds now is all the writer's, but for those who handed it out since they parted
                    tensor.through[g] = () if drops else _beyond(tensor.through[g], line)
                elif tensor is target and drops and not part:
                    tensor.through[g] = ()  # nothing is left of what was handed out
        self.clock += 1
        self.written[id(target.memory)] = self.clock

    # calls

    def call(self, module: int, args: list[Paper], layer: bool, body: Callable[[], list[Paper]]) -> list[Paper]:
        """Enter a module, run its body, leave it. Gives the tensors as the caller gets them."""
        nth = self.times[module]
        self.times[module] += 1
        index = len(self.calls)
        self.calls.append(None)  # type: ignore[arg-type]
        visible = (self.owner[FINE] is None, self.owner[COARSE] is None)
        layers = (layer and visible[FINE], (layer or self.depth == 1) and visible[COARSE])
        inputs = _contents(args)
        before, start = list(self.owner), self.clock
        for g in GRAINS:
            if layers[g]:
                self.owner[g] = Term("call", module, nth)
        self.depth += 1
        made = body()
        self.depth -= 1
        self.owner = before
        left = [self._leave(t, Term("call", module, nth, port), layers, start) for port, t in enumerate(made)]
        self.calls[index] = CallTruth(module, nth, layers, visible, inputs, _contents(left))
        return left

    def _leave(self, tensor: Paper, term: Term, layers: tuple[bool, bool], start: int) -> Paper:
        """A module is the producer of what it returns: of a tensor it was given, only for whoever uses its return value."""
        made = self.made.get(id(tensor), 0) > start
        if not made and self.written.get(id(tensor.memory), 0) <= start:
            self.passes = True
            handed = Paper(tensor.memory, tensor.kind, tensor.rows, tensor.whole, list(tensor.content), tensor.section)
            handed.through, handed.handed, handed.aside = list(tensor.through), list(tensor.handed), tensor.aside
            tensor = self._note(handed)
            made = True
        older = self.made[id(tensor.memory.tensors[0])] <= start
        for g in GRAINS:
            if layers[g]:
                changed = self.written.get(id(tensor.memory), 0) > start
                tensor.content[g] = Content((term,), tensor.content[g].may if changed else frozenset())
                if made and older:
                    before = [t for t in tensor.through[g] if t.what != term.what or t.nth != term.nth]
                    tensor.through[g], tensor.handed[g] = (*before, term), True
        return tensor

    # steps

    def run(self, step: Step, live: list[Paper], block: int) -> None:
        args = [live[i] for i in step.args]
        first = args[0] if args else None
        kind = step.kind
        if kind == "layer":
            live += self.layer(step.module, args)
        elif kind == "block":
            live += self.block(step.module, args)
        elif kind == "no_grad":
            self.sections += 1
            self.section = self.sections
            for inner in step.inner:
                self.run(inner, live, block)
            self.section = 0
        elif kind == "parameter":
            live.append(self.leaf("parameter", block, step.name))
        elif kind == "buffer":
            live.append(self.leaf("buffer", block, step.name))
        elif kind == "constant":
            live.append(self.fresh("float", first.rows if first is not None else ROWS))
        elif kind in OPERATIONS:
            assert first is not None
            weights = [Content((Term("parameter", (block, n)),)) for n in step.name.split()]
            live.append(self.fresh("float", first.rows, *args, *weights))
        elif kind == "argmax":
            assert first is not None
            live.append(self.fresh("int", first.rows, first))
        elif kind == "take":
            live.append(self.fresh("float", args[1].rows, *args))
        elif kind == "embed_f":
            assert first is not None
            live.append(self.fresh("float", first.rows, first, Content((Term("parameter", (block, step.name)),))))
        elif kind == "same":
            live += args
        elif first is not None:
            self._memory(step, first, args, live)

    def _memory(self, step: Step, first: Paper, args: list[Paper], live: list[Paper]) -> None:
        kind = step.kind
        if kind == "full_view":
            live.append(self.view(first, first.rows, True))
            live[-1].aside = live[-1].aside or step.how == 2
        elif kind == "part_view":
            live.append(self.view(first, 2, False))
        elif kind == "chunk":
            live += [self.view(first, 2, False), self.view(first, 2, False)]
            first.memory.locked = True
        elif kind == "write_unary":
            self.write(first, [], drops=False)
        elif kind == "write_binary":
            self.write(first, args[1:], drops=False)
        elif kind == "wipe":
            self.write(first, [], drops=True)
        elif kind in ("copy", "set_all", "out"):
            self.write(first, args[1:], drops=True)
        elif kind == "set_part":
            self.write(first, args[1:], drops=True, part=True)
        else:
            raise AssertionError(kind)

    def leaf(self, kind: str, block: int, name: str) -> Paper:
        key = (kind, block, name)
        if key not in self._leaves:
            content = [Content((Term(kind, (block, name)),)) for _ in GRAINS]
            paper = Paper(Memory(0), "float", ROWS, True, content, 0)
            paper.leaf = kind == "parameter"
            paper.memory.locked = kind == "parameter"
            self.made[id(paper)] = 0
            self._leaves[key] = paper
        return self._leaves[key]

    @cached_property
    def _leaves(self) -> dict[tuple[str, int, str], Paper]:
        return {}

    def layer(self, module: int, args: list[Paper]) -> list[Paper]:
        kind = self.specs[module].kind

        def body() -> list[Paper]:
            if kind == "embedding":
                return [self.fresh("float", args[0].rows)]
            if kind in WRITERS:
                self.write(args[0], [], drops=WRITERS[kind])
                return [] if kind == "silent_" else [self.fresh("float", args[0].rows)] if kind == "scale_" else [args[0]]
            made = []
            for what in LAYERS[kind][1]:
                if what == "same":
                    made.append(args[0])
                elif what in ("view", "part"):
                    made.append(self.view(args[0], args[0].rows if what == "view" else 2, what == "view"))
                else:
                    made.append(self.fresh("int" if what == "int" else "float", args[0].rows))
            return made

        return self.call(module, args, True, body)

    def block(self, module: int, args: list[Paper]) -> list[Paper]:
        spec = self.specs[module]

        def body() -> list[Paper]:
            live = list(args)
            for step in spec.steps:
                self.run(step, live, module)
            return [live[i] for i in spec.returns]

        return self.call(module, args, spec.kind == "quiet", body)


class _Writer:
    """Draws a program step by step, carrying each out on paper as it goes."""

    def __init__(self, draw: Draw, writes: bool) -> None:
        self.draw, self.writes = draw, writes
        self.specs: dict[int, Spec] = {}
        self.paper = Simulation(self.specs)

    def program(self) -> Program:
        kinds = tuple(self.draw(st.lists(st.sampled_from(["float", "float", "int"]), min_size=1, max_size=3)))
        live = []
        for place, kind in enumerate(kinds):
            content = [Content((Term("input", place),)) for _ in GRAINS]
            live.append(Paper(Memory(0), kind, ROWS, True, content, 0))
            self.paper.made[id(live[-1])] = 0
        self.new("block", -1)
        outputs = self.paper.call(0, live, False, lambda: self.body(0, list(live), self.draw(st.integers(1, 12)), 0))
        return Program(self.paper, kinds, _contents(outputs))

    def new(self, kind: str, owner: int) -> int:
        number = len(self.specs)
        self.specs[number] = Spec(kind, owner)
        return number

    def body(self, block: int, live: list[Paper], length: int, depth: int) -> list[Paper]:
        """Steps of a block, then what it returns."""
        spec = self.specs[block]
        self.steps(spec.steps, block, live, length, depth)
        if spec.kind == "block" and not any(s.kind in ("layer", "block") for s in _all(spec.steps)):
            if not (floats := self.floats(live)):
                self.do(spec.steps, block, live, Step("constant"))
                floats = self.floats(live)
            self.do(spec.steps, block, live, Step("layer", (floats[-1],), module=self.new("linear", block)))
        if block == 0 and (floats := self.floats(live)):  # many ways come together in the end
            self.do(spec.steps, block, live, Step("nary", self.several(live, 4, floats), 1))
            self.do(spec.steps, block, live, Step("layer", (len(live) - 1,), module=self.new("linear", block)))
        returnable = [i for i, t in enumerate(live) if not t.leaf and not (self.paper.section and t.memory.section != self.paper.section)]
        distinct = list({id(live[i]): i for i in returnable}.values())
        if not distinct:
            self.do(spec.steps, block, live, Step("constant"))
            distinct = [len(live) - 1]
        chosen = self.draw(st.lists(st.sampled_from(distinct[::-1]), min_size=1, max_size=3, unique=True))
        spec.returns, spec.style = tuple(chosen), self.draw(st.integers(0, 2))
        return [live[i] for i in chosen]

    def steps(self, into: list[Step], block: int, live: list[Paper], length: int, depth: int) -> None:
        for _ in range(length):
            kinds = self.possible(block, live, depth)
            self.do(into, block, live, None, self.draw(st.sampled_from(kinds)), depth)

    def do(self, into: list[Step], block: int, live: list[Paper], step: Step | None, kind: str = "", depth: int = 0) -> None:
        if step is None:
            step = self.one(block, live, kind, depth)
        if step.kind in ("block", "no_grad") and step.how:  # carried out while it was drawn
            into.append(step._replace(how=0))
            return
        into.append(step)
        self.paper.run(step, live, block)

    # what can be done

    def floats(self, live: list[Paper], rows: int | None = None) -> list[int]:
        return [i for i, t in enumerate(live) if t.kind == "float" and rows in (None, t.rows)]

    def handed(self, live: list[Paper]) -> list[int]:
        """Tensors that a module may hand through: in a no_grad part only those made in it, elsewhere torch has no new tensor for them."""
        return [
            i for i in self.floats(live) if not live[i].leaf and (not self.paper.section or live[i].memory.section == self.paper.section)
        ]

    def writable(self, live: list[Paper]) -> list[int]:
        section = self.paper.section
        found = []
        for i in self.floats(live):
            tensor = live[i]
            mine = tensor.memory.section == section
            if not tensor.memory.locked and not tensor.leaf and (mine or (section and tensor.whole and tensor.section == 0)):
                found.append(i)
        return found if self.writes else []

    def possible(self, block: int, live: list[Paper], depth: int) -> list[str]:
        quiet = self.specs[block].kind == "quiet"
        floats, ints = self.floats(live), [i for i, t in enumerate(live) if t.kind == "int"]
        kinds = []
        if floats:
            kinds += [] if quiet else ["layer"] * 8 + ["block"] * 4 * (depth < 2)
            kinds += ["binary", "binary", "binary", "unary", "nary", "where", "linear_f", "weigh", "stray", "full_view", "same", "argmax"]
        kinds += ["constant", "parameter", "buffer"]
        if self.floats(live, ROWS):
            kinds += ["part_view", "chunk"]
        if ints:
            kinds += ["embed_f"] + ["take"] * bool(floats) + ["embed"] * 2 * (not quiet)
        if not self.paper.section and not quiet:
            kinds += ["no_grad"]
        if self.writable(live):
            kinds += ["write_unary", "write_binary", "write_binary", "wipe", "copy", "set_all", "set_part"] + ["writer"] * 3 * (not quiet)
            kinds += ["out"] * bool(self.paper.section)
        return kinds

    def pick(self, choices: list[int], back: int = 0) -> int:
        """The newest first, so that programs grow deep; ``back``: that many before it, so that operands differ."""
        newest = choices[::-1]
        turned = newest[back % len(newest) :] + newest[: back % len(newest)]
        return int(self.draw(st.sampled_from(turned)))

    def several(self, live: list[Paper], count: int, choices: list[int]) -> tuple[int, ...]:
        first = self.pick(choices)
        return (first, *(self.pick(self.floats(live, live[first].rows), back + 1) for back in range(count - 1)))

    def operand(self, live: list[Paper], target: int, rows: int) -> tuple[int, ...]:
        """A tensor to write into another: never one over the same memory."""
        choices = [i for i in self.floats(live, rows) if live[i].memory is not live[target].memory]
        return (self.pick(choices),) if choices else ()

    # one step

    def one(self, block: int, live: list[Paper], kind: str, depth: int) -> Step:
        floats = self.floats(live)
        how = self.draw(st.integers(0, HOWS[kind] - 1)) if kind in HOWS else 0
        if kind == "layer":
            return self.a_layer(block, live)
        if kind == "writer":
            target = self.pick(self.writable(live))
            return Step("layer", (target,), module=self.module(list(WRITERS), block))
        if kind == "embed":
            return Step("layer", (self.pick([i for i, t in enumerate(live) if t.kind == "int"]),), module=self.module(["embedding"], block))
        if kind == "block":
            return self.a_block(block, live, depth)
        if kind == "no_grad":
            return self.a_section(block, live, depth)
        if kind in ("parameter", "buffer"):
            return Step(kind, name=self.named(block, kind))
        if kind == "constant":
            return Step(kind, (self.pick(floats),) if floats else (), how if floats else 0)
        if kind in OPERATIONS:
            names = [self.named(block, "parameter") for _ in range({"linear_f": 2, "weigh": 1}.get(kind, 0))]
            count = OPERATIONS[kind] if kind != "nary" else self.draw(st.integers(1, 4))
            return Step(kind, self.several(live, count, floats), how, name=" ".join(names))
        if kind == "embed_f":
            return Step(kind, (self.pick([i for i, t in enumerate(live) if t.kind == "int"]),), name=self.named(block, "parameter"))
        if kind == "take":
            return Step(kind, (self.pick(floats), self.pick([i for i, t in enumerate(live) if t.kind == "int"])))
        if kind in ("part_view", "chunk"):
            return Step(kind, (self.pick(self.floats(live, ROWS)),), how)
        if kind in ("full_view", "argmax", "same"):
            return Step(kind, (self.pick(floats),), how)
        return self.a_write(live, kind, how)

    def a_write(self, live: list[Paper], kind: str, how: int) -> Step:
        target = self.pick(self.writable(live))
        tensor = live[target]
        if kind in ("write_unary", "wipe"):
            return Step(kind, (target,), how)
        if kind == "set_part":
            if tensor.rows != ROWS:
                return Step("write_unary", (target,))
            return Step(kind, (target, *self.operand(live, target, 2)), how)
        found = self.operand(live, target, tensor.rows)
        if kind == "out":
            found += self.operand(live, target, tensor.rows)
        return Step(kind, (target, *found), how) if found else Step("wipe", (target,))

    def module(self, kinds: list[str], block: int) -> int:
        """A module that is there already, or a new one."""
        there: list[int] = [n for n, spec in self.specs.items() if spec.kind in kinds]
        if there and self.draw(st.sampled_from([False, True])):
            return int(self.draw(st.sampled_from(there)))
        return self.new(self.draw(st.sampled_from(kinds)), block)

    def a_layer(self, block: int, live: list[Paper]) -> Step:
        handed = self.handed(live)
        square = [i for i in handed if live[i].rows == ROWS]
        kinds = [k for k, (_, makes) in LAYERS.items() if handed or not {"same", "view", "part"} & {*makes}]
        if not square:
            kinds.remove("first") if "first" in kinds else None
        module = self.module(kinds, block)
        count, makes = LAYERS[self.specs[module].kind]
        choices = square if "part" in makes else handed if {"same", "view"} & {*makes} else self.floats(live)
        return Step("layer", self.several(live, count, choices), module=module)

    def a_block(self, block: int, live: list[Paper], depth: int) -> Step:
        again = [n for n, spec in self.specs.items() if spec.again]
        plain = [i for i in self.floats(live, ROWS) if self._plain(live[i])]
        if again and plain and not self.paper.section and self.draw(st.booleans()):
            number = int(self.draw(st.sampled_from(again)))
            count = self.arity[number]
            distinct = list({id(live[i].memory): i for i in plain}.values())
            if len(distinct) >= count:
                return Step("block", tuple(self.draw(st.permutations(distinct)))[:count], module=number)
        number = self.new(self.draw(st.sampled_from(["block", "block", "quiet"])), block)
        args = tuple(self.draw(st.lists(st.sampled_from(self.floats(live)[::-1]), min_size=1, max_size=2)))
        papers = [live[i] for i in args]
        self.arity[number] = len(args)
        length = self.draw(st.integers(0 if self.specs[number].kind == "block" else 1, 4))
        live += self.paper.call(
            number, papers, self.specs[number].kind == "quiet", lambda: self.body(number, list(papers), length, depth + 1)
        )
        self.specs[number].again = not self.paper.section and all(t.rows == ROWS for t in papers)
        return Step("block", args, 1, number)

    @cached_property
    def arity(self) -> dict[int, int]:
        return {}

    def _plain(self, tensor: Paper) -> bool:
        """Nobody else holds its memory: whatever a block may do to an argument it may do to this one."""
        return (
            tensor.memory.tensors == [tensor] and not tensor.memory.locked and not tensor.leaf and tensor not in self.paper._leaves.values()
        )

    def a_section(self, block: int, live: list[Paper], depth: int) -> Step:
        inner: list[Step] = []
        self.paper.sections += 1
        self.paper.section = self.paper.sections
        self.steps(inner, block, live, self.draw(st.integers(1, 4)), depth)
        for tensor in live:  # views made without gradient forbid writes with it
            if tensor.section == self.paper.section and len(tensor.memory.tensors) > 1:
                tensor.memory.locked = True
        self.paper.section = 0
        return Step("no_grad", (), 1, inner=tuple(inner))

    def named(self, block: int, kind: str) -> str:
        names = self.specs[block].parameters if kind == "parameter" else self.specs[block].buffers
        if names and self.draw(st.sampled_from([False, True])):
            return str(self.draw(st.sampled_from(names)))
        names.append(f"{kind[0]}{len(names)}")
        return names[-1]


def _all(steps: Iterable[Step]) -> list[Step]:
    return [inner for step in steps for inner in (step, *_all(step.inner))]


@st.composite
def programs(draw: Draw, writes: bool | None = None) -> Program:
    """A model with its right answer. ``writes``: whether it may write in place; left open by default."""
    return _Writer(draw, draw(st.booleans()) if writes is None else writes).program()
