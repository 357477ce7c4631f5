"""Quantities with units, and sizes of element types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan import quantities as units
from syncline.plan.quantities import parse_bandwidth, parse_duration, parse_workers
from tests import strategies as some

Parse = Callable[[str], Any]


@pytest.mark.parametrize(
    ("bytes_per_s", "texts"),
    [
        (1.25e9, ["10gbit", "10Gbps", "10 Gbit/s", "1.25GB/s"]),
        (1.25e8, ["1e3mbit"]),
        (12.5e6, ["100mbit"]),
        (1000, ["8kbit", "1kB/s"]),
        (1, ["8bit/s", "1B/s"]),
        (1e11, ["0.8tbit"]),
        (9e8, ["900MB/s"]),
        (1 << 30, ["1GiB/s"]),
        (1 << 19, [".5MiB/s"]),
    ],
)
def test_bandwidths(bytes_per_s: float, texts: list[str]) -> None:
    for text in texts:
        assert parse_bandwidth(text) == bytes_per_s, text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20us", 2e-5), ("20 µs", 2e-5), ("1.5ms", 1.5e-3), ("300ns", 3e-7), ("2s", 2), ("0us", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("16", (16,)),
        ("4, 8, 16", (4, 8, 16)),
        ("16,4", (16, 4)),
        ("4,8,...,64", (4, 8, 16, 32, 64)),
        ("4,8,…,64", (4, 8, 16, 32, 64)),
        ("4,8,12,...,24", (4, 8, 12, 16, 20, 24)),
        ("2,4,...,10", (2, 4, 6, 8, 10)),
        ("4,6,...,9", (4, 6, 9)),
        ("4,8,...,8", (4, 8)),
        ("2..64", (2, 4, 8, 16, 32, 64)),
        ("3..12", (3, 6, 12)),
        ("5..5", (5,)),
    ],
)
def test_workers(text: str, counts: tuple[int, ...]) -> None:
    assert parse_workers(text) == counts


REFUSED: list[tuple[Parse, str, list[str]]] = [
    (parse_bandwidth, "could mean bits or bytes; .*10gbit", ["10gb", "10Gb/s", "10gb/s"]),
    (parse_bandwidth, "could mean bits or bytes; .*10gbit", ["10GBps", "10GB"]),
    (parse_bandwidth, "has no unit; .*10gbit", ["10"]),
    (parse_bandwidth, "unknown unit 'g'; .*10gbit", ["10g"]),
    (parse_bandwidth, "unknown unit 'furlong'", ["10furlong"]),
    (parse_bandwidth, "not a number with a unit; .*10gbit", ["", "gbit", "-1gbit", "nangbit"]),
    (parse_bandwidth, "must be finite and above 0; .*10gbit", ["0gbit", "1e999gbit"]),
    (parse_duration, r"20us, 1\.5ms", ["20", "", "us", "-1us", "1e999s", "5min", "1us2"]),
    (parse_workers, "not a list of counts", ["", "x", "4,,8", "4,...,8", "...,8", "4..", "-4"]),
    (parse_workers, "not a list of counts", ["2.5"]),
    (parse_workers, "at least 1 and at most", ["0", "9" * 5000]),
    (parse_workers, "names a count twice", ["4,4"]),
    (parse_workers, "does not reach the end exactly", ["8,4,...,1", "4,4,...,8", "4,8,...,2047"]),
    (parse_workers, "does not reach the end exactly", ["4,8,20,...,100", "2..48", "8..4"]),
    (parse_workers, "more than 1000 counts", ["1,2,3,...,2000000000"]),
    (units.bytes_per_element, "gradient dtype 'bfloat61'; did you mean 'bfloat16'", ["bfloat61"]),
]


@pytest.mark.parametrize(("parse", "message", "texts"), REFUSED)
def test_what_is_refused(parse: Parse, message: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(UserError, match=message):
            parse(text)


@some.many
@given(st.text("0123456789.,…gmkKMGTiBbits/peu nµ-", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_bandwidth, parse_duration, parse_workers):
        try:
            parse(text)
        except UserError:
            continue


@some.many
@given(st.integers(1, 1000), st.integers(2, 9), st.integers(2, 4))
def test_series_go_on_as_they_began(first: int, step: int, length: int) -> None:
    powers = [first * step**i for i in range(length + 2)]
    assert parse_workers(f"{powers[0]},{powers[1]},...,{powers[-1]}") == tuple(powers)
    sums = [first + step * i for i in range(length + 2)]
    begun = ",".join(map(str, sums[:3]))
    assert parse_workers(f"{begun},...,{sums[-1]}") == tuple(sums)


def test_sizes_of_elements_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    for dtype in units.BYTES_PER_ELEMENT:
        assert units.bytes_per_element(dtype) == getattr(torch, dtype).itemsize
