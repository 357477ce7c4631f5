"""dag-model, Fig. 1: the DAG of S-SGD, and what each framework makes of it (Eq. 2 to 5).

The figure's tasks have no durations; those below are made up. The DAG is drawn as published, built
task by task for four GPUs, and beside it the simulator runs its own under each strategy.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reproduce.common import ORANGE, YELLOW, Result, figure, lanes, run, span
from reproduce.inputs import chain
from syncline.plan.network import Network
from syncline.plan.planners import planner_named
from syncline.plan.simulator.dag import Scenario
from syncline.plan.simulator.graph import TaskGraph
from syncline.plan.simulator.steady import steady_state
from syncline.plan.simulator.strategy import strategy_named

NAME = "dag_fig1"
GPUS = 4
SHOWN = 3
MS = 1e-3
IO, H2D, UPDATE = 4.0, 2.0, 1.0
FORWARD = [2.0, 3.0, 2.0]
BACKWARD = [4.0, 6.0, 4.0]
MESSAGE = [3.0, 4.0, 5.0]
"""Milliseconds; lists are of layers 1 to 3."""
STRATEGIES = {
    "s-sgd": "naive S-SGD (Eq. 2): nothing overlaps",
    "cntk": "CNTK: only reading overlaps",
    "mxnet": "MXNet, TensorFlow: reading and messages overlap",
    "caffe-mpi": "Caffe-MPI (Eq. 5): copying overlaps too",
}
LANES = {"disk": "disk", "copy": "PCIe copy", "device": "GPU", "channel": "network"}


def equation_ms(strategy: str) -> float:
    """Return the iteration time of Eq. 2 to 5, with the update, which Eq. 3 to 5 leave out."""
    computing = sum(FORWARD) + sum(BACKWARD)
    if strategy == "s-sgd":
        return IO + H2D + computing + sum(MESSAGE) + UPDATE
    exposed = sum(MESSAGE)
    if strategy != "cntk":  # Eq. 7 of MG-WFBP, layer by layer
        ready = end = sum(FORWARD)
        for backward, message in zip(reversed(BACKWARD), reversed(MESSAGE), strict=True):
            ready += backward
            end = max(end, ready) + message
        exposed = end - computing
    if strategy == "caffe-mpi":
        return max(IO + H2D, computing + exposed + UPDATE)
    return max(IO, H2D + computing + exposed + UPDATE)


def figure_1_period_ms(iterations: int = 6) -> tuple[float, int]:
    """Build Fig. 1 task by task for four GPUs under Caffe-MPI; return its period and its tasks."""
    graph = TaskGraph()
    disks = [graph.add_lane() for _ in range(GPUS)]
    gpus = [graph.add_lane() for _ in range(GPUS)]
    network = graph.add_lane()
    updating = graph.add_lane(capacity=None, in_order=False)

    def add(lane: int, ms: float, after: list[int]) -> int:
        task = graph.add_tasks(lane, round(ms * 1e6))
        graph.add_edges(after, task)
        return task

    updates: list[int] = []
    for _ in range(iterations):
        used = updates[-2:-1]  # two buffers on the device, as the simulator has it
        reads = [add(disks[g], IO, []) for g in range(GPUS)]
        state = [add(disks[g], H2D, [reads[g], *used]) for g in range(GPUS)]
        for layer in range(3):
            state = [add(gpus[g], FORWARD[layer], [state[g], *updates[-1:]]) for g in range(GPUS)]
        messages: list[int] = []
        for layer in reversed(range(3)):
            state = [add(gpus[g], BACKWARD[layer], [state[g]]) for g in range(GPUS)]
            messages.append(add(network, MESSAGE[layer], state))
        updates.append(add(updating, UPDATE, messages))
    _, stop = graph.run()
    return float(stop[updates[-1]] - stop[updates[-2]]) / 1e6, len(graph) // iterations


def compute() -> Result:
    """Simulate the example under each strategy."""
    profile = chain(
        "Fig. 1",
        forward_s=[t * MS for t in FORWARD],
        backward_s=[t * MS for t in BACKWARD],
        size_bytes=[round(t * 1e6) for t in MESSAGE],
        data_s=IO * MS,
        copy_s=H2D * MS,
        update_s=UPDATE * MS,
    )
    network = Network.line(workers=GPUS, a_s=0.0, b_s_per_byte=1e-9)
    plan = planner_named("wfbp").plan(profile, network)
    strategies = {}
    for name in STRATEGIES:
        steady = steady_state(Scenario(profile, network, strategy_named(name)), plan)
        # Iterations that begin from nothing are simulated once; shown, they repeat.
        period_ms = steady.period_ns / 1e6
        spans: list[tuple[str, int, str, str, float]] = []
        for index, slot in enumerate(steady.dag.layout.slots):
            if slot.operation is None:
                continue
            operation = profile.operations[slot.operation]
            for k, task in enumerate(steady.dag.slot_tasks(index)[:, 0]):
                spans.append(
                    (operation.lane, k, operation.phase, operation.name, steady.start_ns[task])
                )
        for index, message in enumerate(steady.dag.messages):
            label = plan.tensors[message.message].name
            for k, task in enumerate(steady.dag.message_tasks(index)[:, 0]):
                spans.append(("channel", k, "message", label, steady.start_ns[task]))
        durations = {o.name: o.duration_s * 1e3 for o in profile.operations}
        durations |= {f"W{i}": t for i, t in enumerate(MESSAGE, start=1)}
        rows = []
        for lane, k, kind, label, start in spans:
            repeats = SHOWN if steady.dag.iterations == 1 else 1
            for again in range(repeats):
                begin = float(start) / 1e6 + again * period_ms
                if k + again < SHOWN:
                    rows.append([lane, k + again, kind, label, begin, begin + durations[label]])
        strategies[name] = {
            "period_ms": period_ms,
            "equation_ms": equation_ms(name),
            "spans": rows,
        }
    period_ms, tasks = figure_1_period_ms()
    return {
        "source": "dag-model, Fig. 1 and Eq. 2 to 5; durations made up",
        "strategies": strategies,
        "figure_1": {"tasks_an_iteration": tasks, "period_ms": period_ms},
    }


def _draw_graph(axis: Axes) -> None:
    """Draw Fig. 1: columns are stages, rows the GPUs."""
    at: dict[int, tuple[float, float]] = {}
    for stage in range(8):  # T0 to T31: read, copy, F1 to F3, B3 to B1, for four GPUs
        for gpu in range(GPUS):
            at[stage * GPUS + gpu] = (stage, 3 - gpu)
    at |= {32: (6.0, -1.15), 33: (7.0, -1.15), 34: (8.0, -1.15), 35: (9.0, 1.5)}
    for gpu in range(GPUS):
        at[36 + gpu] = (10.0, 3 - gpu)
        at[40 + gpu] = (11.0, 3 - gpu)
    edges = [(s * GPUS + g, (s + 1) * GPUS + g) for s in range(7) for g in range(GPUS)]
    edges += [(20 + 4 * layer + g, 32 + layer) for layer in range(3) for g in range(GPUS)]
    edges += [(32, 35), (33, 35), (34, 35)]
    edges += [(36 + g, 40 + g) for g in range(GPUS)]
    for before, after in edges:
        axis.annotate(
            "",
            at[after],
            at[before],
            arrowprops={
                "arrowstyle": "-|>",
                "color": "#888888",
                "linewidth": 0.6,
                "shrinkA": 8,
                "shrinkB": 8,
            },
        )
    for marker, colour, members in (
        ("s", ORANGE, [t for t in at if t < 8 or 32 <= t <= 34 or t >= 36]),
        ("o", YELLOW, [t for t in at if 8 <= t < 32 or t == 35]),
    ):
        x, y = zip(*(at[t] for t in members), strict=True)
        axis.scatter(
            x, y, s=300, marker=marker, c=colour, edgecolors="#555555", linewidths=0.6, zorder=3
        )
    for task, (x_at, y_at) in at.items():
        axis.text(x_at, y_at, f"T{task}", ha="center", va="center", fontsize=6.5, zorder=4)
    heads = ["read", "copy", "forward 1", "forward 2", "forward 3"]
    heads += ["backward 3", "backward 2", "backward 1", "", "update", "read next", "copy next"]
    for stage, head in enumerate(heads):
        axis.text(stage, 3.6, head, ha="center", fontsize=7.5)
    axis.text(5.55, -1.15, "all-reduce 3, 2, 1", ha="right", va="center", fontsize=7.5)
    axis.set_xlim(-0.6, 11.6)
    axis.set_ylim(-1.7, 4.1)
    axis.axis("off")
    axis.set_title("The DAG of Fig. 1: 3 layers on 4 GPUs; squares communicate, circles compute")


def draw(result: Result) -> Figure:
    """Draw the DAG, and three iterations under each strategy."""
    made, axes = figure(
        5, 1, width=8.6, height=9.4, gridspec_kw={"height_ratios": [1.9, 1, 1, 1, 1]}
    )
    _draw_graph(axes[0])
    last = max(s[5] for found in result["strategies"].values() for s in found["spans"])
    for axis, (name, title) in zip(axes[1:], STRATEGIES.items(), strict=True):
        found = result["strategies"][name]
        rows = list(LANES)
        for lane, iteration, kind, label, start, stop in found["spans"]:
            if kind in ("data", "copy"):
                text = str(iteration + 1)
            else:
                text = "" if kind == "update" else label
            span(axis, rows.index(lane), start, stop, kind, text)
        lanes(axis, list(LANES.values()))
        axis.set_xlim(0, last)
        axis.set_title(f"{title}: {found['period_ms']:.0f} ms an iteration")
    axes[-1].set_xlabel(
        "time from the start of training, ms (durations are made up)\n"
        "F, B: forward, backward of a layer; W: all-reduce of its gradient; green: update; "
        "grey: the batch of iteration 1, 2, 3"
    )
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
