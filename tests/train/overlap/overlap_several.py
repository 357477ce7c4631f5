"""Scripts with several models, optimizers and parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import SGD, Adam

from tests.train.overlap.features import feature
from tests.train.overlap.overlap_models import FEATURES, Net, batch, loss_of
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONIZES, SYNCHRONOUS, Side


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, FEATURES))


class Discriminator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def _noise(step: int) -> torch.Tensor:
    return batch(step, 5)[0][:, :6]


def _gan(side: Side, *, freeze: bool, both: bool = True) -> None:
    generator = side.wrap(
        Generator(), lambda m: m(_noise(0)).square().sum(), find_unused_parameters=freeze
    )
    judge = side.wrap(
        Discriminator(), lambda m: m(batch(0)[0]).square().sum(), find_unused_parameters=freeze
    )
    making = side.overlap(generator, Adam(generator.parameters(), lr=0.01))
    judging: Any = Adam(judge.parameters(), lr=0.01)
    judging = side.overlap(judge, judging) if both else judging
    ones, zeros = torch.ones(4, 1), torch.zeros(4, 1)
    for step in side.steps:
        if freeze:
            judge.requires_grad_(True)
        judging.zero_grad()
        real = binary_cross_entropy_with_logits(judge(batch(step)[0]), ones)
        real.backward()
        fake = binary_cross_entropy_with_logits(judge(generator(_noise(step)).detach()), zeros)
        fake.backward()
        judging.step()
        if freeze:
            judge.requires_grad_(False)
        making.zero_grad()
        loss = binary_cross_entropy_with_logits(judge(generator(_noise(step))), ones)
        loss.backward()
        making.step()
        side.note("losses", real, fake, loss)
    side.finish(generator, making)
    side.finish(judge, judging)


@feature("two models with an optimizer each (a GAN)", OVERLAPS)
def gan(side: Side) -> None:
    _gan(side, freeze=False)


@feature("a GAN that freezes its discriminator meanwhile, `find_unused_parameters=True`", OVERLAPS)
def gan_frozen(side: Side) -> None:
    _gan(side, freeze=True)


@feature("two models, one of them overlapped", OVERLAPS)
def gan_one(side: Side) -> None:
    _gan(side, freeze=False, both=False)


@feature("one optimizer over two models", OVERLAPS)
def over_two(side: Side) -> None:
    first, second = side.wrap(Net(), loss_of), side.wrap(Net(), loss_of)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = side.overlap(first, Adam(parameters, lr=0.01))
    optimizer = side.overlap(second, optimizer)
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(first, step) + loss_of(second, step + 1)
        loss.backward()
        optimizer.step()
        side.note("loss", loss)
    side.finish(first, optimizer)
    side.finish(second)


@feature("one optimizer over two models, one of them overlapped", OVERLAPS)
def over_one_of_two(side: Side) -> None:
    first, second = side.wrap(Net(), loss_of), side.wrap(Net(), loss_of)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = side.overlap(first, Adam(parameters, lr=0.01))
    for step in side.steps:
        optimizer.zero_grad()
        (loss_of(first, step) + loss_of(second, step + 1)).backward()
        optimizer.step()
    side.finish(first, optimizer)
    side.finish(second)


def _split(ddp: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(ddp.parameters())
    return parameters[:3], parameters[3:]


@feature("two optimizers on one model, both overlapped", OVERLAPS)
def two(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    first, second = _split(ddp)
    one = side.overlap(ddp, SGD(first, lr=0.1, momentum=0.9))
    other = side.overlap(ddp, Adam(second, lr=0.01))
    for step in side.steps:
        ddp.zero_grad(set_to_none=step % 2 == 0)
        loss_of(ddp, step).backward()
        one.step()
        other.step()
    side.finish(ddp, one, other)


@feature("two optimizers on one model, one overlapped and stepped first", OVERLAPS)
def two_first(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    first, second = _split(ddp)
    one = side.overlap(ddp, SGD(first, lr=0.1, momentum=0.9))
    other = Adam(second, lr=0.01)
    for step in side.steps:
        ddp.zero_grad()
        loss_of(ddp, step).backward()
        one.step()
        other.step()
    side.finish(ddp, one, other)


@feature("two optimizers on one model, one overlapped and stepped last", SYNCHRONOUS)
def two_last(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    first, second = _split(ddp)
    one = side.overlap(ddp, SGD(first, lr=0.1, momentum=0.9))
    other = Adam(second, lr=0.01)
    for step in side.steps:
        ddp.zero_grad()
        loss_of(ddp, step).backward()
        other.step()
        one.step()
    side.finish(ddp, one, other)


@feature("two overlapped optimizers on the same parameters", SYNCHRONIZES)
def two_same(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    one = side.overlap(ddp, SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    other = side.overlap(ddp, Adam(ddp.parameters(), lr=0.01))
    for step in side.steps:
        ddp.zero_grad()
        loss_of(ddp, step).backward()
        one.step()
        other.step()
    side.finish(ddp, one, other)


@feature("two optimizers on one model, stepped in turns", OVERLAPS)
def two_turns(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    first, second = _split(ddp)
    optimizers = [
        side.overlap(ddp, SGD(first, lr=0.1, momentum=0.9)),
        side.overlap(ddp, Adam(second, lr=0.01)),
    ]
    for step in side.steps:
        loss_of(ddp, step).backward()
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad()
    side.finish(ddp, *optimizers)


@feature("an optimizer of a part of the model", OVERLAPS)
def part(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    optimizer = side.overlap(ddp, SGD(_split(ddp)[1], lr=0.1, momentum=0.9))
    for step in side.steps:
        ddp.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("a part of the model frozen from the start", OVERLAPS)
def part_frozen(side: Side) -> None:
    net = Net()
    net.hidden.requires_grad_(False)
    ddp = side.wrap(net, loss_of)
    optimizer = side.overlap(ddp, SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


class Pair(nn.Module):
    """A body of its own and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


@feature("two wrapped models that share a part, trained in turns", SYNCHRONIZES)
def shared(side: Side) -> None:
    body = Net()
    models = [side.wrap(Pair(body), loss_of) for _ in range(2)]
    optimizers = [side.overlap(m, SGD(m.parameters(), lr=0.05, momentum=0.9)) for m in models]
    for step in side.steps:
        which = step // 2 % 2
        optimizers[which].zero_grad()
        loss = loss_of(models[which], step)
        loss.backward()
        optimizers[which].step()
        side.note("loss", loss)
    for model, optimizer in zip(models, optimizers, strict=True):
        side.finish(model, optimizer)


@feature("the model called inside another wrapped model's forward pass", OVERLAPS)
def nested(side: Side) -> None:
    one = side.wrap(Net(), loss_of)
    other = side.wrap(Net(), loss_of)
    optimizers = [side.overlap(m, SGD(m.parameters(), lr=0.05, momentum=0.9)) for m in (one, other)]
    for step in side.steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(one, step) + loss_of(other, step) * loss_of(one.module, step).detach()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    side.finish(one, optimizers[0])
    side.finish(other, optimizers[1])
