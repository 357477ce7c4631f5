"""Numbers are written with a unit and no more digits than they deserve."""

from __future__ import annotations

from math import nan

import pytest

from syncline.files.report import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.23456, "1.23 s"),
        (0.4784, "478 ms"),
        (0.99996, "1.00 s"),
        (3.1e-6, "3.10 µs"),
        (8.52e-9, "8.52 ns"),
        (754.2, "754 s"),
        (-0.02, "-20.0 ms"),
        (1e-310, "1.00e-298 ps"),
    ],
)
def test_durations_take_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "noise_s", "text"),
    [
        (0.4782, 0.0013, "478.2 ± 1.3 ms"),
        (0.4782, 0.013, "478 ± 13 ms"),
        (1.5, 0.02, "1.500 ± 0.020 s"),
        (1.5, 0.0, "1.500 s"),
    ],
)
def test_digits_end_where_the_noise_begins(seconds: float, noise_s: float, text: str) -> None:
    assert units.with_noise(seconds, noise_s) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (102_228_128, "102 MB"),
        (3 * 10**9, "3.00 GB"),
    ],
)
def test_sizes_are_decimal(size_bytes: int, text: str) -> None:
    assert units.size(size_bytes) == text


def test_percent_has_a_sign_when_asked_and_no_negative_zero() -> None:
    assert units.percent(0.219) == "21.9 %"
    assert units.percent(0.017, signed=True) == "+1.7 %"
    assert units.percent(-0.017, signed=True) == "-1.7 %"
    assert units.percent(-0.00001, signed=True) == "0.0 %"


def test_a_rate_beyond_all_numbers() -> None:
    assert units.rate(float("inf")) == "∞ TB/s"


@pytest.mark.parametrize(
    ("gbit_s", "text"),
    [
        (1, "1 Gbit/s"),
        (2.5, "2.5 Gbit/s"),
        (400, "400 Gbit/s"),
        (0.1, "100 Mbit/s"),
        (1200, "1200 Gbit/s"),
        (2e-6, "2 kbit/s"),
    ],
)
def test_bandwidths_are_quoted_in_bits(gbit_s: float, text: str) -> None:
    assert units.bandwidth(gbit_s * 125e6) == text


def test_plain_numbers_drop_zeros_that_say_nothing() -> None:
    assert [units.plain(v) for v in (12, 12.0, 0.9810, 23.4, 1e-7, 179.83, nan)] == [
        "12",
        "12",
        "0.981",
        "23.4",
        "1e-07",
        "179.8",
        "NaN",
    ]


def test_nouns_agree_with_their_number() -> None:
    assert units.counted(1, "message") == "1 message"
    assert units.counted(7, "message") == "7 messages"
    assert units.counted(2, "process") == "2 processes"


def test_a_column_of_times_has_one_unit() -> None:
    below = units.TimeUnit([0.5, 0.02])
    assert (below.name, below.text(0.02)) == ("ms", "20.0")
    above = units.TimeUnit([1.2, 0.02])
    assert (above.name, above.text(0.02)) == ("s", "0.020")
    assert units.TimeUnit([]).name == "ms"
