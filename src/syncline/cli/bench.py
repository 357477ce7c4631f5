"""``syncline bench``: measure, beside others."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from syncline.bench.contest import measure
from syncline.bench.names import COPY, GLOO, MPIS, OURS, TORCH, ZERO_COPY, all_contestants
from syncline.bench.page import save_report
from syncline.bench.request import PLACES, Local, Request
from syncline.bench.sizes import parse_sizes
from syncline.bench.table import print_benchmark
from syncline.cli.bench_topk import topk
from syncline.cli.progress import Bar
from syncline.collectives import PROGRAMS, Collective
from syncline.errors import UserError
from syncline.model.quantities import parse_workers
from syncline.processes import ENDING_SIGNALS, exit_code_of, restored_signals
from syncline.report.whatif_page import require_place
from syncline.testbed import Cluster

__all__ = ["bench", "ended_by_signals", "place_of"]

EPILOG = """\b
Examples:
  syncline bench collectives --workers 2,4
  syncline bench collectives --place tcp --sizes 4..1MiB
  syncline bench collectives --hosts 4 --rate 1gbit --report measured

Contestants take turns: each has one in every round. Open MPI and MPICH take part where
tools/bench-mpi has set them up, or --mpi names an interpreter that has mpi4py. Emulated hosts need
what 'syncline emulate' needs.
"""
WORKERS = (2, 3, 4)
DEFAULT = (OURS, ZERO_COPY, TORCH, GLOO, *MPIS, COPY)


@click.group()
def bench() -> None:
    """Measure, beside others."""


bench.add_command(topk)


@bench.command(epilog=EPILOG)
@click.option(
    "--collective",
    default="all-reduce",
    show_default=True,
    metavar="NAME",
    help=f"One of {', '.join(PROGRAMS)}.",
)
@click.option(
    "--sizes",
    default="4,4KiB,64KiB,1MiB,16MiB",
    show_default=True,
    metavar="SIZE,...",
    help="Of the vector; 4..256MiB: from 4 bytes, every fourfold.",
)
@click.option("--workers", metavar="P,...", help="How many take part.  [default: 2,3,4]")
@click.option(
    "--place",
    type=click.Choice(PLACES),
    help="On this host: shared memory, or TCP on the loopback device.  [default: shared]",
)
@click.option("--hosts", type=int, help="On so many emulated hosts instead.")
@click.option("--rate", help="Rate of every link of theirs, such as 1gbit.")
@click.option(
    "--contestants",
    default=",".join(DEFAULT),
    show_default=True,
    metavar="NAME,...",
    help=f"Who takes part; {OURS}:ALGORITHM forces one of ours, 'all' is every one there is.",
)
@click.option("--rounds", type=int, default=5, show_default=True, help="Turns of every contestant.")
@click.option(
    "--lap",
    "lap_s",
    type=float,
    default=0.05,
    show_default=True,
    metavar="SECONDS",
    help="How long a turn should take.",
)
@click.option(
    "--mpi",
    "mpis",
    multiple=True,
    metavar="NAME=PYTHON",
    help="Where an MPI's mpi4py is, such as mpich=env/bin/python; may be repeated.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=300.0,
    show_default=True,
    help="Give up when a turn takes so many seconds.",
)
@click.option("--report", metavar="DIR|FILE.html", help="Write a report.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def collectives(
    collective: Collective,
    sizes: str,
    workers: str | None,
    place: Local | None,
    hosts: int | None,
    rate: str | None,
    contestants: str,
    rounds: int,
    lap_s: float,
    mpis: tuple[str, ...],
    timeout_s: float,
    report: str | None,
    as_json: bool,
) -> None:
    """Measure collectives: ours, Gloo's and MPI's, in turns."""
    where = place_of(place, hosts, rate)
    counts = (where.workers,) if isinstance(where, Cluster) and workers is None else WORKERS
    request = Request(
        collective=collective,
        sizes_bytes=parse_sizes(sizes),
        workers=counts if workers is None else parse_workers(workers),
        place=where,
        contestants=_contestants(collective, contestants),
        rounds=rounds,
        lap_s=lap_s,
        timeout_s=timeout_s,
        pythons=dict(map(_mpi, mpis)),
    )
    if report is not None:
        require_place(Path(report))
    with ended_by_signals(), Bar() as bar:
        benchmark = measure(request, progress=bar)
    if report is not None:
        save_report(benchmark, Path(report))
    if as_json:
        click.echo(benchmark.to_json(), nl=False)
        return
    print_benchmark(Console(highlight=False), benchmark)
    if report is not None:
        click.echo(f"report written to {report}")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Leave in order on signals too, so that workers and emulated hosts end."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(exit_code_of(-number))

    ending = [number for number in ENDING_SIGNALS if number != signal.SIGINT]
    with restored_signals(ending):
        for number in ending:
            signal.signal(number, leave)
        yield


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


def _contestants(collective: Collective, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if names == ("all",) and collective in PROGRAMS:
        return all_contestants(collective)
    return names


def _mpi(text: str) -> tuple[str, Path]:
    name, equals, python = text.partition("=")
    if not (equals and python):
        raise UserError(f"--mpi {text!r}: expected NAME=PYTHON, such as mpich=env/bin/python")
    return name, Path(python)
