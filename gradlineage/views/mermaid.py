"""Mermaid: pictures in READMEs, drawn where they are read. Needs no torch and no Graphviz."""

from __future__ import annotations

from collections.abc import Iterator

from gradlineage.collapse import shallower
from gradlineage.lineage import Lineage
from gradlineage.views.drawing import FAMILIES, Drawing, draw, nested

__all__ = ["to_mermaid"]

_MOST = 280  # wires; more than 500 Mermaid refuses, and long before that no one can read them
_SHAPES = {
    "layer": ("(", ")"), "container": ("[[", "]]"), "join": ("((", "))"), "input": ("[/", "\\]"), "output": ("[\\", "/]"),
    "parameter": ("[(", ")]"), "buffer": ("[(", ")]"), "constant": ("[", "]"), "unknown": ("{{", "}}"), "decision": ("{", "}"),
}  # fmt: skip


def to_mermaid(lineage: Lineage, *, shapes: bool = False, decisions: bool = True) -> str:
    """A flowchart in Mermaid's language, collapsed to what Mermaid can show: the deepest view with fewer than 280 wires.

    Args:
        lineage: any lineage.
        shapes, decisions: as of `gradlineage.views.drawing.draw`.

    Example:
        >>> import torch, gradlineage
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> print(gradlineage.trace(net, torch.ones(2, 3)).to_mermaid().splitlines()[3])
            n2("1<br>ReLU")
    """
    drawing = draw(lineage, shapes=shapes, decisions=decisions)
    views = shallower(lineage)
    while len(drawing.wires) > _MOST and (found := next(views, None)) is not None:
        drawing = draw(found[1], shapes=shapes, decisions=decisions)
    return "\n".join(_lines(drawing)) + "\n"


def _lines(drawing: Drawing) -> Iterator[str]:
    yield "flowchart TD"
    numbers = {spot.key: n for n, spot in enumerate(drawing.spots)}
    number = 0
    for step, chain, spots in nested(drawing):
        pad = "    " * (len(chain) + 1)
        if step == "close":
            yield f"{pad[4:]}end"
            continue
        if chain:
            yield f"{pad[4:]}subgraph c{number}[{_quoted(drawing.containers.get(chain[-1], chain[-1]))}]"
            number += 1
        for spot in spots:
            left, right = _SHAPES[spot.kind]
            yield f"{pad}n{numbers[spot.key]}{left}{_quoted('<br>'.join(map(_text, spot.lines)), raw=True)}{right}"
    for wire in drawing.wires:
        ends = f"n{numbers[wire.source]}", f"n{numbers[wire.target]}"
        text = f"|{_quoted(('cut: ' if wire.stopped else '') + wire.text)}|" if wire.text or wire.stopped else ""
        yield f"    {ends[0]} {'-.->' if wire.stopped or wire.back > 0 else '-->'}{text} {ends[1]}"
    for family, (_, color) in FAMILIES.items():
        members = [f"n{numbers[spot.key]}" for spot in drawing.spots if spot.family == family]
        if members:
            yield f"    classDef {family} fill:{color},stroke:#333,color:#000"
            yield f"    class {','.join(members)} {family}"


def _text(text: str) -> str:
    """Text in which nothing is special to Mermaid: entities in its own spelling, ``#quot;`` for a quote."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return "".join(c if c.isalnum() or c in " .:_,-×→…[]()%?=+/" else f"#{ord(c)};" for c in plain)


def _quoted(text: str, raw: bool = False) -> str:
    return f'"{text if raw else _text(text)}"'
