"""Sizes and bandwidths, as nccl-tests derives them."""

from __future__ import annotations

import pytest

from syncline.comm.collectives import PROGRAMS, Collective
from syncline.errors import UserError
from syncline.lab.bench.request import parse_sizes
from syncline.lab.bench.result import bus_factor, whole_size
from syncline.lab.bench.worker import sizes_of


@pytest.mark.parametrize(
    ("collective", "workers", "factor"),
    [
        ("all-reduce", 2, 1.0),
        ("all-reduce", 4, 1.5),
        ("reduce-scatter", 4, 0.75),
        ("all-gather", 2, 0.5),
        ("broadcast", 4, 1.0),
        ("reduce", 3, 1.0),
    ],
)
def test_bus_bandwidth_over_algorithm_bandwidth(
    collective: Collective, workers: int, factor: float
) -> None:
    assert bus_factor(collective, workers) == factor


@pytest.mark.parametrize("collective", PROGRAMS)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("size_bytes", [1, 4, 4096, 1_000_001])
def test_sizes_are_whole_elements_and_equal_shards(
    collective: Collective, workers: int, size_bytes: int
) -> None:
    whole = whole_size(collective, workers, size_bytes)
    assert size_bytes <= whole < size_bytes + 4 * workers
    given, result = sizes_of(collective, workers, whole)
    assert 4 * max(given, result) == whole
    shards = {"reduce-scatter": (workers, 1), "all-gather": (1, workers)}
    per_given, per_result = shards.get(collective, (1, 1))
    assert given * per_result == result * per_given


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", (4,)),
        ("4,64KiB,1MiB", (4, 65536, 1 << 20)),
        ("4..256", (4, 16, 64, 256)),
        ("1KiB..20 KiB, 1GiB", (1024, 4096, 16384, 20480, 1 << 30)),
    ],
)
def test_sizes_as_people_write_them(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4MB", "cannot read '4MB'"),
        ("", "cannot read ''"),
        ("8..4", "does not go from low to high"),
        ("0", "does not go from low to high"),
        ("4,4", "is named twice"),
    ],
)
def test_sizes_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_sizes(text)
