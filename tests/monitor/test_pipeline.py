"""A stage that is heavier than the others, and bubbles beside the least possible."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from ringside.monitor.collector import StepCollector
from ringside.monitor.groups import JobGroups, Mesh
from ringside.monitor.pipeline import EVERY, BubbleLedger, StageWatcher, schedule_of
from ringside.monitor.run.directory import RunReader, RunWriter
from ringside.monitor.run.records import Group, GroupUse, Row, StepRecord, summary_notes
from ringside.monitor.summary import assess_run
from ringside.monitor.verdict import headline

from .jobs import DATA, STAGES, opened, peer_rows, run_info, watch
from .simulated import Ranks, gpipe


def watcher_of(groups: list[Group], ranks: int = 4) -> StageWatcher:
    known = JobGroups(ranks)
    known.learn(groups)
    return StageWatcher(known)


def test_stages_are_read_from_the_mesh() -> None:
    assert Mesh(4, {group.name: group for group in [*DATA, *STAGES]}).stages == [[0, 2], [1, 3]]
    assert Mesh(4, {group.name: group for group in DATA}).stages == []
    assert Mesh(1, {"pp": Group(name="pp", description="mesh_pp", ranks=(0,))}).stages == [], "one rank is no pipeline"
    assert Mesh(4, {"3": STAGES[0]}).stages == [], "not all ranks are in a pipeline that is known"


def test_the_heavier_stage_is_named_with_what_it_costs_at_most() -> None:
    watcher = watcher_of([*DATA, *STAGES])
    (verdict,) = opened(watch(watcher, peer_rows(200)))
    assert (verdict.kind, verdict.ranks) == ("stage_imbalance", [])
    assert headline(verdict).startswith("pipeline stage 1 (ranks 1 and 3) is ")
    assert verdict.excess_ratio == pytest.approx(1.0, abs=0.05)
    assert verdict.evidence["saved_seconds_per_step"] == pytest.approx(0.025, rel=0.05)
    assert verdict.detected_step < 120
    (after,) = watcher.open
    assert after.cost_rank_seconds == pytest.approx(0.025 * 4 * (200 - verdict.since_step), rel=0.1)


def test_stages_are_looked_at_every_eighth_step_and_cost_in_between_what_they_did_then() -> None:
    watcher, costs = watcher_of([*DATA, *STAGES]), []
    for row in peer_rows(200):
        watch(watcher, [row])
        costs += [verdict.cost_rank_seconds for verdict in watcher.open]
    looks = np.flatnonzero(np.abs(np.diff(costs, n=2)) > 1e-9)
    assert len(looks) > 10
    assert set(np.diff(looks)) == {EVERY}


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_replica_makes_no_stage_heavy(slow: int) -> None:
    for by in (1.3, 2.0):
        rows = peer_rows(250, np.full(4, 0.1), slow=slow, by=by)
        assert opened(watch(watcher_of([*DATA, *STAGES]), rows)) == []


def test_noise_makes_no_stage_heavy_and_a_single_rank_is_none() -> None:
    for seed in range(5):
        noise = np.random.default_rng(seed)
        rows = [
            {
                rank: msgspec.structs.replace(one, own_seconds=float(0.1 * np.exp(noise.normal(0, 0.2))))
                for rank, one in row.items()
            }
            for row in peer_rows(200, np.full(4, 0.1))
        ]
        assert opened(watch(watcher_of([*DATA, *STAGES]), rows)) == []
    assert opened(watch(watcher_of(STAGES), peer_rows(200, np.full(4, 0.1), slow=1, by=2.0))) == []


def test_what_may_have_been_waiting_makes_no_stage_heavy() -> None:
    rows = [
        {rank: msgspec.structs.replace(one, unclear_seconds=0.05 * (rank % 2)) for rank, one in row.items()}
        for row in peer_rows(200)
    ]
    assert opened(watch(watcher_of([*DATA, *STAGES]), rows)) == []


def test_a_stage_that_is_made_lighter_ends_it() -> None:
    events = watch(watcher_of([*DATA, *STAGES]), peer_rows(150) + [
        {rank: msgspec.structs.replace(one, step=one.step + 150) for rank, one in row.items()}
        for row in peer_rows(150, np.full(4, 0.1), seed=2)
    ])  # fmt: skip
    assert [event.ended for event in events] == [False, True]
    assert 150 <= int(events[1].verdict.evidence["until_step"]) <= 190


@pytest.mark.parametrize(
    ("stages", "messages", "expected"),
    [
        (4, {(0, 1): 16, (1, 2): 16, (2, 3): 16}, (8, 1)),
        (4, {(0, 1): 32, (1, 2): 32, (2, 3): 32, (0, 3): 16}, (8, 2)),
        (3, {(0, 1): 24, (1, 2): 24, (0, 2): 16}, (4, 3)),
        (2, {(0, 1): 16}, (8, 1)),
        (2, {(0, 1): 24}, None),  # 12 micro-batches, or 4 with two chunks
        (4, {(0, 1): 16, (1, 2): 16, (2, 3): 14}, None),
        (4, {(0, 1): 16, (1, 2): 16, (2, 3): 16, (0, 2): 2}, None),  # something else is sent
        (4, {(0, 1): 7, (1, 2): 7, (2, 3): 7}, None),
        (4, {}, None),
        (2, {(0, 1): 0}, None),
    ],
)
def test_the_schedule_follows_from_the_messages(
    stages: int, messages: dict[tuple[int, int], int], expected: tuple[int, int] | None
) -> None:
    assert schedule_of(stages, messages) == expected


def piped(seconds: np.ndarray, micro_batches: int, steps: int = 20) -> list[Row]:
    ranks, rows = Ranks(len(seconds), 0, jitter=0.0), []
    for _ in range(steps):
        gpipe(ranks, [tuple(range(len(seconds)))], seconds, micro_batches)
        rows.append(ranks.step_ends())
    return rows


def ledger_of(rows: list[Row]) -> BubbleLedger:
    count = len(rows[0])
    mesh = Mesh(count, {"pp": Group(name="pp", description="mesh_pp", ranks=tuple(range(count)), has_messages=True)})
    ledger = BubbleLedger(mesh)
    assert len(list(ledger.reading(record for row in rows for record in row.values()))) == count * len(rows)
    return ledger


@pytest.mark.parametrize("micro_batches", [2, 4, 8, 16])
def test_stages_of_one_weight_wait_as_long_as_the_schedule_makes_them(micro_batches: int) -> None:
    found = ledger_of(piped(np.full(4, 0.1), micro_batches)).total()
    assert found is not None
    assert (found.stages, found.micro_batches, found.chunks) == (4, micro_batches, 1)
    assert found.least_ratio == pytest.approx(3 / (micro_batches + 3))
    assert found.waiting_ratio == pytest.approx(found.least_ratio, abs=0.002)
    assert found.words.endswith(
        f"(least possible with 4 stages and {micro_batches} micro-batches: {found.least_ratio:.0%})."
    )


@pytest.mark.parametrize(("chunks", "least"), [(1, 3 / 11), (2, 3 / 19)])
def test_the_least_bubble_is_smaller_with_several_chunks(chunks: int, least: float) -> None:
    sent = {(0, 1): 16 * chunks, (1, 2): 16 * chunks, (2, 3): 16 * chunks, (0, 3): 16 * (chunks - 1)}
    rows = []
    for step in range(10, 20):
        uses: dict[int, list[GroupUse]] = {rank: [] for rank in range(4)}
        for (a, b), count in sent.items():
            for rank, peer in ((a, b), (b, a)):
                uses[rank] += [GroupUse("pp", peer, count, 8, 0.1)] if count else []
        rows.append(
            {
                rank: StepRecord(
                    step=step, rank=rank, ended_unix=0.0, step_seconds=1.0, own_seconds=1.0, groups=tuple(own)
                )
                for rank, own in uses.items()
            }
        )
    found = ledger_of(rows).total()
    assert found is not None
    assert (found.micro_batches, found.chunks) == (8, chunks)
    assert found.least_ratio == pytest.approx(least)


def test_stages_that_are_uneven_wait_longer() -> None:
    found = ledger_of(piped(np.array([0.1, 0.2, 0.1, 0.1]), 8)).total()
    assert found is not None
    assert found.waiting_ratio > 0.4
    assert "the rest is stages that take unequally long" in found.words


def test_a_job_without_messages_has_no_pipeline() -> None:
    assert BubbleLedger(Mesh(4)).total() is None
    without = [StepRecord(step=9, rank=0, ended_unix=0.0, step_seconds=1.0, own_seconds=1.0)]
    assert ledger_of([{0: without[0], 1: without[0]}]).total() is None


def test_the_report_says_both(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, run_info(4))
    collector, ranks = StepCollector(4, writer), Ranks(4, 1)
    for step in range(140):
        gpipe(ranks, [(0, 1), (2, 3)], np.array([0.01, 0.02, 0.01, 0.02]), 4)
        row = ranks.step_ends()
        if not step:
            row[0] = msgspec.structs.replace(row[0], new_groups=(*DATA, *STAGES))
        collector.add(row.values())
    live = collector.verdicts
    collector.close()
    summary, _ = assess_run(RunReader(tmp_path))
    (verdict,) = summary["verdicts"]
    assert verdict["kind"] == "stage_imbalance"
    assert verdict["cost_rank_seconds"] == pytest.approx(live[0].cost_rank_seconds, rel=0.1)
    assert summary["assessment"]["state"] == "none"
    assert summary["pipeline"]["least_ratio"] == pytest.approx(1 / 5)
    assert summary_notes(summary) == [summary["pipeline"]["words"]]
