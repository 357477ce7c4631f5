"""Limits of quantities, bytes of element types, and parsing of values with units."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from syncline.errors import UserError, quoted, require_known

LARGEST_BYTES = 1 << 62  # most bytes of all gradients together
LARGEST_CONTENTION = 100.0
"""Largest factor by which computing and communicating may slow each other."""
LARGEST_IN_FLIGHT = 64
LARGEST_JOBS = 64
LARGEST_WORKERS = 1 << 31
LONGEST_NS = 1 << 46
"""Longest that all operations, or all messages, of one iteration may take: 19.5 hours."""


def require_finite(what: str, value: float, *, above_0: bool = False) -> None:
    """Raise :class:`UserError` unless a number is finite and at least 0, or above 0."""
    if not (math.isfinite(value) and value >= 0 and not (above_0 and value == 0)):
        least = "above 0" if above_0 else "at least 0"
        raise UserError(f"{what} must be finite and {least}, found {value}")


def require_count(what: str, value: int, most: int | None = None) -> None:
    """Raise :class:`UserError` unless a count is from 1 to ``most``."""
    if value < 1 or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise UserError(f"{what} must be at least 1{limit}, found {quoted(value)}")


def require_time(what: str, seconds: float) -> None:
    """Raise :class:`UserError` unless a time is finite, at least 0 and at most ``LONGEST_NS``."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise UserError(f"{what} must be a finite time of at least 0 s, found {seconds}")
    if seconds * 1e9 > LONGEST_NS:
        raise UserError(
            f"{what} is {seconds:.4g} s, longer than the {LONGEST_NS / 1e9:.0f} s that one "
            "iteration may take; times are in seconds"
        )


BYTES_PER_ELEMENT = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "complex64": 8,
    "complex128": 16,
}


def bytes_per_element(dtype: str) -> int:
    """Return the bytes per element; raise UserError for a dtype that no gradient can have."""
    if dtype not in BYTES_PER_ELEMENT:
        require_known("gradient dtype", dtype, BYTES_PER_ELEMENT)
    return BYTES_PER_ELEMENT[dtype]


NS_PER_S = 1_000_000_000

NUMBER = r"\s*(\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)\s*"
PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_PREFIXES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
UNITS_PER_S = {"ns": 1e9, "us": 1e6, "µs": 1e6, "μs": 1e6, "ms": 1e3, "s": 1.0}
MOST_COUNTS = 1000  # most worker counts that one list may stand for
BANDWIDTH_HELP = "write bits as 10gbit or 10Gbps, and bytes as 1.25GB/s or 1.25GiB/s"
WORKERS_HELP = "write one as 16, some as 4,8,16, and many as 4,8,...,2048 or 2..64"


def parse_bandwidth(text: str) -> float:
    """Return a bandwidth in bytes per second.

    Bits: ``10gbit``, ``100mbit/s``, ``10Gbps``. Bytes: ``1.25GB/s``, ``900MB/s``, ``1GiB/s``. The
    prefixes k, M, G and T are powers of 1000, lower case allowed for bits; Ki, Mi, Gi and Ti are
    powers of 1024. Ambiguous units, such as ``10gb`` or ``1GBps``, are refused.

    Raises:
        UserError: the text is not a bandwidth, is ambiguous, or is not above 0.
    """
    match = re.fullmatch(NUMBER + r"([a-zA-Z/]*)\s*", text)
    if match is None:
        raise UserError(f"bandwidth {text!r} is not a number with a unit; {BANDWIDTH_HELP}")
    unit = match[2]
    bits = re.fullmatch(r"([kKmMgGtT]?)(?:[bB]it(?:/s|ps)?|bps)", unit)
    whole_bytes = re.fullmatch(r"([kKMGT]?|Ki|Mi|Gi|Ti)B/s", unit)
    if bits is not None:
        factor = Fraction(PREFIXES[bits[1].lower()], 8)
    elif whole_bytes is not None:
        prefix = whole_bytes[1]
        factor = Fraction(BINARY_PREFIXES.get(prefix) or PREFIXES[prefix.lower()])
    elif not unit:
        raise UserError(f"bandwidth {text!r} has no unit; {BANDWIDTH_HELP}")
    elif "b" in unit.lower():
        raise UserError(f"bandwidth {text!r} could mean bits or bytes; {BANDWIDTH_HELP}")
    else:
        raise UserError(f"bandwidth {text!r} has the unknown unit {unit!r}; {BANDWIDTH_HELP}")
    rate = float(match[1]) * float(factor)
    if not (math.isfinite(rate) and rate > 0):
        raise UserError(f"bandwidth {text!r} must be finite and above 0; {BANDWIDTH_HELP}")
    return rate


def parse_duration(text: str) -> float:
    """Return the seconds of a text such as ``1.5ms`` or ``2s``; raise UserError for others."""
    match = re.fullmatch(NUMBER + r"([a-zµμ]*)\s*", text)
    if match is None or match[2] not in UNITS_PER_S or not math.isfinite(float(match[1])):
        raise UserError(
            f"duration {text!r} is not a number with a unit; write it as 20us, 1.5ms, 300ns or 2s"
        )
    return float(match[1]) / UNITS_PER_S[match[2]]


def parse_workers(text: str) -> tuple[int, ...]:
    """Return worker counts in the order of the text.

    ``16``; ``4,8,16``; ``2..64`` (doubling); ``4,8,...,2048``. A list with an ellipsis continues
    by the same factor if that reaches the last count, otherwise by the same difference.

    Raises:
        UserError: the text is not a list of distinct counts of at least 1, the series does not
            reach its last count, or it has more than 1000.
    """
    stripped = text.replace(" ", "").replace("…", "...")
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", stripped):
        first, last = _counts((match[1], match[2]), text)
        counts = _series(first, last, Fraction(2), 0, text)
    elif match := re.fullmatch(r"(\d+(?:,\d+)+),\.\.\.,(\d+)", stripped):
        *begun, last = _counts([*match[1].split(","), match[2]], text)
        counts = _continued(begun, last, text)
    elif re.fullmatch(r"\d+(?:,\d+)*", stripped):
        counts = _counts(stripped.split(","), text)
    else:
        raise UserError(f"workers {text!r} is not a list of counts; {WORKERS_HELP}")
    if not counts:
        raise UserError(
            f"workers {text!r}: the list, continued, does not reach the end exactly; {WORKERS_HELP}"
        )
    if len(set(counts)) < len(counts):
        raise UserError(f"workers {text!r} names a count twice; {WORKERS_HELP}")
    return counts


def _counts(words: Sequence[str], text: str) -> tuple[int, ...]:
    for word in words:
        if len(word) > len(str(LARGEST_WORKERS)) or not 1 <= int(word) <= LARGEST_WORKERS:
            raise UserError(
                f"workers {text!r}: a count must be at least 1 and at most {LARGEST_WORKERS}, "
                f"found {word[:20]}"
            )
    return tuple(int(word) for word in words)


def _continued(begun: Sequence[int], last: int, text: str) -> tuple[int, ...]:
    """Return the geometric, else arithmetic, series that continues ``begun`` to ``last``, or ()."""
    for ratio, step in ((Fraction(begun[1], begun[0]), 0), (Fraction(1), begun[1] - begun[0])):
        counts = _series(begun[0], last, ratio, step, text)
        if counts[: len(begun)] == tuple(begun):
            return counts
    return ()


def _series(first: int, last: int, ratio: Fraction, step: int, text: str) -> tuple[int, ...]:
    """Return ``x, ratio x + step, ...`` from ``first`` to ``last``; () if that misses ``last``."""
    counts = [Fraction(first)]
    while counts[-1] < last:
        following = counts[-1] * ratio + step
        if following <= counts[-1] or following.denominator > 1:
            return ()
        counts.append(following)
        if len(counts) > MOST_COUNTS:
            raise UserError(f"workers {text!r} stands for more than {MOST_COUNTS} counts")
    return tuple(map(int, counts)) if counts[-1] == last else ()
