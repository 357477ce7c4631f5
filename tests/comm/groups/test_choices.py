"""Measured choices as a document, and the choice that follows from a region."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.comm.groups.choices import (
    MOST_BLOCKS,
    Choice,
    Choices,
    Region,
    Regions,
    Timing,
    require_algorithm,
)
from syncline.comm.groups.site import Site
from syncline.errors import FileError, UserError
from tests.comm.groups.choice_examples import HERE, choices, some_regions


@given(some_regions)
def test_what_is_written_is_read_back(regions: Regions) -> None:
    timing = Timing(collective="reduce", size_bytes=4, algorithm="direct", rounds_s=(1e-6, 2e-6))
    written = choices(regions, timings=(timing,))
    assert Choices.from_json(written.to_json()) == written


@given(st.data())
def test_what_was_changed_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    """Put another value anywhere in the file."""
    text = choices().to_json()
    fields = json.loads(text)
    place, key = data.draw(st.sampled_from(list(_places(fields))))
    value = data.draw(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2)
        | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
    )
    place[key] = value
    try:
        read = Choices.from_json(json.dumps(fields))
    except FileError:
        return
    assert Choices.from_json(read.to_json()) == read


def _places(value: Any) -> Any:
    """Yield every container and key of a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(entries):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_are_refused(text: bytes | str) -> None:
    with pytest.raises(FileError):
        Choices.from_json(text)


@given(st.integers(0, 399))
def test_a_file_that_was_cut_off_is_refused(length: int) -> None:
    with pytest.raises(FileError):
        Choices.from_json(choices().to_json()[:length])


@pytest.mark.parametrize(
    ("regions", "said"),
    [
        ((), r"expected regions from 0 and larger sizes, found \[\]"),
        ((Region(from_bytes=1, algorithm="ring"),), "expected regions from 0"),
        ((Region(from_bytes=0, algorithm="ring"),) * 2, "expected regions from 0"),
        ((Region(from_bytes=0, algorithm="rings"),), "unknown algorithm 'rings'"),
        ((Region(from_bytes=0, algorithm="ring", block_bytes=4),), "it takes no blocks"),
        ((Region(from_bytes=0, algorithm="linear-pipeline"),), "needs blocks, at least 1"),
        (
            (Region(from_bytes=0, algorithm="linear-pipeline", block_bytes=0),),
            "needs blocks, at least 1; found 0",
        ),
        ((Region(from_bytes=0, algorithm="hierarchical"),), "for several hosts with several ranks"),
    ],
)
def test_regions_that_cannot_be(regions: tuple[Region, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        choices({"all-reduce": regions})


def test_hierarchical_is_for_hosts_with_several_ranks() -> None:
    both = Site(route="auto", layout=((0, 1), (2, 3)), machines=("a", "b"), names=("a", "b"))
    require_algorithm("all-reduce", "hierarchical", None, both)
    with pytest.raises(UserError, match="unknown algorithm 'hierarchical'"):
        require_algorithm("broadcast", "hierarchical", None, both)
    with pytest.raises(UserError, match="it takes no blocks"):
        require_algorithm("all-reduce", "hierarchical", 4, both)


@pytest.mark.parametrize("rounds_s", [(), (1e-6, 0.0), (-1.0,)])
def test_times_that_cannot_be(rounds_s: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="rounds of more than 0 s"):
        Timing(collective="reduce", size_bytes=4, algorithm="direct", rounds_s=rounds_s)


def test_sizes_and_times_have_limits() -> None:
    with pytest.raises(UserError, match="at most 4611686018427387904 bytes"):
        Timing(collective="reduce", size_bytes=1 << 63, algorithm="direct", rounds_s=(1.0,))
    with pytest.raises(UserError, match="longer than the 70369 s"):
        Timing(collective="reduce", size_bytes=4, algorithm="direct", rounds_s=(1e300,))


@pytest.mark.parametrize(
    ("size_bytes", "blocks"), [(0, 1), (1, 1), (64, 1), (65, 2), (1 << 40, MOST_BLOCKS)]
)
def test_a_pipeline_is_cut_into_blocks_of_the_size_that_was_measured(
    size_bytes: int, blocks: int
) -> None:
    region = Region(from_bytes=0, algorithm="linear-pipeline", block_bytes=64)
    assert region.choice(size_bytes) == Choice("linear-pipeline", blocks)
    assert Region(from_bytes=0, algorithm="ring").choice(size_bytes) == Choice("ring")


def test_what_a_site_says_of_itself() -> None:
    assert str(HERE) == "2 ranks on here"
    assert str(Site(route="ucx", layout=((0,),), machines=("a",), names=("x",))) == (
        "1 rank on x by UCX"
    )
    both = Site(route="auto", layout=((0,), (1,)), machines=("a", "b"), names=("x", "y"))
    assert str(both) == "2 ranks on 2 hosts"
