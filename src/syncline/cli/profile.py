"""``syncline profile``: measure one of the papers' models and the network under its workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from syncline.cli.train import configured, training_options
from syncline.files.report import terminal
from syncline.files.report.bundle import DOCUMENTS
from syncline.files.report.tables import document_table
from syncline.files.traces.layer_table import write_layer_table
from syncline.plan.files import write_atomically
from syncline.plan.network import Network
from syncline.plan.profile import Profile
from syncline.plan.quantities import require_count


@click.command()
@click.option("--model", default="resnet20", help="A model of 'syncline train'.")
@click.option("--data", help="A data set of 'syncline train'.  [default: by the model]")
@training_options("data_dir", "workers", "device", "batch_size", "precision")
@click.option(
    "--iterations",
    type=int,
    default=100,
    help="Iterations that give the durations; three times as many are run.",
)
@training_options("seed")
@click.option("-o", "--output", help="Folder to write to.  [default: runs/profile-<model>-<data>]")
@click.option(
    "--export-papers-table",
    "table_file",
    help="Write the layer-wise table of the papers here, too (dag-model, Table VI).",
)
@training_options("timeout_s")
@click.pass_context
def profile(
    context: click.Context,
    /,
    model: str,
    data: str | None,
    batch_size: int | None,
    iterations: int,
    output: str | None,
    table_file: str | None,
    **options: Any,
) -> None:
    """Measure a model's computing times and its network; no plan is made.

    Writes profile.json and network.json, for 'syncline plan' and 'syncline simulate', and
    layers.txt.gz, the papers' table of every iteration. Durations of the profile are medians over
    the iterations and the workers.

    Under torchrun or 'syncline emulate' the command is one worker of that job and starts none
    itself.
    """
    require_count("--iterations", iterations)
    config = configured(
        context,
        model,
        data,
        {"batch_size": batch_size},
        prefix="profile-",
        report=output,
        steps=iterations,
        **options,
    )
    folder = Path(config.report)
    # Imported here, so that other commands need not wait for torch.
    from syncline.lab.training.group import started_by_launcher
    from syncline.lab.training.launch import launch
    from syncline.lab.training.profiling import LAYERS, run_profiling

    if started_by_launcher(os.environ):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a worker inside a collective, too
        run_profiling(config)
        if os.environ["RANK"] != "0":
            return
    else:
        launch(config, program="syncline.lab.training.profiling")
    paths = [folder / DOCUMENTS[noun][0] for noun in ("profile", "network")]
    found, network = Profile.load(paths[0]), Network.load(paths[1])
    console = Console(highlight=False)
    for document in (found, network):
        console.print(document_table(document))
        console.print()
    for path in (*paths, folder / LAYERS):
        click.echo(f"written: {path}")
    if table_file is not None:
        table = write_layer_table(found, network)
        write_atomically(Path(table_file), table.content)
        click.echo(f"written: {table_file}")
        for sentence in table.lost:
            click.echo(f"  lost: {terminal.plain(sentence)}")
