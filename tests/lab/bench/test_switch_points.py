"""What ``syncline tune`` lets run, and where to switch: only for more than noise."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.comm.collectives import PROGRAMS, Collective
from syncline.comm.groups.choices import Region, choose, require_algorithm
from syncline.comm.groups.compiled import compiled
from syncline.comm.groups.site import Hosts, Site
from syncline.errors import InternalError
from syncline.lab.bench.switch_points import (
    BLOCKS_BYTES,
    SWITCH,
    Measured,
    built_in_candidate,
    candidate,
    candidates,
    is_beaten,
    regions_of,
)

A, B, C = (candidate(name) for name in ("ring", "direct", "recursive-doubling"))
P = candidate("linear-pipeline", 65536)
SIZES = (256, 1024, 4096, 16384, 65536)
ROUNDS = (1.0, 1.02, 0.99, 1.01, 0.98)


def steady(seconds: float) -> list[float]:
    """Return rounds of a quiet machine."""
    return [seconds * share for share in ROUNDS]


def at(regions: Sequence[Region], size: int) -> Region:
    region = [r for r in regions if r.from_bytes <= size][-1]
    return candidate(region.algorithm, region.block_bytes)


def all_of(way: Region, sizes: Sequence[int] = SIZES) -> dict[int, Region]:
    return dict.fromkeys(sizes, way)


LAYOUTS = (((0, 1),), ((0, 1, 2),), ((0,), (1,), (2,)), ((0, 1), (2, 3)), ((0, 2, 3), (1,)))


@pytest.mark.parametrize("collective", PROGRAMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_candidates_can_run_and_are_all_ways(collective: Collective, layout: Hosts) -> None:
    site = Site(route="auto", layout=layout, machines=("a",), names=("a",))
    every = candidates(collective, layout)
    assert len(set(every)) == len(every)
    for each in every:
        require_algorithm(collective, each.algorithm, each.block_bytes, site)
        assert compiled(collective, each.choice(100_000), 0, layout) is not None
    names = {each.algorithm for each in every}
    assert names <= {*PROGRAMS[collective], "hierarchical"}
    entries = [PROGRAMS[collective][name] for name in names - {"hierarchical"}]
    # Two names of one algorithm are one; nothing else is left out.
    assert len(entries) == len({id(entry) for entry in PROGRAMS[collective].values()})
    mixed = collective == "all-reduce" and len(layout) > 1 and any(len(h) > 1 for h in layout)
    assert ("hierarchical" in names) == mixed


@given(st.sampled_from(list(PROGRAMS)), st.sampled_from(LAYOUTS), st.integers(1, 1 << 26))
def test_what_is_built_in_takes_part(collective: Collective, layout: Hosts, size: int) -> None:
    built_in = built_in_candidate(collective, layout, size)
    assert built_in.choice(size) == choose(collective, layout, size)
    assert built_in.choice(size) in {c.choice(size) for c in candidates(collective, layout)}


def test_pipelines_are_tried_with_several_blocks() -> None:
    found = [c.block_bytes for c in candidates("broadcast", ((0, 1),)) if "pipe" in c.algorithm]
    assert found == list(BLOCKS_BYTES)


def test_two_lines_that_cross_are_switched_where_they_do() -> None:
    # 10 us, and 1 us + 9 ns a byte: equal at 1,000 bytes.
    measured: Measured = {
        size: {A: steady(1e-6 + 9e-9 * size), B: steady(10e-6)} for size in (10, 100, 10_000)
    }
    first, second = regions_of(measured, all_of(A, (10, 100, 10_000)))
    assert first == Region(from_bytes=0, algorithm="ring")
    assert second.algorithm == "direct"
    # Lines between the sizes on logarithmic scales, which bend in truth.
    assert 500 < second.from_bytes < 3000


def test_what_is_equal_stays_as_it_is_built_in_also_where_that_switches() -> None:
    built_in = {256: A, 1024: A, 4096: B, 16384: B, 65536: P}
    measured: Measured = {size: {c: steady(1e-5) for c in (A, B, C, P)} for size in SIZES}
    regions = regions_of(measured, built_in)
    assert [at(regions, size) for size in SIZES] == list(built_in.values())
    assert regions[-1].block_bytes == P.block_bytes


def test_one_lucky_size_is_no_region_and_a_great_gain_is() -> None:
    def of(gain: float) -> list[str]:
        measured: Measured = {
            size: {A: steady(1e-5), B: steady(1e-5 / (gain if size == 4096 else 0.9))}
            for size in SIZES
        }
        return [region.algorithm for region in regions_of(measured, all_of(A))]

    assert of(1.08) == ["ring"]  # two switches cost more
    assert of(1.5) == ["ring", "direct", "ring"]


def test_noise_is_no_reason() -> None:
    mine, other = [1.0, 1.4, 1.0, 1.4, 1.0], [1.1, 1.0, 1.1, 1.0, 1.1]
    assert not is_beaten(mine, other)
    assert not is_beaten(other, mine)
    assert not is_beaten(steady(1.02), steady(1.0))
    assert is_beaten(steady(1.08), steady(1.0))
    assert not is_beaten(steady(1.0), steady(1.08))
    # Each was interrupted once, or was lucky once.
    assert is_beaten([1.05, 1.05, 1.05, 1.05, 0.5], [1.0, 1.0, 1.0, 1.0, 9.0])


def test_equals_on_a_busy_machine_are_hardly_ever_told_apart() -> None:
    chance = random.Random(1)
    switched = 0
    for _ in range(200):
        measured: Measured = {
            size: {c: [1e-5 * math.exp(chance.gauss(0, 0.1)) for _ in range(7)] for c in (A, B, C)}
            for size in SIZES
        }
        switched += regions_of(measured, all_of(A)) != (A,)
    assert switched < 30


def test_who_was_left_out_at_a_size_is_not_taken_there() -> None:
    measured: Measured = {
        256: {A: steady(1e-6)},
        1024: {A: steady(3e-6), B: steady(2e-6)},
        4096: {B: steady(2e-6)},
    }
    first, second = regions_of(measured, all_of(A, (256, 1024, 4096)))
    assert first == A
    assert (second.from_bytes, second.algorithm) == (512, "direct")  # halfway: no crossing


@pytest.mark.parametrize("measured", [{}, {256: {}}])
def test_nothing_measured(measured: Measured) -> None:
    with pytest.raises(InternalError, match="nothing was measured"):
        regions_of(measured, {256: A})


rounds = st.lists(st.floats(1e-7, 1e-1), min_size=5, max_size=5)
tables = st.dictionaries(
    st.integers(1, 1 << 30),
    st.fixed_dictionaries({A: rounds}, optional={B: rounds, P: rounds}),
    min_size=1,
    max_size=4,
)


@given(tables, st.data())
def test_regions_in_order_lose_least(measured: Measured, data: st.DataObject) -> None:
    sizes = sorted(measured)
    built_in = {size: data.draw(st.sampled_from(sorted(measured[size], key=str))) for size in sizes}
    regions = regions_of(measured, built_in)
    starts = [region.from_bytes for region in regions]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    pairs = list(itertools.pairwise(regions))
    assert all((a.algorithm, a.block_bytes) != (b.algorithm, b.block_bytes) for a, b in pairs)
    chosen = tuple(at(regions, size) for size in sizes)
    assert all(way in measured[size] for way, size in zip(chosen, sizes, strict=True))
    least = min(
        _lost(measured, built_in, ways)
        for ways in itertools.product(*(measured[size] for size in sizes))
    )
    assert _lost(measured, built_in, chosen) == pytest.approx(least)


def _lost(measured: Measured, built_in: dict[int, Region], chosen: tuple[Region, ...]) -> float:
    """Return what a way to assign candidates loses, counted anew."""
    lost, sizes = 0.0, sorted(measured)
    for size, way in zip(sizes, chosen, strict=True):
        medians = {each: median(times) for each, times in measured[size].items()}
        best = min(medians, key=lambda each: medians[each])
        if is_beaten(measured[size][way], measured[size][best]):
            lost += math.log(medians[way] / medians[best])
    for number in range(1, len(sizes)):
        before, after = chosen[number - 1], chosen[number]
        follows = before == built_in[sizes[number - 1]] and after == built_in[sizes[number]]
        lost += 0 if before == after or follows else math.log(1 + SWITCH)
    return lost
