"""The methods of a wrapper for training with compressed gradients."""

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
    """The compression methods of ``DistributedDataParallel``."""

    _training: UnplannedTraining

    def scaled_by(self, scaler: Scaler) -> None:
        """Let a ``GradScaler`` skip steps when gradients are exchanged sparsely.

        From now on an infinite or NaN gradient is not an error: all ranks get infinities, skip the
        step and restore their residuals from before it. Residuals are rescaled with the loss. The
        backward pass waits for the whole exchange.

        In 8 bits, only the scale of residuals follows the scaler: infinities arrive as NaN anyway.
        Nothing changes in 16 bits, which pass infinities on, or if the scaler is disabled.

        Call on all ranks, before the first forward pass.

        Raises:
            UserError: no compression was asked for, training has begun, or ``check`` is on, which
                makes dense steps.
        """
        training, compressing = self._compressed("scaled_by")
        if not scaler.is_enabled():
            return
        is_sparse = isinstance(compressing.compression, Recipe)
        if is_sparse and training.tuning.settings.check:
            raise UserError(
                "with a scaler, residuals of the sparse exchange could be lost in a dense step "
                "that is skipped; make the wrapper with check=False, so that no step is dense"
            )
        compressing.follow(scaler)
        if is_sparse:
            training.stop_deferring("a scaler reads all gradients before each step")

    def step_ahead(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute gradients at the weights as they will be once residuals are applied.

        Residuals then no longer make successive gradients point the same way, so small densities
        cost less accuracy. From a step's first forward pass to its update, the weights differ
        between ranks. They are restored before the update, before an evaluation and before
        ``state_dict``. So updates are not deferred.

        Call on all ranks, once for each optimizer, before the first forward pass.

        Args:
            optimizer: ``torch.optim.SGD`` of this model.

        Raises:
            UserError: no sparse exchange was asked for, training has begun, or the optimizer is
                not ``SGD``, belongs to another model, or was given before.
        """
        training, compressing = self._compressed("step_ahead")
        synchronize = weakly(training.synchronize)
        compressing.step_ahead(training.wrapped.module, optimizer, synchronize=synchronize)
        training.stop_deferring("step_ahead restores the weights before each of them")

    def compression_state_dict(self) -> dict[str, Any]:
        """Return this rank's state of a compressed training; every rank must save its own.

        It holds the residuals, the step (for the warm-up), the recipe, and the plan once decided.
        :meth:`state_dict` holds none of these.

        Raises:
            UserError: no compression was asked for.
            PeerError: a rank failed or did not answer within the group's timeout.
        """
        training, compressing = self._compressed()
        training.synchronize()
        plan = training.findings.plan
        return compressing.state_dict(plan, decided=training.stage.is_steady)

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's saved state; call on all ranks, before the first forward pass.

        If the plan was already decided, it runs at once, unchecked, so training continues bit for
        bit. For another number of ranks, convert the states with ``syncline.hooks.resharded``; a
        new plan is then made.

        Raises:
            UserError: no compression was asked for, or training has begun.
            MismatchError: the state is of another compression, model, rank or number of ranks.
        """
        training, compressing = self._compressed("load_compression_state_dict")
        decided, plan = compressing.load_state_dict(state)
        if plan is not None:
            require_fitting(plan, training.wrapped, "plan of the state")
        # A decision for DDP's buckets is ignored with check=False, where no step is dense, and
        # with 16 or 8 bits, where it may have been for DDP with torch's hook.
        settings = training.tuning.settings
        if decided and (plan is not None or (settings.check and settings.wire is None)):
            training.tuning.resumed = (plan,)

    def _compressed(self, method: str | None = None) -> tuple[PlannedTraining, Compressing]:
        """Return training and compression; with ``method``, raise if training has begun."""
        training, compressing = self._training, self._training.wrapped.compressing
        if compressing is None:
            raise UserError(
                "this wrapper was made without compression; give it compression=Recipe(...)"
            )
        if method is not None:
            training.require_not_begun(method)
        assert isinstance(training, PlannedTraining)  # others are refused compression
        return training, compressing
