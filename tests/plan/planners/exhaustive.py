"""The best round of a few unit-sized elements, by trying everything: the oracle of ``overlap``.

It shares nothing with the product: the channel is written down here a second time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from hypothesis import strategies as st

from tests.strategies import IntegerCurve

Slices = list[tuple[int, int]]
Tails = Literal["needed last first", "needed first first", "shuffled"]


class Instance(NamedTuple):
    """One round of gradients whose elements have a byte each."""

    ready_ns: list[int]
    elements: list[int]
    tail_ns: list[int]
    curve: IntegerCurve

    def tensor_of(self) -> list[int]:
        return [tensor for tensor, count in enumerate(self.elements) for _ in range(count)]

    def end_ns(self, messages: Slices, in_flight: int) -> int:
        """Return max(arrival + tail), from the statement of the channel, event by event."""
        tensor_of = self.tensor_of()
        latency = self.curve.cost_ns(0)
        begun: list[int] = []
        arrived: list[int] = []
        end = 0
        for start, stop in messages:
            touched = range(tensor_of[start], tensor_of[stop - 1] + 1)
            ready = max(self.ready_ns[t] for t in touched)
            cost = self.curve.cost_ns(stop - start)
            if in_flight == 1:
                begun.append(max([ready, *arrived]))
                arrived.append(begun[-1] + cost)
            else:
                earlier = arrived[-in_flight] if len(arrived) >= in_flight else 0
                begun.append(max([ready, earlier, *begun]))
                arrived.append(max([begun[-1] + latency, *arrived]) + cost - latency)
            end = max(end, arrived[-1] + max(self.tail_ns[t] for t in touched))
        return end


def every_plan(elements: int) -> Iterator[Slices]:
    """Yield all cuts of so many elements in all orders."""
    for cuts in itertools.product((False, True), repeat=elements - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), elements]
        for order in itertools.permutations(itertools.pairwise(bounds)):
            yield list(order)


def least_end_ns(instance: Instance, in_flight: int, below_ns: int | None = None) -> int | None:
    """Return the least end of all cuts in all orders, one or two in flight.

    For every set of elements sent, in whatever messages and order, only those channels are kept
    that no other is as good as: what follows depends on when the next latency and the next
    transmission may begin, and on the end so far. O(3^n) for n elements, times those kept.

    Args:
        instance: what is to be sent.
        in_flight: 1 or 2.
        below_ns: look only for an end below this, which is faster.

    Returns:
        The least end, or None if none is below ``below_ns``.
    """
    tensor_of = instance.tensor_of()
    count = len(tensor_of)
    latency = instance.curve.cost_ns(0)
    costs = [instance.curve.cost_ns(size) - latency for size in range(count + 1)]
    runs = []
    for start in range(count):
        for stop in range(start + 1, count + 1):
            touched = range(tensor_of[start], tensor_of[stop - 1] + 1)
            ready = max(instance.ready_ns[t] for t in touched)
            tail = max(instance.tail_ns[t] for t in touched)
            runs.append(((1 << stop) - (1 << start), ready, costs[stop - start], tail))
    limit = below_ns if below_ns is not None else 1 << 62
    kept: list[list[tuple[int, int, int]]] = [[] for _ in range(1 << count)]
    kept[0] = [(0, 0, 0)]
    everything = (1 << count) - 1
    best = None
    for sent in range(everything):
        for latency_free, channel_free, end in kept[sent]:
            for span, ready, cost, tail in runs:
                if span & sent:
                    continue
                begun = max(ready, latency_free)
                arrived = max(begun + latency, channel_free) + cost
                ends = max(end, arrived + tail)
                if ends >= limit:
                    continue
                free = arrived if in_flight == 1 else max(begun, channel_free)
                after = sent | span
                if after == everything:
                    best = limit = ends
                    continue
                rest = kept[after]
                if any(a <= free and b <= arrived and e <= ends for a, b, e in rest):
                    continue
                kept[after] = [(a, b, e) for a, b, e in rest if a < free or b < arrived or e < ends]
                kept[after].append((free, arrived, ends))
        kept[sent] = []
    return best


class Kind(NamedTuple):
    """What random instances are alike in."""

    tails: Tails
    """``needed last first``: as in a chain of layers, the gradient that is ready last is needed
    first and has the longest tail; or the other way round; or neither."""
    latency: Literal["low", "high"]
    """Of a message: below half of what an element takes, or up to five times as much."""
    sizes: Literal["even", "log-uniform"]

    def __str__(self) -> str:
        return f"{self.tails}, {self.latency} latency, {self.sizes} sizes"

    @property
    def seed(self) -> str:
        """What instances are drawn from: never reworded, or recorded results are of others."""
        return f"{self.tails}, {self.latency} startup, {self.sizes} sizes"


KINDS: tuple[Kind, ...] = tuple(
    Kind(tails, latency, sizes)
    for tails in get_args(Tails)
    for latency in ("low", "high")
    for sizes in ("even", "log-uniform")
)


def random_instance(draw: random.Random, elements: int, kind: Kind) -> Instance:
    """Return an instance of so many elements, on a line."""
    count = draw.randint(2, min(6, elements))
    even = kind.sizes == "even"
    weights = [1.0 if even else 10 ** draw.uniform(0, 2) for _ in range(count)]
    numbers = [1] * count
    for _ in range(elements - count):
        numbers[draw.choices(range(count), weights)[0]] += 1
    slope = draw.randint(5, 15)
    gaps = [draw.choice([0, draw.randint(1, 3 * slope)]) for _ in range(count)]
    lengths = sorted(draw.randint(0, 6 * slope) for _ in range(count))
    if kind.tails == "needed first first":
        lengths.reverse()
    elif kind.tails == "shuffled":
        draw.shuffle(lengths)
    least, most = (0, slope // 2) if kind.latency == "low" else (slope, 5 * slope)
    return Instance(
        ready_ns=list(itertools.accumulate(gaps)),
        elements=numbers,
        tail_ns=lengths,
        curve=IntegerCurve(((0, draw.randint(least, most), slope),)),
    )


@st.composite
def instances(draw: st.DrawFn, *, max_elements: int = 6) -> Instance:
    """Draw a round of a few elements, with any curve."""
    count = draw(st.integers(1, 4))
    elements = [1] * count
    for _ in range(draw(st.integers(0, max_elements - count))):
        elements[draw(st.integers(0, count - 1))] += 1
    gaps = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    segments = [(0, draw(st.integers(0, 60)), draw(st.integers(0, 20)))]
    for start in sorted(draw(st.sets(st.integers(1, 6), max_size=2))):
        before = segments[-1]
        end = before[1] + before[2] * (start - before[0])
        segments.append((start, end + draw(st.integers(0, 20)), draw(st.integers(0, 20))))
    return Instance(
        ready_ns=list(itertools.accumulate(gaps)),
        elements=elements,
        tail_ns=draw(st.lists(st.integers(0, 80), min_size=count, max_size=count)),
        curve=IntegerCurve(tuple(segments)),
    )
