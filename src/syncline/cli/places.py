"""Where collectives are measured, as options say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from syncline.bench.request import PLACES, Local
from syncline.errors import UserError
from syncline.model.quantities import parse_workers
from syncline.testbed import Cluster

__all__ = ["place_of", "place_options", "worker_counts"]


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that :func:`place_of` reads."""
    for option in (
        click.option("--rate", help="Rate of every link of theirs, such as 1gbit."),
        click.option("--hosts", type=int, help="On so many emulated hosts instead."),
        click.option(
            "--place",
            type=click.Choice(PLACES),
            help="On this host: shared memory, or TCP on the loopback device.  [default: shared]",
        ),
    ):
        command = option(command)
    return command


def place_of(
    place: Local | None, hosts: int | None, rate: str | None, workers_per_host: int | None = None
) -> Local | Cluster:
    """Return where to measure.

    Raises:
        UserError: options contradict each other, or no such cluster can be emulated.
    """
    if hosts is None:
        for option, value in (("--rate", rate), ("--workers-per-host", workers_per_host)):
            if value is not None:
                raise UserError(f"{option} is of emulated hosts; say how many with --hosts")
        return place or PLACES[0]
    if place is not None:
        raise UserError(f"--place {place} is on this host, --hosts {hosts} is not; leave one out")
    per_host = 1 if workers_per_host is None else workers_per_host
    return Cluster.of(hosts=hosts, rate=rate, workers_per_host=per_host)


def worker_counts(
    text: str | None, place: Local | Cluster, usual: tuple[int, ...]
) -> tuple[int, ...]:
    """Return how many workers take part: as asked, else all of a cluster, or the usual counts.

    Raises:
        UserError: the text is no list of counts.
    """
    if text is not None:
        return parse_workers(text)
    return (place.workers,) if isinstance(place, Cluster) else usual
