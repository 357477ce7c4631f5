"""Numbers as people read them: with a unit, and only with the digits that matter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"), (1e-12, "ps"))
# Decimal multiples, as link rates and model sizes are usually quoted.
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_BANDWIDTHS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s"))


def _significant(value: float, digits: int) -> str:
    """Return ``value`` with ``digits`` significant digits, as people write them."""
    if value == 0:
        return "0"
    if math.isinf(value):  # a rate whose time is close to 0
        return "∞" if value > 0 else "-∞"
    # The exponent after rounding: 0.99996 has one digit before the point, as 1.00 does.
    scientific = f"{value:.{digits - 1}e}"
    exponent = int(scientific.partition("e")[2])
    if exponent < -6:  # below the smallest unit
        return scientific
    return f"{value:.{max(digits - 1 - exponent, 0)}f}"


def _scale(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    # 0.9995 so that a value that rounds up to 1000 takes the next unit: 1.00 ms, not 1000 µs.
    return next((unit for unit in units if abs(value) >= unit[0] * 0.9995), units[-1])


def duration(seconds: float, digits: int = 3) -> str:
    """Return a duration in the unit that suits it, such as ``"478 ms"``."""
    if seconds == 0:
        return "0 s"
    factor, unit = _scale(seconds, _TIMES)
    return f"{_significant(seconds / factor, digits)} {unit}"


def with_noise(seconds: float, noise_s: float) -> str:
    """Return a duration with its noise and no digits beyond it, such as ``"478.2 ± 1.3 ms"``."""
    if noise_s <= 0 or seconds == 0:
        return duration(seconds, 4)
    factor, unit = _scale(seconds, _TIMES)
    decimals = min(max(1 - math.floor(math.log10(noise_s / factor)), 0), 4)
    return f"{seconds / factor:.{decimals}f} ± {noise_s / factor:.{decimals}f} {unit}"


def between(ends_s: tuple[float, float] | None) -> str:
    """Return an interval of durations, such as ``"462 to 531 ms"``; empty where it is not known."""
    if ends_s is None:
        return ""
    factor, unit = _scale(ends_s[1], _TIMES)
    return f"{' to '.join(_ends(ends_s, factor))} {unit}"


def _ends(ends_s: tuple[float, float], factor: float) -> list[str]:
    return [_significant(end_s / factor, 3) for end_s in ends_s]


def size(size_bytes: float | None) -> str:
    """Return a number of bytes, such as ``"102 MB"`` (10^6 bytes); empty where it is not known."""
    if size_bytes is None:
        return ""
    factor, unit = _scale(size_bytes, _SIZES)
    number = f"{size_bytes:.0f}" if unit == "B" else _significant(size_bytes / factor, 3)
    return f"{number} {unit}"


def rate(bytes_per_s: float) -> str:
    """Return a transfer rate, such as ``"117 MB/s"``."""
    return f"{size(bytes_per_s)}/s"


def bandwidth(bytes_per_s: float) -> str:
    """Return a link's rate as it is quoted, such as ``"25 Gbit/s"``."""
    factor, unit = _scale(bytes_per_s * 8, _BANDWIDTHS)
    return f"{plain(float(f'{bytes_per_s * 8 / factor:.3g}'))} {unit}"


def trimmed(text: str) -> str:
    """Return a number and its unit without needless decimals: ``1 kB`` for ``1.00 kB``."""
    number, unit = text.split(" ")
    return f"{float(number):g}\u00a0{unit}"


def byte_time(s_per_byte: float) -> str:
    """Return a time a byte, such as ``"8.50 ns/B"``."""
    return f"{duration(s_per_byte)}/B"


def percent(fraction: float | None, *, signed: bool = False) -> str:
    """Return a fraction in percent, such as ``"21.9 %"``; empty where it is not known."""
    if fraction is None:
        return ""
    text = f"{fraction * 100:.1f}"
    if float(text) == 0:
        return "0.0 %"
    return f"{'+' if signed and fraction > 0 else ''}{text} %"


def plain(value: float) -> str:
    """Return a number without a unit with four significant digits: ``0.9812``, ``12``, ``NaN``."""
    if math.isnan(value):
        return "NaN"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):d}"
    if 1e-4 <= abs(value) < 1e6:
        text = _significant(value, 4)
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.4g}"


def counted(number: int, noun: str) -> str:
    """Return ``"1 message"``, ``"7 messages"``, ``"2 processes"``."""
    suffix = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else suffix}".replace(",", "\u2009")


class TimeUnit:
    """One unit for a whole column: milliseconds when everything is below 1 s, seconds otherwise."""

    def __init__(self, values_s: Iterable[float]) -> None:
        largest_s = max((abs(v) for v in values_s), default=0.0)
        self.name, self._factor = ("ms", 1e-3) if largest_s < 1 else ("s", 1.0)
        largest = largest_s / self._factor
        self._decimals = 3 if self.name == "s" or largest < 10 else 2 if largest < 100 else 1

    def text(self, seconds: float) -> str:
        """Return the number alone, with as many decimals as the rest of the column."""
        return f"{seconds / self._factor:.{self._decimals}f}"

    def between(self, ends_s: tuple[float, float] | None) -> str:
        """Return the ends of an interval, a dash between them; empty where it is not known."""
        return "" if ends_s is None else "\u2013".join(_ends(ends_s, self._factor))
