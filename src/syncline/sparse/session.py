"""``Session``: the state of one rank in a training with sparse exchange."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from syncline.errors import MismatchError, UserError
from syncline.measure.exchange import gather_json, new_group_like, timeout_of
from syncline.model.recipe import Recipe
from syncline.sparse.ahead import StepAhead, Waiting
from syncline.sparse.gradients import NamedGradient
from syncline.sparse.reducer import SparseReducer
from syncline.sparse.residuals import resharded as resharded_residuals
from syncline.sparse.sparse_transport import SparseTransport
from syncline.sparse.stream_context import stream_context_for
from syncline.torch_private import device_types

__all__ = ["Scaler", "Session", "own_group", "resharded"]

VERSION = 1


class Scaler(Protocol):
    """The methods of torch's ``GradScaler`` that are used."""

    def is_enabled(self) -> bool:
        """Say whether it scales gradients and skips steps."""

    def get_scale(self) -> float:
        """Return the factor of losses."""


class Session:
    """Recipe, step and residuals of one rank, and the process group that they are exchanged over.

    The communication hook and the wrapper both keep one.
    """

    def __init__(
        self,
        recipe: Recipe,
        elements: Mapping[str, int],
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        check: bool = False,
        refused: UserError | None = None,
    ) -> None:
        """Agree with the other ranks; all of them must call.

        Args:
            recipe: the same on all ranks.
            elements: of every parameter by name, in the order of the model.
            group: of the ranks; the session makes another one of them.
            device: of the gradients.
            check: whether every exchange is checked for lost gradient.
            refused: why this rank cannot exchange sparsely, if so; sent to the others.

        Raises:
            UserError: this rank or another cannot exchange sparsely.
            MismatchError: a rank has another recipe or another model; raised on all ranks.
            PeerError: a rank did not take part within the group's timeout.
        """
        self.recipe = recipe
        self._elements = dict(elements)
        self._group = group
        self._require_same(refused)
        self._group = own_group(group)
        timeout = timeout_of(group)
        self.context = stream_context_for(device)
        self.reducer = SparseReducer(
            recipe, elements, self._group, timeout, context=self.context, check=check
        )
        self.step = 0
        """How many steps have been exchanged; the warm-up depends on it."""
        self._scaler: Scaler | None = None
        self._changes = 0
        """How often the residuals have changed."""
        self.delivers = False
        """Whether gradients are exchanged densely for now, with the residuals added to them."""
        self._ahead: list[StepAhead] = []
        """One for each optimizer that steps ahead."""
        self._begun = False
        """Whether a message of the present step has been prepared."""
        self._before: dict[str, list[torch.Tensor]] = {}
        """With a scaler: copies of the residuals from before the present or last step."""

    def follow(self, scaler: Scaler) -> None:
        """Let a scaler skip steps: a gradient that is not finite is no error from now on.

        All ranks then get infinities, so that all scalers skip the step, and the residuals are
        restored. Residuals are rescaled when the scale changes. A scaler that is not enabled has no
        effect.
        """
        if scaler.is_enabled():
            self._scaler = scaler
            self.reducer.refused = False

    @property
    def transport(self) -> SparseTransport:
        """What sends and receives, and counts the bytes."""
        return self.reducer.transport

    @property
    def has_scaler(self) -> bool:
        """Whether steps may be skipped."""
        return self._scaler is not None

    @property
    def refused(self) -> bool:
        """Whether the present step, or the last one, is to be skipped."""
        return bool(self.reducer.refused)

    def refuse(self) -> None:
        """Mark the present step as one to be skipped."""
        self.reducer.refused = True

    def undo_refused(self) -> None:
        """Restore the residuals from before the last step, if that step is to be skipped."""
        if self.refused:
            for name, copies in self._before.items():
                self.reducer.residuals.restore(name, copies)
            self.reducer.refused = False

    def step_ahead(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        *,
        settle: Callable[[], None],
    ) -> None:
        """Compute gradients at the weights with residuals applied, until the session ends.

        See :class:`StepAhead` for the arguments; ``settle`` waits for all exchanges to end.

        Raises:
            UserError: it is an optimizer of another kind or model, or it was given before; or the
                recipe leaves nothing behind.
        """
        residuals = self.reducer.residuals
        if not any(name in residuals for name in parameters):
            raise UserError(
                "step_ahead is for what sparse exchange leaves behind; this recipe exchanges every "
                "parameter whole: leave step_ahead out"
            )
        own = weakref.ref(self)

        def waiting() -> Waiting:
            session = own()
            assert session is not None  # it keeps the caller alive
            settle()
            session.undo_refused()
            return Waiting(session._changes, session.reducer.scale, session.delivers)

        taken = {name for each in self._ahead for name in each.names}
        free = {name: p for name, p in parameters.items() if name not in taken}
        ranks = self._group.size()
        self._ahead.append(
            StepAhead(module, free, optimizer, residuals, ranks=ranks, waiting=waiting)
        )
        # Stepping ahead works better if one rank has all of a dropped sum than if each has a part.
        self.reducer.lowest_keeps = True

    def prepare(
        self, gradients: Sequence[NamedGradient], *, message: int, after: Sequence[Any]
    ) -> Callable[[], None]:
        """Select what one message sends; return what exchanges it.

        See :meth:`SparseReducer.prepare`. Both are complete on the device when they return.
        ``after`` holds the marks of :attr:`context` after which the gradients are complete.
        """
        with self.context.after(after):
            if self._scaler is not None:
                residuals = self.reducer.residuals
                if not self._begun:
                    self.undo_refused()
                    self._before.clear()
                    scale = float(self._scaler.get_scale())
                    if scale != self.reducer.scale:
                        residuals.scale(scale / self.reducer.scale)
                        self.reducer.scale = scale
                self._before |= {g.name: residuals.copy_of(g.name) for g in gradients}
            self._begun = True
            exchange = self.reducer.prepare(gradients, step=self.step, message=message)

        def carry_out() -> None:
            with self.context.after(()):
                exchange()

        return carry_out

    def end_step(self) -> None:
        """Call when all messages of a step have been exchanged."""
        self.step += 1
        self._changes += 1
        self._begun = False
        if not self._ahead:
            self.reducer.residuals.follow_none()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save; every rank saves its own. Nothing may be under way."""
        self.undo_refused()
        return {
            "version": VERSION,
            "recipe": msgspec.to_builtins(self.recipe),
            "ranks": self._group.size(),
            "rank": self._group.rank(),
            "step": self.step,
            "scale": self.reducer.scale,
            **self.reducer.residuals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what this rank has saved.

        Ranks that have loaded other steps refuse each other's messages.

        Raises:
            MismatchError: it is of another recipe, model, rank or number of ranks.
        """
        if state.get("version") != VERSION:
            raise MismatchError(
                f"expected version {VERSION} of a state of gtopk, found {state.get('version')!r}"
            )
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
        place = (state["rank"], state["ranks"])
        if place != (self._group.rank(), self._group.size()):
            raise MismatchError(
                f"the state is of rank {place[0]} of {place[1]}, this is rank {self._group.rank()} "
                f"of {self._group.size()}; load all ranks' states and share them out with "
                "syncline.hooks.resharded"
            )
        self.reducer.residuals.load_state_dict(state)
        # Unscaled; a scaler scales them again.
        self.reducer.residuals.scale(1 / state.get("scale", 1.0))
        self.reducer.scale = 1.0
        self._before.clear()
        self._changes += 1
        self.step = state["step"]

    def _require_same(self, refused: UserError | None) -> None:
        own = {
            "recipe": msgspec.to_builtins(self.recipe),
            "parameters": list(self._elements.items()),
            "refused": None if refused is None else str(refused),
        }
        device = torch.device("cpu" if _serves_the_cpu(self._group) else "cuda")
        found = gather_json(own, self._group, device)
        if refused is not None:
            raise refused
        for rank, other in enumerate(found):
            if other["refused"] is not None:
                raise UserError(f"rank {rank} cannot exchange sparsely: {other['refused']}")
            for what in ("recipe", "parameters"):
                if other[what] != found[0][what]:
                    raise MismatchError(
                        f"rank {rank} differs from rank 0 in its {what}: {_short(other[what])} "
                        f"instead of {_short(found[0][what])}; give all ranks the same"
                    )


def resharded(states: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return states for another number of ranks.

    The sums of the residuals are kept; with as many ranks as before nothing changes. A plan is for
    one number of ranks, so another number drops it.

    Args:
        states: ``state_dict()`` of all ranks of one checkpoint.
        ranks: the new number.

    Raises:
        MismatchError: the states are not all those of one checkpoint.
        UserError: ``ranks`` is below 1.
    """
    if ranks < 1:
        raise UserError(f"states are shared out to at least 1 rank, found {ranks}")
    if any("recipe" not in state for state in states):
        raise UserError(
            "only what sparse exchange has left behind can be shared out; 16 bits leave nothing, "
            "so go on with other ranks without loading these states"
        )
    ordered = sorted(states, key=lambda state: int(state["rank"]))
    expected = ordered[0]["ranks"] if ordered else 1
    found = [state["rank"] for state in ordered]
    common = [{key: s[key] for key in ("version", "recipe", "ranks", "step")} for s in ordered]
    whole = len(found) == expected and found == list(range(expected))
    if not whole or any(each != common[0] for each in common):
        raise MismatchError(
            f"expected the states of ranks 0 to {expected - 1} of one step and recipe, found those "
            f"of ranks {found} at steps {[each['step'] for each in common]}"
        )
    if ranks == len(ordered):
        return [dict(state) for state in ordered]
    shared = resharded_residuals(ordered, ranks)
    scale = ordered[0].get("scale", 1.0)
    return [
        {**common[0], "scale": scale, "ranks": ranks, "rank": rank, **residuals}
        for rank, residuals in enumerate(shared)
    ]


def own_group(base: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a process group for tensors of the CPU of a group's ranks; all of them must call."""
    return new_group_like(base, backend=None if _serves_the_cpu(base) else "gloo")


def _serves_the_cpu(group: dist.ProcessGroup) -> bool:
    return "cpu" in {device.type for device in device_types(group)}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else text[:300] + " ..."
