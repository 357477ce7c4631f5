"""How ranks find each other where there are old notes, ranks that end, and strangers."""

from __future__ import annotations

import os
import re
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from syncline.comm.groups import Group, rendezvous, watch
from syncline.comm.groups.meeting import HELLO, MAGIC, REPLY, listening_at, listens
from syncline.comm.groups.messages import take_descriptors
from syncline.comm.groups.rendezvous import RankCard, Rendezvous
from syncline.errors import PeerError
from tests.comm.groups import jobs, restarted
from tests.comm.groups.answers import DEADLINE_S, answered
from tests.timeouts import TIMEOUT
from tests.workers import WorkerPool

LONG_S = 10 * DEADLINE_S


def pair(store: dist.Store, ranks: int = 2) -> list[Group]:
    """Return all ranks of a group, in this process."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(
            pool.map(lambda rank: Group(store, rank, ranks, timeout_s=LONG_S), range(ranks))
        )


def check(groups: list[Group]) -> None:
    """Exchange something, and leave."""
    values = [torch.full((5,), rank + 1.0) for rank in range(len(groups))]
    pending = [
        group.all_reduce(jobs.elements(value)) for group, value in zip(groups, values, strict=True)
    ]
    for each in pending:
        each.wait(DEADLINE_S)
    total = float(sum(range(len(groups) + 1)))
    assert all(value.tolist() == [total] * 5 for value in values)
    for group in groups:
        group.close()


# ---------------------------------------------------------------------- old notes


def stores(folder: Path) -> dict[str, dist.Store]:
    """Return one of each kind."""
    served = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return {
        "hash": dist.HashStore(),
        "file": dist.FileStore(str(folder / "store"), 2),
        "tcp": served,
        "prefix": dist.PrefixStore("some/prefix", served),
    }


def test_a_name_is_used_again_in_one_store(tmp_path: Path) -> None:
    for store in stores(tmp_path).values():
        for ranks in (2, 2, 3, 2):
            check(pair(store, ranks))


@pytest.mark.parametrize("ended", ["before its call", "after its call"])
@pytest.mark.parametrize("first", [0, 1])
def test_notes_of_processes_that_have_ended_do_not_matter(ended: str, first: int) -> None:
    store = dist.HashStore()
    # Both ranks were killed: one of them had answered, or all, and nobody listens any more.
    gone = [RankCard.own(), RankCard.own()]
    old = [Rendezvous(store, "default", rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        before = [pool.submit(old[0].join, gone[0], time.monotonic() + 0.3)]
        if ended == "after its call":
            before.append(pool.submit(old[1].join, gone[1], time.monotonic() + DEADLINE_S))
        for each in before:
            each.exception(DEADLINE_S)
    with ThreadPoolExecutor(2) as pool:
        joining = {first: pool.submit(Group, store, first, 2, timeout_s=LONG_S)}
        time.sleep(0.1)
        joining[1 - first] = pool.submit(Group, store, 1 - first, 2, timeout_s=LONG_S)
        check([joining[rank].result(DEADLINE_S) for rank in range(2)])


def test_a_reason_of_an_earlier_attempt_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()

    def refuse(*args: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", refuse)
        with ThreadPoolExecutor(2) as pool:
            joining = [pool.submit(Group, store, rank, 2, timeout_s=LONG_S) for rank in range(2)]
            assert all(each.exception(DEADLINE_S) is not None for each in joining)
    check(pair(store))


def test_another_process_of_the_same_rank_is_named() -> None:
    store = dist.HashStore()
    check(pair(store))
    words = "rank 1: rank 0 has formed the group without this process"
    with pytest.raises(PeerError, match=words):
        Group(store, 1, 2, timeout_s=0.3)


def test_a_list_that_comes_at_the_deadline_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives up at the same moment, between this rank's last two looks."""
    store = dist.HashStore()
    card = RankCard.own()
    call = rendezvous._Invitation(identifier="now", ranks=3, card=None)
    store.set("default/call", rendezvous._text(call))
    look = rendezvous.arrived

    def too_early(at: dist.Store, keys: list[str], deadline: float, rank: int) -> bool:
        found = look(at, keys, deadline, rank)
        if keys == ["default/now/members"] and not found:
            own = rendezvous._Answer(nonce=card.nonce, card=card, error=None)
            members = rendezvous._Result(answers={2: own}, error="rank 1 did not join")
            at.set(keys[0], rendezvous._text(members))
        return found

    monkeypatch.setattr(rendezvous, "arrived", too_early)
    with pytest.raises(PeerError, match="rank 2: rank 1 did not join"):
        Rendezvous(store, "default", 2, 3).join(card, time.monotonic())


# ---------------------------------------------------------------------- ranks that end


def test_a_rank_that_ends_between_its_answer_and_the_meeting() -> None:
    store = dist.HashStore()
    card = RankCard.own()
    listening = listening_at(card.socket)
    words = "rank 0: rank 1 has ended before the two could meet on this host"
    with answered(store, card) as answer, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Group, store, 0, 2, timeout_s=LONG_S)
        answer.result(DEADLINE_S)
        listening.close()
        with pytest.raises(PeerError, match=words):
            joining.result(DEADLINE_S)


def test_rank_0_ends_while_it_waits_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    card = RankCard.own()
    listening = listening_at(card.socket)
    seen = threading.Event()

    def seen_to_listen(address: str) -> bool:
        found = listens(address)
        if found:
            seen.set()
        return found

    monkeypatch.setattr(rendezvous, "listens", seen_to_listen)
    call = rendezvous._Invitation(identifier="now", ranks=3, card=card)
    store.set("default/call", rendezvous._text(call))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Group, store, 1, 3, timeout_s=LONG_S)
        assert seen.wait(DEADLINE_S)
        listening.close()
        with pytest.raises(PeerError, match="rank 1: rank 0 has ended while it joined the group"):
            joining.result(DEADLINE_S)


def test_a_rank_that_does_not_answer_is_named() -> None:
    store = dist.HashStore()
    card = RankCard.own()
    with pytest.raises(PeerError, match="rank 0: rank 1, 2 did not join the group in time"):
        Rendezvous(store, "default", 0, 3).join(card, time.monotonic() + 0.1)


# ---------------------------------------------------------------------- strangers of one's own


@contextmanager
def waiting(store: dist.Store) -> Iterator[str]:
    """Let rank 0 wait for rank 1; yield where it listens. Rank 1 comes at the end."""
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Group, store, 0, 2, timeout_s=LONG_S)
        deadline_s = time.monotonic() + DEADLINE_S
        while not store.check(["default/call"]):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        found = re.search(rb"syncline-[0-9a-f]{32}", store.get("default/call"))
        assert found
        yield "\0" + found.group().decode()
        other = Group(store, 1, 2, timeout_s=LONG_S)
        check([joining.result(DEADLINE_S), other])


def connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(DEADLINE_S)
    connection.connect(address)
    return connection


def test_strangers_are_ignored() -> None:
    store = dist.HashStore()
    with waiting(store) as address, ExitStack() as stack:
        for said in (
            b"x",
            b"x" * 1000,
            b"goodbye: I am rank 1",
            HELLO.pack(b"none", 1, bytes(16)),
            HELLO.pack(MAGIC, 0, bytes(16)),
            HELLO.pack(MAGIC, 7, bytes(16)),
        ):
            stack.enter_context(connected(address)).send(said)
        connected(address).close()
        for _ in range(300):  # silent ones, more than are kept
            stack.callback(connected(address).close)


def test_who_does_not_know_the_secret_gets_nothing() -> None:
    """A process of the same user calls in rank 1's place, without the list of members."""
    store = dist.HashStore()
    card = RankCard.own()
    listening = listening_at(card.socket)
    with answered(store, card) as answer, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Group, store, 0, 2, timeout_s=LONG_S)
        theirs = answer.result(DEADLINE_S).cards[0].socket
        for proof in (bytes(32), b"", secrets.token_bytes(32)):
            with connected(theirs) as connection:
                connection.send(HELLO.pack(MAGIC, 1, bytes(16)))
                nonce, reply = REPLY.unpack(connection.recv(100))
                assert nonce != bytes(16)
                # Its own proof is of no use to anybody else.
                socket.send_fds(connection, [proof or reply], [0])
                message, passed = take_descriptors(connection, 1)
                assert (message, passed) == (b"", [])
        listening.close()
        with pytest.raises(PeerError, match="rank 1 has ended before the two could meet"):
            joining.result(DEADLINE_S)


# ---------------------------------------------------------------------- strangers of other users

OTHERS = """
import os, socket, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch, torch.distributed as dist
from syncline.comm.groups import Elements, Group
from syncline.comm.groups.meeting import HELLO, MAGIC, listens
from syncline.comm.groups.messages import take_descriptors
from syncline.comm.groups.rendezvous import RankCard, Rendezvous

path = sys.argv[1]
told, tell = os.pipe()
connections = []


def attack():
    # The store's file can be read by all: this one knows all that is in it.
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    os.listdir("/proc/net")
    squat = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    squat.bind("\\0squat")
    squat.listen()
    os.write(tell, b"1")
    with open(path, "rb") as file:
        while b"syncline-" not in (text := file.read()):
            file.seek(0)
            time.sleep(0.01)
    name = text[text.index(b"syncline-"):][:41].decode()
    for said in [b"x", b"", *[HELLO.pack(MAGIC, 1, bytes(16))] * 3000]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect("\\0" + name)
        if said:
            connection.send(said)
        connections.append(connection)
    os.write(tell, b"2")
    answers = set()
    for connection in connections:
        connection.settimeout(300)
        try:
            answers.add(take_descriptors(connection, 2)[0])
        except ConnectionResetError:  # it hung up without reading
            answers.add(b"")
    print("stranger", answers, flush=True)
    os._exit(0)


os.umask(0o022)
store = dist.FileStore(path, 2)
store.set("here", "")
attacker = os.fork()
if attacker == 0:
    attack()
os.close(tell)
os.read(told, 1)
print("squatter", listens("\\0squat"), flush=True)
with ThreadPoolExecutor(2) as pool:
    first = pool.submit(Group, store, 0, 2, timeout_s=300)
    os.read(told, 1)
    groups = [first, pool.submit(Group, dist.FileStore(path, 2), 1, 2, timeout_s=300)]
    groups = [group.result(300) for group in groups]
    values = [torch.full((3,), 1.5), torch.full((3,), 2.0)]
    work = [g.all_reduce(Elements(v.data_ptr(), 3, "float32", v)) for g, v in zip(groups, values)]
    for each in work:
        each.wait(300)
print(values[0].tolist(), values[1].tolist(), flush=True)
_, status = os.waitpid(attacker, 0)
print("attacker", status, flush=True)
for group in groups:
    group.close()
"""


def test_processes_of_other_users_are_hung_up_on() -> None:
    apart = ["unshare", "--net"]
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace of our own here")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o755)
        ended = subprocess.run(
            [*apart, sys.executable, "-c", OTHERS, f"{folder}/store"],
            capture_output=True,
            text=True,
            check=False,
            timeout=4 * DEADLINE_S,
        )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == [
        "[3.5, 3.5, 3.5] [3.5, 3.5, 3.5]",
        "attacker 0",
        "squatter False",
        "stranger {b''}",
    ]


# ---------------------------------------------------------------------- descriptors


def test_a_group_of_two_keeps_three_descriptors_a_rank() -> None:
    store = dist.HashStore()
    check(pair(store))
    before = len(list(Path("/proc/self/fd").iterdir()))
    groups = pair(store)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2 * 3
    check(groups)


def test_a_message_whose_descriptors_this_process_cannot_have() -> None:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second:
        socket.send_fds(first, [b"two"], [0, 1])
        with (
            jobs.limited(resource.RLIMIT_NOFILE, jobs.free_descriptor()),
            pytest.raises(OSError, match="Too many open files"),
        ):
            take_descriptors(second, 2)


def test_a_buffer_for_which_there_is_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = pair(dist.HashStore())

    def refuse(*args: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(watch, "take_descriptors", refuse)
    with ThreadPoolExecutor(2) as pool:
        for rank, each in enumerate([pool.submit(group.allocate, 64) for group in groups]):
            words = f"no descriptor is left for a buffer of rank {1 - rank}: .*Too many open files"
            with pytest.raises(PeerError, match=words):
                each.result(DEADLINE_S)
    for group in groups:
        group.close()


def test_addresses_where_nobody_listens() -> None:
    assert not listens(RankCard.own().socket)


# ---------------------------------------------------------------------- restarts


@pytest.mark.slow
def test_the_first_restart_of_torchrun_goes_on_bit_for_bit(
    workers: WorkerPool, tmp_path: Path
) -> None:
    (tmp_path / "apart").mkdir()
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    ended = subprocess.run(
        [
            *run,
            "--monitor-interval=0.1",
            "-m",
            "tests.comm.groups.restarted",
            str(tmp_path / "apart"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    found = torch.load(tmp_path / "apart" / "found.pt", weights_only=True)
    assert found["attempt"] == 1
    whole = workers.run(restarted.train_whole, 2, str(tmp_path), backend="syncline")[0]
    assert found["parameters"].keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(found["parameters"][name], value), name


def test_groups_over_gloo_have_names_that_no_earlier_process_used(workers: WorkerPool) -> None:
    first, second = workers.run(restarted.names_of_groups, 2)
    assert first == second
    names = [name for each in first for name in each]
    assert len(set(names)) == 4
