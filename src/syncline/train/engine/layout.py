"""A plan's messages in the reducer's buckets: their places, and whether buckets can match them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from syncline.plan.plan import Message, Plan


class BucketSlice(NamedTuple):
    """The elements ``[start, stop)`` of a bucket's flat buffer."""

    bucket: int
    start: int
    stop: int


class TensorPart(NamedTuple):
    """Elements ``[start, stop)`` of a tensor, which lie in a bucket from ``at`` on."""

    tensor: int
    start: int
    stop: int
    bucket: int
    at: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Buckets that hold whole tensors and whole messages, and each message's place in them.

    A message is a contiguous slice of the gradients, a bucket a contiguous buffer of whole tensors.
    Buckets are as small as both allow, since the reducer reports only full ones. But it has one
    list of caps for all dtypes: if there are several, each has a single bucket.
    """

    firsts: tuple[int, ...]  # of each tensor: its first element among all, and where they end
    buckets: tuple[range, ...]  # the tensors of each bucket, as indices into the plan's
    bucket_caps: tuple[int, ...]  # bytes at which DDP closes each bucket
    places: tuple[BucketSlice, ...]  # of each message
    tensors: tuple[range, ...]  # of each message: the tensors that must be ready to send it
    touching: tuple[tuple[int, ...], ...]  # of each tensor: the messages that hold some of it
    completing: tuple[tuple[int, ...], ...]  # of each tensor: the messages that make it final
    sources: tuple[tuple[int, ...], ...]  # of each all-gather: reduce-scatters whose sums it sends

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Lay out a plan's messages; O(tensors + messages log messages)."""
        tensors = plan.message_tensors()
        by_dtype = itertools.groupby(range(len(plan.tensors)), lambda t: plan.tensors[t].dtype)
        kinds = [list(run) for _, run in by_dtype]
        if len(kinds) > 1:
            buckets = tuple(range(run[0], run[-1] + 1) for run in kinds)
        else:
            buckets = _runs([tensor.elements for tensor in plan.tensors], tensors)
        sizes = [sum(plan.tensors[t].size_bytes for t in bucket) for bucket in buckets]
        bucket_of = {tensor: number for number, run in enumerate(buckets) for tensor in run}
        firsts = (0, *itertools.accumulate(t.elements for t in plan.tensors))
        places = []
        touching: list[list[int]] = [[] for _ in plan.tensors]
        for number, (message, members) in enumerate(zip(plan.messages, tensors, strict=True)):
            bucket = bucket_of[members[0]] if members else 0
            offset = firsts[buckets[bucket][0]]
            filling = (t for t in members if plan.tensors[t].elements)
            assert all(t in buckets[bucket] for t in filling), "a message of several dtypes"
            places.append(BucketSlice(bucket, message.start - offset, message.stop - offset))
            for tensor in members:
                touching[tensor].append(number)
        final = {n for n, m in enumerate(plan.messages) if m.collective != "reduce-scatter"}
        return cls(
            firsts=firsts,
            buckets=buckets,
            bucket_caps=tuple(sizes if len(kinds) == 1 else [max(sizes)] * len(sizes)),
            places=tuple(places),
            tensors=tensors,
            touching=tuple(map(tuple, touching)),
            completing=tuple(tuple(n for n in some if n in final) for some in touching),
            sources=_sources(plan),
        )

    def parts(self, message: int, begin: int, end: int) -> Iterator[TensorPart]:
        """Yield a message's parts of tensors in the elements ``[begin, end)`` of all gradients."""
        bucket = self.places[message].bucket
        for tensor in self.tensors[message]:
            first, after = self.firsts[tensor], self.firsts[tensor + 1]
            start, stop = max(begin, first), min(end, after)
            if start < stop:
                at = start - self.firsts[self.buckets[bucket][0]]
                yield TensorPart(tensor, start - first, stop - first, bucket, at)


def _sources(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return, for each all-gather, the reduce-scatters whose sums it sends, by element order."""
    scattered = [
        (number, m) for number, m in enumerate(plan.messages) if m.collective == "reduce-scatter"
    ]
    scattered.sort(key=lambda numbered: numbered[1].start)
    return tuple(
        tuple(n for n, s in scattered if s.start < message.stop and message.start < s.stop)
        if message.collective == "all-gather"
        else ()
        for message in plan.messages
    )


def _runs(elements: Sequence[int], spans: tuple[range, ...]) -> tuple[range, ...]:
    """Return the shortest runs of tensors such that every span lies in one of them.

    DDP closes a bucket at the tensor that fills it. So a tensor without elements shares a bucket
    with the tensors after it, although it shares a message with those before it.
    """
    joined = [False, *(before == 0 for before in elements[:-1])]
    """Whether a tensor is in the same run as the one before it."""
    for span in spans:
        filling = [tensor for tensor in span if elements[tensor]]
        for tensor in range(filling[0] + 1, filling[-1] + 1) if filling else ():
            joined[tensor] = True
    starts = [tensor for tensor, same in enumerate(joined) if not same]
    return tuple(range(a, b) for a, b in itertools.pairwise([*starts, len(elements)]))


def needs_engine(plan: Plan) -> bool:
    """Say whether a plan needs more than DDP's reducer can do by itself.

    The reducer all-reduces buckets of whole tensors one after the other, in the order in which
    gradients become ready, and ``backward`` waits for all of them. Those of several dtypes cannot
    be chosen.
    """
    ends = {0, *itertools.accumulate(tensor.elements for tensor in plan.tensors)}
    return (
        plan.wait == "need"
        or plan.is_lossy
        or len({tensor.dtype for tensor in plan.tensors}) > 1
        or plan.in_flight > 1
        or any(m.collective != "all-reduce" or m.delay_s > 0 for m in plan.messages)
        or any(not {m.start, m.stop} <= ends for m in plan.messages)
        or list(plan.messages) != sorted(plan.messages, key=lambda m: (m.start, m.stop))
    )


def difference_from_plan(
    plan: Plan, parameter_names: Sequence[str], logging_data: dict[str, Any]
) -> str | None:
    """Say how the reducer's buckets differ from the plan's messages, or None if they do not.

    The names and ``logging_data`` are the reducer's, in the order of its parameters.
    """
    planned = [
        frozenset(plan.tensors[index].name for index in tensors)
        for tensors in plan.message_tensors()
    ]
    listed = logging_data.get("rebuilt_per_bucket_param_indices", "")
    if not listed:
        # DDP does not rebuild when it looks for unused parameters, and then reports only sizes.
        sizes = [int(size) for size in logging_data["bucket_sizes"].split(", ")]
        if sizes == list(plan.message_bytes()):
            return None
        return f"planned messages of {list(plan.message_bytes())} bytes, DDP made {sizes}"
    found = [
        frozenset(parameter_names[int(index)] for index in bucket.split())
        for bucket in listed.split(", ")
    ]
    if len(found) != len(planned):
        return f"planned {len(planned)} messages, DDP made {len(found)} buckets"
    for number, (expected, actual) in enumerate(zip(planned, found, strict=True)):
        if expected != actual:
            differing = sorted(expected ^ actual)[0]
            return f"bucket {number} differs from the planned message: see {differing!r}"
    return None


Shares = tuple[tuple[tuple[int, int], ...], ...]
"""Of each worker: its elements ``[start, stop)``, counted from the start of the message."""


def shares_of(plan: Plan) -> tuple[Shares, ...]:
    """Return the workers' shares in each message; empty for all-reduces.

    A reduce-scatter of n elements leaves worker r with elements ``[r c, (r + 1) c)`` for
    ``c = ceil(n / P)``, cut to n. In an all-gather each worker sends the elements that earlier
    reduce-scatters left on it.
    """
    return tuple(
        _shares(message, [plan.messages[number] for number in sources], plan.workers)
        for message, sources in zip(plan.messages, _sources(plan), strict=True)
    )


def sum_shares(message: Message, workers: int) -> list[tuple[int, int]]:
    """Return the elements ``[start, stop)`` of the gradients that each worker has after a sum."""
    parts = [even_part(message.stop - message.start, workers, worker) for worker in range(workers)]
    return [(message.start + start, message.start + stop) for start, stop in parts]


def even_part(elements: int, parts: int, number: int) -> tuple[int, int]:
    """Return the elements of one part of an even cut, as ``torch.chunk`` makes it."""
    size = -(-elements // parts)
    return min(number * size, elements), min((number + 1) * size, elements)


def _shares(message: Message, sources: list[Message], workers: int) -> Shares:
    if message.collective == "all-reduce":
        return ()
    shares: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    for source in sources or [message]:
        for pieces, (begin, end) in zip(shares, sum_shares(source, workers), strict=True):
            start, stop = max(begin, message.start), min(end, message.stop)
            if start < stop:
                pieces.append((start - message.start, stop - message.start))
    return tuple(map(tuple, shares))
