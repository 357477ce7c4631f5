"""Run every benchmark: ``python -m benchmarks``."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = (
    "planners_on_traces",
    "planning_time",
    "simulator_throughput",
    "chunk_simulation",
    "pipeline_hosts",
    "network_use",
    "trace_replay",
    "overlap_optimality",
    "testbed_rates",
    "steady_overhead",
    "steady_calls",
    "overlap_overhead",
    "backend_latency",
    "kill_resume",
    "group_faults",
    "soak",
    "prediction_error",
    "bsp_profile",
    "bsp_hosts",
    "topk",
    "gtopk_loss",
)


def main() -> None:
    for name in BENCHMARKS:
        print(f"\n== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
