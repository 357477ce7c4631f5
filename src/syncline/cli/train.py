"""``syncline train``: train one of the papers' models, measured, planned and checked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, get_args

import click
import msgspec
from click.core import ParameterSource

from syncline.errors import UserError
from syncline.planners import PLANNERS
from syncline.training.config import TrainingConfig
from syncline.training.hyperparameters import Hyperparameters

__all__ = ["launched_workers", "train", "training_options", "workers_here"]

EPILOG = f"""\b
Models:
  resnet20     ResNet-20 for small images
  vgg16        VGG-16 with batch norm for 32x32 images
  alexnet      AlexNet, with a small form for small images
  googlenet    GoogLeNet, without its auxiliary classifiers
  resnet50     ResNet-50
  lstm         two-layer LSTM language model
  transformer  decoder-only transformer language model

\b
Data:
  digits       scanned digits that come with scikit-learn (default for images)
  cifar10      CIFAR-10, binary version, from --data-dir
  imagefolder  train/<class>/ and val/<class>/, from --data-dir
  text         the text of Python's help() (default for language models)
  ptb          Penn Treebank, ptb.train.txt and so on, from --data-dir

\b
Strategies:
  ddp    Syncline's DistributedDataParallel: all-reduces, planned
  bsp-1  broadcast and reduce layer by layer, overlapped; the root updates
  bsp-2  reduce, the root updates, broadcast; with --planner: merged messages
  bsp-3  all-reduce; all update; the weights are broadcast now and then

\b
Collectives of the BSP strategies:
  auto  what is fastest for each size
  lp    linear pipeline
  mst   minimum spanning tree
  be    bidirectional exchange

\b
Compressions:
  gtopk       the largest gradients of all workers, by a butterfly
  gtopk-tree  the same, by the paper's tree and broadcast
  topk        the largest gradients of each worker
  bf16, fp16  all gradients, in 16 bits

\b
Planners:
  {", ".join(PLANNERS)}

Under torchrun the command is one worker of torchrun's job and starts none itself.
"""


OPTIONS = (
    *("data_dir", "workers", "device", "strategy", "collectives", "planner"),
    *("plan", "profile", "network", "overlap", "compression", "density", "density_warmup"),
    *("dense_below", "step_ahead", "check", "baseline", "block_steps", "epochs", "steps"),
    *("batch_size", "accumulate", "learning_rate", "momentum", "weight_decay", "schedule"),
    *("warmup_epochs", "clip_norm", "precision", "seed", "checkpoint", "resume", "report"),
    *("timeout_s", "json"),
)
"""Fields of the configuration and of its hyper-parameters, in the order of the help."""
FLAGS = {"learning_rate": "--lr", "timeout_s": "--timeout"}
"""Of fields whose option has another name."""
FROM_TEXT: dict[str, Any] = {"density_warmup": str, "dense_below": click.IntRange(min=0)}
"""Types of options where those of their fields do not do."""

HYPERPARAMETERS = {field.name: field for field in msgspec.structs.fields(Hyperparameters)}
FIELDS = {field.name: field for field in msgspec.structs.fields(TrainingConfig)}


def training_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command options for fields of a training's configuration.

    Args:
        names: of fields, in the order of the help.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            command = _option(name)(command)
        return command

    return add


def _option(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    field = HYPERPARAMETERS.get(name) or FIELDS[name]
    kind, meta = get_args(field.type)
    kinds = [each for each in get_args(kind) or [kind] if each is not NoneType]
    flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
    settings: dict[str, Any] = {"help": meta.description}
    if kind is bool:
        settings["is_flag"] = True
        if field.default:
            flag = f"{flag}/--no-{name.replace('_', '-')}"
    else:
        settings["type"] = FROM_TEXT.get(name, str if isinstance(kinds[0], str) else kinds[0])
    # Defaults of hyper-parameters depend on the model; empty ones are described.
    shown = name in FIELDS and field.default not in (None, (), "") and field.default is not False
    if shown:
        settings["default"] = field.default
    return click.option(flag, name, **settings)


@click.command(epilog=EPILOG)
@click.option("--model", default="resnet20", help="One of those below.")
@click.option("--data", help="One of those below.  [default: what is at hand]")
@training_options(*OPTIONS)
@click.pass_context
def train(context: click.Context, /, model: str, data: str | None, **options: Any) -> None:
    """Train a model on several workers, with the gradient exchange measured, planned and checked.

    Without options: ResNet-20 on scanned digits, with two workers on this machine.
    """
    # Here, so that other commands need not wait for torch.
    from syncline.training.data import data_named, default_data
    from syncline.training.group import started_by_launcher
    from syncline.training.models import model_named
    from syncline.training.preflight import preflight

    spec = model_named(model)
    data = data if data is not None else default_data(spec)
    data_named(data)
    launched = started_by_launcher(os.environ)
    options["workers"] = launched_workers(context, options["workers"])
    options["density_warmup"] = _densities(options["density_warmup"])
    overrides = {name: options.pop(name) for name in HYPERPARAMETERS}
    config = TrainingConfig.of(model, data, overrides=overrides, **options)
    preflight(config, workers_here=workers_here(config, os.environ))
    if launched:
        from syncline.training.worker import run_worker

        # Ends a worker inside a collective, too. It has nothing to tidy up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        run_worker(config)
    else:
        from syncline.training.launch import launch

        launch(config)


def launched_workers(context: click.Context, workers: int) -> int:
    """Return how many workers there are: of the launcher if there is one, else as asked.

    Raises:
        UserError: both were given and differ.
    """
    from syncline.training.group import started_by_launcher

    if not started_by_launcher(os.environ):
        return workers
    default = context.get_parameter_source("workers") is ParameterSource.DEFAULT
    return _workers_of_launcher(None if default else workers, os.environ)


def workers_here(config: TrainingConfig, environment: Mapping[str, str]) -> int:
    """Return how many workers of the job run on this host."""
    from syncline.training.group import started_by_launcher

    launched = started_by_launcher(environment)
    return int(environment.get("LOCAL_WORLD_SIZE", config.workers)) if launched else config.workers


def _densities(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UserError(
            f"--density-warmup takes densities with commas between them, found {text!r}"
        ) from None


def _workers_of_launcher(workers: int | None, environment: Mapping[str, str]) -> int:
    started = int(environment["WORLD_SIZE"])
    if workers not in (None, started):
        raise UserError(
            f"--workers is {workers}, but the launcher (torchrun) started {started}; "
            "leave --workers out"
        )
    return started
