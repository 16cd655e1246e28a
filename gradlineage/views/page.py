"""One HTML file for a browser: picture and table side by side, to search, fold and follow. It loads nothing from elsewhere. Needs no torch.

Every name is data: templates escape, the script sets text and never HTML, and the page's policy lets only this script and style sheet run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import linecache
import os
import pathlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from xml.etree import ElementTree

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from gradlineage.errors import LineageError
from gradlineage.lineage import Call, Join, Lineage
from gradlineage.tables import REARRANGING, share_of
from gradlineage.views.dot import drawing_dot, layout
from gradlineage.views.drawing import Drawing, Spot, Wire, draw, shown_families
from gradlineage.views.loops import containers_of, roll
from gradlineage.views.reading import Line, Reading
from gradlineage.views.rows import Entry, Incoming, Row, _layer_row, entries_of, make_rows
from gradlineage.views.table import _argument, _clean, _number, _ranges, _shape

__all__ = ["to_html"]

_DEEPEST = 8  # so many depths have pictures of their own, and rows for their containers
_MOST = 3000, 6000  # nodes and wires in one picture
_INSIDE, _BUDGET = 80, 12_000  # nodes up to which the picture of a container shows all within; nodes in all such pictures
_ENTRIES = 12  # sources in a cell of the table; the panel beside it has all

_END = '\n  label=""; bgcolor=transparent; ranksep=0.22'
_HURRY = "; nslimit=0.3; nslimit1=0.3; mclimit=0.1; searchsize=5; splines=line"  # a DenseNet with bent wires takes minutes to lay out

_Facts = dict[str, Any]
_Chain = tuple[str, ...]  # keys of containers, the outermost first


def to_html(lineage: Lineage, *, shapes: bool = False, source: bool = True) -> str:
    """A page with the picture, the table, and for each layer what feeds it and what it feeds; to be written to a file and opened from there.

    The picture comes for each depth, and for the inside of each container as far as there is room. Without Graphviz the page has the table
    and says how to get pictures.

    Args:
        lineage: any lineage; of a rolled one loops are shown as loops, of a union shares.
        shapes: shapes in the picture too; table and panel have them anyway.
        source: also show the lines of code, where the files are here to be read; a page that is passed on then has these lines in it.

    Example:
        >>> import torch, gradlineage
        >>> to_html(gradlineage.trace(torch.nn.Linear(3, 4), torch.ones(2, 3)))[:15]
        '<!doctype html>'
    """
    items = _Items(lineage, shapes, source)
    pictures, missing = _lay_out(list(_plan(items, shapes)))
    data = {"items": items.facts, "wires": items.wires, "breaks": items.breaks(), "pictures": [p.facts for p in pictures]}
    spots, wires = ([part for p in pictures for part in getattr(p.drawing, name)] for name in ("spots", "wires"))
    return _template().render(
        lineage=lineage, items=items, pictures=pictures, missing=missing, data=data, name=_clean(lineage.model),
        style=_trusted("page.css"), script=_trusted("page.js"),
        kinds={spot.kind for spot in spots}, families=shown_families(spots), wires={kind for wire in wires for kind in _kinds(wire)},
    )  # fmt: skip


@functools.cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["soft"] = lambda text: escape(text).replace(".", Markup(".<wbr>")) if len(text) > 24 else text
    environment.filters |= {"number": _number, "ranges": lambda lineage: _clean(_ranges(lineage.layers, lineage.runs))}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.from_string(str(_trusted("page.html")[0]))


def _trusted(name: str) -> tuple[Markup, str]:
    """A file of ours, and what the policy calls it."""
    text = pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8")
    return Markup(text), "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _key(call: Call) -> str:
    return f"{call.path}[{call.nth}]"


def _code(where: str) -> str:
    """The line of code at ``file:line``, where that file is here."""
    file, _, line = where.rpartition(":")
    paths = [os.path.join(folder, file) for folder in (os.getcwd(), *sys.path)] if file.endswith(".py") and line.isdecimal() else []
    path = next(filter(os.path.isfile, paths), "")
    linecache.checkcache(path)
    return _clean(linecache.getline(path, int(line)).strip())[:200] if path else ""


class _Items:
    """All that can be chosen: layers, joins, decisions, containers, and the ends that only pictures show. Numbers of ``facts`` are their names.

    ``of``: numbers by key of a row or spot. ``wires``: (from, to, from, to, …) among all but containers. ``table``: what the rows show.
    """

    def __init__(self, lineage: Lineage, shapes: bool, source: bool) -> None:
        self.lineage, self.source = lineage, source
        self.facts: list[_Facts] = []
        self.table: list[_Facts] = []
        self.of: dict[str, int] = {}
        self.fed: list[tuple[int, Row]] = []
        self.returned: list[_Facts] = []
        self.unknown: dict[str, None] = {}  # why what is unknown is
        self.flags = Counter[str]()  # how many rows each filter shows
        self.chains: dict[Call | None, _Chain] = {None: ()}  # per container with its own key, the root left out
        for call in lineage.calls:
            if call.kind == "container":
                self.chains[call] = (*self.chains[call.parent], _key(call)) if call.parent is not None else ()
        depth = min(max(map(len, self.chains.values())), _DEEPEST)
        self.views = {d: lineage.collapse(depth=d) for d in range(1, depth + 1)} if lineage.runs == 1 else {}
        rows = make_rows(lineage, decisions=True, values=not lineage.rolled)
        self.reading = Reading(roll(rows, containers_of(lineage, rows)) if lineage.rolled else rows)
        self.full = draw(lineage, shapes=shapes)
        self._rows()
        for spot in self.full.spots:
            self.add(spot)
        self.wires = [self.of[end] for w in self.full.wires for end in (w.source, w.target)]
        for fed in self.fed:
            self._feed(*fed)

    def _rows(self) -> None:
        """Rows of the table: before the first row of a container one for the container itself."""
        levels = {chain[-1]: len(chain) for chain in self.chains.values() if chain}
        tops = [call for depth, view in self.views.items() for call in view.layers if levels.get(_key(call)) == depth]
        tops = tops or [call for call in self.lineage.calls if _key(call) in levels]  # a union can't be collapsed
        heads, calls = {_key(call): _layer_row(call, True, False) for call in tops}, {_key(call): call for call in self.lineage.calls}
        joins = {join.label: join for join in self.lineage.joins}
        read = {f"? {d.kind} at {os.path.basename(d.where) or 'unknown place'}": d.where for d in self.lineage.decisions}
        chain: _Chain = ()
        for number, line in enumerate(self.reading.lines):
            row = line.row or next(below.row for below in self.reading.lines[number:] if below.row is not None)
            item = calls.get(row.key) or joins.get(row.key)
            around = item.parent if isinstance(item, Call) else item.container if item is not None else None
            chain = tuple(key for key in self.chains.get(around, ()) if key in heads) if item is not None else chain
            for n, key in enumerate(chain if line.row is not None else ()):
                if key not in self.of:
                    self._put(key, Line(heads[key], 1, line.depth), "container", chain[:n], calls[key].where, calls[key].outputs)
            if line.row is None:
                self._put(f"loop {number}", line, "loop", chain)
            elif item is None:
                self._put(f"?{number}", line, "decision", chain, next((at for name, at in read.items() if row.label.startswith(name)), ""))
            else:
                kind = "join" if isinstance(item, Join) else "container" if item._index in self.lineage._collapsed else "layer"
                self._put(row.key, line, kind, chain, item.where, item.outputs)

    def _put(self, key: str, line: Line, kind: str, chain: _Chain, where: str = "", outputs: Iterable[Any] = ()) -> None:
        """A new item with a row in the table; ``n``: label, ``k``: kind, ``h``: the item it stands in, ``l``: how deep, ``w``: where."""
        head, runs = next((self.of[key] for key in reversed(chain) if key in self.of), -1), self.lineage.runs
        row = line.row or Row("", f"⟲ ×{line.times}", "loop", (), ())
        facts: _Facts = {"n": _clean(row.label), "t": _clean(row.type), "k": kind, "h": head, "l": len(chain) + line.depth}
        facts |= {"w": _clean(where), "c": _code(where) if self.source else "", "s": [_size(flow) for flow in outputs]}
        own, trainable = row.parameters
        facts["p"] = f"{own:,}" if row.type and line.row and (own or kind != "container") else ""
        facts["p"] += f" ({trainable:,} trainable)" if own != trainable else ""
        facts |= {"x": line.times * row.times} if line.row and line.times * row.times > 1 else {}
        facts |= {name: True for name, on in (("shared", row.shared), ("raised", row.failed)) if on}
        facts |= {"g": share_of(row.seen, runs)} if row.seen not in (0, runs) and line.row else {}
        self._add(key, facts, row)
        self.table.append({"id": self.of[key], **facts})

    def _add(self, key: str, facts: _Facts, row: Row) -> None:
        self.of[key] = len(self.facts)
        self.fed.append((len(self.facts), row))
        self.facts.append(facts)

    def add(self, spot: Spot) -> int:
        """The item of a spot, made where it has none yet: inputs, outputs, parameters, constants, what is unknown."""
        if spot.key not in self.of:
            facts: _Facts = {"n": _clean(spot.lines[0]), "t": spot.kind, "k": spot.kind, "h": -1, "l": 0}
            flows, row = [f for f in self.lineage.inputs if spot.key == f"input:input:{f.name}"], Row("", "", "", (), ())
            if spot.kind == "output":
                flows = [self.lineage.outputs[int(spot.key.removeprefix("output"))]]
                entries = tuple(self.reading.entries(entries_of(flows[0], True)))
                row = row._replace(inputs=(Incoming("", entries),), seen=self.lineage.runs)
            self._add(spot.key, {**facts, "s": [_size(flow) for flow in flows]}, row)
        return self.of[spot.key]

    def _feed(self, number: int, row: Row) -> None:
        """Write down what feeds an item, now that all have numbers."""
        tensors = [[_clean(t.name), t.used, [self._entry(e, row.seen) for e in t.entries]] for t in row.inputs]
        kind, entries = self.facts[number]["k"], list(row.entries)
        flags = ["breaks"] * any(e.stopped for e in entries) + ["unknowns"] * any(e.kind == "unknown" for e in entries)
        flags += ["decisions"] * (kind == "decision") + ["unused"] * (not all(t.used for t in row.inputs))
        self.unknown |= {_clean(e.reason.rstrip(".")): None for e in entries if e.kind == "unknown" and e.reason}
        flags = [flag for flag in flags if kind != "output" and (kind != "container" or flag == "unused")]  # the rest is told within
        self.flags.update(flags)
        self.facts[number] |= {"i": tensors, "f": flags}
        if number < len(self.table):
            self.table[number] |= _cell(tensors)
        elif kind == "output":
            self.returned.append({**self.facts[number], **_cell(tensors)})

    def _entry(self, entry: Entry, seen: int) -> list[Any]:
        share = share_of(entry.seen, self.lineage.runs) if entry.seen not in (0, seen) else ""
        target = self.of.get(entry.key or f"{entry.kind}:{entry.label.removeprefix('first ')}", -1)
        return [_clean(entry.label), entry.kind, [*map(_clean, entry.ops[::-1])], target, entry.stopped, share, _clean(entry.reason)]

    def aliases(self, view: Lineage, drawing: Drawing) -> dict[str, int]:
        """Items of the spots of a collapsed view: its joins may be numbered otherwise, its decisions stand on other lines."""
        names = {j._index: j.label for j in self.lineage.joins}
        found = {j.label: self.of[names[j._index]] for j in view.joins if names.get(j._index) in self.of}
        found |= {key: self.of[key] for key in drawing.containers if key.endswith("]") and key in self.of}  # those of loops are other ones
        decisions = [n for n, facts in enumerate(self.facts) if facts["k"] == "decision"]
        for spot in drawing.spots:
            if spot.kind == "decision":
                start, end = f"? {spot.lines[0].split()[0]} at", spot.lines[-1]
                alike = [n for n in decisions if self.facts[n]["n"].startswith(start) and end in self.facts[n]["n"]]
                found[spot.key] = next((n for n in alike if n not in found.values()), alike[-1] if alike else -1)
            elif spot.key not in found:
                found[spot.key] = self.add(spot)
        return found

    def breaks(self) -> list[_Facts]:
        keys = {c.label: _key(c) for c in self.lineage.layers} | {"output": "output0"}
        found = []
        for b in self.lineage.breaks:
            before = [(s.label, f"{s.path}[{s.nth}]" if s.kind == "call" else f"{s.kind}:{s.label}") for s in b.before]
            sides = {"before": before, "after": [(label, keys.get(label, "")) for label in b.after]}
            linked = {side: [(_clean(label), self.of.get(key, -1)) for label, key in ends] for side, ends in sides.items()}
            found.append({"op": _clean(b.op), "w": _clean(b.where), "c": _code(b.where) if self.source else "", **linked})
        return found


def _size(flow: Any) -> str:
    return f"{_shape(flow.shape)} {flow.dtype}".strip()


def _cell(tensors: Sequence[Any]) -> _Facts:
    """For the table: several arguments are named, those that are fed alike together; not more entries than can be read."""
    single = all(len(entries) < 2 or name == "hidden" for name, _, entries in tensors)
    joined: dict[tuple[str, bool], list[Any]] = {}
    for name, used, entries in tensors:
        joined.setdefault((_argument(name) if single else name, used), []).extend(entries)
    alike: dict[str, tuple[list[str], bool, list[Any]]] = {}
    for (name, used), entries in joined.items():
        alike.setdefault(repr((used, entries)), ([], used, entries))[0].append(name)
    room, groups = _ENTRIES, []
    for names, used, entries in alike.values():
        title = "/".join(filter(None, names)) if len(joined) > 1 or "hidden" in names else ""
        shown = [[e[0], e[1], [op for op in e[2] if op not in REARRANGING], *e[3:]] for e in entries[:room]]
        groups += [(title, used, shown)] if shown or not entries else []
        room -= len(shown)
    return {"groups": groups, "more": sum(len(entries) for *_, entries in alike.values()) - _ENTRIES + room}


class _Picture(NamedTuple):
    drawing: Drawing
    items: dict[str, int]  # per key of a spot
    facts: _Facts  # for the script: depth, the container whose inside it is, how many nodes
    outside: frozenset[str] = frozenset()  # keys of spots that lie outside of that container
    svg: Markup = Markup()


def _plan(items: _Items, shapes: bool) -> Iterator[_Picture]:
    """Which pictures there are: one a depth, then one for the inside of each container, the outermost first, as far as there is room."""
    drawings = {depth: draw(view, shapes=shapes) for depth, view in items.views.items()}
    of = {depth: items.aliases(items.views[depth], drawing) for depth, drawing in drawings.items()}
    drawings[len(drawings) + 1], of[len(of) + 1] = items.full, items.of
    alike = {frozenset(spot.key for spot in drawing.spots): depth for depth, drawing in drawings.items()}
    for depth in alike.values():  # of two that show the same the deeper one
        facts: _Facts = {"depth": depth, "name": "all" if depth == len(drawings) else str(depth), "of": -1}
        yield _Picture(drawings[depth], of[depth], facts | _room(drawings[depth]))
    parts, left = {depth: _Parts(drawing) for depth, drawing in drawings.items()}, _BUDGET
    chains = dict.fromkeys(chain for chain in items.chains.values() if chain and chain[-1] in items.of)
    for *_, key in sorted(chains, key=len):
        open_in = [depth for depth in reversed(drawings) if key in parts[depth].inner]
        depth = next((d for d in open_in if len(parts[d].inner[key]) <= _INSIDE), open_in[-1] if open_in else 0)
        if depth and 1 < len(parts[depth].inner[key]) <= left:
            drawing, outside = parts[depth].inside(key)
            room = _room(drawing)
            left -= room["nodes"]
            if not room["too"]:
                yield _Picture(drawing, of[depth], {"depth": depth, "name": "", "of": items.of[key], **room}, outside)


def _room(drawing: Drawing) -> _Facts:
    nodes, wires = len(drawing.spots), len(drawing.wires)
    return {"nodes": nodes, "too": nodes > _MOST[0] or wires > _MOST[1]}


class _Parts:
    """A drawing by containers. ``inner``: per container the spots in it."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.inner: defaultdict[str, list[Spot]] = defaultdict(list)
        self.places = {spot.key: n for n, spot in enumerate(drawing.spots)}
        self.wires: defaultdict[str, list[int]] = defaultdict(list)
        for spot in drawing.spots:
            for key in spot.within:
                self.inner[key].append(spot)
        for number, wire in enumerate(drawing.wires):
            self.wires[wire.source].append(number)
            self.wires[wire.target].append(number)

    def inside(self, key: str) -> tuple[Drawing, frozenset[str]]:
        """The part in one container, with what feeds it and what it feeds, and the keys of these."""
        spots = {spot.key: replace(spot, within=spot.within[spot.within.index(key) :]) for spot in self.inner[key]}
        wires = tuple(self.drawing.wires[n] for n in sorted({n for spot in spots for n in self.wires[spot]}))
        near = {end for w in wires for end in (w.source, w.target)} - spots.keys()
        for spot in (self.drawing.spots[self.places[end]] for end in near):
            kind = "layer" if spot.kind in ("container", "join", "decision") else spot.kind
            spots[spot.key] = replace(spot, kind=kind, family="", within=(), lines=spot.lines[:1])
        ordered = sorted(spots.values(), key=lambda spot: self.places[spot.key])
        return Drawing("", tuple(ordered), wires, self.drawing.containers), frozenset(near)


def _lay_out(pictures: list[_Picture]) -> tuple[list[_Picture], str]:
    """The pictures with their SVG, made in one run of Graphviz; without it none, and why."""
    fit = [p for p in pictures if not p.facts["too"]]
    ends = [_END + _HURRY * (len(p.drawing.wires) > max(400, 2.5 * len(p.drawing.spots))) + "\n}\n" for p in fit]
    texts = [drawing_dot(p.drawing).rstrip("}\n") + end for p, end in zip(fit, ends, strict=True)]
    try:
        made = layout("".join(texts), "svg").decode().split("</svg>")[:-1] if fit else []
        if len(made) != len(fit):
            raise LineageError(f"Graphviz laid out {len(made)} of {len(fit)} pictures")
    except LineageError as error:
        return [], str(error)
    svgs = iter(made)
    return [p if p.facts["too"] else p._replace(svg=_compact(p, next(svgs) + "</svg>")) for p in pictures], ""


_SVG = "{http://www.w3.org/2000/svg}"
_KEPT = {"path": ("d",), "polygon": ("points",), "polyline": ("points",), "ellipse": ("cx", "cy", "rx", "ry")}


def _compact(picture: _Picture, text: str) -> Markup:
    """Graphviz's SVG with classes for its colours and numbers of items for its ids, and nothing else of it but shapes and words."""
    root, of = ElementTree.fromstring(text[text.index("<svg") :]), picture.items
    shares = any(wire.share < 1 for wire in picture.drawing.wires)
    clusters, parts = _clusters(picture.drawing), []
    for group in root.iterfind(f"{_SVG}g/{_SVG}g"):
        name, shape = group.get("id", ""), "box"
        if group.get("class") == "node":
            spot = picture.drawing.spots[int(name[1:])]
            kinds = [spot.kind, f"f-{spot.family}" * bool(spot.family), "outside" * (spot.key in picture.outside)]
            parts.append(f'<g class="{" ".join(["n", *filter(None, kinds)])}" data-i="{of.get(spot.key, -1)}">')
            shape = {"layer": "box", "container": "stack"}.get(spot.kind, "")
        elif group.get("class") == "edge":
            wire, shape = picture.drawing.wires[int(name[1:])], ""
            width = f' stroke-width="{0.6 + 2 * wire.share:.1f}"' if shares else ""
            ends = f'data-a="{of.get(wire.source, -1)}" data-b="{of.get(wire.target, -1)}"'
            parts.append(f'<g class="{" ".join(_kinds(wire))}" {ends}{width}>')
        else:
            key = clusters[int(group.findtext(f"{_SVG}title", "").removeprefix("cluster_"))]
            parts.append(f'<g class="c" data-i="{of.get(key, -1)}">')
        parts += [*_shapes(group, shape), "</g>"]
    width, height = root.get("viewBox", "0 0 0 0").split()[2:]
    move = _short(root.find(f"{_SVG}g").get("transform", "").rpartition("translate")[2])  # type: ignore[union-attr]
    start = f'<svg data-w="{float(width):.0f}" data-h="{float(height):.0f}"><g class="stage"><g transform="translate{move}">'
    return Markup(f"{start}{''.join(parts)}</g></g></svg>")


def _kinds(wire: Wire) -> list[str]:
    return ["w", *(name for name, on in (("cut", wire.stopped), ("back", wire.back > 0), ("thin", wire.share < 1)) if on)]


def _clusters(drawing: Drawing) -> list[str]:
    """Keys of containers in the order in which `drawing_dot` numbers its clusters: as they are first met, those within another after it."""
    first: dict[_Chain, int] = {}
    for spot in drawing.spots:
        for depth in range(len(spot.within)):
            first.setdefault(spot.within[: depth + 1], len(first))
    return [chain[-1] for chain in sorted(first, key=lambda chain: [first[chain[: n + 1]] for n in range(len(chain))])]


def _shapes(group: ElementTree.Element, shape: str) -> Iterator[str]:
    for part in group.iter():
        tag = part.tag.removeprefix(_SVG)
        if tag == "text":
            side = "s" if part.get("text-anchor") == "start" else "m"
            yield f'<text x="{_short(part.get("x", ""))}" y="{_short(part.get("y", ""))}" class="{side}">{escape(part.text or "")}</text>'
        elif shape and tag in ("path", "polygon"):  # a path of 34 points; a 3D box whose lid would run through the words
            points = [float(n) for n in re.findall(r"-?[\d.]+", part.get(_KEPT[tag][0], ""))]
            (left, right), (top, bottom) = ((min(p), max(p)) for p in (points[::2], points[1::2]))
            for shift in (3.5, 0) if shape == "stack" else (0,):
                size = f'width="{right - left:.1f}" height="{bottom - top:.1f}" rx="{2 if shape == "stack" else 7}"'
                yield f'<rect x="{left + shift:.1f}" y="{top + shift:.1f}" {size}/>'
        elif not shape and tag in _KEPT:
            values = "".join(f' {name}="{_short(part.get(name, ""))}"' for name in _KEPT[tag])
            yield f"<{tag}{values}/>"


def _short(numbers: str) -> str:
    return str(escape(re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), numbers)))
