"""What the models own: paths of modules, names of parameters and buffers, tensors lying about in attributes; and how to put them back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from gradlineage.notes import ModuleNote, named_modules
from gradlineage.tape import LEAVES, Tape
from gradlineage.tensors import is_leaf, storage_of

__all__ = ["Keeper", "Registry"]

_OWN_KEYS = frozenset(nn.Module().__dict__)
_HOLDERS: tuple[type, ...] = (list, tuple, type({}.values()))
_MOST = 1000  # a list of numbers as long as a data set is not searched
_NO_TENSORS = (int, float, str, nn.Module, type(None))
_NO_TENSORS_EXACT = frozenset((int, float, str, bool, type(None)))


class Registry:
    """Names by identity. The models keep the tensors alive, and a name is believed only while its module still holds the tensor under it."""

    def __init__(self, models: Mapping[str, nn.Module], tape: Tape) -> None:
        self.models = dict(models)
        self.tape = tape
        self.notes: dict[int, ModuleNote] = {}  # by id of the module
        self.hook_dicts: dict[int, str] = {}  # id(its hook dict) -> path: a shallow copy shares the dict
        self.taken: list[nn.Module] = []  # those whose tensors are known by name
        self.ignored: set[int] = set()  # parametrizations and what scripts consist of
        self._names: dict[int, tuple[dict[str, Any], str, str, str]] = {}  # id(tensor) -> (dict, key, path of its module, kind)

    def add(self, model: nn.Module, prefix: str, registered: bool) -> Iterator[ModuleNote]:
        """Take in a model's modules under a path; yields those whose calls are noted."""
        for path, module in named_modules(model, prefix):
            if id(module) in self.ignored:
                self._take(path, module)
                continue
            if isinstance(module, ParametrizationList):
                self.ignored.update(map(id, nn.Module.modules(module)))
                self._take(path, module)
                continue
            if id(module) in self.notes:
                continue
            note = self.notes[id(module)] = ModuleNote(path, module, registered)
            if note.script:  # one layer; its parameters are made anew on every access
                self.ignored.update(id(m) for m in nn.Module.modules(module) if m is not module)
            else:
                self._take(path, module)
                self.hook_dicts[id(module._forward_hooks)] = path
            yield note

    def _take(self, path: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        names = self._names
        self.taken.append(module)
        for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in members.items():
                if tensor is not None and id(tensor) not in names and not (self.tape.memory and self._computed(tensor)):
                    names[id(tensor)] = (members, key, path, kind)
                    if is_lazy(tensor):
                        self.tape.lazy.add(id(tensor))
        attributes = module.__dict__
        own = attributes.keys() - _OWN_KEYS
        if own and any(type(attributes[key]) not in _NO_TENSORS_EXACT for key in own):
            for key, value in attributes.items():
                if key in own and not isinstance(value, _NO_TENSORS):
                    self._attribute(f"{path}.{key}" if path else key, value)

    def _computed(self, tensor: torch.Tensor) -> bool:
        """Whether a module made during the pass holds a tensor that the pass computed, as what ``torch.func.linearize`` returns does."""
        held = self.tape.held(tensor)
        return held is not None and self.tape.entries[held][0] != LEAVES

    def _attribute(self, name: str, value: Any) -> None:
        """A plain tensor that lies in a module when the pass begins is a constant, unless an earlier pass computed it."""
        if isinstance(value, dict):
            value = value.values()
        items: Any = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, _HOLDERS) else ()
        for tensor in itertools.islice(items, _MOST):
            if not isinstance(tensor, torch.Tensor):
                continue
            if id(tensor) not in self._names and self.tape.known(tensor) is None and is_leaf(tensor):
                self.tape.know(tensor, self.tape.leaf("constant", name, grad=tensor.requires_grad))

    def name(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """(``parameter`` or ``buffer``, full name) of a tensor that a module had when the pass began."""
        found = self._names.get(id(tensor))
        if found is None or found[0].get(found[1]) is not tensor:
            return None
        return found[3], f"{found[2]}.{found[1]}" if found[2] else found[1]

    def name_since(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """The same for one that a module got during the pass."""
        for path, module in self.modules() if is_leaf(tensor) else ():
            for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, value in members.items():
                    if value is tensor:
                        return kind, f"{path}.{key}" if path else key
        return None

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, parameter), each once, by its first name."""
        seen: set[int] = set()
        for prefix, model in self.models.items():
            for path, module in named_modules(model, prefix):
                for key, tensor in module._parameters.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield f"{path}.{key}" if path else key, tensor

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) for every module that is not a script."""
        for prefix, model in self.models.items():
            for path, module in named_modules(model, prefix):
                if not isinstance(module, torch.jit.ScriptModule):
                    yield path, module


class Keeper:
    """Copies a parameter or buffer before it is first written, and puts it back. What isn't written isn't copied."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # id -> (tensor, its memory, a copy)
        self._storages: dict[int, list[torch.Tensor]] | None = None
        self._lazy: set[int] = set()
        self._places: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def begin(self) -> None:
        """Remember which tensors lie where."""
        for module in self.registry.taken:
            self._places += [(members, dict(members)) for members in (module._parameters, module._buffers) if members]

    def before_write(self, tensor: torch.Tensor) -> None:
        """Keep what lies in the memory that is about to be written."""
        if not is_leaf(tensor):
            return
        if is_lazy(tensor):  # it gets its first values: nothing to go back to
            self._lazy.add(id(tensor))
            return
        for member in self._members().get(storage_of(tensor), ()):
            self._keep(member)

    def keep_all(self) -> None:
        """Keep everything."""
        for members in self._members().values():
            for member in members:
                self._keep(member)

    def _members(self) -> dict[int, list[torch.Tensor]]:
        """Parameters and buffers by storage."""
        if self._storages is None:
            self._storages = {}
            for _, module in self.registry.modules():
                for member in (*module._parameters.values(), *module._buffers.values()):
                    if member is not None and not is_lazy(member) and (storage := storage_of(member)):
                        self._storages.setdefault(storage, []).append(member)
        return self._storages

    def _keep(self, member: torch.Tensor) -> None:
        if id(member) not in self.saved and id(member) not in self._lazy:
            with torch.no_grad():
                self.saved[id(member)] = member, member.data, member.detach().clone()

    def restore(self) -> None:
        for tensor, memory, copy in self.saved.values():
            with torch.no_grad():
                memory.copy_(copy)
                now, was = ((storage_of(t), t.shape, t.stride(), t.storage_offset()) for t in (tensor, memory))
                if now != was:
                    tensor.data = memory
        self.saved.clear()
        for members, before in self._places:
            if any(members.get(key, members) is not tensor for key, tensor in before.items()):
                after = {**before, **{key: tensor for key, tensor in members.items() if key not in before}}
                members.clear()  # in the order in which they were
                members.update(after)
