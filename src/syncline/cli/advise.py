"""``syncline advise``: what limits a training, and what would help, before anything is changed."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from syncline.cli.arguments import json_option, profile_argument, show
from syncline.cli.networks import NETWORK_HELP, network_argument
from syncline.cli.run import start
from syncline.errors import UserError
from syncline.files.report.advice import advice, print_advice

OF_SCRIPTS = {"output": "-o", "seconds": "--seconds", "goes_on": "--continue", "module": "-m"}


@click.command(
    epilog=NETWORK_HELP, context_settings={"allow_interspersed_args": False, "show_default": True}
)
@click.option("-o", "--output", default="runs/advice", help="Folder for what was measured.")
@click.option("--seconds", default=60.0, help="Observe for at most this long.")
@click.option("--continue", "goes_on", is_flag=True, help="Let the training go on afterwards.")
@click.option(
    "--profile",
    metavar="FILE",
    help="Read this profile instead of running a script; give a NETWORK in place of COMMAND.",
)
@json_option
@click.option("-m", "module", is_flag=True, help="COMMAND is a Python module and its arguments.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def advise(
    output: str,
    seconds: float,
    goes_on: bool,
    profile: str | None,
    as_json: bool,
    module: bool,
    command: tuple[str, ...],
) -> None:
    """Observe an unmodified script for a while, and say what limits it and what would help.

    COMMAND is the script or what launches it, as for 'syncline run'. It trains under torch's own
    DDP. The network between its ranks is probed, and a few iterations send all gradients in one
    message, to time the computation. Rank 0 prints the advice; the script ends with exit code 0.
    """
    if profile is not None:
        if len(command) != 1:
            raise UserError(
                f"--profile takes one NETWORK, after all options; found {' '.join(command)}"
            )
        source = click.get_current_context().get_parameter_source
        for name, option in OF_SCRIPTS.items():
            if source(name) is click.core.ParameterSource.COMMANDLINE:
                raise UserError(f"--profile runs no script, so {option} does nothing; leave it out")
        read, network = profile_argument(profile).known_profile(), network_argument(command[0])
        if not network.points or network.workers != read.workers:
            # The baseline was measured on another network.
            read = msgspec.structs.replace(read, baseline=None)
        found = advice(read, network)
        show(found, print_advice, None, as_json=as_json)
        return
    if not seconds > 0:
        raise UserError(f"--seconds must be above 0, found {seconds:g}")
    # Imported here: advice on a profile need not wait for torch.
    from syncline.train.launched.request import Request

    request = Request(
        advises=True,
        folder=str(Path(output).resolve()),
        seconds=seconds,
        goes_on=goes_on,
        json=as_json,
    )
    start(command, request.to_variable(), module=module)
