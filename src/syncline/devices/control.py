"""What the hosts of the ranks tell each other, so that streams wait for recorded events only."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Literal, TypeVar

import msgspec

from syncline.errors import PeerError
from syncline.groups import Elements, Group

T = TypeVar("T")

News = Literal["ready", "taken"]
"""Of a slot: the event after which it is filled, or after which it was read, is recorded."""
TAGS: dict[News, int] = {"ready": 0, "taken": 1}


class GroupControl:
    """Messages between the hosts of the ranks, over a native group on which nothing else may run.

    None of them waits for a device. Before the next :meth:`gather`, every message must have been
    heard. Calls that wait raise PeerError if a rank has ended, or did not answer in time.
    """

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.ranks = group.ranks
        self.timeout_s = group.timeout_s
        self._group = group
        self._heard: Counter[tuple[int, News]] = Counter()

    def gather(self, note: bytes) -> list[bytes]:
        """Return every rank's note, of any length, in order of rank; all ranks must call it."""
        lengths = self._gather_equal(len(note).to_bytes(8, "little"))
        sizes = [int.from_bytes(length, "little") for length in lengths]
        padded = self._gather_equal(note.ljust(max(sizes), b"\0"))
        return [text[:size] for text, size in zip(padded, sizes, strict=True)]

    def tell(self, peer: int, news: News) -> None:
        """Tell a rank the news of its next slot, without waiting until it is heard."""
        self._group.send(_elements(ctypes.create_string_buffer(1)), peer=peer, tag=TAGS[news])

    def hear(self, peer: int, news: News, number: int) -> None:
        """Return once a rank has told the news more than ``number`` times."""
        while self._heard[peer, news] <= number:
            note = _elements(ctypes.create_string_buffer(1))
            self._group.receive(note, peer=peer, tag=TAGS[news]).wait()
            self._heard[peer, news] += 1

    def close(self) -> None:
        """Leave; ranks that wait for this one hear of it."""
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
