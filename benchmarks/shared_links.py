"""Jobs that share the links of two hosts: measured iterations beside what is predicted for them.

Each job has a worker on both hosts. Computing is waiting, so that the jobs share links and nothing
else: the forward pass, then the backward pass, after each quarter of which a message is all-reduced
by Gloo, one message at a time. The jobs of a repetition are equal and begin at random moments of an
iteration, spread evenly over the repetitions. Their iterations count while all of them run.

Predicted are the mean over offsets, as ``syncline simulate`` has it with ``jobs=N``, and what each
job would take with a link of an Nth of the rate. Both rest on all-reduces that were measured before
with nothing else under way.

``python -m benchmarks.shared_links --rate 1gbit`` measures one rate and adds it to the results;
``--table`` prints the table of all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import raw
from benchmarks.common import RESULTS, median, save
from syncline.lab.testbed import Cluster, Testbed
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.predict import predict_iteration_s

NAME = "shared_links"
HOSTS, JOBS, MESSAGES = 2, 3, 4
MESSAGE_S = 0.010
"""What a message takes to transmit; its size follows from the rate."""
RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0)
"""Computing over transmitting."""
FORWARD = 1 / 3
"""Share of computing before the backward pass."""
ITERATIONS, WARM_UP = 16, 3
REPETITIONS = {1: 2, 2: 6, 3: 6}
PROBES = (1_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000)
PROBE_REPETITIONS = 9
DEADLINE_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--table", action="store_true", help="only print what was measured")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker)
        return
    path = RESULTS / f"{NAME}.json"
    rates = raw.read(path)["rates"] if raw.exists(path) else {}
    if not arguments.table:
        rates[arguments.rate] = measure(arguments.rate)
    rows = [row for rate, found in rates.items() for row in compared(rate, found)]
    report(rows)
    if not arguments.table:
        save(NAME, {"rows": rows, "rates": rates})


# --- measuring ---


def measure(rate: str) -> dict[str, Any]:
    """Return all-reduces alone, and when each iteration of each job ended, on links of a rate."""
    cluster = Cluster.of(hosts=HOSTS, rate=rate, workers_per_host=JOBS)
    assert cluster.rate_bytes_per_s is not None
    command = [sys.executable, "-m", f"benchmarks.{Path(__file__).stem}"]
    with Testbed(cluster) as bed:
        result = bed.run(
            [*command, "--worker", str(cluster.rate_bytes_per_s)], timeout_s=DEADLINE_S
        )
    if result.exit_code:
        raise SystemExit(f"{rate} failed: {''.join(result.stderr)}")
    jobs = [json.loads(text) for text in result.stdout[:JOBS]]
    cases = [
        {**case, "ends_s": [job["cases"][index]["ends_s"] for job in jobs[: case["jobs"]]]}
        for index, case in enumerate(jobs[0]["cases"])
    ]
    return {"rate_bytes_per_s": cluster.rate_bytes_per_s, "probe": jobs[0]["probe"], "cases": cases}


def work(rate_bytes_per_s: float) -> None:
    """Take part as a worker: its rank on the host is the number of its job."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job, lead = int(os.environ["LOCAL_RANK"]), int(os.environ["NODE_RANK"]) == 0
    groups = [
        dist.new_group([host * JOBS + number for host in range(HOSTS)]) for number in range(JOBS)
    ]
    group = groups[job]

    probe: dict[int, list[float]] = {}
    for size in PROBES:
        vector = torch.ones(size // 4)
        for _ in range(PROBE_REPETITIONS + 1 if job == 0 else 0):
            dist.barrier(group)
            began_s = time.monotonic()
            dist.all_reduce(vector, group=group)
            probe.setdefault(size, []).append(time.monotonic() - began_s)
    cases = []
    random_of = random.Random(7)
    message_bytes = message_size(rate_bytes_per_s)
    vectors = [torch.zeros(message_bytes // 4) for _ in range(MESSAGES)]
    with ThreadPoolExecutor(1) as sender:
        for ratio in RATIOS:
            computing_s = ratio * MESSAGES * MESSAGE_S
            for jobs, repetitions in REPETITIONS.items():
                strata = [random_of.sample(range(repetitions), repetitions) for _ in range(JOBS)]
                for repetition in range(repetitions):
                    shares = [
                        (row[repetition] + random_of.random()) / repetitions for row in strata
                    ]
                    # An iteration takes about this long alone.
                    period_s = computing_s * (FORWARD + 1 / MESSAGES) + MESSAGES * MESSAGE_S
                    period_s = max(period_s, computing_s + MESSAGE_S)
                    begin = torch.tensor([time.monotonic() + 0.05], dtype=torch.float64)
                    dist.broadcast(begin, 0)
                    ends_s: list[float] = []
                    if job < jobs:
                        offset_s = shares[job] * period_s if job else 0.0
                        time.sleep(max(float(begin) + offset_s - time.monotonic(), 0.0))
                        ends_s.append(time.monotonic())
                        for _ in range(ITERATIONS):
                            iterate(sender, group, vectors, computing_s)
                            ends_s.append(time.monotonic())
                    dist.barrier()
                    cases.append({"ratio": ratio, "jobs": jobs, "ends_s": ends_s})
    if lead:
        kept = {size: times_s[1:] for size, times_s in probe.items()}
        print(json.dumps({"probe": kept, "cases": cases}))
    dist.barrier()
    dist.destroy_process_group()


def message_size(rate_bytes_per_s: float) -> int:
    """Return the bytes of a message: on two hosts, a ring sends each byte once over each link."""
    return round(rate_bytes_per_s * MESSAGE_S) // 4 * 4


def iterate(sender: ThreadPoolExecutor, group: Any, vectors: list[Any], computing_s: float) -> None:
    """Wait and send as an iteration does."""
    import torch.distributed as dist

    time.sleep(computing_s * FORWARD)
    sent = []
    for vector in vectors:
        time.sleep(computing_s * (1 - FORWARD) / len(vectors))
        sent.append(sender.submit(dist.all_reduce, vector, group=group))
    for one in sent:
        one.result()


# --- predicting ---


def compared(rate: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each case of a rate: its mean iteration, and both predictions."""
    sizes = [int(size) for size in found["probe"]]
    times_s = [median(times) for times in found["probe"].values()]
    network = Network.from_points(sizes, times_s, workers=HOSTS, name=rate)
    link_rate = 1 / network.exchange.link.beta_s_per_byte
    rows = []
    for ratio in RATIOS:
        profile, plan = described(ratio, message_size(found["rate_bytes_per_s"]))
        for jobs in REPETITIONS:
            measured_s = [
                mean_iteration_s(case["ends_s"])
                for case in found["cases"]
                if (case["ratio"], case["jobs"]) == (ratio, jobs)
            ]
            whole_s = sum(measured_s) / len(measured_s)
            split = network.replace(bandwidth_bytes_per_s=link_rate / jobs)
            fluid_s = predict_iteration_s(profile, network.replace(jobs=jobs), plan)
            split_s = predict_iteration_s(profile, split, plan)
            rows.append(
                {
                    "rate": rate,
                    "ratio": ratio,
                    "jobs": jobs,
                    "measured_s": whole_s,
                    "repetitions_s": measured_s,
                    "fluid_s": fluid_s,
                    "static_s": split_s,
                    "fluid_error": fluid_s / whole_s - 1,
                    "static_error": split_s / whole_s - 1,
                }
            )
    return rows


def described(ratio: float, message_bytes: int) -> tuple[Profile, Plan]:
    """Return a job as a profile, and its messages as a plan."""
    computing_s = ratio * MESSAGES * MESSAGE_S
    backward_s = computing_s * (1 - FORWARD) / MESSAGES
    profile = Profile(
        model="waiting",
        device="cpu",
        workers=HOSTS,
        iterations=1,
        operations=(
            Operation(name="forward", phase="forward", duration_s=computing_s * FORWARD),
            *(
                Operation(name=f"b{i}", phase="backward", duration_s=backward_s, after=(i,))
                for i in range(MESSAGES)
            ),
        ),
        gradients=tuple(
            Gradient(name=f"g{i}", elements=message_bytes // 4, ready_after=i + 1)
            for i in range(MESSAGES)
        ),
    )
    return profile, Plan.merging("messages", profile, HOSTS, list(range(MESSAGES)))


def mean_iteration_s(ends_s: list[list[float]]) -> float:
    """Return the mean over the iterations of all jobs that lie where all of them run."""
    begin = max(ends[WARM_UP] for ends in ends_s)
    end = min(ends[-1] for ends in ends_s)
    times = []
    for ends in ends_s:
        inside = [when for when in ends if begin <= when <= end]
        times.append((inside[-1] - inside[0]) / (len(inside) - 1))
    return sum(times) / len(times)


def report(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        low, high = min(row["repetitions_s"]), max(row["repetitions_s"])
        print(
            f"{row['rate']:>8}  {row['jobs']} jobs  ratio {row['ratio']:3}  "
            f"{row['measured_s'] * 1e3:7.1f} ms ({low * 1e3:.1f} .. {high * 1e3:.1f})  "
            f"fluid {row['fluid_s'] * 1e3:7.1f} {row['fluid_error'] * 100:+6.1f} %  "
            f"static {row['static_s'] * 1e3:7.1f} {row['static_error'] * 100:+6.1f} %"
        )
    shared = [row for row in rows if row["jobs"] > 1]
    for name in ("fluid", "static"):
        errors = [abs(row[f"{name}_error"]) for row in shared]
        within = sum(error <= 0.15 for error in errors)
        print(
            f"{name}: median {median(errors) * 100:.1f} %, worst {max(errors) * 100:.1f} %, "
            f"{within} of {len(errors)} within 15 %"
        )


if __name__ == "__main__":
    main()
