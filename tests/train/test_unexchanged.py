"""Gradients that nobody exchanges are told once, and only these."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from syncline.train.ddp import DistributedDataParallel
from syncline.train.unexchanged import CHECK_EVERY, LEAST_UPDATES
from tests.train.jobs import logged
from tests.train.overlap.overlap_models import CLASSES, Net, loss_of
from tests.workers import WorkerPool

STEPS = (LEAST_UPDATES + 2) * CHECK_EVERY


def sgd(of: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(of.parameters() if isinstance(of, nn.Module) else of, lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def past_the_wrapper(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model)
    with torch.no_grad():
        loss_of(ddp)  # an evaluation through the wrapper prepares nothing
    train(ddp.module, sgd(model))


def thawed(model: nn.Module) -> None:
    model.hidden.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = sgd(model)
    train(ddp, optimizer, 5)
    model.hidden.requires_grad_(True)
    train(ddp, optimizer)


def added(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model)
    model.adapter = nn.Linear(CLASSES, CLASSES)
    model.register_forward_hook(lambda _, __, output: model.adapter(output))
    train(ddp, sgd(model))


def ordinary(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = ddp.overlap(sgd(model))
    with ddp.no_sync():
        loss_of(ddp, 0, 1).backward()
    train(ddp, optimizer)
    # Later a part of the training may go past the wrapper, as for one network of a GAN.
    for step in range(STEPS):
        loss_of(ddp.module, step, 1).backward()
        optimizer.zero_grad()
        train(ddp, optimizer, 1)


def frozen_later(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(STEPS):
        model.hidden.requires_grad_(step % 10 < 5)
        train(ddp, optimizer, 1)


def not_updated(model: nn.Module) -> None:
    model.hidden.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = sgd(p for p in model.parameters() if p.requires_grad)
    model.hidden.requires_grad_(True)  # its gradients are looked at, no more
    train(ddp, optimizer)
    loss_of(model).backward()


def ignored(model: nn.Module) -> None:
    model.hidden.requires_grad_(False)
    ignored = [f"hidden.{name}" for name, _ in model.hidden.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model)
    model.hidden.requires_grad_(True)
    train(ddp, sgd(model))


def copied_by_hand(model: nn.Module) -> None:
    """A teacher that follows the model, and gets no gradient."""
    student = nn.ModuleDict({"student": model, "teacher": Net().requires_grad_(False)})
    student.forward = lambda x: model(x) + 0 * student["teacher"](x).detach()  # type: ignore[method-assign]
    ddp = DistributedDataParallel(student)
    optimizer = sgd(model)
    for _ in range(STEPS):
        train(ddp, optimizer, 1)
        with torch.no_grad():
            for mean, p in zip(student["teacher"].parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)


def by_another_wrapper(model: nn.Module) -> None:
    idle = DistributedDataParallel(model)
    train(TorchDDP(model), sgd(model))
    assert idle.phase == "starting"


def restored(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = sgd(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, LEAST_UPDATES)
    model.load_state_dict(before)
    train(ddp, optimizer)


def several(model: nn.Module) -> None:
    """Two networks take turns, one of them later."""
    generator, critic = DistributedDataParallel(model), DistributedDataParallel(Net())
    optimizers = [sgd(ddp.parameters()) for ddp in (generator, critic)]
    train(generator, optimizers[0])
    for step in range(STEPS):
        train(critic, optimizers[1], 1)
        critic.requires_grad_(False)
        (loss_of(generator, step) + loss_of(critic, step)).backward()
        critic.requires_grad_(True)
        optimizers[0].step()


def said(loops: list[Callable[[nn.Module], None]]) -> list[list[str]]:
    found = []
    for loop in loops:
        torch.manual_seed(1)
        with logged() as records:
            loop(Net())
        texts = [record.getMessage() for record in records]
        found.append([text for text in texts if "exchanges" in text])
    return found


TOLD = {
    past_the_wrapper: "the parameters 3 times, but .* never called.*call the wrapper",
    thawed: r"nothing exchanges \('hidden.weight', 'hidden.bias'\).*wrap the model again after",
    added: r"nothing exchanges \('adapter.weight', 'adapter.bias'\).*or were not there yet",
}
ORDINARY = [
    *(ordinary, frozen_later, not_updated, ignored),
    *(copied_by_hand, by_another_wrapper, restored, several),
]


def test_gradients_that_nobody_exchanges_are_told(workers: WorkerPool) -> None:
    found, others = workers.run(said, 2, list(TOLD))
    for (text,), pattern in zip(found, TOLD.values(), strict=True):
        assert re.search(pattern, text), text
    assert others == [[]] * len(TOLD)  # one rank is enough


def test_ordinary_trainings_are_left_alone(workers: WorkerPool) -> None:
    assert workers.run(said, 2, ORDINARY) == [[[]] * len(ORDINARY)] * 2
