"""``syncline replay``: try plans on an emulated cluster, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from syncline.cli import arguments
from syncline.cli.networks import network_argument, states_workers
from syncline.cli.places import cluster_options
from syncline.cli.progress import ProgressBar
from syncline.errors import UserError
from syncline.files.report.page import require_place
from syncline.lab.processes import ended_by_signals
from syncline.lab.replay.page import print_replay, save_report
from syncline.lab.replay.session import ReplayRequest
from syncline.lab.replay.session import replay as run_replay
from syncline.lab.testbed.cluster import Cluster
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.simulator.transformations import with_compute_scale

EPILOG = """\b
Examples:
  syncline replay profile.json --hosts 4 --rate 1gbit
  syncline replay trace.json.gz --planner ddp,merge,overlap --rate 10gbit --report replayed

Gradients, messages and the network are real. Workers wait instead of computing, because the hosts
share this machine. A time is that of the slowest worker in the steady state. Needs what 'syncline
emulate' needs.
"""

FIELDS = arguments.fields_of(ReplayRequest)
TURNS = ("rounds", "iterations", "warmup")


@click.command(epilog=EPILOG)
@click.argument("profile")
@click.option(
    "--planner",
    metavar="NAME,...",
    default="ddp,overlap",
    help="Planners to compare, 'all' for every one; ddp is torch's own class.",
)
@click.option(
    "--plan",
    "plan_files",
    metavar="FILE",
    multiple=True,
    help="A plan to run as well; may be repeated.",
)
@cluster_options
@arguments.field_options(FIELDS, *TURNS)
@click.option(
    "--scale-compute",
    type=float,
    default=1.0,
    show_default=False,
    metavar="FACTOR",
    help="The device takes this many times as long; 0.5: half.",
)
@click.option(
    "--network",
    metavar="NETWORK",
    help="Plan and predict with this file, preset, rate, line or link.  "
    "[default: probe the cluster]",
)
@arguments.field_options(FIELDS, "timeout_s")
@arguments.clip_option
@arguments.shard_option
@arguments.report_option
@arguments.json_option
def replay(
    profile: str,
    planner: str,
    plan_files: tuple[str, ...],
    scale_compute: float,
    network: str | None,
    report: str | None,
    as_json: bool,
    clip: bool,
    shard: bool,
    **options: Any,
) -> None:
    """Try plans for PROFILE on an emulated cluster: measured against predicted.

    PROFILE is a profile file, or a trace that 'syncline trace' can read.
    """
    read = arguments.profile_argument(profile)
    loaded, notes = arguments.with_clipping(read.known_profile(), clip=clip), read.notes
    if scale_compute != 1:
        notes += (f"computing takes {scale_compute:g} times as long as in the profile",)
    limits = {name: options.pop(name) for name in (*TURNS, "timeout_s")}
    cluster = Cluster.of(**options)
    request = ReplayRequest(
        profile=with_compute_scale(loaded, scale_compute),
        cluster=cluster,
        planners=arguments.planner_names(planner),
        plans=tuple(map(Plan.load, plan_files)),
        network=None if network is None else _network(network, cluster.workers),
        notes=notes,
        shard=shard,
        **limits,
    )
    if report is not None:
        require_place(Path(report))
    with ended_by_signals(), ProgressBar() as bar:
        outcome = run_replay(request, progress=bar)
    if report is not None:
        save_report(outcome, Path(report))
    arguments.show(outcome.replay, print_replay, report, as_json=as_json)


def _network(text: str, workers: int) -> Network:
    """Read a network, and carry it over to as many workers as the cluster has."""
    network = network_argument(text)
    if network.link is not None and network.workers != workers and states_workers(text):
        raise UserError(
            f"--network is of {network.workers} workers, the emulated cluster has {workers}; leave "
            "workers= and hosts= out of it, or emulate as many"
        )
    return network.replace(workers=workers)
