"""The report on a what-if: words, table, sections."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from syncline.errors import FileError
from syncline.files.report.bundle import Bundle
from syncline.files.report.page import render, save_what_if
from syncline.files.report.summary import summarise
from syncline.files.report.tables import document_table
from syncline.files.report.whatif_curves import Panel, coloured
from syncline.files.report.whatif_table import print_what_if
from syncline.files.report.whatif_words import crossing_text, setting_text, value_text
from syncline.plan.simulator.study import series
from syncline.plan.whatif import Crossing, Setting, WhatIf

from .examples import HOSTILE
from .test_html import _Page, _sections
from .whatif_examples import few, scaling, single, what_if


def printed(made: WhatIf, width: int = 80) -> str:
    stream = io.StringIO()
    print_what_if(Console(file=stream, width=width), made)
    return stream.getvalue()


# --- words ---


def test_settings_in_a_line() -> None:
    setting = Setting(
        workers=2048,
        algorithm="ring",
        bandwidth_bytes_per_s=1.25e9,
        wire="bfloat16",
        stragglers=((3, 1.2), (0, 2.0)),
        latency_s=2e-5,
    )
    text = setting_text(setting, ("wire", "workers", "bandwidth_bytes_per_s", "stragglers"))
    assert text == "2\u2009048 workers, 10 Gbit/s, stragglers 1.2@3+2@0, wire bf16"
    assert setting_text(setting, ()) == ""
    assert setting_text(setting, ("density", "latency_s")) == "dense, latency 20.0 µs"


def test_values_that_are_as_they_were() -> None:
    assert value_text("bandwidth_bytes_per_s", None) == "as is"
    assert value_text("wire", None) == "as is"
    assert value_text("stragglers", ()) == "none"
    assert value_text("latency_s", 0.0) == "0 s"
    assert value_text("density", None) == "dense"


def test_crossings_in_words() -> None:
    crossing = Crossing(
        axis="workers",
        point=1,
        before=4.0,
        after=8.0,
        at=5.0,
        planner="a",
        kind="overtakes",
        other="b",
    )
    assert crossing_text(crossing) == "between 4 and 8 workers, a overtakes b"
    turned = msgspec.structs.replace(
        crossing, axis="bandwidth_bytes_per_s", before=125e6, after=1.25e9, kind="compute-bound"
    )
    assert crossing_text(turned) == "between 1 Gbit/s and 10 Gbit/s, a becomes compute-bound"


# --- the table ---


def test_a_row_a_point_however_narrow_the_stream() -> None:
    made = what_if(scaling())
    for width in (40, 80, 300):
        rows = [line for line in printed(made, width).splitlines() if "Gbit/s  " in line]
        assert len(rows) == 30
    assert re.search(r"10 +1 Gbit/s +2048 +\w+ +[\d.]+ +[\d.]+ +[\d.]+ % +\w+", printed(made))


def test_a_block_ends_where_anything_but_the_workers_changes() -> None:
    text = printed(what_if(scaling()))
    rows = text[text.index("exposed") : text.index("Crossings")].splitlines()
    filled = [bool(line.strip()) for line in rows[1:]]
    assert filled[:32] == [True] * 10 + [False] + [True] * 10 + [False] + [True] * 10


def test_few_planners_have_columns_of_their_own() -> None:
    text = printed(what_if(few()))
    assert "ddp" in text
    assert "merge" in text
    assert "fastest" not in text
    assert text.count("effi-") == 2
    assert "compute-bound: " in text
    assert "stragglers" in text  # what limits two of the points
    assert "Converting gradients" in text


def on_terminal(made: WhatIf, width: int) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    print_what_if(console, made)
    return re.sub(r"\x1b\[\d*m", "", stream.getvalue()).splitlines()


def test_a_terminal_is_not_made_wider() -> None:
    wide, narrow = (on_terminal(what_if(few()), width) for width in (120, 80))
    assert max(map(len, narrow)) <= 80
    assert not any("fastest" in line for line in wide)
    assert any("fastest" in line for line in narrow)


@pytest.mark.parametrize("made", [scaling, few])
def test_nothing_is_cut_in_a_usual_terminal(made: Callable[[], Bundle]) -> None:
    assert "…" not in "".join(on_terminal(what_if(made()), 80))


def test_names_do_not_steer_the_terminal() -> None:
    made = msgspec.structs.replace(what_if(few()), model="a\x1b[31mb", notes=("[red]c[/red]\x07",))
    text = printed(made)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]c[/red]" in text


def test_show_prints_the_same() -> None:
    stream = io.StringIO()
    Console(file=stream, width=300).print(document_table(what_if(few())))
    assert stream.getvalue().split() == printed(what_if(few())).split()


# --- the page ---


def test_the_sections_of_a_sweep() -> None:
    page = render(scaling())
    assert re.findall(r'<section id="([\w-]+)"', page) == [
        "workers-curves",
        "bandwidth-curves",
        "path",
        "timelines",
        "planners",
        "points",
    ]
    _Page(page)
    assert page.count('class="plot curves"') == 4 * (3 + 10)


def test_a_sweep_without_curves() -> None:
    page = render(few())
    assert _sections(page) == ["path", "timelines", "planners", "points"]
    assert "Speed-up and efficiency are relative to one worker" in page
    _Page(page)


def test_a_single_point_has_no_list_of_points() -> None:
    page = render(single())
    assert _sections(page) == ["path", "timelines", "planners"]
    _Page(page)


def test_the_headline_says_what_limits_and_what_would_help() -> None:
    bundle = scaling()
    found = what_if(bundle).bottleneck
    verdict = summarise(bundle).verdict
    said, _, remedy = found.sentence.partition("; ")
    assert verdict.headline.endswith(f"planned by {found.planner}, is {said}")
    assert verdict.headline.startswith("resnet18 on 2\u2009048 workers, 1 Gbit/s")
    assert verdict.detail == remedy
    names = [figure.name for figure in summarise(bundle).figures]
    assert {"predicted", "speed_up", "efficiency"} <= set(names)


def test_crossings_are_marked_and_listed() -> None:
    page = render(scaling())
    made = what_if(scaling())
    panel = Panel(made, "workers", series(made.points, "workers")[1])
    crossings = panel.crossings
    assert crossings
    leaders = {point.best.planner for point in panel.points}
    assert {c.planner for c in crossings} <= leaders
    for crossing in crossings:
        text = crossing_text(crossing)
        assert text in page  # the title of the mark
        assert text[0].upper() + text[1:] in page.replace("\u00a0", " ")


def test_colours_are_the_same_in_every_panel() -> None:
    made = what_if(scaling())
    colours = coloured(made)
    assert "ddp" in colours
    assert {point.best.planner for point in made.points} <= colours.keys()
    assert len(set(colours.values())) == len(colours) <= 6
    for axis in ("workers", "bandwidth_bytes_per_s"):
        for indices in series(made.points, axis):
            groups = Panel(made, axis, indices).groups
            assert sorted(p for g in groups for p in g.planners) == sorted(made.planners)
            for group in groups:
                assert group.css == colours.get(group.planners[0], "pale")


def test_few_planners_all_have_a_colour() -> None:
    assert coloured(what_if(few())).keys() == {"ddp", "merge"}


def test_long_sweeps_are_folded() -> None:
    made = what_if(few())
    points = made.points * (900 // len(made.points))
    page = render(Bundle(what_if=msgspec.structs.replace(made, points=points, crossings=())))
    assert "476 more points" in page
    assert "400 further points and all planners: what-if.json." in page


def test_names_show_as_they_are() -> None:
    made = what_if(single())
    path = tuple(msgspec.structs.replace(part, label=HOSTILE[1]) for part in made.bottleneck.path)
    bottleneck = msgspec.structs.replace(made.bottleneck, path=path, sentence=f"{HOSTILE[2]}; x")
    text = render(
        Bundle(what_if=msgspec.structs.replace(made, model=HOSTILE[0], bottleneck=bottleneck))
    )
    page = _Page(text)
    assert "<script>alert" not in text
    assert not [a for _, a in page.elements if a.get("id") == "broken"]
    for name in HOSTILE[:3]:
        assert name in page.text


def test_a_long_path_is_drawn_in_part() -> None:
    made = what_if(single())
    part = made.bottleneck.path[0]
    path = tuple(
        msgspec.structs.replace(part, time_s=1e-6 * (1 + index % 7)) for index in range(5000)
    )
    bottleneck = msgspec.structs.replace(made.bottleneck, path=path)
    page = render(Bundle(what_if=msgspec.structs.replace(made, bottleneck=bottleneck)))
    assert 500 < page.count("<rect") < 1500


# --- files ---


def test_a_directory_is_written_and_read_again(tmp_path: Path) -> None:
    bundle = few()
    assert bundle.timeline_predicted is not None
    save_what_if(what_if(bundle), bundle.timeline_predicted, tmp_path / "out")
    assert Bundle.load(tmp_path / "out") == bundle
    assert (tmp_path / "out" / "report.html").read_text() == render(bundle)
    assert WhatIf.load(tmp_path / "out" / "what-if.json") == bundle.what_if


def test_a_page_alone(tmp_path: Path) -> None:
    bundle = few()
    assert bundle.timeline_predicted is not None
    save_what_if(what_if(bundle), bundle.timeline_predicted, tmp_path / "page.HTML")
    assert [path.name for path in tmp_path.iterdir()] == ["page.HTML"]
    with pytest.raises(FileError, match="cannot be written"):
        save_what_if(what_if(bundle), bundle.timeline_predicted, tmp_path / "no" / "page.html")
