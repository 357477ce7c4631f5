"""Trainings of which gradients are not exchanged, and others that look like them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from syncline.train.ddp import DistributedDataParallel
from syncline.train.unexchanged import CHECK_EVERY, LEAST_UPDATES
from tests.train.overlap.overlap_models import CLASSES, Net, loss_of

STEPS = (LEAST_UPDATES + 2) * CHECK_EVERY


def _past_the_wrapper(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model)
    with torch.no_grad():
        loss_of(ddp)  # an evaluation through the wrapper prepares nothing
    _train(ddp.module, _sgd(model))


def _thawed(model: nn.Module) -> None:
    _frozen(model).requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = _sgd(model)
    _train(ddp, optimizer, 5)
    _frozen(model).requires_grad_(True)
    _train(ddp, optimizer)


def _added(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model)
    model.adapter = nn.Linear(CLASSES, CLASSES)
    model.register_forward_hook(lambda _, __, output: model.adapter(output))
    _train(ddp, _sgd(model))


def _ordinary(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = ddp.overlap(_sgd(model))
    with ddp.no_sync():
        loss_of(ddp, 0, 1).backward()
    _train(ddp, optimizer)
    # Later a part of the training may go past the wrapper, as for one network of a GAN.
    for step in range(STEPS):
        loss_of(ddp.module, step, 1).backward()
        optimizer.zero_grad()
        _train(ddp, optimizer, 1)


def _frozen_later(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = _sgd(model)
    for step in range(STEPS):
        _frozen(model).requires_grad_(step % 10 < 5)
        _train(ddp, optimizer, 1)


def _not_updated(model: nn.Module) -> None:
    _frozen(model).requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = _sgd(p for p in model.parameters() if p.requires_grad)
    _frozen(model).requires_grad_(True)  # its gradients are looked at, no more
    _train(ddp, optimizer)
    loss_of(model).backward()


def _ignored(model: nn.Module) -> None:
    _frozen(model).requires_grad_(False)
    ignored = [f"hidden.{name}" for name, _ in _frozen(model).named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model)
    _frozen(model).requires_grad_(True)
    _train(ddp, _sgd(model))


def _copied_by_hand(model: nn.Module) -> None:
    """A teacher that follows the model, and gets no gradient."""
    student = nn.ModuleDict({"student": model, "teacher": Net().requires_grad_(False)})
    student.forward = lambda x: model(x) + 0 * student["teacher"](x).detach()  # type: ignore[method-assign]
    ddp = DistributedDataParallel(student)
    optimizer = _sgd(model)
    for _ in range(STEPS):
        _train(ddp, optimizer, 1)
        with torch.no_grad():
            for mean, p in zip(student["teacher"].parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)


def _by_another_wrapper(model: nn.Module) -> None:
    idle = DistributedDataParallel(model)
    _train(TorchDDP(model), _sgd(model))
    assert idle.phase == "starting"


def _restored(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = _sgd(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _train(model, optimizer, LEAST_UPDATES)
    model.load_state_dict(before)
    _train(ddp, optimizer)


def _several(model: nn.Module) -> None:
    """Two networks take turns, one of them later."""
    generator, critic = DistributedDataParallel(model), DistributedDataParallel(Net())
    optimizers = [_sgd(ddp.parameters()) for ddp in (generator, critic)]
    _train(generator, optimizers[0])
    for step in range(STEPS):
        _train(critic, optimizers[1], 1)
        critic.requires_grad_(False)
        (loss_of(generator, step) + loss_of(critic, step)).backward()
        critic.requires_grad_(True)
        optimizers[0].step()


LOOPS: dict[str, Callable[[nn.Module], None]] = {
    "past the wrapper": _past_the_wrapper,
    "thawed": _thawed,
    "added": _added,
    "ordinary": _ordinary,
    "frozen later": _frozen_later,
    "not updated": _not_updated,
    "ignored": _ignored,
    "copied by hand": _copied_by_hand,
    "another wrapper": _by_another_wrapper,
    "restored": _restored,
    "several": _several,
}


def said(kinds: list[str]) -> dict[str, Any]:
    """Return by loop what was said while it ran."""
    found = {}
    for kind in kinds:
        torch.manual_seed(1)
        handler = _Kept()
        logging.getLogger("syncline").addHandler(handler)
        try:
            LOOPS[kind](Net())
        finally:
            logging.getLogger("syncline").removeHandler(handler)
        found[kind] = handler.said
    return found


def _frozen(model: nn.Module) -> nn.Module:
    hidden = model.hidden
    assert isinstance(hidden, nn.Module)
    return hidden


def _sgd(of: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(of.parameters() if isinstance(of, nn.Module) else of, lr=0.01)


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if dist.get_rank() == 0 and "exchanges" in text:
            self.said.append(text)
