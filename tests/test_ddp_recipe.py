"""What docs/ddp.md says, held against DistributedDataParallel in two processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import gradlineage
from tests.ddp_worker import FAULTS, WORLD, Net, batch, loss_of

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "ddp.md"
SECONDS = 180

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="this torch was built without torch.distributed"),
    pytest.mark.skipif(dist.is_available() and not dist.is_gloo_available(), reason="this torch was built without gloo"),
]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def start(command: Sequence[str], folder: Path) -> list[tuple[int, str, str]]:
    """Run a command in `WORLD` processes that find each other: (exit status, output, error output) of each."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        shared["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve does no harm
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DISTRIBUTED_DEBUG"} | shared
    running: list[subprocess.Popen[str]] = []
    try:
        for rank in range(WORLD):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                [sys.executable, *command], cwd=folder, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            running.append(process)
        ended = []
        for process in running:
            out, err = process.communicate(timeout=SECONDS)
            ended.append((process.returncode, out, err))
        return ended
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()


def start_patiently(command: Sequence[str], folder: Path) -> list[tuple[int, str, str]]:
    """`start`, once more if another program took the port in between."""
    ended = start(command, folder)
    # a port that was taken meanwhile, or a process that gloo aborted while it shut down on a busy machine: once more
    return start(command, folder) if any("EADDRINUSE" in err or status < 0 for status, _, err in ended) else ended


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What every process found, by rank."""
    ended = start_patiently(["-m", "tests.ddp_worker"], ROOT)
    assert [status for status, _, _ in ended] == [0] * WORLD, ended
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def missing(fault: str, rank: int) -> list[str]:
    net = Net(fault)
    with gradlineage.recording(net) as rec:
        loss = loss_of(net(batch(rank)))
    return [parameter.name for parameter in rec.lineage(loss).gradient().missing]


def taking(fault: str) -> list[str]:
    return [name for name, parameter in Net(fault).named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("fault", FAULTS)
def test_ddp_complains_of_the_parameters_that_were_named(fault: str, rank: int, found: list[dict[str, Any]]) -> None:
    complaint = found[rank][fault]["complaint"]
    assert complaint
    assert [taking(fault)[index] for index in complaint] == missing(fault, rank)


def test_each_fault_is_told_by_its_own_words() -> None:
    why = {}
    for fault in FAULTS:
        net = Net(fault)
        with gradlineage.recording(net) as rec:
            loss = loss_of(net(batch(0)))
        why[fault] = {p.name: p.state for p in rec.lineage(loss).gradient().missing}
    spare = ("spare.weight", "spare.bias")
    dead, cut, never = (dict.fromkeys(spare, state) for state in ("dead", "cut", "never called"))
    assert why == {
        "never called": never, "unused": {"scale": "unused"}, "dead": dead, "cut": cut, "no grad": cut, "not in the loss": dead, "by input": never,
    }  # fmt: skip


def test_what_is_not_in_the_loss_reaches_an_output() -> None:
    assert gradlineage.trace(Net("not in the loss"), batch(0)).gradient().missing == ()
    assert missing("not in the loss", 0) == ["spare.weight", "spare.bias"]


def test_a_sound_net_trains_under_ddp(found: list[dict[str, Any]]) -> None:
    assert missing("", 0) == missing("", 1) == []
    for rank in range(WORLD):
        assert found[rank]["sound"]["complaint"] is None
        assert found[rank]["sound"]["changed"] == taking("")
    assert found[0]["sound"]["values"] == found[1]["sound"]["values"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_search_for_unused_parameters_leaves_the_same_ones_untrained(fault: str, found: list[dict[str, Any]]) -> None:
    in_none = set(missing(fault, 0)) & set(missing(fault, 1))  # what one process trains is averaged into the other
    for rank in range(WORLD):
        entry = found[rank][f"{fault}, searched"]
        assert entry["complaint"] is None
        assert set(taking(fault)) - set(entry["changed"]) == in_none


# -- the document -------------------------------------------------------------------------------------------------------------------


def listing(after: str, language: str) -> str:
    """The first block of a language after a sentence of the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    block = re.search(rf"^```{language}\n(.*?)^```$", text[text.index(after) :], re.S | re.M)
    assert block is not None
    return block[1]


def test_the_document_says_what_ddp_says(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(listing("Save it as `net.py`", "python"))
    (tmp_path / "train.py").write_text(listing("`train.py`, beside", "py"))
    quoted = re.search(r"^\[rank0\]: RuntimeError: (.*?) \[\.\.\.\]", DOCUMENT.read_text(encoding="utf-8"), re.S | re.M)
    indices = set(re.findall(r"^\[rank0\]: Parameter indices .*$", DOCUMENT.read_text(encoding="utf-8"), re.M))
    assert quoted is not None and len(indices) == 1

    status, _, error = start_patiently(["train.py"], tmp_path)[0]
    assert status != 0
    assert " ".join(quoted[1].split()) in " ".join(error.replace("[rank0]:", "").split())
    assert indices <= {line.strip() for line in error.splitlines()}

    for status, printed, error in start_patiently(["train.py", "--find"], tmp_path):
        assert (status, printed) == (0, "trained 2 steps\n"), error


def test_the_fixed_net_of_the_document_trains_under_ddp(tmp_path: Path) -> None:
    blocks = [b for b in re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.S | re.M) if "class Net" in b or "class Fixed" in b]
    (tmp_path / "net.py").write_text("import gradlineage\n" + "\n".join(blocks) + "\nNet = Fixed\n")
    (tmp_path / "train.py").write_text(listing("`train.py`, beside", "py"))
    for status, printed, error in start_patiently(["train.py"], tmp_path):
        assert (status, printed) == (0, "trained 2 steps\n"), error
