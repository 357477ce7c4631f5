"""Messages between the hosts of ranks, over a native group on which nothing else may run.

Before the next :func:`gather`, every message must have been received. Calls raise PeerError if a
rank has ended, or did not answer in time.
"""

from __future__ import annotations

import ctypes
from typing import TypeVar

import msgspec

from syncline.comm.groups import Elements, Group
from syncline.errors import PeerError

T = TypeVar("T")


def gather(group: Group, note: bytes) -> list[bytes]:
    """Return every rank's note, of any length, in order of rank; all ranks must call it."""
    lengths = _gather_equal(group, len(note).to_bytes(8, "little"))
    sizes = [int.from_bytes(length, "little") for length in lengths]
    padded = _gather_equal(group, note.ljust(max(sizes), b"\0"))
    return [text[:size] for text, size in zip(padded, sizes, strict=True)]


def _gather_equal(group: Group, note: bytes) -> list[bytes]:
    given = ctypes.create_string_buffer(note, len(note))
    result = ctypes.create_string_buffer(len(note) * group.ranks)
    group.all_gather(_elements(given), _elements(result), blocking=True).wait()
    size = len(note)
    return [result.raw[rank * size : (rank + 1) * size] for rank in range(group.ranks)]


def notify(group: Group, peer: int, tag: int) -> None:
    """Send a message without content, and do not wait until it is received."""
    group.send(_elements(ctypes.create_string_buffer(1)), peer=peer, tag=tag)


def await_notice(group: Group, peer: int, tag: int) -> None:
    """Receive the next message of :func:`notify`."""
    group.receive(_elements(ctypes.create_string_buffer(1)), peer=peer, tag=tag).wait()


def _elements(memory: ctypes.Array[ctypes.c_char]) -> Elements:
    return Elements(ctypes.addressof(memory), len(memory), "uint8", memory)


def decoded(text: bytes, form: type[T]) -> T:
    """Return what another rank has sent as JSON; raise PeerError if it is no ``form``."""
    try:
        return msgspec.json.decode(text, type=form)
    except msgspec.DecodeError as error:
        raise PeerError(
            f"a neighbouring rank sent no valid {form.__name__}: {error}; run one release of "
            "syncline and torch on all ranks"
        ) from error
