"""The reducer under a wrapped module: what it exchanges, and how its buckets are changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.measure.clock import Clock, clock_for
from syncline.measure.profiler import dtype_name
from syncline.model.dtypes import BYTES_PER_ELEMENT
from syncline.model.plan import Plan
from syncline.model.quantities import NS_PER_S
from syncline.parallel.buckets import bucket_caps_mb, difference_from_plan, needs_engine
from syncline.parallel.conductor import PACE_EVERY
from syncline.parallel.drift import Pace
from syncline.parallel.recording import BucketRecorder, Recorded
from syncline.parallel.stage_engine import StageEngine, engine_group

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
        self._ddp = ddp

    @property
    def can_defer(self) -> bool:
        """Whether an optimizer's update can wait for the next forward pass."""
        return self._ddp.defers


class ReducerBuckets:
    """Changes and reads the reducer of a wrapped module."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.engine: StageEngine | None = None
        """Runs what the reducer cannot do by itself; None where it can."""
        self._engine_group: dist.ProcessGroup | None = None
        self._recorder: BucketRecorder | None = None

    def use(self, plan: Plan | None, *, record: bool) -> None:
        """Construct torch's class anew in place, with the plan's messages as its buckets.

        The module and whatever the user has attached to the wrapper stay; only the reducer is new.
        A plan that the reducer cannot run by itself is run by the engine over its buckets.
        """
        ddp = self._ddp
        self._stop_engine()
        if ddp._compressing is not None and not (plan is not None and plan.is_lossy):
            ddp._compressing.deliver_residuals()
        module = ddp.module
        kept = {
            name: value
            for name, value in ddp.__dict__.items()
            if "hooks" in name and name not in ("_comm_hooks", "_accum_grad_hooks")
        }
        kept |= {
            name: ddp.__dict__[name]
            for name in (
                *("training", "require_backward_grad_sync", "require_forward_param_sync"),
                "bucket_bytes_cap",  # where torch.compile cuts graphs, not below 1 MiB
            )
        }
        del ddp.reducer, ddp.logger  # takes the old reducer's hooks off the parameters
        changed: dict[str, Any] = {"init_sync": False}
        hook = None
        self._recorder = None
        if plan is not None and needs_engine(plan):
            if self._engine_group is None:
                self._engine_group = engine_group(ddp)
            self.engine = StageEngine(ddp, plan, self._engine_group)
            hook = self.engine.hook
            buckets, sizes = self.engine.layout.buckets, self.engine.layout.bucket_bytes
            changed["gradient_as_bucket_view"] = True
        elif plan is not None:
            buckets, sizes = plan.message_tensors(), plan.message_bytes()
        if self.engine is None and record:
            self._recorder = BucketRecorder(ddp.process_group, clock_for(_device(ddp)))
            hook = self._recorder.hook
        ddp._bucket_names = None
        if plan is not None:
            caps = bucket_caps_mb(sizes)
            backwards = ddp.find_unused_parameters and not ddp.static_graph
            changed["bucket_cap_mb_list"] = caps[::-1] if backwards else caps
            changed["bucket_cap_mb"] = None
            ddp._bucket_names = [[plan.tensors[t].name for t in tensors] for tensors in buckets]
        keeping = nullcontext() if self.engine is None else self.engine.keeping_gradients()
        with ddp._torch_may_hook(), _as_wrapped(ddp):
            with keeping, warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # said once, at first
                TorchDDP.__init__(ddp, module, **(ddp._arguments | changed))
            if hook is not None:
                ddp.register_comm_hook(None, hook)
            ddp.__dict__.update(kept)
            ddp._set_ddp_runtime_logging_sample_rate(PACE_EVERY)
            if self.engine is not None:
                self.engine.start()

    def _stop_engine(self) -> None:
        if self.engine is not None:
            self.engine.stop()
            self.engine = None

    def recorded(self) -> Recorded:
        """Return what was noted of the exchange since the last call."""
        if self.engine is not None:
            return self.engine.times()
        return self._recorder.take() if self._recorder is not None else []

    def mismatch(self, plan: Plan) -> str | None:
        """Say how the reducer's buckets differ from the plan."""
        if self.engine is not None:
            return self.engine.mismatch
        ddp = self._ddp
        names = {id(p): name for name, p in ddp._exchanged_parameters().items()}
        parameters, _ = ddp._build_params_for_reducer()
        return difference_from_plan(
            plan, [names[id(p)] for p in parameters], ddp._get_ddp_logging_data()
        )

    def flushed(self) -> str | None:
        """Say why hardly anything was left to run under forward passes since the last call."""
        return None if self.engine is None else self.engine.flushed()

    def pace(self, iteration_s: float) -> Pace | None:
        """Return what the last iteration took, as far as it was sampled."""
        if self.engine is not None:
            return self.engine.pace(iteration_s)
        data = self._ddp._get_ddp_logging_data()
        if not data.get("backward_compute_time"):
            return None
        return Pace(
            computation_s=(data["forward_compute_time"] + data["backward_compute_time"]) / NS_PER_S,
            communication_s=data["backward_comm_time"] / NS_PER_S,
        )


@contextmanager
def _as_wrapped(ddp: DistributedDataParallel) -> Iterator[None]:
    """Let a reducer find the parameters of the first construction, whatever is frozen now."""
    exchanged = ddp._exchanged_parameters()
    changed = [
        parameter
        for name, parameter in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore and parameter.requires_grad != (name in exchanged)
    ]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


def _device(ddp: DistributedDataParallel) -> torch.device:
    return next(iter(ddp._exchanged_parameters().values())).device


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
    unknown = {dtype_name(p.dtype) for p in parameters.values()} - BYTES_PER_ELEMENT.keys()
    if unknown:
        return f"gradients are of {unknown.pop()}, of which messages cannot be planned"
    if any(getattr(m, "sparse", False) for m in ddp.module.modules()):
        return "some gradients are sparse"
    return None
