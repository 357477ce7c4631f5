"""MG-WFBP, Fig. 2: the four cases of two gradients, sent apart and merged.

For two layers the rule of Lemma 1 (merge if the next gradient is ready less than the latency
after this one could be sent) is exact; random instances check that.
"""

from __future__ import annotations

import random

from matplotlib.figure import Figure

from reproduce.common import Result, figure, iteration, lanes, planner, run, span
from reproduce.inputs import chain
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.simulator.predict import predict

NAME = "mgwfbp_fig2"
LATENCY_MS = 1.0
CASES = {
    "1": ("communication of layer 2 is hidden", [4.0, 1.0], [0.8, 1.2], 0.0, False),
    "2": ("merging saves more than the wait", [0.5, 1.0], [0.8, 1.2], 0.0, True),
    "3": ("the wait costs more than merging saves", [1.6, 1.0], [0.8, 1.8], 0.0, False),
    "4": ("the network is busy anyway", [1.0, 1.0], [0.8, 1.2], 3.2, True),
}
"""Name, backward times of layers 1 and 2 and sizes, all in ms; what was sent before (layer 3), and
whether to merge. Made up so that Eq. 15, 16 to 17, 18 to 19 and 20 hold."""
INSTANCES = 3000


def _network(latency_ms: float) -> Network:
    return Network.line(workers=16, a_s=latency_ms * 1e-3, b_s_per_byte=1e-9)


def compute() -> Result:
    """Simulate both ways in each case, and the rule on random pairs."""
    network = _network(LATENCY_MS)
    cases = {}
    for case, (title, backward, sizes, earlier, merge) in CASES.items():
        # What occupies the network before layer 2's gradient is the message of a third layer.
        times, bytes_ms = list(backward), list(sizes)
        if earlier:
            times.append(0.5)
            bytes_ms.append(earlier - LATENCY_MS if earlier > LATENCY_MS else 0.4)
        profile = chain(
            f"case {case}",
            forward_s=[0.0] * len(times),
            backward_s=[t * 1e-3 for t in times],
            size_bytes=[round(t * 1e6) for t in bytes_ms],
        )
        ways = {}
        first = [0] if earlier else []
        offset = len(first)
        for way, last in (
            ("apart", [*first, offset, offset + 1]),
            ("merged", [*first, offset + 1]),
        ):
            plan = Plan.merging(way, profile, network.workers, last)
            forecast = predict(profile, network, plan)
            names = [
                "+".join(plan.tensors[t].name for t in tensors)
                for tensors in plan.message_tensors()
            ]
            rows = []
            for found in forecast.timeline.spans:
                if found.stop_ns == found.start_ns or found.kind == "wait":
                    continue
                label = names.pop(0) if found.kind == "message" else found.label
                rows.append([found.kind, label, found.start_ns / 1e6, found.stop_ns / 1e6])
            ways[way] = {"end_ms": forecast.prediction.iteration_s * 1e3, "spans": rows}
        chosen = planner("mgwfbp").plan(profile, network)
        cases[case] = {
            "title": title,
            "should_merge": merge,
            "rule_merges": len(chosen.messages) == len(times) - 1,
            **ways,
        }
    return {
        "source": "MG-WFBP, Fig. 2 and Eq. 15 to 21; durations made up",
        "latency_ms": LATENCY_MS,
        "cases": cases,
        "pairs": _pairs(),
    }


def _pairs() -> Result:
    """Return how often the rule is the better of the two ways for two random layers."""
    generator = random.Random(1)
    lost = 0
    for _ in range(INSTANCES):
        network = _network(generator.uniform(0.05, 3))
        profile = chain(
            "two layers",
            forward_s=[0.0, 0.0],
            backward_s=[generator.uniform(0.05, 5) * 1e-3 for _ in range(2)],
            size_bytes=[round(generator.uniform(0.01, 3) * 1e6) for _ in range(2)],
        )
        rule_s, _ = iteration(profile, network, "mgwfbp")
        best_s = min(iteration(profile, network, name)[0] for name in ("wfbp", "single"))
        lost += rule_s > best_s + 2e-9
    return {"instances": INSTANCES, "rule_not_best": lost}


def draw(result: Result) -> Figure:
    """Draw each case both ways."""
    made, axes = figure(2, 2, width=9.2, height=4.9, sharex=True)
    for axis, (case, found) in zip(axes, result["cases"].items(), strict=True):
        for kind, label, start, stop in found["apart"]["spans"]:
            span(axis, 1 if kind == "message" else 0, start, stop, kind, label)
        for kind, label, start, stop in found["merged"]["spans"]:
            if kind == "message":
                span(axis, 2, start, stop, kind, label)
        lanes(axis, ["backward", "apart", "merged"])
        for row, way in ((1, "apart"), (2, "merged")):
            end = found[way]["end_ms"]
            best = end <= min(found["apart"]["end_ms"], found["merged"]["end_ms"])
            axis.text(
                end + 0.1,
                row,
                f"{end:.1f} ms",
                va="center",
                fontsize=8.5,
                fontweight="bold" if best else "normal",
            )
        verdict = "merge" if found["rule_merges"] else "do not merge"
        axis.set_title(f"Case {case}: {found['title']}; {verdict}")
    for axis in axes[2:]:
        axis.set_xlabel(f"time, ms (made up); latency {result['latency_ms']:g} ms a message")
    axes[0].set_xlim(0, 9.8)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
