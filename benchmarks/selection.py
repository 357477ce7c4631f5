"""Selecting the largest elements, ours and torch's in turns, on one core or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from syncline import _native
from syncline.lab.bench.result import times_faster
from syncline.train.measure.machine import machine_name
from syncline.train.sparse.memory import INSTRUCTIONS, WIDEST, HostMemory, Memory, Tracked
from syncline.train.sparse.torch_memory import selection_on

SELECT = "select"
"""The k largest of a vector."""
FUSED = "fused"
"""The check for NaN, the gradient added to the residual, and the k largest taken out of it."""
TORCH = "torch"
"""``torch.topk`` of the magnitudes."""
TORCH_FUSED = "torch-fused"
"""What ``fused`` does, in operations of torch."""
READ = "read"
"""One read of the vector: torch's sum."""
LEAST_LAP_S = 0.02
"""Calls are repeated until a turn takes this long, so that the resolution of the clock does not
matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What one contestant took."""

    contestant: str
    elements: int
    density: float
    """0 where it selects nothing."""
    rounds_s: tuple[float, ...]
    """In each round: seconds of one call, all contestants having a turn."""

    @property
    def time_s(self) -> float:
        """Median over the rounds."""
        return median(self.rounds_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selections:
    """What selecting took, by contestant, size and density."""

    machine: str
    versions: dict[str, str]
    instructions: str
    """The vector instructions that were used, on the CPU."""
    device: str = "cpu"
    """That, or the name of a GPU."""
    entries: tuple[Timed, ...]

    def of(self, contestant: str, elements: int, density: float) -> Timed:
        """Return one entry."""
        wanted = contestant, elements, 0.0 if contestant == READ else density
        return next(e for e in self.entries if (e.contestant, e.elements, e.density) == wanted)

    def times_faster(self, contestant: str, other: str, elements: int, density: float) -> float:
        """Return the median over the rounds of the ratio: both had a turn in every round."""
        a, b = (self.of(name, elements, density) for name in (contestant, other))
        return times_faster(a.rounds_s, b.rounds_s)


def measure_selection(
    sizes: Sequence[int],
    densities: Sequence[float],
    *,
    rounds: int = 5,
    device: str = "cpu",
) -> Selections:
    """Measure every size at every density; every contestant has a turn in every round.

    Values are drawn from a normal distribution. The selection is first compared with torch's.

    Args:
        sizes: numbers of elements.
        densities: shares of them that are selected.
        rounds: turns of every contestant.
        device: ``"cpu"``, or ``"cuda"`` for torch's present GPU.
    """
    place = torch.device(device)
    entries: list[Timed] = []
    with _one_thread():
        for size, density in product(sizes, densities):
            calls = contestants(size, max(1, round(density * size)), place)
            times: dict[str, list[float]] = {name: [] for name in calls}
            laps = {name: _lap(call, place) for name, call in calls.items()}
            for _ in range(rounds):
                for name, call in calls.items():
                    times[name].append(_timed(call, laps[name], place))
            entries += [
                Timed(
                    contestant=name,
                    elements=size,
                    density=0.0 if name == READ else density,
                    rounds_s=tuple(found),
                )
                for name, found in times.items()
                if name != READ or density == densities[0]
            ]
    return Selections(
        machine=machine_name(),
        device="cpu" if device == "cpu" else torch.cuda.get_device_name(place),
        versions={"torch": str(torch.__version__)},
        instructions=next(
            name
            for name in ("avx512", "avx2", "portable")
            if _native.has_instructions(INSTRUCTIONS[name])
        ),
        entries=tuple(entries),
    )


def _lap(call: Call, device: torch.device) -> int:
    """Return how many calls fill a turn; the first call warms up."""
    _timed(call, 1, device)
    return max(1, round(LEAST_LAP_S / _timed(call, 1, device)))


def _timed(call: Call, calls: int, device: torch.device) -> float:
    """Return the seconds of one call, including the device's work."""
    _finish(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _finish(device)
    return (time.perf_counter() - start) / calls


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Call = Callable[[], object]


def contestants(size: int, k: int, device: torch.device) -> dict[str, Call]:
    """Return one call of every contestant, by name; see :func:`measure_selection`."""
    generator = torch.Generator().manual_seed(size + k)
    values, gradient = (torch.randn(size, generator=generator).to(device) for _ in range(2))
    make = _on_the_host if device.type == "cpu" else _on_a_device
    theirs = torch.zeros_like(values)

    def torch_fused() -> None:
        bool(torch.isfinite(gradient).all())
        theirs.add_(gradient)
        indices = torch.topk(theirs.abs(), k, sorted=False).indices
        _ = theirs[indices]
        theirs[indices] = 0

    return {
        **make(values, gradient, k),
        READ: lambda: values.sum(),
        TORCH: lambda: torch.topk(values.abs(), k, sorted=False),
        TORCH_FUSED: torch_fused,
    }


def _on_the_host(values: torch.Tensor, gradient: torch.Tensor, k: int) -> dict[str, Call]:
    def select_largest() -> NDArray[np.uint32]:
        row = (values.data_ptr(), 0, 0, len(values))
        return _native.select([row], 0.0, k, k, k, 0, False, WIDEST)[0]

    found = values[torch.from_numpy(select_largest().astype(np.int64))]
    _require_same(float(found.abs().sum(dtype=torch.float64)), values, k)
    return {SELECT: select_largest, FUSED: _fused(HostMemory(), gradient, k)}


def _on_a_device(values: torch.Tensor, gradient: torch.Tensor, k: int) -> dict[str, Call]:
    memory = selection_on(values.device)

    def select_largest() -> torch.Tensor:
        return memory.largest(values, k)

    found = values[select_largest()]
    _require_same(float(found.abs().sum(dtype=torch.float64)), values, k)
    return {SELECT: select_largest, FUSED: _fused(memory, gradient, k)}


def _fused(memory: Memory, gradient: torch.Tensor, k: int) -> Call:
    tracked = Tracked(torch.zeros_like(gradient), gradient)

    def fused() -> None:
        memory.first_not_finite([gradient])
        memory.take([[tracked]], [k], momentum=0.0)

    return fused


def _require_same(found: float, values: torch.Tensor, k: int) -> None:
    """Check that the magnitudes have the same sum as those that torch selects."""
    expected = float(torch.topk(values.abs(), k).values.sum(dtype=torch.float64))
    assert abs(found - expected) < 1e-3 * k
