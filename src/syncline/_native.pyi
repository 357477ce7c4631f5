from collections.abc import Sequence

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
    task_lanes: Sequence[int],
    durations_ns: Sequence[int],
    offsets: Sequence[int],
    predecessors: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Run a task graph and return the start and stop of every task in nanoseconds."""
