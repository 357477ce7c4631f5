"""The page in a real browser: it draws, zooms, explains, fits a phone, and asks for nothing."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from syncline.files.report.bundle import Bundle
from syncline.files.report.page import render
from syncline.plan.timeline import Span, Timeline
from tests.cases import first_few
from tests.timeouts import DEADLINE_S

from .examples import HOSTILE
from .whatif_examples import few, scaling

try:
    from selenium import webdriver
    from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
except ImportError:
    webdriver = None

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.xdist_group("browser")  # which is started once


def _absent(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; the pages must be tested in a browser in CI")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    if webdriver is None:
        _absent("selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        _absent("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # It waits a minute for Chromium, which a busy machine exceeds.
    chrome = partial(webdriver.Chrome, options=options, service=Service(DRIVER))
    browser = eventually(chrome, WebDriverException)
    browser.set_script_timeout(DEADLINE_S)
    yield browser
    browser.quit()


def eventually(action: Callable[[], Any], error: type[Exception]) -> Any:
    """Return what an action returns, once it does not raise this error."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return action()
        except error:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


class Page:
    """The report on a bundle, open in the browser; its file is in ``folder``."""

    def __init__(
        self, driver: Any, bundle: Bundle, folder: Path, width: int = 1200, scheme: str = "light"
    ) -> None:
        path = folder / "report.html"
        path.write_text(render(bundle), encoding="utf-8")
        self.driver, self.url = driver, path.as_uri()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.get_log("performance")
        driver.get_log("browser")
        driver.get(self.url)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def use(self, selector: str, action: Callable[[Any], Any]) -> Any:
        """Return what an action on an element returns, found again where a drawing replaced it."""
        return eventually(lambda: action(self.one(selector)), StaleElementReferenceException)

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def click(self, selector: str) -> None:
        self.use(selector, lambda element: element.click())

    def text(self, selector: str) -> str:
        return str(self.use(selector, lambda element: element.text))

    def shown(self, selector: str) -> bool:
        return bool(self.use(selector, lambda element: element.is_displayed()))

    def script(self, source: str, *arguments: Any) -> Any:
        return self.driver.execute_script(source, *arguments)

    def do(self, action: str) -> None:
        self.click(f"[data-do={action}]")

    def view(self) -> tuple[int, int]:
        """Return the visible nanoseconds, the same of every timeline."""
        shown = self.script(
            "return [...document.querySelectorAll('[data-timeline]')].map("
            "g => [+g.dataset.from, +g.dataset.to])"
        )
        assert all(each == shown[0] for each in shown)
        return tuple(shown[0])

    def until(self, holds: Callable[[], Any]) -> Any:
        """Wait until the drawing has caught up with what was done."""

        def held() -> Any:
            result = holds()
            assert result, "the page did not change as expected"
            return result

        return eventually(held, AssertionError)

    def changed(self, before: tuple[int, int]) -> tuple[int, int]:
        self.until(lambda: self.view() != before)
        return self.view()

    def requests(self) -> list[str]:
        messages = (json.loads(e["message"])["message"] for e in self.driver.get_log("performance"))
        sent = (m["params"] for m in messages if m["method"] == "Network.requestWillBeSent")
        urls = [params["request"]["url"] for params in sent]
        return [url for url in urls if url != self.url and not url.startswith("data:")]

    def complaints(self) -> list[Any]:
        return list(self.driver.get_log("browser"))

    def act(self, actions: Callable[[Any], Any]) -> None:
        """Do with the mouse what ``actions`` add to a chain."""
        actions(ActionChains(self.driver)).perform()


@contextmanager
def without_scripts(driver: Any) -> Iterator[None]:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.fixture
def page(driver: Any, bundle: Bundle, tmp_path: Path) -> Page:
    return Page(driver, bundle, tmp_path)


def _width(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def test_it_loads_without_complaints_or_requests(page: Page) -> None:
    assert "622" in page.text('[data-timeline="predicted"] text')
    assert page.shown('[data-timeline="measured"] .k-message')
    assert page.complaints() == []
    assert page.requests() == []
    assert page.view()[0] == 0


def test_a_click_on_a_span_shows_what_it_is(page: Page, bundle: Bundle) -> None:
    first = next(s for s in bundle.timeline_predicted.spans if s.kind == "message")
    page.click('[data-timeline="predicted"] .k-message')
    text = page.until(lambda: page.text("#details"))
    for fact in (first.label, "predicted", "Kind", "Start", "Duration", "2.05 MB", "Measured"):
        assert fact in text
    # The text changes at once, the drawing with the next frame.
    page.until(lambda: page.count(".selected") == 1)
    assert page.shown('[data-timeline="measured"] .twin')
    page.one("#chart").send_keys(Keys.ESCAPE)
    page.until(lambda: page.shown("#help"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_waits_and_leads_show(driver: Any, overlapped: Bundle, tmp_path: Path, scheme: str) -> None:
    page = Page(driver, overlapped, tmp_path, scheme=scheme)
    page.click('[data-timeline="measured"] .k-wait')
    page.until(lambda: page.count("rect.k-wait.selected") == 1)
    assert "waiting for messages" in page.text("#details")
    dashes, chosen, fill, paper = page.script(
        "const of = (s, p) => getComputedStyle(document.querySelector(s))[p];"
        "return [of('rect.k-wait:not(.selected):not(.twin)', 'strokeDasharray'),"
        " of('.k-wait.selected', 'strokeDasharray'), of('.span.k-wait', 'fill'),"
        " of('html', 'backgroundColor')]"
    )
    # Told by its outline, not by colour alone.
    assert dashes != "none"
    assert chosen == "none"
    assert fill != paper
    # From the last message of the iteration back to one that had to wait for its turn.
    chart = page.one("#chart")
    chart.send_keys(Keys.ESCAPE, "p")
    page.until(lambda: "Issued" in page.text("#details"))
    for _ in range(200):
        page.script(
            "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        if page.count(".lead.chosen"):
            break
        chart.send_keys("p")
    assert page.count(".lead.chosen") == 1
    text = page.text("#details")
    for fact in ("Kind", "Ready", "Issued", "Finished", "Size"):
        assert fact in text
    # It lies on top of the others.
    leads = page.script(
        "return [...document.querySelectorAll('[data-timeline=measured] .lead')]"
        ".map(e => e.classList.contains('chosen'))"
    )
    assert len(leads) > 10
    assert leads.index(True) == len(leads) - 1
    assert page.complaints() == []


def test_buttons_zoom_and_pan(page: Page) -> None:
    whole = page.view()
    page.do("zoom-in")
    near = page.changed(whole)
    assert _width(near) == pytest.approx(_width(whole) / 1.6, rel=1e-6)
    page.do("pan-right")
    later = page.changed(near)
    assert later[0] > near[0]
    assert _width(later) == pytest.approx(_width(near), abs=2)
    page.do("reset")
    assert page.changed(later) == whole


def test_the_wheel_zooms_about_the_pointer(page: Page) -> None:
    whole = page.view()
    chart = page.one("#chart")
    scrolled = page.script("return scrollY")
    right = ScrollOrigin.from_element(chart, 200, 0)
    page.act(lambda mouse: mouse.move_to_element(chart))
    page.act(lambda mouse: mouse.scroll_from_origin(right, 0, -400))
    near = page.changed(whole)
    assert _width(near) < 0.6 * _width(whole)
    # The pointer was right of the middle, so more was cut off on the left.
    assert near[0] > whole[1] - near[1]
    assert page.script("return scrollY") == scrolled


def test_a_wheel_that_asks_for_more_than_the_whole_scrolls_the_page(page: Page) -> None:
    whole = page.view()
    before = page.script("scrollTo(0, 0); return scrollY")
    origin = ScrollOrigin.from_element(page.one("#chart"))
    page.act(lambda mouse: mouse.scroll_from_origin(origin, 0, 300))
    page.until(lambda: page.script("return scrollY") > before)
    assert page.view() == whole


def test_a_drag_pans(page: Page) -> None:
    whole = page.view()
    page.do("zoom-in")
    near = page.changed(whole)
    chart = page.one("#chart")
    page.act(lambda mouse: mouse.click_and_hold(chart).move_by_offset(-120, 0).release())
    assert page.changed(near)[0] > near[0]
    assert page.shown("#help")  # a drag selects nothing


def test_the_keyboard_does_all_of_it(page: Page) -> None:
    chart = page.one("#chart")
    whole = page.view()
    chart.send_keys("+", "+", "+")
    page.until(lambda: _width(page.view()) < 0.3 * _width(whole))
    near = page.view()
    chart.send_keys(Keys.ARROW_RIGHT)
    later = page.changed(near)
    assert later[0] > near[0]
    chart.send_keys("-")
    wider = page.changed(later)
    assert _width(wider) > _width(later)
    chart.send_keys("0")
    assert page.changed(wider) == whole
    chart.send_keys("n")
    page.until(lambda: "batch" in page.text("#details"))
    chart.send_keys(Keys.ENTER)
    assert _width(page.changed(whole)) < 0.05 * _width(whole)


def test_two_fingers_zoom(page: Page) -> None:
    whole = page.view()
    page.script("document.getElementById('chart').scrollIntoView({block: 'center'})")
    box = page.script("return document.getElementById('chart').getBoundingClientRect().toJSON()")
    x, y = (box[at] + box[size] / 2 for at, size in (("left", "width"), ("top", "height")))

    def touch(kind: str, *apart: int) -> None:
        points = [{"x": x + way * by, "y": y, "id": 2 + way} for by in apart for way in (-1, 1)]
        touched = {"type": kind, "touchPoints": points}
        page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", touched)

    touch("touchStart", 40)
    for apart in (60, 90, 120, 160):
        touch("touchMove", apart)
    touch("touchEnd")
    assert _width(page.changed(whole)) < 0.6 * _width(whole)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_phones(driver: Any, bundle: Bundle, tmp_path: Path, scheme: str) -> None:
    def lightness(colour: str) -> float:
        channels = [float(c) for c in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        return sum(channels) / 3 / 255

    page = Page(driver, bundle, tmp_path, scheme=scheme)
    colours = page.script(
        "const of = (s, p) => getComputedStyle(document.querySelector(s))[p];"
        "return [of('html', 'backgroundColor'), of('body', 'color'),"
        " of('.label', 'fill'), of('.span.k-message', 'fill')]"
    )
    paper, ink, label, kind = map(lightness, colours)
    assert (paper < 0.2) is (scheme == "dark")
    assert abs(paper - ink) > 0.7
    assert abs(label - kind) > 0.4
    page = Page(driver, bundle, tmp_path, width=360, scheme=scheme)
    assert page.script("return document.documentElement.scrollWidth") <= 360
    page.click('[data-timeline="measured"] .k-message')
    page.until(lambda: "Duration" in page.text("#details"))
    for details in page.driver.find_elements(By.CSS_SELECTOR, "summary"):
        details.click()
    assert page.script("return document.documentElement.scrollWidth") <= 360
    assert page.complaints() == []


def test_without_scripts_a_picture_remains(driver: Any, bundle: Bundle, tmp_path: Path) -> None:
    with without_scripts(driver):
        page = Page(driver, bundle, tmp_path)
        assert page.count(".static svg rect") > 150
        assert not page.shown("#tools")
        assert page.one("#timelines details table")


def test_hostile_names_are_only_text(driver: Any, hostile: Bundle, tmp_path: Path) -> None:
    page = Page(driver, hostile, tmp_path)
    chart = page.one("#chart")
    chart.send_keys("p")  # the last span of the measured iteration
    page.until(lambda: page.text("#details"))
    labels: set[str] = set()
    for _ in range(len(HOSTILE) + 300):
        chart.send_keys("p")
        labels.add(page.text("#details b"))
        if set(HOSTILE) <= labels:
            break
    assert set(HOSTILE) <= labels
    assert page.script("return document.getElementById('broken')") is None
    assert page.complaints() == []


def test_many_spans_are_drawn_once_a_frame_where_visible(driver: Any, tmp_path: Path) -> None:
    spans = tuple(
        Span(
            lane="communication" if i % 2 else "compute",
            start_ns=i * 100_000,
            stop_ns=i * 100_000 + 90_000,
            label=f"layer{i}.weight",
            kind="message" if i % 2 else "backward",
            size_bytes=i if i % 2 else None,
        )
        for i in range(5000)
    )
    timeline = Timeline(name="many", source="predicted", iteration_ns=5 * 10**8, spans=spans)
    page = Page(driver, Bundle(timeline_predicted=timeline), tmp_path)
    assert 1000 < page.count(".span") <= 5000
    redraws = page.script(
        "let drawings = 0; const count = (changes) => { drawings += changes.length; };"
        "new MutationObserver(count).observe(document.getElementById('chart'), {childList: true});"
        "for (let i = 0; i < 5; i += 1) { document.querySelector('[data-do=zoom-in]').click(); }"
        "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame("
        "() => done(drawings))))"
    )
    assert redraws == 1
    start, stop = page.view()
    assert stop - start < timeline.iteration_ns / 10
    visible = sum(span.start_ns <= stop and span.stop_ns >= start for span in spans)
    assert 0 < page.count(".span") <= visible


# The curves of a what-if: readable, light and dark, on a phone too

OVERLAPPING = """
const found = [];
for (const svg of document.querySelectorAll('.plot')) {
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
return [...document.querySelectorAll('.plot text')].filter(t => t.getClientRects().length)
  .filter(t => t.getBoundingClientRect().right > innerWidth || t.getBoundingClientRect().left < 0)
  .map(t => t.textContent);
"""
CROWDED = """
const found = [];
for (const svg of document.querySelectorAll('.plot')) {
  if (!svg.getClientRects().length) { continue; }
  const ticks = [...svg.querySelectorAll('text.mid:not(.number)')]
    .map(t => t.getBoundingClientRect()).sort((a, b) => a.left - b.left);
  ticks.slice(1).forEach((t, i) => { if (t.left < ticks[i].right + 2) { found.push(t.left); } });
}
return found;
"""
HEIGHTS = """
return [...document.querySelectorAll('.plot text')].filter(t => t.getClientRects().length)
  .map(t => t.getBoundingClientRect().height);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", first_few([360, 700, 1200]))
def test_it_fits_and_nothing_overlaps(driver: Any, tmp_path: Path, width: int, scheme: str) -> None:
    page = Page(driver, scaling(), tmp_path, width=width, scheme=scheme)
    page.script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.script("return document.documentElement.scrollWidth") <= width
    for found in (OVERLAPPING, OUTSIDE, CROWDED):
        assert page.script(found) == []
    assert min(page.script(HEIGHTS)) >= 9
    assert page.complaints() == []
    assert page.requests() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out(driver: Any, tmp_path: Path, scheme: str) -> None:
    page = Page(driver, scaling(), tmp_path, scheme=scheme)
    colours = page.script(
        "const paint = getComputedStyle(document.documentElement);"
        "const box = document.createElement('canvas').getContext('2d');"
        "const rgb = name => { box.fillStyle = paint.getPropertyValue(name).trim();"
        " box.fillRect(0, 0, 1, 1); return [...box.getImageData(0, 0, 1, 1).data].slice(0, 3); };"
        "return ['--paper', ...[0, 1, 2, 3, 4, 5].map(i => '--c-' + i)].map(rgb);"
    )

    def luminance(colour: list[int]) -> float:
        shares = (value / 255 for value in colour)
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    paper, *inks = map(luminance, colours)
    for ink in inks:  # WCAG 2: text needs a contrast of 4.5
        assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= 4.5
    assert min(math.dist(*pair) for pair in itertools.combinations(colours[1:], 2)) > 60


def test_a_sweep_without_curves(driver: Any, tmp_path: Path) -> None:
    page = Page(driver, few(), tmp_path, width=360)
    assert page.script("return document.documentElement.scrollWidth") <= 360
    assert page.shown("#points tbody tr.marked")
    assert page.complaints() == []


def test_without_scripts_the_curves_remain(driver: Any, tmp_path: Path) -> None:
    with without_scripts(driver):
        assert Page(driver, scaling(), tmp_path).shown("#workers-curves .plot .line")
