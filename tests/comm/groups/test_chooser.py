"""Which algorithm a group takes, and that its ranks agree on it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from syncline.comm.collectives import PROGRAMS, Collective
from syncline.comm.groups import Choice, Group
from syncline.comm.groups import group as module
from syncline.comm.groups.choices import (
    Chooser,
    Regions,
    agreed_chooser,
    choices_path,
    choose,
    chooser_for,
)
from syncline.comm.groups.compiled import Compiled, compiled
from syncline.comm.groups.notes import Notes
from syncline.comm.groups.site import Site
from syncline.errors import MismatchError, PeerError, SynclineError, UserError
from tests.comm.groups import jobs
from tests.comm.groups.choice_examples import HERE, choices, some_regions
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


@dataclass
class _Store:
    """A store whose waits never last."""

    notes: dict[str, bytes] = field(default_factory=dict)

    def set(self, key: str, value: str, /) -> None:
        self.notes[key] = value.encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.notes for key in keys)

    def get(self, key: str, /) -> bytes:
        return self.notes[key]


@given(some_regions)
def test_all_ranks_have_what_rank_0_has(regions: Regions) -> None:
    store = _Store()
    deadline = time.monotonic() + DEADLINE_S
    first = agreed_chooser(choices(regions), HERE, Notes(store, "g", 0, deadline))
    second = agreed_chooser("built-in", HERE, Notes(store, "g", 1, deadline))
    assert (first.regions, first.source) == (second.regions, second.source)
    assert first.regions == regions


def test_what_is_wrong_on_rank_0_is_said_on_all_ranks() -> None:
    store = _Store()
    deadline = time.monotonic() + DEADLINE_S
    with pytest.raises(MismatchError):
        agreed_chooser(choices(site=OTHER), HERE, Notes(store, "g", 0, deadline))
    with pytest.raises(UserError, match="rank 0: the given choices are for 2 ranks on here by UCX"):
        agreed_chooser("measured", HERE, Notes(store, "g", 1, deadline))


def test_a_rank_0_that_says_nothing() -> None:
    with pytest.raises(PeerError, match="rank 1: rank 0 did not join the group in time"):
        agreed_chooser("measured", HERE, Notes(_Store(), "g", 1, time.monotonic()))


# ---------------------------------------------------------------------- groups, in one process


def pair(**arguments: Any) -> list[Group]:
    """Return the two ranks of a group."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        each = [
            pool.submit(Group, store, rank, 2, timeout_s=DEADLINE_S, **arguments)
            for rank in range(2)
        ]
        return [future.result() for future in each]


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return where the choices of a pair are looked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    groups = pair()
    assert [group.chooser.source for group in groups] == ["built-in"] * 2
    path = choices_path(groups[0].site)
    path.parent.mkdir(parents=True)
    choices(site=groups[0].site).save(path)
    for group in groups:
        group.close()
    return path


def test_groups_use_what_is_in_the_cache(cached: Path) -> None:
    groups = pair()
    for group in groups:
        assert group.chooser.source == f"measured 2026-11-21 20:19 UTC, {cached}"
        assert group.chooser.choose("all-reduce", 4) == Choice("ring")
        assert group.chooser.choose("all-reduce", 1000) == Choice("linear-pipeline", 16)
    for count in (1, 300, 5000):
        values = [torch.ones(count) for _ in groups]
        pending = [
            group.all_reduce(jobs.elements(tensor))
            for group, tensor in zip(groups, values, strict=True)
        ]
        for each in pending:
            each.wait()
        assert all(torch.equal(tensor, torch.full((count,), 2.0)) for tensor in values)
    for group in groups:
        group.close()


def test_what_is_forced_is_taken_whatever_was_measured(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached.exists()
    groups = pair()
    taken: list[Choice] = []

    def noted(collective: Collective, choice: Choice, *rest: Any) -> Compiled:
        taken.append(choice)
        return compiled(collective, choice, *rest)

    monkeypatch.setattr(module, "compiled", noted)
    values = [torch.ones(4) for _ in groups]
    forced = Choice("recursive-doubling")
    pending = [
        group.all_reduce(jobs.elements(tensor), choice=forced)
        for group, tensor in zip(groups, values, strict=True)
    ]
    for each in pending:
        each.wait()
    assert taken == [forced] * 2
    for group in groups:
        group.close()


def test_the_built_in_choices_can_be_asked_for(cached: Path) -> None:
    assert cached.exists()
    for group in pair(choices="built-in"):
        assert group.chooser.source == "built-in"
        group.close()


def test_a_damaged_file_ends_all_ranks(cached: Path) -> None:
    cached.write_text("{")
    store = dist.HashStore()

    def join(rank: int) -> str:
        try:
            Group(store, rank, 2, timeout_s=DEADLINE_S)
        except SynclineError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(join, range(2))
    assert first.startswith(f"FileError: {cached}: not valid JSON")
    assert second == f"UserError: rank 0: {first.removeprefix('FileError: ')}"
    assert "measure again with 'syncline tune'" in first
