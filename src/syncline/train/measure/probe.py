"""The network probe: measures the cost of messages between the workers of a process group."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from syncline.errors import PeerError, UserError
from syncline.plan.cost import CostCurve
from syncline.plan.fit import fit_cost_curve, fit_pipelined, link_line, without_bursts
from syncline.plan.network import Contention, Link, Measurement, Network
from syncline.plan.sparse_costs import SparseSpeeds
from syncline.train.measure.sparse import sparse_speeds
from syncline.train.measure.statistics import lower_quartile, median

SMALLEST_BYTES = 256
LARGEST_BYTES = 64 * 1024 * 1024
DENSE_FROM_BYTES = 1024 * 1024
LARGEST_LINK_BYTES = 1024 * 1024
LINK_SWEEPS = 3
MIN_SWEEPS = 4
MAX_SWEEPS = 15
COSTLY_BYTES = 8 * 1024 * 1024
COSTLY_SWEEPS = 1
"""Larger messages are measured only at warm-up and in this many sweeps: they vary less, and take
longest on a slow network."""
IN_FLIGHT = 2
ROW_BYTES = 12 * 1024 * 1024
SHORTEST_ROW, LONGEST_ROW = 3, 16
"""A row of back-to-back messages has as many as make up ROW_BYTES, within these limits."""
ROW_SWEEPS = 3
SHORT_ROW_BYTES = 4 * 1024 * 1024
SHORT_ROW = 6
IN_SHORT_ROWS = tuple(1024 * size for size in (4, 64, 256, 512, 1024, 2048))
"""If time is limited, rows have SHORT_ROW_BYTES, and at most SHORT_ROW messages of these sizes."""
FIRST_SHARE, REPEATED_SHARE, ROWS_SHARE = 0.3, 0.25, 0.15
"""Shares of a limited time: for the first sweep, for repeating small sizes, and for rows."""
FOLLOWING_BYTES = (128 * 1024, 256 * 1024, 512 * 1024)
"""Sizes of the rows with one message in flight: planners make such messages."""
HALVED_FROM_BYTES = 16 * 1024
"""From this size on, rows also have sizes between those of the sweep: plans use such messages."""
BETWEEN_FROM_BYTES = 16 * 1024
"""From this size on, sizes between powers of two are measured too: libraries cut messages into
chunks of powers of two, and are slower or faster at other sizes."""
SUMMATION_BYTES = 16 * 1024 * 1024
"""Larger than a core's caches, so that the summation rate is the memory's."""
SUMMATION_REPETITIONS = 3
CONTENTION_BYTES = 4 * 1024 * 1024
"""A message that takes much longer than a scheduler tick, which could look like contention."""
CONTENTION_REPETITIONS = 5
LARGEST_CONTENTION = 4.0
"""A larger factor is noise: four threads that share a core do not slow each other more."""
SHORTER = 0.75  # share of the message's time that the computation takes
MATRIX = 160  # side of the matrices whose products are the computation of the contention test


def probe(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
    largest_bytes: int = LARGEST_BYTES,
    seconds: float = 1.0,
    pipelined: bool = True,
    contention: bool = True,
    name: str = "measured",
    limit_s: float | None = None,
) -> Network:
    """Measure the network under a process group. All its ranks must call; all get the same result.

    It measures all-reduces of fp32 sums from 256 bytes to ``largest_bytes``, point-to-point
    messages between the first and the last rank (alpha, beta: half a round trip), the rate of
    adding two arrays in memory (gamma), and by how much computing and communicating slow each
    other (contention). If tensors are on the CPU, it also measures how fast the largest elements
    are selected and merged. Each sweep measures all sizes, so that a disturbance of some
    milliseconds affects one repetition of many sizes, not all repetitions of one. A size's time is
    the lower quartile over the sweeps of the slowest rank's time. The curve is fitted piecewise by
    relative error (:func:`syncline.plan.fit.fit_cost_curve`). On shaped links, single small
    messages may exceed the sustained rate. Back-to-back messages give that rate, and no message is
    assumed to be faster (:func:`syncline.plan.fit.without_bursts`).

    Args:
        group: the process group; the default group if None.
        device: where the tensors are; a CUDA device for NCCL.
        largest_bytes: largest message of the sweep.
        seconds: repeat a size until it and all smaller ones have taken about this long, but at
            least 4 times and at most 15 (twice above 8 MiB): small messages vary most.
        pipelined: also measure back-to-back messages, with two in flight and with one.
        contention: estimate the slowdown of computing and communicating at once, from matrix
            products beside a message; training iterations show it more exactly.
        name: name of the resulting network.
        limit_s: take about this long in all. On a slow link the largest sizes are then left out,
            and the curve is extrapolated to them. Others are repeated less often: the longer a
            message takes, the less its time varies.

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
    session = Session(group, torch.device(device), limit_s)
    world = dist.get_world_size(group)
    backend = dist.get_backend(group)
    if world == 1:
        return Network(name=name, workers=1, backend=backend, all_reduce=CostCurve.line(0.0, 0.0))
    try:
        sizes = probe_sizes(largest_bytes)
        points = session.all_reduces(between_powers(sizes), seconds)
        two_at_once = session.two_at_once(sizes) if pipelined else []
        following = session.rows(FOLLOWING_BYTES, 1) if pipelined else []
        alpha_s, beta = session.link(min(largest_bytes, LARGEST_LINK_BYTES))
        gamma = session.summation()
        slowdown = session.contention() if contention else Contention()
        # Elements are selected where the tensors are, but not on a GPU.
        sparse = session.sparse() if session.device.type == "cpu" else None
    except RuntimeError as error:
        raise PeerError(
            f"rank {dist.get_rank(group)}: the network probe lost a peer: {error}"
        ) from error
    fit = fit_cost_curve(points)
    longer = [max(p.time_s - fit.curve.seconds(p.size_bytes), 0.0) for p in following]
    return Network(
        name=name,
        workers=world,
        backend=backend,
        algorithm="nccl" if backend == "nccl" else "ring",
        all_reduce=without_bursts(fit.curve, points, [*two_at_once, *following]),
        pipelined=fit_pipelined(two_at_once, fit.curve) if two_at_once else None,
        issue_gap_s=median(longer) if longer else 0.0,
        contention=slowdown,
        link=Link(alpha_s=alpha_s, beta_s_per_byte=beta, gamma_s_per_byte=gamma),
        sparse=sparse,
        points=tuple(points),
        fit_error=fit.error,
        fit_error_max=fit.error_max,
    )


def probe_sizes(largest_bytes: int = LARGEST_BYTES) -> list[int]:
    """Return the message sizes of a sweep: factors of 4 up to 1 MiB, then factors of 2."""
    sizes = []
    size = SMALLEST_BYTES
    while size < largest_bytes:
        sizes.append(size)
        size *= 2 if size >= DENSE_FROM_BYTES else 4
    sizes.append(max(largest_bytes, SMALLEST_BYTES * 4))
    return sizes


def between_powers(sizes: Sequence[int]) -> list[int]:
    """Return the sizes at which all-reduces are measured: of a sweep, and between powers of two.

    Up to 8 MiB, 1.5 times each power of two is added. Above, where one message takes as long as all
    smaller ones together, it replaces the power of two.
    """
    smallest, largest = sizes[0], sizes[-1]
    found = {size for size in sizes if size <= COSTLY_BYTES}
    power = max(smallest, BETWEEN_FROM_BYTES)
    while power * 2 <= largest:
        if power < COSTLY_BYTES or power * 4 <= largest:
            found.add(power * 3 // 2)
        power *= 2
    return sorted(found | {largest})


def contention_of(computing_s: tuple[float, float], message_s: tuple[float, float]) -> Contention:
    """Return the slowdowns of a computation and a message that begin at once.

    Each is given as the seconds that it takes alone, and beside the other one. While both run, for
    ``o`` seconds, each does what takes it ``alone - (beside - o)`` seconds alone.
    """
    overlap_s = min(computing_s[1], message_s[1])

    def factor(alone_s: float, beside_s: float) -> float:
        found = overlap_s / max(alone_s - (beside_s - overlap_s), 1e-9)
        return min(max(round(found, 3), 1.0), LARGEST_CONTENTION)

    return Contention(computing=factor(*computing_s), exchange=factor(*message_s))


class Session:
    """Measurements that all ranks of a group make together."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, limit_s: float | None = None
    ) -> None:
        self._group = group
        self.device = device
        self._limit_s = limit_s

    def all_reduces(self, sizes: Sequence[int], seconds: float) -> list[Measurement]:
        """Return the seconds of single all-reduces, by sweeps over all sizes."""
        buffer = torch.zeros(max(sizes) // 4, dtype=torch.float32, device=self.device)

        def exchange(size_bytes: int) -> float:
            message = buffer[: size_bytes // 4]
            return self._timed(lambda: dist.all_reduce(message, group=self._group))

        limit_s = math.inf if self._limit_s is None else self._limit_s
        seconds = min(seconds, REPEATED_SHARE * limit_s)
        times: dict[int, list[float]] = {}
        sweeps: dict[int, int] = {}
        up_to_here_s = 0.0
        least = [exchange(size) for size in sizes if size < DENSE_FROM_BYTES]  # connects, warms up
        slowest = self.slowest(least)
        for number, size in enumerate(sizes):
            own_s = least[number] if number < len(least) else exchange(size)
            up_to_here_s += slowest[number] if number < len(slowest) else self.slowest([own_s])[0]
            fitting = round(seconds / max(up_to_here_s, 1e-6))
            times[size], sweeps[size] = [], min(max(fitting, MIN_SWEEPS), MAX_SWEEPS)
            if up_to_here_s > REPEATED_SHARE * limit_s / MIN_SWEEPS:
                times[size], sweeps[size] = [own_s], 0
            elif size > COSTLY_BYTES:
                times[size], sweeps[size] = [own_s], COSTLY_SWEEPS
            if size >= DENSE_FROM_BYTES and up_to_here_s > FIRST_SHARE * limit_s:
                break
        for number in range(max(sweeps.values())):
            for size, taken in times.items():
                if number < sweeps[size]:
                    taken.append(exchange(size))
        return self._measurements(times, lower_quartile)

    def two_at_once(self, sizes: Sequence[int]) -> list[Measurement]:
        """Return the seconds per message with two always in flight; see :meth:`rows`."""
        if self._limit_s is not None:
            chosen = [size for size in IN_SHORT_ROWS if size <= sizes[-1]]
            return self.rows(chosen if len(chosen) > 1 else sizes, IN_FLIGHT)
        chosen = [size for size in sizes if size <= COSTLY_BYTES]
        chosen += [size * 2 for size in chosen if size * 4 in chosen and size >= HALVED_FROM_BYTES]
        return self.rows(sorted(chosen), IN_FLIGHT)

    def rows(self, sizes: Sequence[int], in_flight: int) -> list[Measurement]:
        """Return the seconds per message of back-to-back messages, ``in_flight`` always in flight.

        One thread issues and another waits, as in the engine: switching between them is much of the
        cost of small messages. The median over the rows counts, not the lower quartile, because a
        row's time is the sum of its messages' times.
        """
        buffers = [
            torch.zeros(max(sizes) // 4, dtype=torch.float32, device=self.device)
            for _ in range(in_flight)
        ]

        def row(size_bytes: int, length: int, waiter: Executor) -> None:
            under_way: deque[Future[object]] = deque()
            for number in range(length):
                if len(under_way) == in_flight:
                    under_way.popleft().result()
                message = buffers[number % in_flight][: size_bytes // 4]
                work = dist.all_reduce(message, group=self._group, async_op=True)
                assert work is not None
                under_way.append(waiter.submit(work.wait))
            while under_way:
                under_way.popleft().result()

        times: dict[int, list[float]] = {size: [] for size in sizes}
        row_bytes, longest, sweeps = ROW_BYTES, LONGEST_ROW, ROW_SWEEPS
        if self._limit_s is not None:
            row_bytes, longest = SHORT_ROW_BYTES, SHORT_ROW
        with ThreadPoolExecutor(1) as waiter:
            for sweep in range(ROW_SWEEPS):
                if sweep == sweeps:
                    break
                began_s = time.perf_counter()
                for size, taken in times.items():
                    length = min(max(row_bytes // size, SHORTEST_ROW), longest)
                    self._meet()
                    taken.append(self._timed(partial(row, size, length, waiter)) / length)
                if sweep == 0 and self._limit_s is not None:
                    (took_s,) = self.slowest([time.perf_counter() - began_s])
                    sweeps = max(round(ROWS_SHARE * self._limit_s / took_s), 1)
        return self._measurements(times, median)

    def link(self, largest_bytes: int) -> tuple[float, float]:
        """Return alpha in seconds and beta in seconds per byte, from half round trips."""
        rank, last = dist.get_rank(self._group), dist.get_world_size(self._group) - 1
        peer = dist.get_global_rank(self._group, last if rank == 0 else 0)
        sizes = probe_sizes(largest_bytes)[::2]
        # Gloo sends no message from a GPU's memory, and its collectives pass through the host's.
        place = "cpu" if dist.get_backend(self._group) == "gloo" else self.device
        buffer = torch.zeros(max(sizes) // 4, dtype=torch.float32, device=place)
        ways = {0: (dist.isend, dist.irecv), last: (dist.irecv, dist.isend)}.get(rank, ())

        def exchange(size_bytes: int) -> None:
            message = buffer[: size_bytes // 4]
            for way in ways:
                # As a batch of one: otherwise NCCL makes a communicator for the pair, and warns.
                batch = [dist.P2POp(way, message, peer, group=self._group)]
                for work in dist.batch_isend_irecv(batch):
                    work.wait()

        times: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(1 + LINK_SWEEPS):  # the first warms up
            for size, taken in times.items():
                taken.append(self._timed(partial(exchange, size)))
        one_way_s = [lower_quartile(self.slowest(taken[1:])) / 2 for taken in times.values()]
        return link_line(sizes, one_way_s)

    def summation(self) -> float:
        """Return the seconds per byte of adding one array to another in memory (gamma)."""
        a = torch.zeros(SUMMATION_BYTES // 4, device=self.device)
        b = torch.zeros_like(a)
        a.add_(b)  # touches the memory for the first time
        times = [self._timed(lambda: a.add_(b)) for _ in range(SUMMATION_REPETITIONS)]
        return max(self.slowest([min(times) / SUMMATION_BYTES]))

    def contention(self) -> Contention:
        """Return the slowdowns of computing and communicating while both run."""
        matrix = torch.ones(MATRIX, MATRIX, device=self.device)
        message = torch.zeros(CONTENTION_BYTES // 4, device=self.device)
        products = 1

        def compute() -> None:
            for _ in range(products):
                torch.mm(matrix, matrix)
            if self.device.type == "cuda":  # a message has another stream
                torch.cuda.current_stream(self.device).synchronize()

        def communicate() -> None:
            dist.all_reduce(message, group=self._group)

        def both() -> tuple[float, float]:
            began_s = time.perf_counter()
            work = dist.all_reduce(message, group=self._group, async_op=True)
            compute()
            computed_s = time.perf_counter() - began_s
            assert work is not None
            return computed_s, computed_s + self._timed(work.wait)

        communicate()
        compute()
        each_s = max(self.slowest([self._timed(compute)])[0], 1e-7)
        message_s = self.slowest([self._timed(communicate)])[0]
        # The message lasts longer: what remains of it shows how far it came meanwhile.
        products = min(max(round(SHORTER * message_s / each_s), 1), 10_000)
        times: list[list[float]] = []
        for _ in range(CONTENTION_REPETITIONS):
            self._meet()
            alone = [self._timed(compute), self._timed(communicate)]
            self._meet()
            times.append([*alone, *both()])
        alone_s, sending_s, computed_s, sent_s = (
            lower_quartile(self.slowest(taken)) for taken in zip(*times, strict=True)
        )
        return contention_of((alone_s, computed_s), (sending_s, sent_s))

    def sparse(self) -> SparseSpeeds:
        """Return how fast the slowest rank selects and merges while all of them do."""
        self._meet()
        own = msgspec.structs.asdict(sparse_speeds())
        slowest = self.slowest(list(own.values()))
        return SparseSpeeds(**dict(zip(own, slowest, strict=True)))

    def _measurements(
        self, times: dict[int, list[float]], summary: Callable[[Sequence[float]], float]
    ) -> list[Measurement]:
        """Summarise the slowest rank's times of each size."""
        return [
            Measurement(
                size_bytes=size, time_s=summary(self.slowest(taken)), repetitions=len(taken)
            )
            for size, taken in times.items()
        ]

    def _meet(self) -> None:
        """Return once all ranks have called this."""
        if self.device.type == "cuda":  # where NCCL's barrier has to guess the device
            self.slowest([0.0])
        else:
            dist.barrier(group=self._group)

    def _timed(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def slowest(self, times: Sequence[float]) -> list[float]:
        """Return each time as the slowest rank took it, the same on every rank."""
        tensor = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [float(t) for t in tensor.cpu()]
