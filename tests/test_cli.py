"""The command, mostly called in this process; what concerns the process itself in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gradlineage
from gradlineage.errors import UsageError
from gradlineage.lineage import Lineage
from gradlineage.target import InputSpec, parse_input, parse_settings

torch.set_num_threads(1)

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4, act="relu", depth=1):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.drop = nn.Dropout(0.5)
        self.act = act

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = x + getattr(torch, self.act)(layer(x))
        x = self.drop(x)
        return x if mask is None else x * mask

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 4)
    def forward(self, token_ids, *, attention_mask):
        return self.embed(token_ids) * attention_mask[..., None]

class Deep(nn.Module):
    def __init__(self, blocks=10, each=50):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(*[nn.Linear(2, 2) for _ in range(each)]) for _ in range(blocks)])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class Bad(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
    def forward(self, x):
        try:
            return self.fc(x)
        except RuntimeError as error:
            raise ValueError("no good") from error

def make(**settings):
    print("making")
    return Net(**settings)

class Holder:
    ready = Net()

text = "not a model"
def number():
    return 7
def broken():
    raise OSError("disk on fire")
"""

Run = Callable[..., tuple[int, str, str]]


def process(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(gradlineage.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": root, "PYTHONUTF8": "1"} | environment
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved lineage."""
    path = tmp_path / "saved.json"
    gradlineage.trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)).save(path)
    return path


# -- targets -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["net.py:Net", "./net.py:make", "net:Net", "net:Holder.ready", "net.py:Holder.ready"])
def test_class_function_and_model_in_file_or_module_are_targets(run: Run, target: str) -> None:
    status, out, _ = run(f"show {target} --input 2x4")
    assert status == 0
    assert out.startswith("Net(x: (2, 4) float32)\n") and "\nlayers.0 (Linear)" in out


def test_table_is_that_of_the_library(run: Run) -> None:
    net = torch.nn.ReLU()
    assert run("show torch.nn:ReLU --input 2x4")[1] == gradlineage.trace(net, torch.ones(2, 4)).to_table() + "\n"


def test_settings_reach_the_callable(run: Run) -> None:
    out = run("show net.py:Net --set width=6 --set depth=2 --set act=tanh --input 2x6")[1]
    assert "layers.1 (Linear)" in out and "tanh ← layers.0" in out and "(2, 6)" in out


def test_settings_are_literals_or_else_text() -> None:
    texts = ["weights=None", "shape=(1, 2)", "name=relu", "path=a=b", "low=-1", "flag=True"]
    assert parse_settings(texts) == {"weights": None, "shape": (1, 2), "name": "relu", "path": "a=b", "low": -1, "flag": True}


def test_neighbours_of_a_file_can_be_imported(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "deeper"
    folder.mkdir()
    (folder / "neighbour_of_net.py").write_text("WIDTH = 4")
    (folder / "uses.py").write_text("from neighbour_of_net import WIDTH\nimport torch\ndef make(): return torch.nn.Linear(WIDTH, 1)\n")
    assert run("show deeper/uses.py:make --input 2x4")[0] == 0


# -- inputs ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("1x3x299x299", InputSpec(None, "float32", (1, 3, 299, 299))),
        ("5", InputSpec(None, "float32", (5,))),
        ("x=1x8", InputSpec("x", "float32", (1, 8))),
        ("x=float32[1, 3]<1", InputSpec("x", "float32", (1, 3), 1.0)),
        ("t=float32[1]<1e3", InputSpec("t", "float32", (1,), 1000.0)),
        ("int64[1,16]<1000", InputSpec(None, "int64", (1, 16), 1000.0)),
        ("mask=bool[1,16]", InputSpec("mask", "bool", (1, 16))),
        ("scale=float64[]", InputSpec("scale", "float64", ())),
        ("@batch.pt", InputSpec(file="batch.pt")),
    ],
)
def test_input_is_read_as_meant(text: str, spec: InputSpec) -> None:
    assert parse_input(text) == spec


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1x3x", "expected 1x3x299x299"),
        ("x=[1,3]", "x=float32[1,3,8,8]"),
        ("a-b=1x3", "expected"),
        ("@", "@batch.pt"),
        ("x=float23[1]", "no dtype 'float23'; expected one of float16"),
        ("int64[1]<0.5", "expected a whole number"),
        ("bool[1]<2", "none for bool"),
    ],
)
def test_input_that_cannot_be_read_is_told_with_an_example(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_input(text)
    assert repr(text) in str(caught.value) and told in str(caught.value)


def test_drawn_inputs_are_what_was_asked_for(run: Run, tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(
        "import torch\nclass Probe(torch.nn.Module):\n    def forward(self, a, *, u, i, m, h, c):\n"
        "        torch.save(dict(a=a, u=u, i=i, m=m, h=h, c=c), 'seen.pt')\n        return a\n"
    )
    specs = "--input 200x50 --input 'u=float64[1000]<3' --input 'i=int32[1000]<7' --input m=bool[1000] --input h=float16[2] --input c=complex64[2]"
    assert run(f"show probe.py:Probe {specs}")[0] == 0
    seen = torch.load(tmp_path / "seen.pt", weights_only=True)
    assert {k: str(v.dtype).removeprefix("torch.") for k, v in seen.items()} == {
        "a": "float32", "u": "float64", "i": "int32", "m": "bool", "h": "float16", "c": "complex64",
    }  # fmt: skip
    assert abs(seen["a"].mean()) < 0.1 and abs(seen["a"].std() - 1) < 0.1
    assert 0 <= seen["u"].min() < 0.1 and 2.9 < seen["u"].max() < 3
    assert set(seen["i"].tolist()) == set(range(7)) and set(seen["m"].tolist()) == {True, False}
    run(f"show probe.py:Probe {specs}")
    assert torch.equal(torch.load(tmp_path / "seen.pt", weights_only=True)["a"], seen["a"])


@pytest.mark.parametrize("value", [torch.ones(2, 4), [torch.ones(2, 4), torch.ones(4)], {"x": torch.ones(2, 4), "mask": torch.ones(4)}])
def test_saved_batch_is_passed_as_it_is(run: Run, tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "batch.pt")
    status, out, _ = run("show net.py:Net --input @batch.pt")
    masked = not isinstance(value, torch.Tensor)
    assert status == 0 and ("mask: (4,) float32" in out) == masked


def test_missing_input_shows_the_signature_and_an_example_that_runs(run: Run) -> None:
    status, out, err = run("show net.py:Words")
    assert (status, out) == (2, "")
    assert "Words.forward(token_ids, *, attention_mask)" in err and "missing a required argument: 'token_ids'" in err
    example = err.strip().split("for example: gradlineage ")[1]
    assert run(example)[0] == 0


@pytest.mark.parametrize(
    "command", ["net.py:Net --device meta", "torch.nn:Linear --set in_features=4 --set out_features=1 --set device=meta"]
)
def test_inputs_go_to_the_device_given_or_that_of_the_model(run: Run, command: str) -> None:
    status, out, _ = run(f"show {command} --input 2x4 --json")
    assert status == 0 and json.loads(out)["calls"][0]["inputs"][0]["device"] == "meta"


# -- the view ----------------------------------------------------------------------------------------------------------------------


def test_eval_is_the_default_and_train_can_be_asked_for(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mode.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.fc = torch.nn.Linear(2, 2)\n"
        "    def forward(self, x):\n        return self.fc(x.exp() if self.training else x.sin())\n"
    )
    assert "sin ← input:x" in run("show mode.py:Net --input 2")[1]
    assert "exp ← input:x" in run("show mode.py:Net --input 2 --train")[1]


def test_view_options_reach_the_table(run: Run) -> None:
    run("show net.py:Deep --set blocks=2 --set each=3 --input 1x2 --json -o deep.json")
    lineage = Lineage.load("deep.json")
    assert run("show deep.json --depth 1")[1] == lineage.collapse(depth=1).to_table() + "\n"
    assert run("show deep.json --layer blocks.1")[1] == lineage.to_table(layer="blocks.1") + "\n"
    assert run("show deep.json --width 40")[1] == lineage.to_table(width=40) + "\n"
    run("show net.py:Net --set depth=5 --input 2x4 --json -o net.json")
    net = Lineage.load("net.json")
    assert run("show net.json --no-joins --rearranging --full")[1] == net.to_table(joins=False, rearranging=True, full=True) + "\n"


def test_table_of_many_rows_is_collapsed_and_says_how_to_open_it(run: Run) -> None:
    status, out, err = run("show net.py:Deep --input 1x2")
    assert status == 0 and "10 layers in 10 calls" in out
    assert err == "gradlineage: 500 rows, collapsed to 10 with --depth 1; open it with --full, --depth 2 or --layer 'blocks.0.*'\n"
    for way in ("--full", "--depth 2"):
        status, out, err = run(f"show net.py:Deep --input 1x2 {way}")
        assert "500 layers in 500 calls" in out and err == ""
    assert "50 of 500 rows shown" in run("show net.py:Deep --input 1x2 --layer 'blocks.0.*'")[1]
    assert "500 layers" in run("show net.py:Deep --set blocks=500 --set each=1 --input 1x2")[1]  # collapsing gives no fewer


def test_collapse_takes_the_greatest_depth_that_fits(run: Run, tmp_path: Path) -> None:
    (tmp_path / "nested.py").write_text(
        "from torch.nn import Linear, Sequential as S\ndef make(): return S(*[S(*[S(*[Linear(1, 1) for _ in range(9)]) for _ in range(10)]) for _ in range(10)])\n"
    )
    assert "900 rows, collapsed to 100 with --depth 2;" in run("show nested.py:make --input 1x1")[2]


# -- output ------------------------------------------------------------------------------------------------------------------------


def test_json_is_the_whole_lineage_and_is_read_again(run: Run) -> None:
    status, out, err = run("show net.py:make --input 2x4 --json")
    assert (status, err) == (0, "making\n")  # what the user's code prints stays out of it
    lineage = Lineage.from_json(out)
    assert out == lineage.to_json()
    Path("again.json").write_text(out)
    assert run("show again.json")[1] == lineage.to_table() + "\n"


def test_file_is_replaced_only_when_complete(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("show net.py:Net --input 2x4 -o table.txt") == (0, "", "")
    before = Path("table.txt").read_text()
    assert before.startswith("Net(") and sorted(p.name for p in Path().iterdir() if "table" in p.name) == ["table.txt"]

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    files = sorted(Path().iterdir())
    status, _, err = run("show net.py:Net --set depth=3 --input 2x4 -o table.txt")
    assert status == 2 and "cannot write table.txt: No space left on device" in err
    assert Path("table.txt").read_text() == before and sorted(Path().iterdir()) == files


def test_link_stays_a_link_and_a_pipe_a_pipe(run: Run) -> None:
    Path("real.txt").write_text("old")
    Path("link.txt").symlink_to("real.txt")
    assert run("show torch.nn:ReLU --input 2 -o link.txt")[0] == 0
    assert Path("link.txt").is_symlink() and Path("real.txt").read_text().startswith("ReLU(")
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert run("show torch.nn:ReLU --input 2 -o pipe")[0] == 0
    assert os.read(reader, 5) == b"ReLU(" and Path("pipe").is_fifo()
    os.close(reader)


def test_colour_only_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in run("show net.py:Net --input 2x4")[1]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[1mLayer (type)" in run("show net.py:Net --input 2x4")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("show net.py:Net --input 2x4")[1]


def test_saved_lineage_is_shown_without_torch(saved: Path) -> None:
    code = "import sys; from gradlineage.cli import main; status = main(sys.argv[1:]); print(status, 'torch' in sys.modules)"
    done = process("-c", code, "show", saved.name, "--depth", "1", "--layer", "*", folder=saved.parent)
    assert done.stderr == ""
    assert done.stdout == Lineage.load(saved).to_table(layer="*") + "\n0 False\n"


def test_module_runs_as_command(saved: Path) -> None:
    done = process("-m", "gradlineage", "show", saved.name, folder=saved.parent)
    assert (done.returncode, done.stdout) == (0, Lineage.load(saved).to_table() + "\n")


def test_reader_that_goes_away_is_no_error(saved: Path) -> None:
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); from gradlineage.cli import main; sys.exit(main(sys.argv[1:]))"
    done = process("-c", code, "show", saved.name, folder=saved.parent)
    assert (done.returncode, done.stderr) == (0, "")


def test_terminal_without_arrows_gets_plain_ones(saved: Path) -> None:
    done = process("-m", "gradlineage", "show", saved.name, folder=saved.parent, PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Returns (2, 4) <- 1" in done.stdout


# -- mistakes ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("show", "TARGET"),
        ("paint net.json", "invalid choice"),
        ("show net", "expected for example torchvision.models:resnet18"),
        ("show nowhere.py:Net", "there is no file nowhere.py in"),
        ("show no.such.module:Net", "there is no module 'no'"),
        ("show net.py:Nett", "has no 'Nett'; it has Net"),
        ("show net.py:text", "is a str; expected a torch.nn.Module, its class or a function"),
        ("show net.py:number", "returned an int; expected a torch.nn.Module"),
        ("show net.py:Net --set height=3", "(width=4, act='relu', depth=1) cannot be called with (height=3)"),
        ("show net.py:Net --set height", "expected KEY=VALUE"),
        ("show net:Holder.ready --set width=3", "is a model already and takes no --set (width=3)"),
        ("show net.py:Net --input 1xx", "expected 1x3x299x299"),
        ("show net.py:Net --input 1x4 --input y=1x4", "got an unexpected keyword argument 'y'"),
        ("show net.py:Net --input @nowhere.pt", "--input @nowhere.pt: No such file"),
        ("show net.py:Net --input @net.py", "--input @net.py cannot be read"),
        ("show net.py:Net --input 2x4 --device abacus", "--device 'abacus' cannot be used"),
        ("show net.py:Net --input 2x4 --depth -1", "cannot be negative"),
        ("show net.py:Net --input 2x4 --layer nothing", "no layer, container or join named 'nothing'"),
        ("show net.py:Net --input 2x4 --json --layer x", "cannot go with --json"),
        ("show net.py:Net --input 2x4 -o nowhere/table.txt", "cannot write nowhere/table.txt: No such file"),
        ("show nowhere.json", "cannot read 'nowhere.json': No such file"),
        ("show bad.json", "gradlineage: $"),
        ("show bad.json --input 1x3 --train", "leave out --input, --train"),
    ],
)
def test_mistake_is_one_message_and_status_two(run: Run, command: str, told: str) -> None:
    Path("bad.json").write_text("{}")
    status, out, err = run(command)
    assert (status, out) == (2, "")
    assert told in err and "Traceback" not in err


def test_model_that_fails_shows_its_own_traceback_with_the_call(run: Run) -> None:
    status, out, err = run("show net.py:Bad --input 2x4")
    assert (status, out) == (1, "")
    assert "return self.fc(x)" in err and 'raise ValueError("no good") from error' in err
    assert "RuntimeError: mat1 and mat2" in err and "ValueError: no good\nwhile tracing Bad" in err
    assert f"gradlineage{os.sep}" not in err and "_call_impl" not in err
    assert err.endswith("gradlineage: running the model raised ValueError, see above\n")


def test_target_that_fails_to_build_or_import_is_the_users_error(run: Run) -> None:
    status, _, err = run("show net.py:broken")
    assert status == 1 and "OSError: disk on fire" in err and "building the model raised OSError" in err
    Path("imports.py").write_text("import no_such_neighbour")
    for target in ("imports:make", "imports.py:make"):
        status, _, err = run(f"show {target}")
        assert status == 1 and "No module named 'no_such_neighbour'" in err
    Path("leaves.py").write_text("raise SystemExit(3)")
    assert run("show leaves.py:make")[0] == 1


def test_warnings_of_the_model_take_a_line_each(run: Run, recwarn: pytest.WarningsRecorder) -> None:
    Path("warns.py").write_text(
        "import torch, warnings\ndef make():\n    warnings.simplefilter('always')\n    warnings.warn('be careful')\n    return torch.nn.ReLU()\n"
    )
    status, out, err = run("show warns.py:make --input 2")
    assert status == 0 and out.startswith("ReLU(")
    assert [line.split(": ")[-1] for line in err.splitlines()] == ["be careful"]


def test_help_has_examples_and_says_that_code_runs(run: Run) -> None:
    status, out, _ = run("show --help")
    assert status == 0
    assert "gradlineage show torchvision.models:resnet18 --input 1x3x224x224" in out and "which runs its code" in out
