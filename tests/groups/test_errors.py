"""What groups say to input that they cannot use, and of ranks that do something else."""

from __future__ import annotations

import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from syncline.errors import PeerError, UserError
from syncline.groups import Group
from syncline.groups.rendezvous import HELLO, Card, pass_descriptors
from tests.groups import jobs
from tests.workers import WorkerPool

DEADLINE_S = 30.0


def test_input_that_cannot_be_used(workers: WorkerPool, tmp_path: Path) -> None:
    expected = {
        "count": "expected 3 elements of float32, 3 for each rank, found 4 of float32",
        "dtypes": "expected 3 elements of float32, 3 for each rank, found 3 of float64",
        "gather": "expected 6 elements of float32, 3 for each rank, found 4 of float32",
        "scatter": "expected 6 elements of float32, 3 for each rank, found 3 of float32",
        "dtype": "elements of float8 cannot be exchanged; did you mean 'float64'? (known: ",
        "reduction": "unknown reduction 'som'; did you mean 'sum'? (known: sum, avg, ",
        "average": "the reduction 'avg' is for floating point, not for int32",
        "bitwise": "the reduction 'bor' is for integers and booleans, not for float32",
        "root": "expected a rank from 0 to 1, found 2",
        "negative root": "expected a rank from 0 to 1, found -1",
        "algorithm": "unknown all-reduce algorithm 'rings'; did you mean 'ring'? (known: ",
        "blocks": "ring cuts the vector as it must; blocks=3 has no meaning",
        "no blocks": "linear-pipeline needs a number of blocks; ",
        "itself": "cannot send to itself, or receive from itself",
        "peer": "from 0 to 1, found 2",
        "closed": "this group was closed",
    }
    for found in workers.run(jobs.bad_input, 2, str(tmp_path)):
        assert found.keys() == expected.keys()
        for name, (kind, text) in found.items():
            assert kind == "UserError", name
            assert expected[name] in text, name


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_that_differ_are_named_with_their_rank(
    workers: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    found = workers.run(jobs.mismatch, ranks, str(tmp_path))
    for name in jobs.MISMATCHES:
        kinds, texts = zip(*(answer[name] for answer in found), strict=True)
        assert set(kinds) == {"MismatchError"}, texts
        assert all("the ranks called different collectives: " in text for text in texts), texts
        # Who notices says what both have called; others may learn of it from whoever noticed.
        assert any(re.search(r"rank \d called .+, this rank .+", text) for text in texts), texts
        told = [text for text in texts if "has given up" in text]
        assert all(re.search(r"rank \d called another collective", text) for text in told), texts


def test_a_rank_that_never_joins(workers: WorkerPool, tmp_path: Path) -> None:
    for rank, ((kind, text), seconds) in enumerate(workers.run(jobs.absent, 3, str(tmp_path))):
        if rank != 1:
            assert kind == "PeerError"
            assert f"rank {rank}: rank 1 did not join the group in time" in text
            assert seconds < DEADLINE_S


def test_a_rank_that_never_calls(workers: WorkerPool, tmp_path: Path) -> None:
    (kind, text), _ = workers.run(jobs.silent, 2, str(tmp_path))
    assert kind == "PeerError"
    assert "rank 0 waited in vain in all-reduce number 1 of 4 elements of float32 by sum" in text
    assert "rank 1 did not send, or take, what it should within the timeout" in text


def test_a_rank_that_leaves_while_others_wait(workers: WorkerPool, tmp_path: Path) -> None:
    for rank, (kind, text) in enumerate(workers.run(jobs.leaving_early, 3, str(tmp_path))):
        if rank != 1:
            assert kind == "PeerError"
            # The other may have noticed first, and told.
            assert re.search("rank 1 has (left the group|failed)", text), text


# ---------------------------------------------------------------------- meeting, in one process


class _Caller:
    """A process that meets a rank and says what it likes."""

    def __init__(self, store: dist.HashStore, nonce: str) -> None:
        mine = Card.own()
        self.card = Card(host=mine.host, name="here", machine="", socket=mine.socket, nonce=nonce)
        store.set("default/1", self.card.to_json())
        theirs = Card.from_json(store.get("default/0"))
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.connect(theirs.socket)


@pytest.mark.parametrize(
    ("hello", "descriptors", "words"),
    [
        (HELLO.pack(1, bytes(16)), 2, "says that it is rank 1 and is not: does another job"),
        (HELLO.pack(2, bytes.fromhex("ab" * 16)), 2, "says that it is rank 2 and is not"),
        (b"hello", 2, "a process that is no rank of this group called"),
        (HELLO.pack(1, bytes.fromhex("ab" * 16)), 1, "that is no rank of this group called"),
    ],
)
def test_strangers_are_refused(hello: bytes, descriptors: int, words: str) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Group, store, 0, 2, timeout_s=DEADLINE_S)
        caller = _Caller(store, "ab" * 16)
        pass_descriptors(caller.connection, hello, [0] * descriptors)
        with pytest.raises(PeerError, match=words):
            joining.result(DEADLINE_S)
        caller.connection.close()


def test_a_caller_that_hangs_up_is_refused() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Group, store, 0, 2, timeout_s=DEADLINE_S)
        _Caller(store, "ab" * 16).connection.close()
        with pytest.raises(PeerError, match="no rank of this group called, or has ended"):
            joining.result(DEADLINE_S)


def test_a_rank_that_has_ended_while_joining() -> None:
    store = dist.HashStore()
    gone = Card.own()  # nobody listens there
    store.set("default/0", gone.to_json())
    with pytest.raises(PeerError, match="rank 1 could not meet rank 0 on this host"):
        Group(store, 1, 2, timeout_s=DEADLINE_S)


def test_ranks_of_other_hosts_do_not_share_memory() -> None:
    store = dist.HashStore()
    card = Card.own()
    far = Card(host=("b", "n"), name="far", machine="", socket="", nonce="")
    store.set("default/1", far.to_json())
    with pytest.raises(UserError, match=f"rank 1 is on host 'far' and rank 0 on '{card.name}'"):
        Group(store, 0, 2, timeout_s=DEADLINE_S, transport="shared")


@pytest.mark.parametrize(
    ("module", "function", "words"),
    [
        (os, "memfd_create", "bytes of shared memory to be had: .*not permitted"),
        (socket.socket, "bind", "rank 0: processes of this host are not allowed to meet"),
        (Card, "own", "rank 0: processes of this host are not allowed to meet"),
    ],
)
def test_hosts_that_do_not_permit_it(
    monkeypatch: pytest.MonkeyPatch, module: Any, function: str, words: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module, function, refuse)
    with pytest.raises(UserError, match=words):
        Group(dist.HashStore(), 0, 1)


def test_a_rank_beyond_the_group() -> None:
    with pytest.raises(UserError, match="expected a rank from 0 to 1, found 2"):
        Group(dist.HashStore(), 2, 2)


def test_timeouts_of_any_length_are_kept() -> None:
    group = Group(dist.HashStore(), 0, 1, timeout_s=float("inf"))
    group.close()
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda rank: Group(store, rank, 2, timeout_s=1e15), range(2)))
    values = [jobs.whole_numbers(rank, 10, jobs.torch.float32) for rank in range(2)]
    threads = []
    for rank, group in enumerate(both):
        pending = group.all_reduce(jobs.elements(values[rank]))
        threads.append(threading.Thread(target=pending.wait, args=(1e300,)))
        threads[-1].start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert jobs.torch.equal(*values)
    for group in both:
        group.close()
