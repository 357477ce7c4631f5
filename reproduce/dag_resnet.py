"""dag-model, section V-C: ResNet is computation-bound on K80s and communication-bound on V100s.

The paper prints the backward pass and the communication of ResNet-50 with Caffe-MPI: 0.243 s and
0.23 s on K80s with 10 Gbit/s, 0.0625 s and 0.0797 s on V100s with 100 Gbit/s. It does not say how
the communication divides into latencies and bytes, so both extremes are simulated and all between.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.architectures import Layer, trained
from reproduce.common import (
    COLOURS,
    LABELS,
    Result,
    figure,
    iteration,
    run,
    scaled,
    without_reading,
)
from reproduce.inputs import shared_traces
from syncline.plan.network import Network
from syncline.plan.profile import Profile

NAME = "dag_resnet"
CLUSTERS = {
    "K80, 10 Gbit/s": {"backward_s": 0.243, "communication_s": 0.23, "bits_per_s": 10e9},
    "V100, 100 Gbit/s": {"backward_s": 0.0625, "communication_s": 0.0797, "bits_per_s": 100e9},
}
WORKERS = 16
SHARES = [i / 20 for i in range(21)]
PLANNERS = ("wfbp", "mgwfbp", "overlap")
PARAMETERS = 24e6
"""Of ResNet-50 in dag-model, Table IV."""
TENSORS, TENSOR_BYTES = 161, 635_000
"""Of ResNet-50, for the even stand-in where its trace is absent."""


def even() -> Profile:
    """Return a network of 161 equal layers of ResNet-50's bytes, half as long forward as back."""
    layers = [Layer((TENSOR_BYTES // 4,), macs=1)] * TENSORS
    return trained(f"{TENSORS} equal layers", layers, backward_s=float(TENSORS))


def compute() -> Result:
    """Simulate both clusters for every division of the communication."""
    trace = shared_traces("resnet50").get("resnet50") or even()
    clusters = {}
    for name, cluster in CLUSTERS.items():
        profile = scaled(without_reading(trace), cluster["backward_s"] / trace.phase_s("backward"))
        rows = []
        for share in SHARES:
            network = Network.line(
                workers=WORKERS,
                a_s=share * cluster["communication_s"] / len(profile.gradients),
                b_s_per_byte=(1 - share) * cluster["communication_s"] / profile.gradient_bytes,
            )
            row: Result = {"latency_share": share}
            for planner in PLANNERS:
                seconds, _ = iteration(profile, network, planner)
                row[planner] = {
                    "exposed_s": seconds - profile.computation_s,
                    "efficiency": profile.computation_s / seconds,
                }
            rows.append(row)
        clusters[name] = {
            **cluster,
            "computation_s": profile.computation_s,
            "rows": rows,
            "network_use": PARAMETERS * 4 * 8 / cluster["communication_s"] / cluster["bits_per_s"],
        }
    return {
        "source": "dag-model, section V-C",
        "trace": trace.model,
        "tensors": len(trace.gradients),
        "clusters": clusters,
    }


def draw(result: Result) -> Figure:
    """Draw the scaling efficiency over how much of the communication is latency."""
    made, axes = figure(1, 2, width=8.6, height=3.5, sharey=True)
    for axis, (name, cluster) in zip(axes, result["clusters"].items(), strict=True):
        share = [100 * row["latency_share"] for row in cluster["rows"]]
        for planner in PLANNERS:
            axis.plot(
                share,
                [100 * row[planner]["efficiency"] for row in cluster["rows"]],
                color=COLOURS[planner],
                label=LABELS[planner],
            )
        axis.set_ylim(50, 103)
        axis.set_xlabel("part of the communication that is latency, %")
        hidden = min(row["wfbp"]["efficiency"] for row in cluster["rows"]) > 0.99
        axis.set_title(
            f"{name}: backward {cluster['backward_s'] * 1e3:g} ms,\n"
            f"communication {cluster['communication_s'] * 1e3:g} ms layer by layer"
            + (" (lines coincide)" if hidden else "")
        )
    axes[0].set_ylabel("scaling efficiency, %")
    axes[0].legend(loc="lower left")
    made.suptitle(
        "ResNet-50, as divided between latencies and bytes", x=0.01, ha="left", fontsize=10
    )
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
