"""``syncline run``: train an unmodified script with Syncline."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from pathlib import Path

import click

from syncline.cli.train import NAMES, training_options
from syncline.errors import UserError
from syncline.lab.processes import reason_of
from syncline.lab.training.config import (
    DENSE_BELOW,
    compression_named,
    is_sparse,
    require_compression,
)
from syncline.plan.planners import planner_named
from syncline.plan.recipe import Compression

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""With 0, torch does not call the entry points that load Syncline into a script's processes."""

EPILOG = f"""{NAMES}
\b
Under a launcher, either works:
  torchrun --nproc-per-node 2 -m syncline.run train.py ARGS
  syncline run -- torchrun --nproc-per-node 2 train.py ARGS

If SYNCLINE=0 is set, such a job trains as without 'syncline run'.
"""


@click.command(
    epilog=EPILOG, context_settings={"allow_interspersed_args": False, "show_default": True}
)
@training_options("planner", "compression", "density", "check")
@click.option(
    "--cache",
    metavar="DIR",
    help="Keep plans here for the next start; none: keep none.  [default: the user's cache]",
)
@click.option(
    "--compile-blocks",
    is_flag=True,
    help="Where the script compiles the whole model, compile its repeated blocks instead.",
)
@click.option("--report", metavar="DIR", help="Write the report here at the end, on rank 0.")
@click.option("-m", "module", is_flag=True, help="COMMAND is a Python module and its arguments.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def run(
    planner: str,
    compression: str | None,
    density: float | None,
    check: bool,
    cache: str | None,
    compile_blocks: bool,
    report: str | None,
    module: bool,
    command: tuple[str, ...],
) -> None:
    """Train an unmodified script: COMMAND is the script or what launches it, with its arguments.

    Every model that the script or its framework wraps in torch's DistributedDataParallel is
    converted to Syncline's when it first trains; updates overlap with the next forward pass. What
    cannot be converted trains as before, and one line says why. Nothing on disk is changed.
    """
    # Imported here, so that the help need not wait for torch.
    from syncline.train.launched.request import Request

    planner_named(planner)
    request = Request(
        planner=planner,
        check=check,
        compression=_compression(compression, density),
        cache=cache != "none" and (cache is None or str(Path(cache).resolve())),
        compile_blocks=compile_blocks,
        report=None if report is None else str(Path(report).resolve()),
    )
    start(command, request.to_variable(), module=module)


def start(command: tuple[str, ...], variables: dict[str, str], *, module: bool) -> None:
    """Replace this process by a command, or by Python with a script or module."""
    if not metadata.entry_points(group="torch.backends", name="syncline"):
        raise UserError(
            "syncline is not installed in this environment, so torch would not load it; install it "
            "with pip"
        )
    if os.environ.get(AUTOLOAD) == "0":
        raise UserError(f"{AUTOLOAD}=0 keeps torch from loading Syncline; unset it")
    words = list(command)
    if module or words[0].endswith(".py"):
        unbuffered = ["-u"] if getattr(sys.__stdout__, "write_through", False) else []
        flags = [*unbuffered, *_args_from_interpreter_flags()]
        words = [sys.executable, *flags, *(["-m"] if module else []), *words]
    environment = {**os.environ, **variables}
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        reason = reason_of(error, words[0], environment)
        raise UserError(f"{words[0]} cannot be started: {reason}") from None


def _compression(name: str | None, density: float | None) -> Compression | None:
    if name is not None:
        require_compression(name)
    if is_sparse(name) != (density is not None):
        raise UserError("--compression gtopk, gtopk-tree or topk and --density go together")
    if name is None:
        return None
    return compression_named(name, density, dense_below_elements=DENSE_BELOW)
