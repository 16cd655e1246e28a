"""Does a trace run kernels of its own?

Operations that reach a kernel, counted for a forward with gradient and for the trace of the same batch: by a dispatch mode, those aside that only
look at a tensor in another way, and on a GPU the kernels that torch's profiler saw there as well. A forward that writes no parameter or buffer
has as many with a trace as without; one in training mode, whose batch normalisations write their statistics, has copies made before these writes and
put back after.

    python -m benchmarks.kernels [--device cuda] [--json out.json] [--compare old.json]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradlineage
from benchmarks import harness
from benchmarks.harness import Figure, Options
from benchmarks.models import build, same_kernels

__all__ = ["Counted", "computing", "dispatched"]

#: What makes a tensor over the same memory and starts nothing.
METADATA = frozenset(
    "detach view alias _unsafe_view as_strided as_strided_ t transpose permute expand squeeze unsqueeze slice select split unbind _reshape_alias "
    "unsafe_split split_with_sizes detach_ lift_fresh".split()
)


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def dispatched(run: Callable[[], object]) -> Counter[str]:
    """How often each operation was dispatched."""
    counted = Counted()
    with counted:
        run()
    return counted.names


def computing(names: Counter[str]) -> Counter[str]:
    """Without those that only look at a tensor in another way."""
    return Counter({name: count for name, count in names.items() if name not in METADATA})


def launched(run: Callable[[], object]) -> Counter[str]:
    """The kernels and copies that torch's profiler saw on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return Counter(event.name for event in profiler.events() or () if str(event.device_type).endswith("CUDA"))


def measure(options: Options) -> Iterator[Figure]:
    specs = options.models or (("resnet18@32x2",) if options.quick else ("resnet50@64x2", "mobilenet_v3_small@64x2", "transformer@16"))
    with same_kernels():
        for spec in specs:
            for training in (False, True):
                yield from counted(spec, training, options.device)


def counted(spec: str, training: bool, device: str) -> Iterator[Figure]:
    model, args = build(spec, device)
    model.train(training)
    subject = f"{spec} {'train' if training else 'eval'}"
    writes = training and any(True for _ in model.buffers())
    ways: dict[str, Callable[[], object]] = {"forward": lambda: model(*args), "trace": lambda: gradlineage.trace(model, *args)}
    for run in ways.values():
        run()
    found = {name: dispatched(run) for name, run in ways.items()}
    alone, traced = (computing(found[name]) for name in ways)
    yield Figure("operations dispatched", subject, "forward", alone.total())
    yield Figure("operations dispatched", subject, "trace", traced.total(), bound=None if writes else alone.total())
    extra = ", ".join(f"{count} {name}" for name, count in (traced - alone).most_common())
    yield Figure("operations dispatched", subject, "more", None, note=extra or "none")
    yield Figure("operations dispatched", subject, "metadata only, forward", found["forward"].total() - alone.total())
    yield Figure("operations dispatched", subject, "metadata only, trace", found["trace"].total() - traced.total())
    if device.startswith("cuda"):
        kernels = {name: launched(run) for name, run in ways.items()}
        yield Figure("operations dispatched", subject, "kernels, forward", kernels["forward"].total())
        most = None if writes else kernels["forward"].total()
        yield Figure("operations dispatched", subject, "kernels, trace", kernels["trace"].total(), bound=most)
        more = ", ".join(f"{count} {name[:40]}" for name, count in (kernels["trace"] - kernels["forward"]).most_common(3))
        yield Figure("operations dispatched", subject, "more kernels", None, note=more or "none")


def main(argv: list[str] | None = None) -> int:
    return harness.main("kernels", argv)


if __name__ == "__main__":
    raise SystemExit(main())
