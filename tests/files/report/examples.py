"""A realistic report: ResNet-18 on four workers with 2.5 Gbit/s, six planners, two timelines."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from syncline.files.report.bundle import Bundle
from syncline.plan.cost import CostCurve
from syncline.plan.network import Contention, Link, Measurement, Network
from syncline.plan.plan import Plan
from syncline.plan.planners import planner_named
from syncline.plan.prediction import Comparison
from syncline.plan.profile import Baseline, Gradient, Phase, Profile
from syncline.plan.run import Event, PhaseSpan, RankMemory, Rate, Run
from syncline.plan.simulator.predict import predict
from syncline.plan.timeline import COMMUNICATION, Timeline
from tests.strategies import in_sequence

WORKERS = 4
WIDTHS = (64, 128, 256, 512)
PLANNED = ("ddp", "wfbp", "single", "mgwfbp", "merge", "pace")
change = msgspec.structs.replace


def _layers() -> Iterator[tuple[str, tuple[tuple[str, int], ...], float]]:
    """Yield ResNet-18's layers: name, parameters with their elements, relative forward time."""
    yield "conv1", (("weight", 64 * 3 * 49),), 9.0
    yield "bn1", (("weight", 64), ("bias", 64)), 2.5
    channels = 64
    for stage, width in enumerate(WIDTHS, start=1):
        for block in range(2):
            prefix = f"layer{stage}.{block}"
            for number, inputs in ((1, channels), (2, width)):
                halved = 0.5 if number == 1 and inputs != width else 1.0
                time = 7.0 * halved
                yield f"{prefix}.conv{number}", (("weight", inputs * width * 9),), time
                yield f"{prefix}.bn{number}", (("weight", width), ("bias", width)), 4 / 2**stage
            if channels != width:
                yield f"{prefix}.downsample.0", (("weight", channels * width),), 0.8
                yield f"{prefix}.downsample.1", (("weight", width), ("bias", width)), 0.3
            channels = width
    yield "fc", (("weight", 512 * 1000), ("bias", 1000)), 0.6


def make_profile() -> Profile:
    """Return the profile: about 190 ms forward and 370 ms backward, 62 gradients of 46.8 MB."""
    layers = list(_layers())
    steps: list[tuple[str, Phase, float]] = [("batch", "data", 0.004), ("images", "copy", 0.0025)]
    steps += [(name, "forward", time * 1.35e-3) for name, _, time in layers]
    needed = {name: index for index, (name, _, _) in enumerate(steps)}
    gradients = []
    for name, parameters, time in reversed(layers):
        ready = {"ready_after": len(steps), "needed_by": needed[name]}
        steps.append((name, "backward", time * 2.6e-3))
        gradients += [
            Gradient(name=f"{name}.{parameter}", elements=elements, **ready)
            for parameter, elements in reversed(parameters)
        ]
    steps.append(("SGD.step", "update", 0.021))
    baseline = Baseline(iteration_s=0.7118, noise_s=0.0031, iterations=40)
    made = in_sequence(steps, gradients)
    return change(made, model="resnet18", workers=WORKERS, iterations=40, baseline=baseline)


def make_network() -> Network:
    """Return a fitted 2.5 Gbit/s network: two pieces, measured from 1 KiB to 64 MiB."""
    knee = 65_536
    curve = CostCurve.of_rows([(0, 7.2e-4, 1.6e-8), (knee, 7.2e-4 + knee * 1.6e-8, 7.0e-9)])
    noise = random.Random(3)
    points = tuple(
        Measurement(
            size_bytes=1024 << power,
            time_s=curve.seconds(1024 << power) * noise.uniform(0.93, 1.08),
            repetitions=30,
        )
        for power in range(17)
    )
    return Network(
        name="rack-2.5gbit",
        workers=WORKERS,
        all_reduce=curve,
        backend="gloo",
        contention=Contention(computing=1.02, exchange=1.31, fitted=True),
        link=Link(alpha_s=1.21e-4, beta_s_per_byte=4.61e-9, gamma_s_per_byte=9.7e-11),
        points=points,
        fit_error=0.037,
        fit_error_max=0.079,
    )


def _noisy(profile: Profile) -> Profile:
    noise = random.Random(5)
    operations = [
        change(o, duration_s=o.duration_s * noise.uniform(0.9, 1.2)) for o in profile.operations
    ]
    return change(profile, operations=tuple(operations))


def _measured(profile: Profile, network: Network, plan: Plan) -> Timeline:
    return change(predict(_noisy(profile), network, plan).timeline, source="measured")


def _as_before(timeline: Timeline) -> Timeline:
    """Return it as releases wrote it that noted no waits, nor when messages were ready."""
    spans = tuple(change(span, ready_ns=None) for span in timeline.spans if span.kind != "wait")
    return change(timeline, spans=spans)


def make_bundle() -> Bundle:
    """Return the whole report."""
    profile, network = make_profile(), make_network()
    plans = {name: planner_named(name).plan(profile, network) for name in PLANNED}
    forecasts = {name: predict(profile, network, plan) for name, plan in plans.items()}
    plan = plans["merge"]
    comparison = Comparison(
        model=profile.model,
        network=network.name,
        workers=WORKERS,
        predictions=tuple(forecast.prediction for forecast in forecasts.values()),
        chosen="merge",
        reason="its gain exceeds the noise of the measurement",
    )
    predicted = _as_before(forecasts["merge"].timeline)
    measured = _as_before(_measured(profile, network, plan))
    baseline = Rate(name="DDP", iteration_s=0.7118, noise_s=0.0031, iterations=40)
    planned_s = measured.iteration_ns / 1e9
    steady = (("Syncline", planned_s, 0.0009), ("DDP", 0.7118, 0.0011))
    run = Run(
        model=profile.model,
        workers=WORKERS,
        backend="gloo",
        machine="4 hosts of 1 core, 2.5 GHz, Linux 6.1, torch 2.13",
        decision="planned",
        reason="the measured gain is 24 times its noise",
        planner="merge",
        messages=len(plan.messages),
        baseline=baseline,
        planned=Rate(name=plan.planner, iteration_s=planned_s, noise_s=0.0024, iterations=120),
        predicted_baseline_s=comparison.of("ddp").iteration_s,
        predicted_planned_s=predicted.iteration_ns / 1e9,
        overhead_iterations=23.4,
        phases=tuple(
            PhaseSpan(name=name, start=start, iterations=iterations, seconds=seconds)
            for name, start, iterations, seconds in (
                ("measuring DDP", 1, 10, 7.4),
                ("profiling", 11, 4, 5.9),
                ("calibrating with halves-12", 15, 2, 1.9),
                ("trying merge", 17, 6, 3.8),
                ("recording", 23, 5, 3.2),
                ("steady", 28, 1600, 912.0),
            )
        ),
        memory=tuple(
            RankMemory(
                parameters_bytes=102_000_000,
                gradients_bytes=102_000_000,
                state_bytes=25_500_000 + rank,
                predicted_state_bytes=25_500_000,
                peak_bytes=611_000_000,
            )
            for rank in range(WORKERS)
        ),
        events=(
            Event(iteration=10, text="warm-up ends, measuring DDP"),
            Event(iteration=92, text="network probed: 17 sizes from 1.02 kB to 67.1 MB"),
            Event(iteration=215, text="plan kept: it gains 24 times the noise"),
        ),
        rates=tuple(
            Rate(name=n, iteration_s=s, noise_s=e, iterations=1600, samples_per_s=4 * 32 / s)
            for n, s, e in steady
        ),
        results={"test accuracy": 0.9312},
    )
    return Bundle(
        run=run,
        profile=profile,
        network=network,
        plan=plan,
        comparison=comparison,
        timeline_predicted=predicted,
        timeline_measured=measured,
    )


def make_overlapped() -> Bundle:
    """Return a report on an iteration in which computation waits, messages queue, the link idles.

    Its plan's messages run on under the next forward pass.
    """
    profile = make_profile()
    network = change(make_network(), contention=Contention())
    slower = Network.line(workers=WORKERS, a_s=9e-4, b_s_per_byte=8.2e-9, name=network.name)
    plan = planner_named("p3").plan(profile, network)
    return replace(
        make_bundle(),
        plan=plan,
        network=network,
        timeline_predicted=predict(profile, network, plan).timeline,
        # In training nothing else than computing and sending is measured by lanes of its own.
        timeline_measured=_measured(profile, slower, plan),
    )


HOSTILE = ("<script>alert(1)</script>", "</script><b id=broken>", "{{data}}", "[red]a & 'b' \"c\"")


def with_names(bundle: Bundle, names: Sequence[str]) -> Bundle:
    """Return the report with its first gradients, messages and its model renamed."""
    gradients, tensors = list(bundle.profile.gradients), list(bundle.plan.tensors)
    spans = list(bundle.timeline_predicted.spans)
    message = {"lane": COMMUNICATION, "kind": "message", "size_bytes": 1}
    for index, name in enumerate(names):
        gradients[index] = change(gradients[index], name=name, elements=10**8, needed_by=None)
        tensors[index] = change(tensors[index], name=name)
        spans[-2 - index] = change(spans[-2 - index], label=name, **message)
    first = names[0]
    return replace(
        bundle,
        run=change(
            bundle.run,
            model=first,
            reason=first,
            events=(Event(iteration=1, text=first),),
            phases=(PhaseSpan(name=first, start=0, iterations=1, seconds=1.0),),
            results={first: 1.0},
        ),
        profile=change(bundle.profile, model=first, gradients=tuple(gradients)),
        plan=change(bundle.plan, tensors=tuple(tensors)),
        comparison=change(bundle.comparison, network=first, reason=names[1]),
        network=change(bundle.network, name=first),
        timeline_predicted=change(bundle.timeline_predicted, spans=tuple(spans), name=first),
    )
