"""Hyper-parameters, and the defaults of each model."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

import msgspec

from syncline.errors import UserError, require_known
from syncline.plan.document import Value, described
from syncline.plan.quantities import require_count

ScheduleName = Literal["constant", "step", "cosine"]

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class Hyperparameters(Value, frozen=True):
    """Settings of the optimizer, SGD with momentum; a description is the help of an option.

    Raises:
        UserError: on construction, if a value is out of its range.
    """

    epochs: Annotated[int, described("Passes over the data.")]
    batch_size: Annotated[int, described("Samples a worker in one forward pass.")]
    """For text, rows."""
    learning_rate: Annotated[float, described("Highest learning rate.")]
    """It is not scaled with the worker count."""
    momentum: Annotated[float, described("Momentum of SGD.")] = 0.9
    weight_decay: Annotated[float, described("Weight decay of SGD.")] = 0.0
    schedule: Annotated[
        ScheduleName, described("Learning rate over time: constant, step or cosine.")
    ] = "cosine"
    """See :func:`syncline.lab.training.replica.learning_rate_factor`."""
    warmup_epochs: Annotated[float, described("Epochs over which the learning rate rises.")] = 0.0
    clip_norm: Annotated[float | None, described("Largest norm of the gradients.")] = None

    def __post_init__(self) -> None:
        require_count("--epochs", self.epochs)
        require_count("--batch-size", self.batch_size)
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise UserError(f"--lr must be a number above 0, found {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise UserError(f"--momentum must be at least 0 and below 1, found {self.momentum}")
        for name, number in (
            ("--weight-decay", self.weight_decay),
            ("--warmup-epochs", self.warmup_epochs),
        ):
            if not (math.isfinite(number) and number >= 0):
                raise UserError(f"{name} must be a number of at least 0, found {number}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"--clip-norm must be above 0, found {self.clip_norm}")
        require_known("schedule", self.schedule, SCHEDULES)


_IMAGENET = Hyperparameters(
    epochs=90, batch_size=64, learning_rate=0.1, weight_decay=1e-4, schedule="step", warmup_epochs=5
)

_DEFAULTS: dict[str, Hyperparameters] = {
    # gTop-k, Table V: 140 epochs, 128 samples over all workers, learning rate 0.1.
    "resnet20": Hyperparameters(
        epochs=140, batch_size=64, learning_rate=0.1, weight_decay=1e-4, schedule="step"
    ),
    "vgg16": Hyperparameters(
        epochs=140, batch_size=64, learning_rate=0.05, weight_decay=5e-4, warmup_epochs=1
    ),
    # Without batch norm a learning rate of 0.1 diverges; 0.01 is that of gTop-k, Table V.
    "alexnet": msgspec.structs.replace(_IMAGENET, learning_rate=0.01, weight_decay=5e-4),
    "googlenet": msgspec.structs.replace(_IMAGENET, learning_rate=0.01, weight_decay=2e-4),
    "resnet50": _IMAGENET,
    "lstm": Hyperparameters(
        epochs=40, batch_size=20, learning_rate=1.0, clip_norm=0.25, warmup_epochs=0.5
    ),
    "transformer": Hyperparameters(
        epochs=20, batch_size=16, learning_rate=0.1, clip_norm=1.0, warmup_epochs=0.5
    ),
}

_DEFAULTS_ON_DATA: dict[tuple[str, str], Hyperparameters] = {
    ("resnet20", "digits"): Hyperparameters(
        epochs=15, batch_size=16, learning_rate=0.1, weight_decay=5e-4, warmup_epochs=1
    ),
    ("lstm", "text"): Hyperparameters(
        epochs=8, batch_size=20, learning_rate=4.0, clip_norm=0.25, warmup_epochs=0.5
    ),
    ("transformer", "text"): Hyperparameters(
        epochs=5, batch_size=16, learning_rate=0.2, clip_norm=1.0, warmup_epochs=0.5
    ),
}
"""Replacements for the above on a certain data set."""


def default_hyperparameters(model: str, data: str) -> Hyperparameters:
    """Return the hyper-parameters that ``model`` is trained with on ``data`` by default."""
    return _DEFAULTS_ON_DATA.get((model, data), _DEFAULTS[model])
