"""dag-model, section VI: layer-wise traces of our own, and two workers predicted from one.

Computing is that of the trace of one worker. A message takes what a curve says that is fitted to
the messages of the two other networks, so nothing of the measured iteration is used. Gradients were
exchanged between the backward pass and the update, so the strategy is naive S-SGD (Eq. 2). The form
has no update; an iteration here is reading, both passes and the messages.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.common import BLUE, FOLDER, ORANGE, Result, figure, planner, run
from syncline.files.traces.layer_table import read_layer_table
from syncline.plan.network import Network
from syncline.plan.simulator.predict import predict_iteration_s
from syncline.plan.simulator.strategy import strategy_named

NAME = "dag_traces"
TRACES = FOLDER / "traces" / "dag"
NETWORKS = {"alexnet": "AlexNet", "googlenet": "GoogLeNet", "resnet50": "ResNet-50"}
KINDS = ("predicted", "measured")


def compute() -> Result:
    """Return means over the iterations of each network, predicted and measured."""
    one = {name: read_layer_table(TRACES / f"{name}-1worker.txt.gz") for name in NETWORKS}
    two = {name: read_layer_table(TRACES / f"{name}-2workers.txt.gz") for name in NETWORKS}
    found: Result = {}
    for name in NETWORKS:
        points = [p for other in NETWORKS if other != name for p in two[other].points]
        network = Network.from_points(
            [p.size_bytes for p in points], [p.time_s for p in points], workers=2
        )
        alone = one[name].known_profile()
        plan = planner("wfbp").plan(alone, network)
        predicted_s = predict_iteration_s(alone, network, plan, strategy=strategy_named("s-sgd"))
        sent_s = sum(p.time_s * p.repetitions for p in two[name].points)
        computing_s = [
            trace.known_profile().phase_s("data", "forward", "backward")
            for trace in (one[name], two[name])
        ]
        measured_s = computing_s[1] + sent_s
        found[name] = {
            "iterations": [one[name].steps, two[name].steps],
            "messages": len(plan.messages),
            "gradient_bytes": alone.gradient_bytes,
            "computing_s": dict(zip(KINDS, computing_s, strict=True)),
            "messages_s": dict(zip(KINDS, (predicted_s - computing_s[0], sent_s), strict=True)),
            "error": predicted_s / measured_s - 1,
        }
    return {"source": "reproduce/traces/dag, made with `syncline profile`", "networks": found}


def draw(result: Result) -> Figure:
    """Draw predicted beside measured iterations."""
    made, (axis,) = figure(1, 1, width=7.0, height=2.8)
    rows = [(name, kind) for name in NETWORKS for kind in KINDS]
    left = [0.0] * len(rows)
    for key, label, colour in (
        ("computing_s", "reading and computing", BLUE),
        ("messages_s", "messages", ORANGE),
    ):
        widths = [result["networks"][name][key][kind] for name, kind in rows]
        axis.barh(range(len(rows)), widths, left=left, color=colour, label=label)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(rows)), [f"{NETWORKS[name]}, {kind}" for name, kind in rows])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("iteration of two workers at 1 Gbit/s without overlap, s")
    axis.legend(loc="center right")
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
