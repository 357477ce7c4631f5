"""The curves of a what-if in a real browser: readable, light and dark, on a phone too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syncline.files.report.page import render
from tests.cases import first_few

from .test_browser import Page, driver
from .whatif_examples import few, scaling

__all__ = ["driver"]  # a fixture
pytestmark = pytest.mark.xdist_group("browser")

OVERLAPPING = """
const found = [];
for (const svg of document.querySelectorAll('.curves')) {
  if (!svg.getClientRects().length) { continue; }
  const boxes = [...svg.querySelectorAll('text.name')].map(t => [t, t.getBoundingClientRect()]);
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    if (p.left < q.right && q.left < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom) {
      found.push(a.textContent + ' over ' + b.textContent);
    }
  }));
}
return found;
"""
OUTSIDE = """
return [...document.querySelectorAll('.curves text')].filter(t => t.getClientRects().length)
  .filter(t => t.getBoundingClientRect().right > innerWidth || t.getBoundingClientRect().left < 0)
  .map(t => t.textContent);
"""
CROWDED = """
const found = [];
for (const svg of document.querySelectorAll('.curves')) {
  if (!svg.getClientRects().length) { continue; }
  const ticks = [...svg.querySelectorAll('text.mid:not(.number)')]
    .map(t => t.getBoundingClientRect()).sort((a, b) => a.left - b.left);
  ticks.slice(1).forEach((t, i) => { if (t.left < ticks[i].right + 2) { found.push(t.left); } });
}
return found;
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("what-if") / "report.html"
    path.write_text(render(scaling()), encoding="utf-8")
    return path


def unfold(page: Page) -> None:
    page.script("document.querySelectorAll('details').forEach(d => { d.open = true; })")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", first_few([360, 700, 1200]))
def test_it_fits_and_nothing_covers_anything(
    driver: Any, path: Path, width: int, scheme: str
) -> None:
    page = Page(driver, path, width=width, scheme=scheme)
    unfold(page)
    assert page.script("return document.documentElement.scrollWidth") <= width
    assert page.script(OVERLAPPING) == []
    assert page.script(OUTSIDE) == []
    assert page.script(CROWDED) == []
    assert page.complaints() == []
    assert page.requests() == []


def test_text_on_a_phone_is_large_enough(driver: Any, path: Path) -> None:
    page = Page(driver, path, width=360)
    heights = page.script(
        "return [...document.querySelectorAll('.curves text')].filter(t => t.getClientRects()"
        ".length).map(t => t.getBoundingClientRect().height)"
    )
    assert min(heights) >= 9


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out(driver: Any, path: Path, scheme: str) -> None:
    page = Page(driver, path, scheme=scheme)
    colours = page.script(
        "const paint = getComputedStyle(document.documentElement);"
        "const box = document.createElement('canvas').getContext('2d');"
        "const rgb = name => { box.fillStyle = paint.getPropertyValue(name).trim();"
        " box.fillRect(0, 0, 1, 1); return [...box.getImageData(0, 0, 1, 1).data].slice(0, 3); };"
        "return ['--paper', ...[0, 1, 2, 3, 4, 5].map(i => '--c-' + i)].map(rgb);"
    )

    def luminance(colour: list[int]) -> float:
        linear = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
            for c in (value / 255 for value in colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    paper, *inks = map(luminance, colours)
    for ink in inks:  # WCAG 2: text needs a contrast of 4.5
        assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= 4.5
    distances = [
        sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
        for index, one in enumerate(colours[1:])
        for other in colours[index + 2 :]
    ]
    assert min(distances) > 60


def test_a_sweep_without_curves(driver: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render(few()), encoding="utf-8")
    page = Page(driver, path, width=360)
    assert page.script("return document.documentElement.scrollWidth") <= 360
    assert page.shown("#points tbody tr.marked")
    assert page.complaints() == []


def test_without_scripts_the_curves_remain(driver: Any, path: Path) -> None:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page = Page(driver, path)
        assert page.shown("#workers-curves .curves .line")
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
