"""Draw the pictures that README.md and the documents show, with the very commands that they show, and run the notebook.

    pip install '.[test]' nbclient ipykernel
    python docs/pictures.py

A picture ``![...](pictures/NAME.svg)`` is what some document's snippets write to ``NAME.svg``. Snippets of Python run in their order, of commands
only those that draw. What the notebook's cells give is kept in it. The layout is that of the Graphviz that the extra ``draw`` brings, whatever
else is installed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FOLDER = ROOT / "docs" / "pictures"
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def shown() -> set[str]:
    """The names of all pictures in all documents."""
    return {name for path in DOCUMENTS for name in re.findall(r"!\[[^\]]*\]\((?:docs/)?pictures/([\w-]+\.svg)\)", path.read_text("utf-8"))}


def snippets(document: Path) -> list[tuple[str, str]]:
    """(language, text) of what can be run."""
    return re.findall(r"^```(python|sh)\n(.*?)^```$", document.read_text("utf-8"), re.S | re.M)


def drawn_by() -> dict[Path, list[str]]:
    """The names of the pictures by the document whose snippets draw them.

    Raises:
        SystemExit: a picture that none draws.
    """
    names = shown()
    found = {path: sorted(n for n in names if any(n in text for _, text in snippets(path))) for path in DOCUMENTS}
    if missing := names.difference(*found.values()):
        raise SystemExit(f"no snippet draws {', '.join(sorted(missing))}")
    return {path: some for path, some in found.items() if some}


def draw(document: Path, names: list[str]) -> dict[str, str]:
    """SVG text by name, drawn in a folder of its own."""
    from gradlineage.cli import main

    with tempfile.TemporaryDirectory() as folder, _within(folder):
        namespace: dict[str, Any] = {"__name__": "snippet"}
        for language, text in snippets(document):
            if language == "python":
                exec(compile(text, str(document), "exec"), namespace)
            for line in text.splitlines() if language == "sh" else ():
                words = shlex.split(line)
                if words[:1] == ["gradlineage"] and words[-1] in names and main(words[1:]):
                    raise SystemExit(f"{document.name}: this failed: {line}")
        return {name: Path(name).read_text("utf-8") for name in names}


@contextlib.contextmanager
def _within(folder: str) -> Iterator[None]:
    """In that folder, with the Graphviz of the extra ``draw`` and no other, and what the snippets print put away."""
    path, before = os.environ["PATH"], Path.cwd()
    os.environ["PATH"] = sysconfig.get_path("scripts")
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.chdir(before)
        os.environ["PATH"] = path


def run_notebook(folder: str) -> Any:
    """The notebook with what its cells give now, run in that folder."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    about = notebook.metadata.copy()
    with _within(folder):
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        NotebookClient(notebook, kernel_name="python3", timeout=300).execute(env=os.environ | {"PYTHONPATH": paths})
    notebook.metadata = about  # without the version of Python
    for cell in notebook.cells:
        cell.metadata.clear()  # without times
    return notebook


def main() -> None:
    """Write all pictures to ``docs/pictures``, and the notebook."""
    sys.path.insert(0, str(ROOT))
    for document, names in drawn_by().items():
        for name, text in draw(document, names).items():
            (FOLDER / name).write_text(text, "utf-8")
            print(f"{document.name}: {name}, {len(text):,} characters")
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(run_notebook(folder), NOTEBOOK)
    print(f"{NOTEBOOK.name}, {NOTEBOOK.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
