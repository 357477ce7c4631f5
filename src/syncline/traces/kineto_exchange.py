"""Which gradients a profiled step exchanges, as far as the trace tells their sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from syncline.traces.kineto_collectives import element_dtype
from syncline.traces.kineto_tasks import ReadyPoint, StepTasks

__all__ = ["Exchange", "ExchangedGradient", "exchange_of"]


class ExchangedGradient(NamedTuple):
    """One gradient of the exchange, pointing into the tasks of a step."""

    name: str
    elements: int
    dtype: str
    ready_after: int
    needed_by: int | None
    """None where the trace does not tell."""


class Exchange(NamedTuple):
    """What is exchanged in a step."""

    gradients: tuple[ExchangedGradient, ...]
    last_of_message: tuple[int, ...]
    """Index of the last gradient of each message; empty where nothing was exchanged."""


def exchange_of(step: StepTasks, notes: list[str]) -> Exchange | None:
    """Return the gradients of a step, or None with a note where the trace lacks their sizes.

    The gradient tensors themselves where their sizes are known and add up to the messages, else
    the messages.
    """
    parameters = [_sized(p) for p in step.parameters]
    known = bool(parameters) and all(p.elements is not None for p in parameters)
    if not step.messages:
        if known:
            return Exchange(_named("gradient", parameters, notes), ())
        notes.append(
            "the sizes of the gradients are not in the trace, so it gives phases and timelines "
            "but no profile: record it with record_shapes=True, or join the execution trace"
            if step.parameters
            else "no gradients became ready in the trace, so it gives phases and timelines but no "
            "profile: record whole training iterations"
        )
        return None
    if known:
        parts = _parts(step, parameters)
        if parts is not None:
            typed: list[ReadyPoint] = []
            for message, part in zip(step.messages, parts, strict=True):
                # What is sent is what counts: a hook may send another type than the gradients'.
                own = [p._replace(dtype=message.dtype or p.dtype) for p in parameters[part]]
                typed += [*own[:-1], own[-1]._replace(ready_after=message.ready_after)]
            last = tuple(part.stop - 1 for part in parts)
            return Exchange(_named("gradient", typed, notes), last)
        notes.append(
            "the gradients' sizes do not add up to the messages in the order in which they became "
            "ready; the messages are taken as gradients"
        )
    if any(m.elements is None for m in step.messages):
        notes.append(
            "the sizes of the messages are not in the trace, so it gives phases and timelines but "
            "no profile: record it with record_shapes=True or a PyTorch from 2024 on, or join the "
            "execution trace"
        )
        return None
    notes.append(
        "the sizes of single gradients are not in the trace; each message (bucket) is taken as one "
        "gradient, so a planner can split the messages but not group them anew"
    )
    grouped: list[ReadyPoint] = []
    first = 0
    for message in step.messages:
        stop = first
        while stop < len(parameters) and parameters[stop].ready_after <= message.ready_after:
            stop += 1
        needs = [p.needed_by for p in parameters[first:stop]]
        earliest = min((n for n in needs if n is not None), default=None)
        grouped.append(message._replace(needed_by=None if None in needs else earliest))
        first = stop
    return Exchange(_named("bucket", grouped, notes), tuple(range(len(grouped))))


def _sized(point: ReadyPoint) -> ReadyPoint:
    """Return the point without a size that is none: "[]" stands for a number and for nothing."""
    if point.elements == 1 and not element_dtype(point.dtype):
        return point._replace(elements=None)
    return point


def _parts(step: StepTasks, parameters: Sequence[ReadyPoint]) -> list[slice] | None:
    """Return the gradients that each message holds, or None if sizes contradict that."""
    parts: list[slice] = []
    first = 0
    for message in step.messages:
        stop = first
        total = 0
        while stop < len(parameters) and (
            total < message.elements
            if message.elements is not None
            else parameters[stop].ready_after < message.ready_after
        ):
            total += parameters[stop].elements or 0
            stop += 1
        if stop == first or (message.elements is not None and total != message.elements):
            return None
        parts.append(slice(first, stop))
        first = stop
    return parts if first == len(parameters) else None


def _named(
    kind: str, points: Sequence[ReadyPoint], notes: list[str]
) -> tuple[ExchangedGradient, ...]:
    dtypes = [element_dtype(p.dtype) for p in points]
    if None in dtypes:
        notes.append("the trace does not say the gradients' type; float32 is assumed")
    if any(p.needed_by is None for p in points):
        notes.append(
            "the trace does not tell which forward operator reads the parameters of some "
            f"{kind}s; they are taken as needed at the start of the forward pass"
        )
    ready = itertools.accumulate((p.ready_after for p in points), max)
    return tuple(
        ExchangedGradient(
            name=f"{kind} {index}",
            elements=point.elements or 0,
            dtype=dtype or "float32",
            ready_after=after,
            needed_by=point.needed_by,
        )
        for index, (point, dtype, after) in enumerate(zip(points, dtypes, ready, strict=True))
    )
