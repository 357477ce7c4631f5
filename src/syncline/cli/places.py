"""Options that say where to measure: on this host, or on emulated hosts."""

from __future__ import annotations

import click

from syncline.cli.arguments import with_options
from syncline.errors import UserError
from syncline.lab.bench.request import PLACES, Local
from syncline.lab.testbed import Cluster
from syncline.plan.quantities import parse_workers

place_options = with_options(
    click.option(
        "--place",
        type=click.Choice(PLACES),
        help="On this host: shared memory, or TCP on the loopback device.  [default: shared]",
    ),
    click.option("--hosts", type=int, help="On this many emulated hosts instead."),
    click.option("--rate", help="Rate of every link between emulated hosts, such as 1gbit."),
)
"""Give a command the options that :func:`place_of` reads."""

cluster_options = with_options(
    click.option("--hosts", type=int, default=2, help="How many hosts."),
    click.option("--rate", help="Rate of every link, such as 1gbit.  [default: not limited]"),
    click.option(
        "--hosts-rate",
        multiple=True,
        metavar="HOST:RATE",
        help="Rate of one host's link, such as 0:100mbit; may be repeated.",
    ),
    click.option("--latency", help="Latency added between two hosts, such as 20us."),
    click.option("--workers-per-host", type=int, default=1, help="Workers on each host."),
    click.option("--mtu", "mtu_bytes", type=int, default=9000, help="Largest packet in bytes."),
)
"""Give a command the options that :meth:`Cluster.of` takes."""


def place_of(
    place: Local | None, hosts: int | None, rate: str | None, workers_per_host: int | None = None
) -> Local | Cluster:
    """Return where to measure, if the options do not contradict each other."""
    if hosts is None:
        for option, value in (("--rate", rate), ("--workers-per-host", workers_per_host)):
            if value is not None:
                raise UserError(f"{option} needs emulated hosts; say how many with --hosts")
        return place or PLACES[0]
    if place is not None:
        raise UserError(f"--place {place} is on this host, --hosts {hosts} is not; leave one out")
    per_host = 1 if workers_per_host is None else workers_per_host
    return Cluster.of(hosts=hosts, rate=rate, workers_per_host=per_host)


def worker_counts(
    text: str | None, place: Local | Cluster, usual: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the worker counts: those in ``text``, else a cluster's workers, else ``usual``."""
    if text is not None:
        return parse_workers(text)
    return (place.workers,) if isinstance(place, Cluster) else usual
