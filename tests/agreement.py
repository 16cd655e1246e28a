"""Hold `gradlineage` against the tracker, edge by edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

import gradlineage
from gradlineage import Call, Flow, Lineage
from tests.tracker import Answer, Tracker

__all__ = ["Build", "Mode", "disagreements", "disagreements_on"]

Build = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
Mode = Literal["grad", "no_grad", "frozen"]


def disagreements_on(build: Build, mode: Mode = "grad") -> list[str]:
    """Build a model twice from one seed, ask both sides about ``model(*args, **kwargs)``, and list where they differ."""
    torch.set_num_threads(1)
    answers: list[Any] = []
    for ask in (gradlineage.trace, _track):
        torch.manual_seed(0)
        model, args, kwargs = build()
        if mode == "frozen":
            model.requires_grad_(False)
        torch.manual_seed(1)
        with torch.set_grad_enabled(mode != "no_grad"):
            answers.append(ask(model, *args, **kwargs))
    lineage, answer = answers
    assert answer.calls and answer.outputs, "nothing to compare"
    return disagreements(lineage, answer)


def _track(model: nn.Module, *args: Any, **kwargs: Any) -> Answer:
    with Tracker(model) as tracker:
        model(*args, **kwargs)
    return tracker.answer()


def disagreements(lineage: Lineage, answer: Answer) -> list[str]:
    """Where the two differ, consumer by consumer. An honest ``unknown`` may stand for a tensor from outside, and only there."""
    layers = {(c.path, c.nth): c for c in lineage.layers}

    def names(flow: Flow, above: tuple[Call, ...] = ()) -> set[str]:
        out: set[str] = set()
        for source in flow.sources:
            call = layers.get((source.path or "", source.nth or 0)) if source.kind == "call" else None
            if call is not None and not call.registered and call not in above:  # an operation, as far as kernels tell
                out.update(*(names(inner, (*above, call)) for inner in call.inputs))
            elif source.kind == "call":
                out.add(f"{source.path}@{source.nth}" if source.nth else str(source.path))
            else:
                kind = {"parameter": "param", "constant": "const"}.get(source.kind, source.kind)
                out.add(kind if kind in ("const", "unknown") else f"{kind}:{source.index if kind == 'input' else source.name}")
        return out

    got = {f"{c.path}@{c.nth}" if c.nth else c.path: [names(f) for f in c.inputs] for c in lineage.layers if c.registered}
    got |= {"output": [names(f) for f in lineage.outputs]}
    want = {**answer.calls, "output": answer.outputs}
    found = [f"{c}: a layer call for one side only" for c in sorted(got.keys() ^ want.keys())]
    for consumer in (c for c in want if c in got):
        mine, theirs = want[consumer], got[consumer]
        if len(mine) != len(theirs):
            found.append(f"{consumer}: {len(theirs)} tensors, expected {len(mine)}")
            continue
        for i, (w, g) in enumerate(zip(mine, theirs, strict=True)):
            have = {"const" if n == "unknown" else n for n in g} if "const" in w else g - {"const"}
            if have != w:
                found.append(f"{consumer}[{i}]: missing {sorted(w - have)}, extra {sorted(have - w)}")
    return found
