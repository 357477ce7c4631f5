"""What several commands accept: a profile, the fields of a configuration, and common options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeVar, get_args

import click
import msgspec
from msgspec.structs import FieldInfo
from rich.console import Console

from syncline.cli.progress import reading_bar
from syncline.errors import UserError
from syncline.files.report import terminal, units
from syncline.files.traces.formats import TraceOptions, detect, read_trace
from syncline.files.traces.trace import Trace
from syncline.plan.document import Document
from syncline.plan.network import Network
from syncline.plan.planners.ddp import Ddp
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s

D = TypeVar("D", bound=Document)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def profile_argument(path: str) -> Trace:
    """Return a trace, or a file of a profile as a trace that holds nothing else.

    Raises:
        FileError: the file is missing, broken, or of no known format.
    """
    form = detect(path)
    if form.name == "json":
        profile = Profile.load(path)
        return Trace(profile.model, profile)
    with reading_bar() as progress:
        return read_trace([path], form, TraceOptions(progress=progress))[1]


def fields_of(of: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    """Return the fields of a configuration by name."""
    return {field.name: field for field in msgspec.structs.fields(of)}


def with_options(*options: Decorator) -> Decorator:
    """Give a command options, in the order of the help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def field_options(fields: Mapping[str, FieldInfo], *names: str) -> Decorator:
    """Give a command options for fields, in the order of the names; they describe themselves."""
    return with_options(*(_field_option(fields[name]) for name in names))


FLAGS = {"learning_rate": "lr"}
"""Field -> its option, where that has another name."""
TYPES: dict[str, Any] = {"density_warmup": str, "dense_below": click.IntRange(min=0)}
"""Field -> the type of its option, where that is not the type of the field."""


def _field_option(field: FieldInfo) -> Decorator:
    kind, meta = get_args(field.type)
    kinds = [each for each in get_args(kind) or [kind] if each is not NoneType]
    flag = FLAGS.get(field.name, field.name.removesuffix("_s").replace("_", "-"))
    settings: dict[str, Any] = {"help": meta.description, **(meta.extra or {})}
    if kind is bool:
        settings["is_flag"] = True
        flag = f"{flag}/--no-{flag}" if field.default else flag
    else:
        settings["type"] = TYPES.get(field.name, str if isinstance(kinds[0], str) else kinds[0])
    if field.default not in (None, (), "") and field.default is not False:
        settings["default"] = field.default  # help texts describe empty ones
    return click.option(f"--{flag}", field.name, **settings)


report_option = click.option("--report", metavar="DIR|FILE.html", help="Write a report.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def show(
    document: D,
    print_table: Callable[[Console, D], None],
    report: str | None,
    *,
    as_json: bool,
) -> None:
    """Print a measurement as JSON or as a table, and where its report is."""
    if as_json:
        click.echo(document.to_json(), nl=False)
        return
    print_table(Console(highlight=False), document)
    if report is not None:
        click.echo(f"report written to {report}")


overlap_option = click.option(
    "--overlap/--no-overlap", default=True, help="Overlap messages with the next forward pass."
)
clip_option = click.option(
    "--clip",
    is_flag=True,
    help="Every step clips the norm of all gradients, so every update waits for it.",
)


shard_option = click.option(
    "--shard",
    is_flag=True,
    help="Each worker updates its share of the parameters and keeps state for that alone.",
)


def require_shardable(profile: Profile, density: float | None) -> None:
    """Refuse sharded updates from gradients of which only a part is exchanged.

    Raises:
        UserError: updates are sharded, and only a share of the elements is sent.
    """
    if profile.sharded and density is not None:
        raise UserError(
            "--shard updates shares from whole gradients; leave --shard out, or --density and "
            "what else makes messages sparse"
        )


def with_clipping(profile: Profile, *, clip: bool) -> Profile:
    """Return a profile whose updates wait for the 2-norm of all gradients, if ``clip`` says so."""
    return msgspec.structs.replace(profile, norm="2") if clip else profile


def echo_gain(profile: Profile, network: Network, name: str, iteration_s: float) -> None:
    """Print how a predicted iteration compares with DDP's default buckets.

    If the network has the cost of sparse messages, DDP's own cost is not known.
    """
    if network.density is not None:
        return
    ddp_s = predict_iteration_s(profile, network, Ddp().plan(profile, network))
    click.echo(
        f"\npredicted: {terminal.plain(name)} {units.duration(iteration_s)} an iteration, DDP's "
        f"default buckets {units.duration(ddp_s)}: {ddp_s / iteration_s:.2f} times as fast"
    )
