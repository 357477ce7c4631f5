from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def merge(
    ready_ns: Sequence[int], size_bytes: Sequence[int], segments: Sequence[tuple[int, float, float]]
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

DecoupledRound = tuple[
    Sequence[int],
    Sequence[int],
    Sequence[int],
    Sequence[int],
    Sequence[tuple[int, float, float]],
    int,
    int,
    int,
    bool,
]

def decoupled_end(
    one: DecoupledRound, lasts: Sequence[int], order: Sequence[tuple[int, int, bool]]
) -> int:
    """Return when a round ends whose updates wait for the sums of all gradients."""

def decoupled(
    one: DecoupledRound, seeds: Sequence[Sequence[int]], budget: int
) -> tuple[list[int], list[tuple[int, int, bool]]]:
    """Return the last tensors of groups, and an order in which such a round ends early."""

def simulate(
    lanes: Sequence[tuple[int, bool]],
    contentions: Sequence[tuple[int, int, float, float]],
    task_lanes: NDArray[np.int32],
    durations_ns: NDArray[np.int64],
    tasks: NDArray[np.int32],
    before: NDArray[np.int32],
    holders: NDArray[np.int32],
    held_lanes: NDArray[np.int32],
    stages: Sequence[float],
    users: NDArray[np.int32],
    used: NDArray[np.int32],
    shares: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Run a task graph and return the start and stop of every task in nanoseconds.

    ``tasks[k]`` waits for ``before[k]``; ``holders[k]`` holds ``held_lanes[k]`` beside its own.
    ``stages`` are capacities: ``users[k]`` takes ``shares[k]`` of stage ``used[k]``.
    """

def move(to: int, source: int, size_bytes: int) -> None:
    """Copy bytes between two addresses; the two stretches may overlap."""

class LinkFailure(RuntimeError): ...
class WaitTimeout(RuntimeError): ...
class Forked(RuntimeError): ...

class Program:
    @property
    def out_of_place(self) -> bool: ...
    def changes(self, block: int) -> bool: ...

class Task:
    @property
    def done(self) -> bool: ...

class Operation(Task): ...

class Message(Task):
    @property
    def peer(self) -> int: ...

def interfaces() -> list[tuple[str, str, int]]:
    """Return the name, the address and the prefix's bits, for each address that is up."""

class UcxWorker:
    def __init__(self, library: str, settings: Sequence[tuple[str, str]]) -> None: ...
    @property
    def address(self) -> bytes: ...

class NativeGroup:
    def __init__(
        self,
        rank: int,
        neighbours: Sequence[tuple[int, int, int]],
        connections: Sequence[tuple[int, int]],
        remotes: Sequence[tuple[int, bytes]],
        worker: UcxWorker | None,
        fragment_bytes: int,
        window: int,
        remote_fragment_bytes: int,
        pause_s: float,
        spin_s: float,
        timeout_s: float,
    ) -> None: ...
    @property
    def forked(self) -> bool: ...
    def wait(self, task: Task, timeout_s: float, gives_up: bool) -> None: ...
    def send(
        self, source: int, count: int, dtype: int, peer: int, tag: int, kind: int, /
    ) -> Message: ...
    def receive(
        self, target: int, count: int, dtype: int, peer: int, tag: int, kind: int, /
    ) -> Message: ...
    def lose(self, rank: int, what: str) -> None: ...
    def failed(self) -> bool: ...
    def cut_off(self) -> list[int]: ...
    def close(self) -> None: ...

class NativeCall:
    def __init__(
        self,
        group: NativeGroup,
        program: Program,
        count: int,
        variant: int,
        collective: int,
        dtype: int,
        reduction: int,
        result_start: int,
        result_stop: int,
    ) -> None: ...
    def start(self, input_: int, work: int, output: int, blocking: bool, /) -> Operation | None: ...

def make_program(rank: int, ranks: int, blocks: int, rows: NDArray[np.int32]) -> Program: ...
def segment_bytes(peers: int, fragment_bytes: int, window: int) -> int: ...
def select(
    parts: Sequence[tuple[int, int, int, int]],
    momentum: float,
    k: int,
    least: int,
    most: int,
    hint: int,
    clear: bool,
    instructions: int,
) -> tuple[NDArray[np.uint32], NDArray[np.float32], int, bool, bool]:
    """Update the float32 values of a vector in parts and take the k of largest magnitude.

    A part is the addresses of values, gradient and velocity, 0 where there is none, and the
    elements. Returns indices, values, the threshold's bits, whether all is finite, and whether
    exact. ``instructions``: -1 the widest, 0 none, 1 AVX2, 2 AVX-512.
    """

def sparse_divide(
    indices: NDArray[np.uint32], values: NDArray[np.float32], chosen: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.uint32], NDArray[np.float32]]:
    """Return the entries of the chosen indices, and the others."""

def first_not_finite(values: int, count: int, instructions: int) -> int:
    """Return the first infinite or NaN element of float32 values, or the count."""

def has_instructions(instructions: int) -> bool:
    """Whether the processor has 0: any, 1: AVX2, 2: AVX-512."""

def sparse_merge(
    indices_a: NDArray[np.uint32],
    values_a: NDArray[np.float32],
    indices_b: NDArray[np.uint32],
    values_b: NDArray[np.float32],
    ends: NDArray[np.uint64],
    counts: NDArray[np.uint64],
) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.uint32], NDArray[np.float32]]:
    """Return the largest entries of each part of a sum of sparse vectors, and the others.

    Part i is before ``ends[i]``, and keeps at most ``counts[i]`` entries.
    """

def code_indices(indices: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return ascending indices as distances of 16 bits."""

def decode_indices(
    bytes: NDArray[np.uint8],  # noqa: A002
    count: int,
    universe: int,
) -> tuple[NDArray[np.uint32], int]:
    """Return the indices, and how many bytes they took."""

def longest_code(count: int, universe: int) -> int:
    """Return the most bytes that so many coded indices take."""

def narrow(values: NDArray[np.float32], dtype: int) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 (2) or float16 (3)."""

def widen(values: NDArray[np.uint16], dtype: int) -> NDArray[np.float32]:
    """Return bfloat16 (2) or float16 (3) as float32."""

def add_scaled(
    dtype: int, values: int, arrived: int, count: int, factor: float, *, last: bool
) -> None:
    """Add what arrived, in float32 (0) or bfloat16 (2), to ``factor`` times the values; by address.

    In bfloat16 the rounded sum replaces what arrived and, if it is the last, the values; in float32
    the values only.
    """

def scaled(values: int, result: int, count: int, factor: float) -> None:
    """Round ``factor`` times the values to bfloat16; by address."""

def int8_take(values: int, residual: int, count: int, factor: float) -> None:
    """Add residuals to ``factor`` times the values, both by address, and clear them."""

def int8_encode(values: int, residual: int, count: int, factor: float, encoded: int) -> None:
    """Add residuals to ``factor`` times the values, and round these to 8 bits; by address."""

def int8_decode(encoded: int, count: int, values: int, *, add: bool) -> None:
    """Replace values by encoded ones, or add these; by address."""
