"""Where messages lie in the reducer's buckets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.plan import Message, Plan, Tensor
from syncline.train.engine.layout import BucketLayout
from tests.strategies import many


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw a plan with tensors of any size, none too, cut and ordered anyhow, some decoupled."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    total = sum(sizes)
    cuts = sorted(draw(st.sets(st.integers(0, total), max_size=6)) | {0, total})
    spans = list(itertools.pairwise(cuts)) or [(0, 0)]
    kinds = draw(st.lists(st.booleans(), min_size=len(spans), max_size=len(spans)))
    messages = draw(
        st.permutations(
            [
                Message(start=a, stop=b, collective="reduce-scatter" if halved else "all-reduce")
                for (a, b), halved in zip(spans, kinds, strict=True)
            ]
        )
    )
    scatters = [m for m in messages if m.collective == "reduce-scatter" and m.start < m.stop]
    for scatter in draw(st.permutations(scatters)):
        cut = draw(st.integers(scatter.start, scatter.stop))
        for start, stop in ((scatter.start, cut), (cut, scatter.stop)):
            if start < stop:
                messages.append(Message(start=start, stop=stop, collective="all-gather"))
    return Plan(
        planner="drawn",
        model="drawn",
        workers=draw(st.integers(1, 5)),
        tensors=tuple(Tensor(name=f"t{i}", elements=n) for i, n in enumerate(sizes)),
        messages=tuple(messages),
        in_flight=draw(st.integers(1, 3)),
    )


@many
@given(plans())
def test_buckets_hold_whole_tensors_in_order(plan: Plan) -> None:
    layout = BucketLayout.of(plan)
    assert [t for bucket in layout.buckets for t in bucket] == list(range(len(plan.tensors)))
    assert all(layout.buckets)
    for bucket, size in zip(layout.buckets, layout.bucket_bytes, strict=True):
        assert size == sum(plan.tensors[t].size_bytes for t in bucket)


@many
@given(plans())
def test_places_are_the_messages_elements(plan: Plan) -> None:
    layout = BucketLayout.of(plan)
    ends = [0, *itertools.accumulate(tensor.elements for tensor in plan.tensors)]
    for message, place in zip(plan.messages, layout.places, strict=True):
        if message.start == message.stop:
            continue
        bucket = layout.buckets[place.bucket]
        first = ends[bucket[0]]
        assert (first + place.start, first + place.stop) == (message.start, message.stop)
        assert 0 <= place.start <= place.stop <= ends[bucket[-1] + 1] - first


@many
@given(plans())
def test_a_bucket_is_no_larger_than_its_messages_need(plan: Plan) -> None:
    """Between two buckets no message could be cut, and within one some message is, or a tensor."""
    layout = BucketLayout.of(plan)
    ends = [0, *itertools.accumulate(tensor.elements for tensor in plan.tensors)]
    crossed = {end for message in plan.messages for end in range(message.start + 1, message.stop)}
    for bucket in layout.buckets[:-1]:
        assert ends[bucket[-1] + 1] not in crossed
    for bucket in layout.buckets:
        for tensor in bucket[1:]:
            assert ends[tensor] in crossed or plan.tensors[tensor - 1].elements == 0


@many
@given(plans())
def test_a_gradient_is_final_after_every_message_that_sums_or_gathers_it(plan: Plan) -> None:
    layout = BucketLayout.of(plan)
    ends = [0, *itertools.accumulate(tensor.elements for tensor in plan.tensors)]
    for tensor, (start, stop) in enumerate(itertools.pairwise(ends)):
        over = [n for n, m in enumerate(plan.messages) if m.start < stop and start < m.stop]
        if start == stop:
            continue
        assert sorted(layout.touching[tensor]) == over
        final = [n for n in over if plan.messages[n].collective != "reduce-scatter"]
        assert sorted(layout.completing[tensor]) == final
        covered = sum(
            min(stop, plan.messages[n].stop) - max(start, plan.messages[n].start) for n in final
        )
        assert covered == stop - start


@many
@given(plans())
def test_a_gather_comes_after_its_sums(plan: Plan) -> None:
    layout = BucketLayout.of(plan)
    for number, (message, sources) in enumerate(zip(plan.messages, layout.sources, strict=True)):
        assert bool(sources) == (message.collective == "all-gather")
        assert all(source < number for source in sources)
        for element in range(message.start, message.stop) if sources else ():
            assert (
                sum(plan.messages[s].start <= element < plan.messages[s].stop for s in sources) == 1
            )


@pytest.mark.parametrize(
    ("sizes", "spans", "buckets"),
    [
        ((4, 4), ((0, 4), (4, 8)), [[0], [1]]),
        ((4, 4), ((0, 8),), [[0, 1]]),
        ((4, 4, 4), ((0, 2), (2, 6), (6, 12)), [[0, 1, 2]]),
        ((4, 0, 4), ((0, 4), (4, 8)), [[0], [1, 2]]),
        ((0, 4, 0), ((0, 4),), [[0, 1], [2]]),
        ((6,), ((0, 2), (2, 4), (4, 6)), [[0]]),
    ],
)
def test_examples(
    sizes: tuple[int, ...], spans: tuple[tuple[int, int], ...], buckets: list[list[int]]
) -> None:
    plan = Plan(
        planner="by hand",
        model="model",
        workers=2,
        tensors=tuple(Tensor(name=str(i), elements=n) for i, n in enumerate(sizes)),
        messages=tuple(Message(start=a, stop=b) for a, b in reversed(spans)),
    )
    assert [list(bucket) for bucket in BucketLayout.of(plan).buckets] == buckets
