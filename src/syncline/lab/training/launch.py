"""Checks what a training was asked for, and starts it on this host."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from rich.console import Console
from torch import nn

from syncline.errors import FileError, MismatchError, PeerError
from syncline.lab.processes import ended_by_signals, place_variables, run_folder, threads_a_worker
from syncline.lab.training.checkpoint import load_checkpoint
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.group import pick_device
from syncline.lab.training.task import task_of
from syncline.lab.workers import ThisHost, WorkerGroup, module_command
from syncline.plan.files import require_own_folder
from syncline.plan.network import Network
from syncline.plan.plan import Plan, Tensor
from syncline.plan.profile import Profile
from syncline.train.measure.profiler import dtype_name, trainable_parameters


def preflight(config: TrainingConfig, *, workers_here: int) -> None:
    """Raise a UserError if an option, or a file that it names, cannot be used.

    Loads the data, builds the model, reads every file that was named, and makes the folders to
    write to. ``workers_here`` is the number of workers on this host.
    """
    pick_device(config.device, workers_here)
    task = task_of(config)
    _ = task.steps_per_epoch  # raises where the data do not fill one step
    # Not on the meta device, which loads torch's compiler; drawing weights takes less time.
    module = task.build()
    _check_files(config, module)
    if config.checkpoint is not None and config.resume:
        path, checkpoint = load_checkpoint(Path(config.checkpoint))
        checkpoint.check(path, config, task.classes, module)
    for option, name in (
        ("--report", config.report),
        ("--checkpoint", config.checkpoint),
        ("--cache", config.cache),
    ):
        if name is None:
            continue
        folder = Path(name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            require_own_folder(folder)
        except OSError as error:
            raise FileError(
                f"{folder}: {option} needs a folder, and it cannot be made: {error.strerror}"
            ) from None


def _check_files(config: TrainingConfig, module: nn.Module) -> None:
    tensors = [
        Tensor(name=name, elements=p.numel(), dtype=dtype_name(p.dtype))
        for name, p in trainable_parameters(module).items()
    ]
    plan = None if config.plan is None else Plan.load(config.plan)
    noun, path = "plan", config.plan
    if config.profile is not None:
        noun, path = "profile", config.profile
        found = Profile.load(path)
        plan = Plan.merging(config.planner, found, config.workers, [len(found.gradients) - 1])
    difference = None if plan is None else plan.difference(tensors, config.workers, noun)
    if difference is not None:
        raise MismatchError(
            f"{path}: {difference}; leave out --{noun} to have the model measured and planned anew"
        )
    if config.network is not None:
        network = Network.load(config.network)
        if network.workers != config.workers:
            raise MismatchError(
                f"{config.network}: the network is of {network.workers} workers, this job has "
                f"{config.workers}; measure this one with syncline.probe(), or leave it out"
            )


ADVICE = "all workers were stopped; start again, with --resume if there is a checkpoint"


def launch(config: TrainingConfig, *, program: str = "syncline.lab.training.worker") -> None:
    """Train with ``config.workers`` processes on this host; return when all are done.

    As soon as one process fails, the others are ended. They find each other through a file that
    only this user can read. They listen on the loopback device only, unless ``GLOO_SOCKET_IFNAME``
    or ``NCCL_SOCKET_IFNAME`` names another. ``program`` is the module that a process runs, with
    ``config`` as its order.

    Raises:
        SynclineError: the error of the worker that failed, in its own class.
        PeerError: a worker was killed; the message names its rank and the signal.
        KeyboardInterrupt: on Ctrl-C, after all workers have ended.
        SystemExit: the same, on SIGTERM, SIGHUP and SIGQUIT.
    """
    count = config.workers
    with ended_by_signals(), run_folder() as folder:
        store = folder / "store"
        store.touch(mode=0o600)
        loopback = socket.if_indextoname(1)  # in every network namespace the first
        environment = {
            **threads_a_worker(count, os.environ),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", loopback),
            "TMPDIR": str(folder),
        }
        try:
            with WorkerGroup(folder) as workers:
                command = module_command(program, workers.path, str(store))
                for rank in range(count):
                    place = place_variables(rank=rank, workers=count, workers_per_host=count)
                    variables = {**environment, **place}
                    workers.start(ThisHost(), command, variables, rank=rank, shown=True)
                workers.gather(count)
                workers.ask(config, None, timeout_s=None)
        except PeerError as error:
            raise PeerError(f"{error}; {ADVICE}") from None
        finally:
            if sys.stderr.isatty():  # the live progress of a killed worker has hidden the cursor
                Console(stderr=True).show_cursor(True)
