"""Verdicts, calm, prices and findings in words: every sentence as a whole, and on both sides of what decides it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ringside.monitor.job.questions import Question
from ringside.monitor.verdict import Verdict
from ringside.view.verdict_text import (
    FEWEST_STEPS,
    as_sentence,
    checks,
    describe_calm,
    finding_text,
    rank_texts,
    slowest_first,
    verdict_text,
    what_if_line,
)


def content(**changes: Any) -> dict[str, Any]:
    found = {"kind": "slow_rank", "ranks": [1], "since_step": 20, "detected_step": 29, "excess_ratio": 0.3}
    return {**found, "cause": "its backward pass", "cost_rank_seconds": 12.0, "advice": "move it!", **changes}


def summary(ranks: int = 4, **changes: Any) -> dict[str, Any]:
    return {"world_size": ranks, "step_seconds": {"median": 0.1}, **changes}


def test_a_verdict_in_words() -> None:
    said = verdict_text(content(), summary())
    assert said.headline == "Rank 1 is 30% slower than the others."
    assert said.when == "Since step 20; detected at step 29."
    assert said.why == "Its backward pass."
    assert said.next == "Move it!"
    assert said.price == "12.0 rank-seconds: all 4 ranks lost 3.00 s each."
    over = verdict_text(content(evidence={"until_step": 70, "nothing": None}), summary())
    assert over.headline == "Rank 1 was 30% slower than the others."
    assert over.when == "From step 20 to step 70; detected at step 29."
    assert over.price.endswith("lost 3.00 s each, 60% of the time since then."), "3 s of 50 steps of 0.1 s"
    unknown = verdict_text(content(excess_ratio=None), summary())
    assert unknown.headline == "Rank 1 is an unknown amount slower than the others."


def test_of_two_ranks_the_others_are_one() -> None:
    evidence = {"own_seconds": 0.13, "others_own_seconds": 0.1}
    said = verdict_text(content(evidence=evidence), summary(2))
    assert said.headline == "Rank 1 is 30% slower than the other."
    assert said.why == (
        "Its own work takes 130 ms in the median step since then, the other's 100 ms. Its backward pass."
    )
    assert said.price == "12.0 rank-seconds: both ranks lost 6.00 s each."
    assert "the others' 100 ms" in verdict_text(content(evidence=evidence), summary(3)).why


@pytest.mark.parametrize(
    ("own", "others", "said"),
    [(0.1321, 0.1, True), (0.1319, 0.1, False), (0.1279, 0.1, True), (0.1281, 0.1, False), (0.2, 0.0, False)],
)
def test_medians_that_give_another_excess_are_explained_beyond_two_hundredths(
    own: float, others: float, said: bool
) -> None:
    why = verdict_text(content(evidence={"own_seconds": own, "others_own_seconds": others}), summary()).why
    assert ("; step by step that is 30% longer in the median" in why) is said


@pytest.mark.parametrize(
    ("changes", "step_s", "price"),
    [
        ({"cost_rank_seconds": 0.0}, 0.1, "Nothing that could be measured."),
        ({"cost_rank_seconds": -1.0}, 0.1, "Nothing that could be measured."),
        ({"cost_rank_seconds": None}, 0.1, "Nothing that could be measured."),
        ({"evidence": {"until_step": 50}}, 0.1, "12.0 rank-seconds: all 4 ranks lost 3.00 s each."),  # all of 3 s
        ({"evidence": {"until_step": 51}}, 0.1,
         "12.0 rank-seconds: all 4 ranks lost 3.00 s each, 97% of the time since then."),
        ({"evidence": {"steps": 40}}, 0.1,
         "12.0 rank-seconds: all 4 ranks lost 3.00 s each, 75% of the time since then."),
        ({"evidence": {"steps": 40}}, None, "12.0 rank-seconds: all 4 ranks lost 3.00 s each."),
    ],
)  # fmt: skip
def test_a_price_is_everybodys_and_a_share_of_what_has_passed(
    changes: dict[str, Any], step_s: float | None, price: str
) -> None:
    assert verdict_text(content(**changes), summary(step_seconds={"median": step_s})).price == price


def calm_of(steps: int, *excess: float | None, **assessment: Any) -> tuple[str, str, bool]:
    ranks = [{"excess_ratio": ratio} for ratio in excess]
    return describe_calm({"steps": steps, "ranks": ranks, **({"assessment": assessment} if assessment else {})})


def test_calm_is_as_sure_as_the_record_allows() -> None:
    over = "Over {} steps, the slowest rank's own time is 4.0% above the median of the others'."
    assert calm_of(0) == ("No step was recorded.", "The run ended before its first step did.", False)
    found = {"state": "none", "found_ratio": 0.1}
    sure = f"A rank 10% slower would have been found. {over}"
    assert calm_of(FEWEST_STEPS, 0.04, -0.1, None, **found) == (
        "No straggler detected.", sure.format(FEWEST_STEPS), True,
    )  # fmt: skip
    assert calm_of(FEWEST_STEPS - 1, 0.04, -0.1, **found) == (
        "Too few steps for a verdict.", sure.format(FEWEST_STEPS - 1), False,
    )  # fmt: skip
    headline, text, is_sure = calm_of(60, 0.04, -0.1, state="undecided")
    assert (headline, is_sure) == ("No verdict.", False)
    assert text.startswith("A rank 10% slower might not have been found: ")
    # as an older version wrote it
    assert calm_of(60, 0.04, -0.1) == ("No straggler detected.", over.format(60), False)
    alone = "There is nobody to wait for: one rank is all there is."
    assert calm_of(60, 0.0, **found) == calm_of(60, 0.0, None, **found) == ("No straggler detected.", alone, True)


def test_ranks_stand_culprits_first_then_slowest() -> None:
    rows = [
        {"rank": rank, "host": f"h{rank}", "own_seconds_median": 0.1, "wait_seconds_median": None, "excess_ratio": one}
        for rank, one in enumerate((0.0, 0.2, None, -0.1, 0.3))
    ]
    assert [rank["rank"] for rank in slowest_first({"ranks": rows})] == [4, 1, 0, 2, 3]
    assert [rank["rank"] for rank in slowest_first({"ranks": rows}, {3})] == [3, 4, 1, 0, 2]
    assert rank_texts(rows[1]) == ("1", "h1", "100 ms", "–", "+20.0%")
    assert [rank_texts(rows[rank])[4] for rank in (0, 2, 3)] == ["", "", ""], "nobody is praised"


def found(kind: str, ranks: list[int], excess: float = 0.2, cost: float = 0.0, **evidence: float | str) -> str:
    verdict = Verdict(
        kind=kind, ranks=ranks, since_step=0, detected_step=0, excess_ratio=excess, evidence=evidence,
        cost_rank_seconds=cost,
    )  # fmt: skip
    text = finding_text(verdict)
    assert text.price == (f"{cost:.1f} rank-seconds lost." if cost else "")
    return text.headline


@pytest.mark.parametrize(
    ("said", "kind", "ranks", "evidence"),
    [
        ("Rank 3 did not arrive: the job hangs.", "hang", [3], {}),
        ("Ranks 0-5 did not arrive: the job hangs.", "hang", range(6), {}),
        ("Ranks 0, 1, 2, 3, 4 and 2 more did not arrive: the job hangs.", "hang", range(7), {}),
        ("Rank 3 stopped: the job hangs.", "hang", [3], {"stopped": 1}),
        ("The job hangs.", "hang", [], {}),
        ("Hung; culprit unknown: rank 0 waits in collectives that never completed; the dumps of ranks 1-2 and 4 are "
         "missing.", "hang", [], {"missing_dumps": "1-2, 4", "victims": "0"}),
        ("Hung; culprit unknown: ranks 0 and 3 wait in collectives that never completed; the dumps of rank 1 are "
         "missing.", "hang", [], {"missing_dumps": "1", "victims": "0, 3"}),
        ("Rank 3 did not arrive: the job hangs.", "hang", [3], {"missing_dumps": "1"}),
        ("Rank 1 called something else than the others.", "mismatch", [1], {"collective": 7, "what": "shape"}),
        ("Rank 1 differs from the others in shape.", "mismatch", [1], {"what": "shape"}),
        ("Ranks 1 and 2 differ from the others in something.", "mismatch", [1, 2], {}),
        ("The ring crosses between hosts more often than it needs to.", "broken_ring", [1], {"what": "crosses hosts"}),
        ("Rank 1 fell back to TCP sockets.", "broken_ring", [1], {"what": "sockets"}),
        ("Traffic between hosts fell back to TCP sockets.", "broken_ring", [], {"what": "sockets"}),
        ("The ring is broken at rank 1.", "broken_ring", [1], {}),
        ("Ranks 1 and 2 died.", "dead_rank", [1, 2], {}),
        ("A rank died.", "dead_rank", [], {}),
        ("404 collectives per step are launched.", "small_collectives", [], {"collectives_per_step": 403.6}),
        ("Too many small collectives are launched.", "small_collectives", [],
         {"collectives_per_step": 404.0, "small_ratio": 0.9}),
        ("Too many small collectives are launched.", "small_collectives", [], {}),
        ("Rank 1 is 20% slower than the others.", "slow_rank", [1], {}),
        ("Ranks 1 and 2 are 20% slower than the others.", "slow_rank", [1, 2], {}),
        ("Ranks 1 and 2 wait for their input and need 20% longer than the others.", "input_bound", [1, 2], {}),
        ("The job is bound by communication.", "communication_bound", [], {}),
        ("The link 0 → 1 is slow.", "slow_link", [0, 1], {}),
    ],
)  # fmt: skip
def test_what_the_doctor_found_is_one_sentence(said: str, kind: str, ranks: Any, evidence: dict[str, Any]) -> None:
    assert found(kind, list(ranks), **evidence) == said


def test_a_finding_has_a_price_where_there_is_one() -> None:
    assert found("slow_rank", [1], cost=70.0) == "Rank 1 is 20% slower than the others."


def test_what_a_replayed_timeline_says() -> None:
    replayed = {
        "slowdown": 1.416, "compute_share": 0.5, "wait_for_all_share": 0.051, "cost_rank_hours": 30.0,
        "source": "a file", "ranks": 8,
    }  # fmt: skip
    assert what_if_line(replayed) == (
        "the job would run 1.42 × faster, compute share 50%, wait for all share 5.1%, cost 1.25 rank-days"
    )
    assert what_if_line({"source": "a file"}) == ""


def test_a_check_names_who_differs_where_that_is_known() -> None:
    def similar(words: str, verdicts: list[Verdict] = [], **numbers: Any) -> tuple[str, str]:  # noqa: B006
        question = Question(answer=False, words=words, numbers={"ranks": 4, **numbers})
        check = checks({"similar_step_times": question}, verdicts)["similar_step_times"]
        assert check.mark == "!"
        return check.heading, check.caption

    assert similar("so") == ("Ranks differ", "So.")
    assert similar("so", worst_excess_ratio=0.2) == ("Ranks differ", "So.")
    assert similar("so", worst_rank=2, worst_excess_ratio="much") == ("Ranks differ", "So.")
    known = "rank 2 is 20% slower over the whole run"
    assert similar("so", worst_rank=2, worst_excess_ratio=0.2) == (f"Ranks differ: {known}", "So.")
    assert similar(f"{known}; so", worst_rank=2, worst_excess_ratio=0.2) == (f"Ranks differ: {known}", "So.")
    slow = Verdict(kind="slow_rank", ranks=[7], since_step=0, detected_step=0, excess_ratio=math.nan)
    assert similar("so", [slow]) == ("Ranks differ", "So."), "it is of another job"


def test_a_sentence_has_a_capital_and_an_end() -> None:
    assert [as_sentence(text) for text in ("", "a", "why?", "Yes!", "done.")] == ["", "A.", "Why?", "Yes!", "Done."]
