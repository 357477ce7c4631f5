"""The learning rate over a training."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from syncline.training.hyperparameters import Hyperparameters

__all__ = ["learning_rate_factor", "scheduler"]

DROPS = (0.5, 0.75)
"""Parts of the training after which the step schedule divides the learning rate by ten.

Source: He et al., section 4.2: after 32 and 48 of 64 thousand iterations.
"""


def learning_rate_factor(step: int, steps_per_epoch: int, hyper: Hyperparameters) -> float:
    """Return what the learning rate is multiplied with at a step.

    It rises linearly over the warm-up. From there on ``constant`` keeps it, ``step`` divides it by
    ten after half and after three quarters of the training, and ``cosine`` lets it fall to 0 along
    half a period.

    Args:
        step: optimizer steps done before.
        steps_per_epoch: optimizer steps an epoch.
        hyper: gives the schedule, the warm-up and the epochs.
    """
    warmup_steps = hyper.warmup_epochs * steps_per_epoch
    if step + 1 < warmup_steps:
        return (step + 1) / warmup_steps
    total_steps = hyper.epochs * steps_per_epoch
    if hyper.schedule == "step":
        return 0.1 ** sum(step >= drop * total_steps for drop in DROPS)
    if hyper.schedule == "cosine":
        part = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
        return 0.5 * (1 + math.cos(math.pi * min(max(part, 0.0), 1.0)))
    return 1.0


def scheduler(optimizer: Optimizer, steps_per_epoch: int, hyper: Hyperparameters) -> LambdaLR:
    """Return the scheduler that applies :func:`learning_rate_factor`, stepped every step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps_per_epoch, hyper))
