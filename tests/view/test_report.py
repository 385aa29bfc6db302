from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from ringside.monitor import RunInfo, StepRecord, detect
from ringside.monitor.summary import summarise
from ringside.monitor.verdict import Verdict
from ringside.text import UNKNOWN, digits
from ringside.view.html.charts import POINTS, Curve, chart, ticks
from ringside.view.html.rings import longest_waits, waits_ring
from ringside.view.html.run_report import links_table, render_report
from ringside.view.verdict_text import verdict_text

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """The page's elements; fails on tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.texts.append((self.stack[-1], data))

    def text(self, *tags: str) -> str:
        return " ".join(data for tag, data in self.texts if tag in tags).replace("\u00a0", " ")


def job(ranks: int, steps: int, culprit: int | None = None, **changes: Any) -> tuple[dict[str, Any], RunInfo, Any]:
    rng = np.random.default_rng(4)
    own = 0.1 * np.exp(rng.normal(0, 0.02, (steps, ranks)))
    if culprit is not None:
        own[steps // 2 :, culprit] *= 1.3
    info = RunInfo(
        schema=1, name=changes.get("name", "run"), started_unix=1.7e9, command=["train.py"], world_size=ranks,
        hosts=[changes.get("host", "h")] * ranks, pids=[1] * ranks, engine="ringside", algorithm="push",
    )  # fmt: skip
    records = [
        StepRecord(
            step=s, rank=r, ended_unix=0, step_seconds=float(own[s].max()), own_seconds=float(own[s, r]),
            wait_seconds=float(own[s].max() - own[s, r]), loss=changes.get("loss"),
        )
        for s in range(steps)
        for r in range(ranks)
    ]  # fmt: skip
    return summarise(info, records, detect(own) if steps else [], extra=changes.get("extra")), info, records


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (2, 0), (2, 1), (2, 150), (8, 60), (40, 30)])
def test_any_run_gives_a_whole_page_that_needs_nothing_else(ranks: int, steps: int) -> None:
    source = render_report(*job(ranks, steps, loss=1.0))
    page = Page(source)
    assert not re.search(r"""(src|href)=["']|url\((?!#)|@import|https?://""", source)
    identities = [attributes["id"] for _, attributes in page.seen if attributes.get("id")]
    assert len(identities) == len(set(identities))
    charts = {"Own time", "Over time"} & {attributes.get("aria-label") for _, attributes in page.seen}
    assert len(charts) == (2 if steps else 0)


def test_the_verdict_comes_first_in_plain_words() -> None:
    source = render_report(*job(4, 200, culprit=2))
    page = Page(source)
    assert page.text("h1") == "Rank 2 is 30% slower than the others."
    words = page.text("dd")
    assert "rank-seconds: all 4 ranks lost" in words
    assert "Its own work takes 130 ms in the median step since then, the others' 100 ms." in words
    assert source.index("<h1>") < source.index("<figure")


@pytest.mark.parametrize(("own", "said"), [(0.13, ""), (0.14, "; step by step that is 30% longer in the median")])
def test_an_excess_that_is_not_that_of_the_medians_names_its_statistic(own: float, said: str) -> None:
    summary, *_ = job(4, 200, culprit=2)
    content = {**summary["verdicts"][0], "excess_ratio": 0.3}
    content["evidence"] = {**content["evidence"], "own_seconds": own, "others_own_seconds": 0.1}
    assert f"since then, the others' 100 ms{said}. " in verdict_text(content, summary).why


def test_without_a_verdict_it_says_so() -> None:
    page = Page(render_report(*job(2, 150)))
    assert page.text("h1") == "No straggler detected."


def test_a_few_steps_are_not_called_healthy() -> None:
    assert Page(render_report(*job(2, 3))).text("h1") == "Too few steps for a verdict."
    assert Page(render_report(*job(2, 0))).text("h1") == "No step was recorded."


def test_the_culprit_is_marked_by_more_than_colour() -> None:
    page = Page(render_report(*job(4, 200, culprit=2)))
    assert "slow" in page.text("text")
    assert page.text("span").count("(verdict)") >= 2
    assert any(tag == "circle" and attributes.get("class") == "halo" for tag, attributes in page.seen)


def test_every_picture_has_words() -> None:
    page = Page(render_report(*job(4, 200, culprit=2, loss=2.0)))
    pictures = [attributes for _, attributes in page.seen if attributes.get("role") == "img"]
    assert len(pictures) == 4
    assert all(attributes.get("aria-label") for attributes in pictures)


def test_a_loss_that_only_some_steps_have_is_a_dash_in_the_others() -> None:
    assert digits(float("nan")) == UNKNOWN
    line = Curve("loss", np.arange(4.0), np.array([1.0, 1.0, np.nan, 2.0]), "s0")
    assert "nan" not in chart("loss", "Loss", [line], text=digits).lower()


def test_hostile_text_stays_text() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    injected = {"kind": evil, "ranks": [1], "factor": 1.3, "from_step": evil}
    extra = {"injected": injected, "comparison": {"peer": evil, "step_ratio": 1.5, evil: evil}}
    source = render_report(*job(2, 200, culprit=1, name=evil, host=evil, extra=extra))
    page = Page(source)
    assert not any(tag == "img" for tag, _ in page.seen)
    assert [attributes.get("type") for tag, attributes in page.seen if tag == "script"].count(None) == 1
    assert "alert(1)</script>" not in source


@pytest.mark.parametrize(("factor", "how"), [(1.3, ", 1.30 × its time"), (None, "")])
def test_what_the_demo_injected_is_revealed(factor: float | None, how: str) -> None:
    injected = {"kind": "slow_rank", "ranks": [1], "factor": factor, "from_step": 60}
    page = render_report(*job(2, 200, culprit=1, extra={"injected": injected}))
    assert f"What had been injected, unknown to the detector: slow_rank, rank 1{how}, from step 60." in page


def test_hover_data_is_json_with_one_text_per_step() -> None:
    page = Page(render_report(*job(2, 150)))
    blocks = [json.loads(text) for tag, text in page.texts if tag == "script" and text.startswith("{")]
    assert [len(block["series"]) for block in blocks] == [2, 2]
    assert all(len(line["text"]) == len(block["steps"]) == 150 for block in blocks for line in block["series"])


def test_long_runs_are_thinned() -> None:
    line = Curve("a", np.arange(10_000.0), np.arange(10_000.0), "s0")
    source = chart("x", "t", [line])
    data = json.loads(re.findall(r"application/json\">(.*?)</script>", source)[0])
    assert len(data["steps"]) <= POINTS
    assert data["span"][0] == 0


def test_gaps_break_the_line() -> None:
    line = Curve("a", np.arange(4.0), np.array([1.0, np.nan, 2.0, 3.0]), "s0")
    (path,) = re.findall(r'class="line s0" d="([^"]*)"', chart("x", "t", [line]))
    assert path.count("M") == 2


def test_who_waited_for_whom_adds_up() -> None:
    own = np.array([[1.0, 2.0, 1.5], [3.0, 2.0, 1.0], [np.nan] * 3])
    waits = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 2.0], [9.0, 9.0, 9.0]])
    found = longest_waits(own, waits, 9)
    assert found[0] == (2, 0, 1.0)
    assert {(waiting, awaited): seconds for waiting, awaited, seconds in found} == {
        (2, 0): 1.0, (0, 1): 0.5, (1, 0): 0.5, (2, 1): 0.25
    }  # fmt: skip
    assert longest_waits(own, waits, 1) == found[:1]
    assert longest_waits(own[2:], waits[2:], 9) == []
    assert waits_ring([], 3, set()).count('class="wait') == 1  # the empty list of waits


def test_a_wait_of_less_than_a_fiftieth_of_the_longest_is_not_worth_an_arrow() -> None:
    own, waits = np.array([[2.0, 1.0, 1.0, 1.0]]), np.array([[0.0, 1.0, 0.0201, 0.0199]])
    assert longest_waits(own, waits, 9) == [(1, 0, 1.0), (2, 0, 0.0201)]
    assert longest_waits(own, np.array([[0.0, np.nan, -1.0, 0.5]]), 9) == [(3, 0, 0.5)]
    assert longest_waits(np.array([[2.0, np.nan]]), np.array([[9.0, 1.0]]), 9) == [(1, 0, 1.0)], "nobody for himself"


def labels(source: str, chart_id: str) -> list[str]:
    """The names in a chart's legend."""
    figure = source.partition(f'id="{chart_id}"')[2].partition("</figure>")[0]
    return re.findall(r'<span class="key [^"]*"><i></i>(.*?)</span>', figure)


def accused(count: int, *culprits: int) -> str:
    """The report of a run of twelve steps that a verdict on these ranks was written into."""
    summary, info, records = job(count, 12)
    hang = {"kind": "hang", "ranks": [*culprits], "since_step": 3, "detected_step": 5, "excess_ratio": 0.0}
    return render_report({**summary, "verdicts": [hang] if culprits else []}, info, records)


def test_up_to_eight_ranks_have_a_line_each_and_more_are_a_band_with_its_culprits() -> None:
    assert labels(accused(8), "own") == [f"rank {rank}" for rank in range(8)]
    assert labels(accused(4, 1), "wait") == ["rank 0", "rank 2", "rank 3", "rank 1 (verdict)"]
    assert labels(accused(9), "own") == ["9 other ranks: median, 5–95%"]
    source = accused(12, *range(8), 99)
    assert labels(source, "own") == ["4 other ranks: median, 5–95%", *(f"rank {rank} (verdict)" for rank in range(6))]
    assert '<span class="flag left"' in source
    assert ">ranks 0-7 and 99, from step 3</span>" in source


def test_the_table_of_ranks_is_in_their_order_while_they_are_few() -> None:
    for count, first in ((16, 0), (17, 16)):
        table = accused(count, count - 1).partition('<section aria-label="Ranks">')[2].partition("</section>")[0]
        assert re.findall(r'<th scope="row">(\d+)', table)[0] == str(first)


def test_of_links_the_slowest_thirty_two_are_shown() -> None:
    link = {"bytes_per_s": 5e6, "sent_bytes": 10**9, "wire_seconds": 9.0, "wire_ratio": 0.5, "retransmitted_bytes": 0}
    summary = {"ranks": [{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}]}
    slow = Verdict(kind="slow_link", ranks=[0, 2], since_step=0, detected_step=0, excess_ratio=1.0)
    hung = Verdict(kind="hang", ranks=[0, 1], since_step=0, detected_step=0, excess_ratio=1.0)
    assert links_table({**summary, "links": []}, []) == links_table(summary, []) == ""
    for count, note in ((32, ""), (33, " (the 32 slowest of 33)")):
        links = [{**link, "src": 0, "dst": 1 + n} for n in range(count)]
        page = links_table({**summary, "links": links}, [slow, hung])
        assert f"<figcaption>Links between hosts, as the kernel counts{note}</figcaption>" in page
        assert page.count('<th scope="row">') == 32
        assert re.findall(r'<tr class="culprit"><th scope="row">(.*?) <', page) == ["0 → 2"]
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page.partition("<tbody>")[2].partition("</tr>")[0])
    assert cells == ["0 → 1", "a → b", "5 MB/s", "1 GB", "9.00 s", "50.0%", "0 B"]


def test_figures_and_details_are_those_of_the_summary() -> None:
    summary, info, records = job(2, 40, loss=1.0)
    sync = {**summary["sync"], "exposed_seconds_per_step": 0.01, "total_seconds_per_step": 0.04,
            "payload_bytes_per_step": 4e6, "engine": "ringside", "algorithm": "ring",
            "memory": {"shared_buckets": 2, "shared_bytes": 3e6, "copied_buckets": 0, "copied_bytes": 0}}  # fmt: skip
    comparison = {"peer": "gloo", "step_ratio": 1.5, "asked": 2, "ours": {"step_seconds": 0.1, "odd": []}}
    more = {
        "sync": sync, "step_seconds": {"median": 0.1, "p95": 0.2}, "loss": {"first": 5.0, "last": 2.5},
        "overhead": {"seconds_per_step": 1e-3, "ratio": 0.01}, "comparison": comparison,
    }  # fmt: skip
    source = render_report({**summary, **more}, info, records)
    tiles = source.partition('<dl class="tiles">')[2].partition("</dl>")[0]
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small>", tiles) == [
        ("step time", "100 ms", "median, whole run; 95th percentile 200 ms"),
        ("exposed communication", "10.0 ms", "10.0% of a step; median, whole run"),
        ("Ringside overhead", "1.00 ms", "1.00% of a step; mean, whole run"),
        ("loss", "2.50", "from 5.00"), ("vs gloo", "1.50 ×", "gloo&#x27;s step time over ours"),
    ]  # fmt: skip
    details = source.partition('aria-label="Details"')[2].partition("</section>")[0]
    rows = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", details))
    assert rows["gradients reduced by"] == "ringside, ring"
    assert rows["gradient buckets"] == "2 shared (3 MB)"
    assert (rows["payload per step"], rows["of which exposed"]) == ("4 MB", "10.0 ms")
    compared = {name.removeprefix("comparison: "): text for name, text in rows.items() if "comparison" in name}
    assert compared == {"peer": "gloo", "step ratio": "1.50 ×", "asked": "2", "ours, step seconds": "100 ms"}
    bare = {**more, "overhead": {"seconds_per_step": 1e-3, "ratio": None}, "loss": {"first": None, "last": 2.5},
            "comparison": None, "step_seconds": {"median": None, "p95": None}}  # fmt: skip
    source = render_report({**summary, **bare}, info, records)
    assert "<small>mean, whole run</small>" in source
    assert "<small>median, whole run</small>" in source
    assert "<dt>loss</dt>" not in source
    assert "<dt>vs " not in source


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.137), (2.0, 7.5), (1e-9, 3e-9), (5.0, 5.0)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    values = ticks(low, high)
    assert 1 <= len(values) <= 6
    assert all(low - 1e-12 <= value <= high + 1e-12 for value in values)
