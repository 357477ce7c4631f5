"""``syncline tune``: measure which algorithm is fastest, and keep the choice for later groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from syncline.cli.arguments import field_options, fields_of
from syncline.cli.places import place_of, place_options, worker_counts
from syncline.cli.progress import ProgressBar
from syncline.comm.collectives import PROGRAMS
from syncline.comm.groups import Choices
from syncline.comm.groups.choices import choices_folder, choices_path, load_kept
from syncline.errors import UserError
from syncline.files.report.page import is_page, made_directory, require_place
from syncline.lab.bench.request import Local, TuneRequest, collective_named, parse_sizes
from syncline.lab.bench.tuning import tune as measure
from syncline.lab.bench.tuning_report import print_choices, save_choices_page
from syncline.lab.processes import ended_by_signals

EPILOG = """\b
Examples:
  syncline tune --workers 2,4
  syncline tune --place tcp --collectives all-reduce --page choices.html
  syncline tune --hosts 4 --rate 1gbit
  syncline tune --show

What was measured is kept in the user's cache, and every group of Syncline and every process group
of backend 'syncline' on the same hosts, with as many ranks on each, uses it from then on.
"""
WORKERS = (2, 4)


@click.command(epilog=EPILOG)
@click.option(
    "--collectives", default=",".join(PROGRAMS), metavar="NAME,...", help="Which to measure."
)
@click.option(
    "--sizes",
    default="256..16MiB",
    metavar="SIZE,...",
    help="Sizes of the vector; 256..16MiB is 256, 1024, 4096 bytes and so on.",
)
@click.option("--workers", metavar="P,...", help="Worker counts.  [default: 2,4]")
@place_options
@click.option(
    "--workers-per-host", type=int, help="Workers on each of the emulated hosts.  [default: 1]"
)
@field_options(fields_of(TuneRequest), "rounds", "lap_s", "timeout_s", "deadline_s")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write there instead of to the cache; for one worker count.",
)
@click.option("--page", metavar="FILE.html", help="Write an HTML page with charts.")
@click.option("--json", "as_json", is_flag=True, help="Print an array of JSON documents.")
@click.option("--show", is_flag=True, help="Print what the cache has, and measure nothing.")
@click.pass_context
def tune(
    context: click.Context,
    /,
    collectives: str,
    sizes: str,
    workers: str | None,
    place: Local | None,
    hosts: int | None,
    rate: str | None,
    workers_per_host: int | None,
    output: str | None,
    page: str | None,
    as_json: bool,
    show: bool,
    **limits: Any,
) -> None:
    """Measure which algorithm is fastest for each collective and size, and use it from now on."""
    if page is not None:
        if not is_page(Path(page)):
            raise UserError(f"--page {page}: expected the name of a page, such as choices.html")
        require_place(Path(page))
    if show:
        _require_alone(context)
        _print(_kept(), page, as_json=as_json)
        return
    where = place_of(place, hosts, rate, workers_per_host)
    request = TuneRequest(
        collectives=tuple(map(collective_named, collectives.split(","))),
        sizes_bytes=parse_sizes(sizes),
        workers=worker_counts(workers, where, WORKERS),
        place=where,
        **limits,
    )
    if output is not None and len(request.workers) > 1:
        raise UserError(
            f"-o {output} takes the choices of one worker count, found "
            f"{', '.join(map(str, request.workers))}; name one with --workers"
        )
    if output is None:
        folder = choices_folder()
        if folder is None:
            raise UserError(
                "this user has no home folder, so no cache either; set XDG_CACHE_HOME, or name a "
                "file with -o"
            )
        made_directory(folder)
    with ended_by_signals(), ProgressBar() as bar:
        tuned = measure(request, progress=bar)
    files = [(c, choices_path(c.site) if output is None else Path(output)) for c in tuned.choices]
    for choices, path in files:
        choices.save(path)
    _print(files, page, as_json=as_json)
    if tuned.unfinished:
        what = ", ".join(tuned.unfinished)
        click.echo(
            f"not measured within {request.deadline_s:g} s (--deadline), so as built in: {what}",
            err=True,
        )


def _require_alone(context: click.Context) -> None:
    """Refuse ``--show`` together with options of a measurement."""
    beside = {"show", "as_json", "page"}
    given = click.core.ParameterSource.COMMANDLINE
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in beside and context.get_parameter_source(name) is given:
            raise UserError(f"--show measures nothing, so {parameter.opts[-1]} has no meaning")


def _kept() -> list[tuple[Choices, Path]]:
    """Return all choices in the cache, the latest first."""
    folder, files, unread = choices_folder(), [], ""
    try:
        if folder is not None:
            files = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        pass  # the same as an empty folder
    except OSError as error:
        unread = f", which cannot be read ({error.strerror})"
    if not files:
        raise UserError(f"nothing was measured yet in {folder}{unread}; 'syncline tune' does")
    found = [(load_kept(path), path) for path in files]
    return sorted(found, key=lambda each: each[0].measured, reverse=True)


def _print(files: list[tuple[Choices, Path]], page: str | None, *, as_json: bool) -> None:
    if page is not None:
        save_choices_page([choices for choices, _ in files], Path(page))
    if as_json:
        click.echo(f"[{','.join(choices.to_json().rstrip() for choices, _ in files)}]\n", nl=False)
        return
    console = Console(highlight=False)
    for choices, path in files:
        print_choices(console, choices)
        click.echo(f"kept in {path}\n")
    if page is not None:
        click.echo(f"page written to {page}")
