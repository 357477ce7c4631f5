"""Sizes and bandwidths as nccl-tests derives them, and how they are shown."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from syncline.comm.collectives import PROGRAMS, Collective
from syncline.errors import UserError
from syncline.lab.bench.page import binary_size, headline, print_benchmark, save_report
from syncline.lab.bench.request import parse_sizes
from syncline.lab.bench.result import Benchmark, bus_factor, whole_size
from syncline.lab.bench.worker import sizes_of
from tests.lab.bench.examples import BENCHMARK, entry
from tests.words import assert_tells


@pytest.mark.parametrize(
    ("collective", "workers", "factor"),
    [
        ("all-reduce", 2, 1.0),
        ("all-reduce", 4, 1.5),
        ("reduce-scatter", 4, 0.75),
        ("all-gather", 2, 0.5),
        ("broadcast", 4, 1.0),
        ("reduce", 3, 1.0),
    ],
)
def test_bus_bandwidth_factors(collective: Collective, workers: int, factor: float) -> None:
    assert bus_factor(collective, workers) == factor


@pytest.mark.parametrize("collective", PROGRAMS)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("size_bytes", [1, 4, 4096, 1_000_001])
def test_sizes_are_whole_and_equal(collective: Collective, workers: int, size_bytes: int) -> None:
    whole = whole_size(collective, workers, size_bytes)
    assert size_bytes <= whole < size_bytes + 4 * workers
    given, result = sizes_of(collective, workers, whole)
    assert 4 * max(given, result) == whole
    shards = {"reduce-scatter": (workers, 1), "all-gather": (1, workers)}
    per_given, per_result = shards.get(collective, (1, 1))
    assert given * per_result == result * per_given


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", (4,)),
        ("4,64KiB,1MiB", (4, 65536, 1 << 20)),
        ("4..256", (4, 16, 64, 256)),
        ("1KiB..20 KiB, 1GiB", (1024, 4096, 16384, 20480, 1 << 30)),
    ],
)
def test_sizes_as_people_write_them(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4MB", "cannot read '4MB'"),
        ("", "cannot read ''"),
        ("8..4", "does not go from low to high"),
        ("0", "does not go from low to high"),
        ("4,4", "is named twice"),
    ],
)
def test_sizes_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_sizes(text)


def test_figures_of_an_entry() -> None:
    ours, gloo = BENCHMARK.entries[0], BENCHMARK.entries[1]
    assert ours.latency_s == 5e-6
    assert ours.spread_s == pytest.approx((4.5e-6, 6e-6))
    assert ours.algorithm_bytes_per_s == pytest.approx(4 / 5e-6)
    assert ours.cpu_median_s == 10e-6
    assert ours.times_faster_than(gloo) == pytest.approx(20)
    assert BENCHMARK.of_bound(ours) == pytest.approx(0.2)  # of the copy of as many bytes


def test_with_links_of_a_rate_that_is_the_bound() -> None:
    rate = 1e9 / 8
    bound_s = 2 * 3 / 4 * (1 << 20) / rate
    ours, copy = entry("syncline", bound_s / 0.9, 1 << 20, 4), entry("memcpy", 1e-3, 1 << 20, 4)
    benchmark = msgspec.structs.replace(BENCHMARK, rate_bytes_per_s=rate, entries=(ours, copy))
    assert benchmark.of_bound(ours) == pytest.approx(0.9)
    assert benchmark.of_bound(copy) is None


def test_entries_that_cannot_be() -> None:
    with pytest.raises(UserError, match="no entries"):
        msgspec.structs.replace(BENCHMARK, entries=())
    with pytest.raises(UserError, match="must be above 0 s, found 0"):
        entry("gloo", 0.0, 4)
    with pytest.raises(UserError, match="longer than the 70369 s"):
        entry("gloo", 1e300, 4)
    with pytest.raises(UserError, match="at most 4611686018427387904 bytes"):
        entry("gloo", 1.0, 1 << 63)
    with pytest.raises(UserError, match="rate_bytes_per_s must be finite and above 0, found 0"):
        msgspec.structs.replace(BENCHMARK, rate_bytes_per_s=0.0)


def printed(benchmark: Benchmark) -> str:
    text = io.StringIO()
    print_benchmark(Console(file=text, highlight=False), benchmark)
    return text.getvalue()


def test_the_table_names_everybody_the_fastest_first() -> None:
    lines = printed(BENCHMARK).splitlines()
    assert "all-reduce · 2 workers · one host, shared memory · medians of 5 rounds" in lines[0]
    rows = [line.split() for line in lines if "µs" in line]
    assert rows[0][:3] == ["4", "B", "memcpy"]
    assert [row[0] for row in rows[1:3]] == ["syncline", "gloo"]
    assert rows[1][-1] == "20.00x"
    assert "absent with 2 workers: mpich: not there <here>" in lines[-1]
    # Names do not steer the terminal.
    assert "here \\x1b[31m" in printed(msgspec.structs.replace(BENCHMARK, place="here \x1b[31m"))


def test_the_page_holds_the_numbers_and_escapes_what_others_say(tmp_path: Path) -> None:
    save_report(BENCHMARK, tmp_path / "report")
    assert Benchmark.load(tmp_path / "report" / "collectives.json") == BENCHMARK
    page = (tmp_path / "report" / "collectives.html").read_text()
    assert page.count('<svg viewBox="0 0 460 300"') == 2
    assert "not there &lt;here&gt;" in page
    assert "src=" not in page
    save_report(BENCHMARK, tmp_path / "alone.html")
    assert (tmp_path / "alone.html").read_text() == page


def test_the_page_of_plain_copies_has_no_picture(tmp_path: Path) -> None:
    copies = tuple(entry for entry in BENCHMARK.entries if entry.contestant == "memcpy")
    save_report(msgspec.structs.replace(BENCHMARK, entries=copies), tmp_path / "report")
    page = (tmp_path / "report" / "collectives.html").read_text()
    assert "memcpy" in page
    assert '<svg viewBox="0 0 460 300"' not in page


def test_the_headline_is_about_the_fastest_other() -> None:
    place = "(4 B, 2 workers)"
    assert_tells(headline(BENCHMARK), "fastest other", f"20.00 {place}", f"20.00 {place}")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(4, "4 B"), (65536, "64 KiB"), (3 << 19, "1.5 MiB"), (1 << 30, "1 GiB")],
)
def test_binary_sizes(size_bytes: int, text: str) -> None:
    assert binary_size(size_bytes) == text
