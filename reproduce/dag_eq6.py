"""dag-model, Eq. 6: the speed-up in closed form against the simulated one.

AlexNet of Table VI and ResNet-50 on K80s, on the all-reduce line of MG-WFBP's cluster 1 carried to
other worker counts by the ring. Up to four GPUs of a machine share its disk.
"""

from __future__ import annotations

import msgspec
from matplotlib.figure import Figure

from reproduce.common import BLUE, ORANGE, Result, figure, planner, run
from reproduce.inputs import CLUSTER_1, alexnet, resnet50_k80
from syncline.plan.network import Network
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s
from syncline.plan.simulator.strategy import strategy_named

NAME = "dag_eq6"
GPUS = (1, 2, 4, 8, 16, 32, 64, 128)
A_MACHINE = 4
READING_SHARE = 0.5
"""Time that one GPU alone reads, as a share of computing: a slow disk, so that both terms count."""


def equation_6(profile: Profile, network: Network, reading_1_s: float, reading_s: float) -> float:
    """Return ``N max(t_io1, t_f + t_b) / max(t_ioN, t_f + t_b + t_c^no)`` with Eq. 7's ``t_c``."""
    computing = profile.phase_s("forward", "backward")
    clock = profile.phase_s("forward")
    end = clock
    due = {g.ready_after: g.size_bytes for g in profile.gradients}
    for index, operation in enumerate(profile.operations):
        if operation.phase == "backward":
            clock += operation.duration_s
            if index in due:
                end = max(end, clock) + network.all_reduce.seconds(due[index])
    iteration = max(reading_s, computing + max(end - computing, 0.0))
    return network.workers * max(reading_1_s, computing) / iteration


def reading(profile: Profile, seconds: float) -> Profile:
    """Return the profile with another time of reading, as its first operation."""
    operations = list(profile.operations)
    assert operations[0].phase == "data"
    operations[0] = msgspec.structs.replace(operations[0], duration_s=seconds)
    return msgspec.structs.replace(profile, operations=tuple(operations))


def with_reading(profile: Profile) -> Profile:
    """Return the profile with an operation that reads, if it has none."""
    if profile.operations[0].phase == "data":
        return profile
    shifted = [
        msgspec.structs.replace(o, after=tuple(b + 1 for b in o.after)) for o in profile.operations
    ]
    first = msgspec.structs.replace(
        profile.operations[0], name="data", phase="data", duration_s=0.0, after=()
    )
    return msgspec.structs.replace(
        profile,
        operations=(first, *shifted),
        gradients=tuple(
            msgspec.structs.replace(
                g,
                ready_after=g.ready_after + 1,
                needed_by=None if g.needed_by is None else g.needed_by + 1,
            )
            for g in profile.gradients
        ),
    )


def compute() -> Result:
    """Compare the equation with the simulator."""
    base = CLUSTER_1
    profiles = {"AlexNet (Table VI)": alexnet()[0]}
    resnet = resnet50_k80()
    if resnet is not None:
        profiles["ResNet-50"] = with_reading(resnet)
    caffe = strategy_named("caffe-mpi")
    models = {}
    for model, profile in profiles.items():
        alone_s = READING_SHARE * profile.phase_s("forward", "backward")
        rows = []
        for gpus in GPUS:
            network = (
                base.with_workers(gpus)
                if gpus > 1
                else Network.line(workers=1, a_s=0, b_s_per_byte=0)
            )
            reading_s = alone_s * min(gpus, A_MACHINE)
            here = reading(profile, reading_s)
            plan = planner("wfbp").plan(here, network)
            simulated_s = predict_iteration_s(here, network, plan, strategy=caffe)
            single_s = max(alone_s, profile.phase_s("forward", "backward"))
            rows.append(
                {
                    "gpus": gpus,
                    "equation": equation_6(here, network, alone_s, reading_s),
                    "simulated": gpus * single_s / simulated_s,
                    "compute_bound": equation_6(here, network, alone_s, 0.0),
                }
            )
        models[model] = rows
    worst = max(abs(r["simulated"] / r["equation"] - 1) for rows in models.values() for r in rows)
    return {
        "source": "dag-model, Eq. 6; Table VI; MG-WFBP, Fig. 4(a)",
        "reading_share": READING_SHARE,
        "models": models,
        # Each task is rounded to a nanosecond: less than a part in a million of any iteration.
        "largest_difference_below_1e-6": worst < 1e-6,
    }


def draw(result: Result) -> Figure:
    """Draw speed-ups over GPUs."""
    count = len(result["models"])
    made, axes = figure(1, count, width=4.6 * count, height=3.6)
    for axis, (model, rows) in zip(axes, result["models"].items(), strict=True):
        gpus = [r["gpus"] for r in rows]
        axis.plot(gpus, gpus, ":", color="#999999", label="linear")
        axis.plot(
            gpus,
            [r["compute_bound"] for r in rows],
            "--",
            color=ORANGE,
            label="Eq. 6, if reading took no time",
        )
        axis.plot(gpus, [r["equation"] for r in rows], color=BLUE, label="Eq. 6")
        axis.plot(
            gpus,
            [r["simulated"] for r in rows],
            "o",
            color="black",
            markerfacecolor="white",
            markersize=6,
            label="simulated, Caffe-MPI",
        )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(gpus, [str(g) for g in gpus])
        axis.set_yticks(gpus, [str(g) for g in gpus])
        axis.set_xlabel("GPUs (4 a machine, sharing its disk)")
        axis.set_ylabel("speed-up over one GPU")
        axis.set_title(f"{model} on K80s, 10 Gbit/s, ring")
        axis.legend()
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
