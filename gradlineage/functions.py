"""Custom autograd Functions: their inside runs without gradient, and yet gradient flows through what they return.

The operations of a Function's forward are on the tape like any others. Its autograd node says which of its inputs gradient goes back to, and
the text of its backward which of these never get one.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from gradlineage.private import forward_class
from gradlineage.tape import CALL, OP, Tape

__all__ = ["regain"]


def regain(tape: Tape, resolve: Callable[[Any, int], object]) -> None:
    """Give the insides of custom Functions their gradient back, on the tape.

    Args:
        tape: the tape of a recording; `Tape.regained` says which values need it.
        resolve: the value that stands for an edge of autograd's graph.
    """
    made: dict[Any, int] = {}  # what a Function returned, by its node: another Function may have taken it
    while tape.regained:
        made |= {entry[0]: value for value, entry in tape.regained.items()}
        value, (node, sequence, edges) = tape.regained.popitem()  # the sequence number was taken before the Function's forward ran
        giving = [edge for edge, dead in zip(edges, _dead(node, edges), strict=True) if edge[0] is not None and not dead]
        fed: set[object] = {made[edge[0]] if edge[0] in made and edge[0] is not node else resolve(*edge) for edge in giving}
        _follow(tape, value, sequence, fed, type(node).__name__ == "CheckpointFunctionBackward")


def _follow(tape: Tape, value: int, sequence: int, fed: set[object], recomputed: bool) -> None:
    """``recomputed``: a reentrant checkpoint, whose inside runs again with gradient, the parameters it borrows included."""
    entries = tape.entries
    seen: set[int] = set()
    stack = [value]
    while stack:
        number = stack.pop()
        if number in seen:
            continue
        seen.add(number)
        entry = entries[number]
        inside = []
        edges = []
        for edge in entry[3]:
            parent = edge if edge >= 0 else ~edge
            kind, *_, before, after, _ = entries[parent]
            blank = not entries[parent][4] or tape.cuts.get(parent) is False  # without gradient, or a view that only looks as if it had
            within = blank and ((kind == OP and before > sequence) or (kind == CALL and after > sequence))
            if within:
                inside.append(parent)
            edges.append(parent if within or parent in fed or (recomputed and edge >= 0) else ~parent)
        if entry[0] in (OP, CALL):
            entries[number] = (*entry[:3], tuple(edges), True, *entry[5:])
            tape.cuts.pop(number, None)
            if any(e < 0 and entries[~e][4] for e in edges):
                tape.cuts[number] = True
        stack += inside


def _dead(node: Any, edges: Any) -> list[bool]:
    """For each edge of a Function's node, whether its backward returns None for it."""
    slots = len(edges)
    function = forward_class(node)
    needs = getattr(node, "needs_input_grad", None)
    if function is None or needs is None:
        return [False] * slots
    never = _never_returned(function)
    arguments = iter([i for i, need in enumerate(needs) if need])
    return [edge[0] is not None and next(arguments, -1) in never for edge in edges]


def _never_returned(function: Any) -> set[int]:
    """The positions at which every ``return`` of a Function's backward has a literal None."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.backward)))
    except (OSError, TypeError, SyntaxError):
        return set()
    found: set[int] | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            items = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            none = {i for i, item in enumerate(items) if item is None or (isinstance(item, ast.Constant) and item.value is None)}
            found = none if found is None else found & none
    return found or set()
