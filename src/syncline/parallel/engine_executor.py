"""``EngineExecutor``: our engine exchanges a plan's messages, fed from backward passes."""

# No "from __future__ import annotations" here: DDP checks the hook's annotations as objects.
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from syncline.errors import PeerError
from syncline.measure.exchange import timeout_of
from syncline.measure.gradient_hooks import GradientHooks, weakly
from syncline.model.plan import Plan
from syncline.model.profile import Norm
from syncline.model.quantities import NS_PER_S
from syncline.parallel.engine.compression import Compressor
from syncline.parallel.engine.dense_transport import bucket_elements, transport_for
from syncline.parallel.engine.engine import Engine
from syncline.parallel.engine.layout import BucketLayout
from syncline.parallel.engine.recording import EngineTimes
from syncline.parallel.gradient_views import GradientViews
from syncline.parallel.overlap.deferral import Deferral
from syncline.parallel.overlap.gates import Gates
from syncline.parallel.shutdown import finish_on_shutdown
from syncline.parallel.watches import PaceSample
from syncline.parallel.wrapped import Wrapped
from syncline.sparse.gradients import flat
from syncline.torch_private import has_final_buckets, queue_callback


class _Backward(Enum):
    """Who exchanges the backward pass that runs."""

    NONE = auto()
    """None runs, or nothing exchanges it."""
    REDUCER = auto()
    ENGINE = auto()


class _Buckets(Enum):
    """The state of the reducer's buckets."""

    FIRST = auto()
    """No round is over: the reducer may make others."""
    UNKNOWN = auto()
    """Not all final ones were seen, or they are not those of the layout."""
    USABLE = auto()
    """They are final, and those of the layout."""


class EngineExecutor:
    """Runs one plan under a wrapped module until :meth:`stop`, round after round.

    See :class:`~syncline.parallel.executor.Executor`. A round is one backward pass after a forward
    pass that :meth:`expect` was called for. In the first round the reducer learns the order of the
    gradients, in the second it has its final buckets: in both, backward waits, and the exchange is
    DDP's own. From the third on, the engine runs. Under a lossy plan the first two are exchanged
    message by message once the last gradient is there, so that every step is exchanged by the plan.

    ``group`` is the engine's own; ``updates`` are those that the
    optimizers had made when the ranks agreed on the plan; ``finished`` is called at the end of
    every round.
    """

    needs_views = True

    def __init__(
        self,
        wrapped: Wrapped,
        plan: Plan,
        group: dist.ProcessGroup,
        updates: int,
        finished: Callable[[], None],
    ) -> None:
        self._wrapped = wrapped
        self._finished = finished
        self._layout = BucketLayout.of(plan)
        self.buckets: Sequence[range] = self._layout.buckets
        self.bucket_bytes: Sequence[int] = self._layout.bucket_bytes
        self._waits_by_need = plan.wait == "need"
        self.defers = self._waits_by_need and wrapped.can_defer
        """Whether the exchange is left running when backward ends; else backward waits for it."""
        self._compressor: Compressor | None = None
        """Exchanges the plan's messages while the engine does not, if the plan is lossy."""
        if plan.is_lossy:
            assert wrapped.compressing is not None
            self._compressor = wrapped.compressing.compressor_for(plan)
        self._engine = Engine(
            plan,
            self._layout,
            transport_for(group, wrapped.device),
            compressor=self._compressor,
            timeout_s=timeout_of(wrapped.group).total_seconds(),
        )
        parameters = {tensor.name: wrapped.parameters[tensor.name] for tensor in plan.tensors}
        self.deferral = Deferral(parameters, self._engine, wrapped.guard)
        self._shutdown = finish_on_shutdown(self.deferral, self._engine)
        self._updates_before = updates
        """Under join, ranks make different numbers of updates; the roll call counts from here."""
        self._by_tensor = not wrapped.ddp.static_graph
        """Whether single tensors are reported as ready. In a static graph, where a gradient may be
        accumulated more than once in a backward pass, only full buckets are."""
        self._held: dict[int, torch.Tensor] = {}
        """Gradients held until the last one, by the index of their tensor."""
        self._futures: list[tuple[Future[torch.Tensor], torch.Tensor]] = []
        """Futures of their buckets, with the buckets."""
        self._share = 1.0 / dist.get_world_size(wrapped.group)
        self._views = GradientViews(self.deferral.parameters, as_views=wrapped.wants_views)
        self._hooks = GradientHooks()
        self._gates = Gates(wrapped.ddp.module, self.deferral)
        self._expected = False
        """Whether the next backward pass will be exchanged."""
        self._backward = _Backward.NONE
        self._buckets = _Buckets.FIRST
        self._seen: dict[int, tuple[list[int], int]] = {}
        """Of each final bucket seen so far: its parameters, by identity, and how many values."""
        self.mismatch: str | None = None
        """How the reducer's buckets differ from the layout, once seen."""

    # ------------------------------------------------------------------ from start to stop

    def start(self, _: list[str]) -> None:
        """Attach hooks and gates, after the reducer's own hooks."""
        before, accumulated = weakly(self._before), weakly(self._accumulated)
        for index, parameter in enumerate(self.deferral.parameters):
            after = functools.partial(accumulated, index) if self._by_tensor else None
            self._hooks.add(parameter, before, after)
        if self.defers:
            self._gates.attach()

    def stop(self) -> None:
        """Finish what is pending and take everything off again."""
        self.deferral.settle()
        self._engine.finish()
        self._gates.detach()
        self._hooks.remove()
        self._views.leave()
        self._shutdown.cancel()
        self._engine.close()

    def __del__(self) -> None:
        """Let go of what is under way, without waiting: the wrapper was dropped."""
        if hasattr(self, "_shutdown"):
            self.deferral.outlive()
            self._engine.drain()

    def let_defer(self) -> None:
        """Let the exchange go on under forward passes, where the plan says so."""
        self.deferral.guard = self._wrapped.guard
        if self._wrapped.can_defer and self._waits_by_need and not self.defers:
            self.defers = True
            self._gates.attach()

    def stop_deferring(self) -> None:
        """Let backward wait for the whole exchange from now on."""
        self.deferral.settle()
        self.defers = False
        self._gates.detach()

    # ------------------------------------------------------------------ rounds

    def follow(self) -> None:
        """Every gradient is followed anyway."""

    def expect(self, _: Any) -> None:
        """Call after a forward pass whose gradients will be exchanged."""
        self._expected = True

    def look(self) -> None:
        """The end of every backward pass is seen when it comes."""

    def begin_forward(self, *, exchanged: bool) -> None:
        """Begin to wait, module by module, for what the forward pass reads."""
        if exchanged:
            self._engine.require_whole()
        self.deferral.begin_forward()

    def end_forward(self) -> None:
        """Call when the forward pass is over, also by an error."""
        self.deferral.end_forward()

    def keeping_gradients(self) -> AbstractContextManager[None]:
        """Return a context for the making of buckets, which happens in a forward pass too."""
        return nullcontext() if self._buckets is _Buckets.USABLE else self._views.kept()

    def hook(self) -> Callable[[object, GradBucket], Future[torch.Tensor]]:
        """Return the function that takes full buckets, for ``register_comm_hook``."""
        reference = weakref.ref(self)  # as in weakly()

        def take_bucket(_: object, bucket: GradBucket) -> Future[torch.Tensor]:
            engine = reference()
            assert engine is not None
            return engine._take_bucket(bucket)

        return take_bucket

    def _before(self, *_: Any) -> None:
        """Finish what is pending of the round before, before a gradient is accumulated.

        Raises:
            PeerError: the backward pass before broke off; torch's own check, in the forward pass,
                finds this first wherever a gradient had reached the reducer.
        """
        if self._backward is not _Backward.NONE:
            if self._expected:
                raise PeerError(
                    "the last backward pass broke off while gradients were exchanged, so the ranks "
                    "have parted; resume all of them from the last checkpoint"
                )
            return
        if self.deferral.pending:
            self.deferral.settle()
        if not self._expected:
            return
        self._expected = False
        by_engine = self._buckets is _Buckets.USABLE
        self._backward = _Backward.ENGINE if by_engine else _Backward.REDUCER
        self._views.begin()
        if by_engine:
            self._engine.begin([self._wrapped.updates - self._updates_before])

    def _accumulated(self, index: int, *_: Any) -> None:
        # Python's hooks on a node run where the first of them was registered, which may be before
        # the present reducer's hook: so that may not have copied the gradient yet.
        if self._backward is _Backward.ENGINE and self._views.take(index):
            self._engine.tensor_ready(index)

    def _take_bucket(self, bucket: GradBucket) -> Future[torch.Tensor]:
        # In the first round of a static graph all buckets come when backward ends, unnumbered.
        unnumbered = not self._by_tensor and self._buckets is _Buckets.FIRST
        if self._backward is not _Backward.NONE and (bucket.is_last() or unnumbered):
            # The reducer queues its own callback after its last bucket; a callback that is queued
            # by a callback runs after it. Not earlier: in a nested backward pass, as of reentrant
            # checkpointing, callbacks run when that ends.
            queue_callback(lambda: queue_callback(self._end))
        if self._backward is _Backward.ENGINE:
            self._engine.bucket_ready(bucket.index())
            return _done(bucket.buffer())
        if self._backward is _Backward.REDUCER and self._has_final_buckets():
            self._note(bucket)
        return self._exchange_now(bucket) if self._compressor is None else self._hold(bucket)

    def _end(self) -> None:
        if self._backward is _Backward.NONE:
            return
        by_engine = self._backward is _Backward.ENGINE
        self._backward = _Backward.NONE
        if self._buckets is _Buckets.FIRST:
            self._buckets = _Buckets.UNKNOWN
        self._engine.check()
        if by_engine:
            self._engine.wait(self._views.foreign)
        self._views.end(known=self._buckets is _Buckets.USABLE)
        if by_engine and self.defers:
            self.deferral.suspend_gradients()
        else:
            if by_engine:
                self.deferral.wait_for_all()
            if self._compressor is not None:
                self._compressor.close([p.grad for p in self.deferral.parameters])
        self._finished()

    # ------------------------------------------------------------------ the first two rounds

    def _has_final_buckets(self) -> bool:
        """Whether the reducer's are final: it keeps its first if it looks for unused parameters."""
        if self._wrapped.keeps_first_buckets:
            return self._buckets is not _Buckets.FIRST
        return has_final_buckets(self._wrapped.ddp)

    def _note(self, bucket: GradBucket) -> None:
        """Note a final bucket's content; with the last bucket, compare all with the layout.

        The reducer's order is rank 0's, so the answer is the same on every rank.
        """
        number, elements = bucket.index(), bucket_elements(bucket)
        self._seen[number] = [id(p) for p in bucket.parameters()], elements.numel()
        if number < len(self._layout.buckets):
            self._engine.know(number, elements)
        if bucket.is_last():
            self.mismatch = self._difference()
            if self.mismatch is None:
                self._buckets = _Buckets.USABLE

    def _difference(self) -> str | None:
        """Say how the buckets seen differ from the layout's."""
        wanted = self._layout.buckets
        parameters, names = self.deferral.parameters, self.deferral.names
        if len(self._seen) != len(wanted):
            return f"planned {len(wanted)} buckets, DDP made {len(self._seen)}"
        for number, tensors in enumerate(wanted):
            found, values = self._seen[number]
            if found != [id(parameters[t]) for t in tensors]:
                odd = next(
                    (t for t, f in zip(tensors, found, strict=False) if id(parameters[t]) != f),
                    tensors[-1],
                )
                return f"bucket {number} holds other gradients at {names[odd]!r}"
            elements = sum(parameters[t].numel() for t in tensors)
            if values != elements:
                return (
                    f"bucket {number} has {values} values for the {elements} elements from "
                    f"{names[tensors[0]]!r} on"
                )
        return None

    def _exchange_now(self, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()

        # An error is raised when backward ends: C++ code would wrap errors of futures and hooks in
        # its own messages.
        def first(future: Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                return future.value()[0]
            except RuntimeError as error:
                self._engine.lose(error)
                return buffer

        bucket_elements(bucket).mul_(self._share)
        try:
            work = dist.all_reduce(buffer, group=self._wrapped.group, async_op=True)
        except RuntimeError as error:
            self._engine.lose(error)
            return _done(buffer)
        assert work is not None
        done: Future[torch.Tensor] = work.get_future().then(first)
        return done

    def _hold(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Hold a bucket until the last one is there, then exchange the plan's messages."""
        future = _future_of(bucket.buffer())
        self._futures.append((future, bucket.buffer()))
        for parameter, values in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._held[self.deferral.index_of[id(parameter)]] = flat(values)
        if len(self._held) < len(self.deferral.parameters):
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
            gradients = [self._held[tensor] for tensor in self._layout.tensors[number]]
            if message.payload != "dense":
                self._compressor.prepare(number, gradients)()
                continue
            together = torch.cat(gradients).mul_(self._share)
            dist.all_reduce(together, group=self._wrapped.group)
            parts = together.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part)

    # ------------------------------------------------------------------ what was observed

    @property
    def bucket_count(self) -> int:
        """How many buckets the reducer has."""
        return len(self.buckets)

    @property
    def exposed_s(self) -> float | None:
        """How long the last iteration waited for messages, seconds."""
        return self.deferral.stall_ns / NS_PER_S

    def recorded(self) -> EngineTimes:
        """Return the messages that have finished in the last two rounds, and the gates since."""
        return EngineTimes(self._engine.times(), self.deferral.take_gates())

    def flushed(self, *, always: bool = False) -> tuple[str, Norm | None] | None:
        """Say why hardly anything was left to run under forward passes since the last call.

        With it comes the norm that was asked for last and that the plan does not have, if any.
        ``always``: only if it was so in every round, not in most of them.
        """
        if not self.defers:
            return None
        rounds, early, flushes = self.deferral.take_counts()
        norm = self.deferral.asked_norm
        # What was read in the present round, and at the end of the first, is not counted yet.
        most = max(rounds - 1.5, 0.5) if always else rounds / 2
        if early > most:
            if norm is not None:
                reason = (
                    f"gradients are read before each step for their {norm}-norm, which the plan "
                    "does not exchange (its field norm), and so this waits for all"
                )
            else:
                reason = (
                    "gradients are read before each step, otherwise than by clipping, which waits "
                    "for the whole exchange"
                )
        elif flushes > most:
            reason = (
                "parameters are read between each step and the next forward pass, which waits for "
                "the whole exchange (for an average of the weights there is model.average)"
            )
        else:
            return None
        return reason, norm

    def pace(self, iteration_s: float) -> PaceSample | None:
        """Return what an iteration takes now, from the last finished round."""
        messages = self._engine.last_round()
        if not messages:
            return None
        begun_ns = min(m.issued_ns for m in messages)
        ended_ns = max(m.finished_ns for m in messages)
        return PaceSample(
            computation_s=max(iteration_s - self.deferral.stall_ns / NS_PER_S, 0.0),
            communication_s=(ended_ns - begun_ns) / NS_PER_S,
        )


def _done(buffer: torch.Tensor) -> Future[torch.Tensor]:
    done = _future_of(buffer)
    done.set_result(buffer)
    return done


def _future_of(buffer: torch.Tensor) -> Future[torch.Tensor]:
    devices: list[int | str | torch.device] = (
        [buffer.device] if buffer.device.type == "cuda" else []
    )
    return Future(devices=devices)
