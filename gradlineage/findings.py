"""Is it wired as meant: findings about modules, parameters and tensors that go nowhere. Only wiring, no style. Needs no torch."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gradlineage.errors import LineageError, a_kind
from gradlineage.lineage import Break, Call, Lineage
from gradlineage.look import Look

__all__ = ["CODES", "SEVERITIES", "Finding", "lint"]

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
_BRANCHES = frozenset(("bool", "equal", "index", "shape"))
_MOST = 4  # names that a message lists
_DDP = "; DistributedDataParallel complains about such parameters"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the wiring that is wrong, or may be.

    Attributes:
        code: one of `CODES`.
        severity: ``error`` (wrong whatever was meant), ``warning`` (probably not meant), ``info`` (worth knowing).
        call: label of the call or path of the module it is about, empty where that is none.
        where: ``file:line``, empty where that is not known.
        message: one sentence on what is wrong.
        hint: one sentence on what to do.
    """

    code: str
    severity: Severity
    call: str
    where: str
    message: str
    hint: str

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.severity}: {self.message} [{self.code}]\n    {self.hint}"


_Check = Callable[[Look], Iterator[Finding]]


def _never_called(look: Look) -> Iterator[Finding]:
    borrowed = {name.rpartition(".")[0] for name, _ in look.graph.bypassed}
    owning = {name[:n] for name in (p.name for p in look.graph.registered) for n, c in enumerate(name) if c == "."}
    found: set[str] = set()
    ran = {above for path in (*look.called, *borrowed) for above in _above(path)}  # a Sequential whose layers are called one by one
    plain: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path, kind in look.graph.modules:
        parts = path.split(".")
        if not path or path in ran or any(".".join(parts[:n]) in found for n in range(1, len(parts))):
            continue
        found.add(path)
        if path not in owning:
            plain[kind, parts[-1]].append(path)
            continue
        told = f"{path} ({kind}) is registered and was never called, so its parameters were not used"
        yield Finding("never-called", "warning", path, "", told, f"call it, remove it, or trace an input that reaches it{_DDP}")
    for (kind, _), paths in plain.items():
        told = f"{_listed(paths)} ({kind}, without parameters of its own) {_are(paths)} registered and {_was(paths)} never called"
        yield Finding("never-called", "info", paths[0], "", told, "nothing to do if what it would do is done otherwise")


def _above(path: str) -> Iterator[str]:
    """A path and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _dead_calls(look: Look) -> Iterator[Finding]:
    alive = look.used[1] | look.deciding[1]  # what only decides is used as well
    for index in list(alive):
        above = look.graph.calls[index].parent
        while above >= 0 and above not in alive:
            alive.add(above)
            above = look.graph.calls[above].parent
    if not look.graph.outputs:
        return
    borrowing = look.walk.bare(v.node for v in look.graph.outputs)
    missing = {p.name for p in look.gradient.missing}
    for index, record in enumerate(look.graph.calls):
        if borrowing.intersection(record.uses):
            continue  # differentiated by autograd.grad: what came of it hangs on its parameters
        if index in alive or record.failed or (record.parent >= 0 and record.parent not in alive):
            continue  # the outermost is told of
        untrained = any(name.startswith(f"{record.path}.") for name in missing)
        call = Call(look.whole, index)
        yield Finding(
            "dead-call", "warning", call.label, record.where, f"what {call.label} ({record.type}) computed reaches no output",
            f"use its result or remove the call, unless it is called for what it leaves behind{_DDP if untrained else ''}",
        )  # fmt: skip


def _parameters(look: Look) -> Iterator[Finding]:
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for parameter in look.gradient:
        owner = parameter.name.rpartition(".")[0]
        if parameter.state == "dead" and owner in look.dead and owner not in look.deciders:
            continue  # told of with its call
        if parameter.state in ("unused", "dead", "cut"):
            groups[parameter.state, _stops(parameter.breaks) if parameter.state == "cut" else owner].append(parameter.name)
    for (state, detail), names in groups.items():
        listed = _listed(names)
        if state == "cut":
            stops = next(p.breaks for p in look.gradient if p.name == names[0])
            where = stops[0].where if stops else ""
            yield Finding(
                "gradient-cut", "warning", stops[0].op if stops else "", where, f"{detail}, so {listed} get{_s(names)} no gradient",
                f"remove the operation, or freeze them with requires_grad_(False) if that is meant{_DDP}",
            )  # fmt: skip
        elif state == "unused":
            yield Finding(
                "parameter-unused", "warning", detail, "", f"{listed} {_are(names)} used by no call, though {detail or 'the model'} ran",
                f"use it, or remove it{_DDP}",
            )  # fmt: skip
        elif detail in look.deciders:
            kinds = look.deciders[detail]
            yield Finding(
                "parameter-dead", "info" if kinds <= _BRANCHES else "warning", detail, "",
                f"what was computed from {listed} is only read by Python ({', '.join(sorted(kinds))}), so {_they(names)} no gradient",
                f"nothing to do if it only decides; else keep it a tensor: item, float, tolist and numpy drop the gradient{_DDP}",
            )  # fmt: skip
        else:
            yield Finding(
                "parameter-dead", "warning", detail, "", f"what was computed from {listed} reaches no output",
                f"return it or let it take part in the loss{_DDP}",
            )  # fmt: skip


def _stops(breaks: Sequence[Break]) -> str:
    if len(breaks) == 1:
        return f"{breaks[0].op} stops the gradient"
    found = ", ".join(f"{b.op} at {b.where}" if b.where else b.op for b in breaks)
    return f"the gradient stops at {found}" if found else "the gradient stops on the way"


def _frozen(look: Look) -> Iterator[Finding]:
    frozen = [p for p in look.gradient if p.state == "frozen"]
    if frozen:
        told = f"{len(frozen):,} of {len(look.gradient):,} parameters {_are(frozen)} frozen: {_listed([p.name for p in frozen])}"
        yield Finding("frozen", "info", "", "", told, "nothing to do if that is meant; requires_grad_(True) thaws them")


def _no_gradient(look: Look) -> Iterator[Finding]:
    stopped = [p for p in look.gradient.missing if p.state in ("cut", "dead")]
    stopped.sort(key=lambda p: p.state)
    if stopped and not look.gradient.reached:
        told = (
            f"no parameter gets a gradient: {stopped[0].name} is {stopped[0].why}"
            if stopped[0].state == "dead"
            else f"no parameter gets a gradient: {stopped[0].why}"
        )
        where = stopped[0].breaks[0].where if stopped[0].breaks else ""
        yield Finding(
            "no-gradient", "error", "output", where, told, "let at least one way from the parameters to the outputs keep its gradient"
        )


def _inputs(look: Look) -> Iterator[Finding]:
    reached = look.used[0] | look.deciding[0]  # what only decides is used as well
    for call in look.graph.calls:
        for value in call.inputs if call.parent < 0 and look.graph.outputs else ():
            if value.node not in reached:
                yield Finding(
                    "input-unused", "warning", value.name, "", f"no output depends on the input {value.name or '(unnamed)'}",
                    "use it in the forward, or leave it out of the signature",
                )  # fmt: skip


def _arguments(look: Look) -> Iterator[Finding]:
    unused: defaultdict[tuple[str, tuple[Call, ...]], list[str]] = defaultdict(list)
    names: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in look.whole.calls:
        if call.parent is not None:
            for flow in call.inputs:
                if flow.used is False and flow._key[0] not in look.deciding[0]:
                    names[call.type, flow.name or "a tensor"].append(call)
    for (kind, name), calls in names.items():
        unused[kind, tuple(calls)].append(name)
    for (kind, who), given in unused.items():
        was, it = ("was", "it" if len(given) == 1 else "them") if len(who) == 1 else ("were", "it" if len(given) == 1 else "them")
        told = f"{_listed([c.label for c in who])} ({kind}) {was} given {_listed(given)} and did not use {it}"
        yield Finding("argument-unused", "info", who[0].label, who[0].where, told, "pass it only where it is needed")


def _unregistered(look: Look) -> Iterator[Finding]:
    seen: set[str] = set()
    for record in look.graph.calls:
        if record.registered or record.path in seen or (record.parent >= 0 and not look.graph.calls[record.parent].registered):
            continue
        seen.add(record.path)
        inside = [c for c in look.graph.calls if c.path == record.path or c.path.startswith(f"{record.path}.")]
        own = {look.graph.nodes[n].name for c in inside for n in c.uses if look.graph.nodes[n].name.startswith(record.path)}
        elements = sum({c.path: c.parameters for c in inside}.values())
        if (own or elements) and not any(c.trainable for c in inside):
            yield Finding(
                "not-registered", "info", record.path, record.where,
                f"{record.path} was called and is not registered; nothing in it takes gradient",
                "nothing to do if it is kept out of the model on purpose",
            )  # fmt: skip
        elif own or elements:
            lost = f"{len(own)} tensor{_plural(own)} of its parameters are" if own else f"its parameters ({elements:,} in all) are"
            yield Finding(
                "not-registered", "error", record.path, record.where,
                f"{record.path} was called and is not registered: {lost} not in model.parameters()",
                "keep it in an attribute of the module, in nn.ModuleList or nn.ModuleDict instead of a list, dict or local variable",
            )  # fmt: skip
    yield from _strays(look)


def _strays(look: Look) -> Iterator[Finding]:
    """Tensors that take gradient, were there when the pass began and are in no module."""
    for index in sorted(look.strays):
        name = look.graph.nodes[index].name
        calls = [Call(look.whole, c) for c in look.strays[index]]
        told = f"{name} takes gradient, {calls[0].label or calls[0].type} uses it, and it is not in model.parameters()"
        if name.startswith("<Tensor"):  # perhaps the caller's own, as what an attack looks for
            continue
        yield Finding(
            "not-registered", "error", calls[0].label, calls[0].where, told,
            "assign it to an attribute of a module as nn.Parameter, or keep it in nn.ParameterList or nn.ParameterDict",
        )  # fmt: skip


def _direct(look: Look) -> Iterator[Finding]:
    for path, where in look.graph.direct:
        yield Finding(
            "forward-called", "warning", path, where, f"the forward of {path} was called directly, so its hooks did not run",
            f"call the module: {path.rpartition('.')[2] or 'module'}(...) instead of .forward(...)",
        )  # fmt: skip


def _borrowed(look: Look) -> Iterator[Finding]:
    direct = {path for path, _ in look.graph.direct}
    groups: defaultdict[str, list[str]] = defaultdict(list)
    users: dict[str, str] = {}
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)  # blocks of one kind that do the same are told of at once
    kinds = dict(look.graph.modules)
    for name, calls in look.graph.bypassed:
        owner = name.rpartition(".")[0]
        if owner not in look.modules:
            continue  # a ParameterList cannot be called
        within = [look.graph.calls[c] for c in calls if c >= 0]
        if owner not in direct and not all(c.layer and (not c.path or owner.startswith(f"{c.path}.")) for c in within):
            groups[owner].append(name)  # a layer that uses what lies within it, as attention does its projections, is as torch wants it
            users.setdefault(owner, within[0].path or within[0].type if within else "the caller")
    for owner in groups:
        user, name = users[owner], owner.rpartition(".")[2]
        alike[(kinds.get(user, user), name) if owner.startswith(f"{user}.") else (user, owner)].append(owner)
    for owners in alike.values():
        who = _listed(list(dict.fromkeys(users[o] for o in owners)))
        names = [name for o in owners for name in groups[o]]
        use = f"{who} use{_s({users[o] for o in owners})} {_listed(names)}"
        told = f"{use}, though {_listed(owners) or 'their module'} {_was(owners)} never called"
        yield Finding("borrowed", "info", owners[0], "", told, "call the module if its hooks and its forward should run")


def _again(look: Look) -> Iterator[Finding]:
    times: defaultdict[str, list[int]] = defaultdict(list)
    using: set[int] = set()  # calls that used parameters, in them or below
    for index in range(len(look.graph.calls) - 1, -1, -1):
        if look.graph.calls[index].uses or index in using:
            using.update((index, look.graph.calls[index].parent))
    for index, record in enumerate(look.graph.calls):
        times[record.path].append(index)
    for path, calls in times.items():
        record = look.graph.calls[calls[0]]
        again = record.parent >= 0 and len(times[look.graph.calls[record.parent].path]) == len(calls)  # told of its container
        if len(calls) > 1 and calls[0] in using and not again:
            told = f"{path or record.type} ({record.type}) was called {len(calls)} times, with the same parameters"
            yield Finding("called-again", "info", path, record.where, told, "nothing to do if it is meant to be shared")


def _writes(look: Look) -> Iterator[Finding]:
    label = look.whole._view.call_label
    seen: set[tuple[str, str]] = set()
    for write in look.graph.writes:
        place = (look.graph.calls[write.call].path, write.where) if write.call >= 0 else ("", write.where)
        if place in seen:
            continue  # the same line of a loop
        seen.add(place)
        writer = label(write.call) if write.call >= 0 else ""
        by = f" by {writer}" if write.call >= 0 and look.graph.calls[write.call].layer else ""
        told = f"{label(write.before[0])} read a tensor before it was written in place{by}, {label(write.after[0])} after"
        hint = "write to a copy if both should see the same, or name the new value differently"
        yield Finding("write-between-reads", "warning", writer, write.where, told, hint)


_CHECKS: dict[str, tuple[_Check, str]] = {
    "not-registered": (_unregistered, "a module with parameters was called that the model does not register"),
    "no-gradient": (_no_gradient, "no parameter gets a gradient, because something stops it"),
    "never-called": (_never_called, "a registered module was never called"),
    "dead-call": (_dead_calls, "what a call computed reaches no output"),
    "gradient-cut": (_parameters, "a break keeps the gradient from parameters"),
    "parameter-unused": (_parameters, "a module ran and did not use a parameter of its own"),
    "parameter-dead": (_parameters, "what was computed from a parameter reaches no output"),
    "input-unused": (_inputs, "no output depends on an input"),
    "forward-called": (_direct, "the forward of a module was called directly"),
    "write-between-reads": (_writes, "a tensor was written in place between two layers that read it"),
    "argument-unused": (_arguments, "an argument was passed and not used"),
    "borrowed": (_borrowed, "parameters were used though their module was never called"),
    "called-again": (_again, "a module was called several times"),
    "frozen": (_frozen, "parameters that take no gradient"),
}
CODES: dict[str, str] = {code: told for code, (_, told) in _CHECKS.items()}
"""The codes of findings, with what each is about."""


def lint(lineage: Lineage, *, select: str | Iterable[str] = "*", ignore: str | Iterable[str] = ()) -> tuple[Finding, ...]:
    """Look for faults of wiring.

    Args:
        lineage: of one pass of a whole model, in the mode (``train``, with gradient) in which it is to work.
        select, ignore: codes of `CODES` to look for and to leave out; ``*`` may stand in them.

    Returns:
        Findings, errors first.

    Raises:
        LineageError: no lineage, a union, or a code that there is none like.

    Example:
        >>> import torch, gradlineage
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = [torch.nn.Linear(2, 2)]
        ...     def forward(self, x):
        ...         return self.layers[0](x)
        >>> [finding.code for finding in gradlineage.lint(gradlineage.trace(Net(), torch.ones(1, 2)))]
        ['not-registered']
    """
    if not isinstance(lineage, Lineage) or lineage._view.is_union:
        found = f"a union of {lineage.runs} passes" if isinstance(lineage, Lineage) else a_kind(lineage)
        raise LineageError(
            f"lint() looks at the lineage of one pass, found {found}; give it what trace(...) or Lineage.load(path) returned"
        )
    wanted, left = _patterns(select), _patterns(ignore)
    codes = [c for c in CODES if _matches(c, wanted) and not _matches(c, left)]
    look = Look(lineage)
    findings: list[Finding] = []
    for check in dict.fromkeys(_CHECKS[c][0] for c in codes):
        findings += [f for f in check(look) if f.code in codes]
    return tuple(sorted(findings, key=lambda f: SEVERITIES.index(f.severity)))


def _patterns(codes: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(codes, Iterable):
        raise LineageError(f"lint(): select and ignore take codes such as 'never-called' or lists of them, found {codes!r}")
    given = (codes,) if isinstance(codes, str) else tuple(codes)
    for pattern in given:
        if not isinstance(pattern, str) or not any(fnmatch.fnmatchcase(code, pattern) for code in CODES):
            raise LineageError(f"lint(): there is no code {pattern!r}; there are {', '.join(CODES)}")
    return given


def _matches(code: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(code, pattern) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST])
    return f"{shown} and {len(names) - _MOST:,} more" if len(names) > _MOST else shown


def _plural(things: Iterable[object]) -> str:
    return "" if len(list(things)) == 1 else "s"


def _s(things: Collection[object]) -> str:
    return "s" if len(things) == 1 else ""


def _was(things: Sequence[object]) -> str:
    return "was" if len(things) == 1 else "were"


def _they(things: Sequence[object]) -> str:
    return "it gets" if len(things) == 1 else "they get"


def _are(things: Sequence[object]) -> str:
    return "is" if len(things) == 1 else "are"
