"""UCX, the transport over RDMA."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from syncline import _native
from syncline.comm.groups.notes import Notes, unreadable
from syncline.errors import UserError

NAME = "libucp.so.0"
DIGEST_BYTES = hashlib.sha256().digest_size
TRANSPORTS = "UCX_TLS"
WITHOUT_SHARED_MEMORY = ("TLS", "^sm")


def new_worker(rank: int) -> _native.UcxWorker:
    """Return a worker of UCX for this rank; raise :class:`UserError` if UCX cannot be used.

    UCX's shared memory is off, since we have our own; ``UCX_TLS`` in the environment overrides it.
    """
    settings = [] if TRANSPORTS in os.environ else [WITHOUT_SHARED_MEMORY]
    try:
        return _native.UcxWorker(_library(), settings)
    except _native.Forked as error:
        raise UserError(
            f"rank {rank}: {error}, and UCX does not work in forks; start processes by the method "
            "'spawn' instead"
        ) from None
    except RuntimeError as error:
        raise UserError(
            f"rank {rank}: {error}; this transport needs UCX: pip install "
            "'syncline[ucx]', or the system's libucx"
        ) from error


def addresses(
    worker: _native.UcxWorker, notes: Notes, others: Sequence[int]
) -> list[tuple[int, bytes]]:
    """Publish this worker's address; return those of other ranks. Raises as ``Notes.read``."""
    notes.leave(f"ucx/{notes.rank}", packed(worker.address))
    return [(other, _unpacked(notes.read(f"ucx/{other}", other), notes, other)) for other in others]


def packed(address: bytes) -> str:
    """Return an address as a note, with a checksum: UCX does not check what it is given."""
    return base64.b64encode(hashlib.sha256(address).digest() + address).decode()


def _unpacked(note: bytes, notes: Notes, other: int) -> bytes:
    try:
        content = base64.b64decode(note, validate=True)
    except ValueError as error:
        raise unreadable(notes.rank, other, error) from error
    digest, address = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if hashlib.sha256(address).digest() != digest:
        raise unreadable(notes.rank, other, "the checksum of its UCX address is wrong")
    return address


def _library() -> str:
    """Return the library of the wheel if that is installed, else the system's."""
    wheel = importlib.util.find_spec("libucx")
    folders = (wheel and wheel.submodule_search_locations) or []
    paths = (Path(folder) / "lib" / NAME for folder in folders)
    return next((str(path) for path in paths if path.exists()), NAME)
