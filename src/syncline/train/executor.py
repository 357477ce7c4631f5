"""``Executor``: what exchanges the gradients of a wrapped module, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from syncline.plan.profile import Norm
from syncline.train.engine.recording import Recorded
from syncline.train.overlap.deferral import Deferral
from syncline.train.watches import Sample
from syncline.train.wrapped import Wrapped


class Executor:
    """Runs one plan, or DDP's buckets, from :meth:`start` to :meth:`stop`.

    This base exchanges nothing. Subclasses use DDP's reducer alone (:mod:`.reducer_executor`), or
    our engine over the reducer's buckets (:mod:`.engine_executor`). Each is made before torch's
    reducer is constructed with its buckets and hook. It calls ``finished`` at the end of every
    backward pass whose gradients were exchanged.
    """

    needs_views = False  # whether gradients must be views of the buckets
    deferral: Deferral | None = None
    """Tracks what is deferred to the next forward pass; None if nothing can be."""

    def __init__(
        self,
        wrapped: Wrapped,
        finished: Callable[[], None],
        buckets: Sequence[range] = (),
        bucket_caps: Sequence[int] = (),
    ) -> None:
        self._wrapped = wrapped
        self._finished = finished
        self.buckets = buckets
        """The range of the plan's tensors in each reducer bucket; empty for DDP's own."""
        self.bucket_caps = bucket_caps
        """Bytes at which the reducer closes each bucket."""
        self._expected = False  # whether the next backward pass will be exchanged
        self.mixed = False
        """Whether a backward pass without exchange has followed the last exchanged one."""

    def hook(self) -> Callable[..., Any] | None:
        """Return the communication hook that takes full buckets, if it needs one."""
        return None

    def start(self, order: list[str]) -> None:
        """Begin, once the reducer is made; ``order`` names its parameters in their order."""

    def stop(self) -> None:
        """Finish what is pending, and remove all hooks."""

    def follow(self) -> None:
        """Check again which parameters get gradients: that may have changed."""

    def expect(self, output: Any) -> None:  # noqa: ARG002
        """Call with the output of a forward pass whose gradients will be exchanged."""
        self._expected = True

    def poll(self) -> None:
        """Call before a forward pass, to detect that a nested backward pass has ended."""

    def begin_forward(self, *, exchanged: bool) -> None:
        """Call when a forward pass begins; ``exchanged``: its gradients will be exchanged."""

    def end_forward(self) -> None:
        """Call when the forward pass has ended, even with an error."""
        if self.deferral is not None:
            self.deferral.end_forward()

    def let_defer(self) -> None:
        """Defer updates to the next forward pass from now on, if the plan says so."""

    def stop_deferring(self) -> None:
        """Apply updates synchronously from now on."""

    def keeping_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which the reducer can make buckets without changing gradients."""
        return nullcontext()

    @property
    def bucket_count(self) -> int:
        """How many buckets the reducer has, as far as known."""
        return len(self.buckets)

    @property
    def mismatch(self) -> str | None:
        """How the reducer's buckets differ from the plan, if they do."""
        return None

    @property
    def exposed_s(self) -> float | None:
        """Seconds that the last timed iteration waited for messages."""
        return None

    def recorded(self) -> Recorded:
        """Return what was recorded of the exchange since the last call."""
        return []

    def sample(self, iteration_s: float) -> Sample | None:  # noqa: ARG002
        """Return the times of the last iteration, if it was sampled."""
        return None

    def forced_syncs(self, *, always: bool = False) -> tuple[str, Norm | None] | None:  # noqa: ARG002
        """Say why almost no communication overlapped forward passes since the last call.

        Also return the norm that was last asked for and is not in the plan, if any.
        ``always``: only if this was so in every round, rather than in most of them.
        """
        return None
