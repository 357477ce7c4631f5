"""``syncline train``: train one of the papers' models, measured, planned and checked."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import click

from syncline.errors import UserError
from syncline.planners import PLANNERS

__all__ = ["train"]

DEFAULT_WORKERS = 2

HYPERPARAMETERS = {
    "epochs": "epochs",
    "batch_size": "batch_size",
    "lr": "learning_rate",
    "momentum": "momentum",
    "weight_decay": "weight_decay",
    "schedule": "schedule",
    "warmup_epochs": "warmup_epochs",
    "clip_norm": "clip_norm",
}
"""Option -> field of the hyper-parameters; each has a default of its own for every model."""

EPILOG = f"""\b
Models:
  resnet20     ResNet-20 for small images
  vgg16        VGG-16 with batch norm for 32x32 images
  alexnet      AlexNet, with a small form for small images
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


@click.command(epilog=EPILOG)
@click.option("--model", default="resnet20", show_default=True, help="One of those below.")
@click.option("--data", help="One of those below.  [default: what is at hand]")
@click.option("--data-dir", help="Folder that the data set is read from.")
@click.option(
    "--workers", type=int, help=f"Processes to start on this host.  [default: {DEFAULT_WORKERS}]"
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option(
    "--strategy", default="ddp", show_default=True, help="How to exchange; one of those below."
)
@click.option("--collectives", help="Of a BSP strategy: auto, lp, mst or be.  [default: auto]")
@click.option("--planner", default="auto", show_default=True, help="How to cut the gradients.")
@click.option("--plan", help="Run the plan in this file.")
@click.option("--profile", help="Plan from the profile in this file instead of measuring one.")
@click.option("--network", help="Plan for the network in this file instead of measuring it.")
@click.option(
    "--overlap/--no-overlap",
    default=True,
    show_default=True,
    help="Let messages go on under the next forward pass.",
)
@click.option("--compression", help="Exchange lossily; one of those below.")
@click.option("--density", type=float, help="Share of the gradients that is sent, sparsely.")
@click.option(
    "--density-warmup", help="Densities of the first epochs, such as 0.25,0.0725,0.015,0.004."
)
@click.option(
    "--dense-below",
    type=click.IntRange(min=0),
    help="Parameters of fewer elements are sent whole beside sparse ones.  [default: 1024]",
)
@click.option(
    "--step-ahead",
    is_flag=True,
    help="Take gradients where what waits to be sent will bring the weights.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Go back to DDP's own exchange where that is faster.",
)
@click.option("--baseline", is_flag=True, help="Train a twin under torch's DDP, and compare.")
@click.option(
    "--block-steps", type=int, default=10, show_default=True, help="Steps a turn of each twin."
)
@click.option("--epochs", type=int, help="Passes over the data.")
@click.option("--steps", type=int, help="Stop after this many steps.")
@click.option("--batch-size", type=int, help="Samples a worker in one forward pass.")
@click.option("--accumulate", type=int, default=1, show_default=True, help="Forward passes a step.")
@click.option("--lr", type=float, help="Highest learning rate.")
@click.option("--momentum", type=float, help="Momentum of SGD.")
@click.option("--weight-decay", type=float, help="Weight decay of SGD.")
@click.option("--schedule", help="Learning rate over time: constant, step or cosine.")
@click.option("--warmup-epochs", type=float, help="Epochs over which the learning rate rises.")
@click.option("--clip-norm", type=float, help="Largest norm of the gradients.")
@click.option("--precision", default="float32", show_default=True, help="float32 or bf16.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all randomness.")
@click.option("--checkpoint", help="Folder to write a checkpoint to after every epoch.")
@click.option("--resume", is_flag=True, help="Continue from the checkpoint.")
@click.option("--report", help="Folder of the report.  [default: runs/<model>-<data>]")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds after which a silent worker counts as lost.",
)
@click.option("--json", is_flag=True, help="Print one JSON object at the end.")
def train(model: str, data: str | None, workers: int | None, **options: Any) -> None:
    """Train a model on several workers, with the gradient exchange measured, planned and checked.

    Without options: ResNet-20 on scanned digits, with two workers on this machine.
    """
    # Here, so that other commands need not wait for torch.
    from syncline.training.config import TrainingConfig
    from syncline.training.data import data_named, default_data
    from syncline.training.group import started_by_launcher
    from syncline.training.models import model_named
    from syncline.training.preflight import preflight

    spec = model_named(model)
    data = data if data is not None else default_data(spec)
    data_named(data)
    launched = started_by_launcher(os.environ)
    if launched:
        workers = _workers_of_launcher(workers, os.environ)
    options["density_warmup"] = _densities(options.pop("density_warmup"))
    overrides = {field: options.pop(option) for option, field in HYPERPARAMETERS.items()}
    config = TrainingConfig.of(
        model,
        data,
        overrides=overrides,
        workers=DEFAULT_WORKERS if workers is None else workers,
        **options,
    )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", config.workers)) if launched else config.workers
    preflight(config, workers_here=here)
    if launched:
        from syncline.training.worker import run_worker

        # Ends a worker inside a collective, too. It has nothing to tidy up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        run_worker(config)
    else:
        from syncline.training.launch import launch

        launch(config)


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
