from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def merge(
    ready_ns: Sequence[int],
    size_bytes: Sequence[int],
    segments: Sequence[tuple[int, float, float]],
) -> list[int]:
    """Return the last tensor of each message of the optimal backward-only merge."""

def costs(size_bytes: Sequence[int], segments: Sequence[tuple[int, float, float]]) -> list[int]:
    """Return the cost in nanoseconds of a message of each size."""

def simulate(
    lanes: Sequence[tuple[int, bool]],
    contentions: Sequence[tuple[int, int, float]],
    task_lanes: NDArray[np.int32],
    durations_ns: NDArray[np.int64],
    tasks: NDArray[np.int32],
    before: NDArray[np.int32],
    holders: NDArray[np.int32],
    held_lanes: NDArray[np.int32],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Run a task graph and return the start and stop of every task in nanoseconds.

    ``tasks[k]`` waits for ``before[k]``; ``holders[k]`` holds ``held_lanes[k]`` beside its own.
    """
