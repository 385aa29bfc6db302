"""The four questions, answered by every summary."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.job.questions import QUESTIONS, Question, answer_questions, read_answers, to_plain
from ringside.monitor.links.sampler import LinkTotals
from ringside.monitor.run.directory import RunWriter
from ringside.monitor.run.table import tabulate
from ringside.monitor.summary import finish_run
from ringside.monitor.verdict import Verdict
from ringside.view.html.run_report import render_report
from ringside.view.verdict_text import checks

from .jobs import row

Info = Callable[..., RunInfo]
SLOW = Verdict(kind="slow_rank", ranks=[2], since_step=5, detected_step=9, excess_ratio=0.3)


def records(steps: int = 50, ranks: int = 4, **how: Any) -> list[StepRecord]:
    noise = np.random.default_rng(0)
    return [record for step in range(steps) for record in row(step, ranks, noise, **how).values()]


def link(src: int, dst: int, rate: float, wire: float) -> LinkTotals:
    return LinkTotals(
        src=src,
        dst=dst,
        sent_bytes=10**9,
        wire_seconds=wire * 100,
        wire_ratio=wire,
        bytes_per_s=rate,
        retransmitted_bytes=0,
    )


def answers(info: RunInfo, found: list[StepRecord], *verdicts: Verdict, **how: Any) -> dict[str, Question]:
    return answer_questions(info, tabulate(found, info.world_size), verdicts, **how)


def spread(info: RunInfo, hosts: int) -> RunInfo:
    return msgspec.structs.replace(info, hosts=[f"host{rank % hosts}" for rank in range(info.world_size)])


def test_all_four_are_answered_with_numbers_and_words(make_info: Info) -> None:
    found = answers(
        spread(make_info(4), 2), records(exposed=0.003, collectives=4, payload_bytes=10**6, busy_seconds=0.01)
    )
    assert found.keys() == QUESTIONS.keys()
    assert [one.answer for one in found.values()] == [False, True, False, False]
    assert all(one.numbers and one.words.endswith(".") for one in found.values())
    plain = to_plain(found)
    assert list(plain["small_collectives"]) == ["question", "answer", "numbers", "words"]
    assert read_answers(plain) == found


def test_communication_dominates_where_nobody_is_spared_it(make_info: Info) -> None:
    found = answers(make_info(4), records(exposed=0.05, optimizer_seconds=0.01))["communication_dominates"]
    assert found.answer is True
    assert found.numbers["communication_after_backward_ratio"] == pytest.approx(0.85, abs=0.05)
    waiting = answers(make_info(4), records(slow_rank=1, exposed=0.001))["communication_dominates"]
    assert waiting.answer is False  # three ranks wait for the fourth


def test_a_slow_rank_makes_step_times_differ(make_info: Info) -> None:
    assert answers(make_info(4), records(), SLOW)["similar_step_times"].answer is False
    assert "Rank 2 is 30% slower" in answers(make_info(4), records(), SLOW)["similar_step_times"].words
    unnamed = answers(make_info(4), records(slow_rank=1))["similar_step_times"]
    assert (unnamed.answer, unnamed.numbers["worst_rank"]) == (False, 1)


def test_one_host_has_no_network(make_info: Info) -> None:
    found = answers(spread(make_info(4), 1), records(exposed=0.5))["network_between_hosts"]
    assert (found.answer, found.words) == (False, "All ranks are on one host.")


@pytest.mark.parametrize(("exposed", "wire", "answer"), [(0.05, 0.9, True), (0.05, 0.1, False), (0.005, 0.9, False)])
def test_the_network_is_the_bottleneck_where_wires_are_busy_and_ranks_wait(
    make_info: Info, exposed: float, wire: float, answer: bool
) -> None:
    links = [link(0, 1, 10e6, wire), link(1, 0, 100e6, wire / 2)]
    found = answers(spread(make_info(4), 2), records(exposed=exposed), links=links)["network_between_hosts"]
    assert found.answer is answer
    assert found.numbers["slowest_bytes_per_second"] == 10e6
    assert "0 → 1" in found.words


def test_without_wires_the_exposed_part_decides_and_that_is_said(make_info: Info) -> None:
    found = answers(spread(make_info(4), 2), records(exposed=0.1))["network_between_hosts"]
    assert found.answer is True
    assert "no wire" in found.words
    unknown = msgspec.structs.replace(make_info(4), hosts=["", "", "", ""])
    assert answers(unknown, records())["network_between_hosts"].answer is None


def test_small_collectives_come_with_a_bucket_size(make_info: Info) -> None:
    many = {"collectives": 200, "payload_bytes": 40_000_000, "busy_seconds": 0.1, "latency_seconds": 300e-6}
    found = answers(make_info(4), records(exposed=0.08, **many))["small_collectives"]
    assert found.answer is True
    assert found.numbers["bucket_mb"] == pytest.approx(4, abs=1)
    assert found.numbers["saved_seconds_per_step"] == pytest.approx(0.0564, rel=0.05)
    assert f"buckets of {found.numbers['bucket_mb']} MiB" in found.words
    unmeasured = answers(make_info(4), records(collectives=200, payload_bytes=10**6))["small_collectives"]
    assert unmeasured.answer is None
    assert "not measured" in unmeasured.words


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_runs_that_were_cut_short_say_why_there_is_no_answer(make_info: Info, steps: int) -> None:
    found = answers(make_info(4), records(steps))
    assert all(one.answer is None and one.words for one in found.values())


def test_one_rank_waits_for_nobody(make_info: Info) -> None:
    assert {one.answer for one in answers(make_info(1), records(ranks=1)).values()} == {False}


def test_records_full_of_holes_break_nothing(make_info: Info) -> None:
    holes = [
        StepRecord(step=s, rank=0, ended_unix=0, step_seconds=math.nan, own_seconds=math.nan, exposed_seconds=math.inf)
        for s in range(20)
    ]
    assert answers(make_info(4), holes).keys() == QUESTIONS.keys()


@pytest.mark.parametrize(
    "content", [None, [], "yes", 3, {"small_collectives": 3}, {"small_collectives": {"answer": "yes"}}]
)
def test_what_is_no_answer_is_left_out(content: object) -> None:
    assert read_answers(content) == {}


def test_a_run_that_was_killed_is_answered_from_its_records(tmp_path: Path, make_info: Info) -> None:
    writer = RunWriter(tmp_path / "run", spread(make_info(4), 2))
    writer.append(records(30, exposed=0.1))
    with (tmp_path / "run" / "steps.jsonl").open("ab") as file:
        file.write(b'{"step":30,"rank":0,"ende')
    summary = finish_run(tmp_path / "run", render_report)
    assert summary["questions"]["communication_dominates"]["answer"] is True
    assert summary["questions"]["network_between_hosts"]["answer"] is True
    page = (tmp_path / "run" / "report.html").read_text()
    shown = checks(read_answers(summary["questions"]))
    assert shown.keys() == QUESTIONS.keys()
    assert all(check.heading in page for check in shown.values())


def test_steps_in_which_the_slow_rank_is_missing_say_nothing_of_communication(make_info: Info) -> None:
    rows = records(60, 4, slow_rank=2)
    kept = [record for record in rows if record.rank != 2 or record.step % 5 < 2]
    whole, torn = (answer_questions(make_info(4), tabulate(some, 4), [SLOW]) for some in (rows, kept))
    assert not whole["communication_dominates"].answer
    assert not torn["communication_dominates"].answer
    shares = [answers["communication_dominates"].numbers for answers in (whole, torn)]
    assert shares[0].keys() == shares[1].keys()
    for name, value in shares[0].items():
        assert shares[1][name] == pytest.approx(value, rel=0.2)
