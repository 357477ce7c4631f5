"""Averaging one message's gradients over all ranks, sparsely: the steps of Algorithm 4."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from syncline.errors import InternalError, UserError
from syncline.model.recipe import Recipe
from syncline.sparse.courier import UNREADABLE, Courier
from syncline.sparse.exchange import Content, Outcome, Refusal, Share
from syncline.sparse.precision import rounded
from syncline.sparse.residuals import Residuals
from syncline.sparse.selection import Part, first_not_finite, select
from syncline.sparse.table import ALGORITHMS
from syncline.sparse.vector import Quota, SparseVector, joined
from syncline.sparse.wire import Wire

__all__ = ["Gradient", "SparseReducer", "flat"]

NOT_FINITE, OVERFLOW = 2, 3
"""Reasons of refusals; the detail is the parameter, in the order of the model."""

TOLERANCE = 2.0**-18
"""Of the conservation check, relative to the sum of magnitudes: sums of up to 64 ranks in float32,
each rounded a few times."""


class Gradient(NamedTuple):
    """A parameter's gradient, contiguous float32 on the CPU."""

    name: str
    values: torch.Tensor
    """Of shape (elements,); becomes the average."""


def flat(values: torch.Tensor) -> torch.Tensor:
    """Return a gradient as it lies in its bucket, of shape (elements,), without a copy.

    Channels-last gradients have no view of one dimension.
    """
    return values.as_strided((values.numel(),), (1,), values.storage_offset())


class _Begun(NamedTuple):
    """A sparse exchange, as far as it needs no other rank."""

    own: Content
    quota: Quota
    wire: Wire
    before: torch.Tensor | None
    """What is to be conserved, if that is checked."""


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
        check: bool,
    ) -> None:
        """Begin with empty residuals.

        Args:
            recipe: the same on all ranks.
            elements: of every parameter by name, in the order of the model.
            group: which nothing else uses.
            timeout: after which a peer that does not answer counts as lost.
            check: whether every exchange is checked for lost gradient, by dense exchanges of
                float64.
        """
        self._recipe = recipe
        self._elements = dict(elements)
        self._numbers = {name: number for number, name in enumerate(elements)}
        self._names = list(elements)
        self.courier = Courier(group, timeout)
        self._check = check
        self.refused: bool | None = None
        """Whether a gradient of this step was infinite or NaN. None: that is an error; otherwise it
        is noted, and all ranks get infinities, for whoever skips such steps."""
        self.scale = 1.0
        """What gradients and residuals are multiplied by."""
        kept = {name: n for name, n in elements.items() if not recipe.is_dense(name, n)}
        self.residuals = Residuals(kept, velocities=recipe.momentum > 0)

    def prepare(
        self, gradients: Sequence[Gradient], *, step: int, message: int
    ) -> Callable[[], None]:
        """Select what one message sends; return what is to be called to exchange it.

        The call replaces the gradients by their averages over all ranks; all ranks must call alike.

        Args:
            gradients: of one message.
            step: of training, from 0; the density may depend on it.
            message: its number within the step.

        The call raises:
            UserError: a gradient is infinite or NaN on some rank; raised on all of them. Nothing
                was exchanged: gradients that are finite have gone into the residuals.
            MismatchError: ranks exchange different messages.
            PeerError: a rank failed, or did not answer in time.
        """
        sparse = [g for g in gradients if not self._is_dense(g)]
        dense = [g for g in gradients if self._is_dense(g)]
        refusal = self._refusal_of(gradients)
        # The check exchanges too, and so belongs to the call.
        ready = None
        if sparse and not self._check:
            ready = self._begin(sparse, refusal, step, message)

        def exchange() -> None:
            if sparse:
                self._exchange(sparse, ready or self._begin(sparse, refusal, step, message))
            if dense:
                self._reduce_dense(dense)

        return exchange

    def _is_dense(self, gradient: Gradient) -> bool:
        return self._recipe.is_dense(gradient.name, self._elements[gradient.name])

    def _refusal_of(self, gradients: Sequence[Gradient]) -> Refusal | None:
        for name, values in gradients:
            if first_not_finite(values.data_ptr(), values.numel()) is not None:
                return Refusal(self.courier.rank, NOT_FINITE, self._numbers[name])
        return None

    # ------------------------------------------------------------------ sparse

    def _begin(
        self, gradients: Sequence[Gradient], refusal: Refusal | None, step: int, message: int
    ) -> _Begun:
        names = [gradient.name for gradient in gradients]
        quota = self._quota([self._elements[name] for name in names], step)
        wire = Wire(
            k=quota.k,
            length=quota.length,
            precision=self._recipe.wire,
            digest=_digest_of(self._recipe.digest, step, message, *names),
        )
        own: Content
        if refusal is None:
            self._clip(gradients)
        before = self._totals(gradients) if self._check else None
        if refusal is None:
            taken = self._taken(gradients, quota)
            if isinstance(taken, SparseVector):
                own, remainder = rounded(taken, wire.precision)
                self.residuals.add(names, remainder)
            else:
                own = taken
        else:
            own = refusal
        return _Begun(own, quota, wire, before)

    def _exchange(self, gradients: Sequence[Gradient], begun: _Begun) -> None:
        names = [gradient.name for gradient in gradients]
        own, quota, wire, before = begun
        outcome = self.courier.run(
            ALGORITHMS[self._recipe.algorithm],
            Share(self.courier.rank, self.courier.ranks, own, quota, wire.precision),
            wire,
        )
        if isinstance(outcome.delivered, Refusal) and isinstance(own, SparseVector):
            self.residuals.add(names, own)
        if self._passes_on(outcome.delivered):
            self.refused = True
            for _, values in gradients:
                values.fill_(math.inf)
            return
        delivered = self._accepted(outcome, names)
        self.residuals.add(names, outcome.returned)
        if self._recipe.factor_masking and isinstance(own, SparseVector):
            self._mask(names, own, delivered)
        if before is not None:
            self._require_conserved(gradients, before, delivered)
        ranks = self.courier.ranks
        for (_, values), part in zip(
            gradients, delivered.parts([self._elements[n] for n in names]), strict=True
        ):
            flat = values.zero_().numpy()
            flat[part.indices] = part.values / ranks

    def _mask(self, names: Sequence[str], own: SparseVector, delivered: SparseVector) -> None:
        """Clear the velocities of what this rank has sent and all have got: factor masking.

        What was sent and dropped waits on with its velocity, as if it had not been selected. In
        Deep Gradient Compression, 3.3, everything that is sent is delivered; here, where gradients
        differ, most is not, and would be sent again and again without momentum.
        """
        arrived, _ = own.divided(delivered.indices)
        lengths = [self._elements[name] for name in names]
        for name, part in zip(names, arrived.parts(lengths), strict=True):
            velocity = self.residuals.velocity_of(name)
            if velocity is not None:
                velocity.numpy()[part.indices] = 0

    def _quota(self, lengths: Sequence[int], step: int) -> Quota:
        """Return how many are exchanged, of each parameter or of all together."""
        together = tuple(lengths) if self._recipe.unit == "layer" else (sum(lengths),)
        return Quota(together, tuple(self._recipe.count_at(step, n) for n in together))

    def _units(self, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
        """Return what is clipped and selected from together."""
        if self._recipe.unit == "layer":
            return [[gradient] for gradient in gradients]
        return [list(gradients)]

    def _clip(self, gradients: Sequence[Gradient]) -> None:
        """Scale gradients down, so that averages of independent ones have the largest norm.

        Deep Gradient Compression, 3.2, divides by the root of P: its limit is that of the sum.
        """
        if self._recipe.clip_norm is None:
            return
        limit = self.scale * self._recipe.clip_norm * math.sqrt(self.courier.ranks)
        for unit in self._units(gradients):
            norms = torch.stack([torch.linalg.vector_norm(g.values) for g in unit])
            norm = float(torch.linalg.vector_norm(norms))
            if norm > limit:
                for gradient in unit:
                    gradient.values.mul_(limit / norm)

    def _taken(self, gradients: Sequence[Gradient], quota: Quota) -> SparseVector | Refusal:
        """Add gradients to their residuals and take the largest out of these."""
        taken = []
        for unit, k in zip(self._units(gradients), quota.counts, strict=True):
            kept = [self._kept_of(gradient) for gradient in unit]
            parts = [_part(g, *each) for g, each in zip(unit, kept, strict=True)]
            moves = self._recipe.momentum > 0
            # Velocities go on, so what is taken is cleared here.
            found = select(parts, k, momentum=self._recipe.momentum, clear=not moves)
            if not found.finite:
                return Refusal(self.courier.rank, OVERFLOW, self._numbers[unit[0].name])
            if moves:
                lengths = [part.elements for part in parts]
                for (residual, _), own in zip(kept, found.taken.parts(lengths), strict=True):
                    residual.numpy()[own.indices] = 0
            taken.append(found.taken)
        return joined(taken)

    def _kept_of(self, gradient: Gradient) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the residual, and the velocity if there is one, to select from.

        Zeros for a gradient of zeros, so that nothing is sent: DDP passes nothing on to a parameter
        that no rank has used, so it would be lost.
        """
        residual = self.residuals.of(gradient.name)
        velocity = self.residuals.velocity_of(gradient.name)
        if not _is_zero(gradient.values):
            return residual, velocity
        if velocity is None:
            return torch.zeros_like(residual), None
        residual += velocity.mul_(self._recipe.momentum)
        return torch.zeros_like(residual), torch.zeros_like(velocity)

    def _passes_on(self, delivered: Content) -> bool:
        """Say whether a refusal is left to whoever looks at the gradients."""
        by_gradient = isinstance(delivered, Refusal) and delivered.reason != UNREADABLE
        return by_gradient and self.refused is not None

    def _accepted(self, outcome: Outcome, names: Sequence[str]) -> SparseVector:
        refusal = outcome.delivered
        if isinstance(refusal, SparseVector):
            return refusal
        rank, reason, detail = refusal
        if reason == UNREADABLE:
            raise UserError(
                f"rank {rank} cannot read what rank {detail} sent in this exchange; give all ranks "
                "the same recipe and the same number of steps"
            )
        where = f"parameter {self._names[detail]!r} on rank {rank}"
        if reason == NOT_FINITE:
            raise UserError(
                f"the gradient of {where} is infinite or NaN; the exchange was refused on all "
                "ranks. Lower the learning rate, or look for the operation that overflows"
            )
        raise UserError(
            f"residual and gradient of {where}, or of one of the {len(names)} parameters it is "
            "exchanged with, add up to more than float32 holds; resume all ranks from the last "
            "checkpoint with a lower learning rate"
        )

    # ------------------------------------------------------------------ dense

    def _reduce_dense(self, gradients: Sequence[Gradient]) -> None:
        together = torch.cat([gradient.values for gradient in gradients])
        self.courier.all_reduce(together)
        together /= self.courier.ranks
        start = 0
        for name, values in gradients:
            part = together[start : start + values.numel()]
            if first_not_finite(part.data_ptr(), part.numel()) is not None:
                if self.refused is not None:
                    self.refused = True
                    break
                raise UserError(
                    f"the gradient of parameter {name!r} is infinite or NaN on a rank or in the "
                    "sum of all; lower the learning rate, or look for the operation that overflows"
                )
            start += values.numel()
        start = 0
        for _, values in gradients:
            values.copy_(together[start : start + values.numel()])
            start += values.numel()

    # ------------------------------------------------------------------ conservation

    def _totals(self, gradients: Sequence[Gradient]) -> torch.Tensor:
        """Return what is to be conserved, summed over ranks, and the sum of magnitudes.

        Of shape (2, elements), float64. With momentum correction a velocity takes the gradient's
        place.
        """
        rows = []
        for name, values in gradients:
            added = values
            velocity = self.residuals.velocity_of(name)
            if velocity is not None:
                added = velocity * self._recipe.momentum + added
            residual = self.residuals.of(name).double()
            rows.append(torch.stack([residual + added, residual.abs() + added.abs()]))
        totals = torch.cat(rows, dim=1)
        self.courier.all_reduce(totals, counted=False)
        return totals

    def _require_conserved(
        self, gradients: Sequence[Gradient], before: torch.Tensor, delivered: SparseVector
    ) -> None:
        """Compare what is kept and delivered now with what there was.

        Raises:
            InternalError: an element differs by more than rounding.
        """
        after = torch.cat([self.residuals.of(g.name).double() for g in gradients])
        self.courier.all_reduce(after, counted=False)
        after += torch.from_numpy(delivered.dense())
        expected, magnitude = before
        allowed = magnitude * (TOLERANCE * self.courier.ranks) + 1e-37
        wrong = torch.nonzero((after - expected).abs() > allowed).view(-1)
        if len(wrong) == 0:
            return
        index = int(wrong[0])
        start = 0
        for name, values in gradients:
            if index < start + values.numel():
                raise InternalError(
                    f"element {index - start} of {name!r} is not conserved: residuals and "
                    f"gradients were {expected[index]:g}, residuals and what was delivered are "
                    f"{after[index]:g}; please report it, with the recipe"
                )
            start += values.numel()


def _part(gradient: Gradient, residual: torch.Tensor, velocity: torch.Tensor | None) -> Part:
    """Return what :func:`select` works on; the tensors must outlive it."""
    return Part(
        residual.data_ptr(),
        residual.numel(),
        gradient.values.data_ptr(),
        0 if velocity is None else velocity.data_ptr(),
    )


def _is_zero(values: torch.Tensor) -> bool:
    """Say whether all values are 0; nearly always the first says no."""
    return values.numel() > 0 and float(values[0]) == 0 and not bool(values.any())


def _digest_of(*what: object) -> int:
    """Return 64 bits that stand for what the ranks must have in common."""
    text = "\0".join(map(str, what)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
