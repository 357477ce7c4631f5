"""All commands by name."""

from __future__ import annotations

import importlib

import click

from syncline import __version__
from syncline.errors import UserError, did_you_mean

COMMANDS = (
    "run",
    "advise",
    "train",
    "profile",
    "plan",
    "simulate",
    "emulate",
    "replay",
    "bench",
    "tune",
    "trace",
    "show",
    "report",
    "help",
)


class _Commands(click.Group):
    """Imports a command when it is called: ``plan`` must not wait for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            ctx.fail(f"no such command {cmd_name!r}{did_you_mean(cmd_name, COMMANDS)}")
        module = importlib.import_module(f"syncline.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise UserError(
                "this command needs torch, which is not installed; install it with: "
                "pip install 'syncline[train]'"
            ) from None


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="syncline")
def cli() -> None:
    """Fast synchronous data-parallel training on the network you have."""
