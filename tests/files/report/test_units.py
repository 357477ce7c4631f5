"""Numbers are written with a unit and no more digits than they deserve."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest

from syncline.files.report import units
from syncline.files.report.units import counted, duration, percent, plain, with_noise


def signed(fraction: float) -> str:
    return units.percent(fraction, signed=True)


def gbit(rate: float) -> str:
    return units.bandwidth(rate * 125e6)


@pytest.mark.parametrize(
    ("write", "number", "text"),
    [
        *((duration, 0.0, "0 s"), (duration, 1.23456, "1.23 s"), (duration, 0.4784, "478 ms")),
        *((duration, 0.99996, "1.00 s"), (duration, 3.1e-6, "3.10 µs"), (duration, 754.2, "754 s")),
        *((duration, 8.52e-9, "8.52 ns"), (duration, -0.02, "-20.0 ms")),
        (duration, 1e-310, "1.00e-298 ps"),
        *((units.size, 0, "0 B"), (units.size, 999, "999 B"), (units.size, 1000, "1.00 kB")),
        *((units.size, 102_228_128, "102 MB"), (units.size, 3 * 10**9, "3.00 GB")),
        *((percent, 0.219, "21.9 %"), (signed, 0.017, "+1.7 %"), (signed, -0.017, "-1.7 %")),
        (signed, -0.00001, "0.0 %"),  # no negative zero
        (units.rate, inf, "∞ TB/s"),
        *((gbit, 1, "1 Gbit/s"), (gbit, 2.5, "2.5 Gbit/s"), (gbit, 400, "400 Gbit/s")),
        *((gbit, 0.1, "100 Mbit/s"), (gbit, 1200, "1200 Gbit/s"), (gbit, 2e-6, "2 kbit/s")),
        *((plain, 12, "12"), (plain, 12.0, "12"), (plain, 0.9810, "0.981"), (plain, 23.4, "23.4")),
        *((plain, 1e-7, "1e-07"), (plain, 179.83, "179.8"), (plain, nan, "NaN")),
    ],
)
def test_a_number_has_the_unit_and_the_digits_that_suit_it(
    write: Callable[[float], str], number: float, text: str
) -> None:
    assert write(number) == text


def test_digits_end_where_the_noise_begins() -> None:
    assert with_noise(0.4782, 0.0013) == "478.2 ± 1.3 ms"
    assert with_noise(0.4782, 0.013) == "478 ± 13 ms"
    assert with_noise(1.5, 0.02) == "1.500 ± 0.020 s"
    assert with_noise(1.5, 0.0) == "1.500 s"


def test_nouns_agree_with_their_number() -> None:
    assert counted(1, "message") == "1 message"
    assert counted(7, "message") == "7 messages"
    assert counted(2, "process") == "2 processes"


def test_a_column_of_times_has_one_unit() -> None:
    below = units.TimeUnit([0.5, 0.02])
    assert (below.name, below.text(0.02)) == ("ms", "20.0")
    above = units.TimeUnit([1.2, 0.02])
    assert (above.name, above.text(0.02)) == ("s", "0.020")
    assert units.TimeUnit([]).name == "ms"
