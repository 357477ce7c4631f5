"""``Recipe``: how a lossy exchange selects elements and treats the rest."""

from __future__ import annotations

import fnmatch
import hashlib
import math
from typing import Literal, get_args

import msgspec

from syncline.errors import UserError, require_known
from syncline.plan.document import Value

SparseAlgorithm = Literal["top-k", "gtop-k-naive", "gtop-k", "gtop-k-butterfly"]
SelectionUnit = Literal["layer", "message", "model"]
Wire = Literal["float32", "bfloat16", "float16"]

ALGORITHMS: tuple[str, ...] = get_args(SparseAlgorithm)
SPARSE_DEFAULT: SparseAlgorithm = "gtop-k-butterfly"
"""The algorithm if only a density is given, in training and in the simulator."""
SPARSE_NAMES: dict[str, SparseAlgorithm] = {
    "gtopk": "gtop-k-butterfly",
    "gtopk-tree": "gtop-k",
    "topk": "top-k",
}
"""Short names of sparse algorithms, the same in every command."""
PAPER_WARMUP = (0.25, 0.0725, 0.015, 0.004)
"""Densities of the first epochs, one each (gTop-k, section IV.B)."""


class Recipe(Value, frozen=True, kw_only=True):
    """Which part of the gradients is exchanged, and how the rest is kept for later.

    Raises:
        UserError: on construction, if a value is out of its range or has no effect.
    """

    density: float  # rho: the share of elements that each worker sends; above 0, at most 1
    algorithm: SparseAlgorithm = SPARSE_DEFAULT
    warmup: tuple[float, ...] = ()  # densities to begin with, each for ``warmup_steps`` steps
    warmup_steps: int = 0  # usually the steps of an epoch
    unit: SelectionUnit = "layer"
    """The unit whose largest elements are selected: each parameter, each message (such as a DDP
    bucket), or the whole model, which is exchanged once all gradients are ready. Merging the
    selections of two ranks keeps the largest of each unit, too. DDP's first step has other buckets
    than later steps, so with ``message`` a resumed run differs from an uninterrupted one."""
    wire: Wire = "float32"
    """The type in which values are sent. The rounding error stays in the residuals."""
    momentum: float = 0.0
    """Momentum correction if above 0: elements are selected from each worker's accumulated velocity
    instead of its gradient. The optimizer then has no momentum of its own. Deep Gradient
    Compression, 3.2."""
    factor_masking: bool = False
    """Whether an element's velocity is cleared when the element is delivered. The velocity then
    restarts with every update; the more frequent updates are, the less momentum is left. Deep
    Gradient Compression, 3.3."""
    clip_norm: float | None = None
    """Largest norm of a unit's average gradient, as for clipping without compression. Each worker
    clips its gradient to ``clip_norm * sqrt(P)`` before adding it: if workers' gradients are
    independent, their average then has this norm. Deep Gradient Compression, 3.2, limits the sum
    instead."""
    dense_below_elements: int = 0  # parameters with fewer elements are exchanged whole
    dense_names: tuple[str, ...] = ()
    """So are parameters whose names match one of these patterns, such as ``*bias``."""

    def __post_init__(self) -> None:
        for name, several in (("warmup", self.warmup), ("dense_names", self.dense_names)):
            if not isinstance(several, tuple | list):
                raise UserError(
                    f"recipe: {name} is a tuple, found {several!r}; write ({several!r},)"
                )
        for density in (self.density, *self.warmup):
            if not (isinstance(density, int | float) and 0 < density <= 1):
                raise UserError(f"recipe: a density is above 0 and at most 1, found {density!r}")
        require_known("algorithm", self.algorithm, ALGORITHMS, where="recipe: ")
        require_known("unit", self.unit, get_args(SelectionUnit), where="recipe: ")
        require_known("wire", self.wire, get_args(Wire), where="recipe: ")
        if bool(self.warmup) != (self.warmup_steps > 0) or self.warmup_steps < 0:
            raise UserError(
                "recipe: warm-up needs densities and the steps of each, found "
                f"{len(self.warmup)} densities and {self.warmup_steps} steps"
            )
        if not 0 <= self.momentum < 1:
            raise UserError(f"recipe: momentum is from 0 to below 1, found {self.momentum}")
        if self.factor_masking and self.momentum == 0:
            raise UserError(
                "recipe: factor_masking clears velocities, which exist only with momentum above 0; "
                "give momentum, or leave it out"
            )
        if self.clip_norm is not None and not (
            math.isfinite(self.clip_norm) and self.clip_norm > 0
        ):
            raise UserError(f"recipe: clip_norm is above 0 or None, found {self.clip_norm}")
        if self.dense_below_elements < 0:
            raise UserError(
                f"recipe: dense_below_elements is at least 0, found {self.dense_below_elements}"
            )

    @property
    def digest(self) -> str:
        """A short hash of the recipe."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def density_at(self, step: int) -> float:
        """Return the density of a step; steps count from 0."""
        if step < len(self.warmup) * self.warmup_steps:
            return self.warmup[step // self.warmup_steps]
        return self.density

    def count_at(self, step: int, elements: int) -> int:
        """Return how many of the elements are sent: at least 1, or 0 if there are none."""
        return min(elements, max(1, round(self.density_at(step) * elements)))

    def is_dense(self, name: str, elements: int) -> bool:
        """Return whether the parameter is exchanged whole."""
        return elements < self.dense_below_elements or any(
            fnmatch.fnmatchcase(name, pattern) for pattern in self.dense_names
        )


Rounded = Literal["bfloat16", "float16", "int8"]
"""Every element is sent, rounded. The error of 16 bits is dropped; that of ``int8`` is added to the
next gradient (:mod:`syncline.train.engine.int8`)."""

Compression = Recipe | Rounded  # a lossy way to exchange gradients


def hook_for(wire: Rounded) -> Rounded:
    """Return the type of torch's hook to compare with: bfloat16 for int8, as torch has none."""
    return "bfloat16" if wire == "int8" else wire


def compression_name(compression: Compression) -> str:
    """Return a few words for a compression, such as ``"gtop-k-butterfly"``."""
    return compression.algorithm if isinstance(compression, Recipe) else compression
