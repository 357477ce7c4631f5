"""Every noun has a table that fits a terminal, and no name is taken for markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from math import inf, nan

import msgspec
import pytest
from rich.console import Console, RenderableType

from syncline.files.report import units
from syncline.files.report.bundle import DOCUMENTS, Bundle
from syncline.files.report.sections import network_section
from syncline.files.report.summary import summarise
from syncline.files.report.tables import document_table
from syncline.files.report.units import counted, duration, percent, plain, with_noise
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from tests.words import assert_tells

change = msgspec.structs.replace


def printed(table: RenderableType, width: int = 100) -> str:
    stream = StringIO()
    Console(file=stream, width=width, highlight=False).print(table)
    return stream.getvalue()


@pytest.mark.parametrize("field", [field for field in DOCUMENTS if field != "what_if"])
@pytest.mark.parametrize("width", [80, 120])
def test_each_noun_fits_a_screen(whole: Bundle, field: str, width: int) -> None:
    lines = printed(document_table(getattr(whole, field)), width).splitlines()
    assert 5 <= len(lines) <= 40
    assert max(map(len, lines)) <= width


def test_the_report_itself_has_a_table(bundle: Bundle) -> None:
    text = printed(document_table(summarise(bundle)))
    assert_tells(text, "merge", "resnet18 on 4 workers", "Test accuracy")


def test_what_training_does_to_messages_is_told_for_each_kind_of_plan() -> None:
    network = Network.line(workers=2, a_s=1e-4, b_s_per_byte=1e-9)
    assert "engine" not in printed(document_table(network))
    found = Contention(computing=1.25, exchange=1.5, per_message_s=2e-3, fitted=True)
    both = change(network, contention_by_need=found)
    (line,) = [x for x in printed(document_table(both), 200).splitlines() if "engine" in x]
    assert "computing 1.25 and messages 1.50 times slower at once" in line
    assert "2.00 ms of computing a message" in line
    page = str(network_section(both))
    assert page.count(", Syncline&#x27;s engine") == 3
    assert "1.25" in page


@pytest.mark.parametrize(("factor", "unit", "merge"), [(1, "ms", "622.1"), (2, "s", "1.244")])
def test_planners_are_sorted_and_marked(bundle: Bundle, factor: int, unit: str, merge: str) -> None:
    """Times of a second and more turn the column to seconds."""
    slower = tuple(
        change(p, iteration_s=factor * p.iteration_s) for p in bundle.comparison.predictions
    )
    table = document_table(change(bundle.comparison, predictions=slower))
    first, _, above, head, *rows = printed(table).splitlines()
    assert "549 ms" in first
    assert "90 %" in above
    assert f"iteration, {unit}" in head
    assert rows[0].split()[:3] == ["*", "merge", merge]
    others = ["mgwfbp", "pace", "ddp", "wfbp", "single"]
    assert [row.split()[0] for row in rows[1:6]] == others


def test_names_are_no_markup_and_do_not_steer_the_terminal(bundle: Bundle) -> None:
    first, *tensors = bundle.plan.tensors
    first = change(first, name="[red]w[/red] :smile: \x1b[31m")
    text = printed(document_table(change(bundle.plan, tensors=(first, *tensors))))
    assert "[red]w[/red] :smile: \\x1b[31m" in text


def test_what_is_left_out_is_counted(bundle: Bundle) -> None:
    plan = Plan.merging("separate", bundle.profile, 4, range(len(bundle.profile.gradients)))
    assert "and 37 more messages" in printed(document_table(plan))


def test_waits_are_told_where_they_were_noted(bundle: Bundle, overlapped: Bundle) -> None:
    text = printed(document_table(overlapped.timeline_measured), 160)
    assert re.search(r"waiting for messages [\d.]+ ms, link busy [\d.]+ %, idle while a ", text)
    assert "waiting" not in printed(document_table(bundle.timeline_measured), 160)


# Numbers are written with a unit and no more digits than they deserve


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
def test_a_number_and_its_unit(write: Callable[[float], str], number: float, text: str) -> None:
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
