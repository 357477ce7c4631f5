"""``Pacing``: when the next message may follow the one under way."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

__all__ = ["LEAD_S", "Pacing"]

LEAD_S = 0.003
"""A message is sent at least this long before its predecessor is expected to be complete: about as
long as starting one takes, from the engine's threads to the last rank."""
ROUNDS = 5
"""Rounds whose times are kept."""


class Pacing:
    """Lets a message follow its predecessor closely, without sharing the bandwidth with it.

    Two messages under way hide each other's startup, but backends send both at once, at half the
    rate each. A small message behind a large one would then arrive about when the large one does.
    So the second is sent shortly before the first should be complete, in the last step of its ring:
    there all of the first is on its way, and the second queues behind it. When that is is estimated
    from the last rounds, or from the largest message so far; until the very first message is
    complete, no other follows it.

    Planners and the simulator assume the same: one channel, in the plan's order, startups hidden.

    Args:
        sizes: of the messages of a round, in any unit.
        last_steps: of each message, the share of its time that the last step of its ring takes.
    """

    def __init__(self, sizes: Sequence[int], last_steps: Sequence[float]) -> None:
        self._sizes = sizes
        self._last_steps = last_steps
        self._took_ns: list[deque[int]] = [deque(maxlen=ROUNDS) for _ in sizes]
        """Of each message: how long it occupied the channel."""
        self._largest: int | None = None
        """The largest message of those complete."""
        self._last: int | None = None
        """The message sent last, if it is under way."""
        self._sent_ns = 0
        self._finished_ns = 0
        """When the last message was complete."""
        self._passed_ns: float = 0.0
        """When all messages under way should be complete."""

    def opens_ns(self) -> float:
        """Return when the next message may be sent; infinity: once its predecessor is complete."""
        if self._last is None:
            return 0.0
        if not math.isfinite(self._passed_ns):
            return self._passed_ns
        last_step_ns = self._last_steps[self._last] * self._expected_ns(self._last)
        return self._passed_ns - max(LEAD_S * 1e9, last_step_ns)

    def sent(self, message: int, now_ns: int) -> None:
        """Note that a message is under way."""
        begins_ns = max(now_ns, self._passed_ns) if self._last is not None else now_ns
        self._last, self._sent_ns = message, now_ns
        self._passed_ns = begins_ns + self._expected_ns(message)

    def completed(self, message: int, sent_ns: int, now_ns: int) -> None:
        """Note that a message is complete."""
        self._took_ns[message].append(now_ns - max(sent_ns, self._finished_ns))
        if self._largest is None or self._sizes[message] > self._sizes[self._largest]:
            self._largest = message
        self._finished_ns = now_ns
        if message == self._last:
            self._last = None
        elif self._last is not None:
            self._passed_ns = max(self._sent_ns, now_ns) + self._expected_ns(self._last)

    def _expected_ns(self, message: int) -> float:
        if self._took_ns[message]:
            return median(self._took_ns[message])
        if self._largest is None:
            return float("inf")
        share = self._sizes[message] / max(self._sizes[self._largest], 1)
        return median(self._took_ns[self._largest]) * share
