"""``syncline emulate``: run a command on an emulated cluster."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from syncline.cli.places import cluster_options
from syncline.files.report.units import counted, percent, size
from syncline.lab.processes import end_of, received_signals
from syncline.lab.testbed.cluster import Cluster, bit_rate
from syncline.lab.testbed.job import GRACE_S, JobResult, WorkerEnd, name_of
from syncline.lab.testbed.output import Printer
from syncline.lab.testbed.testbed import Testbed, Traffic
from syncline.plan.quantities import require_finite

EPILOG = """\b
Examples:
  syncline emulate --hosts 4 --rate 1gbit -- python train.py
  syncline emulate --rate 10gbit --hosts-rate 0:1gbit -- python train.py --epochs 3

COMMAND runs once for every worker, with the variables that torchrun sets: RANK, LOCAL_RANK,
WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK, MASTER_ADDR and MASTER_PORT. The hosts are
network namespaces on this machine. They share its files, its GPUs and its processors (in equal
shares, where possible). They can reach each other and no other network.

Needs ip and tc of iproute2, and root or user namespaces.
"""


@click.command(epilog=EPILOG, context_settings={"allow_interspersed_args": False})
@cluster_options
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    help="Stop the job after this many seconds.  [default: never]",
)
@click.option(
    "--grace",
    "grace_s",
    type=float,
    default=GRACE_S,
    help="Seconds that workers have to end after another failed, or after a signal.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def emulate(
    timeout_s: float | None, grace_s: float, command: tuple[str, ...], **described: Any
) -> None:
    """Run COMMAND on an emulated cluster: hosts on this machine, joined by links of a given rate.

    The exit code is 0 if all workers end with 0, else that of the worker that failed first.
    """
    cluster = Cluster.of(**described)
    if timeout_s is not None:
        require_finite("the seconds of --timeout", timeout_s, above_0=True)
    require_finite("the seconds of --grace", grace_s)
    hosts = [rank // cluster.workers_per_host for rank in range(cluster.workers)]
    with received_signals() as signals, Testbed(cluster) as bed:
        _say(f"emulating {cluster}")
        result = bed.run(
            command,
            timeout_s=timeout_s,
            grace_s=grace_s,
            output=Printer(
                [f"{cluster.name_of(host)} rank {rank}" for rank, host in enumerate(hosts)], hosts
            ),
            notice=_say,
            signals=signals,
        )
        traffic = bed.traffic()
    _say(_summary(result, timeout_s))
    if result.cause is None:
        _show(cluster, traffic, result.wall_s)
    sys.exit(result.exit_code)


def _say(text: str) -> None:
    # On standard error, so that standard output is that of the workers alone.
    click.secho(text, err=True, bold=True)


def _summary(result: JobResult, timeout_s: float | None) -> str:
    """Return how the job ended, and which worker failed first."""
    workers = counted(len(result.ends), "worker")
    cause = result.cause
    if result.signal is not None:
        name = signal.Signals(result.signal).name
        return f"stopped by {name} after {result.wall_s:.1f} s; all {workers} have ended"
    if cause is not None:
        others = [end for end in result.ends if end is not cause]
        well = _ranks([end for end in others if end.code == 0], "ended well")
        later = _ranks([e for e in others if e.code and not e.stopped], "failed later")
        stopped = _ranks([e for e in others if e.code and e.stopped], "had to be stopped")
        first = f"error: {name_of(cause)} {end_of(cause.code)} after {cause.after_s:.1f} s"
        return "; ".join([first, *well, *later, *stopped])
    if result.timed_out:
        return f"error: the job was stopped after {timeout_s:g} s (--timeout)"
    return f"{workers} ended well after {result.wall_s:.1f} s"


def _ranks(ends: Sequence[WorkerEnd], what: str) -> list[str]:
    """Return ``["ranks 0, 2 and 3 ended well"]``, or nothing for no rank."""
    if not ends:
        return []
    *first, last = [str(end.rank) for end in ends]
    return [f"ranks {', '.join(first)} and {last} {what}" if first else f"rank {last} {what}"]


def _show(cluster: Cluster, traffic: Sequence[Traffic], wall_s: float) -> None:
    """Print each link's traffic, which shows whether the network was the limit."""
    if not any(passed.sent_bytes for passed in traffic):
        _say("nothing was sent from host to host")
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("host")
    for name in ("link", "sent", "received", "mean use", "packets dropped"):
        table.add_column(name, justify="right")
    for host, passed in enumerate(traffic):
        rate = cluster.rate_of(host)
        busier_bytes = max(passed.sent_bytes, passed.received_bytes)
        table.add_row(
            cluster.name_of(host),
            "not limited" if rate is None else bit_rate(rate),
            size(passed.sent_bytes),
            size(passed.received_bytes),
            "" if rate is None else percent(busier_bytes / wall_s / rate),
            str(passed.dropped_packets),
        )
    Console(stderr=True).print(table)
