"""``Session``: what one rank of a sparse exchange keeps, and how it averages gradients."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from syncline.errors import InternalError, MismatchError, UserError, shortened
from syncline.plan.recipe import Recipe
from syncline.train.measure.exchange import gather_json, timeout_of
from syncline.train.measure.gradient_hooks import weakly
from syncline.train.sparse import algorithms
from syncline.train.sparse.ahead import StepAhead
from syncline.train.sparse.algorithms import ALGORITHMS, Content, Refusal, Share
from syncline.train.sparse.gradients import NamedGradient, device_of, require_exchangeable
from syncline.train.sparse.memory import HostMemory
from syncline.train.sparse.residuals import Residuals
from syncline.train.sparse.sparse_transport import SparseTransport, own_group, serves_the_cpu
from syncline.train.sparse.torch_memory import memory_of
from syncline.train.sparse.vector import Quota, SparseVector, rounded
from syncline.train.sparse.wire import WireFormat

VERSION = 1
TOLERANCE = 2.0**-18  # relative to the sum of magnitudes: enough for float32 sums of up to 64 ranks


class Scaler(Protocol):
    """Torch's ``GradScaler``, as far as it is used."""

    def is_enabled(self) -> bool:
        """Say whether it scales gradients and skips steps."""

    def get_scale(self) -> float:
        """Return the factor of losses."""


class Session:
    """Recipe, step and residuals of one rank's sparse exchange, for the hook or the wrapper."""

    def __init__(
        self,
        recipe: Recipe,
        parameters: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        *,
        model: nn.Module | None = None,
        check: bool = False,
    ) -> None:
        """Agree with the other ranks, which all must call; raise as :class:`.GTopKState` does.

        ``parameters`` are those that get gradients, in the order of the model, which is given
        without a wrapper, if it is known. The session makes another group of the same ranks. With
        ``check``, every exchange is checked for lost gradient.
        """
        self.recipe = recipe
        refused: UserError | None = None
        try:
            require_exchangeable(parameters, model)
        except UserError as error:
            refused, parameters = error, {}
        self._elements = {name: p.numel() for name, p in parameters.items()}
        self._names = list(parameters)
        self._require_same(group, refused)
        self._group = own_group(group)
        self.transport = SparseTransport(self._group, timeout_of(group))
        self.memory = memory_of(device_of(parameters))
        self.residuals = Residuals(recipe, self._elements, self.memory)
        self._check = check
        self.step = 0  # how many steps have been exchanged; the warm-up depends on it
        self.scaler: Scaler | None = None
        self.refused = False  # whether scalers skip the step; all ranks then get infinities
        self._ahead: list[StepAhead] = []  # for each optimizer; on all ranks or on none
        self._begun = False  # whether a message of the current step has been prepared
        self._before: dict[str, list[torch.Tensor]] = {}  # residuals before the step, with a scaler

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has given to the backend so far."""
        return self.transport.sent_bytes

    def follow(self, scaler: Scaler) -> None:
        """Let a scaler, if it is enabled, skip steps in which a gradient is not finite.

        All ranks then get infinities, so all scalers skip, and the residuals are restored.
        """
        if scaler.is_enabled():
            self.scaler = scaler

    def undo_refused(self) -> None:
        """Restore the residuals from before the last step, if that step is to be skipped."""
        if self.refused:
            for name, copies in self._before.items():
                for tensor, copied in zip(self.residuals.tensors_of(name), copies, strict=True):
                    tensor.copy_(copied)
            self.refused = False

    def step_ahead(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        *,
        synchronize: Callable[[], None],
    ) -> None:
        """Step ahead (:class:`StepAhead`) until the session ends; UserError without residuals."""
        residuals = self.residuals
        if not any(name in residuals for name in parameters):
            raise UserError(
                "step_ahead is for what sparse exchange leaves behind; this recipe exchanges every "
                "parameter whole: leave step_ahead out"
            )
        undo_refused = weakly(self.undo_refused)  # the session keeps the StepAhead alive

        def exchanges_end() -> None:
            synchronize()
            undo_refused()

        taken = {name for each in self._ahead for name in each.names}
        free = {name: p for name, p in parameters.items() if name not in taken}
        ranks = self._group.size()
        self._ahead.append(
            StepAhead(module, free, optimizer, residuals, ranks=ranks, synchronize=exchanges_end)
        )

    def prepare(
        self, gradients: Sequence[NamedGradient], *, message: int, after: Sequence[Any]
    ) -> Callable[[], None]:
        """Select what one message sends; return a function that exchanges it.

        The function replaces the gradients by their averages over all ranks, which must all call
        it. While one thread exchanges, another may prepare the next message, of other parameters.
        When either function returns, its work is complete on the device too. The gradients are
        complete after the marks ``after`` of :attr:`memory`.

        The function raises:
            UserError: a gradient is infinite or NaN on some rank, and no scaler skips the step;
                raised on all ranks, which cannot go on.
            MismatchError: ranks exchange different messages.
            PeerError: a rank failed, or did not answer in time.
        """
        sparse = [gradient for gradient in gradients if gradient.name in self.residuals]
        dense = [gradient for gradient in gradients if gradient.name not in self.residuals]
        with self.memory.after(after):
            if self.scaler is not None:
                self._follow_scaler(self.scaler, gradients)
            self._begun = True
            refusal = None
            bad = self.memory.first_not_finite([gradient.values for gradient in gradients])
            if bad is not None:
                number = self._names.index(gradients[bad].name)
                refusal = Refusal(self.transport.rank, algorithms.NOT_FINITE, number)
            # A check is an exchange too, so with it everything is left to the returned function.
            ready = None
            if sparse and not self._check:
                ready = self._begin(sparse, refusal, message)

        def exchange() -> None:
            with self.memory.after(()):
                if sparse:
                    (ready or self._begin(sparse, refusal, message))()
                if dense:
                    self._exchange_whole(dense)

        return exchange

    def _follow_scaler(self, scaler: Scaler, gradients: Sequence[NamedGradient]) -> None:
        """Take a new step's scale, and copy the residuals, so that the step can be undone."""
        if not self._begun:
            self.undo_refused()
            self._before.clear()
            self.residuals.rescale(float(scaler.get_scale()))
        tensors_of = self.residuals.tensors_of
        self._before |= {g.name: [t.clone() for t in tensors_of(g.name)] for g in gradients}

    def _begin(
        self, gradients: Sequence[NamedGradient], refusal: Refusal | None, message: int
    ) -> Callable[[], None]:
        """Do what needs no other rank; return a function that does the rest of the exchange."""
        names = [gradient.name for gradient in gradients]
        by_layer = self.recipe.unit == "layer"
        units = [[gradient] for gradient in gradients] if by_layer else [[*gradients]]
        lengths = tuple(sum(self._elements[g.name] for g in unit) for unit in units)
        quota = Quota(lengths, tuple(self.recipe.count_at(self.step, n) for n in lengths))
        wire = WireFormat(
            k=quota.k,
            length=quota.length,
            precision=self.recipe.wire,
            digest=_digest_of(self.recipe.digest, bool(self._ahead), self.step, message, *names),
        )
        if refusal is None:
            self._clip(units)
        require_conserved = self._conservation(gradients) if self._check else None
        own: Content
        if refusal is not None:
            own = refusal
        elif isinstance(taken := self.residuals.take(units, quota.counts), SparseVector):
            own, remainder = rounded(taken, wire.precision)
            self.residuals.add(names, remainder)
        else:
            own = Refusal(self.transport.rank, algorithms.OVERFLOW, self._names.index(taken))
        rank, ranks = self.transport.rank, self.transport.ranks
        # Stepping ahead works better if one rank has all of a dropped sum than if each has a part.
        share = Share(rank, ranks, own, quota, wire.precision, lowest_keeps=bool(self._ahead))
        return partial(self._exchange, gradients, share, wire, require_conserved)

    def _clip(self, units: Sequence[Sequence[NamedGradient]]) -> None:
        """Clip gradients such that an average of independent ones has at most the recipe's norm.

        So the limit grows with the root of P. In Deep Gradient Compression, 3.2, it is divided by
        that root, because it is for the sum.
        """
        if self.recipe.clip_norm is None:
            return
        limit = self.residuals.scale * self.recipe.clip_norm * math.sqrt(self.transport.ranks)
        for unit in units:
            norms = torch.stack([torch.linalg.vector_norm(g.values) for g in unit])
            norm = float(torch.linalg.vector_norm(norms))
            if norm > limit:
                for gradient in unit:
                    gradient.values.mul_(limit / norm)

    def _exchange(
        self,
        gradients: Sequence[NamedGradient],
        share: Share,
        wire: WireFormat,
        require_conserved: Callable[[SparseVector], None] | None,
    ) -> None:
        names = [gradient.name for gradient in gradients]
        outcome = self.transport.run(ALGORITHMS[self.recipe.algorithm], share, wire)
        delivered = outcome.delivered
        if isinstance(delivered, Refusal):
            error = algorithms.refusal_error(delivered, self._names, together=len(gradients))
            if delivered.reason == algorithms.UNREADABLE:
                raise error
            self._skip_step(gradients, error)
            return
        self.residuals.add(names, outcome.returned)
        if self.recipe.factor_masking and isinstance(share.own, SparseVector):
            self.residuals.mask(names, share.own, delivered)
        if require_conserved is not None:
            require_conserved(delivered)
        averages = delivered.values / np.float32(self.transport.ranks)
        self.memory.write(
            [gradient.values for gradient in gradients],
            SparseVector(delivered.length, delivered.indices, averages),
        )

    def _exchange_whole(self, gradients: Sequence[NamedGradient]) -> None:
        """Average whole gradients over all ranks, on the host; change none if one is not finite."""
        together = torch.cat([gradient.values for gradient in gradients]).cpu()
        self.transport.all_reduce(together)
        together /= self.transport.ranks
        parts = together.split([gradient.values.numel() for gradient in gradients])
        bad = HostMemory().first_not_finite(parts)
        if bad is not None:
            error = UserError(
                f"the gradient of parameter {gradients[bad].name!r} is infinite or NaN on a rank "
                "or in the sum of all; lower the learning rate, or look for the operation that "
                "overflows"
            )
            self._skip_step(gradients, error)
            return
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.values.copy_(part)

    def _skip_step(self, gradients: Sequence[NamedGradient], error: UserError) -> None:
        """Set the gradients to infinity, so that the scaler skips the step; without one, raise."""
        if self.scaler is None:
            raise error
        self.refused = True
        for gradient in gradients:
            gradient.values.fill_(math.inf)

    def _conservation(self, gradients: Sequence[NamedGradient]) -> Callable[[SparseVector], None]:
        """Add up all ranks' residuals and gradients before an exchange; all ranks must call this.

        All ranks call the returned function after the exchange. It raises an InternalError if
        residuals and delivered values do not add up to the same.
        """
        residuals, transport = self.residuals, self.transport
        rows = []
        for name, added in gradients:
            residual, *velocities = residuals.tensors_of(name)
            for velocity in velocities:
                added = velocity * self.recipe.momentum + added
            residual = residual.double()
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

    def end_step(self) -> None:
        """Call when all messages of a step have been exchanged."""
        self.step += 1
        self.residuals.changes += 1
        self._begun = False
        if not self._ahead:
            self.residuals.follow_none()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank to save; call it while no exchange is under way."""
        self.undo_refused()
        recipe = msgspec.to_builtins(self.recipe)
        return state_of(recipe, self.step, self._group, self.residuals)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the saved state; see :meth:`GTopKState.load_state_dict`."""
        require_own_state(state, self._group)
        if not isinstance(state["recipe"], Mapping):
            raise MismatchError(f"the state is of {state['recipe']}, not of a sparse exchange")
        recipe = msgspec.convert(state["recipe"], Recipe)
        if recipe != self.recipe:
            differing = [
                f"{name} was {getattr(recipe, name)!r} and is {getattr(self.recipe, name)!r}"
                for name in Recipe.__struct_fields__
                if getattr(recipe, name) != getattr(self.recipe, name)
            ]
            raise MismatchError(
                f"the checkpoint was made with another recipe: {', '.join(differing)}; continue "
                "with that one"
            )
        self.residuals.load_state_dict(state)
        self._before.clear()
        self.step = state["step"]

    def _require_same(self, group: dist.ProcessGroup, refused: UserError | None) -> None:
        """Raise on all ranks if they differ, or one cannot exchange sparsely."""
        own = {
            "recipe": msgspec.to_builtins(self.recipe),
            "parameters": list(self._elements.items()),
            "refused": None if refused is None else str(refused),
        }
        device = torch.device("cpu" if serves_the_cpu(group) else "cuda")
        found = gather_json(own, group, device)
        if refused is not None:
            raise refused
        for rank, other in enumerate(found):
            if other["refused"] is not None:
                raise UserError(f"rank {rank} cannot exchange sparsely: {other['refused']}")
            for what in ("recipe", "parameters"):
                if other[what] != found[0][what]:
                    theirs, first = (shortened(str(each[what])) for each in (other, found[0]))
                    raise MismatchError(
                        f"rank {rank} differs from rank 0 in its {what}: {theirs} instead of "
                        f"{first}; give all ranks the same"
                    )


def state_of(
    recipe: Any, step: int, group: dist.ProcessGroup, residuals: Residuals
) -> dict[str, Any]:
    """Return what a rank saves of compressed training; ``recipe`` is as JSON can hold it."""
    rank, ranks = group.rank(), group.size()
    own = {"version": VERSION, "recipe": recipe, "ranks": ranks, "rank": rank, "step": step}
    return {**own, **residuals.state_dict()}


def require_own_state(state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Raise a MismatchError for a state of another version, rank or number of ranks."""
    if state.get("version") != VERSION:
        raise MismatchError(
            f"expected version {VERSION} of a state of gtopk, found {state.get('version')!r}"
        )
    rank, ranks = group.rank(), group.size()
    if (state["rank"], state["ranks"]) != (rank, ranks):
        raise MismatchError(
            f"the state is of rank {state['rank']} of {state['ranks']}, this is rank {rank} of "
            f"{ranks}; load all ranks' states and share them out with syncline.hooks.resharded"
        )


def _digest_of(*what: object) -> int:
    text = "\0".join(map(str, what)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
