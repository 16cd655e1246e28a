"""What do other tools say of the same models, how long do they take, and how much memory?

The question put to all: which layers feed each layer? A layer is a module call during which no other module is called; what lies between two layers
(``relu``, ``cat``, ``view``) is looked through. The right answer is read off a graph of torch.fx that carries the real tensors along
(``tests/truth_fx.py``), or written down by hand for the two models that such a graph cannot take as they are. Each tool's own graph is put through
the same reading: a node belongs to the module that the tool says it ran in. Paths are compared, not calls, since half of the tools do not tell two
calls of one module apart; an edge from a module to itself is left out.

``right`` is the share of the edges that a tool found, ``wrong`` how many it named that there are not; ``with weights`` the same for edges between
layers with weights, others looked through: what a tool that sees only those can answer. torchinfo answers no such question; its time is that of a
table of layers, as is the name of the call that was used: each tool's documented call, at the lightest setting that still gives the answer.

Every line is a process of its own: the first call after a warm-up on a small model (memory), then the median of the others (time). The peak is
what it took beyond what was there before; a process whose peak did not move has room left from building the model.

    python -m benchmarks.peers [--rounds 5] [--json out.json] [--compare old.json]

A tool that is not installed is listed as such; ``pip install '.[bench]'`` brings them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import gradlineage
from benchmarks import harness
from benchmarks.harness import Figure, Options
from benchmarks.models import build

Edges = set[tuple[str, str]]
#: What a tool's answer comes down to: per node the path of its module, and the nodes that feed it.
Drawn = tuple[dict[Any, str], dict[Any, list[Any]]]

MODELS = ("resnet50@64", "mobilenet_v3_small@64", "googlenet@64", "densenet121@64", "router", "branches")


class Router(nn.Module):
    """An index on the way: autograd's graph ends at ``argmax``."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.embed, self.head = nn.Linear(4, 3), nn.Embedding(3, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(self.score(x).argmax(-1)))
        return out


class Branches(nn.Module):
    """Goes where a value tells it to, and detaches on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.deep, self.flat, self.head = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        way = self.deep if bool(self.gate(h).sum() > 0) else self.flat
        for _ in range(int(h.detach().abs().sum()) % 2 + 1):
            h = h + way(h.detach()).relu()
        out: torch.Tensor = self.head(h)
        return out


def made(spec: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    if spec not in ("router", "branches"):
        return build(spec)
    torch.manual_seed(0)
    model: nn.Module = Router() if spec == "router" else Branches()
    return model.eval(), (torch.randn(2, 4),)


def truth_of(spec: str, model: nn.Module, args: tuple[torch.Tensor, ...]) -> Drawn:
    """The right answer, call by call."""
    if spec in ("router", "branches"):
        if spec == "router":
            fed = {"score": [], "embed": ["score"], "head": ["embed"]}
        else:
            way = "deep" if bool(model.gate(model.stem(*args)).sum() > 0) else "flat"  # type: ignore[operator]
            fed = {"stem": [], "gate": ["stem"], way: ["stem"], "head": ["stem", way]}
        return {path: path for path in fed}, dict(fed)
    from tests.truth_fx import layer_calls, truth

    inputs = {"x": args[0]}
    calls = [call for call in truth(model, inputs, layer_calls(model, inputs)).calls if call.layer]
    feeding = {(c.path, c.nth): [(s[1], s[2]) for flow in c.inputs for s in flow if s[0] == "call"] for c in calls}
    return {key: key[0] for key in feeding}, dict(feeding)


def layers_of(model: nn.Module, args: tuple[torch.Tensor, ...]) -> set[str]:
    """Paths of the modules whose calls are layers."""
    called: set[str] = set()
    inner: set[str] = set()
    open_calls: list[str] = []

    def enter(path: str) -> None:
        inner.update(open_calls)
        open_calls.append(path)
        called.add(path)

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, a, path=path: enter(path)))
        handles.append(module.register_forward_hook(lambda m, a, o: (open_calls.pop(), None)[1]))
    with torch.no_grad():
        model(*args)
    for handle in handles:
        handle.remove()
    return called - inner


def contracted(drawn: Drawn, kept: set[str]) -> Edges:
    """The edges between the modules in ``kept``; whatever else lies between two nodes is looked through."""
    paths, parents = drawn
    found: Edges = set()
    for start, path in paths.items():
        if path not in kept:
            continue
        seen, stack = set(), list(parents.get(start, ()))
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            here = paths.get(node, "")
            if here in kept:
                if here != path:
                    found.add((here, path))
            else:
                stack.extend(parents.get(node, ()))
    return found


# -- the tools: a call that is timed, and a reading of what it gave -----------------------------------------------------------------------


def read_gradlineage(answer: Any, _: nn.Module) -> Drawn:
    paths: dict[Any, str] = {}
    parents: dict[Any, list[Any]] = {}
    for call in answer.layers:
        key = (call.path, call.nth)
        paths[key] = call.path
        parents[key] = [(s.path, s.nth) for flow in call.inputs for s in flow.sources if s.kind == "call"]
    return paths, parents


def run_torchview(model: nn.Module, args: Any) -> Any:
    return importlib.import_module("torchview").draw_graph(model, input_data=args, depth=100, device="cpu")


def read_torchview(answer: Any, model: nn.Module) -> Drawn:
    names = {id(module): path for path, module in model.named_modules()}
    paths: dict[Any, str] = {}
    parents: dict[Any, list[Any]] = {}
    for before, after in answer.edge_list:
        parents.setdefault(id(after), []).append(id(before))
        for node in (before, after):
            paths[id(node)] = names.get(getattr(node, "compute_unit_id", None) or -1, "")
    return paths, parents


def run_torchlens(model: nn.Module, args: Any) -> Any:
    return importlib.import_module("torchlens").trace(model, list(args), save=None)


def read_torchlens(answer: Any, _: nn.Module) -> Drawn:
    paths: dict[Any, str] = {}
    parents: dict[Any, list[Any]] = {}
    for op in answer.layer_list:
        modules = list(op.modules)
        paths[op.label] = modules[-1].rpartition(":")[0] if modules else ""
        parents[op.label] = [name if ":" in name else f"{name}:1" for name in op.parents]
    return paths, parents


def run_pruning(model: nn.Module, args: Any) -> Any:
    return importlib.import_module("torch_pruning").DependencyGraph().build_dependency(model, example_inputs=args)


def read_pruning(answer: Any, model: nn.Module) -> Drawn:
    names = {module: path for path, module in model.named_modules()}
    nodes = list(answer.module2node.values())
    return {id(n): names.get(n.module, "") for n in nodes}, {id(n): [id(i) for i in n.inputs] for n in nodes}


def run_torchinfo(model: nn.Module, args: Any) -> Any:
    return importlib.import_module("torchinfo").summary(model, input_data=args, verbose=0, depth=100)


def run_fx(model: nn.Module, _: Any) -> Any:
    return torch.fx.symbolic_trace(model)


def read_fx(answer: Any, _: nn.Module) -> Drawn:
    nodes = list(answer.graph.nodes)
    return {n: n.target if n.op == "call_module" else "" for n in nodes}, {n: list(n.all_input_nodes) for n in nodes}


def run_jit(model: nn.Module, args: Any) -> Any:
    return torch.jit.trace(model, args, check_trace=False).inlined_graph  # type: ignore[no-untyped-call]


def read_jit(answer: Any, _: nn.Module) -> Drawn:
    made_by: dict[str, str] = {}
    paths: dict[Any, str] = {}
    parents: dict[Any, list[Any]] = {}
    for node in answer.nodes():
        outputs = [o.debugName() for o in node.outputs()]
        made_by.update(dict.fromkeys(outputs, outputs[0]) if outputs else {})
        if not outputs or node.kind() in ("prim::GetAttr", "prim::Constant"):
            continue
        paths[outputs[0]] = node.scopeName().rpartition("/")[2].removeprefix("__module.").removeprefix("__module")
        parents[outputs[0]] = [made_by.get(i.debugName(), "") for i in node.inputs()]
    return paths, parents


def run_export(model: nn.Module, args: Any) -> Any:
    return torch.export.export(model, args)


def read_export(answer: Any, _: nn.Module) -> Drawn:
    paths: dict[Any, str] = {}
    for node in answer.graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        paths[node] = stack[-1][0].partition("@")[0] if stack else ""
    return paths, {n: list(n.all_input_nodes) for n in answer.graph.nodes}


def run_torchviz(model: nn.Module, args: Any) -> Any:
    return importlib.import_module("torchviz").make_dot(model(*args), params=dict(model.named_parameters()))


def read_torchviz(answer: Any, _: nn.Module) -> Drawn:
    """Boxes are autograd's nodes, and those with a parameter beside them are the layer that owns it."""
    labels = dict(re.findall(r'^\s*(\d+) \[label="?([\w.]+)', answer.source, re.M))
    parents: dict[Any, list[Any]] = {}
    for before, after in re.findall(r"^\s*(\d+) -> (\d+)", answer.source, re.M):
        parents.setdefault(after, []).append(before)
    paths: dict[Any, str] = {}
    for node in labels:
        for above in parents.get(node, ()):
            for leaf in [above, *parents.get(above, ())] if labels.get(above) in ("AccumulateGrad", "TBackward0") else []:
                for owner in (leaf, *parents.get(leaf, ())):
                    name = labels.get(owner, "")
                    if "." in name and not name.endswith("Backward0"):
                        paths[node] = name.rpartition(".")[0]
    return paths, parents


class Tool:
    """One tool: how it is called, in words and in fact, and how its answer is read (None where it gives none)."""

    def __init__(
        self, words: str, run: Callable[[nn.Module, Any], Any], read: Callable[[Any, nn.Module], Drawn] | None, needs: str = ""
    ) -> None:
        self.words, self.run, self.read, self.needs = words, run, read, needs


TOOLS: Mapping[str, Tool] = {
    "gradlineage": Tool("trace(model, x)", lambda model, args: gradlineage.trace(model, *args), read_gradlineage),
    "torchview": Tool("draw_graph(model, x, depth=100), not rendered", run_torchview, read_torchview, "torchview"),
    "torchlens": Tool("trace(model, x, save=None)", run_torchlens, read_torchlens, "torchlens"),
    "Torch-Pruning": Tool("DependencyGraph().build_dependency(model, x)", run_pruning, read_pruning, "torch_pruning"),
    "torchinfo": Tool("summary(model, input_data=x, verbose=0, depth=100)", run_torchinfo, None, "torchinfo"),
    "torch.fx": Tool("symbolic_trace(model)", run_fx, read_fx),
    "jit.trace": Tool("torch.jit.trace(model, x, check_trace=False)", run_jit, read_jit),
    "torch.export": Tool("torch.export.export(model, (x,))", run_export, read_export),
    "torchviz": Tool("make_dot(model(x), params), not rendered", run_torchviz, read_torchviz, "torchviz"),
}


def measure(options: Options) -> Iterator[Figure]:
    yield from called()
    for spec in options.models or (("router",) if options.quick else MODELS):
        for name, tool in TOOLS.items():
            yield from asked(spec, name, tool, options)


def called() -> Iterator[Figure]:
    """The tools, their versions, and how they are called."""
    for name, tool in TOOLS.items():
        try:
            version = (
                importlib.metadata.version(tool.needs.replace("_", "-") or "torch") if name != "gradlineage" else gradlineage.__version__
            )
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        yield Figure("the calls", name, "version", None, note=version)
        yield Figure("the calls", name, "call", None, note=f"`{tool.words}`")


def asked(spec: str, name: str, tool: Tool, options: Options) -> Iterator[Figure]:
    if tool.needs and importlib.util.find_spec(tool.needs) is None:
        yield Figure(spec, name, "time", None, note="not installed")
        return
    found = harness.fresh("peers", spec, name, str(options.rounds), here=options.quick)
    if "error" in found:
        yield Figure(spec, name, "time", None, note=f"fails: {found['error'][:90].replace('|', '/')}")
        return
    yield Figure(spec, name, "time", found["milliseconds"], "ms")
    yield Figure(spec, name, "peak", found["peak"], "MB")
    if found["edges"] is not None:
        yield Figure(spec, name, "right", found["right"] * 100, "%")
        yield Figure(spec, name, "wrong", found["wrong"])
        yield Figure(spec, name, "with weights: right", found["weights right"] * 100, "%")
        yield Figure(spec, name, "with weights: wrong", found["weights wrong"])
    else:
        yield Figure(spec, name, "right", None, note="has no edges")


def child(spec: str, name: str, repeats: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return answered(spec, TOOLS[name], int(repeats))


def answered(spec: str, tool: Tool, repeats: int) -> dict[str, Any]:
    tool.run(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (torch.randn(2, 4),))
    model, args = made(spec)
    with torch.no_grad():
        model(*args)
    before = harness.reset_peak()
    answer = tool.run(model, args)
    peak = harness.peak_memory() - before
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        tool.run(model, args)
        times.append((time.perf_counter() - start) * 1e3)
    found: dict[str, Any] = {"milliseconds": statistics.median(times), "peak": peak, "edges": None}
    if tool.read is None:
        return found
    layers = layers_of(model, args)
    weighted = {path for path in layers if any(True for _ in model.get_submodule(path).parameters())}
    drawn, due = tool.read(answer, model), truth_of(spec, model, args)
    for kind, kept in (("", layers), ("weights ", weighted)):
        edges, right = contracted(drawn, kept), contracted(due, kept)
        found |= {"edges": len(right), f"{kind}right": share(edges, right), f"{kind}wrong": len(edges - right)}
    return found


def share(found: Edges, due: Iterable[tuple[str, str]]) -> float:
    due = set(due)
    return len(found & due) / len(due) if due else 1.0


def main(argv: list[str] | None = None) -> int:
    return harness.main("peers", argv, count=5, models=MODELS)


if __name__ == "__main__":
    raise SystemExit(main())
