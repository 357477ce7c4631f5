"""Which algorithm a group takes, and that its ranks agree on it."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from syncline.comm.collectives import PROGRAMS
from syncline.comm.groups import Choice
from syncline.comm.groups import group as module
from syncline.comm.groups.choices import (
    Chooser,
    Regions,
    agreed_chooser,
    choices_path,
    choose,
    chooser_for,
)
from syncline.comm.groups.compiled import compiled
from syncline.comm.groups.notes import Notes
from syncline.comm.groups.site import Site
from syncline.errors import FileError, MismatchError, PeerError, UserError
from tests.comm.groups.choice_examples import HERE, choices, some_regions
from tests.comm.groups.one_process import add_up, joined, on_each
from tests.timeouts import DEADLINE_S

OTHER = Site(route="ucx", layout=((0,), (1,)), machines=("a",), names=("here",))


@given(some_regions, st.integers(0, 1 << 41))
def test_the_region_of_the_size_says_it_and_else_what_is_built_in(
    regions: Regions, size_bytes: int
) -> None:
    chooser = Chooser(HERE.layout, regions, "measured")
    for collective in PROGRAMS:
        if collective in regions:
            mine = [r for r in regions[collective] if r.from_bytes <= size_bytes][-1]
            assert chooser.choose(collective, size_bytes) == mine.choice(size_bytes)
        else:
            expected = choose(collective, HERE.layout, size_bytes)
            assert chooser.choose(collective, size_bytes) == expected


def test_choices_that_are_given_must_fit_the_group() -> None:
    assert chooser_for(choices(), HERE).source == "measured 2026-11-21 20:19 UTC, given"
    assert chooser_for("built-in", HERE).source == "built-in"
    with pytest.raises(MismatchError, match="the given choices are for 2 ranks on here by UCX"):
        chooser_for(choices(site=OTHER), HERE)


@given(some_regions)
def test_all_ranks_have_what_rank_0_has(regions: Regions) -> None:
    store = dist.HashStore()
    deadline = time.monotonic() + DEADLINE_S
    first = agreed_chooser(choices(regions), HERE, Notes(store, "g", 0, deadline))
    second = agreed_chooser("built-in", HERE, Notes(store, "g", 1, deadline))
    assert (first.regions, first.source) == (second.regions, second.source)
    assert first.regions == regions


def test_what_is_wrong_on_rank_0_is_said_on_all_ranks() -> None:
    store = dist.HashStore()
    deadline = time.monotonic() + DEADLINE_S
    with pytest.raises(MismatchError):
        agreed_chooser(choices(site=OTHER), HERE, Notes(store, "g", 0, deadline))
    with pytest.raises(UserError, match="rank 0: the given choices are for 2 ranks on here by UCX"):
        agreed_chooser("measured", HERE, Notes(store, "g", 1, deadline))


def test_a_rank_0_that_says_nothing() -> None:
    with pytest.raises(PeerError, match="rank 1: rank 0 did not join the group in time"):
        agreed_chooser("measured", HERE, Notes(dist.HashStore(), "g", 1, time.monotonic()))


# ---------------------------------------------------------------------- groups, in one process


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return where the choices of a pair are looked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with joined() as groups:
        assert [group.chooser.source for group in groups] == ["built-in"] * 2
        path = choices_path(groups[0].site)
        path.parent.mkdir(parents=True)
        choices(site=groups[0].site).save(path)
    return path


def test_groups_use_what_is_in_the_cache(cached: Path) -> None:
    with joined() as groups:
        for group in groups:
            assert group.chooser.source == f"measured 2026-11-21 20:19 UTC, {cached}"
            assert group.chooser.choose("all-reduce", 4) == Choice("ring")
            assert group.chooser.choose("all-reduce", 1000) == Choice("linear-pipeline", 16)
        for count in (1, 300, 5000):
            add_up(groups, count)


@pytest.mark.usefixtures("cached")
def test_what_is_forced_is_taken_whatever_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = mock.Mock(side_effect=compiled)
    monkeypatch.setattr(module, "compiled", taken)
    forced = Choice("recursive-doubling")
    with joined() as groups:
        add_up(groups, choice=forced)
    assert [call.args[1] for call in taken.call_args_list] == [forced] * 2


@pytest.mark.usefixtures("cached")
def test_the_built_in_choices_can_be_asked_for() -> None:
    with joined(choices="built-in") as groups:
        assert [group.chooser.source for group in groups] == ["built-in"] * 2


def test_a_damaged_file_ends_all_ranks(cached: Path) -> None:
    cached.write_text("{")
    first, second = (each.exception() for each in on_each(lambda _: None))
    assert isinstance(first, FileError)
    assert str(first).startswith(f"{cached}: not valid JSON")
    assert "measure again with 'syncline tune'" in str(first)
    assert isinstance(second, UserError)
    assert str(second) == f"rank 0: {first}"
