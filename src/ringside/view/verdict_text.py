"""Verdicts in plain words, for the report and the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.monitor.assessment import Assessment, describe_assessment
from ringside.monitor.job.questions import Question
from ringside.monitor.slow_rank.window_test import PERSISTENCE, WARM_UP
from ringside.monitor.verdict import Verdict, headline
from ringside.text import duration, percent, rank_time

FEWEST_STEPS = WARM_UP + PERSISTENCE


class VerdictText(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict in words.

    Args:
        verdict: The verdict itself.
        headline: Who and what, one sentence.
        when: Since when, and when it was noticed.
        why: The probable cause with numbers.
        price: What it cost the job.
        next: What to do.
    """

    verdict: Verdict
    headline: str
    when: str
    why: str
    price: str
    next: str


def verdict_text(content: dict[str, Any], summary: dict[str, Any]) -> VerdictText:
    """Return the text of one of a summary's verdicts.

    Args:
        content: An entry of the summary's `verdicts`.
        summary: The summary.
    """
    # JSON has no NaN: it was written as null.
    lenient = {key: math.nan if value is None else value for key, value in content.items()}
    evidence = {key: value for key, value in (content.get("evidence") or {}).items() if value is not None}
    verdict = msgspec.convert({**lenient, "evidence": evidence}, Verdict)
    until = evidence.get("until_step")
    since = f"Since step {verdict.since_step}" if until is None else f"From step {verdict.since_step} to step {until}"
    own, others = (evidence.get(name) for name in ("own_seconds", "others_own_seconds"))
    why = as_sentence(verdict.cause)
    if isinstance(own, float | int) and isinstance(others, float | int):
        why = f"Its own work takes {duration(own)} per step, the others' {duration(others)}. {why}".strip()
    return VerdictText(
        verdict=verdict,
        headline=as_sentence(_of_two(_in_tense(headline(verdict), verdict), summary)),
        when=f"{since}; noticed at step {verdict.detected_step}.",
        why=_of_two(why, summary),
        price=_price(verdict, summary),
        next=as_sentence(verdict.advice),
    )


def assessment_of(summary: Mapping[str, Any]) -> Assessment | None:
    """Return how sure a run without a verdict makes us that all is well; None where its summary is too old to say."""
    try:
        return msgspec.convert(summary["assessment"], Assessment)
    except (KeyError, *UNDECODABLE):
        return None


def no_verdict(summary: Mapping[str, Any]) -> str:
    """Return the headline of a run without a verdict: all is well, or too little was seen to say so."""
    if not summary["steps"]:
        return "No step was recorded."
    if summary["steps"] < FEWEST_STEPS:
        return "Too few steps for a verdict."
    found = assessment_of(summary)
    if found is not None and found.state == "undecided":
        return "No verdict."
    return "No rank held this job up."


def all_is_well(summary: Mapping[str, Any]) -> str:
    """Return in a few sentences how sure it is that no rank held the job up, with the numbers."""
    if not summary["steps"]:
        return "The run ended before its first step did."
    known = [rank["excess_ratio"] for rank in summary["ranks"] if rank["excess_ratio"] is not None]
    if len(known) < 2:
        return "There is nobody to wait for: one rank is all there is."
    steps = f"{summary['steps']} step{'' if summary['steps'] == 1 else 's'}"
    over = f"Over {steps}, the slowest rank's own time is {percent(max(known))} above the median of the others'."
    found = assessment_of(summary)
    return over if found is None or not (words := describe_assessment(found)) else f"{words} {over}"


def _of_two(text: str, summary: dict[str, Any]) -> str:
    """Of two ranks, the others are one."""
    if summary["world_size"] != 2:
        return text
    return text.replace("the others'", "the other's").replace("the others", "the other")


def _in_tense(sentence: str, verdict: Verdict) -> str:
    """An episode that is over stands in the past."""
    if "until_step" not in verdict.evidence:
        return sentence
    for present, past in (
        (" is ", " was "),
        (" are ", " were "),
        (" gets ", " got "),
        (" needs ", " needed "),
        (" waits ", " waited "),
    ):
        sentence = sentence.replace(present, past)
    return sentence


def _price(verdict: Verdict, summary: dict[str, Any]) -> str:
    cost, ranks = verdict.cost_rank_seconds, max(summary["world_size"], 1)
    if not math.isfinite(cost) or cost <= 0:
        return "Nothing that could be measured."
    until = verdict.evidence.get("until_step", verdict.since_step + int(verdict.evidence.get("steps", 0)))
    # What it cost against the time that has passed, where both can be known.
    elapsed = (int(until) - verdict.since_step) * (summary["step_seconds"]["median"] or 0.0)
    of_time = f", {percent(cost / ranks / elapsed)} of the time since then" if elapsed > cost / ranks else ""
    everyone = "both ranks" if ranks == 2 else f"all {ranks} ranks"
    return f"{rank_time(cost)}: {everyone} lost {duration(cost / ranks)} each{of_time}."


# -------------------------------------------------------------------------------------------------
# The four questions of a profile with their answers, in words.


def answer_sign(question: Question) -> str:
    """Return `yes`, `no`, or a dash where it cannot be told."""
    return "–" if question.answer is None else "yes" if question.answer else "no"


def answer_text(question: Question) -> str:
    """Return `Yes.`, `No.` or that it cannot be told, and why."""
    answer = "It cannot be told" if question.answer is None else "Yes" if question.answer else "No"
    return f"{answer}. {as_sentence(question.words)}".strip()


def as_sentence(text: str) -> str:
    """Return text as a sentence: a capital first, a full stop at its end."""
    return "" if not text else text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
