"""Where a plan's messages lie in the reducer's buckets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from syncline.model.plan import Plan

__all__ = ["Layout", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """The elements ``[start, stop)`` of a bucket's flat buffer."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Buckets that hold whole tensors and whole messages, and each message's place in them.

    A message is a contiguous slice of the gradients, a bucket a contiguous buffer of whole tensors.
    Buckets are as small as both allow, since the reducer reports only full ones.
    """

    buckets: tuple[range, ...]
    """The tensors of each bucket, as indices into the plan's."""
    bucket_bytes: tuple[int, ...]
    places: tuple[Place, ...]
    """Of each message."""
    tensors: tuple[range, ...]
    """Of each message: those that must be ready before it may leave."""
    touching: tuple[tuple[int, ...], ...]
    """Of each tensor: the messages that hold some of it."""
    completing: tuple[tuple[int, ...], ...]
    """Of each tensor: the messages after which its gradient is final."""
    sources: tuple[tuple[int, ...], ...]
    """Of each message: the reduce-scatters whose sums it hands round, for an all-gather."""
    bucket_of: tuple[int, ...]
    """Of each tensor."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Lay out a plan's messages; O(tensors + messages log messages)."""
        tensors = plan.message_tensors()
        buckets = _runs([tensor.elements for tensor in plan.tensors], tensors)
        bucket_of = [0] * len(plan.tensors)
        for bucket, members in enumerate(buckets):
            for tensor in members:
                bucket_of[tensor] = bucket
        first_element = [0, *itertools.accumulate(t.elements for t in plan.tensors)]
        places = []
        touching: list[list[int]] = [[] for _ in plan.tensors]
        completing: list[list[int]] = [[] for _ in plan.tensors]
        for number, message in enumerate(plan.messages):
            members = tensors[number]
            bucket = bucket_of[members[0]] if members else 0
            offset = first_element[buckets[bucket][0]]
            places.append(Place(bucket, message.start - offset, message.stop - offset))
            for tensor in members:
                touching[tensor].append(number)
                if message.collective != "reduce-scatter":
                    completing[tensor].append(number)
        return cls(
            buckets=buckets,
            bucket_bytes=tuple(sum(plan.tensors[t].size_bytes for t in b) for b in buckets),
            places=tuple(places),
            tensors=tensors,
            touching=tuple(map(tuple, touching)),
            completing=tuple(map(tuple, completing)),
            sources=_sources(plan),
            bucket_of=tuple(bucket_of),
        )


def _sources(plan: Plan) -> tuple[tuple[int, ...], ...]:
    scattered = [
        (number, m) for number, m in enumerate(plan.messages) if m.collective == "reduce-scatter"
    ]
    return tuple(
        tuple(n for n, s in scattered if s.start < message.stop and message.start < s.stop)
        if message.collective == "all-gather"
        else ()
        for message in plan.messages
    )


def _runs(elements: Sequence[int], spans: tuple[range, ...]) -> tuple[range, ...]:
    """Return the smallest runs of tensors that no span crosses the ends of.

    A bucket of DDP is closed by the tensor that fills it, so a tensor without elements goes with
    the tensors after it, although a message has it with those before it.
    """
    joined = [False, *(before == 0 for before in elements[:-1])]
    """Whether a tensor is in the same run as the one before it."""
    for span in spans:
        filling = [tensor for tensor in span if elements[tensor]]
        for tensor in range(filling[0] + 1, filling[-1] + 1) if filling else ():
            joined[tensor] = True
    starts = [tensor for tensor, same in enumerate(joined) if not same]
    return tuple(range(a, b) for a, b in itertools.pairwise([*starts, len(elements)]))
