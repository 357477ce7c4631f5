"""Makes :class:`Advice` from a profile and a network, and prints it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median_low

from rich.console import Console

from syncline.files.report import terminal, units
from syncline.files.report.markup import Column
from syncline.plan.advice import Advice, Exchange, Part, RankFacts, Remedy, Scale
from syncline.plan.network import Network
from syncline.plan.planners import planned
from syncline.plan.planners.auto import choose
from syncline.plan.planners.ddp import Ddp
from syncline.plan.prediction import Suggestion
from syncline.plan.profile import COMPUTING, WAIT, Profile
from syncline.plan.simulator.predict import predict_iteration_s
from syncline.plan.simulator.whatif import Change, WhatIfSimulator

MODEL_ERROR = 0.09  # standard error of predicted gains: the RMS of those of benchmarks.remedies
BUCKETS_MIB = (1, 2, 5, 10, 25, 50, 100, 200)
RATES = {"10 Gbit/s": 1.25e9, "25 Gbit/s": 3.125e9, "100 Gbit/s": 12.5e9}
LEAST_GAIN = 1.02  # remedies that gain less than this factor are not worth a change
ACCUMULATED = 4
SMALL_SHARE = 0.05  # exposed communication below this share of an iteration is not the limit
EXPECTED_SHARE = 0.5  # a bus bandwidth below this share of the interface's is suspect
RETRANSMITTED = 0.002  # suspect share of TCP segments sent again; below 0.001 in a sound network
SLOWER, SLOWER_LINK = 1.25, 2.0  # a rank this many times slower than the median rank is suspect
FAST_BYTES_PER_S = 1.25e9  # from 10 Gbit/s on, packets of 1,500 bytes cost noticeable CPU time


def advice(profile: Profile, network: Network, ranks: Sequence[RankFacts] = ()) -> Advice:
    """Return what limits a training, and what would shorten its iterations.

    The iteration time is the profile's baseline if it has one, else predicted. Every prediction is
    this time, times the time predicted with the change over the time predicted without it.

    Raises:
        UserError: the network has no link, so it cannot be carried over to other circumstances.
    """
    unchanged_s = predict_iteration_s(profile, network, Ddp().plan(profile, network))
    baseline = profile.baseline
    iteration_s = baseline.iteration_s if baseline else unchanged_s
    parts = _parts(profile, iteration_s)
    noise = baseline.noise_s / iteration_s if baseline else 0.0
    # The simulator may err with the change as much as without it.
    error = math.hypot(MODEL_ERROR, noise, unchanged_s / iteration_s - 1)
    planners = {name: partial(planned, name) for name in ("ddp", "auto")}
    simulator = WhatIfSimulator(profile, network, planners)
    remedies = [
        Remedy(
            name=name,
            iteration_s=seconds / unchanged_s * iteration_s,
            gain=unchanged_s / seconds,
            error=error,
            how=how,
        )
        for name, seconds, how in _remedies(profile, network, simulator)
    ]
    return Advice(
        model=profile.model,
        network=network.name,
        workers=network.workers,
        iteration_s=iteration_s,
        noise_s=baseline.noise_s if baseline else 0.0,
        is_measured=baseline is not None,
        parts=parts,
        limit=_limit(parts, iteration_s),
        exchanges=tuple(_exchanges(network)),
        ranks=tuple(ranks),
        suspects=tuple(_suspects(network, ranks)),
        remedies=tuple(sorted(remedies, key=lambda r: -r.gain)),
        scaling=tuple(_scaling(network, simulator, iteration_s / unchanged_s)),
    )


def _parts(profile: Profile, iteration_s: float) -> tuple[Part, ...]:
    def seconds(*phases: str) -> float:
        own = (o for o in profile.operations if o.name != WAIT)
        return math.fsum(o.duration_s for o in own if o.phase in phases)

    waiting_s = math.fsum(o.duration_s for o in profile.operations if o.name == WAIT)
    known = {
        "computing": seconds(*COMPUTING, "update", "finalize"),
        "data": seconds("data", "copy"),
        "waiting for the slowest rank": waiting_s,
    }
    left_s = max(iteration_s - math.fsum(known.values()), 0.0)
    known["exposed communication"] = left_s
    scale = iteration_s / math.fsum(known.values())  # 1, unless it computes faster than profiled
    return tuple(Part(name=name, seconds=s * scale) for name, s in known.items())


def _limit(parts: Sequence[Part], iteration_s: float) -> str:
    by_share = sorted(((p.seconds / iteration_s, p.name) for p in parts), reverse=True)
    network = next(share for share, name in by_share if name == "exposed communication")
    noted = [f"{name} {units.percent(share)}" for share, name in by_share if share >= SMALL_SHARE]
    if network < SMALL_SHARE:
        return (
            f"not the network: it takes {units.percent(network)} of an iteration; "
            f"{', '.join(noted)}"
        )
    return f"{by_share[0][1]} limits: {', '.join(noted)} of an iteration"


def _remedies(
    profile: Profile, network: Network, simulator: WhatIfSimulator
) -> Iterator[tuple[str, float, str]]:
    """Yield the name of a change, predicted seconds for one iteration's samples, and how to."""
    if network.workers == 1:
        return
    chosen = choose(profile, network)
    best = min(chosen.comparison.predictions, key=lambda p: p.iteration_s)
    yield "overlap", best.iteration_s, "torchrun ... -m syncline.run script.py, or two lines"

    def ddp_s(change: Change) -> float:
        return simulator.plan_at(change, "ddp").prediction.iteration_s

    found: Suggestion | None = chosen.comparison.suggestion
    rounded_s = None if found is None else found.rounded_s
    rounded_s = ddp_s(Change(wire="bfloat16")) if rounded_s is None else rounded_s
    yield "16-bit gradients", rounded_s, "run --compression bf16"
    if found is not None and found.int8_s is not None:
        yield "8-bit gradients", found.int8_s, "run --compression int8"

    def with_buckets_s(mib: int) -> float:
        buckets = Ddp(bucket_bytes=mib << 20, first_bucket_bytes=mib << 20)
        return predict_iteration_s(profile, network, buckets.plan(profile, network))

    bucket_s, mib = min((with_buckets_s(mib), mib) for mib in BUCKETS_MIB)
    yield "bucket size", bucket_s, f"DistributedDataParallel(..., bucket_cap_mb={mib})"
    batch_s = profile.phase_s("data", "copy", *COMPUTING)
    accumulated_s = (ddp_s(Change()) + (ACCUMULATED - 1) * batch_s) / ACCUMULATED
    how = "with model.no_sync(): for all but the last; makes the batch larger"
    yield f"accumulate {ACCUMULATED} batches", accumulated_s, how
    if found is not None:
        how = "run --compression gtopk --density 0.001; lossy"
        yield f"sparse, {found.algorithm}", found.iteration_s, how
    own = None if network.link is None else 1 / network.link.beta_s_per_byte
    for name, rate in RATES.items():
        if own is not None and rate > 1.5 * own:
            yield f"network of {name}", ddp_s(Change(bandwidth_bytes_per_s=rate)), "other hardware"


def _exchanges(network: Network) -> Iterator[Exchange]:
    if network.workers == 1:
        return
    points = [(p.size_bytes, p.time_s) for p in network.points if not p.size_bytes & 1023]
    if not points:
        points = [(4**n << 10, network.all_reduce.seconds(4**n << 10)) for n in range(9)]
    shares = 2 * (network.workers - 1) / network.workers
    for size, time_s in points:
        if time_s > 0 and size & (size - 1) == 0:
            yield Exchange(
                size_bytes=size,
                time_s=time_s,
                algorithm_bytes_per_s=size / time_s,
                bus_bytes_per_s=size / time_s * shares,
            )


def _scaling(network: Network, simulator: WhatIfSimulator, scale: float) -> Iterator[Scale]:
    if network.workers == 1:
        return
    counts = {max(network.workers // 2, 2), *(network.workers * n for n in (1, 2, 4, 8, 16))}
    for workers in sorted(counts):
        point = simulator.point(Change(workers=workers))
        ddp, overlap = point.predictions
        ends_s = overlap.interval_s
        yield Scale(
            workers=workers,
            ddp_s=ddp.iteration_s * scale,
            overlap_s=overlap.iteration_s * scale,
            interval_s=ends_s and (ends_s[0] * scale, ends_s[1] * scale),
        )


def _suspects(network: Network, ranks: Sequence[RankFacts]) -> Iterator[str]:
    """Yield what may be wrong, a sentence each."""
    hosts = {rank.host for rank in ranks}
    faces = [(rank, rank.interface) for rank in ranks if rank.interface is not None]
    for rank, face in faces:
        if face.faster is not None:
            yield (
                f"wrong interface? {rank.host} (rank {rank.rank}) sends through {face.name}, and "
                f"{face.faster} is faster; set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
            )
        if face.name == "lo" and len(hosts) > 1:
            yield f"wrong interface? {rank.host} (rank {rank.rank}) sends through lo"
    speeds = [face.bytes_per_s for _, face in faces if face.bytes_per_s and face.name != "lo"]
    sizes = {face.mtu_bytes for _, face in faces if face.name != "lo"}
    if len(sizes) > 1:
        yield f"the MTU differs between hosts: {', '.join(map(str, sorted(sizes)))} bytes"
    elif sizes and max(sizes) <= 1500 and max(speeds, default=0) >= FAST_BYTES_PER_S:
        yield "the MTU is 1500 bytes; on a link of 10 Gbit/s or more, 9000 saves processor time"
    for rank in ranks:
        if rank.retransmitted > RETRANSMITTED:
            yield (
                f"{rank.host} (rank {rank.rank}) sends {units.percent(rank.retransmitted)} of its "
                "TCP segments twice: the network loses packets"
            )
    timed = [(rank, rank.computing_s) for rank in ranks if rank.computing_s]
    typical_s = median_low([seconds for _, seconds in timed]) if timed else 0.0
    for rank, seconds in timed:
        if seconds > SLOWER * typical_s:
            yield (
                f"slow host? {rank.host} (rank {rank.rank}) computes in "
                f"{units.duration(seconds)}, the median rank in {units.duration(typical_s)}"
            )
    yield from _slow_links(ranks)
    rows = list(_exchanges(network))
    if speeds and rows and len(hosts) > 1:
        most = max(row.bus_bytes_per_s for row in rows)
        if most < EXPECTED_SHARE * min(speeds):
            yield (
                f"the bus bandwidth reaches {units.bandwidth(most)} of an interface of "
                f"{units.bandwidth(min(speeds))}: one TCP stream may not fill it (window: "
                "net.core.rmem_max, net.ipv4.tcp_rmem), or others share the link"
            )


def _slow_links(ranks: Sequence[RankFacts]) -> Iterator[str]:
    """Yield hosts to and from which all is slow, and slow links between other hosts."""
    ring = zip((*ranks[-1:], *ranks), ranks, strict=False)  # each rank receives from the previous
    links = [(one.host, r.host, r.link_s) for one, r in ring if r.link_s and one.host != r.host]
    hosts = dict.fromkeys(host for *ends, _ in links for host in ends)
    best_s = {host: min(seconds for *ends, seconds in links if host in ends) for host in hosts}
    limit_s = SLOWER_LINK * median_low(best_s.values()) if links else 0.0
    usual = f"{units.duration(limit_s / SLOWER_LINK)} on the median host"
    for host, seconds in best_s.items():
        if seconds > limit_s:
            took = units.duration(seconds)
            yield f"slow host? 1 MiB to or from {host} takes at least {took}, {usual}"
    for one, other, seconds in links:
        if seconds > limit_s and best_s[one] <= limit_s and best_s[other] <= limit_s:
            took = units.duration(seconds)
            yield f"slow link? 1 MiB from {one} to {other} takes {took}, {usual}"


def print_advice(console: Console, found: Advice) -> None:
    """Print advice as tables that fit on one screen."""
    terminal.widen(console)
    took = units.with_noise(found.iteration_s, found.noise_s)
    kind = "measured" if found.is_measured else "predicted"
    workers = units.counted(found.workers, "worker")
    console.print(terminal.title(f"{found.model}, {workers}: {took} an iteration ({kind})"))
    columns: list[Column[Part]] = [
        Column("an iteration", lambda part: part.name),
        Column("time", lambda part: units.duration(part.seconds), numeric=True),
        Column("share", lambda p: units.percent(p.seconds / found.iteration_s), numeric=True),
    ]
    console.print(terminal.table(columns, found.parts))
    console.print(terminal.text(found.limit))
    exchanges: list[Column[Exchange]] = [
        Column("all-reduce", lambda row: units.size(row.size_bytes), numeric=True),
        Column("time", lambda row: units.duration(row.time_s), numeric=True),
        Column("algorithm", lambda row: units.bandwidth(row.algorithm_bytes_per_s), numeric=True),
        Column("bus", lambda row: units.bandwidth(row.bus_bytes_per_s), numeric=True),
    ]
    console.print(terminal.below(terminal.table(exchanges, found.exchanges)))
    if found.ranks and (face := found.ranks[0].interface) is not None:
        gives = units.bandwidth(face.bytes_per_s) if face.bytes_per_s else "of unknown speed"
        facts = f"interface {face.name}, {gives}, MTU {face.mtu_bytes} bytes"
        console.print(terminal.text(facts))
    for suspect in found.suspects:
        console.print(terminal.text(f"! {suspect}"))
    worth = [remedy for remedy in found.remedies if remedy.gain >= LEAST_GAIN]
    if worth:
        remedies: list[Column[Remedy]] = [
            Column("what would help", lambda row: row.name),
            Column("iteration", lambda row: units.duration(row.iteration_s), numeric=True),
            Column(
                "times as fast", lambda r: f"{r.gain:.2f} ± {r.gain * r.error:.2f}", numeric=True
            ),
            Column("how", lambda row: row.how),
        ]
        console.print(terminal.below(terminal.table(remedies, worth)))
    else:
        console.print(terminal.below(terminal.text("No remedy is predicted to gain 2 %.")))
    scaling: list[Column[Scale]] = [
        Column("workers", lambda row: str(row.workers), numeric=True),
        Column("DDP", lambda row: units.duration(row.ddp_s), numeric=True),
        Column("with overlap", lambda row: units.duration(row.overlap_s), numeric=True),
        Column("90 % interval", lambda row: units.between(row.interval_s), numeric=True),
    ]
    if found.scaling:
        console.print(terminal.below(terminal.table(scaling, found.scaling)))
