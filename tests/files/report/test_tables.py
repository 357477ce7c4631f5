"""Every noun has a table that fits a terminal, and no name is taken for markup."""

from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from rich.console import Console, RenderableType

from syncline.files.report.bundle import DOCUMENTS, Bundle
from syncline.files.report.sections import network_section
from syncline.files.report.summary import summarise
from syncline.files.report.tables import comparison_table, document_table, plan_table
from syncline.plan.document import Document
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan


def printed(table: RenderableType, width: int = 100) -> str:
    stream = StringIO()
    Console(file=stream, width=width, highlight=False).print(table)
    return stream.getvalue()


@pytest.mark.parametrize("field", list(DOCUMENTS))
@pytest.mark.parametrize("width", [80, 120])
def test_each_noun_fits_a_screen(whole: Bundle, field: str, width: int) -> None:
    document: Document = getattr(whole, field)
    lines = printed(document_table(document), width).splitlines()
    assert 5 <= len(lines) <= 40
    assert max(map(len, lines)) <= width


def test_the_report_itself_has_a_table(bundle: Bundle) -> None:
    text = printed(document_table(summarise(bundle)))
    assert "With the merge plan, resnet18 on 4 workers trains" in text
    assert "Test accuracy" in text


def test_what_training_does_to_messages_is_told_for_each_kind_of_plan() -> None:
    network = Network.line(workers=2, a_s=1e-4, b_s_per_byte=1e-9)
    assert "engine" not in printed(document_table(network))
    found = Contention(computing=1.25, exchange=1.5, per_message_s=2e-3, fitted=True)
    both = msgspec.structs.replace(network, contention_by_need=found)
    (line,) = [x for x in printed(document_table(both), 200).splitlines() if "engine" in x]
    assert "computing 1.25 and messages 1.50 times slower at once" in line
    assert "2.00 ms of computing a message" in line
    page = str(network_section(both))
    assert page.count(", Syncline&#x27;s engine") == 3
    assert "1.25" in page


def test_planners_are_sorted_and_the_chosen_one_marked(bundle: Bundle) -> None:
    assert bundle.comparison is not None
    lines = printed(comparison_table(bundle.comparison)).splitlines()
    order = [line.split()[0:2] for line in lines[3:10]]
    assert order[0][0] == "pace"
    assert ["*", "merge"] in order
    assert order[-1][0] == "single"
    assert "iteration, ms" in lines[2]
    assert "no schedule can be below 549 ms" in lines[0]


def test_times_of_a_second_and_more_turn_the_column_to_seconds(bundle: Bundle) -> None:
    assert bundle.comparison is not None
    slow = tuple(
        msgspec.structs.replace(p, iteration_s=p.iteration_s * 2)
        for p in bundle.comparison.predictions
    )
    text = printed(comparison_table(msgspec.structs.replace(bundle.comparison, predictions=slow)))
    assert "iteration, s" in text
    assert "1.107" in text


def test_names_are_no_markup_and_do_not_steer_the_terminal(bundle: Bundle) -> None:
    assert bundle.plan is not None
    tensors = list(bundle.plan.tensors)
    tensors[0] = msgspec.structs.replace(tensors[0], name="[red]w[/red] :smile: \x1b[31m")
    text = printed(plan_table(msgspec.structs.replace(bundle.plan, tensors=tuple(tensors))))
    assert "[red]w[/red] :smile: \\x1b[31m" in text


def test_what_is_left_out_is_counted(bundle: Bundle) -> None:
    assert bundle.profile is not None
    plan = Plan.merging("separate", bundle.profile, 4, range(len(bundle.profile.gradients)))
    assert "and 37 more messages" in printed(plan_table(plan))
