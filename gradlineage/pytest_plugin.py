"""A pytest plugin: the fixture ``lineage_snapshot`` holds wiring to a readable text file, ``--lineage-update`` rewrites it.

::

    def test_wiring(lineage_snapshot):
        lineage_snapshot(gradlineage.trace(Net(), torch.ones(1, 3, 32, 32)))
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gradlineage.lineage import Lineage

__all__ = ["lineage_snapshot", "pytest_addoption"]

FOLDER = "wiring"
_WRITTEN = pytest.StashKey[dict[Path, str]]()


def _plain(name: str) -> str:
    """A name for a file; where characters had to be replaced, with what tells it from others that would read alike."""
    plain = re.sub(r"[^\w.-]+", "_", name)
    return plain if plain == name else f"{plain.strip('_')}-{hashlib.sha1(name.encode()).hexdigest()[:6]}"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gradlineage")
    group.addoption("--lineage-update", action="store_true", help="rewrite the wiring files of lineage_snapshot with what was found")


@pytest.fixture
def lineage_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``lineage_snapshot(lineage, name=None)`` compares wiring with ``wiring/<test file>/<test>.txt`` beside the test file.

    Under a ``name`` several tests share ``wiring/<name>.txt``.

    The file has a line for each layer call, join and output, without shapes: who feeds it, through which operations, where gradient stops.

    Raises:
        WiringError: it differs, or there is no such file yet; with the lines that changed. Under ``--lineage-update``: two that differ
            would be written to one file.
        LineageError: it is no lineage.
    """

    def check(lineage: Lineage, name: str | None = None) -> None:
        from gradlineage.errors import LineageError, WiringError, a_kind
        from gradlineage.exchange import write_text
        from gradlineage.lineage import Lineage
        from gradlineage.views.wiring import to_wiring

        if not isinstance(lineage, Lineage):
            raise LineageError(f"lineage_snapshot() takes a lineage, as trace(...) gives it; found {a_kind(lineage)}")
        path = Path(request.path)
        test = ".".join((*(c.__name__ for c in (request.cls,) if c is not None), request.node.name))
        file = path.parent / FOLDER / (f"{_plain(name)}.txt" if name else Path(path.stem, f"{_plain(test)}.txt"))
        found = to_wiring(lineage)
        if request.config.getoption("--lineage-update"):
            written = request.config.stash.setdefault(_WRITTEN, {})
            if written.setdefault(file, found) != found:
                raise WiringError(f"{file} was written in this run with other wiring; give each its own: lineage_snapshot(lineage, name)")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(found, str(file))
            except OSError as error:
                raise WiringError(f"cannot write {file}: {error.strerror or error}") from error
            return
        if not file.is_file():
            raise WiringError(f"there is no wiring to compare with at {file}; run pytest --lineage-update once, and look at what it writes")
        expected = file.read_text(encoding="utf-8")
        if found != expected:
            lines = list(difflib.unified_diff(expected.splitlines(), found.splitlines(), "expected", "found", lineterm="", n=0))
            changed = "\n".join(line for line in lines[2:] if not line.startswith("@@"))
            raise WiringError(f"the wiring differs from {file}:\n{changed}\nif that is meant, run pytest --lineage-update")

    return check
