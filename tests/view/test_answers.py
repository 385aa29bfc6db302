"""The four answers and the links in the report and in the terminal's last words."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.job.questions import QUESTIONS, Question, read_answers
from ringside.monitor.links.sampler import LinkTotals
from ringside.monitor.summary import summarise
from ringside.monitor.verdict import Verdict, headline
from ringside.view.html.page import checks_section
from ringside.view.html.run_report import render_report
from ringside.view.terminal import closing_summary
from ringside.view.verdict_text import answer_sign, answer_text, checks

SLOW_LINK = Verdict(kind="slow_link", ranks=[0, 1], since_step=5, detected_step=9, excess_ratio=3.0, cause="the wire")


def run(*verdicts: Verdict) -> tuple[dict[str, Any], RunInfo, list[StepRecord]]:
    info = RunInfo(
        schema=1,
        name="a run",
        started_unix=0,
        command=["train.py"],
        world_size=3,
        hosts=["a", "<b>", "c"],
        pids=[1, 2, 3],
        engine="native",
    )
    records = [
        StepRecord(step=step, rank=rank, ended_unix=0, step_seconds=0.1, own_seconds=0.06, exposed_seconds=0.04)
        for step in range(30)
        for rank in range(3)
    ]
    link = {"sent_bytes": 10**9, "wire_seconds": 9.0, "wire_ratio": 0.5, "retransmitted_bytes": 1000}
    links = [
        msgspec.convert({**link, "src": src, "dst": dst, "bytes_per_s": rate}, LinkTotals)
        for src, dst, rate in ((0, 1, 5e6), (1, 2, 5e7))
    ]
    return summarise(info, records, verdicts, links=links), info, records


def test_the_page_answers_all_four_and_shows_the_links() -> None:
    summary, info, records = run()
    page = render_report(summary, info, records)
    shown = checks(read_answers(summary["questions"]))
    assert [name for name, check in shown.items() if check.heading in page] == list(QUESTIONS)
    assert page.count('<b title="failed">!</b>') == sum(check.mark == "!" for check in shown.values()) > 0
    assert "0 → 1" in page
    assert "5 MB/s" in page
    assert "a → &lt;b&gt;" in page


def test_of_a_slow_link_neither_end_is_marked_but_the_link_is() -> None:
    page = render_report(*run(SLOW_LINK))
    assert "The link 0 → 1 is slow." in page
    assert '<th scope="row">0 → 1 <span class="badge">verdict</span></th>' in page
    assert "rank 0 (verdict)" not in page
    assert "link 0 → 1, from step 5" in page


def test_the_last_words_in_the_terminal_have_the_checks() -> None:
    summary, _, _ = run()
    out = io.StringIO()
    Console(file=out, width=200).print(closing_summary(summary, []))
    found = checks(read_answers(summary["questions"])).values()
    assert [check.mark for check in found] == ["!", "✓", "!", "?"]
    lines = out.getvalue().splitlines()
    assert all(f"{check.mark} {check.heading}" in lines for check in found)
    assert all(f"  {check.caption}" in lines for check in found)
    del summary["questions"]
    Console(file=out, width=200).print(closing_summary(summary, []))  # as an older version wrote it


@pytest.mark.parametrize(("value", "said"), [(True, "Yes. So."), (False, "No. So."), (None, "Not enough data. So.")])
def test_answers_in_words(value: bool | None, said: str) -> None:
    question = Question(answer=value, words="so")
    assert answer_text(question) == said
    assert answer_sign(question) == {True: "yes", False: "no", None: "–"}[value]


@pytest.mark.parametrize(
    ("name", "answer", "numbers", "mark", "heading"),
    [
        ("small_collectives", True, {}, "!", "Too many small collectives are launched"),
        ("network_between_hosts", False, {}, "✓", "The network between hosts is not the bottleneck"),
        ("similar_step_times", True, {"worst_rank": 1}, "✓", "Ranks take similar times"),
        ("similar_step_times", False, {"worst_rank": 1, "worst_excess_ratio": 0.15}, "!",
         "Ranks differ: rank 1 is 15% slower over the whole run"),
        ("similar_step_times", False, {}, "?", "Ranks were not compared"),
        ("communication_dominates", None, {}, "?", "Exposed communication was not judged"),
    ],
)  # fmt: skip
def test_a_check_has_its_finding_as_heading(
    name: str, answer: bool | None, numbers: dict[str, float], mark: str, heading: str
) -> None:
    question = Question(answer=answer, numbers=dict(numbers), words="so")
    assert checks({name: question}) == {name: (mark, heading, "So.")}


def test_a_verdict_says_which_rank_differs() -> None:
    slow = Verdict(kind="slow_rank", ranks=[3], since_step=0, detected_step=9, excess_ratio=0.3)
    numbers: dict[str, float | int | str] = {"worst_rank": 3, "worst_excess_ratio": 0.02}
    found = checks({"similar_step_times": Question(answer=False, numbers=numbers, words=headline(slow))}, [slow])
    assert found["similar_step_times"].heading == f"Ranks differ: {headline(slow)}"


def test_who_differs_is_not_said_again_below() -> None:
    slow = Verdict(kind="slow_rank", ranks=[3], since_step=0, detected_step=9, excess_ratio=0.3)
    words = "Rank 3 is 30% slower than the others; over the whole run own times differ by 2% at most"
    found = checks({"similar_step_times": Question(answer=False, numbers={"worst_rank": 3}, words=words)}, [slow])
    assert found["similar_step_times"].caption == "Over the whole run own times differ by 2% at most."


def test_hostile_text_in_an_answer_stays_text() -> None:
    section = checks_section({"small_collectives": Question(answer=True, words="<script>", numbers={"<i>": "<b>"})})
    assert "<script>" not in section
    assert "<i>" not in section
    assert checks_section({}) == ""


def test_verdicts_on_the_job_have_sentences() -> None:
    def said(kind: str) -> str:
        return headline(Verdict(kind=kind, ranks=[], since_step=0, detected_step=0, excess_ratio=0.5))

    assert said("communication_bound") == "the job is bound by communication"
    assert said("small_collectives") == "too many small collectives are launched"
    assert said("input_bound") == "the whole job waits for its input"
