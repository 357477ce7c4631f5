"""What the workers of the tests of sharded optimizers run."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from syncline.errors import FileError, UserError
from syncline.train.ddp import DistributedDataParallel, planned_training
from tests.train.overlap.overlap_models import FEATURES, Net, loss_of
from tests.train.overlap.overlap_plans import Style, plan_of, ready_order
from tests.train.overlap.own_optimizers import Custom

STEPS = 8
MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def model_and_optimizer(
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    shard: bool,
    style: Style | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = Net()
    arguments: dict[str, Any] = {"cache": False}
    if style is not None:
        order = ready_order(module, lambda net: loss_of(net, 0))
        module.to(dtype)
        arguments |= {"plan": plan_of(module, order, dist.get_world_size(), style), "check": False}
    model = DistributedDataParallel(module, **arguments)
    optimizer = make(module.parameters())
    model.overlap(optimizer, shard=shard)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on data that does not depend on the number of ranks."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, FEATURES, generator=generator)
        optimizer.zero_grad()
        model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def trained(
    name: str,
    shard: bool,
    style: Style | None,
    start: bytes,
    begin: int,
    steps: int,
    folders: tuple[str, str] = ("", ""),
) -> dict[str, Any]:
    """Train from a checkpoint on; return the next one from rank 0, and what each rank keeps.

    ``folders``: of checkpoints in parts, to load the optimizer from and to save it to.
    """
    model, optimizer = model_and_optimizer(MAKERS[name], shard=shard, style=style)
    if start:
        loaded = torch.load(io.BytesIO(start), weights_only=True)
        model.module.load_state_dict(loaded["model"])
        if folders[0]:
            model.load_sharded_state_dict(optimizer, folders[0])
        else:
            optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, range(begin, begin + steps))
    state = model.full_state_dict(optimizer) if shard else optimizer.state_dict()
    if folders[1]:
        dcp.save({"optimizer": model.sharded_state_dict(optimizer)}, checkpoint_id=folders[1])
    kept = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    parameters = [p.detach().clone() for p in model.parameters()]
    planned_training(model).reducer.executor.stop()
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "optimizer": state}, file)
    return {
        "checkpoint": file.getvalue(),
        "parameters": parameters,
        "elements": sum(v.numel() for v in kept if v.ndim),
        "whole": 2 * sum(p.numel() for p in parameters),
    }


class MasterWeights(Custom):
    """Updates parameters in 16 bits by copies and momentum in float32."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["master"], state["momentum"] = p.float(), torch.zeros_like(p).float()
        state["momentum"].mul_(0.9).add_(p.grad.float())
        p.copy_(state["master"].sub_(state["momentum"].mul(group["lr"])))


def in_16_bits(style: Style) -> tuple[list[str], list[int]]:
    """Train parameters in bfloat16 with state in float32, in shards and whole.

    Return what differs by more than a last bit, and the bytes of state on this rank in each.
    """
    states, parameters, kept = [], [], []
    for shard in (True, False):
        how: dict[str, Any] = {"shard": shard, "style": style, "dtype": torch.bfloat16}
        model, optimizer = model_and_optimizer(partial(MasterWeights, lr=0.01), **how)
        train(model, optimizer, range(STEPS))
        kept.append(sum(v.nbytes for s in optimizer.state.values() for v in s.values()))
        states.append(model.full_state_dict(optimizer) if shard else optimizer.state_dict())
        parameters.append(copy.deepcopy(model.module.state_dict()))
        planned_training(model).reducer.executor.stop()
    differing = [
        name
        for name, value in parameters[1].items()
        if not torch.allclose(parameters[0][name], value, rtol=2**-8, atol=0)
    ]
    for key, state in states[1]["state"].items() if dist.get_rank() == 0 else ():
        for name, value in state.items():
            found = states[0]["state"][key][name]
            if found.dtype != value.dtype or not torch.allclose(found, value, rtol=1e-5, atol=1e-7):
                differing.append(f"{name} of {key}")
    return differing, kept


def refusals(folder: str) -> None:
    def refused(part: str, action: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with pytest.raises((FileError, UserError), match=re.escape(part)):
            action(*args, **kwargs)

    net = Net()
    model = DistributedDataParallel(net, cache=False)
    adafactor = torch.optim.Adafactor(net.parameters())
    refused("Adafactor cannot be sharded", model.overlap, adafactor, shard=True)
    optimizer = torch.optim.AdamW(net.parameters())
    refused("full_state_dict is for optimizers", model.full_state_dict, optimizer)
    refused("(optimizer, shard=True) before", model.sharded_state_dict, optimizer)
    model.overlap(optimizer, shard=True)
    refused("call model.full_state_dict(optimizer)", optimizer.state_dict)
    load = model.load_sharded_state_dict
    refused("no checkpoint can be read", load, optimizer, folder + "/none")
    dcp.save({"optimizer": model.sharded_state_dict(optimizer)}, checkpoint_id=folder)
    refused("no sharded optimizer under 'other'", load, optimizer, folder, key="other")
    refused("called twice", model.overlap, optimizer, shard=True)
    other = torch.optim.SGD(net.parameters())
    refused("all optimizers of a model are sharded, or none", model.overlap, other)
    sparse = nn.Embedding(2, 2, sparse=True)
    unplanned, adamw = DistributedDataParallel(sparse, cache=False), torch.optim.AdamW
    refused("are sparse", unplanned.overlap, adamw(sparse.parameters()), shard=True)


def measured_and_planned(steps: int) -> dict[str, Any]:
    """Train as a user does, from measuring to trials, with clipping; say which stages ran."""
    torch.manual_seed(1)
    twin = Net(64)
    model = DistributedDataParallel(copy.deepcopy(twin), cache=False)
    sides = (model, torch.nn.parallel.DistributedDataParallel(twin))
    optimizers = [torch.optim.AdamW(side.parameters(), lr=1e-3) for side in sides]
    model.overlap(optimizers[0], shard=True)
    stages: dict[str, bool] = {}
    for step in range(steps):
        for side, optimizer in zip(sides, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(side, step).backward()
            nn.utils.clip_grad_norm_(side.parameters(), 0.5)
            optimizer.step()
        plan = planned_training(model).stage.plan
        stages[planned_training(model).stage.name] = plan is not None and plan.sharded
    differences = [
        float((a - b).detach().abs().max() / b.detach().abs().max())
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    ]
    profile = planned_training(model).findings.profile
    planned_training(model).reducer.executor.stop()
    return {
        "stages": stages,
        "difference": max(differences),
        "parameters": [p.detach().clone() for p in model.parameters()],
        "sharded profile": profile is not None and profile.sharded,
        "update": profile is not None and profile.phase_s("update") > 0,
    }
