"""The engine: exchanges gradients as a plan says, while the training thread computes.

What runs in which thread:

| thread | runs | waits for |
|---|---|---|
| training | ``begin``, ``ready``; ``wait`` and what calls it | messages |
| any other | ``wait``, for gradients of a round whose backward pass is over | messages |
| "syncline issuer" | ``_issue``: the desync check, then messages and norms, in order | gradients |
| "syncline completer" | ``_complete``: waits for each message, then notes its end | peers |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from syncline.errors import PeerError
from syncline.train.engine.message_threads import MessageThreads, Round
from syncline.train.engine.recording import MessageTimes

SLACK_S = 30.0  # grace after the group's timeout: the backend, which knows the peer, reports first


class Engine(MessageThreads):
    """Runs a plan's messages in their static order, round after round, on two threads of its own.

    Every method that waits raises a PeerError if a rank failed or did not answer within
    ``timeout_s``, which is that of the transport's group, and a MismatchError if the ranks
    are desynchronized.
    """

    @property
    def exchanging(self) -> bool:
        """Whether a round has begun and is not finished."""
        return self.round is not None and self.round.unfinished > 0

    def require_whole(self) -> None:
        """Raise, outside a backward pass, if a gradient was missed or an exchange has failed."""
        self.check()
        if self.round is not None and any(self.round.missing):
            self._require_ready(self.round, range(len(self.plan.messages)))

    def arrived(self, tensor: int) -> bool:
        """Say whether a tensor's exchanged gradient is in place, and may be changed."""
        round_ = self.round
        return round_ is None or (not round_.left[tensor] and round_.has_norms)

    def wait(self, tensors: Iterable[int], of: Round | None = None) -> None:
        """Return once the exchanged gradients of some tensors are in place, and may be changed.

        On CUDA the current stream waits. The host waits only until the messages are issued, or
        complete if they are sparse, since those pass through the host. ``of`` is their round, by
        default the present one. Threads that do not train must give it: a new one may begin.
        """
        self.check()
        round_ = of or self.round
        messages = sorted({m for tensor in tensors for m in self.layout.completing[tensor]})
        if round_ is None or not messages:
            return
        self._require_ready(round_, messages)

        def is_done(message: int) -> bool:
            if self._host_waits[message]:
                return round_.finished_ns[message] > 0
            return round_.works[message] is not None

        self._wait_for(lambda: all(map(is_done, messages)) and round_.has_norms, messages)
        if self._transport.bounded:
            return
        if round_.norms is not None:
            round_.norms[0].wait_on_stream()
        for message in messages:
            if not self._host_waits[message]:
                work = round_.works[message]
                assert work is not None
                work.wait_on_stream()

    @property
    def carries_parameters(self) -> bool:
        """Whether the present round's all-gathers carry parameters."""
        return self.round is not None and self.round.whole is False

    def ask(self, *, whole: bool) -> None:
        """Say if this rank needs whole gradients of a sharded plan; a round's first call counts."""
        round_ = self.round
        if self.plan.sharded and round_ is not None and round_.asked_whole is None:
            with self._lock:
                if round_.asked_whole is None:
                    round_.asked_whole = whole
                self._for_issuer.notify()

    def wait_for_sums(self) -> bool:
        """Return once this rank's sums are in place; say whether all-gathers carry parameters."""
        self.check()
        round_ = self.round
        assert round_ is not None
        self._require_ready(round_, self._sums)
        self._wait_for(
            lambda: (
                round_.whole is not None
                and round_.has_norms
                and all(map(round_.finished_ns.__getitem__, self._sums))
            ),
            self._sums,
        )
        for message in self._sums:
            work = round_.works[message]
            if work is not None:
                work.wait_on_stream()
        return not round_.whole

    def norms(self) -> torch.Tensor:
        """Return the norms of all gradients, equal on all ranks: float64, shape ``(tensors,)``."""
        self.check()
        round_ = self.round
        assert round_ is not None
        assert self.share_norms is not None
        self._require_ready(round_, range(len(self.plan.messages)))
        self._wait_for(lambda: round_.norms is not None, ())
        assert round_.norms is not None
        work, rows = round_.norms
        work.wait_on_stream()
        return self.share_norms.norms(rows)

    def wait_all(self, *, on_host: bool = False) -> None:
        """Return once the round is finished for the current stream; with ``on_host``, the host."""
        self.wait(range(len(self.layout.touching)))
        round_ = self.round
        if round_ is not None:
            # A reduce-scatter completes no tensor; the all-gather after it does.
            waits = self._transport.bounded or on_host
            self._wait_for(lambda: not (round_.unfinished if waits else round_.unsent), ())

    def finishes(self, patience_s: float) -> bool:
        """Wait while messages complete, at most ``patience_s`` apart; return whether all did."""
        self.check()
        round_ = self.round
        if round_ is None or not round_.unfinished:
            return True
        self._require_own_process()
        self._require_ready(round_, range(len(self.plan.messages)))
        self.ask(whole=True)  # no update of this round will come
        return self._moves_until(lambda: round_.unfinished == 0, patience_s)

    def times(self) -> list[MessageTimes]:
        """Return the times of the finished messages of the last two rounds, in ns."""
        rounds = (self._before, self.round)
        return [times for round_ in rounds if round_ for times in round_.times()]

    def last_round(self) -> list[MessageTimes]:
        """Return the times of the last finished round's messages; nothing before the first."""
        rounds = (self.round, self._before)
        return next((r.times() for r in rounds if r is not None and not r.unfinished), [])

    def _require_ready(self, round_: Round, messages: Iterable[int]) -> None:
        for message in messages:
            if round_.missing[message] and self._error is None:
                tensors = self.layout.tensors[message]
                name = next(self.plan.tensors[t].name for t in tensors if not round_.ready[t])
                raise PeerError(
                    f"rank {self.rank}: the last backward pass did not reach the gradient of "
                    f"{name!r}, so the ranks are desynchronized: was there an exception in it, or "
                    "was this parameter not used (then give find_unused_parameters=True)? Resume "
                    "all ranks from the last checkpoint"
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
                f"{self.timeout_s:.0f} s of its last progress; a peer has stopped, see "
                "the other ranks' output, and resume from the last checkpoint"
            )

    def _moves_until(self, done: Callable[[], bool], patience_s: float) -> bool:
        """Wait until ``done`` is true, and say whether it is; raise a failed exchange's error.

        Messages must go on being issued and completing, at most ``patience_s`` apart.
        """
        round_ = self.round
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
