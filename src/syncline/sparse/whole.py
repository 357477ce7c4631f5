"""Averaging gradients that a recipe keeps dense."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.sparse.courier import Courier
from syncline.sparse.gradients import Gradient
from syncline.sparse.memory import HostMemory

__all__ = ["average_whole"]


def average_whole(gradients: Sequence[Gradient], courier: Courier) -> str | None:
    """Average gradients over all ranks, whole; all ranks must call alike.

    Args:
        gradients: become the averages.
        courier: exchanges them, on the host.

    Returns:
        The name of one whose average is infinite or NaN; then none has changed.

    Raises:
        PeerError: a rank failed, or did not answer in time.
    """
    together = torch.cat([gradient.values for gradient in gradients]).cpu()
    courier.all_reduce(together)
    together /= courier.ranks
    parts = together.split([gradient.values.numel() for gradient in gradients])
    number = HostMemory().first_not_finite(parts)
    if number is not None:
        return gradients[number].name
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.values.copy_(part)
    return None
