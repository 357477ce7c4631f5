"""A configuration that can be made can be run: everything else is refused with a reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from syncline.errors import UserError
from syncline.lab.training.config import TrainingConfig, default_hyperparameters
from syncline.lab.training.data import DATA
from syncline.lab.training.models import MODELS
from syncline.plan.recipe import Recipe


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("data", DATA)
def test_every_model_has_hyperparameters_on_every_data_set(model: str, data: str) -> None:
    assert default_hyperparameters(model, data).epochs >= 1


def test_what_is_not_given_is_the_default_of_the_model() -> None:
    config = TrainingConfig.of(
        "resnet20", "digits", overrides={"epochs": 3, "momentum": None, "clip_norm": 2.0}
    )
    default = default_hyperparameters("resnet20", "digits")
    assert config.hyper == msgspec.structs.replace(default, epochs=3, clip_norm=2.0)
    assert config.report == "runs/resnet20-digits"
    sparse: dict[str, Any] = {"compression": "gtopk", "density": 0.02}
    config = TrainingConfig.of("resnet20", "digits", **sparse)
    assert config.device == "cpu"
    assert config.recipe(7) == Recipe(density=0.02, dense_below_elements=1024)
    config = TrainingConfig.of("resnet20", "digits", **sparse, density_warmup=(0.25,))
    warm = {"warmup": (0.25,), "warmup_steps": 7, "dense_below_elements": 1024}
    assert config.recipe(7) == Recipe(density=0.02, **warm)
    assert TrainingConfig.of("lstm", "text", report="elsewhere").report == "elsewhere"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "--workers must be at least 1, found 0"),
        ({"accumulate": 0}, "--accumulate must be at least 1"),
        ({"block_steps": 0}, "--block-steps must be at least 1"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"seed": -1}, "--seed must not be negative"),
        ({"timeout_s": float("nan")}, "--timeout must be above 0"),
        ({"resume": True}, "--resume continues a checkpoint; name its folder"),
        ({"plan": "p", "network": "n"}, "--plan leaves nothing to plan: drop it, or --network"),
        ({"plan": "p", "profile": "n"}, "--plan leaves nothing to plan: drop it, or --profile"),
        ({"plan": "p", "planner": "merge"}, "--planner merge would make another"),
        ({"plan": "p", "cache": "c"}, "--cache remembers what was tried, and with --plan nothing"),
        ({"check": False, "cache": "c"}, "and with --no-check nothing is"),
        ({"precision": "fp16"}, "unknown precision 'fp16'; did you mean 'bf16'"),
        ({"device": "gpu"}, "unknown device 'gpu'; did you mean 'cpu'"),
        ({"overrides": {"epochs": 0}}, "--epochs must be at least 1"),
        ({"overrides": {"batch_size": -1}}, "--batch-size must be at least 1"),
        ({"overrides": {"learning_rate": float("nan")}}, "--lr must be finite and above 0"),
        ({"overrides": {"momentum": 1.0}}, "--momentum must be at least 0 and below 1"),
        ({"overrides": {"weight_decay": -0.1}}, "--weight-decay must be finite and at least 0"),
        ({"overrides": {"warmup_epochs": float("inf")}}, "--warmup-epochs must be finite"),
        ({"overrides": {"clip_norm": 0.0}}, "--clip-norm must be above 0"),
        ({"overrides": {"schedule": "cos"}}, "unknown schedule 'cos'; did you mean 'cosine'"),
        ({"planner": "murge"}, "unknown planner 'murge'; did you mean 'merge'"),
        ({"density": 0.1}, "--density is for sparse exchange"),
        ({"density_warmup": (0.1,)}, "--density-warmup is for sparse exchange"),
        ({"compression": "gtop"}, "unknown compression 'gtop'; did you mean 'gtopk'?"),
        ({"compression": "gtopk"}, "--compression gtopk needs --density"),
        ({"compression": "gtopk", "density": 0.0}, "a density is above 0 and at most 1, found 0"),
        ({"compression": "topk", "density": 0.1, "density_warmup": (2.0,)}, "found 2.0"),
        ({"compression": "fp16", "density": 0.1}, "sends every element, so there is no density"),
        ({"compression": "fp16", "dense_below": 0}, "sends every element, so there is no density"),
        ({"dense_below": 64}, "--dense-below is for sparse exchange"),
        ({"step_ahead": True}, "--step-ahead is for sparse exchange"),
        ({"compression": "bf16", "step_ahead": True}, "sends every element, so there is no dens"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TrainingConfig.of("resnet20", "digits", **options)
    assert message in str(caught.value)
