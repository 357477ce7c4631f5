"""What ranks train that torchrun restarts: over a default group of ours, and over one by TCP.

``python -m tests.comm.groups.restarted FOLDER`` is one rank of the first attempt or a later one.
In the first, rank 1 is killed in the middle of the training.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import syncline
from syncline.comm.backend.process_group import Options
from syncline.torch_private import set_group_count
from syncline.train.measure.exchange import new_group_like
from syncline.train.sparse.session import own_group
from tests.timeouts import TIMEOUT

STEPS, KILLED_AT = 6, 3


def train(folder: str, *, killed: bool) -> dict[str, torch.Tensor]:
    """Train from the checkpoint, if there is one; return the parameters."""
    rank = dist.get_rank()
    tcp = dist.new_group(backend="syncline", pg_options=Options(transport="tcp"))
    torch.manual_seed(0)
    modules = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(2)
    )
    wrapped = [
        syncline.DistributedDataParallel(module, process_group=group, planner="single")
        for module, group in zip(modules, (None, tcp), strict=True)
    ]
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.05, momentum=0.9)
    path, step = Path(folder) / "checkpoint.pt", 0
    if path.exists():
        step, parameters, state = torch.load(path, weights_only=True)
        modules.load_state_dict(parameters)
        optimizer.load_state_dict(state)
    while step < STEPS:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(4, 8, generator=generator)
        for number, model in enumerate(wrapped):
            model(inputs).square().mean().backward()
            if killed and step == KILLED_AT and rank == 1 and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            saved = step, modules.state_dict(), optimizer.state_dict()
            torch.save(saved, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)
    return modules.state_dict()


def train_whole(folder: str) -> dict[str, torch.Tensor]:
    return train(folder, killed=False)


def names_of_groups() -> list[list[str]]:
    """Make groups over Gloo twice, where torch counts them from the same number each time."""
    found = []
    for _ in range(2):
        set_group_count(7)
        groups = new_group_like(dist.group.WORLD), own_group(dist.group.WORLD)
        found.append([group.group_name for group in groups])
    return found


def main() -> None:
    """Be one rank; leave the parameters of rank 0 in the folder."""
    folder, attempt = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("syncline", timeout=TIMEOUT)
    found = train(folder, killed=attempt == 0)
    if dist.get_rank() == 0:
        torch.save({"attempt": attempt, "parameters": found}, Path(folder) / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
