"""A training loop, told by what differs from the usual one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from syncline.plan.profile import Norm
from tests.train.overlap.overlap_models import Net, loss_of
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONOUS, Script, Side
from tests.train.overlap.parts import Part, Training, backward, finish, nothing, step, zero

Make = Callable[[Any], torch.optim.Optimizer]
MOMENTUM: Make = partial(SGD, lr=0.1, momentum=0.9)
ADAM: Make = partial(Adam, lr=0.01)
ADAMW: Make = partial(AdamW, lr=0.01)
MAKERS: dict[str, Make] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": ADAMW,
}
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
TRAINS, REFUSED = "trains", "refused"
SHARES, ROUNDS = "sees shares", "rounds differently"


@dataclass(frozen=True, slots=True)
class Loop:
    """How a script trains, and what then happens to overlapping, whole and sharded.

    In each step come ``first``, ``zero``, ``backward``, ``before``, ``update`` and ``after``.
    """

    happens: str = OVERLAPS
    sharded: str = TRAINS
    _: KW_ONLY
    model: Callable[[], nn.Module] = Net
    loss: Callable[..., torch.Tensor] = loss_of
    """Of a model and, if it is given, the number of a step."""
    make: Make = MOMENTUM
    ddp: Mapping[str, Any] = field(default_factory=dict)  # arguments of DDP
    early: Part = nothing  # before the optimizer is overlapped
    start: Part = nothing  # before the first step
    first: Part = nothing
    zero: Part = zero
    backward: Part = backward
    before: Part = nothing
    update: Part = step
    after: Part = nothing
    end: Part = finish
    whole: Script | None = None  # the script, where it has not this form
    norm: Norm | None = None  # what norm the plan exchanges
    near: bool = False  # whether values must be near those of DDP, not the same

    def begin(self, side: Side) -> Training:
        t = Training(side, side.wrap(self.model(), self.loss, **self.ddp), loss_of=self.loss)
        t.optimizer = self.make(t.ddp.parameters())
        self.early(t)
        t.optimizer = side.overlap(t.ddp, t.optimizer)
        self.start(t)
        return t

    def script(self, side: Side) -> None:
        if self.whole is not None:
            self.whole(side)
            return
        t = self.begin(side)
        parts = self.first, self.zero, self.backward, self.before, self.update, self.after
        for _ in side.steps:
            for part in parts:
                part(t)
        self.end(t)


no_shards = partial(Loop, OVERLAPS, REFUSED)
refused = partial(Loop, SYNCHRONOUS, REFUSED)
