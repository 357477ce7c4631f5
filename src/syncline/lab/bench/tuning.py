"""Measures which algorithm is fastest at which size, with all algorithms interleaved."""

from __future__ import annotations

import datetime as dt
import time
from typing import NamedTuple

from syncline.comm.collectives import Collective
from syncline.comm.groups import Choice, Choices
from syncline.comm.groups.choices import Region, Timing
from syncline.comm.groups.site import Site
from syncline.errors import PeerError, UserError
from syncline.lab.bench.collectives import TRIALS, Reported, race
from syncline.lab.bench.launch import Team, meeting, torch_team
from syncline.lab.bench.messages import LapTimes, Order, Refused
from syncline.lab.bench.request import TuneRequest, name_of_place
from syncline.lab.bench.result import OURS, whole_size
from syncline.lab.bench.switch_points import built_in_candidate, candidates, regions_of
from syncline.lab.workers import Progress
from syncline.plan.files import release
from syncline.train.measure.machine import machine_name

HOPELESS = 4.0  # an algorithm this many times slower than the fastest in all trials is dropped


class Tuned(NamedTuple):
    """The measured choices, and the parts that the deadline left no time for."""

    choices: tuple[Choices, ...]
    unfinished: tuple[str, ...]  # such as ``"broadcast with 4 workers"``


class OutOfTime(Exception):
    """The deadline has come."""


def tune(request: TuneRequest, *, progress: Progress = lambda _what, _done, _total: None) -> Tuned:
    """Measure all algorithms and choose among them; report progress before every part.

    Raises:
        UserError: the machine cannot emulate the cluster, or there was no time for anything.
        PeerError: a worker failed.
    """
    deadline_s = time.monotonic() + request.deadline_s
    parts = len(request.workers) * len(request.collectives) * len(request.sizes_bytes)
    reported = Reported(progress, parts * (len(TRIALS) + request.rounds))
    found: list[Choices] = []
    unfinished: list[str] = []
    for workers in request.workers:
        reported.say(f"starting {workers} workers")
        # The cache of choices is not read: it may be damaged.
        with (
            meeting(request.place, workers, choices="built-in", timeout_s=request.timeout_s) as at,
            torch_team(at) as team,
        ):
            site = team.ready.site
            assert site is not None  # only an MPI has none
            timings: list[Timing] = []
            regions: dict[Collective, tuple[Region, ...]] = {}
            for collective in request.collectives:
                reported.what = f"{collective}, {workers} workers"
                try:
                    mine = _measured(request, collective, team, site, reported, deadline_s)
                except OutOfTime:
                    unfinished.append(f"{collective} with {workers} workers")
                    continue
                timings += [timing for at_size in mine.values() for timing in at_size.values()]
                regions[collective] = _chosen(collective, site, mine)
        if regions:
            found.append(
                Choices(
                    release=release(),
                    measured=dt.datetime.now(dt.UTC).replace(microsecond=0),
                    place=name_of_place(request.place),
                    machine=machine_name(),
                    site=site,
                    regions=regions,
                    timings=tuple(timings),
                )
            )
    if not found:
        raise UserError(
            f"there was no time to measure anything within {request.deadline_s:g} s; allow more "
            "with --deadline, or measure fewer sizes or collectives"
        )
    return Tuned(tuple(found), tuple(unfinished))


Measured = dict[int, dict[Choice, Timing]]  # by size in bytes and algorithm


def _measured(
    request: TuneRequest,
    collective: Collective,
    team: Team,
    site: Site,
    reported: Reported,
    deadline_s: float,
) -> Measured:
    """Measure all sizes of one collective until the deadline (:class:`OutOfTime`)."""
    measured: Measured = {}
    for size_bytes in sorted(request.sizes_bytes):
        whole = whole_size(collective, site.ranks, size_bytes)
        if whole in measured:
            reported.done += len(TRIALS) + request.rounds
            continue  # small sizes are rounded up to the same

        def lap(choice: Choice, iterations: int, size: int = whole) -> LapTimes:
            if time.monotonic() > deadline_s:
                raise OutOfTime
            order = Order(
                contestant=OURS,
                collective=collective,
                choice=choice,
                size_bytes=size,
                iterations=iterations,
            )
            answer = team.run(order)
            if isinstance(answer, Refused):
                raise PeerError(
                    f"{collective} by {choice.algorithm}, {size} bytes: {answer.reason}"
                )
            return answer

        choices = dict.fromkeys(c.choice(whole) for c in candidates(collective, site.layout))
        found = race(
            list(choices),
            lap,
            rounds=request.rounds,
            lap_s=request.lap_s,
            step=reported.step,
            hopeless=HOPELESS,
        )
        measured[whole] = {
            choice: Timing(
                collective=collective,
                size_bytes=whole,
                algorithm=choice.algorithm,
                blocks=choice.blocks,
                rounds_s=tuple(lap.wall_s for lap in laps),
            )
            for choice, (_, laps) in found.items()
        }
    return measured


def _chosen(collective: Collective, site: Site, measured: Measured) -> tuple[Region, ...]:
    every = candidates(collective, site.layout)
    rounds = {
        size_bytes: {
            candidate: timings[choice].rounds_s
            for candidate in every
            if (choice := candidate.choice(size_bytes)) in timings
        }
        for size_bytes, timings in measured.items()
    }
    built_in = {size: built_in_candidate(collective, site.layout, size) for size in measured}
    return regions_of(rounds, built_in)
