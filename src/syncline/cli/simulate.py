"""``syncline simulate``: predict iteration times, as measured or under other circumstances."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from syncline.cli import arguments, sweep
from syncline.cli.networks import ALGORITHM_ALIASES, NETWORK_HELP, network_argument, states_workers
from syncline.errors import UserError
from syncline.files.report import terminal
from syncline.files.report.page import require_place, save_what_if
from syncline.files.report.tables import comparison_table
from syncline.files.report.whatif_table import print_what_if
from syncline.files.report.whatif_words import REFERENCE, point_comparison
from syncline.files.traces.trace import Trace
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners import planned, planner_named
from syncline.plan.planners.auto import choose, suggestion
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.overlap import candidates
from syncline.plan.prediction import Comparison
from syncline.plan.profile import Profile
from syncline.plan.simulator.calibration import calibrated
from syncline.plan.simulator.predict import predict, timeline_of
from syncline.plan.simulator.study import study
from syncline.plan.simulator.transformations import with_sharding
from syncline.plan.simulator.whatif import Change, WhatIfSimulator
from syncline.plan.timeline import Timeline
from syncline.plan.whatif import WhatIf

WHAT_IF_HELP = """\b
What if: every option of this kind takes a list, such as 1gbit,10gbit; all
combinations are simulated. Worker counts may be a series: 4,8,...,2048."""

GROUPS = {
    "What if the network": ("algorithm", "wire", "density", "jobs"),
    "What if the workers": (
        *("compute_scale", "batch_fixed", "straggler", "spread", "jitter", "seed", "strategy"),
    ),
    "Output": ("point", "timeline_file", "as_json"),
}

Planners = Mapping[str, Callable[[Profile, Network], Plan]]


def _what_if(name: str, metavar: str, text: str) -> arguments.Decorator:
    return click.option(name, metavar=metavar, help=f"What if: {text}")


@click.command(
    cls=arguments.GroupedCommand, groups=GROUPS, epilog=f"{NETWORK_HELP}\n\n{WHAT_IF_HELP}"
)
@click.argument("profile")
@click.argument("network")
@click.option(
    "--planner",
    metavar="NAME,...",
    help="Planners to compare: names, with settings as in horovod:cycle_s=0.005, 'auto' for those "
    "that it chooses from, or 'all'.  [default: auto]",
)
@click.option("--plan", "plan_file", metavar="FILE", help="Simulate the plan in this file instead.")
@click.option(
    "--calibrate",
    metavar="N=TIME,...",
    help="Iterations measured with N workers, such as 8=350ms,16=0.41s, under DDP or the one "
    "planner that is named: NETWORK's link is fitted to them.",
)
@_what_if("--workers", "N,...", "other worker counts, such as 4,8,...,2048.")
@_what_if("--bandwidth", "RATE,...", "links of another rate, such as 10gbit,25gbit.")
@_what_if("--latency", "TIME,...", "links with another latency of a message, such as 20us.")
@_what_if(
    "--algorithm",
    "NAME,...",
    f"other ways to exchange ({', '.join(f'{k} is {v}' for k, v in ALGORITHM_ALIASES.items())}).",
)
@_what_if("--wire", "TYPE,...", "gradients travel as fp32, bf16, fp16, int8 or fp64.")
@_what_if(
    "--density",
    "SHARE,...",
    "send only this share of the elements, by gtopk unless --algorithm is given; none: all.",
)
@_what_if("--jobs", "N,...", "this many equal jobs share the links.")
@_what_if("--compute-scale", "FACTOR,...", "the device takes this many times as long; 0.5: half.")
@_what_if("--batch", "FACTOR,...", "a worker's batch has this many times the samples; 0.5: half.")
@_what_if("--batch-fixed", "SHARE,...", "share of the time that the batch does not change.")
@_what_if("--accumulate", "N,...", "one exchange and update for this many micro-batches.")
@_what_if("--straggler", "FACTOR@RANK,...", "a slower worker; 1.2@3+2@0 for two at once, or none.")
@_what_if("--spread", "SIGMA,...", "workers differ, by a log-normal factor each.")
@_what_if("--jitter", "SIGMA,...", "like --spread, drawn anew for every iteration.")
@_what_if("--seed", "N,...", "other draws of --spread and --jitter.")
@_what_if("--strategy", "NAME,...", "what overlaps is as in loop, caffe-mpi, pytorch, ...; or all.")
@click.option("--point", type=int, metavar="N", help="Say what limits this point of the sweep.")
@arguments.overlap_option
@arguments.clip_option
@arguments.shard_option
@click.option("--report", metavar="DIR|FILE.html", help="Write a report with curves.")
@click.option("--timeline", "timeline_file", metavar="FILE", help="Write the (best) timeline here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate(
    profile: str,
    network: str,
    planner: str | None,
    plan_file: str | None,
    calibrate: str | None,
    point: int | None,
    overlap: bool,
    report: str | None,
    timeline_file: str | None,
    as_json: bool,
    clip: bool,
    shard: bool,
    **asked: str | None,
) -> None:
    """Predict the seconds an iteration of PROFILE takes on NETWORK.

    PROFILE is a profile file, or a trace that 'syncline trace' can read. The worker count is the
    trace's, unless --workers or NETWORK has one.
    """
    arguments.require_kept(timeline_file, profile)
    read = arguments.profile_argument(profile)
    loaded = arguments.with_clipping(read.known_profile(), clip=clip)
    planners = _planners("auto" if planner is None else planner, overlap=overlap)
    plan = None
    if plan_file is not None:
        if planner is not None:
            raise UserError("give either --planner or --plan, not both")
        plan = Plan.load(plan_file)
        plan = plan if overlap else plan.waiting_for_all()
        planners = {plan.planner: lambda *_: plan}
    fixes_workers = plan is not None or asked["workers"] is not None
    base, notes = _network(network, read, fixes_workers=fixes_workers)
    if calibrate is not None:
        if plan is not None:
            raise UserError("--calibrate plans for other worker counts; leave --plan out")
        named = () if planners is None else tuple(planners.values())
        ran = named[0] if len(named) == 1 else partial(planned, Ddp.NAME, defers=overlap)
        times_s = sweep.measured_iterations(calibrate)
        found = calibrated(loaded, base, times_s, ran, track=sweep.tracked)
        base, notes = found.network, (*notes, found.note)
    trained = with_sharding(loaded, base.workers) if shard else loaded
    if sweep.is_plain(asked) and report is None and point is None:
        net = base.replace(
            workers=next(iter(sweep.worker_counts(asked)), None),
            algorithm=next(iter(sweep.algorithms(asked)), None),
        )
        _require_priced(plan, trained, [net.density])
        trained = with_sharding(trained, net.workers) if trained.sharded else trained
        comparison, timeline = _compare(trained, net, planners, plan_file, overlap=overlap)
        output: Comparison | WhatIf = comparison
    else:
        points = sweep.points_of(asked, base.workers)
        exchanges = {(point.algorithm, point.density) for point in points}
        _require_priced(
            plan,
            trained,
            [base.replace(algorithm=a, density=density).density for a, density in exchanges],
        )
        if report is not None:
            require_place(Path(report))
        planners = planners or _by_name((c.NAME for c in candidates(defers=overlap)), overlap)
        simulator = WhatIfSimulator(trained, base, planners, replans=plan is None)
        output, timeline = _sweep(simulator, points, point, loaded.model, notes)
        if report is not None:
            save_what_if(output, timeline, Path(report))
    if timeline_file is not None:
        timeline.save(timeline_file)
    if as_json:
        click.echo(output.to_json(), nl=False)
    else:
        _print(output)
        if isinstance(output, Comparison):
            arguments.echo_gain(loaded, net, output.of(output.chosen))
    for note in notes if isinstance(output, Comparison) else ():
        click.echo(f"note: {terminal.plain(note)}", err=as_json)
    if as_json:
        return
    if timeline_file is not None:
        click.echo(f"timeline of {terminal.plain(timeline.name)} written to {timeline_file}")
    if report is not None:
        click.echo(f"report written to {report}")


def _print(output: Comparison | WhatIf) -> None:
    console = Console(highlight=False)
    if isinstance(output, Comparison):
        console.print(comparison_table(output))
    elif len(output.points) > 1:
        print_what_if(console, output)
    else:
        (point,) = output.points
        console.print(comparison_table(point_comparison(output, point)))
        figures = (
            f"speed-up {point.speed_up(point.best):.4g} of {point.setting.workers}, efficiency "
            f"{point.efficiency(point.best) * 100:.1f} %"
        )
        for text in ("", f"{output.bottleneck.planner} is {output.bottleneck.sentence}", figures):
            console.print(Text(terminal.plain(text)))
        for text in (REFERENCE, *output.notes):
            console.print(Text(terminal.plain(text), style="dim"))


def _network(text: str, read: Trace, *, fixes_workers: bool) -> tuple[Network, tuple[str, ...]]:
    """Return the network, and notes on it and on the profile.

    Its worker count is the trace's, unless ``text`` or another option (``fixes_workers``) has one.
    """
    network = network_argument(text)
    own = network.workers
    if fixes_workers or read.workers in (None, own) or states_workers(text):
        return network, read.notes
    if read.workers == 1:
        note = f"one worker, as in the trace, exchanges nothing: simulated for the {own} of {text}"
    else:
        network = network.replace(workers=read.workers)
        note = f"for {read.workers} workers, as in the trace; --workers {own} takes those of {text}"
    return network, (note, *read.notes)


def _planners(text: str, *, overlap: bool) -> Planners | None:
    """Return the planners asked for; None for those that ``auto`` chooses from."""
    names = arguments.planner_names(text)
    if names == ("auto",):
        return None
    if "auto" in names:
        raise UserError("--planner auto stands alone; leave the other names out")
    for index, name in enumerate(names):
        planner_named(name)
        if name in names[:index]:
            raise UserError(f"--planner names {name!r} twice; name it once")
    return _by_name(names, overlap)


def _by_name(names: Iterable[str], overlap: bool) -> Planners:
    return {name: partial(planned, name, defers=overlap) for name in names}


def _require_priced(plan: Plan | None, profile: Profile, densities: Sequence[float | None]) -> None:
    """Raise a UserError for sparse messages at the cost of dense ones, or with sharded updates."""
    for density in densities:
        arguments.require_shardable(profile, density)
    if plan is not None and plan.is_sparse and None in densities:
        raise UserError(
            "the plan's messages are sparse, and the network says what dense ones cost; give "
            "--density 0.001, or whichever the recipe has, and --algorithm"
        )


def _compare(
    profile: Profile,
    network: Network,
    planners: Planners | None,
    plan_file: str | None,
    *,
    overlap: bool,
) -> tuple[Comparison, Timeline]:
    """Compare planners on the network as it is."""
    if planners is None:
        choice = choose(profile, network, defers=overlap)
        return choice.comparison, choice.forecast.timeline
    plans = [plan(profile, network) for plan in planners.values()]
    forecasts = [predict(profile, network, plan) for plan in plans]
    best = min(forecasts, key=lambda f: (f.prediction.iteration_s, f.prediction.messages))
    reason = "the fastest of those that were asked for"
    if plan_file is not None:
        reason = f"the plan in {plan_file}"
    elif len(plans) == 1:
        reason = f"{best.prediction.planner} was asked for"
    comparison = Comparison(
        model=profile.model,
        network=network.name,
        workers=network.workers,
        predictions=tuple(forecast.prediction for forecast in forecasts),
        chosen=best.prediction.planner,
        reason=reason,
        suggestion=suggestion(profile, network, best.prediction.iteration_s, defers=overlap),
    )
    return comparison, best.timeline


def _sweep(
    simulator: WhatIfSimulator,
    points: list[Change],
    point: int | None,
    model: str,
    notes: tuple[str, ...],
) -> tuple[WhatIf, Timeline]:
    """Simulate every point; the timeline is that of the fastest planner at the chosen one."""
    chosen = None if point is None else point - 1
    made = study(simulator, points, model=model, chosen=chosen, notes=notes, track=sweep.tracked)
    best = simulator.plan_at(points[made.bottleneck.point], made.bottleneck.planner)
    return made, timeline_of(best.scenario, best.plan, best.steady)
