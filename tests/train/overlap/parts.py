"""What the parts of a training loop do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.train.overlap.overlap_models import loss_of
from tests.train.overlap.overlap_rig import Side


@dataclass
class Training:
    """What the parts of a loop work on: a wrapped model and its optimizer."""

    side: Side
    ddp: Any
    optimizer: Any = None
    loss_of: Callable[..., Any] = loss_of
    kept: Any = None  # what one part keeps for another

    @property
    def step(self) -> int:
        return self.side.step

    @property
    def net(self) -> Any:
        return self.ddp.module

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.ddp.parameters() if p.requires_grad]

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [g for p in self.parameters if (g := p.grad) is not None]

    def keep(self, value: Any) -> None:
        self.kept = value

    def note(self, label: str, *values: Any) -> None:
        self.side.note(label, *values)

    def loss(self, *micro: int) -> Any:
        """Return the loss on a batch, or on some part of it."""
        return self.loss_of(self.ddp, self.step, *micro)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.note("loss", loss)


Part = Callable[[Training], object]


def nothing(t: Training) -> None:
    """Do nothing."""


def zero(t: Training) -> None:
    t.optimizer.zero_grad()


def zero_in_place(t: Training) -> None:
    t.optimizer.zero_grad(set_to_none=False)


def backward(t: Training) -> None:
    t.backward(t.loss())


def accumulate(t: Training, passes: int = 3, first: int = 0) -> None:
    """Add up the gradients of several passes, of which the last is exchanged."""
    *own, last = range(first, first + passes)
    with t.ddp.no_sync():
        for micro in own:
            t.backward(t.loss(micro))
    t.backward(t.loss(last))


def step(t: Training) -> None:
    t.optimizer.step()


def halve_gradients(t: Training) -> None:
    for p in t.parameters:
        p.grad *= 0.5


def evaluate(t: Training) -> None:
    t.ddp.eval()
    with torch.no_grad():
        t.note("evaluated", t.loss(1))
    t.ddp.train()


def finish(t: Training) -> None:
    t.side.finish(t.ddp, t.optimizer)


def every(steps: int, part: Part) -> Part:
    """Do something in the last of every so many steps."""
    return lambda t: part(t) if t.step % steps == steps - 1 else None


def once(at: int, part: Part) -> Part:
    return lambda t: part(t) if t.step == at else None


def reloaded(value: Any, *, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def _state(state: Mapping[Any, Any]) -> list[Any]:
    return [
        value.clone() if isinstance(value, torch.Tensor) else value
        for entry in list(state.values())
        for value in list(entry.values())
    ]


THREAD_READS: dict[str, Callable[[Training], Any]] = {
    "p.detach().clone()": lambda t: [p.detach().clone() for p in t.parameters],
    "p.data.clone()": lambda t: [p.data.clone() for p in t.parameters],
    "p.grad": lambda t: [g.clone() for g in t.gradients],
    "optimizer.state": lambda t: _state(t.optimizer.state),
    "vars(optimizer)['state']": lambda t: _state(vars(t.optimizer)["state"]),
    "optimizer.state_dict()": lambda t: copy.deepcopy(t.optimizer.state_dict()),
    "ddp.state_dict()": lambda t: copy.deepcopy(t.ddp.state_dict()),
    "copy.deepcopy(module)": lambda t: copy.deepcopy(t.net).state_dict(),
    "torch.save": lambda t: reloaded((t.net.state_dict(), t.optimizer.state_dict())),
}
