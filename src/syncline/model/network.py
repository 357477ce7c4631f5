"""``Network``: how many workers there are and what it costs them to exchange a message."""

from __future__ import annotations

import math
from typing import ClassVar

from syncline.errors import UserError
from syncline.model.cost import CostCurve, all_reduce_line
from syncline.model.document import Document, Value
from syncline.model.limits import LARGEST_BYTES, LARGEST_CONTENTION, LARGEST_WORKERS

__all__ = ["PRESETS", "Link", "Measurement", "Network"]


class Measurement(Value, frozen=True, kw_only=True):
    """One measured size of a collective."""

    size_bytes: int
    time_s: float
    """Lower quartile over the repetitions of the slowest rank's time, in seconds."""
    repetitions: int


class Link(Value, frozen=True, kw_only=True):
    """Point-to-point cost between two workers: ``alpha + beta M`` (MG-WFBP, section 2.5)."""

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float
    """Time to add one byte of two arrays in memory, for arrays larger than the caches."""

    def __post_init__(self) -> None:
        for field in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"link: {field} must be finite and at least 0, found {value}")


class Network(Document, frozen=True, kw_only=True):
    """Worker count and communication costs.

    Raises:
        UserError: on construction, for fewer than one worker, a contention below 1 or above 100,
            a measured point that cannot be, or a fit error that is negative or not finite.
    """

    KIND: ClassVar[str] = "network"
    VERSION: ClassVar[int] = 1

    name: str
    workers: int
    all_reduce: CostCurve
    backend: str = "unknown"
    """The communication library, such as ``"gloo"`` or ``"nccl"``."""
    contention: float = 1.0
    """How many times slower computing and communicating each run while both run.

    1: independent (separate engines). 2: they share one resource evenly, so that overlapping them
    gains nothing, as on a host whose every core computes.
    """
    link: Link | None = None
    points: tuple[Measurement, ...] = ()
    """The measured all-reduces that the curve was fitted to."""
    fit_error: float | None = None
    """Mean relative error of the curve over the points (0.05: 5 %)."""
    fit_error_max: float | None = None
    """Largest relative error over the points."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= LARGEST_WORKERS:
            raise UserError(
                f"network: workers must be at least 1 and at most {LARGEST_WORKERS}, "
                f"found {self.workers}"
            )
        if not 1 <= self.contention <= LARGEST_CONTENTION:
            raise UserError(
                f"network: contention must be at least 1 and at most {LARGEST_CONTENTION:g}, "
                f"found {self.contention}"
            )
        for index, point in enumerate(self.points):
            size_is_possible = 0 <= point.size_bytes <= LARGEST_BYTES
            if not (size_is_possible and math.isfinite(point.time_s) and point.time_s >= 0):
                raise UserError(
                    f"network: points[{index}]: a measured point of {point.size_bytes} bytes in "
                    f"{point.time_s} s is not possible"
                )
        for field in ("fit_error", "fit_error_max"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UserError(f"network: {field} must be finite and at least 0, found {value}")

    @classmethod
    def line(cls, *, workers: int, a_s: float, b_s_per_byte: float, name: str = "line") -> Network:
        """Return a network whose all-reduce costs ``a + b M``. Source: MG-WFBP, Eq. 10."""
        return cls(name=name, workers=workers, all_reduce=CostCurve.line(a_s, b_s_per_byte))

    def with_workers(self, workers: int, *, algorithm: str = "ring") -> Network:
        """Return this network's prediction for another worker count, from its link.

        Args:
            workers: the new worker count.
            algorithm: which row of MG-WFBP, Table 2 gives the cost.

        Raises:
            UserError: the link was never measured, or the algorithm is unknown.
        """
        if self.link is None:
            raise UserError(
                f"network {self.name!r} has no point-to-point measurement to extrapolate from; "
                "measure it again with syncline.probe()"
            )
        return Network(
            name=f"{self.name} at {workers} workers ({algorithm})",
            workers=workers,
            backend=self.backend,
            contention=self.contention,
            link=self.link,
            all_reduce=all_reduce_line(
                algorithm,
                workers=workers,
                alpha_s=self.link.alpha_s,
                beta_s_per_byte=self.link.beta_s_per_byte,
                gamma_s_per_byte=self.link.gamma_s_per_byte,
            ),
        )


PRESETS: dict[str, Network] = {
    "10gbe-k80": Network.line(workers=16, a_s=9.72e-4, b_s_per_byte=1.97e-9, name="10gbe-k80"),
    "10gbe-v100": Network.line(workers=16, a_s=9.08e-4, b_s_per_byte=7.4e-10, name="10gbe-v100"),
    "56gbib-v100": Network.line(workers=16, a_s=2.36e-4, b_s_per_byte=4.06e-10, name="56gbib-v100"),
}
"""Measured all-reduce lines of three 16-GPU clusters. Source: MG-WFBP, Fig. 4."""
