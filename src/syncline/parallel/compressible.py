"""What a wrapper offers to trainings that compress their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from syncline.parallel.planned_training import PlannedTraining, UnplannedTraining
from syncline.sparse.session import Scaler


class Compressible:
    """The part of ``DistributedDataParallel`` that is about compression."""

    _training: UnplannedTraining

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
        self._compressed().scaled_by(scaler)

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
        self._compressed().step_ahead(optimizer)

    def compression_state_dict(self) -> dict[str, Any]:
        """Return what this rank must save of a compressed training; every rank saves its own.

        Residuals, the step (for the warm-up), the recipe, and the plan once it is decided.
        :meth:`state_dict` stays that of torch's class.

        Raises:
            UserError: no compression was asked for.
            PeerError: a rank failed or did not answer within the group's timeout.
        """
        return self._compressed().compression_state()

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what this rank has saved; before the first forward pass, on all ranks.

        If the plan was decided, it runs at once, unchecked: so training continues bit for bit. For
        another number of ranks convert the states with ``syncline.hooks.resharded``; then a new
        plan is made.

        Raises:
            UserError: no compression was asked for, or training has begun.
            MismatchError: the state is of another compression, model, rank or number of ranks.
        """
        self._compressed().load_compression_state(state)

    def _compressed(self) -> PlannedTraining:
        training = self._training
        training.require_compression()
        assert isinstance(training, PlannedTraining)  # others are refused compression
        return training
