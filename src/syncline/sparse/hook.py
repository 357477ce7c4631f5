"""What the communication hook of sparse exchange keeps between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from syncline.errors import MismatchError, UserError
from syncline.measure.exchange import gather_json
from syncline.model.recipe import Recipe
from syncline.sparse.layout import exchanged_parameters
from syncline.sparse.line import Line
from syncline.sparse.reducer import Gradient, SparseReducer
from syncline.sparse.residuals import resharded as resharded_residuals

__all__ = ["GTopKState", "resharded"]

VERSION = 1

Future = torch.futures.Future


class GTopKState:
    """What :func:`syncline.hooks.gtopk` keeps: recipe, step and residuals of one rank.

    Selecting and exchanging run on a thread of their own and, but for a few lines, without the
    interpreter's lock, while the backward pass goes on. The exchange has a process group to itself.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        process_group: dist.ProcessGroup | None = None,
        *,
        check: bool = False,
    ) -> None:
        """Agree with the other ranks; all of them must call.

        Args:
            model: the module, inside DDP or not; of float32 on the CPU.
            recipe: the same on all ranks.
            process_group: that of DDP; the default group if None.
            check: whether every exchange is checked for lost gradient. Slow: for debugging.

        Raises:
            UserError: the model cannot be exchanged sparsely, or there is no process group.
            MismatchError: a rank has another recipe or another model; raised on all ranks.
            PeerError: a rank did not take part within the group's timeout.
        """
        if not dist.is_initialized():
            raise UserError(
                "sparse exchange needs a process group; call "
                "torch.distributed.init_process_group first"
            )
        base = dist.group.WORLD if process_group is None else process_group
        assert base is not None
        refused: UserError | None = None
        try:
            parameters = exchanged_parameters(model)
        except UserError as error:
            refused, parameters = error, {}
        self.recipe = recipe
        self._names = {id(p): name for name, p in parameters.items()}
        self._elements = {name: p.numel() for name, p in parameters.items()}
        self._group = base
        self._require_same(0, None if refused is None else str(refused), refused)
        timeout = _timeout_of(base)
        own = dist.new_group(
            dist.get_process_group_ranks(base), timeout=timeout, backend=_backend_for(base)
        )
        assert own is not None
        self._group = own
        self._reducer = SparseReducer(recipe, self._elements, own, timeout, check=check)
        self._line = Line("syncline-sparse")
        self._step = 0
        self._agreed = True
        self._message = 0
        self._kept_back: list[tuple[list[Gradient], Future[torch.Tensor], torch.Tensor]] = []

    @property
    def step(self) -> int:
        """How many steps have been exchanged; the warm-up goes by it."""
        return self._step

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save; every rank saves its own."""
        self._line.join()
        return {
            "version": VERSION,
            "recipe": msgspec.to_builtins(self.recipe),
            "ranks": self._group.size(),
            "rank": self._group.rank(),
            "step": self._step,
            **self._reducer.residuals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what this rank has saved.

        Ranks compare their steps before the next exchange.

        Raises:
            MismatchError: it is of another recipe, model, rank or number of ranks.
        """
        self._line.join()
        if state.get("version") != VERSION:
            raise MismatchError(
                f"expected version {VERSION} of a state of gtopk, found {state.get('version')!r}"
            )
        recipe = msgspec.convert(state["recipe"], Recipe)
        if recipe != self.recipe:
            raise MismatchError(
                f"the checkpoint was made with another recipe: {_difference(recipe, self.recipe)}; "
                "continue with that one"
            )
        place = (state["rank"], state["ranks"])
        if place != (self._group.rank(), self._group.size()):
            raise MismatchError(
                f"the state is of rank {place[0]} of {place[1]}, this is rank {self._group.rank()} "
                f"of {self._group.size()}; load all ranks' states and share them out with "
                "syncline.hooks.resharded"
            )
        self._reducer.residuals.load_state_dict(state)
        self._step = state["step"]
        self._agreed = False

    def _require_same(self, step: int, refused: str | None, error: UserError | None) -> None:
        own = {
            "recipe": msgspec.to_builtins(self.recipe),
            "parameters": list(self._elements.items()),
            "step": step,
            "refused": refused,
        }
        found = gather_json(own, self._group, _device_of(self._group))
        if error is not None:
            raise error
        for rank, other in enumerate(found):
            if other["refused"] is not None:
                raise UserError(f"rank {rank} cannot exchange sparsely: {other['refused']}")
            for what in ("recipe", "parameters", "step"):
                if other[what] != found[0][what]:
                    raise MismatchError(
                        f"rank {rank} differs from rank 0 in its {what}: {_short(other[what])} "
                        f"instead of {_short(found[0][what])}; give all ranks the same"
                    )

    # ------------------------------------------------------------------ of the hook

    def exchanged(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Begin the exchange of a bucket; the future is its buffer, averaged."""
        self._line.check()
        future: Future[torch.Tensor] = torch.futures.Future()
        gradients = []
        for parameter, values in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names.get(id(parameter))
            if name is None:
                raise UserError(
                    "a bucket holds a parameter that the state was not made with; make GTopKState "
                    "of the model that DDP trains"
                )
            # As it lies in the bucket: channels-last gradients have no view of one dimension.
            flat = values.as_strided((values.numel(),), (1,), values.storage_offset())
            gradients.append(Gradient(name, flat))
        self._kept_back.append((gradients, future, bucket.buffer()))
        if bucket.is_last() or self.recipe.unit != "model":
            self._begin(bucket.is_last())
        return future

    def _begin(self, last: bool) -> None:
        buckets, self._kept_back = self._kept_back, []
        gradients = [gradient for each, _, _ in buckets for gradient in each]
        step, message = self._step, self._message
        self._message += 1

        def exchange() -> None:
            if not self._agreed:
                self._require_same(step, None, None)
                self._agreed = True
            self._reducer.reduce(gradients, step=step, message=message)

        def ended() -> None:
            for _, future, buffer in buckets:
                future.set_result(buffer)

        self._line.put(exchange, ended)
        if last:
            self._step, self._message = step + 1, 0
            # Before DDP waits for the futures: so an error comes out of backward() as it is.
            Variable._execution_engine.queue_callback(self._line.join)


def resharded(states: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return the states with which another number of ranks goes on.

    What the residuals add up to is kept; with as many ranks as before nothing changes.

    Args:
        states: ``GTopKState.state_dict()`` of all ranks of one checkpoint.
        ranks: how many there are to be.

    Raises:
        MismatchError: the states are not all those of one checkpoint.
        UserError: no rank is to be.
    """
    if ranks < 1:
        raise UserError(f"states are shared out to at least 1 rank, found {ranks}")
    ordered = sorted(states, key=lambda state: int(state["rank"]))
    expected = list(range(ordered[0]["ranks"] if ordered else 1))
    found = [state["rank"] for state in ordered]
    common = [{key: s[key] for key in ("version", "recipe", "ranks", "step")} for s in ordered]
    if found != expected or any(each != common[0] for each in common):
        raise MismatchError(
            f"expected the states of ranks 0 to {expected[-1]} of one step and recipe, found those "
            f"of ranks {found} at steps {[each['step'] for each in common]}"
        )
    shared = resharded_residuals(ordered, ranks)
    return [
        {**common[0], "ranks": ranks, "rank": rank, **residuals}
        for rank, residuals in enumerate(shared)
    ]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(_device_of(group)).options._timeout
    return timeout


def _device_of(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cpu") if _serves_the_cpu(group) else torch.device("cuda")


def _serves_the_cpu(group: dist.ProcessGroup) -> bool:
    return "cpu" in {device.type for device in group._device_types}


def _backend_for(group: dist.ProcessGroup) -> str:
    """Return the group's own backend, or Gloo where that is not for the CPU."""
    return dist.get_backend(group) if _serves_the_cpu(group) else "gloo"


def _difference(given: Recipe, own: Recipe) -> str:
    differing = [
        f"{name} was {getattr(given, name)!r} and is {getattr(own, name)!r}"
        for name in Recipe.__struct_fields__
        if getattr(given, name) != getattr(own, name)
    ]
    return ", ".join(differing)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else text[:300] + " ..."
