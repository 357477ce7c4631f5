"""The reducer under a wrapped module: what it exchanges, and how its buckets are changed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.measure.clock import Clock, clock_for
from syncline.model.plan import Plan
from syncline.model.quantities import NS_PER_S
from syncline.parallel.buckets import bucket_caps_mb, difference_from_plan
from syncline.parallel.conductor import PACE_EVERY
from syncline.parallel.drift import Pace
from syncline.parallel.recording import BucketRecorder

if TYPE_CHECKING:
    from syncline.parallel.ddp import DistributedDataParallel

__all__ = ["ReducerBuckets", "WrappedJob", "obstacle"]

TorchDDP = nn.parallel.DistributedDataParallel


class WrappedJob:
    """What the tuning script needs to know of a wrapped module."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.group: dist.ProcessGroup = ddp.process_group
        self.module: nn.Module = ddp.module
        self.parameters: dict[str, nn.Parameter] = ddp._exchanged_parameters()
        first = next(iter(self.parameters.values()))
        self.device: torch.device = (
            first.device if first.device.type == "cuda" else torch.device("cpu")
        )
        self.clock: Clock = clock_for(first.device)
        self.gradients_are_views: bool = ddp.gradient_as_bucket_view


class ReducerBuckets:
    """Changes and reads the reducer of a wrapped module."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def use(self, plan: Plan | None, recorder: BucketRecorder | None) -> None:
        """Construct torch's class anew in place, with the plan's messages as its buckets.

        The module and whatever the user has attached to the wrapper stay; only the reducer is new.
        """
        ddp = self._ddp
        module = ddp.module
        kept = {
            name: value
            for name, value in ddp.__dict__.items()
            if "hooks" in name and name not in ("_comm_hooks", "_accum_grad_hooks")
        }
        kept |= {
            name: ddp.__dict__[name]
            for name in ("training", "require_backward_grad_sync", "require_forward_param_sync")
        }
        del ddp.reducer, ddp.logger  # takes the old reducer's hooks off the parameters
        changed: dict[str, Any] = {"init_sync": False}
        if plan is not None:
            caps = bucket_caps_mb(plan)
            backwards = ddp.find_unused_parameters and not ddp.static_graph
            changed["bucket_cap_mb_list"] = caps[::-1] if backwards else caps
            changed["bucket_cap_mb"] = None
        ddp._plan_order = plan
        with ddp._torch_may_hook(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # said once, at the first construction
            TorchDDP.__init__(ddp, module, **(ddp._arguments | changed))
            if recorder is not None:
                ddp.register_comm_hook(None, recorder.hook)
        ddp.__dict__.update(kept)
        ddp._set_ddp_runtime_logging_sample_rate(PACE_EVERY)

    def mismatch(self, plan: Plan) -> str | None:
        """Say how the reducer's buckets differ from the plan."""
        ddp = self._ddp
        names = {id(p): name for name, p in ddp._exchanged_parameters().items()}
        parameters, _ = ddp._build_params_for_reducer()
        return difference_from_plan(
            plan, [names[id(p)] for p in parameters], ddp._get_ddp_logging_data()
        )

    def pace(self) -> Pace | None:
        """Return the reducer's timers of the last iteration that it sampled."""
        data = self._ddp._get_ddp_logging_data()
        if not data.get("backward_compute_time"):
            return None
        return Pace(
            computation_s=(data["forward_compute_time"] + data["backward_compute_time"]) / NS_PER_S,
            communication_s=data["backward_comm_time"] / NS_PER_S,
        )


def obstacle(ddp: DistributedDataParallel) -> str | None:
    """Say why this model's buckets cannot be planned, or None if they can."""
    parameters = ddp._exchanged_parameters()
    if ddp._use_python_reducer:
        return "torch._dynamo's Python reducer is in use"
    if ddp.mixed_precision is not None:
        return "the mixed_precision argument uses DDP's only communication hook"
    if ddp._delay_all_reduce_params:
        return "some parameters are reduced later (delay_all_reduce_named_params)"
    if any(hasattr(p, "_in_backward_optimizers") for p in parameters.values()):
        return "the optimizer runs inside backward and uses DDP's only communication hook"
    if len({(p.dtype, p.device) for p in parameters.values()}) > 1:
        return "gradients are of several dtypes or devices, which DDP never merges"
    if any(getattr(m, "sparse", False) for m in ddp.module.modules()):
        return "some gradients are sparse"
    return None
