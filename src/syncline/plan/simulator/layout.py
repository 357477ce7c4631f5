"""One worker's iteration of the DAG of S-SGD: slots on lanes, and the edges among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from syncline.plan.profile import WAITS, Profile
from syncline.plan.simulator.strategy import Strategy


class Slot(NamedTuple):
    """A task that each worker runs once an iteration."""

    lane: str
    duration_ns: int
    operation: int | None  # index in the profile; None for a join
    deferred_update: bool = False
    """Whether it is the share of the update just before the operation, not the operation."""


class IterationLayout(NamedTuple):
    """One worker's iteration: slots before and after the exchange, and the edges among them."""

    slots: tuple[Slot, ...]
    before_exchange: int  # how many slots come before the messages in the list of tasks
    edges: tuple[tuple[int, int], ...]  # (slot, slot that waits for it)
    slot_of: Mapping[int, int]  # slot of each operation that is run
    update_before: Mapping[int, int]  # slot of the deferred update before an operation, if any


@lru_cache(maxsize=8)  # a search simulates hundreds of plans of one profile
def layout_of(profile: Profile, strategy: Strategy, *, on_need: bool) -> IterationLayout:
    """Lay out a profile's operations; with ``on_need`` each follows the updates it needs."""
    updates = profile.deferred_updates_ns() if on_need else {}
    has_host = profile.has_host
    slots: list[Slot] = []
    slot_of: dict[int, int] = {}
    update_before: dict[int, int] = {}
    edges: list[tuple[int, int]] = []
    latest: dict[str, int] = {}  # the last slot of each lane
    batch: list[int] = []  # data and copy slots so far
    reads = {i for i, operation in enumerate(profile.operations) if operation.phase == "data"}
    before_exchange: int | None = None

    def add(slot: Slot, after: Iterable[int]) -> int:
        here = len(slots)
        slots.append(slot)
        # A lane that runs one slot at a time in order needs no edges of its own.
        in_turn = runs_in_turn(slot.lane, strategy)
        needed = {b for b in after if not (in_turn and slots[b].lane == slot.lane)}
        edges.extend((b, here) for b in sorted(needed))
        latest[slot.lane] = here
        return here

    for index, operation in enumerate(profile.operations):
        exchanged = operation.phase in ("finalize", "update")
        if exchanged and before_exchange is None:
            before_exchange = len(slots)
        if on_need and operation.is_device_update:
            continue
        lane = _lane(operation.lane, strategy, has_host=has_host)
        after = [slot_of[b] for b in operation.after if b in slot_of]
        if operation.phase != "data":  # the host goes on while a batch is copied
            after += [b for b in batch if lane != "host" or slots[b].operation in reads]
        if index in updates:
            update = Slot(lane, updates[index], index, deferred_update=True)
            update_before[index] = add(update, after)
            after = [update_before[index]]
        slot_of[index] = add(Slot(lane, operation.duration_ns, index), after)
        if operation.phase in ("data", "copy"):
            if runs_in_turn(lane, strategy):
                batch = [b for b in batch if slots[b].lane != lane]
            batch.append(slot_of[index])
    if before_exchange is None:
        before_exchange = len(slots)
    if strategy.compute == "unlimited":
        ends = sorted(set(range(len(slots))) - {before for before, _ in edges})
    else:
        ends = sorted(latest.values())
    if strategy.prefetch_data:  # reading ahead is no part of what an iteration waits for
        ends = [e for e in ends if slots[e].lane not in ("disk", "copy")] or ends
    join = len(slots)
    slots.append(Slot("join", 0, None))
    edges.extend((end, join) for end in ends)
    return IterationLayout(tuple(slots), before_exchange, tuple(edges), slot_of, update_before)


def runs_in_turn(lane: str, strategy: Strategy) -> bool:
    """Return whether a lane runs its slots one at a time, in order."""
    if lane == "disk":
        return strategy.loaders == 1
    return lane != WAITS and (lane == "copy" or strategy.compute == "stream")


def _lane(lane: str, strategy: Strategy, *, has_host: bool) -> str:
    """Return where an operation runs; the loop's own work is on the host's lane, if any."""
    if lane == "disk":
        return "disk" if strategy.prefetch_data else "host" if has_host else "device"
    if lane == "copy":
        if not strategy.prefetch_copy:
            return "device"
        return "disk" if strategy.one_loader else "copy"
    return lane
