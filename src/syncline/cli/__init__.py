"""The ``syncline`` command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, of this process by default; exit with 0 only on success."""
    if arguments is None:
        signal.signal(signal.SIGINT, _stop)
    # Imported after the line above, without which Ctrl-C would end an import with a traceback.
    import click

    from syncline.cli.commands import cli
    from syncline.cli.output import checked_output
    from syncline.errors import SynclineError, printable

    try:
        with checked_output():
            cli.main(args=arguments, prog_name="syncline", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except SynclineError as error:
        click.echo("error: " + printable(str(error), "\n"), err=True)
        sys.exit(error.exit_code)


def _stop(number: int, _: FrameType | None) -> None:
    """End this process, which has nothing to clean up, at once, with the exit code of a shell.

    A KeyboardInterrupt could be lost instead: modules in C drop exceptions while they are imported.
    """
    with contextlib.suppress(OSError):  # nobody reads any more
        os.write(2, b"stopped\n")  # print() could be interrupted print()
    os._exit(128 + number)
