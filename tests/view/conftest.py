"""A real Chromium for the tests that look at pages; they are skipped where there is none, or no Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.view.served import LIMIT_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; at the end none may have complained on its console."""
    contexts, complaints = [], []

    def open_(url: str, *, width: int = 1280, height: int = 800, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(1000 * LIMIT_S)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    # The server of a test is gone before its pages are: they try to reconnect.
    assert [text for text in complaints if "net::ERR_" not in text] == []


@pytest.fixture
def drag() -> Callable[..., None]:
    """Drags across an element of a page, from one share of its width to another, without letting go where asked."""

    def drag_(page: Any, selector: str, begin: float, end: float, *, drop: bool = True) -> None:
        page.locator(selector).scroll_into_view_if_needed()
        box = page.locator(selector).bounding_box()
        y = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + begin * box["width"], y)
        page.mouse.down()
        page.mouse.move(box["x"] + (begin + end) / 2 * box["width"], y)
        page.mouse.move(box["x"] + end * box["width"], y)
        if drop:
            page.mouse.up()

    return drag_
