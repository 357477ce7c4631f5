"""What PACE's Fig. 8 and 9 are made of: speed under its baselines, over workers and bandwidth.

The testbed had a GTX 1080Ti a worker; the traces are of a V100, and the batch sizes that they were
taken with are not stated. So their computation is stretched: by as much as makes the communication
at the bandwidth of PACE's largest printed gain (VGG16: 32 % at 12 Gbit/s, ResNet50: 32 % at
6 Gbit/s, 12 workers) take about as long as computing, as it must for such a gain.
"""

from __future__ import annotations

from matplotlib.axes import Axes

from reproduce.common import COLOURS, LABELS, Result, iteration, scaled, without_reading
from reproduce.inputs import alexnet, own_traces, shared_traces
from syncline.model.link import Link
from syncline.model.network import Network
from syncline.model.profile import Profile

__all__ = ["PLANNERS", "TITLES", "WORKERS", "draw_speed", "gains", "link", "models", "speeds"]

PLANNERS = ("wfbp", "horovod", "tictac", "p3", "pace", "merge", "overlap")
SHOWN = {
    "wfbp": ("-", "o"),
    "horovod": ("--", "s"),
    "tictac": ("-", "^"),
    "p3": (":", ""),
    "pace": ("-", "D"),
    "overlap": ("--", ""),
}
ALPHA_S = 30e-6
"""Startup of a message between two workers: 0.908 ms / 30, MG-WFBP's Fig. 4(b) for 10 Gbit/s."""
WORKERS = 12
TITLES = {"vgg16": "VGG16", "resnet50": "ResNet50"}
LARGEST_GAIN = {"vgg16": 12, "resnet50": 6}
"""Gbit/s of PACE's largest gains over Horovod (section VI-D)."""


def link(gigabits: float) -> Link:
    """Return the link between two workers at a bandwidth in Gbit/s."""
    return Link(alpha_s=ALPHA_S, beta_s_per_byte=8e-9 / gigabits, gamma_s_per_byte=0.0)


def models() -> dict[str, Profile]:
    """Return the models, stretched to a slower GPU; our own where others' are absent."""
    found = {}
    traces = shared_traces("vgg16", "resnet50") or own_traces()
    for name, trace in (traces or {"AlexNet (Table VI)": alexnet()[0]}).items():
        profile = without_reading(trace)
        network = Network.of_link(link(LARGEST_GAIN.get(name, 10)), workers=WORKERS)
        communication_s = network.all_reduce.seconds(profile.gradient_bytes)
        found[name] = scaled(profile, communication_s / profile.computation_s)
    return found


def speeds(profile: Profile, network: Network) -> Result:
    """Return iterations a second under every planner, the startups of their messages counted."""
    found: Result = {}
    for name in PLANNERS:
        seconds, plan = iteration(profile, network, name)
        found[name] = {"iterations_per_s": 1 / seconds, "messages": len(plan.messages)}
    return found


def gains(row: Result) -> Result:
    """Return how much faster PACE is than each of its baselines, as a fraction."""
    own = row["pace"]["iterations_per_s"]
    return {name: own / row[name]["iterations_per_s"] - 1 for name in ("wfbp", "horovod", "tictac")}


def draw_speed(axis: Axes, rows: list[Result], key: str, *, per_worker: bool = False) -> None:
    """Draw the speed of every planner over the field ``key`` of the rows."""
    for name, (style, marker) in SHOWN.items():
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
