"""Groups of real processes: every rank gets the right result, bit for bit the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.soak import run
from benchmarks.soak_worker import Soak
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.comm.collectives.table import PROGRAMS
from tests.cases import first_few
from tests.comm.groups import jobs
from tests.workers import WorkerPool


@pytest.mark.parametrize("ranks", first_few([3, 1, 2, 4]))
def test_all_algorithms_sizes_and_dtypes(workers: WorkerPool, tmp_path: Path, ranks: int) -> None:
    workers.run(jobs.every_collective, ranks, str(tmp_path))


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
    workers.run(jobs.sequence, ranks, str(folder), plan, flight)


def test_overlapping_groups_over_one_store(workers: WorkerPool, tmp_path: Path) -> None:
    # Ranks put in 1, 2 and 3.
    found = workers.run(jobs.sub_groups, 3, str(tmp_path))
    assert found == [[6.0, 4.0], [6.0, 5.0], [6.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        *((jobs.bits, ranks) for ranks in (2, 3, 4)),
        *((jobs.exchanges, ranks) for ranks in (2, 3)),
        (jobs.tangled, 3),
        (jobs.leaving_after_the_last, 3),
    ],
)
def test_bits_messages_and_leaving(
    workers: WorkerPool, tmp_path: Path, job: Callable[[str], None], ranks: int
) -> None:
    workers.run(job, ranks, str(tmp_path))


def test_mixed_collectives_in_several_groups_are_right() -> None:
    """For a few seconds: ``benchmarks.soak`` goes on for minutes."""
    routes = "auto", "tcp", "mixed"
    found = run(Soak(ranks=3, seconds=2.0, seed=1, routes=routes))
    assert {name.split()[0] for name in found["collectives"]} == set(routes)
    assert {f"{route} messages" for route in routes} <= set(found["collectives"])
    assert all(warm == end for warm, end in found["descriptors"])
