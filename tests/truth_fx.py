"""Where the tensors of a model come from, read off a graph that torch.fx traced.

An answer to gradlineage's own question that uses nothing of it, no ``grad_fn`` and no function mode. A `torch.fx.Tracer` carries the real
tensor of every node along, so that shapes and branches are those of the run at hand; then the nodes are walked in the order in which they ran.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import ParametrizationList

__all__ = ["CONSTANT", "CallTruth", "Source", "Sources", "Truth", "layer_calls", "truth"]

Source = tuple[Any, ...]
"""``("call", path, nth, port)``, ``("input", index)``, ``("parameter", name)``, ``("buffer", name)`` or ``("constant",)``."""
Sources = tuple[Source, ...]

CONSTANT: Source = ("constant",)


class CallTruth(NamedTuple):
    """One module call: the sources of each tensor that entered it, and of each that left it."""

    path: str
    nth: int
    layer: bool
    inputs: tuple[Sources, ...]
    outputs: tuple[Sources, ...]


class Truth(NamedTuple):
    """All calls in the order in which they began, and the sources of what the model returned."""

    calls: tuple[CallTruth, ...]
    outputs: tuple[Sources, ...]


def truth(model: nn.Module, inputs: Mapping[str, Tensor], layers: Collection[tuple[str, int]]) -> Truth:
    """Trace ``model(**inputs)`` with torch.fx, layers as `layer_calls` found them, and follow the tensors through its graph."""
    with torch.no_grad():
        tracer = _Tracer(model, inputs, layers)
        # What torchvision marks with torch.fx.wrap is traced through, so that its operations show one by one.
        with mock.patch.dict("torch.fx._symbolic_trace._wrapped_fns_to_patch", clear=True), tracer.factories():
            graph = tracer.trace(model)
    return _Walk(tracer, graph).truth()


# -- which calls are layers -----------------------------------------------------------------------------------------------------------


def module_paths(model: nn.Module) -> dict[nn.Module, str]:
    """The modules whose calls count. Parametrizations belong to the layer that owns them."""
    hidden = {m for p in model.modules() if isinstance(p, ParametrizationList) for m in p.modules()}
    return {module: path for path, module in model.named_modules() if module not in hidden}


def layer_calls(model: nn.Module, inputs: Mapping[str, Tensor]) -> set[tuple[str, int]]:
    """(path, nth) of the calls during which no other module was called, found by running the model."""
    times: Counter[str] = Counter()
    layers: set[tuple[str, int]] = set()
    stack: list[tuple[str, int]] = []

    def enter(path: str, module: nn.Module, args: Any) -> None:
        layers.difference_update(stack)
        stack.append((path, times[path]))
        layers.add(stack[-1])
        times[path] += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    handles = []
    for module, path in module_paths(model).items():
        handles += [module.register_forward_pre_hook(functools.partial(enter, path)), module.register_forward_hook(leave)]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return layers


# -- tracing --------------------------------------------------------------------------------------------------------------------------


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with everything that is no container replaced; containers keep their type."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, change) for v in value))
    if isinstance(value, tuple | list):
        return type(value)([mapped(v, change) for v in value])
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(mapped(value.start, change), mapped(value.stop, change), mapped(value.step, change))
    if is_record(value):
        found = copy.copy(value)
        vars(found).update(mapped(vars(value), change))
        return found
    return change(value)


def is_record(value: Any) -> bool:
    """Whether a value is a plain object that bundles tensors, such as torchvision's ``ImageList``."""
    return (
        type(value).__module__.startswith("torchvision")
        and hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | type)
        and not callable(value)
    )


def leaves(value: Any) -> list[Any]:
    """What `mapped` would change, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    elif is_record(value):
        value = list(vars(value).values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, tuple | list) else [value]


def enter(path: str, args: Any, kwargs: Any) -> None:
    """Marks in the graph where a container call begins."""


def leave(path: str, output: Any) -> None:
    """Marks in the graph where a container call ends."""


class _Carrier(fx.Proxy):
    """A proxy of which the tensor is known. What is no dataflow, such as its shape, comes out as it is."""

    tracer: _Tracer
    __class__ = Tensor  # type: ignore[assignment]  # for isinstance: models ask whether they were given one tensor or several

    @property
    def value(self) -> Tensor:
        return self.tracer.values[self.node]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.value, name)
        if isinstance(found, Tensor):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        if callable(found):
            return lambda *args, **kwargs: self.tracer.create_proxy("call_method", name, (self, *args), kwargs)
        return found

    def __iter__(self) -> Iterator[fx.Proxy]:
        return iter([operator.getitem(self, i) for i in range(len(self.value))])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __len__(self) -> int:
        return len(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)


#: What makes a tensor of numbers.
FACTORIES = "zeros ones empty full arange linspace rand randn randperm".split()


def _in_place(operation: Callable[..., Any]) -> Callable[..., Any]:
    # fx would record `x += y` as `x + y`, and lose that the other names of x see it
    return lambda self, other: self.tracer.create_proxy("call_function", operation, (self, other), {})


for _name in "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split():
    setattr(_Carrier, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """Runs every node as it is made.

    Attributes:
        values: the tensor of every node that stands for one. Held, so that no two storages have the same address.
        results: what every node gave, containers included.
        written: the nodes whose memory a node wrote to.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor], layers: Collection[tuple[str, int]]) -> None:
        super().__init__()
        self.inputs, self.layers = inputs, layers
        self.paths = module_paths(model)
        self.names: dict[int, Source] = {id(p): ("parameter", n) for n, p in model.named_parameters()}
        self.names |= {id(b): ("buffer", n) for n, b in model.named_buffers()}
        self.values: dict[fx.Node, Tensor] = {}
        self.results: dict[fx.Node, Any] = {}
        self.written: dict[fx.Node, list[fx.Node]] = {}
        self.times: Counter[str] = Counter()
        self.running = False

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.running:
            return forward(*args, **kwargs)
        path = self.paths.get(m)
        if path is None:
            if next(m.parameters(), None) is not None:
                raise NotImplementedError(f"{type(m).__name__} has parameters and no path")
            return forward(*args, **kwargs)
        nth = self.times[path]
        self.times[path] += 1
        if (path, nth) in self.layers:
            return self.create_proxy("call_module", path, args, kwargs)
        self.create_node("call_function", enter, (path, self.create_arg(args), self.create_arg(kwargs)), {})
        output = forward(*args, **kwargs)
        self.create_node("call_function", leave, (path, self.create_arg(output)), {})
        return output

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if self.running or not isinstance(attr_val, Tensor):
            return attr_val
        return self.proxy(self._attribute(attr_val))

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, _Carrier):
            return a.node
        if isinstance(a, tuple):
            a = tuple(a)  # fx would make a node that constructs a named one
        elif is_record(a):
            a = list(vars(a).values())
        return self._attribute(a) if isinstance(a, Tensor) else super().create_arg(a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Carrier(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        if kind == "placeholder":
            value = self.inputs.get(target, args[0] if args else None)
            if not any(isinstance(v, Tensor) for v in leaves(value)):
                return value
            node = self.create_node(kind, target, (), {})
            self.results[node] = value
            return self._handed_out(node, value)
        nodes = self.create_arg(args), self.create_arg(kwargs)
        operands = [n for n in leaves(nodes) if isinstance(n, fx.Node)]
        versions = [self.values[n]._version for n in operands]
        result = self._run(kind, target, *mapped((args, kwargs), lambda v: v.value if isinstance(v, _Carrier) else v))
        written = [n for n, version in zip(operands, versions, strict=True) if self.values[n]._version != version]
        if not written and not any(isinstance(v, Tensor) for v in leaves(result)):
            return result
        node = self.create_node(kind, target, *nodes)
        self.results[node], self.written[node] = result, written
        return self._handed_out(node, result)

    def factories(self) -> contextlib.AbstractContextManager[Any]:
        """Within, what makes a tensor of nothing gives a node too: what is written into it later would be lost otherwise."""
        stack = contextlib.ExitStack()
        for name in FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, self._factory(getattr(torch, name))))
        return stack

    def _factory(self, make: Callable[..., Tensor]) -> Callable[..., Any]:
        return lambda *args, **kwargs: make(*args, **kwargs) if self.running else self.create_proxy("call_function", make, args, kwargs)

    def _attribute(self, tensor: Tensor) -> fx.Node:
        """A parameter, a buffer, or a tensor that was made of nothing in the graph."""
        node = self.create_node("get_attr", self.names.get(id(tensor), CONSTANT)[-1], (), {})
        self.values[node] = tensor
        return node

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        self.running = True
        try:
            if kind == "call_module":
                return self.root.get_submodule(target)(*args, **kwargs)
            return target(*args, **kwargs) if kind == "call_function" else getattr(args[0], target)(*args[1:], **kwargs)
        finally:
            self.running = False

    def _handed_out(self, node: fx.Node, result: Any) -> Any:
        """What the model gets to see: proxies in place of tensors, in real containers."""
        if isinstance(result, Tensor):
            self.values[node] = result
            return self.proxy(node)
        if isinstance(result, dict):
            return {k: self._item(node, k, v) for k, v in result.items()}
        if isinstance(result, tuple | list):
            items = [self._item(node, i, v) for i, v in enumerate(result)]
            return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
        if is_record(result):
            record = copy.copy(result)
            vars(record).update({k: self._item(node, k, v) for k, v in vars(result).items()})
            return record
        return result

    def _item(self, node: fx.Node, key: Any, item: Any) -> Any:
        if not any(isinstance(v, Tensor) for v in leaves(item)):
            return item
        return self._handed_out(self.create_node("call_function", operator.getitem, (node, key), {}), item)


# -- following the tensors ------------------------------------------------------------------------------------------------------------

#: Operands of which only shape, dtype or device is taken: function name -> (position, keyword).
SHAPE_ONLY = {
    **dict.fromkeys("zeros_like ones_like empty_like full_like rand_like randn_like randint_like".split(), (0, "input")),
    **dict.fromkeys("new_zeros new_ones new_empty new_full new_tensor".split(), (0, "self")),
    **dict.fromkeys("expand_as view_as reshape_as type_as to".split(), (1, "other")),
}

#: In-place functions that leave nothing of what was there, where they cover the whole tensor.
OVERWRITING = frozenset("zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ zeros_ ones_ trunc_normal_".split())

#: Sources, time and last overwriting of memory to which nobody wrote.
NEVER: tuple[Sources, int, int] = ((), -1, -1)


def union(parts: Iterable[Sources]) -> Sources:
    """Each source once, in order of first occurrence; a constant only where there is nothing else."""
    found = tuple(dict.fromkeys(source for part in parts for source in part))
    return tuple(s for s in found if s != CONSTANT) or (CONSTANT,)


class _Walk:
    """Goes through the nodes in running order, with the sources of each tensor and of each piece of memory at hand."""

    def __init__(self, tracer: _Tracer, graph: fx.Graph) -> None:
        self.values, self.results, self.written, self.names = tracer.values, tracer.results, tracer.written, tracer.names
        self.graph = graph
        self.time = 0
        # sources, or containers of them, when they were found, and what memory from before a layer had only handed on
        self.known: dict[fx.Node, tuple[Any, int, frozenset[int]]] = {}
        self.memory: dict[
            int, tuple[Sources, int, int]
        ] = {}  # storage -> sources of its last writer, when it wrote, when all was overwritten
        self.storages: set[int] = set()  # all seen so far
        self.holders: dict[int, fx.Node] = {}  # id(tensor) -> the node that handed it out last
        self.times: Counter[str] = Counter()
        self.calls: list[CallTruth | None] = []
        self.open: list[tuple[int, str, int, tuple[Sources, ...]]] = []

    def truth(self) -> Truth:
        number = itertools.count()
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        for node in placeholders:
            self._know(node, self._shaped(node, lambda: (("input", next(number)),)))
        self.open.append((0, "", 0, tuple((("input", i),) for i in range(next(number)))))
        self.calls.append(None)
        self.times[""] += 1
        for node in self.graph.nodes:
            self.time += 1
            if node.op != "placeholder":
                self._visit(node)
        calls = tuple(c for c in self.calls if c is not None)
        return Truth(calls, calls[0].outputs)

    def _visit(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            source = self.names.get(id(self.values[node]), CONSTANT)
            written = self.memory.get(storage_of(self.values[node]))
            self._know(node, written[0] if written else (source,))
        elif node.op == "output":
            self._leave(node.args)
        elif node.target is enter:
            self._enter(str(node.args[0]), node.args[1:])
        elif node.target is leave:
            self._leave(node.args[1:])
        elif node.target is operator.getitem and node.args[0] not in self.values:
            (container, _, lent), key = self.known[node.args[0]], node.args[1]  # type: ignore[index]
            self._know(node, vars(container)[key] if is_record(container) else container[key], lent)
        elif node.op == "call_module":
            self._layer(node)
        else:
            self._operation(node)

    # -- tensors

    def _know(self, node: fx.Node, meaning: Any, lent: frozenset[int] = frozenset()) -> None:
        self.known[node] = meaning, self.time, lent
        if node in self.values:
            self.holders[id(self.values[node])] = node
            self.storages.add(storage_of(self.values[node]))

    def _read(self, node: fx.Node) -> Sources:
        """The last writer of the memory is the producer, if it wrote after the tensor had been handed out."""
        sources, found, lent = self.known[node]
        storage = storage_of(self.values[node])
        written, when, whole = self.memory.get(storage, NEVER)
        if when <= found:
            return sources  # type: ignore[no-any-return]
        # a layer that hands memory on stays the producer for who uses its return value, beside who writes to that memory
        return union([sources, written]) if storage in lent and whole <= found else written

    def _wrote(self, storage: int, sources: Sources, whole: bool) -> None:
        before = self.memory.get(storage, NEVER)[2]
        self.memory[storage] = sources, self.time, self.time if whole else before

    def _reads(self, value: Any) -> tuple[Sources, ...]:
        return tuple(self._read(n) for n in leaves(value) if isinstance(n, fx.Node))

    # -- calls

    def _begin(self, path: str, args: Any) -> tuple[int, str, int, tuple[Sources, ...]]:
        self.calls.append(None)
        self.times[path] += 1
        return len(self.calls) - 1, path, self.times[path] - 1, self._reads(args)

    def _enter(self, path: str, args: Any) -> None:
        self.open.append(self._begin(path, args))

    def _leave(self, output: Any) -> None:
        index, path, nth, inputs = self.open.pop()
        self.calls[index] = CallTruth(path, nth, False, inputs, self._reads(output))

    def _layer(self, node: fx.Node) -> None:
        index, path, nth, inputs = self._begin(str(node.target), (node.args, node.kwargs))
        outputs = [v for v in leaves(self.results[node]) if isinstance(v, Tensor)]
        sources: list[Source] = [("call", path, nth, port) for port in range(len(outputs))]
        lent = self.storages & {storage_of(v) for v in outputs}
        for target in self.written[node]:
            storage = storage_of(self.values[target])
            lent -= {storage}
            ports = [source for source, tensor in zip(sources, outputs, strict=True) if storage_of(tensor) == storage]
            producer = (*ports, ("call", path, nth, None))[:1]
            around = [] if fills(self.values[target]) else [self._read(self._base(target))]
            self._wrote(storage, union([*around, producer]), False)
            self._know(target, producer)
        following = iter(sources)
        self._know(node, self._shaped(node, lambda: (next(following),)), frozenset(lent))
        self.calls[index] = CallTruth(path, nth, True, inputs, tuple((source,) for source in sources))

    # -- operations

    def _operation(self, node: fx.Node) -> None:
        operands = self._operands(node)
        targets = self.written[node]
        if targets and any(storage_of(self.values[t]) != storage_of(self.values[targets[0]]) for t in targets):
            raise NotImplementedError(f"{node.target} writes to several tensors")
        sources = self._write(node, targets[0], operands) if targets else union(self._read(n) for n in operands)
        self._know(node, self._shaped(node, lambda: sources))

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        position, keyword = SHAPE_ONLY.get(function_name(node), (-1, ""))
        args = [a for i, a in enumerate(node.args) if i != position]
        kwargs = {k: a for k, a in node.kwargs.items() if k != keyword}
        return [n for n in leaves((args, kwargs)) if isinstance(n, fx.Node)]

    def _write(self, node: fx.Node, target: fx.Node, operands: Sequence[fx.Node]) -> Sources:
        """What the memory behind ``target`` holds from now on: what it held, unless all of it is written anew, and what is written."""
        tensor = self.values[target]
        whole = fills(tensor) and self._overwrites(node, tensor)
        held = [] if whole else [target] if fills(tensor) else [self._base(target), target]
        others = [n for i, n in enumerate(operands) if i != operands.index(target)]
        sources = union(self._read(n) for n in [*held, *others])
        self._wrote(storage_of(tensor), sources, whole)
        return sources

    def _base(self, node: fx.Node) -> fx.Node:
        """The tensor of which a tensor is a view, where some node handed that out."""
        return self.holders.get(id(self.values[node]._base), node)

    def _overwrites(self, node: fx.Node, tensor: Tensor) -> bool:
        if node.target is not operator.setitem:
            return function_name(node) in OVERWRITING
        index: Any = node.args[1]
        return not any(isinstance(i, fx.Node) for i in leaves(index)) and tensor[index].numel() == tensor.numel()

    def _shaped(self, node: fx.Node, sources: Callable[[], Sources]) -> Any:
        return mapped(self.results[node], lambda v: sources() if isinstance(v, Tensor) else v)


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def fills(tensor: Tensor) -> bool:
    """Whether a tensor is all that lies in its memory."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def function_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
