"""What ``syncline tune`` lets run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.comm.collectives import PROGRAMS, Collective
from syncline.comm.groups.choices import choose, require_algorithm
from syncline.comm.groups.compiled import compiled
from syncline.comm.groups.site import Hosts, Site
from syncline.lab.bench.switch_points import BLOCKS_BYTES, built_in_candidate, candidates

LAYOUTS: tuple[Hosts, ...] = (
    ((0, 1),),
    ((0, 1, 2),),
    ((0,), (1,), (2,)),
    ((0, 1), (2, 3)),
    ((0, 2, 3), (1,)),
)


@pytest.mark.parametrize("collective", PROGRAMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_candidate_can_run_and_each_way_takes_part_once(
    collective: Collective, layout: Hosts
) -> None:
    site = Site(route="auto", layout=layout, machines=("a",), names=("a",))
    every = candidates(collective, layout)
    assert len(set(every)) == len(every)
    for candidate in every:
        require_algorithm(collective, candidate.algorithm, candidate.block_bytes, site)
        assert compiled(collective, candidate.choice(100_000), 0, layout) is not None
    names = {candidate.algorithm for candidate in every}
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
