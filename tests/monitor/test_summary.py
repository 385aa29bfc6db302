from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.monitor.jobs import DATA, TENSOR, crossed_rows, run_info

from ringside.errors import RingsideError
from ringside.monitor import RunInfo, StepRecord, Verdict, detect
from ringside.monitor import summary as summaries
from ringside.monitor.causes import explain_verdict
from ringside.monitor.collector import StepCollector
from ringside.monitor.run.directory import RunReader, RunWriter
from ringside.monitor.run.records import GroupUse
from ringside.monitor.run.table import tabulate
from ringside.monitor.summary import GroupSample, assess_run, finish_run, summarise
from ringside.monitor.verdict import headline
from ringside.view.html.run_report import render_report

Make = Callable[..., np.ndarray]
Records = Callable[..., list[StepRecord]]
Info = Callable[..., RunInfo]

KEYS = {
    "schema", "world_size", "steps", "step_seconds", "ranks", "verdicts", "sync", "overhead", "questions", "assessment",
    "undecided",
}  # fmt: skip
VERDICT_KEYS = list(Verdict.__struct_fields__)


def collected_run(path: Path, own: np.ndarray, info: RunInfo, records: list[StepRecord]) -> None:
    collector = StepCollector(own.shape[1], RunWriter(path, info), clock=lambda: 1.0)
    for begin in range(0, len(records), own.shape[1]):
        collector.add(records[begin : begin + own.shape[1]])
    collector.close()


def strict(text: str) -> object:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_fields_are_those_of_the_contract(make_own: Make, make_records: Records, make_info: Info) -> None:
    own = make_own(200, 2)
    own[100:, 1] *= 1.3
    summary = summarise(make_info(2), make_records(own, payload_bytes=800), detect(own))
    assert set(summary) == KEYS
    assert set(summary["step_seconds"]) == {"median", "p95"}
    assert list(summary["ranks"][0]) == ["rank", "host", "own_seconds_median", "wait_seconds_median", "excess_ratio"]
    assert list(summary["verdicts"][0]) == VERDICT_KEYS
    sync = ["engine", "algorithm", "payload_bytes_per_step", "exposed_seconds_per_step", "total_seconds_per_step"]
    assert list(summary["sync"]) == sync
    assert set(summary["overhead"]) == {"seconds_per_step", "ratio"}
    assert summary["steps"] == 200
    assert summary["sync"]["payload_bytes_per_step"] == 800


def test_figures_of_ranks(make_records: Records, make_info: Info) -> None:
    summary = summarise(make_info(3), make_records(np.array([[0.1, 0.1, 0.12]] * 20)), [])
    slow = summary["ranks"][2]
    assert slow["excess_ratio"] == pytest.approx(0.2)
    assert slow["wait_seconds_median"] == pytest.approx(0.0)
    assert summary["ranks"][0]["wait_seconds_median"] == pytest.approx(0.02)
    assert summary["ranks"][0]["excess_ratio"] == pytest.approx(0.1 / 0.11 - 1)


@pytest.mark.parametrize(("steps", "few"), [(1, 1), (2, 1), (9, 4), (10, 5), (40, 5)])
def test_loss_is_the_mean_of_the_first_and_last_steps(steps: int, few: int, make_info: Info) -> None:
    records = [
        StepRecord(step=s, rank=r, ended_unix=0, step_seconds=1, own_seconds=1, loss=steps - s + r)
        for s in range(steps)
        for r in range(2)
    ]
    aside = (few - 1) / 2 - 0.5
    assert summarise(make_info(2), records, [])["loss"] == {"first": steps - aside, "last": 2 + aside}


def test_nothing_recorded_and_nothing_known_is_valid_json(make_info: Info, make_records: Records) -> None:
    strict(json.dumps(summarise(make_info(2), [], [])))
    broken = make_records(np.full((3, 2), np.nan))
    summary = summarise(make_info(2), broken, [], extra={"comparison": {"step_ratio": float("inf")}, "other": 1})
    strict(json.dumps(summary))
    assert summary["comparison"] == {"step_ratio": None}
    assert "other" not in summary
    assert summary["ranks"][0]["own_seconds_median"] is None


def test_finish_writes_both_files_and_prices_on_all_records(
    tmp_path: Path, make_own: Make, make_records: Records, make_info: Info
) -> None:
    own = make_own(300, 4)
    own[100:, 2] *= 1.3
    collected_run(tmp_path, own, make_info(4), make_records(own))
    summary = finish_run(
        tmp_path, render_report, extra={"injected": {"kind": "slow", "ranks": [2], "factor": 1.3, "from_step": 100}}
    )
    assert strict((tmp_path / "summary.json").read_text()) == summary
    assert "Rank 2 is" in (tmp_path / "report.html").read_text()
    (verdict,) = summary["verdicts"]
    assert verdict["cost_rank_seconds"] == pytest.approx(4 * 200 * 0.03, rel=0.15)
    assert finish_run(tmp_path, render_report) == summary  # what was passed through is kept


def test_a_run_killed_before_its_end_still_gets_its_verdict(
    tmp_path: Path, make_own: Make, make_records: Records, make_info: Info
) -> None:
    """No verdict event was written, and the last line is torn: the detector reads the records instead."""
    own = make_own(200, 2)
    own[100:, 0] *= 1.3
    writer = RunWriter(tmp_path, make_info(2))
    writer.append(make_records(own))
    with (tmp_path / "steps.jsonl").open("ab") as file:
        file.write(b'{"step":200,"ra')
    (verdict,) = finish_run(tmp_path, render_report)["verdicts"]
    assert verdict["ranks"] == [0]
    assert verdict["since_step"] == pytest.approx(100, abs=2)


def test_sigkill_at_any_moment_leaves_a_readable_run(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "scripts" / "endless_collector.py"), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"up\n", b"at step 300\n"]
        os.kill(process.pid, signal.SIGKILL)
    summary = finish_run(tmp_path / "run", render_report)
    assert summary["steps"] > 300
    assert [verdict["ranks"] for verdict in summary["verdicts"]] == [[1]]


def test_two_culprits_are_priced_together_too(
    tmp_path: Path, make_own: Make, make_records: Records, make_info: Info
) -> None:
    own = make_own(300, 8, jitter=0.005)
    own[100:, [1, 2]] *= 1.3
    collected_run(tmp_path, own, make_info(8), make_records(own))
    verdicts = finish_run(tmp_path, render_report)["verdicts"]
    together = verdicts[0]["evidence"]["cost_together_rank_seconds"]
    assert together == pytest.approx(8 * 200 * 0.03, rel=0.1)
    assert sum(verdict["cost_rank_seconds"] for verdict in verdicts) < 0.3 * together


def test_ranks_that_only_a_links_verdict_names_are_not_priced_as_slow(
    tmp_path: Path, make_own: Make, make_records: Records, make_info: Info
) -> None:
    own = make_own(300, 4)
    own[100:, 2] *= 1.3
    collected_run(tmp_path, own, make_info(4), make_records(own))
    link = {
        "kind": "slow_link", "ranks": [0, 1], "since_step": 100, "detected_step": 120, "excess_ratio": 0.5,
        "cause": "", "cost_rank_seconds": 1.0, "advice": "", "evidence": {},
    }  # fmt: skip
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"unix": 1.7e9, "kind": "verdict", "step": 120, "verdict": link}) + "\n")
    verdicts = finish_run(tmp_path, render_report)["verdicts"]
    assert [verdict["ranks"] for verdict in verdicts] == [[2], [0, 1]]
    assert [verdict for verdict in verdicts if "cost_together_rank_seconds" in verdict["evidence"]] == []


@pytest.mark.parametrize("ranks", [2, 8])
def test_together_they_cost_what_they_did_in_their_episodes(
    tmp_path: Path, make_own: Make, make_records: Records, make_info: Info, ranks: int
) -> None:
    """The culprit moves, and both are healthy for most of the run."""
    own = make_own(1_600, ranks, jitter=0.005)
    own[200:400, 0] *= 1.3
    own[1000:1200, 1] *= 1.3
    collected_run(tmp_path, own, make_info(ranks), make_records(own))
    verdicts = finish_run(tmp_path, render_report)["verdicts"]
    assert [verdict["ranks"] for verdict in verdicts] == [[0], [1]]
    together = verdicts[0]["evidence"]["cost_together_rank_seconds"]
    assert together == pytest.approx(ranks * 400 * 0.03, rel=0.1)


def test_a_run_that_was_thinned_out_costs_no_less(
    tmp_path: Path, make_own: Make, make_records: Records, make_info: Info
) -> None:
    own = make_own(2_000, 4, jitter=0.005)
    own[100:, 1] *= 1.3
    records = list(make_records(own))
    costs = []
    for name, full_bytes in (("all", 1 << 30), ("some", 300_000)):
        writer = RunWriter(tmp_path / name, make_info(4), full_bytes=full_bytes)
        slow = Verdict(kind="slow_rank", ranks=[1], since_step=100, detected_step=110, excess_ratio=0.3)
        writer.event({"unix": 0, "kind": "verdict", "verdict": msgspec.to_builtins(slow)})
        for begin in range(0, len(records), 40):
            writer.append(records[begin : begin + 40])
        costs.append(finish_run(tmp_path / name, render_report)["verdicts"][0]["cost_rank_seconds"])
    assert writer.stride > 2
    assert costs[1] == pytest.approx(costs[0], rel=0.05)


@pytest.mark.parametrize("evidence", [{"until_step": "x"}, {"usual_excess_ratio": "x"}])
def test_a_forged_number_is_no_verdict(
    tmp_path: Path, make_own: Make, make_records: Records, make_info: Info, evidence: dict[str, str]
) -> None:
    writer = RunWriter(tmp_path, make_info(2))
    writer.append(make_records(make_own(50, 2)))
    forged = Verdict(
        kind="slow_rank", ranks=[1], since_step=5, detected_step=9, excess_ratio=1.0, evidence=dict(evidence)
    )
    writer.event({"unix": 0, "kind": "verdict", "verdict": msgspec.to_builtins(forged)})
    assert finish_run(tmp_path, render_report)["verdicts"] == []


def test_a_verdict_on_a_rank_of_which_nothing_is_recorded_any_more_stays_as_it_is(
    tmp_path: Path, make_own: Make, make_records: Records, make_info: Info
) -> None:
    writer = RunWriter(tmp_path, make_info(4))
    writer.append([one for one in make_records(make_own(50, 4)) if one.rank != 1 or one.step < 20])
    told = Verdict(
        kind="slow_rank", ranks=[1], since_step=20, detected_step=30, excess_ratio=0.25, cause="as it was told",
        evidence={"own_seconds": 0.125}, cost_rank_seconds=3.5, advice="as it was given",
    )  # fmt: skip
    writer.event({"unix": 0, "kind": "verdict", "verdict": msgspec.to_builtins(told)})
    (verdict,) = finish_run(tmp_path, render_report)["verdicts"]
    assert msgspec.convert(verdict, Verdict) == told


def test_a_verdict_keeps_its_place_without_the_numbers_that_were_none(tmp_path: Path, make_info: Info) -> None:
    evidence = {"until_step": math.nan, "share": math.inf, "kept": 0.5}
    hang = Verdict(kind="hang", ranks=[1], since_step=5, detected_step=9, excess_ratio=math.nan, evidence=evidence)
    writer = RunWriter(tmp_path, make_info(2))
    writer.event({"unix": 0, "kind": "verdict", "verdict": msgspec.to_builtins(hang)})
    (verdict,) = finish_run(tmp_path, render_report)["verdicts"]
    assert (verdict["evidence"], verdict["excess_ratio"]) == ({"kept": 0.5}, None)


def test_forged_events_are_ignored(tmp_path: Path, make_own: Make, make_records: Records, make_info: Info) -> None:
    writer = RunWriter(tmp_path, make_info(2))
    writer.append(make_records(make_own(50, 2)))
    for content in ({"kind": "nonsense"}, None, {"kind": "slow_rank", "ranks": "all"}):
        writer.event({"unix": 0, "kind": "verdict", "verdict": content})
    far = Verdict(kind="slow_rank", ranks=[99], since_step=-5, detected_step=10**12, excess_ratio=1.0)
    writer.event({"unix": 0, "kind": "verdict", "verdict": msgspec.to_builtins(far)})
    assert [verdict["ranks"] for verdict in finish_run(tmp_path, render_report)["verdicts"]] == [[99]]


def test_a_directory_that_cannot_be_written_says_so(tmp_path: Path, make_info: Info) -> None:
    RunWriter(tmp_path, make_info(2))
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(RingsideError, match="cannot be written"):
        finish_run(tmp_path, render_report)


def test_a_long_run_is_kept_at_a_coarser_stride(make_own: Make, make_records: Records) -> None:
    own = make_own(1_000, 4)
    table = tabulate(make_records(own), 4, cells=1_200)
    assert table.stride == 4
    assert len(table) == 250
    np.testing.assert_array_equal(table["own_seconds"], own[::4])


@pytest.mark.parametrize(("sampled", "last"), [(160, 39), (80, 38), (4, 36)])
def test_of_a_long_run_every_second_step_is_kept_to_say_who_waited_again_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sampled: int, last: int
) -> None:
    """Forty steps of four ranks: all of them, at most twenty, at most the sixteen that are always kept."""
    monkeypatch.setattr(summaries, "SAMPLED", sampled)
    collector = StepCollector(4, RunWriter(tmp_path, run_info(4)))
    for number, row in enumerate(crossed_rows(40)):
        if number == 0:
            row[0] = msgspec.structs.replace(row[0], new_groups=(*DATA, *TENSOR))
        collector.add(row.values())
    collector.close()
    waits = assess_run(RunReader(tmp_path))[0]["waits"]
    assert (waits["first_step"], waits["last_step"]) == (0, last)


def test_the_cause_names_the_phase_that_grew() -> None:
    def records(phase: str, cpu: float) -> list[StepRecord]:
        def one(step: int, rank: int) -> StepRecord:
            phases = {"data": 0.01, "forward": 0.03, "backward": 0.06}
            if rank == 1:
                phases[phase] += 0.05
            return StepRecord(
                step=step,
                rank=rank,
                ended_unix=0,
                step_seconds=0.15,
                own_seconds=sum(phases.values()),
                cpu_seconds=cpu if rank == 1 else 0.15,
                **{f"{name}_seconds": value for name, value in phases.items()},
            )

        return [one(step, rank) for step in range(40) for rank in range(2)]

    def found(phase: str, cpu: float) -> Verdict:
        table = tabulate(records(phase, cpu), 2)
        (verdict,) = detect(table["own_seconds"])
        return explain_verdict(verdict, table, table.before(0))

    assert found("data", 0.15).kind == "input_bound"
    assert "backward" in found("backward", 0.15).cause
    assert "running all the time" in found("backward", 0.15).cause
    assert "no CPU" in found("backward", 0.09).cause


@pytest.mark.parametrize(("ranks", "most"), [(2048, 32), (8192, 16)])
def test_of_steps_with_groups_every_second_one_is_kept_when_they_become_too_many(ranks: int, most: int) -> None:
    """As many as make 65,536 records, and sixteen of any job."""
    sample, use = GroupSample(ranks, 3), GroupUse("1", -1, 1, 8, 0.01)
    records = [
        StepRecord(step=step, rank=rank, ended_unix=0.0, step_seconds=0.2, own_seconds=0.1, groups=(use,))
        for step in range(3 * most + 3)
        for rank in (0, ranks - 1)
    ]
    assert list(sample.reading(records[: 6 * most])) == records[: 6 * most]
    assert list(sample.rows) == list(range(0, 3 * most, 3))
    assert all(list(row) == [0, ranks - 1] for row in sample.rows.values())
    list(sample.reading(records[6 * most :]))
    assert list(sample.rows) == list(range(0, 3 * most + 1, 6))


def test_headlines() -> None:
    verdict = Verdict(kind="slow_rank", ranks=[3], since_step=1, detected_step=2, excess_ratio=0.124)
    assert headline(verdict) == "rank 3 is 12% slower than the others"
    link = Verdict(kind="slow_link", ranks=[0, 1], since_step=1, detected_step=2, excess_ratio=0.5)
    assert headline(link) == "the link 0 → 1 is slow"
    with pytest.raises(ValueError, match="the kinds are"):
        Verdict(kind="lazy", ranks=[], since_step=0, detected_step=0, excess_ratio=0)


def test_reading_a_finished_summary(tmp_path: Path, make_info: Info) -> None:
    RunWriter(tmp_path, make_info(2))
    assert RunReader(tmp_path).summary() is None
    finish_run(tmp_path, render_report)
    summary = RunReader(tmp_path).summary()
    assert summary is not None
    assert summary["world_size"] == 2
