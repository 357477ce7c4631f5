"""Figures 10 and 11 of MG-WFBP: from 4 to 2,048 workers.

Source: MG-WFBP, section 6.4: a = 0.972 ms and b = 1.97 ns a byte at 16 workers (Fig. 4(a)) are
taken to the link's alpha and beta by the ring's row of Table 2, and from there to other worker
counts and algorithms by the rows of that table.
"""

from __future__ import annotations

import itertools

from matplotlib.figure import Figure

from reproduce.architectures import by_layer
from reproduce.common import COLOURS, LABELS, Result, figure, iteration, without_reading
from reproduce.inputs import (
    CLUSTER_1,
    K80_BACKWARD_S,
    described,
    own_traces,
    resnet50_k80,
    shared_traces,
)
from syncline.plan.exchange import Link
from syncline.plan.network import Network
from syncline.plan.profile import Profile

__all__ = [
    "PLANNERS",
    "WORKERS",
    "crossing",
    "draw_scaling",
    "k80_models",
    "link",
    "models",
    "sweep",
]

WORKERS = tuple(1 << k for k in range(2, 12))
PLANNERS = ("wfbp", "single", "mgwfbp", "merge", "overlap")
DASHES = {"mgwfbp": "-", "merge": "--", "overlap": ":"}


def k80_models() -> dict[str, Profile]:
    """Return the paper's two models, tensor by tensor and layer by layer.

    By layer the tensors of a layer, such as its weight and bias, are one message. The paper counts
    161 tensors of ResNet-50 and writes of layers, of which 107 have parameters.
    """
    found = {"GoogleNet (K80)": described("GoogleNet", K80_BACKWARD_S)}
    resnet = resnet50_k80()
    if resnet is not None:
        found = {"ResNet-50 (K80)": resnet, **found}
    return found | {f"{name}, by layer": by_layer(profile) for name, profile in found.items()}


def models() -> dict[str, Profile]:
    """Return the models that are simulated: without reading, as in the paper.

    ResNet-50 is there with times by multiplications, too: what that assumption does to a network
    whose times are known.
    """
    found = k80_models()
    found["ResNet-50 (K80), times by multiplications"] = described("ResNet-50", K80_BACKWARD_S)
    if shared := shared_traces("densenet121"):
        found["DenseNet-121 (PipeDream)"] = without_reading(shared["densenet121"])
    for name, profile in own_traces().items():
        found[f"{name} (CPU, ours)"] = without_reading(profile)
    return found


def link() -> Link:
    """Return the link of cluster 1, with gamma as part of beta."""
    return CLUSTER_1.exchange.link


def sweep(profile: Profile, algorithm: str, workers: tuple[int, ...]) -> list[Result]:
    """Return the simulated iteration of every planner at every worker count."""
    rows = []
    for count in workers:
        network = Network.of_link(link(), workers=count, algorithm=algorithm)
        row: Result = {"workers": count}
        for name in PLANNERS:
            seconds, plan = iteration(profile, network, name)
            row[name] = {
                "speedup": count * profile.computation_s / seconds,
                "efficiency": profile.computation_s / seconds,
                "messages": len(plan.messages),
            }
        rows.append(row)
    return rows


def crossing(rows: list[Result]) -> list[int] | None:
    """Return the worker counts between which SyncEASGD overtakes WFBP, or None."""
    for before, after in itertools.pairwise(rows):
        if before["wfbp"]["speedup"] >= before["single"]["speedup"] and (
            after["wfbp"]["speedup"] < after["single"]["speedup"]
        ):
            return [before["workers"], after["workers"]]
    return None


def draw_scaling(panels: dict[str, list[Result]], note: str) -> Figure:
    """Draw the scaling efficiency and the number of messages over workers.

    Args:
        panels: rows of :func:`sweep`, by title.
        note: what the network is.
    """
    count = len(panels)
    made, axes = figure(
        2,
        count,
        width=min(max(4.1 * count, 6.4), 12.6),
        height=5.6,
        sharex="col",
        gridspec_kw={"height_ratios": [1.8, 1]},
    )
    for column, (title, rows) in enumerate(panels.items()):
        efficiency, messages = axes[column], axes[count + column]
        workers = [row["workers"] for row in rows]
        for name in PLANNERS:
            style = DASHES.get(name, "-")
            width = 2.4 if name in ("merge", "overlap") else 1.8
            efficiency.plot(
                workers,
                [100 * row[name]["efficiency"] for row in rows],
                style,
                color=COLOURS[name],
                label=LABELS[name],
                linewidth=width,
            )
            if name in ("mgwfbp", "merge", "overlap"):
                messages.plot(
                    workers,
                    [row[name]["messages"] for row in rows],
                    style + "o",
                    color=COLOURS[name],
                    linewidth=width,
                )
        found = crossing(rows)
        if found:
            efficiency.axvspan(found[0], found[1], color="#eeeeee", zorder=0)
        efficiency.set_title(title)
        efficiency.set_ylim(0, 104)
        messages.set_xscale("log", base=2)
        messages.set_xticks(workers, [str(w) for w in workers], rotation=45)
        messages.set_yscale("log")
        messages.set_ylim(0.8, 180)
        messages.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        messages.minorticks_off()
        messages.set_xlabel("workers")
    axes[0].set_ylabel("scaling efficiency, %\n(speed-up / workers)")
    axes[count].set_ylabel("messages")
    handles, names = axes[0].get_legend_handles_labels()
    made.legend(handles, names, loc="outside lower center", ncols=3)
    made.suptitle(note, x=0.01, ha="left", fontsize=9.5)
    return made
