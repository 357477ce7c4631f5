"""A profile under other circumstances: another wire type, another device, no loading."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec

from syncline.errors import UserError, quoted
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import ACCUMULATING, COMPUTING, STREAMS, Operation, Profile, Resource
from syncline.plan.quantities import NS_PER_S, bytes_per_element, require_count
from syncline.plan.simulator.strategy import Strategy

SLOWEST_SCALE = 1000.0  # largest factor on computing, and its inverse


def with_wire(profile: Profile, dtype: str, *, only: str | None = None) -> Profile:
    """Return the profile with gradients that travel in another type; conversion takes no time.

    With ``only``, those of that dtype.
    """
    bytes_per_element(dtype)  # raises for an unknown type
    changed = [g.dtype != dtype and only in (None, g.dtype) for g in profile.gradients]
    for gradient in itertools.compress(profile.gradients, changed):
        if gradient.dtype.startswith("complex") and not dtype.startswith("complex"):
            raise UserError(
                f"gradient {quoted(gradient.name)} is {gradient.dtype} and cannot travel as "
                f"{dtype}; leave --wire out"
            )
    if not any(changed):
        return profile
    gradients = tuple(
        msgspec.structs.replace(g, dtype=dtype) if changes else g
        for g, changes in zip(profile.gradients, changed, strict=True)
    )
    # The baseline was measured with the original gradients.
    return msgspec.structs.replace(profile, gradients=gradients, baseline=None)


def with_sharding(profile: Profile, workers: int | None) -> Profile:
    """Return the profile if each of the workers updates its share of parameters; None: all."""
    measured, asked = profile.workers if profile.sharded else 1, workers or 1
    scaled = _scaled(profile, lambda o: measured / asked if o.phase == "update" else 1.0)
    return msgspec.structs.replace(
        scaled, sharded=workers is not None, workers=workers or profile.workers
    )


def with_gathering(profile: Profile, network: Network, plan: Plan) -> Profile:
    """Return the profile with an all-gather of the sharded parameters if the plan has none."""
    if not profile.sharded or plan.sharded:
        return profile
    gather = Operation(
        name="gather parameters",
        phase="update",
        duration_s=network.collective("all-gather").seconds(profile.gradient_bytes),
        after=(len(profile.operations) - 1,),
    )
    return msgspec.structs.replace(profile, operations=(*profile.operations, gather))


def with_compute_scale(profile: Profile, scale: float) -> Profile:
    """Return the profile with a device that computes ``scale`` times as long."""
    if not 1 / SLOWEST_SCALE <= scale <= SLOWEST_SCALE:
        raise UserError(
            f"a compute scale must be between {1 / SLOWEST_SCALE:g} and {SLOWEST_SCALE:g}, found "
            f"{scale:g}; 0.5 halves the computing time of the device"
        )
    return _scaled(profile, lambda operation: scale if operation.lane in STREAMS else 1.0)


def with_batch(profile: Profile, factor: float, fixed: float = 0.0) -> Profile:
    """Return the profile with ``factor`` times as many samples in a batch of each worker.

    Reading and copying take ``factor`` times as long. So do the device's forward and backward pass,
    except for a ``fixed`` share of the time, which every batch takes. All else is as before.
    """
    if not 1 / SLOWEST_SCALE <= factor <= SLOWEST_SCALE:
        raise UserError(
            f"a batch must be between {1 / SLOWEST_SCALE:g} and {SLOWEST_SCALE:g} times that of "
            f"the profile, found {factor:g}; 0.5 halves it"
        )
    if not 0 <= fixed <= 1:
        raise UserError(
            "the share of a batch's time that its size does not change is between 0 and 1, found "
            f"{fixed:g}"
        )

    def scale(operation: Operation) -> float:
        if operation.phase in ("data", "copy"):
            return factor
        passes = operation.phase in COMPUTING and operation.lane in STREAMS
        return fixed + (1 - fixed) * factor if passes else 1.0

    return _scaled(profile, scale)


def with_accumulation(profile: Profile, batches: int) -> Profile:
    """Return the profile of one update after ``batches`` micro-batches like the profiled one."""
    require_count("micro-batches to accumulate", batches)
    if batches == 1:
        return profile
    phases = [operation.phase for operation in profile.operations]
    if "backward" not in phases or any(o.name == ACCUMULATING for o in profile.operations):
        raise UserError(
            f"profile {quoted(profile.model)} has no backward pass of a single batch to repeat; "
            "leave --accumulate out, or profile without accumulation"
        )
    first = phases.index("backward")
    finish_ns = profile.finish_ns()
    computing = [i for i, phase in enumerate(phases) if phase in COMPUTING]
    begun_ns = min(finish_ns[i] - profile.operations[i].duration_ns for i in computing)
    duration_s = (batches - 1) * (max(finish_ns[i] for i in computing) - begun_ns) / NS_PER_S
    lanes: list[Resource] = ["host", "device"] if profile.has_host else ["device"]

    def moved(index: int) -> int:
        return index + len(lanes) if index >= first else index

    operations = [
        msgspec.structs.replace(
            operation,
            after=tuple(map(moved, operation.after)),
            duration_s=operation.duration_s * (batches if phase in ("data", "copy") else 1),
        )
        for operation, phase in zip(profile.operations, phases, strict=True)
    ]
    operations[first:first] = [
        Operation(name=ACCUMULATING, phase="forward", duration_s=duration_s, resource=lane)
        for lane in lanes
    ]
    gradients = tuple(
        msgspec.structs.replace(
            gradient,
            ready_after=moved(gradient.ready_after),
            needed_by=None if gradient.needed_by is None else moved(gradient.needed_by),
        )
        for gradient in profile.gradients
    )
    return msgspec.structs.replace(
        profile, operations=tuple(operations), gradients=gradients, baseline=None
    )


def without_loading(profile: Profile) -> Profile:
    """Return the profile with batches that need neither reading nor copying."""
    return _scaled(profile, lambda operation: 0.0 if operation.phase in ("data", "copy") else 1.0)


def as_planned(profile: Profile, strategy: Strategy, slowest: float) -> Profile:
    """Return the profile for planners: of the slowest worker, without prefetched batches."""
    ahead = {"data": strategy.prefetch_data, "copy": strategy.prefetch_copy}

    def factor(operation: Operation) -> float:
        if ahead.get(operation.phase):
            return 0.0
        return slowest if operation.lane in (*STREAMS, "host") else 1.0

    return _scaled(profile, factor)


def _scaled(profile: Profile, factor: Callable[[Operation], float]) -> Profile:
    operations = tuple(
        o if factor(o) == 1 else msgspec.structs.replace(o, duration_s=o.duration_s * factor(o))
        for o in profile.operations
    )
    if operations == profile.operations:
        return profile
    return msgspec.structs.replace(profile, operations=operations, baseline=None)
