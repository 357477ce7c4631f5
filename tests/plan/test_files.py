"""Where files are written, and where not."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.errors import FileError
from syncline.files.report.bundle import Bundle
from syncline.files.report.page import save_page
from syncline.plan.files import write_atomically
from tests.plan.documents import PLAN

Plant = Callable[[Path], object]
SHARED = (0o1777, 0o777, 0o775)  # modes of folders that others can write to


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Return what makes a link or a pipe another user's."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    return give


def names(folder: Path) -> list[str]:
    """Return the names of a folder's files, to see that no temporary one is left."""
    return [path.name for path in folder.iterdir()]


def shared_folder(tmp_path: Path, mode: int) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    return folder


@pytest.mark.parametrize("mode", SHARED)
def test_a_strangers_link_is_not_followed(tmp_path: Path, planted: Plant, mode: int) -> None:
    folder, precious = shared_folder(tmp_path, mode), tmp_path / "precious"
    precious.write_text("mine")
    link = folder / "trace_0.json"
    link.symlink_to(precious)
    planted(link)
    with pytest.raises(FileError, match=r"'trace_0.json' is a link of user \d+ in a folder that"):
        write_atomically(link, "other")
    assert precious.read_text() == "mine"
    assert sorted(names(tmp_path)) == ["precious", "shared"]


@pytest.mark.parametrize(
    ("present", "save"),
    [
        ("report.html", lambda folder: save_page(folder, "other", "report.html", {})),
        ("run.json", Bundle(plan=PLAN).save),  # it would move the files of a run
    ],
)
def test_a_strangers_folder_link(tmp_path: Path, planted: Plant, present: str, save: Plant) -> None:
    folder, own = shared_folder(tmp_path, 0o1777), tmp_path / "own"
    own.mkdir()
    (own / present).write_text("mine")
    (folder / "report").symlink_to(own)
    planted(folder / "report")
    with pytest.raises(FileError, match="'report' is a link of user"):
        save(folder / "report")
    assert (own / present).read_text() == "mine"
    assert names(own) == [present]


def test_a_strangers_pipe_is_not_waited_for(tmp_path: Path, planted: Plant) -> None:
    pipe = shared_folder(tmp_path, 0o777) / "plan.json"
    os.mkfifo(pipe)
    planted(pipe)
    reader = os.open(pipe, os.O_RDWR)  # so that a mistake here does not wait
    with pytest.raises(FileError, match=r"'plan.json' is a pipe or device of user"):
        write_atomically(pipe, "text")
    os.close(reader)


def test_the_users_own_links_are_followed_also_in_shared_folders(tmp_path: Path) -> None:
    folder, target = shared_folder(tmp_path, 0o1777), tmp_path / "deep"
    target.mkdir()
    (folder / "there").symlink_to("../deep")
    (folder / "name").symlink_to("there/new")
    write_atomically(folder / "name", "text")
    assert (target / "new").read_text() == "text"
    assert (folder / "name").is_symlink()
    write_atomically(folder / "name", "again")
    assert (target / "new").read_text() == "again"


def test_links_that_go_in_circles(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(FileError, match="cannot be written: Too many levels of symbolic links"):
        write_atomically(tmp_path / "a", "text")


def test_a_path_below_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    write_atomically(Path("in/../plan.json"), "text")
    assert (tmp_path / "plan.json").read_text() == "text"
    with pytest.raises(FileError, match="Is a directory"):
        write_atomically(Path("in"), "text")
    with pytest.raises(FileError):
        write_atomically(Path(), "text")
    assert sorted(names(tmp_path)) == ["in", "plan.json"]


def test_the_users_own_pipe_is_written_once_somebody_reads(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_atomically, args=(pipe, "text"), daemon=True)
    writer.start()
    assert pipe.read_text() == "text"
    writer.join(60)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_where_only_a_regular_file_may_be_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(FileError, match="expected a regular file, found a pipe or a device"):
            write_atomically(tmp_path / name, "text", regular=True)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(mode)
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_that_the_user_wants(tmp_path: Path) -> None:
    for umask, mode in ((0o077, 0o600), (0o022, 0o644), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            write_atomically(tmp_path / str(umask), "text")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / str(umask)).stat().st_mode) == mode


def test_a_replaced_strangers_file_opens_nothing(tmp_path: Path, planted: Plant) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o666)
    planted(path)
    write_atomically(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
