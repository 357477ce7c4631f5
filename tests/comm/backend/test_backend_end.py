"""A process group may end on any thread and at any moment: no process aborts or hangs for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm.backend import backend_end_jobs as jobs
from tests.mortal import Mortals


def test_the_last_reference_may_go_in_a_callback(mortals: Mortals, tmp_path: Path) -> None:
    for ended in mortals.run(jobs.dropped_in_a_callback, 2, folder=tmp_path):
        assert (ended.code, ended.err) == (0, "")
        assert ended.out == "syncline futures\n[4.0]\n"


def test_a_group_may_be_destroyed_in_a_callback(mortals: Mortals, tmp_path: Path) -> None:
    for ended in mortals.run(jobs.destroyed_in_a_callback, 2, folder=tmp_path):
        assert (ended.code, ended.err) == (0, "")
        assert ended.out == "[2.0]\n"


@pytest.mark.slow
def test_a_script_may_end_with_a_callback_to_come(mortals: Mortals, tmp_path: Path) -> None:
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        for ended in mortals.run(jobs.ends_with_a_callback_to_come, 2, folder=folder):
            assert ended.code == 0, ended


def test_a_thread_may_come_back_from_native_code_as_the_interpreter_ends(
    mortals: Mortals, tmp_path: Path
) -> None:
    [ended] = mortals.run(jobs.ends_with_a_thread_in_native_code, 1, folder=tmp_path)
    assert (ended.code, ended.err) == (0, "")
