"""Fusion: DDP's buckets, those up to a threshold, Horovod's ticks and DeAR's buckets.

Plans by hand: test_by_hand.
"""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.network import Network
from syncline.plan.plan import Message
from syncline.plan.planners.ddp import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES, Ddp
from syncline.plan.planners.dear import Dear
from syncline.plan.planners.horovod import Buckets, Horovod
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict, predict_iteration_s
from tests import strategies as some
from tests.plan.planners.instances import UNIT_LINE, chain, chains, spans

FREE = Network.line(workers=2, a_s=0, b_s_per_byte=0)
counts = st.lists(st.integers(0, 300), min_size=1, max_size=40)


def require_torchs_buckets(planner: Ddp, elements: list[int], dtypes: list[str]) -> None:
    """Require the buckets that the reducer makes of gradients that become ready in this order."""
    torch, dist = (pytest.importorskip(name) for name in ("torch", "torch.distributed"))
    order = range(len(elements))
    given = [
        torch.empty(elements[i], dtype=getattr(torch, dtypes[i]), device="meta") for i in order
    ]
    caps = [planner.first_bucket_bytes, planner.bucket_bytes]
    if planner.from_the_last:  # with the parameters in their own order
        made, _ = dist._compute_bucket_assignment_by_size(given[::-1], caps)
        made = [[len(elements) - 1 - i for i in reversed(bucket)] for bucket in reversed(made)]
    else:
        made, _ = dist._compute_bucket_assignment_by_size(
            given, caps, [False for _ in order], order
        )
    profile = some.profile_of([1 for _ in order], elements)
    gradients = (
        msgspec.structs.replace(g, dtype=d) for g, d in zip(profile.gradients, dtypes, strict=True)
    )
    plan = planner.plan(msgspec.structs.replace(profile, gradients=tuple(gradients)), FREE)
    found = [[plan.tensors[t].name for t in tensors] for tensors in plan.message_tensors()]
    # A tensor without elements is counted with the message that holds the element before it.
    whole = [[name for name in names if elements[int(name[1:])]] for names in found]
    wanted = [[profile.gradients[i].name for i in bucket if elements[i]] for bucket in made]
    assert list(filter(None, whole)) == list(filter(None, wanted))


@some.many
@given(counts, st.integers(1, 1500), st.integers(1, 4000), st.booleans(), st.data())
def test_the_buckets_are_torchs(
    elements: list[int], first: int, cap: int, from_the_last: bool, data: st.DataObject
) -> None:
    dtype = st.sampled_from(
        data.draw(st.sampled_from([["float32"], ["float32", "bfloat16", "float64"]]))
    )
    dtypes = [data.draw(dtype) for _ in elements]
    planner = Ddp(first_bucket_bytes=first, bucket_bytes=cap, from_the_last=from_the_last)
    require_torchs_buckets(planner, elements, dtypes)


@some.few
@given(st.lists(st.integers(0, 1 << 23), min_size=1, max_size=40))
def test_the_default_caps_are_torchs(elements: list[int]) -> None:
    require_torchs_buckets(Ddp(), elements, ["float32" for _ in elements])
    first = pytest.importorskip("torch.distributed")._DEFAULT_FIRST_BUCKET_BYTES
    assert (first, 25 << 20) == (DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_BUCKET_BYTES)


@some.many
@given(counts, st.integers(0, 3000))
def test_only_one_tensor_exceeds_the_threshold(elements: list[int], threshold: int) -> None:
    profile = some.profile_of([1] * len(elements), elements)
    plan = Buckets(threshold_bytes=threshold).plan(profile, FREE)
    sizes = plan.message_bytes()
    for tensors, size in zip(plan.message_tensors(), sizes, strict=True):
        solid = [i for i in tensors if plan.tensors[i].elements]
        assert size <= threshold or len(solid) == 1
    # And it is greedy: no message could have taken the next one's first tensor as well.
    for size, after in zip(sizes, plan.message_tensors()[1:], strict=False):
        assert size + plan.tensors[after[0]].size_bytes > threshold


def test_ticks_by_hand() -> None:
    # Ready at 3, 4, 5 and 9.5 s; with cycles of 2 s handed over at 4, 4, 6 and 10.
    profile = chain([1, 1, 1, 4.5], [1, 2, 1, 1], [2, 0, 0, 0])
    plan = Horovod(cycle_s=2).plan(profile, UNIT_LINE)
    assert plan.messages == (
        Message(start=0, stop=3, delay_s=0),
        Message(start=3, stop=4, delay_s=1),
        Message(start=4, stop=5, delay_s=0.5),
    )
    # Sent from 4 to 7, from 7 to 8 and from 10 to 11.
    timeline = predict(profile, UNIT_LINE, plan).timeline
    sent = [(s.start_ns / 1e9, s.stop_ns / 1e9) for s in timeline.spans if s.kind == "message"]
    assert [times for times in sent if times[1] > times[0]] == [(4, 7), (7, 8), (10, 11)]
    assert timeline.iteration_ns == 11_000_000_000


@some.many
@given(some.layer_profiles(), st.integers(1, 3000), st.integers(0, 9000))
def test_cycle_by_cycle(profile: Profile, cycle_ns: int, threshold_bytes: int) -> None:
    planner = Horovod(cycle_s=cycle_ns / 1e9, threshold_bytes=threshold_bytes)
    plan = planner.plan(profile, Network.line(workers=4, a_s=1e-6, b_s_per_byte=1e-9))
    found = [(m.start, m.stop, round(m.delay_s * 1e9)) for m in plan.messages]

    # Tensors without elements hold up the one before them.
    pending: list[tuple[int, int]] = []  # (ready, elements)
    for gradient, ready in zip(profile.gradients, profile.ready_ns(), strict=True):
        if pending and (gradient.elements == 0 or pending[-1][1] == 0):
            pending[-1] = (ready, pending[-1][1] + gradient.elements)
        else:
            pending.append((ready, gradient.elements))
    expected = []
    start = 0
    for tick, group in itertools.groupby(pending, key=lambda p: math.ceil(p[0] / cycle_ns)):
        waiting = list(group)
        while waiting:  # FuseResponses
            ready, held = waiting.pop(0)
            while waiting and 4 * (held + waiting[0][1]) <= threshold_bytes:
                ready, more = waiting.pop(0)
                held += more
            expected.append((start, start + held, tick * cycle_ns - ready))
            start += held
    assert found == expected


@pytest.mark.parametrize(
    ("bucket_bytes", "stops"),
    [(0, [1, 3, 6, 7]), (13, [3, 6, 7]), (17, [3, 7]), (100, [7]), (28, [1, 7]), (29, [7])],
)
def test_buckets_fill_from_the_input_below_their_size(bucket_bytes: int, stops: list[int]) -> None:
    # In forward order 4, 12, 8 and 4 bytes.
    profile = chain([1] * 4, [1, 2, 3, 1], [1] * 4)
    plan = Dear(bucket_bytes=bucket_bytes).plan(profile, UNIT_LINE)
    assert [m.stop for m in plan.messages if m.collective == "reduce-scatter"] == stops


@some.many
@given(chains(), some.integer_curves(), st.integers(0, 9000))
def test_sums_precede_gathers(profile: Profile, curve: some.IntegerCurve, size: int) -> None:
    plan = Dear(bucket_bytes=size).plan(profile, curve.network(2))
    half = len(plan.messages) // 2
    kinds = ["reduce-scatter"] * half + ["all-gather"] * half
    assert [m.collective for m in plan.messages] == kinds
    summed = spans(plan)[:half]
    assert summed == sorted(summed) == spans(plan)[half:][::-1]
    found_s = predict_iteration_s(profile, curve.network(2), plan)
    assert found_s >= profile.computation_s * (1 - 1e-9)
