"""The report on a replay: a table for a terminal, and a page, alone or with its data."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group
from rich.padding import Padding

from syncline.files.report import sections, terminal, units
from syncline.files.report.bundle import Bundle
from syncline.files.report.chart import Axis, picture
from syncline.files.report.markup import Column, Html, note, section, table, tag, titled, typeset
from syncline.files.report.page import page, save_page, shown
from syncline.files.report.summary import summarise
from syncline.files.report.timelines import timelines_section
from syncline.files.report.verdict import KeyFigure
from syncline.files.traces.chrome import to_chrome_trace
from syncline.lab.replay.result import PlanTimes, Replay
from syncline.lab.replay.session import ReplayOutcome
from syncline.plan.document import Document
from syncline.plan.planners.ddp import Ddp


def headline(replay: Replay) -> str:
    """Return which plan was the fastest, as a sentence without its full stop."""
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


DISPENSABLE = frozenset({"messages", "rounds", "above bound"})  # not on a narrow terminal


def print_replay(console: Console, replay: Replay) -> None:
    """Print measured and predicted times, the fastest first, in the columns that have room."""
    terminal.widen(console)
    columns = _columns(replay, times="x")
    plans = terminal.table(columns, replay.fastest_first)
    if console.is_terminal and terminal.width(console, plans) > console.width:
        columns = [column for column in columns if column.title not in DISPENSABLE]
        plans = terminal.table(columns, replay.fastest_first)
    unit = _time_unit(replay)
    title = f"{replay.model} · {replay.cluster} · {measured_how(replay)}"
    below = (
        f"computing alone takes {unit.text(replay.computation_s)} {unit.name}; no plan of these "
        f"can take less than {unit.text(replay.lower_bound_s)} {unit.name}"
    )
    notes = [terminal.text(f"note: {note}", "dim") for note in replay.notes]
    shown = Padding(plans, (1, 0), expand=False)
    console.print(Group(terminal.title(title), shown, terminal.text(below, "dim"), *notes))


def _time_unit(replay: Replay) -> units.TimeUnit:
    """Return the unit of all times of a replay."""
    return units.TimeUnit(
        seconds
        for entry in replay.entries
        for seconds in (*entry.rounds_s, entry.predicted_s, entry.lower_bound_s)
    )


def _columns(replay: Replay, times: str) -> list[Column[PlanTimes]]:
    """Return the columns of the plans; ``times`` is the sign for a factor."""
    unit, ddp = _time_unit(replay), replay.of(Ddp.NAME)

    def rounds(entry: PlanTimes) -> str:
        low, high = map(unit.text, entry.spread_s)
        return low if low == high else f"{low} to {high}"

    def bound(entry: PlanTimes) -> str:
        return units.percent(entry.above_bound, signed=True)

    def against_ddp(entry: PlanTimes) -> str:
        return "" if ddp is None else f"{entry.speed_up_over(ddp):.2f}{times}"

    return [
        Column("planner", lambda entry: entry.planner, css="name"),
        Column("messages", lambda entry: str(entry.messages), numeric=True, wide=True),
        Column(f"measured, {unit.name}", lambda entry: unit.text(entry.measured_s), numeric=True),
        Column("rounds", rounds, numeric=True, wide=True),
        Column("exposed", lambda entry: unit.text(entry.exposed_s), numeric=True, wide=True),
        Column("predicted", lambda entry: unit.text(entry.predicted_s), numeric=True),
        Column("error", lambda entry: units.percent(entry.error, signed=True), numeric=True),
        Column("above bound", bound, numeric=True, wide=True),
        Column("against DDP", against_ddp, numeric=True),
    ]


def save_report(outcome: ReplayOutcome, target: Path) -> None:
    """Write the page alone to a file that ends in ``.html``, or all files to a directory."""
    best = _best(outcome)
    plans = {f"plan-{number}.json": plan for number, plan in enumerate(outcome.plans, start=1)}
    trace = to_chrome_trace(best.timelines(), profile=outcome.profile, plan=best.plan)
    beside: dict[str, Document | str] = {
        "replay.json": outcome.replay,
        "profile.json": outcome.profile,
        "network.json": outcome.network,
        **plans,
        "trace.json": trace,
    }
    save_page(target, render(outcome), "replay.html", beside)


def render(outcome: ReplayOutcome) -> str:
    """Return the page on a replay as the text of one HTML file."""
    replay, best = outcome.replay, _best(outcome)
    summary = summarise(best)
    worst = max(replay.entries, key=lambda entry: abs(entry.error))
    return page(
        title=replay.model,
        subject=f"{replay.model} · {replay.cluster} · on {replay.machine}",
        headline=headline(replay),
        detail=f"{measured_how(replay)}; the prediction furthest off is that of {worst.planner}, "
        f"by {units.percent(worst.error, signed=True)}",
        sections=[
            sections.figures_section(_figures(replay)),
            _plans_section(replay),
            timelines_section(best.timelines()),
            _rounds_section(replay),
            shown(sections.network_section, best.network),
            shown(sections.messages_section, summary.messages),
            shown(sections.profile_section, summary.profile),
        ],
        timelines=best.timelines(),
        numbers="replay.json",
    )


def _best(outcome: ReplayOutcome) -> Bundle:
    number = outcome.replay.entries.index(outcome.replay.best)
    return Bundle(
        profile=outcome.profile,
        network=outcome.network,
        plan=outcome.plans[number],
        timeline_predicted=outcome.forecasts[number].timeline,
        timeline_measured=outcome.timelines[number],
    )


def _figures(replay: Replay) -> tuple[KeyFigure, ...]:
    best, ddp = replay.best, replay.of(Ddp.NAME)
    name, above = best.planner, best.above_bound
    off = f"{units.percent(best.error, signed=True)} against the measurement"
    exposed = f"an iteration, under {name}"
    bound = f"of {units.duration(best.lower_bound_s)}, for plans like {name}"
    return (
        *(() if ddp is None or ddp is best else (_time(ddp),)),
        _time(best),
        KeyFigure("predicted", f"{name}, predicted", best.predicted_s, "s", note=off),
        KeyFigure("exposed", "Exposed communication", best.exposed_s, "s", note=exposed),
        KeyFigure("above_bound", "Above the lower bound", above, "fraction", note=bound),
    )


def _time(entry: PlanTimes) -> KeyFigure:
    low, high = map(units.duration, entry.spread_s)
    rounds = units.counted(len(entry.rounds_s), "round")
    took = rounds if low == high else f"{rounds} from {low} to {high}"
    label = f"{entry.planner}, measured"
    return KeyFigure(f"measured {entry.planner}", label, entry.measured_s, "s", note=took)


def _plans_section(replay: Replay) -> Html:
    columns = _columns(replay, times="\u00d7")
    rows, caption = replay.fastest_first, "Measured and predicted times of every plan"
    return section(
        "plans",
        "Measured against predicted",
        note(
            "A dot is what was measured, its line runs from the fastest to the slowest round; a "
            "diamond is what was predicted; dashed is the lower bound, "
            f"{typeset(units.duration(replay.lower_bound_s))}: no plan of these can be faster. "
            "Gradients, messages and the network were real; workers waited instead of computing."
        ),
        tag("div", replay_picture(replay), class_="beside"),
        table(titled(columns), rows, caption=caption, marked=0),
        [note(typeset(text)) for text in replay.notes],
    )


def _rounds_section(replay: Replay) -> Html:
    unit = units.TimeUnit(seconds for entry in replay.entries for seconds in entry.rounds_s)

    def column(entry: PlanTimes) -> Column[int]:
        return Column(entry.planner, lambda index: unit.text(entry.rounds_s[index]), numeric=True)

    number: Column[int] = Column("Round", lambda index: str(index + 1), numeric=True)
    columns = [number, *map(column, replay.entries)]
    return section(
        "rounds",
        "Every round",
        note(
            f"Time an iteration on the slowest worker in the steady state, in {unit.name}. Plans "
            "were interleaved, and each round began with another one."
        ),
        table(columns, range(replay.rounds), caption="Time an iteration in every round"),
    )


WIDTH = 560
LEFT, RIGHT, TOP, BOTTOM, ROW = 104, 24, 34, 26, 26
LONGEST_NAME = 15


def _at(axis: Axis, seconds: float) -> float:
    return axis.at(seconds, LEFT, WIDTH - RIGHT)


def replay_picture(replay: Replay) -> Html:
    """Return the picture as SVG: one row per plan, the fastest at the top."""
    entries = replay.fastest_first
    values_s = [
        seconds
        for entry in entries
        for seconds in (*entry.spread_s, entry.predicted_s, replay.lower_bound_s)
    ]
    axis = Axis.between(values_s)
    bottom = TOP + ROW * len(entries)
    drawn = _frame(axis, bottom, units.TimeUnit(values_s))
    title = tag("title", f"lower bound: {units.duration(replay.lower_bound_s)}")
    line = f"M{_at(axis, replay.lower_bound_s)} {TOP - 4} V{bottom}"
    drawn.append(tag("path", title, d=line, class_="line ideal"))
    for number, entry in enumerate(entries):
        drawn += _row(entry, axis, TOP + ROW * number + ROW / 2)
    about = (
        "Measured and predicted time an iteration of every plan, with the lower bound. The table "
        "below says the same."
    )
    return picture(drawn, about, WIDTH, bottom + BOTTOM)


def _frame(axis: Axis, bottom: float, unit: units.TimeUnit) -> list[Html]:
    drawn = []
    for value in axis.ticks:
        place, number = _at(axis, value), f"{float(unit.text(value)):g}"
        drawn += [
            tag("line", x1=place, x2=place, y1=TOP, y2=bottom, class_="grid"),
            tag("text", number, x=place, y=bottom + 18, class_="mid"),
        ]
    heading = "Seconds an iteration" if unit.name == "s" else "Milliseconds an iteration"
    return [*drawn, tag("text", heading, x=0, y=12, class_="heading")]


def _row(entry: PlanTimes, axis: Axis, y: float) -> list[Html]:
    low, high = (_at(axis, seconds) for seconds in entry.spread_s)
    measured, predicted = _at(axis, entry.measured_s), _at(axis, entry.predicted_s)
    name = entry.planner
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 1]}\u2026"
    spread = " to ".join(units.duration(seconds) for seconds in entry.spread_s)
    dot = tag("title", f"measured: {units.duration(entry.measured_s)}")
    diamond = tag("title", f"predicted: {units.duration(entry.predicted_s)}")
    corners = f"M{predicted - 6:.1f} {y} l6 -6 l6 6 l-6 6 Z"
    return [
        tag("text", tag("title", entry.planner), name, x=LEFT - 12, y=y + 4, class_="end"),
        tag("path", tag("title", f"rounds: {spread}"), d=f"M{low} {y} H{high}", class_="line c-1"),
        tag("path", diamond, d=corners, class_="dot c-0"),
        tag("circle", dot, cx=measured, cy=y, r=3.5, class_="mark"),
    ]
