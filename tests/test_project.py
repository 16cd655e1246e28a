"""The project's own promises: what imports what, what the documents say, what the text of the code looks like."""

from __future__ import annotations

import ast
import contextlib
import io
import pathlib
import re
import shlex
import tokenize
from collections.abc import Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "gradlineage"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def allowed_imports() -> dict[str, tuple[set[str], bool]]:
    """file -> (what it may import, whether torch too), as docs/ARCHITECTURE.md says."""
    table: dict[str, tuple[set[str], bool]] = {}
    for line in (ROOT / "docs" / "ARCHITECTURE.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            for name in re.findall(r"`(\w+)/?`", cells[0]):
                torch = "(torch)" in cells[2]
                table[name] = (set(re.findall(r"\w+", cells[2].replace("(torch)", ""))), torch)
    return table


def imports(path: pathlib.Path) -> Iterator[tuple[str, bool]]:
    """(module, whether at the top level) for every import of a file that runs."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(n) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) for n in ast.walk(node)
    }
    top = {id(n) for n in tree.body}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", id(node) in top


def files() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_import_only_what_the_architecture_allows(path: pathlib.Path) -> None:
    name = "views" if path.parent.name == "views" else path.stem
    if name in ("__init__", "__main__", "cli", "commands", "running", "target", "terminal"):
        return
    allowed, torch = allowed_imports()[name]
    for module, top in imports(path):
        if module.startswith("gradlineage.") and top:
            part = module.split(".")[1]
            assert part in allowed or part == name, f"{name} imports {part}"
        if module.split(".")[0] in ("torch", "torchvision"):
            assert torch, f"{name} imports torch"


def test_every_file_of_the_package_is_in_the_architecture() -> None:
    known = set(allowed_imports()) | {"__main__"}
    assert {p.stem for p in PACKAGE.glob("*.py")} <= known


def code_lines(path: pathlib.Path) -> int:
    """Lines with code on them: neither blank, nor comment, nor docstring."""
    text = path.read_text()
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, described) and ast.get_docstring(n) is not None]
    prose = {line for n in nodes for line in range(n.body[0].lineno, (n.body[0].end_lineno or 0) + 1)}
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in empty]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - prose)


def test_files_can_be_read_at_one_sitting_and_the_library_stays_small() -> None:
    assert not {p.name for p in files() if len(p.read_text().splitlines()) > 400}
    on_top = {
        "compare",
        "union",
        "exchange",
        "runs",
        "coverage",
        "many",
        "gradient",
        "look",
        "direct",
        "writes",
        "findings",
        "expect",
        "explain",
        "pytest_plugin",
        "cli",
        "commands",
        "running",
        "target",
        "terminal",
    }
    core = [p for p in files() if p.parent.name != "views" and p.stem not in on_top]
    assert sum(map(code_lines, core)) < 4000


def test_only_the_command_prints() -> None:
    for path in files():
        if path.stem not in ("cli", "commands", "running", "target", "terminal", "__main__"):
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path


# -- documents ----------------------------------------------------------------------------------------------------------------------------------


def blocks(path: pathlib.Path) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a document, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(), re.S | re.M)


def squeeze(text: str) -> list[str]:
    """Lines without the spacing of their columns."""
    return [re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_every_snippet_runs_and_prints_what_the_document_says(
    path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradlineage.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    namespace: dict[str, Any] = {"__name__": "snippet"}
    printed = ""
    for language, text in blocks(path):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(path), "exec"), namespace)
            printed = out.getvalue()
        elif language == "sh":
            out = io.StringIO()
            for line in text.splitlines():
                if line.startswith("gradlineage "):
                    with contextlib.redirect_stdout(out):
                        assert main([*shlex.split(line)[1:]]) == 0, line
            printed = out.getvalue()
        elif language == "text":
            said, found = squeeze(text), squeeze(printed)
            assert [line for line in said if line not in found] == [], printed


MY_MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])

    def forward(self, ids, mask):
        x = self.embed(ids) * mask[..., None]
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def build(depth):
    return Model(depth)
"""


def test_the_readme_has_its_two_lines() -> None:
    lines = re.findall(r"<!-- (\w+) -->\n```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.S)
    assert [name for name, _ in lines] == ["show", "tests"]
    assert all(command.startswith("pip install '.[") and "\n" not in command for _, command in lines)


def test_every_reason_for_an_unknown_is_documented() -> None:
    from gradlineage.tape import Unknown

    limits = (ROOT / "docs" / "limits.md").read_text()
    reasons = [v for k, v in vars(Unknown).items() if k.isupper()]
    assert len(reasons) == len(re.findall(r"^\| (?!reason|---)", limits, re.M))
    rows = [row.split(" (named only")[0].strip() for row in re.findall(r"^\| ([^|]+?) \|", limits, re.M)]
    assert all(any(reason.startswith(row) for row in rows) for reason in reasons)


def test_docstring_examples_run() -> None:
    import doctest

    import gradlineage.tracing

    outcome = doctest.testmod(gradlineage.tracing)
    assert outcome.attempted >= 5
    assert outcome.failed == 0
