"""Plans: which tensors a message holds, how many bytes, and what differs from a model."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.plan import Message, MessageCollective, Payload, Plan, Tensor
from syncline.plan.profile import Profile
from syncline.plan.quantities import BYTES_PER_ELEMENT
from tests import strategies as some
from tests.plan.documents import plan_of


@pytest.mark.parametrize(
    ("tried", "tensors", "sizes"),
    [
        # A split tensor belongs to each message that holds a part of it.
        (plan_of([3, 4, 3], (0, 5), (5, 10)), [[0, 1], [1, 2]], [20, 20]),
        # Preempted: another message goes between two parts.
        (plan_of([6, 2], (0, 3), (6, 8), (3, 6)), [[0], [1], [0]], [12, 8, 12]),
        # A tensor without elements goes with the element before it, leading ones with the first.
        (plan_of([3, 0, 4], (0, 3), (3, 7)), [[0, 1], [2]], [12, 16]),
        (plan_of([0, 0, 4], (0, 4)), [[0, 1, 2]], [16]),
        (plan_of([4, 0, 0], (0, 4)), [[0, 1, 2]], [16]),
        (plan_of([0, 3, 0, 4, 0], (0, 3), (3, 7)), [[0, 1, 2], [3, 4]], [12, 16]),
        (plan_of([5, 0, 4], (0, 2), (2, 7), (7, 9)), [[0], [0, 1, 2], [2]], [8, 20, 8]),
        # No elements at all: one empty message holds them.
        (plan_of([0], (0, 0)), [[0]], [0]),
        (plan_of([0, 0], (0, 0)), [[0, 1]], [0]),
        # Several dtypes: bytes are counted part by part.
        (plan_of([3, 4], (0, 5), (5, 7), dtypes="hd"), [[0, 1], [1]], [6 + 16, 16]),
    ],
)
def test_messages_by_hand(tried: Plan, tensors: list[list[int]], sizes: list[int]) -> None:
    assert [list(found) for found in tried.message_tensors()] == tensors
    assert list(tried.message_bytes()) == sizes


@some.many
@given(some.plans())
def test_messages_against_one_element_at_a_time(tried: Plan) -> None:
    owner = [i for i, tensor in enumerate(tried.tensors) for _ in range(tensor.elements)]
    rows = zip(tried.messages, tried.message_tensors(), tried.message_bytes(), strict=True)
    for message, tensors, size in rows:
        held = owner[message.start : message.stop]
        assert {i for i in tensors if tried.tensors[i].elements} == set(held)
        assert size == sum(BYTES_PER_ELEMENT[tried.tensors[i].dtype] for i in held)
    assert sum(tried.message_bytes()) == sum(tensor.size_bytes for tensor in tried.tensors)
    # Every tensor is in a message, those without elements in exactly one.
    counts = [sum(i in t for t in tried.message_tensors()) for i in range(len(tried.tensors))]
    for tensor, count in zip(tried.tensors, counts, strict=True):
        assert count >= 1
        assert tensor.elements or count == 1


def test_labels() -> None:
    tried = plan_of([3, 4, 5], (0, 12))
    assert tried.label(range(1)) == "t0"
    assert tried.label(range(3)) == "t0 .. t2 (3)"
    assert tried.label(range(0)) == "(empty)"


@some.few
@given(some.layer_profiles(), st.data())
def test_merging_covers_whole_tensors(profile: Profile, data: st.DataObject) -> None:
    count = len(profile.gradients)
    cuts = data.draw(st.sets(st.integers(0, count - 1)))
    last = sorted(cuts | {count - 1})
    made = Plan.merging("p", profile, 3, last)
    assert made.elements == sum(g.elements for g in profile.gradients)
    assert [t.name for t in made.tensors] == [g.name for g in profile.gradients]
    # Each message is the tensors between two cuts, apart from those without elements.
    groups = [range(a + 1, b + 1) for a, b in itertools.pairwise([-1, *last])]
    solid = [[i for i in g if profile.gradients[i].elements] for g in groups]
    found = [[i for i in g if profile.gradients[i].elements] for g in made.message_tensors()]
    assert [g for g in found if g] == [g for g in solid if g]


def test_merging_nothing_but_empty_tensors() -> None:
    made = Plan.merging("p", some.profile_of([1, 1], [0, 0]), 2, [0, 1])
    assert made.messages == (Message(start=0, stop=0),)


PLANNED = plan_of([3, 4], (0, 7))
FIRST = PLANNED.tensors[0]


def tensor(name: str, elements: int, dtype: str = "float32") -> Tensor:
    return Tensor(name=name, elements=elements, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "workers", "said"),
    [
        (PLANNED.tensors, 2, "for 4 workers, this job has 2"),
        ([FIRST], 4, "2 gradients of 'net', this model has 1; the first difference is 't1'"),
        ([*PLANNED.tensors, tensor("new", 1)], 4, "has 3; the first difference is 'new'"),
        ([FIRST, tensor("new", 4)], 4, "no gradient 'new'"),
        ([FIRST, tensor("t1", 5)], 4, "'t1' has 4 elements of float32 in the plan, 5 of float32"),
        ([FIRST, tensor("t1", 4, "bfloat16")], 4, "of float32 in the plan, 4 of bfloat16"),
    ],
)
def test_the_difference_is_named(tensors: list[Tensor], workers: int, said: str) -> None:
    assert said in (PLANNED.difference(tensors, workers) or "")
    for same in (PLANNED.tensors, PLANNED.tensors[::-1]):  # whatever the order
        assert PLANNED.difference(same, 4) is None


@pytest.mark.parametrize(
    ("payload", "collective", "span", "dtypes", "said"),
    [
        ("sparse", "all-reduce", 3, "ff", "and holds a part of a tensor"),
        ("bfloat16", "all-reduce", 4, "dd", "and holds 't0' of float64; only float32 can"),
        ("sparse", "reduce-scatter", 4, "ff", "which no reduce-scatter can"),
        ("float16", "reduce-scatter", 4, "ff", "all-gathers travel as dense and float16"),
    ],
)
def test_what_cannot_travel_lossily(
    payload: Payload, collective: MessageCollective, span: int, dtypes: str, said: str
) -> None:
    dense = plan_of([4, 4], (0, span), (span, 8), dtypes=dtypes)
    first = Message(start=0, stop=span, payload=payload, collective=collective)
    messages = [first, dense.messages[1]]
    if collective == "reduce-scatter":
        messages.append(Message(start=0, stop=span, collective="all-gather"))
    with pytest.raises(UserError, match=said):
        msgspec.structs.replace(dense, messages=tuple(messages))


def test_plans_of_earlier_releases_are_dense() -> None:
    written = plan_of([4], (0, 4)).to_json()
    earlier = "\n".join(line for line in written.splitlines() if "payload" not in line)
    earlier = earlier.replace('"delay_s": 0.0,', '"delay_s": 0.0')
    assert earlier != written
    read = Plan.from_json(earlier)
    assert not read.is_lossy
    assert read == plan_of([4], (0, 4))
