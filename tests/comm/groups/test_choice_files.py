"""Measured choices in the user's cache."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from syncline.cli import tune
from syncline.comm.groups.choices import choices_folder, choices_path, measured_choices, release
from syncline.comm.groups.site import Site
from syncline.errors import FileError, UserError
from tests.comm.groups.choice_examples import HERE, choices


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
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert measured_choices(HERE) is None
    with pytest.raises(UserError, match="set XDG_CACHE_HOME, or name a file"):
        choices_path(HERE)


def test_what_was_saved_is_found_and_what_was_not_is_not(kept: Path) -> None:
    assert measured_choices(HERE) is None
    choices().save(kept)
    assert measured_choices(HERE) == (choices(), kept)
    other = Site(route="ucx", layout=((0,), (1,)), machines=("a",), names=("here",))
    assert measured_choices(other) is None


def test_a_file_that_changes_is_read_again(kept: Path) -> None:
    choices().save(kept)
    assert measured_choices(HERE) is not None
    choices({}).save(kept)
    found = measured_choices(HERE)
    assert found is not None
    assert found[0].regions == {}


def test_another_release_is_not_used_and_that_is_said_once(
    kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choices(version="0.0.0").save(kept)
    with caplog.at_level(logging.WARNING, "syncline"):
        assert measured_choices(HERE) is None
        assert measured_choices(HERE) is None
    assert caplog.messages == [
        f"{kept} was measured with release 0.0.0, this is {release()}: built-in choices are used; "
        "measure again with 'syncline tune'"
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON"),
        ("{}", "not a syncline file"),
        ('{"format": "syncline/plan", "version": 1}', "expected a choices file, this is a plan"),
        (choices().to_json()[:-20], "not valid JSON"),
        (choices().to_json().replace('"ring"', '"rong"'), "unknown algorithm 'rong'"),
        (choices().to_json().replace('"from_bytes": 0', '"from_bytes": 4'), "from 0"),
    ],
)
def test_a_damaged_file_says_what_to_do(kept: Path, text: str, said: str) -> None:
    kept.write_text(text)
    for _ in range(2):
        with pytest.raises(FileError, match=said) as caught:
            measured_choices(HERE)
        assert str(kept) in str(caught.value)
        assert "delete it, or measure again with 'syncline tune'" in str(caught.value)


def test_choices_of_other_hosts_are_refused(kept: Path) -> None:
    other = Site(route="auto", layout=((0, 1),), machines=("b",), names=("there",))
    choices(site=other).save(kept)
    with pytest.raises(FileError, match="expected choices for 2 ranks on here, found some for 2 "):
        measured_choices(HERE)


def test_a_file_that_cannot_be_read(kept: Path) -> None:
    kept.mkdir()
    with pytest.raises(FileError, match=r"this is a folder.*'syncline tune'"):
        measured_choices(HERE)


def test_nobody_waits_for_a_pipe_in_the_cache(kept: Path) -> None:
    os.mkfifo(kept)
    with pytest.raises(FileError, match=r"expected a regular file, found a pipe; delete it, or"):
        measured_choices(HERE)
    with pytest.raises(FileError, match=r"expected a regular file, found a pipe; delete it, or"):
        tune._kept()


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
