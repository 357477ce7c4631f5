"""What measured choices gain, for the terminal and the page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from syncline.bench.words import binary_size
from syncline.collectives import Collective
from syncline.groups import Choice, Choices
from syncline.groups.choices import Region, Timing, choose
from syncline.report import units

__all__ = ["Row", "algorithm_name", "rows_of", "title_of"]


class Row(NamedTuple):
    """One region of one collective, in words."""

    collective: Collective
    start: str
    algorithm: str
    gain: str


def title_of(choices: Choices) -> str:
    """Return what was measured where, in a line."""
    rounds = len(choices.timings[0].rounds_s) if choices.timings else 0
    return (
        f"{choices.site} · {choices.place} · medians of {units.counted(rounds, 'round')}, in "
        f"turns · {choices.date} · release {choices.release}"
    )


def algorithm_name(region: Region) -> str:
    """Return an algorithm with its blocks."""
    if region.block_bytes is None:
        return region.algorithm
    return f"{region.algorithm}, blocks of {binary_size(region.block_bytes)}"


def rows_of(choices: Choices) -> Iterator[Row]:
    """Yield the regions with what each gains over the built-in choice."""
    for collective, regions in choices.regions.items():
        stops = [region.from_bytes for region in regions[1:]]
        for region, stop in itertools.zip_longest(regions, stops):
            mine = {
                timing.size_bytes: timing
                for timing in choices.timings
                if timing.collective == collective
                and region.from_bytes <= timing.size_bytes < (stop or timing.size_bytes + 1)
                and Choice(timing.algorithm, timing.blocks) == region.choice(timing.size_bytes)
            }
            yield Row(
                collective,
                binary_size(region.from_bytes),
                algorithm_name(region),
                _gain(choices, collective, mine),
            )


def _gain(choices: Choices, collective: Collective, mine: dict[int, Timing]) -> str:
    """Return the most that a region gains at a size that was measured in it."""
    most, at = 0.0, 0
    hopeless = None
    for size_bytes, timing in mine.items():
        built_in = choose(collective, choices.site.layout, size_bytes)
        if Choice(timing.algorithm, timing.blocks) == built_in:
            continue
        other = next(
            (
                each
                for each in choices.timings
                if (each.collective, each.size_bytes) == (collective, size_bytes)
                and Choice(each.algorithm, each.blocks) == built_in
            ),
            None,
        )
        if other is None:
            hopeless = size_bytes
            continue
        pairs = zip(other.rounds_s, timing.rounds_s, strict=True)
        ratio = median(theirs / ours for theirs, ours in pairs)
        if ratio > most:
            most, at = ratio, size_bytes
    if hopeless is not None:
        return f"built-in left out at {binary_size(hopeless)}: far slower"
    return f"{most:.2f}x at {binary_size(at)}" if at else "as built in"
