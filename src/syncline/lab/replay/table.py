"""A replay as a table for a terminal: one row per planner."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from syncline.files.report import terminal, units
from syncline.files.report.markup import Column
from syncline.lab.replay.result import PlanTimes, Replay
from syncline.plan.planners.ddp import Ddp


def headline(replay: Replay) -> str:
    """Return who was the fastest, in a sentence without its full stop."""
    best, ddp = replay.best, replay.of(Ddp.NAME)
    takes = f"{best.planner} takes {units.duration(best.measured_s)} an iteration"
    text = f"{replay.model} on {replay.cluster}: {takes}"
    if ddp is None or ddp is best:
        where = "above" if best.above_bound >= 0 else "below"
        return f"{text}, {units.percent(abs(best.above_bound))} {where} the lower bound"
    return f"{text}, {best.speed_up_over(ddp):.2f} times as fast as DDP"


def measured_how(replay: Replay) -> str:
    """Return how many rounds and iterations the medians cover."""
    rounds = units.counted(replay.rounds, "round")
    iterations = units.counted(replay.iterations, "iteration")
    return f"medians of {rounds} of {iterations}, interleaved"


LESS = frozenset({"messages", "rounds", "above bound"})
"""Columns that are left out where there is no room."""


def print_replay(console: Console, replay: Replay) -> None:
    """Print the table; a terminal that is too narrow gets fewer columns."""
    terminal.widen(console)
    needed = terminal.width(console, _plans(replay, frozenset()))
    narrow = console.is_terminal and needed > console.width
    console.print(replay_table(replay, without=LESS if narrow else frozenset()))


def replay_table(replay: Replay, *, without: frozenset[str] = frozenset()) -> RenderableType:
    """Return what was measured beside what was predicted, the fastest first."""
    unit = time_unit(replay)
    title = f"{replay.model} · {replay.cluster} · {measured_how(replay)}"
    below = (
        f"computing alone takes {unit.text(replay.computation_s)} {unit.name}; no plan of these "
        f"can take less than {unit.text(replay.lower_bound_s)} {unit.name}"
    )
    notes = [terminal.text(f"note: {note}", "dim") for note in replay.notes]
    return Group(
        terminal.title(title),
        Padding(_plans(replay, without), (1, 0), expand=False),
        terminal.text(below, "dim"),
        *notes,
    )


def _plans(replay: Replay, without: frozenset[str]) -> Table:
    unit = time_unit(replay)
    rows = [plan_cells(replay, entry, unit) for entry in replay.fastest_first]
    shown = [column for column in rows[0] if column not in without]

    def column(name: str) -> Column[dict[str, str]]:
        title = f"{name}, {unit.name}" if name == "measured" else name
        return Column(title, lambda row: row[name], numeric=name != "planner")

    return terminal.table([column(name) for name in shown], rows)


def time_unit(replay: Replay) -> units.TimeUnit:
    """Return the unit of all times of a replay."""
    return units.TimeUnit(
        seconds
        for entry in replay.entries
        for seconds in (*entry.rounds_s, entry.predicted_s, entry.lower_bound_s)
    )


def plan_cells(replay: Replay, entry: PlanTimes, unit: units.TimeUnit) -> dict[str, str]:
    """Return the cells of a plan by column; ``rounds`` is such as ``"1.39 to 1.42"``."""
    low, high = map(unit.text, entry.spread_s)
    ddp = replay.of(Ddp.NAME)
    return {
        "planner": entry.planner,
        "messages": str(entry.messages),
        "measured": unit.text(entry.measured_s),
        "rounds": low if low == high else f"{low} to {high}",
        "exposed": unit.text(entry.exposed_s),
        "predicted": unit.text(entry.predicted_s),
        "error": units.percent(entry.error, signed=True),
        "above bound": units.percent(entry.above_bound, signed=True),
        "against ddp": "" if ddp is None else f"{entry.speed_up_over(ddp):.2f}x",
    }
