"""Verdicts in plain words, for the terminal and for pages: a recorded run's, the doctor's, and answers to questions."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from ringside.decoding import UNDECODABLE, nan_for_null
from ringside.monitor.assessment import Assessment, describe_assessment
from ringside.monitor.job.questions import Question
from ringside.monitor.price import known_rate, money
from ringside.monitor.slow_rank.window_test import PERSISTENCE, WARM_UP
from ringside.monitor.verdict import Verdict, headline, onset
from ringside.text import counted, duration, label, name_ranks, percent, rank_time, ratio, signed_percent

FEWEST_STEPS = WARM_UP + PERSISTENCE
PAST = {" is ": " was ", " are ": " were ", " gets ": " got ", " needs ": " needed ", " waits ": " waited "}
PLURAL = {" gets ": " get ", " needs ": " need ", " waits ": " wait ", " is ": " are ", " its ": " their "}
OWN_TIME = "own time: work from one synchronisation to the next"
RANKS_CAPTION = f"Ranks: medians, whole run; {OWN_TIME}"
"""Stands above a table of a run's ranks in the terminal."""
MANY = 6
"""So many ranks are all named by the doctor."""


class VerdictText(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict in words: each part a sentence or two, empty where there is nothing to say.

    Args:
        verdict: The verdict itself.
        headline: Who and what, one sentence.
        when: Since when, and when it was detected; empty where there are no steps.
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
    evidence = {key: value for key, value in (content.get("evidence") or {}).items() if value is not None}
    verdict = msgspec.convert({**nan_for_null(content), "evidence": evidence}, Verdict)
    until = evidence.get("until_step")
    since = onset(verdict).capitalize() if until is None else f"From step {verdict.since_step} to step {until}"
    own, others = (evidence.get(name) for name in ("own_seconds", "others_own_seconds"))
    why = as_sentence(verdict.cause)
    if isinstance(own, float | int) and isinstance(others, float | int):
        # the headline's excess is the median of each step's, which is not that of two medians
        excess = verdict.excess_ratio
        apart = others > 0 and abs(own / others - 1 - excess) > 0.02
        longer = f"; step by step that is {percent(excess)} longer in the median" if apart else ""
        medians = f"{duration(own)} in the median step since then, the others' {duration(others)}{longer}"
        why = f"Its own work takes {medians}. {why}".strip()
    who_and_what = headline(verdict)
    if until is not None:
        who_and_what = _replace_all(who_and_what, PAST)
    return VerdictText(
        verdict=verdict,
        headline=as_sentence(_of_two(who_and_what, summary)),
        when=f"{since}; detected at step {verdict.detected_step}.",
        why=_of_two(why, summary),
        price=_price(verdict, summary),
        next=as_sentence(verdict.advice),
    )


class Calm(NamedTuple):
    """What a run without a verdict says: the headline, the reasons, and whether it is sure that all was well."""

    headline: str
    text: str
    sure: bool


def describe_calm(summary: Mapping[str, Any]) -> Calm:
    """Return what a run without a verdict says: how sure it is that no rank held the job up, with the numbers."""
    steps = summary["steps"]
    if not steps:
        return Calm("No step was recorded.", "The run ended before its first step did.", False)
    try:
        found = msgspec.convert(summary["assessment"], Assessment)
    except (KeyError, *UNDECODABLE):  # too old a summary to say
        found = None
    if steps < FEWEST_STEPS:
        headline = "Too few steps for a verdict."
    elif found is not None and found.state == "undecided":
        headline = "No verdict."
    else:
        headline = "No straggler detected."
    known = [rank["excess_ratio"] for rank in summary["ranks"] if rank["excess_ratio"] is not None]
    if len(known) < 2:
        text = "There is nobody to wait for: one rank is all there is."
    else:
        over = f"Over {counted(steps, 'step')}, the slowest rank's own time is {percent(max(known))}"
        over += " above the median of the others'."
        text = f"{describe_assessment(found)} {over}".strip() if found is not None else over
    return Calm(headline, text, steps >= FEWEST_STEPS and found is not None and found.state == "none")


def slowest_first(summary: Mapping[str, Any], culprits: Container[int] = ()) -> list[dict[str, Any]]:
    """Return the ranks of a summary: culprits first, then by how much longer they work than the others."""
    return sorted(summary["ranks"], key=lambda rank: (rank["rank"] not in culprits, -(rank["excess_ratio"] or 0.0)))


def rank_texts(rank: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Return a rank of a summary as texts: rank, host, own time, wait, and excess, empty for one that is no slower."""
    own, wait = duration(rank["own_seconds_median"]), duration(rank["wait_seconds_median"])
    excess = rank["excess_ratio"] or 0.0
    return str(rank["rank"]), str(rank["host"]), own, wait, signed_percent(excess) if excess > 0 else ""


def _of_two(text: str, summary: dict[str, Any]) -> str:
    """Of two ranks, the others are one."""
    if summary["world_size"] != 2:
        return text
    return text.replace("the others'", "the other's").replace("the others", "the other")


def _replace_all(sentence: str, words: Mapping[str, str]) -> str:
    for word, other in words.items():
        sentence = sentence.replace(word, other)
    return sentence


def cost_text(rank_seconds: float, summary: Mapping[str, Any] | None = None) -> str:
    """Return a price: `10.2 rank-hours`, or `10.2 rank-hours (25.50 at 2.5 an hour)` where there is a rate.

    Args:
        rank_seconds: It.
        summary: Of the run, which may have a rate; otherwise it is that of this process.
    """
    rate = known_rate(summary)
    words = rank_time(rank_seconds)
    if rate is None:
        return words
    amount = money(rank_seconds, rate)
    return f"{words} ({'under 0.01' if 0 < amount < 0.005 else f'{amount:,.2f}'} at {rate:.12g} an hour)"


def _price(verdict: Verdict, summary: dict[str, Any]) -> str:
    cost, ranks = verdict.cost_rank_seconds, max(summary["world_size"], 1)
    if not math.isfinite(cost) or cost <= 0:
        return "Nothing that could be measured."
    until = verdict.evidence.get("until_step", verdict.since_step + int(verdict.evidence.get("steps", 0)))
    # What it cost against the time that has passed, where both can be known.
    elapsed = (int(until) - verdict.since_step) * (summary["step_seconds"]["median"] or 0.0)
    of_time = f", {percent(cost / ranks / elapsed)} of the time since then" if elapsed > cost / ranks else ""
    if ranks == 1:
        return f"{cost_text(cost, summary)}{of_time}."
    everyone = "both ranks" if ranks == 2 else f"all {ranks} ranks"
    return f"{cost_text(cost, summary)}: {everyone} lost {duration(cost / ranks)} each{of_time}."


# -------------------------------------------------------------------------------------------------
# What the doctor found.


def finding_text(verdict: Verdict) -> VerdictText:
    """Return a verdict in words; of kinds that the monitor has no sentence for, with one of its own."""
    cost = verdict.cost_rank_seconds
    return VerdictText(
        verdict=verdict,
        headline=as_sentence(_finding_headline(verdict)),
        when="",
        why=as_sentence(verdict.cause),
        price=f"{rank_time(cost)} lost." if cost > 0 else "",
        next=as_sentence(verdict.advice),
    )


def _numbered(ranks: object) -> str:
    """A list of ranks as evidence holds it, by name: `rank 3`, `ranks 0-7 and 9`."""
    text = str(ranks)
    head, comma, tail = text.rpartition(", ")
    return f"{'rank' if text.isdigit() else 'ranks'} {head}{' and ' if comma else ''}{tail}"


def _finding_headline(verdict: Verdict) -> str:
    ranks = verdict.ranks
    who = everyone = name_ranks(ranks) or "the job"
    if len(ranks) > MANY:
        who = f"ranks {', '.join(map(str, ranks[: MANY - 1]))} and {len(ranks) - MANY + 1} more"
    plural = len(ranks) != 1
    if verdict.kind == "hang" and verdict.evidence.get("stopped"):
        return f"{who} stopped: the job hangs"
    if verdict.kind == "hang" and not ranks and verdict.evidence.get("missing_dumps"):
        waiting, dumps = (_numbered(verdict.evidence.get(name, "")) for name in ("victims", "missing_dumps"))
        wait = "waits" if waiting.startswith("rank ") else "wait"
        return (
            f"hung; culprit unknown: {waiting} {wait} in collectives that never completed; the dumps of {dumps} "
            "are missing"
        )
    if verdict.kind == "hang" and not ranks:
        return "the job hangs"
    if verdict.kind == "mismatch":
        if "collective" in verdict.evidence:
            return f"{who} called something else than the others"
        differ = "differ" if plural else "differs"
        return f"{who} {differ} from the others in {verdict.evidence.get('what', 'something')}"
    if verdict.kind == "broken_ring":
        fault = verdict.evidence.get("what")
        if fault == "crosses hosts":
            return "the ring crosses between hosts more often than it needs to"
        if fault == "sockets":
            return f"{who if ranks else 'traffic between hosts'} fell back to TCP sockets"
        return f"the ring is broken at {who}"
    if verdict.kind == "dead_rank":
        return f"{who} died" if ranks else "a rank died"
    per_step = verdict.evidence.get("collectives_per_step")
    if verdict.kind == "small_collectives" and per_step is not None and "small_ratio" not in verdict.evidence:
        return f"{float(per_step):.0f} collectives per step are launched"
    sentence = headline(verdict).replace(everyone, who)
    if plural and not sentence.startswith("the "):
        # The monitor names one rank at a time; several get, need and wait.
        sentence = _replace_all(sentence, PLURAL)
    return sentence


def what_if_line(content: Mapping[str, object]) -> str:
    """Return the figures of a replayed timeline in one line: shares as percentages, the rest as it is."""
    known = {key: value for key, value in content.items() if isinstance(value, float | int)}
    said = [f"the job would run {ratio(known['slowdown'])} faster"] if "slowdown" in known else []
    said += [f"{label(key)} {percent(value)}" for key, value in known.items() if key.endswith("_share")]
    said += [f"cost {rank_time(3600 * known['cost_rank_hours'])}"] if "cost_rank_hours" in known else []
    return ", ".join(said)


# -------------------------------------------------------------------------------------------------
# The four questions of a profile with their answers, in words.


def answer_sign(question: Question) -> str:
    """Return `yes`, `no`, or a dash where there is not enough data."""
    return "–" if question.answer is None else "yes" if question.answer else "no"


def answer_text(question: Question) -> str:
    """Return `Yes.`, `No.` or that there is not enough data, and why."""
    answer = "Not enough data" if question.answer is None else "Yes" if question.answer else "No"
    return f"{answer}. {as_sentence(question.words)}".strip()


class Check(NamedTuple):
    """A question of a profile as a check.

    Args:
        mark: ✓ where all is well, ! where it is not, ? where it could not be judged.
        heading: The finding.
        caption: What it rests on, in a sentence; may be empty.
    """

    mark: str
    heading: str
    caption: str


_CHECK_HEADINGS = {
    "communication_dominates": (
        "Communication does not dominate the step",
        "Exposed communication dominates what follows backward",
        "Exposed communication was not judged",
    ),
    "similar_step_times": ("Ranks take similar times", "Ranks differ", "Ranks were not compared"),
    "network_between_hosts": (
        "The network between hosts is not the bottleneck",
        "The network between hosts is the bottleneck",
        "The network between hosts was not judged",
    ),
    "small_collectives": (
        "Collectives are few or large enough",
        "Too many small collectives are launched",
        "The sizes of collectives were not judged",
    ),
}
"""By question: the heading where all is well, where it is not, and where it could not be judged."""


def checks(answers: Mapping[str, Question], verdicts: Iterable[Verdict] = ()) -> dict[str, Check]:
    """Return the questions of a profile that were put as checks, by their names in `QUESTIONS`.

    Args:
        answers: By their names in `QUESTIONS`.
        verdicts: The first that the answer speaks of names who differs; verdicts of other jobs do not. Without one it
            is the rank with most own time.
    """
    found = {}
    for name, (well, bad, open_) in _CHECK_HEADINGS.items():
        question = answers.get(name)
        if question is None:
            continue
        # Of four questions only this one has the good answer "yes"; one rank alone has nobody to differ from.
        similar = name == "similar_step_times"
        numbers, caption = question.numbers, question.words
        if question.answer is None or (similar and not numbers):
            mark, heading = "?", open_
        elif question.answer is similar:
            mark, heading = "✓", well
        else:
            mark, heading = "!", bad
            if similar:
                said = question.words.lower()
                who = next((told for told in map(headline, verdicts) if told.lower() in said), "")
                worst = numbers.get("worst_excess_ratio")
                if not who and "worst_rank" in numbers and isinstance(worst, int | float):
                    who = f"rank {numbers['worst_rank']} is {percent(worst)} slower over the whole run"
                heading += f": {who}" if who else ""
                # Who it is stands in the heading already.
                caption = caption[len(who) + 2 :] if who and said.startswith(f"{who.lower()}; ") else caption
        found[name] = Check(mark, heading, as_sentence(caption))
    return found


def as_sentence(text: str) -> str:
    """Return text as a sentence: a capital first, a full stop at its end."""
    return "" if not text else text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
