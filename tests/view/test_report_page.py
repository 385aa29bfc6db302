"""A run's report in a real Chromium: hover, and the range of steps that its charts share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.recorded_runs import slow_run

from ringside.monitor.run.directory import RunReader
from ringside.monitor.summary import assess_run
from ringside.view.html.run_report import render_report


@pytest.fixture
def report(tmp_path: Path, open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Opens the report of a run of 121 steps, of which one rank is slow from step 60 on."""

    def open_(**how: Any) -> Any:
        reader = RunReader(slow_run(tmp_path / "run", steps=121))
        summary, table = assess_run(reader)
        (tmp_path / "report.html").write_text(render_report(summary, reader.info, table))
        return open_page((tmp_path / "report.html").as_uri(), **how)

    return open_


def shown(page: Any, chart: str) -> tuple[float, float]:
    """The range of steps that a chart's picture shows."""
    left, _, width, _ = map(float, page.locator(f"#{chart} svg").get_attribute("viewBox").split())
    return left, left + width


def labels(page: Any, chart: str) -> list[int]:
    return [int(text) for text in page.locator(f"#{chart} .x span").all_inner_texts()]


def test_a_range_selected_in_one_chart_is_shown_by_all(report: Callable[..., Any], drag: Callable[..., None]) -> None:
    page = report()
    assert shown(page, "own") == shown(page, "wait") == (0, 120)
    assert labels(page, "own") == list(range(0, 121, 10))
    assert page.locator("#own .whole").is_hidden()

    drag(page, "#own .area", 0.25, 0.75, drop=False)
    assert page.locator(".selection:visible").count() == 2
    page.mouse.up()
    assert page.locator(".selection:visible").count() == 0
    assert shown(page, "own") == shown(page, "wait") == pytest.approx((30, 90), abs=1)
    assert labels(page, "wait") == list(range(30, 91, 5))
    said = page.locator("#wait .whole").inner_text()
    first, last = map(int, re.findall(r"\d+", said))
    assert (first, last) == pytest.approx((30, 90), abs=1)
    # The episode's label goes with its edge, which is step 60.
    area, flag = (page.locator(f"#own {part}").bounding_box() for part in (".area", ".flag"))
    assert flag["x"] - area["x"] == pytest.approx(area["width"] / 2, abs=16)

    page.locator("#wait .whole").click()
    assert shown(page, "own") == shown(page, "wait") == (0, 120)
    drag(page, "#wait .area", 0.5, 0.6)
    page.locator("#own .area").dblclick()
    assert shown(page, "wait") == (0, 120)


def test_keys_zoom_and_step(report: Callable[..., Any]) -> None:
    page = report()
    page.locator("#own .plot").focus()
    page.keyboard.press("Home")
    tip = page.locator("#own .tip")
    assert tip.inner_text().startswith("step 0")
    page.keyboard.press("+")
    assert shown(page, "wait") == (0, 60)
    page.keyboard.press("Shift+ArrowRight")
    assert tip.inner_text().startswith("step 10")
    assert "rank 2 (verdict)" in tip.inner_text()
    page.keyboard.press("End")  # out of what is shown: it is brought into view
    assert shown(page, "wait") == (60, 120)
    page.keyboard.press("-")
    assert shown(page, "own") == (0, 120)
    for _ in range(9):
        page.keyboard.press("+")
    assert shown(page, "own") == pytest.approx((112, 120))  # no further than to a few steps
    page.keyboard.press("Escape")
    assert shown(page, "own") == (0, 120)


def test_the_wheel_zooms_where_the_chart_has_the_focus_and_else_scrolls_the_page(report: Callable[..., Any]) -> None:
    page = report(height=500)
    page.locator("#own .area").hover()
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 60)
    page.wait_for_function("(before) => scrollY > before", arg=before)
    assert shown(page, "own") == (0, 120)
    page.locator("#own .area").click()
    page.mouse.wheel(0, -200)
    page.wait_for_selector("#own.zoomed")
    assert shown(page, "own") == shown(page, "wait")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(report: Callable[..., Any], scheme: str) -> None:
    page = report(width=390, height=844, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.locator("#own .area").hover()
    assert page.locator("#own .tip").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
