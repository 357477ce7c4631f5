"""A small document of each kind, and plans by hand."""

from __future__ import annotations

import msgspec

from syncline.plan.cost import CostCurve, CostSegment
from syncline.plan.document import Document
from syncline.plan.network import Contention, Link, Measurement, Network
from syncline.plan.plan import Message, Plan, Tensor
from syncline.plan.prediction import Comparison, Prediction
from syncline.plan.profile import Baseline, Gradient, Operation, Profile
from syncline.plan.run import Event, PhaseSpan, Rate, Run
from syncline.plan.timeline import Span, Timeline

PROFILE = Profile(
    model="net",
    device="cpu",
    workers=2,
    iterations=3,
    operations=(
        Operation(name="f", phase="forward", duration_s=0.5),
        Operation(name="b2", phase="backward", duration_s=0.25, after=(0,)),
        Operation(name="b1", phase="backward", duration_s=0.25, after=(0, 1)),
        Operation(name="u", phase="update", duration_s=0.125, after=(2,)),
    ),
    gradients=(
        Gradient(name="w2", elements=10, ready_after=1, needed_by=0),
        Gradient(name="w1", elements=30, dtype="float16", ready_after=2),
    ),
    baseline=Baseline(iteration_s=2.0, noise_s=0.01, iterations=9),
)
NETWORK = Network(
    name="lan",
    workers=2,
    all_reduce=CostCurve(
        segments=(
            CostSegment(start_bytes=0, cost_s=1e-3, s_per_byte=1e-8),
            CostSegment(start_bytes=4096, cost_s=2e-3, s_per_byte=5e-9),
        )
    ),
    contention=Contention(computing=1.5, exchange=1.25),
    link=Link(alpha_s=1e-4, beta_s_per_byte=1e-9, gamma_s_per_byte=1e-10),
    points=(Measurement(size_bytes=64, time_s=1e-3, repetitions=5),),
    fit_error=0.02,
    fit_error_max=0.1,
)
PLAN = Plan(
    planner="merge",
    model="net",
    workers=2,
    tensors=(Tensor(name="w2", elements=10), Tensor(name="w1", elements=30, dtype="float16")),
    messages=(Message(start=0, stop=15), Message(start=15, stop=40)),
)
TIMELINE = Timeline(
    name="merge",
    source="predicted",
    iteration_ns=9,
    spans=(
        Span(lane="compute", start_ns=0, stop_ns=5, label="f", kind="forward"),
        Span(lane="communication", start_ns=5, stop_ns=9, label="w", kind="message", size_bytes=4),
    ),
)
COMPARISON = Comparison(
    model="net",
    network="lan",
    workers=2,
    predictions=(
        Prediction(
            planner="ddp",
            messages=2,
            iteration_s=2.0,
            computation_s=1.0,
            communication_s=1.5,
            exposed_s=1.0,
            lower_bound_s=1.5,
        ),
    ),
    chosen="ddp",
    reason="only one",
)
RUN = Run(
    model="net",
    workers=2,
    backend="gloo",
    machine="one",
    decision="planned",
    reason="it gains",
    planner="merge",
    messages=2,
    baseline=Rate(name="DDP", iteration_s=2.0, noise_s=0.1, iterations=40),
    phases=(PhaseSpan(name="profiling", start=1, iterations=2, seconds=0.5),),
    events=(Event(iteration=3, text="measured"),),
    results={"accuracy": 0.5},
)
DTYPES = {"f": "float32", "h": "float16", "d": "float64"}


def plan_of(elements: list[int], *messages: tuple[int, int], dtypes: str = "") -> Plan:
    """Return a plan of 4 workers; ``dtypes`` has a letter a tensor: f(loat32), h(alf), d(ouble)."""
    pairs = zip(elements, dtypes or "f" * len(elements), strict=True)
    return Plan(
        planner="hand",
        model="net",
        workers=4,
        tensors=tuple(
            Tensor(name=f"t{i}", elements=count, dtype=DTYPES[letter])
            for i, (count, letter) in enumerate(pairs)
        ),
        messages=tuple(Message(start=a, stop=b) for a, b in messages),
    )


def prediction(planner: str, iteration_s: float, *, computation_s: float = 0.1) -> Prediction:
    """Return DDP's prediction as another planner's, with other times."""
    times = {"computation_s": computation_s, "exposed_s": iteration_s - computation_s}
    row = COMPARISON.predictions[0]
    return msgspec.structs.replace(row, planner=planner, iteration_s=iteration_s, **times)


def rate(iteration_s: float, noise_s: float = 0.1) -> Rate:
    return Rate(name="any", iteration_s=iteration_s, noise_s=noise_s, iterations=20)


EXAMPLES: tuple[Document, ...] = (PROFILE, NETWORK, PLAN, TIMELINE, COMPARISON, RUN)
