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

def preemptive_order(
    ready_ns: Sequence[int], cost_ns: Sequence[int], tail_ns: Sequence[int]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Return max(arrival + tail) and the pieces (job, start, stop) of Jackson's rule."""

def fuse_balanced(
    ready_ns: Sequence[int],
    size_bytes: Sequence[int],
    tail_ns: Sequence[int],
    base_ns: int,
    segments: Sequence[tuple[int, float, float]],
) -> list[int]:
    """Return the last tensor of each group of PACE, Algorithm 1."""

def round_end(
    ready_ns: Sequence[int],
    elements: Sequence[int],
    element_bytes: Sequence[int],
    tail_ns: Sequence[int],
    in_flight: int,
    segments: Sequence[tuple[int, float, float]],
    messages: Sequence[tuple[int, int]],
) -> int:
    """Return max(arrival + tail) of slices of elements sent in this order."""

def overlap(
    ready_ns: Sequence[int],
    elements: Sequence[int],
    element_bytes: Sequence[int],
    tail_ns: Sequence[int],
    in_flight: int,
    segments: Sequence[tuple[int, float, float]],
    seeds: Sequence[Sequence[tuple[int, int]]],
    goal_ns: int,
    budget: int,
    exact_elements: int,
) -> list[tuple[int, int]]:
    """Return slices of elements, in an order in which the round ends early."""

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
