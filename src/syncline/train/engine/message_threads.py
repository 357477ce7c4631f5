"""The engine's two threads: one issues a plan's messages in order, the other sees them complete.

Under one lock, the training thread and the completer wake the issuer (``_for_issuer``), the issuer
and the completer wake the threads that wait (``_for_trainer``), and the issuer hands works to the
completer through ``_issued_queue``. See :mod:`.engine` for what runs in which thread.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from syncline.errors import InternalError, MismatchError, PeerError, SynclineError, UserError
from syncline.plan.plan import Plan
from syncline.train.engine.compression import Compressor
from syncline.train.engine.dense_transport import DenseTransport, Slice, Work
from syncline.train.engine.layout import BucketLayout, shares_of
from syncline.train.engine.norms import ShareNorms
from syncline.train.engine.pacing import Pacing
from syncline.train.engine.recording import MessageTimes
from syncline.train.measure.exchange import describe_error

CLOSING_S = 10.0


class Round:
    """One iteration's exchange."""

    def __init__(self, layout: BucketLayout, *, norms: bool, sharded: bool) -> None:
        self.missing = [len(tensors) for tensors in layout.tensors]  # by message: tensors not ready
        self.ready = [False] * len(layout.touching)
        self.left = [len(messages) for messages in layout.completing]  # by tensor: messages to come
        self.works: list[Work | None] = [None] * len(layout.places)
        """Of each issued message; None again once the host has seen it complete."""
        self.ready_ns = [0] * len(layout.places)
        self.issued_ns = [0] * len(layout.places)
        self.finished_ns = [0] * len(layout.places)
        self.marks: list[list[Any]] = [[] for _ in layout.places]
        self.asked_whole: bool | None = None  # whether this rank needs whole gradients, if sharded
        self.whole: bool | None = None  # whether any rank does; None until all have answered
        self.loaded = [not sharded] * len(layout.places)
        """Of each all-gather: whether its share of the parameters is in the bucket."""
        self.unsent = self.unfinished = len(layout.places) + norms + sharded
        self.norms: tuple[Work, torch.Tensor] | None = None
        """The work that a reader's stream must wait for, and the rows of all workers. None until
        the work is complete, or only issued if the host need not wait for it."""
        self.has_norms = not norms  # whether this rank has computed its part of the norms, if any

    def times(self) -> list[MessageTimes]:
        """Return the times of the finished messages, in ns."""
        rows = zip(self.ready_ns, self.issued_ns, self.finished_ns, strict=True)
        return [MessageTimes(number, *row) for number, row in enumerate(rows) if row[2]]


class MessageThreads:
    """Issues a message once its gradients are ready and few enough others are in flight.

    All ranks issue the same collectives in the same order, so they never deadlock. Every round
    begins with a desync check, during the backward pass: ranks that count different rounds or
    updates raise instead of averaging gradients of different parameters.
    """

    def __init__(
        self,
        plan: Plan,
        layout: BucketLayout,
        transport: DenseTransport,
        *,
        compressor: Compressor | None = None,
        residual: torch.Tensor | None = None,
        timeout_s: float,
    ) -> None:
        self.plan = plan
        self.layout = layout
        self.rank = transport.rank
        self.timeout_s = timeout_s
        self.buffers: dict[int, torch.Tensor] = {}  # by bucket: its elements; set before round 1
        self.share_norms = ShareNorms(plan, layout) if plan.norm is not None else None
        self.round: Round | None = None  # the present one; other threads give it to ``wait``
        self._before: Round | None = None
        self._next: Round | None = None  # the present round, until the issuer takes it
        self._rounds = 0
        self._desync_numbers: tuple[int, ...] = ()
        self._transport = transport
        self._compressor = compressor
        self._residual = residual  # of a plan in int8: what rounding has lost of its float32
        others = itertools.takewhile(lambda tensor: tensor.dtype != "float32", plan.tensors)
        self._residual_start = sum(tensor.elements for tensor in others)
        self._process = os.getpid()
        self.shares = shares_of(plan)
        self._sums = [i for i, m in enumerate(plan.messages) if m.collective != "all-gather"]
        self._norms_after = self._sums[-1] if self.share_norms is not None else None
        self.gathers = [i for i, m in enumerate(plan.messages) if m.collective == "all-gather"]
        # Sparse messages are sent one at a time; the next is prepared meanwhile.
        bounded = transport.bounded or compressor is not None
        in_flight = plan.in_flight if bounded else len(plan.messages) + 1
        self._most_in_flight = in_flight + (compressor is not None)
        self._host_waits = [transport.bounded or m.payload == "sparse" for m in plan.messages]
        """Of each message: whether the host waits until it is complete, or only the device."""
        # Of a signal's handler, too, which may save a checkpoint while this thread holds it.
        self._lock = threading.RLock()
        self._for_issuer = threading.Condition(self._lock)
        self._for_trainer = threading.Condition(self._lock)
        self._in_flight = 0
        self._pacing = Pacing(
            [message.stop - message.start for message in plan.messages],
            [self._last_step(number) for number in range(len(plan.messages))],
        )
        self._awaited = -1  # the message that the issuer waits to become ready
        self._closing = self._draining = False
        self._error: SynclineError | None = None
        self._issued_queue: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None]
        self._issued_queue = queue.SimpleQueue()  # works, and what to call after each; None to end
        self.threads = [
            threading.Thread(
                target=self._guarded, args=(work,), name=f"syncline {name}", daemon=True
            )
            for name, work in (("issuer", self._issue), ("completer", self._complete))
        ]
        for thread in self.threads:
            thread.start()

    def _last_step(self, number: int) -> float | None:
        """Return the last step's share of a message's time; None if the transport reports it."""
        message = self.plan.messages[number]
        dtypes = {self.plan.tensors[tensor].dtype for tensor in self.layout.tensors[number]}
        casts = message.wire is not None and message.wire not in dtypes
        if self._transport.sends_ring(message.collective, casts=casts):
            return None
        steps = max(self._transport.workers - 1, 1)
        return 1 / (2 * steps if message.collective == "all-reduce" else steps)

    # ------------------------------------------------------------------ called by other threads

    def begin(self, numbers: Iterable[int] = ()) -> None:
        """Begin a round after the last is finished; a desync check compares ranks' ``numbers``."""
        self._require_own_process()
        with self._lock:
            self.check()
            assert self.round is None or self.round.unsent == 0
            self._before = self.round
            self._rounds += 1
            self._desync_numbers = (self._rounds, *numbers)
            self.round = self._next = Round(
                self.layout, norms=self.share_norms is not None, sharded=self.plan.sharded
            )
            self._for_issuer.notify()

    def ready(self, tensors: Iterable[int]) -> None:
        """Note that the gradients of some tensors are in their buckets."""
        round_, transport = self.round, self._transport
        assert round_ is not None
        for tensor in tensors:
            if round_.ready[tensor]:
                continue
            round_.ready[tensor] = True
            messages = self.layout.touching[tensor]
            complete = [message for message in messages if round_.missing[message] == 1]
            if complete:
                # Before ``missing`` becomes 0: the issuer may read it before it is notified.
                mark = transport.mark()
                now_ns = time.perf_counter_ns()
                for message in complete:
                    round_.marks[message].append(mark)
                    round_.ready_ns[message] = now_ns
            for message in messages:
                round_.missing[message] -= 1
            if self._awaited in complete:
                with self._lock:
                    self._for_issuer.notify()

    def check(self) -> None:
        """Raise the error of a failed exchange, if any."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def fail(self, error: SynclineError) -> None:
        """Make every later wait raise ``error``, unless there is an earlier error."""
        if os.getpid() != self._process:
            self._error = self._error or error
            return  # the fork has no thread that could release the lock
        with self._lock:
            self._error = self._error or error
            self._closing = True
            self._for_trainer.notify_all()
            self._for_issuer.notify_all()
        self._issued_queue.put(None)

    def lose(self, error: Exception) -> None:
        """Make every later wait raise an error that tells the user what went wrong."""
        if isinstance(error, SynclineError):
            self.fail(error)
        elif isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            self.fail(
                PeerError(
                    f"rank {self.rank} lost a peer while gradients were exchanged: "
                    f"{describe_error(error, self.timeout_s)}; the deferred updates are lost "
                    "on this rank: see the other ranks' output, and resume all ranks from the "
                    "last checkpoint"
                )
            )
        else:
            kind = SynclineError if isinstance(error, RuntimeError) else InternalError
            ours = kind(f"rank {self.rank}: the exchange of gradients failed: {error!r}")
            ours.__cause__ = error
            self.fail(ours)

    def close(self, patience_s: float = CLOSING_S) -> None:
        """End the threads, waiting ``patience_s`` for each; abandon messages in flight."""
        if os.getpid() != self._process:
            return  # the threads run in the parent only
        with self._lock:
            self._closing = True
            self._for_issuer.notify()
        for thread in self.threads:
            thread.join(patience_s)

    def drain(self) -> None:
        """Let the threads end by themselves once they have sent all messages that they can."""

        # No lock is taken here: the garbage collector may call this, on any thread.
        def drain() -> None:
            with self._lock:
                self._draining = True
                self._for_issuer.notify()

        self._issued_queue.put((Work(lambda: None), drain))

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise UserError(
                f"rank {self.rank}: this process was forked while gradients were exchanged, and "
                "its copy of the model would wait for them for ever; call model.synchronize() "
                "before the fork, or leave the model alone in the forked process"
            )

    # ------------------------------------------------------------------ the issuer

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.lose(error)

    def _issue(self) -> None:
        while True:
            with self._lock:
                self._for_issuer.wait_for(
                    lambda: self._closing or self._draining or self._next is not None
                )
                round_, self._next = self._next, None
                if self._closing or round_ is None:
                    break
            self._check_desync()
            for number in range(len(self.plan.messages)):
                if self.plan.sharded and number == self.gathers[0] and not self._agree(round_):
                    break
                if not self._issue_message(round_, number):
                    break
                if number == self._norms_after and not self._issue_norms(round_):
                    break
        self._issued_queue.put(None)

    def _check_desync(self) -> None:
        work, read_all = self._transport.gather_numbers(self._desync_numbers)

        def compare() -> None:
            everyone = read_all()
            for rank, answer in enumerate(everyone):
                if tuple(answer) != tuple(everyone[0]):
                    raise MismatchError(
                        f"rank {self.rank}: the ranks are desynchronized: in exchange "
                        f"{everyone[0][0]} rank 0 has made {sum(everyone[0][1:])} updates, in its "
                        f"exchange {answer[0]} rank {rank} has made {sum(answer[1:])}; one of them "
                        "skipped a step or a backward pass. Resume from the last checkpoint"
                    )

        self._issued_queue.put((work, compare))

    def _issue_message(self, round_: Round, number: int) -> bool:
        """Send a message once it may be sent; return False if the engine is closing."""
        message, transport, compressor = self.plan.messages[number], self._transport, None
        if message.payload == "sparse":
            compressor = self._compressor
            assert compressor is not None
        # An all-gather sends the sums of messages that may still be in flight.
        sources = self.layout.sources[number] if transport.bounded else ()
        is_sum = message.collective != "all-gather"
        with self._lock:
            self._awaited = number
            # A loop instead of ``wait_for``, whose predicate would be one more call between the
            # last gradient and the message.
            while not self._closing:
                if round_.missing[number]:
                    if self._draining:
                        break
                elif not (is_sum or round_.whole or round_.loaded[number]):
                    if self._draining:
                        return False
                elif all(map(round_.finished_ns.__getitem__, sources)):
                    break
                self._for_issuer.wait()
            self._awaited = -1
            if self._closing or round_.missing[number]:
                return False
        place = self.layout.places[number]
        given = self._slice(number, self.buffers[place.bucket][place.start : place.stop])
        if compressor is None:
            transport.prepare(given)
        if not self._may_send():
            return False
        held_s = message.delay_s - (time.perf_counter_ns() - round_.ready_ns[number]) / 1e9
        if held_s > 0:
            time.sleep(held_s)
        round_.issued_ns[number] = time.perf_counter_ns()
        with self._lock:
            self._pacing.sent(number, round_.issued_ns[number])
        if compressor is not None:
            work = compressor.send(number, given.elements, round_.marks[number])
        else:
            all_sent = functools.partial(self._all_sent, number)
            work = transport.send(given, round_.marks[number], all_sent)
        with self._lock:
            round_.works[number] = work
            round_.unsent -= 1
            self._in_flight += 1
            if not transport.bounded:
                self._for_trainer.notify_all()
        self._issued_queue.put((work, functools.partial(self._arrive, round_, number)))
        return True

    def exchange(self, number: int, elements: torch.Tensor) -> None:
        """Exchange a dense message's elements on this thread, between rounds; all ranks call."""
        given, transport = self._slice(number, elements), self._transport
        transport.prepare(given)
        work = transport.send(given, [transport.mark()], lambda: None)
        work.wait()
        work.wait_on_stream()

    def _slice(self, number: int, elements: torch.Tensor) -> Slice:
        """Return a message's elements, and how they are exchanged."""
        message = self.plan.messages[number]
        residual = None
        wire = elements.dtype if message.wire is None else getattr(torch, message.wire)
        if message.wire == "int8":
            assert self._residual is not None
            start = self._residual_start
            residual = self._residual[message.start - start : message.stop - start]
        shares, normed = self.shares[number], self.plan.norm is not None
        return Slice(elements, wire, message.collective, shares, residual, normed)

    def _agree(self, round_: Round) -> bool:
        """Gather gradients, not parameters, if any rank needs them; return False if closing."""
        with self._lock:
            self._for_issuer.wait_for(
                lambda: self._closing or self._draining or round_.asked_whole is not None
            )
            if self._closing or round_.asked_whole is None:
                return False
        work, read_all = self._transport.gather_numbers([int(round_.asked_whole)])

        def decide() -> None:
            whole = any(answer for (answer,) in read_all())
            with self._lock:
                round_.whole = whole
                round_.unfinished -= 1
                self._for_issuer.notify()
                self._for_trainer.notify_all()

        with self._lock:
            round_.unsent -= 1
        self._issued_queue.put((work, decide))
        with self._lock:
            self._for_issuer.wait_for(lambda: self._closing or round_.whole is not None)
            return not self._closing

    def load(self, message: int) -> None:
        """Note that this rank's share of the parameters of an all-gather is in its bucket."""
        round_ = self.round
        assert round_ is not None
        mark = self._transport.mark()
        with self._lock:
            round_.marks[message].append(mark)
            round_.loaded[message] = True
            self._for_issuer.notify()

    def _may_send(self) -> bool:
        """Wait until one more message may be in flight; return False if the engine is closing."""
        paced = self._transport.bounded and self._compressor is None
        with self._lock:
            while not self._closing and self._in_flight:
                wait_s = None
                if self._in_flight < self._most_in_flight:
                    left_ns = self._pacing.opens_ns() - time.perf_counter_ns() if paced else 0
                    if left_ns <= 0:
                        break
                    wait_s = min(left_ns / 1e9, self.timeout_s)
                self._for_issuer.wait(wait_s)
            return not self._closing

    def _all_sent(self, number: int) -> None:
        with self._lock:
            self._pacing.all_sent(number)
            self._for_issuer.notify()

    def _issue_norms(self, round_: Round) -> bool:
        """Exchange norms once all sums are complete; return False if the engine is closing."""
        assert self.share_norms is not None
        sums, bounded = self._complete_sums(round_), self._transport.bounded
        own = functools.partial(self.share_norms.row, self.rank, self.buffers, sums)
        if bounded:
            row = own()
            if self._closing:
                return False
            norms = self._transport.gather_rows(lambda: row)
        else:
            norms = self._transport.gather_rows(own)

        def finished() -> None:
            with self._lock:
                round_.norms = norms
                round_.unfinished -= 1
                self._for_trainer.notify_all()

        with self._lock:
            round_.norms = None if bounded else norms
            round_.has_norms = True
            round_.unsent -= 1
            self._for_trainer.notify_all()
        self._issued_queue.put((norms[0], finished))
        return True

    def _complete_sums(self, round_: Round) -> Iterator[int]:
        """Yield each sum once it is complete, until all are or the engine is closing."""
        for number in self._sums:
            with self._lock:
                while self._transport.bounded and not (self._closing or round_.finished_ns[number]):
                    self._for_issuer.wait()
                if self._closing:
                    return
            yield number

    # ------------------------------------------------------------------ the completer

    def _complete(self) -> None:
        while (issued := self._issued_queue.get()) is not None:
            work, then = issued
            work.wait()
            del issued, work  # release the work before anyone learns that it is complete,
            then()
            del then  # and keep nothing that is complete while waiting for the next

    def _arrive(self, round_: Round, number: int) -> None:
        with self._lock:
            if self._host_waits[number]:
                round_.works[number] = None
            round_.finished_ns[number] = time.perf_counter_ns()
            self._pacing.completed(number, round_.issued_ns[number], round_.finished_ns[number])
            if self.plan.messages[number].collective != "reduce-scatter":
                for tensor in self.layout.tensors[number]:
                    round_.left[tensor] -= 1
            round_.unfinished -= 1
            self._in_flight -= 1
            self._for_issuer.notify()
            self._for_trainer.notify_all()
