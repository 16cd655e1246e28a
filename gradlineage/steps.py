"""One step back from a tensor, and the names on a longer way: what `view` gives out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gradlineage.view import View

__all__ = ["Chain", "Outer", "Reference", "Way", "braced"]


class Outer:
    """The rest of a way that leaves a folded join or a union: the node of that, the node at which the way goes on, and the rest after that."""

    __slots__ = ("at", "join", "length", "rest")

    def __init__(self, join: int, at: int, rest: Outer | None, length: int) -> None:
        self.join, self.at, self.rest, self.length = join, at, rest, length


class Way:
    """Names of the operations on a way, put together when asked: in a deep residual network every source has a long one."""

    __slots__ = ("_chain", "_names", "_view")

    def __init__(self, names: tuple[str, ...] | None, view: View | None = None, chain: Chain | None = None) -> None:
        self._names, self._view, self._chain = names, view, chain

    @property
    def names(self) -> tuple[str, ...]:
        if self._names is None:
            assert self._view is not None
            found: list[str] = []
            chain = self._chain
            while chain is not None:
                found += self._view.passed(chain.reference)
                chain = chain.back
            self._names, self._view, self._chain = tuple(found), None, None
        return self._names

    def __reduce__(self) -> tuple[type[Way], tuple[tuple[str, ...]]]:
        return Way, (self.names,)


class Chain(NamedTuple):
    """The last step of a way to a source, and the steps nearer to the asker."""

    reference: Reference
    back: Chain | None


class Reference(NamedTuple):
    """One step back from a tensor: to ``atom``, along the way that ends in node ``at`` and, in a folded join, goes on as ``outer`` says."""

    atom: int
    differentiable: bool
    at: int
    outer: Outer | None
    seen: int = 1  # in a union, how often it was seen


def braced(parts: Sequence[str], groups: Sequence[tuple[int, ...]]) -> list[str]:
    """Operands that met before, in braces: ``{add <- a, add <- b}`` for ``(a + b) * …``."""
    found = []
    for n, part in enumerate(parts):
        before = groups[n - 1] if n else ()
        after = groups[n + 1] if n + 1 < len(parts) else ()
        opened = sum(groups[n][: d + 1] != before[: d + 1] for d in range(len(groups[n])))
        closed = sum(groups[n][: d + 1] != after[: d + 1] for d in range(len(groups[n])))
        found.append("{" * opened + part + "}" * closed)
    return found
