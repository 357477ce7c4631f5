"""``TritonMemory``: updates residuals and selects from them in one pass, by Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.train.sparse import selection_kernels as kernels
from syncline.train.sparse.memory import Taken, Tracked, Unit, require_selectable
from syncline.train.sparse.torch_memory import TorchMemory, moved_units
from syncline.train.sparse.vector import SparseVector, joined

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
SAMPLED_FROM = 4 * kernels.SAMPLE  # in a unit of fewer elements, all but zeros are candidates
CANDIDATES = 4
"""A unit has room for this many times k candidates, or :data:`SAMPLED_FROM` if that is more."""
MOST_TAKEN = 1 << 19  # for a larger k torch is faster: here one program finishes a whole unit


class TritonMemory(TorchMemory):
    """Memory of a GPU; also of the CPU, where Triton's interpreter runs the kernels."""

    def take(self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float) -> Taken:
        """Add gradients to residuals, take out those of largest magnitude, and leave zeros."""
        lengths = [sum(each.residual.numel() for each in unit) for unit in units]
        require_selectable(sum(lengths))
        if not sum(lengths):
            return SparseVector.empty(0)
        moved = moved_units(units, momentum)
        packed = select(moved, counts).cpu().numpy()
        said, found = np.split(packed, [2 * len(units)])
        indices, values = np.split(found, 2)
        taken = []
        start = first = 0
        for number, (unit, k) in enumerate(zip(units, counts, strict=True)):
            state, entries = said[2 * number : 2 * number + 2]
            one: SparseVector | None = None
            if state == kernels.DONE:
                part = slice(start, start + entries)
                there = indices[part].view(np.uint32) - np.uint32(first)
                one = SparseVector(lengths[number], there, values[part].view(np.float32))
            elif state == kernels.NOT_SELECTED:
                one = self.take_largest([each.residual for each in unit], k)
            if one is None:
                return number
            taken.append(one)
            start += min(k, lengths[number])
            first += lengths[number]
        return joined(taken)

    def largest(self, values: Tensor, k: int) -> Tensor:
        """Return the indices of the k largest magnitudes that are not zero; 16-bit values, too."""
        if not len(values):
            return super().largest(values, k)
        packed = select([[Tracked(values, values)]], [k], clear=False)
        state, entries = packed[:2].tolist()
        if state == kernels.NOT_SELECTED:
            return super().largest(values, k)
        return packed[2 : 2 + entries].to(torch.int64) & 0xFFFFFFFF


def select(units: Sequence[Unit], counts: Sequence[int], *, clear: bool = True) -> Tensor:
    """Update residuals and select from them, on the current stream, without waiting for it.

    Each unit's threshold is guessed from a sample, a little low. One pass adds the gradients and
    notes the candidates, which are above the threshold. The k largest candidates are the result. If
    there are fewer than k, or too many, nothing is selected from the unit.

    Args:
        units: the parts of a vector, not all empty. Gradients may have 16 bits. If the first
            gradient is its residual itself, nothing is added, and residuals may have 16 bits.
        counts: k, how many are taken of each unit.
        clear: whether to set the elements taken to zero.

    Returns:
        int32, of shape (2 U + 2 K,), with U units and at most K elements taken: for each unit its
        state and how many elements were taken, then the indices (uint32) of all units, then
        the values (float32). Each unit has room for min(k, elements).
    """
    first = next(each for unit in units for each in unit)
    residual, gradient = first.residual, first.gradient
    updates = gradient is not residual
    key = tuple(tuple(map(_addresses, unit)) for unit in units)
    parts, of_units, tiles, most, candidates = table(key, tuple(counts), residual.device)
    size = len(units)

    def empty(length: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(length, dtype=dtype, device=residual.device)

    thresholds, histogram = empty(size), empty(size * kernels.BINS)
    kept, kept_counts = empty(tiles * kernels.TILE, torch.int16), empty(tiles)
    tile_parts, before = empty(tiles), empty(tiles, torch.int64)
    addresses, positions = empty(candidates, torch.int64), empty(candidates)
    band, result = empty(candidates), empty(2 * size + 2 * most)
    said, indices, values = result.split([2 * size, most, most])
    kind = TYPES[residual.dtype]
    # Nothing is multiplied, so there is nothing to fuse; without the option Triton warns.
    unfused = {"enable_fp_fusion": False}
    kinds = {"VALUES": kind, "GRADIENTS": TYPES[gradient.dtype] if updates else None}
    kernels.guess[(size,)](parts, of_units, thresholds, histogram, **kinds, **unfused, num_warps=32)
    kernels.scan[(tiles,)](
        parts, thresholds, histogram, kept, kept_counts, tile_parts, PARTS=len(parts), **kinds,
        **unfused, num_warps=8,
    )  # fmt: skip
    kernels.finish[(size,)](
        parts, of_units, thresholds, histogram, kept, kept_counts, tile_parts, before, addresses,
        positions, band, said, indices, values.view(torch.float32), VALUES=kind,
        VALUE_BYTES=residual.element_size(), CLEAR=clear, **unfused, num_warps=32,
    )  # fmt: skip
    return result


def _addresses(each: Tracked) -> tuple[int, int, int]:
    """Return the addresses of residual and gradient, and how many elements."""
    return each.residual.data_ptr(), each.gradient.data_ptr(), each.residual.numel()


@lru_cache(maxsize=64)  # residuals and gradients keep their addresses during training
def table(
    units: tuple[tuple[tuple[int, int, int], ...], ...],
    counts: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor, int, int, int]:
    """Return the rows of parts and units, and how many tiles, results and candidates there are."""
    parts: list[list[int]] = []
    rows: list[list[int]] = []
    first = tiles = results = candidates = 0
    for number, (unit, k) in enumerate(zip(units, counts, strict=True)):
        first_part, first_tile = len(parts), tiles
        elements = sum(length for *_, length in unit)
        for *addresses, length in unit:
            parts.append([*addresses, first, length, tiles, number])
            first += length
            tiles += -(-length // kernels.TILE)
        room = min(elements, max(CANDIDATES * k, SAMPLED_FROM)) if k <= MOST_TAKEN else 0
        taken = min(k, elements)
        row = [first_part, len(unit), elements, guessed_rank(elements, taken), taken, results]
        rows.append([*row, first_tile, tiles - first_tile, candidates, room])
        results += taken
        candidates += room
    # Padding to a power of two; these rows have no tile.
    spare = triton.next_power_of_2(len(parts)) - len(parts)
    parts += [[0, 0, first, 0, 1 << 40, 0]] * spare
    of_parts, of_units = (torch.tensor(each, dtype=torch.int64) for each in (parts, rows))
    return of_parts.to(device), of_units.to(device), tiles, results, candidates


def guessed_rank(elements: int, k: int) -> int:
    """Return the guess's rank among a sample's largest elements; 0 if there is no guess."""
    if elements < SAMPLED_FROM:
        return 0
    expected = k / elements * kernels.SAMPLE
    # Elements of a line are correlated, so their ranks vary more than in an independent sample.
    rank = math.ceil(1.2 * expected + 6.0 * math.sqrt(expected) + 4.0)
    return rank if rank < kernels.SAMPLE else 0
