"""Clocks: on a GPU, moments of a stream, which are read once all are reached."""

from __future__ import annotations

import pytest
import torch

from syncline.train.measure.clock import CpuClock, CudaClock, clock_for


def test_the_host_s_clock_needs_no_wait() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, CpuClock)
    earlier, later = clock.stamp(), clock.stamp()
    clock.synchronize()
    assert clock.between_ns(earlier, later) == later - earlier >= 0


def test_moments_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is recorded on the stream that is current then; the host waits for the last."""
    recorded: list[Event] = []

    class Event:
        reached = False

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "the current stream of cuda:1"
            recorded.append(self)

        def synchronize(self) -> None:
            # What comes before it on the stream is reached, too.
            for event in recorded[: recorded.index(self) + 1]:
                event.reached = True

        def elapsed_time(self, later: Event) -> float:
            assert self.reached
            assert later.reached
            return float(recorded.index(later) - recorded.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: f"the current stream of {d}")
    clock = clock_for(torch.device("cuda:1"))
    assert isinstance(clock, CudaClock)
    clock.synchronize()  # nothing was stamped
    first, second, third = (clock.stamp() for _ in range(3))
    clock.synchronize()
    assert clock.between_ns(first, third) == 2_000_000
    assert clock.between_ns(second, third) == 1_000_000
