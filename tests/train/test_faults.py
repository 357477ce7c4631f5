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
from benchmarks.kill_resume import LARGEST_DIFFERENCE, disturbed, largest_difference, undisturbed

from tests.cases import first_few
from tests.mortal import Ended, Mortals
from tests.train import fault_jobs as jobs
from tests.words import assert_tells

KILLED = -signal.SIGKILL
RESUME = "see the other ranks' output, and resume all ranks from the last checkpoint"

Run = Callable[..., list[Ended]]
Values = Callable[[int], list[float]]


def told(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in ended.out.splitlines():
        found |= json.loads(line)
    return found


def last_line(ended: Ended) -> str:
    """Return the last line of the standard error output, without torch's prefix."""
    lines = [line for line in ended.err.splitlines() if line.strip()]
    return lines[-1].partition("]: ")[2] if lines[-1].startswith("[rank") else lines[-1]


def ends_by_itself(ended: Ended, error: str) -> None:
    assert ended.code == 1, ended
    assert last_line(ended).startswith(f"syncline.errors.{error}: "), ended.err


@pytest.fixture
def run(mortals: Mortals, tmp_path: Path) -> Run:
    def ranks_of(job: Callable[..., None], *args: Any, ranks: int = 2) -> list[Ended]:
        return mortals.run(job, ranks, *args, folder=tmp_path)

    return ranks_of


@pytest.fixture(scope="module")
def undisturbed_values(mortals: Mortals, tmp_path_factory: pytest.TempPathFactory) -> Values:
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


EXCHANGING = ["rank 0 lost a peer while gradients were exchanged: ", RESUME]


@pytest.mark.parametrize(
    ("job", "arguments", "facts"),
    [
        *first_few(
            [
                (jobs.dies_in_backward, ["need", jobs.WARM], EXCHANGING),
                (jobs.dies_between_steps, ["update"], EXCHANGING),
                (jobs.dies_in_backward, ["need", 0], EXCHANGING),
                (jobs.dies_in_backward, ["need", 1], EXCHANGING),
                (jobs.dies_in_backward, ["need", 2], EXCHANGING),
                (jobs.dies_in_backward, ["update", jobs.WARM], EXCHANGING),
                (jobs.dies_between_steps, ["need"], EXCHANGING),
            ],
            2,
        ),
        *first_few([(jobs.dies_at_first, [step], []) for step in (2, 0, 1, 5)]),
        (jobs.dies_before_construction, [], ["lost a peer while the ranks compared what"]),
    ],
)
def test_a_rank_dies(run: Run, job: Any, arguments: list[Any], facts: list[str]) -> None:
    survivor, dead = run(job, *arguments)
    assert dead.code == KILLED
    ends_by_itself(survivor, "PeerError")
    assert_tells(last_line(survivor), *facts)


def test_all_survivors_of_three_say_so(run: Run) -> None:
    first, dead, last = run(jobs.dies_after_step, ranks=3)
    assert dead.code == KILLED
    for rank, survivor in ((0, first), (2, last)):
        ends_by_itself(survivor, "PeerError")
        assert f"rank {rank} lost a peer while gradients were exchanged: " in last_line(survivor)
        assert last_line(survivor).endswith(RESUME)


def test_what_is_read_after_an_error_raises_it_again(run: Run) -> None:
    survivor, _ = run(jobs.dies_after_step_and_the_error_is_caught)
    said = told(survivor)
    assert said["first"][0] == "PeerError"
    assert said["reads"] == [said["first"]] * 9
    # The script went on to its end, so this is all that tells of the loss.
    assert survivor.code == 1
    assert_tells(last_line(survivor), "syncline: rank 0 ended", "lost", said["first"][1])


def test_a_rank_falls_silent(run: Run) -> None:
    survivor, _ = run(jobs.falls_silent)
    kind, text = told(survivor)["error"]
    assert kind == "PeerError"
    assert f"no answer within {jobs.SHORT_TIMEOUT_S:g} s (" in text


@pytest.mark.parametrize("wait", ["need", "update"])
def test_a_rank_skips_a_step(run: Run, wait: str) -> None:
    for number, rank in enumerate(run(jobs.skips_a_step, wait)):
        ends_by_itself(rank, "MismatchError")
        assert f"rank {number}: the ranks are desynchronized" in last_line(rank)


def test_a_rank_skips_an_iteration(run: Run) -> None:
    longer, shorter = run(jobs.skips_an_iteration)
    assert (shorter.code, shorter.err) == (0, "")
    ends_by_itself(longer, "PeerError")


@pytest.mark.parametrize(
    ("job", "arguments", "code"),
    first_few(
        [
            (jobs.ends, ["group destroyed, model dropped"], 0),
            (jobs.ends, ["exit code"], 3),
            (jobs.ends, ["quietly"], 0),
            (jobs.ends, ["group destroyed"], 0),
            (jobs.ends, ["model dropped"], 0),
            (jobs.ends, ["exception"], 1),
            (jobs.in_a_child, ["ends", "quietly"], 0),
        ],
        2,
    ),
)
def test_a_process_ends_with_its_update_pending(
    run: Run, undisturbed_values: Values, job: Any, arguments: list[str], code: int
) -> None:
    ending, reading = run(job, *arguments)
    assert (ending.code, reading.code) == (code, 0)
    assert "ValueError: the user's own" in ending.err if code == 1 else ending.err == ""
    assert told(reading)["values"] == undisturbed_values(jobs.WARM + 1)


def test_nothing_that_has_landed_is_kept(run: Run) -> None:
    # A process would wait for it at its end.
    for rank in run(jobs.gets_all_back):
        assert (rank.code, rank.err) == (0, "")


LOST = ["syncline: rank 0 ended", "last update", "lost"]


@pytest.mark.parametrize(
    ("job", "arguments", "lines"),
    first_few(
        [
            (jobs.ends_alone, ["dead"], [LOST]),
            (jobs.ends_alone, ["silent"], [["syncline: rank 0 waits", "last update"], LOST]),
            (jobs.in_a_child, ["ends_alone", "dead"], [LOST]),
        ]
    ),
)
def test_an_update_that_is_lost_at_the_end_is_told(
    run: Run, job: Any, arguments: list[str], lines: list[list[str]]
) -> None:
    alone, _ = run(job, *arguments)
    assert alone.code == 1
    for line, facts in zip(alone.err.splitlines(), lines, strict=True):
        assert_tells(line, *facts)


@pytest.mark.slow
def test_after_an_exception_it_does_not_wait_for_long(run: Run) -> None:
    alone, _ = run(jobs.ends_alone, "silent, after an exception")
    assert alone.code == 1
    *_, exception, lost = alone.err.splitlines()
    assert exception.endswith("ValueError: the user's own")
    assert_tells(lost, "syncline: rank 0", "last update is lost", "1 s", "checkpoint")


@pytest.mark.slow
def test_exit_handlers_of_the_user_run_first(run: Run) -> None:
    alone, _ = run(jobs.says_at_exit)
    assert alone.code == 1
    assert told(alone) == {"handler": "ran"}


def test_a_forward_pass_that_fails_can_be_tried_again(run: Run, undisturbed_values: Values) -> None:
    steps = 60  # more than a window of the steady state, which the ranks conclude together
    ranks = run(jobs.fails_in_forward, steps)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert [told(rank)["values"] for rank in ranks] == [undisturbed_values(steps)] * 2
    assert told(ranks[1])["pending"] > 0


@pytest.mark.slow
def test_a_forward_pass_fails_for_good(run: Run) -> None:
    other, failing = run(jobs.fails_in_forward_for_good)
    assert failing.code == 1
    assert last_line(failing).endswith("OnceError")
    ends_by_itself(other, "PeerError")


def test_a_backward_pass_fails(run: Run) -> None:
    other, failing = run(jobs.fails_in_backward)
    said = told(failing)
    assert said["saved"] is None
    assert said["stepped"] == said["went_on"]
    assert said["stepped"][0] == "PeerError"
    assert "the last backward pass did not reach the gradient of '0.bias'" in said["stepped"][1]
    ends_by_itself(other, "PeerError")


def test_an_update_fails(run: Run) -> None:
    for number, rank in enumerate(run(jobs.fails_in_an_update)):
        said = told(rank)
        assert said["raised"] == "no update"
        kind, text = said["reads"][0]
        assert kind == "SynclineError"
        assert_tells(text, f"rank {number}: the update of ", "OnceError: no update", "checkpoint")
        assert said["reads"] == [[kind, text]] * 3
        assert rank.code == 1
        assert last_line(rank).endswith(f"which is lost: {text}")


def test_ctrl_c_at_a_gate(run: Run, undisturbed_values: Values) -> None:
    steps = jobs.WARM + 3
    ranks = run(jobs.is_interrupted, steps)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert told(ranks[0])["interrupted"] == 3
    assert [told(rank)["values"] for rank in ranks] == [undisturbed_values(steps)] * 2


@pytest.mark.parametrize("reads", first_few([True, False]))
def test_workers_of_a_data_loader(run: Run, undisturbed_values: Values, reads: bool) -> None:
    for rank in run(jobs.forks, reads):
        said = told(rank)
        assert (rank.code, rank.err) == (0, "")
        assert said["values"] == undisturbed_values(jobs.WARM + 3)
        if reads:
            assert said["error"][0] == "UserError"
            assert "this process was forked while gradients were exchanged" in said["error"][1]
        else:
            assert said["error"] is None
            assert said["got"] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("keeps", first_few(["", "model", "optimizer", "model and optimizer"]))
@pytest.mark.parametrize("when", ["after step", "after backward"])
def test_a_model_is_dropped(run: Run, settled: dict[str, Any], keeps: str, when: str) -> None:
    for rank in run(jobs.is_dropped, keeps, when):
        said = told(rank)
        assert (rank.code, rank.err) == (0, "")
        if "model" in keeps:
            assert said["gradients"] == settled["gradients"]
            assert said["values"] == settled["values" if when == "after step" else "before"]
        if "optimizer" in keeps and when == "after step":
            assert said["state"] == settled["state"]


@pytest.mark.slow
def test_a_model_is_copied(run: Run, undisturbed_values: Values) -> None:
    for rank in run(jobs.is_copied):
        assert (rank.code, rank.err) == (0, "")
        assert told(rank)["values"] == undisturbed_values(jobs.WARM + 6)


@pytest.mark.slow
def test_killed_workers_resume_bit_for_bit() -> None:
    found = disturbed(90, kills=3, seed=1, shard=False, most_steps=20)
    assert len(found["kills"]) == 3
    for kill in found["kills"]:
        for line in kill["said"]:
            assert "PeerError: rank " in line
    assert found["ends"] == undisturbed(90, shard=False)


@pytest.mark.slow
def test_killed_workers_resume_with_another_number_of_ranks() -> None:
    found = disturbed(90, kills=3, seed=1, shard=True, most_steps=20)
    assert [kill["ranks"] for kill in found["kills"]] == [4, 2, 4]
    (whole,) = undisturbed(90, shard=True)
    assert largest_difference(found["ends"][0], whole) < LARGEST_DIFFERENCE
