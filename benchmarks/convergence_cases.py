"""What is trained for the convergence of gTop-k, and how: models, data, densities, recipes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from torch import nn

from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.models.language import LstmLanguageModel, TransformerLanguageModel
from syncline.lab.training.models.vision import ResNet20, Vgg16
from syncline.lab.training.task import ImageTask, Task, TextTask, task_of
from syncline.plan.recipe import PAPER_WARMUP, Recipe

__all__ = [
    "CASES",
    "VARIANTS",
    "VARIED",
    "VARIED_DENSITY",
    "VARIED_EPOCHS",
    "WORKERS",
    "Case",
    "Cut",
    "config_of",
    "recipe_of",
    "told",
    "training_of",
]

WORKERS = 4

BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "resnet20": ResNet20,
    "vgg16": Vgg16,
    "lstm": LstmLanguageModel,
    "transformer": TransformerLanguageModel,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The beginning of a text, in short windows, so that steps are cheap and there can be many."""

    tokens: int | None = None
    """Of the training text; None: all."""
    window: int
    """Tokens a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on data, and what is varied."""

    model: str
    data: str
    densities: tuple[float, ...]
    ahead: tuple[float, ...] = ()
    """Densities that are trained stepping ahead too."""
    hyper: dict[str, float | str] = field(default_factory=dict)
    warmup_epochs: float = 1.0
    """Of each density of the warm-up."""
    size: dict[str, float] = field(default_factory=dict)
    """Arguments of the model, for a smaller one than the usual."""
    cut: Cut | None = None
    """Of texts; None for images."""


CASES = {
    "resnet20": Case(
        model="resnet20",
        data="digits",
        densities=(0.01, 0.001, 0.0005),
        ahead=(0.01, 0.001),
        hyper={"epochs": 20, "batch_size": 8},
    ),
    "lstm": Case(
        model="lstm",
        data="text",
        densities=(0.01, 0.005, 0.001),
        ahead=(0.001,),
        hyper={
            "epochs": 30,
            "batch_size": 4,
            "learning_rate": 1.5,
            "clip_norm": 1.0,
            "warmup_epochs": 1,
        },
        size={"hidden": 128, "dropout": 0.3},
        cut=Cut(tokens=40_000, window=16),
    ),
    "transformer": Case(
        model="transformer",
        data="text",
        densities=(0.01, 0.001),
        ahead=(0.01, 0.001),
        hyper={
            "epochs": 24,
            "batch_size": 4,
            "learning_rate": 0.2,
            "clip_norm": 1.0,
            "warmup_epochs": 1,
        },
        size={"width": 128, "layers": 2, "dropout": 0.1},
        cut=Cut(tokens=40_000, window=16),
    ),
    "transformer on all text": Case(
        model="transformer",
        data="text",
        densities=(0.001,),
        ahead=(0.01, 0.001),
        hyper={
            "epochs": 4,
            "batch_size": 4,
            "learning_rate": 0.1,
            "clip_norm": 1.0,
            "warmup_epochs": 0.1,
        },
        warmup_epochs=0.1,
        size={"width": 128, "layers": 2, "dropout": 0.1},
        cut=Cut(window=16),
    ),
    "vgg16": Case(
        model="vgg16",
        data="digits",
        densities=(0.01, 0.001),
        ahead=(0.01, 0.001),
        hyper={"epochs": 24, "batch_size": 4, "learning_rate": 0.02, "warmup_epochs": 1},
        size={"width": 0.5},
    ),
}
"""Trainings that end in minutes on two cores."""


VARIED, VARIED_DENSITY, VARIED_EPOCHS = "lstm", 0.01, 8
"""What of the recipe matters is looked at in a training so short that it shows."""

SMALL_ELEMENTS = 1024

VARIANTS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "momentum correction": {},
    "and factor masking": {"factor_masking": True},
    "the optimizer's momentum": {"momentum": 0.0},
    "and small tensors dense": {"momentum": 0.0, "dense_below_elements": SMALL_ELEMENTS},
    "and unit=layer": {"momentum": 0.0, "unit": "layer"},
    "and unit=layer, small tensors dense": {
        "momentum": 0.0,
        "unit": "layer",
        "dense_below_elements": SMALL_ELEMENTS,
    },
}
"""Changes of the recipe."""


def told(name: str) -> dict[str, Any]:
    """Return a case as it is written down, so that results of another are known as such."""
    case = CASES[name]
    return {
        "data": case.data,
        "densities_warm_up": list(PAPER_WARMUP),
        "warmup_epochs_each": case.warmup_epochs,
        "size": case.size,
        "cut": None if case.cut is None else asdict(case.cut),
        "hyper": msgspec.to_builtins(config_of(name, 0).hyper),
    }


def config_of(name: str, seed: int, epochs: int | None = None) -> TrainingConfig:
    """Return how a case is trained without compression, for so many epochs or its own."""
    case = CASES[name]
    hyper = dict(case.hyper) if epochs is None else case.hyper | {"epochs": epochs}
    return TrainingConfig.of(
        case.model, case.data, workers=WORKERS, seed=seed, device="cpu", overrides=hyper
    )


def training_of(name: str, config: TrainingConfig) -> Task:
    """Return the model and its data."""
    task, case = task_of(config), CASES[name]
    build = partial(BUILDERS[case.model], **case.size)
    if isinstance(task, ImageTask):
        return replace(task, model=replace(task.model, build=lambda _, classes: build(classes)))
    assert isinstance(task, TextTask)
    assert case.cut is not None
    return replace(
        task,
        model=replace(task.model, build=build, window=case.cut.window),
        data=replace(task.data, train=task.data.train[: case.cut.tokens]),
    )


def recipe_of(
    name: str, config: TrainingConfig, steps_per_epoch: int, density: float, **changes: Any
) -> Recipe:
    """Return how a density is trained: what is higher of the paper's warm-up, then the density."""
    usual = {
        "warmup": tuple(d for d in PAPER_WARMUP if d > density),
        "warmup_steps": max(round(CASES[name].warmup_epochs * steps_per_epoch), 1),
        "momentum": config.hyper.momentum,
        "clip_norm": config.hyper.clip_norm,
        "unit": "model",
    }
    return Recipe(density=density, **(usual | changes))
