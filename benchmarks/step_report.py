"""What ``step_time`` prints: a table for every cell, then the targets."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.common import median
from benchmarks.step_cells import CONTESTANTS, TITLES
from benchmarks.step_results import Measured, Results, median_s
from benchmarks.step_targets import verdicts
from syncline.lab.testbed.cluster import bit_rate

__all__ = ["print_cell", "print_targets", "summary"]

STYLES = {"met": "green", "not met": "red", "not measured": "dim"}


def summary(measured: Measured) -> str:
    """Return what is known of a cell before a contestant has its turn."""
    whole_s = median(measured.all_reduce_s)
    said = (
        f"compute alone {measured.computation_s:.3f} s, one all-reduce alone {whole_s:.3f} s "
        f"({bit_rate(measured.share_of_rate * measured.cell.rate_bytes_per_s)} a link, "
        f"{measured.share_of_rate:.2f} of the rate), bound {measured.bound_s:.3f} s"
    )
    if not measured.explored:
        return said
    explored = ", ".join(
        f"{TITLES.get(name, name)} {median_s(turns):.3f} s"
        for name, turns in measured.explored.items()
    )
    return f"{said}\n  predicted from {explored}"


def print_cell(console: Console, measured: Measured, absent: dict[str, str]) -> None:
    """Print what each contestant took in a cell, the fastest first."""
    table = Table(title=f"{measured.cell}\n{summary(measured)}", title_justify="left")
    table.add_column("")
    for heading in (
        "s/iteration",
        "smallest",
        "largest",
        "rounds",
        "cores",
        "of bound",
        "idle s",
        "peak MB",
    ):
        table.add_column(heading, justify="right")
    for heading in ("messages", "predicted s", "error", "its bound s"):
        table.add_column(heading, justify="right")
    ran = [name for name in CONTESTANTS if measured.times_s(name)]
    for name in sorted(ran, key=lambda name: median(measured.times_s(name))):
        times_s = measured.times_s(name)
        forecast, error = measured.forecasts.get(name), measured.prediction_error(name)
        turns = measured.turns[name]
        peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
        table.add_row(
            TITLES[name],
            f"{median(times_s):.3f}",
            f"{min(times_s):.3f}",
            f"{max(times_s):.3f}",
            str(len(times_s)),
            "saturated" if measured.is_saturated(name) else "",
            f"{median(times_s) / measured.bound_of(name):.3f}",
            f"{median([turn.idle_s for turn in turns]):.3f}",
            f"{median(peaks) / 1e6:.0f}" if peaks else "",
            "" if forecast is None else str(forecast.messages),
            "" if forecast is None else f"{forecast.iteration_s:.3f}",
            "" if error is None else f"{error:+.1%}",
            "" if forecast is None else f"{forecast.lower_bound_s:.3f}",
        )
    console.print(table)
    for name, reason in absent.items():
        console.print(f"  {TITLES[name]} is absent: {reason}", markup=False, highlight=False)
    for name, reason in measured.failed.items():
        console.print(f"  {TITLES[name]} failed: {reason}", markup=False, highlight=False)


def print_targets(console: Console, results: Results) -> None:
    """Print every target with the figure beside it."""
    table = Table(title="targets", title_justify="left")
    for heading in ("target", "measured: median (smallest .. largest)", ""):
        table.add_column(heading)
    for verdict in verdicts(results):
        word = f"[{STYLES[verdict.word]}]{verdict.word}[/]"
        table.add_row(verdict.target, verdict.measured, word)
    console.print(table)
