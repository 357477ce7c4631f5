"""Ranks that end, in every way: the others hear of it in time, and nothing is left behind."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.group_faults import ROUTES, Route, draw, run

from syncline.comm.groups import Choice, Group, Transport
from syncline.errors import PeerError, UserError
from tests.cases import first_few
from tests.comm.groups import jobs, mortal_jobs
from tests.comm.groups.one_process import add_up, join, joined, on_each
from tests.mortal import Mortals
from tests.timeouts import DEADLINE_S

TRANSPORTS: tuple[Transport, ...] = ("auto", "tcp", "ucx")


@pytest.mark.parametrize(
    ("route", "seeds"),
    [("auto", range(2)), *(pytest.param(r, range(2, 12), marks=pytest.mark.slow) for r in ROUTES)],
)
def test_survivors_of_kills_at_random_moments(route: Route, seeds: range) -> None:
    """All survivors hear of it; ``benchmarks/group_faults.py`` measures after how long."""
    for seed in seeds:
        trial = draw(random.Random(seed), route)
        assert run(trial)["left"] == [], trial


def test_a_rank_that_ends_by_an_error(mortals: Mortals, tmp_path: Path) -> None:
    ranks = mortals.run(mortal_jobs.raises, 3, folder=tmp_path)
    assert [ended.code for ended in ranks] == [1, 1, 1]
    assert "ValueError: an error of rank 1" in ranks[1].err
    for ended in (ranks[0], ranks[2]):
        assert "PeerError: rank" in ended.err
        assert "rank 1 has " in ended.err


def test_ends_with_work_under_way(mortals: Mortals, tmp_path: Path) -> None:
    for ended in mortals.run(mortal_jobs.ends_with_work_under_way, 2, folder=tmp_path):
        # Whoever is behind hears that the other has left.
        assert (ended.code, ended.err) == (0, "") or "PeerError: rank" in ended.err


def test_a_process_that_ends_leaves_before_python_goes(mortals: Mortals, tmp_path: Path) -> None:
    """A thread of the group that went on while Python is taken down would crash the process."""
    other, ending = mortals.run(mortal_jobs.ends_in_its_group, 2, folder=tmp_path)
    assert (ending.code, ending.out, ending.err) == (0, "MainThread\n", "")
    assert "rank 1 has left the group" in other.out


@pytest.mark.parametrize(
    ("job", "ranks", "given"),
    [
        (mortal_jobs.falls_off, 3, []),
        *((mortal_jobs.forks, 2, [transport]) for transport in TRANSPORTS),
        *first_few([(mortal_jobs.forks_of_torch, 2, [transport]) for transport in TRANSPORTS]),
    ],
)
def test_ranks_may_just_end_and_fork(
    mortals: Mortals, tmp_path: Path, job: Callable[..., None], ranks: int, given: list[str]
) -> None:
    for ended in mortals.run(job, ranks, *given, folder=tmp_path):
        assert (ended.code, ended.out, ended.err) == (0, "done\n", "")


def test_a_rank_is_dead_though_its_child_lives(mortals: Mortals, tmp_path: Path) -> None:
    ranks = mortals.run(mortal_jobs.dies_with_a_child, 2, folder=tmp_path)
    assert "the process of rank 1 has ended" in ranks[0].out


# ---------------------------------------------------------------------- in one process


both = pytest.mark.parametrize("transport", first_few(TRANSPORTS))


def left() -> Counter[str]:
    """Return the names of what this process has open, and our threads; none is used again."""
    found = Counter(str(t) for t in threading.enumerate() if t.name == "syncline watch")
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found[str(entry.readlink())] += 1
    return found


@both
def test_nothing_is_left_of_a_closed_group(transport: Transport) -> None:
    kept = []
    with joined(transport=transport):
        pass  # what is loaded once, such as a library, is none of a group's
    before = left()
    for _ in range(5):
        with joined(transport=transport) as groups, ThreadPoolExecutor(2) as pool:
            list(pool.map(Group.close, groups))
        kept.append(groups)
    assert left() <= before  # groups of earlier tests may go meanwhile


@both
def test_nothing_is_left_of_a_group_that_nobody_refers_to(transport: Transport) -> None:
    join(transport=transport).clear()
    before = left()
    for _ in range(2):
        join(transport=transport).clear()
    assert left() <= before  # groups of earlier tests may go meanwhile


def test_a_group_that_is_forgotten_is_left() -> None:
    first, second = join()
    del second
    with pytest.raises(PeerError, match="rank 1 has left the group"):
        first.all_reduce(jobs.elements(torch.ones(4))).wait()
    first.close()


def test_nothing_is_left_where_joining_fails() -> None:
    before = left()
    for _ in range(3):
        with pytest.raises(PeerError, match="rank 1 did not join"):
            Group(dist.HashStore(), 0, 2, timeout_s=0.1)
    assert left() <= before  # groups of earlier tests may go meanwhile


@both
def test_closing_ends_the_waits_of_other_threads(transport: Transport) -> None:
    with joined(transport=transport) as (first, second):
        tensor = torch.ones(100_000)
        pending = [first.all_reduce(jobs.elements(tensor)) for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            waits = [pool.submit(each.wait) for each in pending]
            first.close()
        for wait in waits:
            with pytest.raises(PeerError, match="the group was closed"):
                wait.result()
        assert all(each.ended and not each.done for each in pending)
        with pytest.raises(UserError, match="this group was closed"):
            first.all_reduce(jobs.elements(tensor))
        # Where the way to it was full of what it did not take, the last word did not get through.
        words = r"rank 0 has (left the group|ended, or cannot be reached)"
        with pytest.raises(PeerError, match=words):
            second.all_reduce(jobs.elements(tensor)).wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_never_calls(transport: Transport) -> None:
    words = (
        "rank 0 waited in vain in all-reduce number 1 of 4 elements of float32 by sum.*rank 1 did "
        "not send, or take, what it should within the timeout"
    )
    with joined(transport=transport) as (first, _):
        pending = first.all_reduce(jobs.elements(torch.ones(4)))
        first.timeout_s = 0.5
        with pytest.raises(PeerError, match=words):
            pending.wait()
        assert pending.ended
        assert not pending.done


@both
@pytest.mark.parametrize("count", [1, 50_000])
def test_what_was_sent_before_leaving_arrives(transport: Transport, count: int) -> None:
    def job(group: Group) -> torch.Tensor:
        value = torch.ones(count)
        group.reduce(jobs.elements(value)).wait()
        if group.rank == 1:
            group.close()
            return value
        with pytest.raises(PeerError, match="rank 1 has left the group"):
            group.reduce(jobs.elements(torch.ones(count))).wait()
        return value

    first, _ = on_each(job, transport=transport)
    assert torch.equal(first.result(), torch.full((count,), 2.0))


AHEAD_BYTES = 2 * 1024 * 1024
"""So much a rank may have to keep of one that it receives nothing from."""


def test_a_rank_sends_only_so_much_ahead_of_one_that_takes_nothing() -> None:
    with joined(transport="tcp") as (first, _):
        first.send(jobs.elements(torch.ones(AHEAD_BYTES // 4)), peer=1).wait()
        with pytest.raises(PeerError, match="rank 1 did not send, or take, what it should"):
            first.send(jobs.elements(torch.ones(1)), peer=1).wait(0.3)


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_what_was_held_back_follows_when_it_is_taken(transport: Transport) -> None:
    values = torch.arange(3.5 * AHEAD_BYTES / 4)
    with joined(transport=transport) as (first, second):
        for _ in range(3):
            sent = first.send(jobs.elements(values), peer=1)
            taken = torch.zeros_like(values)
            second.receive(jobs.elements(taken), peer=0).wait()
            sent.wait()
            assert torch.equal(taken, values)


@both
def test_survivors_go_on_in_a_new_group(transport: Transport) -> None:
    store = dist.HashStore()
    with joined(3, store, name="all", transport=transport) as groups:
        groups[1].close()
        for rank in (0, 2):
            with pytest.raises(PeerError, match="rank 1 has"):
                groups[rank].all_reduce(jobs.elements(torch.ones(10))).wait()
            groups[rank].close()
    with joined(2, store, name="without 1", transport=transport) as again:
        add_up(again)


@both
@pytest.mark.parametrize("algorithm", first_few(["minimum-spanning-tree", "ring", "direct"]))
def test_who_waits_through_others_names_a_silent_rank(transport: Transport, algorithm: str) -> None:
    count, silent = 4, 1
    begun = threading.Barrier(count - 1, timeout=DEADLINE_S)

    def wait(group: Group) -> None:
        operation = group.all_reduce(jobs.elements(torch.ones(1000)), choice=Choice(algorithm))
        begun.wait()  # a rank that has not come would be silent, too
        group.timeout_s = 0.5
        with pytest.raises(PeerError, match=rf"rank {silent}\b"):
            operation.wait()

    with joined(count, transport=transport) as groups, ThreadPoolExecutor(count) as pool:
        list(pool.map(wait, (group for group in groups if group.rank != silent)))
