"""Putting a model under Syncline's DistributedDataParallel, as the options say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.training.config import TrainingConfig
from syncline.training.group import Worker

if TYPE_CHECKING:
    from syncline.parallel.ddp import DistributedDataParallel

__all__ = ["syncline_ddp"]


def syncline_ddp(
    module: nn.Module, config: TrainingConfig, worker: Worker
) -> DistributedDataParallel:
    """Return ``module`` wrapped, with the plan, profile and network that ``config`` names.

    Raises:
        FileError: one of them cannot be read.
        MismatchError: one of them is for another model or worker count.
    """
    from syncline.parallel.ddp import DistributedDataParallel

    return DistributedDataParallel(
        module,
        planner=config.planner,
        plan=None if config.plan is None else Plan.load(config.plan),
        profile=None if config.profile is None else Profile.load(config.profile),
        network=None if config.network is None else Network.load(config.network),
        device_ids=worker.device_ids,
    )
