"""What the hosts of the ranks tell each other, so that no stream waits for what is not recorded."""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from typing import Literal, TypeVar, get_args

import msgspec

from syncline.errors import InternalError, PeerError
from syncline.groups import Elements, Group

__all__ = ["GroupControl", "News", "decoded"]

T = TypeVar("T")

News = Literal["ready", "taken"]
"""Of a slot: the event after which it is filled, or after which it was read, is recorded."""
KINDS = get_args(News)
NOTE = struct.Struct("<qq")
"""The kind's number, and how many of that kind this rank has sent to the peer before."""
SIZE = struct.Struct("<q")


class GroupControl:
    """Messages between the hosts of the ranks, over a native group on which nothing else may run.

    None of them waits for a device. A message takes part in the group's order: before the next
    :meth:`gather`, every message must have been heard.

    Raises:
        PeerError: by every call that waits: a rank has ended, or did not answer in time.
    """

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.ranks = group.ranks
        self.timeout_s = group.timeout_s
        self._group = group
        self._sent: Counter[tuple[int, News]] = Counter()
        self._heard: Counter[tuple[int, News]] = Counter()

    def gather(self, note: bytes) -> list[bytes]:
        """Return every rank's note, in order of rank; all ranks must call it.

        Notes may differ in length.
        """
        sizes = [SIZE.unpack(size)[0] for size in self._gather_equal(SIZE.pack(len(note)))]
        padded = self._gather_equal(note.ljust(max(sizes), b"\0"))
        return [text[:size] for text, size in zip(padded, sizes, strict=True)]

    def tell(self, peer: int, news: News) -> None:
        """Tell a rank that one more slot has come so far; this does not wait until it is heard."""
        note = NOTE.pack(KINDS.index(news), self._sent[peer, news])
        self._sent[peer, news] += 1
        self._group.send(_elements(ctypes.create_string_buffer(note, NOTE.size)), peer=peer)

    def hear(self, peer: int, news: News, number: int) -> None:
        """Return once a rank has sent the news more than ``number`` times.

        Messages of the other kind that come before are kept.
        """
        while self._heard[peer, news] <= number:
            note = ctypes.create_string_buffer(NOTE.size)
            self._group.receive(_elements(note), peer=peer).wait()
            kind, count = NOTE.unpack(note.raw)
            heard: News = KINDS[kind]
            if count != self._heard[peer, heard]:
                raise InternalError(
                    f"rank {self.rank}: rank {peer} tells {heard!r} number {count}, expected "
                    f"{self._heard[peer, heard]}"
                )
            self._heard[peer, heard] += 1

    def close(self) -> None:
        """Leave: others that wait for this rank hear of it."""
        self._group.close()

    def _gather_equal(self, note: bytes) -> list[bytes]:
        given = ctypes.create_string_buffer(note, len(note))
        result = ctypes.create_string_buffer(len(note) * self.ranks)
        self._group.all_gather(_elements(given), _elements(result), attended=True).wait()
        size = len(note)
        return [result.raw[rank * size : (rank + 1) * size] for rank in range(self.ranks)]


def _elements(memory: ctypes.Array[ctypes.c_char]) -> Elements:
    return Elements(ctypes.addressof(memory), len(memory), "uint8", memory)


def decoded(text: bytes, form: type[T]) -> T:
    """Return what another rank has sent, as JSON of plain fields.

    Raises:
        PeerError: it is not of that form.
    """
    try:
        return msgspec.json.decode(text, type=form)
    except msgspec.DecodeError as error:
        raise PeerError(
            f"a neighbouring rank sent what cannot be read as {form.__name__}: {error}; run one "
            "release of syncline and torch on all ranks"
        ) from error
