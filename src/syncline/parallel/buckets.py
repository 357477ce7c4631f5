"""Plans as the buckets of DistributedDataParallel's reducer, and the check that they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from syncline.model.plan import Plan

__all__ = [
    "BYTES_PER_MIB",
    "difference_from_plan",
    "needs_engine",
    "unbucketable",
]

BYTES_PER_MIB = 1024 * 1024


def needs_engine(plan: Plan) -> bool:
    """Say whether a plan is more than DDP's reducer can do by itself.

    The reducer all-reduces one bucket after the other as soon as each is full, and ``backward``
    waits for all of them.
    """
    return (
        plan.wait == "need"
        or plan.is_lossy
        or plan.in_flight > 1
        or any(m.collective != "all-reduce" or m.delay_s > 0 for m in plan.messages)
        or unbucketable(plan) is not None
    )


def unbucketable(plan: Plan) -> str | None:
    """Say why no buckets can be the plan's messages, or None if some can.

    A bucket holds whole tensors, and buckets are sent in the order in which they become full.
    """
    ends = {0, *itertools.accumulate(tensor.elements for tensor in plan.tensors)}
    for number, message in enumerate(plan.messages):
        if message.start not in ends or message.stop not in ends:
            return f"message {number} splits a tensor, a bucket holds whole ones"
    if list(plan.messages) != sorted(plan.messages, key=lambda m: (m.start, m.stop)):
        return "its messages are not in the order in which gradients become ready"
    return None


def difference_from_plan(
    plan: Plan, parameter_names: Sequence[str], logging_data: dict[str, Any]
) -> str | None:
    """Say how the reducer's buckets differ from the plan's messages, or None if they do not.

    Args:
        plan: what the buckets should be.
        parameter_names: the names of the reducer's parameters, in its order.
        logging_data: ``DistributedDataParallel._get_ddp_logging_data()``.
    """
    planned = [
        frozenset(plan.tensors[index].name for index in tensors)
        for tensors in plan.message_tensors()
    ]
    listed = logging_data.get("rebuilt_per_bucket_param_indices", "")
    if not listed:
        # DDP does not rebuild when it looks for unused parameters, and then tells only sizes.
        sizes = [int(size) for size in logging_data["bucket_sizes"].split(", ")]
        if sizes == list(plan.message_bytes()):
            return None
        return f"planned messages of {list(plan.message_bytes())} bytes, DDP made {sizes}"
    found = [
        frozenset(parameter_names[int(index)] for index in bucket.split())
        for bucket in listed.split(", ")
    ]
    if found == planned:
        return None
    if len(found) != len(planned):
        return f"planned {len(planned)} messages, DDP made {len(found)} buckets"
    for number, (expected, actual) in enumerate(zip(planned, found, strict=True)):
        if expected != actual:
            odd = sorted(expected ^ actual)[0]
            return f"bucket {number} differs from the planned message: see {odd!r}"
    return None
