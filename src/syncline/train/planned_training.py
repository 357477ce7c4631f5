"""``PlannedTraining``: what a wrapper adds to torch's DDP during training.

:class:`~syncline.train.ddp.DistributedDataParallel` delegates to one of two classes:
:class:`PlannedTraining` measures, plans and overlaps; :class:`UnplannedTraining` leaves everything
to torch.
"""

from __future__ import annotations

from typing import Any

import torch

from syncline.errors import UserError
from syncline.torch_private import disable_dynamo, is_compiled, is_joining, is_tensor_parallel
from syncline.train.compilation import why_not_compiled
from syncline.train.executor import Executor
from syncline.train.log import about, warn
from syncline.train.measure.exchange import telling_lost_peers
from syncline.train.measure.observer import tensors_in
from syncline.train.measure.step_hooks import before_steps
from syncline.train.measured_iterations import Forward
from syncline.train.memory import Memory
from syncline.train.overlap.averages import average_with_torch
from syncline.train.overlap.deferral import Deferral
from syncline.train.overlap.deferred_optimizer import DeferredOptimizer
from syncline.train.overlap.guard import Guard
from syncline.train.overlap.sharded_optimizer import ShardedOptimizer
from syncline.train.overlap.sharding import Sharding
from syncline.train.overlap.trial import parameters_of
from syncline.train.reducer import Reducer
from syncline.train.requirements import (
    SHARED_MEMORY,
    TENSOR_PARALLEL,
    require_outermost,
    require_same_ranks,
    require_shardable,
)
from syncline.train.stage_runner import StageRunner
from syncline.train.stages import Findings, Settings, Stage
from syncline.train.tuning import Tuning
from syncline.train.unexchanged import UnexchangedWatch
from syncline.train.wrapped import Wrapped


class UnplannedTraining:
    """Training by torch's class alone: nothing is measured, planned or deferred.

    ``why`` is the reason, which is logged; None for a copy. If compression was asked for, raise
    UserError.
    """

    runner: StageRunner | None = None  # runs the stages of a planned training; None without a plan

    def __init__(
        self, wrapped: Wrapped, why: str | None = None, compression: object = None
    ) -> None:
        if compression is not None:
            raise UserError(f"gradients cannot be compressed here: {why}")
        self.wrapped = wrapped
        self.why = why
        self._nothing = Executor(wrapped, lambda: None)
        self._join_ended = False
        """Whether our ``join`` context has ended, and no other one has begun since."""
        self._unexchanged = UnexchangedWatch(wrapped)
        if why is not None:
            warn(about(wrapped.module, f"training with DDP's buckets: {why}"))

    @property
    def begun(self) -> bool:
        """Whether an iteration has begun."""
        return self.runner is not None and self.runner.iterations.begun

    @property
    def executor(self) -> Executor:
        """What exchanges the gradients now; without a plan torch alone does."""
        return self._nothing

    @property
    def deferral(self) -> Deferral | None:
        """Tracks what is deferred to the next forward pass; None if nothing can be."""
        return self.executor.deferral

    @property
    def stage(self) -> Stage:
        """The stage that training is in."""
        return Stage(name="steady") if self.runner is None else self.runner.stage

    @property
    def findings(self) -> Findings:
        """What is known by now."""
        return Findings() if self.runner is None else self.runner.tuning.findings

    @disable_dynamo
    def begin_forward(self, batch: object, *, compiled: bool) -> None:  # noqa: ARG002
        """Prepare a forward pass of a batch.

        Once training has begun, nothing here waits for other ranks: they may skip this pass.
        ``compiled`` is whether the wrapper itself is compiled.
        """
        if torch.is_grad_enabled():
            self._unexchanged.begin()

    @disable_dynamo
    def leave_forward(self) -> None:
        """Call when a forward pass has ended, even with an error."""
        self.executor.end_forward()

    @disable_dynamo
    def end_forward(self, output: Any) -> None:
        """Call with the output of a forward pass."""

    def expect_backward(self, loss: torch.Tensor) -> None:
        """Prepare an exchanged backward pass after a forward pass that did not prepare it."""

    def begin_join(self) -> None:
        """Call when uneven inputs are prepared for."""
        self._join_ended = False

    def end_join(self) -> None:
        """Call when uneven inputs are over."""
        self._join_ended = True
        if self.runner is not None:
            self.runner.return_to_engine()

    def overlap(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        guard: bool = False,  # noqa: ARG002
        shard: bool = False,
    ) -> None:
        """Defer the updates of an optimizer."""
        if shard and self.why is not None:
            raise UserError(f"overlap(shard=True): nothing can be sharded here: {self.why}")
        known = {id(parameter) for parameter in self.wrapped.module.parameters()}
        if known.isdisjoint(map(id, parameters_of(optimizer))):
            raise UserError(
                "the optimizer holds no parameter of this model; give overlap an optimizer of this "
                "model's parameters"
            )

    def synchronize(self) -> None:
        """Wait for all gradients, and apply all deferred updates."""
        if self.deferral is not None:
            self.deferral.finish()

    def require_not_begun(self, method: str) -> None:
        """Raise a UserError once training has begun."""
        if self.begun:
            raise UserError(
                f"{method} was called after training had begun; call it before the first forward "
                "pass"
            )


class PlannedTraining(UnplannedTraining):
    """Training that is measured, planned and overlapped."""

    runner: StageRunner

    def __init__(self, wrapped: Wrapped, settings: Settings, memory: Memory | None) -> None:
        super().__init__(wrapped)
        self._reported_synchronous: str | None = None
        """The reason for synchronous updates that was logged last."""
        self._consistency_checks_left = 2 if settings.overlap_optimizers else 1
        self.tuning = Tuning(wrapped, settings, memory)
        self.reducer = Reducer(wrapped, self._end_iteration)
        self.runner = StageRunner(wrapped, self.tuning, self.reducer)
        self._iterations = self.runner.iterations
        if settings.overlap_optimizers:
            wrapped.will_overlap = True
            before_steps.add(self._overlap_at_first_step)
        if settings.plan is not None and not settings.check:
            self.reducer.make_group(settings.plan)

    @property
    def executor(self) -> Executor:
        """What exchanges the gradients now."""
        return self.reducer.executor

    @property
    def mixed(self) -> bool:
        """Whether a backward pass without exchange has followed the last exchanged one."""
        return self.executor.mixed

    # ------------------------------------------------------------------ training

    @disable_dynamo
    def begin_forward(self, batch: object, *, compiled: bool) -> None:
        """Prepare a forward pass of a batch; see :meth:`UnplannedTraining.begin_forward`."""
        runner, compressing = self.runner, self.wrapped.compressing
        if not self.begun:
            require_outermost(self.wrapped)
        if compiled and self.wrapped.why_not_deferred is None:
            self.stop_deferring(why_not_compiled(self.wrapped.module))
        super().begin_forward(batch, compiled=compiled)
        self.executor.poll()
        if self._is_joining():
            if self.wrapped.sharding is not None:
                raise UserError(
                    "join cannot be used with overlap(shard=True): every rank must make every "
                    "step, to gather the parameters; leave shard out"
                )
            runner.leave_engine()
        else:
            runner.return_to_engine()
        if compressing is not None:
            compressing.forget_delivered()
        if not self.begun and torch.is_grad_enabled() and not self._is_joining():
            # Also under no_sync(): a reducer notes there, too, which parameters are used, so it
            # must not be replaced between that backward pass and the one that is exchanged.
            if compressing is not None:
                self._require_same_ranks()
            runner.begin(next((len(t) for t in tensors_in(batch) if t.dim()), None))
        exchanged = self._is_exchanged()
        if exchanged:
            self.reducer.make_changes()
        self._iterations.begin_forward(self._forward_now())
        self.executor.begin_forward(exchanged=exchanged)

    @disable_dynamo
    def end_forward(self, output: Any) -> None:
        """Call with the output of a forward pass."""
        if self._is_exchanged():
            self.executor.expect(output)
        self._iterations.end_forward(self._forward_now(), output)

    def expect_backward(self, loss: torch.Tensor) -> None:
        """Prepare an exchanged backward pass after a forward pass that did not prepare it."""
        # While a change of buckets is pending, a backward pass is no iteration of the next stage.
        if not self.reducer.changes:
            self.executor.expect(loss)
            if self._forward_now() is Forward.EXCHANGED:
                self._iterations.expect_backward(loss)

    @disable_dynamo
    def _end_iteration(self) -> None:
        """Call at the end of a backward pass, once its gradients are exchanged, on all ranks."""
        if not self.begun or self._is_joining():
            return
        with telling_lost_peers("at the end of a backward pass"):
            self.reducer.make_final()
            if self._consistency_checks_left:
                self._require_same_ranks()
            self.runner.end_iteration()
        self._unexchanged.check()

    def _require_same_ranks(self) -> None:
        """Check that all ranks have begun the same training."""
        self._consistency_checks_left -= 1
        require_same_ranks(self.wrapped)

    def _is_exchanged(self) -> bool:
        """Whether torch prepares the reducer for a backward pass after this forward pass."""
        return torch.is_grad_enabled() and self.wrapped.ddp.require_backward_grad_sync

    def _forward_now(self) -> Forward:
        """What becomes of the gradients of a forward pass made now."""
        if not torch.is_grad_enabled() or self._is_joining():
            return Forward.OTHER
        return Forward.EXCHANGED if self._is_exchanged() else Forward.ACCUMULATED

    def _is_joining(self) -> bool:
        """Whether ranks may run different numbers of iterations; if so, measure and change nothing.

        torch leaves its join configuration enabled when the context ends. We only see the end of
        our own context, so after a bare ``Join`` context the buckets never change again.
        """
        return is_joining(self.wrapped.ddp) and not self._join_ended

    # ------------------------------------------------------------------ the update

    def overlap(
        self, optimizer: torch.optim.Optimizer, *, guard: bool = False, shard: bool = False
    ) -> None:
        """Defer the updates of an optimizer."""
        super().overlap(optimizer, guard=guard, shard=shard)
        wrapped = self.wrapped
        if shard or wrapped.sharding is not None:
            require_shardable(wrapped, optimizer, shard=shard)
        if guard and wrapped.guard is None:
            wrapped.guard = Guard()
        if shard:
            wrapped.sharding = wrapped.sharding or Sharding(
                wrapped.parameters, wrapped.tensors(), wrapped.group
            )
            wrapped.optimizers.append(ShardedOptimizer(optimizer, wrapped.sharding, self))
            if len(wrapped.optimizers) > 1:
                self.stop_deferring("several sharded optimizers update this model")
        else:
            wrapped.optimizers.append(DeferredOptimizer.of(optimizer, self))
        if is_compiled(wrapped.module) and wrapped.why_not_deferred is None:
            self.stop_deferring(why_not_compiled(wrapped.module))
        if is_tensor_parallel(wrapped.parameters.values()):
            self.stop_deferring(TENSOR_PARALLEL)
        elif wrapped.share_memory:
            self.stop_deferring(SHARED_MEMORY)
        self._report_synchronous()
        average_with_torch()
        self.executor.let_defer()

    def _overlap_at_first_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Overlap an optimizer of this model's parameters that was not given to ``overlap``."""
        if any(o.optimizer is optimizer for o in self.wrapped.optimizers):
            return
        if not self.wrapped.parameter_ids.isdisjoint(map(id, parameters_of(optimizer))):
            self.overlap(optimizer)

    def stop_deferring(self, reason: str) -> None:
        """Apply updates synchronously from now on, and log the reason if that is a change."""
        self.wrapped.why_not_deferred = reason
        self.executor.stop_deferring()
        self._report_synchronous()

    def _report_synchronous(self) -> None:
        """Log why updates are not deferred, once there is an optimizer that would defer them."""
        reason = self.wrapped.why_not_deferred
        defers = any(optimizer.why_not is None for optimizer in self.wrapped.optimizers)
        if defers and reason not in (None, self._reported_synchronous):
            self._reported_synchronous = reason
            warn(about(self.wrapped.module, f"overlap: updates are synchronous: {reason}"))
