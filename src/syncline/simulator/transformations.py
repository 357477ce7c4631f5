"""A profile under other circumstances: another wire type, another device, no loading."""

from __future__ import annotations

import msgspec

from syncline.errors import UserError, quoted
from syncline.model.profile import STREAMS, Profile
from syncline.model.quantities import bytes_per_element
from syncline.simulator.strategy import Strategy

__all__ = ["as_planned", "with_compute_scale", "with_wire", "without_loading"]

SLOWEST_SCALE = 1000.0
"""Largest factor on computing, and its inverse."""


def with_wire(profile: Profile, dtype: str) -> Profile:
    """Return the profile with gradients that travel in another type.

    The time of conversion is not counted.

    Raises:
        UserError: the type is unknown, or a gradient is complex and the type is not.
    """
    bytes_per_element(dtype)  # raises for an unknown type
    for gradient in profile.gradients:
        if gradient.dtype.startswith("complex") and not dtype.startswith("complex"):
            raise UserError(
                f"gradient {quoted(gradient.name)} is {gradient.dtype} and cannot travel as "
                f"{dtype}; leave --wire out"
            )
    if all(gradient.dtype == dtype for gradient in profile.gradients):
        return profile
    gradients = tuple(msgspec.structs.replace(g, dtype=dtype) for g in profile.gradients)
    # The measured time of stock DDP is that of the original gradients.
    return msgspec.structs.replace(profile, gradients=gradients, baseline=None)


def with_compute_scale(profile: Profile, scale: float) -> Profile:
    """Return the profile with a device that takes ``scale`` times as long for everything.

    Reading, copying, the launching of work by the host, and communication with other workers take
    as long as before.

    Raises:
        UserError: the scale is outside 1/1000 to 1000, or an operation becomes absurdly long.
    """
    if not 1 / SLOWEST_SCALE <= scale <= SLOWEST_SCALE:
        raise UserError(
            f"a compute scale must be between {1 / SLOWEST_SCALE:g} and {SLOWEST_SCALE:g}, found "
            f"{scale:g}; 0.5 halves what the device computes for"
        )
    return _scaled(profile, scale, {*STREAMS})


def without_loading(profile: Profile) -> Profile:
    """Return the profile with batches that need neither reading nor copying."""
    return _without(profile, {"data", "copy"})


def as_planned(profile: Profile, strategy: Strategy, slowest: float) -> Profile:
    """Return the profile for planners, which know no strategy and only one kind of worker.

    What the strategy fetches ahead takes no time in an iteration. Every message waits for the
    slowest worker, whose factor is ``slowest``.
    """
    ahead = {"data": strategy.prefetch_data, "copy": strategy.prefetch_copy}
    seen = _without(profile, {phase for phase, is_ahead in ahead.items() if is_ahead})
    return _scaled(seen, slowest, {*STREAMS, "host"})


def _without(profile: Profile, phases: set[str]) -> Profile:
    if not any(operation.phase in phases for operation in profile.operations):
        return profile
    operations = tuple(
        msgspec.structs.replace(o, duration_s=0.0) if o.phase in phases else o
        for o in profile.operations
    )
    return msgspec.structs.replace(profile, operations=operations, baseline=None)


def _scaled(profile: Profile, factor: float, lanes: set[str]) -> Profile:
    if factor == 1:
        return profile
    operations = tuple(
        msgspec.structs.replace(o, duration_s=o.duration_s * factor) if o.lane in lanes else o
        for o in profile.operations
    )
    return msgspec.structs.replace(profile, operations=operations, baseline=None)
