"""The engine: exchanges gradients as a plan says, while the training thread computes.

What runs in which thread:

| thread | runs | waits for |
|---|---|---|
| training | ``begin``, ``tensor_ready``, ``bucket_ready``; ``wait`` and what calls it | messages |
| any other | ``wait``, for gradients of a round whose backward pass is over | messages |
| "syncline issuer" | ``_issue``: the roll call, then each message and norms, in order | gradients |
| "syncline completer" | ``_complete``: waits for each message, then notes its end | peers |

Under one lock, the training thread and the completer wake the issuer (``_for_issuer``), the issuer
and the completer wake the threads that wait (``_for_trainer``), and the issuer hands works to the
completer through ``_issued_queue``.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from syncline.errors import InternalError, MismatchError, PeerError, SynclineError, UserError
from syncline.measure.exchange import describe_error
from syncline.model.plan import Message, Plan
from syncline.parallel.engine.compression import Compressor
from syncline.parallel.engine.dense_transport import DenseTransport, Work
from syncline.parallel.engine.layout import BucketLayout, shares_of
from syncline.parallel.engine.norms import ShareNorms
from syncline.parallel.engine.pacing import Pacing
from syncline.parallel.engine.recording import MessageTimes

SLACK_S = 30.0
"""A wait of the training thread ends at most this long after the group's own timeout: the backend
should report first, as it knows which peer it was."""
CLOSING_S = 10.0


class Round:
    """One iteration's exchange."""

    def __init__(self, layout: BucketLayout, *, norms: bool) -> None:
        self.missing = [len(tensors) for tensors in layout.tensors]
        """Of each message: how many of its tensors are not ready."""
        self.ready = [False] * len(layout.touching)
        self.left = [len(messages) for messages in layout.completing]
        """Of each tensor: how many messages must still arrive before its gradient is final."""
        self.works: list[Work | None] = [None] * len(layout.places)
        """Of each issued message; None again once the host has seen it complete."""
        self.ready_ns = [0] * len(layout.places)
        self.issued_ns = [0] * len(layout.places)
        self.finished_ns = [0] * len(layout.places)
        self.marks: list[list[Any]] = [[] for _ in layout.places]
        self.unsent = self.unfinished = len(layout.places) + norms
        self.norms: tuple[Work, torch.Tensor] | None = None
        """What a reader's stream must wait for, and then the rows of all workers. None until that
        work is complete, or only issued where the host need not wait for it."""
        self.has_norms = not norms
        """Whether this rank's part of the norms has been computed, if any."""

    def times(self) -> list[MessageTimes]:
        """Return the times of the finished messages, in ns."""
        rows = zip(self.ready_ns, self.issued_ns, self.finished_ns, strict=True)
        return [MessageTimes(number, *row) for number, row in enumerate(rows) if row[2]]


class _Issued(NamedTuple):
    work: Work
    then: Callable[[], None]
    """Called once ``work`` is complete."""


class Engine:
    """Runs a plan's messages in their static order, round after round, on two threads of its own.

    The issuer sends each message once its gradients are ready, the one before it has been issued
    and fewer than ``plan.in_flight`` are under way. The completer waits until they are complete.
    The training thread says what is ready and asks for what it needs. All ranks issue the same
    collectives in the same order, so ranks never wait for each other in a circle.

    Every round begins with a roll call, during the backward pass: ranks that count different rounds
    or updates have parted, and raise instead of averaging gradients of different parameters.

    Every method that waits raises a PeerError if a rank failed or did not answer within
    ``timeout_s``, which is that of the transport's group, and a MismatchError if the ranks have
    parted.
    """

    def __init__(
        self,
        plan: Plan,
        layout: BucketLayout,
        transport: DenseTransport,
        *,
        compressor: Compressor | None = None,
        timeout_s: float,
    ) -> None:
        self.plan = plan
        self.layout = layout
        self.rank = transport.rank
        self._transport = transport
        self._compressor = compressor
        self.timeout_s = timeout_s
        self._process = os.getpid()
        self._shares = shares_of(plan)
        self._share_norms = ShareNorms(plan, layout) if plan.norm is not None else None
        self._sums = [i for i, m in enumerate(plan.messages) if m.collective != "all-gather"]
        self._norms_after = self._sums[-1] if self._share_norms is not None else None
        bounded = transport.bounded or compressor is not None
        self._credits = plan.in_flight if bounded else len(plan.messages) + 1
        if compressor is not None:
            # Lossy messages are sent one at a time; the next is prepared meanwhile.
            self._credits += 1
        self._host_waits = [transport.bounded or m.payload != "dense" for m in plan.messages]
        """Of each message: whether the host waits until it is complete, or only the device."""
        self._buffers: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._for_issuer = threading.Condition(self._lock)
        self._for_trainer = threading.Condition(self._lock)
        self._round: Round | None = None
        self._before: Round | None = None
        """The round before the present one."""
        self._next: Round | None = None
        """The present one, until the issuer takes it."""
        self._rounds = 0
        self._roll: tuple[int, ...] = ()
        self._in_flight = 0
        self._pacing = Pacing(
            [message.stop - message.start for message in plan.messages],
            [self._last_step(message) for message in plan.messages],
        )
        self._awaited = -1
        """The message that the issuer waits to become ready."""
        self._closing = False
        self._draining = False
        self._error: SynclineError | None = None
        self._issued_queue: queue.SimpleQueue[_Issued | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(
                target=self._guarded, args=(work,), name=f"syncline {name}", daemon=True
            )
            for name, work in (("issuer", self._issue), ("completer", self._complete))
        ]
        for thread in self.threads:
            thread.start()

    # ------------------------------------------------------------------ the training thread

    def know(self, bucket: int, buffer: torch.Tensor) -> None:
        """Register a bucket's flat buffer; all must be known before the first round."""
        self._buffers[bucket] = buffer

    @property
    def exchanging(self) -> bool:
        """Whether a round has begun that is not finished."""
        return self._round is not None and self._round.unfinished > 0

    @property
    def round(self) -> Round | None:
        """The present round, which a thread that does not train gives to :meth:`wait`."""
        return self._round

    def require_whole(self) -> None:
        """Make sure, outside a backward pass, that gradients can be used for an update.

        Raises:
            PeerError: the last backward pass missed a gradient, or a rank failed.
            MismatchError: the ranks have parted.
        """
        self.check()
        if self._round is not None and any(self._round.missing):
            self._require_ready(self._round, range(len(self.plan.messages)))

    def check(self) -> None:
        """Raise the error that an exchange has raised, if one has."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def fail(self, error: SynclineError) -> None:
        """Let every wait from now on raise ``error``, unless an earlier one does already."""
        if os.getpid() != self._process:
            self._error = self._error or error
            return  # the fork has no thread that could release the lock
        with self._lock:
            if self._error is None:
                self._error = error
            self._closing = True
            self._for_trainer.notify_all()
            self._for_issuer.notify_all()
        self._issued_queue.put(None)

    def begin(self, roll: Iterable[int] = ()) -> None:
        """Begin a round, when the one before is finished.

        The numbers of ``roll``, such as how many updates each rank has made, must be equal on all.
        """
        self._require_own_process()
        with self._lock:
            self.check()
            assert self._round is None or self._round.unsent == 0
            self._before = self._round
            self._rounds += 1
            self._roll = (self._rounds, *roll)
            self._round = self._next = Round(self.layout, norms=self._share_norms is not None)
            self._for_issuer.notify()

    def tensor_ready(self, tensor: int) -> None:
        """Note that a tensor's gradient is in its bucket."""
        round_ = self._round
        assert round_ is not None
        if round_.ready[tensor]:
            return
        round_.ready[tensor] = True
        messages = self.layout.touching[tensor]
        complete = [message for message in messages if round_.missing[message] == 1]
        if complete:
            # Before the messages count as complete: the issuer may look before it is notified.
            mark, now_ns = self._transport.mark(), time.perf_counter_ns()
            for message in complete:
                round_.marks[message].append(mark)
                round_.ready_ns[message] = now_ns
        for message in messages:
            round_.missing[message] -= 1
        if self._awaited in complete:
            with self._lock:
                self._for_issuer.notify()

    def bucket_ready(self, bucket: int) -> None:
        """Note that all of a bucket's tensors are ready."""
        for tensor in self.layout.buckets[bucket]:
            self.tensor_ready(tensor)

    def arrived(self, tensor: int) -> bool:
        """Say whether a tensor's exchanged gradient is in place, and may be changed."""
        round_ = self._round
        return round_ is None or (not round_.left[tensor] and round_.has_norms)

    def wait(self, tensors: Iterable[int], of: Round | None = None) -> None:
        """Return once the exchanged gradients of some tensors are in place, and may be changed.

        On CUDA the current stream waits, and the host only until their messages are issued; until
        they are complete if those are lossy, which pass through the host.

        Args:
            tensors: by index.
            of: the round of these gradients. By default the present one, which begins and ends with
                the backward passes of the training thread, whatever other threads wait for.
        """
        self.check()
        round_ = of or self._round
        messages = sorted({m for tensor in tensors for m in self.layout.completing[tensor]})
        if round_ is None or not messages:
            return
        self._require_ready(round_, messages)
        self._wait_for(
            lambda: all(self._settled(round_, m) for m in messages) and round_.has_norms,
            messages,
        )
        if self._transport.bounded:
            return
        if round_.norms is not None:
            round_.norms[0].wait_on_stream()
        for message in messages:
            if not self._host_waits[message]:
                work = round_.works[message]
                assert work is not None
                work.wait_on_stream()

    def norms(self) -> torch.Tensor:
        """Return the plan's norms of all exchanged gradients: float64 of shape ``(tensors,)``.

        Every rank gets the same; on CUDA the current stream waits for them.
        """
        self.check()
        round_ = self._round
        assert round_ is not None
        assert self._share_norms is not None
        self._require_ready(round_, range(len(self.plan.messages)))
        self._wait_for(lambda: round_.norms is not None, ())
        assert round_.norms is not None
        work, rows = round_.norms
        work.wait_on_stream()
        return self._share_norms.norms(rows)

    def local_norm(self, tensor: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the norm of a gradient as it is now; see :meth:`ShareNorms.local`."""
        assert self._share_norms is not None
        return self._share_norms.local(tensor, gradient)

    def _settled(self, round_: Round, message: int) -> bool:
        """Say whether the host need not wait for a message any more."""
        if self._host_waits[message]:
            return round_.finished_ns[message] > 0
        return round_.works[message] is not None

    def wait_all(self) -> None:
        """Return once the round is finished; see :meth:`wait`."""
        self.wait(range(len(self.layout.touching)))
        round_, bounded = self._round, self._transport.bounded
        if round_ is not None:
            # A reduce-scatter completes no tensor; the all-gather after it does.
            self._wait_for(lambda: not (round_.unfinished if bounded else round_.unsent), ())

    def finish(self) -> None:
        """Return once nothing is under way, on the host either."""
        round_ = self._round
        if round_ is not None:
            self.wait_all()
            self._wait_for(lambda: round_.unfinished == 0, ())

    def times(self) -> list[MessageTimes]:
        """Return the times of the finished messages of the last two rounds, in ns."""
        rounds = (self._before, self._round)
        return [times for round_ in rounds if round_ for times in round_.times()]

    def last_round(self) -> list[MessageTimes]:
        """Return the times of the last finished round's messages; nothing before the first."""
        rounds = (self._round, self._before)
        return next((r.times() for r in rounds if r is not None and not r.unfinished), [])

    def finishes(self, patience_s: float) -> bool:
        """Wait while messages go on completing, at most ``patience_s`` apart.

        Return whether nothing is under way any more.
        """
        self.check()
        round_ = self._round
        if round_ is None or not round_.unfinished:
            return True
        self._require_own_process()
        self._require_ready(round_, range(len(self.plan.messages)))
        return self._moves_until(lambda: round_.unfinished == 0, patience_s)

    def close(self, patience_s: float = CLOSING_S) -> None:
        """End the threads, and wait for each at most ``patience_s``.

        Messages under way are abandoned; call :meth:`finish` first.
        """
        if os.getpid() != self._process:
            return  # the threads run in the parent only
        with self._lock:
            self._closing = True
            self._for_issuer.notify()
        for thread in self.threads:
            thread.join(patience_s)

    def drain(self) -> None:
        """Let the threads end by themselves, once every message of the round that can be is sent.

        Takes no lock: it may be called by the garbage collector, on any thread.
        """
        self._issued_queue.put(_Issued(Work(lambda: None), self._end_when_sent))

    def _require_ready(self, round_: Round, messages: Iterable[int]) -> None:
        for message in messages:
            if round_.missing[message] and self._error is None:
                tensors = self.layout.tensors[message]
                name = next(self.plan.tensors[t].name for t in tensors if not round_.ready[t])
                raise PeerError(
                    f"rank {self.rank}: the last backward pass did not reach the gradient of "
                    f"{name!r}, so the ranks have parted: was there an exception in it, or was "
                    "this parameter not used (then give find_unused_parameters=True)? Resume all "
                    "ranks from the last checkpoint"
                )

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise UserError(
                f"rank {self.rank}: this process was forked while gradients were exchanged, and "
                "its copy of the model would wait for them for ever; call settle() on the model "
                "before the fork, or leave the model alone in the forked process"
            )

    def _wait_for(self, done: Callable[[], bool], messages: Sequence[int]) -> None:
        """Wait while messages go on being issued and completing, with a deadline between them."""
        if done():
            return
        self._require_own_process()
        if not self._moves_until(done, self.timeout_s + SLACK_S):
            names = ", ".join(self.plan.label(self.layout.tensors[m]) for m in messages[:3])
            raise PeerError(
                f"rank {self.rank}: the exchange of {names or 'the gradients'} did not end within "
                f"{self.timeout_s:.0f} s of the last message that moved; a peer has stopped, see "
                "the other ranks' output, and resume from the last checkpoint"
            )

    def _moves_until(self, done: Callable[[], bool], patience_s: float) -> bool:
        """Wait while messages go on being issued and completing, at most ``patience_s`` apart.

        Return whether ``done`` says so; raise the error that an exchange has raised, if one has.
        """
        round_ = self._round
        assert round_ is not None
        over = False

        def changed() -> bool:
            nonlocal over
            over = self._error is not None or done()
            return over or (round_.unsent, round_.unfinished) != left

        with self._lock:
            while not over:
                left = (round_.unsent, round_.unfinished)
                if not self._for_trainer.wait_for(changed, patience_s):
                    break
            self.check()
        return over

    # ------------------------------------------------------------------ the engine's threads

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Let every wait from now on raise an error that explains to the user what went wrong."""
        if isinstance(error, SynclineError):
            self.fail(error)
        elif isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            self.fail(
                PeerError(
                    f"rank {self.rank} lost a peer while gradients were exchanged: "
                    f"{describe_error(error, self.timeout_s)}; the updates that are due are lost "
                    "on this rank: see the other ranks' output, and resume all ranks from the "
                    "last checkpoint"
                )
            )
        else:
            kind = SynclineError if isinstance(error, RuntimeError) else InternalError
            ours = kind(f"rank {self.rank}: the exchange of gradients failed: {error!r}")
            ours.__cause__ = error
            self.fail(ours)

    def _issue(self) -> None:
        while True:
            with self._lock:
                self._for_issuer.wait_for(
                    lambda: self._closing or self._draining or self._next is not None
                )
                round_, self._next = self._next, None
                if self._closing or round_ is None:
                    break
            self._call_roll()
            for number in range(len(self.plan.messages)):
                if not self._issue_message(round_, number):
                    break
                if number == self._norms_after and not self._issue_norms(round_):
                    break
        self._issued_queue.put(None)

    def _issue_message(self, round_: Round, number: int) -> bool:
        """Send a message once it may be; return False if the engine is closing."""
        message = self.plan.messages[number]
        # An all-gather sends sums, of which several may still be under way.
        sources = self.layout.sources[number] if self._transport.bounded else ()

        def goes_on() -> bool:
            if self._closing or round_.missing[number]:
                return self._closing or self._draining
            return all(round_.finished_ns[source] for source in sources)

        with self._lock:
            self._awaited = number
            self._for_issuer.wait_for(goes_on)
            self._awaited = -1
            if self._closing or round_.missing[number]:
                return False
        place = self.layout.places[number]
        elements = self._buffers[place.bucket][place.start : place.stop]
        if message.payload == "dense":
            self._transport.prepare(elements, message.collective)
        if not self._may_send():
            return False
        held_s = message.delay_s - (time.perf_counter_ns() - round_.ready_ns[number]) / 1e9
        if held_s > 0:
            time.sleep(held_s)
        round_.issued_ns[number] = time.perf_counter_ns()
        with self._lock:
            self._pacing.sent(number, round_.issued_ns[number])
        if message.payload != "dense":
            assert self._compressor is not None
            work = self._compressor.send(number, elements, round_.marks[number])
        else:
            work = self._transport.send(
                elements,
                message.collective,
                self._shares[number],
                round_.marks[number],
                functools.partial(self._all_sent, number),
            )
        with self._lock:
            round_.works[number] = work
            round_.unsent -= 1
            self._in_flight += 1
            if not self._transport.bounded:
                self._for_trainer.notify_all()
        self._issued_queue.put(_Issued(work, functools.partial(self._arrive, round_, number)))
        return True

    def _last_step(self, message: Message) -> float | None:
        """Return the share of its time that the last step of a message's ring takes.

        None if the transport says when that step has begun.
        """
        steps = max(self._transport.workers - 1, 1)
        if message.collective == "all-reduce":
            return 1 / (2 * steps)
        return None if self._transport.halves_say_when_sent else 1 / steps

    def _issue_norms(self, round_: Round) -> bool:
        """Exchange norms once all sums are complete; return False if the engine is closing."""
        assert self._share_norms is not None
        sums = self._complete_sums(round_)
        own = functools.partial(self._share_norms.row, self.rank, self._buffers, sums)
        bounded = self._transport.bounded
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
        self._issued_queue.put(_Issued(norms[0], finished))
        return True

    def _complete_sums(self, round_: Round) -> Iterator[int]:
        """Yield each sum once it is complete, until all are or the engine is closing."""
        bounded = self._transport.bounded
        for number in self._sums:
            with self._lock:
                while bounded and not (self._closing or round_.finished_ns[number]):
                    self._for_issuer.wait()
                if self._closing:
                    return
            yield number

    def _may_send(self) -> bool:
        """Wait until one more message may be under way; return False if the engine is closing."""
        paced = self._transport.bounded and self._compressor is None
        with self._lock:
            self._for_issuer.wait_for(lambda: self._closing or self._in_flight < self._credits)
            while paced and not self._closing:
                left_ns = self._pacing.opens_ns() - time.perf_counter_ns()
                if left_ns <= 0:
                    break
                self._for_issuer.wait(min(left_ns / 1e9, self.timeout_s))
            return not self._closing

    def _all_sent(self, number: int) -> None:
        """Note that the backend has all that this worker sends for a message."""
        with self._lock:
            self._pacing.all_sent(number)
            self._for_issuer.notify()

    def _complete(self) -> None:
        while True:
            issued = self._issued_queue.get()
            if issued is None:
                return
            issued.work.wait()
            then = issued.then
            del issued  # the work is released before anyone learns that it is complete,
            then()
            del then  # and nothing that is complete is kept while the next is waited for

    def _end_when_sent(self) -> None:
        with self._lock:
            self._draining = True
            self._for_issuer.notify()

    def _arrive(self, round_: Round, number: int) -> None:
        """Note that a message is complete."""
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

    def _call_roll(self) -> None:
        work, tell = self._transport.gather_numbers(self._roll)

        def compare() -> None:
            everyone = tell()
            for rank, answer in enumerate(everyone):
                if tuple(answer) != tuple(everyone[0]):
                    raise MismatchError(
                        f"rank {self.rank}: the ranks have parted: in exchange {everyone[0][0]} "
                        f"rank 0 has made {sum(everyone[0][1:])} updates, in its exchange "
                        f"{answer[0]} "
                        f"rank {rank} has made {sum(answer[1:])}; one of them skipped a step or a "
                        "backward pass. Resume from the last checkpoint"
                    )

        self._issued_queue.put(_Issued(work, compare))
