"""Putting a model under what exchanges its gradients, as the options say."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from syncline.devices import CudaDevice, DeviceGroup
from syncline.groups import Group
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.parallel.bsp import BspSgd
from syncline.parallel.ddp import DistributedDataParallel
from syncline.torch_private import default_store
from syncline.training.config import COLLECTIVES, TrainingConfig
from syncline.training.group import Worker


def sgd(module: nn.Module, config: TrainingConfig) -> SGD:
    """Return the optimizer of a module."""
    return SGD(
        module.parameters(),
        lr=config.hyper.learning_rate,
        momentum=config.hyper.momentum,
        weight_decay=config.hyper.weight_decay,
    )


@contextmanager
def bsp_group(config: TrainingConfig, worker: Worker) -> Iterator[Group | DeviceGroup | None]:
    """Join the workers in a group for a BSP strategy, and leave it at the end; None for others.

    Raises:
        PeerError: a worker does not come within the timeout.
        UserError: the workers have GPUs, and are on several hosts or cannot share their memory.
    """
    if config.strategy == "ddp":
        yield None
        return
    # The store may have seen a group of another training.
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    store = default_store()
    group = Group(store, worker.rank, worker.workers, name=name[0], timeout_s=config.timeout_s)
    on_gpu = worker.device.type == "cuda"
    joined = DeviceGroup(group, CudaDevice(worker.device)) if on_gpu else group
    yield joined
    # Not after an error: the process ends anyway, and others learn of it by that.
    worker.barrier()
    joined.close()


def wrapped(
    module: nn.Module,
    optimizer: SGD,
    config: TrainingConfig,
    worker: Worker,
    group: Group | DeviceGroup | None,
    *,
    steps_per_epoch: int,
) -> DistributedDataParallel | BspSgd:
    """Return ``module`` under the strategy that ``config`` names.

    ``group`` is that of a BSP strategy; the warm-up of a density goes by ``steps_per_epoch``.

    Raises:
        FileError: a plan, profile or network cannot be read.
        MismatchError: one of them is for another model or worker count.
    """
    if group is not None:
        return BspSgd(
            module,
            optimizer,
            group,
            algorithm=int(config.strategy.removeprefix("bsp-")),
            collectives=COLLECTIVES[config.collectives or "auto"],
            planner=config.merging_planner(),
        )
    return DistributedDataParallel(
        module,
        planner=config.planner,
        plan=None if config.plan is None else Plan.load(config.plan),
        profile=None if config.profile is None else Profile.load(config.profile),
        network=None if config.network is None else Network.load(config.network),
        check=config.check,
        compression=config.recipe(steps_per_epoch),
        device_ids=worker.device_ids,
    )
