"""The commands over many inputs and over two lineages: ``paths``, ``merge``, ``diff``, and the views ``--roll`` and ``--decisions``."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradlineage
from gradlineage import Lineage, Runs
from tests.test_cli import process

torch.set_num_threads(1)

NET = """
import torch
from torch import nn

class Gate(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b, self.never = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(1, 1)
    def forward(self, x, scale=None):
        h = self.a(x) if x.sum() > 0 else self.b(x)
        return h if scale is None else h * scale

class Loop(nn.Module):
    def __init__(self, extra=False):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(2, 2), nn.Linear(2, 2)
        self.extra = nn.ReLU() if extra else None
    def forward(self, x):
        state = None
        for step in x:
            state = self.cell(step, state)
        h = self.head(state[0])
        return self.extra(h) if self.extra is not None else h

class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)
    def forward(self, x):
        return self.fc(x) if self.training and torch.rand(()) < 0.5 else self.drop(self.fc(x))

class Bad(nn.Module):
    def forward(self, x):
        if x.sum() < 0:
            raise ValueError("no good")
        return x
"""

Run = Callable[[str], tuple[int, str, str]]


UP, DOWN = torch.ones(1, 4), -torch.ones(1, 4)


def taken(runs: Runs) -> list[tuple[int, tuple[int, ...]]]:
    return [(path.count, path.examples) for path in runs.paths]


def layers(runs: Runs) -> list[list[str]]:
    return [[call.path for call in path.lineage.layers] for path in runs.paths if path.lineage is not None]


def paths(run: Run, command: str) -> Runs:
    status, out, err = run(f"paths {command} --json")
    assert (status, err) == (0, "")
    return Runs.from_json(out)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two parts of some runs, their whole, and two lineages, without the command's help."""
    space: dict[str, Any] = {}
    exec(compile(NET, str(tmp_path / "model.py"), "exec"), space)
    gate, x = space["Gate"](), [UP, DOWN, UP]
    for name, start, stop in (("whole", 0, 3), ("first", 0, 2), ("second", 2, 3)):
        gradlineage.trace_many(gate, x[start:stop], start=start).save(tmp_path / f"{name}.json")
    gradlineage.trace(space["Loop"](), torch.ones(3, 2)).save(tmp_path / "short.json")
    gradlineage.trace(space["Loop"](), torch.ones(40, 2)).save(tmp_path / "long.json")
    gradlineage.trace(gate, UP).save(tmp_path / "gate.json")
    return tmp_path


# -- inputs of paths -------------------------------------------------------------------------------------------------------------------


def test_folder_of_inputs_is_taken_in_the_order_of_names(run: Run) -> None:
    Path("inputs").mkdir()
    for name, value in {"b.pt": DOWN, "a.pt": UP, "c.pt": [DOWN, UP], "d.pt": {"x": UP, "scale": UP}}.items():
        torch.save(value, Path("inputs") / name)
    Path("inputs/.hidden").write_text("no input")
    Path("inputs/folder").mkdir()
    runs = paths(run, "net.py:Gate --inputs inputs")
    assert taken(runs) == [(1, (0,)), (1, (1,)), (1, (2,)), (1, (3,))]
    found = [path.lineage for path in runs.paths if path.lineage is not None]
    assert [[call.path for call in lineage.layers] for lineage in found] == [["a"], ["b"], ["b"], ["a"]]
    assert [[flow.name for flow in lineage.inputs] for lineage in found] == [["x"], ["x"], ["x", "scale"], ["x", "scale"]]


@pytest.mark.parametrize(
    "value",
    [
        [UP, DOWN, UP],
        (UP, DOWN, UP),
        [[UP], (DOWN,), {"x": UP}],
        torch.cat([UP, DOWN, UP]),
    ],
)
def test_file_of_inputs_is_a_list_or_a_tensor(run: Run, value: object) -> None:
    torch.save(value, "inputs.pt")
    runs = paths(run, "net.py:Gate --inputs inputs.pt")
    assert taken(runs) == [(2, (0, 2)), (1, (1,))] and layers(runs) == [["a"], ["b"]]
    lineage = runs.paths[0].lineage
    assert lineage is not None and lineage.inputs[0].shape == (1, 4)


def test_random_inputs_are_those_of_the_seed(run: Run) -> None:
    runs = paths(run, "net.py:Gate --random 9 --input 1x4")
    torch.manual_seed(0)
    for _ in range(2):
        torch.nn.Linear(4, 4)
    torch.nn.Linear(1, 1)
    signs = [bool(torch.randn(1, 4).sum() > 0) for _ in range(9)]
    ups, downs = ([n for n, sign in enumerate(signs) if sign is side] for side in (True, False))
    assert taken(runs) == sorted([(len(side), tuple(side)) for side in (ups, downs)], key=lambda way: (-way[0], way[1]))
    assert runs == paths(run, "net.py:Gate --random 9 --input 1x4")


def test_random_inputs_may_be_several_and_named(run: Run) -> None:
    runs = paths(run, "net.py:Gate --random 2 --input 1x4 --input 'scale=float64[4]<2'")
    assert runs.total == 2 and all(path.lineage and [f.dtype for f in path.lineage.inputs] == ["float32", "float64"] for path in runs.paths)


def test_settings_and_training_reach_the_model(run: Run) -> None:
    assert paths(run, "net.py:Gate --set width=6 --random 1 --input 1x6").total == 1
    assert len(paths(run, "net.py:Dropped --random 20 --input 1x2").paths) == 1
    assert len(paths(run, "net.py:Dropped --random 20 --input 1x2 --train").paths) == 2


def test_fewer_lineages_may_be_kept(run: Run) -> None:
    runs = paths(run, "net.py:Gate --random 9 --input 1x4 --max-paths 1")
    assert runs.max_paths == 1 and [path.lineage is not None for path in sorted(runs.paths, key=lambda p: p.examples)] == [True, False]


# -- what paths prints -----------------------------------------------------------------------------------------------------------------


def test_text_is_that_of_the_library(run: Run) -> None:
    torch.save([UP, DOWN, UP], "inputs.pt")
    status, out, err = run("paths net.py:Gate --inputs inputs.pt")
    assert (status, err) == (0, "") and out == str(paths(run, "net.py:Gate --inputs inputs.pt")) + "\n"
    assert out.startswith("Gate: 3 inputs took 2 paths\npath 1  67%  ×2  1 layer  inputs 0, 2\npath 2  33%  ×1  1 layer  input 1\n")
    assert "\nnever called: never\n" in out and "True 67%, False 33%; True on path 1; False on path 2\n" in out


def test_union_is_a_table_with_shares(run: Run) -> None:
    torch.save([UP, DOWN, UP], "inputs.pt")
    status, out, _ = run("paths net.py:Gate --inputs inputs.pt --union")
    assert status == 0 and out == paths(run, "net.py:Gate --inputs inputs.pt").union().to_table() + "\n"
    assert "a (Linear) 67%" in out and "b (Linear) 33%" in out and "Returns (1, 4) ← a 67%, b 33%" in out


@pytest.mark.parametrize("how", ["", "--json", "--union"])
def test_output_goes_to_a_file(run: Run, how: str) -> None:
    torch.save([UP, DOWN], "inputs.pt")
    out = run(f"paths net.py:Gate --inputs inputs.pt {how}")[1]
    assert run(f"paths net.py:Gate --inputs inputs.pt {how} -o out.txt") == (0, "", "")
    assert Path("out.txt").read_text(encoding="utf-8") == out


@pytest.mark.usefixtures("saved")
def test_saved_runs_are_printed_as_they_were(run: Run) -> None:
    runs = Runs.load("whole.json")
    assert run("paths whole.json") == (0, f"{runs}\n", "")
    assert run("paths whole.json --union") == (0, f"{runs.union()}\n", "")
    assert run("paths whole.json --json") == (0, runs.to_json(), "")


# -- merge -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("files", ["first.json second.json", "second.json first.json"])
def test_parts_in_any_order_are_the_whole(run: Run, files: str) -> None:
    whole = Runs.load("whole.json")
    assert run(f"merge {files}") == (0, f"{whole}\n", "")
    assert run(f"merge {files} -o merged.json") == (0, "", "")
    assert Runs.load("merged.json") == whole
    assert run("paths merged.json")[1] == f"{whole}\n"


@pytest.mark.usefixtures("saved")
def test_one_part_is_itself(run: Run) -> None:
    assert run("merge first.json")[1] == f"{Runs.load('first.json')}\n"


# -- diff --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("saved")
def test_difference_of_saved_lineages_is_status_one(run: Run) -> None:
    status, out, err = run("diff short.json long.json")
    assert (status, err) == (1, "")
    assert out == f"{gradlineage.diff(Lineage.load('short.json'), Lineage.load('long.json'))}\n"
    assert out == "37 added\n+ cell[3–39] (LSTMCell) ×37\n"
    assert run("diff long.json short.json")[1] == "37 removed\n- cell[3–39] (LSTMCell) ×37\n"


@pytest.mark.usefixtures("saved")
def test_no_difference_is_status_zero(run: Run) -> None:
    assert run("diff short.json short.json") == (0, "no difference\n", "")
    assert run("diff net.py:Loop net.py:Loop --input 3x2") == (0, "no difference\n", "")


@pytest.mark.usefixtures("saved")
def test_saved_lineage_and_model_are_compared(run: Run) -> None:
    assert run("diff short.json net.py:Loop --input 3x2") == (0, "no difference\n", "")
    expected = "1 added, 1 rewired\n+ extra (ReLU)\n~ output: was head, now extra\n"
    assert run("diff short.json net.py:Loop --input 3x2 --set extra=True") == (1, expected, "")
    assert run("diff net.py:Loop short.json --input 3x2 --set extra=True")[:2] == (
        1,
        expected.replace("added", "removed").replace("+", "-").replace("was head, now extra", "was extra, now head"),
    )


def test_model_that_fails_is_no_difference(run: Run) -> None:
    torch.save(DOWN, "down.pt")
    status, out, err = run("diff net.py:Bad net.py:Bad --input @down.pt")
    assert out == "" and "ValueError: no good" in err
    assert status == 2


# -- views of one lineage ------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("saved")
def test_roll_shows_a_loop_as_one_row(run: Run) -> None:
    long = Lineage.load("long.json")
    assert run("show long.json")[1] == f"{long}\n"
    status, out, err = run("show long.json --roll")
    assert (status, out, err) == (0, f"{long.roll()}\n", "") and "cell ×40 (LSTMCell)" in out
    assert Lineage.from_json(run("show long.json --roll --json")[1]) == long.roll()


def test_rolled_table_of_many_rows_is_not_collapsed(run: Run) -> None:
    status, out, err = run("show net.py:Loop --input 500x2 --roll")
    assert (status, err) == (0, "") and "cell ×500 (LSTMCell)" in out and "2 layers in 501 calls" in out


@pytest.mark.usefixtures("saved")
def test_decisions_are_notes_in_the_table_or_a_list_below(run: Run) -> None:
    gate = Lineage.load("gate.json")
    status, out, _ = run("show gate.json --decisions")
    assert status == 0 and out == gate.to_table(decisions=True) + "\n" != f"{gate}\n"
    (below,) = (text for text in out.split("─\n")[2].splitlines() if text.startswith("?"))
    assert below.startswith("? bool at ") and "is True" in below and "sum ← input:x" in below and "1 decision:" in out
    within = run("show gate.json")[1]
    assert "? bool at " in within.split("─\n")[1] and "1 decision" not in within


# -- without torch -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("paths whole.json", 0),
        ("paths whole.json --union", 0),
        ("merge first.json second.json", 0),
        ("diff short.json long.json", 1),
        ("show long.json --roll", 0),
        ("show gate.json --decisions", 0),
    ],
)
def test_what_is_saved_needs_no_torch(saved: Path, command: str, status: int) -> None:
    code = "import sys; from gradlineage.cli import main; status = main(sys.argv[1:]); print(status, 'torch' in sys.modules)"
    done = process("-c", code, *command.split(), folder=saved)
    assert done.stderr == "" and done.stdout.endswith(f"\n{status} False\n")


# -- mistakes ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("paths net.py:Gate", "paths net.py:Gate needs inputs: --inputs FOLDER_OR_FILE, or --random 100 with --input 1x3x224x224"),
        ("paths net.py:Gate --input 1x4", "needs inputs"),
        ("paths net.py:Gate --random 3", "--random 100 --input 1x3x224x224"),
        ("paths net.py:Gate --random 0 --input 1x4", "--random 0 draws what --input describes"),
        ("paths net.py:Gate --random x --input 1x4", "invalid int value: 'x'"),
        ("paths net.py:Gate --random 3 --inputs inputs.pt", "needs inputs"),
        ("paths net.py:Gate --inputs inputs.pt --input 1x4", "give one of the two"),
        ("paths net.py:Gate --inputs nowhere", "No such file"),
        ("paths net.py:Gate --inputs net.py", "cannot be read"),
        ("paths net.py:Gate --inputs empty", "the folder is empty"),
        ("paths net.py:Gate --inputs dict.pt", "holds one dict; expected a folder of files that torch.save wrote"),
        ("paths net.py:Gate --inputs ints.pt", "an input is an int; expected a tensor, a list or tuple, or a dict by name"),
        ("paths net.py:Gate --random 2 --input 1x4 --input 1x4 --input 1x4", "too many positional arguments"),
        ("paths net.py:Gate --random 2 --input 1x", "--input '1x' is no input"),
        ("paths net.py:Gates --random 2 --input 1x4", "net.py has no 'Gates'; it has Gate"),
        ("paths whole.json --union --json", "--union prints a table and cannot go with --json"),
        ("paths whole.json --random 3 --input 1x4", "whole.json holds saved runs, no model runs: leave out --input, --random"),
        ("paths whole.json --inputs inputs.pt --train", "leave out --train, --inputs"),
        ("paths gate.json", 'expected "gradlineage-runs/1"'),
        ("paths nowhere.json", "cannot read 'nowhere.json': No such file"),
        ("paths bad.json", "gradlineage: $"),
        ("paths whole.json -o nowhere/out.txt", "cannot write nowhere/out.txt"),
        ("merge", "the following arguments are required: FILE"),
        ("merge whole.json gate.json", 'expected "gradlineage-runs/1"'),
        ("merge whole.json other.json", "merge(): runs of one model can be put together"),
        ("merge whole.json nowhere.json", "cannot read 'nowhere.json'"),
        ("diff gate.json", "the following arguments are required: B"),
        (
            "diff gate.json short.json --input 1x4 --set a=1",
            "gate.json and short.json are saved lineages, no model runs: leave out --set, --input",
        ),
        ("diff gate.json nowhere.json", "cannot read 'nowhere.json'"),
        ("diff gate.json whole.json", "gradlineage: $"),
        ("diff gate.json net.py:Gate", "Gate.forward(x, scale=None) cannot be called"),
        ("show whole.json", "gradlineage: $"),
    ],
)
@pytest.mark.usefixtures("saved")
def test_mistake_is_one_message_and_status_two(run: Run, command: str, told: str) -> None:
    Path("bad.json").write_text("{}")
    Path("empty").mkdir()
    torch.save([UP], "inputs.pt")
    torch.save({"x": UP}, "dict.pt")
    torch.save([1, 2], "ints.pt")
    gradlineage.trace_many(torch.nn.ReLU(), [UP]).save("other.json")
    status, out, err = run(command)
    assert (status, out) == (2, "")
    assert told in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["paths net.py:Gate --random 3 --input 1x4 --max-paths -1", "paths whole.json --random 0"])
@pytest.mark.usefixtures("saved")
def test_numbers_that_make_no_sense_are_a_mistake(run: Run, command: str) -> None:
    assert run(command)[:2] == (2, "")


@pytest.mark.parametrize("value", [[], torch.tensor(1.0), torch.ones(0, 4)])
def test_file_without_inputs_is_a_mistake(run: Run, value: object) -> None:
    torch.save(value, "inputs.pt")
    assert run("paths net.py:Gate --inputs inputs.pt")[:2] == (2, "")


def test_message_names_the_option_that_was_given(run: Run) -> None:
    err = run("paths net.py:Gate --inputs nowhere")[2]
    assert "--inputs nowhere" in err and "--input @" not in err


def test_model_that_fails_on_one_of_many_says_which(run: Run) -> None:
    torch.save([UP, UP, DOWN], "inputs.pt")
    status, out, err = run("paths net.py:Bad --inputs inputs.pt --json -o runs.json")
    assert (status, out) == (1, "") and not Path("runs.json").exists()
    assert 'raise ValueError("no good")' in err and "while tracing input 2 of many" in err
    assert err.endswith("gradlineage: running the model raised ValueError, see above\n") and "gradlineage/" not in err.replace(os.sep, "/")


@pytest.mark.parametrize("command", ["paths", "diff", "merge"])
def test_help_says_how(run: Run, command: str) -> None:
    status, out, _ = run(f"{command} --help")
    assert status == 0 and f"usage: gradlineage {command} " in out
    examples = [text.strip() for text in out.splitlines() if text.startswith("  gradlineage ")]
    assert all(text.split()[1] == command for text in examples) and (examples or command == "merge")


# -- on a terminal -------------------------------------------------------------------------------------------------------------------------


def on_terminal(folder: Path, command: str) -> tuple[int, str, str]:
    """Exit status, standard output, and what a terminal as standard error got."""
    ours, theirs = pty.openpty()
    env = os.environ | {
        "PYTHONPATH": str(Path(gradlineage.__file__).parents[1]),
        "TERM": "xterm",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "gradlineage", *shlex.split(command)], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    err = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        err += part
    os.close(ours)
    assert child.stdout is not None
    with child.stdout:
        out = child.stdout.read().decode()
    return child.wait(60), out, err.decode()


@pytest.mark.usefixtures("run")
def test_bar_shows_while_inputs_run_and_stays_out_of_the_output(tmp_path: Path) -> None:
    status, out, err = on_terminal(tmp_path, "paths net.py:Gate --random 5 --input 1x4")
    assert status == 0 and out.startswith("Gate: 5 inputs took ") and "\x1b" not in out and "tracing" not in out
    assert "tracing" in err and "5/5" in err
