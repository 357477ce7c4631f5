"""The ``syncline`` command."""

from __future__ import annotations

import importlib
import sys

import click

from syncline import __version__
from syncline.errors import SynclineError, UserError, did_you_mean
from syncline.processes import stop_on_ctrl_c

__all__ = ["main"]

COMMANDS = (
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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="syncline")
def cli() -> None:
    """Fast synchronous data-parallel training on the network you have."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exit with 0 only on success, 2 for the user's mistake.

    Args:
        arguments: None takes those of this process, and Ctrl-C with them.
    """
    if arguments is None:
        stop_on_ctrl_c()
    try:
        cli.main(args=arguments, prog_name="syncline", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except SynclineError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
