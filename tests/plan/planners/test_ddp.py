"""DDP's buckets against torch's own function."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.network import Network
from syncline.plan.planners.ddp import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES, Ddp
from tests import strategies as some

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402 - only where there is torch

FREE = Network.line(workers=2, a_s=0, b_s_per_byte=0)


def torchs_buckets(elements: list[int], first_bytes: int, bucket_bytes: int) -> list[int]:
    """Return the last tensor of each bucket that the reducer makes."""
    tensors = [torch.empty(count, device="meta") for count in elements]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [first_bytes, bucket_bytes])
    assert [i for bucket in buckets for i in bucket] == list(range(len(elements)))
    return [bucket[-1] for bucket in buckets]


@some.many
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.integers(1, 1500),
    st.integers(1, 4000),
)
def test_the_buckets_are_torchs(elements: list[int], first: int, cap: int) -> None:
    profile = some.profile_of([1] * len(elements), elements)
    ours = Ddp(first_bucket_bytes=first, bucket_bytes=cap).last_tensors(profile, FREE)
    assert ours == torchs_buckets(elements, first, cap)


@some.few
@given(st.lists(st.integers(0, 1 << 23), min_size=1, max_size=40))
def test_the_default_caps_are_torchs(elements: list[int]) -> None:
    profile = some.profile_of([1] * len(elements), elements)
    first = dist._DEFAULT_FIRST_BUCKET_BYTES
    assert Ddp().last_tensors(profile, FREE) == torchs_buckets(elements, first, 25 << 20)
    assert (first, 25 << 20) == (DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_BUCKET_BYTES)


def test_by_hand() -> None:
    # Caps 8 and then 20 bytes: a bucket closes once it holds at least its cap.
    profile = some.profile_of([1] * 7, [1, 1, 4, 1, 6, 2, 1])
    planner = Ddp(first_bucket_bytes=8, bucket_bytes=20)
    # 4 + 4 = 8 closes; 16 + 4 = 20 closes; 24 closes; 8 + 4 is left over.
    assert planner.last_tensors(profile, FREE) == [1, 3, 4, 6]
