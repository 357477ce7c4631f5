"""Trainings that are started again, in one process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.train.ddp import DistributedDataParallel
from syncline.train.log import logger
from tests.train.jobs import OPTIMIZERS, SLOW, batch, measured_as, planned_is_faster, train
from tests.train.models import Plain

MOST_STEPS = 300


def start(cache: Any, model: nn.Module | None = None, **asked: Any) -> dict[str, Any]:
    """Train until measuring is over; say what was gone through and found."""
    overlaps = asked.pop("overlaps", True)
    samples = asked.pop("samples", 6)
    model = DistributedDataParallel(model or Plain(), network=SLOW, cache=cache, **asked)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    if overlaps:
        model.overlap(optimizer)
    phases = [model.phase]
    with measured_as(planned_is_faster):
        for step in range(MOST_STEPS):
            if samples == len(batch(0)[0]):
                train(model, optimizer, 1, first=step)
            else:
                optimizer.zero_grad()
                model(torch.cat([batch(step)[0]] * 2)[:samples]).square().mean().backward()
                optimizer.step()
            if model.phase != phases[-1]:
                phases.append(model.phase)
            if not model.measuring:
                break
    run = model.run_record()
    return {
        "phases": phases,
        "decision": run.decision,
        "predicted_s": run.predicted_planned_s,
        "plan": None if model.plan is None else model.plan.to_json(),
        "profiled": model.profile is not None,
    }


def starts_twice(folder: str) -> list[dict[str, Any]]:
    """Start the same training twice."""
    return [start(folder) for _ in range(2)]


def starts_twice_with_a_folder_each(folder: str) -> list[dict[str, Any]]:
    """The same, where every rank has a folder of its own."""
    return starts_twice(str(Path(folder, str(dist.get_rank()))))


class Wider(Plain):
    """Another model."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.more(torch.ones(3)).sum()


def starts_another(folder: str, other: str) -> list[dict[str, Any]]:
    """Start a training, and then another one that differs in one thing."""
    if other == "nothing kept":
        return [start(False), start(folder)]
    first = start(folder)
    differing: dict[str, dict[str, Any]] = {
        "model": {"model": Wider()},
        "batch": {"samples": 4},
        "planner": {"planner": "merge"},
        "optimizer": {"overlaps": False},
    }
    return [first, start(folder, **differing[other])]


def starts_once(folder: str) -> tuple[list[str], list[tuple[int, str]]]:
    """Start once; return the phases, and what was logged."""
    said: list[tuple[int, str]] = []
    keep = logging.Handler()
    keep.emit = lambda record: said.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger.addHandler(keep)
    try:
        return start(folder)["phases"], said
    finally:
        logger.removeHandler(keep)
