"""How much computing and communicating slow each other, from measured iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.simulator.predict import predict_iteration_s

__all__ = ["calibrate_contention"]

LARGEST = 4.0
STEPS = 40


def calibrate_contention(
    profile: Profile, network: Network, measured: Sequence[tuple[Plan, float]]
) -> Network:
    """Return the network with the contention that explains measured iterations best.

    The profile's operations were timed with nothing in flight and the network's messages with
    nothing computed. What an iteration that overlaps them takes beyond the simulation of both is
    put down to one factor by which they slow each other, between 1 and 4: on a host whose cores all
    compute, the exchange takes them from the computation. The factor minimises the squared
    relative error over the measured plans (golden-section search on a fine grid of the simulator).

    Args:
        profile: the profile.
        network: the network; its own contention is replaced.
        measured: plans with their measured seconds an iteration.
    """

    def error(contention: float) -> float:
        candidate = msgspec.structs.replace(network, contention=contention)
        return math.fsum(
            (predict_iteration_s(profile, candidate, plan) / seconds - 1) ** 2
            for plan, seconds in measured
        )

    low, high = 1.0, LARGEST
    shrink = (math.sqrt(5) - 1) / 2
    for _ in range(STEPS):
        left, right = high - shrink * (high - low), low + shrink * (high - low)
        if error(left) <= error(right):
            high = right
        else:
            low = left
    best = min((1.0, (low + high) / 2), key=error)
    return msgspec.structs.replace(network, contention=round(best, 4))
