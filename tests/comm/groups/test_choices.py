"""Measured choices: as documents, in the user's cache, and the sites for which they are valid."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from msgspec.structs import replace

from syncline.cli import main
from syncline.comm.groups import site as module
from syncline.comm.groups.choices import (
    MOST_BLOCKS,
    Choice,
    Choices,
    Region,
    Regions,
    Timing,
    choices_folder,
    choices_path,
    measured_choices,
    release,
    require_algorithm,
)
from syncline.comm.groups.site import Site, machine_identity
from syncline.errors import FileError, UserError
from syncline.lab.testbed import Cluster
from tests.comm.groups.choice_examples import HERE, choices, some_regions
from tests.words import assert_tells


@given(some_regions)
def test_what_is_written_is_read_back(regions: Regions) -> None:
    timing = Timing(collective="reduce", size_bytes=4, algorithm="direct", rounds_s=(1e-6, 2e-6))
    written = choices(regions, timings=(timing,))
    assert Choices.from_json(written.to_json()) == written


def region(from_bytes: int, algorithm: str = "ring", block_bytes: int | None = None) -> Region:
    return Region(from_bytes=from_bytes, algorithm=algorithm, block_bytes=block_bytes)


@pytest.mark.parametrize(
    ("regions", "said"),
    [
        ((), r"expected regions from 0 and larger sizes, found \[\]"),
        ((region(1),), "expected regions from 0"),
        ((region(0),) * 2, "expected regions from 0"),
        ((region(0, "rings"),), "unknown algorithm 'rings'"),
        ((region(0, "ring", 4),), "it takes no blocks"),
        ((region(0, "linear-pipeline"),), "needs blocks, at least 1"),
        ((region(0, "linear-pipeline", 0),), "needs blocks, at least 1; found 0"),
        ((region(0, "hierarchical"),), "for several hosts with several ranks"),
    ],
)
def test_regions_that_cannot_be(regions: tuple[Region, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        choices({"all-reduce": regions})


def test_hierarchical_is_for_hosts_with_several_ranks() -> None:
    both = Site(route="auto", layout=((0, 1), (2, 3)), machines=("a", "b"), names=("a", "b"))
    require_algorithm("all-reduce", "hierarchical", None, both)
    with pytest.raises(UserError, match="unknown algorithm 'hierarchical'"):
        require_algorithm("broadcast", "hierarchical", None, both)
    with pytest.raises(UserError, match="it takes no blocks"):
        require_algorithm("all-reduce", "hierarchical", 4, both)


@pytest.mark.parametrize(
    ("size_bytes", "rounds_s", "said"),
    [
        (4, (), "rounds of more than 0 s"),
        (4, (1e-6, 0.0), "rounds of more than 0 s"),
        (4, (-1.0,), "rounds of more than 0 s"),
        (1 << 63, (1.0,), "at most 4611686018427387904 bytes"),
        (4, (1e300,), "longer than the 70369 s"),
    ],
)
def test_timings_that_cannot_be(size_bytes: int, rounds_s: tuple[float, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Timing(collective="reduce", size_bytes=size_bytes, algorithm="direct", rounds_s=rounds_s)


@pytest.mark.parametrize(("size", "cuts"), [(0, 1), (1, 1), (64, 1), (65, 2), (2**40, MOST_BLOCKS)])
def test_a_pipeline_is_cut_into_blocks_of_the_size_that_was_measured(size: int, cuts: int) -> None:
    cut = region(0, "linear-pipeline", 64)
    assert cut.choice(size) == Choice("linear-pipeline", cuts)
    assert region(0).choice(size) == Choice("ring")


# ---------------------------------------------------------------------- in the user's cache


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return where the choices of HERE would be, in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = choices_path(HERE)
    assert path == tmp_path / "syncline" / "choices" / f"{HERE.key}.json"
    path.parent.mkdir(parents=True)
    return path


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert choices_folder() == tmp_path / ".cache" / "syncline" / "choices"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert choices_folder() == tmp_path / ".cache" / "syncline" / "choices"


def test_a_user_without_a_home_has_no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home")))
    assert measured_choices(HERE) is None
    with pytest.raises(UserError, match="set XDG_CACHE_HOME, or name a file"):
        choices_path(HERE)


def test_what_was_saved_last_is_found_and_what_was_not_is_not(kept: Path) -> None:
    assert measured_choices(HERE) is None
    for saved in (choices(), choices({})):
        saved.save(kept)
        assert measured_choices(HERE) == (saved, kept)
    assert measured_choices(replace(HERE, route="ucx", layout=((0,), (1,)))) is None


def test_another_release_is_not_used(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    choices(version="0.0.0").save(kept)
    with caplog.at_level(logging.WARNING, "syncline"):
        assert measured_choices(HERE) is None
        assert measured_choices(HERE) is None
    [said] = caplog.messages
    facts = str(kept), "release 0.0.0", release(), "built-in choices", "'syncline tune'"
    assert_tells(said, *facts)


def of_other_hosts(path: Path) -> None:
    choices(site=replace(HERE, machines=("b",), names=("there",))).save(path)


def holds(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (holds(""), "not valid JSON"),
        (holds("{}"), "not a syncline file"),
        (holds('{"format": "syncline/plan", "version": 1}'), "a choices file, this is a plan"),
        (holds(choices().to_json()[:-20]), "not valid JSON"),
        (holds(choices().to_json().replace('"ring"', '"rong"')), "unknown algorithm 'rong'"),
        (holds(choices().to_json().replace('"from_bytes": 0', '"from_bytes": 4')), "from 0"),
        (of_other_hosts, "expected choices for 2 ranks on here, found some for 2 "),
        (Path.mkdir, "this is a folder"),
        (os.mkfifo, "expected a regular file, found a pipe"),  # nobody waits for it
    ],
)
def test_a_damaged_file_is_explained(kept: Path, make: Callable[[Path], object], said: str) -> None:
    make(kept)
    for _ in range(2):
        with pytest.raises(FileError, match=said) as caught:
            measured_choices(HERE)
        assert str(kept) in str(caught.value)
        assert "delete it, or measure again with 'syncline tune'" in str(caught.value)


def test_tune_waits_for_no_pipe_in_a_cache(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(kept)
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--show"])
    assert "expected a regular file, found a pipe; delete it, or" in capsys.readouterr().err


def test_a_cache_that_may_not_be_read_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container under another user's number, whose HOME is still root's."""
    choices().save(kept := tmp_path / "kept.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # no folder
    with caplog.at_level(logging.DEBUG, "syncline"):
        assert measured_choices(HERE) is None
        assert measured_choices(HERE) is None
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        path = choices_path(HERE)
        path.parent.mkdir(parents=True)
        kept.rename(path)
        assert measured_choices(HERE) is not None
        monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may read everything
        assert measured_choices(HERE) is None
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "cannot be read: Not a directory; built-in choices are used",
        "cannot be read: Permission denied; built-in choices are used",
    ]


def test_what_a_site_says_of_itself() -> None:
    assert str(HERE) == "2 ranks on here"
    assert str(replace(HERE, route="ucx", layout=((0,),))) == "1 rank on here by UCX"
    assert str(replace(HERE, layout=((0,), (1,)), names=("x", "y"))) == "2 ranks on 2 hosts"


@pytest.mark.parametrize("layout", [(), ((),), ((0, 2),), ((0,), (0, 1)), ((0,), ()), ((1, 2),)])
def test_ranks_that_cannot_be(layout: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(UserError, match=r"expected each of the ranks 0, 1, 2 \.\.\. on one host"):
        replace(HERE, layout=layout)


def test_names_of_hosts_make_no_difference_and_everything_else_does() -> None:
    assert replace(HERE, names=("renamed",)).key == HERE.key
    changes: list[dict[str, Any]] = [
        {},
        {"route": "ucx"},
        {"layout": ((0, 1, 2),)},
        {"layout": ((0,), (1,))},
        {"layout": ((1, 0),)},
        {"machines": ("b",)},
    ]
    keys = {replace(HERE, **change).key for change in changes}
    assert len(keys) == 6
    assert all(key.startswith(("auto-2-", "auto-3-", "ucx-2-")) for key in keys)


def test_a_machine_is_told_by_its_own_number_its_name_and_its_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setattr(module, "DOMAIN", tmp_path / "domain")
    found = set()
    for name, machine, domain in (
        ("one", "", "(none)\n"),
        ("one", "f00d\n", "(none)\n"),
        ("two", "f00d\n", "(none)\n"),
        ("two", "f00d\n", "syncline-1234\n"),
    ):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        if machine:  # a container has none
            (tmp_path / "machine-id").write_text(machine)
        (tmp_path / "domain").write_text(domain)
        found.add(machine_identity())
    assert len(found) == 4
    assert found.isdisjoint({"f00d"})
    assert machine_identity() in found


def test_emulated_hosts_with_other_links_are_others() -> None:
    same = Cluster.of(hosts=2, rate="1gbit"), Cluster.of(hosts=2, rate="1000mbit")
    assert same[0].domain == same[1].domain
    others = {
        Cluster.of(hosts=2, rate="10gbit").domain,
        Cluster.of(hosts=2, rate="1gbit", latency="20us").domain,
        Cluster.of(hosts=2, rate="1gbit", hosts_rate=["1:2gbit"]).domain,
        same[0].domain,
    }
    assert len(others) == 4
    assert all(len(domain) <= 64 for domain in others)  # the most that the kernel takes
