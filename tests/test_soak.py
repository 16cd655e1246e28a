# mypy: disable-error-code="no-untyped-call,no-any-return"
"""Two thousand traces in one process: memory, registries and times stay where they were."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import gc, json, resource, sys, time, tracemalloc, types, weakref
import torch, torch._dynamo
from torch import nn
import gradlineage
import gradlineage.naming, gradlineage.tables, gradlineage.record, gradlineage.tracing, gradlineage.shadow

torch.set_num_threads(1)
torch.manual_seed(0)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.bn = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        h = self.bn(self.a(x))
        h = torch.relu(h) + self.b(x) if float(h.detach().sum()) > 0 else self.b(h)
        return {"h": h, "best": h.argmax(-1)}


class Breaks(Gate):
    def forward(self, x):
        super().forward(x)
        raise ValueError("on purpose")


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0]


class Custom(Gate):
    def forward(self, x):
        return Squared.apply(self.a(x))


class Differentiates(Gate):
    def forward(self, x):
        h = self.a(x)
        return torch.autograd.grad(self.b(h).square().sum(), h)[0]


MODELS = [Gate(), Gate().eval(), Custom(), Differentiates(), Breaks(), nn.LSTM(4, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)]
INPUTS = [torch.randn(2, 4)] * 5 + [torch.randn(3, 2, 4)] * 2


def fresh():
    \"\"\"A model of a class that is made anew each time, as notebooks and tests do.\"\"\"
    kept = torch.zeros(1000)

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) + kept[0]

    return Local(), kept


def turn(n):
    model, x = MODELS[n % len(MODELS)], INPUTS[n % len(MODELS)]
    start = time.process_time()
    if n % 3 == 2 and not isinstance(model, (Breaks, Differentiates)):
        with gradlineage.recording(model) as rec:
            model(x)
        lineage = rec.lineage()
    else:
        try:
            lineage = gradlineage.trace(model, x)
        except ValueError:
            lineage = None
    if lineage is not None and n % 10 == 0:
        str(lineage), lineage.to_json(), lineage.collapse(depth=1)
    return time.process_time() - start


def sizes():
    \"\"\"Every dict, list and set that lies in a module of ours.\"\"\"
    return {
        f"{name}.{key}": len(value)
        for name, module in list(sys.modules.items()) if name.startswith("gradlineage") and isinstance(module, types.ModuleType)
        for key, value in vars(module).items() if isinstance(value, (dict, list, set)) and not key.startswith("__")
    }


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


COUNT = int(sys.argv[1])
for n in range(100):
    turn(n)
gc.collect()
registries, objects, before = sizes(), len(gc.get_objects()), resident()
times = [[turn(n) for n in range(quarter * COUNT // 4, (quarter + 1) * COUNT // 4)] for quarter in range(4)]
gc.collect()
told = {
    "registries": {k: (registries.get(k, 0), v) for k, v in sizes().items() if v > registries.get(k, 0)},
    "objects": len(gc.get_objects()) - objects,
    "resident": resident() - before,
    "times": [sum(sorted(quarter[k :: len(MODELS)])[5] for k in range(len(MODELS))) for quarter in times],  # of each model one of the fastest
}
tracemalloc.start()
for n in range(35):
    turn(n)
gc.collect()
held = tracemalloc.get_traced_memory()[0]
for n in range(140):
    turn(n)
gc.collect()
told["allocated"] = tracemalloc.get_traced_memory()[0] - held
tracemalloc.stop()
gone = []
for n in range(20):
    model, kept = fresh()
    gradlineage.trace(model, INPUTS[0])
    gone += [weakref.ref(model), weakref.ref(type(model)), weakref.ref(kept)]
    del model, kept
gc.collect()
told["models"], told["classes"], told["tensors of classes"] = (sum(ref() is not None for ref in gone[k::3]) for k in range(3))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT, "2000"], capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_no_registry_grows_with_the_number_of_traces(told: dict[str, Any]) -> None:
    assert told["registries"] == {}


def test_no_objects_pile_up(told: dict[str, Any]) -> None:
    assert told["objects"] < 200
    assert told["allocated"] < 50_000  # bytes, over 140 traces


def test_memory_of_the_process_stays_flat(told: dict[str, Any]) -> None:
    assert told["resident"] < 20 * 2**20


def test_later_traces_take_no_longer(told: dict[str, Any]) -> None:
    first, *_, last = told["times"]
    assert last < 1.5 * first


def test_traced_models_are_let_go_of(told: dict[str, Any]) -> None:
    assert told["models"] == 0


def test_classes_of_traced_models_are_let_go_of_with_what_they_refer_to(told: dict[str, Any]) -> None:
    assert told["classes"] <= 1
    assert told["tensors of classes"] <= 1
