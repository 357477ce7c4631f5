"""What the scripts share: running one, result files, the look of pictures, names and colours."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks import raw
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners import planner_named
from syncline.plan.planners.base import Planner
from syncline.plan.planners.overlap import Overlap
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s

__all__ = [
    "BLUE",
    "COLOURS",
    "FILLS",
    "FOLDER",
    "GREEN",
    "GREY",
    "LABELS",
    "ORANGE",
    "PICTURES",
    "PURPLE",
    "RED",
    "RESULTS",
    "SKY",
    "YELLOW",
    "Result",
    "absent",
    "figure",
    "iteration",
    "lanes",
    "load",
    "planner",
    "run",
    "scaled",
    "span",
    "tidy",
    "without_reading",
]

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
PICTURES = FOLDER / "pictures"
SHADES = 128
"""Colours of a picture."""
DIGITS = 7
"""Significant digits of a result: what no rounding of another machine changes."""

Result = dict[str, Any]
"""What a script found, as JSON."""

STYLE: Any = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "font.size": 9,
    "grid.color": "#e2e2e2",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "savefig.dpi": 110,
}

# The palette of M. Okabe and K. Ito, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#7f7f7f",
)

LABELS = {
    "wfbp": "WFBP",
    "single": "SyncEASGD (one message)",
    "mgwfbp": "MG-WFBP, Algorithm 1",
    "merge": "merge (ours)",
    "overlap": "overlap (ours)",
    "horovod": "Horovod",
    "tictac": "TicTac",
    "p3": "P3",
    "pace": "PACE",
}
COLOURS = {
    "wfbp": ORANGE,
    "single": GREY,
    "mgwfbp": BLUE,
    "merge": GREEN,
    "overlap": RED,
    "horovod": SKY,
    "tictac": PURPLE,
    "p3": GREY,
    "pace": BLUE,
}
FILLS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "message": ORANGE,
    "data": "#bdbdbd",
    "copy": "#969696",
    "update": GREEN,
}
"""Colours of spans by kind."""


def run(name: str, compute: Callable[[], Result], draw: Callable[[Result], Figure]) -> None:
    """Compute, write ``results/NAME.json``, draw it and write ``pictures/NAME.png``.

    Args:
        name: of the script.
        compute: finds the numbers.
        draw: makes the picture from them alone.
    """
    RESULTS.mkdir(exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    result = tidy(compute())
    path = raw.write(RESULTS / f"{name}.json", result, ensure_ascii=False)
    with mpl.rc_context(STYLE):
        drawn = io.BytesIO()
        draw(result).savefig(drawn, format="png")
    picture = PICTURES / f"{name}.png"
    with Image.open(drawn) as image:  # a palette makes the file a quarter as large
        image.convert("RGB").quantize(SHADES, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"{name}: {path.relative_to(FOLDER.parent)}, {picture.relative_to(FOLDER.parent)}")


def load(name: str) -> Result:
    """Return what a script wrote."""
    result: Result = raw.read(RESULTS / f"{name}.json")
    return result


def tidy(value: Any) -> Any:
    """Return a result as it reads from its file: keys as text, floats rounded."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(key): tidy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tidy(item) for item in value]
    return value


def absent(what: str, instead: str) -> None:
    """Say that something is not on this machine, and what is done without it."""
    print(f"  {what} is absent here; {instead}")


# --- simulating ---


def planner(name: str) -> Planner:
    """Return the planner of that name."""
    return Overlap() if name == Overlap.NAME else planner_named(name)


def iteration(profile: Profile, network: Network, name: str) -> tuple[float, Plan]:
    """Return the predicted seconds of an iteration under a planner, and the plan."""
    plan = planner(name).plan(profile, network)
    return predict_iteration_s(profile, network, plan), plan


def scaled(profile: Profile, factor: float, *, model: str | None = None) -> Profile:
    """Return a profile whose operations take ``factor`` times as long."""
    return msgspec.structs.replace(
        profile,
        model=model or profile.model,
        operations=tuple(
            msgspec.structs.replace(o, duration_s=o.duration_s * factor) for o in profile.operations
        ),
    )


def without_reading(profile: Profile) -> Profile:
    """Return a profile whose reading and copying take no time, as MG-WFBP and PACE have it."""
    return msgspec.structs.replace(
        profile,
        operations=tuple(
            msgspec.structs.replace(o, duration_s=0.0) if o.phase in ("data", "copy") else o
            for o in profile.operations
        ),
    )


# --- drawing ---


def figure(
    rows: int, columns: int, *, width: float = 8.0, height: float = 4.0, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, row by row; sizes in inches."""
    made = Figure(figsize=(width, height), layout="constrained")
    axes = made.subplots(rows, columns, squeeze=False, **options)
    return made, [axis for row in axes for axis in row]


def span(
    axis: Axes,
    y: float,
    start: float,
    stop: float,
    kind: str,
    text: str = "",
    *,
    height: float = 0.72,
    colour: str | None = None,
) -> None:
    """Draw something that ran from ``start`` to ``stop`` in row ``y``, with text if it is long."""
    axis.barh(
        y,
        stop - start,
        left=start,
        height=height,
        color=colour or FILLS[kind],
        edgecolor="white",
        linewidth=1.0,
    )
    if text:
        axis.text(
            (start + stop) / 2,
            y,
            text,
            ha="center",
            va="center",
            fontsize=8,
            color="white" if kind == "backward" and colour is None else "black",
        )


def lanes(axis: Axes, names: Sequence[str]) -> None:
    """Name the rows of a timeline, the first on top."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.45, -0.55)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
