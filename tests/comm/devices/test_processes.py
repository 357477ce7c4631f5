"""Device groups of real processes, on a device of the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import first_few
from tests.comm.devices import jobs
from tests.mortal import Mortals
from tests.workers import WorkerPool


@pytest.mark.parametrize(
    ("job", "ranks", "given"),
    [
        (jobs.results, 3, ["host"]),
        *first_few([(jobs.results, ranks, ["host"]) for ranks in (1, 2, 4)], 0),
        (jobs.bits, 3, ["host"]),
        (jobs.leaves, 3, ["host"]),
        (jobs.mismatches, 3, []),
        (jobs.bad_input, 2, []),
        (jobs.bad_groups, 2, []),
    ],
)
def test_results_and_refusals(
    workers: WorkerPool, tmp_path: Path, job: Callable[..., None], ranks: int, given: list[str]
) -> None:
    workers.run(job, ranks, str(tmp_path), *given)


@pytest.mark.parametrize("copies", first_few([7, 0, 1, 60], 0))
def test_a_killed_rank_is_named_by_others(mortals: Mortals, tmp_path: Path, copies: int) -> None:
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
