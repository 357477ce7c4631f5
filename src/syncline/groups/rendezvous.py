"""How ranks find each other, prove that they share a host, and exchange memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from syncline.errors import UserError
from syncline.groups.meeting import Introduced, Meeting, listening_at
from syncline.groups.messages import out_of_descriptors
from syncline.groups.notes import Store, leave_reason, require_joining
from syncline.groups.roll import Card, RollCall
from syncline.groups.site import Route, Site

__all__ = ["Reception"]


class Reception:
    """Where ranks of one host come to meet this one, and exchange memory.

    That a rank is on this host is not believed but seen: a connection through the kernel's own
    sockets, which do not leave a host, hands over its memory and attests its process and user.

    Args:
        store: where all ranks of the group look.
        name: of the group.
        rank: this rank.
        ranks: how many there are.
        deadline: when to give up, on the monotonic clock, in seconds.

    Raises:
        PeerError: on construction, if a rank does not join.
        UserError: on construction, if this host does not let processes meet.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: int, deadline: float) -> None:
        self._store = store
        self._rank = rank
        self._deadline = deadline
        call = RollCall(store, name, rank, ranks)
        try:
            card = Card.own()
            self._listening = listening_at(card.socket)
        except OSError as error:
            refused = out_of_descriptors(rank, error) or UserError(
                f"rank {rank}: processes of this host are not allowed to meet (Unix sockets, "
                f"/proc): {error}"
            )
            call.refuse(refused, deadline)
            raise refused from error
        try:
            self._roll = call.join(card, deadline)
        except BaseException:
            self._listening.close()
            raise

    def __enter__(self) -> Reception:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            leave_reason(self._store, self.prefix, self._rank, error)
        self._listening.close()

    @property
    def cards(self) -> tuple[Card, ...]:
        """What each rank says of itself."""
        return self._roll.cards

    @property
    def prefix(self) -> str:
        """Of this group's notes in the store, which no other group has."""
        return self._roll.prefix

    @property
    def neighbours(self) -> list[int]:
        """The ranks of this host, this one included."""
        own = self.cards[self._rank].host
        return [rank for rank, card in enumerate(self.cards) if card.host == own]

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank, card in enumerate(self.cards):
            found.setdefault(card.host, []).append(rank)
        return tuple(map(tuple, found.values()))

    def site(self, route: Route) -> Site:
        """Return where the ranks are; each counts as on a host of its own by UCX alone."""
        cards = [self.cards[host[0]] for host in self.hosts]
        alone = tuple((rank,) for rank in range(len(self.cards)))
        return Site(
            route=route,
            layout=alone if route == "ucx" else self.hosts,
            machines=tuple(sorted(card.machine for card in cards)),
            names=tuple(sorted(card.name for card in cards)),
        )

    def meet(self, others: Sequence[int], passed: Sequence[int]) -> list[Introduced]:
        """Meet other ranks of this host.

        Args:
            others: who, in order.
            passed: descriptors for them; each passes on as many of its own.

        Raises:
            PeerError: a rank has ended, or does not come in time.
            OSError: this process has run out of descriptors.
        """
        meeting = Meeting(
            self._rank,
            [card.socket for card in self.cards],
            self._roll.secret,
            self._listening,
            passed,
            lambda other: require_joining(self._store, self.prefix, self._rank, other),
        )
        return meeting.meet(others, self._deadline)
