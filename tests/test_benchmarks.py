"""The benchmarks run, small, and say what they measured. Their figures are not judged here."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.__main__ as everything
from benchmarks import harness
from benchmarks.harness import Figure, Report
from benchmarks.peers import contracted

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", everything.ALL)
def test_each_runs_small_and_leaves_its_figures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, plot = tmp_path / "out.json", tmp_path / "out.svg"
    assert everything.main([name, "--quick", "--json", str(kept), "--plot", str(plot)]) == 0
    (report,) = harness.loaded(str(kept))
    assert report.name == name
    assert report.question.endswith("?")
    assert f"== {name}" in capsys.readouterr().out
    assert [f for f in report.figures if f.value is not None]
    failed = [f"{f.subject}: {f.note}" for f in report.figures if f.note.startswith(("fails", "error")) or "Error" in f.note]
    assert all("a step that depends on a value" in f.table for f in report.figures if f.note and f"{f.subject}: {f.note}" in failed), failed
    assert plot.read_text().startswith("<svg")


def test_one_file_alone_and_beside_an_older_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import trace_cost

    kept = str(tmp_path / "out.json")
    assert trace_cost.main(["--rounds", "2", "--models", "mobilenet_v3_small@32", "--json", kept]) == 0
    assert trace_cost.main(["--rounds", "2", "--models", "mobilenet_v3_small@32", "--compare", kept]) == 0
    out = capsys.readouterr().out
    assert "trace x floor" in out
    assert "now / before" in out


def test_a_process_of_its_own_answers_and_says_what_went_wrong() -> None:
    found = harness.fresh("large", "recurrent, steps", "20", "cpu")
    assert found["calls"] == 22
    assert "No module named benchmarks.nothing" in harness.fresh("nothing")["error"]


def test_gpu_is_asked_for_only_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        everything.main(["--device", "cuda"])
    assert "no CUDA device" in capsys.readouterr().err


class Event:
    """Stands for a CUDA event: time passes, and is only known once the GPU was waited for."""

    waited = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()
        Event.waited = False

    def elapsed_time(self, last: Event) -> float:
        assert Event.waited
        return (last.at - self.at) * 1e3


def test_on_a_gpu_time_is_taken_between_events_and_memory_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for what ``torch.cuda`` would answer."""
    stand_ins: dict[str, Any] = {
        "synchronize": lambda: setattr(Event, "waited", True),
        "Event": Event,
        "get_device_name": lambda device: "a GPU",
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 2_000_000,
        "max_memory_allocated": lambda device: 5_000_000,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    times = harness.rounds({"wait": lambda: time.sleep(0.01)}, 2, "cuda")
    assert all(value >= 10 for value in times["wait"])
    assert harness.machine("cuda")["gpu"] == "a GPU"
    assert (harness.reset_peak("cuda"), harness.peak_memory("cuda")) == (2.0, 5.0)


# -- the harness --------------------------------------------------------------------------------------------------------------------------


def sample(value: float, name: str = "large") -> Report:
    figures = (Figure("t", "net", "trace", value, "ms", 0.9, 1.2, 1.5), Figure("t", "net", "say", None, note="none"))
    return Report(name, "Is it so?", "2026-01-02", {"cpu": "chip", "python": "3.11", "threads": "1"}, 1.0, figures)


def test_rounds_take_turns_and_prepare_is_not_timed() -> None:
    ran: list[str] = []
    ways: dict[str, harness.Way | Callable[[], object]] = {
        "a": lambda: ran.append("a"),
        "b": harness.Way(lambda made: ran.append(made), lambda: "b"),
    }
    times = harness.rounds(ways, 3)
    assert ran == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [len(v) for v in times.values()] == [3, 3]


def test_figures_come_back_from_json_and_are_compared() -> None:
    before, after = sample(1.0), sample(2.0)
    assert Report.of(json.loads(json.dumps(before.plain()))) == before
    assert [(f.measure, f.value) for f in harness.compared(before, after)] == [("before", 1.0), ("now", 2.0), ("now / before", 2.0)]


def test_tables_say_what_is_over_its_bound() -> None:
    assert "1 (0.90–1.20) ≤ 1.50" in harness.text(sample(1.0).figures)
    assert "| net | 2 (0.90–1.20) **> 1.50** | none |" in harness.markdown(sample(2.0))
    assert harness.plotted(sample(2.0)).count("<rect") == 2


def test_slope_of_a_square_is_two() -> None:
    assert harness.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_results_in_the_readme_are_replaced_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# B\n\n<!-- results -->\n\n<!-- end of results -->\nend\n")
    everything.readme([sample(1.0, "large"), sample(1.0, "memory")], path)
    everything.readme([sample(7.0, "large")], path)
    words = path.read_text()
    assert re.findall(r"^### (\w+)$", words, re.M) == ["memory", "large"]
    assert "| net | 7 " in words
    assert words.endswith("<!-- end of results -->\nend\n")


def test_the_readme_has_every_question() -> None:
    words = (ROOT / "benchmarks" / "README.md").read_text()
    for name in everything.ALL:
        question = (__import__(f"benchmarks.{name}", fromlist=["__doc__"]).__doc__ or "").splitlines()[0]
        assert f"| `{name}` | {question} |" in words


def test_what_lies_between_two_layers_is_looked_through() -> None:
    paths = {1: "a", 2: "", 3: "b", 4: "b", 5: "c"}
    assert contracted((paths, {2: [1], 3: [2], 4: [3], 5: [4, 2]}), {"a", "b", "c"}) == {("a", "b"), ("b", "c"), ("a", "c")}
    assert contracted((paths, {2: [1], 3: [2], 4: [3], 5: [4]}), {"a", "c"}) == {("a", "c")}
