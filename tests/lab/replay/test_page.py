"""The figures of a replay, and the report on it: all names escaped, all figures there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from syncline.errors import FileError, UserError
from syncline.lab.replay.page import headline, print_replay, render, replay_picture, save_report
from syncline.lab.replay.result import Replay
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from tests.lab.replay.examples import entry, layers, outcome, replay

HOSTILE = "<script>alert(1)</script>{{style}}\"'&"


def test_the_page_says_what_was_measured() -> None:
    page = render(outcome()).replace("\u00a0", " ")
    assert "tictac takes 102 ms an iteration, 1.25 times as fast as DDP." in page
    for title in (
        "Measured against predicted",
        "One iteration, predicted and measured",
        "Every round",
        "The network",
        "The messages of the plan",
        "What was profiled",
    ):
        assert f"<h2>{title}</h2>" in page
    assert "<code>replay.json</code>" in page


def test_nothing_in_the_data_becomes_markup() -> None:
    names = (HOSTILE, f"{HOSTILE}.weight", "b.bias", "a.weight")
    profile = msgspec.structs.replace(layers(names=names), model=HOSTILE)
    hostile = msgspec.structs.replace(entry("tictac"), planner=HOSTILE)
    found = replay(
        **dict.fromkeys(("model", "cluster", "machine"), HOSTILE),
        entries=(entry("ddp"), entry("merge"), hostile),
        notes=(HOSTILE,),
    )
    page = render(outcome(found, profile))
    outside = re.sub(r"<script[ >].*?</script>", "", page, flags=re.DOTALL)
    assert "alert(1)" in outside
    assert "<script" not in outside
    assert "{{style}}" in outside
    assert page.count("<script") == render(outcome()).count("<script")


def test_without_ddp_the_bound_is_what_it_is_held_against() -> None:
    found = replay(entries=(entry("merge"),))
    assert headline(found).endswith("merge takes 110 ms an iteration, 10.0 % above the lower bound")
    fast = replay(entries=(entry("merge", lower_bound_s=0.2),))
    assert headline(fast).endswith("45.0 % below the lower bound")


@pytest.mark.parametrize(
    "found",
    [
        replay(),
        replay(entries=(entry("merge", predicted_s=40.0),)),
        replay(entries=(entry("ddp", rounds_s=(0.1,) * 3, predicted_s=0.1),)),
    ],
    ids=["usual", "far off", "equal times"],
)
def test_the_picture_holds_every_time_in_its_frame(found: Replay) -> None:
    svg = replay_picture(found)
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])  # type: ignore[index]
    places = [float(x) for x in re.findall(r'cx="([\d.]+)"', svg)]
    places += [float(x) for x in re.findall(r'd="M([\d.]+)', svg)]
    assert len(places) == 3 * len(found.entries) + 1
    assert all(90 <= place <= width for place in places)
    assert "NaN" not in svg


def test_a_directory_holds_what_it_was_made_from(tmp_path: Path) -> None:
    found, folder = outcome(), tmp_path / "new" / "report"
    save_report(found, folder)
    assert Replay.load(folder / "replay.json") == found.replay
    assert Network.load(folder / "network.json") == found.network
    assert Profile.load(folder / "profile.json") == found.profile
    for number, plan in enumerate(found.plans, start=1):
        assert Plan.load(folder / f"plan-{number}.json") == plan
    assert (folder / "replay.html").read_text() == render(found)
    assert (folder / "trace.json").exists()


def test_a_page_alone(tmp_path: Path) -> None:
    save_report(outcome(), page := tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == [page]
    with pytest.raises(FileError, match="cannot be written"):
        save_report(outcome(), page / "report")


def printed(found: Replay, **options: Any) -> str:
    console = Console(highlight=False, **options)
    with console.capture() as capture:
        print_replay(console, found)
    return capture.get()


def test_the_table_is_aligned_and_steers_no_terminal() -> None:
    text = printed(replay(model="\x1b[31mred", notes=("left out \x07",)), width=120, record=True)
    assert "\x1b[31m" not in text
    assert "\x07" not in text
    lines = text.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert list(rows)[1:5] == ["planner", "tictac", "merge", "ddp"]
    assert rows["tictac"][1:3] == ["2", "102.0"]
    assert rows["ddp"][-1] == "1.00x"
    assert rows["tictac"][-1] == "1.25x"
    begins = (["planner"], ["ddp"], ["merge"])
    assert len({len(line.rstrip()) for line in lines if line.split()[:1] in begins}) == 1


@pytest.mark.parametrize(("width", "columns"), [(70, 6), (160, 9)])
def test_a_narrow_screen_gets_fewer_columns(width: int, columns: int) -> None:
    lines = printed(replay(), width=width, force_terminal=True, color_system=None).splitlines()
    header = next(line for line in lines if line.startswith("planner"))
    assert len(re.split(r"  +", header.strip())) == columns
    assert all(len(line) <= width for line in lines)


def test_the_figures_of_an_entry() -> None:
    found = entry("ddp")
    assert found.measured_s == 0.130
    assert found.spread_s == (0.120, 0.140)
    assert found.exposed_s == 0.02
    assert found.error == pytest.approx(0.12 / 0.13 - 1)
    assert found.above_bound == pytest.approx(0.3)
    assert entry("ddp", lower_bound_s=0.0).above_bound == 0
    # A speed-up is the median of those of the rounds.
    assert entry("merge").speed_up_over(found) == pytest.approx(130 / 110)
    assert entry("tictac").speed_up_over(found) == pytest.approx(130 / 104)


def test_the_figures_of_a_replay() -> None:
    found = replay()
    assert found.rounds == 3
    assert found.best.planner == "tictac"
    assert [e.planner for e in found.fastest_first] == ["tictac", "merge", "ddp"]
    assert found.lower_bound_s == 0.1
    assert found.of("merge") == found.entries[1]
    assert found.of("wfbp") is None


SHORT = entry("ddp", rounds_s=(1.0,), settled_s=(1.0,), idle_s=(0.0,), iterations_s=((1.0,),))


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (entry, {"messages": 0}, "replay of 'ddp': messages must be at least 1, found 0"),
        (entry, {"predicted_s": -1.0}, "predicted_s must be a finite time"),
        (entry, {"rounds_s": ()}, "no rounds"),
        (entry, {"settled_s": (0.1,)}, "expected settled_s of 3 rounds, found 1"),
        (entry, {"iterations_s": ((0.1,), (0.1,), (math.inf,))}, "iterations_s must be a finite"),
        (entry, {"rounds_s": (0.0, 0.1, 0.1)}, "must be above 0 s"),
        (replay, {"entries": ()}, "no entries"),
        (replay, {"workers": 0}, "replay: workers must be at least 1, found 0"),
        (replay, {"entries": (entry("ddp"), entry("ddp"))}, "is named twice: ddp, ddp"),
        (replay, {"entries": (SHORT, entry("merge"))}, "different numbers of rounds"),
        (replay, {"computation_s": math.nan}, "computation_s must be a finite time"),
    ],
)
def test_what_cannot_be(make: Callable[..., Any], changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make(**changes)


def test_its_file(tmp_path: Path) -> None:
    found = replay(notes=("a note",))
    found.save(path := tmp_path / "replay.json")
    assert Replay.load(path) == found
    path.write_text(path.read_text().replace('"rounds_s": [', '"rounds_s": ["x", ', 1))
    with pytest.raises(FileError, match=r"entries\[0\].rounds_s\[0\]"):
        Replay.load(path)
