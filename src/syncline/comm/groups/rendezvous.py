"""How ranks find each other, prove that they share a host, and exchange memory.

A store may hold notes of processes that have ended: of a job before a restart, or of an earlier
group of the same name. So rank 0 draws a new identifier for each rendezvous and leaves it in the
store; every other rank answers under that identifier with a nonce; and rank 0 writes the list of
members from the answers. A rank accepts only a list with its own nonce, and polls for a newer
invitation until then.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.comm.groups.meeting import Connected, Introduced, Introduction, listening_at, listens
from syncline.comm.groups.messages import out_of_descriptors, require_descriptors
from syncline.comm.groups.notes import CHECK_S, Notes, Store, arrived, decoded, encoded
from syncline.comm.groups.site import APART, Route, Site, machine_identity
from syncline.comm.groups.tcp import connect
from syncline.errors import PeerError, UserError
from syncline.plan.document import Value

REFUSAL_S = 5.0  # how long a rank that cannot join waits for the others, so that they learn why
POLL_S = 0.01
"""The first interval between polls for a newer invitation; it doubles up to ``CHECK_S``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCard:
    """What a rank publishes about itself."""

    host: tuple[str, str]
    """Boot and network namespace: ranks that have both in common can share memory."""
    name: str  # the name of its host, for errors
    machine: str  # its host's identity in measured choices; see :func:`machine_identity`
    socket: str
    nonce: str  # unique: it tells this process from earlier ones with this rank

    @classmethod
    def own(cls) -> RankCard:
        """Return that of this process, with a new socket address."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            host=(boot, str(Path("/proc/self/ns/net").readlink())),
            name=socket.gethostname(),
            machine=machine_identity(),
            socket=f"\0syncline-{secrets.token_hex(16)}",
            nonce=secrets.token_hex(16),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The processes of a group, on which all of them agree."""

    cards: tuple[RankCard, ...]
    prefix: str  # prefix of further notes in the store; no other rendezvous has it
    secret: bytes  # known to every process that has read the list


class _Invitation(Value, frozen=True, kw_only=True):
    """Rank 0's note: answer under this identifier."""

    identifier: str
    ranks: int
    card: RankCard | None


class _Answer(Value, frozen=True, kw_only=True):
    """A rank's note."""

    nonce: str
    card: RankCard | None
    error: str | None  # why it does not join; None if it does


class _Result(Value, frozen=True, kw_only=True):
    """Rank 0's note: the answers so far, all of them unless there is an error."""

    answers: dict[int, _Answer]
    error: str | None  # why there is no group


@dataclass(frozen=True, slots=True, eq=False)
class Rendezvous:
    """Finds the processes of a group, through a store that all its ranks share."""

    _store: Store
    _name: str
    _rank: int
    _ranks: int

    def join(self, card: RankCard, deadline: float) -> Members:
        """Return the members once all ranks have answered; raise PeerError if one does not join.

        This process's socket must listen already.
        """
        return self._agreed(_Answer(nonce=card.nonce, card=card, error=None), deadline)

    def refuse(self, error: Exception, deadline: float) -> None:
        """Let the other ranks know why this one does not join, if they come soon."""
        answer = _Answer(nonce=secrets.token_hex(16), card=None, error=str(error))
        with contextlib.suppress(RuntimeError):  # no rank came, or all know it
            self._agreed(answer, min(deadline, time.monotonic() + REFUSAL_S))

    def _agreed(self, own: _Answer, deadline: float) -> Members:
        return self._gathered(own, deadline) if self._rank == 0 else self._answered(own, deadline)

    def _gathered(self, own: _Answer, deadline: float) -> Members:
        identifier = secrets.token_hex(16)
        prefix = f"{self._name}/{identifier}"
        invitation = _Invitation(identifier=identifier, ranks=self._ranks, card=own.card)
        self._store.set(f"{self._name}/call", encoded(invitation))
        answers = {0: own}
        error = own.error and f"rank 0 does not join the group: {own.error}"
        while missing := [rank for rank in range(self._ranks) if rank not in answers]:
            come = self._new_answers(prefix, missing, deadline)
            answers.update(come)
            for rank, answer in come.items():
                if error is None and answer.error is not None:
                    error = f"rank {rank} does not join the group: {answer.error}"
                    deadline = min(deadline, time.monotonic() + REFUSAL_S)
            late = [rank for rank in missing if rank not in come]
            if late and time.monotonic() >= deadline:
                error = error or _did_not_join(late)
                break
            if error is not None and come:  # each rank reads it as soon as it comes
                self._store.set(f"{prefix}/members", encoded(_Result(answers=answers, error=error)))
        text = encoded(_Result(answers=answers, error=error))
        self._store.set(f"{prefix}/members", text)
        return self._members_of(prefix, text.encode())

    def _new_answers(
        self, prefix: str, missing: Sequence[int], deadline: float
    ) -> dict[int, _Answer]:
        """Wait briefly for answers; return those that have come."""
        keys = {rank: f"{prefix}/answer/{rank}" for rank in missing}
        everybody = arrived(self._store, list(keys.values()), deadline, 0)
        return {
            rank: decoded(self._store.get(key), _Answer, self._rank, rank)
            for rank, key in keys.items()
            if everybody or self._store.check([key])
        }

    def _answered(self, own: _Answer, deadline: float) -> Members:
        """Answer rank 0's invitation, and every newer one, until a list has this answer."""
        answered: _Invitation | None = None
        why = _did_not_join([0])
        listening = False  # whether rank 0 listened at the last poll
        pause_s = POLL_S
        while True:
            invitation = self._invitation(deadline)
            if invitation is not None and invitation != answered:
                answered, listening, pause_s = invitation, False, POLL_S
                prefix = f"{self._name}/{invitation.identifier}"
                self._store.set(f"{prefix}/answer/{self._rank}", encoded(own))
            listed = False
            if answered is not None:
                listed = arrived(self._store, [f"{prefix}/members"], deadline, self._rank)
                if listed:
                    text = self._store.get(f"{prefix}/members")
                    answer = decoded(text, _Result, self._rank, 0).answers.get(self._rank)
                    if answer is not None and answer.nonce == own.nonce:
                        return self._members_of(prefix, text)
                    # Rank 0 has yet to read this answer, or to invite the ranks of a new group.
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, CHECK_S)
                else:
                    listening = self._listens(answered, own, prefix, listening)
            if time.monotonic() >= deadline:
                if answered is not None:
                    if not listed and self._store.check([f"{prefix}/members"]):
                        continue  # the list has come since, and may say why there is no group
                    why = self._what_is_missing(answered, prefix)
                raise PeerError(f"rank {self._rank}: {why}")

    def _invitation(self, deadline: float) -> _Invitation | None:
        """Return rank 0's last invitation, if it is for a group of as many ranks."""
        key = f"{self._name}/call"
        if not arrived(self._store, [key], deadline, self._rank):
            return None
        invitation = decoded(self._store.get(key), _Invitation, self._rank, 0)
        if invitation.ranks == self._ranks:
            return invitation
        time.sleep(POLL_S)  # before a restart there were more ranks, or fewer
        return None

    def _listens(self, invitation: _Invitation, own: _Answer, prefix: str, before: bool) -> bool:
        """Return whether the process that has invited listens; raise PeerError if only ``before``.

        If it never did, the invitation is an old one.
        """
        card = invitation.card
        if card is None or own.card is None or card.host != own.card.host:
            return False
        now = listens(card.socket)
        if before and not now and not self._store.check([f"{prefix}/members"]):
            raise PeerError(f"rank {self._rank}: rank 0 has ended while it joined the group")
        return now

    def _what_is_missing(self, invitation: _Invitation, prefix: str) -> str:
        if self._store.check([f"{prefix}/members"]):
            return (
                "rank 0 has formed the group without this process, and sent no newer invitation in "
                "time: does another process have this rank, or another job use the same store and "
                "group name?"
            )
        answers = {rank: f"{prefix}/answer/{rank}" for rank in range(1, invitation.ranks)}
        late = [rank for rank, key in answers.items() if not self._store.check([key])]
        return _did_not_join(late or [0])

    def _members_of(self, prefix: str, text: bytes) -> Members:
        result = decoded(text, _Result, self._rank, 0)
        if result.error is not None:
            raise PeerError(f"rank {self._rank}: {result.error}")
        answers = [result.answers.get(rank) for rank in range(self._ranks)]
        cards = tuple(answer.card for answer in answers if answer and answer.card)
        if len(cards) < self._ranks or len(result.answers) > self._ranks:
            raise PeerError(
                f"rank {self._rank}: rank 0 is faulty: expected a list of the ranks 0 to "
                f"{self._ranks - 1}, found one of {sorted(result.answers)}"
            )
        return Members(cards=cards, prefix=prefix, secret=hashlib.sha256(text).digest())


def _did_not_join(ranks: Sequence[int]) -> str:
    said = ", ".join(map(str, ranks))
    return (
        f"rank {said} did not join the group in time; has it started, with the same number of "
        "ranks?"
    )


MEETING_DESCRIPTORS = 2  # the listening socket, and a store in a file while it is read


class Reception(contextlib.AbstractContextManager["Reception"]):
    """Where ranks of one host meet this one and exchange memory.

    A Unix socket is reached only from its host, and the kernel attests the process and user of a
    rank. The deadline is on the monotonic clock. Raise PeerError if a rank does not join, and
    UserError if processes may not meet here, or can open too few files.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: int, deadline: float) -> None:
        rendezvous = Rendezvous(store, name, rank, ranks)
        try:
            require_descriptors(MEETING_DESCRIPTORS, rank)
        except UserError as error:
            rendezvous.refuse(error, deadline)
            raise
        try:
            card = RankCard.own()
            self._listening = listening_at(card.socket)
        except OSError as error:
            refused = out_of_descriptors(rank, error) or UserError(
                f"rank {rank}: processes of this host are not allowed to meet (Unix sockets, "
                f"/proc): {error}"
            )
            rendezvous.refuse(refused, deadline)
            raise refused from error
        try:
            self._members = rendezvous.join(card, deadline)
        except BaseException:
            self._listening.close()
            raise
        self.cards = self._members.cards
        self.notes = Notes(store, self._members.prefix, rank, deadline)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.notes.refuse(error)
        self._listening.close()

    @property
    def neighbours(self) -> list[int]:
        """The ranks of this host, this one included."""
        own = self.cards[self.notes.rank].host
        return [rank for rank, card in enumerate(self.cards) if card.host == own]

    def site(self, route: Route) -> Site:
        """Return where the ranks are; without shared memory each counts as a host of its own."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank, card in enumerate(self.cards):
            found.setdefault(card.host, []).append(rank)
        hosts = tuple(map(tuple, found.values()))
        cards = [self.cards[host[0]] for host in hosts]
        return Site(
            route=route,
            layout=tuple((rank,) for rank in range(len(self.cards))) if route in APART else hosts,
            machines=tuple(sorted(card.machine for card in cards)),
            names=tuple(sorted(card.name for card in cards)),
        )

    def meet(self, others: Sequence[int], passed: Sequence[int]) -> list[Introduced]:
        """Meet other ranks of this host; see :class:`Meeting`."""
        sockets = [card.socket for card in self.cards]
        secret = self._members.secret
        return Introduction(self.notes, sockets, secret, self._listening, passed).meet(others)

    def connect(self, others: Sequence[int], interface: str | None) -> list[Connected]:
        """Connect to ranks of other hosts over TCP; see :func:`.tcp.connect`."""
        names = [card.name for card in self.cards]
        secret = hashlib.sha256(b"tcp" + self._members.secret).digest()
        boot = self.cards[self.notes.rank].host[0]
        return connect(self.notes, names, secret, boot, others, interface)
