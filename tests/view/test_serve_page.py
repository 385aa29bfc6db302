"""The live page in a real Chromium."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.recorded_runs import own_times, slow_run, write_run
from tests.support.waiting import until
from tests.view.hostile_run import HOSTILE, hostile_run

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.view.served import LIMIT_S, serving

from ringside.text import digits, duration, signed_percent
from ringside.view.server.feed import PageFeed
from ringside.view.server.state import packed


def rows(page: Any) -> int:
    count: int = page.evaluate("ringside.run.rows.count")
    return count


def append(path: Path, own: np.ndarray, first: int) -> None:
    """Add steps to a run as its collector does: one batch of lines at a time."""
    with (path / "steps.jsonl").open("a") as file:
        for step, times in enumerate(own, start=first):
            file.writelines(
                json.dumps({
                    "step": step, "rank": rank, "ended_unix": 0.0, "step_seconds": float(times.max()) + 0.01,
                    "own_seconds": float(value), "wait_seconds": float(times.max() - value), "exposed_seconds": 0.01,
                    "sync_seconds": 0.02,
                }) + "\n" for rank, value in enumerate(times)
            )  # fmt: skip
            file.flush()


def test_the_verdict_comes_first_and_everything_is_there(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    with serving(slow_run(tmp_path / "run")) as url:
        page = open_page(url)
        page.wait_for_selector("#verdicts h1:has-text('Rank 2 is')")
        assert page.locator("h1").count() == 1
        assert page.title() == "! run · Ringside"
        until(lambda: rows(page) == 120)
        order = page.evaluate(
            "[...document.querySelectorAll('main section:not([hidden])')].map(one => one.getBoundingClientRect().top)"
        )
        assert order[0] == min(order)
        assert page.locator("#rows tr").first.inner_text().startswith("2")
        assert page.locator("#ring .wait.culprit").count() == 3
        assert page.locator("#ring .edge, #ring .track").count() > 0
        assert page.locator("#questions li").count() == 4
        assert "Rank 2 is" in page.locator("#announce").inner_text()
        label = until(
            lambda: (text := page.locator("#of-rank").get_attribute("aria-label")) and "own 1" in text and text
        )
        assert "At step 119" in label


def drawn(page: Any) -> int:
    """How many colours the map shows."""
    count: int = page.evaluate(
        "(() => { const c = document.getElementById('heat'); const d = new Uint32Array(c.getContext('2d')"
        ".getImageData(50, 0, c.width - 50, c.height - 30).data.buffer); return new Set(d).size })()"
    )
    return count


def test_zoom_hover_links_and_keys(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    with serving(slow_run(tmp_path / "run")) as url:
        page = open_page(url + "#step=70&rank=1")
        until(lambda: rows(page) == 120)
        until(lambda: page.locator("#reading").inner_text().startswith("Rank 1, step 70: "))
        assert page.locator("#rank").input_value() == "1"
        assert until(lambda: drawn(page) > 10)
        heat = page.locator("#heat")
        heat.focus()
        for key in ("ArrowRight", "ArrowDown", "Shift+ArrowLeft"):
            page.keyboard.press(key)
        assert page.locator("#reading").inner_text().startswith("Rank 2, step 61: ")
        assert page.evaluate("location.hash") == "#step=61&rank=2"
        page.keyboard.press("+")
        zoomed = page.evaluate("ringside.heat.x.to - ringside.heat.x.from")
        assert zoomed == pytest.approx(60)
        page.keyboard.press("0")
        assert page.evaluate("ringside.heat.x.to - ringside.heat.x.from") == 120
        box = heat.bounding_box()
        page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.6 * box["height"])
        tip = page.locator("#tip").inner_text()
        assert "rank 2, step " in tip
        assert "median of all" in tip
        page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 20)
        assert page.locator("#reading").inner_text().startswith("Rank 0, step ")
        page.evaluate("location.hash = '#step=5&rank=3'")
        until(lambda: page.locator("#reading").inner_text().startswith("Rank 3, step 5: "))


SHOWN = "[ringside.heat.x, ...ringside.charts.map((chart) => chart.x)].map(({ from, to }) => [from, to])"


def test_a_range_selected_in_one_chart_is_shown_by_all(
    tmp_path: Path, open_page: Callable[..., Any], drag: Callable[..., None]
) -> None:
    def shown() -> tuple[float, float]:
        """The range of all charts and the map: one."""
        found = {tuple(one) for one in page.evaluate(SHOWN)}
        assert len(found) == 1
        return found.pop()

    with serving(slow_run(tmp_path / "run")) as url:
        page = open_page(url)
        until(lambda: rows(page) == 120)
        box = page.locator("#of-wait").bounding_box()
        width, left = box["width"] - 58, 58  # beside the labels of the axis
        begin, end = ((left + share * width) / box["width"] for share in (0.25, 0.75))
        drag(page, "#of-wait", begin, end, drop=False)
        marked = page.evaluate("ringside.charts.map((chart) => [chart.marked.from, chart.marked.to])")
        assert marked == [pytest.approx([30, 90], abs=1)] * 4
        page.mouse.up()
        assert page.evaluate("ringside.charts.map((chart) => chart.marked)") == [None] * 4
        assert shown() == pytest.approx((30, 90), abs=1)
        assert page.locator("#follow").get_attribute("aria-pressed") == "false"

        page.keyboard.press("Escape")  # the chart has the focus since it was dragged
        assert shown() == (0, 120)
        page.keyboard.press("Home")
        page.keyboard.press("+")
        assert shown() == (0, 60)
        tip = page.locator("#tip")
        assert tip.inner_text().startswith("step 0")
        page.keyboard.press("Shift+ArrowRight")
        assert tip.inner_text().startswith("step 10")
        page.locator("#of-all").dblclick()
        assert shown() == (0, 120)
        drag(page, "#of-all", 0.5, 0.5)  # a click selects nothing
        assert shown() == (0, 120)


def test_bars_of_ranks_are_their_excess(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    own = np.tile([0.1, 0.1004, 0.1021, 0.1], (40, 1))
    with serving(write_run(tmp_path / "run", own)) as url:
        page = open_page(url)
        until(lambda: page.locator("#rows tr").count() == 4)
        excess = page.locator("#rows tr td:nth-child(4)").all_inner_texts()
        assert excess[:2] == ["+2.1%", "+0.4%"]
        wide, narrow, *_ = (bar.bounding_box()["width"] for bar in page.locator("#rows .bar").all())
        assert 4 < wide / narrow < 6.5
        assert page.locator("#rows .track").first.bounding_box()["width"] > 2 * wide  # 2% is not alarming


def test_a_run_without_a_verdict_so_far_says_who_is_slowest_and_is_not_called_healthy(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    path = write_run(tmp_path / "run", np.tile([0.1, 0.1021, 0.1], (40, 1)))
    (path / "events.jsonl").write_text("")
    with serving(path, make=lambda path: PageFeed(path, poll_s=0.05)) as url:  # not yet quiet for long
        page = open_page(url)
        page.wait_for_selector("#verdicts .open h1:has-text('No straggler so far.')")
        said = "Rank 1 is slowest now: its own time is 2.1% above the median of the others’ (last 16 steps)."
        words = page.locator("[data-name=calm]")
        assert words.inner_text() == said
        append(path, np.tile([0.1, 0.1, 0.105], (20, 1)), 40)
        until(lambda: words.inner_text().startswith("Rank 2 is slowest now: its own time is 5.0% above"))


def test_an_ended_run_is_told_as_a_report_tells_it(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    with serving(slow_run(tmp_path / "run")) as url:  # killed: no event says that it has ended
        page = open_page(url)
        page.wait_for_selector("#state:has-text('ended')")
        page.wait_for_selector("#questioncard:visible")
        assert page.locator("#verdicts dt").all_inner_texts() == ["Why", "Cost", "Next"]
        tops = [
            page.locator(part).bounding_box() for part in ("#verdicts", "#of-all", "#ring", "#questioncard", "#tiles")
        ]
        order = [(box["y"] // 100, box["x"]) for box in tops]
        assert order == sorted(order)
        assert "mean per step, last 16 steps" in page.locator("#ringnote").inner_text()


def test_it_updates_while_a_run_grows_and_survives_a_restart(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    path = write_run(tmp_path / "run", own_times(20, 4))
    (path / "events.jsonl").write_text("")
    own = own_times(200, 4, seed=1)
    own[60:, 3] *= 1.4
    with serving(path) as url:
        page = open_page(url)
        until(lambda: rows(page) == 20)
        job = threading.Thread(target=append, args=(path, own, 20))
        job.start()
        until(lambda: rows(page) == 220)
        job.join(LIMIT_S)
        verdict = {"kind": "slow_rank", "ranks": [3], "since_step": 80, "detected_step": 90, "excess_ratio": 0.4}
        with (path / "events.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "verdict", "verdict": verdict}) + "\n")
        page.wait_for_selector("#verdicts h1:has-text('Rank 3 is')")
        price = page.locator("[data-name=price]")
        before = price.inner_text()
        append(path, own[100:], 220)
        until(lambda: price.inner_text() != before)  # it ticks
        write_run(tmp_path / "restarted", own_times(9, 2))
        path.rename(tmp_path / "before")
        (tmp_path / "restarted").rename(path)
        until(lambda: rows(page) == 9 and page.evaluate("ringside.run.rows.ranks") == 2)
        page.wait_for_selector("#verdicts h1:has-text('verdict')")  # too few steps for one; none, once it is quiet
        assert page.locator("#rows tr").count() == 2


def test_a_browser_that_lost_the_server_comes_back(tmp_path: Path, browser: Any) -> None:
    path = write_run(tmp_path / "run", own_times(20, 2))
    context = browser.new_context()  # a lost connection is a complaint on the console
    context.set_default_timeout(1000 * LIMIT_S)
    page = context.new_page()
    with serving(path) as url:
        page.goto(url)
        until(lambda: rows(page) == 20)
    page.wait_for_selector("#state:has-text('reconnecting')")
    append(path, own_times(5, 2), 20)
    with serving(path, port=int(url.rstrip("/").rpartition(":")[2])):
        until(lambda: rows(page) == 25)
        page.wait_for_selector("#state:not(:has-text('reconnecting'))")
    context.close()


def test_hostile_names_are_text(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    with serving(hostile_run(tmp_path / "run")) as url:
        page = open_page(url)
        until(lambda: rows(page) == 120)
        assert page.locator("#run").inner_text() == HOSTILE
        assert page.locator("main img").count() == 0
        assert page.locator("#rows tr").count() == 4


def test_a_run_that_has_not_begun_is_no_blank_page(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    (tmp_path / "run").mkdir()
    with serving(tmp_path / "run") as url:
        page = open_page(url)
        page.wait_for_selector("#verdicts h1:has-text('Waiting')")
        page.wait_for_selector("#state:has-text('waiting')")
        assert page.locator("main .card:visible").count() == 0  # no panel that holds nothing
        slow_run(tmp_path / "run", ranks=2, rank=1)
        page.wait_for_selector("#verdicts h1:has-text('Rank 1')")
        assert page.locator("main .card:visible").count() >= 6


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1440, "dark")])
def test_it_fits(tmp_path: Path, open_page: Callable[..., Any], width: int, scheme: str) -> None:
    with serving(slow_run(tmp_path / "a-run-with-quite-a-long-name-of-its-own-" / "run")) as url:
        page = open_page(url, width=width, height=780, scheme=scheme)
        page.wait_for_selector("#verdicts h1:has-text('Rank 2')")
        until(lambda: rows(page) == 120)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(part) for part in paper[4:-1].split(",")) < 200) == (scheme == "dark")


def test_numbers_are_written_as_in_the_report(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    values = [0.0, 1.0, 0.0999, 0.09996, 12.345, 99.96, 999.6, 3600.0, 86399.0, 1e6, 4.2e-5, 3.1e-8, -0.25, 0.1234]
    values += [-0.0004, 0.0004]
    with serving(slow_run(tmp_path / "run")) as url:
        page = open_page(url)
        written = page.evaluate(
            "async values => { const w = await import('/web/words.js');"
            " return values.map(v => [w.digits(v), w.duration(v), w.signedPercent(v)]) }",
            values,
        )
    assert written == [[digits(value), duration(value), signed_percent(value)] for value in values]


RANKS, STEPS, PIECE = 1024, 10_000, 1500


class Large(PageFeed):
    """1,024 ranks × 10,000 steps, without the four gigabytes of lines that they would be on disk."""

    def rows(self, since: int, epoch: str) -> bytes:
        """The next piece of steps, rank 700 late from the middle on."""
        since = since if epoch == self.epoch else 0
        steps = np.arange(since, min(since + PIECE, STEPS))
        random = np.random.default_rng(since)
        late = random.integers(1, 40, (len(steps), RANKS), dtype=np.uint8)
        late[steps >= STEPS // 2, 700] = 140
        line = (0.1 + 0.01 * random.random(len(steps))).astype(np.float32)
        lines: dict[str, Any] = dict.fromkeys(
            ("own_low", "own", "own_high", "own_most", "wait", "wire", "step", "sync"), line
        )
        lines |= {"exposed": line / 2, "backward": line}
        done = since + len(steps)
        found = {
            "epoch": self.epoch,
            "ranks": RANKS,
            "stride": 1,
            "rows": len(steps),
            "steps": packed(steps, np.float64),
            "late": packed(late, np.uint8),
            "worst": packed(np.full(len(steps), 700), np.int32),
            "lines": {name: packed(values, np.float32) for name, values in lines.items()},
            "since": done,
            "more": done < STEPS,
        }
        return msgspec.json.encode(found)


FRAMES = """async () => {
  const { heat } = ringside, found = {};
  const frame = () => new Promise(requestAnimationFrame);
  const measure = async (name, count, act) => {
    await frame(); await frame();
    heat.frames.length = 0;
    const intervals = [];
    let before = await frame();
    for (let i = 0; i < count; i++) {
      act(i);
      const now = await frame();
      intervals.push(now - before);
      before = now;
    }
    await frame();
    found[name] = { intervals, paints: heat.frames.slice() };
  };
  heat.fit();
  await measure("everything anew", 5, () => { heat.tiles.clear(); heat.draw(); });
  await measure("zoom", 90, (i) => heat.zoom(i % 30 < 15 ? 0.8 : 1.25));
  heat.view(2000, 3200, 0, 1024);
  await measure("pan", 90, (i) => heat.pan(i < 45 ? 12 : -12, 0));
  heat.fit();
  return found;
}"""


SEEN = """(() => {
  const { heat } = ringside, { canvas } = heat, late = heat.palette[140];
  const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Uint32Array(image.data.buffer).filter((pixel) => pixel === late).length;
})()"""


def test_a_thousand_ranks_and_ten_thousand_steps_are_smooth(
    tmp_path: Path, open_page: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(write_run(tmp_path / "run", own_times(1, RANKS)), make=Large) as url:
        page = open_page(url)
        until(lambda: rows(page) == STEPS)
        found = page.evaluate(FRAMES)
        assert until(lambda: page.evaluate(SEEN) > 500)  # one late rank among ten million cells, seen from afar
        pooled = page.evaluate("ringside.run.rows.levels.map((cells, k) => Math.max(...cells.subarray(0, 700)))")
    for name, times in found.items():
        painted, apart = (np.quantile(times[of], (0.5, 0.99)) for of in ("paints", "intervals"))
        with capsys.disabled():
            print(f"\n{name}: painted in {painted[0]:.1f} ms (99% {painted[1]:.1f}), ", end="")
            print(f"frames {apart[0]:.1f} ms apart (99% {apart[1]:.1f})", end="")
    assert len(pooled) > 10
    assert len(found["pan"]["paints"]) >= 90  # every change was painted in the next frame
    anew = np.median(found["everything anew"]["paints"])
    assert np.median(found["pan"]["paints"]) < anew
    assert np.median(found["zoom"]["paints"]) < anew
