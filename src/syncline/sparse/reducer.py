"""Averaging one message's gradients over all ranks, sparsely: the steps of Algorithm 4."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from syncline.errors import InternalError, UserError
from syncline.model.recipe import Recipe
from syncline.sparse.algorithms import ALGORITHMS
from syncline.sparse.exchange import (
    NOT_FINITE,
    OVERFLOW,
    UNREADABLE,
    Content,
    Refusal,
    Share,
    refusal_error,
)
from syncline.sparse.gradients import NamedGradient
from syncline.sparse.memory import HostMemory
from syncline.sparse.residuals import Residuals, Treatment
from syncline.sparse.sparse_transport import SparseTransport
from syncline.sparse.stream_context import StreamContext
from syncline.sparse.vector import Quota, SparseVector, rounded
from syncline.sparse.wire import WireFormat

__all__ = ["SparseReducer"]


TOLERANCE = 2.0**-18
"""Relative to the sum of magnitudes: sums of up to 64 ranks in float32, each rounded a few
times."""


class SparseReducer:
    """Averages gradients over the ranks of a group in messages.

    One thread exchanges. Another may prepare the next message, of other parameters, meanwhile.
    """

    def __init__(
        self,
        recipe: Recipe,
        elements: Mapping[str, int],
        group: dist.ProcessGroup,
        timeout: timedelta,
        *,
        context: StreamContext,
        check: bool,
    ) -> None:
        """Begin with empty residuals; see :class:`~syncline.sparse.session.Session`.

        Nothing else uses the group. The caller has entered the context.
        """
        self._recipe = recipe
        self._elements = dict(elements)
        self._numbers = {name: number for number, name in enumerate(elements)}
        self._names = list(elements)
        self.transport = SparseTransport(group, timeout)
        self._check = check
        self.refused: bool | None = None
        """Whether a gradient of this step was infinite or NaN. None: that is an error. Otherwise
        all ranks get infinities, so that a scaler skips the step."""
        self.scale = 1.0
        """The factor of gradients and residuals."""
        self.lowest_keeps = False
        """See :class:`Share`; ranks that differ in it refuse each other's messages."""
        self._memory = context.memory
        kept = {name: n for name, n in elements.items() if not recipe.is_dense(name, n)}
        self.residuals = Residuals(
            kept, velocities=recipe.momentum > 0, memory=context.memory, device=context.device
        )
        self._treatment = Treatment(recipe, self.residuals, context.memory, self.transport.ranks)

    def prepare(
        self, gradients: Sequence[NamedGradient], *, step: int, message: int
    ) -> Callable[[], None]:
        """Select what one message sends; return a function that exchanges it.

        The function replaces the gradients by their averages over all ranks; all ranks must call it
        alike.

        Args:
            gradients: of one message.
            step: of training, from 0; the density may depend on it.
            message: its number within the step.

        The function raises:
            UserError: a gradient is infinite or NaN on some rank; raised on all of them. Nothing
                was exchanged: gradients that are finite have gone into the residuals.
            MismatchError: ranks exchange different messages.
            PeerError: a rank failed, or did not answer in time.
        """
        sparse = [gradient for gradient in gradients if gradient.name in self.residuals]
        dense = [gradient for gradient in gradients if gradient.name not in self.residuals]
        refusal = None
        odd = self._memory.first_not_finite([gradient.values for gradient in gradients])
        if odd is not None:
            number = self._numbers[gradients[odd].name]
            refusal = Refusal(self.transport.rank, NOT_FINITE, number)
        # The check is an exchange, too, so it belongs to the function.
        ready = None
        if sparse and not self._check:
            ready = self._begin(sparse, refusal, step, message)

        def exchange() -> None:
            if sparse:
                (ready or self._begin(sparse, refusal, step, message))()
            if dense:
                self._exchange_whole(dense)

        return exchange

    def _begin(
        self, gradients: Sequence[NamedGradient], refusal: Refusal | None, step: int, message: int
    ) -> Callable[[], None]:
        """Do the part of a sparse exchange that needs no other rank; return the rest."""
        names = [gradient.name for gradient in gradients]
        quota = self._treatment.quota([self._elements[name] for name in names], step)
        wire = WireFormat(
            k=quota.k,
            length=quota.length,
            precision=self._recipe.wire,
            digest=_digest_of(self._recipe.digest, self.lowest_keeps, step, message, *names),
        )
        if refusal is None:
            self._treatment.clip(gradients, self.scale)
        require_conserved = self._conservation(gradients) if self._check else None
        own: Content
        if refusal is not None:
            own = refusal
        elif isinstance(taken := self._treatment.taken(gradients, quota), SparseVector):
            own, remainder = rounded(taken, wire.precision)
            self.residuals.add(names, remainder)
        else:
            own = Refusal(self.transport.rank, OVERFLOW, self._numbers[taken])
        return partial(self._exchange, gradients, own, quota, wire, require_conserved)

    def _exchange(
        self,
        gradients: Sequence[NamedGradient],
        own: Content,
        quota: Quota,
        wire: WireFormat,
        require_conserved: Callable[[SparseVector], None] | None,
    ) -> None:
        names = [gradient.name for gradient in gradients]
        rank, ranks = self.transport.rank, self.transport.ranks
        share = Share(rank, ranks, own, quota, wire.precision, self.lowest_keeps)
        outcome = self.transport.run(ALGORITHMS[self._recipe.algorithm], share, wire)
        delivered = outcome.delivered
        if isinstance(delivered, Refusal):
            if isinstance(own, SparseVector):
                self.residuals.add(names, own)
            error = refusal_error(delivered, self._names, together=len(gradients))
            if delivered.reason == UNREADABLE:
                raise error
            self._skip_step(gradients, error)
            return
        self.residuals.add(names, outcome.returned)
        if self._recipe.factor_masking and isinstance(own, SparseVector):
            self._treatment.mask(names, own, delivered)
        if require_conserved is not None:
            require_conserved(delivered)
        averages = delivered.values / np.float32(self.transport.ranks)
        self._memory.write(
            [gradient.values for gradient in gradients],
            SparseVector(delivered.length, delivered.indices, averages),
        )

    def _exchange_whole(self, gradients: Sequence[NamedGradient]) -> None:
        """Average whole gradients over all ranks, on the host; change none if one is not finite."""
        together = torch.cat([gradient.values for gradient in gradients]).cpu()
        self.transport.all_reduce(together)
        together /= self.transport.ranks
        parts = together.split([gradient.values.numel() for gradient in gradients])
        odd = HostMemory().first_not_finite(parts)
        if odd is not None:
            error = UserError(
                f"the gradient of parameter {gradients[odd].name!r} is infinite or NaN on a rank "
                "or in the sum of all; lower the learning rate, or look for the operation that "
                "overflows"
            )
            self._skip_step(gradients, error)
            return
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.values.copy_(part)

    def _skip_step(self, gradients: Sequence[NamedGradient], error: UserError) -> None:
        """Set the gradients to infinity, for a scaler to skip the step; without one, raise."""
        if self.refused is None:
            raise error
        self.refused = True
        for gradient in gradients:
            gradient.values.fill_(math.inf)

    def _conservation(self, gradients: Sequence[NamedGradient]) -> Callable[[SparseVector], None]:
        """Add up all ranks' residuals and gradients, before an exchange; all ranks call.

        Returns:
            What compares the sum with that of residuals and delivered values, after it. All ranks
            call it. It raises InternalError if an element differs by more than rounding.
        """
        residuals, transport = self.residuals, self.transport
        rows = []
        for name, added in gradients:
            velocity = residuals.velocity_of(name)
            if velocity is not None:
                added = velocity * self._recipe.momentum + added
            residual = residuals.of(name).double()
            rows.append(torch.stack([residual + added, residual.abs() + added.abs()]))
        before = torch.cat(rows, dim=1).cpu()  # float64: sums, and sums of magnitudes
        transport.all_reduce(before, counted=False)

        def require(delivered: SparseVector) -> None:
            after = torch.cat([residuals.of(name).double() for name, _ in gradients]).cpu()
            transport.all_reduce(after, counted=False)
            after += torch.from_numpy(delivered.dense())
            expected, magnitude = before
            allowed = magnitude * (TOLERANCE * transport.ranks) + 1e-37
            wrong = torch.nonzero((after - expected).abs() > allowed).view(-1).tolist()
            first = 0
            for name, values in gradients:
                if wrong and wrong[0] < first + values.numel():
                    raise InternalError(
                        f"element {wrong[0] - first} of {name!r} is not conserved: residuals and "
                        f"gradients were {expected[wrong[0]]:g}, residuals and what was delivered "
                        f"are {after[wrong[0]]:g}; please report it, with the recipe"
                    )
                first += values.numel()

        return require


def _digest_of(*what: object) -> int:
    """Return 64 bits of a digest of what the ranks must have in common."""
    text = "\0".join(map(str, what)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
