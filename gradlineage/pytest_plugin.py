"""A pytest plugin: the fixture ``lineage_snapshot`` holds wiring to a readable text file, ``--lineage-update`` rewrites it.

::

    def test_wiring(lineage_snapshot):
        lineage_snapshot(gradlineage.trace(Net(), torch.ones(1, 3, 32, 32)))
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gradlineage.lineage import Lineage

__all__ = ["lineage_snapshot", "pytest_addoption"]

FOLDER = "wiring"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gradlineage")
    group.addoption("--lineage-update", action="store_true", help="rewrite the wiring files of lineage_snapshot with what was found")


@pytest.fixture
def lineage_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``lineage_snapshot(lineage, name=None)`` compares wiring with ``wiring/<test>.txt`` beside the test file.

    The file has a line for each layer call, join and output, without shapes: who feeds it, through which operations, where gradient stops.

    Raises:
        WiringError: it differs, or there is no such file yet; with the lines that changed.
    """

    def check(lineage: Lineage, name: str | None = None) -> None:
        from gradlineage.errors import WiringError
        from gradlineage.views.wiring import to_wiring

        stem = re.sub(r"[^\w.-]+", "_", name or request.node.name)
        file = Path(request.path).parent / FOLDER / f"{stem}.txt"
        found = to_wiring(lineage)
        if request.config.getoption("--lineage-update"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(found, encoding="utf-8")
            return
        if not file.is_file():
            raise WiringError(f"there is no wiring to compare with at {file}; run pytest --lineage-update once, and look at what it writes")
        expected = file.read_text(encoding="utf-8")
        if found != expected:
            lines = list(difflib.unified_diff(expected.splitlines(), found.splitlines(), "expected", "found", lineterm="", n=0))
            changed = "\n".join(line for line in lines[2:] if not line.startswith("@@"))
            raise WiringError(f"the wiring differs from {file}:\n{changed}\nif that is meant, run pytest --lineage-update")

    return check
