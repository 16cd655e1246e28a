"""What feeds each layer of a PyTorch model: one forward pass in, Keras's "Connected to" column out.

`trace` and `recording` need torch and are imported when first used; reading, collapsing and printing saved lineages does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradlineage.errors import FormatError, LineageError, NameNotFound, TraceError, UsageError
from gradlineage.lineage import Break, Call, Decision, Flow, Join, Lineage, Link, Source

if TYPE_CHECKING:
    from gradlineage.tracing import Recording, recording, trace

__version__ = "0.1.0"
__all__ = [
    "Break", "Call", "Decision", "Flow", "FormatError", "Join", "Lineage", "LineageError", "Link", "NameNotFound", "Recording", "Source",
    "TraceError", "UsageError", "recording", "trace",
]  # fmt: skip

_LAZY = frozenset(("Recording", "recording", "trace"))


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module("gradlineage.tracing")
        found = getattr(module, name)
        globals().update({n: getattr(module, n) for n in _LAZY})
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
