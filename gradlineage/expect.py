"""Wiring as a test: what is expected to feed a tensor, written as an expression, held against what was found. Needs no torch.

The grammar::

    expression = name | operation "(" expression { "," expression } ")" | "*"

A *name* is a label as the table prints it: a layer (``conv1``, ``relu[1]``), ``input:x``, a parameter, ``constant``, or a join
(``layer1.0:add``). It matches the tensor that this feeds through any operations. ``operation(…)`` matches an operation or join whose operands
match; operations that only rearrange (``view``, ``permute``, slices) are left out on both sides, and so may parameters, buffers and constants
be. ``*`` matches anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradlineage.errors import LineageError, NameNotFound, WiringError, a_kind
from gradlineage.lineage import Flow, Lineage
from gradlineage.steps import Reference
from gradlineage.tables import REARRANGING

__all__ = ["expect"]

Expected = str | None | Sequence["str | None"] | Mapping[str, "str | None"]
_TOKEN = re.compile(r"\s*([(),]|[^(),]+)")
_DEEPEST = 50
_FLAT = frozenset(
    "add mul cat concat stack and or logical_and logical_or maximum minimum".split()
)  # written in a row, whatever the brackets
_LEAVES = ("parameter", "buffer", "constant", "empty")


class _Expression(NamedTuple):
    name: str
    operands: tuple[_Expression, ...] | None  # None for a name

    def __str__(self) -> str:
        return self.name if self.operands is None else f"{self.name}({', '.join(map(str, self.operands))})"


class _Way(NamedTuple):
    """One of the ways that lead to a tensor: operations that compute something, the nearest first, and where it begins."""

    ops: tuple[str, ...]
    reference: Reference


def expect(lineage: Lineage, wiring: Mapping[str, Expected]) -> None:
    """Hold a lineage against the wiring that is expected of it.

    Args:
        lineage: any lineage.
        wiring: by label of a call or join, or ``output``: an expression for its only tensor, a list with one for each, or a mapping by argument.
            None in their place is not looked at.

    Raises:
        WiringError: it is wired otherwise; the message has what was found beside what was expected, for every tensor.
        NameNotFound: a label that the lineage does not have.
        LineageError: an expression that cannot be read.
    """
    if not isinstance(wiring, Mapping):
        raise LineageError(f"expect() takes a mapping of labels to expressions, such as {{'fc': 'relu(conv)'}}; found {a_kind(wiring)}")
    faults: list[str] = []
    for label, expected in wiring.items():
        item = None if label == "output" and label not in lineage else lineage[label]
        flows = lineage.outputs if item is None else item.inputs
        for flow, expression in _paired(label, flows, expected, faults):
            if expression is None:
                continue
            wanted = _read(expression)
            node, operand = flow._key
            node = flow._references[0].at if operand >= 0 and flow._references else node
            if not _fits(lineage, wanted, node):
                name = f"{label} {flow.name}".rstrip()
                found = _as_ran(lineage, node, _depth(wanted))
                faults.append(f"{name}\n    expected {wanted}\n    found    {found}{_strangers(lineage, wanted)}")
    if faults:
        raise WiringError("the model is not wired as expected:\n" + "\n".join(faults))


def _paired(label: str, flows: Sequence[Flow], expected: Expected, faults: list[str]) -> list[tuple[Flow, str | None]]:
    if isinstance(expected, Mapping):
        known = {flow.name: flow for flow in flows}
        faults += [f"{label} {name}\n    expected {text}\n    found    no such tensor; it has {', '.join(known) or 'none'}"
                   for name, text in expected.items() if name not in known]  # fmt: skip
        return [(known[name], text) for name, text in expected.items() if name in known]
    if expected is not None and not isinstance(expected, str | Sequence):
        raise LineageError(f"expect(): {label!r} needs an expression, a list of them or a mapping by argument; found {expected!r}")
    listed = [expected] if expected is None or isinstance(expected, str) else list(expected)
    if expected is not None and len(listed) != len(flows):
        found = (
            "; ".join(f"{f.name}: {_shown(f._lineage, _ways(f._lineage, f._references), 2)}".removeprefix(": ") for f in flows) or "nothing"
        )
        faults.append(f"{label}\n    expected {len(listed)} tensor{'s' * (len(listed) != 1)}\n    found    {len(flows)}: {found}")
        return []
    return list(zip(flows, listed, strict=False))


# -- reading -----------------------------------------------------------------------------------------------------------------------


def _read(text: str) -> _Expression:
    if not isinstance(text, str):
        raise LineageError(f"expect(): an expression is text such as 'add(a, relu(b))', found {text!r}")
    tokens = [t.strip() for t in _TOKEN.findall(text) if t.strip()]
    stack: list[tuple[str, list[_Expression]]] = [("", [])]
    last = ""
    for n, token in enumerate(tokens):
        after = tokens[n + 1] if n + 1 < len(tokens) else ""
        if token == "(":
            if last in ("", "(", ",", ")"):
                raise _unreadable(text, "an operation before '('")
            stack.append((last, []))
            if len(stack) > _DEEPEST:
                raise _unreadable(text, f"no more than {_DEEPEST} brackets within each other")
        elif token == ")":
            if len(stack) == 1 or last in ("(", ","):
                raise _unreadable(text, "an operand before ')'" if len(stack) > 1 else "'(' before ')'")
            name, operands = stack.pop()
            rearranged = name in REARRANGING and len(operands) == 1
            stack[-1][1].append(operands[0] if rearranged else _Expression(name, tuple(operands)))
        elif token == ",":
            if len(stack) == 1 or last in ("(", ",", ""):
                raise _unreadable(text, "',' between operands only")
        elif after != "(":
            if last not in ("", "(", ","):
                raise _unreadable(text, f"',' before {token!r}")
            stack[-1][1].append(_Expression(token, None))
        last = token
    if len(stack) != 1 or len(stack[0][1]) != 1:
        raise _unreadable(text, "one expression with all brackets closed")
    return stack[0][1][0]


def _unreadable(text: str, expected: str) -> LineageError:
    return LineageError(f"expect(): cannot read {text!r}: expected {expected}; an example is 'add(a, relu(b))'")


def _depth(expression: _Expression) -> int:
    return 1 if expression.operands is None else 1 + max(map(_depth, expression.operands))


# -- comparing ---------------------------------------------------------------------------------------------------------------------


def _ways(lineage: Lineage, references: Sequence[Reference]) -> tuple[_Way, ...]:
    names = lineage._view.ops
    return tuple(_Way(tuple(op for op in reversed(names(r)) if op not in REARRANGING), r) for r in references)


def _is_leaf(lineage: Lineage, way: _Way) -> bool:
    node = lineage._graph.nodes[way.reference.atom]
    return node.kind in _LEAVES and not lineage._view.of_layer(way.reference.atom)


def _matches(lineage: Lineage, expected: _Expression, ways: Sequence[_Way]) -> bool:
    if expected.operands is None:
        if expected.name == "*":
            return True
        candidates = [w for w in ways if not _is_leaf(lineage, w)] or list(ways)
        named = [w for w in ways if _is_leaf(lineage, w) and _named(lineage, expected.name, w)]
        return bool(named) or (len(candidates) == 1 and _named(lineage, expected.name, candidates[0]))
    operands = _operands(lineage, expected.name, ways)
    if operands is None:
        return False
    for wanted in (expected.operands, _flat(expected)) if expected.name in _FLAT else (expected.operands,):
        for given in (operands, [o for o in operands if not all(_is_leaf(lineage, w) for w in o)]):
            if len(wanted) == len(given) and all(_matches(lineage, e, o) for e, o in zip(wanted, given, strict=True)):
                return True
    return False


def _fits(lineage: Lineage, expected: _Expression, node: int) -> bool:
    """Whether the operations, as they ran, are what is expected; parameters, buffers and constants may be left out."""
    if expected.operands is None:
        return _matches(lineage, expected, _ways(lineage, lineage._view.references(node)))
    node = _computed(lineage, node)
    found = lineage._graph.nodes[node]
    if found.kind in ("memory", "union"):  # several things in one: what feeds it is known, not in which order
        return _matches(lineage, expected, _ways(lineage, lineage._view.references(node)))
    if lineage._view.of_layer(node) or found.kind != "op" or found.name != expected.name:
        return False
    given = [_plain(p) for p in found.parents]
    if _paired_off(lineage, expected.operands, given):
        return True
    return expected.name in _FLAT and _paired_off(lineage, _flat(expected), _in_a_row(lineage, expected.name, given))


def _computed(lineage: Lineage, node: int) -> int:
    """Back over what rearranges and what hands on."""
    nodes, view = lineage._graph.nodes, lineage._view
    while not view.of_layer(node) and nodes[node].parents and (nodes[node].kind == "call" or nodes[node].name in REARRANGING):
        node = _plain(nodes[node].parents[0])
    return node


def _in_a_row(lineage: Lineage, op: str, operands: list[int]) -> list[int]:
    """Operands that are the same operation again give theirs instead."""
    nodes, found = lineage._graph.nodes, []
    stack = list(reversed(operands))
    while stack:
        node = stack.pop()
        inner = _computed(lineage, node)
        if nodes[inner].kind == "op" and nodes[inner].name == op and not lineage._view.of_layer(inner):
            stack += [_plain(p) for p in reversed(nodes[inner].parents)]
        else:
            found.append(node)
    return found


def _paired_off(lineage: Lineage, wanted: Sequence[_Expression], given: Sequence[int]) -> bool:
    fits = {0}  # how many of the expected operands the given ones so far may have been
    for operand in given:
        optional = all(_is_leaf(lineage, w) for w in _ways(lineage, lineage._view.references(operand)))
        after = {n + 1 for n in fits if n < len(wanted) and _fits(lineage, wanted[n], operand)}
        fits = after | (fits if optional else set())
    return len(wanted) in fits


def _plain(edge: int) -> int:
    return edge if edge >= 0 else ~edge


def _strangers(lineage: Lineage, expected: _Expression) -> str:
    """A line on each name in an expression that is none of this lineage's."""
    known = {
        *lineage._names(),
        *(n.name for n in lineage._graph.nodes),
        *(f"input:{n.name}" for n in lineage._graph.nodes if n.kind == "input"),
    }
    lines, stack = [], [expected]
    while stack:
        item = stack.pop(0)
        stack += item.operands or ()
        again = [c.label for c in lineage.calls if c.path == item.name != c.label]
        if item.operands is None and again and item.name not in known:
            lines.append(f"\n    ({item.name} was called {len(again)} times: say {' or '.join(again[:4])})")
        elif item.operands is None and item.name not in known and item.name.split(":")[0] not in ("*", "constant", "unknown"):
            lines.append(f"\n    ({NameNotFound(item.name, known, 'call, join, input, parameter or buffer').message})")
    return "".join(dict.fromkeys(lines))


def _named(lineage: Lineage, name: str, way: _Way) -> bool:
    view, atom = lineage._view, way.reference.atom
    if view.label(atom) == name or view.label(atom).split(":")[0] == name == "constant":
        return True
    if not view.of_layer(atom):
        return False
    call = view.leaving(atom)[0]
    return name in (view.call_label(call), lineage._graph.calls[call].path) and view.call_label(call) == lineage._graph.calls[call].path


def _operands(lineage: Lineage, op: str, ways: Sequence[_Way]) -> list[tuple[_Way, ...]] | None:
    """The operands of the operation nearest to a tensor, if that is its name."""
    view = lineage._view
    if all(w.ops and w.ops[0] == op for w in ways) and ways:
        rest = [_Way(w.ops[1:], w.reference) for w in ways]
        data = [w for w in rest if not _is_leaf(lineage, w)]
        return [(w,) for w in rest] if len(data) <= 1 else [tuple(rest)]
    joins = [w for w in ways if not w.ops and view.is_join(w.reference.atom)]
    if len(joins) == 1 and lineage._graph.nodes[joins[0].reference.atom].name == op:
        return _spliced(lineage, op, joins[0].reference.atom)
    return None


def _spliced(lineage: Lineage, op: str, join: int) -> list[tuple[_Way, ...]]:
    """The operands of a join; those that are joins of the same operation with no row of their own give theirs instead."""
    view, found = lineage._view, []
    stack = list(reversed(view.apart(join)))
    while stack:
        operand = stack.pop()
        ways = _ways(lineage, operand)
        inner = [w.reference.atom for w in ways if not w.ops and w.reference.atom in view.folded]
        if len(ways) == 1 and inner and op in _FLAT and lineage._graph.nodes[inner[0]].name == op:
            stack += reversed(view.apart(inner[0]))
        else:
            found.append(ways)
    return found


def _flat(expected: _Expression) -> tuple[_Expression, ...]:
    """``add(add(a, b), c)`` as the operands ``a, b, c`` of the one row in which such joins stand."""
    found: list[_Expression] = []
    for operand in expected.operands or ():
        found += _flat(operand) if operand.operands is not None and operand.name == expected.name else [operand]
    return tuple(found)


def _as_ran(lineage: Lineage, node: int, depth: int, level: int = 0) -> str:
    """What feeds a tensor as the expression that would fit, joins written out as deep as what was expected."""
    node, view = _computed(lineage, node), lineage._view
    found = lineage._graph.nodes[node]
    ways = _ways(lineage, view.references(node))
    if view.of_layer(node) or found.kind != "op" or (view.is_join(node) and depth <= 1) or level > _DEEPEST:
        return _shown(lineage, ways, depth)
    operands = [_plain(p) for p in found.parents]
    if found.name in _FLAT:
        operands = _in_a_row(lineage, found.name, operands)
    below = depth - 1 if view.is_join(node) else depth
    return f"{found.name}({', '.join(_as_ran(lineage, p, below, level + 1) for p in operands)})"


def _shown(lineage: Lineage, ways: Sequence[_Way], depth: int) -> str:
    """What feeds a tensor as an expression, as deep as what was expected."""
    first = {w.ops[:1] for w in ways}
    if len(ways) > 1 and len(first) == 1 and () not in first:  # one operation of several operands
        return f"{ways[0].ops[0]}({', '.join(_shown(lineage, [_Way(w.ops[1:], w.reference)], depth - 1) for w in ways)})"
    texts = []
    for way in ways:
        atom = way.reference.atom
        text = lineage._view.label(atom)
        if lineage._view.is_join(atom) and depth > len(way.ops) + 1:
            op = lineage._graph.nodes[atom].name
            inner = (_shown(lineage, o, depth - len(way.ops) - 1) for o in _spliced(lineage, op, atom))
            text = f"{op}({', '.join(inner)})"
        for op in reversed(way.ops):
            text = f"{op}({text})"
        texts.append(text)
    return " and ".join(texts) or "nothing"
