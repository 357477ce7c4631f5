"""What a replay is called, in the terminal and on the page."""

from __future__ import annotations

from syncline.planners.ddp import Ddp
from syncline.replay.result import Entry, Replay
from syncline.report import units

__all__ = ["against_ddp", "headline", "measured_how", "spread_text"]


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
    """Return how the medians came about."""
    rounds = units.counted(replay.rounds, "round")
    iterations = units.counted(replay.iterations, "iteration")
    return f"medians of {rounds} of {iterations}, in turns"


def spread_text(entry: Entry, unit: units.TimeUnit) -> str:
    """Return the fastest and the slowest round, such as ``"1.39 to 1.42"``."""
    low, high = map(unit.text, entry.spread_s)
    return low if low == high else f"{low} to {high}"


def against_ddp(replay: Replay, entry: Entry) -> str:
    """Return how many times as fast as DDP an entry was; empty where DDP did not run."""
    ddp = replay.of(Ddp.NAME)
    return "" if ddp is None else f"{entry.speed_up_over(ddp):.2f}x"
