import math

import numpy as np
import pytest

from ringside.demo.reveal import comparison_lines, draw, facts, facts_lines, has_begun, injected, reveal
from ringside.faults.inject import KINDS, Input, Link, Pause, Slow, parse_fault
from ringside.monitor.run.records import StepRecord
from ringside.monitor.run.table import tabulate
from ringside.monitor.verdict import Verdict


def verdict(rank, detected=60, kind="slow_rank"):
    return Verdict(kind=kind, ranks=[rank], since_step=50, detected_step=detected, excess_ratio=0.3)


def pair(kind):
    return Verdict(kind=kind, ranks=[0, 1], since_step=50, detected_step=60, excess_ratio=0.0)


def test_what_is_drawn_begins_after_a_healthy_stretch_and_depends_on_the_seed():
    drawn = {draw(seed, 4, 400) for seed in range(200)}
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert all(80 <= fault.from_step <= 120 and fault.factor == 1.3 for fault in drawn)
    assert draw(7, 4, 200) == draw(7, 4, 200)
    assert draw(7, 2, 1) == Slow(draw(7, 2, 1).rank, 1.3, 0)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.kind)
def test_any_kind_of_fault_can_be_drawn(kind):
    fault = draw(7, 3, 300, kind)
    assert parse_fault(str(fault), 3) == fault
    slow = draw(7, 3, 300)
    assert (fault.rank, getattr(fault, "from_step", None) or fault.at_step) == (slow.rank, slow.from_step)
    if kind is Link:
        assert fault.to == (fault.rank + 1) % 3
    elif kind in (Input, Pause):
        assert fault.seconds != kind(0, 0).seconds


@pytest.mark.parametrize(
    ("spec", "verdicts", "right", "words"),
    [
        ("none", [], True, "no rank was named"),
        ("none", [verdict(0)], False, "yet a rank was named"),
        ("slow:rank=1,from_step=50", [verdict(1)], True, "correct, 11 steps after"),
        ("slow:rank=1,from_step=50", [verdict(0)], False, "another rank"),
        ("slow:rank=1,from_step=50", [verdict(1, detected=40)], False, "not detected"),
        ("slow:rank=1,from_step=50", [verdict(1, detected=40), verdict(1)], False, "named its rank in step 40, before"),
        ("slow:rank=1,from_step=50", [verdict(1), verdict(1, kind="hang")], False, "called hung"),
        ("input:rank=1,seconds=9,from_step=50", [verdict(1), verdict(1, kind="hang")], True, "correct"),
        ("slow:rank=1,from_step=50", [verdict(1), verdict(0)], True, "another rank too"),
        ("slow:rank=1,from_step=50", [], False, "not detected"),
        ("pause:rank=1,at_step=50", [], True, "no rank was named"),
        ("kill:rank=1,at_step=60", [verdict(1, kind="dead_rank")], True, "correct"),
        ("kill:rank=1,at_step=60", [verdict(1, 55, "dead_rank")], True, "correct"),  # the last steps died with it
        ("kill:rank=1,at_step=60", [verdict(1)], False, "not detected"),
        ("pause:rank=1,at_step=50,seconds=9", [verdict(1, kind="hang")], True, "no rank was named"),
        ("pause:rank=1,at_step=50,seconds=4", [verdict(1, kind="hang")], True, "no rank was named"),
        ("pause:rank=1,at_step=50,seconds=3.9", [verdict(1, kind="hang")], False, "yet a rank was named"),
        ("pause:rank=1,at_step=50,every=10", [verdict(1)], True, "correct"),
        ("pause:rank=1,at_step=50,seconds=9", [verdict(0, kind="hang")], False, "yet a rank was named"),
        ("pause:rank=1,at_step=50", [verdict(1, kind="hang")], False, "yet a rank was named"),
        ("input:rank=1,from_step=50", [verdict(1, kind="input_bound")], True, "correct, 11 steps after"),
        ("uneven:rank=1,from_step=50", [verdict(1, kind="uneven_work")], True, "correct, 11 steps after"),
        ("quota:rank=1,from_step=50", [verdict(1)], True, "correct, 11 steps after"),
        ("link:rank=1,to=0,from_step=50", [pair("slow_link")], True, "correct, 11 steps after"),
        ("link:rank=1,to=0,from_step=50", [verdict(1)], False, "another rank"),
        ("link:rank=1,to=2,from_step=50", [pair("slow_link")], False, "another rank"),
        ("link:rank=1,to=2,from_step=50", [], False, "not detected in time"),
        ("hang:rank=1,at_step=50", [verdict(1, kind="hang")], True, "correct."),
        ("stop:rank=1,at_step=50", [verdict(0, kind="hang")], False, "another rank"),
        ("diverge:rank=1,at_step=50", [verdict(1, kind="diverged")], True, "correct."),
        ("diverge:rank=1,at_step=50", [pair("diverged")], True, "correct."),
        ("diverge:rank=1,at_step=50", [pair("hang")], False, "another rank"),
        ("diverge:rank=1,at_step=50", [verdict(1)], False, "not detected in this run"),
    ],
)
def test_verdicts_are_held_against_what_was_injected(spec, verdicts, right, words):
    found, told = reveal(parse_fault(spec), verdicts)
    assert found is right
    assert words in told


@pytest.mark.parametrize(
    ("spec", "steps", "verdicts", "began"),
    [
        ("none", 0, [], True),
        ("slow:rank=1,from_step=50", 50, [verdict(1)], False),
        ("slow:rank=1,from_step=50", 51, [], True),
        ("hang:rank=1,at_step=50", 50, [], True),
        ("hang:rank=1,at_step=50", 49, [], False),
        ("kill:rank=0,at_step=50", 40, [verdict(0, kind="dead_rank")], True),  # the last steps died with it
    ],
)
def test_a_fault_after_the_end_never_began(spec, steps, verdicts, began):
    assert has_begun(parse_fault(spec), verdicts, steps) is began


def test_of_a_fault_that_never_began_nothing_is_said_to_have_been():
    fault = parse_fault("slow:rank=1,from_step=400")
    right, told = reveal(fault, [], began=False)
    assert not right
    assert told == f"What was to be injected never began, the run ended before: {fault}."
    assert "false alarm" in reveal(fault, [verdict(0)], began=False)[1]


def test_injected_as_the_summary_has_it():
    assert injected(None) == {"kind": "none", "ranks": [], "factor": None, "from_step": None}
    slow = {"kind": "slow", "ranks": [1], "factor": 1.3, "from_step": 40}
    assert injected(parse_fault("slow:rank=1,from_step=40")) == slow
    assert injected(parse_fault("pause:rank=1,at_step=4"))["seconds"] == 3.0
    assert injected(parse_fault("kill:rank=1,at_step=4"))["from_step"] == 4
    assert injected(parse_fault("uneven:rank=1,factor=2,from_step=4"))["factor"] == 2
    assert injected(parse_fault("diverge:rank=1,at_step=4"))["by"] == 0.01
    assert injected(parse_fault("quota:rank=1"))["cpus"] == 0.6
    link = {"kind": "link", "ranks": [0, 2], "factor": 4.0, "from_step": 80}
    assert injected(parse_fault("link:rank=0,to=2,from_step=80")) == link


def recorded(before=60, after=64, size=0.3):
    """A run of two ranks, the second of which becomes slower."""
    generator = np.random.default_rng(1)
    records = []
    for step in range(before + after):
        for rank in range(2):
            own = 0.1 * np.exp(0.02 * generator.standard_normal()) * (1 + size if rank and step >= before else 1)
            records.append(StepRecord(step=step, rank=rank, ended_unix=step, step_seconds=own, own_seconds=own))
    return tabulate(records, 2)


def found_slow(rank, since, ratio, usual=0.0):
    evidence = {"usual_excess_ratio": usual}
    return Verdict(
        kind="slow_rank", ranks=[rank], since_step=since, detected_step=70, excess_ratio=ratio, evidence=evidence
    )


def test_the_reveal_has_what_was_injected_what_it_came_to_what_was_found_and_the_errors():
    verdict = found_slow(1, 61, 0.431, usual=0.1)
    told = facts(Slow(1, 1.42, 60), [verdict], recorded())
    assert told["injected"] == {"kind": "slow", "ranks": [1], "factor": 1.42, "from_step": 60}
    assert told["came_to"]["relative"] == pytest.approx(0.3, abs=0.01)
    assert told["came_to"]["steps"] == (60, 64)
    assert told["found"]["relative"] == pytest.approx(0.3, abs=0.001)
    assert told["found"]["since_interval"] is None
    assert told["errors"]["since_steps"] == 1
    assert told["errors"]["delay_steps"] == 11
    assert told["errors"]["names_the_rank"] is told["errors"]["interval_holds"] is True
    assert told["errors"]["relative"] == pytest.approx(1.431 / 1.1 - 1 - told["came_to"]["relative"])
    lines = "\n".join(facts_lines(told))
    assert "came to   rank 1's own time 100 ms → 130 ms (+30%), the others' 99.9 ms → 99.5 ms (+0%): relative" in lines
    assert "found     rank 1, since step 61, +30%\n" in lines
    assert "errors    who: right, since: +1 steps, size: " in lines
    assert "within the interval of what it came to" in lines
    assert max(map(len, facts_lines(told)[2:])) <= 100


def test_errors_are_told_where_they_are_bad():
    told = facts(Slow(1, 1.42, 60), [found_slow(1, 90, 0.1)], recorded())
    assert (told["errors"]["since_steps"], round(told["errors"]["relative"], 2)) == (30, -0.2)
    for size in (0.05, 0.9):
        told = facts(Slow(1, 1.42, 60), [found_slow(1, 60, size)], recorded())
        assert told["errors"]["interval_holds"] is False
        assert "OUTSIDE the interval of what it came to" in "\n".join(facts_lines(told))
    wrong = facts(Slow(1, 1.42, 60), [found_slow(0, 20, 0.1), found_slow(1, 61, 0.3)], recorded())
    assert wrong["found"]["ranks"] == [0]
    assert wrong["errors"]["names_the_rank"] is False
    assert wrong["errors"]["relative"] is None
    assert "who: WRONG, since: -40 steps" in "\n".join(facts_lines(wrong))


def test_what_does_not_apply_is_left_out():
    nothing = facts(Slow(1, 1.42, 60), [], recorded())
    assert nothing["found"] is nothing["errors"] is None
    assert [line.split()[0] for line in facts_lines(nothing)] == ["came", "Relative:"]
    short = facts(Slow(1, 1.42, 60), [found_slow(1, 61, 0.3)], recorded(after=4))
    assert short["came_to"] is short["errors"]["interval_holds"] is None
    healthy = facts(None, [found_slow(1, 61, 0.3)], recorded())
    assert healthy["came_to"] is healthy["errors"] is None
    diverged = facts(parse_fault("diverge:rank=1,at_step=50"), [pair("diverged")], recorded())
    assert diverged["found"]["relative"] is None
    assert diverged["found"]["since_interval"] == (50, 60)
    assert diverged["errors"]["names_the_rank"] is True
    assert not math.isnan(diverged["errors"]["delay_steps"])
    assert facts_lines(facts(None, [], recorded())) == []
    paused = facts(parse_fault("pause:rank=1,at_step=60,every=5"), [found_slow(1, 61, 0.3)], recorded())
    assert paused["came_to"] is None
    assert facts_lines(paused)[0] == "  found     rank 1, since step 61, +30%"


def test_the_comparison_in_words():
    side = {"step_seconds": 0.1, "sync_seconds": 0.01, "exposed_seconds": 0.002, "share": 0.02}
    found = {"engine": "ringside", "peer": "gloo", "step_ratio": 1.25, "sync_ratio": 4.0, "exposed_ratio": 3.0}
    text = "\n".join(comparison_lines({**found, "ours": side, "theirs": side, "steps": 25}))
    assert "over Gloo" in text
    assert "1.25 ×" in text
    assert "2.0% of the step" in text
    assert "nothing to compare" in comparison_lines({**found, "engine": "gloo"})[0]
    assert comparison_lines({}) == []
