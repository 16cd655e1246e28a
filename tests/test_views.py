"""Pictures and graphs: DOT, SVG, PNG, Mermaid, networkx, the notebook, and the command that draws."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import gradlineage
from gradlineage import Join, Lineage, LineageError
from gradlineage.collapse import fitting
from gradlineage.views import dot as dot_module
from gradlineage.views.dot import to_dot, to_png, to_svg
from gradlineage.views.drawing import FAMILIES, Drawing, draw
from gradlineage.views.mermaid import to_mermaid
from gradlineage.views.network import to_networkx
from gradlineage.views.notebook import to_fragment

from .nets import Net, data, lin
from .profiles import examples
from .strategies import lineages
from .test_page import HOSTILE, Gated, hostile

ROOT = Path(__file__).parent.parent
OWN = shutil.which("graphviz-pure", path=sysconfig.get_path("scripts"))
NAMESPACE = "{http://www.w3.org/2000/svg}"

graphviz = pytest.mark.skipif(
    OWN is None and shutil.which("dot") is None, reason="needs Graphviz: pip install 'gradlineage[draw]', or a dot on the PATH"
)
Run = Callable[[str], tuple[int, str, str]]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.gate, self.head = nn.Linear(4, 1), nn.Linear(4, 4)

    def forward(self, x):
        h = self.stem(x)
        if self.gate(h).sum() > 1e9:
            return h
        return self.head(h) + x

class Longer(Net):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(4, 4)

    def forward(self, x):
        return self.more(super().forward(x))

def deep(blocks=30):
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(blocks)])
"""


# -- what is in a text of DOT ------------------------------------------------------------------------------------------------------------------

_STRING = r'"(?:[^"\\]|\\.)*"'


def nodes_in(dot: str) -> dict[str, str]:
    """Attributes as text by name of the node; fails on lines of any other form."""
    found = {}
    for line in dot.splitlines():
        text = line.strip()
        if match := re.fullmatch(rf"(n\d+) \[((?:[^\"\[\]]|{_STRING})*)\]", text):
            found[match[1]] = match[2]
        else:
            assert re.fullmatch(
                rf"digraph {{|}}|subgraph cluster_\d+ {{|label={_STRING}; labeljust=l; fontsize=10; color={_STRING}; style=rounded"
                rf"|(?:graph|node|edge) \[(?:[^\"\[\]]|{_STRING})*\]|n\d+ -> n\d+ \[(?:[^\"\[\]]|{_STRING})*\]",
                text,
            ), line
    return found


def wires_in(dot: str) -> list[tuple[str, str, str]]:
    return re.findall(r"^  (n\d+) -> (n\d+) \[(.*)\]$", dot, re.M)


def label(attributes: str) -> str:
    """As Graphviz reads it."""
    text = re.search(rf"label=({_STRING})", attributes)
    assert text is not None
    return text[1][1:-1].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\").replace("&amp;", "&")


def counted(dot: str) -> tuple[int, int]:
    """Nodes and edges, by Graphviz."""
    kinds = Counter(line.split(" ", 1)[0] for line in dot_module.layout(dot, "plain").decode().splitlines())
    return kinds["node"], kinds["edge"]


def spot(drawing: Drawing, label: str) -> Any:
    (found,) = (s for s in drawing.spots if s.lines[0] == label)
    return found


def wires(drawing: Drawing) -> dict[tuple[str, str], Any]:
    names = {s.key: s.lines[0] for s in drawing.spots}
    return {(names[w.source], names[w.target]): w for w in drawing.wires}


@pytest.fixture(scope="module")
def gated() -> Lineage:
    torch.manual_seed(0)
    return gradlineage.trace(Gated(), torch.randn(2, 4))


# -- DOT ---------------------------------------------------------------------------------------------------------------------------------------


def test_every_layer_join_and_end_is_a_node_and_every_way_an_arrow(gated: Lineage) -> None:
    drawing, dot = draw(gated), to_dot(gated)
    nodes = nodes_in(dot)
    assert set(nodes) == {f"n{n}" for n in range(len(drawing.spots))}
    kinds = Counter(s.kind for s in drawing.spots)
    assert (kinds["layer"], kinds["join"], kinds["input"], kinds["output"]) == (len(gated.layers), len(gated.joins), 1, 1)
    numbers = {s.key: f"n{n}" for n, s in enumerate(drawing.spots)}
    assert [(a, b) for a, b, _ in wires_in(dot)] == [(numbers[w.source], numbers[w.target]) for w in drawing.wires]
    assert [re.search(r'id="(w\d+)"', attributes)[1] for _, _, attributes in wires_in(dot)] == [f"w{n}" for n in range(len(drawing.wires))]  # type: ignore[index]


@graphviz
def test_graphviz_reads_as_many_nodes_and_arrows_as_were_written(gated: Lineage) -> None:
    for lineage in (gated, gated.collapse(depth=1), hostile()):
        drawing = draw(lineage)
        assert counted(to_dot(lineage)) == (len(drawing.spots), len(drawing.wires))


@given(lineages())
@examples(100)
def test_any_lineage_gives_lines_of_the_known_forms(lineage: Lineage) -> None:
    for shown in (lineage, lineage.roll()):
        drawing = draw(shown, shapes=True)
        dot = to_dot(shown, shapes=True)
        assert len(nodes_in(dot)) == len(drawing.spots)
        assert len(wires_in(dot)) == len(drawing.wires)
        mermaid_lines(to_mermaid(shown))


def test_containers_are_clusters_within_clusters(gated: Lineage) -> None:
    dot = to_dot(gated)
    stack: list[str] = []
    around: dict[str, list[str]] = {}
    for line in dot.splitlines():
        if "subgraph" in line:
            stack.append("")
        elif line.strip() == "}" and stack:
            stack.pop()
        elif stack and not stack[-1]:
            stack[-1] = label(line)
        elif match := re.match(r"\s+(n\d+) \[(.*)\]$", line):
            around[label(match[2]).splitlines()[0] + match[1]] = list(stack)
    of = {s.lines[0]: f"n{n}" for n, s in enumerate(draw(gated).spots)}
    assert around["0" + of["blocks.1.mlp.0"]] == ["blocks (Sequential)", "blocks.1 (Block)", "blocks.1.mlp (Sequential)"]
    assert around["add" + of["blocks.0:add"]] == ["blocks (Sequential)", "blocks.0 (Block)"]
    assert around["head" + of["head"]] == []


def test_a_name_within_its_container_is_short(gated: Lineage) -> None:
    labels = [label(attributes).split("\n") for attributes in nodes_in(to_dot(gated)).values()]
    assert ["norm", "LayerNorm"] in labels
    assert not [lines for lines in labels if lines[0].startswith("blocks.")]
    flat = [label(attributes).split("\n")[0] for attributes in nodes_in(to_dot(gated.collapse(depth=1))).values()]
    assert "blocks" in flat


def test_a_collapsed_container_is_one_node_of_its_own_shape(gated: Lineage) -> None:
    drawing = draw(gated.collapse("blocks"))
    assert spot(drawing, "blocks").kind == "container"
    assert "box3d" in to_dot(gated.collapse("blocks"))
    assert not [s for s in drawing.spots if s.lines[0].startswith("blocks.")]


def test_every_kind_of_node_has_a_shape_that_no_other_has() -> None:
    shapes = {kind: re.sub(r'fillcolor="[^"]*",? ?', "", style) for kind, style in dot_module._STYLES.items()}
    assert len(set(shapes.values())) == len(shapes) == 10


def test_shapes_and_decisions_are_shown_as_asked(gated: Lineage) -> None:
    assert "2×4" not in to_dot(gated)
    assert spot(draw(gated, shapes=True), "head").lines == ("head", "Linear", "2×4")
    assert spot(draw(gated, shapes=True), "output").lines == ("output", "2×4")
    decisions = [s for s in draw(gated).spots if s.kind == "decision"]
    assert [s.lines[0] for s in decisions] == ["bool is False"]
    assert not [s for s in draw(gated, decisions=False).spots if s.kind == "decision"]


def test_a_wire_says_what_lies_on_it_where_gradient_stops_and_what_is_not_used(gated: Lineage) -> None:
    drawing = draw(gated)
    ways = wires(drawing)
    cut = ways["pick.fc", "head"]
    assert (cut.stopped, cut.text) == (True, "detach")
    assert ways["gate", "bool is False"].text == "mean → gt"
    assert ' label=" cut: detach ", style=dashed' in to_dot(gated)
    many = draw(gradlineage.trace(Net(lambda self, x: self.b(self.a(x).relu().sin().cos().tan()), a=lin(), b=lin()), data()))
    assert wires(many)["a", "b"].text == "relu → … → tan"
    assert wires(draw(gated.collapse("pick")))["blocks.1:add", "pick"].text.count("unused") == 1


def test_of_two_ways_from_one_node_to_another_both_are_told() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return torch.cat([h, h.relu(), self.b(x)])

    ways = wires(draw(gradlineage.trace(Net(run, a=lin(), b=lin()), data())))
    assert ways["a", ":cat"].text == "as it is, relu"
    assert ways["b", ":cat"].text == ""


def test_arguments_are_named_where_there_are_several() -> None:
    class Both(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left * right

    lineage = gradlineage.trace(Net(lambda self, x: self.both(self.a(x), right=self.b(x)), a=lin(), b=lin(), both=Both()), data())
    ways = wires(draw(lineage))
    assert (ways["a", "both"].text, ways["b", "both"].text, ways["args[0]", "a"].text) == ("left", "right", "")


def test_ends_of_every_kind_are_drawn() -> None:
    net = Net(lambda self, x: self.a(x * self.scale + self.shift) + torch.from_numpy(x.detach().numpy() * 2), a=lin())
    net.register_parameter("scale", nn.Parameter(torch.ones(4)))
    net.register_buffer("shift", torch.ones(4))
    kinds = {s.lines[0]: s.kind for s in draw(gradlineage.trace(net, data())).spots}
    assert (kinds["scale"], kinds["shift"], kinds["unknown"]) == ("parameter", "buffer", "unknown")
    lineage = gradlineage.trace(Net(lambda self: self.a(torch.zeros(2, 4)), a=lin()))
    assert [s.kind for s in draw(lineage).spots] == ["constant", "layer", "output"]


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


def test_a_layer_that_raised_is_drawn_and_says_so() -> None:
    net = Net(lambda self, x: self.b(self.a(x)), a=lin(), b=Refuses())
    with pytest.raises(ValueError, match="no"), gradlineage.recording(net) as recorder:
        net(data())
    drawing = draw(recorder.lineage())
    assert [s.lines for s in drawing.spots if s.kind == "layer"] == [("a", "Linear"), ("b", "Refuses (raised)")]
    assert ("a", "b") in wires(drawing)


# -- hostile names -----------------------------------------------------------------------------------------------------------------------------


def written(name: str) -> list[str]:
    """A name line by line, as it can be shown: what has no glyph is spelled out."""
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in name.split("\n")]


@graphviz
def test_hostile_names_are_text_in_svg() -> None:
    svg = to_svg(hostile())
    tree = ElementTree.fromstring(svg.encode())
    tags = {element.tag.removeprefix(NAMESPACE) for element in tree.iter()}
    assert tags <= {"svg", "g", "title", "polygon", "polyline", "path", "ellipse", "text", "a"}
    for element in tree.iter():
        assert not [name for name in element.attrib if name.lower().startswith("on") or name == "href"]
    texts = {"".join(element.itertext()).strip() for element in tree.iter(f"{NAMESPACE}text")}
    for name in HOSTILE:
        for line in written(name):
            assert any(line.strip() in text for text in texts), line


@graphviz
def test_hostile_names_make_no_other_picture(gated: Lineage) -> None:
    plain, bad = gradlineage.trace(Gated(), torch.randn(2, 4)), hostile()
    assert counted(to_dot(bad)) == counted(to_dot(plain))
    assert to_png(bad).startswith(b"\x89PNG\r\n")


def test_hostile_names_are_text_in_dot() -> None:
    dot = to_dot(hostile())
    assert len(nodes_in(dot)) == len(draw(hostile()).spots)
    shown = "\n".join(label(attributes) for attributes in nodes_in(dot).values())
    assert "<script>alert(1)</script>" in shown
    assert '"; } alert(5); {' in shown
    assert "\\N \\\\ %s ${x} `y`" in shown
    assert "&lt;b&gt; &amp; ]]> <!-- -->" in shown
    dot.encode()


def mermaid_lines(text: str) -> list[str]:
    """The lines of a flowchart; fails on any that is of no known form."""
    string = r'"[^"\\`<>&]*(?:<br>[^"\\`<>&]*)*"'
    shapes = [("(", ")"), ("[[", "]]"), ("((", "))"), ("[/", "\\]"), ("[\\", "/]"), ("[(", ")]"), ("[", "]"), ("{{", "}}"), ("{", "}")]
    node = "|".join(re.escape(left) + string + re.escape(right) for left, right in shapes)
    form = re.compile(
        rf"flowchart TD| +n\d+(?:{node})| +subgraph c\d+\[{string}\]| +end| {{4}}n\d+ (?:-->|-\.->)(?:\|{string}\|)? n\d+"
        r"| {4}classDef [a-z]+ fill:#[0-9a-f]{6},stroke:#333,color:#000| {4}class n\d+(?:,n\d+)* [a-z]+"
    )
    lines = text.splitlines()
    assert not [line for line in lines if not form.fullmatch(line)]
    return lines


def test_hostile_names_are_text_in_mermaid() -> None:
    text = to_mermaid(hostile())
    lines = mermaid_lines(text)
    assert len([line for line in lines if re.match(r" +n\d+[\[({]", line)]) == len(draw(hostile()).spots)
    plain = re.sub(r"#(\d+);", lambda code: chr(int(code[1])), text)
    for name in HOSTILE:
        assert written(name)[0] in plain


def test_hostile_names_are_kept_in_networkx() -> None:
    graph = to_networkx(hostile())
    assert any(
        str(facts.get("type", "")).startswith("<script>") or str(name).startswith("<script>") for name, facts in graph.nodes(data=True)
    )


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))


@pytest.mark.parametrize("there", [True, False])
def test_hostile_names_are_text_in_a_notebook(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if there and OWN is None:
        pytest.skip("needs graphviz-pure: pip install 'gradlineage[draw]'")
    if not there:
        without_graphviz(monkeypatch)
    fragment = to_fragment(hostile())
    allowed = {"div", "p", "code", "pre", "svg", "g", "title", "polygon", "polyline", "path", "ellipse", "text", "a"}
    for tag, attributes in Tags(fragment).found:
        assert tag in allowed
        assert not [name for name in attributes if name.startswith("on") or name in ("href", "src", "autofocus")]


# -- Mermaid -----------------------------------------------------------------------------------------------------------------------------------


def test_mermaid_has_the_nodes_containers_and_wires_of_the_picture(gated: Lineage) -> None:
    lines = mermaid_lines(to_mermaid(gated))
    drawing = draw(gated)
    assert len([line for line in lines if " --> " in line or "-->|" in line or "-.->" in line]) == len(drawing.wires)
    assert lines.count("    end") + lines.count("        end") + lines.count("            end") == len(drawing.containers)
    assert '            n2("blocks.0.norm<br>LayerNorm")' in lines
    assert any('-.->|"cut: detach"|' in line for line in lines)
    assert any('{"bool is False<br>test_page.py:' in line for line in lines)
    assert not any("bool" in line for line in to_mermaid(gated, decisions=False).splitlines())
    assert "2×4" in to_mermaid(gated, shapes=True)


def test_mermaid_is_collapsed_until_it_can_be_drawn() -> None:
    lineage = gradlineage.trace(nn.Sequential(*(nn.Sequential(*(lin() for _ in range(20))) for _ in range(20))), data())
    assert len(draw(lineage).wires) > 400
    assert len([line for line in mermaid_lines(to_mermaid(lineage)) if "-->" in line]) == 21


# -- networkx ----------------------------------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """A layer with two results."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 2


def ported() -> Lineage:
    def run(self: Any, x: Tensor) -> Tensor:
        left, right = self.two(self.a(x))
        joined = torch.cat([right.relu(), left, right])
        return self.b(joined + self.a(x).detach().repeat(3, 1))  # type: ignore[no-any-return]

    return gradlineage.trace(Net(run, a=lin(), b=lin(), two=Two()), data())


def test_networkx_has_an_edge_for_every_link(gated: Lineage) -> None:
    for lineage in (gated, gated.collapse(depth=1), ported()):
        graph = to_networkx(lineage)
        expected: Counter[Any] = Counter()
        readers: list[tuple[str, Any]] = [(c.label, f) for c in lineage.layers for f in (*c.inputs, *c.hidden)]
        readers += [(j.label, f) for j in lineage.joins for f in j.inputs]
        readers += [(f"output:{n}", f) for n, f in enumerate(lineage.outputs)]
        for reader, flow in readers:
            for link in flow.links:
                source = link.source
                if isinstance(source, Join):
                    name, port = source.label, None
                elif source.kind == "call":
                    name, port = lineage[source].label, source.port
                else:
                    name, port = source.label, None
                expected[name, reader, port, link.ops, link.differentiable, link.count] += 1
        found = Counter((a, b, e["port"], e["ops"], e["differentiable"], e["count"]) for a, b, e in graph.edges(data=True))
        assert found == expected


def test_two_ways_between_the_same_nodes_are_two_edges_with_ports_and_places() -> None:
    graph = to_networkx(ported())
    assert graph.is_directed()
    assert graph.is_multigraph()
    (join,) = (name for name, facts in graph.nodes(data=True) if facts["kind"] == "join")
    edges = sorted((e["position"], e["argument"], e["port"], e["ops"]) for e in graph.get_edge_data("two", join).values())
    assert edges == [(0, "[0]", 1, ("relu", "cat")), (1, "[1]", 0, ("cat",)), (2, "[2]", 1, ("cat",))]
    assert graph.get_edge_data("a[1]", join)[0]["differentiable"] is False


def test_networkx_nodes_have_what_the_lineage_knows(gated: Lineage) -> None:
    graph = to_networkx(gated)
    assert graph.graph["model"] == "Gated"
    for call in gated.layers:
        facts = graph.nodes[call.label]
        shapes = tuple(f.shape for f in call.outputs)
        assert (facts["kind"], facts["type"], facts["path"], facts["nth"]) == ("layer", call.type, call.path, call.nth)
        assert (facts["shapes"], facts["parameters"], facts["where"], facts["count"]) == (shapes, call.parameters[0], call.where, 1)
    assert {facts["kind"] for _, facts in graph.nodes(data=True)} == {"layer", "join", "input", "output"}
    import networkx

    assert networkx.is_directed_acyclic_graph(graph)
    assert set(networkx.ancestors(graph, "head")) >= {call.label for call in gated.ancestors("head")}


def test_two_unknowns_are_two_nodes_in_networkx() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        one, other = (torch.from_numpy(x.numpy() * n) for n in (2, 3))
        return self.a(one) + self.b(one) + self.c(other)  # type: ignore[no-any-return]

    graph = to_networkx(gradlineage.trace(Net(run, a=lin(), b=lin(), c=lin()), data()))
    assert {(a, b) for a, b in graph.edges() if a.startswith("unknown")} == {("unknown:0", "a"), ("unknown:0", "b"), ("unknown:1", "c")}
    assert all(graph.nodes[name]["reason"].startswith("made where") for name in ("unknown:0", "unknown:1"))


# -- notebook ----------------------------------------------------------------------------------------------------------------------------------


@graphviz
def test_in_a_notebook_a_lineage_is_a_picture_that_fits(gated: Lineage) -> None:
    bundle = gated._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/plain"] == repr(gated)
    assert bundle["text/html"].count("<svg") == 1
    large = gradlineage.trace(Gated(20), torch.randn(2, 4))
    fragment = to_fragment(large)
    assert "shown as" in fragment
    assert fragment.count('class="node"') < 60


# -- without Graphviz --------------------------------------------------------------------------------------------------------------------------


def without_graphviz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")


def test_without_graphviz_the_error_names_the_two_ways_to_get_it(gated: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    without_graphviz(monkeypatch)
    for make in (to_svg, to_png):
        with pytest.raises(LineageError, match=r"pip install 'gradlineage\[draw\]'.*apt install graphviz.*brew install graphviz"):
            make(gated)
    assert to_dot(gated).startswith("digraph {")
    assert to_mermaid(gated).startswith("flowchart TD")
    assert "<pre>" in to_fragment(gated)


def test_without_graphviz_the_command_says_so_and_leaves_no_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("draw net.py:Net --input 2x4 -o net.json")[0] == 0
    without_graphviz(monkeypatch)
    status, out, err = run("draw net.json -o net.svg")
    assert (status, out) == (2, "")
    assert "pip install 'gradlineage[draw]'" in err
    assert not (tmp_path / "net.svg").exists()
    assert run("draw net.json -o net.dot")[0] == run("draw net.json -o net.mmd")[0] == run("draw net.json -o net.html")[0] == 0


def test_a_graphviz_that_fails_is_told_of_with_its_reason(gated: Lineage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho 'no layout today' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LineageError, match=r"dot could not lay out the picture: no layout today"):
        to_svg(gated)


def test_dot_on_the_path_comes_first(gated: Lineage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\necho "$1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert to_svg(gated) == "-Tsvg\n"


# -- the command -------------------------------------------------------------------------------------------------------------------------------

SUFFIXES = {
    "svg": b"<?xml",
    "png": b"\x89PNG\r\n\x1a\n",
    "dot": b"digraph {",
    "html": b"<!doctype html>",
    "mmd": b"flowchart TD",
    "json": b'{\n"schema": "gradlineage/1"',
}


@graphviz
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_name_of_the_file_says_what_is_drawn(suffix: str, run: Run, tmp_path: Path) -> None:
    status, out, err = run(f"draw net.py:Net --input 2x4 -o net.{suffix}")
    assert (status, out, err) == (0, "", "")
    assert (tmp_path / f"net.{suffix}").read_bytes().startswith(SUFFIXES[suffix])
    status, out, err = run(f"draw net.py:Net --input 2x4 -o NET.{suffix.upper()}")
    assert (status, out, err) == (0, "", "")
    assert (tmp_path / f"NET.{suffix.upper()}").read_bytes() == (tmp_path / f"net.{suffix}").read_bytes()


@pytest.mark.parametrize("name", ["net", "net.pdf", "net.svg.txt"])
def test_another_name_is_refused_before_the_model_runs(name: str, run: Run, tmp_path: Path) -> None:
    status, out, err = run(f"draw net.py:no_such_thing -o {name}")
    assert (status, out) == (2, "")
    assert "expected .svg, .png" in err
    assert not (tmp_path / name).exists()


@graphviz
def test_a_saved_file_is_drawn_without_torch(run: Run, tmp_path: Path) -> None:
    assert run("draw net.py:Net --input 2x4 -o saved.json")[0] == 0
    code = """
import sys
from gradlineage.cli import main
for suffix in ("svg", "png", "dot", "html", "mmd", "json"):
    assert main(["draw", "saved.json", "-o", f"again.{suffix}"]) == 0
assert main(["draw", "saved.json", "--depth", "1", "--roll", "--shapes", "--no-decisions", "-o", "more.svg"]) == 0
assert main(["draw", "saved.json", "--before", "saved.json", "-o", "same.svg"]) == 0
assert not {"torch", "numpy", "networkx"} & set(sys.modules), set(sys.modules)
"""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for suffix, begin in SUFFIXES.items():
        assert (tmp_path / f"again.{suffix}").read_bytes().startswith(begin)
    assert (tmp_path / "again.json").read_text() == (tmp_path / "saved.json").read_text()


def test_what_is_too_large_to_read_is_collapsed_and_the_command_says_so(run: Run, tmp_path: Path) -> None:
    status, _, err = run("draw net.py:deep --input 2x4 -o net.dot")
    assert status == 0
    assert "90 rows, collapsed to 30 with --depth 1; open it with --full, --depth 2 or --layer" in err
    assert len(nodes_in((tmp_path / "net.dot").read_text())) == 32
    status, _, err = run("draw net.py:deep --input 2x4 --full -o net.dot")
    assert (status, err) == (0, "")
    assert len(nodes_in((tmp_path / "net.dot").read_text())) == 92
    assert run("draw net.py:deep --input 2x4 --collapse 1? -o net.dot")[0] == 0
    assert len(nodes_in((tmp_path / "net.dot").read_text())) == 72


def test_changes_since_a_saved_lineage_are_marked_and_only_where_they_can_be(run: Run, tmp_path: Path) -> None:
    assert run("draw net.py:Net --input 2x4 -o before.json")[0] == 0
    assert run("draw net.py:Longer --input 2x4 --before before.json -o change.dot")[0] == 0
    assert "+ more" in (tmp_path / "change.dot").read_text()
    status, _, err = run("draw net.py:Longer --input 2x4 --before before.json -o change.html")
    assert (status, "--before marks changes in .svg, .png and .dot, not in .html" in err) == (2, True)


def test_what_was_before_is_collapsed_as_what_is_now(run: Run, tmp_path: Path) -> None:
    assert run("draw net.py:deep --input 2x4 -o before.json")[0] == 0
    for options in ("", "--depth 1", "--collapse '1*'", "--full"):
        assert run(f"draw before.json --before before.json {options} -o same.dot")[0] == 0
        text = (tmp_path / "same.dot").read_text()
        assert not re.search(r'label="[+−] ', text), options
    assert run("draw net.py:deep --set blocks=31 --input 2x4 --before before.json -o change.dot")[0] == 0
    assert re.findall(r'label="([+−] [^\\]*)', (tmp_path / "change.dot").read_text()) == ["+ 30"]


def test_changes_and_loops_do_not_go_together(run: Run) -> None:
    status, _, err = run("draw before.json --before before.json --roll -o same.dot")
    assert (status, "--before compares single calls and cannot go with --roll" in err) == (2, True)


def test_shapes_are_in_the_page_too_if_asked(run: Run, tmp_path: Path) -> None:
    for options, there in (("", False), ("--shapes", True)):
        assert run(f"draw net.py:Net --input 2x4 {options} -o net.html")[0] == 0
        assert ("2×4" in (tmp_path / "net.html").read_text()) == there


# -- size --------------------------------------------------------------------------------------------------------------------------------------


def cpu() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@graphviz
@pytest.mark.slow
def test_two_thousand_layers_are_drawn_in_under_a_minute() -> None:
    model = nn.Sequential(*(nn.Sequential(*(Gated(1).blocks[0] for _ in range(10))) for _ in range(50)))
    lineage = gradlineage.trace(model, torch.randn(2, 4))
    assert len(lineage.layers) == 2000
    start = cpu()
    svg = to_svg(lineage)
    assert cpu() - start < 60
    assert svg.count('class="node"') == len(draw(lineage).spots) == 2502
    start = time.process_time()
    to_dot(lineage)
    assert time.process_time() - start < 10


@pytest.fixture(scope="module")
def resnet50() -> Lineage:
    models = pytest.importorskip("torchvision.models", reason="needs torchvision")
    return gradlineage.trace(models.resnet50(weights=None).eval(), torch.randn(1, 3, 64, 64))


@pytest.mark.filterwarnings("ignore")
def test_resnet_50_can_be_read_when_collapsed(resnet50: Lineage) -> None:
    assert len(draw(resnet50).spots) > 160
    assert [s.lines[0] for s in draw(resnet50.collapse(depth=1)).spots if s.kind == "container"] == [f"layer{n}" for n in (1, 2, 3, 4)]
    shown, depth = fitting(resnet50, 70)
    drawing = draw(shown)
    assert depth == 2
    assert len([s for s in drawing.spots if s.kind == "container"]) == 16
    assert len(drawing.spots) <= 30
    assert set(drawing.containers.values()) == {f"layer{n} (Sequential)" for n in (1, 2, 3, 4)}
    one = draw(resnet50.collapse("layer[134]"))
    assert 40 < len(one.spots) < 70


# -- unions, differences, loops ----------------------------------------------------------------------------------------------------------------


class Exit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Linear(1, 1), nn.Linear(1, 1)
        nn.init.ones_(self.stem.weight)
        nn.init.zeros_(self.stem.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return h if h.sum() > 0 else self.deep(h)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def union() -> Lineage:
    return gradlineage.trace_many(Exit(), [torch.tensor([[float(x)]]) for x in (1, 2, 3, -1)]).union()


def test_a_union_has_shares_on_wires_and_nodes(union: Lineage) -> None:
    drawing = draw(union)
    assert [s.lines[0] for s in drawing.spots] == ["x", "stem", "deep 25%", "output"]
    ways = wires(drawing)
    assert {ends: (w.text, w.share) for ends, w in ways.items()} == {
        ("x", "stem"): ("", 1.0),
        ("stem", "deep 25%"): ("", 0.25),
        ("stem", "output"): ("75%", 0.75),
        ("deep 25%", "output"): ("25%", 0.25),
    }
    assert 'label=" 75% "' in to_dot(union)
    assert '"75%"' in to_mermaid(union)


def test_a_wire_of_a_union_is_thicker_the_more_passes_went_there(union: Lineage) -> None:
    found = re.findall(r"n\d+ -> n\d+ .*penwidth=([\d.]+)", to_dot(union))
    widths = {wire.share: float(width) for wire, width in zip(draw(union).wires, found, strict=True)}
    assert widths[0.25] < widths[0.75] < widths[1.0]
    assert "penwidth" not in "".join(attributes for _, _, attributes in wires_in(to_dot(gradlineage.trace(Exit(), torch.ones(1, 1)))))


def test_a_difference_of_unions_is_marked_whatever_their_shares(union: Lineage) -> None:
    once = gradlineage.trace(Exit(), torch.ones(1, 1))
    assert {s.lines[0]: s.change for s in draw(union, before=once).spots} == {"x": "", "stem": "", "deep 25%": "added", "output": ""}


def test_networkx_counts_passes_of_a_union(union: Lineage) -> None:
    graph = to_networkx(union)
    assert (graph.nodes["stem"]["count"], graph.nodes["deep"]["count"]) == (4, 1)
    assert [e["count"] for _, _, e in graph.edges("stem", data=True)] == [1, 3]


def test_a_difference_marks_what_is_new_and_what_is_gone() -> None:
    def before(self: Any, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.a(x))))  # type: ignore[no-any-return]

    def after(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(self.d(h) + h)  # type: ignore[no-any-return]

    old = gradlineage.trace(Net(before, a=lin(), b=lin(), c=lin()), data())
    new = gradlineage.trace(Net(after, a=lin(), d=lin(), c=lin()), data())
    drawing = draw(new, before=old)
    changes = {s.lines[0]: s.change for s in drawing.spots}
    assert changes == {"args[0]": "", "a": "", "d": "added", ":add": "added", "c": "", "output": "", "b": "removed"}
    ways = {ends: w.change for ends, w in wires(drawing).items()}
    assert ways["a", "d"] == ways["d", ":add"] == ways["a", ":add"] == ways[":add", "c"] == "added"
    assert ways["a", "b"] == ways["b", "c"] == "removed"
    assert ways["c", "output"] == ""
    dot = to_dot(new, before=old)
    labels = [label(attributes).split("\n")[0] for attributes in nodes_in(dot).values()]
    assert {"+ d", "+ add", "− b"} <= set(labels)
    added, removed = (color for color, _ in dot_module._CHANGES.values())
    for name, (color, style) in {"+ d": (added, "rounded,filled"), "− b": (removed, "rounded,dashed")}.items():
        attributes = next(a for a in nodes_in(dot).values() if label(a).startswith(name))
        assert f'color="{color}"' in attributes
        assert style in attributes
    gone = [attributes for _, _, attributes in wires_in(dot) if removed in attributes]
    assert len(gone) == 2
    assert all("style=dashed" in attributes for attributes in gone)


def test_nothing_is_marked_where_nothing_changed(gated: Lineage) -> None:
    drawing = draw(gated, before=gated)
    assert {s.change for s in drawing.spots} == {w.change for w in drawing.wires} == {""}
    assert to_dot(gated, before=gated) == to_dot(gated)


class Steps(nn.Module):
    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.cell, self.head, self.alone = nn.GRUCell(4, 4), nn.Linear(4, 4), alone

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.head(x)
        for _ in range(7):
            h = self.cell(x, h)
            if not self.alone:
                x = torch.relu(self.head(h))
        return h


def test_a_rolled_loop_is_one_node_or_a_frame_with_its_number_of_turns() -> None:
    one = gradlineage.trace(Steps(True), data()).roll()
    drawing = draw(one)
    assert [s.lines for s in drawing.spots if s.kind == "layer"] == [("head", "Linear"), ("cell ×7", "GRUCell")]
    again = [w for w in drawing.wires if w.source == w.target]
    assert [(w.back, w.text) for w in again] == [(1, "hx")]
    assert "constraint=false" in next(a for s, t, a in wires_in(to_dot(one)) if s == t)
    several = gradlineage.trace(Steps(False), data()).roll()
    assert "loop ×" in to_dot(several)
    assert any(re.search(r'subgraph c\d+\["loop ×\d"\]', line) for line in to_mermaid(several).splitlines())
    assert "×" not in to_dot(one.unroll())


def test_what_feeds_the_first_turn_alone_is_the_same_node_as_elsewhere() -> None:
    drawing = draw(gradlineage.trace(Net(lambda self, x: self.b(x + _grown(self, x)), a=lin(), b=lin()), data()).roll())
    assert [s.lines[0] for s in drawing.spots if s.kind == "input"] == ["args[0]"]
    assert wires(drawing)["args[0]", "a ×5"].text == "first"


def _grown(self: Any, x: Tensor) -> Tensor:
    for _ in range(5):
        x = self.a(x)
    return x


# -- what the documents say of it --------------------------------------------------------------------------------------------------------------


def first_cells(document: str, heading: str) -> list[str]:
    """The first cells of the table whose first heading that is."""
    text = (ROOT / "docs" / document).read_text("utf-8")
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[ |-]+\n((?:\|.*\n)+)", text, re.M)
    return [row.split("|")[1].strip() for row in table.splitlines()]


def test_families_are_documented_with_their_words() -> None:
    text = (ROOT / "docs" / "views.md").read_text("utf-8")
    rows = {name: words.split(", ") for name, words in re.findall(r"^\| ([a-z]+) \| ([a-z, ]+) \|$", text, re.M)}
    assert {name: rows.get(name) for name in FAMILIES} == {name: list(words) for name, (words, _) in FAMILIES.items()}
    assert first_cells("views.md", "family") == list(FAMILIES)


def test_every_kind_of_node_is_documented() -> None:
    text = (ROOT / "docs" / "views.md").read_text("utf-8")
    table = text[text.index("| shape |") : text.index("| wire |")]
    assert set(re.findall(r"`(\w+)`", table)) >= set(dot_module._STYLES)


def test_every_attribute_of_networkx_is_documented(gated: Lineage, union: Lineage) -> None:
    graphs = [to_networkx(lineage) for lineage in (gated, union, ported())]
    nodes = {name for graph in graphs for _, facts in graph.nodes(data=True) for name in facts}
    edges = {name for graph in graphs for _, _, facts in graph.edges(data=True) for name in facts}
    for heading, names in (("attribute of a node", nodes), ("attribute of an edge", edges)):
        documented = {name for cell in first_cells("views.md", heading) for name in re.findall(r"`(\w+)`", cell)}
        assert documented == names
