"""Finding the user's mistakes before any worker is started."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from syncline.errors import FileError, MismatchError, quoted
from syncline.lab.training.checkpoint import load_checkpoint
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.group import pick_device
from syncline.lab.training.task import task_of
from syncline.plan.files import require_own_folder
from syncline.plan.network import Network
from syncline.plan.plan import Plan, Tensor
from syncline.plan.profile import Gradient, Profile
from syncline.train.measure.profiler import dtype_name, trainable_parameters


def preflight(config: TrainingConfig, *, workers_here: int) -> None:
    """Check everything that can be checked without training.

    The data are loaded, the model is built, and every file that was named is read; the folders to
    be written to are made.

    ``workers_here`` are those on this host.

    Raises:
        UserError: an option, or a file that it names, cannot be used.
    """
    pick_device(config.device, workers_here)
    task = task_of(config)
    _ = task.steps_per_epoch  # raises where the data do not fill one step
    # Not on the meta device, which loads torch's compiler: that takes longer than to draw weights.
    module = task.build()
    _check_nouns(config, module)
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


def _check_nouns(config: TrainingConfig, module: nn.Module) -> None:
    tensors = [
        Tensor(name=name, elements=p.numel(), dtype=dtype_name(p.dtype))
        for name, p in trainable_parameters(module).items()
    ]
    if config.plan is not None:
        plan = Plan.load(config.plan)
        _refuse(config.plan, plan.difference(tensors, config.workers), "plan")
    if config.profile is not None:
        gradients = Profile.load(config.profile).gradients
        _refuse(config.profile, _difference(gradients, tensors), "profile")
    if config.network is not None:
        network = Network.load(config.network)
        if network.workers != config.workers:
            raise MismatchError(
                f"{config.network}: the network is of {network.workers} workers, this job has "
                f"{config.workers}; measure this one with syncline.probe(), or leave it out"
            )


def _difference(gradients: tuple[Gradient, ...], tensors: list[Tensor]) -> str | None:
    profiled = {g.name: (g.elements, g.dtype) for g in gradients}
    present = {t.name: (t.elements, t.dtype) for t in tensors}
    for name in sorted(profiled.keys() | present.keys()):
        if profiled.get(name) != present.get(name):
            return (
                f"gradient {quoted(name)} is {profiled.get(name)} in the profile, "
                f"{present.get(name)} in this model (elements, dtype; None: it has none)"
            )
    return None


def _refuse(path: str, difference: str | None, noun: str) -> None:
    if difference is not None:
        raise MismatchError(
            f"{path}: {difference}; leave out --{noun} to have the model measured and planned anew"
        )
