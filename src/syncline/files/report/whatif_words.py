"""The text of a what-if: its settings, crossings and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from syncline.files.report import units
from syncline.files.report.bundle import Bundle
from syncline.plan.prediction import Comparison
from syncline.plan.timeline import Timeline
from syncline.plan.whatif import Crossing, Point, Setting, WhatIf

REFERENCE = (
    "Speed-up and efficiency are relative to one worker of the same profile without communication: "
    "efficiency is its time over that of the iteration, speed-up is efficiency times workers."
)
BOUNDS = {
    "compute": "compute",
    "communication": "network",
    "loading": "loading",
    "straggler": "stragglers",
}
"""What limits an iteration -> how a table names it."""


class IterationPart(NamedTuple):
    """How a part of an iteration is named and coloured."""

    name: str
    short: str
    css: str


PARTS = {
    "computing_s": IterationPart("computing", "computing", "k-backward"),
    "loading_s": IterationPart("waiting for the batch", "the batch", "k-data"),
    "straggling_s": IterationPart("waiting for slower workers", "stragglers", "k-finalize"),
    "exposed_s": IterationPart("exposed communication", "exposed", "exposed"),
}
"""Field of a split -> how it is shown, in the order in which the parts are stacked."""
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def _stragglers(pairs: Iterable[tuple[int, float]]) -> str:
    return "+".join(f"{factor:g}@{rank}" for rank, factor in pairs) or "none"


SETTINGS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "strategy": ("strategy", str),
    "stragglers": ("stragglers", _stragglers),
    "spread": ("spread", lambda value: f"{value:g}"),
    "jitter": ("jitter", lambda value: f"{value:g}"),
    "seed": ("seed", str),
    "compute_scale": ("compute", lambda value: f"x{value:g}"),
    "batch_fixed": ("batch fixed", lambda value: f"{value:g}"),
    "batch": ("batch", lambda value: f"x{value:g}"),
    "accumulate": ("accumulate", lambda value: str(round(value))),
    "wire": ("wire", lambda value: SHORT.get(value, value) if value else "as is"),
    "algorithm": ("algorithm", str),
    "density": ("density", lambda value: "dense" if value is None else f"{value:g}"),
    "jobs": ("jobs", str),
    "latency_s": ("latency", lambda value: "as is" if value is None else units.duration(value)),
    "bandwidth_bytes_per_s": (
        "bandwidth",
        lambda value: "as is" if value is None else units.bandwidth(value),
    ),
    "workers": ("workers", lambda value: str(round(value))),
}
"""Setting -> its heading and how a value is written, in the order in which a sweep varies them.

Values on an axis are floats, even worker counts.
"""


def value_text(field: str, value: Any) -> str:
    """Return the value of a setting as people read it."""
    return SETTINGS[field][1](value)


def setting_text(setting: Setting, fields: Iterable[str]) -> str:
    """Return some settings in a line, such as ``"64 workers, 10 Gbit/s, ring"``."""
    wanted = set(fields)
    parts = []
    order = dict.fromkeys(("workers", "bandwidth_bytes_per_s", *SETTINGS))
    for field in (name for name in order if name in wanted):
        value = getattr(setting, field)
        heading, text = SETTINGS[field]
        if field in ("workers", "jobs"):
            parts.append(units.counted(value, field.removesuffix("s")))
        elif value is None and field == "density":
            parts.append("dense")
        elif field in ("bandwidth_bytes_per_s", "algorithm") and value is not None:
            parts.append(text(value))
        else:
            parts.append(f"{heading} {text(value)}")
    return ", ".join(parts)


def notable_settings(setting: Setting) -> list[str]:
    """Return the settings worth naming: workers, algorithm, and those that are not the default."""
    usual = Setting(workers=setting.workers, algorithm=setting.algorithm)
    return [
        field
        for field in SETTINGS
        if field in ("workers", "algorithm") or getattr(setting, field) != getattr(usual, field)
    ]


def crossing_text(crossing: Crossing) -> str:
    """Return a crossing as a sentence without its place: ``"merge overtakes ddp"``."""
    before, after = (value_text(crossing.axis, end) for end in (crossing.before, crossing.after))
    where = f"between {before} and {after}{' workers' if crossing.axis == 'workers' else ''}"
    if crossing.kind == "overtakes":
        return f"{where}, {crossing.planner} overtakes {crossing.other}"
    return f"{where}, {crossing.planner} becomes {crossing.kind}"


def point_comparison(what_if: WhatIf, point: Point) -> Comparison:
    """Return the planners at a point, the fastest chosen."""
    several = len(point.predictions) > 1
    return Comparison(
        model=what_if.model,
        network=point.network,
        workers=point.setting.workers,
        predictions=point.predictions,
        chosen=point.best.planner,
        reason="the fastest of those that were asked for" if several else "it was asked for",
    )


def what_if_bundle(what_if: WhatIf, timeline: Timeline) -> Bundle:
    """Return the report on a sweep; ``timeline`` is of the fastest planner at its chosen point."""
    return Bundle(
        what_if=what_if,
        comparison=point_comparison(what_if, what_if.chosen),
        timeline_predicted=timeline,
    )
