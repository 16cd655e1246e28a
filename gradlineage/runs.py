"""Many passes of one model: the paths that were taken, how often, what decided which, and what never ran. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gradlineage.compare import Difference, diff
from gradlineage.errors import FormatError, LineageError
from gradlineage.exchange import load_text, save_text
from gradlineage.lineage import Lineage
from gradlineage.tables import REARRANGING, share_of
from gradlineage.union import unite

if TYPE_CHECKING:
    from gradlineage.coverage import Coverage

__all__ = ["Path", "Runs", "Sides", "signature"]

SCHEMA = "gradlineage-runs/1"
_T = TypeVar("_T")
_EXAMPLES = 10  # numbers of inputs kept per path


@dataclass(frozen=True, slots=True)
class Sides:
    """How the readings on one line fell: of truth values how often which, of numbers the least and the greatest."""

    true: int = 0
    false: int = 0
    numbers: int = 0
    least: float | None = None
    most: float | None = None
    others: int = 0

    def __add__(self, other: Sides) -> Sides:
        least = [n for n in (self.least, other.least) if n is not None]
        most = [n for n in (self.most, other.most) if n is not None]
        return Sides(
            self.true + other.true, self.false + other.false, self.numbers + other.numbers, min(least, default=None), max(most, default=None),
            self.others + other.others,
        )  # fmt: skip

    @classmethod
    def of(cls, value: object) -> Sides:
        if isinstance(value, bool):
            return cls(true=int(value), false=int(not value))
        if isinstance(value, int | float) and math.isfinite(value):
            return cls(numbers=1, least=value, most=value)
        return cls(others=1)

    def __str__(self) -> str:
        total = self.true + self.false
        parts = [f"True {share_of(self.true, total)}, False {share_of(self.false, total)}"] if self.true and self.false else []
        parts += [f"always {self.true > 0} (×{total})"] if total and not parts else []
        if self.numbers and self.least is not None and self.most is not None:
            span = f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"
            parts.append(f"{span} (×{self.numbers})")
        return "; ".join([*parts, *([f"×{self.others}"] if self.others else [])])


@dataclass(frozen=True, slots=True)
class _Trail:
    """One path, as it is kept: how often, the first inputs that took it, a lineage and the number of the input that it is of."""

    count: int
    examples: tuple[int, ...]
    lineage: Lineage | None = None
    of: int = -1
    length: int = 0
    sides: Mapping[tuple[str, str, str], Sides] = field(default_factory=dict)  # (place, kind, path of the call)

    def joined(self, other: _Trail) -> _Trail:
        kept = [t for t in (self, other) if t.lineage is not None]
        best = min(kept, key=_precedence if len({t.of for t in kept}) == 1 and self.lineage != other.lineage else _of, default=self)
        sides = dict(self.sides)
        for place, seen in other.sides.items():
            sides[place] = sides[place] + seen if place in sides else seen
        examples = tuple(sorted({*self.examples, *other.examples})[:_EXAMPLES])
        return _Trail(self.count + other.count, examples, best.lineage, best.of, self.length, sides)


def _of(trail: _Trail) -> int:
    return trail.of


def _precedence(trail: _Trail) -> tuple[int, str]:
    """Of two lineages for one path the one of the earlier input is kept, so that merging in any order gives the same."""
    return trail.of, trail.lineage.to_json() if trail.lineage is not None else ""


class Path:
    """A way through the model that one or more inputs took. Two inputs take the same if the same calls and edges ran, whatever shapes and values.

    Attributes:
        count: how many inputs took it.
        share: the same as a part of all inputs, 0 to 1.
        examples: numbers of the first inputs that took it.
        lineage: that of the first of them; None beyond ``max_paths``.
        length: how many layer calls ran.
    """

    __slots__ = ("_runs", "count", "examples", "key", "length", "lineage", "share")

    def __init__(self, runs: Runs, key: str, trail: _Trail) -> None:
        self._runs, self.key = runs, key
        self.count, self.examples, self.lineage, self.length = trail.count, trail.examples, trail.lineage, trail.length
        self.share = trail.count / runs.total

    @property
    def difference(self) -> Difference | None:
        """What sets it apart from the commonest path, which has none; None too where a lineage was not kept."""
        first = self._runs.paths[0]
        if first.key == self.key or first.lineage is None or self.lineage is None:
            return None
        return diff(first.lineage, self.lineage)

    def __repr__(self) -> str:
        return f"<Path of {self.count} inputs ({share_of(self.count, self._runs.total)}), such as {', '.join(map(str, self.examples[:3]))}>"


class Runs:
    """What `gradlineage.trace_many` gives: immutable, and bounded in size however many inputs there were.

    Merging is associative and commutative: parts of a data set can be traced anywhere, and put together in any order.
    """

    __slots__ = ("__dict__", "_borrowed", "_edges", "_modules", "_reach", "_trails", "max_paths", "model", "total")

    def __init__(
        self,
        model: str,
        modules: Sequence[tuple[str, str]],
        trails: Mapping[str, _Trail],
        reach: Mapping[str, tuple[int, int, int]],
        edges: Mapping[tuple[str, str], int],
        borrowed: Iterable[str],
        max_paths: int,
    ) -> None:
        self._borrowed = frozenset(borrowed)  # modules whose parameters were used though they were not called

        self.model, self._modules, self._reach, self._edges, self.max_paths = model, tuple(modules), dict(reach), dict(edges), max_paths
        self.total = sum(trail.count for trail in trails.values())
        kept = sorted((t.of, key) for key, t in trails.items() if t.lineage is not None)
        dropped = {key for _, key in kept[max_paths:]}
        self._trails = {key: replace(t, lineage=None, of=-1) if key in dropped else t for key, t in trails.items()}

    @classmethod
    def of(cls, lineage: Lineage, number: int, modules: Sequence[tuple[str, str]], max_paths: int) -> Runs:
        """The runs that consist of one."""
        calls: defaultdict[str, int] = defaultdict(int)
        for call in lineage.calls:
            calls[call.path] += 1
        sides: dict[tuple[str, str, str], Sides] = {}
        for decision in lineage.decisions:
            place = decision.where, decision.kind, decision.call.path if decision.call is not None else ""
            sides[place] = sides.get(place, Sides()) + Sides.of(decision.value)
        edges = {(_plain(reader), _plain(source)): 1 for reader, source in _edges(lineage)}
        borrowed = {name.rpartition(".")[0] for name, _ in lineage._graph.bypassed}
        trail = _Trail(1, (number,), lineage, number, len(lineage.layers), sides)
        return cls(
            lineage.model, modules, {signature(lineage): trail}, {p: (n, n, 1) for p, n in calls.items()}, edges, borrowed, max_paths
        )

    # -- what there is ---------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.total

    def __repr__(self) -> str:
        return f"<Runs of {self.model}: {self.total} inputs took {len(self._trails)} paths>"

    def __str__(self) -> str:
        from gradlineage.views.paths import to_text

        return to_text(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Runs):
            return NotImplemented
        return self._facts == other._facts

    def __hash__(self) -> int:
        return hash((self.model, self.total, frozenset(self._trails)))

    @property
    def _facts(self) -> tuple[Any, ...]:
        return self.model, self._modules, self._trails, self._reach, self._edges, self._borrowed, self.max_paths

    def __reduce__(self) -> tuple[Any, ...]:
        return Runs, self._facts

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The paths that were taken, the commonest first."""
        order = sorted(self._trails.items(), key=lambda item: (-item[1].count, item[1].examples, item[0]))
        return tuple(Path(self, key, trail) for key, trail in order)

    @property
    def calls(self) -> dict[str, tuple[int, int]]:
        """Per module that ran, how often an input called it at least and at most: ``{"cell": (3, 17)}``."""
        return {p: (low if inputs == self.total else 0, high) for p, (low, high, inputs) in self._reach.items()}

    def union(self, *patterns: str, depth: int | None = None) -> Lineage:
        """One lineage in which every call and edge carries how often it occurred, ``call.count`` and ``link.count`` of ``lineage.runs``.

        Args:
            patterns, depth: collapse each pass before, as `Lineage.collapse` does.

        Raises:
            LineageError: there is no lineage: of no input, or with ``max_paths=0``.
        """
        parts = [(path.lineage, path.count) for path in self.paths if path.lineage is not None]
        if not parts:
            raise LineageError("union() needs lineages, and none was kept: trace at least one input, with max_paths of 1 or more")
        if patterns or depth is not None:
            parts = [(lineage.collapse(*patterns, depth=depth), count) for lineage, count in parts]
        notes = []
        if missing := [path for path in self.paths if path.lineage is None]:
            inputs = sum(path.count for path in missing)
            notes.append(f"{inputs} inputs on {len(missing)} paths beyond max_paths={self.max_paths} are not in this union.")
        return unite(parts, notes)

    def coverage(self) -> Coverage:
        """What never ran or ran once, and how each decision fell."""
        from gradlineage.coverage import cover

        return cover(self)

    # -- putting together and keeping ------------------------------------------------------------------------------------------------

    def merge(self, *others: Runs) -> Runs:
        """All in one; the smallest ``max_paths`` holds.

        Raises:
            LineageError: they are of different models.
        """
        trails, reach, edges = dict(self._trails), dict(self._reach), dict(self._edges)
        borrowed = self._borrowed.union(*(o._borrowed for o in others if isinstance(o, Runs)))
        for other in others:
            self._check(other)
            for key, trail in other._trails.items():
                trails[key] = trails[key].joined(trail) if key in trails else trail
            for path, (low, high, inputs) in other._reach.items():
                now = reach.get(path, (low, high, 0))
                reach[path] = min(now[0], low), max(now[1], high), now[2] + inputs
            for edge, count in other._edges.items():
                edges[edge] = edges.get(edge, 0) + count
        return Runs(self.model, self._modules, trails, reach, edges, borrowed, min(r.max_paths for r in (self, *others)))

    def _check(self, other: object) -> None:
        if not isinstance(other, Runs):
            raise LineageError(f"merge() needs Runs, as trace_many() and Runs.load() give, found {type(other).__name__}")
        if (self.model, self._modules) != (other.model, other._modules):
            ours, theirs = (f"{r.model} with {len(r._modules)} modules" for r in (self, other))
            raise LineageError(f"merge(): runs of one model can be put together; found {ours} and {theirs}")

    def to_json(self) -> str:
        """All of it as JSON, schema ``gradlineage-runs/1``; lineages within it as `Lineage.to_json` writes them."""
        paths = []
        for key, trail in sorted(self._trails.items()):
            sides = [[*place, s.true, s.false, s.numbers, s.least, s.most, s.others] for place, s in sorted(trail.sides.items())]
            lineage = json.loads(trail.lineage.to_json()) if trail.lineage is not None else None
            facts = {"key": key, "count": trail.count, "examples": trail.examples, "of": trail.of, "length": trail.length}
            paths.append({**facts, "decisions": sides, "lineage": lineage})
        document = {
            "schema": SCHEMA, "model": self.model, "max_paths": self.max_paths, "modules": self._modules,
            "calls": [[path, *numbers] for path, numbers in sorted(self._reach.items())],
            "edges": [[*edge, count] for edge, count in sorted(self._edges.items())], "borrowed": sorted(self._borrowed), "paths": paths,
        }  # fmt: skip
        return json.dumps(document, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Runs:
        """Read what `to_json` wrote.

        Raises:
            FormatError: the text is no such document.
        """
        try:
            found = json.loads(text, object_pairs_hook=_once)
            if found["schema"] != SCHEMA:
                _refuse("$.schema", f'"{SCHEMA}"', found["schema"])
            trails = {_a(str, p["key"]): _trail(p, f"$.paths[{n}]") for n, p in enumerate(found["paths"])}
            if len(trails) < len(found["paths"]):
                _refuse("$.paths", "every key once", "one twice")
            total = sum(trail.count for trail in trails.values())
            for n, (_, low, high, inputs) in enumerate(found["calls"]):
                if not (0 < _a(int, inputs) <= total and _a(int, low) <= _a(int, high)):
                    _refuse(f"$.calls[{n}]", f"the least and most calls and by how many of {total} inputs", [low, high, inputs])
            if type(found["max_paths"]) is not int or found["max_paths"] < 0:
                _refuse("$.max_paths", "a whole number from 0 on", found["max_paths"])
            reach = {_a(str, path): (_a(int, low), _a(int, high), _a(int, inputs)) for path, low, high, inputs in found["calls"]}
            edges = {(_a(str, reader), _a(str, source)): _a(int, count) for reader, source, count in found["edges"]}
            modules = [(_a(str, path), _a(str, kind)) for path, kind in found["modules"]]
            borrowed = [_a(str, name) for name in found["borrowed"]]
            return cls(_a(str, found["model"]), modules, trails, reach, edges, borrowed, _a(int, found["max_paths"]))
        except FormatError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(f"$: expected saved runs, schema {SCHEMA}, found something else: {type(error).__name__}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, all of it or nothing.

        Raises:
            LineageError: the file cannot be written.
        """
        save_text(self.to_json(), os.fsdecode(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Runs:
        """Read a file that `save` wrote.

        Raises:
            FormatError: the content are no runs.
            LineageError: the file cannot be read.
        """
        return cls.from_json(load_text(os.fsdecode(path)))


def _a(kind: type[_T], value: object) -> _T:
    """The value, if it is of that type and, where a number, not negative."""
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise TypeError(f"{kind.__name__} expected, found {value!r}"[:80])
    return value


def _refuse(at: str, expected: str, found: object) -> NoReturn:
    raise FormatError(f"{at}: expected {expected}, found {found!r}"[:200])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        _refuse("$", "every key once", "one twice")
    return found


def _trail(row: Mapping[str, Any], at: str) -> _Trail:
    lineage = Lineage.from_json(json.dumps(row["lineage"])) if row["lineage"] is not None else None
    sides = {}
    for where, kind, path, true, false, numbers, least, most, others in row["decisions"]:
        low, high = (None if n is None else n if type(n) is int else _a(float, n) for n in (least, most))
        if any(n is not None and not math.isfinite(n) for n in (low, high)):
            _refuse(f"{at}.decisions", "finite numbers", [least, most])
        found = Sides(_a(int, true), _a(int, false), _a(int, numbers), low, high, _a(int, others))
        sides[_a(str, where), _a(str, kind), _a(str, path)] = found
    examples = tuple(_a(int, n) for n in row["examples"])
    if type(row["count"]) is not int or not max(1, len(examples)) <= row["count"] < 2**63:
        _refuse(f"{at}.count", f"a whole number from {max(1, len(examples))} on, as there are so many examples", row["count"])
    of = -1 if lineage is None else _a(int, row["of"])
    return _Trail(_a(int, row["count"]), examples, lineage, of, _a(int, row["length"]), sides)


# -- what a path is ----------------------------------------------------------------------------------------------------------------


def signature(lineage: Lineage) -> str:
    """A short text that is the same for two passes in which the same calls and edges ran, whatever shapes, values and places."""
    digest = hashlib.blake2b(digest_size=16)
    for call in lineage.calls:
        digest.update(f"{call.path}\0{call.nth}\0{call.type}\0{call.kind}\0{call._record.parent}\n".encode())
    for edge in _edges(lineage, ops=True):
        digest.update("\0".join(edge).encode() + b"\n")
    return digest.hexdigest()


def _edges(lineage: Lineage, ops: bool = False) -> Iterator[tuple[str, ...]]:
    """(reader, source) for every link, with ``ops`` the tensor's place and the operations that compute something too."""
    view = lineage._view
    for reader, position, group, references in _readings(lineage):
        for reference in references:
            names = [name for name in view.ops(reference) if name not in REARRANGING] if ops else []
            yield (reader, view.label(reference.atom), *([str(position), str(group), *names] if ops else []))


def _readings(lineage: Lineage) -> Iterable[tuple[str, int, tuple[int, ...], Any]]:
    view, graph = lineage._view, lineage._graph
    for call in lineage.layers:
        nodes = [*(v.node for v in graph.calls[call._index].inputs), *view.hidden(call._index)]
        yield from ((call.label, position, (), view.references(node)) for position, node in enumerate(nodes))
    for join in lineage.joins:
        yield from ((join.label, n, view.group(join._index, n), operand) for n, operand in enumerate(view.operands(join._index)))
    yield from (("output", position, (), view.references(value.node)) for position, value in enumerate(graph.outputs))


def _plain(label: str) -> str:
    """A label without the numbers of calls: loops and shared modules give one edge however often they run."""
    return re.sub(r"\[\d+\]", "", label)
