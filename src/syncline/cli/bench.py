"""``syncline bench``: measure Syncline beside other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from syncline.cli.arguments import field_options, fields_of, json_option, report_option, show
from syncline.cli.places import place_of, place_options, worker_counts
from syncline.cli.progress import ProgressBar
from syncline.comm.collectives import PROGRAMS, Collective
from syncline.errors import UserError
from syncline.files.report.page import require_place
from syncline.lab.bench.collectives import measure_collectives
from syncline.lab.bench.page import print_benchmark, save_report
from syncline.lab.bench.request import BenchmarkRequest, Local, parse_sizes
from syncline.lab.bench.result import COPY, GLOO, MPIS, OURS, TORCH, all_contestants
from syncline.lab.processes import ended_by_signals

EPILOG = """\b
Examples:
  syncline bench collectives --workers 2,4
  syncline bench collectives --place tcp --sizes 4..1MiB
  syncline bench collectives --hosts 4 --rate 1gbit --report measured

Contestants are interleaved: each takes one turn in every round. Open MPI and MPICH take part if
tools/bench-mpi has set them up, or if --mpi names an interpreter that has mpi4py. Emulated hosts
need what 'syncline emulate' needs.
"""
WORKERS = (2, 3, 4)
FIELDS = fields_of(BenchmarkRequest)
DEFAULT = (OURS, TORCH, GLOO, *MPIS, COPY)


@click.group()
def bench() -> None:
    """Measure Syncline beside other libraries."""


@bench.command(epilog=EPILOG)
@click.option(
    "--collective", default="all-reduce", metavar="NAME", help=f"One of {', '.join(PROGRAMS)}."
)
@click.option(
    "--sizes",
    default="4,4KiB,64KiB,1MiB,16MiB",
    metavar="SIZE,...",
    help="Sizes of the vector; 4..256MiB is 4, 16, 64 bytes and so on.",
)
@click.option("--workers", metavar="P,...", help="Worker counts.  [default: 2,3,4]")
@place_options
@click.option(
    "--contestants",
    default=",".join(DEFAULT),
    metavar="NAME,...",
    help=f"Libraries to compare; {OURS}:ALGORITHM forces one of ours, 'all' is every one.",
)
@field_options(FIELDS, "rounds", "lap_s")
@click.option(
    "--mpi",
    "mpis",
    multiple=True,
    metavar="NAME=PYTHON",
    help="Interpreter with an MPI's mpi4py, such as mpich=env/bin/python; may be repeated.",
)
@field_options(FIELDS, "timeout_s")
@report_option
@json_option
def collectives(
    collective: Collective,
    sizes: str,
    workers: str | None,
    place: Local | None,
    hosts: int | None,
    rate: str | None,
    contestants: str,
    mpis: tuple[str, ...],
    report: str | None,
    as_json: bool,
    **limits: Any,
) -> None:
    """Measure collectives: ours, Gloo's and MPI's, interleaved."""
    where = place_of(place, hosts, rate)
    names = tuple(name.strip() for name in contestants.split(","))
    if names == ("all",) and collective in PROGRAMS:
        names = all_contestants(collective)
    request = BenchmarkRequest(
        collective=collective,
        sizes_bytes=parse_sizes(sizes),
        workers=worker_counts(workers, where, WORKERS),
        place=where,
        contestants=names,
        pythons=dict(map(_mpi, mpis)),
        **limits,
    )
    if report is not None:
        require_place(Path(report))
    with ended_by_signals(), ProgressBar() as bar:
        benchmark = measure_collectives(request, progress=bar)
    if report is not None:
        save_report(benchmark, Path(report))
    show(benchmark, print_benchmark, report, as_json=as_json)


def _mpi(text: str) -> tuple[str, Path]:
    name, equals, python = text.partition("=")
    if not (equals and python):
        raise UserError(f"--mpi {text!r}: expected NAME=PYTHON, such as mpich=env/bin/python")
    return name, Path(python)
