"""``DistributedDataParallel``: torch's, with measured, planned and checked gradient exchange."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from syncline.errors import MismatchError, UserError
from syncline.measure.exchange import telling_lost_peers
from syncline.measure.gradient_hooks import weakly
from syncline.measure.observer import tensors_in
from syncline.measure.step_hooks import before_steps
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.model.quantities import NS_PER_S
from syncline.model.recipe import Compression, Recipe
from syncline.model.run import Run
from syncline.parallel.agreement import require_same_ranks, require_same_training
from syncline.parallel.engine.compression import Compressing, require_compression
from syncline.parallel.log import warn
from syncline.parallel.memory import Memory
from syncline.parallel.overlap.averages import average, average_with_torch
from syncline.parallel.overlap.deferral import Deferral
from syncline.parallel.overlap.deferred_optimizer import DeferredOptimizer, innermost
from syncline.parallel.overlap.guard import Guard
from syncline.parallel.properties import with_own_errors
from syncline.parallel.record import record_of
from syncline.parallel.reducer import ReducerBuckets
from syncline.parallel.shutdown import let_gloo_finish
from syncline.parallel.stage_engine import StageEngine
from syncline.parallel.stage_runner import Forward, StageRunner
from syncline.parallel.stages import Settings
from syncline.parallel.tuning import Tuning
from syncline.parallel.unexchanged import UnexchangedWatch
from syncline.parallel.wrapped import Wrapped
from syncline.planners import planner_named
from syncline.planners.compressed import compressed
from syncline.sparse.session import Scaler
from syncline.torch_entry import advice, untried
from syncline.torch_private import (
    DDP_ARGUMENTS,
    active_ddp,
    arguments_of,
    disable_dynamo,
    eval_frame_callback,
    exposed_communication_ns,
    has_comm_hook,
    ignored_by_ddp,
    is_compiled,
    is_joining,
    is_tensor_parallel,
    logging_data,
    reducer_parameters,
)
from syncline.torch_private import Ddp as TorchDDP


def _why_not_compiled(module: nn.Module) -> str:
    """Say why a model that is compiled as a whole makes synchronous steps, and what to do."""
    blocks = "model.children()"
    most = sum(p.numel() for p in module.parameters()) / 2
    for name, inner in module.named_modules():
        held = sum(p.numel() for p in inner.parameters())
        if isinstance(inner, nn.ModuleList | nn.Sequential) and len(inner) > 1 and held > most:
            blocks, most = ".".join(["model", *name.split(".")]), held
    blocks = blocks.replace("._orig_mod", "").rstrip(".")
    return (
        "the whole model is compiled, so that every gradient comes at the end of the backward pass "
        "and no part of the model can wait for its own; compile it block by block instead, before "
        f"it is wrapped: for block in {blocks}: block.compile()"
    )


WRAPPED_TWICE = (
    "the model is wrapped in two DistributedDataParallel at once, one of them Syncline's, so that "
    "both would exchange its gradients; give the framework the model itself and let its adapter "
    "wrap it, or wrap it only here"
)
COPIED = (
    "a copy was put in the wrapper's place before the first forward pass, as Accelerate does to "
    "compile block by block (use_regional_compilation), and its parameters have other names; "
    "compile the blocks before prepare instead: for block in model.blocks: block.compile()"
)
TENSOR_PARALLEL = (
    "the model is tensor-parallel, too: it computes with distributed tensors made of its "
    "parameters' memory, and reads of these cannot be seen"
)


@with_own_errors
class DistributedDataParallel(TorchDDP):
    """A drop-in for ``torch.nn.parallel.DistributedDataParallel`` that plans its messages.

    It runs torch's own class for the first iterations while it measures them and the network,
    plans on rank 0, gives the reducer the plan's messages as its buckets, and trains on. If the
    planned iterations are slower than the measured baseline beyond noise it goes back to DDP's own
    buckets and says so once. When computation or communication drifts by more than 20 % for 50
    iterations it measures again. Measuring uses ordinary training steps, none of which is
    discarded, and at two ranks results are those of torch's class to the last bit. What was found
    is kept, so the next start of the same training runs its plan from the first step on.

    Args:
        module: as for torch's class; all its other arguments are taken too.
        planner: ``"auto"`` or the name of a planner; the plan is made by it.
        plan: use this plan instead of measuring and planning.
        profile: use this profile instead of measuring one.
        network: use this network instead of probing.
        check: go back to DDP's own buckets if the plan is slower than they are.
        compression: exchange gradients lossily: a ``Recipe`` for sparse exchange, or
            ``"bfloat16"`` or ``"float16"`` for values of 16 bits. Measured and checked like any
            plan, so the first steps are dense; with ``check=False`` every step is compressed.
        overlap_optimizers: call :meth:`overlap` for every optimizer of this model's parameters
            when it makes its first step.
        cache: the folder in which rank 0 keeps what was found for the next start; ``True`` for the
            user's cache, ``False`` for none.

    Raises:
        UserError: an unknown planner, arguments that exclude each other, or a model that a wrapper
            exchanges already.
        MismatchError: the plan or profile is for another model or worker count.

    What cannot be planned (sparse gradients, gradients of several dtypes, torch's experimental
    ``mixed_precision`` argument, optimizers that run in backward, delayed parameters, the Python
    reducer) trains with DDP's own buckets; the reason is logged once. So does everything under a
    torch newer than those that Syncline was tried with: there the class only hands its calls on to
    torch's, so results are torch's, while measuring and overlapping would rely on parts of DDP that
    may have changed. An older torch is refused, since it lacks some of what even that needs.
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
        cache: bool | str | os.PathLike[str] = True,
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
        _require_same(module, arguments, settings)
        self._in_torch = True
        with telling_lost_peers("while the model was sent to all ranks"):
            super().__init__(module, *args, **kwargs)
        self._begin(settings, cache)

    @classmethod
    def convert(cls, ddp: TorchDDP, **options: Any) -> Self:
        """Make an object of this class of a model that torch's class has wrapped.

        It stays the same object: the framework that has made it may refer to it.
        Call on all ranks, before the first forward pass.

        Args:
            ddp: of torch's own class.
            options: ``planner``, ``plan`` and so on, as for this class.

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
        _require_same(ddp.module, arguments_of(ddp), settings)
        ddp.__class__ = cls
        assert isinstance(ddp, cls)
        ddp._begin(settings, cache)
        return ddp

    def _begin(self, settings: Settings, cache: bool | str | os.PathLike[str]) -> None:
        """Prepare planning, once torch's class has wrapped the model."""
        plan, compression = settings.plan, settings.compression
        let_gloo_finish()
        self._runner: StageRunner | None = None
        """None where nothing is measured and planned: DDP's own buckets stay."""
        self._in_torch = False
        self._joined = False
        """Whether our ``join`` context has ended, and no other one has begun since."""
        self._told_synchronous: str | None = None
        """The reason that was logged last."""
        self._comparisons = 2 if settings.overlap_optimizers else 1
        """How many times the ranks will still compare what they train with."""
        self._exchanged = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        }
        self._wrapped = Wrapped(self, self._exchanged)
        self._unexchanged = UnexchangedWatch(self._wrapped)
        if plan is not None and compression is not None:
            plan = compressed(plan, compression)
        self._settings = replace(settings, plan=plan, ddp=self._wrapped.own_buckets())
        self._check_given()
        self._why_not_planned: str | None = None
        reason = _why_untried() or self._wrapped.why_not_planned()
        if reason is not None:
            self._leave_unplanned(reason)
            return
        if compression is not None:
            self._wrapped.compressing = Compressing(
                compression, self._exchanged, self.process_group
            )
        memory = None
        if cache is not False:
            memory = Memory(None if cache is True else Path(cache))
        self._tuning = Tuning(self._wrapped, self._settings, memory)
        self._reducer_buckets = ReducerBuckets(self._wrapped, self._end_iteration)
        self._runner = StageRunner(self._wrapped, self._tuning, self._reducer_buckets)
        if settings.overlap_optimizers:
            self._wrapped.will_overlap = True
            before_steps.add(self._overlap_at_first_step)
        if plan is not None and not settings.check:
            self._reducer_buckets.meet(plan)

    def _leave_unplanned(self, reason: str) -> None:
        """Train with DDP's own buckets, and log why."""
        if self._settings.compression is not None:
            raise UserError(f"gradients cannot be compressed here: {reason}")
        self._runner, self._why_not_planned = None, reason
        warn(f"training with DDP's own buckets: {reason}")

    # ------------------------------------------------------------------ training

    @disable_dynamo(recursive=False)  # as torch's own forward: only the module is compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; measure, if this is the start of a measured iteration."""
        # Checked here: inside any function that is called from here it would be None.
        self._begin_forward((inputs, kwargs), compiled=eval_frame_callback() is not None)
        try:
            output = super().forward(*inputs, **kwargs)
        finally:
            self._leave_forward()
        self._end_forward(output)
        return output

    @disable_dynamo
    def _begin_forward(self, batch: object, *, compiled: bool) -> None:
        """Prepare a forward pass of a batch.

        Once training has begun, nothing here waits for other ranks: they may skip this pass.
        """
        if self._runner is not None and not self._runner.begun:
            self._require_outermost()
            if self._wrapped.ddp is not self:
                self._leave_unplanned(COPIED)
        if compiled and self._wrapped.why_not_deferred is None:
            self._stop_deferring(_why_not_compiled(self.module))
        if torch.is_grad_enabled():
            self._unexchanged.begin()
        runner = self._runner
        if runner is None:
            return
        self._reducer_buckets.look()
        if self._joins():
            runner.leave_engine()
        else:
            runner.return_to_engine()
        compressing = self._wrapped.compressing
        if compressing is not None:
            compressing.forget_delivered()
        if not runner.begun and torch.is_grad_enabled() and not self._joins():
            # Under no_sync(), too: there a reducer also notes which parameters are used, so it must
            # not be replaced between that backward pass and the one that is exchanged.
            if compressing is not None:
                self._require_same_ranks()
            runner.begin(next((len(t) for t in tensors_in(batch) if t.dim()), None))
        exchanged = self._is_exchanged()
        if exchanged:
            self._reducer_buckets.make_changes()
        runner.begin_forward(self._forward_now())
        deferral = self._deferral()
        if deferral is not None:
            if exchanged:
                deferral.engine.require_whole()
            deferral.begin_forward()

    @disable_dynamo
    def _end_forward(self, output: Any) -> None:
        if self._runner is None:
            return
        if self._is_exchanged():
            self._reducer_buckets.expect(output)
        self._runner.end_forward(self._forward_now(), output)

    def expect_backward(self, loss: torch.Tensor) -> None:
        """Prepare an exchanged backward pass after a forward pass that did not prepare it.

        For frameworks that switch ``require_backward_grad_sync`` off in the forward pass and
        prepare torch's reducer right before ``backward()``.

        Args:
            loss: what ``backward`` is called on.
        """
        # What is exchanged before a change that waits is no iteration of the stage that comes.
        if self._runner is not None and not self._reducer_buckets.changing:
            self._reducer_buckets.expect(loss)
            if self._forward_now() is Forward.EXCHANGED:
                self._runner.expect_backward(loss)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as in torch's class; the time in evaluation mode is not measured."""
        super().train(mode)
        if self._runner is not None and not mode:
            self._runner.leave_training()
        return self

    @disable_dynamo
    def _leave_forward(self) -> None:
        deferral = self._deferral()
        if deferral is not None:
            deferral.end_forward()

    @disable_dynamo
    def _end_iteration(self) -> None:
        """Call at the end of a backward pass, once its gradients are exchanged, on all ranks."""
        runner = self._runner
        if runner is None or not runner.begun or self._joins():
            return
        with telling_lost_peers("at the end of a backward pass"):
            self._reducer_buckets.make_final()
            if self._comparisons:
                self._require_same_ranks()
            runner.end_iteration()
        self._unexchanged.look()

    def _require_outermost(self) -> None:
        """Raise where another wrapper exchanges this one's gradients as well."""
        outer = active_ddp()
        if outer is not None and outer is not self:
            ours = self._wrapped.parameter_ids
            if any(id(p) in ours for p in reducer_parameters(outer)[0]):
                raise UserError(WRAPPED_TWICE)

    def _require_same_ranks(self) -> None:
        """Make sure that all ranks have begun the same training."""
        self._comparisons -= 1
        optimizers, compressing = self._wrapped.optimizers, self._wrapped.compressing
        state = None if compressing is None else compressing.description()
        require_same_ranks(optimizers, state, self.module, self.process_group)

    def _is_exchanged(self) -> bool:
        """Whether torch prepares the reducer, after this forward pass, for a backward pass."""
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def _stop_deferring(self, reason: str) -> None:
        """Make updates at once from now on, and log the reason if that is a change."""
        self._wrapped.why_not_deferred = reason
        if self._engine is not None:
            self._engine.stop_deferring()
        self._tell_synchronous()

    def _tell_synchronous(self) -> None:
        """Log why updates are not deferred, once there is an optimizer that would defer them."""
        reason = self._wrapped.why_not_deferred
        defers = any(optimizer.why_not is None for optimizer in self._wrapped.optimizers)
        if defers and reason not in (None, self._told_synchronous):
            self._told_synchronous = reason
            warn(f"overlap: updates are synchronous: {reason}")

    def _forward_now(self) -> Forward:
        """What becomes of the gradients of a forward pass made now."""
        if not torch.is_grad_enabled() or self._joins():
            return Forward.OTHER
        return Forward.EXCHANGED if self._is_exchanged() else Forward.ACCUMULATED

    def _joins(self) -> bool:
        """Whether ranks may run different numbers of iterations: nothing is measured or changed.

        torch leaves the configuration enabled when the context ends, so only the end of our own
        context is known; after a bare ``Join`` context the buckets do not change any more.
        """
        return is_joining(self) and not self._joined

    # ------------------------------------------------------------------ the update

    def overlap(
        self, optimizer: torch.optim.Optimizer, *, guard: bool = False
    ) -> torch.optim.Optimizer:
        """Let the exchange go on under the next forward pass, and update each parameter there.

        From here on the optimizer's ``step`` returns at once. In the next forward pass each module
        waits only for its own gradients, and its parameters are updated just before it runs, with
        the hyper-parameters as they were at ``step``. Whatever else reads a parameter or gradient
        waits for it. An optimizer whose update of a parameter depends on other parameters makes
        synchronous steps, and so does one that is stepped with a closure or has step hooks; the
        reason is logged once.

        Call on all ranks, once for each optimizer, before the first forward pass.

        Args:
            optimizer: of parameters of this model; it keeps its class, state and groups. Its other
                parameters are updated at once, or with another wrapper that overlaps it. Where a
                framework has put an optimizer of its own around it (Accelerate, Lightning, timm's
                Lookahead), the inner one's step is deferred.
            guard: also make C++ code wait that reads a parameter or gradient without asking its
                Python class, such as ``torch.tensor(p)`` or an extension. A warning names each
                place in the code that does so. It costs about 25 us per parameter and iteration;
                use it to look for such reads, or where they cannot be changed. It applies to all
                optimizers of this wrapper, and works on CPUs only.

        Returns:
            The same optimizer.

        Raises:
            UserError: called twice for this optimizer or after training has begun, or the optimizer
                holds no parameter of this model.
        """
        self._require_not_begun("overlap")
        self._overlap(innermost(optimizer), guard=guard)
        return optimizer

    def _overlap(self, optimizer: torch.optim.Optimizer, *, guard: bool = False) -> None:
        known = {id(parameter) for parameter in self.module.parameters()}
        if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            raise UserError(
                "the optimizer holds no parameter of this model; give overlap an optimizer of this "
                "model's parameters"
            )
        if self._runner is None:
            return  # nothing is ever left to the next forward pass
        wrapped = self._wrapped
        if guard and wrapped.guard is None:
            wrapped.guard = Guard()
        wrapped.optimizers.append(
            DeferredOptimizer.of(optimizer, weakref.WeakMethod(self._deferral))
        )
        if is_compiled(self.module) and wrapped.why_not_deferred is None:
            self._stop_deferring(_why_not_compiled(self.module))
        if is_tensor_parallel(self._exchanged.values()):
            self._stop_deferring(TENSOR_PARALLEL)
        self._tell_synchronous()
        average_with_torch()
        engine = self._engine
        if engine is not None:
            engine.deferral.guard = wrapped.guard
            if self.defers:
                engine.let_defer()

    def _overlap_at_first_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Overlap an optimizer of this model's parameters that was not given to ``overlap``."""
        if any(o.optimizer is optimizer for o in self._wrapped.optimizers):
            return
        known = self._wrapped.parameter_ids
        if any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            self._overlap(optimizer)

    @property
    def defers(self) -> bool:
        """Whether an update can wait for the next forward pass."""
        return self._wrapped.can_defer

    def settle(self) -> None:
        """Wait for all gradients, and make all due updates.

        It is needed only before code that reads parameters, gradients or the optimizer's state
        without torch's Python interface.

        Raises:
            PeerError: a rank failed or did not answer within the group's timeout.
            MismatchError: the ranks have parted.
        """
        deferral = self._deferral()
        if deferral is not None:
            deferral.finish()

    def average(self, averages: Iterable[torch.Tensor], weight: float) -> None:
        """Move averages of the weights towards the weights by a part of the difference.

        Other code that averages reads all parameters, and so waits for the whole exchange. This
        method moves each average right after the deferred update of its parameter.
        ``torch.optim.swa_utils.AveragedModel`` does so without this call.

        Args:
            averages: a tensor for each of ``module.parameters()``, in their order. A read of one
                waits for the update of its parameter.
            weight: the part, 1 - decay.

        Raises:
            UserError: the averages do not fit the parameters.
        """
        averages, parameters = list(averages), list(self.module.parameters())
        if len(averages) != len(parameters):
            raise UserError(
                f"expected an average for each of the {len(parameters)} parameters, found "
                f"{len(averages)}; give one for each of module.parameters(), in their order"
            )
        for number, (mean, parameter) in enumerate(zip(averages, parameters, strict=True)):
            if mean.shape != parameter.shape:
                raise UserError(
                    f"expected shape {tuple(parameter.shape)} of average {number}, as its "
                    f"parameter has, found {tuple(mean.shape)}; give one for each of "
                    "module.parameters(), in their order"
                )

        @torch.no_grad()
        def update(some: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
            for mean, parameter in zip(some, parameters, strict=True):
                mean.lerp_(parameter.to(mean), weight)

        average(averages, parameters, update)

    # ------------------------------------------------------------------ compression

    def scaled_by(self, scaler: Scaler) -> None:
        """Let a ``GradScaler`` skip steps of a training that is exchanged sparsely.

        From here on an infinite or NaN gradient is no error: all ranks get infinities and skip the
        step, and their residuals are again what they were before it. Residuals follow the scale.
        The backward pass waits for the whole exchange. A scaler that is not enabled changes
        nothing.

        Call on all ranks, before the first forward pass.

        Raises:
            UserError: no compression was asked for, training has begun, or the check would make
                dense steps.
        """
        compressing = self._require_compression()
        self._require_not_begun("scaled_by")
        if not scaler.is_enabled():
            return
        if self._settings.check and isinstance(compressing.compression, Recipe):
            raise UserError(
                "with a scaler, what sparse exchange has left over could be lost with a dense step "
                "that is skipped; make the wrapper with check=False, so that no step is dense"
            )
        compressing.follow(scaler)
        self._stop_deferring("a scaler reads all gradients before each step")

    def step_ahead(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute gradients at the weights as they will be once residuals are applied.

        Then residuals no longer make gradients point the same way again and again, so small
        densities cost less accuracy. From a step's first forward pass to its update, the weights
        differ between ranks; before the update, an evaluation and ``state_dict`` they are restored.
        So updates are not deferred.

        Call on all ranks, once for each optimizer, before the first forward pass.

        Args:
            optimizer: ``torch.optim.SGD`` of this model.

        Raises:
            UserError: no sparse exchange was asked for, training has begun, or it is another
                optimizer, of another model, or was given before.
        """
        compressing = self._require_compression()
        self._require_not_begun("step_ahead")
        compressing.step_ahead(self.module, optimizer, settle=weakly(self.settle))
        self._stop_deferring("step_ahead puts the weights back before each of them")

    def compression_state_dict(self) -> dict[str, Any]:
        """Return what this rank must save of a compressed training; every rank saves its own.

        Residuals, the step (for the warm-up), the recipe, and the plan once it is decided.
        :meth:`state_dict` stays that of torch's class.

        Raises:
            UserError: no compression was asked for.
            PeerError: a rank failed or did not answer within the group's timeout.
        """
        compressing = self._require_compression()
        self.settle()
        assert self._runner is not None
        return compressing.state_dict(self._tuning.findings.plan, decided=self._runner.steady)

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what this rank has saved; before the first forward pass, on all ranks.

        If the plan was decided, it runs at once, unchecked: so training continues bit for bit. For
        another number of ranks convert the states with ``syncline.hooks.resharded``; then a new
        plan is made.

        Raises:
            UserError: no compression was asked for, or training has begun.
            MismatchError: the state is of another compression, model, rank or number of ranks.
        """
        compressing = self._require_compression()
        self._require_not_begun("load_compression_state_dict")
        decided, plan = compressing.load_state_dict(state)
        if plan is not None:
            self._require_fitting(plan, "plan of the state")
        # Without the check no step is dense, so an earlier decision for dense buckets is ignored.
        if decided and (plan is not None or self._settings.check):
            self._tuning.resume(plan)

    def _require_not_begun(self, method: str) -> None:
        if self._runner is not None and self._runner.begun:
            raise UserError(
                f"{method} was called after training had begun; call it before the first forward "
                "pass"
            )

    def _require_compression(self) -> Compressing:
        if self._wrapped.compressing is None:
            raise UserError(
                "this wrapper was made without compression; give it compression=Recipe(...)"
            )
        return self._wrapped.compressing

    @property
    def _engine(self) -> StageEngine | None:
        """What runs the plan beside the reducer, where one does."""
        return None if self._runner is None else self._reducer_buckets.engine

    def _deferral(self) -> Deferral | None:
        engine = self._engine
        return None if engine is None else engine.deferral

    # ------------------------------------------------------------------ torch's own

    @contextlib.contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Train with uneven inputs, as torch's ``join``; the buckets stay as they are meanwhile.

        With ``enable=False`` it does nothing, as torch's.
        """
        try:
            with super().join(*args, **kwargs):
                yield
        finally:
            self._joined = True
            if self._runner is not None:
                self._runner.return_to_engine()

    def join_hook(self, **kwargs: Any) -> Any:
        """Prepare for uneven inputs, as torch's; without the engine as long as that lasts.

        The engine is left in the first forward pass, since torch does not say here whether the
        context is enabled; or before this rank, which has no inputs, answers that of another one.
        """
        self._joined = False
        hook = super().join_hook(**kwargs)
        runner, answer = self._runner, hook.main_hook
        if runner is not None:

            def main_hook() -> None:
                runner.leave_engine()
                answer()

            hook.main_hook = main_hook
        return hook

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refuse the user's communication hooks: a hook replaces the exchange that is planned.

        Raises:
            UserError: always, except for torch's own use during construction.
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
        if getattr(self, "_runner", None) is not None:
            self._reducer_buckets.follow()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        super()._set_ddp_runtime_logging_sample_rate(sample_rate)
        self._wrapped.sample_rate = sample_rate

    def _update_process_group(self, new_process_group: Any) -> None:
        """Refuse another process group: what was measured and planned is of this one.

        Raises:
            UserError: unless the wrapper trains with DDP's own buckets alone.
        """
        if self._runner is not None:
            raise UserError(
                "_update_process_group is not available: Syncline measures and plans for the ranks "
                "that the model was wrapped with; wrap the model again, or use torch's "
                "DistributedDataParallel"
            )
        super()._update_process_group(new_process_group)

    @disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        engine = self._engine
        keeping = contextlib.nullcontext() if engine is None else engine.keeping_gradients()
        with telling_lost_peers("before the forward pass"), keeping:
            return super()._pre_forward(*inputs, **kwargs)

    def _sync_buffers(self) -> None:
        begun_ns = time.perf_counter_ns()
        super()._sync_buffers()
        self._wrapped.broadcast_ns += time.perf_counter_ns() - begun_ns

    def _lazy_init(self) -> None:
        self._in_torch = True
        try:
            super()._lazy_init()
        finally:
            self._in_torch = False

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        state: dict[str, Any] = super().__getstate__()
        # Measurements belong to this process; a copy trains with DDP's own buckets.
        state.pop("_tuning", None)
        state["_runner"] = None
        state["_comm_hooks"] = []
        state.pop("_reducer_buckets", None)
        state.pop("_unexchanged", None)
        state["_wrapped"] = self._wrapped.why_not_deferred
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        reason = self.__dict__["_wrapped"]
        self._wrapped = Wrapped(self, self._exchanged)
        self._wrapped.why_not_deferred = reason
        self._unexchanged = UnexchangedWatch(self._wrapped)

    # ------------------------------------------------------------------ what is going on

    @property
    def phase(self) -> str:
        """The stage of training: ``"baseline"``, ``"profiling"``, ..., ``"steady"``."""
        return "steady" if self._runner is None else self._runner.stage.name

    @property
    def measuring(self) -> bool:
        """Whether measurement and check are not finished."""
        return self._runner is not None and not self._runner.steady

    @property
    def plan(self) -> Plan | None:
        """The plan that runs now; None while DDP's own buckets do."""
        return self._runner.stage.plan if self._runner is not None else None

    @property
    def profile(self) -> Profile | None:
        """The measured or given profile, once there is one."""
        return self._tuning.findings.profile if self._runner is not None else None

    @property
    def network(self) -> Network | None:
        """The probed or given network, once there is one."""
        return self._tuning.findings.network if self._runner is not None else None

    @property
    def exposed_communication_s(self) -> float | None:
        """How long the last sampled iteration waited for communication, in seconds."""
        if self._runner is not None:
            return self._runner.progress.exposed_s
        waited_ns = exposed_communication_ns(logging_data(self))
        return None if waited_ns is None else waited_ns / NS_PER_S

    def run_record(self) -> Run:
        """Return the record of this run so far; any thread may call."""
        runner = self._runner
        if runner is None:
            return record_of(self._wrapped, None, why_not_planned=self._why_not_planned)
        return record_of(self._wrapped, runner.progress, runner.steady_iteration_s)

    def metrics(self) -> dict[str, float]:
        """Return what can be logged at every step, as numbers by name; nothing is measured for it.

        Any thread may call: all numbers are of the same moment, the end of the last iteration.

        ``syncline/iteration``; ``syncline/steady``, whether measuring is over; and where they are
        known ``syncline/iteration_s`` of the last iteration, ``syncline/ddp_iteration_s`` of stock
        DDP, ``syncline/predicted_iteration_s``, ``syncline/exposed_communication_s``,
        ``syncline/messages`` an iteration and ``syncline/overlaps``, whether updates wait for the
        next forward pass. Times are in seconds.
        """
        if self._runner is None:
            return {}
        now = self._runner.progress
        found, plan = now.tuning.findings, now.stage.plan
        known: dict[str, float | None] = {
            "iteration": now.iteration,
            "steady": now.steady,
            "iteration_s": now.iteration_s,
            "ddp_iteration_s": found.baseline.iteration_s if found.baseline else None,
            "predicted_iteration_s": found.predicted_planned_s,
            "exposed_communication_s": now.exposed_s,
            "messages": len(plan.messages) if plan else None,
            "overlaps": now.overlaps,
        }
        return {f"syncline/{name}": float(x) for name, x in known.items() if x is not None}

    def save_report(self, directory: str | Path, *, run: Run | None = None) -> Path:
        """Write all measurements and predictions into a directory, with ``report.html``.

        Call on one rank.

        Args:
            directory: created if missing; files of earlier reports are replaced.
            run: the record to save; by default :meth:`run_record`.

        Returns:
            The path of ``report.html``.

        Raises:
            FileError: the directory cannot be written.
        """
        from syncline.report.bundle import Bundle
        from syncline.report.page import save

        tuning = self._runner.progress.tuning if self._runner is not None else None
        bundle = Bundle(
            run=run or self.run_record(),
            profile=tuning.findings.profile if tuning else None,
            network=tuning.findings.network if tuning else None,
            plan=tuning.running_plan if tuning else None,
            comparison=tuning.findings.comparison if tuning else None,
            timeline_predicted=tuning.predicted_timeline if tuning else None,
            timeline_measured=tuning.measured_timeline if tuning else None,
        )
        return save(bundle, directory)

    # ------------------------------------------------------------------ the reducer

    def _check_given(self) -> None:
        workers = dist.get_world_size(self.process_group)
        plan, profile = self._settings.plan, self._settings.profile
        network = self._settings.network
        if network is not None and network.workers != workers:
            raise MismatchError(
                f"the given network {network.name!r} is of {network.workers} workers, this job has "
                f"{workers}; probe this one, or extrapolate with Network.with_workers"
            )
        if profile is not None:
            last = len(profile.gradients) - 1
            plan = Plan.merging(self._settings.planner, profile, workers, [last])
        if plan is not None:
            self._require_fitting(plan, "given profile" if profile is not None else "given plan")

    def _require_fitting(self, plan: Plan, what: str) -> None:
        workers = dist.get_world_size(self.process_group)
        difference = plan.difference(self._wrapped.tensors(), workers)
        if difference is not None:
            raise MismatchError(
                f"the {what} does not fit: {difference}; "
                "profile and plan this model at this worker count again"
            )


def _require_same(module: nn.Module, arguments: Mapping[str, Any], settings: Settings) -> None:
    """Raise on all ranks if they differ, or on this one if it cannot go on."""
    refused = None
    try:
        _require_usable(module, arguments, settings)
    except UserError as error:
        refused = error
    require_same_training(module, settings, arguments, refused)


def _why_untried() -> str | None:
    """Say why nothing is planned under this version of torch, or None."""
    if untried(torch.__version__) is None:
        return None
    return f"torch {torch.__version__} is newer than those that Syncline was tried with; {advice()}"


def _require_usable(module: nn.Module, arguments: Mapping[str, Any], settings: Settings) -> None:
    """Raise a UserError for arguments that cannot be used, or a torch that is too old."""
    if untried(torch.__version__) == "older":
        raise UserError(
            f"torch {torch.__version__} is older than those that DistributedDataParallel was made "
            f"for; {advice()}; or use torch.nn.parallel.DistributedDataParallel"
        )
    plan = settings.plan
    if plan is not None and (settings.profile is not None or settings.network is not None):
        raise UserError(
            "a plan was given, so a profile or network would be ignored; give one or the other"
        )
    if arguments.get("bucket_cap_mb_list"):
        raise UserError(
            "bucket_cap_mb_list sets the buckets by hand; give a plan instead, or use torch's "
            "DistributedDataParallel"
        )
    ignored = ignored_by_ddp(module)
    for name, inner in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(inner, TorchDDP) and any(
            p.requires_grad and prefix + own not in ignored for own, p in inner.named_parameters()
        ):
            raise UserError(WRAPPED_TWICE)
    planner_named(settings.planner)
    require_compression(
        module, settings.compression, plan, planner=settings.planner, check=settings.check
    )
