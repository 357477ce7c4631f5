"""What a wrapper offers to trainings that compress their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from syncline.errors import UserError
from syncline.plan.recipe import Recipe
from syncline.train.engine.compression import Compressing
from syncline.train.measure.gradient_hooks import weakly
from syncline.train.planned_training import PlannedTraining, UnplannedTraining
from syncline.train.requirements import require_fitting
from syncline.train.sparse.session import Scaler


class Compressible:
    """The part of ``DistributedDataParallel`` that is about compression."""

    _training: UnplannedTraining

    def scaled_by(self, scaler: Scaler) -> None:
        """Let a ``GradScaler`` skip steps of a training that is exchanged sparsely.

        From here on an infinite or NaN gradient is no error: all ranks get infinities and skip the
        step, and their residuals are again what they were before it. Residuals follow the scale.
        The backward pass waits for the whole exchange. A scaler that is not enabled changes
        nothing, and neither does one of an exchange in 16 bits, which passes infinities on.

        Call on all ranks, before the first forward pass.

        Raises:
            UserError: no compression was asked for, training has begun, or the check would make
                dense steps.
        """
        training, compressing = self._compressed("scaled_by")
        if not scaler.is_enabled() or not isinstance(compressing.compression, Recipe):
            return
        if training.tuning.settings.check:
            raise UserError(
                "with a scaler, what sparse exchange has left over could be lost with a dense step "
                "that is skipped; make the wrapper with check=False, so that no step is dense"
            )
        compressing.follow(scaler)
        training.stop_deferring("a scaler reads all gradients before each step")

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
        training, compressing = self._compressed("step_ahead")
        synchronize = weakly(training.synchronize)
        compressing.step_ahead(training.wrapped.module, optimizer, synchronize=synchronize)
        training.stop_deferring("step_ahead puts the weights back before each of them")

    def compression_state_dict(self) -> dict[str, Any]:
        """Return what this rank must save of a compressed training; every rank saves its own.

        Residuals, the step (for the warm-up), the recipe, and the plan once it is decided.
        :meth:`state_dict` stays that of torch's class.

        Raises:
            UserError: no compression was asked for.
            PeerError: a rank failed or did not answer within the group's timeout.
        """
        training, compressing = self._compressed()
        training.synchronize()
        plan = training.findings.plan
        return compressing.state_dict(plan, decided=training.stage.is_steady)

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what this rank has saved; before the first forward pass, on all ranks.

        If the plan was decided, it runs at once, unchecked: so training continues bit for bit. For
        another number of ranks convert the states with ``syncline.hooks.resharded``; then a new
        plan is made.

        Raises:
            UserError: no compression was asked for, or training has begun.
            MismatchError: the state is of another compression, model, rank or number of ranks.
        """
        training, compressing = self._compressed("load_compression_state_dict")
        decided, plan = compressing.load_state_dict(state)
        if plan is not None:
            require_fitting(plan, training.wrapped, "plan of the state")
        # Without the check no step is dense, so an earlier decision for dense buckets is ignored.
        # In 16 bits it may have been one for torch's hook, and nothing is left to be delivered.
        settings = training.tuning.settings
        if decided and (plan is not None or (settings.check and settings.wire is None)):
            training.tuning.resume(plan)

    def _compressed(self, method: str | None = None) -> tuple[PlannedTraining, Compressing]:
        """Return what trains and compresses, before the first iteration if a method says so."""
        training, compressing = self._training, self._training.wrapped.compressing
        if compressing is None:
            raise UserError(
                "this wrapper was made without compression; give it compression=Recipe(...)"
            )
        if method is not None:
            training.require_not_begun(method)
        assert isinstance(training, PlannedTraining)  # others are refused compression
        return training, compressing
