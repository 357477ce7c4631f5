"""``syncline show``: what is in one of our files."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from syncline.model.document import Document, read_document
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.prediction import Comparison
from syncline.model.profile import Profile
from syncline.model.run import Run
from syncline.model.timeline import Timeline
from syncline.report.summary import Summary
from syncline.report.tables import document_table

__all__ = ["show"]

KINDS: tuple[type[Document], ...] = (Profile, Network, Plan, Timeline, Comparison, Run, Summary)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the validated file as JSON.")
def show(file: Path, as_json: bool) -> None:
    """Show what is in FILE: a profile, network, plan, timeline, comparison, run or report."""
    document = read_document(file, KINDS)
    if as_json:
        click.echo(document.to_json(), nl=False)
    else:
        Console(highlight=False).print(document_table(document))
