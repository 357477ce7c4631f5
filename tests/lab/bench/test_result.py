"""What follows from measured times, and how it is shown."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from syncline.errors import UserError
from syncline.lab.bench.page import binary_size, headline, print_benchmark, save_report
from syncline.lab.bench.result import Benchmark
from tests.lab.bench.examples import BENCHMARK, entry


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
    benchmark = Benchmark(
        collective="all-reduce",
        place="4 hosts",
        rate_bytes_per_s=rate,
        machine="",
        versions={},
        entries=(entry("syncline", bound_s / 0.9, 1 << 20, 4), entry("memcpy", 1e-3, 1 << 20, 4)),
    )
    assert benchmark.of_bound(benchmark.entries[0]) == pytest.approx(0.9)
    assert benchmark.of_bound(benchmark.entries[1]) is None


def test_the_file_is_read_back() -> None:
    assert Benchmark.from_json(BENCHMARK.to_json()) == BENCHMARK


def test_entries_that_cannot_be() -> None:
    with pytest.raises(UserError, match="no entries"):
        Benchmark(collective="reduce", place="", machine="", versions={}, entries=())
    with pytest.raises(UserError, match="must be above 0 s, found 0"):
        entry("gloo", 0.0, 4)
    with pytest.raises(UserError, match="longer than the 70369 s"):
        entry("gloo", 1e300, 4)
    with pytest.raises(UserError, match="at most 4611686018427387904 bytes"):
        entry("gloo", 1.0, 1 << 63)
    with pytest.raises(UserError, match="rate_bytes_per_s must be finite and above 0, found 0"):
        msgspec.structs.replace(BENCHMARK, rate_bytes_per_s=0.0)


def test_names_do_not_steer_the_terminal() -> None:
    text = io.StringIO()
    named = msgspec.structs.replace(BENCHMARK, place="here \x1b[31m")
    print_benchmark(Console(file=text, highlight=False), named)
    assert "here \\x1b[31m" in text.getvalue()


def test_the_table_names_everybody_the_fastest_first() -> None:
    text = io.StringIO()
    print_benchmark(Console(file=text, highlight=False), BENCHMARK)
    lines = text.getvalue().splitlines()
    assert "all-reduce · 2 workers · one host, shared memory · medians of 5 rounds" in lines[0]
    rows = [line.split() for line in lines if "µs" in line]
    assert rows[0][:3] == ["4", "B", "memcpy"]
    assert [row[0] for row in rows[1:3]] == ["syncline", "gloo"]
    assert rows[1][-1] == "20.00x"
    assert "absent with 2 workers: mpich: not there <here>" in lines[-1]


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
    assert headline(BENCHMARK).endswith(
        "against the fastest other, Syncline is 20.00 (4 B, 2 workers) to 20.00 (4 B, 2 workers) "
        "times as fast"
    )


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(4, "4 B"), (65536, "64 KiB"), (3 << 19, "1.5 MiB"), (1 << 30, "1 GiB")],
)
def test_binary_sizes(size_bytes: int, text: str) -> None:
    assert binary_size(size_bytes) == text
