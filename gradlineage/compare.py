"""What changed between two lineages: calls and joins that came or went, and tensors that are fed from elsewhere. Needs no torch.

Calls, joins and output become `_Item`s; those of one module or operation are paired with the other lineage's, then what feeds a pair is compared.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradlineage.errors import LineageError, a_kind
from gradlineage.lineage import Flow, Lineage
from gradlineage.steps import braced
from gradlineage.tables import REARRANGING

__all__ = ["Difference", "Reshaped", "Retyped", "Rewired", "diff"]

_RUN = 4  # from so many on, lines that say the same are folded
_STRAY = 100  # so many calls of the shorter sequence may be without a partner before an alignment gives up


@dataclass(frozen=True, slots=True)
class Rewired:
    """A tensor that is fed by something else.

    Attributes:
        label: the call or join that reads it, as the second lineage labels it; ``output`` for what is returned.
        input: the argument, lists as a whole; ``hidden`` for what came by another door; empty for the only input of a call and for joins.
        was, now: what feeds it, one step back, such as ``relu ← bn1``; ``⇠`` where no gradient flows back because something in the model
            stops it, parameters and buffers in brackets. Empty where the one lineage has no such input.
    """

    label: str
    input: str
    was: tuple[str, ...]
    now: tuple[str, ...]

    def __str__(self) -> str:
        place = f"({self.input})" if self.input and not self.input.startswith("[") else self.input
        return f"{self.label}{place}: was {', '.join(self.was) or 'nothing'}, now {', '.join(self.now) or 'nothing'}"


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A layer call or join whose output tensors have other sizes, such as ``(1, 10)``, or dtypes, such as ``(1, 10) float16``."""

    label: str
    was: str
    now: str


@dataclass(frozen=True, slots=True)
class Retyped:
    """A layer call whose module is of another class."""

    label: str
    was: str
    now: str


@dataclass(frozen=True, slots=True)
class Difference:
    """What `diff` found; false where that is nothing. ``str`` of it is meant to be read.

    Attributes:
        added, removed: labels of the calls (layers and containers) and joins that only the second or only the first lineage has.
        rewired: tensors fed by something else, where both lineages have the call or join that reads them.
        retyped: layer calls of a module that is of another class.
        reshaped: layer calls and joins with other output shapes or dtypes.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    rewired: tuple[Rewired, ...] = ()
    retyped: tuple[Retyped, ...] = ()
    reshaped: tuple[Reshaped, ...] = ()
    _calls: tuple[str, ...] = field(default=(), repr=False, compare=False)  # what is added and removed, as it is printed

    def __bool__(self) -> bool:
        return any((self.added, self.removed, self.rewired, self.retyped, self.reshaped))

    def __str__(self) -> str:
        counts = ((len(getattr(self, name)), name) for name in ("added", "removed", "rewired", "retyped", "reshaped"))
        head = ", ".join(f"{count:,} {name}" for count, name in counts if count)
        changes = [*map(str, self.rewired), *(f"{c.label}: {c.was} → {c.now}" for c in self.retyped)]
        changes += (f"{c.label}: output {c.was} → {c.now}" for c in self.reshaped)
        return "\n".join(map(_clean, (head or "no difference", *_fold(self._calls), *_gather(_fold(changes)))))


def diff(a: Lineage, b: Lineage) -> Difference:
    """What one has to change in ``a`` to get ``b``: calls and joins, what feeds them, classes of layers, shapes and dtypes of what they return.

    Calls are taken for the same by path and number, and where a path is called more often in one of the two, by what feeds them, so that a loop
    that runs longer is some added calls and nothing else. Operations that only rearrange (``view``, ``permute``, slices) do not count, nor do
    parameters, devices, lines of code and the order in which independent calls run. What lies in a collapsed container is not looked at.

    Args:
        a, b: any two lineages, of different models, from files or collapsed as may be.

    Raises:
        LineageError: one of them is no lineage.

    Example:
        >>> import torch, gradlineage
        >>> from gradlineage.compare import diff
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> other = torch.nn.Sequential(net[0], torch.nn.Tanh())
        >>> print(diff(*(gradlineage.trace(model, torch.ones(2, 3)) for model in (net, other))))
        1 removed, 1 rewired, 1 retyped
        - 2 (Linear)
        ~ output: was 2, now 1
        ~ 1: ReLU → Tanh
    """
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, Lineage):
            raise LineageError(f"diff(): {name} is {a_kind(value)}, expected a Lineage: pass trace(...) or Lineage.load(path)")
    _pair(before := _items(a), after := _items(b))
    pairs = [(y.partner, y) for y in after if y.partner is not None and y.is_layer and y.partner.is_layer]
    added, removed = ([item for item in items if item.partner is None] for items in (after, before))
    return Difference(
        added=tuple(item.label for item in added),
        removed=tuple(item.label for item in removed),
        rewired=tuple(found for x, y in pairs for found in _rewired(x, y)),
        retyped=tuple(Retyped(y.label, x.type, y.type) for x, y in pairs if x.type != y.type),
        reshaped=tuple(found for x, y in pairs for found in _reshaped(x, y)),
        _calls=(*_outline("+", added), *_outline("-", removed)),
    )


class _Link(NamedTuple):
    """What feeds a tensor: a call or join (None: a leaf), all else that is compared, and how it reads."""

    origin: _Item | None
    facts: tuple[Hashable, ...]
    text: str
    group: tuple[int, ...]  # of an operand, the folded joins in which it met others before


@dataclass(slots=True, eq=False, repr=False)
class _Item:
    """A call, a join or the output. ``is_layer`` for all but containers: what enters one of those enters a layer within."""

    label: str
    type: str
    path: str  # of a join, that of the container
    op: str  # empty for calls
    above: _Item | None  # the container call in which it ran
    clock: tuple[int, int]  # when it ran: calls begun by then, and for joins their number
    is_layer: bool = True
    outputs: Sequence[Flow] = ()
    inputs: dict[str, list[tuple[_Link, ...]]] = field(default_factory=dict)  # per argument, the links of each of its tensors
    where: str = ""  # of a join, the line of code
    later: _Item | None = None  # the next one of its group
    partner: _Item | None = None  # the one of the other lineage that is taken for the same
    group: tuple[str, str] = ("", "")  # what calls of one module have in common, and joins of one operation in the calls of one container
    name: Hashable = None  # the same for both of a pair, before that the path

    def __post_init__(self) -> None:
        self.name = re.sub(r"^(<.*):\d+>", r"\1>", self.path)  # the line of an unregistered module may have moved
        self.group = str(self.name), self.op

    @property
    def home(self) -> Hashable:
        return self.above and self.above.name

    @property
    def looks(self) -> Hashable:
        """What it looks like from near by: where it ran and what fed it, whichever call of that."""
        fed = (
            (name, link.origin and link.origin.group, link.facts)
            for name, flows in self.inputs.items()
            for links in flows
            for link in links
        )
        return self.home, *fed


def _items(lineage: Lineage) -> list[_Item]:
    """In running order, the output last."""
    view, calls = lineage._view, lineage._graph.calls
    found: dict[tuple[str, int], _Item] = {}
    flows: list[tuple[_Item, str, Flow]] = []
    for call in lineage.calls:
        index, is_layer = call._index, call.kind == "layer"
        above = found.get(("call", calls[index].parent))
        item = found["call", index] = _Item(call.label, call.type, call.path, "", above, (index, 0), is_layer, call.outputs)
        if is_layer:
            flows += [(item, f.name, f) for f in call.inputs] + [(item, "hidden", f) for f in call.hidden]
    begun = -1
    for number, join in enumerate(lineage.joins, 1):
        index, container = join._index, view.call_of(join._index)
        fed = (r.atom for r in view.incoming("join", index))
        begun = max((begun, container, *(view.leaving(atom)[0] for atom in fed if view.of_layer(atom))))
        path, above = calls[container].path if container >= 0 else "", found.get(("call", container))
        item = found["join", index] = _Item(join.label, "", path, join.op, above, (begun, number), outputs=join.outputs, where=join.where)
        flows += [(item, "", f) for f in join.inputs]
    output = found["output", 0] = _Item("output", "", "", "(output)", None, (len(calls), 0))
    flows += [(output, f.name, f) for f in lineage.outputs]
    for item, name, flow in flows:
        item.inputs.setdefault(re.sub(r"(\[\d+\])+$", "", name), []).append(tuple(_links(flow, found)))
    items = sorted(found.values(), key=lambda item: item.clock)
    latest: dict[tuple[str, str], _Item] = {}
    for item in reversed(items):
        item.later = latest.get(item.group)
        latest[item.group] = item
    return items


def _links(flow: Flow, found: dict[tuple[str, int], _Item]) -> Iterator[_Link]:
    view, unused = flow._lineage._view, flow.used is False
    group = view.group(*flow._key) if flow._key[1] >= 0 else ()
    for reference in flow._references:
        node, label = view.graph.nodes[reference.atom], view.label(reference.atom)
        origin, place = None, label  # leaves are told apart by their labels
        if view.is_join(reference.atom):
            origin, place = found["join", reference.atom], ""
        elif view.of_layer(reference.atom):
            call, port = view.leaving(reference.atom)
            origin, place = found["call", call], str(port) if len(view.graph.calls[call].outputs) > 1 else "0"
        elif node.kind in ("parameter", "buffer"):
            label = f"[{label}]"
        ops = tuple(op for op in view.ops(reference) if op not in REARRANGING)
        stopped = view.stopped(reference.atom, reference.differentiable)
        arrow = "⇠ " if stopped else "← " if ops else ""
        text = f"{' ← '.join(reversed(ops))} {arrow}{label}".lstrip() + " (unused)" * unused
        yield _Link(origin, (place, ops, stopped, unused, group), text, group)


def _pair(a: Iterable[_Item], b: Iterable[_Item]) -> None:
    """Find partners: calls by path, then joins by the container call in which they ran."""
    calls = _together([i for i in a if not i.op], [i for i in b if not i.op], lambda item: item.group)
    # containers before what is in them, and in an order that is the same from both sides
    calls.sort(key=lambda two: (two[0][0].is_layer and two[1][0].is_layer, len(two[0]) != len(two[1]), two[0][0].group))
    for here, there in calls:
        _meet(here, there)
    for here, there in _together([i for i in a if i.op], [i for i in b if i.op], lambda item: (item.home, item.group)):
        lines = [{item.where for item in items} for items in (here, there)]
        one = lines[0] <= lines[1] or lines[1] <= lines[0]  # one version of the code: a line is itself
        for xs, ys in _together(here, there, lambda item: item.where) if one else [(here, there)]:
            _meet(xs, ys)


def _together(a: Iterable[_Item], b: Iterable[_Item], sign: Callable[[_Item], Hashable]) -> list[tuple[list[_Item], list[_Item]]]:
    groups: defaultdict[Hashable, tuple[list[_Item], list[_Item]]] = defaultdict(lambda: ([], []))
    for side, items in enumerate((a, b)):
        for item in items:
            groups[sign(item)][side].append(item)
    return [(here, there) for here, there in groups.values() if here and there]


def _meet(here: list[_Item], there: list[_Item]) -> None:
    """Pair the members of a group: one to one where they are equally many, else in order those that look the same, and then as they come."""
    if len(here) > len(there):
        here, there = there, here
    pairs = list(zip(here, there, strict=False))
    if len(here) < len(there):
        pairs = [(here[x], there[y]) for x, y in _common([item.looks for item in here], [item.looks for item in there])]
        taken = {item for pair in pairs for item in pair}
        rest = _together((i for i in here if i not in taken), (i for i in there if i not in taken), lambda item: item.home)
        pairs += [pair for xs, ys in rest for pair in zip(xs, ys, strict=False)]
    for x, y in pairs:
        x.partner, y.partner = y, x
        x.name = y.name = object()


def _common(xs: Sequence[Hashable], ys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Places in which two sequences agree, in order and as many as can be; ``xs`` is the shorter (Wu, Manber, Myers and Miller, 1990).

    ``far[k]`` is how far into ``ys`` one comes on diagonal ``k = y - x``, and the runs of agreement on the way. Each round leaves one more of ``xs``.
    """
    lead = len(ys) - len(xs)
    far: defaultdict[int, tuple[int, Any]] = defaultdict(lambda: (-1, None))
    for stray in range(min(len(xs), _STRAY) + 1):
        for k in (*range(-stray, lead), *range(lead + stray, lead - 1, -1)):
            y, runs = max((far[k - 1][0] + 1, far[k - 1][1]), far[k + 1], key=lambda reached: reached[0])
            start = y
            while y < len(ys) and y - k < len(xs) and xs[y - k] == ys[y]:
                y += 1
            far[k] = y, (start, y, k, runs) if y > start else runs
        if far[lead][0] >= len(ys):
            break
    found, runs = [], far[lead][1]
    while runs is not None:
        start, stop, k, runs = runs
        found += [(y - k, y) for y in range(start, stop)]
    return found


def _rewired(x: _Item, y: _Item) -> Iterator[Rewired]:
    """The inputs of a pair that are fed by something else."""
    names = dict.fromkeys((*x.inputs, *y.inputs))
    for name in names:
        was, now = x.inputs.get(name, []), y.inputs.get(name, [])
        if len(was) != len(now) or not all(_agree(x, p, y, q) for p, q in zip(was, now, strict=True)):
            told = {p.text: p.origin for links in was for p in links}
            twice = any(q.text in told and not _same(told[q.text], q.origin) for links in now for q in links)  # one label, two calls
            yield Rewired(y.label, name if len(names) > 1 else "", _texts(was, twice), _texts(now, twice))


def _agree(x: _Item, was: tuple[_Link, ...], y: _Item, now: tuple[_Link, ...]) -> bool:
    """Whether ``x`` gets from its links what ``y`` gets from its."""
    facts = [p.facts for p in was] == [q.facts for q in now]
    return facts and all(_same(p.origin, q.origin) or _last(x, p.origin, y, q.origin) for p, q in zip(was, now, strict=True))


def _same(p: _Item | None, q: _Item | None) -> bool:
    return p is q if p is None or q is None else p.partner is q  # leaves are told apart by their labels


def _last(x: _Item, p: _Item | None, y: _Item, q: _Item | None) -> bool:
    """The last step of a loop that runs longer: one of them has no partner, so that it is listed as added or removed, and that says it all."""
    if p is None or q is None or (p.partner and q.partner) or p.group != q.group or (p.op and p.where != q.where):
        return False
    return all(origin.later is None or origin.later.clock >= reader.clock for origin, reader in ((p, x), (q, y)))


def _texts(tensors: list[tuple[_Link, ...]], across: bool) -> tuple[str, ...]:
    """How an input reads: its links, or where it is a list, its tensors. ``across``: with what each call is in the other lineage."""

    def text(link: _Link) -> str:
        partner = link.origin and link.origin.partner
        if not across or link.origin is None or (partner and partner.label == link.origin.label):
            return link.text
        return f"{link.text} ({f'{partner.label} in' if partner else 'not in'} the other)"

    parts = [tuple(map(text, links)) for links in tensors]
    groups = [links[0].group if links else () for links in tensors]
    return parts[0] if len(parts) == 1 else tuple(braced([*map(" & ".join, parts)], groups))


def _reshaped(x: _Item, y: _Item) -> Iterator[Reshaped]:
    was, now = ([(f.shape, f.dtype) for f in item.outputs] for item in (x, y))
    if was != now:
        typed = {dtype for _, dtype in was} != {dtype for _, dtype in now} or [shape for shape, _ in was] == [shape for shape, _ in now]
        texts = [[f"{'?' if shape is None else shape} {dtype * typed}" for shape, dtype in tensors] for tensors in (was, now)]
        yield Reshaped(y.label, *(", ".join(map(str.rstrip, tensors)).replace("'", "") or "none" for tensors in texts))


def _outline(mark: str, items: Iterable[_Item]) -> Iterator[str]:
    """A line for each call and join that only one lineage has; what ran in such a container is named in the container's line."""
    hosts: dict[_Item | None, _Item] = {}
    inside: defaultdict[_Item, list[str]] = defaultdict(list)
    for item in items:
        host = hosts[item] = hosts.get(item.above, item)
        if host is not item and item.is_layer:
            inside[host].append(f"{item.path}:{item.op}".removesuffix(":").removeprefix(host.path).lstrip("."))
    for item in dict.fromkeys(hosts.values()):
        names = _listed([f"{name} ×{count}" if count > 1 else name for name, count in Counter(inside[item]).items()], 2 * _RUN)
        title = f" ({item.type})" if item.type not in ("", item.label) and not item.label.startswith("<") else ""
        yield f"{mark} {item.label}{title}{f' with {names}' if names else ''}"


def _fold(lines: Iterable[str]) -> Iterator[str]:
    """Lines whose numbers go on as they began, and that are alike in all else, as one: ``+ cell[3–499] (LSTMCell) ×497``."""
    runs: list[list[list[str]]] = []
    latest: dict[tuple[str, ...], list[list[str]]] = {}
    for line in lines:
        parts = re.split(r"([0-9]{1,9})", line)  # words and, in odd places, numbers
        run = latest.get(tuple(parts[::2]), [])
        if not run or (len(run) > 1 and _steps(run[-1], parts) != _steps(run[-2], run[-1])):
            run = latest[tuple(parts[::2])] = [run.pop()] if len(run) == 2 else []
            runs.append(run)
        run.append(parts)
    for run in runs:
        yield from [_span(run)] if len(run) >= _RUN else map("".join, run)


def _steps(parts: list[str], following: list[str]) -> list[int]:
    return [int(y) - int(x) for x, y in zip(parts[1::2], following[1::2], strict=True)]


def _span(run: list[list[str]]) -> str:
    found = list(run[0])
    for place, step in enumerate(_steps(run[0], run[1])):
        at = 2 * place + 1
        if step:
            span = f"{run[0][at]}{'–' if step == 1 else f', {run[1][at]} … '}{run[-1][at]}"
            found[at] = span if found[at - 1].endswith("[") and found[at + 1].startswith("]") else f"{{{span}}}"
    return f"{''.join(found)} ×{len(run)}"


def _gather(lines: Iterable[str]) -> Iterator[str]:
    """Of many labels the same is said in one line."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for label, _, rest in (line.partition(": ") for line in lines):
        alike[rest].append(label)
    for rest, labels in alike.items():
        yield from (f"~ {label}: {rest}" for label in (labels if len(labels) < _RUN else [_listed(labels, _RUN - 1)]))


def _listed(texts: Sequence[str], most: int) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most:,} more" if len(texts) > most else "")


def _clean(line: str) -> str:
    """A line on one line of a terminal, whatever is in its names."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
