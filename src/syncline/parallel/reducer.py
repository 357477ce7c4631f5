"""The reducer under a wrapped module: what it exchanges, and how its buckets are changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from syncline.measure.exchange import new_group_like, telling_lost_peers
from syncline.measure.gradient_hooks import GradientHooks, thawed, weakly
from syncline.model.plan import Plan
from syncline.model.quantities import NS_PER_S
from syncline.parallel.engine.layout import difference_from_plan, needs_engine
from syncline.parallel.engine.recording import BucketRecorder, Recorded
from syncline.parallel.stage_engine import StageEngine
from syncline.parallel.watches import PACE_EVERY, PaceSample
from syncline.parallel.wrapped import Wrapped
from syncline.torch_private import Ddp as TorchDDP
from syncline.torch_private import (
    bucket_sizes,
    caps_for_buckets,
    current_graph_task,
    disable_dynamo,
    exposed_communication_ns,
    has_final_buckets,
    is_finalized,
    logging_data,
    make_final_buckets,
    queue_callback,
    reducer_parameters,
    remake_reducer,
    tree_leaves,
)


class ReducerBuckets:
    """Changes and reads the reducer of a wrapped module.

    The method ``end_iteration`` is called at the end of every backward pass whose gradients are
    exchanged; its object is not kept alive.
    """

    def __init__(self, wrapped: Wrapped, end_iteration: Callable[[], None]) -> None:
        self._wrapped = wrapped
        self._parameters, self._sparse, self._names = reducer_parameters(wrapped.ddp)
        """What torch's class gave to its reducer; the module may change later."""
        self._order = list(range(len(self._parameters)))
        """The order in which the reducer has them now."""
        self.engine: StageEngine | None = None
        """Runs what the reducer cannot do by itself; None where it can."""
        self._engine_group: dist.ProcessGroup | None = None
        self._recorder: BucketRecorder | None = None
        self._finished = weakly(end_iteration)
        self._reductions: _Reductions | None = _Reductions(wrapped, self._finished)
        """Follows the reducer where the engine does not run."""
        self._is_ours = False
        """Whether the reducer is one that was made here."""
        self._logged = logging_data(wrapped.ddp)
        """What the reducer said last. Only the thread that trains asks it: another one could keep
        it from being freed, and then free it during a backward pass."""
        self._changes: list[Callable[[], None]] = []
        """What is to be changed before the next forward pass whose gradients will be exchanged."""

    @property
    def changing(self) -> bool:
        """Whether a change waits for a forward pass whose gradients will be exchanged."""
        return bool(self._changes)

    def change(self, change: Callable[[], None]) -> None:
        """Call a function that changes the reducer: at once or, in a static graph, later.

        In its first backward pass the reducer of a static graph learns how often each gradient is
        accumulated, and exchanges them all. That must not be a pass under ``no_sync()``: so there
        it is changed right before the next forward pass whose gradients will be exchanged. Other
        reducers also note under ``no_sync()`` which parameters are used: they must not be changed
        between such a pass and the one that is exchanged.
        """
        self._changes.append(change)
        if not self._wrapped.ddp.static_graph:
            self.make_changes()

    def make_changes(self) -> None:
        """Call before a forward pass whose gradients will be exchanged."""
        changes, self._changes = self._changes, []
        for change in changes:
            change()

    def meet(self, plan: Plan) -> None:
        """Make the process group that a plan needs, if any, together with all ranks."""
        if needs_engine(plan) and self._engine_group is None:
            with telling_lost_peers("while the engine's process group was made"):
                group = new_group_like(self._wrapped.group, description="syncline engine")
            self._engine_group = group

    def follow(self) -> None:
        """Follow the reducer anew: which of its parameters get gradients may have changed."""
        if self._reductions is not None:
            self._reductions.detach()
            self._reductions = _Reductions(self._wrapped, self._finished)

    def expect(self, output: Any) -> None:
        """Call with the output of a forward pass whose gradients will be exchanged."""
        if self.engine is not None:
            self.engine.expect()
        if self._reductions is not None:
            self._reductions.expect(output)

    def look(self) -> None:
        """Call before a forward pass, to see a backward pass whose end could not be seen."""
        if self._reductions is not None:
            self._reductions.look()

    def make_final(self) -> None:
        """Let the reducer make its final buckets, after its first backward pass.

        It exchanges their order for that. torch's class does so in the next forward pass, once in
        a training; we change reducers more often, and forward passes may not be in step.
        """
        ddp = self._wrapped.ddp
        if self._is_ours and not has_final_buckets(ddp):
            with self.keeping_gradients():
                make_final_buckets(ddp)

    def use(self, plan: Plan | None, *, record: bool, updates: int) -> None:
        """Make a new reducer, with the plan's messages as its buckets.

        ``updates`` is how often the optimizers had been stepped when the ranks agreed on the plan.

        Everything else about the wrapper stays: its module, mode and hooks, and whatever the user
        has attached to it. A plan that the reducer cannot run by itself is run by the engine over
        its buckets.
        """
        wrapped = self._wrapped
        self._stop_engine()
        if self._reductions is not None:
            self._reductions.detach()
            self._reductions = None
        if wrapped.compressing is not None and not (plan is not None and plan.is_lossy):
            wrapped.compressing.deliver_residuals()
        hook = None
        self._recorder = None
        buckets: Sequence[range] = ()
        sizes: Sequence[int] = ()
        if plan is not None and needs_engine(plan):
            assert self._engine_group is not None  # made by :meth:`meet`
            self.engine = StageEngine(wrapped, plan, self._engine_group, updates, self._finished)
            hook = self.engine.hook()
            buckets, sizes = self.engine.layout.buckets, self.engine.layout.bucket_bytes
        elif plan is not None:
            buckets, sizes = plan.message_tensors(), plan.message_bytes()
        if self.engine is None and record:
            self._recorder = BucketRecorder(wrapped.group, wrapped.clock)
            hook = self._recorder.hook
        self._order = list(range(len(self._parameters)))
        if plan is not None and wrapped.keeps_first_buckets:
            # DDP does not rebuild its buckets when it looks for unused parameters: it keeps the
            # buckets it made at first, the last one from the first parameters.
            order = [plan.tensors[t].name for bucket in reversed(buckets) for t in bucket]
            position = {id(wrapped.parameters[name]): n for n, name in enumerate(order)}
            self._order.sort(key=lambda index: position[id(self._parameters[index])])
            sizes = sizes[::-1]
        changed = {} if plan is None else caps_for_buckets(wrapped.ddp, sizes)
        if self.engine is not None:
            changed["gradient_as_bucket_view"] = True
        with _changed(wrapped.ddp, changed), self.keeping_gradients():
            self._make_reducer()
        if hook is not None:
            TorchDDP.register_comm_hook(wrapped.ddp, None, hook)  # ours refuses hooks
        self._is_ours = True
        if self.engine is not None:
            self.engine.start()
        else:
            self._reductions = _Reductions(wrapped, self._finished)

    def _make_reducer(self) -> None:
        """Make a reducer of the same parameters as at first, whatever is frozen now."""
        order = self._order
        with thawed(self._parameters):
            remake_reducer(
                self._wrapped.ddp,
                [self._parameters[index] for index in order],
                [self._sparse[index] for index in order],
                {n: self._names[index] for n, index in enumerate(order) if index in self._names},
                sample_every=self._wrapped.sample_rate or PACE_EVERY,
            )
        self._logged = logging_data(self._wrapped.ddp)

    def keeping_gradients(self) -> AbstractContextManager[None]:
        """Return a context for the making of buckets, in which gradients stay what they are."""
        return nullcontext() if self.engine is None else self.engine.keeping_gradients()

    def _stop_engine(self) -> None:
        if self.engine is not None:
            self.engine.stop()
            self.engine = None

    def close(self) -> None:
        """End the engine and its process group, and let the reducer go: training is over."""
        self._stop_engine()
        if self._engine_group is not None:
            dist.destroy_process_group(self._engine_group)
            self._engine_group = None
        # The reducer holds the engine's hook in C++, where the collector cannot see the cycle.
        del self._wrapped.ddp.reducer, self._wrapped.ddp.logger

    def recorded(self) -> Recorded:
        """Return what was noted of the exchange since the last call."""
        if self.engine is not None:
            return self.engine.times()
        return self._recorder.take() if self._recorder is not None else []

    def mismatch(self, plan: Plan) -> str | None:
        """Say how the reducer's buckets differ from the plan."""
        if self.engine is not None:
            return self.engine.mismatch
        names = {id(p): name for name, p in self._wrapped.parameters.items()}
        ordered = [names[id(self._parameters[index])] for index in self._order]
        return difference_from_plan(plan, ordered, logging_data(self._wrapped.ddp))

    @property
    def exposed_s(self) -> float | None:
        """How long the last iteration that was timed waited for messages, seconds."""
        if self.engine is not None:
            return self.engine.deferral.stall_ns / NS_PER_S
        waited_ns = exposed_communication_ns(self._logged)
        return None if waited_ns is None else waited_ns / NS_PER_S

    @property
    def count(self) -> int:
        """How many buckets the reducer has, as far as it has said."""
        return len(bucket_sizes(self._logged))

    def pace(self, iteration_s: float) -> PaceSample | None:
        """Return the times of the last iteration, if it was sampled."""
        if self.engine is not None:
            return self.engine.pace(iteration_s)
        data = self._logged = logging_data(self._wrapped.ddp)
        if not data.get("backward_compute_time"):
            return None
        return PaceSample(
            computation_s=(data["forward_compute_time"] + data["backward_compute_time"]) / NS_PER_S,
            communication_s=data["backward_comm_time"] / NS_PER_S,
        )


class _Reductions:
    """Calls ``finished`` at the end of every backward pass that the present reducer has exchanged.

    Forward passes cannot be counted instead: one rank may make more of them than another, such as
    to log a sample.
    """

    def __init__(self, wrapped: Wrapped, finished: Callable[[], None]) -> None:
        ddp = wrapped.ddp
        self._finished = finished
        self._reducer: Any = ddp.reducer
        self._expected = False
        """Whether the reducer exchanges the next backward pass."""
        self._begun = False
        """Whether that backward pass has reached a gradient."""
        self._task = -1
        """The number of the backward pass at whose end we look; those inside it have their own."""
        self._is_static = ddp.static_graph
        """Whether we look only at the end of the backward pass that reaches the model's output: in
        a static graph the reducer notes nothing before the last use of a parameter, and looks
        finished until then."""
        self._hooks = GradientHooks()
        parameters = list(wrapped.parameters.values())
        if not (ddp.find_unused_parameters or ddp.static_graph):
            # The reducer insists on a gradient for each of them.
            parameters = [p for p in parameters if p.requires_grad][:1]
        reached = weakly(self._reached)
        for parameter in parameters:
            self._hooks.add(parameter, reached)

    def expect(self, output: Any) -> None:
        """Call with the output of a forward pass whose gradients will be exchanged."""
        self._expected = True
        if self._is_static:
            look = weakly(self._look_at_end)
            for node in filter(None, {getattr(x, "grad_fn", None) for x in tree_leaves(output)}):
                node.register_prehook(look)

    def look(self) -> None:
        """Call before a forward pass: the end of a backward pass inside another is seen here."""
        if self._reducer is not None and self._begun and is_finalized(self._reducer):
            self._expected = self._begun = False
            self._task = -1
            self._finished()

    def detach(self) -> None:
        """Remove the hooks, and let the reducer go."""
        self._reducer = None
        self._hooks.remove()

    @disable_dynamo
    def _reached(self, *_: Any) -> None:
        if not self._expected:
            return
        self._begun = True
        task = current_graph_task()
        if task != self._task and not self._is_static:
            self._task = task
            self._look_at_end()

    @disable_dynamo
    def _look_at_end(self, *_: Any) -> None:
        # The reducer queues its last work when the last gradient is there, so by the end of this
        # backward pass; what is queued then comes after it.
        queue_callback(lambda: queue_callback(self.look))


@contextmanager
def _changed(ddp: TorchDDP, changed: Mapping[str, Any]) -> Iterator[None]:
    """Let a wrapper have other settings for a moment."""
    before = {name: ddp.__dict__[name] for name in changed}
    ddp.__dict__.update(changed)
    try:
        yield
    finally:
        ddp.__dict__.update(before)
