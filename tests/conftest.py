"""What several test files share: golden files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


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
