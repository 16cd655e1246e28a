"""What calls, joins and leaves are called in a view, and what a name stands for."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradlineage.view import View

__all__ = ["Labels"]


class Labels:
    """The names in a `View`, each worked out when first asked."""

    def __init__(self, view: View) -> None:
        self.view, self.graph = view, view.graph

    @cached_property
    def _times(self) -> Counter[str]:
        return Counter(path for path, _ in {(c.path, c.nth) for c in self.graph.calls})

    def call(self, call: int) -> str:
        record = self.graph.calls[call]
        name = record.path or (f"({record.type})" if record.type in self._times else record.type)
        return f"{name}[{record.nth}]" if self._times[record.path] > 1 else name

    @cached_property
    def _join_labels(self) -> dict[int, str]:
        nodes = self.graph.nodes
        groups: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for join in self.view.joins:
            groups[self.view.call_of(join), nodes[join].name].append(join)
        labels = {}
        for (call, name), members in groups.items():
            if call < 0:
                place = "(outside)"
            else:
                record = self.graph.calls[call]
                place = f"{record.path}[{record.nth}]" if self._times[record.path] > 1 else record.path
            for number, join in enumerate(members):
                labels[join] = f"{place}:{name}[{number}]" if len(members) > 1 else f"{place}:{name}"
        return labels

    def atom(self, atom: int) -> str:
        node = self.graph.nodes[atom]
        if self.view.is_join(atom):
            return self._join_labels.get(atom, f":{node.name}")
        if self.view.of_layer(atom):
            call, port = self.view.leaving(atom)
            record = self.graph.calls[call]
            if port is None or len(record.outputs) == 1:
                return self.call(call)
            return f"{record.path or record.type}[{record.nth}][{port}]"
        if node.kind == "input":
            nth = self.graph.calls[node.call].nth if node.call >= 0 else 0
            return f"input:{node.name}[{nth}]" if nth else f"input:{node.name}"
        if node.kind == "constant":
            return f"constant:{node.name}" if node.name else "constant"
        return "unknown" if node.kind in ("unknown", "empty") else node.name

    @cached_property
    def _by_name(self) -> dict[str, tuple[str, int]]:
        names: dict[str, tuple[str, int]] = {}
        for join, label in self._join_labels.items():
            names[label] = "join", join
        for index in reversed(self.view.shown):  # the first call of a path wins
            record = self.graph.calls[index]
            names[f"{record.path}[{record.nth}]"] = "call", index
            names[record.path] = "call", index
            names.setdefault(self.call(index), ("call", index))
        return names

    def find(self, key: object) -> tuple[str, int] | None:
        if isinstance(key, tuple):
            return self._by_name.get(f"{key[0]}[{key[1]}]") if len(key) == 2 else None
        if not isinstance(key, str):
            return None
        found = self._by_name.get(key)
        if found is None and (match := re.fullmatch(r"(.+\[\d+\])\[(\d+)\]", key)):  # a port: lstm[0][1]
            found = self._by_name.get(match[1])
            if found is not None and (found[0] != "call" or int(match[2]) >= len(self.graph.calls[found[1]].outputs)):
                return None
        return found
