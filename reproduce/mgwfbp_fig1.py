"""MG-WFBP, Fig. 1: naive S-SGD, WFBP and SyncEASGD on one made-up network of four layers."""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.common import Result, figure, lanes, planner, run, span
from reproduce.inputs import chain
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.strategy import strategy_named

NAME = "mgwfbp_fig1"
FORWARD = [1.0, 1.5, 1.5, 1.0]
BACKWARD = [2.0, 3.0, 3.0, 2.0]
SIZE = [0.3, 0.5, 0.8, 1.5]
LATENCY = 2.0
"""Milliseconds, made up; of layers 1 to 4. A message takes the latency and its size."""
WAYS = {
    "naive": ("wfbp", "s-sgd", "Eq. 3", "(a) naive S-SGD: layer by layer, after the backward pass"),
    "wfbp": ("wfbp", "loop", "Eq. 8", "(b) WFBP: layer by layer, beside it"),
    "single": ("single", "loop", "Eq. 9", "(c) SyncEASGD: all in one message"),
    "merge": ("merge", "loop", "", "merged as well as can be (merge, ours)"),
}


def equation_ms(way: str) -> float | None:
    """Return the iteration time in closed form."""
    computing = sum(FORWARD) + sum(BACKWARD)
    if way == "naive":
        return computing + sum(SIZE) + 4 * LATENCY
    if way == "single":
        return computing + sum(SIZE) + LATENCY
    if way == "merge":
        return None
    ready = end = sum(FORWARD)
    for backward, size in zip(reversed(BACKWARD), reversed(SIZE), strict=True):
        ready += backward
        end = max(end, ready) + LATENCY + size
    return end


def _label(plan: Plan, index: int) -> str:
    tensors = plan.message_tensors()[index]
    return "+".join(plan.tensors[t].name for t in tensors)


def compute() -> Result:
    """Simulate the three ways, and the optimum of merging."""
    profile = chain(
        "Fig. 1",
        forward_s=[t * 1e-3 for t in FORWARD],
        backward_s=[t * 1e-3 for t in BACKWARD],
        size_bytes=[round(t * 1e6) for t in SIZE],
    )
    network = Network.line(workers=4, a_s=LATENCY * 1e-3, b_s_per_byte=1e-9)
    ways = {}
    for way, (name, strategy, _, _) in WAYS.items():
        plan = planner(name).plan(profile, network)
        forecast = predict(profile, network, plan, strategy=strategy_named(strategy))
        spans = [
            [s.kind, s.label, s.start_ns / 1e6, s.stop_ns / 1e6]
            for s in forecast.timeline.spans
            if s.stop_ns > s.start_ns and s.kind != "wait"
        ]
        index = 0
        for row in spans:
            if row[0] == "message":
                row[1] = _label(plan, index)
                index += 1
        ways[way] = {
            "iteration_ms": forecast.prediction.iteration_s * 1e3,
            "equation_ms": equation_ms(way),
            "spans": spans,
        }
    return {"source": "MG-WFBP, Fig. 1, Eq. 3, 8 and 9; durations made up", "ways": ways}


def draw(result: Result) -> Figure:
    """Draw one iteration each way."""
    made, axes = figure(4, 1, width=8.0, height=5.6, sharex=True)
    for axis, (way, (_, _, equation, title)) in zip(axes, WAYS.items(), strict=True):
        found = result["ways"][way]
        for kind, label, start, stop in found["spans"]:
            span(axis, 1 if kind == "message" else 0, start, stop, kind, label)
        lanes(axis, ["compute", "network"])
        known = f" ({equation})" if equation else ""
        axis.set_title(f"{title}: {found['iteration_ms']:.1f} ms{known}")
    axes[-1].set_xlabel("time, ms (durations are made up); W: the gradient of a layer")
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
