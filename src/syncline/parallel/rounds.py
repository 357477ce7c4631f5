"""The backward side of the engine: what is ready when, and where a round begins and ends."""

# No "from __future__ import annotations" here: DDP checks the hook's annotations as objects.
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from syncline.errors import PeerError
from syncline.parallel.carrier import bucket_elements
from syncline.parallel.compressor import Compressor
from syncline.parallel.deferral import Deferral
from syncline.parallel.engine import Engine
from syncline.parallel.gradient_views import GradientViews
from syncline.parallel.reductions import accumulator, take_off
from syncline.sparse.gradients import flat

__all__ = ["Rounds"]

_ENGINE = torch.autograd.Variable._execution_engine


class Rounds:
    """Feeds the engine from the reducer's hooks, round after round.

    A round is one backward pass after a forward pass that :meth:`expect` was told of. The reducer's
    first tells it the order of the gradients, the second comes with its final buckets: in these,
    backward waits, and the exchange is DDP's own. From the third on, the engine runs. Under a lossy
    plan these two are exchanged message by message when the last gradient is there, so that every
    step is exchanged by the plan.

    Args:
        engine: runs the plan.
        compressor: exchanges the plan's messages while the engine does not, if the plan is lossy.
        deferral: what is left to do after a round.
        group: the wrapper's own group, for what is exchanged before the buckets are final.
        defer: leave the exchange running when backward ends; otherwise backward waits for it.
        by_tensor: call single tensors ready. Where a gradient may be accumulated more than once in
            a backward pass (a static graph), only full buckets are.
        as_views: the user, too, asked for gradients that are views of the buckets.
        roll: returns what all ranks must agree on when a round begins.
        is_final: says whether the reducer has its final buckets.
        finished: is called at the end of every round.
    """

    def __init__(
        self,
        engine: Engine,
        deferral: Deferral,
        group: dist.ProcessGroup,
        *,
        compressor: Compressor | None = None,
        defer: bool,
        by_tensor: bool,
        as_views: bool,
        roll: Callable[[], list[int]],
        is_final: Callable[[], bool],
        finished: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._deferral = deferral
        self._group = group
        self._compressor = compressor
        self._held: dict[int, torch.Tensor] = {}
        """Gradients that wait for the others, by the index of their tensor."""
        self._futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        """Of their buckets, with these."""
        self._share = 1.0 / dist.get_world_size(group)
        self.defer = defer
        self._by_tensor = by_tensor
        self._roll = roll
        self._is_final = is_final
        self._finished = finished
        self._views = GradientViews(deferral.parameters, as_views=as_views)
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Any] = []
        """What the hooks are on; kept alive, or the hooks would go with it."""
        # Parameters outlive their wrapper: nothing of it stays on them when it is dropped.
        weakref.finalize(self, take_off, self._handles).atexit = False
        self._expected = False
        """Whether the reducer exchanges the next backward pass."""
        self._running = False
        """Whether that backward pass has begun."""
        self._exchanging = False
        """Whether the engine exchanges it."""
        self.first = True
        """Whether no round is over."""
        self._seen: dict[int, list[int]] = {}
        """The parameters in each final bucket, by identity, as far as seen."""
        self._values: dict[int, int] = {}
        """How many values each of these buckets holds."""
        self._usable = False
        """Whether the reducer's buckets are final, and those of the layout."""
        self.mismatch: str | None = None
        """How the reducer's buckets differ from the layout, once seen."""

    def attach(self) -> None:
        """Register hooks on the gradients."""
        # The hooks are held by what they are hooked to, where garbage collection cannot look: they
        # must not keep this object alive, or the wrapper would never be freed.
        reference = weakref.ref(self)

        def before(*_: Any) -> None:
            rounds = reference()
            if rounds is not None:
                rounds._before()

        def ready(index: int) -> Callable[..., None]:
            def after(*_: Any) -> None:
                rounds = reference()
                if rounds is not None:
                    rounds._accumulated(index)

            return after

        for index, parameter in enumerate(self._deferral.parameters):
            node = accumulator(parameter)
            self._nodes.append(node)
            self._handles.append(node.register_prehook(before))
            if self._by_tensor:
                self._handles.append(node.register_hook(ready(index)))

    def detach(self) -> None:
        """Remove them."""
        take_off(self._handles)
        self._nodes.clear()
        self._views.leave()

    def keeping_gradients(self) -> AbstractContextManager[None]:
        """Return what is to surround the making of buckets, which happens in a forward pass too."""
        return nullcontext() if self._usable else self._views.kept()

    def expect(self) -> None:
        """Call after a forward pass whose gradients will be exchanged."""
        self._expected = True

    def hook(self) -> Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]:  # type: ignore[name-defined]
        """Return what takes over full buckets, for ``register_comm_hook``."""
        reference = weakref.ref(self)  # as above

        def take_bucket(
            _: object,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[torch.Tensor]:
            rounds = reference()
            assert rounds is not None
            return rounds._take_bucket(bucket)

        return take_bucket

    def _take_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        # In its first round a static graph's buckets all come when backward ends, unnumbered.
        unnumbered = not self._by_tensor and self.first
        if self._running and (bucket.is_last() or unnumbered):
            # The reducer's own callback is queued after its last bucket; a callback that is queued
            # by a callback comes after it. Not any sooner: inside a nested backward pass, as
            # reentrant checkpointing makes, callbacks run when that ends.
            _ENGINE.queue_callback(lambda: _ENGINE.queue_callback(self._end))
        if self._exchanging:
            self._engine.bucket_ready(bucket.index())
            return _done(buffer)
        if self._running and self._is_final():
            self._note(bucket)
        return self._exchange_now(bucket) if self._compressor is None else self._hold(bucket)

    def _hold(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Keep a bucket back until the last one is there, and then exchange the plan's messages."""
        future = _future_of(bucket.buffer())
        self._futures.append((future, bucket.buffer()))
        for parameter, values in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._held[self._deferral.index_of[id(parameter)]] = flat(values)
        if len(self._held) < len(self._deferral.parameters):
            return future
        try:
            self._exchange_held()
        except Exception as error:  # raised when backward ends
            self._engine.lose(error)
        self._held.clear()
        futures, self._futures = self._futures, []
        for each, buffer in futures:
            each.set_result(buffer)
        return future

    def _exchange_held(self) -> None:
        assert self._compressor is not None
        for number, message in enumerate(self._engine.plan.messages):
            gradients = [self._held[tensor] for tensor in self._engine.layout.tensors[number]]
            if message.payload != "dense":
                self._compressor.prepare(number, gradients)()
                continue
            together = torch.cat(gradients).mul_(self._share)
            dist.all_reduce(together, group=self._group)
            parts = together.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part)

    def _note(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Note what a final bucket holds; with the last of them, compare all with the layout.

        The reducer's order is rank 0's, so the answer is the same on every rank.
        """
        self._seen[bucket.index()] = [id(parameter) for parameter in bucket.parameters()]
        self._values[bucket.index()] = bucket_elements(bucket).numel()
        wanted = self._engine.layout.buckets
        if bucket.index() < len(wanted):
            self._engine.know(bucket.index(), bucket_elements(bucket))
        if not bucket.is_last():
            return
        parameters, names = self._deferral.parameters, self._deferral.names
        if len(self._seen) != len(wanted):
            self.mismatch = f"planned {len(wanted)} buckets, DDP made {len(self._seen)}"
            return
        for number, tensors in enumerate(wanted):
            expected, found = [id(parameters[t]) for t in tensors], self._seen[number]
            if expected != found:
                odd = next(
                    (t for t, f in zip(tensors, found, strict=False) if id(parameters[t]) != f),
                    tensors[-1],
                )
                self.mismatch = f"bucket {number} holds other gradients at {names[odd]!r}"
                return
            elements = sum(parameters[t].numel() for t in tensors)
            if self._values[number] != elements:
                self.mismatch = (
                    f"bucket {number} has {self._values[number]} values for the {elements} "
                    f"elements from {names[tensors[0]]!r} on"
                )
                return
        self._usable = True

    def _exchange_now(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()

        # An error is raised when backward ends: those of futures and hooks pass through C++ code,
        # which puts its own words around them.
        def first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                return future.value()[0]
            except RuntimeError as error:
                self._engine.lose(error)
                return buffer

        bucket_elements(bucket).mul_(self._share)
        try:
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
        except RuntimeError as error:
            self._engine.lose(error)
            return _done(buffer)
        assert work is not None
        done: torch.futures.Future[torch.Tensor] = work.get_future().then(first)
        return done

    def _before(self) -> None:
        """Before a gradient is accumulated: what is pending of the round before must be over.

        Raises:
            PeerError: the backward pass before broke off; torch's own check, in the forward pass,
                finds this first wherever a gradient had reached the reducer.
        """
        if self._running:
            if self._expected:
                raise PeerError(
                    "the last backward pass broke off while gradients were exchanged, so the ranks "
                    "have parted; resume all of them from the last checkpoint"
                )
            return
        if self._deferral.pending:
            self._deferral.settle()
        if self._expected:
            self._begin()

    def _begin(self) -> None:
        self._running, self._expected = True, False
        self._exchanging = self._usable
        self._views.begin()
        if self._exchanging:
            self._engine.begin(self._roll())

    def _accumulated(self, index: int) -> None:
        # Python's hooks keep the place among a node's hooks that the first of them had, which may
        # be before the present reducer's: so it may not have taken the gradient yet.
        if self._exchanging and self._views.take(index):
            self._engine.tensor_ready(index)

    def _end(self) -> None:
        if not self._running:
            return
        exchanged = self._exchanging
        self._running = self._exchanging = self.first = False
        self._engine.check()
        if exchanged:
            self._engine.wait(self._views.foreign)
        self._views.end(known=self._usable)
        if exchanged and self.defer:
            self._deferral.suspend_gradients()
        else:
            if exchanged:
                self._deferral.wait_for_all()
            if self._compressor is not None:
                self._compressor.close([p.grad for p in self._deferral.parameters])
        self._finished()


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done = _future_of(buffer)
    done.set_result(buffer)
    return done


def _future_of(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    devices: list[int | str | torch.device] = (
        [buffer.device] if buffer.device.type == "cuda" else []
    )
    return torch.futures.Future(devices=devices)
