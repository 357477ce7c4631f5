"""A script that knows nothing of Syncline: ``unmodified.py FOLDER KIND...``, under torchrun."""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as scripts do

WIDTH, STEPS = 48, 120


def net() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)])


class Subclass(DDP):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def compiled(_: str) -> dict[str, Any]:
    """A model that is compiled as a whole."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*[Block() for _ in range(5)]))
    model = DDP(torch.compile(module, backend="eager"))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
    names = [name.removeprefix("module.") for name in model.state_dict()]
    return {**outcome(model), "names": names}


def plain(kind: str) -> dict[str, Any]:
    model = {"subclass": Subclass}.get(kind, DDP)(net())
    if kind == "hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        if step % 50 == 0 and dist.get_rank() == 0:  # a sample that rank 0 alone computes
            model.eval()
            with torch.no_grad():
                model.module(torch.ones(1, WIDTH))
            model.train()
        optimizer.zero_grad()
        model(torch.randn(16, WIDTH)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    saved, whole = io.BytesIO(), io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    torch.save(model.module, whole)
    for file in (saved, whole):
        file.seek(0)
    state = torch.load(saved)["model"]
    loaded = torch.load(whole, weights_only=False).state_dict()
    same = [
        isinstance(model, DDP),
        list(state) == [f"module.{name}" for name in loaded],
        all(torch.equal(state[f"module.{name}"], value) for name, value in loaded.items()),
        digest(copy.deepcopy(model.module)) == digest(model),
    ]
    return {**outcome(model), "same": same}


def gan(_: str) -> dict[str, Any]:
    """Two models, two optimizers, which take turns."""
    maker, judge = DDP(net()), DDP(net(), broadcast_buffers=False)
    makes = torch.optim.Adam(maker.parameters(), lr=0.001)
    judges = torch.optim.Adam(judge.parameters(), lr=0.001)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        noise, real = torch.randn(16, WIDTH), torch.randn(16, WIDTH) + 1
        fake = maker(noise)
        judges.zero_grad()
        (judge(real).mean() - judge(fake.detach()).mean()).square().backward()
        judges.step()
        makes.zero_grad()
        judge(fake).square().mean().backward()
        makes.step()
    return outcome(judge, maker)


def outcome(model: nn.Module, *others: nn.Module) -> dict[str, Any]:
    return {"digest": digest(model, *others), "same": [True], "class": type(model).__module__}


def digest(*models: nn.Module) -> str:
    flat = torch.cat([p.detach().flatten() for model in models for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def train(folder: str, *kinds: str) -> None:
    for name in kinds:
        torch.manual_seed(0)
        found = {"gan": gan, "compiled": compiled}.get(name, plain)(name)
        Path(folder, f"{name}-{dist.get_rank()}.json").write_text(json.dumps(found))
    # Models keep Gloo's threads, which abort an interpreter that exits while they release tensors.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(*sys.argv[1:])
