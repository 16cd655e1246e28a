"""The pictures in the documents are those that the code draws now."""

from __future__ import annotations

import importlib
import re
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("pictures")


def said(svg: str) -> list[str]:
    """What a picture says, line by line: shapes, texts, colours, what leads where.

    Places and sizes hang on the version of Graphviz and on the fonts at hand, tooltips on the lines of torchvision.
    """
    text = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    text = re.sub(r"\s(?:points|d|x|y|cx|cy|rx|ry|width|height|viewBox|transform|xlink:title)=\"[^\"]*\"", "", text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_every_picture_in_a_document_is_drawn_by_its_snippets_and_there_are_no_others(pictures: Any) -> None:
    drawn = [name for names in pictures.drawn_by().values() for name in names]
    assert len(drawn) == len(set(drawn)) >= 6
    assert {path.name for path in pictures.FOLDER.iterdir()} == set(drawn)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["README.md", "comparison.md", "paths.md", "views.md"])
def test_pictures_are_current(name: str, pictures: Any) -> None:
    if shutil.which("graphviz-pure", path=sysconfig.get_path("scripts")) is None:
        pytest.skip("needs graphviz-pure: pip install 'gradlineage[draw]'")
    drawn_by = pictures.drawn_by()
    (document,) = (path for path in drawn_by if path.name == name)
    for file, svg in pictures.draw(document, drawn_by[document]).items():
        committed = (pictures.FOLDER / file).read_text("utf-8")
        assert said(svg) == said(committed), f"{file} is not current; draw it again with: python docs/pictures.py"


def test_documents_with_pictures_are_all_checked(pictures: Any) -> None:
    assert {path.name for path in pictures.drawn_by()} == {"README.md", "comparison.md", "paths.md", "views.md"}


def test_pictures_are_small_and_no_two_runs_differ(pictures: Any) -> None:
    for path in pictures.FOLDER.iterdir():
        assert path.stat().st_size < 40_000, path.name
    if shutil.which("graphviz-pure", path=sysconfig.get_path("scripts")) is not None:
        document = ROOT / "docs" / "views.md"
        names = pictures.drawn_by()[document]
        assert pictures.draw(document, names) == pictures.draw(document, names)
