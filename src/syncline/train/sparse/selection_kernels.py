"""Triton kernels that select the largest magnitudes; ``triton_memory.py`` launches them.

Each launch serves all units at once. A magnitude is a float32 without its sign, read as int32. Such
integers sort in the order of magnitudes, then infinity, then NaN. Tables are of int64:

- a row of ``parts``: addresses of residual and gradient, the index of the first element in the
  vector, elements, the first tile, the unit;
- a row of ``units``: the first part, how many parts, elements, the rank of the guess in the sample
  (0: guess 0), k, where its results begin, the first tile, how many tiles, where its candidates
  begin, how many it may have.
"""

import triton
import triton.language as tl

TILE = 4096
"""Elements of a part that one program of :func:`scan` reads; the last tile of a part has fewer."""
SAMPLE = 16384
LINE = 16  # contiguous elements of a sample: as many as one memory access delivers
BINS = 1024
DONE, NOT_FINITE, NOT_SELECTED = 0, 1, 2
"""The states of a unit that :func:`finish` reports."""

_PART_COLUMNS = tl.constexpr(6)
_UNIT_COLUMNS = tl.constexpr(10)
_TILE = tl.constexpr(TILE)
_SAMPLE = tl.constexpr(SAMPLE)
_LINE = tl.constexpr(LINE)
_BINS = tl.constexpr(BINS)
_CHUNK = tl.constexpr(8192)  # candidates that `finish` handles at once
_GUESSED_BITS = tl.constexpr(23)  # the low 8 bits of a guess need not be known
_FINE = tl.constexpr(13)  # bits of a magnitude that a bin spans above a guess: 2^-10 of an octave
_COARSE = tl.constexpr(21)  # where there is no guess: bins of all magnitudes
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _magnitude(values):
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _updated(row, offset, mask, VALUES: tl.constexpr, GRADIENTS: tl.constexpr):
    """Return residual plus gradient at offsets in the part of a row, or of several rows."""
    value = tl.load(tl.load(row).to(tl.pointer_type(VALUES)) + offset, mask=mask, other=0)
    if GRADIENTS is not None:
        gradient = tl.load(row + 1).to(tl.pointer_type(GRADIENTS)) + offset
        value += tl.load(gradient, mask=mask, other=0).to(tl.float32)
    return value


@triton.jit
def _last_at_most(firsts, stride, count, wanted, found):
    """For each wanted number, return the index of the last of the ascending ``firsts`` up to it."""
    step = 1
    while step < count:
        step *= 2
    while step > 0:
        tried = found + step
        first = tl.load(firsts + tried.to(tl.int64) * stride, mask=tried < count, other=1 << 40)
        found = tl.where(first <= wanted, tried, found)
        step //= 2
    return found


@triton.jit
def guess(
    parts, units, thresholds, histogram, VALUES: tl.constexpr, GRADIENTS: tl.constexpr
):  # fmt: skip
    """Guess a magnitude that somewhat more than k elements of a unit exceed, and clear its bins.

    One program per unit. It finds a sample's element of a given rank, from the highest bit down.
    """
    unit = tl.program_id(0)
    row = units + unit * _UNIT_COLUMNS
    tl.store(histogram + unit * _BINS + tl.arange(0, _BINS), 0)
    rank = tl.load(row + 3)
    found = 0
    if rank > 0:
        first_part = tl.load(row)
        at = tl.arange(0, _SAMPLE)
        # One line of every stretch, at a pseudo-random place: gradients have rows and columns, and
        # lines at equal distances could hit the same columns again and again.
        line = at // _LINE
        stretch = tl.load(row + 2) // (_SAMPLE // _LINE)
        random = (line.to(tl.uint32) * 2654435761).to(tl.uint32).to(tl.int64)
        place = (random * (stretch - _LINE + 1)) >> 32
        firsts, count = parts + first_part * _PART_COLUMNS + 2, tl.load(row + 1).to(tl.int32)
        index = line * stretch + place + at % _LINE + tl.load(firsts)
        part = _last_at_most(firsts, _PART_COLUMNS, count, index, tl.zeros([_SAMPLE], tl.int32))
        rows = parts + (first_part + part) * _PART_COLUMNS
        offset = index - tl.load(rows + 2)
        magnitude = _magnitude(_updated(rows, offset, offset >= 0, VALUES, GRADIENTS))
        for number in range(_GUESSED_BITS):
            tried = found | (1 << (30 - number))
            found = tl.where(tl.sum((magnitude >= tried).to(tl.int32)) >= rank, tried, found)
    tl.store(thresholds + unit, tl.maximum(found - 1, 0))


@triton.jit
def scan(
    parts, thresholds, histogram, kept, kept_counts, tile_parts,
    PARTS: tl.constexpr, VALUES: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Update a tile, and note which of its elements exceed the threshold; count them by bins."""
    tile = tl.program_id(0)
    firsts = tl.load(parts + tl.arange(0, PARTS) * _PART_COLUMNS + 4)
    part = tl.sum((firsts <= tile).to(tl.int32)) - 1
    row = parts + part * _PART_COLUMNS
    at = tl.arange(0, _TILE)
    offset = (tile - tl.load(row + 4)) * _TILE + at
    mask = offset < tl.load(row + 3)
    value = _updated(row, offset, mask, VALUES, GRADIENTS)
    if GRADIENTS is not None:
        tl.store(tl.load(row).to(tl.pointer_type(VALUES)) + offset, value, mask=mask)
    unit = tl.load(row + 5)
    threshold = tl.load(thresholds + unit)
    magnitude = _magnitude(value)
    above = mask & (magnitude > threshold)
    place = tl.cumsum(above.to(tl.int32), 0)
    tl.store(kept + tile.to(tl.int64) * _TILE + place - 1, at.to(tl.int16), mask=above)
    tl.store(kept_counts + tile, tl.sum(above.to(tl.int32)))
    tl.store(tile_parts + tile, part)
    shift = tl.where(threshold == 0, _COARSE, _FINE)
    bins = tl.minimum((magnitude - threshold - 1) >> shift, _BINS - 1)
    tl.atomic_add(histogram + unit * _BINS + bins, 1, mask=above, sem="relaxed")


@triton.jit
def finish(
    parts, units, thresholds, histogram, kept, kept_counts, tile_parts, before, addresses,
    positions, band, said, indices, values,
    VALUES: tl.constexpr, VALUE_BYTES: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Take a unit's k largest candidates in index order, of equal ones the first; one program each.

    The histogram tells in which bin the k-th lies. The candidates of that bin are the band. The
    k-th is found in the band from the highest bit down.
    """
    unit = tl.program_id(0)
    row = units + unit * _UNIT_COLUMNS
    first_tile = tl.load(row + 6)
    tiles = tl.load(row + 7).to(tl.int32)
    results = tl.load(row + 5)
    own = tl.load(row + 8)
    threshold = tl.load(thresholds + unit)
    at = tl.arange(0, _CHUNK)

    # How many candidates come before those of each tile.
    found = tl.full([], 0, tl.int64)
    for start in range(0, tiles, _CHUNK):
        mask = start + at < tiles
        count = tl.load(kept_counts + first_tile + start + at, mask=mask, other=0).to(tl.int64)
        tl.store(before + first_tile + start + at, found + tl.cumsum(count, 0) - count, mask=mask)
        found += tl.sum(count)
    tl.debug_barrier()
    # A guess above the k-th leaves too few candidates; a poor sample or many equal ones, too many.
    wanted = tl.load(row + 4)
    is_enough = ((found >= wanted) | (threshold == 0)) & (found <= tl.load(row + 9))
    k = tl.minimum(wanted, found).to(tl.int32)
    state = tl.where(is_enough, 0, 2)
    taken = 0
    if (state == 0) & (k > 0):
        total = found.to(tl.int32)

        # The bin of the k-th, and how many are in higher bins.
        downward = _BINS - 1 - tl.arange(0, _BINS)
        seen = tl.cumsum(tl.load(histogram + unit * _BINS + downward), 0)
        above = tl.max(tl.where(seen < k, seen, 0))
        number = tl.maximum(_BINS - 1 - tl.sum((seen < k).to(tl.int32)), 0)
        shift = tl.where(threshold == 0, _COARSE, _FINE)
        least = threshold + 1 + (number << shift)
        bits = tl.where(number == _BINS - 1, 31, shift)  # the last bin has no upper end
        width = tl.where(number == _BINS - 1, 0x7FFFFFFF, 1 << shift)

        # Where the candidates are, in order of their indices, and the magnitudes of the band.
        size = 0
        for start in range(0, total, _CHUNK):
            candidate = start + at
            mask = candidate < total
            none = tl.zeros([_CHUNK], tl.int32)
            tile = _last_at_most(before + first_tile, 1, tiles, candidate, none)
            tile += first_tile.to(tl.int32)
            place = candidate - tl.load(before + tile, mask=mask, other=0)
            within = tl.load(kept + tile.to(tl.int64) * _TILE + place, mask=mask, other=0)
            rows = parts + tl.load(tile_parts + tile, mask=mask, other=0) * _PART_COLUMNS
            offset = (tile - tl.load(rows + 4)) * _TILE + within
            address = tl.load(rows) + offset * VALUE_BYTES
            tl.store(addresses + own + candidate, address, mask=mask)
            tl.store(
                positions + own + candidate, (tl.load(rows + 2) + offset).to(tl.int32), mask=mask
            )
            value = tl.load(address.to(tl.pointer_type(VALUES)), mask=mask, other=0)
            magnitude = _magnitude(value)
            inside = mask & (magnitude >= least) & (magnitude - least < width)
            rank = tl.cumsum(inside.to(tl.int32), 0)
            tl.store(band + own + size + rank - 1, magnitude, mask=inside)
            size += tl.sum(inside.to(tl.int32))
        tl.debug_barrier()

        # The k-th: the largest magnitude that at least k candidates reach.
        cut = 0
        for bit in range(1, bits + 1):
            tried = cut | (1 << (bits - bit))
            count = 0
            for start in range(0, size, _CHUNK):
                one = tl.load(band + own + start + at, mask=start + at < size, other=0)
                count += tl.sum(((start + at < size) & (one - least >= tried)).to(tl.int32))
            cut = tl.where(above + count >= k, tried, cut)
        cut += least
        larger = above
        for start in range(0, size, _CHUNK):
            one = tl.load(band + own + start + at, mask=start + at < size, other=0)
            larger += tl.sum((one > cut).to(tl.int32))

        equal = 0
        largest = 0
        for start in range(0, total, _CHUNK):
            candidate = own + start + at
            mask = start + at < total
            address = tl.load(addresses + candidate, mask=mask, other=0)
            pointer = address.to(tl.pointer_type(VALUES))
            value = tl.load(pointer, mask=mask, other=0)
            magnitude = _magnitude(value)
            same = mask & (magnitude == cut)
            rank = equal + tl.cumsum(same.to(tl.int32), 0)
            equal += tl.sum(same.to(tl.int32))
            keep = mask & ((magnitude > cut) | (same & (rank <= k - larger)))
            place = results + taken + tl.cumsum(keep.to(tl.int32), 0) - 1
            position = tl.load(positions + candidate, mask=mask, other=0)
            tl.store(indices + place, position, mask=keep)
            tl.store(values + place, value.to(tl.float32), mask=keep)
            if CLEAR:
                tl.store(pointer, tl.zeros([_CHUNK], VALUES), mask=keep)
            taken += tl.sum(keep.to(tl.int32))
            largest = tl.maximum(largest, tl.max(tl.where(keep, magnitude, 0)))
        if largest >= _INFINITE:
            state = 1
    tl.store(said + unit * 2, state)
    tl.store(said + unit * 2 + 1, taken)
