"""The figures of a replay, and what no replay can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.errors import FileError, UserError
from syncline.lab.replay.result import Replay
from tests.lab.replay.examples import entry, replay


def test_the_figures_of_an_entry() -> None:
    found = entry("ddp")
    assert found.measured_s == 0.130
    assert found.spread_s == (0.120, 0.140)
    assert found.exposed_s == 0.02
    assert found.error == pytest.approx(0.12 / 0.13 - 1)
    assert found.above_bound == pytest.approx(0.3)
    assert entry("ddp", lower_bound_s=0.0).above_bound == 0


def test_a_speed_up_is_the_median_of_the_rounds() -> None:
    assert entry("merge").speed_up_over(entry("ddp")) == pytest.approx(130 / 110)
    assert entry("tictac").speed_up_over(entry("ddp")) == pytest.approx(130 / 104)


def test_the_figures_of_a_replay() -> None:
    found = replay()
    assert found.rounds == 3
    assert found.best.planner == "tictac"
    assert [e.planner for e in found.fastest_first] == ["tictac", "merge", "ddp"]
    assert found.lower_bound_s == 0.1
    assert found.of("merge") == found.entries[1]
    assert found.of("wfbp") is None


def test_it_survives_its_file(tmp_path: Path) -> None:
    found = replay(notes=("a note",))
    found.save(tmp_path / "replay.json")
    assert Replay.load(tmp_path / "replay.json") == found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"messages": 0}, "replay of 'ddp': messages must be at least 1, found 0"),
        ({"predicted_s": -1.0}, "predicted_s must be a finite time"),
        ({"rounds_s": ()}, "no rounds"),
        ({"settled_s": (0.1,)}, "expected settled_s of 3 rounds, found 1"),
        ({"iterations_s": ((0.1,), (0.1,), (float("inf"),))}, "iterations_s must be a finite"),
        ({"rounds_s": (0.0, 0.1, 0.1)}, "must be above 0 s"),
    ],
)
def test_what_no_entry_can_be(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        entry("ddp", **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"entries": ()}, "no entries"),
        ({"workers": 0}, "replay: workers must be at least 1, found 0"),
        ({"entries": (entry("ddp"), entry("ddp"))}, "is named twice: ddp, ddp"),
        ({"computation_s": float("nan")}, "computation_s must be a finite time"),
    ],
)
def test_what_no_replay_can_be(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        replay(**changes)


def test_rounds_must_be_as_many_for_all() -> None:
    short = entry("ddp", rounds_s=(1.0,), settled_s=(1.0,), idle_s=(0.0,), iterations_s=((1.0,),))
    with pytest.raises(UserError, match="different numbers of rounds"):
        replay(entries=(short, entry("merge")))


def test_a_broken_file_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    path.write_text(replay().to_json().replace('"rounds_s": [', '"rounds_s": ["x", ', 1))
    with pytest.raises(FileError, match=r"entries\[0\].rounds_s\[0\]"):
        Replay.load(path)
