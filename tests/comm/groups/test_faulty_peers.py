"""Peers that write or send what no rank does: the others name them, before their deadline."""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline import _native
from syncline.comm.groups import Group
from syncline.comm.groups.shared_buffers import NOTICE
from syncline.comm.groups.ucx import packed
from syncline.errors import PeerError
from tests.comm.groups import jobs
from tests.comm.groups.one_process import FAR, join_with, joined, noting

SEGMENT = re.compile(r"(\w+)-\w+ rw-s \S+ \S+ (\d+) +/memfd:syncline")
TO_FIRST = 4096
"""Where what a rank says to rank 0 begins, in its segment."""
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
    "buffer": (of_fragments(40), U32, 7, "a place in a buffer .* found byte .* number 7"),
    "slot": (of_fragments(44), U32, 2**31 - 1, "a slot below [0-9]+, found 2147483647"),
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
    ("notice", "files"),
    [
        (b"no", 0),
        (b"x" * 900, 1),
        (NOTICE.pack(1, 4096), 0),
        (NOTICE.pack(1, 2**40), 1),
        (NOTICE.pack(2**40, 0), 0),
    ],
    ids=["short", "long", "no file", "too large", "number"],
)
def test_a_wrong_notice(monkeypatch: pytest.MonkeyPatch, notice: bytes, files: int) -> None:
    send_fds = socket.send_fds

    def wrong(connection: socket.socket, _: list[bytes], descriptors: list[int]) -> int:
        return send_fds(connection, [notice], descriptors * files)

    words = "rank 0: rank 1 is faulty: expected a notice of a buffer"
    with ThreadPoolExecutor(1) as pool, joined() as groups:
        monkeypatch.setattr(socket, "send_fds", wrong)
        pool.submit(groups[1].allocate, 4000)
        with pytest.raises(PeerError, match=words):
            groups[0].all_reduce(jobs.elements(torch.ones(10))).wait()


def test_memory_that_may_become_less() -> None:
    """An access to what is gone would end the process."""
    file = os.memfd_create("any", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 8192)
    with pytest.raises(ValueError, match="8192 bytes that may become fewer"):
        _native.SharedMemory(file, 8192)
    os.close(file)


@pytest.mark.parametrize("damage", ["no base64 at all!", "bytes", "cut"])
def test_a_wrong_address_in_the_store(damage: str) -> None:
    whole = packed(b"an address")
    note = {"bytes": whole[:-2] + "AA", "cut": whole[:8]}.get(damage, damage)
    joining = join_with(FAR, noting("ucx/1", note), transport="shared+ucx")
    with pytest.raises(PeerError, match="rank 0: a note of rank 1 in the store cannot be read"):
        joining.result()
