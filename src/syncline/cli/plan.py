"""``syncline plan``: make a plan from a profile and a network."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from syncline.cli import arguments
from syncline.cli.networks import NETWORK_HELP, network_argument
from syncline.files.report.tables import document_table
from syncline.plan.planners import PLANNERS, planned, planner_named
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.transformations import with_sharding


@click.command(epilog=NETWORK_HELP)
@click.argument("profile")
@click.argument("network")
@click.option(
    "--planner",
    default="auto",
    help=f"Name of the planner: {', '.join(PLANNERS)}. Training can run all their plans. Settings "
    "follow the name: horovod:cycle_s=0.005.",
)
@click.option("--workers", type=int, help="Carry the network over to this many workers.")
@click.option("--algorithm", help="All-reduce algorithm, instead of the network's own.")
@arguments.overlap_option
@arguments.clip_option
@arguments.shard_option
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the plan here.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    profile: str,
    network: str,
    planner: str,
    workers: int | None,
    algorithm: str | None,
    overlap: bool,
    output: str | None,
    as_json: bool,
    clip: bool,
    shard: bool,
) -> None:
    """Plan which gradients of PROFILE to exchange together on NETWORK.

    'auto' chooses as 'syncline train' does before it tries a plan.
    """
    arguments.require_kept(output, profile)
    planner_named(planner)  # report a mistake before files are read
    measured = arguments.with_clipping(Profile.load(profile), clip=clip)
    exchange = network_argument(network, workers=workers, algorithm=algorithm)
    trained = with_sharding(measured, exchange.workers) if shard else measured
    arguments.require_shardable(trained, exchange.density)
    made = planned(planner, trained, exchange, defers=overlap)
    if output is not None:
        made.save(output)
    if as_json:
        click.echo(made.to_json(), nl=False)
    else:
        Console(highlight=False).print(document_table(made))
        arguments.echo_gain(measured, exchange, predict(trained, exchange, made).prediction)
        if output is not None:
            click.echo(f"plan written to {Path(output)}")
