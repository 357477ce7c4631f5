"""A report on an overlapped iteration: computation waits, messages queue, the line idles."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec

from syncline.files.report.bundle import Bundle
from syncline.plan.network import Contention, Network
from syncline.plan.planners import planner_named
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from syncline.plan.timeline import Timeline

from .examples import WORKERS, make_bundle, make_network, make_profile

change = msgspec.structs.replace


def _noisy(profile: Profile) -> Profile:
    noise = random.Random(5)
    operations = [
        change(o, duration_s=o.duration_s * noise.uniform(0.9, 1.2)) for o in profile.operations
    ]
    return change(profile, operations=tuple(operations))


def make_overlapped(planner: str = "p3", in_flight: int | None = None) -> Bundle:
    """Return the realistic report with a plan whose messages run on under the next forward pass."""
    profile = make_profile()
    network = change(make_network(), contention=Contention())
    slower = Network.line(workers=WORKERS, a_s=9e-4, b_s_per_byte=8.2e-9, name=network.name)
    plan = planner_named(planner).plan(profile, network)
    if in_flight is not None:
        plan = change(plan, in_flight=in_flight)
    predicted = predict(profile, network, plan).timeline
    # In training nothing else than computing and sending is measured by lanes of its own.
    measured: Timeline = predict(_noisy(profile), slower, plan).timeline
    return replace(
        make_bundle(),
        plan=plan,
        network=network,
        timeline_predicted=predicted,
        timeline_measured=change(measured, source="measured"),
    )
