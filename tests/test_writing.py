# mypy: disable-error-code="no-untyped-call,no-any-return"
"""What is written to disk appears when it is complete, or not at all; what was there before stays until then."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gradlineage
import gradlineage.exchange
from gradlineage import Lineage, LineageError, Runs
from gradlineage.pytest_plugin import lineage_snapshot
from tests.nets import data, lin

torch.set_num_threads(1)

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
"""

Run = Callable[[str], tuple[int, str, str]]
LINEAGE = gradlineage.trace(lin(), data())
RUNS = gradlineage.trace_many(nn.ReLU(), [data(), data()])

#: Every way to get a file out of the library: what to call with the name, and the name's end.
CALLS: dict[str, Callable[[str], Any]] = {"Lineage.save": LINEAGE.save, "Runs.save": RUNS.save}
COMMANDS = {
    "show": "show net.py:Net --input 2x4 -o {}.txt",
    "show --json": "show net.py:Net --input 2x4 --json -o {}.json",
    "paths": "paths net.py:Net --random 2 --input 2x4 -o {}.txt",
    "paths --json": "paths net.py:Net --random 2 --input 2x4 --json -o {}.json",
    "merge": "merge runs.json runs.json -o {}.json",
    "lint": "lint net.py:Net --input 2x4 -o {}.txt",
    "lint --json": "lint net.py:Net --input 2x4 --format json -o {}.json",
    "grads": "grads net.py:Net --input 2x4 -o {}.txt",
    **{f"draw {kind}": f"draw net.py:Net --input 2x4 -o {{}}.{kind}" for kind in ("svg", "png", "html", "dot", "mmd", "json")},
}


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    RUNS.save(tmp_path / "runs.json")
    return tmp_path


def end_of(command: str) -> str:
    return re.split(r"\{\}", COMMANDS[command])[1]


def listing(folder: Path) -> list[str]:
    return sorted(n for n in os.listdir(folder) if n != "__pycache__")


class Breaking(io.RawIOBase):
    """A file that takes a few bytes and then no more."""

    def __init__(self, file: Any, error: BaseException) -> None:
        self.file, self.error = file, error

    def writable(self) -> bool:
        return True

    def write(self, text: Any) -> int:
        self.file.write(bytes(text)[:7])
        self.file.flush()
        raise self.error

    def close(self) -> None:
        self.file.close()
        super().close()


FAULTS: dict[str, Callable[[], BaseException]] = {
    "full": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "quota": lambda: OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    "broken": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "read-only": lambda: OSError(errno.EROFS, os.strerror(errno.EROFS)),
    "forbidden": lambda: PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    "interrupted": KeyboardInterrupt,
    "out of memory": MemoryError,
}


@pytest.fixture(params=["opening", "writing", "moving"])
def breaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """``breaks(error)``: from then on a step of writing a file raises it."""

    def arm(error: BaseException) -> None:
        def fails(*args: Any, **options: Any) -> Any:
            raise error

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "w" not in mode:
                return open(file, mode, *args, **options)
            return fails() if request.param == "opening" else Breaking(open(file, mode, *args, **options), error)

        if request.param == "moving":
            monkeypatch.setattr(os, "replace", fails)
        else:
            monkeypatch.setattr(gradlineage.exchange, "open", opened, raising=False)

    return arm


# -- interrupted and failing writes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", ["old", None])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", CALLS)
def test_write_that_fails_leaves_the_old_file_and_no_other(
    call: str, fault: str, old: str | None, breaks: Callable[[BaseException], None], tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    if old is not None:
        path.write_text(old)
    breaks(error := FAULTS[fault]())
    expected = LineageError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        CALLS[call](str(path))
    if isinstance(error, OSError):
        assert f"cannot save to {str(path)!r}: {error.strerror}" in str(caught.value)
    assert listing(tmp_path) == (["a.json"] if old is not None else [])
    assert old is None or path.read_text() == old


@pytest.mark.parametrize("fault", ["full", "interrupted"])
@pytest.mark.parametrize("command", COMMANDS)
def test_command_whose_write_fails_leaves_the_old_file_and_says_so(
    command: str, fault: str, run: Run, folder: Path, breaks: Callable[[BaseException], None]
) -> None:
    path = folder / f"out{end_of(command)}"
    path.write_text("old")
    before = listing(folder)
    breaks(FAULTS[fault]())
    status, out, err = run(COMMANDS[command].format("out"))
    assert path.read_text() == "old"
    assert listing(folder) == before
    assert (status, out) == (2 if fault == "full" else 130, "")
    assert fault != "full" or err.endswith(
        f"cannot write {path.name}: No space left on device; expected the name of a file, as in -o net.txt\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_command_writes_a_whole_file_beside_no_other(command: str, run: Run, folder: Path) -> None:
    before = listing(folder)
    status, out, err = run(COMMANDS[command].format("out"))
    assert (status, out) == (0, ""), err
    name = f"out{end_of(command)}"
    assert listing(folder) == sorted([*before, name])
    content = (folder / name).read_bytes()
    assert content.endswith(b"\n") or name.endswith("png")
    assert content.startswith(b"\x89PNG") == name.endswith(".png")


@pytest.mark.parametrize("where", ["{folder}", "{folder}/missing/x", "{folder}/plain/x", "/dev/full", "/proc/x", "{folder}/" + "a" * 300])
@pytest.mark.parametrize("command", ["show", "paths", "merge", "lint", "grads"])
def test_command_refuses_places_that_cannot_be_written(command: str, where: str, run: Run, folder: Path) -> None:
    (folder / "plain").write_text("")
    before = listing(folder)
    place = where.format(folder=folder)
    status, out, err = run(re.sub(r"-o \S+", f"-o {place}", COMMANDS[command]))
    assert (status, out) == (2, "")
    assert f"cannot write {place}: " in err
    assert "Traceback" not in err
    assert listing(folder) == before


@pytest.mark.parametrize("place", ["", "a\0b", "\udcff/\udcfe"])
@pytest.mark.parametrize("call", [*CALLS, "Lineage.load", "Runs.load"])
def test_names_that_are_none_are_refused_in_our_own_words(call: str, place: str) -> None:
    function = {**CALLS, "Lineage.load": Lineage.load, "Runs.load": Runs.load}[call]
    with pytest.raises(LineageError, match=r"cannot (save to|read)"):
        function(place)


# -- real faults, in processes of their own --------------------------------------------------------------------------------------------------

SAVE = """
import os, resource, signal, sys
import gradlineage.exchange
from gradlineage.lineage import Lineage
lineage = Lineage.load(sys.argv[1])
{before}
try:
    lineage.save(sys.argv[2])
except Exception as error:
    print(type(error).__name__, error)
"""


def save_in_a_process(folder: Path, before: str) -> tuple[int, str]:
    LINEAGE.save(folder / "from.json")
    (folder / "to.json").write_text("old")
    code = SAVE.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder / "from.json"), str(folder / "to.json")], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_file_that_may_not_grow_is_told_of_and_the_old_one_stays(tmp_path: Path) -> None:
    status, out = save_in_a_process(tmp_path, "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))")
    assert status == 0
    assert out.startswith("LineageError cannot save to ")
    assert "File too large" in out
    assert (tmp_path / "to.json").read_text() == "old"
    assert listing(tmp_path) == ["from.json", "to.json"]


@pytest.mark.parametrize("step", ["os.replace", "os.chmod"])
def test_process_that_is_killed_while_it_writes_leaves_the_old_file(step: str, tmp_path: Path) -> None:
    status, _ = save_in_a_process(tmp_path, f"{step} = lambda *a: os.kill(os.getpid(), signal.SIGKILL)")
    assert status == -signal.SIGKILL
    assert (tmp_path / "to.json").read_text() == "old"
    assert [name for name in listing(tmp_path) if not name.startswith(".gradlineage-")] == ["from.json", "to.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full disk at hand")
def test_command_whose_standard_output_is_full_says_so(tmp_path: Path) -> None:
    LINEAGE.save(tmp_path / "a.json")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gradlineage", "show", str(tmp_path / "a.json")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode in (1, 2)
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_command_whose_reader_goes_away_ends_quietly(tmp_path: Path) -> None:
    net = nn.Sequential(*[lin() for _ in range(300)])
    gradlineage.trace(net, data()).save(tmp_path / "a.json")
    with subprocess.Popen(
        [sys.executable, "-m", "gradlineage", "show", str(tmp_path / "a.json"), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


# -- what kind of file it is ---------------------------------------------------------------------------------------------------------------


def test_new_file_has_the_permissions_that_the_process_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        LINEAGE.save(tmp_path / "a.json")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640


def test_link_to_nowhere_is_followed_and_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    LINEAGE.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Lineage.load(tmp_path / "real.json") == LINEAGE


def test_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    LINEAGE.save(pipe)
    reader.join(30)
    assert Lineage.from_json(read[0]) == LINEAGE
    assert pipe.is_fifo()


def test_many_writers_of_one_file_leave_it_whole_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    lineages = [gradlineage.trace(nn.Sequential(*[lin() for _ in range(n)]), data()) for n in (1, 20)]
    lineages[0].save(path)
    stop = threading.Event()

    def write(lineage: Lineage) -> None:
        while not stop.is_set():
            lineage.save(path)

    writers = [threading.Thread(target=write, args=(lineage,)) for lineage in lineages * 2]
    for writer in writers:
        writer.start()
    try:
        found = {len(Lineage.load(path).layers) for _ in range(100)}
    finally:
        stop.set()
        for writer in writers:
            writer.join(30)
    assert found <= {1, 20}
    assert listing(tmp_path) == ["a.json"]


# -- the snapshot -------------------------------------------------------------------------------------------------------------------------


def snapshot(folder: Path, update: bool = True) -> Iterator[Callable[..., None]]:
    """The fixture ``lineage_snapshot`` as a test in a folder would get it."""
    request = SimpleNamespace(
        config=SimpleNamespace(getoption=lambda name: update, stash=pytest.Stash()),
        path=folder / "test_x.py",
        node=SimpleNamespace(name="test_x"),
        cls=None,
    )
    function: Any = getattr(lineage_snapshot, "__wrapped__", None) or lineage_snapshot._get_wrapped_function()
    return function(request)


@pytest.mark.parametrize("fault", ["full", "interrupted"])
def test_snapshot_whose_write_fails_leaves_the_old_one(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check: Any = snapshot(tmp_path)
    check(LINEAGE)
    check = snapshot(tmp_path)  # in another run
    (file,) = (tmp_path / "wiring" / "test_x").iterdir()
    old = file.read_text()
    error = FAULTS[fault]()
    real = io.open

    def opened(name: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        made = real(name, mode, *args, **options)
        if "w" in mode:
            made.close()
            raise error
        return made

    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr(gradlineage.exchange, "open", opened, raising=False)
    with pytest.raises((OSError, LineageError, KeyboardInterrupt)):
        check(gradlineage.trace(nn.Sequential(lin(), lin()), data()))
    monkeypatch.undo()
    assert file.read_text() == old
    assert listing(tmp_path / "wiring" / "test_x") == [file.name]


def test_snapshot_in_a_place_that_cannot_be_written_is_told_of_in_our_own_words(tmp_path: Path) -> None:
    (tmp_path / "wiring").write_text("a file where the folder should be")
    check: Any = snapshot(tmp_path)
    with pytest.raises(LineageError):
        check(LINEAGE)
