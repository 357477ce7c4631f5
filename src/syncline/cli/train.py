"""``syncline train``: train one of the papers' models, measured, planned and checked."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from syncline.cli.arguments import GroupedCommand, field_options, fields_of
from syncline.errors import UserError, require_known
from syncline.lab.training.config import Hyperparameters, TrainingConfig
from syncline.plan.planners import PLANNERS

EPILOG = """\b
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

Under torchrun the command is one worker of torchrun's job and starts none itself.
"""

NAMES = f"""\b
Compressions:
  gtopk       the largest gradients of all workers, by a butterfly
  gtopk-tree  the same, by the paper's tree and broadcast
  topk        the largest gradients of each worker
  bf16, fp16  all gradients, in 16 bits
  int8        all gradients, in 8 bits; errors are added to later gradients

\b
Planners:
  {textwrap.fill(", ".join(PLANNERS), 76, subsequent_indent="  ")}
"""

OPTIONS = (
    *("workers", "device", "planner", "overlap", "cache", "baseline", "epochs", "batch_size"),
    *("learning_rate", "precision", "checkpoint", "report"),
)
GROUPS = {
    "What is trained": ("data_dir", "steps", "accumulate", "seed", "resume"),
    "Optimizer": ("momentum", "weight_decay", "schedule", "warmup_epochs", "clip_norm"),
    "What is exchanged, and when": ("plan", "profile", "network", "check", "shard"),
    "Lossy exchange": (*("compression", "density", "density_warmup", "dense_below", "step_ahead"),),
    "Measuring and output": ("block_steps", "timeout_s", "json"),
}
"""Fields of the configuration and its hyper-parameters, besides the everyday ones above."""
HYPERPARAMETERS = fields_of(Hyperparameters)
# Their defaults depend on the model.
FIELDS = fields_of(TrainingConfig) | {
    name: msgspec.structs.replace(field, default=None) for name, field in HYPERPARAMETERS.items()
}

training_options = partial(field_options, FIELDS)  # adds options for fields of TrainingConfig


@click.command(cls=GroupedCommand, groups=GROUPS, epilog=EPILOG, details=NAMES)
@click.option("--model", default="resnet20", help="One of those below.")
@click.option("--data", help="One of those below.  [default: by the model]")
@training_options(*OPTIONS, *chain(*GROUPS.values()))
@click.pass_context
def train(context: click.Context, /, model: str, data: str | None, **options: Any) -> None:
    """Train a model on several workers, with the gradient exchange measured, planned and checked.

    Without options: ResNet-20 on scanned digits, with two workers on this machine.
    """
    options["density_warmup"] = _densities(options["density_warmup"])
    overrides = {name: options.pop(name) for name in HYPERPARAMETERS}
    config = configured(context, model, data, overrides, **options)
    # Imported here, so that other commands need not wait for torch.
    from syncline.lab.training.group import started_by_launcher

    if started_by_launcher(os.environ):
        from syncline.lab.training.worker import run_worker

        # Ends a worker inside a collective, too. It has nothing to tidy up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        run_worker(config)
    else:
        from syncline.lab.training.launch import launch

        launch(config)


def configured(
    context: click.Context,
    model: str,
    data: str | None,
    overrides: Mapping[str, object],
    *,
    prefix: str = "",
    **options: Any,
) -> TrainingConfig:
    """Return the configuration of a training with as many workers as asked for, or launched.

    ``prefix`` begins the name of the default output folder.
    """
    from syncline.lab.training.data import DATA, default_data
    from syncline.lab.training.group import started_by_launcher
    from syncline.lab.training.launch import preflight
    from syncline.lab.training.models import model_named

    spec = model_named(model)
    data = data if data is not None else default_data(spec)
    require_known("data set", data, DATA)
    workers_here = options["workers"]
    if started_by_launcher(os.environ):
        started = int(os.environ["WORLD_SIZE"])
        default = context.get_parameter_source("workers") is ParameterSource.DEFAULT
        if not default and workers_here != started:
            raise UserError(
                f"--workers is {workers_here}, but the launcher (torchrun) started {started}; "
                "leave --workers out"
            )
        options["workers"] = started
        workers_here = int(os.environ.get("LOCAL_WORLD_SIZE", started))
    options["report"] = options["report"] or f"runs/{prefix}{model}-{data}"
    config = TrainingConfig.of(model, data, overrides=overrides, **options)
    preflight(config, workers_here=workers_here)
    return config


def _densities(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UserError(
            f"--density-warmup takes densities with commas between them, found {text!r}"
        ) from None
