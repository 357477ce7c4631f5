"""A worker of :mod:`benchmarks.kill_resume`: overlapped training that saves checkpoints."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from syncline.plan.plan import Message, Plan, Tensor
from syncline.train.ddp import DistributedDataParallel
from syncline.train.measure.exchange import telling_lost_peers

WORKERS = 2
LAYERS = 6
WIDTH = 64
CHECKPOINT_EVERY = 10
"""Steps."""
GROUP_TIMEOUT_S = 20.0
HELD_S = 0.002
"""Every message is held back so long, so that most moments have some under way."""


class Net(nn.Sequential):
    """Layers with dropout, so that the random generators matter too."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)]
        super().__init__(*layers, nn.Linear(WIDTH, 10))


def need_first() -> Plan:
    """Return a plan that sends each layer's halves, the first layer's first."""
    named = list(Net().named_parameters())
    tensors = tuple(Tensor(name=name, elements=p.numel()) for name, p in reversed(named))
    spans = []
    start = 0
    for tensor in tensors:
        middle, stop = start + tensor.elements // 2, start + tensor.elements
        spans.append(((start, middle), (middle, stop)))
        start = stop
    return Plan(
        planner="by hand",
        model="Net",
        workers=WORKERS,
        tensors=tensors,
        messages=tuple(
            Message(start=a, stop=b, delay_s=HELD_S)
            for halves in reversed(spans)
            for a, b in halves
        ),
        wait="need",
        in_flight=2,
    )


def join(rank: int, folder: Path, attempt: int, errors: Path, workers: int) -> None:
    """Join the workers of an attempt."""
    torch.set_num_threads(1)
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), 2)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{attempt}",
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    torch.manual_seed(0)


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    inputs: torch.Tensor,
) -> None:
    """Take a step of the training and of its schedule."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), torch.arange(8)).backward()
    optimizer.step()
    scheduler.step()


def work_in_shards(
    rank: int, folder: Path, attempt: int, steps: int, errors: Path, workers: int
) -> None:
    """Train with a sharded optimizer as one worker from the last checkpoint on."""
    join(rank, folder, attempt, errors, workers)
    plan = msgspec.structs.replace(need_first(), workers=workers).in_shards()
    model = DistributedDataParallel(Net(), plan=plan, check=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    model.overlap(optimizer, shard=True)
    done, last = 0, folder / "last"
    if last.exists():
        done = int(last.read_text())
        checkpoint = folder / f"checkpoint-{done}"
        state = {"model": model.module.state_dict(), "scheduler": scheduler.state_dict()}
        with telling_lost_peers("while a checkpoint was loaded"):
            dcp.load(state, checkpoint_id=checkpoint)
            model.load_sharded_state_dict(optimizer, checkpoint)
        scheduler.load_state_dict(state["scheduler"])
    while done < steps:
        torch.manual_seed(done)  # on all ranks alike, also for what drops out
        take_step(model, optimizer, scheduler, torch.randn(8, WIDTH))
        done += 1
        if rank == 0:
            (folder / "progress").write_text(str(done))
        if done % CHECKPOINT_EVERY == 0 or done == steps:
            with telling_lost_peers("while a checkpoint was saved"):
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": model.sharded_state_dict(optimizer),
                    "scheduler": scheduler.state_dict(),
                }
                dcp.save(state, checkpoint_id=folder / f"checkpoint-{done}")
                dist.barrier()
            if rank == 0:
                (folder / "last.partial").write_text(str(done))
                (folder / "last.partial").replace(last)
    whole = model.full_state_dict(optimizer)
    if rank == 0:
        found = dict(model.module.state_dict())
        for number, states in whole["state"].items():
            found |= {f"{number} {name}": value for name, value in states.items()}
        torch.save(found, folder / "final.pt")
    dist.barrier()
    dist.destroy_process_group()


def work(rank: int, folder: Path, attempt: int, steps: int, errors: Path, workers: int) -> None:
    """Train as one worker from the last checkpoint on."""
    join(rank, folder, attempt, errors, workers)
    model = DistributedDataParallel(Net(), plan=need_first(), check=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    model.overlap(optimizer)
    done = 0
    torch.manual_seed(rank)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        content = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        scheduler.load_state_dict(content["scheduler"])
        torch.set_rng_state(content["generators"][rank])
        done = content["done"]
    while done < steps:
        inputs = torch.Generator().manual_seed(WORKERS * done + rank)
        take_step(model, optimizer, scheduler, torch.randn(8, WIDTH, generator=inputs))
        done += 1
        if rank == 0:
            (folder / "progress").write_text(str(done))
        if done % CHECKPOINT_EVERY == 0 or done == steps:
            generators = [torch.empty_like(torch.get_rng_state()) for _ in range(WORKERS)]
            with telling_lost_peers("while a checkpoint was gathered"):
                dist.all_gather(generators, torch.get_rng_state())
            if rank == 0:
                content = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "generators": generators,
                    "done": done,
                }
                torch.save(content, folder / "checkpoint.partial")
                (folder / "checkpoint.partial").replace(checkpoint)
    (folder / f"digest-{rank}").write_text(_digest(model, optimizer))
    dist.barrier()
    dist.destroy_process_group()


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.numpy().tobytes())
    for index, state in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(state.items()):
            found.update(f"{index} {name}".encode() + value.numpy().tobytes())
    return found.hexdigest()
