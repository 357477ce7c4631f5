"""dag-model, Fig. 4: speed-ups predicted by the DAG model on both clusters, up to 16 GPUs.

The paper shows predictions beside measurements as bars without numbers, so the measured side cannot
be had here. The prediction is made again from what is printed: Table II (hardware), Table VI and
section V-C.
"""

from __future__ import annotations

import msgspec
from matplotlib.figure import Figure

from reproduce.common import BLUE, ORANGE, Result, figure, planner, run, scaled, without_reading
from reproduce.dag_eq6 import reading, with_reading
from reproduce.inputs import K80_BACKWARD_S, alexnet, shared_traces
from syncline.plan.exchange import Link
from syncline.plan.network import Network
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.strategy import strategy_named

NAME = "dag_fig4"
GPUS = (1, 2, 4, 8, 16)
A_MACHINE = 4
READ_BYTES = {"AlexNet": 0.6 * 1.1e9, "ResNet-50": 32 * 256 * 256 * 3}
"""Of a batch as it is read. AlexNet: what Table VI reads, 1.2 s for two GPUs at 1.1 GB/s; that is
645 KB an image, near the 618 KB of 227 x 227 x 3 floats. ResNet-50: 256 x 256 x 3 bytes an image,
assumed; with floats its reading would not be negligible, as section V-C says it is."""
ALEXNET_AS_BYTES = 1024 * 256 * 256 * 3
"""The same for AlexNet if its images were stored as bytes too, against Table VI."""
INSIDE_ALPHA_S, BETWEEN_ALPHA_S = 10e-6, 30e-6
"""Latencies of a message: assumed; the second is near MG-WFBP's 0.972 ms / 30 messages."""
CLUSTERS = {
    "K80, PCIe, 10 Gbit/s": {"inside": 15e9, "between": 1.25e9, "disk": 1.1e9, "faster": 1.0},
    "V100, NVLink, 100 Gbit/s": {
        "inside": 95e9,
        "between": 1.5 * 96e6 / 0.0797,
        "disk": 367.3e6,
        "faster": 10.0,
    },
}
"""Bytes a second of Table II; of the InfiniBand what a ring of 4 machines uses if it takes 0.0797 s
for ResNet's 96 MB (section V-C). The V100 computes 10 times as fast (section V-C), ResNet-50's
backward pass takes the printed times."""


def profiles() -> dict[str, Profile]:
    """Return the models as one K80 computes them."""
    # Forward of Table VI is 4 times the backward pass, as if cuDNN chose its algorithms in that
    # iteration; half of the backward pass is taken instead.
    table, _ = alexnet()
    backward = table.phase_s("backward")
    factor = 0.5 * backward / table.phase_s("forward")
    found = {"AlexNet": _forward(table, factor)}
    trace = shared_traces("resnet50").get("resnet50")
    if trace is not None:
        found["ResNet-50"] = with_reading(
            scaled(without_reading(trace), K80_BACKWARD_S / trace.phase_s("backward"))
        )
    return found


def _forward(profile: Profile, factor: float) -> Profile:
    return msgspec.structs.replace(
        profile,
        operations=tuple(
            msgspec.structs.replace(o, duration_s=o.duration_s * factor)
            if o.phase == "forward"
            else o
            for o in profile.operations
        ),
    )


def speedups(profile: Profile, read_bytes: float, hardware: dict[str, float]) -> list[Result]:
    """Return the predicted speed-ups of a model whose batch has so many bytes to read."""
    caffe = strategy_named("caffe-mpi")
    inside, between = (
        Link(alpha_s=alpha_s, beta_s_per_byte=1 / hardware[where], gamma_s_per_byte=0.0)
        for alpha_s, where in ((INSIDE_ALPHA_S, "inside"), (BETWEEN_ALPHA_S, "between"))
    )
    batch_s = read_bytes / hardware["disk"]
    rows: list[Result] = []
    for gpus in GPUS:
        if gpus <= A_MACHINE:
            network = Network.of_link(inside, workers=gpus)
        else:
            network = Network.of_link(between, workers=gpus, hosts=gpus // A_MACHINE, inside=inside)
        # Cluster 1 reads over NFS, from one server; cluster 2 from its own disks.
        readers = gpus if hardware["faster"] == 1.0 else min(gpus, A_MACHINE)
        here = reading(profile, batch_s * readers)
        plan = planner("wfbp").plan(here, network)
        iteration_s = predict(here, network, plan, strategy=caffe).prediction.iteration_s
        alone_s = rows[0]["iteration_s"] if rows else iteration_s
        rows.append(
            {
                "gpus": gpus,
                "iteration_s": iteration_s,
                "speedup": gpus * alone_s / iteration_s,
                "reading_s": batch_s * readers,
                "computation_s": here.phase_s("forward", "backward"),
            }
        )
    return rows


def compute() -> Result:
    """Predict the speed-ups, and AlexNet's once more for a smaller form of its images."""
    clusters: Result = {}
    as_bytes: Result = {}
    for cluster, hardware in CLUSTERS.items():
        clusters[cluster] = {}
        for model, k80 in profiles().items():
            factor = 1 / hardware["faster"]
            if model == "ResNet-50" and factor < 1:
                factor = 0.0625 / K80_BACKWARD_S
            here = scaled(k80, factor)
            clusters[cluster][model] = speedups(here, READ_BYTES[model], hardware)
            if model == "AlexNet":
                as_bytes[cluster] = speedups(here, ALEXNET_AS_BYTES, hardware)[-1]["speedup"]
    return {
        "source": "dag-model, Fig. 4; Tables II and VI; section V-C",
        "clusters": clusters,
        "alexnet_as_bytes": as_bytes,
    }


def draw(result: Result) -> Figure:
    """Draw speed-ups over GPUs."""
    made, axes = figure(1, 2, width=8.6, height=3.6)
    for axis, (cluster, models) in zip(axes, result["clusters"].items(), strict=True):
        axis.plot(GPUS, GPUS, ":", color="#999999", label="linear")
        for colour, (model, rows) in zip((ORANGE, BLUE), models.items(), strict=False):
            axis.plot(
                [r["gpus"] for r in rows],
                [r["speedup"] for r in rows],
                "o-",
                color=colour,
                label=model,
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(GPUS, [str(g) for g in GPUS])
        axis.set_yticks(GPUS, [str(g) for g in GPUS])
        axis.set_ylim(0.9, 18)
        axis.set_xlabel("GPUs (4 a machine)")
        axis.set_ylabel("predicted speed-up over one GPU")
        linear = all(rows[-1]["speedup"] > 0.99 * GPUS[-1] for rows in models.values())
        axis.set_title(cluster + (" (the lines coincide)" if linear else ""))
        axis.legend(loc="upper left")
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
