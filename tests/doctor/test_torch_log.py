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
