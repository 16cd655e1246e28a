"""What feeds each layer of a PyTorch model: one forward pass in, Keras's "Connected to" column out.

`trace` and `recording` need torch and are imported when first used; reading, collapsing and printing saved lineages does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradlineage.errors import FormatError, LineageError, NameNotFound, TraceError, UsageError, WiringError
from gradlineage.lineage import Break, Call, Decision, Flow, Join, Lineage, Link, Source

if TYPE_CHECKING:
    from gradlineage.compare import Difference, diff
    from gradlineage.findings import Finding, lint
    from gradlineage.many import trace_many
    from gradlineage.runs import Path, Runs
    from gradlineage.tracing import Recording, recording, trace

__version__ = "0.1.0"
__all__ = [
    "Break", "Call", "Decision", "Difference", "Finding", "Flow", "FormatError", "Join", "Lineage", "LineageError", "Link", "NameNotFound", "Path",
    "Recording", "Runs", "Source", "TraceError", "UsageError", "WiringError", "diff", "lint", "recording", "trace", "trace_many",
]  # fmt: skip

_LAZY = {
    **dict.fromkeys(("Recording", "recording", "trace"), "tracing"), "trace_many": "many", **dict.fromkeys(("Difference", "diff"), "compare"),
    **dict.fromkeys(("Path", "Runs"), "runs"), **dict.fromkeys(("Finding", "lint"), "findings"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        found = globals()[name] = getattr(importlib.import_module(f"gradlineage.{_LAZY[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
