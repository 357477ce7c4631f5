"""The report on a what-if: words, table, sections."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from syncline.errors import FileError
from syncline.files.report.bundle import Bundle
from syncline.files.report.page import render, save_what_if
from syncline.files.report.summary import summarise
from syncline.files.report.whatif_curves import Panel, coloured
from syncline.files.report.whatif_table import print_what_if
from syncline.files.report.whatif_words import crossing_text, setting_text, value_text
from syncline.plan.simulator.study import series
from syncline.plan.whatif import Crossing, Setting, WhatIf

from .examples import HOSTILE
from .test_html import Parsed
from .whatif_examples import few, scaling, single

change = msgspec.structs.replace


def written(made: WhatIf, width: int = 80, **options: Any) -> str:
    stream = io.StringIO()
    print_what_if(Console(file=stream, width=width, **options), made)
    return stream.getvalue()


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
    met = {"planner": "a", "kind": "overtakes", "other": "b", "point": 1}
    crossing = Crossing(axis="workers", before=4.0, after=8.0, at=5.0, **met)
    assert crossing_text(crossing) == "between 4 and 8 workers, a overtakes b"
    rates = {"axis": "bandwidth_bytes_per_s", "before": 125e6, "after": 1.25e9}
    turned = change(crossing, kind="compute-bound", **rates)
    assert crossing_text(turned) == "between 1 Gbit/s and 10 Gbit/s, a becomes compute-bound"


def test_a_row_a_point_however_narrow_the_stream() -> None:
    made = scaling().what_if
    for width in (40, 80, 300):
        rows = [line for line in written(made, width).splitlines() if "Gbit/s  " in line]
        assert len(rows) == 30
    figures = r"[\d.]+ +[\d.]+\u2013[\d.]+ +[\d.]+ +[\d.]+ %"
    assert re.search(rf"10 +1 Gbit/s +2048 +\w+ +{figures} +\w+", written(made))


def test_a_block_ends_where_anything_but_the_workers_changes() -> None:
    text = written(scaling().what_if)
    rows = text[text.index("exposed") : text.index("Crossings")].splitlines()
    filled = [bool(line.strip()) for line in rows[1:]]
    assert filled[:32] == [True] * 10 + [False] + [True] * 10 + [False] + [True] * 10


def test_few_planners_have_columns_of_their_own() -> None:
    text = written(few().what_if)
    assert "fastest" not in text
    assert text.count("effi-") == 2
    # Stragglers limit two of the points.
    for told in ("ddp", "merge", "compute-bound: ", "stragglers", "Converting gradients"):
        assert told in text


def on_terminal(made: WhatIf, width: int) -> list[str]:
    text = written(made, width, force_terminal=True, color_system=None)
    return re.sub(r"\x1b\[\d*m", "", text).splitlines()


def test_a_terminal_is_not_made_wider() -> None:
    wide, narrow = (on_terminal(few().what_if, width) for width in (120, 80))
    assert max(map(len, narrow)) <= 80
    assert not any("fastest" in line for line in wide)
    assert any("fastest" in line for line in narrow)


@pytest.mark.parametrize("made", [scaling, few])
def test_nothing_is_cut_in_a_usual_terminal(made: Callable[[], Bundle]) -> None:
    assert "…" not in "".join(on_terminal(made().what_if, 80))


def test_names_do_not_steer_the_terminal() -> None:
    made = change(few().what_if, model="a\x1b[31mb", notes=("[red]c[/red]\x07",))
    text = written(made)
    assert not {"\x1b", "\x07"} & set(text)
    assert "[red]c[/red]" in text


@pytest.mark.parametrize(
    ("made", "curves", "points", "plots"),
    [
        (scaling, ["workers-curves", "bandwidth-curves"], ["points"], 4 * (3 + 10)),
        (few, [], ["points"], 0),
        (single, [], [], 0),
    ],
)
def test_the_sections_of_a_sweep(
    made: Callable[[], Bundle], curves: list[str], points: list[str], plots: int
) -> None:
    page = render(made())
    assert Parsed(page).sections() == [*curves, "path", "timelines", "planners", *points]
    assert page.count('class="plot"') == plots
    if made is few:
        assert "Speed-up and efficiency are relative to one worker" in page


def test_the_headline_says_what_limits_and_what_would_help() -> None:
    bundle = scaling()
    found = bundle.what_if.bottleneck
    verdict = summarise(bundle).verdict
    said, _, remedy = found.sentence.partition("; ")
    assert verdict.headline.endswith(f"planned by {found.planner}, is {said}")
    assert verdict.headline.startswith("resnet18 on 2\u2009048 workers, 1 Gbit/s")
    assert verdict.detail == remedy
    names = {figure.name for figure in summarise(bundle).figures}
    assert {"predicted", "speed_up", "efficiency"} <= names


def test_crossings_are_marked_and_listed() -> None:
    page, made = render(scaling()), scaling().what_if
    panel = Panel(made, "workers", series(made.points, "workers")[1])
    assert panel.crossings
    leaders = {point.best.planner for point in panel.points}
    assert {crossing.planner for crossing in panel.crossings} <= leaders
    for text in map(crossing_text, panel.crossings):
        assert text in page  # the title of the mark
        assert text[0].upper() + text[1:] in page.replace("\u00a0", " ")


def test_colours_are_the_same_in_every_panel() -> None:
    made = scaling().what_if
    colours = coloured(made)
    assert {"ddp", *(point.best.planner for point in made.points)} <= colours.keys()
    assert len(set(colours.values())) == len(colours) <= 6
    for axis in ("workers", "bandwidth_bytes_per_s"):
        for indices in series(made.points, axis):
            groups = Panel(made, axis, indices).groups
            assert sorted(p for g in groups for p in g.planners) == sorted(made.planners)
            assert all(g.css == colours.get(g.planners[0], "pale") for g in groups)


def test_few_planners_all_have_a_colour() -> None:
    assert coloured(few().what_if).keys() == {"ddp", "merge"}


def test_long_sweeps_are_folded() -> None:
    made = few().what_if
    points = made.points * (900 // len(made.points))
    page = render(Bundle(what_if=change(made, points=points, crossings=())))
    assert "476 more points" in page
    assert "400 further points and all planners: what-if.json." in page


def with_path(made: WhatIf, **changed: object) -> WhatIf:
    return change(made, bottleneck=change(made.bottleneck, **changed))


def test_names_show_as_they_are() -> None:
    made = change(single().what_if, model=HOSTILE[0])
    path = tuple(change(part, label=HOSTILE[1]) for part in made.bottleneck.path)
    text = render(Bundle(what_if=with_path(made, path=path, sentence=f"{HOSTILE[2]}; x")))
    assert "<script>alert" not in text
    assert Parsed(text).shows_as_text(HOSTILE[:3])


def test_a_long_path_is_drawn_in_part() -> None:
    made = single().what_if
    part = made.bottleneck.path[0]
    path = tuple(change(part, time_s=1e-6 * (1 + index % 7)) for index in range(5000))
    page = render(Bundle(what_if=with_path(made, path=path)))
    assert 500 < page.count("<rect") < 1500


def test_a_page_alone_or_a_directory_that_is_read_again(tmp_path: Path) -> None:
    bundle = few()
    saved = bundle.what_if, bundle.timeline_predicted
    save_what_if(*saved, tmp_path / "page.HTML")
    assert [path.name for path in tmp_path.iterdir()] == ["page.HTML"]
    with pytest.raises(FileError, match="cannot be written"):
        save_what_if(*saved, tmp_path / "no" / "page.html")
    save_what_if(*saved, tmp_path / "out")
    assert Bundle.load(tmp_path / "out") == bundle
    assert (tmp_path / "out" / "report.html").read_text() == render(bundle)
