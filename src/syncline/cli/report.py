"""``syncline report``: render the report of a directory again."""

from __future__ import annotations

from pathlib import Path

import click

from syncline.files.report.bundle import Bundle
from syncline.files.report.page import render, save_report
from syncline.files.report.summary import summarise
from syncline.plan.files import write_atomically


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print report.json instead of the path.")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the page to FILE, and nothing into DIR.",
)
def report(directory: Path, as_json: bool, output: Path | None) -> None:
    """Render report.html, report.json and trace.json again from the files in DIR."""
    bundle = Bundle.load(directory)
    if output is None:
        output = save_report(bundle, directory)
    else:
        write_atomically(output, render(bundle))
    if as_json:
        click.echo(summarise(bundle).to_json(), nl=False)
    else:
        click.echo(output)
