"""The page for a browser: what is in the file, and in a real browser what it does."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlineage
from gradlineage import Lineage, LineageError
from gradlineage.views import page as page_module
from gradlineage.views.drawing import FAMILIES
from gradlineage.views.page import to_html

from .nets import Net, lin

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "</template><img src=x onerror=alert(3)>",
    "</title></style><svg onload=alert(4)>",
    '"; } alert(5); {',
    "' onmouseover='alert(6)",
    '" autofocus onfocus="alert(7)',
    "two\nlines\rand\ttabs",
    "&lt;b&gt; &amp; ]]> <!-- -->",
    "{{ 7 * 7 }} {% raw %}",
    "ünïcødé \u2028\u2029 \u202e \x00 \ud800 名前",
    "\\N \\\\ %s ${x} `y`",
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Gated(nn.Module):
    """Blocks, a decision, an argument that is not used, a way without gradient."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.gate = nn.Linear(4, 1)
        self.pick = Net(lambda self, x, spare: self.fc(x), fc=lin())
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.blocks(x)
        if self.gate(x).mean() > 100:
            x = x + 1
        x = self.pick(x, x.detach() * 2)
        out: Tensor = self.head(x.detach())
        return out


def renamed(lineage: Lineage, names: Callable[[str], str]) -> Lineage:
    """The same with other paths and types."""
    graph = lineage._graph
    calls = tuple(c._replace(path=names(c.path), type=names(c.type), where=names(c.where)) for c in graph.calls)
    nodes = tuple(n._replace(name=names(n.name) if n.kind in ("op", "input") and n.name else n.name) for n in graph.nodes)
    return Lineage(graph._replace(calls=calls, nodes=nodes, model=names(graph.model), notes=(names("note"),)))


def hostile() -> Lineage:
    made: dict[str, str] = {}

    def name(plain: str) -> str:
        return made.setdefault(plain, f"{HOSTILE[len(made) % len(HOSTILE)]}{len(made)}")

    return renamed(gradlineage.trace(Gated(), torch.randn(2, 4)), name)


def without_graphviz(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(dot: str, format: str) -> bytes:
        raise LineageError("a picture needs Graphviz: pip install 'gradlineage[draw]'")

    monkeypatch.setattr(page_module, "layout", none)


class Parsed(HTMLParser):
    """Tags with attributes, and the text within them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.data = ""
        self.stack = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.stack = tag

    def handle_data(self, data: str) -> None:
        if self.stack == "script" and self.tags[-1][1].get("id") == "data":
            self.data += data
        elif self.stack not in ("script", "style"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def gated() -> Lineage:
    torch.manual_seed(0)
    return gradlineage.trace(Gated(), torch.randn(2, 4))


# -- the file ----------------------------------------------------------------------------------------------------------------------------------


def test_a_page_loads_nothing_from_elsewhere(gated: Lineage) -> None:
    text = to_html(gated)
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "").replace("http://www.w3.org/2000/svg", "")
    for tag, attributes in Parsed(text).tags:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base", "use", "image")
        assert not {"src", "srcset", "data", "action", "style", "xlink:href"} & set(attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    policy = next(a["content"] for t, a in Parsed(text).tags if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


@pytest.mark.parametrize("graphviz", [True, False])
def test_hostile_names_are_text(graphviz: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not graphviz:
        without_graphviz(monkeypatch)
    plain, bad = (Parsed(to_html(lineage)) for lineage in (gradlineage.trace(Gated(), torch.randn(2, 4)), hostile()))
    # hostile names are longer, so there may be other <wbr>; and the note that the hostile one has is one more paragraph
    tags = [[tag for tag, a in page.tags if tag != "wbr" and a.get("class") != "note"] for page in (plain, bad)]
    assert set(tags[1]) <= set(tags[0]) | {"i"}
    assert tags[1].count("script") == tags[0].count("script") == 2
    for _, attributes in bad.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "autofocus"]
    items = json.loads(bad.data)["items"]
    assert not set("<>&\u2028\u2029") & set(bad.data)
    assert any(item["n"].startswith("<script>alert(1)</script>") for item in items) or any("<script>" in item["t"] for item in items)
    shown = "".join(bad.texts)
    assert "{{ 7 * 7 }}" in shown
    assert "<script>alert(1)</script>" in shown
    to_html(hostile()).encode()  # lone surrogates are written out


def test_the_same_lineage_gives_the_same_page_also_from_a_file(gated: Lineage) -> None:
    assert to_html(gated) == to_html(gated) == to_html(Lineage.from_json(gated.to_json()))


def test_without_graphviz_the_page_has_the_table_and_says_how_to_get_pictures(gated: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    without_graphviz(monkeypatch)
    text = to_html(gated)
    assert "pip install &#39;gradlineage[draw]&#39;" in text
    assert "<template" not in text
    assert text.count("<tr id=") > 10


def test_rows_are_those_of_the_text_table_and_heads_for_containers(gated: Lineage) -> None:
    items = json.loads(Parsed(to_html(gated)).data)["items"]
    layers = [item["n"] for item in items if item["k"] == "layer"]
    assert layers == [call.label for call in gated.layers]
    assert [item["n"] for item in items if item["k"] == "join"] == [join.label for join in gated.joins]
    heads = [item["n"] for item in items if item["k"] == "container"]
    assert heads == ["blocks", "blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp", "pick"]
    norm = next(item for item in items if item["n"] == "blocks.1.norm")
    assert items[norm["h"]]["n"] == "blocks.1"
    assert [e[0] for _, _, entries in norm["i"] for e in entries] == ["blocks.0:add"]
    assert {flag for item in items for flag in item.get("f", ())} == {"breaks", "decisions", "unused"}


def test_nodes_and_clusters_of_every_picture_are_those_items_whose_names_they_show(gated: Lineage) -> None:
    text = to_html(gated)
    items = json.loads(Parsed(text).data)["items"]
    seen = 0
    for svg in re.findall(r"<template.*?</template>", text, re.S):
        for kind, number, words in re.findall(r'<g class="(n|c)[^"]*" data-i="(\d+)">.*?<text[^>]*>([^<]*)</text>', svg):
            label = items[int(number)]["n"]
            assert words.startswith(label) if kind == "c" else label.endswith((words, f":{words}")) or label.startswith("? "), (
                label,
                words,
            )
            seen += 1
    assert seen > 50
    assert 'data-i="-1"' not in text


def test_lines_of_code_are_shown_and_can_be_left_out(gated: Lineage) -> None:
    assert "x = self.embed(x)" in to_html(gated)
    assert "self.embed(x)" not in to_html(gated, source=False)


def test_a_union_shows_shares_and_a_rolled_lineage_its_loop() -> None:
    runs = gradlineage.trace_many(
        Net(lambda s, x: s.a(x) if x.sum() > 0 else s.b(x), a=lin(), b=lin()), [torch.ones(2, 4)] * 3 + [-torch.ones(2, 4)]
    )
    union = to_html(runs.union())
    assert "<small>75%</small>" in union
    assert "the union of 4 passes" in union

    def loop(self: Any, x: Tensor) -> Tensor:
        for _ in range(20):
            x = self.cell(x)
        return x

    rolled = to_html(gradlineage.trace(Net(loop, cell=lin()), torch.randn(2, 4)).roll())
    assert ">cell ×20<" in rolled


def test_what_is_too_large_for_one_picture_is_left_out_and_said(gated: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_MOST", (12, 100))
    data = json.loads(Parsed(to_html(gated)).data)
    assert [p["too"] for p in data["pictures"] if p["of"] < 0] == [False, False, True, True]
    monkeypatch.setattr(page_module, "_MOST", (1, 1))
    assert "<tr id=" in to_html(gated)


def test_colours_of_families_are_those_of_every_picture() -> None:
    style = pathlib.Path(page_module.__file__).with_name("page.css").read_text()
    for family, (_, colour) in FAMILIES.items():
        assert f".n.f-{family} {{ fill: light-dark({colour}," in style


def test_no_layer_at_all_still_gives_a_page() -> None:
    assert "<table" in to_html(gradlineage.trace(Net(lambda s, x: x + x), torch.randn(2)))


# -- in a browser ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("needs a browser: chromium, chromium-browser or google-chrome on the PATH")
    with api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page opened from a file, with all that went wrong in it and all that it asked for."""

    def __init__(self, browser: Any, folder: pathlib.Path, text: str, **options: Any) -> None:
        self.wrong: list[str] = []
        self.asked: list[str] = []
        path = folder / "page.html"
        path.write_text(text, encoding="utf-8")
        self.tab = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
        self.tab.add_init_script("window.alert = () => { window.alerted = true; }")
        self.tab.on("dialog", self._dialog)
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("console", lambda message: self.wrong.append(message.text) if message.type in ("error", "warning") else None)
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(path.as_uri())

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append("dialog")
        dialog.dismiss()

    def row(self, label: str) -> Any:
        name = re.compile(rf"^{re.escape(label)}$")
        return self.tab.locator("tbody tr").filter(has=self.tab.locator(".name").filter(has_text=name))

    def node(self, label: str) -> Any:
        number = self.row(label).get_attribute("data-i")
        return self.tab.locator(f'#pane .n[data-i="{number}"]')

    def shown(self) -> list[str]:
        return [text.strip() for text in self.tab.locator("tbody tr:visible .name").all_inner_texts()]

    def labels(self, query: str) -> list[str]:
        return [text.strip() for text in self.tab.locator(f"{query} .name").all_inner_texts()]

    def state(self, label: str) -> set[str]:
        return set(self.row(label).get_attribute("class").split())


@pytest.fixture
def opened(browser: Any, tmp_path: pathlib.Path, gated: Lineage) -> Iterator[Opened]:
    made = Opened(browser, tmp_path, to_html(gated))
    yield made
    assert made.wrong == []
    assert len(made.asked) == 1
    made.tab.close()


def depth(opened: Opened, name: str) -> None:
    opened.tab.get_by_role("button", name=name, exact=True).click()


def test_opens_fitted_with_rows_as_deep_as_the_picture(opened: Opened) -> None:
    box, room = opened.tab.locator("#pane .stage").bounding_box(), opened.tab.locator("#pane").bounding_box()
    assert box["x"] >= room["x"]
    assert box["y"] >= room["y"]
    assert box["x"] + box["width"] <= room["x"] + room["width"]
    assert box["y"] + box["height"] <= room["y"] + room["height"]
    depth(opened, "1")
    assert [name for name in opened.shown() if not name.startswith("?")] == ["embed", "blocks", "gate", "pick", "head"]


def test_choosing_a_node_lights_its_row_and_all_that_it_comes_from_and_goes_to(opened: Opened) -> None:
    depth(opened, "all")
    opened.node("blocks.0.norm").click()
    assert "sel" in opened.state("blocks.0.norm")
    assert opened.row("blocks.0.norm").get_attribute("aria-selected") == "true"
    assert opened.labels("tr.up") == ["embed"]
    assert {"blocks.0.mlp.0", "blocks.1:add", "gate", "head"} <= set(opened.labels("tr.down"))
    assert "up" in opened.node("embed").get_attribute("class").split()
    assert opened.tab.locator("#pane .w.up").count() == 2
    panel = opened.tab.locator("#panel").inner_text()
    assert "LayerNorm" in panel
    assert "(2, 4) float32" in panel
    assert "test_page.py" in panel
    opened.tab.locator("#panel").get_by_text("blocks.0.mlp.0").click()
    assert "sel" in opened.state("blocks.0.mlp.0")


def test_a_label_in_connected_to_jumps_there(opened: Opened) -> None:
    depth(opened, "all")
    opened.row("head").locator("a").click()
    assert opened.labels("tr.sel") == ["pick.fc"]


def test_breaks_are_listed_and_told_of_where_they_matter(opened: Opened) -> None:
    assert "No gradient flows back" in opened.tab.locator("#breaks summary").inner_text()
    opened.row("head").click()
    assert "detach" in opened.tab.locator("#panel").inner_text()


def test_depths_fold_table_and_picture_alike_and_a_container_opens(opened: Opened) -> None:
    depth(opened, "2")
    assert {"blocks.0", "blocks.1", "pick.fc"} <= set(opened.shown())
    assert "blocks.0.norm" not in opened.shown()
    opened.node("blocks.0").dblclick()
    assert opened.tab.locator("#crumbs").inner_text() == "whole model › blocks › blocks.0"
    assert opened.tab.locator("#pane .n:not(.outside)").count() == 5
    assert "blocks.0.norm" in opened.shown()
    opened.tab.keyboard.press("Escape")
    opened.tab.keyboard.press("Escape")
    assert opened.tab.locator("#crumbs").inner_text() == ""
    opened.row("blocks.1").locator(".fold").click()
    assert "blocks.1.norm" in opened.shown()


def test_finding_narrows_the_table_and_enter_goes_from_one_to_the_next(opened: Opened) -> None:
    opened.tab.keyboard.press("/")
    opened.tab.keyboard.type("layernorm")
    assert opened.shown() == ["blocks.0.norm", "blocks.1.norm"]
    assert opened.tab.locator("#found").inner_text() == "2 found"
    opened.tab.keyboard.press("Enter")
    opened.tab.keyboard.press("Enter")
    assert opened.labels("tr.sel") == ["blocks.1.norm"]
    assert opened.tab.locator("#found").inner_text() == "2 of 2"
    opened.tab.keyboard.press("Escape")
    assert len(opened.shown()) > 4
    opened.tab.locator("#find").fill("nothing like it")
    assert opened.tab.get_by_text("No row matches").is_visible()


def test_filters_show_only_what_they_say(opened: Opened) -> None:
    flags = [chip.get_attribute("data-flag") for chip in opened.tab.locator("[data-flag]").all()]
    assert flags == ["breaks", "decisions", "unused"]
    for flag, start in (("breaks", "head"), ("decisions", "? bool at "), ("unused", "pick")):
        chip = opened.tab.locator(f'[data-flag="{flag}"]')
        chip.click()
        assert chip.get_attribute("aria-pressed") == "true"
        assert len(opened.shown()) == int(chip.locator("b").inner_text()), opened.shown()
        assert all(name.startswith(start) for name in opened.shown()), opened.shown()
        chip.click()
    assert len(opened.shown()) > 3


def test_everything_can_be_done_by_keyboard(opened: Opened) -> None:
    depth(opened, "1")
    opened.tab.locator("tbody tr").first.focus()
    keys = opened.tab.keyboard
    keys.press("ArrowDown")
    keys.press("ArrowRight")
    assert "blocks.0" in opened.shown()
    keys.press("ArrowDown")
    keys.press("Enter")
    assert opened.labels("tr.sel") == ["blocks.0"]
    keys.press("o")
    assert "blocks.0" in opened.tab.locator("#crumbs").inner_text()
    keys.press("Escape")
    assert opened.tab.locator("#panel").is_hidden()
    before = opened.tab.locator(".stage").get_attribute("transform")
    keys.press("+")
    assert opened.tab.locator(".stage").get_attribute("transform") != before
    keys.press("0")
    opened.tab.locator("#pane").focus()
    keys.press("ArrowDown")
    assert opened.tab.locator(".stage").get_attribute("transform") != before
    order = []
    opened.tab.locator("#find").focus()
    for _ in range(26):
        keys.press("Tab")
        order.append(opened.tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
    rows = [name for name in order if re.fullmatch(r"r\d+", name)]
    assert len(rows) == 1, order
    assert order.index("theme") < order.index("pane") < order.index(rows[0])


def test_wheel_zooms_and_dragging_moves(opened: Opened) -> None:
    room, stage, mouse = opened.tab.locator("#pane").bounding_box(), opened.tab.locator(".stage"), opened.tab.mouse
    x, y = room["x"] + 40, room["y"] + 40
    first = stage.bounding_box()
    mouse.move(x, y)
    mouse.wheel(0, -400)
    opened.tab.wait_for_timeout(100)
    second = stage.bounding_box()
    assert second["width"] > first["width"] * 1.3
    mouse.down()
    mouse.move(x + 50, y + 30, steps=4)
    mouse.up()
    third = stage.bounding_box()
    assert third["x"] - second["x"] == pytest.approx(50, abs=1)
    assert third["y"] - second["y"] == pytest.approx(30, abs=1)
    opened.tab.locator("#fit").click()
    assert stage.bounding_box()["width"] == pytest.approx(first["width"], rel=0.05)


def test_light_and_dark_follow_the_system_and_the_switch(browser: Any, tmp_path: pathlib.Path, gated: Lineage) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    opened = Opened(browser, tmp_path, to_html(gated), color_scheme="dark")
    dark = opened.tab.evaluate(colour)
    opened.tab.locator("#theme").click()
    light = opened.tab.evaluate(colour)
    brightness = [sum(map(int, re.findall(r"\d+", found)[:3])) for found in (dark, light)]
    assert brightness[0] < 150
    assert brightness[1] > 600
    opened.tab.locator("#theme").click()
    assert opened.tab.evaluate(colour) == dark
    assert opened.wrong == []
    opened.tab.close()


def test_hostile_names_do_not_run(browser: Any, tmp_path: pathlib.Path) -> None:
    opened = Opened(browser, tmp_path, to_html(hostile()))
    tab = opened.tab
    for button in tab.locator("[data-picture]").all():
        button.click()
        for node in tab.locator("#pane .n").all()[:30]:
            node.dispatch_event("pointerover")
            node.dispatch_event("pointerdown", {"button": 0})
            node.dispatch_event("pointerup", {"button": 0})
    for row in tab.locator("tbody tr").all():
        row.dispatch_event("click")
    tab.locator("#find").fill("<script>")
    tab.locator("#find").press("Enter")
    tab.wait_for_timeout(100)
    assert tab.evaluate("window.alerted") is None
    assert tab.locator("script").count() == 2
    assert tab.locator("img, svg[onload], [onerror], [onfocus], [onmouseover]").count() == 0
    assert opened.wrong == []
    tab.close()


def test_an_injected_script_is_stopped_by_the_policy(browser: Any, tmp_path: pathlib.Path, gated: Lineage) -> None:
    text = to_html(gated).replace("</main>", "</main><script>alert(1)</script><b id=b onclick='alert(2)'>x</b>")
    opened = Opened(browser, tmp_path, text)
    opened.tab.locator("#b").dispatch_event("click")
    assert opened.tab.evaluate("window.alerted") is None
    assert any("Content Security Policy" in text for text in opened.wrong)
    opened.tab.close()


def test_without_graphviz_the_table_works(browser: Any, tmp_path: pathlib.Path, gated: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    without_graphviz(monkeypatch)
    opened = Opened(browser, tmp_path, to_html(gated))
    opened.row("head").click()
    assert opened.labels("tr.up")
    opened.tab.keyboard.press("Escape")
    opened.tab.keyboard.press("0")
    assert opened.wrong == []
    opened.tab.close()


def test_without_a_picture_that_fits_the_page_says_so(
    browser: Any, tmp_path: pathlib.Path, gated: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "_MOST", (1, 1))
    opened = Opened(browser, tmp_path, to_html(gated))
    assert "too many for one picture. The table has all of them." in opened.tab.locator("#large").inner_text()
    opened.tab.evaluate("dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'))")
    opened.row("head").click()
    opened.tab.keyboard.press("0")
    opened.tab.keyboard.press("Escape")
    assert opened.wrong == []
    opened.tab.close()


def test_on_paper_there_are_picture_and_table(opened: Opened) -> None:
    opened.tab.emulate_media(media="print")
    opened.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.tab.locator("#find").is_hidden()
    assert opened.tab.locator("#pane svg").get_attribute("viewBox")
    assert opened.tab.locator("#scroll").evaluate("e => getComputedStyle(e).overflow") == "visible"
    opened.tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.tab.locator("#pane svg").get_attribute("viewBox") is None


@pytest.mark.slow
def test_two_thousand_layers_open_and_react_in_seconds(browser: Any, tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(*(nn.Sequential(*(Block() for _ in range(10))) for _ in range(50)))
    lineage = gradlineage.trace(model, torch.randn(2, 4))
    assert len(lineage.layers) == 2000
    text = to_html(lineage)
    assert len(text) < 15e6
    opened = Opened(browser, tmp_path, text)
    now = "performance.now()"
    assert opened.tab.evaluate(now) < 15_000
    for action in (
        lambda: depth(opened, "all"),
        lambda: opened.tab.locator("#find").fill("25.5"),
        lambda: opened.tab.locator("#find").press("Enter"),
        lambda: opened.tab.locator("#find").press("Escape"),
        lambda: depth(opened, "1"),
    ):
        start = opened.tab.evaluate(now)
        action()
        assert opened.tab.evaluate(now) - start < 6_000
    assert opened.labels("tr.sel") == ["25.5"]
    assert opened.wrong == []
    opened.tab.close()
