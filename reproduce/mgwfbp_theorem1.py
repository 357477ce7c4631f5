"""MG-WFBP, Theorem 1 and Algorithm 1: the published rule is not optimal.

A counterexample of four tensors, how often random networks are another, and what it costs on
traces. The optimum is that of ``merge``, which tests hold against exhaustive search.
"""

from __future__ import annotations

import random

from matplotlib.figure import Figure

from reproduce.common import (
    BLUE,
    COLOURS,
    Result,
    figure,
    iteration,
    lanes,
    planner,
    run,
    span,
    without_reading,
)
from reproduce.inputs import CLUSTER_1, chain, own_traces, resnet50_k80, shared_traces
from syncline.plan.network import PRESETS, Network
from syncline.plan.simulator.predict import predict

NAME = "mgwfbp_theorem1"
READY_MS = [1.0, 1.9, 2.8, 3.7]
SIZE_BYTES = [800_000, 100_000, 100_000, 100_000]
LATENCY_S, SLOPE = 1e-3, 2e-9
"""Every gap is below the latency, so the rule merges all; in ready order."""
INSTANCES = 300
LAYERS = range(2, 10)
WORSE = 1e-6
"""Relative; below that two plans count as equal."""


def counterexample() -> Result:
    """Simulate the four tensors."""
    backward = [b - a for a, b in zip([0.0, *READY_MS], READY_MS, strict=False)]
    profile = chain(
        "four tensors",
        forward_s=[0.0] * 4,
        backward_s=[t * 1e-3 for t in reversed(backward)],
        size_bytes=SIZE_BYTES[::-1],
    )
    network = Network.line(workers=16, a_s=LATENCY_S, b_s_per_byte=SLOPE)
    found = {}
    for name in ("wfbp", "mgwfbp", "merge"):
        plan = planner(name).plan(profile, network)
        forecast = predict(profile, network, plan)
        labels = ["+".join(plan.tensors[t].name for t in ts) for ts in plan.message_tensors()]
        found[name] = {
            "end_ms": forecast.prediction.iteration_s * 1e3,
            "messages": [
                [labels.pop(0), s.start_ns / 1e6, s.stop_ns / 1e6]
                for s in forecast.timeline.spans
                if s.kind == "message"
            ],
        }
    return found


def random_instances() -> list[Result]:
    """Return how often and by how much the rule loses, by the number of layers."""
    rows = []
    for layers in LAYERS:
        generator = random.Random(layers)
        losses = []
        for _ in range(INSTANCES):
            network = Network.line(
                workers=16, a_s=generator.uniform(0.1, 3) * 1e-3, b_s_per_byte=1e-9
            )
            profile = chain(
                "random",
                forward_s=[0.0] * layers,
                backward_s=[generator.expovariate(1) * 1e-3 for _ in range(layers)],
                size_bytes=[round(generator.expovariate(1) * 1e6) + 2 for _ in range(layers)],
            )
            rule, best = (iteration(profile, network, n)[0] for n in ("mgwfbp", "merge"))
            losses.append(rule / best - 1)
        rows.append(
            {
                "layers": layers,
                "instances": INSTANCES,
                "beaten": sum(loss > WORSE for loss in losses) / INSTANCES,
                "mean_loss": sum(losses) / INSTANCES,
                "largest_loss": max(losses),
            }
        )
    return rows


def on_traces() -> list[Result]:
    """Return what the rule loses on traces, on the three clusters and over worker counts."""
    profiles = {n: without_reading(p) for n, p in (shared_traces() | own_traces()).items()}
    resnet = resnet50_k80()
    if resnet is not None:
        profiles["resnet50, K80"] = resnet
    networks = [PRESETS[n] for n in ("10gbe-k80", "10gbe-v100", "56gbib-v100")]
    base = CLUSTER_1
    networks += [base.with_workers(n) for n in (64, 128, 256)]
    rows = []
    for name, profile in profiles.items():
        for network in networks:
            rule, best = (iteration(profile, network, n)[0] for n in ("mgwfbp", "merge"))
            rows.append(
                {
                    "trace": name,
                    "network": network.name if network.name in PRESETS else "10gbe-k80, ring",
                    "workers": network.workers,
                    "loss": rule / best - 1,
                }
            )
    return sorted(rows, key=lambda row: -float(str(row["loss"])))


def compute() -> Result:
    """Find all three."""
    return {
        "source": "MG-WFBP, Theorem 1, Lemma 1 and Algorithm 1",
        "latency_s": LATENCY_S,
        "s_per_byte": SLOPE,
        "ready_ms": READY_MS,
        "size_bytes": SIZE_BYTES,
        "counterexample": counterexample(),
        "random": random_instances(),
        "traces": on_traces(),
    }


def draw(result: Result) -> Figure:
    """Draw the counterexample, and the losses on random networks."""
    made, (timeline, losses) = figure(
        1, 2, width=9.4, height=3.3, gridspec_kw={"width_ratios": [1.6, 1]}
    )
    start = 0.0
    for index, ready in enumerate(result["ready_ms"]):
        span(timeline, 0, start, ready, "backward", f"B{4 - index}")
        start = ready
    for row, name in enumerate(("wfbp", "mgwfbp", "merge"), start=1):
        found = result["counterexample"][name]
        for label, begin, stop in found["messages"]:
            span(timeline, row, begin, stop, "message", label)
        timeline.text(found["end_ms"] + 0.08, row, f"{found['end_ms']:.1f} ms", va="center")
    lanes(timeline, ["backward", "WFBP", "MG-WFBP,\nAlgorithm 1", "merge (ours),\nthe optimum"])
    timeline.set_xlim(0, 8.2)
    timeline.set_xlabel("time, ms; latency 1 ms a message, 2 ns a byte")
    timeline.set_title("Gaps of 0.9 ms, each below the latency: all is merged")
    layers = [row["layers"] for row in result["random"]]
    for field, colour, label in (
        ("beaten", BLUE, "networks on which the rule is beaten"),
        ("largest_loss", COLOURS["overlap"], "largest loss of time"),
        ("mean_loss", COLOURS["merge"], "mean loss of time"),
    ):
        losses.plot(
            layers, [100 * row[field] for row in result["random"]], "o-", color=colour, label=label
        )
    losses.set_xlabel("layers")
    losses.set_ylabel("%")
    losses.set_ylim(0, 100)
    losses.set_title(f"Random networks, {INSTANCES} of each size")
    losses.legend(loc="upper left")
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
