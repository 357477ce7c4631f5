"""Ranks that end, in every way: the others hear of it in time, and nothing is left behind."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections import Counter
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
from tests.mortal import Mortals
from tests.timeouts import DEADLINE_S

TRANSPORTS: tuple[Transport, ...] = ("auto", "tcp", "ucx")


@pytest.mark.parametrize(
    ("route", "seeds"),
    [
        ("auto", range(2)),
        *(pytest.param(route, range(2, 12), marks=pytest.mark.slow) for route in ROUTES),
    ],
)
def test_survivors_of_kills_at_random_moments(route: Route, seeds: range) -> None:
    """All survivors hear of it; ``benchmarks/group_faults.py`` measures after how long."""
    for seed in seeds:
        trial = draw(random.Random(seed), route)
        assert run(trial)["left"] == [], trial


def test_ranks_may_just_end_once_they_are_done(mortals: Mortals, tmp_path: Path) -> None:
    for ended in mortals.run(mortal_jobs.falls_off, 3, folder=tmp_path):
        assert (ended.code, ended.err) == (0, "")


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


def test_a_process_that_ends_leaves_its_group_before_python_goes(
    mortals: Mortals, tmp_path: Path
) -> None:
    """A thread of the group that went on while Python is taken down would crash the process."""
    other, ending = mortals.run(mortal_jobs.ends_in_its_group, 2, folder=tmp_path)
    assert (ending.code, ending.out, ending.err) == (0, "MainThread\n", "")
    assert "rank 1 has left the group" in other.out


def test_a_group_that_is_forgotten_is_left(mortals: Mortals, tmp_path: Path) -> None:
    ranks = mortals.run(mortal_jobs.forgets, 3, folder=tmp_path)
    assert [ended.code for ended in ranks] == [0, 0, 0], ranks
    for ended in (ranks[0], ranks[2]):
        assert "rank 1 has " in ended.out


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forks_of_a_rank_do_not_matter(
    mortals: Mortals, tmp_path: Path, transport: Transport
) -> None:
    for ended in mortals.run(mortal_jobs.forks, 2, transport, folder=tmp_path):
        assert (ended.code, ended.err) == (0, "")
        assert ended.out == "closed\n"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forks_do_not_matter_to_torchs_groups(
    mortals: Mortals, tmp_path: Path, transport: Transport
) -> None:
    for ended in mortals.run(mortal_jobs.forks_of_torch, 2, transport, folder=tmp_path):
        assert (ended.code, ended.err) == (0, "")


def test_a_rank_is_dead_though_its_child_lives(mortals: Mortals, tmp_path: Path) -> None:
    ranks = mortals.run(mortal_jobs.dies_with_a_child, 2, folder=tmp_path)
    assert "the process of rank 1 has ended" in ranks[0].out


# ---------------------------------------------------------------------- in one process


both = pytest.mark.parametrize("transport", first_few(TRANSPORTS))


def pair(transport: Transport = "auto", timeout_s: float = DEADLINE_S) -> list[Group]:
    """Return the two ranks of a group, both in this process."""
    store = dist.HashStore()

    def join(rank: int) -> Group:
        return Group(store, rank, 2, timeout_s=timeout_s, transport=transport)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(join, range(2)))


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
    for group in pair(transport):  # what is loaded once, such as a library, is none of a group's
        group.close()
    before = left()
    for _ in range(5):
        groups = pair(transport)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Group.close, groups))
        for group in groups:
            group.close()
        kept.append(groups)
    assert left() <= before  # groups of earlier tests may go meanwhile


@both
def test_nothing_is_left_of_a_group_that_nobody_refers_to(transport: Transport) -> None:
    pair(transport).clear()
    before = left()
    for _ in range(2):
        pair(transport).clear()
    assert left() <= before  # groups of earlier tests may go meanwhile


def test_nothing_is_left_where_joining_fails() -> None:
    before = left()
    for _ in range(3):
        with pytest.raises(PeerError, match="rank 1 did not join"):
            Group(dist.HashStore(), 0, 2, timeout_s=0.1)
    assert left() <= before  # groups of earlier tests may go meanwhile


@both
def test_closing_ends_the_waits_of_other_threads(transport: Transport) -> None:
    first, second = pair(transport)
    tensor = torch.ones(100_000)
    pending = [first.all_reduce(jobs.elements(tensor)) for _ in range(3)]
    said: list[str] = []

    def wait(number: int) -> None:
        try:
            pending[number].wait()
        except PeerError as error:
            said.append(str(error))

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    first.close()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert all("the group was closed" in words for words in said)
    assert len(said) == 3
    assert all(each.ended and not each.done for each in pending)
    with pytest.raises(UserError, match="this group was closed"):
        first.all_reduce(jobs.elements(tensor))
    # Where the way to it was full of what it did not take, the last word did not get through.
    with pytest.raises(PeerError, match=r"rank 0 has (left the group|ended, or cannot be reached)"):
        second.all_reduce(jobs.elements(tensor)).wait()
    second.close()


@both
@pytest.mark.parametrize("count", [1, 50_000])
def test_what_was_sent_before_leaving_arrives(transport: Transport, count: int) -> None:
    root, other = pair(transport)
    values = [torch.ones(count), torch.ones(count)]

    def send_and_leave() -> None:
        other.reduce(jobs.elements(values[1])).wait()
        other.close()

    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(send_and_leave)
        root.reduce(jobs.elements(values[0])).wait()
        leaving.result(DEADLINE_S)
    assert torch.equal(values[0], torch.full((count,), 2.0))
    with pytest.raises(PeerError, match="rank 1 has left the group"):
        root.reduce(jobs.elements(values[0])).wait()
    root.close()


AHEAD_BYTES = 2 * 1024 * 1024
"""So much a rank may have to keep of one that it receives nothing from."""


def test_a_rank_sends_only_so_much_ahead_of_one_that_takes_nothing() -> None:
    first, second = pair("tcp")
    first.send(jobs.elements(torch.ones(AHEAD_BYTES // 4)), peer=1).wait()
    with pytest.raises(PeerError, match="rank 1 did not send, or take, what it should"):
        first.send(jobs.elements(torch.ones(1)), peer=1).wait(0.3)
    first.close()
    second.close()


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_what_was_held_back_follows_when_it_is_taken(transport: Transport) -> None:
    first, second = pair(transport)
    values = torch.arange(3.5 * AHEAD_BYTES / 4)
    for _ in range(3):
        sent = first.send(jobs.elements(values), peer=1)
        taken = torch.zeros_like(values)
        second.receive(jobs.elements(taken), peer=0).wait()
        sent.wait()
        assert torch.equal(taken, values)
    first.close()
    second.close()


@both
def test_survivors_go_on_in_a_new_group(transport: Transport) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        groups = list(
            pool.map(lambda rank: Group(store, rank, 3, name="all", transport=transport), range(3))
        )
        groups[1].close()
        for rank in (0, 2):
            tensor = torch.ones(10)
            with pytest.raises(PeerError, match="rank 1 has"):
                groups[rank].all_reduce(jobs.elements(tensor)).wait()
            groups[rank].close()
        again = list(
            pool.map(
                lambda rank: Group(store, rank, 2, name="without 1", transport=transport), range(2)
            )
        )
        values = [torch.ones(10), torch.ones(10)]
        pending = [
            group.all_reduce(jobs.elements(tensor))
            for group, tensor in zip(again, values, strict=True)
        ]
        for each in pending:
            each.wait()
    assert all(torch.equal(tensor, torch.full((10,), 2.0)) for tensor in values)
    for group in again:
        group.close()


@both
@pytest.mark.parametrize("algorithm", first_few(["minimum-spanning-tree", "ring", "direct"]))
def test_who_waits_through_others_names_the_silent_rank(
    transport: Transport, algorithm: str
) -> None:
    store, count, silent = dist.HashStore(), 4, 1
    begun = threading.Barrier(count - 1, timeout=DEADLINE_S)

    def join(rank: int) -> Group:
        return Group(store, rank, count, timeout_s=DEADLINE_S, transport=transport)

    def wait(group: Group) -> str:
        operation = group.all_reduce(jobs.elements(torch.ones(1000)), choice=Choice(algorithm))
        begun.wait()  # a rank that has not come would be silent, too
        with pytest.raises(PeerError) as error:
            operation.wait()
        return str(error.value)

    with ThreadPoolExecutor(count) as pool:
        groups = list(pool.map(join, range(count)))
        for group in groups:
            group.timeout_s = 0.5
        for said in pool.map(wait, (group for group in groups if group.rank != silent)):
            assert re.search(rf"rank {silent}\b", said), said
        list(pool.map(Group.close, groups))
