"""Selecting the largest elements, ours and torch's in turns, on one core."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch

from syncline import _native
from syncline.bench.topk.result import (
    FUSED,
    READ,
    SELECT,
    TORCH,
    TORCH_FUSED,
    Selections,
    Timed,
)
from syncline.errors import UserError
from syncline.replay.machine import machine_name
from syncline.sparse.selection import INSTRUCTIONS, Part, first_not_finite, select

__all__ = ["measure"]

LEAST_LAP_S = 0.02
"""Calls are repeated until a turn takes so long, so that the clock's grain does not matter."""

Progress = Callable[[str, int, int], None]


def measure(
    sizes: Sequence[int],
    densities: Sequence[float],
    *,
    rounds: int = 5,
    progress: Progress = lambda _what, _done, _total: None,
) -> Selections:
    """Measure every size at every density; every contestant has a turn in every round.

    Values are drawn from a normal distribution. What is selected is compared with torch's before.

    Args:
        sizes: numbers of elements.
        densities: shares of them that are selected.
        rounds: turns of every contestant.
        progress: is told how far it is.

    Raises:
        UserError: an argument is out of its range.
    """
    if not sizes or not densities or rounds < 1 or min(sizes) < 1:
        raise UserError("a benchmark of selection needs sizes, densities and rounds of at least 1")
    if not all(0 < density <= 1 for density in densities):
        raise UserError(f"densities are above 0 and at most 1, found {list(densities)}")
    entries: list[Timed] = []
    total = len(sizes) * len(densities) * rounds
    with _one_thread():
        for number, (size, density) in enumerate(product(sizes, densities)):
            contestants = _contestants(size, max(1, round(density * size)))
            times: dict[str, list[float]] = {name: [] for name in contestants}
            laps = {name: _calls(call) for name, call in contestants.items()}
            for turn in range(rounds):
                progress(f"{size} elements, {density:g}", number * rounds + turn, total)
                for name, call in contestants.items():
                    times[name].append(_timed(call, laps[name]))
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
        versions={"torch": str(torch.__version__)},
        instructions=next(
            name
            for name in ("avx512", "avx2", "portable")
            if _native.has_instructions(INSTRUCTIONS[name])
        ),
        entries=tuple(entries),
    )


def _contestants(size: int, k: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(size + k)
    values = torch.randn(size, generator=generator)
    gradient = torch.randn(size, generator=generator)
    ours, theirs = torch.zeros(size), torch.zeros(size)
    address, added = values.data_ptr(), gradient.data_ptr()

    def fused() -> None:
        first_not_finite(added, size)
        select([Part(ours.data_ptr(), size, added)], k)

    def torch_fused() -> None:
        bool(torch.isfinite(gradient).all())
        theirs.add_(gradient)
        indices = torch.topk(theirs.abs(), k, sorted=False).indices
        _ = theirs[indices]
        theirs[indices] = 0

    found = select([Part(address, size)], k, clear=False).taken
    expected = torch.topk(values.abs(), k).values.sum(dtype=torch.float64)
    assert abs(float(abs(found.values.astype("float64")).sum()) - float(expected)) < 1e-3 * k
    return {
        SELECT: lambda: (values, select([Part(address, size)], k, clear=False)),
        FUSED: fused,
        READ: lambda: values.sum(),
        TORCH: lambda: torch.topk(values.abs(), k, sorted=False),
        TORCH_FUSED: torch_fused,
    }


def _calls(call: Callable[[], object]) -> int:
    return max(1, round(LEAST_LAP_S / _timed(call, 1)))


def _timed(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
