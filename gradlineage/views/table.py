"""Keras's table as text: ``Layer (type)``, ``Output shape``, ``Params``, ``Connected to``. Laid out by hand: ten thousand rows are usual."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len

from gradlineage.errors import LineageError
from gradlineage.lineage import Call, Flow, Lineage
from gradlineage.tables import REARRANGING, share_of
from gradlineage.views.loops import containers_of, roll
from gradlineage.views.reading import Line, Reading
from gradlineage.views.rows import Entry, Row, entries_of, make_rows

__all__ = ["to_table"]

_HEADS = ("Layer (type)", "Output shape", "Params", "Connected to")
_GAP = "  "
_NARROWEST = 30  # of the last column; with less room it stands below the others
_RUN = 4  # from so many on, entries that differ by a running number are folded
_STYLES = {"bold": "\x1b[1m", "dim": "\x1b[2m"}

_Words = Callable[..., str]  # of entries, and of how often their row was seen


def to_table(
    lineage: Lineage,
    *,
    joins: bool = True,
    decisions: bool = False,
    rearranging: bool = False,
    full: bool = False,
    rolled: bool | None = None,
    width: int | None = None,
    layer: str | None = None,
    color: bool = False,
) -> str:
    """A table with one row a layer call and, indented, one a join; below it what is returned, totals, notes and what stayed unknown.

    An entry reads against the running order, the operation nearest to the row first: ``relu ← bn1``. Parameters and buffers stand in
    brackets. ``⇠`` in place of the arrow: no gradient flows back on that way, because something in the model stops it. In a union a call
    that not all passes had is followed by its share of them, as is an edge that not all passes with its call had.

    Args:
        lineage: any lineage.
        joins: False for no rows of joins and the nearest layer calls instead of them.
        decisions: a section of their own below the table for the places where Python read a tensor's value, instead of notes within it.
        rearranging: also name operations that only move values about (``view``, ``permute``, ``getitem``).
        full: no folding of long regular lists such as ``experts.{0–499}``.
        rolled: one row for each call of a loop's body, ``cell ×500``; by default as `Lineage.rolled` says.
        width: columns of text; by default those of the terminal, and 120 where there is none. Names are never cut, so a line may be longer.
        layer: only rows that match this pattern or lie in a container that does, as in `make_rows`.
        color: with ANSI escapes for a terminal.

    Raises:
        NameNotFound: ``layer`` matches nothing.

    Example:
        >>> import torch, gradlineage
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> print(gradlineage.trace(net, torch.ones(2, 3)).to_table())
        Sequential(input: (2, 3) float32)
        Layer (type)  Output shape  Params  Connected to
        ────────────────────────────────────────────────
        0 (Linear)    (2, 4)            16  input:input
        1 (ReLU)      (2, 4)             0  0
        ────────────────────────────────────────────────
        Returns (2, 4) ← 1
        2 layers in 2 calls, no joins; 16 parameters, all trainable
    """
    if not (width is None or isinstance(width, int)) or not (layer is None or isinstance(layer, str)):
        raise LineageError(f"to_table(width={width!r}, layer={layer!r}): expected columns as a whole number and a path pattern as text")
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else 120
    hidden = frozenset() if rearranging else REARRANGING

    def words(entries: Iterable[Entry], seen: int = lineage.runs) -> str:
        texts = [
            _entry(e, _alike((op for op in reversed(e.ops) if op not in hidden), full))
            + (_share(e.seen, lineage.runs) if e.seen != seen else "")
            for e in entries
        ]
        return ", ".join(texts if full else _fold(texts)) or "-"

    rolled = lineage.rolled if rolled is None else rolled
    rows = make_rows(lineage, joins=joins, decisions=not decisions, values=not rolled, layer=layer)
    reading = Reading(roll(rows, containers_of(lineage, rows)) if rolled else rows)
    body = _lay_out([_cells(line, words, full, lineage.runs) for line in reading.lines], width)
    rule = "─" * min(width, max(_size(line) for _, line in body))
    heads = sum(number < 0 for number, _ in body)
    typed = [line.row is not None and line.row.type != "" for line in reading.lines]
    styles = ["bold" if number < 0 else "" if typed[number] else "dim" for number, _ in body] if color else [""] * len(body)
    lines = [_paint(line.rstrip(), style) for (_, line), style in zip(body, styles, strict=True)]
    inputs = _alike((f"{f.name}: {_shape(f.shape)} {f.dtype}" for f in lineage.inputs), full)
    above = _fill(f"{lineage.model}({'; '.join(inputs)})", width, ("; ", " "))
    rows = [row for row in rows if row.key]
    told = itertools.chain(_below(lineage, rows, joins, words, reading), _decisions(lineage, hidden) if decisions else ())
    below = (part for line in told for part in _fill(line, width, ("[;,] ", " ")))
    return "\n".join(line.rstrip() for line in (*above, *lines[:heads], rule, *lines[heads:], rule, *below))


# -- words -------------------------------------------------------------------------------------------------------------------------


def _entry(entry: Entry, ops: Sequence[str]) -> str:
    label = f"[{_clean(entry.label)}]" if entry.kind in ("parameter", "buffer") else _clean(entry.label)
    arrow = "⇠ " if entry.stopped else "← " if ops else ""
    return f"{' ← '.join(ops)} {arrow}{label}".lstrip()


def _clean(name: str) -> str:
    """A name on one line of a terminal, whatever is in it."""
    return name if name.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def _connected(row: Row, words: _Words) -> str:
    """Tensors of one list argument stand side by side; several arguments are named, those that are fed alike together."""
    groups: dict[tuple[str, bool], list[Entry]] = {}
    single = all(len(tensor.entries) < 2 or tensor.name == "hidden" for tensor in row.inputs)
    for tensor in row.inputs:
        groups.setdefault((_argument(tensor.name) if single else tensor.name, tensor.used), []).extend(tensor.entries)
    unnamed = sum(name != "hidden" for name, _ in groups) < 2
    alike: dict[str, list[str]] = {}
    for (name, used), entries in groups.items():
        alike.setdefault(words(entries, row.seen) + ("" if used else " (unused)"), []).append("" if unnamed and name != "hidden" else name)
    return "; ".join(f"{'/'.join(names)}: {text}".removeprefix(": ") for text, names in alike.items()) or "-"


def _argument(name: str) -> str:
    """``hx`` for ``hx[0]``: the argument, or part of one, that is a list."""
    return re.sub(r"(\[\d+\])+$", "", name)


def _cells(line: Line, words: _Words, full: bool, runs: int) -> tuple[str, list[str], str, str]:
    row, indent = line.row, _GAP * line.depth
    if row is None:
        return f"{indent}⟲ ×{line.times}", [""], "", ""
    shapes = _alike(map(_shape, row.shapes), full) or ["-" if row.key else ""]
    return indent + _title(row, row.times * line.times) + _share(row.seen, runs), shapes, _count(row), _connected(row, words)


def _title(row: Row, times: int) -> str:
    label = _clean(row.label) + (f" ×{times}" if times > 1 else "")
    if not row.type:
        return _GAP + label
    named = row.label.startswith("<") or row.label.split("[")[0] == row.type
    return label + ("" if named else f" ({row.type})") + (" (raised)" if row.failed else "")


def _share(seen: int, runs: int) -> str:
    return "" if seen in (0, runs) else f" {share_of(seen, runs)}"


def _count(row: Row) -> str:
    return "shared" if row.shared else f"{row.parameters[0]:,}" if row.type else ""


def _shape(shape: tuple[int | str, ...] | None) -> str:
    return "?" if shape is None else f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _below(lineage: Lineage, rows: Sequence[Row], joins: bool, words: _Words, reading: Reading) -> Iterable[str]:
    """What stands under the table, a line each."""
    unknown = [e for row in rows for e in row.entries if e.kind == "unknown"]
    returned = []
    for (name, shape), run in itertools.groupby(lineage.outputs, key=lambda f: (_argument(f.name), _shape(f.shape))):
        flows: list[Flow] = list(run)
        entries = [e for flow in flows for e in entries_of(flow, joins)]
        unknown += [e for e in entries if e.kind == "unknown"]
        returned.append(f"{name} {shape}{f' ×{len(flows)}' if len(flows) > 1 else ''} ← {words(reading.entries(entries))}".lstrip())
    if returned:
        yield f"Returns {'; '.join(returned)}"
    calls, total, (elements, trainable) = lineage.layers, len(lineage.joins), lineage.parameters
    paths = len({call.path for call in calls})
    training = "" if not elements else ", all trainable" if trainable == elements else f", {trainable:,} trainable"
    yield f"{_number(paths, 'layer')} in {_number(len(calls), 'call')}, {_number(total, 'join')}; {_number(elements, 'parameter')}{training}"
    if lineage._view.is_union:
        yield f"The union of {lineage.runs:,} pass{'es' * (lineage.runs != 1)}{_ranges(calls, lineage.runs)}"
    if len(rows) != (everything := len(calls) + total * joins):
        yield f"{len(rows):,} of {everything:,} rows shown"
    if stops := dict.fromkeys(f"{b.op} at {b.where}" if b.where else b.op for b in lineage.breaks if b.after):
        yield f"⇠ no gradient flows back: {', '.join(stops)}"
    if unknown:
        reasons = "; ".join(dict.fromkeys(e.reason.rstrip(".") for e in unknown if e.reason))
        yield f"{_number(len(unknown), 'unknown source')}: {reasons or 'no reason known'}"
    yield from lineage.notes


def _ranges(calls: Iterable[Call], runs: int) -> str:
    """How often an input called a layer, where that differs or is more than once: ``cell ×3–17``."""
    most, least = Counter(c.path for c in calls), Counter(c.path for c in calls if c.count == runs)
    spans = [f"{path} ×{least[path]}–{high}" if least[path] != high else f"{path} ×{high}" for path, high in most.items() if high > 1]
    return f"; calls per input: {', '.join(spans)}" if spans else ""


def _decisions(lineage: Lineage, hidden: frozenset[str]) -> Iterable[str]:
    yield f"{_number(len(lineage.decisions), 'decision')}{':' if lineage.decisions else ''}"
    lines = []
    for found in lineage.decisions:
        words = []
        for source in found.sources:
            label = f"[{source.label}]" if source.kind in ("parameter", "buffer") else source.label
            words.append(" ← ".join((*(op for op in reversed(source.ops) if op not in hidden), _clean(label))))
        value = "" if found.value is None else f" is {found.value:.4g}" if type(found.value) is float else f" is {found.value}"
        place = f" in {_clean(found.call.label)}" if found.call is not None else ""
        waits = " (waits for the device)" if found.waits else ""
        lines.append(f"? {found.kind} at {found.where or 'unknown place'}{place}{value}{waits}: {', '.join(words) or '-'}")
    yield from _alike(lines)


def _number(n: int, what: str) -> str:
    return f"{n or 'no':{',' if n else ''}} {what}{'s' * (n != 1)}"


def _alike(texts: Iterable[str], full: bool = False) -> list[str]:
    """Equal neighbours once, with their number."""
    runs = [list(run) for _, run in itertools.groupby(texts)]
    return [text for run in runs for text in ([f"{run[0]} ×{len(run)}"] if len(run) >= _RUN and not full else run)]


def _fold(texts: list[str]) -> list[str]:
    """Write runs of texts that are equal, or differ by a running number, as one."""
    texts = _alike(texts)
    for place in (1, 3, 5, 7):  # the first number in a text, the second, …
        parted = enumerate(re.split(r"(\d+)", text) for text in texts) if len(texts) >= _RUN else ()
        runs = [[tokens for _, tokens in run] for _, run in itertools.groupby(parted, key=functools.partial(_common, place))]
        texts = [text for run in runs for text in ([_span(run, place)] if len(run) >= _RUN else map("".join, run))] or texts
    return texts


def _common(place: int, numbered: tuple[int, list[str]]) -> tuple[object, ...]:
    """What texts that count up at ``place`` have in common with their neighbours."""
    index, tokens = numbered
    if len(tokens) <= place or str(int(tokens[place])) != tokens[place]:
        return index, *tokens
    return int(tokens[place]) - index, *tokens[:place], "", *tokens[place + 1 :]


def _span(run: list[list[str]], place: int) -> str:
    before, after = "".join(run[0][:place]), "".join(run[0][place + 1 :])
    span = f"{run[0][place]}–{run[-1][place]}"
    return f"{before}{span}{after}" if before.endswith("[") and after.startswith("]") else f"{before}{{{span}}}{after}"


# -- layout ------------------------------------------------------------------------------------------------------------------------


def _lay_out(cells: Sequence[tuple[str, list[str], str, str]], width: int) -> list[tuple[int, str]]:
    """Lines, each with the number of its row, -1 for the heading. Without room for the last column that comes below, on lines of its own."""
    cells = [(_HEADS[0], [_HEADS[1]], _HEADS[2], _HEADS[3]), *cells]
    shapes, counts = max(_size(s) for c in cells for s in c[1]), max(len(c[2]) for c in cells)
    room = width - shapes - counts - 3 * len(_GAP)
    piece, names = _widths(c[0] for c in cells)
    token, natural = _widths(c[3] for c in cells)
    below = piece + _NARROWEST > room
    names = max(piece, min(names, room + len(_GAP) if below else room - min(natural, max(_NARROWEST, token))))
    last = width - 2 * len(_GAP) if below else room - names
    lines = []
    for number, (title, shape, count, connected) in enumerate(cells, -1):
        sources = _fill(connected, last, ("[;,] ", " ", r"\."))
        columns = (_fill(title, names, (r"(?<=\S) ",)), shape, [count], [] if below else sources)
        for name, size, figure, source in itertools.zip_longest(*columns, fillvalue=""):
            lines.append((number, _GAP.join((_pad(name, names), _pad(size, shapes), figure.rjust(counts), source))))
        lines += [(number, 2 * _GAP + source) for source in sources] if below else []
    return lines


def _widths(texts: Iterable[str]) -> tuple[int, int]:
    """Of the longest piece that has no space in it, and of the longest text."""
    texts = list(texts)
    indents = [len(text) - len(text.lstrip()) for text in texts]
    return max(n + _size(piece) for text, n in zip(texts, indents, strict=True) for piece in text.split()), max(map(_size, texts))


def _size(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _pad(text: str, width: int) -> str:
    return text.rstrip() + " " * (width - _size(text.rstrip()))


def _fill(text: str, width: int, breaks: Sequence[str]) -> list[str]:
    """Lines of at most ``width``, broken after the first of ``breaks`` that serves. What has none of them stays whole."""
    if _size(text.rstrip()) <= width or not breaks:
        return [text]
    lines: list[str] = [""]
    for part in re.findall(rf".+?(?:{breaks[0]}|$)", text):
        if _size(lines[-1]) + _size(part.rstrip()) <= width:
            lines[-1] += part
        else:
            lines += _fill(part, width, breaks[1:])
    return [line for line in lines if line]


def _paint(text: str, style: str) -> str:
    return f"{_STYLES[style]}{text}\x1b[0m" if style else text
