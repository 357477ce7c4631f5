"""The contestants that Syncline itself brings: torch's DDP, and plans."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from syncline.errors import UserError, quoted
from syncline.model.plan import Plan
from syncline.parallel.ddp import DistributedDataParallel
from syncline.replay.contest import Contestant
from syncline.replay.model import Replayed
from syncline.replay.names import renamed_plan
from syncline.replay.optimizer import ReplayedOptimizer
from syncline.replay.timeline import SentMessage

__all__ = ["planned", "stock_ddp"]


def stock_ddp(name: str = "ddp", **arguments: Any) -> Contestant:
    """Return torch's own DistributedDataParallel.

    Args:
        name: of the contestant.
        arguments: of torch's class, such as ``bucket_cap_mb=5``.
    """

    def wrap(module: Replayed, optimizer: ReplayedOptimizer) -> tuple[Any, Any]:
        # Parameters are equal; sending them round would cost seconds each time.
        model = nn.parallel.DistributedDataParallel(module, init_sync=False, **arguments)
        return model, optimizer

    return Contestant(name=name, wrap=wrap)


def planned(plan: Plan, name: str | None = None) -> Contestant:
    """Return Syncline's DistributedDataParallel under a plan.

    Args:
        plan: with the tensors' names in the profile.
        name: of the contestant; by default the planner's.
    """

    def wrap(module: Replayed, optimizer: ReplayedOptimizer) -> tuple[Any, Any]:
        fitting = renamed_plan(plan, module.gradient_names)
        model = DistributedDataParallel(module, plan=fitting, check=False, init_sync=False)
        return model, model.overlap(optimizer) if plan.wait == "need" else optimizer

    def messages(model: DistributedDataParallel) -> list[SentMessage]:
        if model.plan is None:
            raise UserError(
                f"the plan of {quoted(plan.planner)} did not run: {model.run_record().reason}; "
                "replay a profile whose gradients can be planned"
            )
        return _sent(model, plan)

    return Contestant(
        name=name or plan.planner,
        wrap=wrap,
        is_ready=lambda model: not model.measuring,
        settle=lambda model: model.settle(),
        messages=messages,
        close=_close,
    )


def _sent(model: DistributedDataParallel, plan: Plan) -> list[SentMessage]:
    """Return when messages went, where our engine sent them; the reducer does not tell."""
    engine = model._reducer_buckets.engine
    if engine is None:
        return []
    labels = [plan.label(tensors) for tensors in plan.message_tensors()]
    sizes = plan.message_bytes()
    return [
        SentMessage(labels[m.message], sizes[m.message], m.ready_ns, m.issued_ns, m.finished_ns)
        for m in engine.times().messages
    ]


def _close(model: DistributedDataParallel) -> None:
    buckets = model._reducer_buckets
    if buckets.engine is not None:
        buckets.engine.stop()
        buckets.engine = None
    if buckets._engine_group is not None:
        dist.destroy_process_group(buckets._engine_group)
    # The reducer holds the engine's hook, which the collector cannot see: a circle for ever.
    del model.reducer, model.logger
