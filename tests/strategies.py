"""Hypothesis strategies for Syncline's nouns and for the instances that planners are tried on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from syncline.plan.cost import CostCurve
from syncline.plan.network import Contention, Link, Measurement, Network
from syncline.plan.plan import Message, Plan, Tensor
from syncline.plan.prediction import Comparison, Prediction
from syncline.plan.profile import Baseline, Gradient, Operation, Phase, Profile
from syncline.plan.quantities import BYTES_PER_ELEMENT
from syncline.plan.run import Event, Rate, Run
from syncline.plan.timeline import Span, Timeline

NS_PER_S = 1_000_000_000
PHASES = ("data", "copy", "forward", "backward")

LARGE = settings.get_current_profile_name() in ("large", "random")
"""Whether ``make test-slow`` runs the tests, or somebody looks for failures: with more examples."""
few = settings(
    max_examples=40 if LARGE else 12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
many = settings(few, max_examples=60 if LARGE else 40)
costly = settings(many, max_examples=60 if LARGE else 10)
"""For examples that take long, such as those that every planner plans."""

seconds = st.floats(0, 1000, allow_nan=False)
names = st.text(max_size=8)


class IntegerCurve(NamedTuple):
    """A cost curve of whole nanoseconds, so that tests can cost without rounding."""

    segments: tuple[tuple[int, int, int], ...]  # (start_bytes, cost_ns, ns_per_byte) of each

    def cost_ns(self, size_bytes: int) -> int:
        """Return what a message costs, by a linear scan."""
        start, cost, slope = [s for s in self.segments if s[0] <= size_bytes][-1]
        return cost + slope * (size_bytes - start)

    def curve(self) -> CostCurve:
        """Return it as the product's curve."""
        rows = ((start, cost / NS_PER_S, slope / NS_PER_S) for start, cost, slope in self.segments)
        return CostCurve.of_rows(rows)

    def network(self, workers: int = 4, pipelined: IntegerCurve | None = None) -> Network:
        """Return a network that costs this, and with two in flight perhaps something else."""
        two = None if pipelined is None else pipelined.curve()
        return Network(name="random", workers=workers, all_reduce=self.curve(), pipelined=two)


@st.composite
def integer_curves(
    draw: st.DrawFn, *, max_segments: int = 4, max_latency_ns: int = 3000, falls: bool = False
) -> IntegerCurve:
    """Draw a piecewise linear curve with jumps, flat pieces and, if so told, falls."""
    starts = sorted(draw(st.sets(st.integers(1, 4000), max_size=max_segments - 1)))
    segments = [(0, draw(st.integers(0, max_latency_ns)), draw(st.integers(0, 5)))]
    for start in starts:
        before = segments[-1]
        end = before[1] + before[2] * (start - before[0])
        jumps = [st.just(0), st.integers(0, max_latency_ns)]
        if falls:
            jumps.append(st.integers(segments[0][1] - end, 0))
        jump = draw(st.one_of(jumps))
        segments.append((start, end + jump, draw(st.integers(0, 5))))
    return IntegerCurve(tuple(segments))


def profile_of(
    gaps_ns: list[int], elements: list[int], *, forward_ns: int = 0, update_ns: int = 0
) -> Profile:
    """Return a profile with a backward operation for each gradient: all of one dtype, float32."""
    operations = [Operation(name="forward", phase="forward", duration_s=forward_ns / NS_PER_S)]
    operations += [
        Operation(name=f"b{i}", phase="backward", duration_s=gap / NS_PER_S, after=(i,))
        for i, gap in enumerate(gaps_ns)
    ]
    if update_ns:
        operations.append(Operation(name="u", phase="update", duration_s=update_ns / NS_PER_S))
    return Profile(
        model="random",
        device="cpu",
        workers=4,
        iterations=1,
        operations=tuple(operations),
        gradients=tuple(
            Gradient(name=f"g{i}", elements=count, ready_after=i + 1)
            for i, count in enumerate(elements)
        ),
    )


def in_sequence(
    steps: Iterable[tuple[str, Phase, float]], gradients: Iterable[Gradient]
) -> Profile:
    """Return a profile of operations that follow each other: their names, phases and seconds."""
    operations = tuple(
        Operation(name=name, phase=phase, duration_s=seconds, after=(i - 1,) if i else ())
        for i, (name, phase, seconds) in enumerate(steps)
    )
    parts = {"operations": operations, "gradients": tuple(gradients)}
    return Profile(model="chain", device="cpu", workers=2, iterations=1, **parts)


@st.composite
def layer_profiles(draw: st.DrawFn, *, max_layers: int = 10, min_elements: int = 0) -> Profile:
    """Draw a profile as :func:`profile_of` makes them; equal ready times are common."""
    layers = draw(st.integers(1, max_layers))
    gap = st.one_of(st.just(0), st.integers(0, 50), st.integers(0, 5000))
    size = st.one_of(st.integers(min_elements, 3), st.integers(min_elements, 1500))
    return profile_of(
        draw(st.lists(gap, min_size=layers, max_size=layers)),
        draw(st.lists(size, min_size=layers, max_size=layers)),
        forward_ns=draw(st.integers(0, 5000)),
        update_ns=draw(st.integers(0, 500)),
    )


@st.composite
def profiles(draw: st.DrawFn, most_elements: int = 1 << 40) -> Profile:
    """Draw any valid profile: a DAG, several dtypes, tensors without elements."""
    early = draw(st.lists(st.sampled_from(PHASES), min_size=1, max_size=6))
    late = draw(st.sampled_from([(), ("update",), ("finalize", "update")]))
    operations = tuple(
        Operation(
            name=draw(names),
            phase=phase,
            duration_s=draw(seconds),
            after=tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else (),
        )
        for i, phase in enumerate((*early, *late))
    )
    ready = sorted(draw(st.lists(st.integers(0, len(early) - 1), min_size=1, max_size=6)))
    gradients = tuple(
        Gradient(
            name=f"{i} {draw(names)}",
            elements=draw(st.integers(0, most_elements)),
            dtype=draw(st.sampled_from(sorted(BYTES_PER_ELEMENT))),
            ready_after=after,
            needed_by=draw(st.none() | st.integers(0, len(operations) - 1)),
        )
        for i, after in enumerate(ready)
    )
    baseline = st.builds(
        Baseline, iteration_s=seconds, noise_s=seconds, iterations=st.integers(1, 9)
    )
    return Profile(
        model=draw(names),
        device=draw(names),
        workers=draw(st.integers(1, 4096)),
        iterations=draw(st.integers(1, 100)),
        operations=operations,
        gradients=gradients,
        baseline=draw(st.none() | baseline),
    )


@st.composite
def curves(draw: st.DrawFn) -> CostCurve:
    """Draw any valid curve of moderate values."""
    starts = sorted(draw(st.sets(st.integers(1, 1 << 32), max_size=4)))
    rate = st.floats(0, 1e-6)
    rows = [(0, draw(st.floats(0, 1)), draw(rate))]
    for start in starts:
        before, cost_s, slope = rows[-1]
        end_s = cost_s + slope * (start - before)
        rows.append((start, end_s + draw(st.floats(0, 1)), draw(rate)))
    return CostCurve.of_rows(rows)


def contentions(most: float) -> st.SearchStrategy[Contention]:
    """Draw factors between 1 and ``most``, often one of them 1, and what each message computes."""
    factor = st.just(1.0) | st.floats(1, most)
    per_message_s = st.just(0.0) | st.floats(0, 1e-6)
    return st.builds(Contention, computing=factor, exchange=factor, per_message_s=per_message_s)


@st.composite
def falling_curves(draw: st.DrawFn) -> CostCurve:
    """Draw a curve whose pieces may begin lower than the one before ends."""
    rate, more = st.floats(0, 1e-6), st.floats(0, 1)
    latency_s = draw(more)
    starts = sorted(draw(st.sets(st.integers(1, 1 << 32), max_size=4)))
    rows = [(start, latency_s + draw(more), draw(rate)) for start in starts]
    return CostCurve.of_rows([(0, latency_s, draw(rate)), *rows])


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Draw any valid network."""
    rate = st.floats(0, 1e-3)
    link = st.builds(Link, alpha_s=rate, beta_s_per_byte=rate, gamma_s_per_byte=rate)
    point = st.builds(
        Measurement,
        size_bytes=st.integers(0, 1 << 40),
        time_s=seconds,
        repetitions=st.integers(1, 100),
    )
    return Network(
        name=draw(names),
        workers=draw(st.integers(1, 4096)),
        all_reduce=draw(st.one_of(curves(), falling_curves())),
        backend=draw(names),
        contention=draw(contentions(100)),
        link=draw(st.none() | link),
        points=tuple(draw(st.lists(point, max_size=3))),
        fit_error=draw(st.none() | st.floats(0, 1)),
        fit_error_max=draw(st.none() | st.floats(0, 10)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw any valid plan: merged and split tensors, messages in any order."""
    tensors = tuple(
        Tensor(
            name=f"{i} {draw(names)}",
            elements=draw(st.integers(0, 40)),
            dtype=draw(st.sampled_from(sorted(BYTES_PER_ELEMENT))),
        )
        for i in range(draw(st.integers(1, 6)))
    )
    elements = sum(tensor.elements for tensor in tensors)
    cuts = draw(st.sets(st.integers(1, max(elements - 1, 1)), max_size=6)) if elements > 1 else ()
    bounds = [0, *sorted(cuts), elements]
    messages = [Message(start=a, stop=b) for a, b in itertools.pairwise(bounds)]
    return Plan(
        planner=draw(names),
        model=draw(names),
        workers=draw(st.integers(1, 4096)),
        tensors=tensors,
        messages=tuple(draw(st.permutations(messages))),
    )


predictions = st.builds(
    Prediction,
    planner=names,
    messages=st.integers(0, 1000),
    iteration_s=st.just(0.0) | st.floats(1e-9, 1000),
    computation_s=seconds,
    communication_s=seconds,
    exposed_s=seconds,
    lower_bound_s=seconds,
)


@st.composite
def comparisons(draw: st.DrawFn) -> Comparison:
    """Draw any valid comparison."""
    rows = tuple(draw(st.lists(predictions, min_size=1, max_size=4)))
    return Comparison(
        model=draw(names),
        network=draw(names),
        workers=draw(st.integers(1, 4096)),
        predictions=rows,
        chosen=draw(st.sampled_from(rows)).planner,
        reason=draw(names),
    )


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Draw any valid timeline."""
    spans = []
    for _ in range(draw(st.integers(0, 4))):
        start, length = draw(st.integers(0, 1 << 50)), draw(st.integers(0, 1 << 50))
        kind = draw(st.sampled_from([*PHASES, "finalize", "update", "message", "wait"]))
        ready = st.none() | st.integers(0, start) if kind == "message" else st.none()
        spans.append(
            Span(
                lane=draw(names),
                start_ns=start,
                stop_ns=start + length,
                label=draw(names),
                kind=kind,
                size_bytes=draw(st.none() | st.integers(0, 1 << 60)),
                ready_ns=draw(ready),
            )
        )
    return Timeline(
        name=draw(names),
        source=draw(st.sampled_from(["predicted", "measured"])),
        iteration_ns=draw(st.integers(0, 1 << 60)),
        spans=tuple(spans),
    )


rates = st.builds(
    Rate,
    name=names,
    iteration_s=st.floats(1e-9, 1000),
    noise_s=seconds,
    iterations=st.integers(0, 1000),
    samples_per_s=st.none() | seconds,
)
runs = st.builds(
    Run,
    model=names,
    workers=st.integers(1, 4096),
    backend=names,
    machine=names,
    decision=st.sampled_from(["planned", "ddp", "reverted", "undecided"]),
    reason=names,
    planner=names,
    messages=st.integers(0, 1000),
    baseline=st.none() | rates,
    planned=st.none() | rates,
    steady=st.none() | rates,
    predicted_baseline_s=st.none() | seconds,
    predicted_planned_s=st.none() | seconds,
    overhead_iterations=st.none() | seconds,
    events=st.lists(st.builds(Event, iteration=st.integers(0, 100), text=names), max_size=3).map(
        tuple
    ),
    rates=st.lists(rates, max_size=3).map(tuple),
    results=st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
documents = st.one_of(profiles(), networks(), plans(), timelines(), comparisons(), runs)
"""A document of any kind."""
