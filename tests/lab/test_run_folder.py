"""What a command leaves behind when it is killed, the next one removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from syncline.lab.processes import run_folder

HOLD = "import time\nfrom syncline.lab.processes import run_folder\nwith run_folder() as folder:\n"
HOLD += "    print(folder, flush=True)\n    time.sleep(600)"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_this_users_alone_and_goes_with_what_is_in_it(temporary: Path) -> None:
    with run_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_command_is_removed_and_that_of_a_running_one_is_not(
    temporary: Path,
) -> None:
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        for _ in range(2)
    ]
    try:
        folders = [Path(h.stdout.readline().strip()) for h in holders if h.stdout is not None]
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        assert folders[0].exists()
        with run_folder():
            assert [folder.exists() for folder in folders] == [False, True]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_left_alone(temporary: Path) -> None:
    theirs = temporary / f"syncline-{os.getuid()}-squatted"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    with run_folder() as folder:
        assert folder != theirs
    assert theirs.exists()
