"""Predictions from profiler traces of other projects against what the traces measured.

Replay: each traced step of ResNet-50 under DDP on two A100 is simulated from a profile made of that
step, and from one made of the other steps. The durations that go in are those of tasks; that the
host waits for the device, kernels for their launch and the update for messages is simulated. The
step is bound by the CPU that launches, so the replay of a step from itself checks that no time is
lost or counted twice; the prediction from the other steps is the harder test. The other two traces
are replayed as well: with loader processes the device is the bottleneck, and the host's waiting for
it is simulated.

What-if: from the trace of a training that reads its batches itself, the step time with four loader
processes; measured in a second trace. Reading then takes a quarter of its time a batch and runs
beside computing (dag-model, Eq. 3 and 5), while the training process still copies. The second trace
has two steps that stalled, so its median counts; all are listed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import median, save
from syncline.files.traces.kineto import KinetoTrace, read_kineto
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s
from syncline.plan.simulator.strategy import STRATEGIES

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "kineto"
DDP = "ddp_resnet50_2xA100_rank0.json.gz"
LOADING = ("resnet50_num_workers_0.pt.trace.json.gz", "resnet50_num_workers_4.pt.trace.json.gz")
ALONE = Network.line(workers=1, a_s=0, b_s_per_byte=0, name="one worker")
LOADERS = (1, 2, 4, 8)


def predicted_s(
    trace: KinetoTrace, profile: Profile, *, strategy: str = "loop", loaders: int = 1
) -> float:
    network = trace.trace().network() if trace.points else ALONE
    plan = trace.plan() or Plan.merging("none", profile, 1, [len(profile.gradients) - 1])
    chosen = msgspec.structs.replace(STRATEGIES[strategy], loaders=loaders)
    return predict_iteration_s(profile, network, plan, strategy=chosen)


def lanes_s(profile: Profile) -> dict[str, float]:
    """Return the seconds of work on each lane."""
    totals: dict[str, float] = {}
    for operation in profile.operations:
        totals[operation.lane] = totals.get(operation.lane, 0.0) + operation.duration_s
    return totals


def replay(name: str) -> dict[str, Any]:
    trace = read_kineto(TRACES / name)
    rows: list[dict[str, Any]] = []
    for step in trace.steps:
        own = trace._replace(steps=(step,)).profile()
        others = trace._replace(steps=tuple(s for s in trace.steps if s is not step)).profile()
        itself_s, from_others_s = predicted_s(trace, own), predicted_s(trace, others)
        rows.append(
            {
                "step": step.number,
                "measured_s": step.measured_s,
                "replayed_s": itself_s,
                "replay_error": itself_s / step.measured_s - 1,
                "from_others_s": from_others_s,
                "from_others_error": from_others_s / step.measured_s - 1,
                "work_s": lanes_s(own),
                "messages_s": sum(c.stop_ns - c.start_ns for c in step.collectives) / 1e9,
            }
        )
    print(f"\n{trace.model}: {trace.workers or 1} workers, {len(own.operations)} operations a step")
    print("step  measured  replayed          from others       work: host  device  messages")
    for row in rows:
        work = row["work_s"]
        print(
            f"{row['step']:4}  {row['measured_s'] * 1e3:5.1f} ms  "
            f"{row['replayed_s'] * 1e3:5.1f} ms {row['replay_error']:+6.2%}  "
            f"{row['from_others_s'] * 1e3:5.1f} ms {row['from_others_error']:+6.2%}  "
            f"{work['host'] * 1e3:11.1f} {work['device'] * 1e3:7.1f} {row['messages_s'] * 1e3:9.1f}"
        )
    return {"trace": name, "rows": rows, "notes": list(trace.notes)}


def loading(without: str, with_four: str) -> dict[str, Any]:
    trace, other = read_kineto(TRACES / without), read_kineto(TRACES / with_four)
    profile = trace.profile()
    measured = {"0 loaders": trace, "4 loaders": other}
    steps = {name: [step.measured_s for step in t.steps] for name, t in measured.items()}
    guesses = {"0 loaders": predicted_s(trace, profile)}
    for count in LOADERS:
        name = f"{count} loader{'s' * (count > 1)}"
        guesses[name] = predicted_s(trace, profile, strategy="mxnet", loaders=count)
    errors = {name: guesses[name] / median(values) - 1 for name, values in steps.items()}
    print(f"\n{trace.model}: reading takes {profile.phase_s('data') * 1e3:.1f} ms a step")
    for name, guess in guesses.items():
        line = f"{name:10} predicted {guess * 1e3:5.1f} ms"
        if name in steps:
            listed = ", ".join(f"{s * 1e3:.1f}" for s in steps[name])
            line += f", measured {median(steps[name]) * 1e3:5.1f} ms ({listed}): "
            line += f"{errors[name]:+.1%}"
        print(line)
    return {
        "traces": [without, with_four],
        "work_s": lanes_s(profile),
        "work_with_four_s": lanes_s(other.profile()),
        "predicted_s": guesses,
        "measured_s": steps,
        "error_of_median": errors,
    }


def main() -> None:
    if not TRACES.is_dir():
        sys.exit(f"the traces are not in {TRACES.name}/ of the shared data beside the project")
    save(
        "trace_replay",
        {
            "replay": [replay(name) for name in (DDP, *LOADING)],
            "loading": loading(*LOADING),
        },
    )


if __name__ == "__main__":
    main()
