"""What several test files share: golden files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradlineage.cli import main


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="rewrite the golden files with what the code gives now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` holds a text to ``tests/golden/name``."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--regen"):
            path.write_text(text + "\n", encoding="utf-8")
        assert path.is_file(), f"no {path}; make it with --regen"
        assert text + "\n" == path.read_text(encoding="utf-8"), f"{path.name} differs; if the change is meant, rewrite it with --regen"

    return check


@pytest.fixture
def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], tuple[int, str, str]]]:
    """``run("show …")`` in a folder with the test file's ``NET`` as ``net.py``: exit status, standard output, standard error."""
    (tmp_path / "net.py").write_text(request.module.NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)

    def call(command: str) -> tuple[int, str, str]:
        sys.modules.pop("net", None)
        status = main(shlex.split(command))
        return status, *capsys.readouterr()

    yield call
    for name in set(sys.modules) - known:
        if name in ("net", "__gradlineage_target__"):
            del sys.modules[name]
