"""A realistic report: ResNet-18 on four workers with 2.5 Gbit/s, seven planners, two timelines."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from syncline.files.report.bundle import Bundle
from syncline.plan.cost import CostCurve, CostSegment
from syncline.plan.network import Contention, Link, Measurement, Network
from syncline.plan.plan import Plan
from syncline.plan.prediction import Comparison, Prediction
from syncline.plan.profile import Baseline, Gradient, Operation, Profile
from syncline.plan.run import Event, PhaseSpan, RankMemory, Rate, Run
from syncline.plan.timeline import COMMUNICATION, COMPUTE, Span, Timeline

WORKERS = 4
WIDTHS = (64, 128, 256, 512)


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
    operations = [Operation(name="batch", phase="data", duration_s=0.004)]
    operations.append(Operation(name="images", phase="copy", duration_s=0.0025, after=(0,)))
    needed: dict[str, int] = {}
    for name, _, time in layers:
        needed[name] = len(operations)
        before = (len(operations) - 1,)
        operations.append(
            Operation(name=name, phase="forward", duration_s=time * 1.35e-3, after=before)
        )
    gradients = []
    for name, parameters, time in reversed(layers):
        index = len(operations)
        operations.append(
            Operation(name=name, phase="backward", duration_s=time * 2.6e-3, after=(index - 1,))
        )
        gradients += [
            Gradient(
                name=f"{name}.{parameter}",
                elements=elements,
                ready_after=index,
                needed_by=needed[name],
            )
            for parameter, elements in reversed(parameters)
        ]
    update = Operation(
        name="SGD.step", phase="update", duration_s=0.021, after=(len(operations) - 1,)
    )
    return Profile(
        model="resnet18",
        device="cpu",
        workers=WORKERS,
        iterations=40,
        operations=(*operations, update),
        gradients=tuple(gradients),
        baseline=Baseline(iteration_s=0.7118, noise_s=0.0031, iterations=40),
    )


def make_network() -> Network:
    """Return a fitted 2.5 Gbit/s network: two pieces, measured from 1 KiB to 64 MiB."""
    knee = 65_536
    curve = CostCurve(
        segments=(
            CostSegment(start_bytes=0, cost_s=7.2e-4, s_per_byte=1.6e-8),
            CostSegment(start_bytes=knee, cost_s=7.2e-4 + knee * 1.6e-8, s_per_byte=7.0e-9),
        )
    )
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


def _groups(profile: Profile, at_least_bytes: int) -> list[int]:
    """Return the last tensor of each message when messages close at a size."""
    last, size = [], 0
    for index, gradient in enumerate(profile.gradients):
        size += gradient.size_bytes
        if size >= at_least_bytes:
            last.append(index)
            size = 0
    return last if last and last[-1] == index else [*last, index]


def simulate(profile: Profile, network: Network, plan: Plan, source: str) -> Timeline:
    """Return a timeline: messages in order, each after its last gradient, the update at the end.

    A measured one is the same with noise.
    """
    noise = random.Random(11)

    def about(seconds: float) -> int:
        factor = noise.uniform(0.96, 1.09) if source == "measured" else 1.0
        return round(seconds * factor * 1e9)

    spans, clock, finished = [], 0, []
    for operation in profile.operations[:-1]:
        stop = clock + about(operation.duration_s)
        spans.append(
            Span(
                lane=COMPUTE,
                start_ns=clock,
                stop_ns=stop,
                label=operation.name,
                kind=operation.phase,
            )
        )
        clock = stop
        finished.append(stop)
    free = 0
    for tensors, size_bytes in zip(plan.message_tensors(), plan.message_bytes(), strict=True):
        start = max(free, finished[profile.gradients[tensors[-1]].ready_after])
        free = start + about(network.all_reduce.seconds(size_bytes))
        spans.append(
            Span(
                lane=COMMUNICATION,
                start_ns=start,
                stop_ns=free,
                label=plan.label(tensors),
                kind="message",
                size_bytes=size_bytes,
            )
        )
    update = profile.operations[-1]
    start = max(free, clock)
    stop = start + about(update.duration_s)
    spans.append(Span(lane=COMPUTE, start_ns=start, stop_ns=stop, label=update.name, kind="update"))
    return Timeline(
        name=f"{plan.planner}, {len(plan.messages)} messages",
        source=source,  # type: ignore[arg-type]
        iteration_ns=stop,
        spans=tuple(spans),
    )


def _predict(profile: Profile, network: Network, plan: Plan, faster: float = 1.0) -> Prediction:
    timeline = simulate(profile, network, plan, "predicted")
    communication_s = sum(network.all_reduce.seconds(b) for b in plan.message_bytes())
    iteration_s = profile.computation_s + faster * (
        timeline.iteration_ns / 1e9 - profile.computation_s
    )
    return Prediction(
        planner=plan.planner,
        messages=len(plan.messages),
        iteration_s=iteration_s,
        computation_s=profile.computation_s,
        communication_s=communication_s,
        exposed_s=iteration_s - profile.computation_s,
        lower_bound_s=max(
            profile.computation_s, network.all_reduce.cheapest_s(profile.gradient_bytes)
        ),
    )


def make_bundle() -> Bundle:
    """Return the whole report."""
    profile, network = make_profile(), make_network()
    sizes = {
        "ddp": 25_000_000,
        "separate": 1,
        "single": 10**9,
        "mgwfbp": 8_000_000,
        "buckets": 5_000_000,
        "merge": 3_000_000,
    }
    plans = {
        planner: Plan.merging(planner, profile, WORKERS, _groups(profile, size_bytes))
        for planner, size_bytes in sizes.items()
    }
    predictions = [_predict(profile, network, plan) for plan in plans.values()]
    overlap = Plan.merging("pace", profile, WORKERS, _groups(profile, 1_000_000))
    predictions.append(_predict(profile, network, overlap, faster=0.985))
    plan = plans["merge"]
    comparison = Comparison(
        model=profile.model,
        network=network.name,
        workers=WORKERS,
        predictions=tuple(predictions),
        chosen="merge",
        reason="it is the fastest plan whose gain exceeds the noise of the measurement; "
        "no order of the same messages is more than 1.5 % faster",
    )
    predicted = simulate(profile, network, plan, "predicted")
    measured = simulate(profile, network, plan, "measured")
    baseline_s = profile.baseline.iteration_s if profile.baseline else 0.0
    planned_s = measured.iteration_ns / 1e9
    run = Run(
        model=profile.model,
        workers=WORKERS,
        backend="gloo",
        machine="4 hosts of 1 core, 2.5 GHz, Linux 6.1, torch 2.13",
        decision="planned",
        reason="the measured gain is 24 times its noise",
        planner="merge",
        messages=len(plan.messages),
        baseline=Rate(name="DDP", iteration_s=baseline_s, noise_s=0.0031, iterations=40),
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
            Event(iteration=50, text="profiling begins, 40 iterations without communication"),
            Event(iteration=92, text="network probed: 17 sizes from 1.02 kB to 67.1 MB"),
            Event(iteration=95, text="plan 'merge' adopted: 8 messages, 14 % less expected"),
            Event(iteration=215, text="plan kept: it gains 24 times the noise"),
        ),
        rates=(
            Rate(
                name="Syncline",
                iteration_s=planned_s,
                noise_s=0.0009,
                iterations=1600,
                samples_per_s=4 * 32 / planned_s,
            ),
            Rate(
                name="DDP",
                iteration_s=baseline_s,
                noise_s=0.0011,
                iterations=1600,
                samples_per_s=4 * 32 / baseline_s,
            ),
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


HOSTILE = ("<script>alert(1)</script>", "</script><b id=broken>", "{{data}}", "[red]a & 'b' \"c\"")


def with_names(bundle: Bundle, names: Sequence[str]) -> Bundle:
    """Return the report with its first gradients, messages and its model renamed."""
    profile, plan, timeline = bundle.profile, bundle.plan, bundle.timeline_predicted
    assert profile is not None
    assert plan is not None
    assert timeline is not None
    gradients = list(profile.gradients)
    tensors = list(plan.tensors)
    spans = list(timeline.spans)
    for index, name in enumerate(names):
        gradients[index] = Gradient(
            name=name, elements=10**8, ready_after=gradients[index].ready_after
        )
        tensors[index] = type(tensors[index])(name=name, elements=tensors[index].elements)
        spans[-2 - index] = Span(
            lane=COMMUNICATION,
            start_ns=spans[-2 - index].start_ns,
            stop_ns=spans[-2 - index].stop_ns,
            label=name,
            kind="message",
            size_bytes=1,
        )
    change = msgspec.structs.replace
    return replace(
        bundle,
        run=change(
            bundle.run,
            model=names[0],
            reason=names[0],
            events=(Event(iteration=1, text=names[0]),),
            phases=(PhaseSpan(name=names[0], start=0, iterations=1, seconds=1.0),),
            results={names[0]: 1.0},
        ),
        profile=change(profile, model=names[0], gradients=tuple(gradients)),
        plan=change(plan, tensors=tuple(tensors)),
        comparison=change(bundle.comparison, network=names[0], reason=names[1]),
        network=change(bundle.network, name=names[0]),
        timeline_predicted=change(timeline, spans=tuple(spans), name=names[0]),
    )
