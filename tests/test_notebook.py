"""The notebook in the documents runs, and shows what its cells give now."""

from __future__ import annotations

import importlib
import re
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from .test_pictures import said

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    for package in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(package, reason=f"needs {package}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        return importlib.import_module("pictures").run_notebook(str(tmp_path_factory.mktemp("notebook")))


def outputs(notebook: Any) -> list[dict[str, str]]:
    """Per output its text by kind."""
    found = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [dict(output.data) if "data" in output else {output.output_type: output.text} for output in found]


def plain(given: dict[str, str]) -> dict[str, list[str]]:
    """Without what hangs on the process that ran the cell, and on where Graphviz puts things."""
    return {kind: [re.sub(r"\S*ipykernel_\d+/", "", line) for line in said(text)] for kind, text in given.items()}


def test_nothing_goes_wrong_in_any_cell(ran: Any) -> None:
    given = outputs(ran)
    assert len(given) >= 7
    assert {kind for output in given for kind in output} == {"text/plain", "text/html", "stream"}
    assert [cell.execution_count for cell in ran.cells if cell.cell_type == "code"] == list(range(1, len(given) + 2))


def test_a_lineage_shows_as_picture_and_as_text(ran: Any) -> None:
    shown = [output for output in outputs(ran) if "text/html" in output]
    assert len(shown) == 3
    for output in shown:
        assert output["text/plain"].startswith("<Lineage of ")
        assert "<script" not in output["text/html"]
        if shutil.which("graphviz-pure", path=sysconfig.get_path("scripts")) is not None:
            assert output["text/html"].count("<svg") == output["text/html"].count("</svg>") == 1
    for output, text in zip(shown, ("critic", "stem", "30%"), strict=True):
        assert text in output["text/html"]


def test_table_explanation_and_gradient_are_printed(ran: Any) -> None:
    printed = "".join(output.get("stream", "") for output in outputs(ran))
    assert "Connected to" in printed
    assert re.search(r"critic \(Linear\) .* detach ← mean ⇠ :cat", printed)
    assert "from stem.0 to critic" in printed
    assert "gradient reaches 2 of 12 parameters" in printed


def test_what_the_file_shows_is_current(ran: Any) -> None:
    if shutil.which("graphviz-pure", path=sysconfig.get_path("scripts")) is None:
        pytest.skip("needs graphviz-pure: pip install 'gradlineage[draw]'")
    nbformat: Any = importlib.import_module("nbformat")
    committed = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    nbformat.validate(committed)
    for now, then in zip(outputs(ran), outputs(committed), strict=True):
        assert plain(now) == plain(then), "draw it again with: python docs/pictures.py"
