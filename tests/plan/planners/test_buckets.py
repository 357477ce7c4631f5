"""Fusion up to a threshold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.planners.horovod import Buckets
from tests import strategies as some

FREE = Network.line(workers=2, a_s=0, b_s_per_byte=0)


@some.many
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 3000))
def test_a_message_exceeds_the_threshold_only_if_one_tensor_does(
    elements: list[int], threshold: int
) -> None:
    profile = some.profile_of([1] * len(elements), elements)
    plan = Buckets(threshold_bytes=threshold).plan(profile, FREE)
    sizes = plan.message_bytes()
    for tensors, size in zip(plan.message_tensors(), sizes, strict=True):
        solid = [i for i in tensors if plan.tensors[i].elements]
        assert size <= threshold or len(solid) == 1
    # And it is greedy: no message could have taken the next one's first tensor as well.
    for size, after in zip(sizes, plan.message_tensors()[1:], strict=False):
        assert size + plan.tensors[after[0]].size_bytes > threshold


def test_by_hand() -> None:
    profile = some.profile_of([1] * 6, [1, 1, 3, 9, 1, 1])
    # 4 + 4, + 12 would be 20; 12, + 36 would be 48; 36 is over by itself; 4 + 4.
    assert Buckets(threshold_bytes=16).last_tensors(profile, FREE) == [1, 2, 3, 5]


def test_a_negative_threshold() -> None:
    with pytest.raises(UserError, match="threshold_bytes must be at least 0, found -1"):
        Buckets(threshold_bytes=-1)
