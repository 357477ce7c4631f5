"""``Chooser``: the algorithm of every collective of a group, the same on all its ranks."""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

import msgspec

from syncline.collectives import Collective
from syncline.errors import MismatchError, UserError
from syncline.groups.choice import Choice, Hosts, choose
from syncline.groups.choice_files import measured_choices
from syncline.groups.choices import Choices, Region, Regions
from syncline.groups.notes import Store, read_note
from syncline.groups.site import Site
from syncline.model.document import Value

__all__ = ["BUILT_IN", "Chooser", "Wanted", "agreed_chooser", "chooser_for"]

BUILT_IN = "built-in"
CHOICES = "choices"
"""The name of rank 0's note."""
Wanted = Choices | Literal["measured", "built-in"]
"""Which choices a group is to use: those given, those that the user's cache has for its hosts, else
the built-in ones; or the built-in ones."""


class Chooser:
    """Says which algorithm runs a collective.

    Args:
        hosts: the ranks of each host.
        regions: what was measured; collectives that are not there get the built-in choice.
        source: where that comes from, in words.
    """

    def __init__(self, hosts: Hosts, regions: Regions, source: str) -> None:
        self.hosts = hosts
        self.regions = regions
        self.source = source
        self._measured: dict[Collective, tuple[list[int], tuple[Region, ...]]] = {
            collective: ([region.from_bytes for region in found], found)
            for collective, found in regions.items()
        }

    def choose(self, collective: Collective, size_bytes: int) -> Choice:
        """Return the algorithm for a vector of so many bytes."""
        measured = self._measured.get(collective)
        if measured is None:
            return choose(collective, self.hosts, size_bytes)
        starts, regions = measured
        return regions[bisect_right(starts, size_bytes) - 1].choice(size_bytes)

    def source_of(self, collective: Collective) -> str:
        """Return where the choice of one collective comes from, in words."""
        return self.source if collective in self._measured else BUILT_IN


class _Note(Value, frozen=True, kw_only=True):
    """What rank 0 tells the others."""

    regions: dict[Collective, tuple[Region, ...]] = msgspec.field(default_factory=dict)
    source: str = BUILT_IN
    error: str | None = None
    """Why there is no group."""


def chooser_for(wanted: Wanted, site: Site) -> Chooser:
    """Return what chooses for the ranks of a site, without asking them.

    Raises:
        FileError: the file in the cache is damaged, or of another site.
        MismatchError: given choices are for other numbers of ranks or hosts, or another route.
    """
    regions: Regions = {}
    source = BUILT_IN
    if isinstance(wanted, Choices):
        if (wanted.site.route, wanted.site.layout) != (site.route, site.layout):
            raise MismatchError(
                f"the given choices are for {wanted.site} in the layout {wanted.site.layout}, and "
                f"this group has {site} in {site.layout}; give others, or leave them out"
            )
        regions, source = wanted.regions, f"measured {wanted.date}, given"
    elif wanted == "measured" and (found := measured_choices(site)) is not None:
        choices, path = found
        regions, source = choices.regions, f"measured {choices.date}, {path}"
    return Chooser(site.layout, regions, source)


def agreed_chooser(
    wanted: Wanted, site: Site, store: Store, prefix: str, rank: int, deadline: float
) -> Chooser:
    """Return what chooses for all ranks: what rank 0 has found, since caches may differ.

    Args:
        wanted: which choices; those of rank 0 count.
        site: where the ranks are.
        store: where all ranks of the group look.
        prefix: of the group's notes in it.
        rank: this rank.
        deadline: when to give up, on the monotonic clock, in seconds.

    Raises:
        UserError: on all ranks, where :func:`chooser_for` raises one on rank 0.
        PeerError: rank 0 does not say in time.
    """
    key = f"{prefix}/{CHOICES}"
    if rank != 0:
        found = read_note(store, prefix, CHOICES, rank, 0, deadline)
        note = msgspec.json.decode(found, type=_Note)
        if note.error is not None:
            raise UserError(f"rank 0: {note.error}")
        return Chooser(site.layout, note.regions, note.source)
    try:
        chooser = chooser_for(wanted, site)
    except UserError as error:
        store.set(key, msgspec.json.encode(_Note(error=str(error))).decode())
        raise
    note = _Note(regions=dict(chooser.regions), source=chooser.source)
    store.set(key, msgspec.json.encode(note).decode())
    return chooser
