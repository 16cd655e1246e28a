"""docs/json.md and what a saved lineage has in it: every field is in both."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlineage
from gradlineage import exchange
from gradlineage.graph import Node

from .nets import Net, lin

TEXT = (Path(__file__).parent.parent / "docs" / "json.md").read_text("utf-8")

#: For each heading of the document, the fields that are read there.
READ = {
    "The document": exchange._DOCUMENT,
    "calls": exchange._CALL,
    "values": exchange._VALUE,
    "nodes": exchange._NODE,
    "breaks": exchange._BREAK,
    "decisions": exchange._DECISION,
    "registered": exchange._PARAMETER,
    "writes": exchange._WRITE,
}


def documented() -> dict[str, list[str]]:
    """Per heading the fields of its table."""
    found = {}
    for heading, text in re.findall(r"^##+ (.*)\n((?:(?!##).*\n?)*)", TEXT, re.M):
        if fields := re.findall(r"^\| `(\w+)` \|", text, re.M):
            found[heading] = fields
    return found


class Everything(nn.Module):
    """Something for every field."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.spare, self.head, self.one = lin(), lin(), lin(), nn.Linear(4, 1)
        self.inner = Net(lambda self, x: self.fc(x), fc=lin())
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = self.stem(x) * self.mask
        early = self.head(h)
        h.mul_(2)
        late = self.head(h)
        h[:, 0] = torch.zeros(2)
        again = self.inner.forward(torch.nn.functional.linear(h, self.spare.weight))
        if self.one(h).mean() > 1e9:
            return x
        unseen = torch.from_numpy(table.numpy() * 2)
        return torch.cat([early.detach(), late, again + unseen, self.stem(torch.ones(2, 4))])


@pytest.fixture(scope="module")
def saved() -> list[dict[str, Any]]:
    """Documents of one pass, of one with a layer collapsed, and of a union."""
    model = Everything()
    inputs = torch.randn(2, 4), torch.randn(2, 4)
    union = gradlineage.trace_many(model, [inputs, inputs]).union()
    lineages = gradlineage.trace(model, *inputs), gradlineage.trace(model, *inputs).collapse(depth=1), union
    return [json.loads(lineage.to_json()) for lineage in lineages]


def objects(document: Any, heading: str = "The document") -> Any:
    """(heading, object) for every object in a document."""
    if isinstance(document, list):
        for item in document:
            yield from objects(item, heading)
    elif isinstance(document, dict):
        yield heading, document
        for key, value in document.items():
            if heading.startswith("table"):
                below = f"{heading}.{key}" if heading == "table" and key != "outputs" else "connections"
            else:
                below = "values" if key in ("inputs", "outputs", "hidden") else key
            yield from objects(value, below)


def test_every_field_of_a_saved_lineage_is_documented_and_every_documented_one_exists(saved: list[dict[str, Any]]) -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for document in saved:
        for heading, item in objects(document):
            found[heading] |= set(item)
    told = {heading: set(fields) for heading, fields in documented().items()}
    assert dict(found) == told


def test_every_field_that_is_read_is_documented_in_its_order() -> None:
    told = documented()
    for heading, fields in READ.items():
        assert set(told[heading]) == set(fields), heading
    assert told["The document"] == list(exchange._DOCUMENT)
    assert set(told) == {*READ, "bypassed", "table", "table.layers", "table.joins", "connections"}


def test_kinds_and_what_is_left_out_are_documented() -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| `kind` | text | `op`"))
    assert set(re.findall(r"`(\w+)`", row)) == {"kind", *exchange._KINDS}
    nodes = TEXT[TEXT.index("## nodes") : TEXT.index("## bypassed")]
    told = dict(re.findall(r"^\| `(\w+)` \|.*\| ?`?([^|`]*)`? \|$", nodes, re.M))
    plain = {**Node._field_defaults, "without_grad": ()}
    for field in exchange._NODE.keys() - {"kind"}:
        expected = plain[field]
        assert json.loads(told[field]) == (list(expected) if isinstance(expected, tuple) else expected), field


def test_kinds_of_decisions_are_documented() -> None:
    from gradlineage.values import Decision

    row = next(line for line in TEXT.splitlines() if line.startswith("| `kind` | text | `bool`"))
    kinds = set(re.findall(r"`(\w+)`", row)) - {"kind"}
    assert Decision.__doc__ is not None
    assert all(f"``{kind}``" in Decision.__doc__ for kind in kinds)
    assert kinds == {"bool", "int", "float", "index", "item", "list", "numpy", "equal", "format", "shape"}
