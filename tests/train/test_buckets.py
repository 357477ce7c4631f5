"""Plans as DDP's buckets, without a process group."""

from __future__ import annotations

import msgspec
import pytest

from syncline.plan.plan import Message
from syncline.train.engine.layout import difference_from_plan, needs_engine
from tests.train.jobs import plain_plan

PLAN = plain_plan()
NAMES = [tensor.name for tensor in reversed(PLAN.tensors)]


def listed(*buckets: str) -> dict[str, str]:
    return {"rebuilt_per_bucket_param_indices": ", ".join(buckets), "bucket_sizes": "1"}


def test_equal_buckets_are_no_difference() -> None:
    assert difference_from_plan(PLAN, NAMES, listed("7 6", "5 4", "3 2 1 0")) is None
    assert difference_from_plan(PLAN, NAMES, listed("6 7", "4 5", "0 1 2 3")) is None


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        (("7 6", "5 4 3 2 1 0"), "planned 3 messages, DDP made 2 buckets"),
        (("7 6", "5 4 3", "2 1 0"), "bucket 1 differs"),
        (("5 4", "7 6", "3 2 1 0"), "bucket 0 differs"),
    ],
)
def test_other_buckets_are_named(buckets: tuple[str, ...], expected: str) -> None:
    assert expected in str(difference_from_plan(PLAN, NAMES, listed(*buckets)))


def test_without_a_rebuild_sizes_are_compared() -> None:
    sizes = ", ".join(map(str, PLAN.message_bytes()))
    assert difference_from_plan(PLAN, NAMES, {"bucket_sizes": sizes}) is None
    assert "DDP made [4]" in str(difference_from_plan(PLAN, NAMES, {"bucket_sizes": "4"}))


TOTAL = PLAN.elements
FEATURES = [
    pytest.param({"wait": "need"}, id="waits on need"),
    pytest.param({"in_flight": 2}, id="two in flight"),
    pytest.param(
        {
            "messages": (
                Message(start=0, stop=TOTAL, collective="reduce-scatter"),
                Message(start=0, stop=TOTAL, collective="all-gather"),
            )
        },
        id="decoupled",
    ),
    pytest.param({"messages": (Message(start=0, stop=TOTAL, delay_s=5e-4),)}, id="held back"),
    pytest.param(
        {"messages": (Message(start=0, stop=100), Message(start=100, stop=TOTAL))}, id="split"
    ),
    pytest.param(
        {"messages": (Message(start=970, stop=TOTAL), Message(start=0, stop=970))}, id="turned"
    ),
]


@pytest.mark.parametrize("changed", FEATURES)
def test_what_needs_the_engine(changed: dict[str, object]) -> None:
    assert not needs_engine(PLAN)
    assert needs_engine(msgspec.structs.replace(PLAN, **changed))
