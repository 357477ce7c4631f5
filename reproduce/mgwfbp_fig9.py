"""MG-WFBP, Fig. 9: computation and exposed communication on the two V100 clusters of 16 GPUs.

The paper measured. Its models are simulated here with times by multiplications, and beside them
other V100 traces (Espresso's and PipeDream's), on the lines of Fig. 4(b) and (c) and in single
precision. What is assumed of their times: ``reproduce.inputs``.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.architectures import by_layer
from reproduce.common import COLOURS, Result, figure, iteration, run, without_reading
from reproduce.inputs import V100_BACKWARD_S, described, shared_traces
from syncline.plan.network import PRESETS

NAME = "mgwfbp_fig9"
CLUSTERS = {
    "10gbe-v100": "Cluster 2: 16 V100s, 10 Gbit/s Ethernet",
    "56gbib-v100": "Cluster 3: 16 V100s, 56 Gbit/s InfiniBand",
}
PLANNERS = {"wfbp": "WF.", "single": "S.E.", "mgwfbp": "M.W.", "merge": "mg.", "overlap": "ov."}
NETWORKS = ("ResNet-152", "DenseNet-161", "DenseNet-201", "Inception-v4")
"""Of the paper."""
TRACES = ("resnet50", "vgg16", "bert", "gpt2", "LSTM", "densenet121")


def compute() -> Result:
    """Simulate every network on both clusters."""
    profiles = {name: described(name, V100_BACKWARD_S) for name in NETWORKS}
    profiles |= {f"{name}, by layer": by_layer(profile) for name, profile in profiles.items()}
    profiles |= shared_traces(*TRACES)
    clusters: Result = {}
    for cluster in CLUSTERS:
        clusters[cluster] = {}
        for name, trace in profiles.items():
            profile = without_reading(trace)
            rows = {p: iteration(profile, PRESETS[cluster], p)[0] for p in PLANNERS}
            clusters[cluster][name] = {
                "computation_s": profile.computation_s,
                "iteration_s": rows,
                "gain_over_wfbp": rows["wfbp"] / rows["mgwfbp"] - 1,
                "gain_over_single": rows["single"] / rows["mgwfbp"] - 1,
                "gain_over_best": min(rows["wfbp"], rows["single"]) / rows["mgwfbp"] - 1,
                "rule_over_merge": rows["mgwfbp"] / rows["merge"] - 1,
            }
    return {
        "source": "MG-WFBP, Fig. 9 and section 6.3.2",
        "networks": [n for n in profiles if n.partition(",")[0] in NETWORKS],
        "clusters": clusters,
    }


def draw(result: Result) -> Figure:
    """Draw stacked bars, five for each network."""
    made, axes = figure(2, 1, width=12.4, height=5.8)
    for axis, (cluster, title) in zip(axes, CLUSTERS.items(), strict=True):
        found = {n: x for n, x in result["clusters"][cluster].items() if "by layer" not in n}
        ticks, labels = [], []
        for group, (name, row) in enumerate(found.items()):
            computation = 1e3 * row["computation_s"]
            for place, (planner, short) in enumerate(PLANNERS.items()):
                x = group * 6 + place
                total = 1e3 * row["iteration_s"][planner]
                axis.bar(x, computation, width=0.86, color="#c6dbef")
                axis.bar(
                    x, total - computation, width=0.86, bottom=computation, color=COLOURS[planner]
                )
                axis.text(x, total, f"{total:.0f}", ha="center", va="bottom", fontsize=5.5)
                ticks.append(x)
                labels.append(short)
            axis.text(
                group * 6 + 2,
                -0.17,
                name,
                ha="center",
                va="top",
                transform=axis.get_xaxis_transform(),
            )
        axis.set_xticks(ticks, labels, fontsize=5)
        axis.tick_params(axis="x", length=0)
        axis.grid(axis="x", visible=False)
        axis.set_ylabel("iteration, ms")
        axis.set_title(f"{title}: pale = computation, colour = exposed communication")
    made.supxlabel(
        "WF. = WFBP, S.E. = SyncEASGD, M.W. = MG-WFBP (Algorithm 1), mg. = merge (ours), "
        "ov. = overlap (ours)",
        fontsize=8.5,
    )
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
