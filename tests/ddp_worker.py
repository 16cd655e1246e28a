"""One process of several that train under DistributedDataParallel: ``python -m tests.ddp_worker``, placed by torchrun's environment variables.

For every fault it wraps a net with that fault, trains two steps and notes what DDP said; then a sound net, and one that is searched for unused
parameters. It prints one line of JSON.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["FAULTS", "Net", "batch", "loss_of", "main"]

FAULTS = ("never called", "unused", "dead", "cut", "no grad", "not in the loss", "by input")
WORLD = 2


class Net(nn.Module):
    """A net with one fault of wiring, or none. What is frozen stands first, so that DDP's indices are not those of ``parameters()``."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.stem = nn.Linear(4, 8).requires_grad_(False)
        self.encoder, self.spare = nn.Linear(8, 8), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.encoder(self.stem(x)))
        if self.fault == "by input":
            return {"logits": self.scale * (self.head(hidden) if x.mean() > 0 else self.spare(hidden))}
        with torch.set_grad_enabled(self.fault != "no grad"):
            spare = torch.ones(2) if self.fault == "never called" else self.spare(hidden)
        if self.fault == "cut":
            spare = (spare > 0).float()
        logits = self.head(hidden) * (1.0 if self.fault == "unused" else self.scale)
        if self.fault in ("dead", "not in the loss"):
            return {"logits": logits, "spare": spare} if self.fault == "not in the loss" else {"logits": logits}
        return {"logits": logits + spare}


def batch(rank: int) -> torch.Tensor:
    """What a process trains on: positive in the first, negative in the second."""
    return torch.linspace(0.5, 1.5, 32).reshape(8, 4) * (1 if rank % 2 == 0 else -1)


def loss_of(output: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = output["logits"].square().mean()
    return loss


def steps(fault: str, rank: int, find_unused: bool) -> dict[str, Any]:
    """Two steps: the indices in DDP's complaint (None without one), the names of what changed, and all values at the end."""
    torch.manual_seed(0)
    net = Net(fault)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    model = DistributedDataParallel(net, process_group=dist.new_group(), find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    complaint = None
    try:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(batch(rank))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    except RuntimeError as error:
        found = re.search(rf"Parameter indices which did not receive grad for rank {rank}: ([\d ]+)", str(error))
        if found is None or "not used in producing loss" not in str(error):
            raise
        complaint = [int(index) for index in found[1].split()]
    return {
        "complaint": complaint,
        "changed": [name for name, parameter in net.named_parameters() if not torch.equal(parameter, before[name])],
        "values": [value for parameter in net.parameters() for value in parameter.flatten().tolist()],
    }


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    found = {fault: steps(fault, rank, False) for fault in FAULTS}
    found["sound"] = steps("", rank, False)
    found |= {f"{fault}, searched": steps(fault, rank, True) for fault in FAULTS}
    print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
