"""Optimizers of somebody's own, which the overlap tests train with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch


class Custom(torch.optim.Optimizer):
    """Gradient descent, and the place for what makes it special."""

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.05, **defaults})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.prepare()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def prepare(self) -> None:
        pass

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"])


class Signs(Custom):
    """Each parameter by itself."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        mean.mul_(0.9).add_(p.grad, alpha=0.1)
        p.add_(mean.sign(), alpha=-group["lr"])


class Voting(Custom):
    """Follows the sum of the ranks' signs."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        signs = torch.ops._c10d_functional.all_reduce(p.grad.sign(), "sum", "default")
        p.sub_(signs, alpha=group["lr"])


class TrustRatio(Custom):
    """Divides each parameter's update by the gradient's norm, as LAMB and LARS do."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class Counting(Custom):
    """Counts its steps in its groups, as timm's Lamb does, and sums weights (schedule-free)."""

    def prepare(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["sum"] = group.get("sum", 0.0) + group["lr"] ** 2

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] ** 2 / group["sum"] / group["step"])


class Normed(Custom):
    """Steps by the norm of all gradients together."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        gradients = [q.grad for g in self.param_groups for q in g["params"] if q.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        p.sub_(p.grad / norm, alpha=group["lr"])


class Clipped(Custom):
    """Clips by the norm of all gradients where a setting, an attribute or a state says so."""

    limit: float | None = None

    def __init__(self, params: Iterable[Any], *, warm_up: int | None = None) -> None:
        super().__init__(params, lr=0.1, max_norm=math.inf, warm_up=warm_up)

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[p]["step"] = steps = self.state[p].get("step", 0) + 1
        limit = group["max_norm"] if self.limit is None else self.limit
        if group["warm_up"] is not None and steps > group["warm_up"]:
            limit = 0.05
        gradients = [q.grad for q in group["params"] if q.grad is not None]
        norm = torch.stack([g.norm().float() for g in gradients]).norm()
        share = min(1.0, limit / (float(norm) + 1e-6))
        p.add_(p.grad, alpha=-share * group["lr"])


class Careful(Signs):
    """Skips the whole step where a gradient is not finite."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        if all(bool(p.grad.isfinite().all()) for g in self.param_groups for p in g["params"]):
            super().step()


class Noisy(Custom):
    """Draws noise from the generator that dropout draws from."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])
