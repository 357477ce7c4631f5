"""The page in a real browser: it draws, zooms, explains, fits a phone, and asks for nothing."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from syncline.files.report.bundle import Bundle
from syncline.files.report.page import render
from syncline.plan.timeline import Span, Timeline
from tests.timeouts import DEADLINE_S

from .examples import HOSTILE
from .overlap_example import make_overlapped

try:
    from selenium import webdriver
    from selenium.common.exceptions import (
        StaleElementReferenceException,
        WebDriverException,
    )
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
    browser = _started(options)
    browser.set_script_timeout(DEADLINE_S)
    yield browser
    browser.quit()


def _started(options: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return webdriver.Chrome(options=options, service=Service(DRIVER))
        except WebDriverException:  # it waits a minute for Chromium, which a busy machine exceeds
            if time.monotonic() > deadline:
                raise


class Page:
    """A report that is open in the browser."""

    def __init__(
        self, driver: Any, path: Path, *, width: int = 1200, scheme: str = "light"
    ) -> None:
        self.driver = driver
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        driver.get_log("performance")
        driver.get_log("browser")
        self.url = path.as_uri()
        driver.get(self.url)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def use(self, selector: str, action: Callable[[Any], Any]) -> Any:
        """Return what an action on an element returns, found again where a drawing replaced it."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return action(self.one(selector))
            except StaleElementReferenceException:
                if time.monotonic() > deadline:
                    raise

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

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Return the visible nanoseconds of each timeline."""
        found = self.script(
            "return [...document.querySelectorAll('[data-timeline]')].map("
            "g => [g.dataset.timeline, +g.dataset.from, +g.dataset.to])"
        )
        return {name: (start, stop) for name, start, stop in found}

    def until(self, holds: Callable[[], Any]) -> Any:
        """Wait until the drawing has caught up with what was done."""
        deadline = time.monotonic() + DEADLINE_S
        while not (result := holds()):
            assert time.monotonic() < deadline, "the page did not change as expected"
            time.sleep(0.02)
        return result

    def changed(self, before: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        self.until(lambda: self.ranges() != before)
        return self.ranges()

    def requests(self) -> list[str]:
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        urls = [
            m["params"]["request"]["url"]
            for m in messages
            if m["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if url != self.url and not url.startswith("data:")]

    def complaints(self) -> list[Any]:
        return list(self.driver.get_log("browser"))


@pytest.fixture(scope="module")
def path(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(bundle), encoding="utf-8")
    return path


@pytest.fixture
def page(driver: Any, path: Path) -> Page:
    return Page(driver, path)


def _width(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def test_it_loads_without_complaints_or_requests(page: Page) -> None:
    assert "569" in page.text('[data-timeline="predicted"] text')
    assert page.shown('[data-timeline="measured"] .k-message')
    assert page.complaints() == []
    assert page.requests() == []


def test_both_timelines_share_one_axis(page: Page) -> None:
    ranges = page.ranges()
    assert ranges["predicted"] == ranges["measured"]
    assert ranges["predicted"][0] == 0


def test_a_click_on_a_span_shows_what_it_is(page: Page, bundle: Bundle) -> None:
    assert bundle.timeline_predicted is not None
    first = next(s for s in bundle.timeline_predicted.spans if s.kind == "message")
    page.click('[data-timeline="predicted"] .k-message')
    text = page.until(lambda: page.text("#details"))
    assert first.label in text
    assert "predicted" in text
    for fact in ("Kind", "Start", "Duration", "Size", "11.5 MB", "Measured"):
        assert fact in text
    # The text changes at once, the drawing with the next frame.
    page.until(lambda: page.count(".selected") == 1)
    assert page.shown('[data-timeline="measured"] .twin')
    page.one("#chart").send_keys(Keys.ESCAPE)
    page.until(lambda: page.shown("#help"))


def test_waits_and_leads_are_drawn_and_explained(driver: Any, tmp_path: Path) -> None:
    overlapped = make_overlapped()
    assert overlapped.timeline_measured is not None
    path = tmp_path / "report.html"
    path.write_text(render(overlapped), encoding="utf-8")
    for scheme in ("light", "dark"):
        page = Page(driver, path, scheme=scheme)
        page.click('[data-timeline="measured"] .k-wait')
        page.until(lambda page=page: page.count("rect.k-wait.selected") == 1)
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
        page.until(lambda page=page: "Issued" in page.text("#details"))
        for _ in range(200):
            page.script(
                "return new Promise(done => requestAnimationFrame("
                "() => requestAnimationFrame(done)))"
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


def test_buttons_zoom_and_pan_both_timelines(page: Page) -> None:
    whole = page.ranges()
    page.do("zoom-in")
    near = page.changed(whole)
    assert near["predicted"] == near["measured"]
    assert _width(near["predicted"]) == pytest.approx(_width(whole["predicted"]) / 1.6, rel=1e-6)
    page.do("pan-right")
    later = page.changed(near)
    assert later["measured"][0] > near["measured"][0]
    assert _width(later["measured"]) == pytest.approx(_width(near["measured"]), abs=2)
    page.do("reset")
    assert page.changed(later) == whole


def test_the_wheel_zooms_about_the_pointer(page: Page) -> None:
    whole = page.ranges()
    chart = page.one("#chart")
    scrolled = page.script("return scrollY")
    ActionChains(page.driver).move_to_element(chart).perform()
    ActionChains(page.driver).scroll_from_origin(
        ScrollOrigin.from_element(chart, 200, 0), 0, -400
    ).perform()
    near = page.changed(whole)
    assert near["predicted"] == near["measured"]
    assert _width(near["predicted"]) < 0.6 * _width(whole["predicted"])
    # The pointer was right of the middle, so more was cut off on the left.
    assert near["predicted"][0] > whole["predicted"][1] - near["predicted"][1]
    assert page.script("return scrollY") == scrolled


def test_a_wheel_that_asks_for_more_than_the_whole_scrolls_the_page(page: Page) -> None:
    whole = page.ranges()
    before = page.script("scrollTo(0, 0); return scrollY")
    origin = ScrollOrigin.from_element(page.one("#chart"))
    ActionChains(page.driver).scroll_from_origin(origin, 0, 300).perform()
    page.until(lambda: page.script("return scrollY") > before)
    assert page.ranges() == whole


def test_a_drag_pans(page: Page) -> None:
    whole = page.ranges()
    page.do("zoom-in")
    near = page.changed(whole)
    ActionChains(page.driver).click_and_hold(page.one("#chart")).move_by_offset(
        -120, 0
    ).release().perform()
    later = page.changed(near)
    assert later["predicted"][0] > near["predicted"][0]
    assert later["predicted"] == later["measured"]
    assert page.shown("#help")  # a drag selects nothing


def test_the_keyboard_does_all_of_it(page: Page) -> None:
    chart = page.one("#chart")
    whole = page.ranges()
    chart.send_keys("+", "+", "+")
    page.until(lambda: _width(page.ranges()["measured"]) < 0.3 * _width(whole["measured"]))
    near = page.ranges()
    chart.send_keys(Keys.ARROW_RIGHT)
    later = page.changed(near)
    assert later["measured"][0] > near["measured"][0]
    chart.send_keys("-")
    wider = page.changed(later)
    assert _width(wider["measured"]) > _width(later["measured"])
    chart.send_keys("0")
    assert page.changed(wider) == whole
    chart.send_keys("n")
    page.until(lambda: "batch" in page.text("#details"))
    chart.send_keys(Keys.ENTER)
    fitted = page.changed(whole)
    assert _width(fitted["predicted"]) < 0.05 * _width(whole["predicted"])


def test_two_fingers_zoom(page: Page) -> None:
    whole = page.ranges()
    page.script("document.getElementById('chart').scrollIntoView({block: 'center'})")
    box = page.script("return document.getElementById('chart').getBoundingClientRect().toJSON()")
    y = box["top"] + box["height"] / 2
    middle = box["left"] + box["width"] / 2

    def touch(kind: str, apart: float) -> None:
        points = [{"x": middle - apart, "y": y, "id": 1}, {"x": middle + apart, "y": y, "id": 2}]
        page.driver.execute_cdp_cmd(
            "Input.dispatchTouchEvent",
            {"type": kind, "touchPoints": [] if kind == "touchEnd" else points},
        )

    touch("touchStart", 40)
    for apart in (60, 90, 120, 160):
        touch("touchMove", apart)
    touch("touchEnd", 160)
    near = page.changed(whole)
    assert _width(near["measured"]) < 0.6 * _width(whole["measured"])
    assert near["predicted"] == near["measured"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(driver: Any, path: Path, scheme: str) -> None:
    page = Page(driver, path, width=360, scheme=scheme)
    assert page.script("return document.documentElement.scrollWidth") <= 360
    page.click('[data-timeline="measured"] .k-message')
    page.until(lambda: "Duration" in page.text("#details"))
    for details in page.driver.find_elements(By.CSS_SELECTOR, "summary"):
        details.click()
    assert page.script("return document.documentElement.scrollWidth") <= 360
    assert page.complaints() == []


def test_dark_and_light_are_both_readable(driver: Any, path: Path) -> None:
    def lightness(colour: str) -> float:
        channels = [float(c) for c in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        return sum(channels) / 3 / 255

    for scheme in ("light", "dark"):
        page = Page(driver, path, scheme=scheme)
        paper, ink, label, kind = page.script(
            "const of = (s, p) => getComputedStyle(document.querySelector(s))[p];"
            "return [of('html', 'backgroundColor'), of('body', 'color'),"
            " of('.label', 'fill'), of('.span.k-message', 'fill')]"
        )
        assert (lightness(paper) < 0.2) is (scheme == "dark")
        assert abs(lightness(paper) - lightness(ink)) > 0.7
        assert abs(lightness(label) - lightness(kind)) > 0.4
        assert page.complaints() == []


def test_without_scripts_the_picture_and_the_table_remain(driver: Any, path: Path) -> None:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page = Page(driver, path)
        assert len(page.driver.find_elements(By.CSS_SELECTOR, ".static svg rect")) > 150
        assert not page.shown("#tools")
        assert page.one("#timelines details table")
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_hostile_names_are_only_text(driver: Any, hostile: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render(hostile), encoding="utf-8")
    page = Page(driver, path)
    chart = page.one("#chart")
    chart.send_keys("p")  # the last span of the measured iteration
    page.until(lambda: page.text("#details"))
    labels = set()
    for _ in range(len(HOSTILE) + 300):
        chart.send_keys("p")
        labels.add(page.text("#details b"))
        if set(HOSTILE) <= labels:
            break
    assert set(HOSTILE) <= labels
    assert page.script("return document.getElementById('broken')") is None
    assert page.complaints() == []


def test_many_spans_are_drawn_once_a_frame_and_only_where_visible(
    driver: Any, tmp_path: Path
) -> None:
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
    path = tmp_path / "report.html"
    path.write_text(render(Bundle(timeline_predicted=timeline)), encoding="utf-8")
    page = Page(driver, path)
    drawn = page.script("return document.querySelectorAll('.span').length")
    assert 1000 < drawn <= 5000
    redraws = page.script(
        "let drawings = 0; const count = (changes) => { drawings += changes.length; };"
        "new MutationObserver(count).observe(document.getElementById('chart'), {childList: true});"
        "for (let i = 0; i < 5; i += 1) { document.querySelector('[data-do=zoom-in]').click(); }"
        "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame("
        "() => done(drawings))))"
    )
    assert redraws == 1
    start, stop = page.ranges()["predicted"]
    assert stop - start < timeline.iteration_ns / 10
    visible = sum(span.start_ns <= stop and span.stop_ns >= start for span in spans)
    assert 0 < page.count(".span") <= visible
