"""The network probe: what messages cost between the workers of a process group."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from syncline.errors import PeerError, UserError
from syncline.measure.statistics import median
from syncline.model.cost import CostCurve
from syncline.model.fit import fit_cost_curve, relative_line
from syncline.model.network import Link, Measurement, Network

__all__ = ["probe", "probe_sizes"]

SMALLEST_BYTES = 256
LARGEST_BYTES = 64 * 1024 * 1024
DENSE_FROM_BYTES = 64 * 1024
MIN_REPETITIONS = 3
MIN_REPETITIONS_SMALL = 7
"""For messages whose time is mostly startup, which varies most and costs little to repeat."""
MAX_REPETITIONS = 25
SUMMATION_BYTES = 32 * 1024 * 1024
"""Larger than the caches, so that the summation rate is the memory's."""


def probe(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
    largest_bytes: int = LARGEST_BYTES,
    seconds_per_size: float = 0.05,
    name: str = "measured",
) -> Network:
    """Measure the network under a process group. All its ranks must call; all get the result.

    Measured are all-reduce of fp32 sums from 256 bytes to ``largest_bytes`` (each size as the
    median of the slowest rank's times), point-to-point messages between the first and the last
    rank (alpha, beta: half a round trip), and the rate of adding two arrays in memory (gamma).
    The curve is fitted piecewise by relative error (:func:`syncline.model.fit.fit_cost_curve`).

    Args:
        group: the process group; the default group if None.
        device: where the tensors are; a CUDA device for NCCL.
        largest_bytes: largest message of the sweep.
        seconds_per_size: repeat each size for about this long, at least 3 times
            (7 for small messages), at most 25.
        name: name of the resulting network.

    Raises:
        UserError: there is no process group.
        PeerError: another rank failed or did not answer within the group's timeout.
    """
    if not dist.is_initialized():
        raise UserError(
            "probing needs a process group; call torch.distributed.init_process_group first"
        )
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    device = torch.device(device)
    world = dist.get_world_size(group)
    backend = dist.get_backend(group)
    gamma = _summation_s_per_byte(device)
    if world == 1:
        return Network(name=name, workers=1, backend=backend, all_reduce=CostCurve.line(0.0, 0.0))
    try:
        points = [
            _measure_all_reduce(size, group, device, seconds_per_size)
            for size in probe_sizes(largest_bytes)
        ]
        alpha_s, beta = _measure_link(group, device, largest_bytes, seconds_per_size)
        gamma = _largest(gamma, group, device)
    except RuntimeError as error:
        raise PeerError(
            f"rank {dist.get_rank(group)}: the network probe lost a peer: {error}"
        ) from error
    fit = fit_cost_curve(points)
    return Network(
        name=name,
        workers=world,
        backend=backend,
        all_reduce=fit.curve,
        link=Link(alpha_s=alpha_s, beta_s_per_byte=beta, gamma_s_per_byte=gamma),
        points=tuple(points),
        fit_error=fit.error,
        fit_error_max=fit.error_max,
    )


def probe_sizes(largest_bytes: int = LARGEST_BYTES) -> list[int]:
    """Return the message sizes of a sweep: by four up to 64 KiB, by two where messages live."""
    sizes = []
    size = SMALLEST_BYTES
    while size < largest_bytes:
        sizes.append(size)
        size *= 2 if size >= DENSE_FROM_BYTES else 4
    sizes.append(max(largest_bytes, SMALLEST_BYTES * 4))
    return sizes


def _measure_all_reduce(
    size_bytes: int, group: dist.ProcessGroup, device: torch.device, seconds: float
) -> Measurement:
    tensor = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)

    def exchange() -> None:
        dist.all_reduce(tensor, group=group)

    least = MIN_REPETITIONS_SMALL if size_bytes <= DENSE_FROM_BYTES else MIN_REPETITIONS
    times = _repeat(exchange, group, device, seconds, least)
    return Measurement(size_bytes=size_bytes, median_s=median(times), repetitions=len(times))


def _measure_link(
    group: dist.ProcessGroup, device: torch.device, largest_bytes: int, seconds: float
) -> tuple[float, float]:
    """Return alpha in seconds and beta in seconds a byte, from half round trips."""
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    sizes = [s for s in probe_sizes(largest_bytes) if s <= 16 * 1024 * 1024][::2]
    halves: list[float] = []
    for size in sizes:
        tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)
        peer = dist.get_global_rank(group, last if rank == 0 else 0)

        def exchange(tensor: torch.Tensor = tensor, peer: int = peer) -> None:
            if rank == 0:
                dist.send(tensor, peer, group=group)
                dist.recv(tensor, peer, group=group)
            elif rank == last:
                dist.recv(tensor, peer, group=group)
                dist.send(tensor, peer, group=group)

        halves.append(median(_repeat(exchange, group, device, seconds / 2)) / 2)
    return relative_line(sizes, halves)


def _repeat(
    call: Callable[[], object],
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float,
    least: int = MIN_REPETITIONS,
) -> list[float]:
    """Return the slowest rank's time of each repetition, the same list on every rank."""
    first = _largest(max(_timed(call, device), 1e-7), group, device)  # also the warm-up
    repetitions = min(max(round(seconds / first), least), MAX_REPETITIONS)
    times = torch.tensor([_timed(call, device) for _ in range(repetitions)], dtype=torch.float64)
    times = times.to(device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return [float(t) for t in times.cpu()]


def _timed(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _largest(value: float, group: dist.ProcessGroup, device: torch.device) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return float(tensor.item())


def _summation_s_per_byte(device: torch.device) -> float:
    """Return the seconds a byte of adding one array to another in memory (gamma)."""
    a = torch.zeros(SUMMATION_BYTES // 4, device=device)
    b = torch.zeros_like(a)
    times = [_timed(lambda: a.add_(b), device) for _ in range(4)]
    return min(times[1:]) / SUMMATION_BYTES
