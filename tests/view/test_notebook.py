"""The live view of notebooks: what flows to the front end, and the front end in a real Chromium."""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from tests.recorded_runs import own_times, slow_run, write_run

pytest.importorskip("anywidget", reason="anywidget is not installed: pip install 'torch-ringside[notebook]'")

from ringside.errors import UsageError
from ringside.notebook import SHOWN_RANKS, LiveView, state_of
from ringside.view.tui.source import Local, take_snapshot

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "notebook.md"
# A model as anywidget gives one, which takes down what it is asked; the clock is ours.
MODEL = """async (code) => {
  const { default: widget } = await import("data:text/javascript;base64," + code);
  const asked = [], listening = new Set();
  let tick = null;
  window.setInterval = (call) => { tick = call; return 7; };
  window.clearInterval = (id) => { if (id === 7) tick = null; };
  const model = {
    get: () => window.state, send: (content) => asked.push(content),
    on: (name, call) => listening.add(call), off: (name, call) => listening.delete(call),
  };
  window.end = widget.render({ model, el: document.body });
  window.tick = () => { tick(); return asked; };
  window.change = (state) => { window.state = state; listening.forEach((call) => call()); };
  window.left = () => [tick, listening.size];
}"""


def test_what_is_asked_for_is_read_anew(tmp_path: Path) -> None:
    view = LiveView(tmp_path / "run")
    assert "state" in view.keys, "the front end is sent it"
    assert view.state["ranks"] == []
    assert "waiting for the first step" in view.state["remark"]
    write_run(tmp_path / "run", own_times(40, 4))
    view._handle_custom_msg("something else", [])
    assert view.state["ranks"] == []
    view._handle_custom_msg("look", [])
    assert view.state["title"].startswith("run · ")
    assert sorted(one["rank"] for one in view.state["ranks"]) == [0, 1, 2, 3]
    assert {len(one["spark"]) for one in view.state["ranks"]} == {40}
    assert all(one["own"].endswith(" ms") for one in view.state["ranks"])
    view.close()


def test_verdicts_are_told_with_why_price_and_what_to_do(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", own_times(40, 2))
    verdict = {
        "kind": "slow_rank", "ranks": [1], "since_step": 20, "detected_step": 26, "excess_ratio": 0.3,
        "cause": "\x1b[2Jheat", "cost_rank_seconds": 12.0, "advice": "cool it",
    }  # fmt: skip
    (run / "events.jsonl").write_text(
        json.dumps({"unix": 1.0, "kind": "verdict", "step": 26, "verdict": verdict}) + "\n"
    )
    (told,) = state_of(take_snapshot(Local(run)))["verdicts"]
    assert told["headline"] == "rank 1 is 30% slower than the others since step 20"
    assert told["told"][0] == ["why", "�[2Jheat"]
    assert [name for name, _ in told["told"]] == ["why", "cost", "do"]


def test_of_many_ranks_the_slowest_are_shown(tmp_path: Path) -> None:
    own = own_times(10, SHOWN_RANKS + 6)
    own[:, 5] *= 2
    state = state_of(take_snapshot(Local(write_run(tmp_path / "run", own))))
    assert (len(state["ranks"]), state["more"], state["ranks"][0]["rank"]) == (SHOWN_RANKS, 6, 5)


def test_a_run_of_a_newer_ringside_is_said_to_be_one(tmp_path: Path) -> None:
    file = write_run(tmp_path / "run", own_times(4, 2)) / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema": 99}))
    view = LiveView(tmp_path / "run")
    assert "a newer Ringside (schema 99; this one knows 1)" in view.state["remark"]
    assert view.state["verdicts"] == []
    view.close()


def test_without_anywidget_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "ringside.notebook")
    with pytest.raises(UsageError, match=r"^the live view needs anywidget: pip install 'torch-ringside\[notebook\]'$"):
        __import__("ringside.notebook")


def test_what_the_page_shows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    write_run(tmp_path / "runs" / "before", own_times(20, 2))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_front_end_draws_asks_follows_and_leaves_nothing(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    view = LiveView(slow_run(tmp_path / "run"))
    first = dict(view.state)
    named = {"headline": "rank 2 is slow", "over": False, "told": [["why", "<img src=x onerror=alert(1)>"]]}
    then = {**first, "remark": "", "verdicts": [named], "more": 3}
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.evaluate("(state) => { window.state = state; }", first)
        page.evaluate(MODEL, base64.b64encode(view._esm.encode()).decode())
        assert page.locator("h4").inner_text() == first["title"]
        assert page.locator("tbody tr").first.locator("td").first.inner_text() == "2"
        assert page.locator("p.meaning").inner_text() == "own time: work from one synchronisation to the next"
        assert page.evaluate("tick()") == ["look"]
        page.evaluate("(state) => change(state)", then)
        assert page.locator("section.open strong").inner_text() == "rank 2 is slow"
        assert page.locator("section dd").inner_text() == named["told"][0][1]
        assert page.locator("img").count() == 0
        assert page.locator("caption").inner_text() == "and 3 ranks that are less slow"
        page.evaluate("end()")
        assert page.evaluate("left()") == [None, 0]
        browser.close()
    view.close()
