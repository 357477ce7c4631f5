"""``Pacing``: when the next message may follow the one in flight."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

LEAD_S = 0.003
"""A message is sent at least this long before its predecessor is expected to be complete: about as
long as starting one takes, from the engine's threads to the last rank."""
ROUNDS = 5  # rounds whose times are kept


class Pacing:
    """Lets a message follow its predecessor closely, without sharing the bandwidth with it.

    Two messages in flight hide each other's latency, but backends send both at once, at half the
    rate each. A small message behind a large one would then arrive about when the large one does.
    And in a ring, the parts of the first message that a worker must still pass on would queue
    behind those of the second, and the next worker would wait. So the second message is sent in
    the last step of the first one's ring, when all of the first has been sent. If the transport
    does not report when that step begins, it is estimated from the last rounds, or from the largest
    message so far. Until the very first message is complete, no other follows it.

    Planners and the simulator assume the same: one channel, in the plan's order, latencies hidden.

    Args:
        sizes: of the messages of a round, in any unit.
        last_steps: of each message, the share of its time that the last step of its ring takes;
            None if :meth:`all_sent` says when that step begins.
    """

    def __init__(self, sizes: Sequence[int], last_steps: Sequence[float | None]) -> None:
        self._sizes = sizes
        self._last_steps = last_steps
        self._took_ns: list[deque[int]] = [deque(maxlen=ROUNDS) for _ in sizes]
        """Of each message: how long it occupied the channel."""
        self._largest: int | None = None  # the largest complete message
        self._last: int | None = None  # the message sent last, if it is in flight
        self._last_is_sent = False  # whether the last step of its ring is known to have begun
        self._sent_ns = 0
        self._finished_ns = 0  # when the last message was complete
        self._begins_ns: float = 0.0  # when the last message has the channel to itself

    def opens_ns(self) -> float:
        """Return when the next message may be sent; infinity if only after its predecessor."""
        if self._last is None or self._last_is_sent:
            return 0.0
        last_step, expected_ns = self._last_steps[self._last], self._expected_ns(self._last)
        if last_step is None or not math.isfinite(self._begins_ns + expected_ns):
            return math.inf
        return self._begins_ns + expected_ns - max(LEAD_S * 1e9, last_step * expected_ns)

    def sent(self, message: int, now_ns: int) -> None:
        """Note that a message is in flight."""
        passed_ns = 0.0
        if self._last is not None:
            passed_ns = self._begins_ns + self._expected_ns(self._last)
        self._begins_ns = max(now_ns, passed_ns)
        self._last, self._last_is_sent, self._sent_ns = message, False, now_ns

    def all_sent(self, message: int) -> None:
        """Note that the last step of a message's ring has begun."""
        if message == self._last:
            self._last_is_sent = True

    def completed(self, message: int, sent_ns: int, now_ns: int) -> None:
        """Note that a message is complete."""
        self._took_ns[message].append(now_ns - max(sent_ns, self._finished_ns))
        if self._largest is None or self._sizes[message] > self._sizes[self._largest]:
            self._largest = message
        self._finished_ns = now_ns
        if message == self._last:
            self._last = None
        elif self._last is not None:
            self._begins_ns = max(self._sent_ns, now_ns)

    def _expected_ns(self, message: int) -> float:
        if self._took_ns[message]:
            return median(self._took_ns[message])
        if self._largest is None:
            return math.inf
        share = self._sizes[message] / max(self._sizes[self._largest], 1)
        return median(self._took_ns[self._largest]) * share
