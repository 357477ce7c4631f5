"""Selecting the largest elements, ours and torch's in turns, on one core or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from syncline import _native
from syncline.errors import UserError
from syncline.lab.bench.topk_report import (
    FUSED,
    READ,
    SELECT,
    TORCH,
    TORCH_FUSED,
    Selections,
    Timed,
)
from syncline.lab.workers import Progress
from syncline.train.measure.machine import machine_name
from syncline.train.sparse.memory import INSTRUCTIONS, WIDEST, HostMemory, Memory, Tracked
from syncline.train.sparse.torch_memory import selection_on

LEAST_LAP_S = 0.02
"""Calls are repeated until a turn takes this long, so that the resolution of the clock does not
matter."""


def measure_selection(
    sizes: Sequence[int],
    densities: Sequence[float],
    *,
    rounds: int = 5,
    device: str = "cpu",
    progress: Progress = lambda _what, _done, _total: None,
) -> Selections:
    """Measure every size at every density; every contestant has a turn in every round.

    Values are drawn from a normal distribution. The selection is first compared with torch's.

    Args:
        sizes: numbers of elements.
        densities: shares of them that are selected.
        rounds: turns of every contestant.
        device: ``"cpu"``, or ``"cuda"`` for torch's present GPU.
        progress: called before every part.

    Raises:
        UserError: an argument is out of its range, or there is no such device.
    """
    if not sizes or not densities or rounds < 1 or min(sizes) < 1:
        raise UserError("a benchmark of selection needs sizes, densities and rounds of at least 1")
    if not all(0 < density <= 1 for density in densities):
        raise UserError(f"densities are above 0 and at most 1, found {list(densities)}")
    place = _device_named(device)
    entries: list[Timed] = []
    total = len(sizes) * len(densities) * rounds
    with _one_thread():
        for number, (size, density) in enumerate(product(sizes, densities)):
            calls = contestants(size, max(1, round(density * size)), place)
            times: dict[str, list[float]] = {name: [] for name in calls}
            laps = {name: _lap(call, place) for name, call in calls.items()}
            for turn in range(rounds):
                progress(f"{size} elements, {density:g}", number * rounds + turn, total)
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


def _device_named(device: str) -> torch.device:
    if device not in ("cpu", "cuda"):
        raise UserError(f"selection is measured on 'cpu' or 'cuda', found {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device cuda: torch {torch.__version__} finds no GPU here; check 'nvidia-smi', "
            "CUDA_VISIBLE_DEVICES, and that torch was built for CUDA, or take --device cpu"
        )
    return torch.device(device)


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
