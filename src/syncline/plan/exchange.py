"""``Exchange``: the algorithm and the workers of a gradient exchange, and its cost."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Literal

import msgspec

from syncline.errors import UserError, require_known
from syncline.plan.collective_costs import (
    ALL_REDUCE_ALGORITHMS,
    SERVER_ALGORITHMS,
    all_reduce_line,
    doubling_rounds,
    pipeline_curve,
    server_line,
)
from syncline.plan.cost import CostCurve, lower_envelope
from syncline.plan.document import Value
from syncline.plan.quantities import require_count, require_finite
from syncline.plan.sparse_costs import (
    INDEX_BYTES,
    SPARSE_ALGORITHMS,
    SparseSpeeds,
    coded_index_bytes,
    computing_line,
    rounds_over_hosts,
    sent_share_of,
    sparse_line,
)


class Link(Value, frozen=True, kw_only=True):
    """Point-to-point cost between two workers: ``alpha + beta M`` (MG-WFBP, section 2.5)."""

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float
    """Time to add one byte of two arrays in memory, for arrays larger than the caches."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            require_finite(f"link: {field}", getattr(self, field))

    def replace(
        self, *, bandwidth_bytes_per_s: float | None = None, latency_s: float | None = None
    ) -> Link:
        """Return the link with another one-way bandwidth or latency; UserError if impossible."""
        rate = bandwidth_bytes_per_s
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise UserError(f"a bandwidth must be finite and above 0 bytes/s, found {rate}")
        return Link(
            alpha_s=self.alpha_s if latency_s is None else latency_s,
            beta_s_per_byte=self.beta_s_per_byte if rate is None else 1 / rate,
            gamma_s_per_byte=self.gamma_s_per_byte,
        )


class Stage(Value, frozen=True, kw_only=True):
    """A resource other than the links, whose users share its capacity equally.

    ``"host"``: work of a host on the whole message of each of its workers, such as copies over
    PCIe, while the links wait. ``"switch"``: what carries the bytes of all links together, such as
    a switch or an uplink; it works while the links do, and the slower one counts.
    """

    at: Literal["host", "switch"]
    bytes_per_s: float

    def __post_init__(self) -> None:
        require_finite(f"stage: the capacity of a {self.at}", self.bytes_per_s, above_0=True)


FLAT = ("flat-ring", "flat-tree")
"""All-reduces that pipeline chunks over all workers, whatever their hosts. Hosts, links and staging
work at the same time, so the slowest one counts."""
TUNED = {"tuned": ("ring", "halving-doubling", "recursive-doubling"), "nccl": FLAT}
"""Algorithms among which MPI and NCCL choose by message size; the cheapest one counts."""
DENSE_ALGORITHMS = (*ALL_REDUCE_ALGORITHMS, "linear-pipeline", *FLAT)
"""All-reduces of whole messages between equal workers."""


def all_reduce_curve(
    algorithm: str, workers: int, link: Link, *, switch_bytes_per_s: float | None = None
) -> CostCurve:
    """Return the cost of an all-reduce over a link, by one of :data:`DENSE_ALGORITHMS`."""
    require_known("all-reduce algorithm", algorithm, DENSE_ALGORITHMS)
    algorithm = "ring" if algorithm == "flat-ring" else algorithm
    if algorithm == "flat-tree":
        curve = _flat_tree(workers, workers, link, link)
    elif algorithm == "linear-pipeline":
        curve = pipeline_curve(workers, *msgspec.structs.astuple(link))
    else:
        curve = all_reduce_line(algorithm, workers=workers, **msgspec.structs.asdict(link))
    if switch_bytes_per_s is None:
        return curve
    doubling = algorithm == "recursive-doubling"
    # How often the message passes the switch, over all workers.
    sent = workers * doubling_rounds(workers) if doubling else 2 * (workers - 1)
    return curve.at_least(curve.latency_s, sent / switch_bytes_per_s)


def _flat_ring(hosts: int, workers: int, inside: Link, between: Link) -> CostCurve:
    within, across = (all_reduce_curve("ring", workers, link) for link in (inside, between))
    if hosts == 1:
        return within
    rates = [curve.segments[0].s_per_byte for curve in (within, across)]
    # The critical path through the hops of all chunks: a chunk queues for the slowest link at every
    # hop, at none, or at those after the last host but one.
    local, hops = -(-workers // hosts), 2 * (workers - 1)
    out = -(-hops * hosts // workers)
    last = hops - (out - 1) * local - 1  # hops after the last host but one, on the longest way
    slowest = between if rates[1] >= rates[0] else inside
    curve = CostCurve.line(slowest.alpha_s, max(rates))
    for waits in (0, min(max(last, 0), hops - out)):
        inner = hops - out - waits
        curve = curve.at_least(
            out * between.alpha_s + inner * inside.alpha_s,
            (out * rates[1] + inner * rates[0] + waits * max(rates)) / hops,
        )
    return curve


def _flat_tree(hosts: int, workers: int, inside: Link, between: Link) -> CostCurve:
    """Return the cost of double binary trees over hosts, whose workers form a chain.

    The first chunk goes all the way up and down; meanwhile each port passes the bytes of one way.
    After that both ways share the ports, and hide the hops next to the roots.
    """
    alpha_s, beta = between.alpha_s, between.beta_s_per_byte
    local, rounds = -(-workers // hosts), 2 * doubling_rounds(hosts)
    latency_s = 2 * (local - 1) * inside.alpha_s + rounds * alpha_s
    # How often the bytes pass a port; a chain of two uses both ways at once.
    within = min(local - 1, 2) * inside.beta_s_per_byte
    one_way, both_ways = {1: (0.0, 0.0), 2: (0.5, 1.0), 3: (0.5, 1.5)}.get(hosts, (1.0, 2.0))
    adds = max((local > 1) * inside.gamma_s_per_byte, (hosts > 1) * between.gamma_s_per_byte)
    curve = CostCurve.line(latency_s, max(within, one_way * beta, adds))
    return curve.at_least(latency_s - min(rounds / 2, 2) * alpha_s, both_ways * beta)


EXCHANGES = (*DENSE_ALGORITHMS, *TUNED, *SERVER_ALGORITHMS, *SPARSE_ALGORITHMS)


class Exchange(Value, frozen=True, kw_only=True):
    """An exchange of gradients whose cost a formula gives; ``Network`` describes the fields."""

    algorithm: str
    workers: int
    link: Link
    density: float | None = None
    hosts: int | None = None
    inside: Link | None = None
    speeds: SparseSpeeds | None = None
    """Set if the cost of a sparse algorithm includes selecting and merging."""
    servers: int | None = None
    colocated: bool = False
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        require_known("all-reduce algorithm", self.algorithm, EXCHANGES)
        sparse = self.algorithm in SPARSE_ALGORITHMS
        if sparse and self.density is None:
            raise UserError(f"{self.algorithm} needs a density, such as 0.001")
        if not sparse and self.density is not None:
            raise UserError(
                f"a density was given, but {self.algorithm} sends every element; "
                f"choose one of {', '.join(SPARSE_ALGORITHMS)}"
            )
        if not sparse and self.speeds is not None:
            raise UserError(f"speeds of sparse exchange were given, but {self.algorithm} is dense")
        if self.servers is not None:
            if self.algorithm != "parameter-server":
                raise UserError(
                    f"servers were given, but {self.algorithm} does not count them; leave them "
                    "out, or choose parameter-server"
                )
            require_count("parameter servers", self.servers)
        if self.colocated and self.algorithm not in SERVER_ALGORITHMS:
            raise UserError(f"{self.algorithm} has no servers that could be on the workers' hosts")
        if self.hosts is None:
            return
        if not 1 <= self.hosts <= self.workers:
            raise UserError(
                f"{self.workers} workers cannot be on {self.hosts} hosts; each host needs at least "
                "one"
            )
        if self.inside is None:
            raise UserError("workers on hosts need a link inside a host; give its costs too")

    def curve(self) -> CostCurve:
        """Return the cost as a function of the bytes of the dense message."""
        if self.algorithm in SERVER_ALGORITHMS:
            return CostCurve.in_turn(self.push_and_pull())
        return CostCurve.in_turn((self.links_curve(), self.computing_curve()))

    def links_curve(self) -> CostCurve:
        """Return the part of the cost that links and switches take."""
        if self.algorithm in SERVER_ALGORITHMS:
            switches = tuple(stage for stage in self.stages if stage.at == "switch")
            return msgspec.structs.replace(self, stages=switches).curve()
        if self.algorithm in SPARSE_ALGORITHMS:
            assert self.density is not None
            if self.workers_a_host > 1:
                return self._sparse_over_hosts(sent_share_of(self.density, self.index_bytes))
            return sparse_line(
                self.algorithm,
                workers=self.workers,
                alpha_s=self.link.alpha_s,
                beta_s_per_byte=self.link.beta_s_per_byte,
                density=self.density,
                index_bytes=self.index_bytes,
                switch_bytes_per_s=self._switch_bytes_per_s,
            )
        if self.algorithm in TUNED:
            choices = (msgspec.structs.replace(self, algorithm=a) for a in TUNED[self.algorithm])
            return lower_envelope([each.links_curve() for each in choices])
        curve = self._all_reduce_curve()
        if self.algorithm in FLAT:  # staging is one more stage of the pipeline
            curve = curve.at_least(curve.latency_s, self._staging_s_per_byte)
        return curve

    def _all_reduce_curve(self) -> CostCurve:
        """Return the cost of an all-reduce between workers that are spread evenly over the hosts.

        Algorithms of :data:`FLAT` (NCCL's ring and tree, without its protocols) are one pipeline
        over all workers. All others run in three stages: a reduce-scatter inside each host, an
        all-reduce between hosts, and an all-gather inside. All bytes between hosts pass the switch.
        The page "Algorithms and costs" has the formulas.
        """
        hosts, workers, switch = self._ends, self.workers, self._switch_bytes_per_s
        between, inside = self.link, self.inside or _FREE
        if self.algorithm in FLAT and workers > hosts:
            flat = _flat_ring if self.algorithm == "flat-ring" else _flat_tree
            curve = flat(hosts, workers, inside, between)
            if switch is None or hosts == 1:
                return curve
            return curve.at_least(curve.latency_s, 2 * hosts / switch)
        local = all_reduce_curve("ring", self.workers_a_host, inside)
        # Where the fewest share the work.
        gamma = between.gamma_s_per_byte / max(workers // hosts, 1)
        shared = msgspec.structs.replace(between, gamma_s_per_byte=gamma)
        across = all_reduce_curve(self.algorithm, hosts, shared, switch_bytes_per_s=switch)
        return CostCurve.in_turn((local, across))

    def _sparse_over_hosts(self, sent_share: float) -> CostCurve:
        link, inside, switch = self.link, self.inside, self._switch_bytes_per_s
        assert inside is not None
        rounds = []
        for each in rounds_over_hosts(self.algorithm, self.workers, self._ends):
            within_s = each.inside * sent_share * inside.beta_s_per_byte
            curve = CostCurve.line(inside.alpha_s if each.inside else 0.0, within_s)
            if each.across:
                curve = curve.at_least(
                    link.alpha_s, each.across * sent_share * link.beta_s_per_byte
                )
                if switch is not None:
                    curve = curve.at_least(link.alpha_s, each.everywhere * sent_share / switch)
            rounds.append(curve)
        return CostCurve.in_turn(rounds)

    def push_and_pull(self) -> tuple[CostCurve, CostCurve]:
        """Return the costs of sending gradients to parameter servers and of fetching the sums."""
        require_known("exchange through servers", self.algorithm, SERVER_ALGORITHMS)
        link, inside = self.link, self.inside or _FREE
        return self._one_way(link, inside), self._one_way(_no_gamma(link), _no_gamma(inside))

    def _one_way(self, link: Link, inside: Link) -> CostCurve:
        local, ends = self.workers_a_host, self._ends
        sharded = self.algorithm == "sharded-parameter-server"
        servers = ends if sharded else self.servers or 1
        own = msgspec.structs.astuple(link)
        across = server_line(ends, *own, servers=servers, colocated=self.colocated)
        if self._switch_bytes_per_s is not None and ends > 1:
            across = across.at_least(across.latency_s, ends / self._switch_bytes_per_s)
        rate = inside.beta_s_per_byte + inside.gamma_s_per_byte
        within = CostCurve.line((local - 1) * inside.alpha_s, rate * (local - 1) / local)
        return CostCurve.in_turn((across, CostCurve.line(0.0, self._host_s_per_byte / 2), within))

    @property
    def _ends(self) -> int:
        """How many hosts, or workers, the links connect."""
        return self.workers if self.hosts is None else self.hosts

    @property
    def workers_a_host(self) -> int:
        """Workers on the fullest host."""
        return -(-self.workers // self._ends)

    @property
    def _switch_bytes_per_s(self) -> float | None:
        """Capacity for the bytes of all workers; None: no limit."""
        return min((s.bytes_per_s for s in self.stages if s.at == "switch"), default=None)

    @property
    def _host_s_per_byte(self) -> float:
        """Seconds per byte that the stages of a host take while links wait."""
        flat = self.algorithm in (*FLAT, "nccl")
        return 0.0 if flat else self._staging_s_per_byte

    @property
    def _staging_s_per_byte(self) -> float:
        """Seconds per byte of the stages of a host, which its workers share."""
        if self.workers == 1:
            return 0.0
        users = self.workers_a_host
        return math.fsum(users / s.bytes_per_s for s in self.stages if s.at == "host")

    def transmitting(self) -> Exchange:
        """Return the exchange whose :meth:`links_curve` is how long links and switches are busy."""
        link = msgspec.structs.replace(_no_gamma(self.link), alpha_s=0.0)
        inside = None if self.inside is None else _FREE
        stages = tuple(stage for stage in self.stages if stage.at == "switch")
        return msgspec.structs.replace(self, link=link, inside=inside, stages=stages)

    def of_every_element(self, algorithm: str, *, servers: int | None = None) -> Exchange:
        """Return the exchange of every element between the same workers, by a dense algorithm."""
        return msgspec.structs.replace(
            self,
            algorithm=algorithm,
            density=None,
            speeds=None,
            servers=servers,
            colocated=self.colocated and algorithm in SERVER_ALGORITHMS,
        )

    @property
    def index_bytes(self) -> float:
        """Bytes of an index on the wire, for a sparse algorithm."""
        assert self.density is not None
        return INDEX_BYTES if self.speeds is None else coded_index_bytes(self.density)

    def computing_curve(self, *, element_bytes: float = 4) -> CostCurve:
        """Return the cost of the hosts' stages and, where known, of selecting and merging."""
        staged = CostCurve.line(0.0, self._host_s_per_byte)
        if self.speeds is None:
            return staged
        assert self.density is not None
        selected = computing_line(
            self.algorithm,
            workers=self.workers,
            density=self.density,
            speeds=self.speeds,
            element_bytes=element_bytes,
        )
        return CostCurve.in_turn((selected, staged))


def _no_gamma(link: Link) -> Link:
    return msgspec.structs.replace(link, gamma_s_per_byte=0.0)


_FREE = Link(alpha_s=0.0, beta_s_per_byte=0.0, gamma_s_per_byte=0.0)


def rescaled(
    curve: CostCurve, before: Exchange, after: Exchange, reference_bytes: int
) -> CostCurve:
    """Return a measured curve of the exchange ``before`` for the exchange ``after``.

    Latency and rate are multiplied by the ratio of the formulas after and before; the page
    "Algorithms and costs" has the details. For algorithms of :data:`FLAT` and :data:`TUNED`, each
    size has its own ratio. The cost of hosts' stages and of selecting and merging was not measured;
    it is added unscaled. For the ratios, a curve that is not straight counts as the line through
    its cost at 0 and ``reference_bytes``.
    """
    if before == after:
        return curve
    if before.workers > 1 and _same(curve, before.curve()):
        return after.curve()
    scaled = _link_rescaled(curve.less(before.computing_curve()), before, after, reference_bytes)
    return CostCurve.in_turn((scaled, after.computing_curve()))


def _link_rescaled(
    curve: CostCurve, before: Exchange, after: Exchange, reference_bytes: int
) -> CostCurve:
    old, new = (each.links_curve() for each in (before, after))
    if old == new:
        return curve
    old_a_s, old_b = old.linearised(reference_bytes)
    if (old_b == 0 and before.workers == 1) or _same(curve, old):
        return new  # a single worker before: there is nothing to scale
    if not {before.algorithm, after.algorithm}.isdisjoint((*FLAT, *TUNED)):
        return _times_ratio(curve, old, new, reference_bytes)
    # A link inferred from a flat curve takes no time per byte, before or after.
    slower = new.segments[0].s_per_byte / old_b if old_b else 1.0
    a_s, b = curve.linearised(reference_bytes)
    new_a_s = new.latency_s
    scales = a_s > 0 and old_a_s > 0
    latency_s = a_s * (new_a_s / old_a_s) if scales else max(a_s + new_a_s - old_a_s, 0.0)
    if len(new.segments) > 1 or after.density != before.density:
        return new.rebased(latency_s, b / old_b if old_b else 1.0)
    return curve.rebased(latency_s, slower)


SIZES_A_DOUBLING = 4  # sizes per doubling of the bytes at which the ratio of two curves is taken


def _times_ratio(curve: CostCurve, old: CostCurve, new: CostCurve, up_to_bytes: int) -> CostCurve:
    """Return ``curve(M) new(M) / old(M)``, as straight lines between many sizes; never falling."""
    starts = {s.start_bytes for each in (curve, old, new) for s in each.segments}
    doublings = up_to_bytes.bit_length() + 1
    grid = (round(2 ** (k / SIZES_A_DOUBLING)) for k in range(doublings * SIZES_A_DOUBLING))
    sizes = sorted({0, *grid, *starts, *(start - 1 for start in starts if start)})

    def scaled(of: Callable[[CostCurve], float]) -> float:
        return of(curve) * (of(new) / of(old) if of(old) else 1.0)

    costs = [scaled(operator.methodcaller("seconds", size)) for size in sizes]
    costs = list(itertools.accumulate(costs, max))
    slopes = [
        (after - cost) / (stop - start)
        for (start, stop), (cost, after) in zip(
            itertools.pairwise(sizes), itertools.pairwise(costs), strict=True
        )
    ]
    end = scaled(lambda c: c.segments[-1].s_per_byte)
    return CostCurve.of_rows(zip(sizes, costs, [*slopes, end], strict=True))


def _same(one: CostCurve, other: CostCurve) -> bool:
    """Return whether two curves differ by rounding only."""
    if len(one.segments) != len(other.segments):
        return False
    return all(
        math.isclose(x, y, rel_tol=1e-9)
        for row, other_row in zip(one.rows(), other.rows(), strict=True)
        for x, y in zip(row, other_row, strict=True)
    )


def difference(before: Exchange, after: Exchange, *, inferred: bool) -> str:
    """Return what changed, in a few words, for the name of a network."""
    details = [after.algorithm]
    if after.density is not None:
        details.append(f"density {after.density:g}")
    if after.hosts is not None:
        details.append(f"{after.hosts} hosts")
    if after.servers is not None:
        details.append(f"{after.servers} servers")
    if after.link.beta_s_per_byte != before.link.beta_s_per_byte:
        details.append(f"{8e-9 / after.link.beta_s_per_byte:.3g} Gbit/s")
    if after.link.alpha_s != before.link.alpha_s:
        details.append(f"{after.link.alpha_s * 1e6:.3g} us")
    if inferred:
        details.append(f"link inferred by {before.algorithm}")
    return f"at {after.workers} workers ({', '.join(details)})"
