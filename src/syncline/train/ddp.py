"""``DistributedDataParallel``: torch's, with measured, planned and checked gradient exchange."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.compressed import compressed
from syncline.plan.profile import Profile
from syncline.plan.recipe import Compression
from syncline.torch_private import (
    DDP_ARGUMENTS,
    TorchDDP,
    arguments_of,
    disable_dynamo,
    eval_frame_callback,
    has_comm_hook,
)
from syncline.train.compressible import Compressible
from syncline.train.engine.compression import Compressing
from syncline.train.measure.exchange import telling_lost_peers
from syncline.train.measure.profiler import trainable_parameters
from syncline.train.memory import Memory
from syncline.train.monitoring import Monitored, with_own_errors
from syncline.train.overlap.averages import average_weights
from syncline.train.overlap.deferred_optimizer import innermost
from syncline.train.overlap.sharded_optimizer import ShardedOptimizer
from syncline.train.planned_training import PlannedTraining, UnplannedTraining
from syncline.train.requirements import COPIED, require_accepted, require_given_fits, why_untried
from syncline.train.shutdown import let_gloo_finish
from syncline.train.stages import Settings
from syncline.train.wrapped import Wrapped

Cache = bool | str | os.PathLike[str]


@with_own_errors
class DistributedDataParallel(Monitored, Compressible, TorchDDP):
    """A drop-in for ``torch.nn.parallel.DistributedDataParallel`` that plans its messages.

    It runs torch's own class for the first iterations while it measures them and the network,
    plans on rank 0, gives the reducer the plan's messages as its buckets, and trains on. If the
    planned iterations are slower than the measured baseline by more than noise, it goes back to
    DDP's buckets and logs it. When computation or communication drifts by more than 20 % for
    100 iterations, it measures again. Measuring uses ordinary training steps; none is discarded.
    At two ranks, results equal those of torch's class to the last bit. The decision is saved, so
    the next start of the same training runs its plan from the first step.

    Args:
        module: as for torch's class; all other arguments of that class are accepted, too.
        planner: ``"auto"``, or the name of the planner that makes the plan. Settings may follow it:
            ``"horovod:cycle_s=0.005"``.
        plan: use this plan instead of measuring and planning.
        profile: use this profile instead of measuring one.
        network: use this network instead of probing.
        check: go back to DDP's buckets if the plan is slower than they are.
        compression: exchange gradients lossily: a ``Recipe`` for sparse exchange, or
            ``"bfloat16"`` or ``"float16"`` for values of 16 bits, or ``"int8"`` for 8 bits with
            error feedback. Measured and checked like any plan, so the first steps are dense; with
            ``check=False`` every step is compressed.
        overlap_optimizers: call :meth:`overlap` for every optimizer of this model's parameters
            when it makes its first step.
        cache: the folder in which rank 0 saves the decision for the next start; ``True`` for the
            user's cache, ``False`` for none.

    Raises:
        UserError: an unknown planner, arguments that exclude each other, or a model that another
            wrapper already exchanges.
        MismatchError: the plan or profile is for another model or worker count.

    A model that cannot be planned (sparse gradients, several devices, torch's experimental
    ``mixed_precision`` argument, optimizers that run in backward, delayed parameters, the Python
    reducer) trains with DDP's buckets; the reason is logged once. So does every
    model under a torch newer than those that Syncline was tested with, whose DDP may have changed.
    An older torch is refused: it lacks parts that even delegating to torch's class needs.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        planner: str = "auto",
        plan: Plan | None = None,
        profile: Profile | None = None,
        network: Network | None = None,
        check: bool = True,
        compression: Compression | None = None,
        overlap_optimizers: bool = False,
        cache: Cache = True,
        **kwargs: Any,
    ) -> None:
        arguments = dict(zip(DDP_ARGUMENTS, args, strict=False)) | kwargs
        settings = Settings(
            planner=planner,
            plan=plan,
            profile=profile,
            network=network,
            check=check,
            compression=compression,
            overlap_optimizers=overlap_optimizers,
        )
        require_accepted(module, arguments, settings)
        self._in_torch = True
        with telling_lost_peers("while the model was sent to all ranks"):
            super().__init__(module, *args, **kwargs)
        self._begin(settings, cache)

    @classmethod
    def convert(cls, ddp: TorchDDP, **options: Any) -> Self:
        """Convert a model wrapped by torch's class to this class, in place.

        It stays the same object, because the framework that made it may refer to it.
        Call on all ranks, before the first forward pass. The options are ``planner``, ``plan`` and
        so on, as for this class.

        Raises:
            UserError: as for the constructor; or ``ddp`` is of another class, or has a
                communication hook.
            MismatchError: as for the constructor; or the ranks differ.
        """
        if type(ddp) is not TorchDDP:
            raise UserError(
                "expected a model wrapped in torch.nn.parallel.DistributedDataParallel, found a "
                f"{type(ddp).__name__}"
            )
        if has_comm_hook(ddp):
            raise UserError(
                "the wrapped model has a communication hook, which replaces the exchange that "
                "Syncline plans; leave the hook out, or torch's class as it is"
            )
        cache = options.pop("cache", True)
        settings = Settings(**options)
        require_accepted(ddp.module, arguments_of(ddp), settings)
        ddp.__class__ = cls
        assert isinstance(ddp, cls)
        try:
            ddp._begin(settings, cache)
        except BaseException:
            ddp.__class__ = TorchDDP  # type: ignore[assignment]
            raise
        return ddp

    def _begin(self, settings: Settings, cache: Cache) -> None:
        """Prepare planning, once torch's class has wrapped the model."""
        plan, compression = settings.plan, settings.compression
        let_gloo_finish()
        self._in_torch = False
        wrapped = Wrapped(self, exchanged_parameters(self))
        if plan is not None and compression is not None:
            plan = compressed(plan, compression)
        settings = replace(settings, plan=plan, ddp=wrapped.own_buckets())
        require_given_fits(wrapped, settings)
        self._training: UnplannedTraining
        reason = why_untried() or wrapped.why_not_planned()
        if reason is not None:
            self._training = UnplannedTraining(wrapped, reason, compression)
            return
        if compression is not None:
            wrapped.compressing = Compressing(compression, wrapped.parameters, self.process_group)
        memory = None if cache is False else Memory(None if cache is True else Path(cache))
        self._training = PlannedTraining(wrapped, settings, memory)

    # ------------------------------------------------------------------ training

    @disable_dynamo(recursive=False)  # as torch's own forward: only the module is compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module as torch's class does, and measure and exchange as the stage says."""
        training = self._training
        if training.runner is not None and training.wrapped.ddp is not self and not training.begun:
            wrapped = Wrapped(self, training.wrapped.parameters)
            training = UnplannedTraining(wrapped, COPIED, training.wrapped.compressing)
            self._training = training
        # Not asked in begin_forward: inside a function that is not compiled, it returns None.
        compiled = eval_frame_callback() is not None
        training.begin_forward((inputs, kwargs), compiled=compiled)
        try:
            output = super().forward(*inputs, **kwargs)
        finally:
            training.leave_forward()
        training.end_forward(output)
        return output

    def expect_backward(self, loss: torch.Tensor) -> None:
        """Exchange the next backward pass even if the forward pass has not prepared that.

        For frameworks that switch ``require_backward_grad_sync`` off in the forward pass and
        prepare torch's reducer right before ``backward()`` is called on ``loss``.
        """
        self._training.expect_backward(loss)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as in torch's class; the time in evaluation mode is not measured."""
        super().train(mode)
        runner = self._training.runner
        if not mode and runner is not None:
            runner.iterations.leave_training()
        return self

    # ------------------------------------------------------------------ the update

    def overlap(
        self, optimizer: torch.optim.Optimizer, *, guard: bool = False, shard: bool = False
    ) -> torch.optim.Optimizer:
        """Overlap the exchange with the next forward pass; update each parameter just before use.

        From now on the optimizer's ``step`` returns at once. In the next forward pass each module
        waits only for its own gradients, and its parameters are updated just before it runs, with
        the hyper-parameters as they were at ``step``. Any other read of a parameter or gradient
        waits for it. Steps are synchronous if the optimizer's update of a parameter depends on
        other parameters, if it is stepped with a closure, or if it has step hooks; the reason is
        logged once.

        Call on all ranks, once for each optimizer, before the first forward pass.

        Args:
            optimizer: holds parameters of this model; it keeps its class, state and groups. Its
                other parameters are updated at once, or by another wrapper that overlaps it. If a
                framework has wrapped it in an optimizer of its own (Accelerate, Lightning, timm's
                Lookahead), the inner one's step is deferred. It is returned as it was given.
            guard: also intercept C++ code that reads a parameter or gradient without asking its
                Python class, such as ``torch.tensor(p)`` or an extension, and make it wait. A
                warning names each place in the code that does so. It costs about 25 us per
                parameter and iteration; use it to find such reads, or if they cannot be changed. It
                applies to all optimizers of this wrapper, and works on CPUs only.
            shard: each rank keeps the optimizer's state of its own share of the parameters only,
                and updates only that share (ZeRO, stage 1). ``optimizer.state[p]`` is this rank's
                share, of shape ``(elements,)``; :meth:`full_state_dict` collects the whole state.
                All optimizers of a model are sharded, or none.

        Raises:
            UserError: called twice for this optimizer or after training has begun, or the optimizer
                holds no parameter of this model; or it cannot be sharded.
        """
        self._training.require_not_begun("overlap")
        self._training.overlap(innermost(optimizer), guard=guard, shard=shard)
        return optimizer

    def full_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Collect the state of a sharded optimizer, in the format of its own ``state_dict``.

        Call on all ranks. Load it with ``optimizer.load_state_dict`` on all ranks; then the number
        of ranks may differ, and the optimizer need not be sharded.

        Args:
            optimizer: given to :meth:`overlap` with ``shard=True``.

        Returns:
            The whole state on rank 0, its tensors on the CPU; ``{}`` on other ranks.

        Raises:
            UserError: this optimizer of this model is not sharded.
        """
        return self._sharded(optimizer, "full_state_dict").full_state_dict()

    def sharded_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of a sharded optimizer for ``torch.distributed.checkpoint.save``.

        Call on all ranks. Each rank gets only its part, as ``DTensor`` of shape ``(elements,)``.
        Argument and errors are those of :meth:`full_state_dict`.
        """
        return self._sharded(optimizer, "sharded_state_dict").sharded_state_dict()

    def load_sharded_state_dict(
        self, optimizer: torch.optim.Optimizer, checkpoint: Any, *, key: str = "optimizer"
    ) -> None:
        """Load the state of a sharded optimizer with ``torch.distributed.checkpoint``.

        Call on all ranks; there may be more or fewer of them than when it was saved.

        Args:
            optimizer: given to :meth:`overlap` with ``shard=True``.
            checkpoint: a folder, or a ``StorageReader``. DCP keeps its index in a pickle: load only
                checkpoints that you trust.
            key: the key under which the :meth:`sharded_state_dict` was saved.

        Raises:
            UserError: this optimizer of this model is not sharded.
            FileError: the checkpoint holds no such state, or that of another optimizer.
        """
        self._sharded(optimizer, "load_sharded_state_dict").load_sharded_state_dict(checkpoint, key)

    def _sharded(self, optimizer: torch.optim.Optimizer, method: str) -> ShardedOptimizer:
        inner = innermost(optimizer)
        for known in self._training.wrapped.optimizers:
            if known.optimizer is inner and isinstance(known, ShardedOptimizer):
                return known
        raise UserError(
            f"{method} is for optimizers that this model shards; call optimizer.state_dict(), or "
            "model.overlap(optimizer, shard=True) before training"
        )

    @property
    def defers(self) -> bool:
        """Whether an update can wait for the next forward pass."""
        return self._training.wrapped.can_defer

    def synchronize(self) -> None:
        """Wait for all gradients, and apply all deferred updates.

        It is needed only before code that reads parameters, gradients or the optimizer's state
        without torch's Python interface.

        Raises:
            PeerError: a rank failed or did not answer within the group's timeout.
            MismatchError: the ranks are desynchronized.
        """
        self._training.synchronize()

    def average(self, averages: Iterable[torch.Tensor], weight: float) -> None:
        """Update moving averages of the weights (EMA) without waiting for the whole exchange.

        Each average moves by a fraction of its difference from the weight, right after the deferred
        update of that parameter. Averaging code of your own would read, and so wait for, all
        parameters. ``torch.optim.swa_utils.AveragedModel`` needs no such call.

        Args:
            averages: a tensor for each of ``module.parameters()``, in their order. A read of one
                waits for the update of its parameter.
            weight: the fraction, 1 - decay.

        Raises:
            UserError: the averages do not fit the parameters.
        """
        average_weights(self.module, averages, weight)

    # ------------------------------------------------------------------ torch's own

    @contextlib.contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Train with uneven inputs, as torch's ``join``; the buckets do not change meanwhile.

        With ``enable=False`` it does nothing, as in torch.
        """
        try:
            with super().join(*args, **kwargs):
                yield
        finally:
            self._training.end_join()

    def join_hook(self, **kwargs: Any) -> Any:
        """Prepare for uneven inputs, as torch's ``join_hook``; DDP's reducer exchanges meanwhile.

        It replaces the engine in the first forward pass, since torch does not say here whether the
        context is enabled. A rank without inputs switches before it shadows another rank's pass.
        """
        training = self._training
        training.begin_join()
        hook = super().join_hook(**kwargs)
        answer = hook.main_hook

        def main_hook() -> None:
            if training.runner is not None:
                training.runner.leave_engine()
            answer()

        hook.main_hook = main_hook
        return hook

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refuse communication hooks with a UserError: they replace the exchange that is planned.

        Only torch itself may register them, during construction.
        """
        if not self._in_torch:
            raise UserError(
                "register_comm_hook is not available: a hook would replace the exchange that "
                "Syncline plans and measures; use torch's DistributedDataParallel for this hook"
            )
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Refuse torch's own communication hooks too; see :meth:`register_comm_hook`."""
        self.register_comm_hook(None, comm_hook_type)

    def _set_static_graph(self) -> None:
        super()._set_static_graph()
        if not self._in_torch:
            self._training.executor.follow()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        super()._set_ddp_runtime_logging_sample_rate(sample_rate)
        self._training.wrapped.sample_rate = sample_rate

    def _update_process_group(self, new_process_group: Any) -> None:
        """Refuse another process group with a UserError: measurements and plan are of this one."""
        if self._training.runner is not None:
            raise UserError(
                "_update_process_group is not available: Syncline measures and plans for the ranks "
                "that the model was wrapped with; wrap the model again, or use torch's "
                "DistributedDataParallel"
            )
        super()._update_process_group(new_process_group)

    @disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        executor = self._training.executor
        with telling_lost_peers("before the forward pass"), executor.keeping_gradients():
            return super()._pre_forward(*inputs, **kwargs)

    def _sync_buffers(self) -> None:
        begun_ns = time.perf_counter_ns()
        super()._sync_buffers()
        self._training.wrapped.broadcast_ns += time.perf_counter_ns() - begun_ns

    def _lazy_init(self) -> None:
        self._in_torch = True
        try:
            super()._lazy_init()
        finally:
            self._in_torch = False

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        state: dict[str, Any] = super().__getstate__()
        # Measurements belong to this process; a copy trains with DDP's buckets.
        state["_comm_hooks"] = []
        state["_training"] = self._training.wrapped.why_not_deferred
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        reason = state.pop("_training")
        super().__setstate__(state)
        wrapped = Wrapped(self, exchanged_parameters(self))
        wrapped.why_not_deferred = reason
        self._training = UnplannedTraining(wrapped)


def exchanged_parameters(ddp: TorchDDP) -> dict[str, nn.Parameter]:
    """Return the parameters that torch's class exchanges, by name."""
    parameters = trainable_parameters(ddp.module).items()
    return {name: p for name, p in parameters if name not in ddp.parameters_to_ignore}


def planned_training(model: DistributedDataParallel) -> PlannedTraining:
    """Return a model's planned training; raise UserError if it is not planned, or no longer."""
    training = model._training
    if not isinstance(training, PlannedTraining):
        raise UserError(f"this training is not planned: {training.why or 'it is a copy'}")
    return training
