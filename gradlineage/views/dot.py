"""Pictures: Graphviz's DOT language, and SVG and PNG laid out by Graphviz. Needs no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator

from gradlineage.errors import LineageError
from gradlineage.lineage import Lineage
from gradlineage.views.drawing import FAMILIES, Drawing, Spot, Wire, draw, nested

__all__ = ["drawing_dot", "layout", "to_dot", "to_png", "to_svg"]

_LARGE = 400  # nodes, from which on the layout is told to hurry
_STYLES = {
    "layer": 'shape=box, style="rounded,filled", fillcolor="#ffffff"',
    "container": 'shape=box3d, style=filled, fillcolor="#dfe8f5", margin="0.14,0.09"',
    "join": 'shape=ellipse, style=filled, fillcolor="#ffffff", margin="0.05,0.02"',
    "input": 'shape=invhouse, style=filled, fillcolor="#ffffff", penwidth=2',
    "output": 'shape=house, style=filled, fillcolor="#ffffff", penwidth=2',
    "parameter": 'shape=cylinder, style=filled, fillcolor="#f5f5f5"',
    "buffer": 'shape=cylinder, style="filled,dashed", fillcolor="#f5f5f5"',
    "constant": 'shape=plain, fontcolor="#555555"',
    "unknown": 'shape=octagon, style="filled,dashed", fillcolor="#ffffff", color="#b00020", fontcolor="#b00020"',
    "decision": 'shape=diamond, style=filled, fillcolor="#fff7d6", margin="0.02,0.02"',
}
_CHANGES = {"added": ("#00795b", "+ "), "removed": ("#b3400a", "− ")}


def to_dot(lineage: Lineage, *, shapes: bool = False, decisions: bool = True, before: Lineage | None = None) -> str:
    """A lineage in Graphviz's DOT language, top to bottom, with a cluster for each container. Arguments as of `gradlineage.views.drawing.draw`.

    Example:
        >>> import torch, gradlineage
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> print(gradlineage.trace(net, torch.ones(2, 3)).to_dot().splitlines()[-2])
          n2 -> n3 [id="w2"]
    """
    return drawing_dot(draw(lineage, shapes=shapes, decisions=decisions, before=before))


def to_svg(lineage: Lineage, *, shapes: bool = False, decisions: bool = True, before: Lineage | None = None) -> str:
    """A picture as SVG text.

    Raises:
        LineageError: there is no Graphviz; with the two ways to get it.
    """
    return layout(to_dot(lineage, shapes=shapes, decisions=decisions, before=before), "svg").decode()


def to_png(lineage: Lineage, *, shapes: bool = False, decisions: bool = True, before: Lineage | None = None) -> bytes:
    """A picture as the bytes of a PNG file.

    Raises:
        LineageError: there is no Graphviz; with the two ways to get it.
    """
    return layout(to_dot(lineage, shapes=shapes, decisions=decisions, before=before), "png")


def drawing_dot(drawing: Drawing) -> str:
    """A drawing in the DOT language. Node ``n3`` is the fourth of its nodes, ``w3`` the fourth of its wires, also in the SVG made of it."""
    lines = ["digraph {", *_settings(drawing)]
    numbers = {spot.key: n for n, spot in enumerate(drawing.spots)}
    lines += _nodes(drawing, numbers)
    shares = any(w.share < 1 for w in drawing.wires)
    lines += (f"  n{numbers[w.source]} -> n{numbers[w.target]} [{', '.join(_wire(w, n, shares))}]" for n, w in enumerate(drawing.wires))
    return "\n".join([*lines, "}"]) + "\n"


def _settings(drawing: Drawing) -> Iterator[str]:
    yield f"  graph [label={_quoted(drawing.title)}, labelloc=t, rankdir=TB, fontname=Helvetica, fontsize=16, ranksep=0.35, nodesep=0.25]"
    if len(drawing.wires) > max(_LARGE, 2.5 * len(drawing.spots)):  # a tangle, such as DenseNet
        yield "  graph [nslimit=0.3, nslimit1=0.3, mclimit=0.1, searchsize=5, splines=line]"
    elif len(drawing.spots) > _LARGE:
        yield "  graph [nslimit=1, nslimit1=1, mclimit=0.3, splines=polyline]"
    yield '  node [fontname=Helvetica, fontsize=11, height=0.3, margin="0.1,0.04", color="#333333"]'
    yield '  edge [fontname=Helvetica, fontsize=9, color="#444444", fontcolor="#333333", arrowsize=0.7]'


def _nodes(drawing: Drawing, numbers: dict[str, int]) -> Iterator[str]:
    """Nodes within clusters within clusters."""
    number = 0
    for step, chain, spots in nested(drawing):
        pad = "  " * (len(chain) + 1)
        if step == "close":
            yield f"{pad[2:]}}}"
            continue
        if chain:
            yield f"{pad[2:]}subgraph cluster_{number} {{"
            yield f'{pad}label={_quoted(drawing.containers.get(chain[-1], chain[-1]))}; labeljust=l; fontsize=10; color="#8899aa"; style=rounded'
            number += 1
        yield from (f"{pad}n{numbers[spot.key]} [{', '.join(_node(spot, numbers[spot.key]))}]" for spot in spots)


def _node(spot: Spot, number: int) -> Iterator[str]:
    sign = _CHANGES[spot.change][1] if spot.change else ""
    yield f'id="n{number}", label={_quoted(chr(10).join((sign + _near(spot), *spot.lines[1:])))}'
    yield _STYLES[spot.kind]
    if spot.family:
        yield f'fillcolor="{FAMILIES[spot.family][1]}"'
    if spot.change:
        yield f'color="{_CHANGES[spot.change][0]}", penwidth=3' + (', style="rounded,dashed"' if spot.change == "removed" else "")
    yield f"tooltip={_quoted(spot.where or spot.lines[0])}"


def _near(spot: Spot) -> str:
    """The label as it reads within its container: ``conv`` in ``Mixed_5b.branch1x1``, ``cat`` for ``Mixed_5b:cat``."""
    label = spot.lines[0]
    for around in reversed(spot.within):
        for place in (around, around.rpartition("[")[0]):
            if label.startswith((f"{place}.", f"{place}:")):
                return label[len(place) + 1 :]
    return label.removeprefix(":") if spot.kind == "join" else label


def _wire(wire: Wire, number: int, shares: bool) -> Iterator[str]:
    yield f'id="w{number}"'
    text = f"cut: {wire.text}" if wire.stopped and wire.text else wire.text
    if text:
        yield f"label={_quoted(f' {text} ')}"
    if wire.stopped:
        yield 'style=dashed, color="#b3400a", fontcolor="#b3400a", arrowhead=empty'
    if wire.back > 0:
        yield 'constraint=false, color="#6a3d9a"'
    if shares:  # in a union: the more passes, the thicker
        yield f"penwidth={0.6 + 2 * wire.share:.2f}"
    if wire.change:
        color = _CHANGES[wire.change][0]
        yield f'color="{color}", penwidth=2.5' + (", style=dashed, constraint=false" if wire.change == "removed" else "")


def _quoted(text: str) -> str:
    """A string of the DOT language in which nothing is special: neither quotes, escapes such as ``\\N``, nor entities such as ``&lt;``."""
    plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;").replace("\n", "\\n")
    return f'"{escaped}"'


def layout(dot: str, format: str) -> bytes:
    """Run Graphviz: the ``dot`` on the PATH, or the one that the extra ``draw`` installs.

    Raises:
        LineageError: there is neither, or it failed.
    """
    own = os.path.join(sysconfig.get_path("scripts"), "graphviz-pure")
    program = shutil.which("dot") or shutil.which("graphviz-pure") or shutil.which(own)
    if program is None:
        raise LineageError(
            "a picture needs Graphviz, and there is no 'dot' on the PATH: pip install 'gradlineage[draw]' brings one that needs no system package, "
            "or install Graphviz itself (apt install graphviz, brew install graphviz); to_dot() and to_mermaid() need neither"
        )
    done = subprocess.run([program, f"-T{format}"], input=dot.encode(), capture_output=True, check=False)
    if done.returncode or not done.stdout:
        raise LineageError(
            f"{program} could not lay out the picture: {done.stderr.decode(errors='replace').strip()[:500] or 'no reason given'}"
        )
    return done.stdout
