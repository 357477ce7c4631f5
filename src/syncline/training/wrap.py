"""Putting a model under what exchanges its gradients, as the options say."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from syncline.devices import CudaDevice, DeviceGroup
from syncline.errors import UserError
from syncline.groups import Group
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.planners import planner_named
from syncline.planners.base import MergingPlanner
from syncline.torch_private import default_store
from syncline.training.config import COLLECTIVES, TrainingConfig
from syncline.training.group import Worker

if TYPE_CHECKING:
    from syncline.parallel.bsp import BspSgd
    from syncline.parallel.ddp import DistributedDataParallel


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
    joined: Group | DeviceGroup = group
    if worker.device.type == "cuda":
        joined = DeviceGroup(group, CudaDevice(worker.device))
    yield joined
    # Not after an error: the process ends anyway, and others learn of it by that.
    worker.barrier()
    joined.close()


def merging_planner(config: TrainingConfig) -> MergingPlanner | None:
    """Return the planner of ``--strategy bsp-2``, or None for the algorithm as published.

    Raises:
        UserError: it is unknown, or does not merge whole gradients.
    """
    planner = planner_named(config.planner)
    if config.strategy != "bsp-2" or config.planner == "auto":
        return None
    if not isinstance(planner, MergingPlanner):
        raise UserError(
            f"--strategy bsp-2 pushes merged gradients in the order in which they become ready, "
            f"and --planner {config.planner} plans more than that; take merge, mgwfbp, wfbp, "
            "buckets, ddp or single"
        )
    return planner


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
    from syncline.parallel.bsp import BspSgd
    from syncline.parallel.ddp import DistributedDataParallel

    if group is not None:
        return BspSgd(
            module,
            optimizer,
            group,
            algorithm=int(config.strategy.removeprefix("bsp-")),
            collectives=COLLECTIVES[config.collectives or "auto"],
            planner=merging_planner(config),
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
