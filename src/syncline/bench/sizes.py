"""Sizes as people write them."""

from __future__ import annotations

import re

from syncline.errors import UserError

__all__ = ["parse_sizes"]

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
STEP = 4
"""From one size of a range to the next."""


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes that a list says, in its order.

    ``4,64KiB,1MiB``; ``4..256MiB`` stands for all sizes from one to the other by factors of 4, and
    the other.

    Raises:
        UserError: it is no list of different sizes.
    """
    sizes: list[int] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        first = _size(low, text)
        last = _size(high, text) if dots else first
        if not 0 < first <= last:
            raise UserError(f"sizes {text!r}: {part.strip()!r} does not go from low to high")
        while first < last:
            sizes.append(first)
            first *= STEP
        sizes.append(last)
    if len(set(sizes)) < len(sizes):
        raise UserError(f"sizes {text!r}: a size stands there twice")
    return tuple(sizes)


def _size(part: str, text: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*(B|KiB|MiB|GiB|)\s*", part)
    if match is None:
        raise UserError(
            f"sizes {text!r}: cannot read {part.strip()!r}; write 4, 64KiB or 4..256MiB"
        )
    return int(match[1]) * UNITS[match[2]]
