import pytest

from ringside.demo.reveal import comparison_lines, draw, injected, reveal
from ringside.faults.inject import Slow, parse_fault
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


@pytest.mark.parametrize(
    ("spec", "verdicts", "right", "words"),
    [
        ("none", [], True, "no rank was named"),
        ("none", [verdict(0)], False, "yet a rank was named"),
        ("slow:rank=1,from_step=50", [verdict(1)], True, "correct, 11 steps after"),
        ("slow:rank=1,from_step=50", [verdict(0)], False, "another rank"),
        ("slow:rank=1,from_step=50", [verdict(1, detected=40)], False, "not detected"),
        ("slow:rank=1,from_step=50", [verdict(1), verdict(0)], True, "another rank too"),
        ("slow:rank=1,from_step=50", [], False, "not detected"),
        ("pause:rank=1,at_step=50", [], True, "no rank was named"),
        ("kill:rank=1,at_step=60", [verdict(1, kind="dead_rank")], True, "correct"),
        ("kill:rank=1,at_step=60", [verdict(1)], False, "not detected"),
        ("pause:rank=1,at_step=50,seconds=9", [verdict(1, kind="hang")], True, "no rank was named"),
        ("pause:rank=1,at_step=50,seconds=4", [verdict(1, kind="hang")], True, "no rank was named"),
        ("pause:rank=1,at_step=50,seconds=3.9", [verdict(1, kind="hang")], False, "yet a rank was named"),
        ("pause:rank=1,at_step=50,every=10", [verdict(1)], True, "correct"),
        ("pause:rank=1,at_step=50,seconds=9", [verdict(0, kind="hang")], False, "yet a rank was named"),
        ("pause:rank=1,at_step=50", [verdict(1, kind="hang")], False, "yet a rank was named"),
        ("input:rank=1,from_step=50", [verdict(1, kind="input_bound")], True, "correct, 11 steps after"),
        ("uneven:rank=1,from_step=50", [verdict(1, kind="uneven_work")], True, "correct, 11 steps after"),
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


def test_injected_as_the_summary_has_it():
    assert injected(None) == {"kind": "none", "ranks": [], "factor": None, "from_step": None}
    slow = {"kind": "slow", "ranks": [1], "factor": 1.3, "from_step": 40}
    assert injected(parse_fault("slow:rank=1,from_step=40")) == slow
    assert injected(parse_fault("pause:rank=1,at_step=4"))["seconds"] == 3.0
    assert injected(parse_fault("kill:rank=1,at_step=4"))["from_step"] == 4
    assert injected(parse_fault("uneven:rank=1,factor=2,from_step=4"))["factor"] == 2
    assert injected(parse_fault("diverge:rank=1,at_step=4"))["by"] == 0.01


def test_the_comparison_in_words():
    side = {"step_seconds": 0.1, "sync_seconds": 0.01, "exposed_seconds": 0.002, "share": 0.02}
    found = {"engine": "ringside", "peer": "gloo", "step_ratio": 1.25, "sync_ratio": 4.0, "exposed_ratio": 3.0}
    text = "\n".join(comparison_lines({**found, "ours": side, "theirs": side, "steps": 25}))
    assert "over Gloo" in text
    assert "1.25 ×" in text
    assert "2.0% of the step" in text
    assert "nothing to compare" in comparison_lines({**found, "engine": "gloo"})[0]
    assert comparison_lines({}) == []
