"""Where gradient stops: operations that took a tensor with gradient and gave one without."""

from __future__ import annotations

import dataclasses

from gradlineage.inside import Inside
from gradlineage.record import Recorder
from gradlineage.tape import CALL, OP

__all__ = ["Cut", "find_cuts"]


@dataclasses.dataclass(slots=True)
class Cut:
    """A break, in numbers of the tape: one operation, or all that a ``no_grad`` region took in."""

    op: str
    number: int  # the operation that comes first
    call: int
    before: dict[int, None] = dataclasses.field(default_factory=dict)
    after: dict[int, None] = dataclasses.field(default_factory=dict)


def find_cuts(recorder: Recorder, layer: list[bool], insides: dict[int, Inside]) -> list[Cut]:
    """The breaks of a recording, once each, in running order.

    What happened inside of a layer counts where the layer's output has no gradient because of it. A pass that ran without gradient as a whole
    has no breaks: nothing in the model stopped it.
    """
    entries, calls = recorder.tape.entries, recorder.calls
    cuts: list[Cut] = []
    regions: dict[int, Cut] = {}  # per call with gradient, its no_grad region under way
    leaving = _leaving(recorder, layer)
    for number in sorted(entries):
        kind, name, call, parents, grad, *_ = entries[number]
        if kind != OP:
            continue
        if grad:
            regions.pop(call, None)
        if number not in recorder.tape.cuts:
            continue
        inside = call >= 0 and layer[call]
        after = [v for v in leaving.get(call, ()) if grad or not entries[v][4]] if inside else [number]
        if not after:
            continue
        if grad:  # a custom Function that gives some of its operands none
            before = [~p for p in parents if p < 0 and entries[~p][4]]
        else:
            before = [p for p in parents if p >= 0]
        if inside and not grad:  # seen from outside the layer, what it took in
            before = [v for v in insides[call].taken if entries[v][4]] or before
        if recorder.tape.cuts[number]:
            cut = Cut(name, number, call)
            cuts.append(cut)
        else:
            owner = call
            while owner >= 0 and not calls[owner].grad_enabled:
                owner = calls[owner].parent
            if owner < 0 and call >= 0:
                continue  # the caller's own no_grad
            found = regions.get(owner)
            if found is None:
                found = regions[owner] = Cut("no_grad", number, call)
                cuts.append(found)
            cut = found
        cut.before.update(dict.fromkeys(before))
        cut.after.update(dict.fromkeys(after))
    return cuts


def _leaving(recorder: Recorder, layer: list[bool]) -> dict[int, list[int]]:
    """The values that each layer call handed out."""
    found: dict[int, list[int]] = {}
    for call in recorder.calls:
        if layer[call.index]:
            found[call.index] = [value for *_, value in call.outputs if recorder.tape.entries[value][0] == CALL]
    return found
