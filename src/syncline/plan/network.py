"""``Network``: how many workers there are and what it costs them to exchange a message."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from syncline.errors import UserError, quoted, require_known, unknown
from syncline.plan.collective_costs import ALL_REDUCE_ALGORITHMS, SERVER_ALGORITHMS
from syncline.plan.cost import CostCurve, Measurement
from syncline.plan.document import Document, Value
from syncline.plan.exchange import (
    EXCHANGES,
    FLAT,
    TUNED,
    Exchange,
    Link,
    Stage,
    difference,
    rescaled,
)
from syncline.plan.fit import fit_cost_curve
from syncline.plan.quantities import (
    LARGEST_BYTES,
    LARGEST_CONTENTION,
    LARGEST_JOBS,
    LARGEST_WORKERS,
    bytes_per_element,
    require_count,
    require_finite,
    require_time,
)
from syncline.plan.recipe import SPARSE_DEFAULT, Rounded
from syncline.plan.sparse_costs import SPARSE_ALGORITHMS, SparseSpeeds

__all__ = ["ETHERNET_LATENCY_S", "PRESETS", "Contention", "Link", "Measurement", "Network"]

ETHERNET_LATENCY_S = 20e-6
"""Latency that a link is assumed to have if it was not measured: TCP inside a rack."""
ENCODED_SEGMENT_BYTES = 256 * 1024  # largest segment of an int8 message
CARRIED_OVER = 1.7
"""Nine of ten all-reduces take what a curve says within this factor, if the curve was measured with
fewer workers (DeepBench: 2 to 16 ranks, carried over to 4 to 32)."""
REFERENCE_BYTES = 64 * 1024 * 1024  # a curve without measured points is linearised up to this size


class Contention(Value, frozen=True, kw_only=True):
    """How many times slower computing and exchanging messages run while both are active.

    A factor of 1 is no slowdown. With 2 for both, they share one resource evenly and overlapping
    gains nothing, as on a host whose every core computes.
    """

    computing: float = 1.0  # slowdown of computing while messages are in flight
    exchange: float = 1.0  # slowdown of messages while the worker computes
    per_message_s: float = 0.0
    """Extra computing time per message: the processor that computes also runs the library that
    sends it."""
    free_messages: int = 0
    """Messages without that extra time: the factors, or the profile, already include it."""
    fitted: bool = False
    """Whether it was fitted to training iterations; otherwise measured by the probe, or given."""

    def __post_init__(self) -> None:
        for name in ("computing", "exchange"):
            if not 1 <= (factor := getattr(self, name)) <= LARGEST_CONTENTION:
                raise UserError(
                    f"network: contention must be at least 1 and at most {LARGEST_CONTENTION:g}, "
                    f"found {factor} for {name}"
                )
        require_time("network: contention.per_message_s", self.per_message_s)
        if self.free_messages < 0:
            raise UserError(
                "network: contention.free_messages must not be negative, found "
                f"{self.free_messages}"
            )

    def handling_s(self, messages: int) -> float:
        """Return the extra computing time of an iteration with this many messages."""
        return self.per_message_s * max(messages - self.free_messages, 0)

    @property
    def slows(self) -> bool:
        """Whether either slows the other."""
        return max(self.computing, self.exchange) > 1


class Network(Document, frozen=True, kw_only=True):
    """Worker count and communication costs.

    Raises:
        UserError: on construction, for a value out of its range, or an impossible exchange
            (:class:`syncline.plan.exchange.Exchange`).
    """

    KIND: ClassVar[str] = "network"
    VERSION: ClassVar[int] = 2

    name: str
    workers: int
    all_reduce: CostCurve
    pipelined: CostCurve | None = None
    """Cost of an all-reduce while another is in flight. The value at 0 bytes is hidden behind the
    other one; the rest occupies the channel. None: ``all_reduce``, its whole latency hidden."""
    issue_gap_s: float = msgspec.field(default=0.0, name="handing_over_s")
    """Extra time per message when messages are sent one at a time, back to back: until a thread
    notices that one has arrived and issues the next. Files call it ``handing_over_s``."""
    backend: str = "unknown"  # the communication library, such as ``"gloo"`` or ``"nccl"``
    contention: Contention = Contention()
    contention_by_need: Contention | None = None
    """The same under plans that wait on need, whose messages the engine sends; None: equal."""
    link: Link | None = None  # between two workers or, with ``hosts``, between two hosts
    algorithm: str = "ring"  # the algorithm by which the curve is scaled when the network changes
    density: float | None = None
    """Share of the elements that each worker sends, for a sparse algorithm."""
    hosts: int | None = None  # how many hosts the workers are on; None: unknown, or each on its own
    inside: Link | None = None  # link between two workers of one host
    servers: int | None = None
    """Number of parameter servers, among which each message is split evenly; None: one."""
    colocated: bool = False
    """Servers are on the workers' hosts, so that pushes and pulls share their links."""
    stages: tuple[Stage, ...] = ()
    """Resources other than links that the bytes of an exchange pass through."""
    jobs: int = 1
    """How many equal jobs share the links and switches, each with its own servers, if any. The
    curve is that of one job alone; the simulator predicts how jobs slow each other."""
    sparse: SparseSpeeds | None = None
    """How fast the workers select and merge, if that was measured. A sparse algorithm's curve then
    includes the time for it."""
    whole: CostCurve | None = None
    """If ``all_reduce`` is the cost of a compressed exchange: the cost of exchanging every element,
    for the dense messages among compressed ones."""
    points: tuple[Measurement, ...] = ()  # the measured all-reduces that the curve was fitted to
    fit_error: float | None = None  # mean relative error of the curve over the points (0.05: 5 %)
    fit_error_max: float | None = None  # largest relative error over the points
    known_within: float | None = None
    """Nine of ten messages take what the curve says within this factor; 1: it was measured. None:
    that is not known, unless there are :attr:`points`."""

    def __post_init__(self) -> None:
        require_count("network: workers", self.workers, LARGEST_WORKERS)
        _require_points(self.points)
        require_time("network: handing_over_s", self.issue_gap_s)
        require_known("all-reduce algorithm", self.algorithm, EXCHANGES)
        known = (*ALL_REDUCE_ALGORITHMS, *FLAT, *TUNED, *SERVER_ALGORITHMS)
        if self.link is not None:
            _ = self.exchange  # checks itself
        elif self.hosts or self.density or self.stages or self.algorithm not in known:
            raise UserError(
                f"network: without a link the curve must be of one of {', '.join(known)}, "
                "without hosts, density or stages"
            )
        require_count("network: jobs", self.jobs, LARGEST_JOBS)
        for field in ("fit_error", "fit_error_max"):
            if (value := getattr(self, field)) is not None:
                require_finite(f"network: {field}", value)
        if self.known_within is not None and not 1 <= self.known_within < math.inf:
            raise UserError(
                f"network: known_within must be finite and at least 1, found {self.known_within}"
            )

    @property
    def is_measured(self) -> bool:
        """Whether the curve was measured with these workers on this link."""
        return bool(self.points) or self.known_within == 1

    def contention_under(self, *, by_need: bool) -> Contention:
        """Return the contention under plans that wait on need, or under all others."""
        return (self.contention_by_need if by_need else None) or self.contention

    @classmethod
    def line(
        cls,
        *,
        workers: int,
        a_s: float,
        b_s_per_byte: float,
        name: str = "line",
        algorithm: str = "ring",
    ) -> Network:
        """Return a network whose all-reduce costs ``a + b M``. Source: MG-WFBP, Eq. 10."""
        curve = CostCurve.line(a_s, b_s_per_byte)
        return cls(
            name=name, workers=workers, all_reduce=curve, algorithm=algorithm, known_within=1.0
        )

    @classmethod
    def from_points(
        cls,
        sizes_bytes: Sequence[int],
        times_s: Sequence[float],
        *,
        workers: int,
        name: str = "points",
        algorithm: str = "ring",
    ) -> Network:
        """Return a network whose all-reduce costs what was measured, such as by nccl-tests.

        The curve is fitted as a probe's (:func:`syncline.plan.fit.fit_cost_curve`). Of repeated
        sizes, the median counts. ``algorithm`` scales the curve to other worker counts.

        Raises:
            UserError: there are not as many times as sizes, fewer than two sizes or more than
                4,096, a size is not a whole number of bytes, or a time is not above 0.
        """
        if len(sizes_bytes) != len(times_s):
            raise UserError(
                f"network: {len(sizes_bytes)} sizes and {len(times_s)} times; give one time for "
                "each size"
            )
        points: list[Measurement] = []
        for index, (size, seconds) in enumerate(zip(sizes_bytes, times_s, strict=True)):
            try:
                size_bytes = operator.index(size)
            except TypeError:
                raise UserError(
                    f"network: sizes_bytes[{index}]: expected a whole number of bytes, found {size}"
                ) from None
            points.append(Measurement(size_bytes=size_bytes, time_s=float(seconds), repetitions=1))
        _require_points(points)
        fit = fit_cost_curve(points)
        return cls(
            name=name,
            workers=workers,
            all_reduce=fit.curve,
            algorithm=algorithm,
            points=tuple(points),
            fit_error=fit.error,
            fit_error_max=fit.error_max,
        )

    @classmethod
    def of_link(
        cls,
        link: Link,
        *,
        workers: int,
        algorithm: str = "ring",
        density: float | None = None,
        hosts: int | None = None,
        inside: Link | None = None,
        servers: int | None = None,
        colocated: bool = False,
        stages: tuple[Stage, ...] = (),
        jobs: int = 1,
        sparse: SparseSpeeds | None = None,
        name: str = "link",
    ) -> Network:
        """Return a network whose exchange costs what a formula says; see the fields."""
        network = cls(
            name=name,
            workers=workers,
            all_reduce=CostCurve.line(0.0, 0.0),
            link=link,
            algorithm=algorithm,
            density=density,
            hosts=hosts,
            inside=inside,
            servers=servers,
            colocated=colocated,
            stages=stages,
            jobs=jobs,
            sparse=sparse,
        )
        exchange = network.exchange
        whole = None if density is None else exchange.of_every_element("ring").curve()
        return msgspec.structs.replace(network, all_reduce=exchange.curve(), whole=whole)

    def collective(self, kind: str, *, in_flight: int = 1) -> CostCurve:
        """Return the cost of ``"all-reduce"``, ``"reduce-scatter"`` or ``"all-gather"``.

        A reduce-scatter and an all-gather cost half of the all-reduce each. Only the reduce-scatter
        adds, so with gamma each is off by half of it, but their sum is right.

        Raises:
            UserError: it is none of the three.
        """
        whole = self.all_reduce
        if in_flight > 1 and self.pipelined is not None:
            whole = self.pipelined
        if kind == "all-reduce":
            return whole
        if kind in ("reduce-scatter", "all-gather"):
            return whole.rebased(whole.latency_s / 2, 0.5)
        raise UserError(unknown("collective", kind, ("all-reduce", "reduce-scatter", "all-gather")))

    def casting(self, wire: Rounded) -> Network:
        """Return the network whose curves are for messages rounded to 16 or 8 bits.

        The page "Algorithms and costs" has the formulas. Sizes are bytes on the wire. Casting takes
        no time if gamma is unknown.
        """
        passes, longer, direct = 1, 1.0, False
        if wire == "int8":
            passes, direct = 2, self.workers > 2
            if self.hosts is not None and 1 < self.hosts < self.workers:
                local = self.exchange.workers_a_host
                sent = local**2 * (self.hosts - 1) / (self.hosts * local - 1)
                longer = (1 + max(sent, 1.0)) / 2  # the all-gather is a ring
        gamma = 0.0 if self.link is None else self.link.gamma_s_per_byte
        cast = CostCurve.line(0.0, passes * 4 / bytes_per_element(wire) * gamma)

        def rounded(curve: CostCurve) -> CostCurve:
            parts = [curve.rebased(curve.latency_s, longer), cast]
            if direct:
                # A worker's flows to the others end up to a segment (or a whole share) apart;
                # meanwhile its link is partly idle. A ring sends 2 (P - 1) / P times the bytes.
                whole = ENCODED_SEGMENT_BYTES * self.workers
                per_byte = curve.segments[-1].s_per_byte / (2 * (self.workers - 1))
                parts.append(
                    CostCurve.of_rows([(0, 0.0, per_byte), (whole, whole * per_byte, 0.0)])
                )
            return CostCurve.in_turn(parts)

        if self.workers == 1 or (not gamma and longer == 1 and not direct):
            return self
        return self.with_curves(rounded)

    def faster(self, factor: float) -> Network:
        """Return the network on which every message costs ``factor`` times less."""

        def cheaper(curve: CostCurve) -> CostCurve:
            return curve.rebased(curve.latency_s / factor, 1 / factor)

        gap_s, whole = self.issue_gap_s / factor, self.whole and cheaper(self.whole)
        return msgspec.structs.replace(self.with_curves(cheaper), issue_gap_s=gap_s, whole=whole)

    def with_curves(self, change: Callable[[CostCurve], CostCurve]) -> Network:
        """Return the network with both costs of an all-reduce changed by a function."""
        alone, pipelined = change(self.all_reduce), self.pipelined and change(self.pipelined)
        return msgspec.structs.replace(self, all_reduce=alone, pipelined=pipelined)

    def with_workers(self, workers: int, *, algorithm: str | None = None) -> Network:
        """Return this network's prediction for another worker count; see :meth:`replace`."""
        return self.replace(workers=workers, algorithm=algorithm)

    def replace(
        self,
        *,
        workers: int | None = None,
        bandwidth_bytes_per_s: float | None = None,
        latency_s: float | None = None,
        algorithm: str | None = None,
        density: float | None = None,
        hosts: int | None = None,
        inside: Link | None = None,
        servers: int | None = None,
        stages: tuple[Stage, ...] | None = None,
        jobs: int | None = None,
    ) -> Network:
        """Return this network with some values changed; None keeps a value.

        The cost is rescaled by the ratio of the formulas after and before the change
        (:func:`syncline.plan.exchange.rescaled`). For a network without a link, the link is
        inferred (:attr:`exchange`), and the new name says so. If nothing changes, the network
        itself is returned. Most arguments are fields of the network; of the others:

        - workers are on as many hosts as they need, with at most as many on each as before;
        - the bandwidth and the latency are those of the link, one way: ``1 / beta`` and ``alpha``;
        - a dense algorithm drops the density; a density makes a dense network's algorithm the one
          that training takes, ``gtop-k-butterfly``, if none is given.

        Raises:
            UserError: there is no link and none can be inferred, or the change is impossible.
        """
        asked: dict[str, Any] = {
            "workers": workers,
            "algorithm": algorithm,
            "density": density,
            "hosts": hosts,
            "inside": inside,
            "servers": servers,
            "stages": stages,
        }
        of_link: dict[str, Any] = {
            "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
            "latency_s": latency_s,
        }
        if jobs is not None and jobs != self.jobs:
            others = self.replace(**asked, **of_link)
            return msgspec.structs.replace(
                others, jobs=jobs, name=f"{others.name} shared by {jobs} jobs"
            )
        kept = all(v is None or v == getattr(self, field) for field, v in asked.items())
        if kept and bandwidth_bytes_per_s is None and latency_s is None:
            return self
        before = self.exchange
        link = before.link.replace(**of_link)
        count = self.workers if workers is None else workers
        require_count("network: workers", count, LARGEST_WORKERS)
        if hosts is None and self.hosts is not None:
            hosts = -(-count // before.workers_a_host)
        if density is None and (algorithm is None or algorithm in SPARSE_ALGORITHMS):
            density = self.density
        if algorithm is None:
            dense = self.algorithm not in SPARSE_ALGORITHMS
            algorithm = SPARSE_DEFAULT if density is not None and dense else self.algorithm
        if servers is None and algorithm == "parameter-server":
            servers = self.servers
        changed = msgspec.structs.replace(
            self,
            workers=count,
            link=link,
            algorithm=algorithm,
            density=density,
            hosts=hosts,
            inside=self.inside if inside is None else inside,
            servers=servers,
            colocated=self.colocated and algorithm in SERVER_ALGORITHMS,
            stages=self.stages if stages is None else stages,
            points=(),
            fit_error=None,
            fit_error_max=None,
            known_within=CARRIED_OVER if self.is_measured else self.known_within,
        )
        after = changed.exchange
        if after == before:
            return self
        reference_bytes = self._reference_bytes()
        return msgspec.structs.replace(
            changed.with_curves(lambda curve: rescaled(curve, before, after, reference_bytes)),
            name=f"{self.name} {difference(before, after, inferred=self.link is None)}",
            whole=self._whole_after(before, after),
        )

    def _whole_after(self, before: Exchange, after: Exchange) -> CostCurve | None:
        sparse = before.density is not None
        curve = self.whole if sparse else self.all_reduce
        if after.density is None or curve is None:
            return None
        algorithm, servers = "ring" if sparse else before.algorithm, before.servers
        before, after = (
            each.of_every_element(algorithm, servers=servers) for each in (before, after)
        )
        return rescaled(curve, before, after, self._reference_bytes())

    @property
    def exchange(self) -> Exchange:
        """The exchange whose cost is the curve, with an inferred link if none is known.

        Over that link the formula costs as much as the curve. Source: MG-WFBP, section 6.4.

        Raises:
            UserError: no link can be inferred.
        """
        if self.link is not None:
            return self._exchange_over(self.link)
        if self.workers < 2:
            raise UserError(
                f"network {quoted(self.name)} has no point-to-point measurement to "
                "extrapolate from; measure it again with syncline.probe()"
            )
        unit = Link(alpha_s=1.0, beta_s_per_byte=1.0, gamma_s_per_byte=0.0)
        formula = self._exchange_over(unit).curve()
        latencies, sent = formula.latency_s, formula.segments[-1].s_per_byte
        a_s, b = self.all_reduce.linearised(self._reference_bytes())
        return self._exchange_over(
            Link(alpha_s=a_s / latencies, beta_s_per_byte=b / sent, gamma_s_per_byte=0.0)
        )

    def _exchange_over(self, link: Link) -> Exchange:
        names = set(Exchange.__struct_fields__) - {"link", "speeds"}
        same: dict[str, Any] = {name: getattr(self, name) for name in names}
        speeds = None if self.density is None else self.sparse
        return Exchange(link=link, speeds=speeds, **same)

    def _reference_bytes(self) -> int:
        return max((point.size_bytes for point in self.points), default=0) or REFERENCE_BYTES


def _require_points(points: Sequence[Measurement]) -> None:
    for index, point in enumerate(points):
        where = f"network: points[{index}]"
        if not 0 <= point.size_bytes <= LARGEST_BYTES:
            raise UserError(
                f"{where}: a measured point of {point.size_bytes} bytes is not possible"
            )
        require_time(f"{where}: time_s", point.time_s)


def _ethernet(gigabits: int) -> Network:
    link = Link(alpha_s=ETHERNET_LATENCY_S, beta_s_per_byte=8e-9 / gigabits, gamma_s_per_byte=0.0)
    return Network.of_link(link, workers=16, name=f"{gigabits}gbit")


PRESETS: dict[str, Network] = {
    "10gbe-k80": Network.line(workers=16, a_s=9.72e-4, b_s_per_byte=1.97e-9, name="10gbe-k80"),
    "10gbe-v100": Network.line(workers=16, a_s=9.08e-4, b_s_per_byte=7.4e-10, name="10gbe-v100"),
    "56gbib-v100": Network.line(workers=16, a_s=2.36e-4, b_s_per_byte=4.06e-10, name="56gbib-v100"),
    "1gbit": _ethernet(1),
    "10gbit": _ethernet(10),
    "25gbit": _ethernet(25),
    "100gbit": _ethernet(100),
}
"""Measured all-reduce lines of three 16-GPU clusters (MG-WFBP, Fig. 4), and ideal links: a ring of
16 workers, 20 us per message, and the full nominal bandwidth."""
