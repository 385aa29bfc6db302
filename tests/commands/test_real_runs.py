"""Real ranks with one thing wrong, over our engine and over Gloo: each gives exactly the right verdict.

The ranks are those of `bench/real_runs/`, which measures the same with real compute. Here forward and backward take
their time without a processor, so that other tests on the same cores disturb little, and a job ends once its verdict
is there.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import Team

from . import launched

pytest.importorskip("torch")

from tests.pytorch.training import free_port, group

ENGINES = [
    pytest.param("ringside", marks=pytest.mark.native),
    "native",
]
AT, MOST_STEPS, HEALTHY_STEPS = 56, 480, 120
HANG_S, PATIENCE_S, DIGEST_EVERY = 1.5, 60.0, 20
SLOWED = {
    "slow": (f"slow:rank=1,factor=2.5,from_step={AT}", "slow_rank"),
    "input": (f"input:rank=1,seconds=0.02,from_step={AT}", "input_bound"),
    "uneven": (f"uneven:rank=1,factor=2.4,from_step={AT}", "uneven_work"),
}


def job(port: int, path: str, engine: str, fault: str, steps: int = MOST_STEPS, model: str = "waiting") -> int:
    """Train on this rank until somebody was named, or for so many steps; return how many it were."""
    from bench.real_runs.rank import train

    from ringside.pytorch.recording import session
    from ringside.pytorch.recording.session import RecordingSettings

    with pytest.MonkeyPatch.context() as patch, group(port):
        patch.setenv("RINGSIDE_DIGEST_EVERY", str(DIGEST_EVERY))
        if fault.startswith("hang"):
            session.begin(path, engine, RecordingSettings(hang_s=HANG_S))
        return len(train(model, steps, fault, engine=engine, run_dir=path, enough=bool))


def run(path: Path, engine: str, fault: str, *more: Any, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a job to its end; return its verdicts."""
    with Team(ranks) as team:
        done = team.run(job, free_port(), str(path), engine, fault, *more, limit_s=90.0)
    assert set(done) == {launched.summary(path)["steps"]}
    return launched.summary(path)["verdicts"]


def named(path: Path) -> list[dict[str, Any]]:
    """Return the verdicts that a job that still runs has told."""
    lines = (path / "events.jsonl").read_text().splitlines() if (path / "events.jsonl").exists() else []
    return [event["verdict"] for event in map(json.loads, lines) if event["kind"] == "verdict"]


@pytest.mark.noisy
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", ["none", f"pause:rank=1,at_step={AT},seconds=0.4"])
def test_healthy_ranks_and_one_short_stall_name_nobody(tmp_path: Path, engine: str, fault: str) -> None:
    assert run(tmp_path / "run", engine, fault, HEALTHY_STEPS) == []


@pytest.mark.noisy
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", SLOWED)
def test_a_rank_that_holds_the_others_up_is_named_with_the_reason(tmp_path: Path, engine: str, case: str) -> None:
    fault, kind = SLOWED[case]
    (verdict,) = run(tmp_path / "run", engine, fault)
    assert (verdict["kind"], verdict["ranks"]) == (kind, [1]), verdict
    assert verdict["detected_step"] >= AT
    assert verdict["since_step"] >= AT - 8
    assert verdict["excess_ratio"] > 0.3
    assert verdict["cost_rank_seconds"] > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("ranks", "named"), [(2, [0, 1]), (3, [2])])
def test_a_replica_that_differs_is_named_where_most_agree(
    tmp_path: Path, engine: str, ranks: int, named: list[int]
) -> None:
    fault = f"diverge:rank={ranks - 1},at_step=25"
    (verdict,) = run(tmp_path / "run", engine, fault, ranks=ranks)
    assert (verdict["kind"], verdict["ranks"]) == ("diverged", named)
    assert verdict["evidence"]["last_agreed_step"] < 25 <= verdict["detected_step"]
    assert verdict["evidence"]["parameter"].endswith("layer.weight")
    assert verdict["evidence"]["parameters_differing"] == 1


@pytest.mark.native
def test_hundreds_of_tiny_parameters_in_buckets_of_their_own_are_too_many(tmp_path: Path) -> None:
    told = run(tmp_path / "run", "ringside", "none", 4 * MOST_STEPS, "tiny")
    (verdict,) = (each for each in told if not each["ranks"])  # what else runs here may hold a rank up
    assert verdict["kind"] == "small_collectives"
    assert verdict["evidence"]["collectives_per_step"] > 100


def test_where_they_are_only_watched_what_each_takes_is_not_known(tmp_path: Path) -> None:
    (verdict,) = run(tmp_path / "run", "native", "none", 4 * MOST_STEPS, "tiny")
    assert (verdict["kind"], verdict["ranks"]) == ("communication_bound", [])
    assert "bucket_cap_mb" in verdict["advice"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_never_calls_its_all_reduce_is_named_while_the_job_hangs(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "run"
    with Team(2) as team:
        team.start(job, free_port(), str(path), engine, f"hang:rank=1,at_step={AT}")
        deadline = time.monotonic() + PATIENCE_S
        while not (found := named(path)):
            assert time.monotonic() < deadline, "nobody was named"
            assert team.alive == [0, 1]
            time.sleep(0.02)  # a file that grows gives no event to wait for
        for rank in team.alive:
            team.kill(rank)
        team.finish()
    assert [(verdict["kind"], verdict["ranks"]) for verdict in found] == [("hang", [1])]
    assert found[0]["evidence"]["arrived"] == "0"


@pytest.mark.parametrize(
    ("notes", "right"),
    [
        ([], False),
        ([(8, [1, 0])], True),
        ([(8, [0, 1]), (30, [1, 0])], True),
        ([(8, [1, 2])], False),
        ([(-300, [0, 1]), (8, [0, 1])], False),
    ],
)
def test_a_link_that_was_gone_around_is_right_if_the_run_notes_it_and_no_other(
    notes: list[tuple[int, list[int]]], right: bool
) -> None:
    from bench.real_runs.__main__ import CASES, judge
    from bench.real_runs.jobs import LINK_STEPS, Ended

    told = [{"step": LINK_STEPS + after, "words": "", "links": [{"ranks": ranks}]} for after, ranks in notes]
    judged = judge(CASES["link"], Ended(Path(), {"step_seconds": {"median": 0.03}, "revisions": told}, []))
    assert judged["right"] is right
    if right:
        assert judged["delay"] == 9
