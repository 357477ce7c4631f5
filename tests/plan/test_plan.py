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


def plan(elements: list[int], *messages: tuple[int, int], dtypes: str = "") -> Plan:
    """Return a plan; ``dtypes`` has a letter a tensor: f(loat32), h(alf), d(ouble)."""
    letters = {"f": "float32", "h": "float16", "d": "float64"}
    return Plan(
        planner="hand",
        model="net",
        workers=2,
        tensors=tuple(
            Tensor(name=f"t{i}", elements=count, dtype=letters[letter])
            for i, (count, letter) in enumerate(
                zip(elements, dtypes or "f" * len(elements), strict=True)
            )
        ),
        messages=tuple(Message(start=a, stop=b) for a, b in messages),
    )


@pytest.mark.parametrize(
    ("tried", "tensors", "sizes"),
    [
        # One tensor a message, and all in one.
        (plan([3, 4], (0, 3), (3, 7)), [[0], [1]], [12, 16]),
        (plan([3, 4], (0, 7)), [[0, 1]], [28]),
        # A split tensor belongs to each message that holds a part of it.
        (plan([10], (0, 4), (4, 10)), [[0], [0]], [16, 24]),
        (plan([3, 4, 3], (0, 5), (5, 10)), [[0, 1], [1, 2]], [20, 20]),
        (plan([9], (0, 3), (3, 6), (6, 9)), [[0], [0], [0]], [12, 12, 12]),
        # Preempted: another message goes between two parts.
        (plan([6, 2], (0, 3), (6, 8), (3, 6)), [[0], [1], [0]], [12, 8, 12]),
        # A tensor without elements goes with the element before it, leading ones with the first.
        (plan([3, 0, 4], (0, 3), (3, 7)), [[0, 1], [2]], [12, 16]),
        (plan([0, 0, 4], (0, 4)), [[0, 1, 2]], [16]),
        (plan([4, 0, 0], (0, 4)), [[0, 1, 2]], [16]),
        (plan([0, 3, 0, 4, 0], (0, 3), (3, 7)), [[0, 1, 2], [3, 4]], [12, 16]),
        (plan([5, 0, 4], (0, 2), (2, 7), (7, 9)), [[0], [0, 1, 2], [2]], [8, 20, 8]),
        # No elements at all: one empty message holds them.
        (plan([0], (0, 0)), [[0]], [0]),
        (plan([0, 0], (0, 0)), [[0, 1]], [0]),
        # Several dtypes: bytes are counted part by part.
        (plan([3, 4], (0, 5), (5, 7), dtypes="hd"), [[0, 1], [1]], [6 + 16, 16]),
        (plan([1, 1, 1], (0, 3), dtypes="fhd"), [[0, 1, 2]], [4 + 2 + 8]),
        (plan([4, 4], (0, 2), (2, 6), (6, 8), dtypes="dh"), [[0], [0, 1], [1]], [16, 20, 4]),
    ],
)
def test_messages_by_hand(tried: Plan, tensors: list[list[int]], sizes: list[int]) -> None:
    assert [list(found) for found in tried.message_tensors()] == tensors
    assert list(tried.message_bytes()) == sizes


@some.many
@given(some.plans())
def test_messages_against_one_element_at_a_time(tried: Plan) -> None:
    owner = [i for i, tensor in enumerate(tried.tensors) for _ in range(tensor.elements)]
    for message, tensors, size in zip(
        tried.messages, tried.message_tensors(), tried.message_bytes(), strict=True
    ):
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
    tried = plan([3, 4, 5], (0, 12))
    assert tried.label(range(1)) == "t0"
    assert tried.label(range(3)) == "t0 .. t2 (3)"
    assert tried.label(range(0)) == "(empty)"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([(0, 4), (3, 7)], r"starts at element 4, found \[3, 7\)"),
        ([(0, 3), (4, 7)], r"starts at element 3, found \[4, 7\)"),
        ([(0, 7), (0, 7)], r"starts at element 7, found \[0, 7\)"),
        ([(0, 6)], "cover 6 of 7"),
        ([(0, 8)], "cover 8 of 7"),
        ([(1, 7)], r"starts at element 0, found \[1, 7\)"),
        ([(-1, 7)], r"starts at element 0, found \[-1, 7\)"),
        ([(0, 3), (3, 2), (2, 7)], "cover every gradient once"),
        ([], "cover 0 of 7"),
    ],
)
def test_messages_that_overlap_or_leave_a_gap(
    messages: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan([3, 4], *messages)


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


def test_merging_that_forgets_the_last_tensor() -> None:
    with pytest.raises(UserError, match="cover 3 of 7"):
        Plan.merging("p", some.profile_of([1, 1], [3, 4]), 2, [0])


def test_merging_nothing_but_empty_tensors() -> None:
    made = Plan.merging("p", some.profile_of([1, 1], [0, 0]), 2, [0, 1])
    assert made.messages == (Message(start=0, stop=0),)


# difference


PLANNED = plan([3, 4], (0, 7))


@pytest.mark.parametrize(
    ("tensors", "workers", "said"),
    [
        (PLANNED.tensors, 4, "the plan is for 2 workers, this job has 4"),
        (
            PLANNED.tensors[:1],
            2,
            "the plan has 2 gradients of 'net', this model has 1; the first difference is 't1'",
        ),
        (
            (*PLANNED.tensors, Tensor(name="new", elements=1)),
            2,
            "the plan has 2 gradients of 'net', this model has 3; the first difference is 'new'",
        ),
        (
            (PLANNED.tensors[0], Tensor(name="new", elements=4)),
            2,
            "the plan for 'net' has no gradient 'new', this model does",
        ),
        (
            (PLANNED.tensors[0], Tensor(name="t1", elements=5)),
            2,
            "gradient 't1' has 4 elements of float32 in the plan, 5 of float32 in this model",
        ),
        (
            (PLANNED.tensors[0], Tensor(name="t1", elements=4, dtype="bfloat16")),
            2,
            "gradient 't1' has 4 elements of float32 in the plan, 4 of bfloat16 in this model",
        ),
    ],
)
def test_the_difference_is_named(tensors: tuple[Tensor, ...], workers: int, said: str) -> None:
    assert PLANNED.difference(tensors, workers) == said


def test_no_difference_whatever_the_order() -> None:
    assert PLANNED.difference(PLANNED.tensors, 2) is None
    assert PLANNED.difference(PLANNED.tensors[::-1], 2) is None


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
    dense = plan([4, 4], (0, span), (span, 8), dtypes=dtypes)
    first = Message(start=0, stop=span, payload=payload, collective=collective)
    messages = [first, dense.messages[1]]
    if collective == "reduce-scatter":
        messages.append(Message(start=0, stop=span, collective="all-gather"))
    with pytest.raises(UserError, match=said):
        msgspec.structs.replace(dense, messages=tuple(messages))


def test_plans_of_earlier_releases_are_dense() -> None:
    written = plan([4], (0, 4)).to_json()
    earlier = "\n".join(line for line in written.splitlines() if "payload" not in line)
    earlier = earlier.replace('"delay_s": 0.0,', '"delay_s": 0.0')
    assert earlier != written
    read = Plan.from_json(earlier)
    assert not read.is_lossy
    assert read == plan([4], (0, 4))
