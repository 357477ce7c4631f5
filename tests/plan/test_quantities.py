"""Quantities with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.quantities import parse_bandwidth, parse_duration, parse_workers
from tests import strategies as some


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10gbit", 1.25e9),
        ("10Gbps", 1.25e9),
        ("10 Gbit/s", 1.25e9),
        ("100mbit", 12.5e6),
        ("8kbit", 1000),
        ("8bit/s", 1),
        ("0.8tbit", 1e11),
        ("1e3mbit", 1.25e8),
        ("1.25GB/s", 1.25e9),
        ("900MB/s", 9e8),
        ("3kB/s", 3000),
        ("7B/s", 7),
        ("1GiB/s", 1 << 30),
        (".5MiB/s", 1 << 19),
    ],
)
def test_bandwidths(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10gb", "could mean bits or bytes"),
        ("10Gb/s", "could mean bits or bytes"),
        ("10gb/s", "could mean bits or bytes"),
        ("10GBps", "could mean bits or bytes"),
        ("10GB", "could mean bits or bytes"),
        ("10", "has no unit"),
        ("10g", "unknown unit 'g'"),
        ("10furlong", "unknown unit 'furlong'"),
        ("", "not a number with a unit"),
        ("gbit", "not a number with a unit"),
        ("-1gbit", "not a number with a unit"),
        ("nangbit", "not a number with a unit"),
        ("0gbit", "must be finite and above 0"),
        ("1e999gbit", "must be finite and above 0"),
    ],
)
def test_what_is_no_bandwidth(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_bandwidth(text)
    assert "10gbit" in str(error.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20us", 2e-5), ("20 µs", 2e-5), ("1.5ms", 1.5e-3), ("300ns", 3e-7), ("2s", 2), ("0us", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["20", "", "us", "-1us", "1e999s", "5min", "1us2"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UserError, match=r"write it as 20us, 1\.5ms, 300ns or 2s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("16", (16,)),
        ("4, 8, 16", (4, 8, 16)),
        ("16,4", (16, 4)),
        ("4,8,...,64", (4, 8, 16, 32, 64)),
        ("4,8,…,64", (4, 8, 16, 32, 64)),
        ("1,3,9,...,81", (1, 3, 9, 27, 81)),
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


def test_the_issues_list() -> None:
    assert parse_workers("4,8,...,2048") == tuple(1 << i for i in range(2, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a list of counts"),
        ("x", "not a list of counts"),
        ("4,,8", "not a list of counts"),
        ("4,...,8", "not a list of counts"),
        ("...,8", "not a list of counts"),
        ("4..", "not a list of counts"),
        ("-4", "not a list of counts"),
        ("2.5", "not a list of counts"),
        ("0", "at least 1 and at most"),
        ("9" * 5000, "at least 1 and at most"),
        ("4,4", "names a count twice"),
        ("8,4,...,1", "does not reach the end exactly"),
        ("4,4,...,8", "does not reach the end exactly"),
        ("4,8,...,2047", "does not reach the end exactly"),
        ("4,8,20,...,100", "does not reach the end exactly"),
        ("2..48", "does not reach the end exactly"),
        ("8..4", "does not reach the end exactly"),
        ("1,2,3,...,2000000000", "more than 1000 counts"),
    ],
)
def test_what_is_no_list_of_workers(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_workers(text)


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
