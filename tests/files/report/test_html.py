"""The page is one file that fetches nothing and shows every name as it is."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from syncline.files.report.bundle import Bundle
from syncline.files.report.markup import Column, Html, table, tag, typeset
from syncline.files.report.page import render
from syncline.files.report.summary import summarise, timeline_facts
from syncline.plan.network import Contention
from syncline.plan.plan import Plan
from syncline.plan.timeline import Span, Timeline

from .examples import HOSTILE

change = msgspec.structs.replace
SECTIONS = ["timelines", "planners", "checks", "network", "messages"]
SECTIONS += ["largest", "profile", "phases", "memory", "events"]


class Parsed(HTMLParser):
    """Collects the elements, and fails where they are not nested properly."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    def sections(self) -> list[str]:
        return [a["id"] or "" for tag, a in self.elements if tag == "section" and "id" in a]

    def drawn(self) -> tuple[list[str], list[list[Any]]]:
        """Return the kinds of spans and each timeline's spans, as the script gets them."""
        data = json.loads(self.scripts[0])
        timelines = [[s for row in t["rows"] for s in row["spans"]] for t in data["timelines"]]
        return list(data["kinds"]), timelines

    def shows_as_text(self, names: tuple[str, ...]) -> bool:
        """Return whether these names show as they are, and run or break nothing."""
        ids = [attributes.get("id") for _, attributes in self.elements]
        return len(self.scripts) == 2 and "broken" not in ids and all(n in self.text for n in names)


@pytest.mark.parametrize(
    ("missing", "gone"),
    [
        (None, set()),
        ("run", {"phases", "memory", "events"}),
        ("comparison", {"planners"}),
        ("network", {"network"}),
        ("plan", {"messages"}),
        ("profile", {"largest", "profile"}),
    ],
)
def test_sections_come_in_order_and_those_without_input_are_left_out(
    bundle: Bundle, missing: str | None, gone: set[str]
) -> None:
    page = render(replace(bundle, **{missing: None}) if missing else bundle)
    assert Parsed(page).sections() == [name for name in SECTIONS if name not in gone]
    assert page.index('class="figures"') < page.index('id="timelines"')


def test_a_single_timeline_is_enough(bundle: Bundle) -> None:
    page = Parsed(render(Bundle(timeline_measured=bundle.timeline_measured)))
    assert page.sections() == ["timelines"]
    assert "One iteration, measured" in page.text


def test_nothing_is_fetched_and_only_our_script_may_run(bundle: Bundle) -> None:
    text = render(bundle)
    page = Parsed(text)
    for _, attributes in page.elements:
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in text
    assert "@import" not in text
    policy = next(a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def test_names_show_as_they_are_and_run_nothing(hostile: Bundle) -> None:
    text = render(hostile)
    page = Parsed(text)
    assert "<script>alert" not in text
    assert page.shows_as_text(HOSTILE)
    assert set(HOSTILE) <= {span[3] for timeline in page.drawn()[1] for span in timeline}
    assert "<" not in page.scripts[0]


def test_five_thousand_spans_stay_a_small_page() -> None:
    spans = tuple(
        Span(lane="compute", start_ns=i * 10, stop_ns=i * 10 + 9, label=f"op{i}", kind="forward")
        for i in range(5000)
    )
    timeline = Timeline(name="many", source="predicted", iteration_ns=50_000, spans=spans)
    page = render(Bundle(timeline_predicted=timeline))
    assert len(page) < 1_000_000
    assert "4000 shorter spans are left out here" in page
    _, (drawn,) = Parsed(page).drawn()
    assert len(drawn) == 5000


def test_a_timeline_without_spans_is_drawn_empty() -> None:
    timeline = Timeline(name="none", source="measured", iteration_ns=0, spans=())
    assert Parsed(render(Bundle(timeline_measured=timeline))).drawn()[1] == [[]]


def test_a_plan_of_many_messages_unfolds(bundle: Bundle) -> None:
    gradients = range(len(bundle.profile.gradients))
    separate = Plan.merging("separate", bundle.profile, 4, gradients)
    assert "<summary>38 more</summary>" in render(Bundle(plan=separate))


def test_a_network_without_points_has_no_plot(bundle: Bundle) -> None:
    assert 'class="plot"' in render(Bundle(network=bundle.network))
    page = render(Bundle(network=change(bundle.network, points=(), link=None)))
    assert 'class="plot"' not in page
    assert "\u03b1" not in page


def test_each_term_of_the_network_has_a_name_of_its_own(bundle: Bundle) -> None:
    contention = Contention(computing=1.2, exchange=1.3, per_message_s=1e-4)
    both = change(bundle.network, contention=contention, contention_by_need=contention)
    terms = re.findall(r'<th scope="row">([^<]*)</th>', render(Bundle(network=both)))
    assert len(set(terms)) == len(terms)
    assert html.escape("slowed messages, Syncline's engine") in terms
    alone = change(both, contention_by_need=None)
    assert "DDP&#x27;s reducer" not in render(Bundle(network=alone))


def test_the_phases_are_drawn_to_scale_and_a_long_last_one_is_cut(bundle: Bundle) -> None:
    page = Parsed(render(bundle))
    parts = [a for _, a in page.elements if "flex-grow" in (a.get("style") or "")]
    lengths = [float((a["style"] or "").partition(":")[2]) for a in parts]
    assert lengths == [7.4, 5.9, 1.9, 3.8, 3.2, pytest.approx(22.2 / 2)]
    assert [a.get("class") for a in parts] == [None] * 5 + ["final cut"]
    assert "29\u20131628" in page.text
    assert "running merge, 1.09x DDP" in page.text


def test_markup_escapes_text_and_keeps_markup() -> None:
    made = tag("p", "<b>", Html("<i></i>"), None, ["&"], class_='"', hidden=True, id=None)
    assert made == '<p class="&quot;" hidden>&lt;b&gt;<i></i>&amp;</p>'


def test_typesetting_keeps_units_with_their_numbers() -> None:
    assert typeset("-1.7 % of 3.0 ± 0.1 ms") == "\u22121.7\u00a0% of 3.0\u00a0±\u00a00.1\u00a0ms"
    assert typeset("layer-1 in 4 steps, a-2") == "layer-1 in 4 steps, a-2"


def test_numeric_cells_are_typeset_and_rows_marked() -> None:
    columns = [Column("a", lambda row: row[0]), Column("b", lambda row: row[1], numeric=True)]
    made = table(columns, [("x-1", "-1 %")], caption="", marked=0)
    assert '<tr class="marked"><th scope="row">x-1</th>' in made
    assert '<td class="n">\u22121\u00a0%</td>' in made


def test_where_waits_were_not_noted_nothing_is_compared(bundle: Bundle) -> None:
    assert not [c for c in summarise(bundle).checks if "waiting" in c.what or "idle" in c.what]
    page = render(bundle)
    assert "waiting for messages</li>" not in page
    assert "not yet sent" not in page


def test_the_page_draws_waits_with_and_without_its_script(overlapped: Bundle) -> None:
    page = render(overlapped)
    assert "Its computation waiting for messages" in page
    assert "Its link idle while a later message was ready" in page
    assert '<span class="swatch k-wait"></span> waiting for messages</li>' in page
    assert '<span class="swatch lead"></span> a message is ready and not yet sent</li>' in page
    static = page[page.index('class="static"') : page.index('id="help"')]
    spans = [span for timeline in overlapped.timelines() for span in timeline.spans]
    assert static.count('class="k-wait"') == sum(s.kind == "wait" for s in spans)
    queued = sum(s.ready_ns is not None and s.ready_ns < s.start_ns for s in spans)
    assert static.count('class="lead"') == queued
    stall_s = timeline_facts(overlapped.timeline_measured).stall_s
    assert f"{stall_s * 1e3:.0f} ms waiting" in static
    assert page.count(">Ready</th>") == 2  # a column in the table of each


def test_the_script_gets_when_messages_were_ready(overlapped: Bundle) -> None:
    kinds, timelines = Parsed(render(overlapped)).drawn()
    ready = [span for span in timelines[1] if len(span) == 6]
    spans = overlapped.timeline_measured.spans
    assert {(s[0], s[1], s[5]) for s in ready} == {
        (s.start_ns, s.stop_ns, s.ready_ns) for s in spans if s.ready_ns is not None
    }
    assert {kinds[s[2]] for s in ready} == {"message"}
