"""``TrainingConfig``: all that ``syncline train`` was asked for, checked and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec

from syncline.errors import UserError, require_known
from syncline.lab.training.hyperparameters import Hyperparameters, default_hyperparameters
from syncline.plan.document import Value, described
from syncline.plan.planners import planner_named
from syncline.plan.quantities import require_count
from syncline.plan.recipe import SPARSE_NAMES, Compression, Recipe, Rounded, SparseAlgorithm

Precision = Literal["float32", "bf16"]
DeviceName = Literal["auto", "cpu", "cuda"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
DEVICES: tuple[DeviceName, ...] = get_args(DeviceName)

ROUNDED: dict[str, Rounded] = {"bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
"""The types of ``--compression`` in which every element is sent, by their short names."""
COMPRESSIONS: dict[str, Rounded | SparseAlgorithm] = {**SPARSE_NAMES, **ROUNDED}
"""What ``--compression`` may be: one of these types, or a sparse algorithm by its short name."""
FULL_NAMES: dict[str, SparseAlgorithm] = {name: name for name in SPARSE_NAMES.values()}
"""Sparse algorithms by the names that files, reports and the simulator give them, taken too."""
DENSE_BELOW = 1024
"""Elements. The largest are selected from each parameter by itself, so a bias or a norm would send
only one or two a step, and the rest late and all at once."""


def is_sparse(compression: str | None) -> bool:
    """Return whether a ``--compression`` sends only the largest gradients."""
    return compression is not None and compression not in ROUNDED


class TrainingConfig(Value, frozen=True):
    """What to train, how, and what to leave behind; the same on every worker.

    A field's description is the help of its option.

    Raises:
        UserError: on construction, if a value is out of its range or two contradict each other.
    """

    model: str
    data: str
    hyper: Hyperparameters
    data_dir: Annotated[str | None, described("Folder that the data set is read from.")] = None
    workers: Annotated[int, described("Processes to start on this host.")] = 2
    seed: Annotated[int, described("Seed of all randomness.")] = 0
    precision: Annotated[Precision, described("float32 or bf16.")] = "float32"
    accumulate: Annotated[int, described("Forward passes a step.")] = 1
    """Only the last backward pass of a step exchanges gradients."""
    steps: Annotated[int | None, described("Stop after this many steps.")] = None
    """Training ends earlier if the epochs are done. The learning rate always follows the epochs."""
    device: Annotated[DeviceName, described("auto, cpu or cuda.")] = "auto"
    planner: Annotated[str, described("How to cut the gradients.")] = "auto"
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
    ] = False
    """Each worker updates only its share of the parameters."""
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
    ] = False
    """Then nothing is deferred."""
    check: Annotated[bool, described("Go back to DDP's own exchange where that is faster.")] = True
    cache: Annotated[
        str | None, described("Folder that keeps the plan for the next start of this training.")
    ] = None
    baseline: Annotated[bool, described("Train a replica under torch's DDP, and compare.")] = False
    block_steps: Annotated[int, described("Steps a turn of each replica.")] = 10
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
        for name, value in (
            ("--workers", self.workers),
            ("--accumulate", self.accumulate),
            ("--block-steps", self.block_steps),
            ("--steps", self.steps),
        ):
            if value is not None:
                require_count(name, value)
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
        """Return how gradients are compressed; each density of the warm-up is for an epoch.

        Raises:
            UserError: a density is out of its range.
        """
        if self.compression is None:
            return None
        if self.compression in ROUNDED:
            return ROUNDED[self.compression]
        algorithm = (SPARSE_NAMES | FULL_NAMES)[self.compression]
        assert self.density is not None
        return Recipe(
            density=self.density,
            algorithm=algorithm,
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
        require_known("compression", self.compression, COMPRESSIONS, also=FULL_NAMES)
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

        Raises:
            UserError: as on construction, and for a precision or device that does not exist.
        """
        choices = {"precision": PRECISIONS, "device": DEVICES}
        for option, known in choices.items():
            require_known(option, str(options.get(option, known[0])), known)
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        hyper = msgspec.structs.replace(default_hyperparameters(model, data), **given)
        report = report or f"runs/{model}-{data}"
        on_cpu = options.get("compression") is not None
        if on_cpu and options.get("device", "auto") == "auto":
            options["device"] = "cpu"
        return cls(model=model, data=data, hyper=hyper, report=report, **options)  # type: ignore[arg-type]
