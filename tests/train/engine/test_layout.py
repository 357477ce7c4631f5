"""Where messages lie in the reducer's buckets, and who sums what of decoupled ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from syncline.plan.plan import Message, Plan
from syncline.train.engine.layout import BucketLayout, difference_from_plan, needs_engine, shares_of
from tests.strategies import many
from tests.train.engine.plans import plan_of
from tests.train.jobs import plain_plan


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw a plan with tensors of any size, none too, cut and ordered anyhow, some decoupled."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    total = sum(sizes)
    cuts = sorted(draw(st.sets(st.integers(0, total), max_size=6)) | {0, total})
    spans = list(itertools.pairwise(cuts)) or [(0, 0)]
    kinds = st.sampled_from(["all-reduce", "reduce-scatter"])
    rows = [(*span, draw(kinds)) for span in draw(st.permutations(spans))]
    scatters = [row for row in rows if row[2] == "reduce-scatter" and row[0] < row[1]]
    for first, last, _ in draw(st.permutations(scatters)):
        cut = draw(st.integers(first, last))
        parts = ((first, cut), (cut, last))
        rows += [(start, stop, "all-gather") for start, stop in parts if start < stop]
    return plan_of(sizes, rows, draw(st.integers(1, 5)), in_flight=draw(st.integers(1, 3)))


def ends_of(plan: Plan) -> list[int]:
    """Return where tensors begin, and where the last ends."""
    return [0, *itertools.accumulate(tensor.elements for tensor in plan.tensors)]


@many
@given(plans())
def test_buckets_hold_whole_tensors_in_order_and_no_more_than_needed(plan: Plan) -> None:
    """A bucket ends with a tensor that has elements, wherever no message goes on."""
    layout, ends = BucketLayout.of(plan), ends_of(plan)
    assert [t for bucket in layout.buckets for t in bucket] == list(range(len(plan.tensors)))
    for bucket, size in zip(layout.buckets, layout.bucket_caps, strict=True):
        assert size == sum(plan.tensors[t].size_bytes for t in bucket)
    crossed = {end for message in plan.messages for end in range(message.start + 1, message.stop)}
    firsts = {bucket[0] for bucket in layout.buckets}
    for number in range(1, len(plan.tensors)):
        goes_on = ends[number] in crossed or plan.tensors[number - 1].elements == 0
        assert (number in firsts) != goes_on


@many
@given(plans())
def test_places_are_the_messages_elements(plan: Plan) -> None:
    layout, ends = BucketLayout.of(plan), ends_of(plan)
    for message, place in zip(plan.messages, layout.places, strict=True):
        if message.start == message.stop:
            continue
        bucket = layout.buckets[place.bucket]
        first = ends[bucket[0]]
        assert (first + place.start, first + place.stop) == (message.start, message.stop)
        assert 0 <= place.start <= place.stop <= ends[bucket[-1] + 1] - first


@many
@given(plans())
def test_a_gradient_is_final_after_every_message_that_sums_or_gathers_it(plan: Plan) -> None:
    layout = BucketLayout.of(plan)
    for tensor, (start, stop) in enumerate(itertools.pairwise(ends_of(plan))):
        if start == stop:
            continue
        over = [n for n, m in enumerate(plan.messages) if m.start < stop and start < m.stop]
        assert sorted(layout.touching[tensor]) == over
        final = [n for n in over if plan.messages[n].collective != "reduce-scatter"]
        assert sorted(layout.completing[tensor]) == final


@many
@given(plans())
def test_a_gather_comes_after_its_sums(plan: Plan) -> None:
    layout = BucketLayout.of(plan)
    for number, (message, sources) in enumerate(zip(plan.messages, layout.sources, strict=True)):
        assert bool(sources) == (message.collective == "all-gather")
        assert all(source < number for source in sources)
        summed = [range(plan.messages[s].start, plan.messages[s].stop) for s in sources]
        for element in range(message.start, message.stop) if sources else ():
            assert sum(element in elements for elements in summed) == 1


@many
@given(plans())
def test_shares_are_disjoint_complete_and_of_sums_even(plan: Plan) -> None:
    for message, shares in zip(plan.messages, shares_of(plan), strict=True):
        if message.collective == "all-reduce":
            assert shares == ()
            continue
        assert len(shares) == plan.workers
        held = [e for pieces in shares for start, stop in pieces for e in range(start, stop)]
        assert sorted(held) == list(range(message.stop - message.start))
        if message.collective == "reduce-scatter":
            sizes = [sum(stop - start for start, stop in pieces) for pieces in shares]
            assert all(len(pieces) <= 1 for pieces in shares)
            assert max(sizes) == -(-(message.stop - message.start) // plan.workers)
            # Rows of equal length: what the all-to-all exchange needs. Later workers get less.
            assert sizes == sorted(sizes, reverse=True)


@many
@given(plans())
def test_gathered_shares_are_what_was_summed(plan: Plan) -> None:
    """A worker hands round exactly those elements that a reduce-scatter has left with it."""
    held: dict[str, set[tuple[int, int]]] = {"reduce-scatter": set(), "all-gather": set()}
    for message, workers in zip(plan.messages, shares_of(plan), strict=True):
        for worker, pieces in enumerate(workers):
            for start, stop in pieces:
                elements = range(message.start + start, message.start + stop)
                held[message.collective].update((worker, element) for element in elements)
    assert held["reduce-scatter"] == held["all-gather"]


def test_an_example_of_shares() -> None:
    sums = [(0, 7, "reduce-scatter"), (7, 10, "all-reduce")]
    assert shares_of(plan_of([10], [*sums, (2, 7, "all-gather"), (0, 2, "all-gather")], 3)) == (
        (((0, 3),), ((3, 6),), ((6, 7),)),
        (),
        (((0, 1),), ((1, 4),), ((4, 5),)),
        (((0, 2),), (), ()),
    )


PLAN = plain_plan()
NAMES = [tensor.name for tensor in reversed(PLAN.tensors)]
SIZES = ", ".join(map(str, PLAN.message_bytes()))


@pytest.mark.parametrize(
    ("buckets", "sizes", "expected"),
    [
        ("7 6, 5 4, 3 2 1 0", "1", None),
        ("6 7, 4 5, 0 1 2 3", "1", None),
        ("7 6, 5 4 3 2 1 0", "1", "planned 3 messages, DDP made 2 buckets"),
        ("7 6, 5 4 3, 2 1 0", "1", "bucket 1 differs"),
        ("5 4, 7 6, 3 2 1 0", "1", "bucket 0 differs"),
        # Without a rebuild, sizes are compared.
        (None, SIZES, None),
        (None, "4", "DDP made [4]"),
    ],
)
def test_other_buckets_are_named(buckets: str | None, sizes: str, expected: str | None) -> None:
    rebuilt = {} if buckets is None else {"rebuilt_per_bucket_param_indices": buckets}
    found = difference_from_plan(PLAN, NAMES, {**rebuilt, "bucket_sizes": sizes})
    assert found is None if expected is None else expected in found


def part(start: int = 0, stop: int = PLAN.elements, **how: object) -> Message:
    return Message(start=start, stop=stop, **how)  # type: ignore[arg-type]


HALVES = (part(collective="reduce-scatter"), part(collective="all-gather"))


@pytest.mark.parametrize(
    "changed",
    [
        {"wait": "need"},
        {"in_flight": 2},
        {"messages": HALVES},
        {"messages": (part(delay_s=5e-4),)},
        {"messages": (part(stop=100), part(100))},
        {"messages": (part(970), part(stop=970))},
    ],
    ids=["waits on need", "two in flight", "decoupled", "held back", "split", "turned"],
)
def test_what_needs_the_engine(changed: dict[str, object]) -> None:
    assert not needs_engine(PLAN)
    assert needs_engine(replace(PLAN, **changed))
