"""What the benchmarks share: interleaved rounds, medians and quartiles, fresh processes, tables, JSON, comparison with an older run, a plot."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = [
    "Figure", "Options", "Report", "Way", "children", "compared", "fresh", "machine", "main", "markdown", "peak_memory", "plotted", "ratios",
    "report", "reset_peak", "rounds", "slope", "synchronise", "text",
]  # fmt: skip

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "torchvision", "transformers")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured number: what it is about, what it measures, the quartiles around it, and the bound it is to stay under."""

    table: str
    subject: str
    measure: str
    value: float | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    bound: float | None = None
    note: str = ""  # in place of a value, or beside it

    @classmethod
    def of(cls, table: str, subject: str, measure: str, values: Sequence[float], unit: str = "", bound: float | None = None) -> Figure:
        """Median and quartiles."""
        low, mid, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
        return cls(table, subject, measure, mid, unit, low, high, bound)

    @property
    def over(self) -> bool:
        return self.value is not None and self.bound is not None and self.value > self.bound


class Options(NamedTuple):
    device: str
    rounds: int
    quick: bool
    models: tuple[str, ...]


class Report(NamedTuple):
    """What one benchmark gave."""

    name: str
    question: str
    date: str
    machine: dict[str, str]
    seconds: float
    figures: tuple[Figure, ...]

    def plain(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "figures": [{k: v for k, v in dataclasses.asdict(f).items() if v not in (None, "")} for f in self.figures],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Report:
        figures = tuple(Figure(**{"value": None, **f}) for f in plain["figures"])
        return cls(plain["name"], plain["question"], plain["date"], plain["machine"], plain["seconds"], figures)


# -- where --------------------------------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, str]:
    """The machine and the versions, in words."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}", "cpu": _processor()}
    if device.startswith("cuda"):
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "threads": str(torch.get_num_threads()), "device": device}


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.processor() or 'unknown'])[0]}, {os.cpu_count()} cores"


# -- time ---------------------------------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """Something to be timed: ``run`` is, on what ``prepare`` made right before."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _once(way: Way, device: str) -> float:
    """Milliseconds of this thread on the processor, which other work on the machine leaves alone; on a GPU between two events."""
    made = way.prepare()
    gc.collect()
    synchronise(device)
    if device.startswith("cuda"):
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        first.record()
        way.run(made)
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))
    start = time.thread_time()
    way.run(made)
    return (time.thread_time() - start) * 1e3


def rounds(ways: Mapping[str, Way | Callable[[], object]], count: int, device: str = "cpu") -> dict[str, list[float]]:
    """Milliseconds of each way in each round. Rounds are interleaved and begin with another way each time; one round more warms up."""
    ready = {name: way if isinstance(way, Way) else Way(lambda _, run=way: run()) for name, way in ways.items()}  # type: ignore[misc]
    names = list(ready)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # what was imported is not looked through again and again
    try:
        for number in range(count + 1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                taken = _once(ready[name], device)
                if number:
                    times[name].append(taken)
    finally:
        gc.unfreeze()
    return times


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """What one way took over what another took, round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent with which values grow with sizes: the slope of a line through their logarithms."""
    x, y = [math.log(s) for s in sizes], [math.log(max(v, 1e-9)) for v in values]
    return statistics.linear_regression(x, y).slope


# -- memory -------------------------------------------------------------------------------------------------------------------------------


def fresh(module: str, *words: str, here: bool = False) -> dict[str, Any]:
    """What ``child(*words)`` of a benchmark gives in a process of its own, or ``{"error": ...}``. ``here``: in this one, to see that it runs."""
    if here:
        try:
            found: dict[str, Any] = importlib.import_module(f"benchmarks.{module}").child(*words)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:200]}
        return found
    command = [sys.executable, "-m", f"benchmarks.{module}", "--child", *words]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        named = [line for line in said if re.match(r"(\w+\.)+[A-Z]\w*: |\w*(Error|Exception): ", line)]
        return {"error": (named or said)[-1][:200]}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def children(module: str, repeats: int, words: Sequence[Sequence[str]], here: bool = False) -> list[list[dict[str, Any]]]:
    """`fresh` for each list of words, ``repeats`` times, interleaved."""
    found: list[list[dict[str, Any]]] = [[] for _ in words]
    for _ in range(repeats):
        for i, each in enumerate(words):
            found[i].append(fresh(module, *each, here=here))
    return found


def reset_peak(device: str = "cpu") -> float:
    """Forget the peak so far; returns what is in use now, in MB."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 1e6
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return peak_memory()  # only the peak of the whole process is known there
    return _status("VmRSS")


def peak_memory(device: str = "cpu") -> float:
    """MB at the peak since `reset_peak`: of the process, or of what torch allocated on the GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) / 1e6
    return _status("VmHWM")


def _status(key: str) -> float:
    """Of this process, by the kernel; not ``ru_maxrss``, which a child has from its parent."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1e3
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


# -- tables -------------------------------------------------------------------------------------------------------------------------------


def _number(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.2f}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _cell(figure: Figure | None, marked: bool) -> str:
    if figure is None:
        return ""
    if figure.value is None:
        return figure.note or "–"
    words = _number(figure.value, figure.unit)
    if figure.low is not None and figure.high is not None and figure.low != figure.high:
        words += f" ({_number(figure.low, figure.unit)}–{_number(figure.high, figure.unit)})"
    if figure.bound is not None:
        limit = f"{'>' if figure.over else '≤'} {_number(figure.bound, figure.unit)}"
        words += f" **{limit}**" if marked and figure.over else f" {limit}"
    return f"{words} {figure.note}" if figure.note else words


def _grids(figures: Iterable[Figure], marked: bool) -> Iterator[tuple[str, list[list[str]]]]:
    """Per table a title and rows of cells, the first of them the head."""
    tables: dict[str, dict[tuple[str, str], Figure]] = {}
    for figure in figures:
        tables.setdefault(figure.table, {})[figure.subject, figure.measure] = figure
    for title, cells in tables.items():
        measures = list(dict.fromkeys(m for _, m in cells))
        units = {f.measure: f.unit for f in cells.values() if f.unit not in ("", "x")}
        head = ["", *(f"{m}, {units[m]}" if m in units else m for m in measures)]
        body = [[s, *(_cell(cells.get((s, m)), marked) for m in measures)] for s in dict.fromkeys(s for s, _ in cells)]
        yield title, [head, *body]


def text(figures: Iterable[Figure]) -> str:
    """For a terminal."""
    parts = []
    for title, grid in _grids(figures, False):
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        rows = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in grid]
        parts.append("\n".join([title, *(row.rstrip() for row in rows)]))
    return "\n\n".join(parts)


def markdown(done: Report) -> str:
    """For README.md."""
    parts = [f"### {done.name}", "", done.question, ""]
    for title, grid in _grids(done.figures, True):
        head, *body = grid
        parts += [f"**{title}**", "", *("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)), ""]
    where = done.machine
    versions = ", ".join(f"{key} {where[key]}" for key in ("python", *PACKAGES) if key in where)
    place = where.get("gpu", where["cpu"])
    return "\n".join([*parts, f"{done.date}; {place}; {where['threads']} thread; {versions}; {done.seconds:.0f} s.", ""])


def compared(before: Report, after: Report) -> tuple[Figure, ...]:
    """Both values and their ratio, for every figure that both runs have."""
    old = {(f.table, f.subject, f.measure): f for f in before.figures if f.value is not None}
    found = []
    for figure in after.figures:
        was = old.get((figure.table, figure.subject, figure.measure))
        if was is None or was.value is None or figure.value is None:
            continue
        subject, unit = f"{figure.subject}: {figure.measure} ({figure.table})", figure.unit
        table = f"{after.name}: {before.date} and now"
        found += [Figure(table, subject, "before", was.value, unit if unit == "x" else ""), Figure(table, subject, "now", figure.value)]
        if was.value:
            found.append(Figure(table, subject, "now / before", figure.value / was.value, "x"))
    return tuple(found)


# -- plot ---------------------------------------------------------------------------------------------------------------------------------


def plotted(done: Report) -> str:
    """An SVG of bars, one panel for each measure, quartiles as whiskers and bounds as red lines."""
    panels: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in done.figures:
        if figure.value is not None:
            panels.setdefault((figure.table, figure.measure, figure.unit), []).append(figure)
    shapes: list[str] = []
    y = 20
    for (table, measure, unit), figures in panels.items():
        most = max(max(f.value or 0, f.high or 0, f.bound or 0) for f in figures) or 1
        scale = 420 / most
        shapes.append(f'<text x="10" y="{y + 10}" font-weight="bold">{_escaped(f"{table}: {measure} {unit}".strip())}</text>')
        y += 20
        for figure in figures:
            value = figure.value or 0
            shapes.append(f'<text x="230" y="{y + 11}" text-anchor="end">{_escaped(figure.subject[-36:])}</text>')
            shapes.append(
                f'<rect x="240" y="{y}" width="{max(value, 0) * scale:.1f}" height="14" fill="{"#d77" if figure.over else "#79c"}"/>'
            )
            if figure.low is not None and figure.high is not None:
                a, b = 240 + figure.low * scale, 240 + figure.high * scale
                shapes.append(f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{y + 7}" y2="{y + 7}" stroke="#333"/>')
            if figure.bound is not None:
                x = 240 + figure.bound * scale
                shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 1}" y2="{y + 15}" stroke="#c00" stroke-width="2"/>')
            shapes.append(f'<text x="{670}" y="{y + 11}">{_number(value, unit)}</text>')
            y += 18
        y += 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{y + 10}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="760" height="{y + 10}" fill="white"/>', *shapes, "</svg>", ""])


def _escaped(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# -- the command --------------------------------------------------------------------------------------------------------------------------


def arguments(about: str | None, count: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--rounds", type=int, default=count, help=f"interleaved rounds, or fresh processes for memory ({count or 'as each has it'})"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it run at all?")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--compare", metavar="FILE", help="an older run's JSON: print what changed")
    parser.add_argument("--plot", metavar="FILE", help="write an SVG there")
    return parser


def report(name: str, options: Options, tell: Callable[[str], object] = lambda _: None) -> Report:
    """Run one benchmark. ``tell`` is given each table as soon as it is complete."""
    module = importlib.import_module(f"benchmarks.{name}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.perf_counter()
    figures: list[Figure] = []
    try:
        for _, group in itertools.groupby(module.measure(options), key=lambda f: f.table):
            done = list(group)
            figures += done
            tell(text(done) + "\n")
        where = machine(options.device)
    finally:
        torch.set_num_threads(threads)
    question = (module.__doc__ or "").strip().splitlines()[0]
    return Report(name, question, datetime.date.today().isoformat(), where, time.perf_counter() - start, tuple(figures))


def finish(reports: Sequence[Report], json_file: str | None, compare: str | None, plot: str | None) -> None:
    if json_file:
        whole = {"schema": "gradlineage-benchmarks/1", "reports": [done.plain() for done in reports]}
        pathlib.Path(json_file).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if compare:
        for before in loaded(compare):
            for after in reports:
                if before.name == after.name:
                    print(text(compared(before, after)))
    if plot:
        target = pathlib.Path(plot)
        for done in reports:
            path = target if len(reports) == 1 else target.with_name(f"{target.stem}-{done.name}{target.suffix}")
            path.write_text(plotted(done), encoding="utf-8")


def loaded(file: str) -> list[Report]:
    return [Report.of(plain) for plain in json.loads(pathlib.Path(file).read_text(encoding="utf-8"))["reports"]]


def main(name: str, argv: Sequence[str] | None, *, count: int = 15, models: Sequence[str] = ()) -> int:
    """The command line of one benchmark."""
    words = list(sys.argv[1:] if argv is None else argv)
    module = importlib.import_module(f"benchmarks.{name}")
    if words[:1] == ["--child"]:
        torch.set_num_threads(1)
        print(json.dumps(module.child(*words[1:])))
        return 0
    parser = arguments(module.__doc__, count)
    if models:
        parser.add_argument("--models", nargs="+", default=None, help=", ".join(models))
    given = parser.parse_args(words)
    rounds_given = min(given.rounds, 2) if given.quick else given.rounds
    options = Options(given.device, rounds_given, given.quick, tuple(getattr(given, "models", None) or ()))
    print(", ".join(f"{key} {value}" for key, value in machine(given.device).items()), flush=True)
    done = report(name, options, lambda words: print("\n" + words, end="", flush=True))
    finish([done], given.json, given.compare, given.plot)
    return 0
