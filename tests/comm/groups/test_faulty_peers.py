"""Peers that write or send what no rank does: the others name them, before their deadline."""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.comm.groups import Group
from syncline.comm.groups import group as group_module
from syncline.comm.groups.ucx import packed
from syncline.errors import PeerError
from tests.comm.groups import jobs
from tests.comm.groups.one_process import FAR, join_with, joined, noting

SEGMENT = re.compile(r"(\w+)-\w+ rw-s \S+ \S+ (\d+) +/memfd:syncline")
TO_FIRST = 4096  # where what a rank says to rank 0 begins, in its segment
FRAGMENTS, STRIDE, COUNT = 128, 320, 8


def segments() -> dict[str, int]:
    """Return where this process has mapped memory of ranks, by the number of its file."""
    maps = Path("/proc/self/maps").read_text()
    return {inode: int(start, 16) for start, inode in SEGMENT.findall(maps)}


@contextmanager
def mapped(count: int) -> Iterator[tuple[list[Group], list[int]]]:
    """Let there be the ranks of a group; also yield where their segments are."""
    before = segments()
    with joined(count) as groups:
        yield groups, [start for inode, start in segments().items() if inode not in before]


def poke(starts: list[int], offset: int, value: int, kind: Any) -> None:
    for start in starts:
        kind.from_address(start + offset).value = value


def of_fragments(offset: int) -> list[int]:
    """Return where a word lies that is said of each of the next fragments to rank 0."""
    return [TO_FIRST + FRAGMENTS + STRIDE * number + offset for number in range(COUNT)]


U8, U32, U64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64
WORDS = {
    "verdict": ([TO_FIRST], U32, 0x7FFFFFFE, "a rank below 3 that has failed, found [0-9]"),
    "number": (of_fragments(0), U64, 999, "fragment 0 or 1 here, found 999"),
    "count": (of_fragments(8), U64, 2**63, "all-reduce number 1 .*, found all-reduce"),
    "collective": (of_fragments(24), U8, 99, "all-reduce .*, found an unknown coll"),
    "dtype": (of_fragments(25), U8, 99, "all-reduce .*, found .* of an unknown dtype"),
    "bytes": (of_fragments(32), U64, 2**40, "[0-9]+ bytes in all-reduce .*, found 1"),
    "slot": (of_fragments(40), U64, 2**31 - 1, "a slot below [0-9]+, found 2147483647"),
}


@pytest.mark.parametrize("word", WORDS)
def test_a_wrong_word_names_who_wrote_it(word: str) -> None:
    offsets, kind, value, words = WORDS[word]
    # Rank 0 asks why a rank is silent only where it is.
    speak = () if word == "verdict" else (1, 2)
    with mapped(3) as (groups, starts):
        tensors = [torch.ones(5000) for _ in groups]
        begun = {rank: groups[rank].all_reduce(jobs.elements(tensors[rank])) for rank in speak}
        for offset in offsets:
            poke(starts, offset, value, kind)
        with pytest.raises(PeerError, match=f"rank 0: rank [12] is faulty: expected {words}"):
            groups[0].all_reduce(jobs.elements(tensors[0])).wait()
        for rank in (1, 2):  # everybody hears of it
            with pytest.raises(PeerError, match=r"rank 0 has given up|is faulty"):
                (begun.get(rank) or groups[rank].all_reduce(jobs.elements(tensors[rank]))).wait()


def test_a_wrong_count_of_what_was_taken() -> None:
    words = "rank 1 is faulty: expected 0 to 16 fragments taken, found"
    with mapped(2) as (groups, starts):
        # By rank 1, of rank 0's fragments.
        poke(starts, 3 * TO_FIRST + 64, 2**64 - 1, U64)
        with pytest.raises(PeerError, match=words):
            groups[0].all_reduce(jobs.elements(torch.ones(1_000_000))).wait()


@pytest.mark.parametrize(
    ("said", "files"), [(b"no", 0), (b"x" * 5000, 1), (b"goodby", 2)], ids=["short", "long", "cut"]
)
def test_a_wrong_farewell(monkeypatch: pytest.MonkeyPatch, said: bytes, files: int) -> None:
    """Nor does the other keep the files that come with it."""
    words = "rank 0: rank 1 is faulty: expected a notice that it leaves, found b'"
    with joined() as groups:
        opened = len(list(Path("/proc/self/fd").iterdir()))
        with monkeypatch.context() as patched:
            wrong = partial(socket.send_fds, buffers=[said], fds=[0] * files)
            patched.setattr(group_module, "announce_shutdown", wrong)
            groups[1].close()
        with pytest.raises(PeerError, match=words):
            groups[0].all_reduce(jobs.elements(torch.ones(10))).wait()
        assert len(list(Path("/proc/self/fd").iterdir())) == opened - 3


def test_memory_that_may_become_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """An access to what is gone would end the process."""

    def unsealed(size_bytes: int) -> int:
        file = os.memfd_create("any", os.MFD_ALLOW_SEALING)
        os.ftruncate(file, size_bytes)
        return file

    monkeypatch.setattr(group_module, "_sealed_memory", unsealed)
    words = "rank 0 is faulty: expected [0-9]+ bytes .*, found [0-9]+ bytes that may become fewer"
    with pytest.raises(PeerError, match=words):
        Group(dist.HashStore(), 0, 1)


@pytest.mark.parametrize("damage", ["no base64 at all!", "bytes", "cut"])
def test_a_wrong_address_in_the_store(damage: str) -> None:
    whole = packed(b"an address")
    note = {"bytes": whole[:-2] + "AA", "cut": whole[:8]}.get(damage, damage)
    joining = join_with(FAR, noting("ucx/1", note), transport="shared+ucx")
    with pytest.raises(PeerError, match="rank 0: a note of rank 1 in the store cannot be read"):
        joining.result()
