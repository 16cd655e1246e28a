"""What a picture shows, before any layout: nodes, wires and the containers around them. Needs no torch.

One visual language for every picture: what a node is shows in its shape, its family in its colour (Okabe and Ito's palette, lightened, in
different lightness for grey), and both in words. A wire is dashed where no gradient flows back because something stops it, and says what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gradlineage.compare import Difference, diff
from gradlineage.lineage import Call, Lineage
from gradlineage.tables import REARRANGING, share_of
from gradlineage.views.loops import containers_of, roll
from gradlineage.views.reading import Line, Reading
from gradlineage.views.rows import Entry, Row, entries_of, make_rows

__all__ = ["FAMILIES", "Drawing", "Spot", "Wire", "draw", "nested", "shown_families"]

#: Families of layers: words in class names, colour.
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "convolution": (("conv",), "#a9d3ee"),
    "attention": (("attention", "attn"), "#e3b5cf"),
    "recurrent": (("lstm", "gru", "rnn"), "#8fd3bf"),
    "normalization": (("norm",), "#ebebeb"),
    "activation": (("relu", "gelu", "silu", "elu", "tanh", "sigmoid", "softmax", "swish", "mish", "activation", "act"), "#f7e3a1"),
    "pooling": (("pool", "upsample", "interpolate", "shuffle"), "#c9b8e8"),
    "dropout": (("drop", "identity"), "#f8f8f8"),
    "embedding": (("embed",), "#d8cf9a"),
    "linear": (("linear", "mlp", "dense"), "#f3c491"),
}
_MOST_OPS = 3  # on a wire; of more the first and the last stand


@dataclass(frozen=True, slots=True)
class Spot:
    """A node.

    Attributes:
        key: what wires call it.
        kind: ``layer``, ``container`` (a collapsed one), ``join``, ``input``, ``output``, ``parameter``, ``buffer``, ``constant``, ``unknown`` or
            ``decision``.
        lines: what stands in it; the first is the label.
        family: of a layer, one of `FAMILIES`, or empty.
        within: keys of the containers around it, the outermost first.
        change: in a drawing of a difference ``added`` or ``removed``.
        where: ``file:line``.
        name: the label without the number of turns and the share that may stand behind it.
    """

    key: str
    kind: str
    lines: tuple[str, ...]
    family: str = ""
    within: tuple[str, ...] = ()
    change: str = ""
    where: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Wire:
    """A way from one node to another: the operations on it, whether gradient stops on it, how many turns of a loop it looks back."""

    source: str
    target: str
    text: str = ""
    stopped: bool = False
    back: int = 0
    share: float = 1.0
    change: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Nodes in reading order, wires, and per container key its label and class."""

    title: str
    spots: tuple[Spot, ...]
    wires: tuple[Wire, ...]
    containers: dict[str, str] = field(default_factory=dict)


def draw(lineage: Lineage, *, shapes: bool = False, decisions: bool = True, before: Lineage | None = None) -> Drawing:
    """What a picture of a lineage shows.

    Args:
        lineage: any lineage; collapse it to see less, `Lineage.roll` it to see loops as loops. A union shows shares.
        shapes: also the shapes of what layers and joins return.
        decisions: diamonds for the places where Python read a tensor's value.
        before: another lineage; what was added, removed or rewired since is marked.
    """
    maker = _Maker(lineage, shapes)
    maker.rows(decisions)
    maker.outputs()
    drawing = maker.drawing()
    return drawing if before is None else _compared(drawing, diff(before, lineage), draw(before, shapes=shapes, decisions=False))


class _Maker:
    def __init__(self, lineage: Lineage, shapes: bool) -> None:
        self.lineage, self.shapes = lineage, shapes
        self.spots: dict[str, Spot] = {}
        self.wires: dict[tuple[str, str, int], Wire] = {}
        self.containers: dict[str, str] = {}
        self.calls = {f"{c.path}[{c.nth}]": c for c in lineage.layers}

    def rows(self, decisions: bool) -> None:
        rows = make_rows(self.lineage, decisions=decisions, values=not self.lineage.rolled)
        around = containers_of(self.lineage, rows)
        self.reading = Reading(roll(rows, around) if self.lineage.rolled else rows)
        within = self._within(rows)
        loops: list[tuple[str, int]] = []  # those we are in, with their depths
        for number, line in enumerate(self.reading.lines):
            while loops and line.depth <= loops[-1][1]:
                loops.pop()
            if line.row is None:
                loops.append((f"loop {number}", line.depth))
                self.containers[loops[-1][0]] = f"loop ×{line.times}"
            else:
                self._line(number, line, within, tuple(key for key, _ in loops))

    def _within(self, rows: Sequence[Row]) -> dict[str, tuple[str, ...]]:
        """Per row key, the containers around it, the root left out."""
        found: dict[str, tuple[str, ...]] = {}
        chains: dict[Call | None, tuple[str, ...]] = {None: ()}
        for call in self.lineage.calls:
            if call.kind == "container":
                key = f"{call.path}[{call.nth}]"
                chains[call] = (*chains[call.parent], key) if call.parent is not None else ()
                self.containers[key] = f"{call.label} ({call.type})" + self._share(call.count)
        for call in self.lineage.layers:
            found[f"{call.path}[{call.nth}]"] = chains.get(call.parent, ())
        for join in self.lineage.joins:
            found[join.label] = chains.get(join.container, ())
        return found

    def _line(self, number: int, line: Line, within: dict[str, tuple[str, ...]], loops: tuple[str, ...]) -> None:
        row = line.row
        assert row is not None
        key = row.key or f"?{number}"
        title = row.label + (f" ×{line.times * row.times}" if line.times * row.times > 1 else "") + self._share(row.seen)
        call = self.calls.get(key)
        kind = "decision" if not row.key else "join" if not row.type else "layer"
        if call is not None and call._index in self.lineage._collapsed:
            kind = "container"
        named = not row.type or row.label.startswith("<")
        around = loops + (within.get(key) or within.get(key.partition("[")[0] + "[0]", ()))
        texts = (_decision(title) if kind == "decision" else [title]) + ([] if named else [row.type + (" (raised)" if row.failed else "")])
        if self.shapes and row.key:
            texts += dict.fromkeys("×".join(map(str, s)) for s in row.shapes if s)
        where = call.where if call is not None else ""
        family = _family(row.type) if kind == "layer" else ""
        self.spots[key] = Spot(key, kind, tuple(texts), family, around, where=where, name=row.label)
        position = 0
        for tensor in row.inputs:
            for entry in tensor.entries:
                back = line.back[position] if line.back else 0
                self._wire(entry, key, tensor.name if len(row.inputs) > 1 and row.type else "", tensor.used, back, row.seen)
                position += 1

    def outputs(self) -> None:
        for number, flow in enumerate(self.lineage.outputs):
            key = f"output{number}"
            name = f"output {flow.name}".strip()
            size = ["×".join(map(str, flow.shape))] if self.shapes and flow.shape else []
            self.spots[key] = Spot(key, "output", (name, *size))
            for entry in self.reading.entries(entries_of(flow, True)):
                self._wire(entry, key, "", True, 0, self.lineage.runs)

    def _wire(self, entry: Entry, target: str, argument: str, used: bool, back: int, seen: int) -> None:
        source = entry.key
        if not source or (source not in self.spots and source not in self.calls and entry.kind not in ("join", "call")):
            label = entry.label.removeprefix("first ") if back < 0 else entry.label  # that stands on the wire
            source = f"{entry.kind}:{label}" if entry.kind != "unknown" else f"unknown:{target}"
            if source not in self.spots:
                self.spots = {source: Spot(source, entry.kind, (label.removeprefix("input:"),)), **self.spots}
        ops = [op for op in entry.ops if op not in REARRANGING]
        if len(ops) > _MOST_OPS:
            ops = [ops[0], "…", ops[-1]]
        parts = [*ops, *([argument] if argument and not ops else [])]
        share = "" if entry.seen in (0, seen) else share_of(entry.seen, self.lineage.runs)
        turn = "first" if back < 0 else f"{back} before" if back > 1 else ""
        text = " ".join(filter(None, (turn, " → ".join(parts), "" if used else "(unused)" if parts else "unused", share)))
        made = Wire(source, target, text, entry.stopped, back, entry.seen / self.lineage.runs if entry.seen else 1.0)
        known = self.wires.get((source, target, back))
        if known is not None:  # two ways between the same two: one wire
            texts = ", ".join(dict.fromkeys(part or "as it is" for part in (known.text, text))) if known.text or text else ""
            made = replace(made, text=texts, stopped=known.stopped and entry.stopped, share=max(known.share, made.share))
        self.wires[source, target, back] = made

    def _share(self, seen: int) -> str:
        return "" if seen in (0, self.lineage.runs) else f" {share_of(seen, self.lineage.runs)}"

    def drawing(self) -> Drawing:
        used = {key for spot in self.spots.values() for key in spot.within}
        wires = tuple(w for w in self.wires.values() if w.source in self.spots)
        containers = {key: label for key, label in self.containers.items() if key in used}
        return Drawing(self.lineage.model, tuple(self.spots.values()), wires, containers)


def _decision(label: str) -> list[str]:
    """``? bool at net.py:8 is False`` on two lines, for a diamond."""
    kind, _, place = label.removeprefix("? ").partition(" at ")
    where, found, value = place.partition(" is ")
    return [f"{kind}{found}{value}", where]


def _family(kind: str) -> str:
    name = kind.lower()
    return next((family for family, (words, _) in FAMILIES.items() if any(word in name for word in words)), "")


def _compared(now: Drawing, difference: Difference, before: Drawing) -> Drawing:
    """Both in one: what is new, what is gone, and wires that were moved."""
    added, removed = set(difference.added), set(difference.removed)
    labels = {spot.key: _plain(spot) for spot in now.spots}
    spots = [replace(s, change="added") if _plain(s) in added else s for s in now.spots]
    gone = [s for s in before.spots if _plain(s) in removed and s.kind in ("layer", "container", "join")]
    spots += [replace(s, key=f"-{s.key}", change="removed", within=()) for s in gone]
    keys = {_plain(s): s.key for s in now.spots} | {_plain(s): f"-{s.key}" for s in gone}
    old = {s.key: _plain(s) for s in before.spots}
    rewired = {r.label for r in difference.rewired}
    was = {(old.get(w.source), old.get(w.target), w.text) for w in before.wires}
    wires = []
    for wire in now.wires:
        ends = labels[wire.source], labels[wire.target]
        touched = ends[0] in added or ends[1] in added or _target(ends[1]) in rewired
        wires.append(replace(wire, change="added") if touched and (*ends, wire.text) not in was else wire)
    is_now = {(labels[w.source], labels[w.target], w.text) for w in now.wires}
    for wire in before.wires:
        ends = old[wire.source], old[wire.target]
        lost = ends[0] in removed or ends[1] in removed or _target(ends[1]) in rewired
        if lost and (*ends, wire.text) not in is_now and ends[0] in keys and ends[1] in keys:
            wires.append(replace(wire, source=keys[ends[0]], target=keys[ends[1]], change="removed"))
    return Drawing(now.title, tuple(spots), tuple(wires), now.containers)


def _plain(spot: Spot) -> str:
    return spot.name or spot.lines[0]


def _target(label: str) -> str:
    return "output" if label.startswith("output") else label


def nested(drawing: Drawing) -> Iterator[tuple[str, tuple[str, ...], list[Spot]]]:
    """The nodes by container: ``open`` or ``close``, the keys of a container and those around it, and at its opening the nodes right in it."""
    inside: defaultdict[tuple[str, ...], list[Spot]] = defaultdict(list)
    children: defaultdict[tuple[str, ...], dict[tuple[str, ...], None]] = defaultdict(dict)
    for spot in drawing.spots:
        inside[spot.within].append(spot)
        for depth in range(len(spot.within)):
            children[spot.within[:depth]].setdefault(spot.within[: depth + 1])
    stack: list[tuple[str, tuple[str, ...]]] = [("open", ())]
    while stack:
        step, chain = stack.pop()
        yield step, chain, inside[chain] if step == "open" else []
        if step == "open":
            stack += [("close", chain)] if chain else []
            stack += [("open", below) for below in reversed(children[chain])]


def shown_families(spots: Iterable[Spot]) -> list[str]:
    """The families that occur, in the order of `FAMILIES`."""
    found = {spot.family for spot in spots}
    return [family for family in FAMILIES if family in found]
