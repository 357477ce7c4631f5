"""Device groups of real processes, on a device of the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import first_few
from tests.comm.devices import jobs
from tests.mortal import Mortals
from tests.words import assert_tells
from tests.workers import WorkerPool


@pytest.mark.parametrize("ranks", first_few([3, 1, 2, 4]))
def test_results_are_right(workers: WorkerPool, tmp_path: Path, ranks: int) -> None:
    for wrong in workers.run(jobs.results, ranks, str(tmp_path), "host"):
        assert wrong == []


def test_all_ranks_have_the_same_bits(workers: WorkerPool, tmp_path: Path) -> None:
    first, *others = workers.run(jobs.bits, 3, str(tmp_path), "host")
    assert len(set(first)) == len(first)
    assert all(other == first for other in others)


def test_ranks_that_call_different_things_say_so_and_go_on(
    workers: WorkerPool, tmp_path: Path
) -> None:
    found = workers.run(jobs.mismatches, 3, str(tmp_path))
    for rank, errors in enumerate(found):
        assert {kind for kind, _ in errors.values()} == {"MismatchError"}
        assert all(text.startswith(f"rank {rank} calls ") for _, text in errors.values())
    mine = ("rank 0", "all-reduce of 10 elements of float32 by 'sum'")
    others = ("rank 1", "all-reduce of 9 elements of float32 by 'sum'")
    assert_tells(found[0]["count"][1], *mine, *others)
    assert "; rank 1 calls all-reduce of 9 elements of float64" in found[2]["dtype"][1]
    assert "; rank 1 calls all-reduce of 9 elements of float32 by 'max'" in found[2]["reduction"][1]
    assert "; rank 1 calls broadcast of 9 elements of float32, root 1" in found[2]["root"][1]
    assert "; rank 1 calls reduce of 9 elements" in found[2]["collective"][1]
    assert "; rank 0 calls all-reduce of 10 elements" in found[1]["count"][1]


def test_bad_input_is_explained_and_the_group_goes_on(workers: WorkerPool, tmp_path: Path) -> None:
    for rank, found in enumerate(workers.run(jobs.bad_input, 2, str(tmp_path))):
        assert {kind for kind, _ in found.values()} == {"UserError"}
        text = {name: said for name, (_, said) in found.items()}
        expected = f"rank {rank}: expected a contiguous tensor on cpu, found one "
        assert text["device"] == f"{expected}on meta; move it there"
        assert text["strided"].startswith(f"{expected}of shape (2, 4) that is not")
        assert text["sparse"].startswith(f"{expected}of shape (4, 4) that is not")
        assert "elements of int32 cannot be reduced" in text["dtype"]
        assert "unknown reduction 'som'; did you mean 'sum'?" in text["reduction"]
        assert text["root"] == "expected a rank from 0 to 1, found 2"
        assert text["closed"].endswith("was closed, or a call on it has failed; make another")


def test_groups_that_cannot_be_made(workers: WorkerPool, tmp_path: Path) -> None:
    for rank, found in enumerate(workers.run(jobs.bad_groups, 2, str(tmp_path))):
        assert found["block"] == (
            "UserError",
            "block_bytes must be a multiple of 16 above 0, found 24",
        )
        assert found["window"] == ("UserError", "the window must be at least 1 block, found 0")
        kind, text = found["hosts"]
        assert kind == "UserError"
        assert "expected all ranks on one host" in text
        assert "found ((0,), (1,)) on 2" in text
        kind, text = found["blocks"]
        assert kind == "MismatchError"
        assert text.startswith(f"rank {rank} has a window of 4 blocks of {(32, 64)[rank]} bytes")
        assert found["windows"][0] == "MismatchError"


def test_a_rank_that_leaves_by_an_error_is_heard_of(workers: WorkerPool, tmp_path: Path) -> None:
    found = workers.run(jobs.an_error_of_its_own, 3, str(tmp_path))
    assert found[1] == ("PeerError", "an error of rank 1")
    for rank in (0, 2):
        assert found[rank][0] == "PeerError"
        assert "rank 1" in found[rank][1]


@pytest.mark.parametrize("copies", first_few([7, 0, 1, 60], 0))
def test_a_rank_that_is_killed_is_named_by_the_others(
    mortals: Mortals, tmp_path: Path, copies: int
) -> None:
    ended = mortals.run(jobs.dies, 3, copies, folder=tmp_path)
    assert ended[1].code == -9
    for rank in (0, 2):
        first, second, *rest = ended[rank].out.splitlines()
        assert ended[rank].code == 0, ended[rank].err
        assert first.startswith("PeerError ")
        assert second.startswith("UserError ")
        assert rest == []
    assert "rank 1" in ended[0].out
    assert "rank 1" in ended[2].out
