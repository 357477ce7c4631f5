"""Clocks that stamp moments in the order of a device's work, and return the time between stamps."""

from __future__ import annotations

import time

import torch

NS_PER_MS = 1_000_000


class CpuClock:
    """The host's monotonic clock: work on the CPU is done when the call returns."""

    def stamp(self) -> int:
        """Return the clock in nanoseconds."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        """Do nothing: stamps have their times already."""

    def between_ns(self, earlier: int, later: int) -> int:
        """Return the difference of two stamps."""
        return later - earlier


class CudaClock:
    """Events on the current CUDA stream, whose times are read once after all iterations.

    MG-WFBP (section 5.1) instead calls ``torch.cuda.synchronize`` after every tensor's gradient,
    which empties the launch queue and so measures a device that never runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Event | None = None

    def stamp(self) -> torch.cuda.Event:
        """Record an event on the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._last = event
        return event

    def synchronize(self) -> None:
        """Wait until every stamp so far has a time; called once after many iterations."""
        if self._last is not None:
            self._last.synchronize()

    def between_ns(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> int:
        """Return the time between two events, which CUDA resolves to about 0.5 us."""
        milliseconds: float = earlier.elapsed_time(later)
        return max(round(milliseconds * NS_PER_MS), 0)


Clock = CpuClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    """Return the clock for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
