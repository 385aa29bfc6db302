"""The predictor's pages: self-contained, right, and looked at in a real Chromium, light and dark, wide and narrow."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringside.errors import UsageError
from ringside.predict import Timeline, preset, score, simulate
from ringside.predict.laws.calibrate import Band
from ringside.predict.laws.knowledge import Knowledge
from ringside.predict.plan.plan import PlanQuestion, plan
from ringside.predict.tables import read_tables
from ringside.predict.what_if import PredictedStep, StepChange, played, what_if
from ringside.schedule import contributions, hierarchical, ring
from ringside.text import giga, percent, rate, size
from ringside.view.export.perfetto import write_timeline
from ringside.view.html.predictions import plan_page, score_page, what_if_page
from ringside.view.html.simulation import gantt, shown_lanes, timeline_page
from ringside.view.predict_text import Rates, about, band_text, full_plan

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
H100 = preset("dgx-h100", 2, 4)


def late_ring() -> Timeline:
    return simulate(ring(8), H100.with_slow_link(3, 4, 3.0), 64e6, late={1: 2e-4})


def a_plan() -> str:
    return plan_page(plan(PlanQuestion(H100, 1e9, parameters=7e9, memory_bytes=80e9, compute_s=0.2)))


def a_what_if() -> str:
    change = StepChange(slower={3: 0.1}, slow_links=((0, 4, 2.0),))
    answer = what_if(PredictedStep(H100, 1e9, np.full((1, 8), 0.2), 40), change)
    return what_if_page(answer, change, (played(answer.before), played(answer.after)), Rates(2.0, 700.0))


def a_score(folder: Path) -> str:
    rows = [f"{2**power},{20 + 2**power / 1e5:.4g}" for power in range(10, 31)]
    (folder / "table.csv").write_text("\n".join(["size_bytes,time_us", *rows, "4096,9999"]))
    tables, _ = score.check_tables(read_tables(folder / "table.csv"))
    return score_page([score.hold_out(one, Knowledge()) for one in tables])


@pytest.mark.parametrize(
    ("ends", "answer", "text"),
    [
        ((78.0e-3, 34.8e-3, 174e-3), "about 80 ms (35 to 170)", "78 ms (35 to 170)"),
        ((15.2e-3, 6.8e-3, 34e-3), "about 15 ms (6.8 to 34)", "15 ms (6.8 to 34)"),
        ((19.5e-3, 18.1e-3, 20.8e-3), "about 19.5 ms (18.1 to 20.8)", "19.5 ms (18.1 to 20.8)"),
        ((3.0e-3, 1.4e-3, 6.5e-3), "about 3.0 ms (1.4 to 6.5)", "3.0 ms (1.4 to 6.5)"),
        ((1.67e-3, 372e-6, 551e-3), "about 1.7 ms (370 µs to 550 ms)", "1.7 ms (370 µs to 550 ms)"),
        ((0.25, 0.25, 0.25), "250 ms (input)", "250 ms (input)"),
        ((0.0, 0.0, 2e-3), "about 0 s (0 s to 2.0 ms)", "0 s (0 s to 2.0 ms)"),
        ((1.0, 0.99996, 1.0), "about 1.00 s (1.00 to 1.00)", "1.00 s (1.00 to 1.00)"),
    ],
)
def test_a_band_has_as_many_digits_as_are_known(ends: tuple[float, float, float], answer: str, text: str) -> None:
    band = Band(*ends)
    assert about(band) == answer
    assert band_text(band) == text


def test_of_shares_and_rates_the_same() -> None:
    assert band_text(Band(0.99, 0.31, 1.0), percent) == "99% (31 to 100)"
    assert band_text(Band(260e9, 210e9, 322e9), rate) == "260 GB/s (210 to 320)"
    assert band_text(Band(0.0066, 0.0012, 0.688), lambda share: percent(share, 1)) == "0.7% (0.1 to 69)"
    assert band_text(Band(1.12e9, 0.25e9, 5.04e9), giga) == "1.1 (0.25 to 5.0)"
    assert band_text(Band(3.53e9, 1.51e9, 8.29e9), size) == "3.5 GB (1.5 to 8.3)"


def test_a_plan_answers_before_it_says_what_fits_and_why() -> None:
    page = a_plan()
    places = [page.index(words) for words in ("1 GB among 8 ranks: about ", "does not fit with plain", "<dt>Why</dt>")]
    assert places == sorted(places)
    assert 'class="verdict open"' in page
    nowhere = plan_page(plan(PlanQuestion(H100, 2e12, parameters=1e12, memory_bytes=80e9)))
    assert 'class="verdict bad"' in nowhere


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (StepChange(slower={3: 0.003}), "bad"),
        (StepChange(slower={3: 0.0005}), "open"),
        (StepChange(repaired=(2,)), "well"),
    ],
)
def test_a_difference_that_two_digits_do_not_show_is_neither_good_nor_bad(change: StepChange, kind: str) -> None:
    own = np.full((1, 8), 0.2)
    own[0, 2] += 0.0006 * bool(change.repaired)
    page = what_if_page(what_if(PredictedStep(H100, 1e9, own, 40), change), change, (None, None), Rates(2.0, 700.0))
    assert f'class="verdict {kind}"' in page


PAGES: dict[str, Callable[[Path], str]] = {
    "plan": lambda _: a_plan(),
    "what if": lambda _: a_what_if(),
    "simulation": lambda _: timeline_page(late_ring()),
    "score": a_score,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


def opened(browser: Any, path: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    """Return a page and what it complains about."""
    complaints: list[str] = []
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    page.set_default_timeout(60_000)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
    page.goto(path.as_uri())
    return page, complaints


def tones(png: bytes) -> int:
    """How many different bytes a picture consists of: a blank one has a handful."""
    at, data = 8, b""
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    return len(set(zlib.decompress(data)))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_no_browser_complains(name: str, browser: Any, tmp_path: Path) -> None:
    text = PAGES[name](tmp_path)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    (tmp_path / "page.html").write_text(text)
    for width, scheme in ((1200, "light"), (390, "dark")):
        page, complaints = opened(browser, tmp_path / "page.html", width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("h1").count() == 1
        assert tones(page.screenshot()) > 60
        for plot in page.locator("figure.chart .area").all():
            plot.hover()
            assert plot.locator(".tip").is_visible()
        assert complaints == []
        page.context.close()


def test_a_chunk_is_where_simulated_time_says_with_what_it_carries(browser: Any, tmp_path: Path) -> None:
    timeline = late_ring()
    (tmp_path / "page.html").write_text(timeline_page(timeline))
    page, complaints = opened(browser, tmp_path / "page.html", 1200, "light")
    held = list(contributions(ring(8)))
    # Nothing moves before somebody presses Play.
    page.wait_for_timeout(200)
    assert page.locator("#play").inner_text() == "Play"
    assert page.locator("#seek").input_value() == "0"
    for share in (0.0, 0.2, 0.62, 1.0):
        page.evaluate("at => { seek.value = 1000 * at; seek.dispatchEvent(new Event('input')) }", share)
        expected = under_way(timeline, held, share * timeline.seconds)
        drawn = page.evaluate(
            "[...document.querySelectorAll('.parcel')].map(p => [+p.dataset.src, +p.dataset.dst,"
            "p.querySelectorAll('[fill^=\"#\"], [fill^=hsl], [fill^=rgb], [fill^=oklch]').length])"
        )
        assert sorted(map(tuple, drawn)) == sorted(expected)
    assert (
        page.locator(".done").evaluate_all("all => all.map(one => one.getAttribute('d').split('M').length - 1)")
        == [8] * 8
    )
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    page.wait_for_function("+document.getElementById('seek').value > 5")
    assert complaints == []
    page.context.close()


def under_way(timeline: Timeline, held: list[np.ndarray], now: float) -> list[tuple[int, int, int]]:
    """Return (sender, receiver, contributions) of what has left and was not taken yet."""
    found = []
    for sent in timeline.sent():
        taken = np.maximum(sent.arrive_s, timeline.ready_for(sent.round)[sent.dst])
        step = timeline.schedule.round(sent.round)
        chunk = dict(zip(zip(step.src.tolist(), step.dst.tolist(), strict=True), step.chunk.tolist(), strict=True))
        for src, dst, begin, until in zip(sent.src, sent.dst, sent.begin_s, taken, strict=True):
            if begin <= now < until:
                found.append((int(src), int(dst), int(held[sent.round][src, chunk[int(src), int(dst)]].sum())))
    return found


def test_lanes_hold_the_critical_path_and_fit_one_axis() -> None:
    timeline = simulate(hierarchical(8, 4), preset("dgx-h100", 4), 1e8, late={20: 1e-4})
    lanes = shown_lanes(timeline)
    assert len(lanes) == 16
    assert {20} < set(lanes)
    assert {hop.dst for hop in timeline.critical_path} <= set(lanes)
    figure = gantt(timeline, "After", 2 * timeline.seconds)
    assert f'data-end="{2 * timeline.seconds!r}"' in figure
    assert "rank 20</span>" in figure
    assert "16 of 32 ranks, in the order in which the critical path reaches them" in figure
    reached = dict.fromkeys(vertex for hop in timeline.critical_path for vertex in (hop.src, hop.dst))
    assert lanes[: len(reached)] == list(reached)


def test_what_a_rank_sends_is_drawn_above_what_it_takes() -> None:
    figure = gantt(simulate(ring(3), preset("loopback", 1, 3), 1e6), "After")
    drawn = re.findall(r'<rect class="(sends|takes)" x="[\d.]+" y="([\d.]+)"', figure)
    assert {kind for kind, _ in drawn} == {"sends", "takes"}
    for kind, y in drawn:  # a lane is twenty units high
        assert (float(y) % 20 < 10) == (kind == "sends")


def test_the_critical_path_is_drawn_only_between_ranks_with_a_lane() -> None:
    timeline = simulate(ring(32), preset("dgx-h100", 4), 1e8)
    lanes = shown_lanes(timeline)
    shown = [hop for hop in timeline.critical_path if {hop.src, hop.dst} <= set(lanes)]
    assert 0 < len(shown) < len(timeline.critical_path)
    path = gantt(timeline, "After").partition('class="path" d="')[2].partition('"')[0]
    breaks = sum(before.dst != after.src for before, after in pairwise(shown))
    assert path.count("M") == 1 + breaks
    assert path.count("M") + path.count("L") == 1 + breaks + len(shown)


def test_the_animation_is_above_the_fold(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(timeline_page(simulate(ring(16), preset("dgx-h100", 2), 1e9)))
    page, _ = opened(browser, tmp_path / "page.html", 1280, "light")
    box = page.locator("#figure .stage svg").bounding_box()
    assert box["height"] > 350
    assert box["y"] + box["height"] <= page.locator("#player").bounding_box()["y"] <= 860
    page.context.close()


def test_baselines_have_their_proper_names(tmp_path: Path) -> None:
    assert "Hockney" in a_score(tmp_path).partition("Baselines")[2][:200]


def test_bandwidth_is_the_bus_only_where_ranks_are_known(tmp_path: Path) -> None:
    """2^29 bytes in 5,389 µs are 99.6 GB/s; on the bus of 8 ranks 2·7/8 of it."""
    text = a_score(tmp_path)
    assert "table: bandwidth, GB/s" in text
    table = tmp_path / "known.csv"
    rows = (tmp_path / "table.csv").read_text().splitlines()[:-1]
    table.write_text("\n".join([f"{rows[0]},gpus", *(f"{row},8" for row in rows[1:])]))
    tables, _ = score.check_tables(read_tables(table))
    known = score_page([score.hold_out(one, Knowledge()) for one in tables])
    assert "known: bus bandwidth, GB/s" in known
    for page, shown in ((text, "99.6"), (known, "174")):
        figure = page.partition('id="rate-0"')[2].partition("</figure>")[0]
        data = json.loads(figure.partition('<script type="application/json">')[2].partition("</script>")[0])
        assert [series["text"][-1] for series in data["series"] if series["name"] == "measured"] == [shown]


def test_a_table_says_why_its_fastest_row_is_not_the_answer() -> None:
    question = PlanQuestion(preset("dgx-h100", 64, 8), 14e9)
    found = plan(question)
    assert found.here[0].algorithm == "in_network" != found.priced.algorithm
    for text in (plan_page(found), "\n".join(full_plan(found))):
        assert "in_network requires switches that reduce (SHARP)" in text
        assert "Rows priced by schedule ignore per-message GPU overhead, so they are optimistic." in text


def test_a_large_schedule_gets_lanes_and_no_animation() -> None:
    page = timeline_page(simulate(ring(128), preset("dgx-h100", 16), 1e8))
    assert 'id="player"' not in page
    assert 'class="path"' in page


def test_a_trace_of_a_simulation(tmp_path: Path) -> None:
    timeline = late_ring()
    count = write_timeline(tmp_path / "trace.json", timeline)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == count
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * timeline.seconds, abs=0.01)
    arrows = {kind: [event["id"] for event in events if event["ph"] == kind] for kind in "sf"}
    assert arrows["s"] == arrows["f"] == list(range(14 * 8))
    path = [event for event in events if event["ph"] == "X" and event["pid"] == 8]
    assert sum(event["dur"] for event in path) == pytest.approx(1e6 * timeline.seconds, abs=0.1)
    assert {event["name"] for event in events if event["pid"] == 1} >= {"late", "process_name"}
    with pytest.raises(UsageError, match="more than a trace viewer can show"):
        write_timeline(tmp_path / "large.json", simulate(ring(512), preset("dgx-h100", 64), 1e8))
