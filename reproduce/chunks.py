"""A collective simulated transfer by transfer: a schedule run over a fabric with contention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reproduce.dependencies import dependencies
from reproduce.fabric import Fabric
from syncline.comm.collectives.schedule import Schedule
from syncline.errors import MismatchError, UserError, quoted, require_known
from syncline.plan.quantities import LARGEST_BYTES, LONGEST_NS
from syncline.plan.simulator.graph import TaskGraph, Times

__all__ = ["ChunkTimes", "TransferOrder", "simulate_chunks"]

TransferOrder = Literal["ready", "program"]
"""In which order a port takes its transfers; see :func:`simulate_chunks`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkTimes:
    """When each transfer of a schedule ran; all times in nanoseconds from the start."""

    schedule: Schedule
    size_bytes: int
    start_ns: Times
    """When each transfer began; shape ``(transfers,)``."""
    stop_ns: Times
    """When its last byte was there."""
    done_ns: Times
    """When its result was there: for a reduction once it was added, else ``stop_ns``."""
    active_ns: dict[str, int]
    """How long each port, card and switch was held, by name: ``"rank 3 out"``, ``"host 0 NIC in"``,
    ``"switch"``, ``"rank 3 reduce"``. The sum over all transfers that it carries at once."""

    @property
    def total_ns(self) -> int:
        """When the last rank was through."""
        return int(self.done_ns.max(initial=0))

    @property
    def total_s(self) -> float:
        """When the last rank was through, in seconds."""
        return self.total_ns / 1e9


def simulate_chunks(
    schedule: Schedule, fabric: Fabric, *, size_bytes: int, order: TransferOrder = "ready"
) -> ChunkTimes:
    """Run a schedule for a vector of ``size_bytes`` on a fabric.

    A transfer begins once its sender has the data and every resource that it needs is free (see
    :class:`~reproduce.fabric.Fabric`). What is to be reduced comes into a buffer; the
    receiver then adds it in ``gamma M``, one reduction at a time, while its ports go on. What is to
    be copied comes in place, so that the transfer waits until the receiver has sent what was there.
    All ranks start at 0. A block of no bytes is sent all the same and costs alpha.

    With ``order="ready"`` a port never waits for a transfer that cannot begin: it takes the first
    in the program that can. That may delay a more urgent one, as in the double binary trees. With
    ``order="program"`` every rank's port takes its transfers strictly in the order of the program,
    like a queue. Shared cards and switches always take the first transfer in the program that is
    ready.

    Args:
        schedule: the program.
        fabric: what it runs on, for as many ranks.
        size_bytes: size of the whole vector.
        order: how ports choose among transfers.

    Raises:
        MismatchError: the fabric has another number of ranks.
        UserError: the size is negative, the order is unknown, or a transfer takes longer than
            19.5 hours.

    Complexity: O(n log n) in time for n transfers, O(n) in memory: 2.1 million transfers, a ring
    over 1,024 ranks, take seconds and less than 1 GiB.
    """
    if schedule.ranks != fabric.ranks:
        raise MismatchError(
            f"schedule {quoted(schedule.algorithm)} is for {schedule.ranks} ranks, the fabric has "
            f"{fabric.ranks}; make one of them for the other's number"
        )
    if not 0 <= size_bytes <= LARGEST_BYTES:
        raise UserError(f"a vector has 0 to {LARGEST_BYTES} bytes, found {size_bytes}")
    require_known("order", order, get_args(TransferOrder))
    offsets = schedule.block_offsets(size_bytes)
    transfer_bytes = offsets[schedule.block_stop] - offsets[schedule.block_start]
    reductions = np.flatnonzero(schedule.reduces)

    graph = TaskGraph()
    lanes = _Lanes(graph, fabric)
    transfers_ns = _nanoseconds(
        fabric.transfer_s(schedule.source, schedule.destination, transfer_bytes)
    )
    reductions_ns = _nanoseconds(fabric.gamma_s_per_byte * transfer_bytes[reductions])
    graph.add_tasks(lanes.out[schedule.source], transfers_ns)
    first = graph.add_tasks(lanes.reduce[schedule.destination[reductions]], reductions_ns)
    lanes.hold_further(schedule)

    # The task with which the result of each transfer is there.
    result = np.arange(len(schedule))
    result[reductions] = first + np.arange(len(reductions))
    needs = dependencies(schedule)
    graph.add_edges(before=reductions, after=result[reductions])
    graph.add_edges(
        before=result[needs.send_after_result.earlier], after=needs.send_after_result.later
    )
    graph.add_edges(
        before=needs.result_after_send.earlier, after=result[needs.result_after_send.later]
    )
    graph.add_edges(
        before=result[needs.result_after_result.earlier],
        after=result[needs.result_after_result.later],
    )
    if order == "program":
        for port in (schedule.source, schedule.destination):
            graph.add_edges(*_queued(port))
    start, stop = graph.run()
    return ChunkTimes(
        schedule=schedule,
        size_bytes=size_bytes,
        start_ns=start[: len(schedule)],
        stop_ns=stop[: len(schedule)],
        done_ns=stop[result],
        active_ns=lanes.active_ns(np.concatenate([transfers_ns, reductions_ns])),
    )


class _Lanes:
    """The lanes of a fabric in a task graph."""

    def __init__(self, graph: TaskGraph, fabric: Fabric) -> None:
        self._fabric = fabric
        self._names: list[str] = []
        self._graph = graph
        ranks = range(fabric.ranks)
        self.out = np.array([self._add(f"rank {rank} out", 1) for rank in ranks])
        """Lane of each rank's outgoing port."""
        self._in = np.array([self._add(f"rank {rank} in", 1) for rank in ranks])
        self.reduce = np.array([self._add(f"rank {rank} reduce", 1) for rank in ranks])
        """Lane on which each rank reduces."""
        cards = fabric.concurrent(fabric.nic_s_per_byte)
        self._cards: list[NDArray[np.int64]] = []  # out and in: lane of each rank's host
        if cards is not None:
            hosts = sorted(set(fabric.hosts))
            for way in ("out", "in"):
                lane = {host: self._add(f"host {host} NIC {way}", cards) for host in hosts}
                self._cards.append(np.array([lane[host] for host in fabric.hosts]))
        together = fabric.concurrent(fabric.switch_s_per_byte)
        self._switch = None if together is None else self._add("switch", together)

    def _add(self, name: str, capacity: int) -> int:
        self._names.append(name)
        return self._graph.add_lane(capacity=capacity, in_order=False)

    def hold_further(self, schedule: Schedule) -> None:
        """Let transfers hold all that they need beside their sender's port."""
        self._graph.hold(np.arange(len(schedule)), self._in[schedule.destination])
        leaving = np.flatnonzero(
            self._fabric.is_between_hosts(schedule.source, schedule.destination)
        )
        for card, rank in zip(self._cards, (schedule.source, schedule.destination), strict=False):
            self._graph.hold(leaving, card[rank[leaving]])
        if self._switch is not None:
            self._graph.hold(leaving, np.full(len(leaving), self._switch))

    def active_ns(self, durations_ns: Times) -> dict[str, int]:
        """Return how long tasks hold each lane, summed over what it carries at once."""
        tasks, lanes = self._graph.lane_members()
        busy = np.zeros(len(self._names), dtype=np.int64)
        np.add.at(busy, lanes, durations_ns[tasks])
        return dict(zip(self._names, busy.tolist(), strict=True))


def _queued(port: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each transfer and the next one over the same port."""
    by_port = np.argsort(port, kind="stable")
    same = np.diff(port[by_port]) == 0
    return by_port[:-1][same], by_port[1:][same]


def _nanoseconds(seconds: NDArray[np.floating]) -> Times:
    nanoseconds = np.rint(seconds * 1e9)
    if nanoseconds.max(initial=0) > LONGEST_NS:
        raise UserError(
            f"a transfer takes {nanoseconds.max() / 1e9:.3g} s, longer than the "
            f"{LONGEST_NS / 1e9:.0f} s that can be simulated; alpha is in seconds, beta and gamma "
            "in seconds a byte"
        )
    return np.asarray(nanoseconds, dtype=np.int64)
