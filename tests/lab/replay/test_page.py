"""The report on a replay: all names escaped, all figures there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from syncline.errors import FileError
from syncline.lab.replay.page import (
    headline,
    print_replay,
    render,
    replay_picture,
    save_report,
)
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
    entries = (
        entry("ddp"),
        entry("merge"),
        msgspec.structs.replace(entry("tictac"), planner=HOSTILE),
    )
    found = replay(
        model=HOSTILE, cluster=HOSTILE, machine=HOSTILE, entries=entries, notes=(HOSTILE,)
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


def test_the_picture_holds_every_time_in_its_frame() -> None:
    for found in (replay(), replay(entries=(entry("merge", predicted_s=40.0),))):
        svg = replay_picture(found)
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])  # type: ignore[index]
        places = [float(x) for x in re.findall(r'cx="([\d.]+)"', svg)]
        places += [float(x) for x in re.findall(r'd="M([\d.]+)', svg)]
        assert len(places) == 3 * len(found.entries) + 1
        assert all(90 <= place <= width for place in places)


def test_equal_times_are_a_picture_too() -> None:
    one = entry("ddp", rounds_s=(0.1,) * 3, predicted_s=0.1)
    assert "NaN" not in replay_picture(replay(entries=(one,)))


def test_a_directory_holds_what_it_was_made_from(tmp_path: Path) -> None:
    found = outcome()
    save_report(found, tmp_path / "new" / "report")
    folder = tmp_path / "new" / "report"
    assert Replay.load(folder / "replay.json") == found.replay
    assert Network.load(folder / "network.json") == found.network
    assert Profile.load(folder / "profile.json") == found.profile
    for number, plan in enumerate(found.plans, start=1):
        assert Plan.load(folder / f"plan-{number}.json") == plan
    assert (folder / "replay.html").read_text() == render(found)
    assert (folder / "trace.json").exists()


def test_a_page_alone(tmp_path: Path) -> None:
    save_report(outcome(), tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be written"):
        save_report(outcome(), tmp_path / "file" / "report")


def test_the_table_is_aligned_and_steers_no_terminal() -> None:
    console = Console(width=120, record=True, highlight=False)
    found = replay(model="\x1b[31mred", notes=("left out \x07",))
    with console.capture() as capture:
        print_replay(console, found)
    text = capture.get()
    assert "\x1b[31m" not in text
    assert "\x07" not in text
    lines = text.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert list(rows)[1:5] == ["planner", "tictac", "merge", "ddp"]
    assert rows["tictac"][1:3] == ["2", "102.0"]
    assert rows["ddp"][-1] == "1.00x"
    assert rows["tictac"][-1] == "1.25x"
    header = next(line for line in lines if line.startswith("planner"))
    ends = {len(line.rstrip()) for line in lines if line.split()[:1] in (["ddp"], ["merge"])}
    assert ends == {len(header.rstrip())}


@pytest.mark.parametrize(("width", "columns"), [(70, 6), (160, 9)])
def test_a_narrow_screen_gets_fewer_columns(width: int, columns: int) -> None:
    console = Console(width=width, force_terminal=True, color_system=None, highlight=False)
    with console.capture() as capture:
        print_replay(console, replay())
    lines = capture.get().splitlines()
    header = next(line for line in lines if line.startswith("planner"))
    assert len(re.split(r"  +", header.strip())) == columns
    assert all(len(line) <= width for line in lines)
