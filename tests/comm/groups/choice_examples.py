"""Measured choices, as if measured, and strategies for more of them."""

from __future__ import annotations

import datetime as dt

from hypothesis import strategies as st

from syncline.comm.collectives import PROGRAMS, Pipelined
from syncline.comm.groups.choices import Choices, Region, Regions, Timing
from syncline.comm.groups.site import Site
from syncline.plan.files import release

HERE = Site(route="auto", layout=((0, 1),), machines=("a",), names=("here",))
DATE = dt.datetime(2026, 11, 21, 20, 19, tzinfo=dt.UTC)


def choices(
    regions: Regions | None = None,
    *,
    site: Site = HERE,
    version: str | None = None,
    timings: tuple[Timing, ...] = (),
) -> Choices:
    """Return choices of this release, or of another."""
    some: Regions = {
        "all-reduce": (
            Region(from_bytes=0, algorithm="ring"),
            Region(from_bytes=1000, algorithm="linear-pipeline", block_bytes=64),
            Region(from_bytes=5000, algorithm="direct"),
        )
    }
    return Choices(
        release=version or release(),
        measured=DATE,
        place="one host, shared memory",
        machine="an imagined processor",
        site=site,
        regions=dict(some if regions is None else regions),
        timings=timings,
    )


@st.composite
def regions_of(draw: st.DrawFn, collective: str) -> tuple[Region, ...]:
    programs = PROGRAMS[collective]  # type: ignore[index]
    starts = sorted(draw(st.sets(st.integers(1, 1 << 40), max_size=5)))
    regions = []
    for start in (0, *starts):
        algorithm = draw(st.sampled_from(list(programs)))
        pipelined = isinstance(programs[algorithm], Pipelined)
        block = draw(st.integers(1, 1 << 30)) if pipelined else None
        regions.append(Region(from_bytes=start, algorithm=algorithm, block_bytes=block))
    return tuple(regions)


some_regions = st.fixed_dictionaries({}, optional={name: regions_of(name) for name in PROGRAMS})
