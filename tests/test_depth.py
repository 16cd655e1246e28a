"""Long chains of operations and calls, in processes of their own: that these end well, their interpreter's exit included, is the point."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch, gradlineage
from torch import nn

torch.set_num_threads(1)
count = int(sys.argv[1])


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        h = self.a(x)
        for _ in range(count):
            h = h + 1
        return self.b(h)


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(1, 1)

    def forward(self, x):
        for _ in range(count):
            x = self.a(x)
        return x


x = torch.ones(1, 1)
"""


def run(code: str, count: int, timeout: float = 110) -> list[str]:
    """What a script printed that ran in a process of its own, which must end as it should, its interpreter's exit included."""
    done = subprocess.run([sys.executable, "-c", SCRIPT + code, str(count)], capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\n")[:-1]


# -- depth -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_chain_of_a_million_operations_is_traced_and_the_process_ends_well() -> None:
    code = """
lineage = gradlineage.trace(Chain(), x)
(source,) = lineage["b"].inputs[0].sources
print(source.label, len(source.ops), len(lineage.joins))
"""
    assert run(code, 1_000_000) == ["a 1000000 0"]


@pytest.mark.parametrize("count", [60_000])
def test_recording_of_a_deep_chain_whose_output_is_kept_differentiates_and_frees_it(count: int) -> None:
    """Nodes that Python has looked at crash the interpreter when some 45,000 of them are freed in a row."""
    code = """
net = Chain()
with gradlineage.recording(net) as rec:
    y = net(x)
print(len(rec.lineage(y)["b"].inputs[0].sources[0].ops), flush=True)
del rec
y.sum().backward()
print(net.a.weight.grad is not None, flush=True)
del y
print("freed", flush=True)
with gradlineage.recording(net) as rec:
    y = net(x)
del y, rec
with gradlineage.recording(net) as rec:
    y = net(x)  # both are left to the exit of the interpreter
"""
    assert run(code, count) == [str(count), "True", "freed"]


@pytest.mark.slow
def test_recording_of_many_calls_in_a_row_whose_output_is_kept_differentiates_and_frees_it() -> None:
    """Here every node was looked at."""
    code = """
net = Calls()
with gradlineage.recording(net) as rec:
    y = net(x)
print(len(rec.lineage(y).layers), flush=True)
del rec
y.sum().backward()
print(net.a.weight.grad is not None, flush=True)
del y
print("freed", flush=True)
"""
    assert run(code, 50_000) == ["50000", "True", "freed"]
