"""Ranks are judged beside those that do the same work, and where nobody does beside their own past."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from tests.monitor.jobs import DATA, STAGES, TENSOR, crossed_rows, opened, peer_rows, watch

from ringside.monitor.groups import JobGroups, Mesh, read_chain
from ringside.monitor.run.records import Group, Row, StepRecord
from ringside.monitor.run.table import tabulate
from ringside.monitor.slow_rank.watcher import PeersWatcher, among_peers
from ringside.monitor.verdict import Verdict, headline


def mesh_of(groups: Iterable[Group], ranks: int = 4) -> Mesh:
    return Mesh(ranks, {group.name: group for group in groups})


def found_in(job: list[Row], groups: Iterable[Group]) -> list[Verdict]:
    known = JobGroups(4)
    known.learn(groups)
    return opened(watch(PeersWatcher(known), job))


def test_a_heavier_stage_is_no_slow_rank() -> None:
    assert found_in(peer_rows(300), [*DATA, *STAGES]) == []
    assert {verdict.ranks[0] for verdict in found_in(peer_rows(300), [])} == {1, 3}, "without the mesh they would be"


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_rank_is_named_beside_its_replica(slow: int) -> None:
    (verdict,) = found_in(peer_rows(300, slow=slow), [*DATA, *STAGES])
    assert (verdict.kind, verdict.ranks) == ("slow_rank", [slow])
    assert verdict.excess_ratio == pytest.approx(0.25, abs=0.05)
    assert abs(verdict.since_step - 60) <= 3
    assert verdict.detected_step <= 100
    other = (slow + 2) % 4
    assert verdict.evidence["place"] == f"dp {slow // 2}, pp {slow % 2}"
    assert verdict.evidence["peers"] == f"rank {other}"
    assert headline(verdict).endswith(f"slower than its peers (rank {other})")


def test_all_ranks_of_the_job_pay() -> None:
    def cost(groups: list[Group], lengths: np.ndarray) -> float:
        return found_in(peer_rows(300, lengths, slow=0), groups)[0].cost_rank_seconds

    assert cost(DATA, np.full(4, 0.05)) == pytest.approx(cost([], np.full(4, 0.05)), rel=0.35)


def test_without_replicas_a_rank_has_changed_and_is_not_slow() -> None:
    (verdict,) = found_in(peer_rows(300, slow=1), STAGES)
    assert (verdict.kind, verdict.ranks) == ("changed", [1])
    assert verdict.evidence["before_own_seconds"] == pytest.approx(0.10, rel=0.05)
    assert verdict.evidence["own_seconds"] == pytest.approx(0.125, rel=0.05)
    assert headline(verdict) == f"rank 1 (pp 1) needs {verdict.excess_ratio:.0%} longer than before"


def test_what_all_ranks_do_at_once_accuses_none() -> None:
    job = peer_rows(300)
    longer = [
        {
            rank: StepRecord(
                step=one.step, rank=rank, ended_unix=0.0, step_seconds=one.step_seconds * 1.5,
                own_seconds=one.own_seconds * 1.5, exposed_seconds=one.exposed_seconds,
            )
            for rank, one in row.items()
        }
        for row in job[150:]
    ]  # fmt: skip
    assert found_in(job[:150] + longer, STAGES) == []


def test_a_mesh_that_is_learnt_later_begins_anew_and_ends_what_was_open() -> None:
    job = JobGroups(4)
    watcher = PeersWatcher(job)
    events = watch(watcher, peer_rows(100))
    assert {event.verdict.ranks[0] for event in events if not event.ended} == {1, 3}
    job.learn([*DATA, *STAGES])
    after = watch(watcher, peer_rows(200)[100:])
    assert {event.verdict.ranks[0] for event in after} == {1, 3}
    assert all(event.ended for event in after)
    assert watcher.open == []


def test_whom_a_slow_rank_holds_up_and_through_whom() -> None:
    (verdict,) = found_in(crossed_rows(200), [*DATA, *TENSOR])
    assert verdict.ranks == [3]
    assert verdict.evidence["held_up"] == "ranks 0-2"
    assert verdict.evidence["by_way_of"] == "0 waits for 3 by way of 1"
    assert read_chain(verdict.evidence["by_way_of"]) == [0, 1, 3]


def test_what_may_have_been_waiting_is_counted_for_the_accused() -> None:
    """Of own time that lies between two bounds, the kinder one must be too long as well."""

    def with_unclear(seconds: float) -> list[Verdict]:
        job = peer_rows(300, np.full(4, 0.1), slow=2)
        for row in job:
            one = row[2]
            row[2] = StepRecord(
                step=one.step, rank=2, ended_unix=0.0, step_seconds=one.step_seconds, own_seconds=one.own_seconds,
                exposed_seconds=one.exposed_seconds, unclear_seconds=seconds,
            )  # fmt: skip
        return found_in(job, [])

    assert [verdict.ranks for verdict in with_unclear(0.001)] == [[2]]
    assert with_unclear(0.024) == []


def test_a_verdict_is_judged_again_beside_peers() -> None:
    mesh = mesh_of([*DATA, *STAGES])
    job = peer_rows(200, slow=3)
    (verdict,) = found_in(job, [*DATA, *STAGES])
    table = tabulate((record for row in job for record in row.values()), 4)
    seen = []

    def judge(local, beside):
        seen.append((local.ranks, beside.ranks, float(np.nanmedian(beside["own_seconds"][:, 0]))))
        return local

    again = among_peers(verdict, table, mesh, judge)
    assert again.ranks == [3]
    assert seen == [([1], 2, pytest.approx(0.1, rel=0.03))]


def test_a_verdict_that_is_left_as_it_is_keeps_its_price() -> None:
    mesh = mesh_of([*DATA, *STAGES])
    (verdict,) = found_in(peer_rows(200, slow=3), [*DATA, *STAGES])
    again = among_peers(verdict, tabulate([], 4), mesh, lambda local, _: local)
    assert again.ranks == [3]
    assert again.cost_rank_seconds == pytest.approx(verdict.cost_rank_seconds)
