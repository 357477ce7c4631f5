"""Scripts that train under every optimizer."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from tests.train.overlap.features import feature
from tests.train.overlap.overlap_models import Net, loss_of
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONOUS, Side

Make = Callable[[Any], torch.optim.Optimizer]


def train(side: Side, make: Make, module: Callable[[], nn.Module] = Net) -> None:
    """Train a model plainly."""
    ddp = side.wrap(module(), loss_of)
    optimizer = side.overlap(ddp, make(ddp.parameters()))
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step)
        loss.backward()
        optimizer.step()
        side.note("loss", loss)
    side.finish(ddp, optimizer)


PLAIN: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, momentum, weight decay": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD, Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, maximize, dampening": lambda p: optim.SGD(
        p, lr=0.01, momentum=0.9, dampening=0.1, maximize=True
    ),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam, foreach": lambda p: optim.Adam(p, lr=0.01, foreach=True),
    "Adam, fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "Adam, learning rate a tensor": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW, amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW, foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01),
    "RMSprop, centered, momentum": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
}
for _name, _make in PLAIN.items():
    feature(_name, OVERLAPS)(partial(train, make=_make))


class Matrices(nn.Sequential):
    """Layers without biases: what Muon takes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 20, bias=False), nn.Tanh(),
            nn.Linear(20, 5, bias=False),
        )  # fmt: skip


@feature("Muon", OVERLAPS)
def muon(side: Side) -> None:
    train(side, lambda p: optim.Muon(p, lr=0.01), Matrices)


class Signs(torch.optim.Optimizer):
    """Somebody's own: each parameter by itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.add_(mean.sign(), alpha=-group["lr"])


@feature("An optimizer of your own that updates each parameter by itself", OVERLAPS)
def own(side: Side) -> None:
    train(side, lambda p: Signs(p, lr=0.01))


class Counting(Signs):
    """Counts its steps in its groups, as timm's Lamb does, and sums weights (schedule-free)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["sum"] = group.get("sum", 0.0) + group["lr"] ** 2
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] ** 2 / group["sum"] / group["step"])


def _groups(parameters: Any) -> list[dict[str, Any]]:
    first, *others = parameters
    return [{"params": [first], "lr": 0.2}, {"params": others}]


@feature("An optimizer that counts its steps in its parameter groups", OVERLAPS)
def counting(side: Side) -> None:
    train(side, lambda p: Counting(_groups(p), lr=0.05))


@feature("`step(None)` and `step(closure=None)`", OVERLAPS)
def stepped_with_none(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    optimizer = side.overlap(ddp, optim.AdamW(ddp.parameters(), lr=0.01))
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        _ = optimizer.step(None) if step % 2 else optimizer.step(closure=None)
    side.finish(ddp, optimizer)


class Around(torch.optim.Optimizer):
    """Shows the groups of the optimizer inside it, without torch's constructor (Accelerate)."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside

    param_groups = property(lambda self: self.inside.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inside.state)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inside.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inside.state_dict()

    def step(self, closure: Any = None) -> None:
        self.inside.step(closure)


class LookingAhead(Around):
    """Moves the weights back towards slow ones now and then, as timm's Lookahead does."""

    count, slow = 0, ()

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.slow = self.slow or [p.detach().clone() for p in parameters]
        self.count += 1
        if self.count % 6 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, parameters, strict=True):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)


@feature("an optimizer inside a framework's (Accelerate, Lightning)", OVERLAPS)
def around(side: Side) -> None:
    train(side, lambda p: Around(optim.SGD(p, lr=0.1, momentum=0.9)))


@feature("an optimizer inside another that reads the weights at some steps (Lookahead)", OVERLAPS)
def looking_ahead(side: Side) -> None:
    train(side, lambda p: LookingAhead(optim.SGD(p, lr=0.1, momentum=0.9)))


class Normed(Signs):
    """Steps by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


@feature("An optimizer whose update depends on other parameters", SYNCHRONOUS)
def crossing(side: Side) -> None:
    train(side, lambda p: Normed(p, lr=0.01))


class Clipped(Signs):
    """Clips by the norm of all gradients where a setting, an attribute or a state says so."""

    limit: float | None = None

    def __init__(self, params: Any, *, warm_up: int | None = None) -> None:
        super().__init__(params, 0.1)
        for group in self.param_groups:
            group.update(max_norm=math.inf, warm_up=warm_up)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            if not used:
                continue
            for p in used:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
            limit = group["max_norm"] if self.limit is None else self.limit
            if group["warm_up"] is not None and self.state[used[0]]["step"] > group["warm_up"]:
                limit = 0.05
            norm = torch.stack([p.grad.norm().float() for p in used]).norm()
            share = min(1.0, limit / (float(norm) + 1e-6))
            for p in used:
                p.add_(p.grad, alpha=-share * group["lr"])


class Careful(Signs):
    """Skips the whole step where a gradient is not finite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
        if all(bool(p.grad.isfinite().all()) for g in self.param_groups for p in g["params"]):
            super().step()


def _train_changing(
    side: Side, make: Make, change: Callable[[torch.optim.Optimizer, int], None]
) -> None:
    ddp = side.wrap(Net(), loss_of)
    optimizer = side.overlap(ddp, make(ddp.parameters()))
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        change(optimizer, step)
        optimizer.step()
    side.finish(ddp, optimizer)


def _set_at_ten(optimizer: torch.optim.Optimizer, step: int, **values: Any) -> None:
    if step == 10:
        for group in optimizer.param_groups:
            group.update(values)


def _limit_at_ten(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 10:
        optimizer.limit = 0.05  # type: ignore[attr-defined]


def _reload_at_seven(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Load a state that has three steps more than the present one."""
    if step == 7:
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["step"] += 3
        optimizer.load_state_dict(state)


feature("An optimizer that clips by the norm of all gradients after a warm-up", SYNCHRONOUS)(
    partial(_train_changing, make=partial(Clipped, warm_up=10), change=lambda *_: None)
)
feature("the same, its state loaded in between", SYNCHRONOUS)(
    partial(_train_changing, make=partial(Clipped, warm_up=10), change=_reload_at_seven)
)
feature("an optimizer's threshold for all gradients, set in mid-training", SYNCHRONOUS)(
    partial(_train_changing, make=Clipped, change=partial(_set_at_ten, max_norm=0.05))
)
feature("an attribute of your own optimizer, set in mid-training, with that effect", SYNCHRONOUS)(
    partial(_train_changing, make=Clipped, change=_limit_at_ten)
)
feature("settings of torch's optimizers changed in kind (`weight_decay`, `foreach`)", OVERLAPS)(
    partial(
        _train_changing,
        make=lambda p: optim.RMSprop(p, lr=0.01),
        change=partial(_set_at_ten, weight_decay=0.1, maximize=True, foreach=True),
    )
)
feature("An optimizer that skips a step where a gradient is not finite", SYNCHRONOUS)(
    partial(train, make=lambda p: Careful(p, lr=0.01))
)


class Noisy(Signs):
    """Draws noise from the generator that dropout draws from."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])


class Dropping(Net):
    """Drops values in the forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.3))


@feature("An optimizer that draws random numbers", SYNCHRONOUS)
def noisy(side: Side) -> None:
    train(side, lambda p: Noisy(p, lr=0.01), Dropping)


@feature("LBFGS", SYNCHRONOUS)
def lbfgs(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    optimizer = side.overlap(ddp, optim.LBFGS(ddp.parameters(), lr=0.05, max_iter=2))
    for step in side.steps:

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(ddp, step)
            loss.backward()
            return loss

        side.note("loss", optimizer.step(closure))
    side.finish(ddp, optimizer)


@feature("`step` with a closure that it calls once, first", OVERLAPS)
def closures(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    optimizer = side.overlap(ddp, optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    for step in side.steps:

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(ddp, step)
            loss.backward()
            return loss

        side.note("loss", optimizer.step(closure))
    side.finish(ddp, optimizer)


def _train_hooked(side: Side, hook: Callable[[torch.optim.Optimizer, Any], None]) -> None:
    ddp = side.wrap(Net(), loss_of)
    optimizer = side.overlap(ddp, optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    for step in side.steps:
        if step == 10:
            hook(optimizer, lambda *_: side.note("hooked", list(ddp.parameters())))
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("A hook on the optimizer's step, from then on", SYNCHRONOUS)
def hooked(side: Side) -> None:
    _train_hooked(side, lambda optimizer, hook: optimizer.register_step_post_hook(hook))


@feature("`step` replaced by a function of your own before `overlap`", SYNCHRONOUS)
def replaced(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    optimizer = optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    own_step = optimizer.step

    def halved() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        own_step()

    optimizer.step = halved  # type: ignore[method-assign]
    optimizer = side.overlap(ddp, optimizer)
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation around another optimizer, in two steps of its own."""

    def __init__(self, params: Any, base: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(params, {})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad.sign(), alpha=0.01)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.state[p]["before"])
        self.base.step()


@feature("An optimizer around another, with steps of its own (SAM)", SYNCHRONOUS)
def sharpness(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    make = lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9)  # noqa: E731
    optimizer = side.overlap(ddp, Sharpness(ddp.parameters(), make))
    for step in side.steps:
        loss_of(ddp, step).backward()
        optimizer.climb()
        loss_of(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.finish(ddp, optimizer.base)


@feature("`overlap` of the inner one of such an optimizer", OVERLAPS)
def inner(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    make = lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9)  # noqa: E731
    optimizer = Sharpness(ddp.parameters(), make)
    side.overlap(ddp, optimizer.base)
    for step in side.steps:
        loss_of(ddp, step).backward()
        optimizer.climb()
        loss_of(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.finish(ddp, optimizer.base)


@feature("`ZeroRedundancyOptimizer`", SYNCHRONOUS)
def zero(side: Side) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which it uses
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ddp = side.wrap(Net(), loss_of)
    optimizer = side.overlap(
        ddp, ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=optim.Adam, lr=0.01)
    )
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step)
        loss.backward()
        optimizer.step()
        side.note("loss", loss)
    side.note("parameters", list(ddp.parameters()))
