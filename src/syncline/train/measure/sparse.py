"""How fast this worker selects and merges the elements of a sparse exchange."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np
import torch

from syncline import _native
from syncline.plan.sparse_costs import SparseSpeeds

ELEMENTS = 1 << 22
"""Gradient, residual and average then take 50 MB, more than most caches, as a model's do."""
DISTINCT_VALUES = 1 << 16
"""Random numbers, repeated to fill them: drawing all would take longer than the measurement."""
ENTRIES = 20_000
OVERHEAD_ELEMENTS = 64  # elements, and entries, of a message whose time is all overhead
REPETITIONS = 3
DENSITY = 0.001
WIDEST_VECTORS = -1
"""The native core's code for the widest vector instructions that the processor has."""
SEED = 6


def sparse_speeds() -> SparseSpeeds:
    """Measure selecting and merging on this worker, in some hundredths of a second.

    Selecting checks a gradient for values that are not finite, adds it to its residual, takes out
    the largest elements and writes the average. Merging encodes, decodes and merges two vectors.
    """
    random = np.random.default_rng(SEED)
    return SparseSpeeds(
        select_s_per_element=_selecting_s(random, ELEMENTS) / ELEMENTS,
        merge_s_per_entry=_merging_s(random, ENTRIES) / (2 * ENTRIES),
        message_s=_selecting_s(random, OVERHEAD_ELEMENTS),
        round_s=_merging_s(random, OVERHEAD_ELEMENTS),
    )


def _selecting_s(random: np.random.Generator, elements: int) -> float:
    gradient, residual = (
        torch.from_numpy(np.resize(random.standard_normal(DISTINCT_VALUES, np.float32), elements))
        for _ in range(2)
    )
    average = torch.empty(elements)
    part = (residual.data_ptr(), gradient.data_ptr(), 0, elements)
    k = max(1, round(DENSITY * elements))

    def select() -> None:
        _native.first_not_finite(gradient.data_ptr(), elements, WIDEST_VECTORS)
        indices, values, *_ = _native.select([part], 0.0, k, k, k, 0, True, WIDEST_VECTORS)
        average.zero_().numpy()[indices] = values

    return _least_s(select)


def _merging_s(random: np.random.Generator, entries: int) -> float:
    length = round(entries / DENSITY)
    ends, counts = np.array([length], np.uint64), np.array([entries], np.uint64)

    def vector() -> tuple[np.ndarray, np.ndarray]:
        places = np.sort(random.choice(length, entries, replace=False)).astype(np.uint32)
        return places, random.standard_normal(entries, np.float32)

    (indices_a, values_a), (indices_b, values_b) = vector(), vector()
    message = np.empty(8 * entries, np.uint8)

    def merge() -> None:
        coded = _native.code_indices(indices_b)
        message[: len(coded)] = coded
        message[4 * entries :] = values_b.view(np.uint8)
        arrived, _ = _native.decode_indices(message[: 4 * entries], entries, length)
        values = message[4 * entries :].copy().view(np.float32)
        parts = _native.sparse_merge(indices_a, values_a, arrived, values, ends, counts)
        _native.sparse_divide(indices_a, values_a, parts[2])

    return _least_s(merge)


def _least_s(work: Callable[[], None]) -> float:
    """Return the shortest time, which is the least disturbed. The first repetition warms up."""
    return min(timeit.repeat(work, number=1, repeat=REPETITIONS + 1)[1:])
