"""What groups say to input that they cannot use, and of ranks that do something else."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from syncline import _native
from syncline.comm.groups import Group, shared_buffers
from syncline.comm.groups.rendezvous import RankCard
from syncline.comm.groups.ucx import new_worker, packed
from syncline.errors import PeerError, UserError
from tests.comm.groups import jobs
from tests.comm.groups.answers import FAR, answered
from tests.timeouts import DEADLINE_S
from tests.workers import WorkerPool


def test_input_that_cannot_be_used(workers: WorkerPool, tmp_path: Path) -> None:
    expected = {
        "count": "expected 3 elements of float32, 3 for each rank, found 4 of float32",
        "dtypes": "expected 3 elements of float32, 3 for each rank, found 3 of float64",
        "gather": "expected 6 elements of float32, 3 for each rank, found 4 of float32",
        "scatter": "expected 6 elements of float32, 3 for each rank, found 3 of float32",
        "dtype": "elements of float8 cannot be exchanged; did you mean 'float64'? (known: ",
        "reduction": "unknown reduction 'som'; did you mean 'sum'? (known: sum, avg, ",
        "average": "the reduction 'avg' is for numbers, not for bool",
        "bitwise": "the reduction 'bor' is for integers and booleans, not for float32",
        "root": "expected a rank from 0 to 1, found 2",
        "negative root": "expected a rank from 0 to 1, found -1",
        "algorithm": "unknown all-reduce algorithm 'rings'; did you mean 'ring'? (known: ",
        "blocks": "ring cuts the vector by itself; leave blocks=3 out",
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


@pytest.mark.parametrize(
    ("ranks", "route"), [(2, "auto"), (3, "auto"), (2, "tcp"), (3, "tcp"), (3, "mixed"), (3, "ucx")]
)
def test_calls_that_differ_are_named_with_their_rank(
    workers: WorkerPool, tmp_path: Path, ranks: int, route: str
) -> None:
    found = workers.run(jobs.mismatch, ranks, str(tmp_path), route)
    for name in jobs.MISMATCHES:
        kinds, texts = zip(*(answer[name] for answer in found), strict=True)
        assert set(kinds) == {"MismatchError"}, texts
        assert all("the ranks called different collectives: " in text for text in texts), texts
        # Who notices says what both have called; others may learn of it from whoever noticed.
        both = r"rank \d called .+, this rank .+|this rank called .+, rank \d .+"
        assert any(re.search(both, text) for text in texts), texts
        told = [text for text in texts if "has given up" in text]
        assert all(re.search(r"rank \d called another collective", text) for text in told), texts


def test_a_rank_that_never_joins(workers: WorkerPool, tmp_path: Path) -> None:
    for rank, ((kind, text), seconds) in enumerate(workers.run(jobs.absent, 3, str(tmp_path))):
        if rank != 1:
            assert kind == "PeerError"
            assert f"rank {rank}: rank 1 did not join the group in time" in text
            assert seconds < DEADLINE_S


DESCRIPTORS = "rank 1 has run out of file descriptors .*the limit of its process is .*ulimit"
REASONS = {
    "permission": "rank 1: .* bytes of shared memory cannot be allocated: .*not permitted",
    "memory": "rank 1: .* bytes of shared memory cannot be allocated: .*too large",
    "descriptors": DESCRIPTORS,
    "a descriptor": DESCRIPTORS,
    "processes": "rank 1 cannot watch the process of rank 0: .*not permitted",
    "threads": "rank 1: .*can.t start new thread; see the limits of this process .*ulimit",
    "sockets": r"rank 1: processes of this host are not allowed to meet .*not permitted",
    "ucx": "rank 1: UCX could not begin: .*; this transport needs UCX",
    "interface": r"rank 1: no interface 'none0' is up .found: .*GLOO_SOCKET_IFNAME",
}


@pytest.mark.parametrize("name", jobs.REFUSALS)
def test_all_ranks_hear_why_one_cannot_join(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    (first, first_s), (second, second_s) = workers.run(jobs.refusing, 2, str(tmp_path), name)
    assert second[0] in ("UserError", "PeerError")
    assert re.match(REASONS[name], second[1]), second
    assert first[0] == "PeerError"
    # Who is refused when all have met leaves again; its peer is in the group then.
    told = "rank 1 (does not join|has left) the group: "
    assert re.match(f"rank 0: ({told})?{REASONS[name]}", first[1]), first
    assert max(first_s, second_s) < DEADLINE_S < jobs.TIMEOUT_S


@pytest.mark.parametrize("route", ["auto", "tcp", "ucx"])
def test_a_rank_that_never_calls(workers: WorkerPool, tmp_path: Path, route: str) -> None:
    (kind, text), _ = workers.run(jobs.silent, 2, str(tmp_path), route)
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


@pytest.mark.parametrize("refused", [0, 1])
def test_a_process_that_may_not_be_watched(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    store = dist.HashStore()
    opened, numbers = os.pidfd_open, itertools.count()

    def pidfd_open(process: int) -> int:  # called by rank 0, then by rank 1
        if next(numbers) == refused:
            raise PermissionError(1, "Operation not permitted")
        return opened(process)

    def joined(rank: int) -> None:
        group = Group(store, rank, 2, timeout_s=DEADLINE_S)
        try:
            group.all_reduce(jobs.elements(jobs.torch.zeros(1))).wait()
        finally:
            group.close()

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    words = f"rank {refused} cannot watch the process of rank {1 - refused}: .*not permitted"
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(joined, rank) for rank in range(2)]:
            with pytest.raises(PeerError, match=words):
                each.result(DEADLINE_S)


def test_ranks_of_other_hosts_do_not_share_memory() -> None:
    store = dist.HashStore()
    card = RankCard.own()
    words = f"rank 1 is on host 'far' and rank 0 on '{card.name}'"
    with answered(store, FAR), pytest.raises(UserError, match=words):
        Group(store, 0, 2, timeout_s=DEADLINE_S, transport="shared")


@pytest.mark.parametrize(
    ("module", "function", "words"),
    [
        (os, "memfd_create", "rank 0: .* of shared memory cannot be allocated: .*not permitted"),
        (socket.socket, "bind", "rank 0: processes of this host are not allowed to meet"),
        (RankCard, "own", "rank 0: processes of this host are not allowed to meet"),
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


def _read_only(size_bytes: int) -> int:
    """Return memory that cannot be mapped as it must be."""
    descriptor = os.memfd_create("here", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    return again


def test_memory_that_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("syncline.comm.groups.group._new_segment", lambda *_: _read_only(1 << 20))
        with pytest.raises(UserError, match=r"rank 0: .*mapping shared memory.*; see the limits"):
            Group(dist.HashStore(), 0, 1)
    group = Group(dist.HashStore(), 0, 1)
    monkeypatch.setattr(
        "syncline.comm.groups.shared_buffers._new_memory", lambda *_: _read_only(64)
    )
    with pytest.raises(UserError, match="rank 0: 64 bytes of a shared buffer cannot be mapped: "):
        group.allocate(64)
    group.close()


def test_a_peers_buffer_that_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    mapped = shared_buffers._mapped

    def refused(descriptor: int, size_bytes: int, rank: int) -> Any:
        watching = threading.current_thread().name == "syncline watch"
        return mapped(_read_only(size_bytes) if watching else descriptor, size_bytes, rank)

    def allocated(rank: int) -> None:
        group = Group(store, rank, 2, timeout_s=DEADLINE_S)
        try:
            group.allocate(64)
        finally:
            group.close()

    monkeypatch.setattr(shared_buffers, "_mapped", refused)
    with ThreadPoolExecutor(2) as pool:
        for rank, each in enumerate([pool.submit(allocated, rank) for rank in range(2)]):
            words = f"rank {rank}, shared buffer 1 of 64 bytes: .*(cannot be mapped|has left)"
            with pytest.raises(PeerError, match=words):
                each.result(DEADLINE_S)


FULL = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import torch.distributed as dist
from syncline.comm.groups import Group, shared_buffers

with open("/dev/shm/all of it", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        print(error.strerror)
store = dist.HashStore()
with ThreadPoolExecutor(2) as pool:
    groups = list(pool.map(lambda rank: Group(store, rank, 2, timeout_s=300), range(2)))
    buffers = list(pool.map(lambda group: group.allocate(1 << 20), groups))
    for number, buffer in enumerate(buffers):
        buffer.memory[:] = bytes([number + 1]) * buffer.size_bytes
    list(pool.map(lambda group: group.all_reduce(buffers[group.rank].elements("uint8")).wait(),
                  groups))
print(set(buffers[0].memory), set(buffers[1].memory))
"""


def test_a_full_dev_shm_does_not_matter() -> None:
    in_own_mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*in_own_mounts, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here, so no /dev/shm of our own")
    mounted = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    ended = subprocess.run(
        [*in_own_mounts, "sh", "-c", mounted, "sh", sys.executable, "-c", FULL],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S * 2,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "No space left on device\n{3} {3}\n"


# ---------------------------------------------------------------------- hosts out of reach


def test_an_interface_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "nowhere0")
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        joining = [
            pool.submit(Group, store, rank, 2, timeout_s=DEADLINE_S, transport="ucx")
            for rank in range(2)
        ]
        for rank, each in enumerate(joining):
            words = f"rank {rank}: (UCX could not reach rank {1 - rank}: .*UCX_NET_DEVICES|rank)"
            with pytest.raises(PeerError, match=words):
                each.result(DEADLINE_S)


def test_a_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    native, store = _native.NativeGroup, dist.HashStore()
    # The deadline comes once this rank has come so far as to connect.
    monkeypatch.setattr(_native, "NativeGroup", lambda *given: native(*given[:-1], 1.0))
    silent = new_worker(1)  # its kernel takes connections, and nobody speaks
    words = (
        "rank 0: rank 1 did not connect through UCX in time; see that rank's output, and whether"
    )
    with answered(store, FAR) as answer, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Group, store, 0, 2, timeout_s=DEADLINE_S, transport="shared+ucx")
        store.set(f"{answer.result(DEADLINE_S).prefix}/ucx/1", packed(silent.address))
        with pytest.raises(PeerError, match=words):
            joining.result(DEADLINE_S)


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
