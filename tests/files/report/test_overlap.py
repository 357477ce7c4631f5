"""Waits and what is ready, in every form of a report."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from syncline.files.report.bundle import Bundle
from syncline.files.report.page import render, save_report
from syncline.files.report.summary import summarise, timeline_facts
from syncline.files.report.tables import timeline_table
from syncline.plan.timeline import Span, Timeline

from .overlap_example import make_overlapped


@pytest.fixture(scope="module")
def overlapped() -> Bundle:
    return make_overlapped()


def _measured(bundle: Bundle) -> Timeline:
    assert bundle.timeline_measured is not None
    return bundle.timeline_measured


def test_the_example_waits_and_idles(overlapped: Bundle) -> None:
    measured = _measured(overlapped)
    assert measured.stall_ns() > 0
    assert measured.order_stall_ns() > 0
    assert 0 < measured.link_share() < 1


def test_waiting_is_no_computing(overlapped: Bundle) -> None:
    facts = timeline_facts(_measured(overlapped))
    # One worker on one lane: it computes, waits for messages, or nothing is known of it.
    assert facts.computation_s + facts.stall_s == pytest.approx(facts.iteration_s)
    assert facts.exposed_s == pytest.approx(facts.stall_s)


def test_stalls_are_predicted_and_measured(overlapped: Bundle) -> None:
    checks = {check.what: check for check in summarise(overlapped).checks}
    measured = _measured(overlapped)
    waiting = checks["its computation waiting for messages"]
    assert waiting.measured_s == measured.stall_ns() / 1e9
    assert waiting.predicted_s > 0
    idle = checks["its link idle while a later message was ready"]
    assert idle.measured_s == measured.order_stall_ns() / 1e9
    assert idle.error == pytest.approx(idle.predicted_s / idle.measured_s - 1)
    text = render(overlapped)
    assert "Its computation waiting for messages" in text
    assert "Its link idle while a later message was ready" in text


def test_where_waits_were_not_noted_nothing_is_compared(bundle: Bundle) -> None:
    assert not [c for c in summarise(bundle).checks if "waiting" in c.what or "idle" in c.what]
    page = render(bundle)
    assert "waiting for messages</li>" not in page
    assert "not yet sent" not in page


def test_the_page_draws_them_with_and_without_its_script(overlapped: Bundle) -> None:
    page = render(overlapped)
    assert '<span class="swatch k-wait"></span> waiting for messages</li>' in page
    assert '<span class="swatch lead"></span> a message is ready and not yet sent</li>' in page
    static = page[page.index('class="static"') : page.index('id="help"')]
    waits = [s for t in overlapped.timelines() for s in t.spans if s.kind == "wait"]
    assert static.count('class="k-wait"') == len(waits)
    queued = [
        s
        for t in overlapped.timelines()
        for s in t.spans
        if s.ready_ns is not None and s.ready_ns < s.start_ns
    ]
    assert static.count('class="lead"') == len(queued)
    assert f"{timeline_facts(_measured(overlapped)).stall_s * 1e3:.0f} ms waiting" in static
    assert page.count(">Ready</th>") == 2  # a column in the table of each


def test_the_script_gets_when_messages_were_ready(overlapped: Bundle) -> None:
    page = render(overlapped)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    data = json.loads(found[1])
    kinds = list(data["kinds"])
    drawn = [s for row in data["timelines"][1]["rows"] for s in row["spans"]]
    ready = {(s[0], s[1], s[5]) for s in drawn if len(s) == 6}
    spans = _measured(overlapped).spans
    assert ready == {(s.start_ns, s.stop_ns, s.ready_ns) for s in spans if s.ready_ns is not None}
    assert {kinds[s[2]] for s in drawn if len(s) == 6} == {"message"}


def test_the_terminal_says_so(overlapped: Bundle) -> None:
    def printed(timeline: Timeline) -> str:
        stream = StringIO()
        Console(file=stream, width=160).print(timeline_table(timeline))
        return stream.getvalue()

    text = printed(_measured(overlapped))
    assert re.search(r"waiting for messages [\d.]+ ms, link busy [\d.]+ %, idle while a ", text)
    span = Span(lane="compute", start_ns=0, stop_ns=5, label="f", kind="forward")
    plain = Timeline(name="t", source="measured", iteration_ns=5, spans=(span,))
    assert "waiting" not in printed(plain)


def test_the_trace_has_waits_and_a_counter(overlapped: Bundle, tmp_path: Path) -> None:
    save_report(overlapped, tmp_path)
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    assert any(e["ph"] == "X" and e["name"].startswith("wait: ") for e in events)
    counters = [e["args"]["messages"] for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert max(counters) > 1
