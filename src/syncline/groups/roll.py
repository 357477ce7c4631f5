"""Which processes are the ranks of a group: rank 0 calls the roll.

A store may hold notes of processes that have ended: of a job before a restart, or of an earlier
group of the same name. So rank 0 draws a new identifier for each roll call and leaves it in the
store; every other rank answers under that identifier with a nonce; and rank 0 writes down who has
answered. A rank believes only a roll that has its own nonce, and until then looks for a newer call.
So all ranks that believe a roll have read the same one, and all of them have answered it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from syncline.errors import PeerError
from syncline.groups.meeting import listens
from syncline.groups.notes import LOOK_S, Store, arrived
from syncline.groups.site import machine_identity
from syncline.model.document import Value

__all__ = ["Card", "Roll", "RollCall"]

Note = TypeVar("Note", bound=Value)
FAREWELL_S = 5.0
"""How long a rank that cannot join waits for the others, to tell them why."""
POLL_S = 0.01
"""How soon a rank looks again for a newer call; twice as late each time, up to ``LOOK_S``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a rank says of itself."""

    host: tuple[str, str]
    """Boot and network namespace: ranks for which both are the same can share memory."""
    name: str
    """Of its host, for errors."""
    machine: str
    """What its host is called in measured choices; see :func:`machine_identity`."""
    socket: str
    nonce: str
    """Nobody else has it: it tells this process from others that were this rank."""

    @classmethod
    def own(cls) -> Card:
        """Return that of this process, with a socket that nobody has yet."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            host=(boot, str(Path("/proc/self/ns/net").readlink())),
            name=socket.gethostname(),
            machine=machine_identity(),
            socket=f"\0syncline-{secrets.token_hex(16)}",
            nonce=secrets.token_hex(16),
        )

    def to_json(self) -> str:
        """Return it as others read it."""
        return json.dumps([self.host, self.name, self.machine, self.socket, self.nonce])

    @classmethod
    def from_json(cls, text: str | bytes) -> Card:
        """Return what another rank has left."""
        host, name, machine, address, nonce = json.loads(text)
        return cls(host=tuple(host), name=name, machine=machine, socket=address, nonce=nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """The processes of a group, which all of them agree on."""

    cards: tuple[Card, ...]
    """Of each rank."""
    prefix: str
    """Of further notes in the store, which no other roll call has."""
    secret: bytes
    """Known to whoever has read the roll."""


class _Call(Value, frozen=True, kw_only=True):
    """Rank 0's note: answer under this identifier."""

    identifier: str
    ranks: int
    card: str | None


class _Answer(Value, frozen=True, kw_only=True):
    """A rank's note."""

    nonce: str
    card: str | None
    error: str | None
    """Why it does not join."""


class _Result(Value, frozen=True, kw_only=True):
    """Rank 0's note: who has answered so far, all of them unless there is an error."""

    answers: dict[int, _Answer]
    error: str | None
    """Why there is no group."""


class RollCall:
    """Finds the processes of a group.

    Args:
        store: where all ranks of the group look.
        name: of the group.
        rank: this rank.
        ranks: how many there are.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._ranks = ranks

    def join(self, card: Card, deadline: float) -> Roll:
        """Return the roll with this process on it, once all ranks have answered.

        Args:
            card: of this process, whose socket is listening.
            deadline: when to give up, on the monotonic clock, in seconds.

        Raises:
            PeerError: a rank does not answer in time, or says that it does not join.
        """
        answer = _Answer(nonce=card.nonce, card=card.to_json(), error=None)
        return self._gathered(answer, deadline) if self._rank == 0 else self._told(answer, deadline)

    def refuse(self, error: Exception, deadline: float) -> None:
        """Tell the other ranks why this one does not join, if they come soon."""
        answer = _Answer(nonce=secrets.token_hex(16), card=None, error=str(error))
        deadline = min(deadline, time.monotonic() + FAREWELL_S)
        try:
            self._gathered(answer, deadline) if self._rank == 0 else self._told(answer, deadline)
        except RuntimeError:
            return  # nobody came, or all have heard

    # ------------------------------------------------------------------ rank 0

    def _gathered(self, own: _Answer, deadline: float) -> Roll:
        """Call the roll."""
        identifier = secrets.token_hex(16)
        prefix = f"{self._name}/{identifier}"
        call = _Call(identifier=identifier, ranks=self._ranks, card=own.card)
        self._store.set(f"{self._name}/call", _text(call))
        answers = {0: own}
        error = own.error and f"rank 0 does not join the group: {own.error}"
        while missing := [rank for rank in range(self._ranks) if rank not in answers]:
            come = self._new_answers(prefix, missing, deadline)
            answers.update(come)
            for rank, answer in come.items():
                if error is None and answer.error is not None:
                    error = f"rank {rank} does not join the group: {answer.error}"
                    deadline = min(deadline, time.monotonic() + FAREWELL_S)
            late = [rank for rank in missing if rank not in come]
            over = bool(late) and time.monotonic() >= deadline
            if over and error is None:
                error = _did_not_join(late)
            if over:
                break
            if error is not None and come:  # each rank hears it as soon as it comes
                self._store.set(f"{prefix}/roll", _text(_Result(answers=answers, error=error)))
        text = _text(_Result(answers=answers, error=error))
        self._store.set(f"{prefix}/roll", text)
        return self._roll(prefix, text)

    def _new_answers(
        self, prefix: str, missing: Sequence[int], deadline: float
    ) -> dict[int, _Answer]:
        """Wait a moment for answers; return those that have come."""
        keys = {rank: f"{prefix}/answer/{rank}" for rank in missing}
        everybody = arrived(self._store, list(keys.values()), deadline, 0)
        return {
            rank: self._read(key, _Answer, rank)
            for rank, key in keys.items()
            if everybody or self._store.check([key])
        }

    # ------------------------------------------------------------------ the others

    def _told(self, own: _Answer, deadline: float) -> Roll:
        """Answer rank 0's call, and every newer one, until there is a roll with this answer."""
        answered: _Call | None = None
        why = _did_not_join([0])
        listening = False  # rank 0 was, when it was last looked at
        pause_s = POLL_S
        while True:
            call = self._call(deadline)
            if call is not None and call != answered:
                answered, listening, pause_s = call, False, POLL_S
                prefix = f"{self._name}/{call.identifier}"
                self._store.set(f"{prefix}/answer/{self._rank}", _text(own))
            if answered is not None:
                if arrived(self._store, [f"{prefix}/roll"], deadline, self._rank):
                    text = self._store.get(f"{prefix}/roll").decode()
                    result = self._decoded(text, _Result, 0)
                    answer = result.answers.get(self._rank)
                    if answer is not None and answer.nonce == own.nonce:
                        return self._roll(prefix, text)
                    # Rank 0 has yet to read this answer, or to call the roll of a new group.
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, LOOK_S)
                else:
                    listening = self._listens(answered, own, prefix, listening)
            if time.monotonic() >= deadline:
                if answered is not None:
                    why = self._what_is_missing(answered, prefix)
                raise PeerError(f"rank {self._rank}: {why}")

    def _call(self, deadline: float) -> _Call | None:
        """Return rank 0's last call, if there is one for a group of so many ranks."""
        key = f"{self._name}/call"
        if not arrived(self._store, [key], deadline, self._rank):
            return None
        call = self._read(key, _Call, 0)
        if call.ranks == self._ranks:
            return call
        time.sleep(POLL_S)  # before a restart there were more ranks, or fewer
        return None

    def _listens(self, call: _Call, own: _Answer, prefix: str, before: bool) -> bool:
        """Return whether the process that has called still listens, where that can be seen.

        Raises:
            PeerError: it did, and does not any more. (If it never did, the call is an old one.)
        """
        if call.card is None or own.card is None:
            return False
        theirs, ours = Card.from_json(call.card), Card.from_json(own.card)
        if theirs.host != ours.host:
            return False
        now = listens(theirs.socket)
        if before and not now and not self._store.check([f"{prefix}/roll"]):
            raise PeerError(f"rank {self._rank}: rank 0 has ended while it joined the group")
        return now

    def _what_is_missing(self, call: _Call, prefix: str) -> str:
        if self._store.check([f"{prefix}/roll"]):
            return (
                "rank 0 has formed the group without this process, and called no newer roll in "
                "time: does another process have this rank, or another job use the same store and "
                "group name?"
            )
        late = [
            rank
            for rank in range(1, call.ranks)
            if not self._store.check([f"{prefix}/answer/{rank}"])
        ]
        return _did_not_join(late or [0])

    # ------------------------------------------------------------------ all

    def _roll(self, prefix: str, text: str) -> Roll:
        result = self._decoded(text, _Result, 0)
        if result.error is not None:
            raise PeerError(f"rank {self._rank}: {result.error}")
        cards = tuple(
            Card.from_json(answer.card)
            for _, answer in sorted(result.answers.items())
            if answer.card is not None
        )
        return Roll(cards=cards, prefix=prefix, secret=hashlib.sha256(text.encode()).digest())

    def _read(self, key: str, kind: type[Note], rank: int) -> Note:
        return self._decoded(self._store.get(key), kind, rank)

    def _decoded(self, text: str | bytes, kind: type[Note], rank: int) -> Note:
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise PeerError(
                f"rank {self._rank}: a note of rank {rank} in the store cannot be read ({error}); "
                "do all ranks have the same version of Syncline?"
            ) from error


def _text(note: Value) -> str:
    return msgspec.json.encode(note).decode()


def _did_not_join(ranks: Sequence[int]) -> str:
    said = ", ".join(map(str, ranks))
    return (
        f"rank {said} did not join the group in time; has it started, with the same number of "
        "ranks?"
    )
