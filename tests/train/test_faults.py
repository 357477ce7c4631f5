"""Whatever goes wrong in overlapped training: all ranks end, all say why, and no update is lost.

The ranks of these tests die, so each test has processes of its own: see
:mod:`tests.mortal`.
"""

from __future__ import annotations

import functools
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kill_resume import (
    LARGEST_DIFFERENCE,
    disturbed,
    largest_difference,
    undisturbed,
)

from tests.cases import first_few
from tests.mortal import Ended, Mortals
from tests.train import fault_jobs as jobs
from tests.words import assert_tells

KILLED = -signal.SIGKILL
RESUME = "see the other ranks' output, and resume all ranks from the last checkpoint"


def told(ended: Ended) -> dict[str, Any]:
    """Return what a rank's job said."""
    found: dict[str, Any] = {}
    for line in ended.out.splitlines():
        found |= json.loads(line)
    return found


def last_line(ended: Ended) -> str:
    """Return the last line of the standard error output, without torch's prefix."""
    lines = [line for line in ended.err.splitlines() if line.strip()]
    return lines[-1].partition("]: ")[2] if lines[-1].startswith("[rank") else lines[-1]


def ends_by_itself(ended: Ended, error: str) -> None:
    """Check that a rank's script ended by an uncaught error of ours."""
    assert ended.code == 1, ended
    assert last_line(ended).startswith(f"syncline.errors.{error}: "), ended.err


@pytest.fixture(scope="module")
def undisturbed_values(
    mortals: Mortals, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[float]]:
    """Return what a training of so many steps comes to that nobody disturbs."""

    @functools.cache
    def values_after(steps: int) -> list[float]:
        folder = tmp_path_factory.mktemp("undisturbed")
        ranks = mortals.run(jobs.undisturbed, 2, steps, folder=folder)
        assert [rank.code for rank in ranks] == [0, 0], ranks
        assert told(ranks[0]) == told(ranks[1])
        values: list[float] = told(ranks[0])["values"]
        assert all(map(math.isfinite, values))
        return values

    return values_after


@pytest.fixture(scope="module")
def settled(mortals: Mortals, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What dropped models are to leave behind."""
    ranks = mortals.run(jobs.synchronizes, 2, folder=tmp_path_factory.mktemp("settled"))
    assert [rank.code for rank in ranks] == [0, 0], ranks
    return told(ranks[0])


# ------------------------------------------------------------------ a rank dies


@pytest.mark.parametrize(
    ("job", "arguments"),
    first_few(
        [
            (jobs.dies_after_step, []),
            (jobs.dies_in_backward, ["need", jobs.WARM]),
            (jobs.dies_between_steps, ["update"]),
            (jobs.dies_in_backward, ["need", 0]),
            (jobs.dies_in_backward, ["need", 1]),
            (jobs.dies_in_backward, ["need", 2]),
            (jobs.dies_in_backward, ["update", jobs.WARM]),
            (jobs.dies_between_steps, ["need"]),
        ],
        3,
    ),
)
def test_a_rank_dies(mortals: Mortals, tmp_path: Path, job: Any, arguments: list[Any]) -> None:
    survivor, dead = mortals.run(job, 2, *arguments, folder=tmp_path)
    assert dead.code == KILLED
    ends_by_itself(survivor, "PeerError")
    assert "rank 0 lost a peer while gradients were exchanged: " in last_line(survivor)
    assert last_line(survivor).endswith(RESUME)


@pytest.mark.parametrize("step", first_few([2, 0, 1, 5]))
def test_a_rank_dies_early(mortals: Mortals, tmp_path: Path, step: int) -> None:
    survivor, dead = mortals.run(jobs.dies_at_first, 2, step, folder=tmp_path)
    assert dead.code == KILLED
    ends_by_itself(survivor, "PeerError")


def test_a_rank_dies_before_it_wraps_its_model(mortals: Mortals, tmp_path: Path) -> None:
    survivor, dead = mortals.run(jobs.dies_before_construction, 2, folder=tmp_path)
    assert dead.code == KILLED
    ends_by_itself(survivor, "PeerError")
    assert "lost a peer while the ranks compared what they were given" in last_line(survivor)


def test_all_survivors_of_three_say_so(mortals: Mortals, tmp_path: Path) -> None:
    first, dead, last = mortals.run(jobs.dies_after_step, 3, folder=tmp_path)
    assert dead.code == KILLED
    ends_by_itself(first, "PeerError")
    ends_by_itself(last, "PeerError")


def test_what_is_read_after_an_error_raises_it_again(mortals: Mortals, tmp_path: Path) -> None:
    survivor, _ = mortals.run(jobs.dies_after_step_and_the_error_is_caught, 2, folder=tmp_path)
    said = told(survivor)
    assert said["first"][0] == "PeerError"
    assert said["reads"] == [said["first"]] * 9
    # The script went on to its end, so this is all that tells of the loss.
    assert survivor.code == 1
    assert_tells(last_line(survivor), "syncline: rank 0 ended", "lost", said["first"][1])


def test_a_rank_falls_silent(mortals: Mortals, tmp_path: Path) -> None:
    survivor, _ = mortals.run(jobs.falls_silent, 2, folder=tmp_path)
    kind, text = told(survivor)["error"]
    assert kind == "PeerError"
    assert f"no answer within {jobs.SHORT_TIMEOUT_S:g} s (" in text


# ------------------------------------------------------------------ ranks part


@pytest.mark.parametrize("wait", ["need", "update"])
def test_a_rank_skips_a_step(mortals: Mortals, tmp_path: Path, wait: str) -> None:
    ranks = mortals.run(jobs.skips_a_step, 2, wait, folder=tmp_path)
    for number, rank in enumerate(ranks):
        ends_by_itself(rank, "MismatchError")
        assert f"rank {number}: the ranks are desynchronized" in last_line(rank)


def test_a_rank_skips_an_iteration(mortals: Mortals, tmp_path: Path) -> None:
    longer, shorter = mortals.run(jobs.skips_an_iteration, 2, folder=tmp_path)
    assert (shorter.code, shorter.err) == (0, "")
    ends_by_itself(longer, "PeerError")


# ------------------------------------------------------------------ a process ends with work left


@pytest.mark.parametrize(
    ("how", "code"),
    first_few(
        [
            ("group destroyed, model dropped", 0),
            ("exit code", 3),
            ("quietly", 0),
            ("group destroyed", 0),
            ("model dropped", 0),
            ("exception", 1),
        ],
        2,
    ),
)
def test_a_process_ends_with_its_update_pending(
    mortals: Mortals,
    tmp_path: Path,
    undisturbed_values: Callable[[int], list[float]],
    how: str,
    code: int,
) -> None:
    ending, reading = mortals.run(jobs.ends, 2, how, folder=tmp_path)
    assert ending.code == code
    assert ("ValueError: the user's own" if how == "exception" else "") in ending.err
    assert how == "exception" or ending.err == ""
    assert reading.code == 0
    assert told(reading)["values"] == undisturbed_values(jobs.WARM + 1)


def test_nothing_that_has_landed_is_kept(mortals: Mortals, tmp_path: Path) -> None:
    # A process would wait for it at its end.
    for rank in mortals.run(jobs.gets_all_back, 2, folder=tmp_path):
        assert (rank.code, rank.err) == (0, "")


@pytest.mark.slow
def test_so_does_a_child_of_multiprocessing(
    mortals: Mortals, tmp_path: Path, undisturbed_values: Callable[[int], list[float]]
) -> None:
    ending, reading = mortals.run(jobs.ends_in_a_child, 2, folder=tmp_path)
    assert (ending.code, ending.err) == (0, "")
    assert told(reading)["values"] == undisturbed_values(jobs.WARM + 1)


def test_an_update_that_is_lost_at_the_end_is_told(mortals: Mortals, tmp_path: Path) -> None:
    alone, _ = mortals.run(jobs.ends_alone, 2, "dead", folder=tmp_path)
    assert alone.code == 1
    assert alone.err.startswith("syncline: rank 0 ended before its last update, which is lost: ")
    assert alone.err.count("\n") == 1


@pytest.mark.slow
def test_a_process_that_waits_at_its_end_says_so(mortals: Mortals, tmp_path: Path) -> None:
    alone, _ = mortals.run(jobs.ends_alone, 2, "silent", folder=tmp_path)
    assert alone.code == 1
    waits, lost = alone.err.splitlines()
    assert_tells(waits, "syncline: rank 0 waits", "last update")
    assert_tells(lost, "syncline: rank 0 ended", "last update", "lost")


@pytest.mark.slow
def test_after_an_exception_it_does_not_wait_for_long(mortals: Mortals, tmp_path: Path) -> None:
    alone, _ = mortals.run(jobs.ends_alone, 2, "silent, after an exception", folder=tmp_path)
    assert alone.code == 1
    *_, exception, lost = alone.err.splitlines()
    assert exception.endswith("ValueError: the user's own")
    assert_tells(lost, "syncline: rank 0", "last update is lost", "1 s", "checkpoint")


@pytest.mark.slow
def test_it_is_told_by_a_child_of_multiprocessing(mortals: Mortals, tmp_path: Path) -> None:
    alone, _ = mortals.run(jobs.ends_alone_in_a_child, 2, folder=tmp_path)
    assert alone.code == 1
    assert alone.err.startswith("syncline: rank 0 ended before its last update, which is lost: ")


@pytest.mark.slow
def test_exit_handlers_of_the_user_run_first(mortals: Mortals, tmp_path: Path) -> None:
    alone, _ = mortals.run(jobs.says_at_exit, 2, folder=tmp_path)
    assert alone.code == 1
    assert told(alone) == {"handler": "ran"}


# ------------------------------------------------------------------ exceptions of the user


def test_a_forward_pass_that_fails_can_be_tried_again(
    mortals: Mortals, tmp_path: Path, undisturbed_values: Callable[[int], list[float]]
) -> None:
    steps = 60  # more than a window of the steady state, which the ranks conclude together
    ranks = mortals.run(jobs.fails_in_forward, 2, steps, folder=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    values = undisturbed_values(steps)
    assert [told(rank)["values"] for rank in ranks] == [values, values]
    assert told(ranks[1])["pending"] > 0


@pytest.mark.slow
def test_a_forward_pass_fails_for_good(mortals: Mortals, tmp_path: Path) -> None:
    other, failing = mortals.run(jobs.fails_in_forward_for_good, 2, folder=tmp_path)
    assert failing.code == 1
    assert last_line(failing).endswith("OnceError")
    ends_by_itself(other, "PeerError")


def test_a_backward_pass_fails(mortals: Mortals, tmp_path: Path) -> None:
    other, failing = mortals.run(jobs.fails_in_backward, 2, folder=tmp_path)
    said = told(failing)
    assert said["stepped"] == said["went_on"]
    assert said["stepped"][0] == "PeerError"
    assert "the last backward pass did not reach the gradient of '0.bias'" in said["stepped"][1]
    ends_by_itself(other, "PeerError")


def test_an_update_fails(mortals: Mortals, tmp_path: Path) -> None:
    for number, rank in enumerate(mortals.run(jobs.fails_in_an_update, 2, folder=tmp_path)):
        said = told(rank)
        assert said["raised"] == "no update"
        kind, text = said["reads"][0]
        assert kind == "SynclineError"
        assert text.startswith(f"rank {number}: the update of ")
        assert text.endswith(
            " was interrupted by OnceError: no update; resume all ranks from the last checkpoint"
        )
        assert said["reads"] == [[kind, text]] * 3
        assert rank.code == 1
        assert last_line(rank).endswith(f"which is lost: {text}")


def test_ctrl_c_at_a_gate(
    mortals: Mortals, tmp_path: Path, undisturbed_values: Callable[[int], list[float]]
) -> None:
    steps = jobs.WARM + 3
    ranks = mortals.run(jobs.is_interrupted, 2, steps, folder=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert told(ranks[0])["interrupted"] == 3
    values = undisturbed_values(steps)
    assert [told(rank)["values"] for rank in ranks] == [values, values]


# ------------------------------------------------------------------ forks


@pytest.mark.parametrize("reads", first_few([True, False]))
def test_workers_of_a_data_loader(
    mortals: Mortals, tmp_path: Path, undisturbed_values: Callable[[int], list[float]], reads: bool
) -> None:
    ranks = mortals.run(jobs.forks, 2, reads, folder=tmp_path)
    values = undisturbed_values(jobs.WARM + 3)
    for rank in ranks:
        said = told(rank)
        assert (rank.code, rank.err) == (0, "")
        assert said["values"] == values
        assert said["still"]
        if reads:
            assert said["error"][0] == "UserError"
            assert "this process was forked while gradients were exchanged" in said["error"][1]
        else:
            assert said["error"] is None
            assert said["got"] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


# ------------------------------------------------------------------ dropping and copying


@pytest.mark.parametrize("keeps", first_few(["", "model", "optimizer", "model and optimizer"]))
@pytest.mark.parametrize("when", ["after step", "after backward"])
def test_a_model_is_dropped(
    mortals: Mortals, tmp_path: Path, settled: dict[str, Any], keeps: str, when: str
) -> None:
    for rank in mortals.run(jobs.is_dropped, 2, keeps, when, folder=tmp_path):
        said = told(rank)
        assert (rank.code, rank.err) == (0, "")
        assert said["running"] == ["syncline completer", "syncline issuer"]
        assert said["left"] == []
        gone = ["wrapper", "engine"] if keeps else ["wrapper", "engine", "parameter"]
        assert said["collected"] == gone
        if "model" in keeps:
            assert said["gradients"] == settled["gradients"]
            assert said["values"] == settled["values" if when == "after step" else "before"]
            assert said["classes"] == ["Parameter"]
            assert said["hooks"] == 0
        if "optimizer" in keeps and when == "after step":
            assert said["state"] == settled["state"]


@pytest.mark.slow
def test_a_model_is_copied(
    mortals: Mortals, tmp_path: Path, undisturbed_values: Callable[[int], list[float]]
) -> None:
    ranks = mortals.run(jobs.is_copied, 2, folder=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    values = undisturbed_values(jobs.WARM + 6)
    for rank in ranks:
        said = told(rank)
        assert said["same"]
        assert said["untouched"]
        assert said["values"] == values


# ------------------------------------------------------------------ resuming


@pytest.mark.slow
def test_killed_workers_resume_bit_for_bit() -> None:
    steps = 150
    found = disturbed(steps, kills=3, seed=1, shard=False)
    assert len(found["kills"]) == 3
    for kill in found["kills"]:
        for line in kill["said"]:
            assert "PeerError: rank " in line
    assert found["ends"] == undisturbed(steps, shard=False)


@pytest.mark.slow
def test_killed_workers_resume_with_another_number_of_ranks() -> None:
    steps = 150
    found = disturbed(steps, kills=3, seed=1, shard=True)
    assert [kill["ranks"] for kill in found["kills"]] == [4, 2, 4]
    (whole,) = undisturbed(steps, shard=True)
    assert largest_difference(found["ends"][0], whole) < LARGEST_DIFFERENCE
