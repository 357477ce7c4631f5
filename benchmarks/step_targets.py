"""The targets of ``step_time``, each with the figure that was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.common import median
from benchmarks.step_cells import DDP_NAMES, NOMINAL_RATE, OURS, Cell
from benchmarks.step_results import Measured, Results
from syncline.train.measure.statistics import standard_error

__all__ = ["OUR_BEST", "Verdict", "verdicts"]

OUR_BEST = "overlap"
CONFIDENCE = 2.0
"""Standard errors beyond which a difference is no noise."""
LARGEST_PREDICTION_ERROR = 0.10
AIMED_PREDICTION_ERROR = 0.05

RESNET50 = Cell(model="resnet50", workers=4, rate=NOMINAL_RATE)
VGG16 = Cell(model="vgg16", workers=4, rate=NOMINAL_RATE)
RESNET152 = Cell(model="resnet152", workers=8, rate=NOMINAL_RATE)
DENSENET201 = Cell(model="densenet201", workers=8, rate=NOMINAL_RATE)


class SpeedUp(NamedTuple):
    """Ours must be so many times faster than another in a cell."""

    cell: Cell
    over: str
    """A contestant, or :data:`BEST_DDP`."""
    words: str
    least: float


class Distance(NamedTuple):
    """Ours may take so many times the bound in a cell."""

    cell: Cell
    most: float
    kind: str


BEST_DDP = "best"
SPEED_UPS = (
    SpeedUp(RESNET50, "ddp", "DDP's default", 1.30),
    SpeedUp(RESNET50, BEST_DDP, "DDP's best bucket size", 1.12),
    SpeedUp(VGG16, "wfbp", "WFBP", 1.30),
    SpeedUp(VGG16, "horovod", "Horovod-like fusion", 1.20),
    SpeedUp(RESNET152, "wfbp", "WFBP", 1.20),
    SpeedUp(RESNET152, "single", "a single message", 1.15),
    SpeedUp(DENSENET201, "wfbp", "WFBP", 1.20),
    SpeedUp(DENSENET201, "single", "a single message", 1.15),
)
DISTANCES = (Distance(RESNET50, 1.10, "target"), Distance(RESNET50, 1.05, "aim"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A target beside what was measured."""

    target: str
    measured: str
    """The figure with its smallest and largest value over the rounds, or why there is none."""
    met: bool | None
    """None where it was not measured."""

    @property
    def word(self) -> str:
        """``met``, ``not met`` or ``not measured``."""
        return "not measured" if self.met is None else "met" if self.met else "not met"


def verdicts(results: Results) -> list[Verdict]:
    """Return every target with the figures measured so far."""
    return [
        *(_speed_up(results.of(t.cell), t) for t in SPEED_UPS),
        *(_distance(results.of(t.cell), t) for t in DISTANCES),
        _never_slower(results),
        *(
            _predictions(results, limit, what)
            for limit, what in (
                (LARGEST_PREDICTION_ERROR, "target"),
                (AIMED_PREDICTION_ERROR, "aim"),
            )
        ),
    ]


def best_ddp(measured: Measured) -> str | None:
    """Return the DDP whose size of bucket does best; None unless all were measured."""
    times_s = {name: measured.iteration_s(name) for name in DDP_NAMES}
    known = {name: time_s for name, time_s in times_s.items() if time_s is not None}
    return min(known, key=known.__getitem__) if len(known) == len(DDP_NAMES) else None


def _speed_up(measured: Measured | None, asked: SpeedUp) -> Verdict:
    target = f"{asked.cell}: {OUR_BEST} at least {asked.least:.2f}x as fast as {asked.words}"
    over: str | None = asked.over
    if over == BEST_DDP:
        over = None if measured is None else best_ddp(measured)
    ratios = [] if measured is None or over is None else measured.speed_ups(OUR_BEST, over)
    if not ratios:
        return Verdict(target=target, measured="-", met=None)
    which = f" over {over}" if asked.over == BEST_DDP else ""
    return Verdict(
        target=target, measured=f"{_spread(ratios)}x{which}", met=median(ratios) >= asked.least
    )


def _distance(measured: Measured | None, asked: Distance) -> Verdict:
    target = f"{asked.cell}: {OUR_BEST} within {asked.most:.2f} of the bound ({asked.kind})"
    times_s = [] if measured is None else measured.times_s(OUR_BEST)
    if measured is None or not times_s:
        return Verdict(target=target, measured="-", met=None)
    ratios = [time_s / measured.bound_s for time_s in times_s]
    return Verdict(target=target, measured=_spread(ratios), met=median(ratios) <= asked.most)


def slower_cells(results: Results) -> tuple[int, list[str]]:
    """Return how many cells can be judged, and those where ours is slower than DDP by default.

    Slower is what takes longer by more than two standard errors of the median of the ratios.
    """
    judged, slower = 0, []
    for measured in results.cells:
        ratios = measured.speed_ups(OUR_BEST, DDP_NAMES[0])
        if not ratios:
            continue
        judged += 1
        if median(ratios) + CONFIDENCE * standard_error(ratios) < 1:
            slower.append(f"{measured.cell}: {_spread(ratios)}x")
    return judged, slower


def _never_slower(results: Results) -> Verdict:
    target = f"no cell where {OUR_BEST} is slower than DDP's default beyond noise"
    judged, slower = slower_cells(results)
    if not judged:
        return Verdict(target=target, measured="-", met=None)
    said = f"{len(slower)} of {judged} cells" + "".join(f"; {cell}" for cell in slower)
    return Verdict(target=target, measured=said, met=not slower)


def _predictions(results: Results, limit: float, what: str) -> Verdict:
    target = f"every plan within {limit:.0%} of its prediction ({what})"
    errors = [
        (abs(error), f"{name}, {measured.cell}", measured.is_saturated(name))
        for measured in results.cells
        for name in OURS
        if (error := measured.prediction_error(name)) is not None
    ]
    if not errors:
        return Verdict(target=target, measured="-", met=None)
    within = sum(error <= limit for error, _, _ in errors)
    worst, where, _ = max(errors)
    middle = median([error for error, _, _ in errors])
    said = f"{within} of {len(errors)}; median {middle:.1%}, worst {worst:.1%} ({where})"
    if saturated := [error for error, _, is_saturated in errors if is_saturated]:
        said += f"; the cores were the limit of {len(saturated)}, worst {max(saturated):.1%}"
    return Verdict(target=target, measured=said, met=within == len(errors))


def _spread(values: list[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} .. {max(values):.3f})"
