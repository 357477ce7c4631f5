"""Buffers that all ranks of a host have mapped, so that fragments are read in place."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from syncline import _native
from syncline.comm.groups.elements import SIZES_BYTES, Elements, dtype_code
from syncline.comm.groups.meeting import Introduced
from syncline.errors import MismatchError, PeerError, UserError

NOTICE = struct.Struct("<QQ")
"""The number of a buffer and its size in bytes; size 0: its owner has closed it."""
OWN = -1  # the native group's number for this rank


class SharedBuffer:
    """Memory of this rank that the other ranks of its host read without a copy.

    Every rank of the group has one of the same size, with contents of its own. It is filled through
    :attr:`memory` or :attr:`address`, and given to collectives as :meth:`elements`. Close it once
    the collectives that use it are done.
    """

    def __init__(self, memory: _native.SharedMemory, forget: Callable[[], None]) -> None:
        self.address = memory.address
        self.size_bytes = memory.bytes
        self._forget = forget
        self._closed = False
        # A new class, so that views keep the memory mapped.
        kind: Any = type("SharedBytes", (ctypes.c_char * memory.bytes,), {"mapped": memory})
        self._bytes = kind.from_address(memory.address)

    @property
    def memory(self) -> memoryview:
        """Its bytes. Views of them stay valid when it is closed, but are no longer shared."""
        return memoryview(self._bytes).cast("B")

    def elements(self, dtype: str, count: int | None = None, *, start: int = 0) -> Elements:
        """Return ``count`` elements, or all, from ``start`` on; raise UserError beyond them."""
        dtype_code(dtype)
        element_bytes = SIZES_BYTES[dtype]
        room = self.size_bytes // element_bytes
        count = room - start if count is None else count
        if not (start >= 0 and count >= 0 and start + count <= room):
            raise UserError(
                f"elements {start} to {start + count} of {dtype} are not in a buffer of {room}"
            )
        return Elements(self.address + start * element_bytes, count, dtype, self._bytes)

    def close(self) -> None:
        """Stop sharing it, here and on the peers; closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedBuffers:
    """Makes the buffers of a group, and maps those of its peers, the other ranks of the host."""

    def __init__(self, rank: int, peers: Sequence[Introduced], native: _native.NativeGroup) -> None:
        self._rank = rank
        self._peers = peers
        self._native = native
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, int], int] = {}
        """Sizes of peers' buffers that have arrived, not awaited yet, by rank and number."""
        self._lost: dict[int, str] = {}

    def allocate(
        self, size_bytes: int, timeout_s: float, close: Callable[[Callable[[], None]], None]
    ) -> SharedBuffer:
        """Return this rank's buffer, once those of all peers are mapped; see ``Group.allocate``.

        ``close`` gets a function to call once the collectives begun before are done.
        """
        if size_bytes < 1:
            raise UserError(f"a shared buffer has at least 1 byte, found {size_bytes}")
        deadline_s = time.monotonic() + timeout_s
        number = next(self._numbers)
        descriptor = _new_memory(size_bytes, self._rank)
        try:
            memory = _mapped(descriptor, size_bytes, self._rank)
            for peer in self._peers:
                with contextlib.suppress(OSError):  # it has ended, which the watch reports
                    message = NOTICE.pack(number, size_bytes)
                    socket.send_fds(peer.connection, [message], [descriptor])
        finally:
            os.close(descriptor)
        self._native.add_arena(OWN, number, memory)
        buffer = SharedBuffer(memory, lambda: close(lambda: self._forget(number)))
        try:
            for peer in self._peers:
                self._await(peer.rank, number, size_bytes, deadline_s)
        except BaseException:
            buffer.close()
            raise
        return buffer

    def _await(self, peer: int, number: int, size_bytes: int, deadline_s: float) -> None:
        with self._changed:
            there = self._changed.wait_for(
                lambda: (peer, number) in self._arrived or peer in self._lost,
                max(deadline_s - time.monotonic(), 0),
            )
            found = self._arrived.pop((peer, number), None)
            said = self._lost.get(peer)
        where = f"rank {self._rank}, shared buffer {number} of {size_bytes} bytes"
        if found is None:
            silent = f"rank {peer} did not allocate its own" + ("" if there else " in time")
            raise PeerError(f"{where}: {said or silent}; see that rank's output")
        if found != size_bytes:
            raise MismatchError(
                f"{where}: rank {peer} allocates {found} bytes; all ranks must allocate the same"
            )

    def take(self, peer: int, notice: bytes, descriptors: Sequence[int]) -> None:
        """Map a buffer that a peer has made, or forget one that it has closed."""
        try:
            number, size_bytes = NOTICE.unpack(notice)
            if size_bytes == 0:
                self._native.forget_arena(peer, number)
                return
            memory = _mapped(descriptors[0], size_bytes, self._rank)
            self._native.add_arena(peer, number, memory)
        except (struct.error, ValueError, TypeError, IndexError) as error:
            found = f"{notice[: NOTICE.size]!r} with {len(descriptors)} files: {error}"
            self.lose(peer, f"rank {peer} is faulty: expected a notice of a buffer, found {found}")
            return
        except UserError as error:
            self.lose(peer, f"the buffer of rank {peer} is out of reach: {error}")
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        with self._changed:
            self._arrived[peer, number] = size_bytes
            self._changed.notify_all()

    def lose(self, peer: int, what: str) -> None:
        """Note that a peer has ended or left, here and in the native group."""
        with self._changed:
            self._lost[peer] = what
            self._changed.notify_all()
        self._native.lose(peer, what)

    def abandon(self) -> None:
        """End all waiting: this rank has left the group, and no peer is heard any more."""
        with self._changed:
            for peer in self._peers:
                self._lost.setdefault(peer.rank, f"rank {self._rank} itself has left the group")
            self._changed.notify_all()

    def _forget(self, number: int) -> None:
        """Stop sharing a buffer. Peers have read everything that this rank sent from it."""
        self._native.forget_arena(OWN, number)
        for peer in self._peers:
            with contextlib.suppress(OSError):  # it has ended, or this group is closed
                peer.connection.send(NOTICE.pack(number, 0))


def sealed_memory(size_bytes: int, extend: Callable[[int, int], None]) -> int:
    """Return a descriptor of unnamed memory, which can neither shrink nor outlive its processes."""
    descriptor = os.memfd_create("syncline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        extend(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _new_memory(size_bytes: int, rank: int) -> int:
    """Return a descriptor of memory that is allocated, not only mapped."""
    where = f"rank {rank}: no memory for a shared buffer of {size_bytes} bytes"
    do = "free some, raise the container's limit, or allocate less"
    available = available_bytes()
    if size_bytes > available:  # the kernel would overcommit, and kill processes
        raise UserError(f"{where}: {available} are free; {do}")
    try:
        # Allocated, because missing memory would be a fatal signal at the first access.
        return sealed_memory(size_bytes, lambda fd, size: os.posix_fallocate(fd, 0, size))
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}; {do}") from error


def _mapped(descriptor: int, size_bytes: int, rank: int) -> _native.SharedMemory:
    try:
        return _native.SharedMemory(descriptor, size_bytes)
    except OSError as error:
        raise UserError(
            f"rank {rank}: {size_bytes} bytes of a shared buffer cannot be mapped: "
            f"{error.strerror}; see the limits of this process (ulimit -v), or allocate less"
        ) from error


def available_bytes() -> int:
    """Return how much memory this machine has left."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
