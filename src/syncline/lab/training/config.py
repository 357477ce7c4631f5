"""``TrainingConfig``: all that ``syncline train`` was asked for, and each model's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from syncline.errors import UserError, require_known
from syncline.plan.document import Value, described
from syncline.plan.planners import planner_named
from syncline.plan.quantities import require_count, require_finite
from syncline.plan.recipe import SPARSE_NAMES, Compression, Recipe, Rounded

ScheduleName = Literal["constant", "step", "cosine"]

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class Hyperparameters(Value, frozen=True):
    """Settings of the optimizer, SGD with momentum; a description is the help of an option."""

    epochs: Annotated[int, described("Passes over the data.")]
    batch_size: Annotated[int, described("Samples a worker in one forward pass.")]  # text: rows
    learning_rate: Annotated[float, described("Highest learning rate.")]  # for any workers
    momentum: Annotated[float, described("Momentum of SGD.")] = 0.9
    weight_decay: Annotated[float, described("Weight decay of SGD.")] = 0.0
    schedule: Annotated[
        ScheduleName, described("Learning rate over time: constant, step or cosine.")
    ] = "cosine"
    warmup_epochs: Annotated[float, described("Epochs over which the learning rate rises.")] = 0.0
    clip_norm: Annotated[float | None, described("Largest norm of the gradients.")] = None

    def __post_init__(self) -> None:
        require_count("--epochs", self.epochs)
        require_count("--batch-size", self.batch_size)
        require_finite("--lr", self.learning_rate, above_0=True)
        if not 0 <= self.momentum < 1:
            raise UserError(f"--momentum must be at least 0 and below 1, found {self.momentum}")
        require_finite("--weight-decay", self.weight_decay)
        require_finite("--warmup-epochs", self.warmup_epochs)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"--clip-norm must be above 0, found {self.clip_norm}")
        require_known("schedule", self.schedule, SCHEDULES)


# Epochs, batch size and learning rate come first.
_IMAGENET = Hyperparameters(90, 64, 0.1, weight_decay=1e-4, schedule="step", warmup_epochs=5)

_DEFAULTS: dict[str, Hyperparameters] = {
    # gTop-k, Table V: 140 epochs, 128 samples over all workers, learning rate 0.1.
    "resnet20": Hyperparameters(140, 64, 0.1, weight_decay=1e-4, schedule="step"),
    "vgg16": Hyperparameters(140, 64, 0.05, weight_decay=5e-4, warmup_epochs=1),
    # Without batch norm a learning rate of 0.1 diverges; 0.01 is that of gTop-k, Table V.
    "alexnet": msgspec.structs.replace(_IMAGENET, learning_rate=0.01, weight_decay=5e-4),
    "googlenet": msgspec.structs.replace(_IMAGENET, learning_rate=0.01, weight_decay=2e-4),
    "resnet50": _IMAGENET,
    "lstm": Hyperparameters(40, 20, 1.0, clip_norm=0.25, warmup_epochs=0.5),
    "transformer": Hyperparameters(20, 16, 0.1, clip_norm=1.0, warmup_epochs=0.5),
}

_DEFAULTS_ON_DATA: dict[tuple[str, str], Hyperparameters] = {
    ("resnet20", "digits"): Hyperparameters(15, 16, 0.1, weight_decay=5e-4, warmup_epochs=1),
    ("lstm", "text"): Hyperparameters(8, 20, 4.0, clip_norm=0.25, warmup_epochs=0.5),
    ("transformer", "text"): Hyperparameters(5, 16, 0.2, clip_norm=1.0, warmup_epochs=0.5),
}
"""Replacements for the above on a certain data set."""


def default_hyperparameters(model: str, data: str) -> Hyperparameters:
    """Return the hyper-parameters that ``model`` is trained with on ``data`` by default."""
    return _DEFAULTS_ON_DATA.get((model, data), _DEFAULTS[model])


Precision = Literal["float32", "bf16"]
DeviceName = Literal["auto", "cpu", "cuda"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
DEVICES: tuple[DeviceName, ...] = get_args(DeviceName)

_ROUNDED: dict[str, Rounded] = {"bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
COMPRESSIONS = (*SPARSE_NAMES, *_ROUNDED)
"""What ``--compression`` may be. The full names, which files and classes give, are taken, too."""
_ALGORITHMS = SPARSE_NAMES | {name: name for name in SPARSE_NAMES.values()}
_TYPES = _ROUNDED | {name: name for name in _ROUNDED.values()}
DENSE_BELOW = 1024
"""Parameters of fewer elements are sent whole. Elements are selected parameter by parameter, so a
bias or a norm would send only one or two a step, and the rest late and all at once."""


def is_sparse(compression: str | None) -> bool:
    """Return whether a ``--compression`` sends only the largest gradients."""
    return compression in _ALGORITHMS


def require_compression(name: str) -> None:
    """Raise a UserError for an unknown ``--compression``."""
    require_known("compression", name, COMPRESSIONS, also=(*_ALGORITHMS, *_TYPES))


def compression_named(name: str, density: float | None, **settings: Any) -> Compression:
    """Return what a ``--compression`` asks for, with the settings of a sparse one's recipe."""
    if name in _TYPES:
        return _TYPES[name]
    assert density is not None
    return Recipe(density=density, algorithm=_ALGORITHMS[name], **settings)


class TrainingConfig(Value, frozen=True):
    """What to train, how, and what to leave behind; the same on every worker.

    A field's description is the help of its option.
    """

    model: str
    data: str
    hyper: Hyperparameters
    data_dir: Annotated[str | None, described("Folder that the data set is read from.")] = None
    workers: Annotated[int, described("Processes to start on this host.")] = 2
    seed: Annotated[int, described("Seed of all randomness.")] = 0
    precision: Annotated[Precision, described("float32 or bf16.")] = "float32"
    accumulate: Annotated[int, described("Forward passes a step, with one exchange.")] = 1
    steps: Annotated[int | None, described("Stop after this many steps.")] = None
    """Training ends earlier if the epochs are done. The learning rate always follows the epochs."""
    device: Annotated[DeviceName, described("auto, cpu or cuda.")] = "auto"
    planner: Annotated[str, described("How gradients are grouped.")] = "auto"
    plan: Annotated[str | None, described("Run the plan in this file.")] = None
    profile: Annotated[
        str | None, described("Plan from the profile in this file instead of measuring one.")
    ] = None
    network: Annotated[
        str | None, described("Plan for the network in this file instead of measuring it.")
    ] = None
    overlap: Annotated[bool, described("Overlap messages with the next forward pass.")] = True
    """Each parameter is updated there, too. It changes no result, so a checkpoint of a training
    with it can be resumed without it, and vice versa."""
    shard: Annotated[
        bool, described("Shard the optimizer's state: each worker keeps its share.")
    ] = False  # each worker updates only its share of the parameters
    compression: Annotated[str | None, described("Exchange lossily; one of those below.")] = None
    density: Annotated[
        float | None, described("Share of the gradients that is sent, sparsely.")
    ] = None
    density_warmup: Annotated[
        tuple[float, ...],
        described("Densities of the first epochs, such as 0.25,0.0725,0.015,0.004."),
    ] = ()
    dense_below: Annotated[
        int | None,
        described(
            "Parameters of fewer elements are sent whole beside sparse ones.  "
            f"[default: {DENSE_BELOW}]"
        ),
    ] = None
    step_ahead: Annotated[
        bool, described("Compute gradients at the weights with this rank's residuals applied.")
    ] = False  # updates are then not deferred
    check: Annotated[bool, described("Go back to DDP's own exchange where that is faster.")] = True
    cache: Annotated[
        str | None, described("Folder that keeps the plan for the next start of this training.")
    ] = None
    baseline: Annotated[
        bool,
        described(
            "Train a replica under torch's DDP, with its hook for --compression, and compare."
        ),
    ] = False
    block_steps: Annotated[int, described("Steps of a replica before the other's.")] = 10
    checkpoint: Annotated[
        str | None, described("Folder to write a checkpoint to after every epoch.")
    ] = None
    resume: Annotated[bool, described("Continue from the checkpoint.")] = False
    report: Annotated[str, described("Folder of the report.  [default: runs/<model>-<data>]")] = ""
    timeout_s: Annotated[
        float, described("Seconds after which a silent worker counts as lost.")
    ] = 60.0
    json: Annotated[bool, described("Print one JSON object at the end.")] = False

    def __post_init__(self) -> None:
        for option in ("workers", "accumulate", "block_steps", "steps"):
            if (value := getattr(self, option)) is not None:
                require_count(f"--{option.replace('_', '-')}", value)
        if self.seed < 0:
            raise UserError(f"--seed must not be negative, found {self.seed}")
        if not 0 < self.timeout_s <= 86_400:
            raise UserError(
                f"--timeout must be above 0 and at most 86400 seconds, found {self.timeout_s}"
            )
        if self.resume and self.checkpoint is None:
            raise UserError("--resume continues a checkpoint; name its folder with --checkpoint")
        if self.plan is not None:
            for name, other in (("--profile", self.profile), ("--network", self.network)):
                if other is not None:
                    raise UserError(f"--plan leaves nothing to plan: drop it, or {name}")
            if self.planner != "auto":
                raise UserError(
                    f"--plan runs the plan in {self.plan}, --planner {self.planner} would make "
                    "another; name one of them"
                )
        for name, given in (("--plan", self.plan is not None), ("--no-check", not self.check)):
            if given and self.cache is not None:
                raise UserError(f"--cache remembers what was tried, and with {name} nothing is")
        require_known("precision", self.precision, PRECISIONS)
        require_known("device", self.device, DEVICES)
        planner_named(self.planner)
        if self.shard and (self.compression is not None or not self.overlap):
            raise UserError(
                "--shard gathers parameters under the next forward pass, from gradients that are "
                "exchanged whole; leave --no-overlap and --compression out"
            )
        self._check_compression()

    @property
    def samples_per_step(self) -> int:
        """Samples of all workers together in one optimizer step."""
        return self.workers * self.hyper.batch_size * self.accumulate

    @property
    def is_sparse(self) -> bool:
        """Whether only the largest gradients are sent."""
        return is_sparse(self.compression)

    @property
    def compression_text(self) -> str | None:
        """The compression with its densities, in words; None where there is none."""
        if self.compression is None or not self.is_sparse:
            return self.compression
        densities = ", ".join(map(str, (*self.density_warmup, self.density)))
        whole = f", whole below {self._dense_below} elements" if self._dense_below else ""
        ahead = ", stepping ahead" if self.step_ahead else ""
        return f"{self.compression} at {densities}{whole}{ahead}"

    @property
    def _dense_below(self) -> int:
        return DENSE_BELOW if self.dense_below is None else self.dense_below

    def recipe(self, steps_per_epoch: int) -> Compression | None:
        """Return how gradients are compressed; each density of the warm-up is for an epoch."""
        if self.compression is None:
            return None
        return compression_named(
            self.compression,
            self.density,
            warmup=self.density_warmup,
            warmup_steps=steps_per_epoch if self.density_warmup else 0,
            dense_below_elements=self._dense_below,
        )

    def _check_compression(self) -> None:
        sparse_only = (
            ("--density", self.density is not None),
            ("--density-warmup", bool(self.density_warmup)),
            ("--dense-below", self.dense_below is not None),
            ("--step-ahead", self.step_ahead),
        )
        if self.compression is None:
            for option, given in sparse_only:
                if given:
                    raise UserError(
                        f"{option} is for sparse exchange; name it with --compression gtopk"
                    )
            return
        require_compression(self.compression)
        if not self.is_sparse and any(given for _, given in sparse_only):
            raise UserError(
                f"--compression {self.compression} sends every element, so there is no density; "
                "take gtopk, gtopk-tree or topk, or leave --density and what goes with it out"
            )
        if self.is_sparse and self.density is None:
            raise UserError(
                f"--compression {self.compression} needs --density, the share of the elements "
                "that is sent, such as 0.001"
            )
        self.recipe(1)

    @classmethod
    def of(
        cls,
        model: str,
        data: str,
        *,
        overrides: Mapping[str, object] | None = None,
        report: str | None = None,
        **options: object,
    ) -> TrainingConfig:
        """Return a configuration with the model's default hyper-parameters.

        ``overrides`` are hyper-parameters in place of the defaults, where they are not None, and
        ``options`` the other fields. None as ``report`` is ``runs/<model>-<data>``.
        """
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        hyper = msgspec.structs.replace(default_hyperparameters(model, data), **given)
        report = report or f"runs/{model}-{data}"
        if options.get("compression") is not None and options.get("device", "auto") == "auto":
            options["device"] = "cpu"
        return cls(model=model, data=data, hyper=hyper, report=report, **options)  # type: ignore[arg-type]
