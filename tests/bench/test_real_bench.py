"""How bench/real_runs/ and bench/monitor/price.py judge what they measured; no job is started."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from bench.monitor.price import figures_of, is_right, results_table, unseen_by_replay
from bench.real_runs.__main__ import AT, CASES, judge
from bench.real_runs.jobs import ENGINES, LINK_STEPS, Ended, Others
from bench.real_runs.page import page

from ringside.faults.inject import parse_fault
from ringside.monitor.verdict import KINDS, Verdict


def verdict(kind: str = "slow_rank", *ranks: int, detected: int = 70) -> Verdict:
    return Verdict(kind=kind, ranks=list(ranks), since_step=60, detected_step=detected, excess_ratio=0.3)


def judged(case: str, *verdicts: Verdict) -> dict[str, Any]:
    return judge(CASES[case], Ended(Path(), {"step_seconds": {"median": 0.03}}, list(verdicts)))


@pytest.mark.parametrize("name", CASES)
def test_every_case_expects_what_can_be(name: str) -> None:
    case = CASES[name]
    assert case.kind in ("", *KINDS)
    assert bool(case.kind) or not case.ranks
    fault = parse_fault(case.fault, dict(case.job).get("ranks", 2))
    assert fault is None or not case.kind or fault.rank in case.ranks


def test_right_is_this_verdict_and_nothing_else() -> None:
    assert judged("slow", verdict("slow_rank", 1))["right"]
    assert judged("slow", verdict("slow_rank", 1))["delay"] == 11
    for wrong in (
        [],
        [verdict("slow_rank", 0)],
        [verdict("uneven_work", 1)],
        [verdict("slow_rank", 1), verdict("slow_rank", 0)],
        [verdict("slow_rank", 1), verdict("slow_rank", 1, detected=90)],
    ):
        assert not judged("slow", *wrong)["right"]
    assert judged("healthy")["right"]
    assert not judged("healthy", verdict("slow_rank", 1))["right"]


def test_a_link_may_be_named_in_both_directions() -> None:
    there, back = (verdict("slow_link", *ends, detected=LINK_STEPS + 9) for ends in ((0, 1), (1, 0)))
    assert judged("link", there)["delay"] == 10
    assert judged("link", there, back)["right"]
    assert not judged("link", there, verdict("slow_link", 1, 2))["right"]
    assert not judged("link", there, verdict("slow_rank", 1))["right"]
    assert not judged("link", verdict("slow_link", 0, 1, detected=LINK_STEPS - 1))["right"]  # before there was a cause


def test_the_page_counts_runs_and_tells_what_came_instead() -> None:
    results = [
        {"case": "slow", "engine": "gloo", "model": "gpt", "expected": "slow_rank", "others_cores": 0.5}
        | judged("slow", *found)
        for found in ([verdict("slow_rank", 1)], [], [verdict("slow_rank", 0)])
    ]
    text = page(results, {"slow": "a slow rank"})
    wrong = "1 × no verdict; 1 × slow_rank [0]"
    assert f"| a slow rank | gloo | gpt | 30 ms | slow_rank | 1 of 3 | 11 | 30% | {wrong} | 0.5 |" in text
    later = results[0] | judged("slow", verdict("slow_rank", 1, detected=AT + 14))
    text = page([*results, later], {"slow": "a slow rank"})
    assert f"| 2 of 4 | 13 (11 to 15) | 30% | {wrong} | 0.5 |" in text


def priced(lost: float, told: float, *, right: bool = True) -> dict[str, Any]:
    differences = list(np.full(24, lost / 24) + 0.01 * np.resize([1.0, -1.0], 24))
    return {
        "differences": differences, "predicted": told if right else 0.0, "replay": told, "step_seconds": 0.03,
        "right": right, "lost_in_own": 0.9 * lost, "others_slower": 0.04,
    }  # fmt: skip


def test_a_price_is_held_against_what_was_lost() -> None:
    found = figures_of([priced(2.0, 1.8), priced(2.1, 1.9), priced(1.9, 1.7), priced(2.0, 1.8, right=False)])
    assert found["named"] == 3
    for key in ("predicted", "replay"):
        assert found[key]["ratio"] == pytest.approx(0.9, rel=0.01)
        assert 0.8 < found[key]["low"] <= found[key]["ratio"] <= found[key]["high"] < 1.0
    assert is_right(figures_of([priced(2.0, 1.9)]))
    assert not is_right(figures_of([priced(2.0, 1.7)]))
    line = results_table([{"fault": "slow", "engine": "gloo", "runs": [1] * 4, **found}])
    assert "| 0.90 (" in line
    assert line.endswith("| 90% | 4.0% |")


def test_what_a_replay_cannot_see_is_told_beside_it() -> None:
    own, twin = np.full((120, 2), 0.022), np.full((120, 2), 0.020)
    own[:, 1] = 0.030
    told = unseen_by_replay(own, twin, [1])
    assert told["lost_in_own"] == pytest.approx(2 * 120 * 0.010)
    assert told["others_slower"] == pytest.approx(0.1)


def test_a_fault_that_nobody_noticed_still_has_a_replay() -> None:
    found = figures_of([priced(2.0, 2.0, right=False)])
    assert found["named"] == 0
    assert math.isnan(found["predicted"]["ratio"])
    assert not is_right(found)
    assert found["replay"]["ratio"] == pytest.approx(1.0)


def test_this_process_is_not_one_of_the_others() -> None:
    others = Others()
    sum(range(3_000_000))
    assert 0.0 <= others.cores() < 1024
    assert set(ENGINES) == {"ringside", "gloo"}
