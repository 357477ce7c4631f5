"""Calibration of a network with iteration times that were measured at some worker counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from syncline.errors import UserError, quoted
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s

LARGEST_FACTOR = 16.0  # largest factor by which the link may be slower or faster than given
STEPS = 64  # factors that are tried first, evenly spread on a logarithmic scale
PRECISION = 1e-4  # of the logarithm of the factor
CALIBRATED = 1.3
"""Nine of ten exchanges over a calibrated link take what its formula says within this factor."""
LEAST_EFFECT = 0.01
"""If a network twice as slow changes the times by a smaller share, they cannot calibrate it."""


class Calibration(NamedTuple):
    """A network whose link explains measured iterations."""

    network: Network
    factor: float  # how many times slower the link is than given
    errors: dict[int, float]  # by number of workers: predicted over measured, less 1

    @property
    def note(self) -> str:
        """The calibration in a sentence."""
        found = ", ".join(f"{error:+.1%} at {count}" for count, error in self.errors.items())
        word = "slower" if self.factor >= 1 else "faster"
        times = max(self.factor, 1 / self.factor)
        sure = (
            "one measurement cannot show how accurate that is"
            if len(self.errors) == 1
            else "expect similar errors between these worker counts, and larger ones beyond"
        )
        return (
            f"the link is {times:.2f} times {word} than given; the predictions of the measured "
            f"iterations are then off by {found} workers; {sure}"
        )


def calibrated(
    profile: Profile,
    network: Network,
    measured_s: Mapping[int, float],
    planner: Callable[[Profile, Network], Plan],
    track: Callable[[Sequence[float]], Iterable[float]] = iter,
) -> Calibration:
    """Return the network with its link scaled so that it explains measured iterations.

    One factor scales latency and time per byte alike: the one with the least squares of the
    logarithms of predicted over measured. ``measured_s`` are the seconds of an iteration by worker
    count, at least one, and ``planner`` makes the plan that they ran under. ``track`` wraps the
    factors that are tried first, so that a progress bar can follow. Raise UserError if no link
    explains the times, or they do not depend on the network.
    """

    def errors(factor: float) -> dict[int, float]:
        slower = _slower(network, factor)
        found = {}
        for count, seconds in measured_s.items():
            net = slower.with_workers(count)
            found[count] = predict_iteration_s(profile, net, planner(profile, net)) / seconds - 1
        return found

    def loss(logarithm: float) -> float:
        found = errors(math.exp(logarithm)).values()
        return math.fsum(math.log1p(error) ** 2 for error in found)

    limit = math.log(LARGEST_FACTOR)
    grid = [limit * (2 * step / STEPS - 1) for step in range(STEPS + 1)]
    losses = {logarithm: round(loss(logarithm), 12) for logarithm in track(grid)}
    best = min(grid, key=lambda logarithm: (losses[logarithm], abs(logarithm)))
    if abs(best) == limit:
        off = ", ".join(f"{e:+.0%} at {count}" for count, e in errors(math.exp(best)).items())
        raise UserError(
            f"calibrating: no link from {LARGEST_FACTOR:g} times slower to as many times faster "
            f"explains these iterations of {quoted(profile.model)}: predictions are off by {off} "
            "workers; are model, batch and workers a host those of the measurement?"
        )
    low, high = best - 2 * limit / STEPS, best + 2 * limit / STEPS
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > PRECISION:  # golden-section search
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = loss(right)
    factor = math.exp((low + high) / 2)
    found, slower = errors(factor), errors(2 * factor)
    if all(slower[count] - found[count] < LEAST_EFFECT for count in found):
        raise UserError(
            "calibrating: messages are hidden behind computing at "
            f"{' and '.join(map(str, measured_s))} workers, so these iterations say nothing about "
            "the network; give one at more workers"
        )
    link = msgspec.structs.replace(_slower(network, factor), known_within=CALIBRATED)
    return Calibration(link, factor, found)


def _slower(network: Network, factor: float) -> Network:
    link = network.exchange.link
    rate = 1 / (link.beta_s_per_byte * factor) if link.beta_s_per_byte else None
    return network.replace(bandwidth_bytes_per_s=rate, latency_s=link.alpha_s * factor)
