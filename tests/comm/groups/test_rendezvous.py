"""How ranks find each other where there are old notes, ranks that end, and strangers."""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from syncline.comm.groups import Group, rendezvous
from syncline.comm.groups.meeting import HELLO, MAGIC, REPLY, listening_at, listens
from syncline.comm.groups.messages import take_descriptors
from syncline.comm.groups.rendezvous import Members, RankCard, Rendezvous
from syncline.errors import PeerError, UserError
from tests.comm.groups import jobs, restarted
from tests.comm.groups.one_process import VisitedStore, add_up, join, join_with, joined
from tests.programs import ran
from tests.timeouts import DEADLINE_S, TIMEOUT
from tests.workers import WorkerPool

LONG_S = 10 * DEADLINE_S


def check(ranks: int = 2, store: Any = None) -> None:
    """Let a group form, exchange something, and leave."""
    with joined(ranks, store, timeout_s=LONG_S) as groups:
        add_up(groups)


# ---------------------------------------------------------------------- old notes


def test_a_name_is_used_again_in_one_store(tmp_path: Path) -> None:
    served = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    kept = dist.FileStore(str(tmp_path / "store"), 2)
    for store in (dist.HashStore(), kept, served, dist.PrefixStore("some/prefix", served)):
        for ranks in (2, 2, 3, 2):
            check(ranks, store)


@pytest.mark.parametrize("ended", ["before its call", "after its call"])
@pytest.mark.parametrize("first", [0, 1])
def test_notes_of_processes_that_have_ended_do_not_matter(ended: str, first: int) -> None:
    store = dist.HashStore()
    # Both ranks were killed: one of them had answered, or all, and nobody listens any more.
    gone = [RankCard.own(), RankCard.own()]
    old = [Rendezvous(store, "default", rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        answered = ended == "after its call"
        wait_s = LONG_S if answered else 0.3  # in which nobody comes
        before = [pool.submit(old[0].join, gone[0], time.monotonic() + wait_s)]
        if answered:
            before.append(pool.submit(old[1].join, gone[1], time.monotonic() + LONG_S))
        for each in before:
            each.exception(DEADLINE_S)
    with ThreadPoolExecutor(2) as pool:
        joining = {first: pool.submit(Group, store, first, 2, timeout_s=LONG_S)}
        time.sleep(0.1)
        joining[1 - first] = pool.submit(Group, store, 1 - first, 2, timeout_s=LONG_S)
        add_up([joining[rank].result(DEADLINE_S) for rank in range(2)])


def test_a_reason_of_an_earlier_attempt_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", jobs.refused)
        with pytest.raises(UserError, match="not permitted"):
            join(2, store, timeout_s=LONG_S)
    check(2, store)


def test_another_process_of_the_same_rank_is_named() -> None:
    store = dist.HashStore()
    check(2, store)
    with pytest.raises(PeerError, match="rank 1: rank 0 has formed the group without this process"):
        Group(store, 1, 2, timeout_s=0.3)


def note(**fields: object) -> str:
    return msgspec.json.encode(fields).decode()


def test_a_list_that_comes_at_the_deadline_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives up at the same moment, between this rank's last two looks."""
    store = dist.HashStore()
    card = RankCard.own()
    store.set("default/call", note(identifier="now", ranks=3, card=None))
    look = rendezvous.arrived

    def too_early(at: dist.Store, keys: list[str], deadline: float, rank: int) -> bool:
        found = look(at, keys, deadline, rank)
        if keys == ["default/now/members"] and not found:
            own = {"nonce": card.nonce, "card": card, "error": None}
            at.set(keys[0], note(answers={2: own}, error="rank 1 did not join"))
        return found

    monkeypatch.setattr(rendezvous, "arrived", too_early)
    with pytest.raises(PeerError, match="rank 2: rank 1 did not join"):
        Rendezvous(store, "default", 2, 3).join(card, time.monotonic())


# ---------------------------------------------------------------------- ranks that end


def test_a_rank_that_ends_between_its_answer_and_the_meeting() -> None:
    card = RankCard.own()
    listening = listening_at(card.socket)
    joining = join_with(card, lambda *_: listening.close(), timeout_s=LONG_S)
    words = "rank 0: rank 1 has ended before the two could meet on this host"
    with pytest.raises(PeerError, match=words):
        joining.result()


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
    store.set("default/call", note(identifier="now", ranks=3, card=card))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Group, store, 1, 3, timeout_s=LONG_S)
        assert seen.wait(DEADLINE_S)
        listening.close()
        with pytest.raises(PeerError, match="rank 1: rank 0 has ended while it joined the group"):
            joining.result(DEADLINE_S)


def test_a_rank_that_does_not_join_is_named() -> None:
    store, joining_s = dist.HashStore(), 2.0  # on a busy machine the others need a while, too
    with ThreadPoolExecutor(2) as pool:
        joining = {rank: pool.submit(Group, store, rank, 3, timeout_s=joining_s) for rank in (0, 2)}
    for rank, each in joining.items():
        words = f"rank {rank}: rank 1 did not join the group in time"
        with pytest.raises(PeerError, match=words):
            each.result()


# ---------------------------------------------------------------------- strangers of one's own


def connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(DEADLINE_S)
    connection.connect(address)
    return connection


def test_strangers_are_ignored() -> None:
    with ExitStack() as stack:

        def visit(key: str, value: str) -> None:
            if key == "default/call":
                address = json.loads(value)["card"]["socket"]
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
                    stack.enter_context(connected(address))

        check(2, VisitedStore(visit))


def test_of_many_silent_strangers_the_first_are_hung_up_on() -> None:
    """They would otherwise take all of a rank's descriptors."""
    card = RankCard.own()

    def crowd(members: Members, _: dist.Store) -> None:
        with ExitStack() as stack:
            address = members.cards[0].socket
            first, *_, last = [stack.enter_context(connected(address)) for _ in range(300)]
            assert first.recv(1) == b""
            last.setblocking(False)
            with pytest.raises(BlockingIOError):
                last.recv(1)
        listening.close()

    listening = listening_at(card.socket)
    joining = join_with(card, crowd, timeout_s=LONG_S)
    with pytest.raises(PeerError, match="rank 1 has ended before the two could meet"):
        joining.result()


def test_who_does_not_know_the_secret_gets_nothing() -> None:
    """A process of the same user calls in rank 1's place, without the list of members."""
    card = RankCard.own()

    def attack(members: Members, _: dist.Store) -> None:
        for proof in (bytes(32), b"", secrets.token_bytes(32)):
            with connected(members.cards[0].socket) as connection:
                connection.send(HELLO.pack(MAGIC, 1, bytes(16)))
                nonce, reply = REPLY.unpack(connection.recv(100))
                assert nonce != bytes(16)
                # Its own proof is of no use to anybody else.
                socket.send_fds(connection, [proof or reply], [0])
                message, passed = take_descriptors(connection, 1)
                assert (message, passed) == (b"", [])
        listening.close()

    listening = listening_at(card.socket)
    joining = join_with(card, attack, timeout_s=LONG_S)
    with pytest.raises(PeerError, match="rank 1 has ended before the two could meet"):
        joining.result()


# ---------------------------------------------------------------------- strangers of other users

OTHERS = """
import os, socket, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch.distributed as dist
from syncline.comm.groups import Group
from syncline.comm.groups.meeting import HELLO, MAGIC, listens
from syncline.comm.groups.messages import take_descriptors
from tests.comm.groups.one_process import add_up

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
    second = pool.submit(Group, dist.FileStore(path, 2), 1, 2, timeout_s=300)
    groups = [first.result(300), second.result(300)]
add_up(groups)
_, status = os.waitpid(attacker, 0)
print("attacker", status, flush=True)
for group in groups:
    group.close()
"""


def test_processes_of_other_users_are_hung_up_on() -> None:
    apart = ["unshare", "--net"]
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    if ran(*apart, "true").returncode:
        pytest.skip("no network namespace of our own here")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o755)
        command = [*apart, sys.executable, "-c", OTHERS, f"{folder}/store"]
        ended = ran(*command, timeout_s=4 * DEADLINE_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    said = ["attacker 0", "squatter False", "stranger {b''}"]
    assert sorted(ended.stdout.splitlines()) == said


# ---------------------------------------------------------------------- descriptors


def test_a_group_of_two_keeps_three_descriptors_a_rank() -> None:
    check()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with joined() as groups:
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 2 * 3
        add_up(groups)


def test_a_message_whose_descriptors_this_process_cannot_have() -> None:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second:
        socket.send_fds(first, [b"two"], [0, 1])
        with (
            jobs.limited(resource.RLIMIT_NOFILE, jobs.free_descriptor()),
            pytest.raises(OSError, match="Too many open files"),
        ):
            take_descriptors(second, 2)


def test_addresses_where_nobody_listens() -> None:
    assert not listens(RankCard.own().socket)


# ---------------------------------------------------------------------- restarts


@pytest.mark.slow
def test_the_first_restart_of_torchrun_goes_on_bit_for_bit(
    workers: WorkerPool, tmp_path: Path
) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()
    run = ["torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    run += ["--monitor-interval=0.1", "-m", "tests.comm.groups.restarted", str(apart)]
    ended = ran(sys.executable, "-m", *run, timeout_s=LONG_S, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stderr
    found = torch.load(apart / "found.pt", weights_only=True)
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
