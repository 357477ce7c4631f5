"""Syncline against stock DDP between two hosts that a slow link joins.

Two network namespaces on this machine are the hosts; a pair of virtual Ethernet devices joins them,
each shaped by the kernel's token bucket filter. `syncline train --baseline` runs on both, as under
torchrun, with Syncline and stock DDP in turns on the same batches. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import median, save, spread
from syncline.model.run import Run

HOSTS = ("syncline-bench-0", "syncline-bench-1")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = "29517"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--batch-size", default="64")
    parser.add_argument("--steps", default="330")
    parser.add_argument("--report", help="keep the last run's report here")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("shaped_link makes network namespaces, which needs root; run it with sudo")
    rows = []
    with shaped_hosts(arguments.rate):
        for number in range(arguments.runs):
            row = one(arguments)
            rows.append(row)
            print(
                f"{number}: {row['planner']} ({row['messages']} messages, {row['decision']}): "
                f"Syncline {row['syncline_s'] * 1e3:.1f} ms, DDP {row['ddp_s'] * 1e3:.1f} ms, "
                f"ratio {row['speed_up']:.3f}, prediction {row['error']:+.1%}",
                flush=True,
            )
    print(
        f"{arguments.model}, 2 hosts at {arguments.rate}: DDP over Syncline "
        f"{spread([r['speed_up'] for r in rows])}, prediction error "
        f"{median([abs(r['error']) for r in rows]):.1%}"
    )
    settings = {name: value for name, value in vars(arguments).items() if name != "report"}
    save("shaped_link", {"settings": settings, "rows": rows})


@contextlib.contextmanager
def shaped_hosts(rate: str) -> Iterator[None]:
    """Make two namespaces with a shaped link between them; remove them at the end."""
    remove()
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip(
            "link",
            "add",
            "sb0",
            "netns",
            HOSTS[0],
            "type",
            "veth",
            "peer",
            "name",
            "sb1",
            "netns",
            HOSTS[1],
        )
        for number, host in enumerate(HOSTS):
            device = f"sb{number}"
            ip("-n", host, "addr", "add", f"{ADDRESSES[number]}/24", "dev", device)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", device, "up")
            subprocess.run(
                [
                    "tc",
                    "-n",
                    host,
                    "qdisc",
                    "add",
                    "dev",
                    device,
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "128kb",
                    "latency",
                    "50ms",
                ],
                check=True,
            )
        yield
    finally:
        remove()


def remove() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], check=False, stderr=subprocess.DEVNULL)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def one(arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        report = arguments.report or folder
        workers = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    host,
                    str(Path(sys.executable).with_name("syncline")),
                    "train",
                    "--model",
                    arguments.model,
                    "--data",
                    arguments.data,
                    "--baseline",
                    "--batch-size",
                    arguments.batch_size,
                    "--steps",
                    arguments.steps,
                    "--epochs",
                    arguments.steps,
                    "--timeout",
                    "120",
                    "--report",
                    report,
                ],
                env=os.environ
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": ADDRESSES[0],
                    "MASTER_PORT": PORT,
                    "GLOO_SOCKET_IFNAME": f"sb{rank}",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.DEVNULL,
            )
            for rank, host in enumerate(HOSTS)
        ]
        codes = [worker.wait(timeout=1200) for worker in workers]
        if any(codes):
            raise SystemExit(f"the workers ended with {codes}")
        run = Run.load(Path(report) / "run.json")
    rates = {rate.name: rate for rate in run.rates}
    ours, ddp = rates["syncline"], rates["torch ddp"]
    return {
        "decision": run.decision,
        "planner": run.planner,
        "messages": run.messages,
        "syncline_s": ours.iteration_s,
        "ddp_s": ddp.iteration_s,
        "speed_up": ddp.iteration_s / ours.iteration_s,
        "error": run.prediction_error,
        "overhead_iterations": run.overhead_iterations,
        "identical": run.results.get("largest parameter difference") == 0,
    }


if __name__ == "__main__":
    main()
