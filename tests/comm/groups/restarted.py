"""What ranks train that torchrun restarts: over a default group of ours, and over one by TCP.

``python -m tests.comm.groups.restarted FOLDER`` is one rank of the first attempt or a later one.
In the first, rank 1 is killed in the middle of the training.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import syncline
from syncline.comm.backend.process_group import Options
from syncline.train.measure.exchange import new_group_like
from syncline.train.sparse.session import own_group
from tests.timeouts import TIMEOUT

STEPS, KILLED_AT = 6, 3


def train(folder: str, *, killed: bool) -> dict[str, torch.Tensor]:
    """Train from the checkpoint, if there is one; return the parameters."""
    rank = dist.get_rank()
    tcp = dist.new_group(backend="syncline", pg_options=Options(transport="tcp"))
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(2)]
    wrapped = [
        syncline.DistributedDataParallel(model, process_group=group, planner="single")
        for model, group in zip(models, (None, tcp), strict=True)
    ]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in wrapped]
    path, step = Path(folder) / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        step = saved["step"]
        for parts, states in ((models, saved["models"]), (optimizers, saved["optimizers"])):
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)  # type: ignore[attr-defined]
    while step < STEPS:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(4, 8, generator=generator)
        for number, (model, optimizer) in enumerate(zip(wrapped, optimizers, strict=True)):
            model(inputs).square().mean().backward()
            if killed and step == KILLED_AT and rank == 1 and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        states = {
            "step": step,
            "models": [model.state_dict() for model in models],
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        if rank == 0:
            torch.save(states, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)
    return {
        f"{number}.{name}": value.detach().clone()
        for number, model in enumerate(models)
        for name, value in model.named_parameters()
    }


def train_whole(folder: str) -> dict[str, torch.Tensor]:
    """Train without a break."""
    return train(folder, killed=False)


def names_of_groups() -> list[list[str]]:
    """Make groups over Gloo twice, where torch counts them from the same number each time."""
    world = dist.distributed_c10d._world
    found = []
    for _ in range(2):
        world.group_count = 7
        wrapper: Any = SimpleNamespace(process_group=dist.group.WORLD)
        groups = new_group_like(wrapper.process_group), own_group(wrapper.process_group)
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
