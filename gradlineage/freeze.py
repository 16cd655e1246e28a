"""From a recording to a frozen graph: number what is reachable, let go of the rest.

The tape says what every torch call made of what. Where a tensor was made unseen (a scripted function, a C++ extension, another thread) or the
shadow plane is off, the search goes on in autograd's graph until it meets a claimed output, an operation on the tape, or a leaf.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gradlineage.breaks import Cut, find_cuts
from gradlineage.decisions import ReadNote, inner_ways
from gradlineage.direct import called_directly
from gradlineage.functions import regain
from gradlineage.graph import BreakRecord, CallRecord, DecisionRecord, Graph, Node, ParameterRecord, ValueRecord, WriteRecord
from gradlineage.inside import Inside, bypassed, flowing, hidden_values, look_inside, stray
from gradlineage.naming import argument_names, short_path, snake_case
from gradlineage.notes import CallNote, callable_modules, line_of, looks, own_parameters, plain_shape, plain_text
from gradlineage.private import disabled
from gradlineage.record import Recorder
from gradlineage.tape import CALL, GRADIENT, LEAVES, MEMORY, OP, Unknown
from gradlineage.writes import between_reads

__all__ = ["freeze"]

#: Nodes whose empty slots are absent weights and biases, not lost operands.
_OPTIONAL_SLOTS = tuple("Convolution NativeBatchNorm CudnnBatchNorm NativeLayerNorm NativeGroupNorm Slow Mkldnn Embedding Cudnn".split())


def freeze(recorder: Recorder, outputs: Sequence[tuple[str, torch.Tensor]] | None = None, notes: Sequence[str] = ()) -> Graph:
    """The graph of everything that reached a call or the output.

    Args:
        recorder: a recording, finished or not.
        outputs: what to name as the outputs, instead of what the root calls returned.
        notes: sentences for the reader.
    """
    collecting = gc.isenabled()
    gc.disable()  # nothing of the user's runs, and all that is made stays: collections would find nothing, a tenth of the time
    try:
        with disabled():
            return _Freezer(recorder).graph(outputs, list(notes))
    finally:
        if collecting:
            gc.enable()


class _Freezer:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.tape = recorder.tape
        self.numbers: dict[Hashable, int] = {}
        self.nodes: list[Node] = []
        self.layer = [_is_layer(call) for call in recorder.calls]
        self.single = len(recorder.threads) <= 1  # sequence numbers are per thread
        self._ranges: tuple[list[int], list[tuple[int, int]]] | None = None
        self._starts = [c.sequence for c in recorder.calls]
        self._files: dict[str, str] = {}
        self._named: dict[int, list[str]] = {}
        self._order = 0
        self.insides: dict[int, Inside] = {}
        self._gradients: list[tuple[int, Sequence[int]]] = []  # (node, values that gradient goes on to)

    def graph(self, outputs: Sequence[tuple[str, torch.Tensor]] | None, notes: list[str]) -> Graph:
        recorder = self.recorder
        regain(self.tape, lambda node, output: self._edge(node, output, False, None))
        insides = self.insides = look_inside(recorder, self.layer)
        calls = []
        final: list[ValueRecord] = []
        uncalled = self._uncalled_parameters()
        for call in recorder.calls:
            extra = uncalled.get(call.path, (0, 0)) if self.layer[call.index] else (0, 0)
            held = own_parameters(call.note.module)
            count, learned = held[0] + extra[0], held[1] + extra[1]
            named = self._names_of(call)
            inside = insides.get(call.index)
            inputs = tuple(
                self._value(name, item, inside is None or item[4] in inside.taken or (None if not inside.complete else False))
                for name, item in zip(named, call.inputs, strict=True)
            )
            outs = tuple(self._value(item[0], item) for item in call.outputs)
            if call.parent < 0:
                final += outs
            calls.append(
                CallRecord(
                    call.path, call.nth, call.type, self.layer[call.index], call.parent, self._where(call.code, call.code_at), count, learned,
                    call.note.registered, call.failed, inputs, outs, self._hidden(call, inside), self._uses(inside),
                )
            )  # fmt: skip
        if outputs is not None:
            final = []
            for name, tensor in outputs:
                value = recorder.value(tensor)
                final.append(self._value(name, (name, *looks(tensor), value)))
        if not final and calls and outputs is None:
            notes.append("The output holds no tensor" + ("." if any(self.layer) else ", and no layer ran: is the forward a generator?"))
        models = recorder.registry.models
        name = type(models[""]).__name__ if "" in models else ", ".join(f"{k}={type(m).__name__}" for k, m in models.items())
        borrowed = tuple(bypassed(recorder, self.layer, insides))
        registered = tuple(self._registered())
        self._pass_gradient()
        breaks = tuple(self._break(cut) for cut in find_cuts(recorder, self.layer, insides))
        decisions = tuple(map(self._decision, self.tape.reads))
        self._pass_gradient()
        total = sum(p.elements for p in registered)
        trainable = sum(p.elements for p in registered if p.trainable)
        direct = tuple((path, self._where(*place)) for path, place in called_directly(recorder).items())
        modules = tuple(item for prefix, model in models.items() for item in callable_modules(model, prefix))
        return Graph(
            tuple(self.nodes), tuple(calls), tuple(final), name, total, trainable, tuple(notes), borrowed, breaks, decisions,
            modules, registered, tuple(self._writes()), direct,
        )  # fmt: skip

    def _value(self, name: str, item: tuple[Any, ...], used: bool | None = True) -> ValueRecord:
        _, shape, dtype, device, value = item
        return ValueRecord(name, plain_shape(shape), plain_text(dtype), plain_text(device), self._number(value), used)

    def _names_of(self, call: CallNote) -> list[str]:
        """What a call's arguments are called, worked out once."""
        found = self._named.get(call.index)
        if found is None:
            found = self._named[call.index] = argument_names(call)
        return found

    def _uncalled_parameters(self) -> dict[str, tuple[int, int]]:
        """Per layer, the parameters of modules within it that were never called: it uses them itself, as attention does its projections."""
        called = {call.path for call in self.recorder.calls}
        found: dict[str, tuple[int, int]] = {}
        for path, module in self.recorder.registry.modules():
            if path in called or id(module) in self.recorder.registry.ignored:
                continue
            above = path
            while above and above not in called:
                above = above.rpartition(".")[0]
            total, trainable = own_parameters(module)
            before = found.get(above, (0, 0))
            found[above] = before[0] + total, before[1] + trainable
        return found

    def _break(self, cut: Cut) -> BreakRecord:
        entry = self.tape.entries[cut.number]
        before, after = ([self._number(v) for v in values] for values in (cut.before, cut.after))
        return BreakRecord(cut.op, self._where(entry[5], entry[6], cut.call), cut.call, tuple(before), tuple(after))

    def _decision(self, note: ReadNote) -> DecisionRecord:
        values: dict[int, tuple[str, ...]] = dict.fromkeys(note.operands, ())
        if note.call >= 0 and self.layer[note.call]:  # seen from inside, not as the layer's own work
            entries, start = self.tape.entries, self.recorder.calls[note.call].start
            values = inner_ways(self.tape, note, lambda n: n > start and entries[n][0] in (OP, MEMORY) and entries[n][2] == note.call)
        after = bisect.bisect_right([c.start for c in self.recorder.calls], note.order) - 1
        nodes = tuple(self._number(v) for v in values)
        where = self._where(note.code, note.at, note.call)
        return DecisionRecord(note.kind, where, note.call, note.value, nodes, tuple(values.values()), note.order, after, note.waits)

    def _hidden(self, call: CallNote, inside: Inside | None) -> tuple[ValueRecord, ...]:
        if inside is None:
            return ()
        values = hidden_values(self.tape.entries, call, inside)
        return tuple(ValueRecord("", (), "", "", self._number(value)) for value in values)

    # -- numbering -----------------------------------------------------------------------------------------------------------------

    def _number(self, value: Hashable) -> int:
        """Number a value and all that it came from, parents first; iterative, for graphs of any depth."""
        numbers = self.numbers
        if value in numbers:
            return numbers[value]
        pending: dict[Hashable, tuple[dict[str, Any], list[tuple[Hashable, bool]]]] = {}
        stack: list[Hashable] = [value]
        while stack:
            key = stack[-1]
            if key in numbers:
                stack.pop()
                continue
            if key not in pending:
                fields, parents = self._entry(key) if type(key) is int else self._expand(key)
                waiting = [p for p, _ in parents if p not in numbers and p not in pending]
                if waiting:
                    pending[key] = fields, parents
                    waiting.reverse()
                    stack += waiting
                    continue
            else:
                fields, parents = pending.pop(key)
            stack.pop()
            edges = [numbers[p] if flows else ~numbers[p] for p, flows in parents if p in numbers]
            if through := fields.pop("gradient", ()):
                self._gradients.append((len(self.nodes), through))
            numbers[key] = len(self.nodes)
            self.nodes.append(Node(parents=tuple(edges), **fields))
        return numbers[value]

    def _expand(self, key: Hashable) -> tuple[dict[str, Any], list[tuple[Hashable, bool]]]:
        """Fields and parents of one node. Keys: a number on the tape, (autograd node, output number), or a ready leaf."""
        if isinstance(key, int):
            return self._entry(key)
        if isinstance(key, str):
            return {"kind": "unknown", "name": key}, []
        if key[0] == "brought":  # type: ignore[index]
            return self._brought(key[1])  # type: ignore[index]
        return self._autograd(key)  # type: ignore[arg-type]

    def _entry(self, number: int) -> tuple[dict[str, Any], list[tuple[Hashable, bool]]]:
        kind, name, call, parents, grad, code, at, seventh, eighth, shape = self.tape.entries[number]
        edges: list[tuple[Hashable, bool]] = [*map(_split, parents)]
        if kind == MEMORY:
            known = shape >= 0 and edges[0][0] in {p if p >= 0 else ~p for p in self.tape.entries[shape][3]}
            own: Hashable = shape if known else ("brought", number)  # the operation's own value says it all, or it needs one
            return {"kind": "memory", "name": name or "write", "call": call, "order": number, "grad": grad}, [edges[0], (own, grad)]
        if kind == OP:
            if call >= 0 and self.layer[call]:
                return {"kind": "call", "call": call, "grad": grad, **self._through(call, number, grad, False)}, []
            fields = {"kind": "op", "name": name, "call": call, "where": self._where(code, at, call), "order": number, "grad": grad}
            fields |= self._wiped(number)
            if shape is not None:
                fields |= {"shape": plain_shape(shape[0]), "dtype": plain_text(shape[1]), "device": plain_text(shape[2])}
            return fields, edges
        if kind == CALL:
            if self.layer[call]:
                return {"kind": "call", "call": call, "port": seventh, "grad": grad, **self._through(call, *_split(parents[0]), True)}, []
            return {"kind": "call", "call": call, "port": seventh, "grad": grad}, edges
        if kind == GRADIENT:
            self._order = number
            return {"kind": "op", "call": -1, "order": number, "grad": True}, [(self._edge(seventh, eighth, shape, None, number), True)]
        if name == "input":
            note = self.recorder.calls[call]
            return {"kind": "input", "name": self._names_of(note)[seventh], "call": call, "port": seventh, "grad": grad}, []
        if name in ("constant", "empty") and call >= 0 and self.layer[call]:
            return {"kind": "call", "call": call, "grad": grad}, []  # made or wiped in a layer, and out by a side door
        where = self._where(code, at, call) if code is not None else ""
        return {
            "kind": name,
            "name": Unknown.EMPTY if name == "empty" else eighth,
            "call": call,
            "where": where,
            "grad": grad,
            **self._wiped(number),
        }, []

    def _wiped(self, number: int) -> dict[str, Any]:
        """Autograd sends zeros to what a write left nothing of."""
        return {"gradient": (self.tape.wiped[number],)} if number in self.tape.wiped else {}

    def _pass_gradient(self) -> None:
        """Through layers gradient goes to values that may be younger than the node: tell of it when the others are numbered."""
        while self._gradients:
            index, values = self._gradients.pop()
            self.nodes[index] = self.nodes[index]._replace(gradient=tuple(dict.fromkeys(map(self._number, values))))

    def _through(self, call: int, value: int, grad: bool, port: bool) -> dict[str, Any]:
        """Where gradient goes on from a value that a layer made."""
        inside, note = self.insides.get(call), self.recorder.calls[call]
        if inside is None or not grad:
            return {}
        return {"gradient": flowing(self.tape.entries, note, inside, value, port and len(note.outputs) == 1)}

    def _uses(self, inside: Inside | None) -> tuple[int, ...]:
        entries = self.tape.entries
        taken = inside.taken if inside is not None else ()
        return tuple(self._number(v) for v in taken if entries[v][0] == LEAVES and (entries[v][1] == "parameter" or stray(entries[v])))

    def _registered(self) -> Iterator[ParameterRecord]:
        """The models' parameters, each by its first name."""
        used = {n.name: i for i, n in enumerate(self.nodes) if n.kind == "parameter"}
        own = list(self.recorder.registry.parameters())
        if any(name not in used for name, _ in own):  # perhaps for what was dropped at once
            for value in [_split(edge)[0] for entry in list(self.tape.entries.values()) if entry[0] == OP for edge in entry[3]]:
                leaf = self.tape.entries[value]
                if leaf[0] == LEAVES and leaf[1] == "parameter" and leaf[8] not in used:
                    used[leaf[8]] = self._number(value)
        for name, parameter in own:
            yield ParameterRecord(name, 0 if is_lazy(parameter) else parameter.numel(), parameter.requires_grad, used.get(name, -1))

    def _writes(self) -> Iterator[WriteRecord]:
        """The in-place writes to memory that one layer read before, and another after."""
        for number, before, after in between_reads(self.recorder, self.layer):
            call, code, at = (self.tape.entries[number][i] for i in (2, 5, 6))
            yield WriteRecord(call, self._where(code, at, call), before, after)

    def _brought(self, number: int) -> tuple[dict[str, Any], list[tuple[Hashable, bool]]]:
        """Memory of which a part was written, as the operation that wrote it sees it."""
        _, name, call, parents, grad, code, at, _, _, own = self.tape.entries[number]
        if call >= 0 and self.layer[call] and own < 0:
            call = self.recorder.calls[call].parent  # by the layer as a whole
        edges: list[tuple[Hashable, bool]] = [*map(_split, parents)]
        fields = {"kind": "op", "name": name or "write", "call": call, "where": self._where(code, at, call), "order": number, "grad": grad}
        return fields, [] if call >= 0 and self.layer[call] else edges

    # -- autograd's graph ----------------------------------------------------------------------------------------------------------

    def _edge(self, node: Any, output: int, through: bool, time: int | None, before: int | None = None) -> Hashable:
        """What stands for an edge of autograd's graph. ``time``: sequence number of its reader; ``before``: number of the reading entry."""
        claims = self.recorder.claims.get((node, output))
        if claims:
            for sequence, value in reversed(claims):
                if (before is None or value < before) and (time is None or not self.single or sequence <= time):
                    return value
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self.tape.value(variable)
        if self.single:
            sequence = node._sequence_nr()
            if sequence < self.recorder.first_sequence:
                return Unknown.EARLIER
            found = self._op_at(sequence)
            if found is not None and not (through and self._in_layer(found)):
                return found
        return (node, output, through)

    def _in_layer(self, number: int) -> bool:
        call = self.tape.entries[number][2]
        return bool(call >= 0 and self.layer[call])

    def _op_at(self, sequence: int, last: bool = True) -> int | None:
        """The operation on the tape whose last node, or one of whose nodes, has this sequence number."""
        if self._ranges is None:
            spans = sorted((e[7], e[8], n) for n, e in self.tape.entries.items() if e[0] == OP and e[8] > e[7])
            self._ranges = [s[0] for s in spans], [(s[1], s[2]) for s in spans]
        starts, ends = self._ranges
        index = bisect.bisect_right(starts, sequence) - 1
        if index < 0 or sequence >= ends[index][0] or (last and sequence != ends[index][0] - 1):
            return None
        return ends[index][1]

    def _autograd(self, key: tuple[Any, int, bool]) -> tuple[dict[str, Any], list[tuple[Hashable, bool]]]:
        node, output, through = key
        self.recorder.nodes.append(node)
        sequence = node._sequence_nr()
        call = self._call_at(sequence) if self.single else -1
        if call >= 0 and self.layer[call]:
            if not through:
                return {"kind": "call", "call": call, "grad": True}, []
            call = self.recorder.calls[call].parent
        name = node.name().rsplit("::", 1)[-1]
        slots = node.next_functions
        if name.startswith("BackwardHookFunction") and output < len(slots):
            slots = (slots[output],)  # output k is input k
        parents: list[tuple[Hashable, bool]] = []
        lost = False
        for below, number in slots:
            if below is None:
                lost = True
            else:
                parents.append((self._edge(below, number, through, sequence), True))
        if lost:
            seen = self._op_at(sequence, last=False) if self.single else None
            if seen is not None:  # a node within an operation on the tape, which knows its operands without gradient
                parents += [(~p, False) for p in self.tape.entries[seen][3] if p < 0]
            elif not parents or not (through or name.startswith(_OPTIONAL_SLOTS)):
                parents.append((Unknown.LOST_OPERAND if self.recorder.shadow else Unknown.NO_GRADIENT, False))
        name = name.rstrip("0123456789").removesuffix("Backward")
        fields = {
            "kind": "op",
            "name": f"~{snake_case(name)}",
            "call": call,
            "order": self._order,
            "where": self._where(None, 0, call),
            "grad": True,
        }
        return fields, parents

    def _call_at(self, sequence: int) -> int:
        """The innermost call during which a node with this sequence number was made, -1 for none."""
        calls = self.recorder.calls
        index = bisect.bisect_right(self._starts, sequence) - 1
        while index >= 0 and not calls[index].sequence <= sequence < calls[index].sequence_end:
            index = calls[index].parent
        return index

    # -- places --------------------------------------------------------------------------------------------------------------------

    def _where(self, code: Any, at: int, call: int = -1) -> str:
        if code is None:
            if call < 0:
                return ""
            note = self.recorder.calls[call]
            return self._where(note.code, note.code_at)
        name = self._files.get(code.co_filename)
        if name is None:
            name = self._files[code.co_filename] = short_path(code.co_filename)
        return f"{name}:{line_of(code, at)}"


def _split(edge: int) -> tuple[int, bool]:
    return (edge, True) if edge >= 0 else (~edge, False)


def _is_layer(call: CallNote) -> bool:
    """No other module call was recorded during it. A root whose children never ran and that returned nothing is none."""
    if call.children:
        return False
    return call.parent >= 0 or bool(call.outputs) or not call.note.module._modules
