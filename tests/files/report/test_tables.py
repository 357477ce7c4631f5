"""Every noun has a table that fits a terminal, and no name is taken for markup."""

from __future__ import annotations

import re
from io import StringIO

import msgspec
import pytest
from rich.console import Console, RenderableType

from syncline.files.report.bundle import DOCUMENTS, Bundle
from syncline.files.report.sections import network_section
from syncline.files.report.summary import summarise
from syncline.files.report.tables import (
    comparison_table,
    document_table,
    plan_table,
    timeline_table,
)
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from tests.words import assert_tells

change = msgspec.structs.replace


def printed(table: RenderableType, width: int = 100) -> str:
    stream = StringIO()
    Console(file=stream, width=width, highlight=False).print(table)
    return stream.getvalue()


@pytest.mark.parametrize("field", DOCUMENTS)
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
def test_planners_are_sorted_and_the_chosen_one_marked(
    bundle: Bundle, factor: int, unit: str, merge: str
) -> None:
    """Times of a second and more turn the column to seconds."""
    slower = tuple(
        change(p, iteration_s=factor * p.iteration_s) for p in bundle.comparison.predictions
    )
    table = comparison_table(change(bundle.comparison, predictions=slower))
    first, _, head, *rows = printed(table).splitlines()
    assert "549 ms" in first
    assert f"iteration, {unit}" in head
    assert rows[0].split()[:3] == ["*", "merge", merge]
    others = ["mgwfbp", "pace", "ddp", "wfbp", "single"]
    assert [row.split()[0] for row in rows[1:6]] == others


def test_names_are_no_markup_and_do_not_steer_the_terminal(bundle: Bundle) -> None:
    first, *tensors = bundle.plan.tensors
    first = change(first, name="[red]w[/red] :smile: \x1b[31m")
    text = printed(plan_table(change(bundle.plan, tensors=(first, *tensors))))
    assert "[red]w[/red] :smile: \\x1b[31m" in text


def test_what_is_left_out_is_counted(bundle: Bundle) -> None:
    plan = Plan.merging("separate", bundle.profile, 4, range(len(bundle.profile.gradients)))
    assert "and 37 more messages" in printed(plan_table(plan))


def test_waits_are_told_where_they_were_noted(bundle: Bundle, overlapped: Bundle) -> None:
    text = printed(timeline_table(overlapped.timeline_measured), 160)
    assert re.search(r"waiting for messages [\d.]+ ms, link busy [\d.]+ %, idle while a ", text)
    assert "waiting" not in printed(timeline_table(bundle.timeline_measured), 160)
