"""``EngineExecutor``: the engine exchanges a plan's messages as backward passes fill them."""

# No "from __future__ import annotations" here: DDP checks the hook's annotations as objects.
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from syncline.errors import PeerError
from syncline.plan.plan import Plan
from syncline.plan.profile import Norm
from syncline.plan.quantities import NS_PER_S
from syncline.torch_private import has_final_buckets, queue_callback
from syncline.train.engine.dense_transport import transport_for
from syncline.train.engine.engine import Engine
from syncline.train.engine.layout import BucketLayout
from syncline.train.engine.recording import EngineTimes
from syncline.train.executor import Executor
from syncline.train.first_rounds import FirstRounds, done
from syncline.train.gradient_views import GradientViews
from syncline.train.measure.exchange import timeout_of
from syncline.train.measure.gradient_hooks import GradientHooks, weakly
from syncline.train.overlap.deferral import Deferral
from syncline.train.overlap.pre_forward_hooks import PreForwardHooks
from syncline.train.overlap.sharded_deferral import ShardedDeferral
from syncline.train.shutdown import finish_on_shutdown
from syncline.train.watches import Sample
from syncline.train.wrapped import Wrapped


class EngineExecutor(Executor):
    """Runs one plan under a wrapped module until :meth:`stop`, round after round.

    A round is a backward pass whose forward pass :meth:`expect` was called for. In the first two
    rounds the reducer makes its buckets (:class:`FirstRounds`); the engine runs from the third on.
    ``updates`` is how often the optimizers had been stepped when the ranks agreed on the plan. The
    desync check counts from there: under join, ranks have made different numbers of steps before.
    """

    needs_views = True
    deferral: Deferral

    def __init__(
        self,
        wrapped: Wrapped,
        plan: Plan,
        group: dist.ProcessGroup,
        updates: int,
        finished: Callable[[], None],
    ) -> None:
        layout = BucketLayout.of(plan)
        super().__init__(wrapped, finished, layout.buckets, layout.bucket_caps)
        self._waits_by_need = plan.wait == "need"
        self.defers = self._waits_by_need and wrapped.can_defer
        """Whether the exchange is left running when backward ends; else backward waits for it."""
        self._compressing = wrapped.compressing if plan.is_lossy else None
        self._compressor = None
        residual = None
        if self._compressing is not None:
            self._compressor = self._compressing.compressor_for(plan)
            residual = self._compressing.residual_for(plan)
        self._engine = Engine(
            plan,
            layout,
            transport_for(group, wrapped.device),
            compressor=self._compressor,
            residual=residual,
            timeout_s=timeout_of(wrapped.group).total_seconds(),
        )
        parameters = {tensor.name: wrapped.parameters[tensor.name] for tensor in plan.tensors}
        kind = ShardedDeferral if plan.sharded else Deferral
        self.deferral = kind(parameters, self._engine, wrapped.guard)
        self._shutdown = finish_on_shutdown(self.deferral, self._engine)
        self._first_rounds = FirstRounds(self.deferral, self._compressor, wrapped.group)
        self._rounds = 0
        self._updates_before = updates
        self._by_tensor = not wrapped.ddp.static_graph
        """Whether single tensors are reported as ready. In a static graph, where a gradient may be
        accumulated more than once in a backward pass, only full buckets are."""
        self._views = GradientViews(self.deferral.parameters, as_views=wrapped.wants_views)
        self._hooks = GradientHooks()
        self._pre_forward_hooks = PreForwardHooks(wrapped.ddp.module, self.deferral)
        self._backward: Literal["reducer", "engine"] | None = None
        """What exchanges the running backward pass; None if none runs or it is not exchanged."""

    # ------------------------------------------------------------------ from start to stop

    def start(self, order: list[str]) -> None:  # noqa: ARG002
        """Attach all hooks; those on gradients must come after the reducer's own."""
        before, accumulated = weakly(self._before), weakly(self._accumulated)
        for index, parameter in enumerate(self.deferral.parameters):
            after = functools.partial(accumulated, index) if self._by_tensor else None
            self._hooks.add(parameter, before, after)
        if self.defers:
            self._pre_forward_hooks.attach()

    def stop(self) -> None:
        """Finish the exchange and all deferred updates, and remove hooks and views."""
        self.deferral.stop()
        self._engine.wait_all(on_host=True)
        self._pre_forward_hooks.detach()
        self._hooks.remove()
        self._views.leave()
        self._shutdown.cancel()
        self._engine.close()

    def __del__(self) -> None:
        """Let the engine end by itself, without waiting or locking: the wrapper was dropped."""
        if hasattr(self, "_shutdown"):
            self.deferral.outlive()
            self._engine.drain()

    def let_defer(self) -> None:
        """Overlap the exchange with forward passes from now on, if the plan says so."""
        self.deferral.guard = self._wrapped.guard
        if self._wrapped.can_defer and self._waits_by_need and not self.defers:
            self.defers = True
            self._pre_forward_hooks.attach()

    def stop_deferring(self) -> None:
        """Let backward wait for the whole exchange from now on."""
        self.deferral.synchronize()
        self.defers = False
        self._pre_forward_hooks.detach()

    # ------------------------------------------------------------------ rounds

    def begin_forward(self, *, exchanged: bool) -> None:
        """Start waiting, module by module, for the parameters that the forward pass reads."""
        if exchanged:
            self._engine.require_whole()
        self.deferral.begin_forward()

    def keeping_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which the reducer can make buckets without changing gradients."""
        return nullcontext() if self._first_rounds.usable else self._views.kept()

    def hook(self) -> Callable[[object, GradBucket], Future[torch.Tensor]]:
        """Return the function that takes full buckets, for ``register_comm_hook``."""
        reference = weakref.ref(self)  # as in weakly()

        def take_bucket(_: object, bucket: GradBucket) -> Future[torch.Tensor]:
            executor = reference()
            assert executor is not None
            first = executor._first_rounds
            # In the first round of a static graph all buckets come when backward ends, unnumbered.
            unnumbered = not (executor._by_tensor or executor._rounds)
            if executor._backward is not None and (bucket.is_last() or unnumbered):
                # The reducer queues its own callback after its last bucket; a callback queued by a
                # callback runs after it. It must not be queued earlier: callbacks queued in a
                # nested backward pass (reentrant checkpointing) run when the nested pass ends.
                queue_callback(functools.partial(queue_callback, executor._end))
            if executor._backward == "engine":
                executor._engine.ready(executor.buckets[first.number_of(bucket)])
                return done(bucket.buffer())
            if executor._backward == "reducer" and executor._has_final_buckets():
                first.note(bucket)
            return first.exchange(bucket)

        return take_bucket

    def _has_final_buckets(self) -> bool:
        """Whether the buckets are final; with ``find_unused_parameters``, the first ones are."""
        if self._wrapped.keeps_first_buckets:
            return self._rounds > 0
        return has_final_buckets(self._wrapped.ddp)

    def _before(self, *_: Any) -> None:
        """Begin a round before its first gradient is accumulated, and finish the previous one."""
        if self._backward is not None:
            if self._expected:
                # If a gradient had reached the reducer, torch's forward pass would have raised.
                raise PeerError(
                    "the last backward pass broke off while gradients were exchanged, so the ranks "
                    "are desynchronized; resume all of them from the last checkpoint"
                )
            return
        if self.deferral.pending:
            self.deferral.synchronize()
        self.deferral.begin_backward()
        self.mixed = not self._expected
        if self.mixed:
            return
        self._expected = False
        if self._compressing is not None:
            self._compressing.begin_round()
        by_engine = self._first_rounds.usable
        self._backward = "engine" if by_engine else "reducer"
        self._views.begin()
        if by_engine:
            self._engine.begin([self._wrapped.updates - self._updates_before])

    def _accumulated(self, index: int, *_: Any) -> None:
        # All Python hooks of a node run at the position of the first one registered. That may be
        # before the current reducer's hook, which then has not copied the gradient yet.
        if self._backward == "engine" and self._views.take(index):
            self._engine.ready((index,))

    def _end(self) -> None:
        if self._backward is None:
            return
        by_engine = self._backward == "engine"
        self._backward = None
        self._rounds += 1
        self._engine.check()
        foreign = self._views.foreign
        if by_engine:
            self.deferral.wait_for(foreign)
        self._views.end(known=self._first_rounds.usable)
        if by_engine and self.defers:
            self.deferral.suspend_gradients()
            self.deferral.deliver(foreign)  # the program may read them without our notice
        else:
            if by_engine:
                self.deferral.wait_for_all()
            if self._compressor is not None:
                self._compressor.close([p.grad for p in self.deferral.parameters])
        if self._compressing is not None:
            self._compressing.end_round(self._engine.plan)
        self._finished()

    # ------------------------------------------------------------------ what was observed

    @property
    def mismatch(self) -> str | None:
        """How the reducer's buckets differ from the layout, once seen."""
        return self._first_rounds.mismatch

    @property
    def exposed_s(self) -> float | None:
        """Seconds that the last iteration waited for messages."""
        return self.deferral.waits.stall_ns / NS_PER_S

    def recorded(self) -> EngineTimes:
        """Return the finished messages of the last two rounds, and waits since the last call."""
        return EngineTimes(self._engine.times(), self.deferral.waits.take_waits())

    def forced_syncs(self, *, always: bool = False) -> tuple[str, Norm | None] | None:
        """Say why almost no communication overlapped forward passes since the last call."""
        return self.deferral.waits.forced_syncs(always=always) if self.defers else None

    def sample(self, iteration_s: float) -> Sample | None:
        """Return the times of an iteration, from the last finished round."""
        messages = self._engine.last_round()
        if not messages:
            return None
        begun_ns = min(m.issued_ns for m in messages)
        ended_ns = max(m.finished_ns for m in messages)
        return Sample(
            computation_s=max(iteration_s - self.deferral.waits.stall_ns / NS_PER_S, 0.0),
            communication_s=(ended_ns - begun_ns) / NS_PER_S,
        )
