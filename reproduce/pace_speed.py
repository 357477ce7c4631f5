"""What PACE's Fig. 8 and 9 are made of: speed under its baselines, over workers and bandwidth.

The testbed had two workers a host, each with a GTX 1080Ti. The traces are of a V100, and the batch
sizes that they were taken with are not stated; of Transformer and Seq2Seq there are none, so their
times go by multiplications. So computation is stretched: by as much as makes the communication at
the bandwidth of PACE's largest printed gain (VGG16: 32 % at 12 Gbit/s, ResNet50: 32 % at 6 Gbit/s,
Transformer: 27 % at 14 Gbit/s, 12 workers) take about as long as computing, as it must for such a
gain. None is printed for Seq2Seq; 10 Gbit/s are taken, the least of the "10-15 Gbps" of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from matplotlib.axes import Axes

from reproduce.architectures import NETWORKS, trained
from reproduce.common import (
    COLOURS,
    LABELS,
    Result,
    planner,
    scaled,
    without_reading,
)
from reproduce.inputs import shared_traces
from syncline.plan.collective_costs import doubling_rounds
from syncline.plan.exchange import Link
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.horovod import FIRST_THRESHOLD_BYTES, Horovod
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s

__all__ = [
    "COMPARED",
    "LATENCIES_S",
    "PLANNERS",
    "TITLES",
    "USUAL",
    "WORKERS",
    "draw_speed",
    "gains",
    "models",
    "network",
    "plan",
    "speeds",
]

COMPARED = ("wfbp", "horovod", "tictac", "pace")
PLANNERS = (*COMPARED, "p3", "overlap")
SHOWN = {
    "wfbp": ("-", "o"),
    "horovod": ("--", "s"),
    "tictac": ("-", "^"),
    "p3": (":", ""),
    "pace": ("-", "D"),
    "overlap": ("--", ""),
}
USUAL = "30 us"
LATENCIES_S = {USUAL: 30e-6, "5 us": 5e-6}
"""Of a message between two hosts, which PACE does not print: 0.908 ms / 30, of MG-WFBP's Fig. 4(b)
for 10 Gbit/s, and what RDMA takes, which the testbed's cards have."""
A_HOST = 2
"""Workers, which share the host's card. Source: PACE, section VI-B."""
INSIDE = Link(alpha_s=5e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=0.0)
"""Between two workers of a host: PCI Express 3.0, about 10 GB/s."""
HOROVOD = Horovod(cycle_s=5e-3, threshold_bytes=FIRST_THRESHOLD_BYTES)
"""Its defaults when PACE was measured."""
WORKERS = 12
TITLES = {
    "vgg16": "VGG16",
    "resnet50": "ResNet50",
    "Transformer": "Transformer",
    "Seq2Seq": "Seq2Seq",
}
LARGEST_GAIN = {"vgg16": 12, "resnet50": 6, "Transformer": 14, "Seq2Seq": 10}
"""Gbit/s of PACE's largest gains over Horovod (section VI-D)."""


def network(gigabits: float, workers: int, latency_s: float) -> Network:
    """Return hosts of two workers with cards of a bandwidth in Gbit/s.

    An all-reduce reduces and scatters inside the hosts, goes round a ring between them, and gathers
    inside. One ring through all workers, as NCCL's, would send a tenth more with 12 of them.
    """
    link = Link(alpha_s=latency_s, beta_s_per_byte=8e-9 / gigabits, gamma_s_per_byte=0.0)
    return Network.of_link(link, workers=workers, hosts=workers // A_HOST, inside=INSIDE)


def models() -> dict[str, Profile]:
    """Return the models, stretched to a slower GPU; those whose traces are absent are left out."""
    found = {}
    described = {name: trained(name, NETWORKS[name], 1.0) for name in ("Transformer", "Seq2Seq")}
    for name, trace in (shared_traces("vgg16", "resnet50") | described).items():
        profile = without_reading(trace)
        largest = network(LARGEST_GAIN[name], WORKERS, LATENCIES_S[USUAL])
        communication_s = largest.all_reduce.seconds(profile.gradient_bytes)
        found[name] = scaled(profile, communication_s / profile.computation_s)
    return found


def negotiation_s(on: Network) -> float:
    """Return how long Horovod's workers take to agree which tensors are ready on all.

    Rank 0 gathers how much each has to say and what, the one by a tree, the other worker by worker,
    and broadcasts by trees how long the answer is and the answer: small messages, a latency each.
    Source: ``RunLoopOnce`` of Horovod before version 0.19 (MPI_Gather, MPI_Gatherv, twice
    MPI_Bcast), and Open MPI's algorithms for short messages. Later versions cache most of it.
    """
    assert on.link is not None
    return (3 * doubling_rounds(on.workers) + on.workers - 1) * on.link.alpha_s


def plan(name: str, profile: Profile, on: Network) -> Plan:
    """Return the plan of a planner; Horovod's messages wait for their negotiation."""
    if name != HOROVOD.NAME:
        return planner(name).plan(profile, on)
    fused = HOROVOD.plan(profile, on)
    late_s = negotiation_s(on)
    return msgspec.structs.replace(
        fused,
        messages=tuple(
            msgspec.structs.replace(m, delay_s=m.delay_s + late_s) for m in fused.messages
        ),
    )


def speeds(profile: Profile, on: Network, names: Sequence[str] = PLANNERS) -> Result:
    """Return iterations a second under planners, the latencies of their messages counted."""
    found: Result = {}
    for name in names:
        planned = plan(name, profile, on)
        seconds = predict_iteration_s(profile, on, planned)
        found[name] = {"iterations_per_s": 1 / seconds, "messages": len(planned.messages)}
    return found


def gains(row: Result) -> Result:
    """Return how much faster PACE is than each of its baselines, as a fraction."""
    own = row["pace"]["iterations_per_s"]
    return {n: own / row[n]["iterations_per_s"] - 1 for n in COMPARED if n != "pace"}


def draw_speed(axis: Axes, rows: list[Result], key: str, *, per_worker: bool = False) -> None:
    """Draw the speed of every planner over the field ``key`` of the rows."""
    for name, (style, marker) in SHOWN.items():
        if name not in rows[0]["planners"]:
            continue
        axis.plot(
            [row[key] for row in rows],
            [
                row["planners"][name]["iterations_per_s"] * (row[key] if per_worker else 1)
                for row in rows
            ],
            style,
            marker=marker,
            color=COLOURS[name],
            label=LABELS[name],
        )
    axis.set_ylim(bottom=0)
