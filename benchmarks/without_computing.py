"""Can a model be traced without computing it, one that fits on no machine?

On the meta device and under ``FakeTensorMode`` tensors have shapes and no values. Each line is a process of its own: seconds of the trace, peak
memory of the process, calls. The largest is a transformers Llama of the shape of the one with 70 billion parameters, given ``position_ids`` and a
four-dimensional mask, so that it asks for no value; its bounds are two minutes and 3 GB. Then a model that asks for a value, which neither has:
what the error says.

    python -m benchmarks.without_computing [--json out.json] [--compare old.json]
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import gradlineage
from benchmarks import harness
from benchmarks.harness import Figure, Options
from benchmarks.models import build

TABLE = "traced without computing"
CASES = (("resnet50@224x64", "meta"), ("resnet50@224x64", "fake"), ("densenet121@224x64", "meta"), ("densenet121@224x64", "fake"))
QUICK = (("resnet18@224x64", "meta"), ("resnet18@224x64", "fake"))


def measure(options: Options) -> Iterator[Figure]:
    cases = (*QUICK, ("llama@2", "meta")) if options.quick else (*CASES, ("llama@80", "meta"), ("llama@80", "fake"))
    for spec, kind in cases:
        subject = f"{spec} {kind}"
        found = harness.fresh("without_computing", spec, kind, here=options.quick)
        if "error" in found:
            yield Figure(TABLE, subject, "trace", None, note=found["error"])
            continue
        large = spec.startswith("llama")
        yield Figure(TABLE, subject, "trace", found["seconds"], "s", bound=120 if large else None)
        yield Figure(TABLE, subject, "process at its peak", found["peak"], "MB", bound=3000 if large else None)
        yield Figure(TABLE, subject, "beyond what the model took", found["more"], "MB")
        yield Figure(TABLE, subject, "calls", found["calls"])
        yield Figure(TABLE, subject, "parameters", found["parameters"] / 1e9, "billion")
        yield Figure(TABLE, subject, "unknown sources", found["unknown"], bound=0)
    for kind in ("meta", "fake"):
        found = harness.fresh("without_computing", "branch", kind, here=options.quick)
        words = found.get("error") or f"{found['type']}: {found['words']}"
        yield Figure("a step that depends on a value", kind, "names its line", None, note="yes" if found.get("line") else "no")
        yield Figure("a step that depends on a value", kind, "says to use real inputs", None, note="yes" if found.get("advice") else "no")
        yield Figure("a step that depends on a value", kind, "the error", None, note=words.replace("|", "/"))


class Branch(nn.Module):
    """Goes where a value tells it to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.fc(x)
        if h.sum() > 0:
            h = self.other(h)
        return h


LINE = Branch.forward.__code__.co_firstlineno + 2


def llama(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Llama's 70-billion shape, but for the number of layers."""
    from transformers import LlamaConfig, LlamaModel

    configure: Any = LlamaConfig
    make: Any = LlamaModel
    config = configure(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
        use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    tokens = 512
    with torch.device("meta"):
        model: nn.Module = make(config).eval()
        inputs = {
            "input_ids": torch.zeros(1, tokens, dtype=torch.long),
            "position_ids": torch.arange(tokens)[None],
            "attention_mask": torch.zeros(1, 1, tokens, tokens),
        }
    return model, inputs


def child(spec: str, kind: str) -> dict[str, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=False) if kind == "fake" else None
    where: contextlib.AbstractContextManager[Any] = fake or contextlib.nullcontext()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    with where, torch.device("cpu" if fake else "meta"):
        model: nn.Module
        if spec == "branch":
            model, args = Branch(), (torch.randn(2, 4),)
        elif spec.startswith("llama"):
            layers = int(spec.partition("@")[2])
            model, kwargs = llama(layers)
        else:
            model, args = build(spec, "cpu" if fake else "meta")
    before = harness.reset_peak()
    start = time.perf_counter()
    try:
        with where:
            lineage = gradlineage.trace(model, *args, **kwargs)
    except Exception as error:
        if spec != "branch":
            raise
        words = " ".join([str(error), *getattr(error, "__notes__", ())]).replace("\n", " ")
        advice = any(word in words for word in ("real input", "real tensors"))
        return {"type": type(error).__name__, "words": words[:300], "line": f".py:{LINE}" in words, "advice": advice}
    seconds = time.perf_counter() - start
    peak = harness.peak_memory()
    sources = [source for call in lineage.calls for flow in call.inputs for source in flow.sources]
    return {
        "seconds": seconds,
        "peak": peak,
        "more": peak - before,
        "calls": len(lineage.calls),
        "parameters": lineage.parameters[0],
        "unknown": sum(source.kind == "unknown" for source in sources),
    }


def main(argv: list[str] | None = None) -> int:
    return harness.main("without_computing", argv)


if __name__ == "__main__":
    raise SystemExit(main())
