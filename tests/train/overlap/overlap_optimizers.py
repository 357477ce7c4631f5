"""Training under every optimizer."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from tests.train.overlap.loop import ADAMW, MOMENTUM, REFUSED, Loop, Make, no_shards, refused
from tests.train.overlap.overlap_models import Net
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONOUS
from tests.train.overlap.own_optimizers import Careful, Clipped, Counting, Noisy, Normed, Signs
from tests.train.overlap.parts import Part, Training, nothing, once, zero

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


class Matrices(nn.Sequential):
    """Layers without biases: what Muon takes."""

    def __init__(self) -> None:
        layers = [nn.Linear(*sides, bias=False) for sides in ((12, 20), (20, 20), (20, 5))]
        super().__init__(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Dropping(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.3))


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


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation around another optimizer, in two steps of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = MOMENTUM(self.param_groups)
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


def sharpness(happens: str, sharded: str, of: Part) -> Loop:
    """Climb between two backward passes; ``of`` keeps it, and may choose what is overlapped."""

    def climb(t: Training) -> None:
        t.kept.climb()
        t.backward(t.loss())

    return Loop(
        happens,
        sharded,
        make=Sharpness,
        early=of,
        zero=nothing,
        before=climb,
        update=lambda t: t.kept.step(),
        after=zero,
        end=lambda t: t.side.finish(t.ddp, t.kept.base),
    )


def inner(t: Training) -> None:
    t.kept, t.optimizer = t.optimizer, t.optimizer.base


def zero_redundancy(parameters: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which it uses
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, optimizer_class=optim.Adam, lr=0.01)


def step_with_closure(t: Training) -> None:
    def closure() -> torch.Tensor:
        t.optimizer.zero_grad()
        loss = t.loss()
        loss.backward()
        return loss

    t.note("loss", t.optimizer.step(closure))


def set_all(t: Training, **values: Any) -> None:
    for group in t.optimizer.param_groups:
        group.update(values)


def reload_older(t: Training) -> None:
    state = copy.deepcopy(t.optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"] += 3
    t.optimizer.load_state_dict(state)


def note_steps(t: Training) -> None:
    t.optimizer.register_step_post_hook(lambda *_: t.note("hooked", t.parameters))


def replace_step(t: Training) -> None:
    own_step = t.optimizer.step

    def slower() -> None:
        for group in t.optimizer.param_groups:
            group["lr"] *= 0.9
        own_step()

    t.optimizer.step = slower


CLIPS_LATER: Make = partial(Clipped, warm_up=10)
with_closure: dict[str, Part] = {"zero": nothing, "backward": nothing, "update": step_with_closure}
SCENARIOS = {
    **{
        name: Loop(make=make, sharded=REFUSED if name == "Adafactor" else "trains")
        for name, make in PLAIN.items()
    },
    "Muon": no_shards(make=partial(optim.Muon, lr=0.01), model=Matrices),
    "An optimizer of your own that updates each parameter by itself": Loop(
        make=partial(Signs, lr=0.01)
    ),
    "An optimizer that counts its steps in its parameter groups": Loop(
        make=lambda p: Counting([{"params": [next(p)], "lr": 0.2}, {"params": [*p]}])
    ),
    "`step(None)` and `step(closure=None)`": Loop(
        make=ADAMW,
        update=lambda t: t.optimizer.step(None) if t.step % 2 else t.optimizer.step(closure=None),
    ),
    "an optimizer inside a framework's (Accelerate, Lightning)": Loop(
        make=lambda p: Around(MOMENTUM(p))
    ),
    "an optimizer inside another that reads the weights at some steps (Lookahead)": Loop(
        make=lambda p: LookingAhead(MOMENTUM(p))
    ),
    "An optimizer whose update depends on other parameters": refused(make=partial(Normed, lr=0.01)),
    "An optimizer that clips by the norm of all gradients after a warm-up": refused(
        make=CLIPS_LATER
    ),
    "the same, its state loaded in between": refused(
        make=CLIPS_LATER, before=once(7, reload_older)
    ),
    "an optimizer's threshold for all gradients, set in mid-training": refused(
        make=Clipped, before=once(10, partial(set_all, max_norm=0.05))
    ),
    "an attribute of your own optimizer, set in mid-training, with that effect": refused(
        make=Clipped, before=once(10, lambda t: setattr(t.optimizer, "limit", 0.05))
    ),
    "settings of torch's optimizers changed in kind (`weight_decay`, `foreach`)": Loop(
        make=partial(optim.RMSprop, lr=0.01),
        before=once(10, partial(set_all, weight_decay=0.1, maximize=True, foreach=True)),
    ),
    "An optimizer that skips a step where a gradient is not finite": refused(
        make=partial(Careful, lr=0.01)
    ),
    "An optimizer that draws random numbers": refused(make=partial(Noisy, lr=0.01), model=Dropping),
    "LBFGS": refused(make=partial(optim.LBFGS, lr=0.05, max_iter=2), **with_closure),
    "`step` with a closure that it calls once, first": Loop(**with_closure),
    "A hook on the optimizer's step, from then on": refused(first=once(10, note_steps)),
    "`step` replaced by a function of your own before `overlap`": refused(early=replace_step),
    "An optimizer around another, with steps of its own (SAM)": sharpness(
        SYNCHRONOUS, REFUSED, lambda t: t.keep(t.optimizer)
    ),
    "`overlap` of the inner one of such an optimizer": sharpness(OVERLAPS, "trains", inner),
    "`ZeroRedundancyOptimizer`": refused(
        make=zero_redundancy, end=lambda t: t.note("parameters", t.parameters)
    ),
}
