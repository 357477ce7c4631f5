"""``syncline simulate``: predict the iteration time of one planner or of all."""

from __future__ import annotations

import click
from rich.console import Console

from syncline.cli.networks import NETWORK_HELP, network_argument
from syncline.errors import UserError
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.prediction import Comparison
from syncline.model.profile import Profile
from syncline.model.timeline import Timeline
from syncline.planners import planner_named
from syncline.planners.auto import choose
from syncline.report.tables import comparison_table
from syncline.simulator.predict import predict

__all__ = ["simulate"]


@click.command(epilog=NETWORK_HELP)
@click.argument("profile")
@click.argument("network")
@click.option(
    "--planner", default="all", show_default=True, help="Name of a planner, or 'all' to compare."
)
@click.option("--plan", "plan_file", help="Simulate the plan in this file instead.")
@click.option("--workers", type=int, help="Extrapolate the network to this many workers.")
@click.option("--algorithm", default="ring", show_default=True, help="All-reduce to do so with.")
@click.option("--timeline", "timeline_file", help="Write the (best) timeline here.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def simulate(
    profile: str,
    network: str,
    planner: str,
    plan_file: str | None,
    workers: int | None,
    algorithm: str,
    timeline_file: str | None,
    as_json: bool,
) -> None:
    """Predict the seconds an iteration of PROFILE takes on NETWORK."""
    loaded = Profile.load(profile)
    net = network_argument(network, workers=workers, algorithm=algorithm)
    comparison, timeline = _compare(loaded, net, planner, plan_file)
    if timeline_file is not None:
        timeline.save(timeline_file)
    if as_json:
        click.echo(comparison.to_json(), nl=False)
        return
    Console(highlight=False).print(comparison_table(comparison))
    if timeline_file is not None:
        click.echo(f"timeline of {timeline.name} written to {timeline_file}")


def _compare(
    profile: Profile, network: Network, planner: str, plan_file: str | None
) -> tuple[Comparison, Timeline]:
    if plan_file is not None and planner != "all":
        raise UserError("give either --planner or --plan, not both")
    if plan_file is None and planner in ("all", "auto"):
        choice = choose(profile, network)
        return choice.comparison, choice.forecast.timeline
    if plan_file is not None:
        plan, reason = Plan.load(plan_file), f"the plan in {plan_file}"
    else:
        plan, reason = planner_named(planner).plan(profile, network), f"{planner} was asked for"
    forecast = predict(profile, network, plan)
    comparison = Comparison(
        model=profile.model,
        network=network.name,
        workers=network.workers,
        predictions=(forecast.prediction,),
        chosen=plan.planner,
        reason=reason,
    )
    return comparison, forecast.timeline
