"""Clocks that stamp moments of an iteration, on the processor that does the work."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch

NS_PER_MS = 1_000_000


class Clock(ABC):
    """Stamps moments, and later returns the time between stamps."""

    @abstractmethod
    def stamp(self) -> Any:
        """Mark the present moment in the order of the device's work."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until every stamp so far has a time. Called once an iteration or less."""

    @abstractmethod
    def between_ns(self, earlier: Any, later: Any) -> int:
        """Return the nanoseconds from one settled stamp to another."""


class CpuClock(Clock):
    """The host's monotonic clock: work on the CPU is done when the call returns."""

    def stamp(self) -> int:
        """Return the clock in nanoseconds."""
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Do nothing: stamps are times already."""

    def between_ns(self, earlier: int, later: int) -> int:
        """Return the difference of two stamps."""
        return later - earlier


class CudaClock(Clock):
    """Events on the current CUDA stream.

    MG-WFBP (section 5.1) calls ``torch.cuda.synchronize`` after every tensor's gradient, which
    empties the launch queue each time and so measures a device that never runs ahead. An event is
    a marker in the stream: the host goes on, the times are read once after the iteration, and the
    profiled iteration runs as fast as any other.
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

    def settle(self) -> None:
        """Wait for the last event that was recorded."""
        if self._last is not None:
            self._last.synchronize()

    def between_ns(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> int:
        """Return the time between two events, which CUDA resolves to about 0.5 us."""
        milliseconds: float = earlier.elapsed_time(later)
        return max(round(milliseconds * NS_PER_MS), 0)


def clock_for(device: torch.device) -> Clock:
    """Return the clock for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
