"""Draw the same models with several tools: the numbers and the pictures in docs/comparison.md.

    pip install '.[zoo,draw]' torchview==0.2.7 torchviz==0.0.3 torchlens==2.36.1
    python docs/comparison.py

All are laid out by the Graphviz that the extra ``draw`` brings. Pictures go to ``docs/peers``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchlens
import torchview
import torchviz
from torch import nn
from torchvision.models import inception_v3
from torchvision.models.inception import InceptionA

import gradlineage
from gradlineage.collapse import fitting

FOLDER = Path(__file__).resolve().parent / "peers"
GRAPHVIZ = Path(sysconfig.get_path("scripts")) / "graphviz-pure"


class EarlyExit(nn.Module):
    """The example of docs/paths.md: sure enough of inputs 0, 2 and 4 to leave at the first exit."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.exit1 = nn.Linear(2, 2), nn.Linear(2, 2)
        self.block2, self.exit2 = nn.Linear(2, 2), nn.Linear(2, 2)
        for layer in self.children():
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.block1(x)
        y = self.exit1(h)
        if y.softmax(-1).max() > 0.9:  # sure enough
            return y
        return self.exit2(torch.relu(self.block2(h)))


IMAGES = torch.tensor([[5.0, 0.0], [0.0, 0.0], [0.0, 4.0], [1.0, 0.0], [3.0, 0.0]])


def by_torchview(model: nn.Module, x: torch.Tensor, **options: Any) -> str:
    return torchview.draw_graph(model, input_data=x, **options).visual_graph.source


def by_torchviz(model: nn.Module, x: torch.Tensor) -> str:
    return torchviz.make_dot(model(x), params=dict(model.named_parameters())).source


def by_torchlens(model: nn.Module, x: torch.Tensor, **options: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "graph")
        graph = torchlens.trace(model, x).draw(vis_outpath=path, vis_fileformat="svg", vis_save_only=True, return_graph=True, **options)
        return graph.source


def by_gradlineage(model: nn.Module, x: torch.Tensor, view: Callable[[Any], Any] = lambda lineage: lineage) -> str:
    return view(gradlineage.trace(model, x)).to_dot()


def laid_out(dot: str, format: str) -> str:
    return subprocess.run([GRAPHVIZ, f"-T{format}"], input=dot.encode(), capture_output=True, check=False).stdout.decode()


def count(dot: str) -> tuple[int, int]:
    """Nodes and arrows of a text in the DOT language, its labels left out."""
    plain, depth = [], 0
    for part in re.split(r'("(?:[^"\\]|\\.)*"|->|[<>])', dot):
        depth += (part == "<") - (part == ">")
        if not depth and part != ">":
            plain.append(f"q{hash(part)}".replace("-", "_") if part.startswith('"') else part)
    text = re.sub(r"\[[^\]]*\]", ";", "".join(plain))
    name = r"\w+(?::\w+)*"
    arrows = re.findall(rf"({name})\s*->\s*({name})", text)
    alone = re.findall(rf"^\s*({name})\s*;", text, re.M)
    return len({*alone, *(end for arrow in arrows for end in arrow)} - {"graph", "node", "edge"}), len(arrows)


@contextlib.contextmanager
def as_dot() -> Iterator[None]:
    """TorchLens runs a program named ``dot``."""
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(GRAPHVIZ, os.path.join(folder, "dot"))
        os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]
        yield


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    print(
        ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchvision", "torchview", "torchviz", "torchlens"))
    )
    whole, image = inception_v3(weights=None, init_weights=False).eval(), torch.randn(1, 3, 299, 299)
    block, features = InceptionA(192, 32).eval(), torch.randn(1, 192, 35, 35)
    early = EarlyExit().eval()
    (cat,) = gradlineage.trace(block, features).find(op="cat")  # first, since TorchLens leaves torch's functions wrapped
    print("gradlineage:", [source.label for flow in cat.inputs for source in flow.sources])
    print(gradlineage.trace_many(early, [image[None] for image in IMAGES]))
    views: list[tuple[str, str, str]] = [
        ("Inception v3", "torchview, depth=1", by_torchview(whole, image, depth=1)),
        ("Inception v3", "torchview, depth=3", by_torchview(whole, image, depth=3)),
        ("Inception v3", "torchviz", by_torchviz(whole, image)),
        ("Inception v3", "torchlens, vis_call_depth=1", by_torchlens(whole, image, vis_call_depth=1)),
        ("Inception v3", "torchlens", by_torchlens(whole, image)),
        ("Inception v3", "gradlineage, as the command draws it", by_gradlineage(whole, image, lambda lineage: fitting(lineage, 70)[0])),
        ("Inception v3", "gradlineage, depth=2", by_gradlineage(whole, image, lambda lineage: lineage.collapse(depth=2))),
        ("Inception v3", "gradlineage, all", by_gradlineage(whole, image)),
        ("block", "torchview", by_torchview(block, features, depth=1)),
        ("block", "torchviz", by_torchviz(block, features)),
        ("block", "torchlens", by_torchlens(block, features, vis_call_depth=1)),
        ("block", "gradlineage", by_gradlineage(block, features, lambda lineage: lineage.collapse(depth=1))),
        ("early exit", "torchview", by_torchview(early, IMAGES[1:2])),
        ("early exit", "torchviz", by_torchviz(early, IMAGES[1:2])),
        ("early exit", "torchlens", by_torchlens(early, IMAGES[1:2])),
        ("early exit", "gradlineage", by_gradlineage(early, IMAGES[1:2])),
    ]
    for model, tool, dot in views:
        nodes, edges = count(dot)
        print(f"| {model} | {tool} | {nodes} | {edges} |")
        if model != "Inception v3" and tool != "gradlineage":
            svg = re.sub(r"<title>\d+(?:&#45;&gt;\d+)?</title>\n", "", laid_out(dot.replace(os.getcwd() + "/", ""), "svg"))
            (FOLDER / f"{model.replace(' ', '_')}_{tool}.svg").write_text(svg, "utf-8")
    trace = torchlens.trace(block, features)
    print("torchlens:", [(label, trace[label].module) for label in trace["cat_1_23"].parents])
    bundle = torchlens.bundle([torchlens.trace(early, image[None]) for image in IMAGES])
    print("torchlens, five inputs:", bundle.shared_module_addresses, bundle.divergent_module_addresses)


if __name__ == "__main__":
    with as_dot():
        main()
