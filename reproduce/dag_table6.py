"""dag-model, Table VI: AlexNet on two K80s, simulated from the table under each strategy.

Messages take the times of the column ``Comm.`` (:func:`reproduce.inputs.messages_as_measured`).
"""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.common import GREY, ORANGE, Result, figure, planner, run
from reproduce.inputs import TABLE_VI, alexnet, messages_as_measured
from syncline.plan.fit import fit_cost_curve
from syncline.plan.network import Network
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.strategy import strategy_named

NAME = "dag_table6"
GPUS = 2
STRATEGIES = ("s-sgd", "cntk", "mxnet", "tensorflow", "caffe-mpi")
EQUATION = {"s-sgd": "Eq. 2", "cntk": "Eq. 3", "caffe-mpi": "Eq. 5"}


def exposed_s(profile: Profile) -> float:
    """Return t_c^no: what Eq. 7 of MG-WFBP leaves after the last backward operation."""
    ready = end = 0.0
    clock = 0.0
    sizes = {g.ready_after: g.size_bytes for g in profile.gradients}
    for index, operation in enumerate(profile.operations):
        if operation.phase != "backward":
            continue
        clock += operation.duration_s
        if index in sizes:
            ready = clock
            end = max(end, ready) + sizes[index] * 1e-9
    return max(end - clock, 0.0)


def compute() -> Result:
    """Simulate the table."""
    profile = messages_as_measured()
    network = Network.line(workers=GPUS, a_s=0.0, b_s_per_byte=1e-9)
    plan = planner("wfbp").plan(profile, network)
    computing = profile.phase_s("forward", "backward")
    reading = profile.phase_s("data")
    messages = sum(g.size_bytes for g in profile.gradients) * 1e-9
    late = exposed_s(profile)
    closed = {
        "s-sgd": reading + computing + messages,
        "cntk": max(reading, computing + messages),
        "mxnet": max(reading, computing + late),
        "tensorflow": max(reading, computing + late),
        "caffe-mpi": max(reading, computing + late),
    }
    alone = max(reading, computing)
    strategies = {}
    for name in STRATEGIES:
        found = predict(profile, network, plan, strategy=strategy_named(name)).prediction
        strategies[name] = {
            "iteration_s": found.iteration_s,
            "equation_s": closed[name],
            "speedup": GPUS
            * (alone if name != "s-sgd" else reading + computing)
            / found.iteration_s,
        }
    _, points = alexnet()
    fit = fit_cost_curve(points)
    rows = [line.split("\t") for line in TABLE_VI.splitlines()[1:]]
    return {
        "source": "dag-model, Table VI (quoted in reproduce/inputs.py)",
        "forward_s": profile.phase_s("forward"),
        "backward_s": profile.phase_s("backward"),
        "reading_s": reading,
        "messages_s": messages,
        "exposed_s": late,
        "parameters": sum(int(row[5]) for row in rows) // 4,
        "strategies": strategies,
        "layers": {row[1]: [float(row[4]) * 1e-6, int(row[5])] for row in rows if int(row[5])},
        "fit_error_max": fit.error_max,
    }


def draw(result: Result) -> Figure:
    """Draw what an iteration is made of, and the measured messages."""
    made, (bars, dots) = figure(1, 2, width=9.0, height=3.4)
    computing = result["forward_s"] + result["backward_s"]
    names = list(result["strategies"])
    for row, name in enumerate(names):
        total = result["strategies"][name]["iteration_s"]
        reading = result["reading_s"] if name == "s-sgd" else 0.0
        parts = [
            (reading, GREY, "reading, not hidden"),
            (result["forward_s"], "#9ecae1", "forward"),
            (result["backward_s"], "#4292c6", "backward"),
            (total - computing - reading, ORANGE, "messages, not hidden"),
        ]
        left = 0.0
        for seconds, colour, label in parts:
            bars.barh(
                row,
                seconds,
                left=left,
                color=colour,
                edgecolor="white",
                label=label if row == 0 else None,
            )
            left += seconds
        bars.text(left + 0.15, row, f"{total:.2f} s", va="center", fontsize=8.5)
    bars.set_yticks(range(len(names)), names)
    bars.invert_yaxis()
    bars.grid(axis="y", visible=False)
    bars.set_xlim(0, 23.5)
    bars.set_xlabel("simulated iteration, s")
    bars.set_title("AlexNet of Table VI (two K80s)")
    bars.legend(loc="upper center", bbox_to_anchor=(0.45, -0.17), ncols=2)
    for name, (seconds, size) in result["layers"].items():
        dots.plot(size / 1e6, seconds, "o", color=ORANGE)
        left_of = name in ("conv5", "fc6", "conv1")
        dots.annotate(
            name,
            (size / 1e6, seconds),
            xytext=(-6 if left_of else 6, 0),
            textcoords="offset points",
            va="center",
            ha="right" if left_of else "left",
        )
    dots.set_xscale("log")
    dots.set_yscale("log")
    dots.set_xlim(0.03, 1000)
    dots.set_xlabel("gradient, MB")
    dots.set_ylabel("measured message, s")
    dots.set_title("Column Comm. against Size: no function of the size")
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
