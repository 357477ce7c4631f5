"""Plans as DDP's buckets, without a process group."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from syncline.plan.plan import Message
from syncline.train.engine.layout import difference_from_plan, needs_engine
from tests.train.jobs import plain_plan

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
