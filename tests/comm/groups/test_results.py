"""Groups of real processes: every rank gets the right result, bit for bit the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.comm.collectives.table import PROGRAMS
from tests.cases import first_few
from tests.comm.groups import jobs
from tests.workers import WorkerPool


@pytest.mark.parametrize("ranks", first_few([3, 1, 2, 4]))
def test_every_algorithm_size_dtype_and_reduction(
    workers: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    for wrong in workers.run(jobs.every_collective, ranks, str(tmp_path)):
        assert wrong == []


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_have_the_same_bits(workers: WorkerPool, tmp_path: Path, ranks: int) -> None:
    first, *others = workers.run(jobs.bits, ranks, str(tmp_path))
    assert first
    assert all(other == first for other in others)


calls = st.fixed_dictionaries(
    {
        "collective": st.sampled_from(list(PROGRAMS)),
        "count": st.one_of(st.integers(0, 40), st.integers(0, 60_000)),
        "dtype": st.sampled_from(["float32", "int64", "bfloat16", "uint8"]),
        "reduction": st.sampled_from(["sum", "max", "product"]),
        "root": st.integers(0, 3),
        "in_place": st.booleans(),
        "blocking": st.booleans(),
    }
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.lists(calls, min_size=1, max_size=25), ranks=st.integers(2, 4), flight=st.integers(1, 6)
)
def test_any_sequence_with_several_in_flight(
    workers: WorkerPool,
    tmp_path_factory: pytest.TempPathFactory,
    plan: list[dict[str, Any]],
    ranks: int,
    flight: int,
) -> None:
    folder = tmp_path_factory.mktemp("sequence")
    for wrong in workers.run(jobs.sequence, ranks, str(folder), plan, flight):
        assert wrong == []


def test_overlapping_groups_over_one_store(workers: WorkerPool, tmp_path: Path) -> None:
    # Ranks put in 1, 2 and 3.
    found = workers.run(jobs.sub_groups, 3, str(tmp_path))
    assert found == [[6.0, 4.0], [6.0, 5.0], [6.0, 4.0, 5.0]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sends_and_receives_among_all_pairs(
    workers: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    for wrong in workers.run(jobs.exchanges, ranks, str(tmp_path)):
        assert wrong == []


def test_ranks_may_leave_as_soon_as_they_are_done(workers: WorkerPool, tmp_path: Path) -> None:
    for wrong in workers.run(jobs.leaving_after_the_last, 3, str(tmp_path)):
        assert wrong == []
