"""``ReplayedOptimizer``: an update that takes its time and leaves the parameters as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from syncline.replay.work import Work

__all__ = ["ReplayedOptimizer"]


class ReplayedOptimizer(Optimizer):
    """Takes as long as the profile's update, for the parameters that have a gradient.

    Like any optimizer that updates each parameter from its own gradient alone, it may be stepped
    for some of its parameters at a time; each takes its share of the time by its bytes.

    Args:
        params: as for every optimizer.
        work: whose update it is; may be left out where every group of ``params`` names it, as
            groups of another such optimizer do.
    """

    def __init__(self, params: Any, work: Work | None = None) -> None:
        # A setting of the groups, not an attribute: wrappers that make an optimizer of their own
        # class hand over the groups and nothing else.
        super().__init__(params, {"work": work})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Let the device wait for as long as the update takes; the host goes on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            work: Work = group["work"]
            stepped = [p for p in group["params"] if p.grad is not None]
            if stepped:
                work.update(sum(p.nbytes for p in stepped), len(stepped))
        return loss
