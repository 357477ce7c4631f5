"""Why a rank takes no part in an exchange, and what the user is told of it."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import UserError
from syncline.sparse.courier import UNREADABLE
from syncline.sparse.exchange import Refusal

__all__ = ["NOT_FINITE", "OVERFLOW", "is_by_gradient", "refusal_error"]

NOT_FINITE = 2
"""The reason of a refusal: a gradient holds an infinity or NaN; the detail is the parameter, in the
order of the model."""
OVERFLOW = 3
"""Residual and gradient add up to that; the detail is one of the parameters of the unit."""


def is_by_gradient(refusal: Refusal) -> bool:
    """Say whether it was a gradient's values: then a scaler may skip the step."""
    return refusal.reason != UNREADABLE


def refusal_error(refusal: Refusal, names: Sequence[str], *, together: int) -> UserError:
    """Return the error for a refusal that has reached this rank.

    Args:
        refusal: a rank's.
        names: of all parameters, in the order of the model.
        together: how many parameters were exchanged together.
    """
    rank, reason, detail = refusal
    if reason == UNREADABLE:
        return UserError(
            f"rank {rank} cannot read what rank {detail} sent in this exchange; give all ranks "
            "the same recipe and the same number of steps, and let all step ahead or none"
        )
    where = f"parameter {names[detail]!r} on rank {rank}"
    if reason == NOT_FINITE:
        return UserError(
            f"the gradient of {where} is infinite or NaN; the exchange was refused on all "
            "ranks. Lower the learning rate, or look for the operation that overflows"
        )
    return UserError(
        f"residual and gradient of {where}, or of one of the {together} parameters it is "
        "exchanged with, add up to more than float32 holds; resume all ranks from the last "
        "checkpoint with a lower learning rate"
    )
