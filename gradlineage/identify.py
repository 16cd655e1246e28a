"""Which value a tensor holds that the tape has not seen being made: a name, a claim on autograd's graph, memory, or ``unknown``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradlineage.notes import CallNote
from gradlineage.private import disabled, functorch, sequence_number
from gradlineage.registry import Registry
from gradlineage.tape import CALL, OP, Tape, Unknown
from gradlineage.tensors import inner_tensors, is_leaf, node_of

__all__ = ["Identifier"]


class Identifier:
    """A tape, the names of the models' tensors, and claims on autograd's graph.

    Args:
        models: by the first part of their paths.
        shadow: whether a function mode writes the tape; without it autograd alone is asked.
    """

    def __init__(self, models: Mapping[str, nn.Module], shadow: bool) -> None:
        self.shadow = shadow
        self.tape = Tape(self._adopt, lambda tensor: self.registry.name(tensor) is not None)
        self.registry = Registry(models, self.tape)
        self.calls: list[CallNote] = []
        self.claims: dict[tuple[Any, int], list[tuple[int, int]]] = {}  # (autograd node, output) -> [(sequence number, value)]
        self.nodes: list[Any] = []  # autograd nodes touched, in running order: held to the end and let go consumers first
        self._stacks: dict[int, list[CallNote]] = {}  # per thread, the calls under way

    def _stack(self) -> list[CallNote]:
        return self._stacks.setdefault(threading.get_ident(), [])

    def _touch(self, tensor: torch.Tensor, value: int) -> None:
        """Claim a value on the gradient plane too, for what only autograd sees."""
        node = node_of(tensor)
        if node is None:
            return
        self.nodes.append(node)
        self.claims.setdefault((node, tensor.output_nr), []).append((sequence_number(), value))
        base = tensor._base if tensor._is_view() else None
        entry = self.tape.entries[value]
        below = node_of(base) if base is not None else None
        if base is None or below is None or below is node or entry[0] != CALL:
            return
        # a 3-D Linear is a view of its addmm: an in-place write would go past the claim to the layer's own parameters
        key = (below, base.output_nr)
        if key not in self.claims and below._sequence_nr() >= self.calls[entry[2]].sequence:
            self.nodes.append(below)
            self.claims[key] = [(sequence_number(), value)]

    def _claim(self, node: Any, output: int) -> int | None:
        found = self.claims.get((node, output))
        return found[-1][1] if found else None

    def value(self, tensor: torch.Tensor) -> int:
        """The value a tensor holds now; without the shadow plane, what autograd alone says."""
        if self.shadow:
            edge = self.tape.edge(tensor)
            return edge if edge >= 0 else ~edge
        known = self.tape.known(tensor)
        return self._identify(tensor) if known is None or node_of(tensor) is not None else known[1]

    def _adopt(self, tensor: torch.Tensor) -> int:
        with disabled():
            return self._identify(tensor)

    def _identify(self, tensor: torch.Tensor) -> int:
        tape = self.tape
        if functorch.is_functorch_wrapped_tensor(tensor):
            inner = tape.value(functorch.get_unwrapped(tensor))
            return self._step("vmap" if functorch.is_batchedtensor(tensor) else "", inner, tensor)
        name = self.registry.name(tensor)
        if name is not None:
            return tape.leaf(*name, grad=tensor.requires_grad)
        node = node_of(tensor)
        if node is not None:
            claim = self._claim(node, tensor.output_nr)
            if claim is not None:
                return claim
            memory = tape.sharing(tensor) if self.shadow and node._sequence_nr() < sequence_number() else None
            if memory is not None and tape.entries[memory][0] == OP and not tensor._is_view():
                return memory  # what a transform computed within its wrappers
            self.nodes.append(node)
            return tape.gradient(tensor)
        base = tensor._base if tensor._is_view() else None
        if base is not None and (not self.shadow or tape.known(base) is not None or base.requires_grad or tape.seen_part(tensor)):
            return self._step("view", tape.value(base), tensor)
        shared = tape.sharing(tensor) if self.shadow else None
        if shared is not None:
            return self._step("alias", shared, tensor)
        if (name := self.registry.name_since(tensor)) is not None:
            return tape.leaf(*name, grad=tensor.requires_grad)
        parts = inner_tensors(tensor)
        if parts:
            edges = tuple(map(tape.edge, parts))
            return tape.step(type(tensor).__name__, edges, self._stack()[-1].index if self._stack() else -1, tensor.requires_grad)
        if tensor.requires_grad:  # a leaf that no module registered
            return tape.leaf("constant", f"<{type(tensor).__name__} {'x'.join(map(str, tensor.shape))}>", grad=True)
        return tape.leaf("unknown", Unknown.UNSEEN if self.shadow else Unknown.NO_GRADIENT)

    def _step(self, name: str, parent: int, tensor: torch.Tensor) -> int:
        stack = self._stack()
        grad = tensor.requires_grad or (name != "alias" and self.tape.entries[parent][4])
        edge = ~parent if not grad or (tensor.requires_grad and is_leaf(tensor)) else parent
        return self.tape.step(name, (edge,), stack[-1].index if stack else -1, grad)
