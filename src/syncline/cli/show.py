"""``syncline show``: what is in one of our files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from syncline.cli import arguments
from syncline.comm.groups import Choices
from syncline.files.report.advice import print_advice
from syncline.files.report.tables import TABLES, document_table
from syncline.files.report.whatif_table import print_what_if
from syncline.lab.bench.page import print_benchmark
from syncline.lab.bench.result import Benchmark
from syncline.lab.bench.tuning_report import print_choices
from syncline.lab.replay.page import print_replay
from syncline.lab.replay.result import Replay
from syncline.plan.advice import Advice
from syncline.plan.document import Document, read_document
from syncline.plan.whatif import WhatIf

PRINTERS: dict[type[Document], Callable[[Console, Any], None]] = {
    **dict.fromkeys(TABLES, lambda console, document: console.print(document_table(document))),
    WhatIf: print_what_if,
    Replay: print_replay,
    Benchmark: print_benchmark,
    Choices: print_choices,
    Advice: print_advice,
}


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the validated file as JSON.")
def show(file: Path, as_json: bool) -> None:
    """Show what is in FILE.

    A profile, network, plan, timeline, comparison, what-if, replay, benchmark of
    collectives, choices of algorithms, advice, run or report.
    """
    document = read_document(file, tuple(PRINTERS))
    arguments.show(document, PRINTERS[type(document)], None, as_json=as_json)
