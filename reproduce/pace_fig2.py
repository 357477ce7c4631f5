"""PACE, Fig. 2: first in first out, by priority, and preemptive, on the DAG of Fig. 1.

The figure is drawn without numbers. Durations for which preemption saves exactly the 25 % that the
paper states are constructed, and then messages are given a latency, which PACE leaves out.
"""

from __future__ import annotations

import itertools

from matplotlib.figure import Figure

from reproduce.common import COLOURS, LABELS, Result, figure, iteration, lanes, planner, run, span
from reproduce.inputs import chain
from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners.slices import plan_of
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict

NAME = "pace_fig2"
BACKWARD = {"dReLU": 1.0, "dAdd": 1.0, "dMul": 1.0}
FORWARD = {"Mul": 2.0, "Add": 2.0, "ReLU": 2.0}
MESSAGES = {"AR1": 4.0, "AR2": 3.0, "AR3": 2.0}
"""Milliseconds. AR1 follows dReLU and is needed by ReLU, AR2 is of Add, AR3 of Mul.

With backward operations of 1 and forward ones of f, the DAG takes 1 + C + 3 f first in first out,
where C is all communication, and 1 + C + f preemptively, as long as AR3 is short. So 25 % is saved
for C = 5 f - 1: f = 2 and C = 9.
"""
LATENCIES = [i / 20 for i in range(31)]
STATED = 0.25


def example() -> Profile:
    """Return the DAG as one iteration: backward, then the next forward pass."""
    return chain(
        "PACE, Fig. 1",
        forward_s=[t * 1e-3 for t in FORWARD.values()],
        backward_s=[t * 1e-3 for t in reversed(BACKWARD.values())],
        size_bytes=[round(t * 1e6) for t in reversed(MESSAGES.values())],
    )


def fifo(profile: Profile, network: Network) -> Plan:
    """Return the plan of a queue: whole tensors in ready order, each waited for on need."""
    stops = [0]
    for gradient in profile.gradients:
        stops.append(stops[-1] + gradient.elements)
    messages = [Message(start=a, stop=b) for a, b in itertools.pairwise(stops)]
    return plan_of("fifo", profile, network.workers, messages)


def compute() -> Result:
    """Simulate the three orders, without and with latencies."""
    profile = example()
    network = Network.line(workers=3, a_s=0.0, b_s_per_byte=1e-9)
    plans = {
        "fifo": fifo(profile, network),
        "tictac": planner("tictac").plan(profile, network),
        "pace": planner("pace").plan(profile, network),
    }
    names = list(MESSAGES)
    orders: Result = {}
    for name, plan in plans.items():
        forecast = predict(profile, network, plan)
        clock = 0.0
        rows = []
        tensors = plan.message_tensors()
        ready = {0: BACKWARD["dReLU"], 1: 2.0, 2: 3.0}
        arrivals: dict[int, float] = {}
        for members, size in zip(tensors, plan.message_bytes(), strict=True):
            start = max(clock, *(ready[t] for t in members))
            clock = start + size * 1e-6
            rows.append(["message", "+".join(names[t] for t in members), start, clock])
            arrivals |= dict.fromkeys(members, clock)
        now = 0.0
        for operation, duration in BACKWARD.items():
            rows.append(["backward", operation, now, now + duration])
            now += duration
        for tensor, (operation, duration) in zip((2, 1, 0), FORWARD.items(), strict=True):
            now = max(now, arrivals[tensor])
            rows.append(["forward", operation, now, now + duration])
            now += duration
        orders[name] = {
            "dag_ms": forecast.prediction.iteration_s * 1e3,
            "by_hand_ms": now,
            "messages": len(plan.messages),
            "spans": rows,
        }
    reductions = []
    for latency in LATENCIES:
        costly = Network.line(workers=3, a_s=latency * 1e-3, b_s_per_byte=1e-9)
        first = predict(profile, costly, fifo(profile, costly)).prediction.iteration_s
        row: Result = {"latency_ms": latency}
        for name in ("tictac", "pace", "overlap"):
            row[name] = 1 - iteration(profile, costly, name)[0] / first
        reductions.append(row)
    return {
        "source": "PACE, Fig. 1 and 2 and section II-C; durations constructed",
        "orders": orders,
        "reduction": {n: 1 - orders[n]["dag_ms"] / orders["fifo"]["dag_ms"] for n in orders},
        "stated": STATED,
        "with_latency": reductions,
    }


def draw(result: Result) -> Figure:
    """Draw the three orders, and what latencies do to the gain."""
    made, axes = figure(
        3, 2, width=10.2, height=4.6, gridspec_kw={"width_ratios": [1.7, 1]}, sharex="col"
    )
    titles = {
        "fifo": "First in, first out",
        "tictac": "By priority (TicTac)",
        "pace": "Preemptive (PACE)",
    }
    for row, (name, title) in enumerate(titles.items()):
        axis = axes[2 * row]
        found = result["orders"][name]
        for kind, label, start, stop in found["spans"]:
            span(axis, 1 if kind == "message" else 0, start, stop, kind, label)
        lanes(axis, ["compute", "network"])
        saved = result["reduction"][name]
        gain = f", {saved:.1%} less" if saved else ""
        axis.set_title(f"{title}: {found['dag_ms']:.0f} ms{gain}")
        axis.set_xlim(0, 16.5)
    axes[4].set_xlabel("time, ms (durations constructed)")
    grid = axes[1].get_gridspec()
    assert grid is not None
    for axis in axes[1::2]:
        axis.remove()
    curve = made.add_subplot(grid[:, 1])
    for name in ("tictac", "pace", "overlap"):
        curve.plot(
            [r["latency_ms"] for r in result["with_latency"]],
            [100 * r[name] for r in result["with_latency"]],
            color=COLOURS[name],
            label=LABELS[name],
        )
    curve.axhline(0, color="#777777", linewidth=0.8)
    curve.set_xlabel("latency of every message, ms")
    curve.set_ylabel("DAG time saved against first in, first out, %")
    curve.set_title("With a latency for every message")
    curve.legend()
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
