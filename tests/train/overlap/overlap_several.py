"""Scripts with several models, optimizers and parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.train.overlap.loop import ADAM, MOMENTUM, REFUSED, Loop, no_shards, refused
from tests.train.overlap.overlap_models import FEATURES, Net, batch, loss_of
from tests.train.overlap.overlap_rig import SYNCHRONIZES, Side


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, FEATURES))


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def noise(step: int) -> torch.Tensor:
    return batch(step, 5)[0][:, :6]


def gan(side: Side, *, freeze: bool = False, both: bool = True) -> None:
    wrap = partial(side.wrap, find_unused_parameters=freeze)
    maker = wrap(generator(), lambda m: m(noise(0)).square().sum())
    judge = wrap(discriminator(), lambda m: m(batch(0)[0]).square().sum())
    making = side.overlap(maker, ADAM(maker.parameters()))
    judging: Any = ADAM(judge.parameters())
    judging = side.overlap(judge, judging) if both else judging
    ones, zeros = torch.ones(4, 1), torch.zeros(4, 1)
    for step in side.steps:
        if freeze:
            judge.requires_grad_(True)
        judging.zero_grad()
        real = binary_cross_entropy_with_logits(judge(batch(step)[0]), ones)
        real.backward()
        fake = binary_cross_entropy_with_logits(judge(maker(noise(step)).detach()), zeros)
        fake.backward()
        judging.step()
        if freeze:
            judge.requires_grad_(False)
        making.zero_grad()
        loss = binary_cross_entropy_with_logits(judge(maker(noise(step))), ones)
        loss.backward()
        making.step()
        side.note("losses", real, fake, loss)
    side.finish(maker, making)
    side.finish(judge, judging)


def over_two(side: Side, *, both: bool) -> None:
    first, second = side.wrap(Net(), loss_of), side.wrap(Net(), loss_of)
    optimizer = side.overlap(first, ADAM([*first.parameters(), *second.parameters()]))
    optimizer = side.overlap(second, optimizer) if both else optimizer
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(first, step) + loss_of(second, step + 1)
        loss.backward()
        optimizer.step()
        side.note("loss", loss)
    side.finish(first, optimizer)
    side.finish(second)


def last_part(parameters: Any) -> list[nn.Parameter]:
    return list(parameters)[3:]


def two(side: Side, *, both: bool = True, last: bool = False, same: bool = False) -> None:
    """Train by two optimizers: both overlapped or one, which is stepped first or last."""
    ddp = side.wrap(Net(), loss_of)
    parameters = list(ddp.parameters())
    one = side.overlap(ddp, MOMENTUM(parameters if same else parameters[:3]))
    other: Any = ADAM(parameters if same else parameters[3:])
    other = side.overlap(ddp, other) if both else other
    for step in side.steps:
        ddp.zero_grad(set_to_none=step % 2 == 0)
        loss_of(ddp, step).backward()
        for optimizer in (other, one) if last else (one, other):
            optimizer.step()
    side.finish(ddp, one, other)


def two_in_turns(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    first, second = list(ddp.parameters())[:3], last_part(ddp.parameters())
    optimizers = [side.overlap(ddp, MOMENTUM(first)), side.overlap(ddp, ADAM(second))]
    for step in side.steps:
        loss_of(ddp, step).backward()
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad()
    side.finish(ddp, *optimizers)


def partly_frozen() -> nn.Module:
    net = Net()
    net.hidden.requires_grad_(False)
    return net


class Pair(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def shared(side: Side) -> None:
    body = Net()
    models = [side.wrap(Pair(body), loss_of) for _ in range(2)]
    optimizers = [side.overlap(m, MOMENTUM(m.parameters())) for m in models]
    for step in side.steps:
        which = step // 2 % 2
        optimizers[which].zero_grad()
        loss = loss_of(models[which], step)
        loss.backward()
        optimizers[which].step()
        side.note("loss", loss)
    for model, optimizer in zip(models, optimizers, strict=True):
        side.finish(model, optimizer)


def nested(side: Side) -> None:
    models = [side.wrap(Net(), loss_of) for _ in range(2)]
    optimizers = [side.overlap(m, MOMENTUM(m.parameters())) for m in models]
    one, other = models
    for step in side.steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(one, step) + loss_of(other, step) * loss_of(one.module, step).detach()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    for model, optimizer in zip(models, optimizers, strict=True):
        side.finish(model, optimizer)


SCENARIOS = {
    "two models with an optimizer each (a GAN)": no_shards(whole=gan),
    "a GAN that freezes its discriminator meanwhile, `find_unused_parameters=True`": Loop(
        whole=partial(gan, freeze=True)
    ),
    "two models, one of them overlapped": no_shards(whole=partial(gan, both=False)),
    "one optimizer over two models": no_shards(whole=partial(over_two, both=True)),
    "one optimizer over two models, one of them overlapped": Loop(
        whole=partial(over_two, both=False)
    ),
    "two optimizers on one model, both overlapped": Loop(whole=two),
    "two optimizers on one model, one overlapped and stepped first": no_shards(
        whole=partial(two, both=False)
    ),
    "two optimizers on one model, one overlapped and stepped last": refused(
        whole=partial(two, both=False, last=True)
    ),
    "two overlapped optimizers on the same parameters": Loop(
        SYNCHRONIZES, whole=partial(two, same=True)
    ),
    "two optimizers on one model, stepped in turns": Loop(whole=two_in_turns),
    "an optimizer of a part of the model": Loop(
        make=lambda p: MOMENTUM(last_part(p)), zero=lambda t: t.ddp.zero_grad()
    ),
    "a part of the model frozen from the start": Loop(model=partly_frozen),
    "two wrapped models that share a part, trained in turns": Loop(
        SYNCHRONIZES, REFUSED, whole=shared
    ),
    "the model called inside another wrapped model's forward pass": Loop(whole=nested),
}
