"""Contestants and algorithms in turns: by a clock of the test's own, and real workers in small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from syncline.comm.collectives import PROGRAMS, Collective
from syncline.comm.groups import Choice, Choices
from syncline.comm.groups.choices import Region, Timing, choices_path
from syncline.errors import UserError
from syncline.lab.bench import collectives
from syncline.lab.bench.collectives import measure_collectives, race
from syncline.lab.bench.launch import Team, meeting, torch_team
from syncline.lab.bench.messages import LapTimes
from syncline.lab.bench.request import BenchmarkRequest, TuneRequest
from syncline.lab.bench.result import COPY, GLOO, OURS, STREAM, TORCH, UCX
from syncline.lab.bench.tuning import HOPELESS, tune
from syncline.lab.bench.tuning_report import print_choices, rows_of, save_choices_page
from syncline.lab.testbed import Cluster
from tests.cases import first_few
from tests.comm.groups.choice_examples import choices
from tests.lab.testbed.machine import require_namespaces
from tests.timeouts import DEADLINE_S

ABSENT = Path("nowhere") / "python"


def request(*contestants: str, **changes: Any) -> BenchmarkRequest:
    """Return a small request of two workers that share memory, or another one."""
    given = {"collective": "all-reduce", "sizes_bytes": (4,), "workers": (2,), "place": "shared"}
    return BenchmarkRequest(**given | {"contestants": contestants, "lap_s": 1e-3} | changes)


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    """Two workers that share memory: to start them takes longer than to measure."""
    place = meeting("shared", 2, choices="measured", timeout_s=DEADLINE_S)
    with place as at, torch_team(at) as started:
        yield started


@pytest.mark.parametrize("collective", first_few(PROGRAMS, 0))
def test_every_contestant_has_a_turn_in_every_round(
    collective: Collective, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "torch_team", lambda _: nullcontext(team))
    told: list[tuple[int, int]] = []
    names = (OURS, TORCH, GLOO, STREAM, f"{OURS}:direct", COPY, "mpich")
    benchmark = measure_collectives(
        request(*names, collective=collective, sizes_bytes=(40, 40_000), pythons={"mpich": ABSENT}),
        progress=lambda _, done, total: told.append((done, total)),
    )
    assert [entry.contestant for entry in benchmark.entries] == [*names[:-1]] * 2
    assert all(len(entry.rounds_s) == 5 for entry in benchmark.entries)
    assert [(a.contestant, a.workers) for a in benchmark.absent] == [("mpich", 2)]
    assert "tools/bench-mpi" in benchmark.absent[0].reason
    assert told[-1] == (13, 14)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tcp", Cluster.of(hosts=2, rate="1gbit")])
def test_over_tcp_and_on_emulated_hosts(place: Any) -> None:
    names = (OURS, TORCH, f"{OURS}:linear-pipeline", GLOO, UCX, STREAM)
    if place != "tcp":
        require_namespaces()
    benchmark = measure_collectives(request(*names, place=place))
    if place != "tcp":
        assert benchmark.rate_bytes_per_s == 1e9 / 8
        assert benchmark.place == "2 hosts, 1 worker each, links 1 Gbit/s"
    assert [entry.contestant for entry in benchmark.entries] == [*names]
    assert benchmark.absent == ()


def test_when_nobody_can_take_part_the_reasons_are_said() -> None:
    with pytest.raises(UserError, match=r"could be measured: open-mpi: no nowhere/python"):
        measure_collectives(request("open-mpi", pythons={"open-mpi": ABSENT}))


def tune_request(**arguments: Any) -> TuneRequest:
    given = {"collectives": ("all-reduce",), "sizes_bytes": (256, 65536), "workers": (2,)}
    return TuneRequest(**given | {"place": "shared", "lap_s": 1e-3} | arguments)


def test_each_round_begins_with_another_and_the_hopeless_are_left_out() -> None:
    names = [Choice(name) for name in "abcd"]
    seconds = dict(zip(names, (1e-3, 2e-3, 3.9e-3, 4.1e-3), strict=True))
    calls: list[tuple[str, int]] = []
    steps: list[int] = []

    def measured(choice: Choice, iterations: int) -> LapTimes:
        calls.append((choice.algorithm, iterations))
        return LapTimes(wall_s=seconds[choice], cpu_s=0.0)

    def step() -> None:
        steps.append(len(calls))

    found = race(names, measured, rounds=3, lap_s=0.1, step=step, hopeless=HOPELESS)
    times = {choice: [lap.wall_s for lap in laps] for choice, (_, laps) in found.items()}
    assert times == {choice: [seconds[choice]] * 3 for choice in names[:3]}
    trials, rounds = calls[:8], calls[8:]
    # First one each, then as many as fill the turn, but few.
    assert trials == [*((name, 1) for name in "abcd"), *((name, 10) for name in "abcd")]
    assert [name for name, _ in rounds] == list("abcbcacab")
    assert dict(rounds) == {"a": 100, "b": 50, "c": 26}
    assert steps == [0, 4, 8, 11, 14]


def test_one_interruption_in_the_trials_leaves_nobody_out() -> None:
    names = [Choice("a"), Choice("b")]
    calls: list[Choice] = []

    def measured(choice: Choice, _: int) -> LapTimes:
        calls.append(choice)
        return LapTimes(wall_s=1.0 if len(calls) == 2 else 1e-3, cpu_s=0.0)

    found = race(names, measured, rounds=5, lap_s=0.01, step=lambda: None, hopeless=HOPELESS)
    assert set(found) == set(names)


def test_who_cannot_go_on_is_left_out_and_the_others_are_measured() -> None:
    calls: list[str] = []

    def measured(name: str, iterations: int) -> LapTimes | None:
        calls.append(name)
        gives_up = {"never": 1, "later": 4}.get(name)
        return None if calls.count(name) == gives_up else LapTimes(wall_s=iterations, cpu_s=0.0)

    found = race(["never", "always", "later"], measured, rounds=3, lap_s=1.0, step=lambda: None)
    assert {name: len(laps) for name, (_, laps) in found.items()} == {"always": 3}
    assert (calls.count("never"), calls.count("later")) == (1, 4)


def test_every_collective_is_measured_and_groups_find_what_was(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    tuned = tune(
        tune_request(collectives=tuple(PROGRAMS), sizes_bytes=(4, 8, 65536)),
        progress=lambda _, done, total: told.append((done, total)),
    )
    assert tuned.unfinished == ()
    [found] = tuned.choices
    assert list(found.regions) == list(PROGRAMS)
    assert {timing.collective for timing in found.timings} == set(PROGRAMS)
    assert all(len(timing.rounds_s) == 7 for timing in found.timings)
    assert {t.size_bytes for t in found.timings if t.collective == "all-gather"} == {8, 65536}
    assert found.site.layout == ((0, 1),)
    assert Choices.from_json(found.to_json()) == found
    assert told[-1] == (5 * 3 * 9 - 1, 5 * 3 * 9)
    save_choices_page([found], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count("<svg viewBox") == len(PROGRAMS)
    # A group of this process with as many ranks is at the same site.
    assert choices_path(found.site).name.startswith("auto-2-")


@pytest.mark.slow
def test_over_tcp_and_on_emulated_hosts_the_site_is_another() -> None:
    require_namespaces()
    small = {"sizes_bytes": (256,), "collectives": ("broadcast",)}
    [tcp] = tune(tune_request(place="tcp", **small)).choices
    assert (tcp.site.route, tcp.site.layout) == ("tcp", ((0,), (1,)))
    cluster = Cluster.of(hosts=2, rate="1gbit", workers_per_host=2)
    [emulated] = tune(
        tune_request(place=cluster, workers=(4,), sizes_bytes=(4096,), collectives=("all-reduce",))
    ).choices
    assert emulated.site.layout == ((0, 1), (2, 3))
    assert emulated.site.names == ("host0", "host1")
    assert len(set(emulated.site.machines)) == 2
    assert emulated.place == str(cluster)


@pytest.mark.slow
def test_a_damaged_cache_can_be_measured_again(team: Team) -> None:
    path = choices_path(team.ready.site)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    [again] = tune(tune_request(sizes_bytes=(256,))).choices
    assert again.site == team.ready.site


@pytest.mark.slow
def test_no_time_for_anything() -> None:
    with pytest.raises(UserError, match=r"no time to measure anything within 0\.0001 s; allow"):
        tune(tune_request(deadline_s=1e-4))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"collectives": ("all-reduse",)}, "did you mean 'all-reduce'"),
        ({"collectives": ("reduce", "reduce")}, "'reduce' would be measured twice"),
        ({"collectives": ()}, "nothing to measure"),
        ({"sizes_bytes": ()}, "nothing to measure"),
        ({"sizes_bytes": (4, 4)}, "a size would be measured twice"),
        ({"workers": (2, 2)}, "a worker count would be measured twice"),
        ({"workers": (1,)}, "a collective needs 2 to"),
        ({"rounds": 4}, "rounds must be at least 5"),
        ({"deadline_s": 0.0}, "deadline_s must be finite and above 0"),
        ({"lap_s": float("nan")}, "lap_s must be finite and above 0"),
        ({"place": Cluster.of(hosts=3)}, "the emulated cluster has 3 workers"),
    ],
)
def test_requests_that_cannot_be(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tune_request(**arguments)


def _timing(algorithm: str, size_bytes: int, seconds: float) -> Timing:
    return Timing(
        collective="all-reduce",
        size_bytes=size_bytes,
        algorithm=algorithm,
        blocks=2 if algorithm == "linear-pipeline" else None,
        rounds_s=tuple(seconds * share for share in (1.0, 0.9, 1.1)),
    )


EXAMPLE = choices(
    {
        "all-reduce": (
            Region(from_bytes=0, algorithm="ring"),
            Region(from_bytes=4096, algorithm="recursive-doubling"),
            Region(from_bytes=1 << 20, algorithm="linear-pipeline", block_bytes=1 << 20),
        )
    },
    timings=(
        _timing("ring", 256, 1e-6),
        _timing("recursive-doubling", 256, 3e-6),  # which is built in
        _timing("recursive-doubling", 4096, 2e-6),
        _timing("linear-pipeline", 2 << 20, 1e-3),  # and direct was left out
    ),
)


def test_the_table_says_what_is_taken_and_gained(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row[1:] for row in rows_of(EXAMPLE)] == [
        ("0 B", "ring", "3.00x at 256 B"),
        ("4 KiB", "recursive-doubling", "as built in"),
        ("1 MiB", "linear-pipeline, blocks of 1 MiB", "built-in left out at 2 MiB: far slower"),
    ]
    print_choices(Console(highlight=False), EXAMPLE)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 ranks on here · one host, shared memory · medians of 3 rounds")
    assert lines[3].index("ring") == lines[4].index("recursive")  # aligned
    assert max(map(len, lines)) < 160


def test_the_page_marks_the_switches(tmp_path: Path) -> None:
    save_choices_page([EXAMPLE], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "from 1 MiB: linear-pipeline, blocks of 1 MiB" in page
    assert page.count('class="mark"') == 2
    assert "recursive-doubling, 256 B: 3.00 µs" in page
