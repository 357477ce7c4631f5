"""What several commands accept: a profile, the fields of a configuration, and common options."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.ddp import Ddp
from syncline.plan.prediction import Prediction
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s

D = TypeVar("D", bound=Document)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def profile_argument(path: str) -> Trace:
    """Read a trace; a profile file is a trace that holds nothing but the profile."""
    # A pipe can be read only once, so it cannot be looked at first.
    form = detect(path) if Path(path).is_file() else None
    if form is None or form.name == "json":
        profile = Profile.load(path)
        return Trace(profile.model, profile)
    with reading_bar() as progress:
        return read_trace([path], form, TraceOptions(progress=progress))[1]


def require_kept(output: str | None, read: str) -> None:
    """Raise a UserError if an output would replace the file that is read."""
    files = [Path(each) for each in (output, read) if each is not None]
    if len(files) == 2 and all(map(Path.exists, files)) and files[0].samefile(files[1]):
        raise UserError(f"{output}: this file is read; write to another one")


def planner_names(text: str) -> tuple[str, ...]:
    """Return the names of planners that ``--planner`` lists."""
    names = tuple(name.strip() for name in text.split(","))
    if names == ("all",):
        return tuple(name for name in PLANNERS if name != "auto")
    if "all" in names:
        raise UserError("--planner all stands alone; leave the other names out")
    return names


def fields_of(of: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    """Return the fields of a configuration by name."""
    return {field.name: field for field in msgspec.structs.fields(of)}


def with_options(*options: Decorator) -> Decorator:
    """Return a decorator that adds options to a command, in the order of its help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def field_options(fields: Mapping[str, FieldInfo], *names: str) -> Decorator:
    """Return a decorator that adds an option for each named field, with the field's own help."""
    return with_options(*(_field_option(fields[name]) for name in names))


FLAGS = {"learning_rate": "lr"}  # field -> its option, where that has another name
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
        settings["default"] = field.default  # the help text describes an empty default
    return click.option(f"--{flag}", field.name, **settings)


report_option = click.option("--report", metavar="DIR|FILE.html", help="Write a report.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def show(
    document: D, print_table: Callable[[Console, D], None], report: str | None, *, as_json: bool
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
    """Raise a UserError for sharded updates with sparse messages."""
    if profile.sharded and density is not None:
        raise UserError(
            "--shard needs dense messages; leave out --shard, or --density and any other sparse "
            "option"
        )


def with_clipping(profile: Profile, *, clip: bool) -> Profile:
    """Return a profile whose updates wait for the 2-norm of all gradients, if ``clip`` says so."""
    return msgspec.structs.replace(profile, norm="2") if clip else profile


def echo_gain(profile: Profile, network: Network, found: Prediction) -> None:
    """Print how a predicted iteration compares with DDP's default buckets."""
    if network.density is not None:
        return  # the network has no cost of DDP's dense messages
    ddp_s = predict_iteration_s(profile, network, Ddp().plan(profile, network))
    click.echo(
        f"\npredicted: {terminal.plain(found.planner)} {units.duration(found.iteration_s)} an "
        f"iteration (90 % interval: {units.between(found.interval_s)}), DDP's default buckets "
        f"{units.duration(ddp_s)}: {ddp_s / found.iteration_s:.2f} times as fast"
    )


class GroupedCommand(click.Command):
    """A command whose ``--help`` shows everyday options, and ``--help-all`` all of them.

    ``groups`` maps each title in ``--help-all`` to the names of its parameters. Those in no group
    are everyday options. ``details`` is shown after the epilog by ``--help-all`` alone.
    """

    def __init__(
        self, *, groups: Mapping[str, Sequence[str]], details: str = "", **others: Any
    ) -> None:
        super().__init__(**others)
        self._groups, self._details, self._shown = groups, details, ["Options"]
        option = click.help_option("--help-all", callback=self._show_all, help="Show all options.")
        option(self)

    def _show_all(self, context: click.Context, _: click.Parameter, is_asked: bool) -> None:
        if is_asked and not context.resilient_parsing:
            whole = copy.copy(self)
            whole._shown = ["Options", *self._groups]
            whole.epilog = f"{self.epilog}\n\n{self._details}"
            click.echo(whole.get_help(context))
            context.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the groups that are shown."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        rows = {str(each.name): each.get_help_record(ctx) for each in options}
        groups = {key: [rows.pop(name) for name in names] for key, names in self._groups.items()}
        for title, found in {"Options": rows.values(), **groups}.items():
            if title in self._shown:
                with formatter.section(title):
                    formatter.write_dl([row for row in found if row is not None])
