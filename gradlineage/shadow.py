"""The shadow plane: a function mode that writes down on a tape what every torch call made of what.

It asks autograd for ``requires_grad`` alone: reading ``grad_fn`` of every step of a deep graph makes the interpreter crash when the graph is freed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradlineage.decisions import ReadNote, kind_of_read, plain_value, size_of
from gradlineage.notes import place
from gradlineage.private import HigherOrderOperator, backward_task, dense_kernel, disabled, dispatch_mode, enabled, level, sequence_number
from gradlineage.tables import Facts, facts_of
from gradlineage.tape import LEAVES, OP, Tape, Unknown
from gradlineage.tensors import captured, gather, node_of, takes_gradient

__all__ = ["ShadowMode"]

Tensor = torch.Tensor
_Wrapper = types.MethodWrapperType
_ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))
_TENSOR_GETTERS = frozenset(["data", "T", "mT", "H", "mH", "real", "imag"])


class ShadowMode(TorchFunctionMode):
    """Writes every torch function call of its thread to a tape.

    Args:
        tape: where to.
        stack: numbers of the calls under way in this thread, the innermost last.
        before_write: called with a tensor before it is written in place.
    """

    def __init__(self, tape: Tape, stack: list[Any], before_write: Callable[[Tensor], None] | None) -> None:
        super().__init__()
        self.tape, self.stack, self.before_write = tape, stack, before_write
        self.on = True  # closed from another thread it stays on that thread's stack

    def __torch_function__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is _Wrapper:
            name = getattr(func.__self__, "__name__", "")
            if func.__name__ == "__get__":
                if name == "grad":
                    return self._gradient(func(*args, **kwargs))
                if name not in _TENSOR_GETTERS:
                    return func(*args, **kwargs)
                facts = facts_of(_getter(name))
            elif name in ("data", "real", "imag") and func.__name__ == "__set__":
                facts = facts_of(_getter(f"{name}="))
            else:
                return func(*args, **kwargs)
        else:
            facts = facts_of(func)
            if facts.silent:
                return func(*args, **kwargs)
        if backward_task() != -1 or not self.on:
            return func(*args, **kwargs)
        if facts.plain and level() is None and "out" not in kwargs and _ORDINARY.issuperset(classes):
            return self._plain(func, facts, args, kwargs)
        for wrapper in classes:
            if not issubclass(wrapper, Tensor):  # a class of the user's around tensors: what it does with them is what happens
                with self:
                    return wrapper.__torch_function__(func, classes, args, kwargs)
        operands: list[Tensor] = []
        shape_only = facts.shape_only
        for position, arg in enumerate(args):
            if shape_only is not None and position in shape_only:
                continue
            if isinstance(arg, Tensor):
                operands.append(arg)
            elif isinstance(arg, list | tuple | slice | dict):
                gather(arg, operands)
        if kwargs:
            out = kwargs.get("out")
            for key, arg in kwargs.items():
                if key != "out" and (shape_only is None or key not in _LIKE):
                    gather(arg, operands)
        else:
            out = None
        if isinstance(func, HigherOrderOperator):
            dense = dense_kernel(func)
            if dense is not None and func.__name__ in _CONTROL_FLOW and dispatch_mode() is None:
                return self._control_flow(func, dense, args, kwargs)
            for arg in (*args, *kwargs.values()):
                captured(arg, operands)
        if (classes and not _ORDINARY.issuperset(classes)) or level() is not None:
            with disabled():
                return self._careful(func, facts, args, kwargs, operands, out)
        return self._note(func, facts, args, kwargs, operands, out)

    def _plain(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        """`_note` for what most functions do: make something new of their operands."""
        if self.before_write is not None and facts.hidden_write is not None and kwargs.get(*facts.hidden_write):
            operands: list[Tensor] = []
            gather((*args, kwargs), operands)
            return self._note(func, facts, args, kwargs, operands, None)
        tape = self.tape
        operands = []
        for arg in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(arg, Tensor):
                operands.append(arg)
            elif isinstance(arg, list | tuple | slice | dict):
                gather(arg, operands)
        parents = [tape.edge(t) for t in operands]
        first = args[0] if args else None
        version = _version_of(first, args, kwargs) if isinstance(first, Tensor) else -1
        before = sequence_number()
        result = func(*args, **kwargs)
        after = sequence_number()
        if (
            type(result) is not Tensor
            or not parents
            or facts.name in _LEAF_MAKERS
            or any(result is t for t in operands)
            or not torch.is_grad_enabled()
        ):
            return self._made(facts, result, operands, [], parents, before, after, first, version)
        grad = result.requires_grad
        number = tape.next()
        code, at = place(sys._getframe(1))
        if not grad and any(p >= 0 for p in parents):
            tape.cuts[number] = True
        looks = (
            (result.shape, result.dtype, result.device)
            if len(parents) > 1 and result.layout is torch.strided and not result.is_nested
            else None
        )
        call = self.stack[-1].index if self.stack else -1
        tape.entries[number] = (OP, facts.name, call, tuple(parents), grad, code, at, before, after, looks)
        tape.know(result, number)
        return result

    def _control_flow(self, func: Any, dense: Any, args: Any, kwargs: Any) -> Any:
        """The plain Python of a control-flow operator, whose steps are operations like any other; compiling it would hide them."""
        with self:
            result = dense(*args, **kwargs)
        if func.__name__ == "cond" and isinstance(args[0], Tensor):  # the condition is an operand of what comes out
            made: list[Tensor] = []
            gather(result, made)
            for tensor in made:
                edges = (self.tape.edge(args[0]), self.tape.edge(tensor))
                self.tape.know(
                    tensor, self._entry(facts_of(func), edges, tensor.requires_grad, sequence_number(), sequence_number(), tensor)
                )
        return result

    def _gradient(self, grad: Tensor | None) -> Tensor | None:
        if grad is not None and self.tape.known(grad) is None and node_of(grad) is None:
            self.tape.know(grad, self.tape.leaf("unknown", Unknown.BACKWARD))
        return grad

    def _careful(self, func: Any, facts: Facts, args: Any, kwargs: Any, operands: list[Tensor], out: Any) -> Any:
        """Subclasses and functorch wrappers: look at tensors without waking their own ``__torch_function__``, but let the call do so."""

        def call(*a: Any, **k: Any) -> Any:
            with enabled():
                return func(*a, **k)

        return self._note(call, facts, args, kwargs, operands, out)

    def _note(self, func: Any, facts: Facts, args: Any, kwargs: Any, operands: list[Tensor], out: Any) -> Any:
        tape = self.tape
        parents = [tape.edge(t) for t in operands]
        written: list[Tensor] = []
        kept: list[int] = []
        whole = False
        first = args[0] if args else None
        version = -1
        if facts.writes:
            for i in facts.writes:
                if i < len(args):
                    gather(args[i], written)
                elif i == 0 and operands:
                    written.append(operands[0])
            if len(written) == 1:
                kept, parents, whole = self._prepare(facts, args, operands, written[0], parents)
            elif facts.overwrites:  # _foreach_copy_ and _foreach_zero_
                parents, whole = parents[len(written) :], True
        elif isinstance(first, Tensor):
            version = _version_of(first, args, kwargs)
        if out is not None:
            gather(out, written)
            whole = all(map(tape.covers, written))
            if not whole:
                parents += [~tape.base_value(t) for t in written]
        if self.before_write is not None and facts.reshapes and isinstance(first, Tensor):
            self.before_write(first)
        elif self.before_write is not None and (written or facts.hidden_write is not None):
            argument, default = facts.hidden_write or ("", False)
            hidden = kwargs.get(argument, default)
            for t in operands if hidden else written:
                if not hidden or argument == "max_norm" or not t.requires_grad:  # statistics, not weights
                    self.before_write(t)
        read = kind_of_read(facts, args, kwargs) if facts.reads else ""
        before = sequence_number()
        result = func(*args, **kwargs)
        after = sequence_number()
        if read:
            picked = facts.reads == "?" and isinstance(first, Tensor) and first.dim() > 0 and len(parents) > 1
            self._decide(read, result, operands, parents[1:] if picked else parents)  # what is read, not what it picks from
        if written:
            self._wrote(facts, written, whole, kept, tuple(parents), before, after)
        return self._made(facts, result, operands, written, parents, before, after, first, version)

    def _made(
        self, facts: Facts, result: Any, operands: list[Tensor], written: list[Tensor], parents: list[int], before: int, after: int,
        first: Any, version: int,
    ) -> Any:  # fmt: skip
        """Note what a function returned, and return it. ``first``: its first argument, ``version`` how often that had been written before."""
        tape = self.tape
        if isinstance(result, Tensor):
            if written and any(result is t for t in written):
                return result
            if first is not None and result is first:
                if facts.metadata and facts.name == "detach":
                    tape.know(result, self._entry(facts, tuple(parents), False, before, after, None))
                elif facts.metadata:
                    tape.touched(result)
                elif version == -2 or (version >= 0 and result._version != version):
                    self._wrote(facts, [result], False, [], tuple(parents), before, after)
            elif facts.name in _SHARING and not operands and (shared := tape.sharing(result)) is not None:
                tape.know(result, self._entry(facts, (~shared,), False, before, after, None))  # numpy there and back
            elif not any(result is t for t in operands):  # contiguous() and the like may hand an operand through
                grad = takes_gradient(result)
                fresh = grad and facts.name in _LEAF_MAKERS and any(p >= 0 for p in parents)
                if grad and (fresh or not torch.is_grad_enabled()):  # a leaf, or a view of which autograd keeps no way back
                    parents = [p if p < 0 else ~p for p in parents]
                number = self._entry(facts, tuple(parents), grad, before, after, result)
                if fresh:
                    tape.cuts[number] = True
                tape.know(result, number)
        elif isinstance(result, list | tuple | dict):
            made: list[Tensor] = []
            gather(result, made)
            if made:
                self._several(facts, made, [*operands, *written], tuple(parents), before, after)
        return result

    def _entry(self, facts: Facts, parents: tuple[int, ...], grad: bool, before: int, after: int, like: Tensor | None) -> int:
        tape = self.tape
        number = tape.next()
        code, at = place(sys._getframe(2))
        call = self.stack[-1].index if self.stack else -1
        noted = like is not None and len(parents) > 1 and like.layout is torch.strided and not like.is_nested
        shape = (like.shape, like.dtype, like.device) if noted and like is not None else None
        if parents and not grad and any(p >= 0 for p in parents):
            tape.cuts[number] = torch.is_grad_enabled()
        elif grad and parents and like is not None and not torch.is_grad_enabled() and all(p < 0 for p in parents):
            tape.cuts[number] = False
        if parents:
            tape.entries[number] = (OP, facts.name, call, parents, grad, code, at, before, after, shape)
        else:
            kind = "empty" if facts.name in _EMPTY else "constant"
            tape.entries[number] = (LEAVES, kind, call, (), grad, code, at, -1, facts.name, None)
        return number

    def _decide(self, kind: str, result: Any, operands: list[Tensor], parents: list[int]) -> None:
        code, at = place(sys._getframe(2))
        call = self.stack[-1].index if self.stack else -1
        values = tuple(p if p >= 0 else ~p for p in parents)
        waits = any(t.device.type not in ("cpu", "meta") for t in operands)
        self.tape.reads.append(
            ReadNote(kind, self.tape.next(), call, size_of(result) if kind == "shape" else plain_value(result), values, code, at, waits)
        )

    def _several(self, facts: Facts, made: list[Tensor], operands: list[Tensor], parents: tuple[int, ...], before: int, after: int) -> None:
        """Outputs share an entry; those without gradient have one of their own, so that top-k's indices are told from its values."""
        tape = self.tape
        entries: dict[bool, int] = {}
        if not torch.is_grad_enabled():  # views may require gradient all the same
            parents = tuple(p if p < 0 else ~p for p in parents)
        slots = _slot_count(facts, made, parents)
        for i, tensor in enumerate(made):
            if any(tensor is t for t in operands):
                continue
            grad = takes_gradient(tensor)
            if facts.name == "autograd.grad" and grad and level() is None:
                tape.know(tensor, tape.gradient(tensor, through=True))
                continue
            if slots:
                tape.know(tensor, self._entry(facts, parents[i::slots], grad, before, after, None))
                continue
            if grad not in entries:
                entries[grad] = self._entry(facts, parents, grad, before, after, tensor)
            tape.know(tensor, entries[grad])

    def _prepare(
        self, facts: Facts, args: Sequence[Any], operands: list[Tensor], target: Tensor, parents: list[int]
    ) -> tuple[list[int], list[int], bool]:
        """What an in-place write keeps of its target, what it brings, and whether nothing is left of the whole memory."""
        rest = parents[1:] if facts.repoints or (operands and operands[0] is target) else parents
        covers = facts.overwrites or (facts.name == "setitem" and len(args) > 1 and _covers(target, args[1]))
        if facts.repoints or (covers and self.tape.covers(target)):
            return [], rest, True
        if covers and self.tape.alone(target):
            return [], rest, False
        own, base = self.tape.value(target), self.tape.base_value(target)
        if covers:  # what lies around it in memory
            kept = [base]
        else:
            kept = [own, base] if base != own and not self.tape.covers(target) and not self.tape.alone(target) else [own]
        return [k if target.requires_grad else ~k for k in kept], rest, False

    def _wrote(
        self, facts: Facts, written: list[Tensor], whole: bool, kept: list[int], parents: tuple[int, ...], before: int, after: int
    ) -> None:
        tape = self.tape
        slots = _slot_count(facts, written, parents)
        for i, tensor in enumerate(written):
            if (not self.stack and tape.is_registered(tensor)) or id(tensor) in tape.lazy:
                continue  # an optimizer between calls, or the first values of a lazy layer: a parameter stays itself
            brought = parents[i::slots] if slots else parents
            full = whole and (facts.repoints or tape.covers(tensor))
            if not brought and not full and (facts.partial or facts.overwrites):
                brought = (~tape.leaf("constant", facts.name),)  # a number
            if not torch.is_grad_enabled():
                brought = tuple(b if b < 0 else ~b for b in brought)
            memory = tape.held(tensor)
            old = None if full or (tape.covers(tensor) and not facts.partial) else memory
            number = self._entry(facts, (*kept, *brought), tensor.requires_grad, before, after, tensor)
            held = number
            if memory is not None:
                tape.overwrites[number] = memory
            if kept:
                tape.written[number] = kept[0] if kept[0] >= 0 else ~kept[0]
            elif torch.is_grad_enabled() and (known := tape.known(tensor)) is not None and tape.entries[known[1]][4]:
                tape.wiped[number] = known[1]
            if old is not None:
                entry = tape.entries[number]
                parts = brought if facts.partial else (*kept, *brought)
                held = tape.part(facts.name, old, parts, entry[2], entry[4], entry[5:7], number)
                own = kept[0] if kept and kept[0] >= 0 else ~kept[0] if kept else old
                if facts.partial and tape.covers(tensor):  # the rest of what it holds is as it was
                    number = held if own == old else tape.part(facts.name, own, parts, entry[2], entry[4], entry[5:7], number)
            if facts.repoints:
                tape.know(tensor, number)
            else:
                tape.write(tensor, number, held, full)


def _version_of(tensor: Tensor, args: Any, kwargs: Any) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors have none
        return -2 if kwargs.get("inplace") or any(a is True for a in args) else -1


_CONTROL_FLOW = frozenset(("cond", "while_loop", "scan", "map_impl", "associative_scan"))
_EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"))
_SHARING = frozenset(("as_tensor", "asarray"))  # these take numpy's memory as it is
_LEAF_MAKERS = frozenset(("tensor", "new_tensor", "as_tensor", "asarray"))
_LIKE = frozenset(("input", "self", "other", "tensor"))  # keyword names under which the arguments of the shape-only table come
_SLOTWISE = frozenset(("broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"))


def _slot_count(facts: Facts, tensors: Sequence[Tensor], parents: tuple[int, ...]) -> int:
    """How many slots a function on several tensors at once has, each output made of the inputs in its slot alone; 0 for other functions."""
    slotwise = facts.name in _SLOTWISE or facts.name.startswith("_foreach")
    return len(tensors) if slotwise and parents and len(parents) % len(tensors) == 0 else 0


def _covers(tensor: Tensor, index: Any) -> bool:
    """Whether ``tensor[index] = ...`` writes every element; only for indices that make a view."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(p, Tensor | list | bool) for p in parts):
        return False
    return all(p is Ellipsis or p is None or p == slice(None) for p in parts) or _whole_view(tensor, index)


def _whole_view(tensor: Tensor, index: Any) -> bool:
    try:
        with torch.no_grad(), disabled():
            return tensor.detach()[index].numel() == tensor.numel()
    except (IndexError, TypeError, RuntimeError):
        return False


class _Named:
    """Stands for a property, whose descriptor has no name of its own worth keeping."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


_getters: dict[str, _Named] = {}


def _getter(name: str) -> _Named:
    found = _getters.get(name)
    if found is None:
        found = _getters[name] = _Named(name)
    return found
