"""The reducer under a wrapped module: what it exchanges, and how its buckets are changed."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.measure.clock import Clock, clock_for
from syncline.measure.profiler import dtype_name
from syncline.model.plan import Plan
from syncline.model.quantities import BYTES_PER_ELEMENT, NS_PER_S
from syncline.parallel.conductor import PACE_EVERY
from syncline.parallel.layout import difference_from_plan, needs_engine
from syncline.parallel.recording import BucketRecorder, Recorded
from syncline.parallel.reductions import Reductions, thawed
from syncline.parallel.stage_engine import StageEngine, engine_group
from syncline.parallel.watches import Pace

if TYPE_CHECKING:
    from syncline.parallel.ddp import DistributedDataParallel

__all__ = ["ReducerBuckets", "WrappedJob", "obstacle"]


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
        self._parameters, self._sparse = ddp._build_params_for_reducer()
        """The parameters that torch's class gave to its reducer; the module may change later."""
        self._names = ddp._build_debug_param_to_name_mapping(self._parameters)
        """Of these parameters, where torch is to name them in its messages."""
        self._order = list(range(len(self._parameters)))
        """The order in which the reducer has them now."""
        self.engine: StageEngine | None = None
        """Runs what the reducer cannot do by itself; None where it can."""
        self._engine_group: dist.ProcessGroup | None = None
        self._recorder: BucketRecorder | None = None
        reference = weakref.WeakMethod(ddp._end_iteration)

        def finished() -> None:
            end_iteration = reference()
            if end_iteration is not None:
                end_iteration()

        self._finished = finished
        self._reductions: Reductions | None = Reductions(ddp, finished)
        """Follows the reducer where the engine does not run."""
        self._is_ours = False
        """Whether the reducer is one that was made here."""

    def meet(self, plan: Plan) -> None:
        """Make the process group that a plan needs, if any, together with all ranks."""
        if needs_engine(plan) and self._engine_group is None:
            self._engine_group = engine_group(self._ddp)

    def follow(self) -> None:
        """Follow the reducer anew: which of its parameters get gradients may have changed."""
        if self._reductions is not None:
            self._reductions.detach()
            self._reductions = Reductions(self._ddp, self._finished)

    def expect(self) -> None:
        """Call after a forward pass whose gradients will be exchanged."""
        if self.engine is not None:
            self.engine.expect()
        if self._reductions is not None:
            self._reductions.expect()

    def look(self) -> None:
        """Call before a forward pass, to see a backward pass whose end could not be seen."""
        if self._reductions is not None:
            self._reductions.look()

    def make_final(self) -> None:
        """Let the reducer make its final buckets, after its first backward pass.

        It exchanges their order for that. torch's class does so in the next forward pass, once in
        a training; we change reducers more often, and forward passes may not be in step.
        """
        ddp = self._ddp
        if self._is_ours and not ddp._has_rebuilt_buckets:
            with self._keeping_gradients():
                ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()

    def use(self, plan: Plan | None, *, record: bool) -> None:
        """Make a new reducer, with the plan's messages as its buckets.

        Everything else about the wrapper stays: its module, mode and hooks, and whatever the user
        has attached to it. A plan that the reducer cannot run by itself is run by the engine over
        its buckets.
        """
        ddp = self._ddp
        self._stop_engine()
        if self._reductions is not None:
            self._reductions.detach()
            self._reductions = None
        if ddp._compressing is not None and not (plan is not None and plan.is_lossy):
            ddp._compressing.deliver_residuals()
        hook = None
        self._recorder = None
        buckets: Sequence[range] = ()
        sizes: Sequence[int] = ()
        if plan is not None and needs_engine(plan):
            self.meet(plan)
            assert self._engine_group is not None
            self.engine = StageEngine(ddp, plan, self._engine_group, self._finished)
            hook = self.engine.hook
            buckets, sizes = self.engine.layout.buckets, self.engine.layout.bucket_bytes
        elif plan is not None:
            buckets, sizes = plan.message_tensors(), plan.message_bytes()
        if self.engine is None and record:
            self._recorder = BucketRecorder(ddp.process_group, clock_for(_device(ddp)))
            hook = self._recorder.hook
        backwards = ddp.find_unused_parameters and not ddp.static_graph
        self._order = list(range(len(self._parameters)))
        if plan is not None and backwards:
            # DDP does not rebuild its buckets when it looks for unused parameters: it keeps the
            # buckets it made at first, the last one from the first parameters.
            order = [plan.tensors[t].name for bucket in reversed(buckets) for t in bucket]
            position = {id(ddp._exchanged_parameters()[name]): n for n, name in enumerate(order)}
            self._order.sort(key=lambda index: position[id(self._parameters[index])])
            sizes = sizes[::-1]
        changed = {} if plan is None else _bucket_caps(ddp, sizes)
        if self.engine is not None:
            changed["gradient_as_bucket_view"] = True
        with ddp._torch_may_hook():
            with _changed(ddp, changed), self._keeping_gradients():
                self._make_reducer()
            if hook is not None:
                ddp.register_comm_hook(None, hook)
        self._is_ours = True
        if self.engine is not None:
            self.engine.start()
        else:
            self._reductions = Reductions(ddp, self._finished)

    def _make_reducer(self) -> None:
        """Make a reducer of the same parameters as at first, whatever is frozen now."""
        ddp, order = self._ddp, self._order
        del ddp.reducer, ddp.logger  # takes the old reducer's hooks off the parameters
        with thawed(self._parameters):
            ddp._ddp_init_helper(
                [self._parameters[index] for index in order],
                [self._sparse[index] for index in order],
                {n: self._names[index] for n, index in enumerate(order) if index in self._names},
                ddp.static_graph,
            )
        ddp._comm_hooks = []
        ddp._has_rebuilt_buckets = False
        if ddp.static_graph:
            ddp._static_graph_delay_allreduce_enqueued = False
            ddp.reducer._set_static_graph()
            assert ddp.logger is not None
            ddp.logger._set_static_graph()
        if getattr(ddp, "require_manual_backward_finalization", False):  # since torch 2.15
            setattr(ddp, "require_manual_backward_finalization", True)  # noqa: B010 - a property
        ddp.reducer._set_ddp_runtime_logging_sample_rate(ddp._sample_rate or PACE_EVERY)

    def _keeping_gradients(self) -> AbstractContextManager[None]:
        return nullcontext() if self.engine is None else self.engine.keeping_gradients()

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
        ordered = [names[id(self._parameters[index])] for index in self._order]
        return difference_from_plan(plan, ordered, ddp._get_ddp_logging_data())

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
def _changed(ddp: DistributedDataParallel, changed: Mapping[str, Any]) -> Iterator[None]:
    """Let a wrapper have other settings for a moment."""
    before = {name: ddp.__dict__[name] for name in changed}
    ddp.__dict__.update(changed)
    try:
        yield
    finally:
        ddp.__dict__.update(before)


def _bucket_caps(ddp: DistributedDataParallel, sizes: Sequence[int]) -> dict[str, Any]:
    """Return what torch's class would have noted of a cap in bytes for each bucket.

    A bucket is closed once it holds at least its cap: a cap of exactly its bytes closes it there.
    """
    largest, caps = max(sizes), list(sizes)
    noted: dict[str, Any] = {
        "bucket_bytes_cap": largest,
        "bucket_bytes_cap_list": caps,
        "bucket_bytes_cap_default": False,
    }
    config = ddp.__dict__.get("_bucket_config")  # since torch 2.13 it counts, not these
    if config is not None:
        noted["_bucket_config"] = dataclasses.replace(
            config,
            bucket_bytes_cap=largest,
            per_bucket_bytes_caps=tuple(caps),
            first_bucket_bytes_cap=largest,
        )
    return noted


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
