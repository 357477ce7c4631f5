"""What groups say to input that they cannot use, and of ranks that do something else."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from syncline import _native
from syncline.comm.groups import Choice, Elements, Group
from syncline.comm.groups import group as group_module
from syncline.comm.groups.rendezvous import RankCard
from syncline.comm.groups.ucx import new_worker, packed
from syncline.errors import PeerError, UserError
from tests.comm.groups import jobs
from tests.comm.groups.jobs import elements
from tests.comm.groups.one_process import FAR, add_up, join_with, joined, noting, on_each
from tests.programs import ran
from tests.timeouts import DEADLINE_S
from tests.workers import WorkerPool

THREE, FOUR = elements(torch.ones(3)), elements(torch.ones(4))
DOUBLE, BOOL = elements(torch.ones(3).double()), elements(torch.ones(3).bool())
OF_EACH = "elements of float32, 3 for each rank, found "
MISTAKES: list[tuple[Callable[[Group], object], str]] = [
    (lambda g: g.all_reduce(THREE, FOUR), f"expected 3 {OF_EACH}4 of float32"),
    (lambda g: g.all_reduce(THREE, DOUBLE), f"expected 3 {OF_EACH}3 of float64"),
    (lambda g: g.all_gather(THREE, FOUR), f"expected 6 {OF_EACH}4 of float32"),
    (lambda g: g.reduce_scatter(THREE, THREE), f"expected 6 {OF_EACH}3 of float32"),
    (lambda g: g.all_reduce(Elements(0, 1, "float8")), "float8 cannot .* mean 'float64'.*known: "),
    (lambda g: g.all_reduce(THREE, reduction="sm"), "'sm'; did you mean 'sum'.*known: sum, avg, "),
    (lambda g: g.all_reduce(BOOL, reduction="avg"), "'avg' is for numbers, not for bool"),
    (lambda g: g.all_reduce(THREE, reduction="bor"), "'bor' is for integers .* not for float32"),
    (lambda g: g.broadcast(THREE, root=2), "expected a rank from 0 to 1, found 2"),
    (lambda g: g.reduce(THREE, root=-1), "expected a rank from 0 to 1, found -1"),
    (lambda g: g.all_reduce(THREE, choice=Choice("rign")), "'rign'; did you mean 'ring'.*known: "),
    (lambda g: g.all_reduce(THREE, choice=Choice("ring", 3)), "by itself; leave blocks=3 out"),
    (lambda g: g.all_reduce(THREE, choice=Choice("linear-pipeline")), "needs a number of blocks; "),
    (lambda g: g.send(THREE, peer=0), "cannot send to itself, or receive from itself"),
    (lambda g: g.receive(THREE, peer=2), "from 0 to 1, found 2"),
]


def test_input_that_cannot_be_used() -> None:
    with joined() as groups:
        for call, words in MISTAKES:
            with pytest.raises(UserError, match=words):
                call(groups[0])
        add_up(groups)
    with pytest.raises(UserError, match="this group was closed"):
        groups[0].all_reduce(THREE)


@pytest.mark.parametrize(
    ("ranks", "route"), [(2, "auto"), (3, "auto"), (2, "tcp"), (3, "tcp"), (3, "mixed"), (3, "ucx")]
)
def test_calls_that_differ(workers: WorkerPool, tmp_path: Path, ranks: int, route: str) -> None:
    found = workers.run(jobs.mismatch, ranks, str(tmp_path), route)
    for texts in zip(*found, strict=True):
        # Who notices says what both have called; others may learn of it from whoever noticed.
        both = r"rank \d called .+, this rank .+|this rank called .+, rank \d .+"
        assert any(re.search(both, text) for text in texts), texts
        told = [text for text in texts if "has given up" in text]
        assert all(re.search(r"rank \d called another collective", text) for text in told), texts


@pytest.mark.parametrize("name", jobs.REFUSALS)
def test_all_ranks_hear_why_one_cannot_join(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    workers.run(jobs.refusing, 2, str(tmp_path), name)


# ---------------------------------------------------------------------- meeting, in one process


@pytest.mark.parametrize("refused", [0, 1])
def test_a_process_that_may_not_be_watched(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    opened, numbers = os.pidfd_open, itertools.count()

    def pidfd_open(process: int) -> int:  # called by rank 0, then by rank 1
        if next(numbers) == refused:
            raise PermissionError(1, "Operation not permitted")
        return opened(process)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    words = f"rank {refused} cannot watch the process of rank {1 - refused}: .*not permitted"
    for each in on_each(lambda group: group.all_reduce(elements(torch.zeros(1))).wait()):
        with pytest.raises(PeerError, match=words):
            each.result()


def test_ranks_of_other_hosts_do_not_share_memory() -> None:
    words = f"rank 1 is on host 'far' and rank 0 on '{RankCard.own().name}'"
    joining = join_with(FAR, transport="shared")
    with pytest.raises(UserError, match=words):
        joining.result()


def test_a_host_that_does_not_permit_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "bind", jobs.refused)
    with pytest.raises(UserError, match="rank 0: processes of this host are not allowed to meet"):
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
    monkeypatch.setattr(group_module, "_sealed_memory", lambda _: _read_only(1 << 20))
    with pytest.raises(UserError, match=r"rank 0: .*mapping shared memory.*; see the limits"):
        Group(dist.HashStore(), 0, 1)


FULL = """
from tests.comm.groups.one_process import add_up, joined

with open("/dev/shm/all of it", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        print(error.strerror)

with joined() as groups:
    add_up(groups, 1 << 20)
print("added up")
"""


def test_a_full_dev_shm_does_not_matter() -> None:
    in_own_mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    if ran(*in_own_mounts, "true").returncode:
        pytest.skip("no user namespaces here, so no /dev/shm of our own")
    mounted = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    command = [*in_own_mounts, "sh", "-c", mounted, "sh", sys.executable, "-c", FULL]
    ended = ran(*command, timeout_s=2 * DEADLINE_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "No space left on device\nadded up\n"


def test_an_interface_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "nowhere0")
    for rank, each in enumerate(on_each(lambda _: None, transport="ucx")):
        words = f"rank {rank}: (UCX could not reach rank {1 - rank}: .*UCX_NET_DEVICES|rank)"
        with pytest.raises(PeerError, match=words):
            each.result()


def test_a_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    native = _native.NativeGroup
    # The deadline comes once this rank has come so far as to connect.
    monkeypatch.setattr(_native, "NativeGroup", lambda *given: native(*given[:-1], 1.0))
    silent = new_worker(1)  # its kernel takes connections, and nobody speaks
    words = "rank 0: rank 1 did not connect through UCX in time; see that rank's output, and wheth"
    note = noting("ucx/1", packed(silent.address))
    joining = join_with(FAR, note, transport="shared+ucx")
    with pytest.raises(PeerError, match=words):
        joining.result()


def test_a_rank_beyond_the_group() -> None:
    with pytest.raises(UserError, match="expected a rank from 0 to 1, found 2"):
        Group(dist.HashStore(), 2, 2)


def test_timeouts_of_any_length_are_kept() -> None:
    with joined(1, timeout_s=float("inf")):
        pass

    def job(group: Group) -> list[float]:
        value = torch.full((10,), group.rank + 1.0)
        group.all_reduce(elements(value)).wait(1e300)
        return value.tolist()

    assert [each.result() for each in on_each(job, timeout_s=1e15)] == [[3.0] * 10] * 2
