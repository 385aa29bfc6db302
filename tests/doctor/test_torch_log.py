from __future__ import annotations

from pathlib import Path

from ringside.doctor import examine

from .torch_logs import ELASTIC, standing, timeout


def verdict_of(tmp_path: Path, text: str):
    (tmp_path / "train.log").write_text("step 1 loss 2.3\n" * 2000 + text)
    (verdict,) = examine([tmp_path]).verdicts
    return verdict


def test_the_rank_that_enqueued_less_is_the_culprit(tmp_path: Path) -> None:
    text = "".join(timeout(rank, 1580) + standing(rank, 1582, 1579) for rank in (0, 1, 3)) + standing(2, 1579, 1579)
    verdict = verdict_of(tmp_path, text)
    assert (verdict.kind, verdict.ranks) == ("hang", [2])
    assert verdict.evidence["victims"] == "0, 1, 3"
    assert verdict.evidence["collective_seq_id"] == 1580


def test_the_one_rank_that_says_nothing_is_the_culprit(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, "".join(timeout(rank, 7) for rank in (0, 2, 3))).ranks == [1]


def test_nobody_is_blamed_where_all_ranks_timed_out_alike(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, "".join(timeout(rank, 7) for rank in range(4)))
    assert (verdict.kind, verdict.ranks) == ("hang", [])
    assert "not in this log" in verdict.cause


def test_a_rank_in_another_collective_is_a_mismatch(tmp_path: Path) -> None:
    text = "".join(timeout(rank, 9) for rank in (0, 1, 2)) + timeout(3, 9, "BROADCAST")
    verdict = verdict_of(tmp_path, text)
    assert (verdict.kind, verdict.ranks) == ("mismatch", [3])


def test_torchrun_knows_who_failed_first(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, "".join(timeout(rank, 7) for rank in (0, 1, 2)) + ELASTIC)
    assert (verdict.kind, verdict.ranks) == ("dead_rank", [3])
    assert "SIGKILL" in verdict.cause
    assert verdict.evidence["host"] == "node-1"
    assert verdict.evidence["victims"] == "0-2"


def test_of_a_ranks_timeouts_the_earliest_call_counts_and_of_calls_the_one_in_which_most_wait(tmp_path: Path) -> None:
    several = timeout(0, 9) + timeout(0, 7) + timeout(1, 7) + timeout(1, 9)
    evidence = verdict_of(tmp_path, several).evidence
    assert (evidence["collective_seq_id"], evidence["collective"], evidence["victims"]) == (7, "ALLREDUCE", "0, 1")
    assert (evidence["elements"], evidence["waited_seconds"]) == (466119168, 600.06)
    tie = "".join(timeout(rank, seq) for rank, seq in ((0, 9), (1, 7), (2, 9), (3, 7)))
    assert verdict_of(tmp_path, tie).evidence["collective_seq_id"] == 7
    most = verdict_of(tmp_path, tie + timeout(4, 9))
    assert (most.evidence["collective_seq_id"], most.kind, most.ranks) == (9, "mismatch", [1, 3])
    assert most.cause == "most ranks timed out in ALLREDUCE 9, but rank 1 was in ALLREDUCE 7, rank 3 was in ALLREDUCE 7"


def test_a_rank_that_says_nothing_is_blamed_only_by_several_others_and_if_it_is_the_only_one(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, timeout(1, 7)).ranks == []
    assert verdict_of(tmp_path, timeout(1, 7) + timeout(2, 7)).ranks == [0]
    assert verdict_of(tmp_path, timeout(1, 7) + timeout(3, 7)).ranks == []
    there = standing(0, 8, 7)  # it said where it stands: not behind
    assert verdict_of(tmp_path, timeout(1, 7) + timeout(2, 7) + there).ranks == []


def test_standings_are_the_first_that_a_rank_told_and_behind_is_who_did_not_enqueue_the_call(tmp_path: Path) -> None:
    waiting = timeout(0, 7) + timeout(1, 7)
    for enqueued, ranks in ((6, [2]), (7, [])):
        verdict = verdict_of(tmp_path, waiting + standing(2, enqueued, 5) + standing(2, 1, 1))
        assert verdict.ranks == ranks
        assert verdict.evidence["standing"] == f"rank 2 enqueued {enqueued}"


def test_of_torchruns_account_only_what_belongs_to_the_first_failure_is_taken(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, ELASTIC + "  host      : later\n  rank      : 9 (local_rank: 0)\n")
    assert (verdict.ranks, verdict.evidence["host"]) == ([3], "node-1")
    assert verdict.cause == "torchrun saw it fail first (exit status -9): Signal 9 (SIGKILL) received by PID 77"
    unknown = ELASTIC.replace("exitcode  : -9 (pid: 77)", "exitcode  : ").replace(
        "Signal 9 (SIGKILL) received by PID 77", ""
    )
    assert verdict_of(tmp_path, unknown).cause == "torchrun saw it fail first (it failed)"
