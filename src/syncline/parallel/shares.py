"""Which worker sums which elements, where an all-reduce is sent in two halves."""

from __future__ import annotations

from syncline.model.plan import Message, Plan

__all__ = ["Shares", "shares_of"]

Shares = tuple[tuple[tuple[int, int], ...], ...]
"""Of each worker: its elements ``[start, stop)``, counted from the start of the message."""


def shares_of(plan: Plan) -> tuple[Shares, ...]:
    """Return the workers' shares in each message; empty for all-reduces.

    A reduce-scatter of n elements leaves worker r with elements ``[r c, (r + 1) c)`` for
    ``c = ceil(n / P)``, as far as there are so many. An all-gather hands round whatever of its
    elements the reduce-scatters before it have left where.
    """
    scattered = [m for m in plan.messages if m.collective == "reduce-scatter"]
    scattered.sort(key=lambda m: m.start)
    return tuple(_shares(message, scattered, plan.workers) for message in plan.messages)


def _shares(message: Message, scattered: list[Message], workers: int) -> Shares:
    if message.collective == "all-reduce":
        return ()
    sources = [message]
    if message.collective == "all-gather":
        sources = [s for s in scattered if s.start < message.stop and s.stop > message.start]
    shares: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    for source in sources:
        chunk = -(-(source.stop - source.start) // workers)
        for worker, pieces in enumerate(shares):
            start = max(source.start + worker * chunk, message.start)
            stop = min(source.start + (worker + 1) * chunk, source.stop, message.stop)
            if start < stop:
                pieces.append((start - message.start, stop - message.start))
    return tuple(map(tuple, shares))
