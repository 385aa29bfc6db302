"""bench/scale/ with a dozen processes: the same harness as with a thousand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from bench.scale.__main__ import REPLAY_ONSET, judge, slow_rank_job
from bench.scale.page import page
from bench.scale.rank import Heard
from bench.scale.replay import Turn, recorded, replay
from tests.doctor.shared_data import shared
from tests.support import zygote
from tests.support.ranks import run_script

from ringside.errors import UsageError
from ringside.monitor import detect


def outcome_of(folder: Path, name: str, *words: object) -> dict[str, Any]:
    """Run a job in a fresh process, which forks its ranks before it has any thread."""
    script, python = Path(__file__).parent / "scripts" / "scale_run.py", [zygote.python()]
    (ended,) = run_script(1, script, folder, name, *words, python=python, limit_s=120.0)
    assert ended.status == 0, ended.err
    result: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return result


def test_the_slow_one_of_a_dozen_processes_is_named_and_every_record_arrives(tmp_path: Path) -> None:
    plan = slow_rank_job(12, 20.0, 3)
    found = outcome_of(tmp_path, "slow rank", 12, 20.0, 3)
    (verdict,) = found["verdicts"]
    assert verdict["ranks"] == [plan.culprit]
    assert abs(verdict["since_step"] - plan.onset) <= 2
    assert 5 <= verdict["detected_step"] - plan.onset < 24
    assert found["missing"] == found["late"] == 0
    assert found["completed"] == plan.job.steps
    assert 12 <= found["messages"] <= 12 * (plan.job.steps + 1)
    assert 12 * plan.job.steps < found["bytes"] < 2_000 * 12 * plan.job.steps


def test_recorded_nccl_traces_go_the_same_way(tmp_path: Path) -> None:
    """Eight ranks' recorded step, over and over: the records that arrive hold the times that the traces hold."""
    folder = shared("kineto")
    seen = recorded([folder])
    assert seen.backend == "nccl"
    assert seen.own_s.shape == (1, 8)
    found = outcome_of(tmp_path, "recorded", folder)
    assert found["missing"] == 0
    assert found["completed"] == 90
    slow = {verdict.ranks[0] for verdict in detect(seen.own_s.repeat(90, axis=0))}
    assert slow  # in that step some ranks worked a quarter longer, and in this run for good
    assert {one["ranks"][0] for one in found["verdicts"]} == slow
    lines = (tmp_path / "run" / "steps.jsonl").read_bytes().splitlines()
    owns = {(one["step"], one["rank"]): one["own_seconds"] for one in map(json.loads, lines)}
    assert [owns[50, rank] for rank in range(8)] == pytest.approx(seen.own_s[0].tolist(), rel=1e-4)


def test_dealt_anew_nobody_is_slow_and_an_injected_rank_is_found() -> None:
    """The detector alone, over the replays that `--replay` runs with processes."""
    seen = recorded([shared("kineto")])
    healthy = replay(seen, Turn("dealt", False, 2, REPLAY_ONSET), 600, 0)
    assert detect(healthy.own_s) == []
    slow = replay(seen, Turn("dealt", True, 2, REPLAY_ONSET), 600, 0)
    assert [verdict.ranks for verdict in detect(slow.own_s)] == [[2]]


def test_traces_of_one_rank_cannot_be_replayed(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    with pytest.raises(UsageError, match="give --replay the traces of all ranks"):
        recorded([tmp_path])


def test_a_job_keeps_the_asked_rate_though_one_rank_is_slow() -> None:
    plan = slow_rank_job(128, 2.0, 0)
    healthy = plan.job.own_s[4 : plan.onset]
    slow = plan.job.own_s[plan.onset :, plan.culprit]
    assert slow.mean() / healthy.mean() == pytest.approx(1.12, rel=0.02)
    last = plan.job.ends_s[plan.onset :]
    assert (len(last) - 1) / (last[-1] - last[0]) >= 1.96


def test_a_verdict_before_the_onset_on_another_rank_or_of_another_kind_is_wrong() -> None:
    early = Heard("slow_rank", [5], 3, 9, 0.1, 10)
    other = Heard("slow_rank", [2], 41, 47, 0.1, 48)
    right = Heard("slow_rank", [5], 40, 45, 0.1, 48)
    assert judge([right], 5, 40) == judge([right], 5, 40).__class__(True, [], 6, 8)
    assert judge([early, other], 5, 40).named is False
    assert judge([early, other, right], 5, 40).wrong == [2, 5]
    whole = Heard("communication_bound", [], 41, 47, 0.5, 48)
    assert judge([right, whole], 5, 40).wrong == [-1]
    assert judge([Heard("uneven_work", [5], 40, 45, 0.1, 48)], 5, 40).named is False


def test_the_page_leaves_out_what_was_not_measured() -> None:
    assert "|" not in page({})
    figures = {"ranks": 8, "decode_s": 1e-6, "collect_s": 4e-6, "records_per_s": 200_000.0, "steps": 10}
    assert "| 8 | 1.0 µs | 4.0 µs | 200,000 | 25,000 |" in page({"alone/8": figures})
