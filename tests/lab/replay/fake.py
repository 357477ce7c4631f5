"""A clock whose time passes only where something waits."""

from __future__ import annotations

from collections.abc import Callable

from syncline.lab.replay.clock import DeviceClock


class FakeTime:
    """Time in ns; ``oversleep_ns`` is by how much each sleep is too long."""

    def __init__(self, oversleep_ns: Callable[[], int] = lambda: 0) -> None:
        self.now_ns = 1_000
        self.switches = 0
        self._oversleep_ns = oversleep_ns

    def clock(self) -> DeviceClock:
        return DeviceClock(
            now_ns=lambda: self.now_ns, sleep_s=self._sleep, waits=lambda: self.switches
        )

    def _sleep(self, seconds: float) -> None:
        self.switches += 1
        self.now_ns += round(seconds * 1e9) + self._oversleep_ns()

    def block_until(self, when_ns: int) -> None:
        """Let the host wait for something else than the device."""
        if when_ns > self.now_ns:
            self.switches += 1
            self.now_ns = when_ns

    def lose_core(self, for_ns: int) -> None:
        """Let another process have the host's core."""
        self.now_ns += for_ns
