"""The ``syncline`` command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line (None: this process's); exit 0 on success, 2 on a user's mistake."""
    if arguments is None:
        signal.signal(signal.SIGINT, _stop)
    # Imported after the line above, without which Ctrl-C would end an import with a traceback.
    import click

    from syncline.cli.commands import cli
    from syncline.cli.output import checked_output
    from syncline.errors import SynclineError, printable

    if os.environ.get("COLUMNS") == "0":  # unknown; rich would print nothing
        del os.environ["COLUMNS"]
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
    """Exit at once with a shell's exit code for the signal; there is nothing to clean up.

    A KeyboardInterrupt could get lost: C modules may swallow exceptions while they are imported.
    """
    with contextlib.suppress(OSError):  # standard error is closed
        os.write(2, b"stopped\n")  # print() must not interrupt itself
    os._exit(128 + number)
