"""``WhatIf``: what iterations would take under other circumstances, and what would limit them."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec

from syncline.errors import UserError
from syncline.plan.document import Document, Value
from syncline.plan.prediction import Prediction, of_planner
from syncline.plan.quantities import (
    LARGEST_JOBS,
    LARGEST_WORKERS,
    require_count,
    require_finite,
    require_time,
)

BOUND_SHARE = 0.05
"""Least share of an iteration at which something other than computing counts as its limit."""

Bound = Literal["compute", "communication", "loading", "straggler"]


class Setting(Value, frozen=True, kw_only=True):
    """The circumstances of a point."""

    workers: int
    algorithm: str  # of the gradient exchange
    bandwidth_bytes_per_s: float | None = None  # of the link; None: the network's
    latency_s: float | None = None  # latency of a message over the link; None: the network's
    density: float | None = None  # share of the elements that each worker sends; None: all of them
    wire: str | None = None  # type in which gradients travel; None: as profiled
    compute_scale: float = 1.0  # factor on the duration of everything that the device computes
    batch: float = 1.0  # factor on the samples of a batch
    batch_fixed: float = 0.0
    """Share of the profiled passes' time that every batch takes, whatever its size."""
    accumulate: int = 1  # micro-batches whose gradients are added up before one exchange and update
    stragglers: tuple[tuple[int, float], ...] = ()
    """(rank, factor): this worker computes ``factor`` times as long."""
    spread: float = 0.0  # this and the next two: see ``syncline.plan.simulator.workers.Workers``
    jitter: float = 0.0
    seed: int = 0
    strategy: str = "loop"
    """Which tasks overlap; a key of ``syncline.plan.simulator.strategy.STRATEGIES``."""
    jobs: int = 1  # how many equal jobs share the links

    def __post_init__(self) -> None:
        require_count("what-if: workers", self.workers, LARGEST_WORKERS)
        require_count("what-if: accumulate", self.accumulate)
        require_count("what-if: jobs", self.jobs, LARGEST_JOBS)
        for rank, factor in self.stragglers:
            require_finite(f"what-if: the factor of straggler {rank}", factor, above_0=True)
        positive = ("bandwidth_bytes_per_s", "density", "compute_scale", "batch")
        for field in (*positive, "latency_s", "spread", "jitter", "batch_fixed"):
            if (value := getattr(self, field)) is not None:
                require_finite(f"what-if: {field}", value, above_0=field in positive)


class Split(Value, frozen=True, kw_only=True):
    """An iteration in four parts, each the extra time over an iteration without its cause."""

    computing_s: float
    loading_s: float  # reading and copying the batch, where computing does not hide it
    straggling_s: float  # waiting for workers that are slower than the profile
    exposed_s: float  # communication that nothing hides

    @property
    def iteration_s(self) -> float:
        """The sum of the parts."""
        return self.computing_s + self.loading_s + self.straggling_s + self.exposed_s

    @property
    def shares(self) -> dict[Bound, float]:
        """Each part as a share of the iteration."""
        whole = self.iteration_s or 1.0
        return {
            "compute": self.computing_s / whole,
            "loading": self.loading_s / whole,
            "straggler": self.straggling_s / whole,
            "communication": self.exposed_s / whole,
        }

    @property
    def bound(self) -> Bound:
        """The largest part besides computing, if it takes at least 5 %; otherwise computing."""
        others = {name: share for name, share in self.shares.items() if name != "compute"}
        largest = max(others, key=lambda name: others[name])
        return largest if others[largest] >= BOUND_SHARE else "compute"


class Point(Value, frozen=True, kw_only=True):
    """One point of a sweep: its settings, and the prediction for each planner."""

    setting: Setting
    network: str  # name of the network after the change
    alone_s: float
    """Iteration time of one worker as in the profile, without communication and stragglers."""
    computing_s: float  # the same, without reading and copying the batch
    predictions: tuple[Prediction, ...]  # one for each planner, in the requested order

    def __post_init__(self) -> None:
        if not self.predictions:
            raise UserError("what-if: a point without a prediction; ask for at least one planner")
        require_time("what-if: alone_s", self.alone_s)
        require_time("what-if: computing_s", self.computing_s)

    @property
    def best(self) -> Prediction:
        """The prediction that is preferred; see :attr:`Prediction.preference`."""
        return min(self.predictions, key=lambda p: p.preference)

    def of(self, planner: str) -> Prediction:
        """Return the prediction for ``planner``; raise :class:`UserError` if there is none."""
        return of_planner(self.predictions, planner, "at this point")

    def efficiency(self, prediction: Prediction) -> float:
        """Return the time of one worker without communication over that of the iteration."""
        return self.alone_s / prediction.iteration_s if prediction.iteration_s > 0 else 1.0

    def speed_up(self, prediction: Prediction) -> float:
        """Return the speed-up over one such worker: workers times efficiency."""
        return self.setting.workers * self.efficiency(prediction)

    def split(self, prediction: Prediction) -> Split:
        """Return the iteration in four parts."""
        whole_s = prediction.iteration_s
        communicating_s = min(prediction.exposed_s, whole_s)
        without_s = whole_s - communicating_s
        straggling_s = min(max(prediction.computation_s - self.alone_s, 0.0), without_s)
        loading_s = min(max(self.alone_s - self.computing_s, 0.0), without_s - straggling_s)
        return Split(
            computing_s=without_s - straggling_s - loading_s,
            loading_s=loading_s,
            straggling_s=straggling_s,
            exposed_s=communicating_s,
        )


class Crossing(Value, frozen=True, kw_only=True):
    """A place between two neighbouring points of a sweep where the order or the limit changes."""

    axis: Literal["workers", "bandwidth_bytes_per_s"]
    """The only setting in which the two points differ."""
    point: int  # index of the point after the crossing
    before: float  # value of the setting at the point before
    after: float
    at: float
    """Where the two lines cross, if they are straight between the points on a logarithmic axis."""
    planner: str  # the planner that overtakes, or whose limit changes
    kind: Literal["overtakes", "communication-bound", "compute-bound"]
    other: str | None = None  # the planner that is overtaken


class PathPart(Value, frozen=True, kw_only=True):
    """A part of the critical path."""

    kind: str  # a phase of the profile, ``message``, or ``delay``
    label: str  # operation or message
    time_s: float  # on the critical path of one iteration
    rank: int | None = None
    """First rank of the workers that ran it; None for a message, or if all workers are alike."""


class Bottleneck(Value, frozen=True, kw_only=True):
    """What limits one planner at one point, and what would lift that limit."""

    point: int  # index of the point
    planner: str
    kind: Bound
    share: float  # share of the iteration that this limit takes
    sentence: str  # the limit and the remedy
    split: Split
    path: tuple[PathPart, ...] = ()
    """The critical path of one iteration in the steady state, ordered by time; neighbouring steps
    of the same kind and worker are joined, except messages."""
    cure_bandwidth_bytes_per_s: float | None = None
    """Smallest common link bandwidth with which the point is not communication-bound."""
    cure_workers: int | None = None
    """The largest smaller power of two of workers that does so, if no bandwidth does."""

    def by_kind(self) -> dict[str, float]:
        """Return the seconds of the path by kind, the longest first."""
        kinds = dict.fromkeys(part.kind for part in self.path)
        sums = {k: math.fsum(p.time_s for p in self.path if p.kind == k) for k in kinds}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


class WhatIf(Document, frozen=True, kw_only=True):
    """A sweep over circumstances."""

    KIND: ClassVar[str] = "what-if"
    VERSION: ClassVar[int] = 1

    model: str
    network: str  # name of the network that the points change
    points: tuple[Point, ...]
    crossings: tuple[Crossing, ...] = ()
    bottleneck: Bottleneck
    notes: tuple[str, ...] = ()  # what the predictions leave out, one sentence each

    def __post_init__(self) -> None:
        if not self.points:
            raise UserError("what-if: no points")
        planners = self.planners
        for i, each in enumerate(self.points):
            found = tuple(prediction.planner for prediction in each.predictions)
            if found != planners:
                raise UserError(
                    f"what-if: points[{i}]: expected predictions of {', '.join(planners)}, "
                    f"found {', '.join(found)}"
                )
        named: dict[str, Bottleneck | Crossing] = {"bottleneck": self.bottleneck}
        named |= {f"crossings[{i}]": crossing for i, crossing in enumerate(self.crossings)}
        for what, about in named.items():
            if not 0 <= about.point < len(self.points):
                raise UserError(
                    f"what-if: {what}: there are {len(self.points)} points, found {about.point}"
                )
            self.points[about.point].of(about.planner)
        by_setting = {point.setting: point for point in self.points} if self.crossings else {}
        for i, crossing in enumerate(self.crossings):
            self._require_neighbour(f"what-if: crossings[{i}]", crossing, by_setting)

    def _require_neighbour(
        self, where: str, crossing: Crossing, by_setting: dict[Setting, Point]
    ) -> None:
        """Check that a crossing lies between its point and another one along its axis."""
        after = self.points[crossing.point].setting
        if getattr(after, crossing.axis) != crossing.after:
            raise UserError(
                f"{where}: after is {crossing.after:g}, but {crossing.axis} of "
                f"points[{crossing.point}] is {getattr(after, crossing.axis)}"
            )
        value = round(crossing.before) if crossing.axis == "workers" else crossing.before
        before = msgspec.structs.replace(after, **{crossing.axis: value})
        neighbour = by_setting.get(before)
        # The crossing was computed from logarithms, whose last bits may take it past a point.
        between = crossing.before * (1 - 1e-9) <= crossing.at <= crossing.after * (1 + 1e-9)
        if neighbour is None or not (0 < crossing.before < crossing.after and between):
            raise UserError(
                f"{where}: expected at between before and after, and a point that differs from "
                f"points[{crossing.point}] in nothing but {crossing.axis}; found before "
                f"{crossing.before:g}, at {crossing.at:g}, after {crossing.after:g}"
                f"{', and no such point' if neighbour is None else ''}"
            )
        neighbour.of(crossing.planner)

    @property
    def planners(self) -> tuple[str, ...]:
        """The planners, in the requested order."""
        return tuple(dict.fromkeys(p.planner for point in self.points for p in point.predictions))

    @property
    def swept(self) -> tuple[str, ...]:
        """The settings that differ between points, in the order of the fields."""
        return tuple(
            field
            for field in Setting.__struct_fields__
            if len({getattr(point.setting, field) for point in self.points}) > 1
        )

    @property
    def chosen(self) -> Point:
        """The point whose bottleneck is described."""
        return self.points[self.bottleneck.point]
