"""``syncline trace``: what trace files hold, and their conversion from one format to another."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from syncline.cli.arguments import with_options
from syncline.cli.networks import NETWORK_HELP, network_argument
from syncline.cli.progress import reading_bar
from syncline.errors import UserError
from syncline.files.report import terminal, units
from syncline.files.traces.astrasim import DEFAULT_CLOCK_HZ
from syncline.files.traces.formats import (
    FORMATS,
    Format,
    TraceOptions,
    format_named,
    read_trace,
    write_trace,
)
from syncline.files.traces.trace import Trace
from syncline.plan.document import Document
from syncline.plan.files import write_atomically
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import NOT_COMPUTED, UNEXPLAINED
from syncline.plan.simulator.predict import predict_iteration_s


def _formats_help() -> str:
    width = max(map(len, FORMATS))
    lines = []
    for form in FORMATS.values():
        ways = "read" if form.write is None else "written" if form.read is None else "read, written"
        lines.append(f"  {form.name:{width}}  {form.summary} ({ways})")
    return "\b\nFormats:\n" + "\n".join(lines)


@click.group(epilog=_formats_help())
def trace() -> None:
    """See what a trace of another tool holds, and convert it.

    The beginning of a file shows its format. Files may be packed with gzip.
    """


_reading_options = with_options(
    click.option("--from", "from_format", help="Read the files as of this format."),
    click.option(
        "--clock-hz",
        type=float,
        help="Cycles a second, where times are cycles (astrasim).  "
        f"[default: {DEFAULT_CLOCK_HZ:g}]",
    ),
    click.option("--step", type=int, help="Take this step only, of a profiler trace (kineto)."),
    click.option(
        "--sizes",
        metavar="FILE",
        help="Sizes that a profiler trace lacks: a header 'name elements' or 'name bytes', then a "
        "line for each gradient in the order in which they become ready.",
    ),
)
"""Give a command the options that :func:`_read` takes."""


@trace.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@_reading_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(files: tuple[str, ...], as_json: bool, **reading: Any) -> None:
    """Show what a trace holds, and what could not be recovered from it.

    Several FILEs form one trace: profiler traces of several ranks, or a profiler trace with its
    execution trace. A profiler trace's step is also simulated, beside what was measured.
    """
    form, found, _ = _read(files, **reading)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_facts(form, found))).decode())
        return
    console = Console(highlight=False)
    console.print(terminal.title(f"Trace {found.model}"))
    console.print(terminal.facts(_rows(form, found)))


@trace.command(epilog=NETWORK_HELP)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--to", "to_format", required=True, help="Format to write.")
@click.option("-o", "--output", required=True, help="File to write.")
@click.option("--network-out", help="Write the network of the timed messages here.")
@click.option("--plan-out", help="Write the messages that were sent here, as a plan.")
@click.option("--network", help="What messages cost, for formats that hold it.  [default: FILE's]")
@click.option("--workers", type=int, help="Workers that exchanged the messages, if FILE lacks it.")
@_reading_options
def convert(
    files: tuple[str, ...],
    to_format: str,
    output: str,
    network_out: str | None,
    plan_out: str | None,
    network: str | None,
    workers: int | None,
    **reading: Any,
) -> None:
    """Convert a trace to another format, and say what that format cannot hold."""
    target = format_named(to_format)
    _, found, options = _read(files, target, **reading)
    beside: list[tuple[str, Document, str]] = []
    missing: UserError | None = None
    if network_out is not None:
        try:
            beside.append(("network", found.network(workers), network_out))
        except UserError as error:
            if found.has_network:
                raise
            missing = error  # the trace has no network: the rest is written all the same
    if plan_out is not None:
        if found.plan is None:
            raise UserError(
                f"{files[0]}: the trace does not hold the messages that were sent; leave out "
                "--plan-out"
            )
        beside.append(("plan", found.plan, plan_out))
    written = write_trace(found, target, _network(found, network, workers), options)
    write_atomically(Path(output), written.content)
    click.echo(f"{target.name} written to {output}")
    for name, document, path in beside:
        document.save(path)
        click.echo(f"{name} written to {path}")
    for sentence in written.lost:
        click.echo(f"  lost: {terminal.plain(sentence)}")
    if missing is not None:
        raise UserError(f"no network written: {missing}") from missing


def _read(
    files: tuple[str, ...],
    target: Format | None = None,
    *,
    from_format: str | None,
    clock_hz: float | None,
    step: int | None,
    sizes: str | None,
) -> tuple[Format, Trace, TraceOptions]:
    """Return the format of the files, what they hold, and the options for writing it as another."""
    form = None if from_format is None else format_named(from_format)
    options = TraceOptions(
        clock_hz=DEFAULT_CLOCK_HZ if clock_hz is None else clock_hz, step=step, sizes=sizes
    )
    with reading_bar() as progress:
        form, found = read_trace(files, form, options._replace(progress=progress))
    if clock_hz is not None and all(each.name != "astrasim" for each in (form, target or form)):
        raise UserError(
            "--clock-hz is for astrasim workloads, whose times are cycles; leave it out"
        )
    return form, found, options


def _network(found: Trace, named: str | None, workers: int | None) -> Network | None:
    """Return what the messages cost: as named, else as timed in the trace, else None."""
    if named is not None:
        return network_argument(named, workers=workers)
    if not found.has_network:
        return None
    # Only its costs are asked for here, which do not depend on the worker count.
    return found.network(workers or found.workers or 1)


def _simulated_s(found: Trace) -> float | None:
    """Return what a step takes as simulated from the trace itself, if that holds enough for it."""
    profile = found.profile
    if profile is None or not found.iteration_s:
        return None
    plan = found.plan
    if plan is None:
        plan = Plan.merging("no messages", profile, 1, [len(profile.gradients) - 1])
        network = Network.line(workers=1, a_s=0.0, b_s_per_byte=0.0)
    elif found.has_network:
        network = found.network(plan.workers)
    elif found.points:
        time_s = found.points[0].time_s
        network = Network.line(workers=plan.workers, a_s=time_s, b_s_per_byte=0.0)
    else:
        return None
    return predict_iteration_s(profile, network, plan)


def _facts(form: Format, found: Trace) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "format": form.name,
        "model": found.model,
        "steps": found.steps,
        "workers": found.workers,
    }
    if (profile := found.profile) is not None:
        operations = profile.operations
        waits = [o for o in operations if o.lane in NOT_COMPUTED]
        computed = [o for o in operations if o.lane not in NOT_COMPUTED]
        facts |= {
            "operations": len(operations),
            "gradients": len(profile.gradients),
            "gradient_bytes": profile.gradient_bytes,
            "computation_s": profile.computation_s,
            "phases_s": {
                phase: math.fsum(o.duration_s for o in computed if o.phase == phase)
                for phase in dict.fromkeys(o.phase for o in operations)
            },
            "host_s": sum(o.duration_s for o in operations if o.lane == "host"),
            "waiting_s": sum(o.duration_s for o in waits if not o.name.startswith(UNEXPLAINED)),
            "unexplained_s": sum(o.duration_s for o in waits if o.name.startswith(UNEXPLAINED)),
        }
    if (timeline := found.timeline) is not None:
        spans = timeline.spans
        facts |= {"iteration_s": timeline.iteration_ns / 1e9, "spans": len(spans)}
        if profile is None:
            facts["phases_s"] = {
                kind: sum(s.stop_ns - s.start_ns for s in spans if s.kind == kind) / 1e9
                for kind in dict.fromkeys(span.kind for span in spans)
            }
    if (simulated_s := _simulated_s(found)) is not None:
        facts |= {"measured_s": found.iteration_s, "simulated_s": simulated_s}
    if (plan := found.plan) is not None:
        facts |= {
            "tensors": len(plan.tensors),
            "messages": len(plan.messages),
            "message_bytes": sum(plan.message_bytes()),
        }
    facts |= {
        "timed_messages": [
            {"bytes": p.size_bytes, "seconds": p.time_s, "repetitions": p.repetitions}
            for p in found.points
        ],
        "notes": list(found.notes),
    }
    return facts


def _rows(form: Format, found: Trace) -> Iterable[tuple[str, str]]:
    facts = _facts(form, found)
    phases = [(f"  {phase}", units.duration(s)) for phase, s in facts.get("phases_s", {}).items()]
    yield "format", f"{form.name}: {form.summary}"
    yield "steps", str(found.steps)
    yield "workers", "unknown" if found.workers is None else str(found.workers)
    if found.profile is not None:
        yield "operations", str(facts["operations"])
        yield "gradients", f"{facts['gradients']}, {units.size(facts['gradient_bytes'])}"
        yield "computation", units.duration(facts["computation_s"])
        yield from phases
        for name, key in (
            ("  of these on the CPU", "host_s"),
            ("  other workers", "waiting_s"),
            ("  unexplained waits", "unexplained_s"),
        ):
            if facts[key]:
                yield name, units.duration(facts[key])
    if found.timeline is not None:
        yield "iteration", units.duration(facts["iteration_s"])
        yield "spans", str(facts["spans"])
        if found.profile is None:
            yield from phases
    if "simulated_s" in facts:
        error = facts["simulated_s"] / facts["measured_s"] - 1
        yield "median step", units.duration(facts["measured_s"])
        yield "  simulated", f"{units.duration(facts['simulated_s'])} ({error * 100:+.1f} %)"
    if found.plan is not None:
        size = units.size(facts["message_bytes"])
        yield "messages", f"{facts['messages']} of {facts['tensors']} tensors, {size}"
    if found.points:
        sizes = [point.size_bytes for point in found.points]
        count = sum(point.repetitions for point in found.points)
        yield "timed messages", f"{count}, {units.size(min(sizes))} to {units.size(max(sizes))}"
    for index, note in enumerate(found.notes):
        yield "" if index else "note", note
