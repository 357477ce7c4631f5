"""``DeviceClock``: an emulated device with a queue, kept in time by sleeping.

The host thread puts operations into the queues of the device's lanes, as a training loop launches
kernels. An operation starts when the one before it on its lane, and those that it waits for on
other lanes, have ended. A lane idles only if the host thread was held up by something that the
device must wait for too. The host then calls :meth:`DeviceClock.arrived`.

The device makes up for other delays of the host. A sleeping thread is woken late, by 0.1 to 4 ms if
more processes run than there are cores, and hooks and copies take time of the host. Deadlines are
counted from the end of the operation before, not from when the host noticed it. So such delays are
hidden behind the operations that follow, as on a GPU that has work in its queue, and do not add up.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from syncline.plan.quantities import NS_PER_S

BLOCKED_NS = 300_000
"""A host thread that gave up its core and took longer than this, 0.3 ms, had to wait. A shorter
time is the cost of a hook, which a device with work in its queue does not notice. Losing the core
to another process does not count."""
CATCH_UP_NS = 100_000_000  # a host later than 0.1 s holds up the device: its queue has run empty


class DeviceClock:
    """When the lanes of an emulated device are free, in nanoseconds of the monotonic clock.

    ``waits`` returns how often the host thread has given up its core to wait for something.
    """

    def __init__(
        self,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep_s: Callable[[float], None] = time.sleep,
        waits: Callable[[], int] | None = None,
    ) -> None:
        self._now_ns = now_ns
        self._sleep_s = sleep_s
        self._free_ns: dict[str, int] = {}
        self._waits = waits or (lambda: resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw)
        self._left_ns = now_ns()
        self._left_waits = self._waits()
        self.idle_ns = 0  # total time that lanes have stood still in :meth:`arrived`

    def free_ns(self, lane: str = "device") -> int:
        """Return when a lane has done all that is in its queue."""
        return self._free_ns.setdefault(lane, self._left_ns)

    def run(self, duration_ns: int, *, lane: str = "device", not_before_ns: int = 0) -> int:
        """Put an operation into a lane's queue; return when it ends, without waiting for that.

        ``not_before_ns`` is when the operations that it waits for on other lanes have ended.
        """
        start_ns = max(self.free_ns(lane), not_before_ns)
        if lane == "device":
            start_ns = max(start_ns, self._now_ns() - CATCH_UP_NS)
        self._free_ns[lane] = start_ns + duration_ns
        return self._free_ns[lane]

    def wait(self, until_ns: int | None = None) -> None:
        """Let the host wait until a time; by default until the device is free."""
        deadline_ns = self.free_ns() if until_ns is None else until_ns
        now_ns = self._now_ns()
        while now_ns < deadline_ns:
            self._sleep_s((deadline_ns - now_ns) / NS_PER_S)
            now_ns = self._now_ns()
        self._left_ns, self._left_waits = now_ns, self._waits()

    def arrived(self, lane: str = "device") -> None:
        """Note that the host has passed a point at which it, and so a lane, may have had to wait.

        If the host was held up since :meth:`wait` or :meth:`arrived` last returned, the lane has
        stood still until now.
        """
        now_ns, waits, free_ns = self._now_ns(), self._waits(), self.free_ns(lane)
        waited = waits > self._left_waits and now_ns - self._left_ns > BLOCKED_NS
        if waited and now_ns > free_ns:
            self.idle_ns += now_ns - free_ns
            self._free_ns[lane] = now_ns
        self._left_ns, self._left_waits = now_ns, waits
