"""The four questions of every profile, and how a run's records answer them; see docs/questions.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ringside.decoding import UNDECODABLE
from ringside.monitor.job.collectives import best_buckets, bucket_mb
from ringside.monitor.job.watcher import MANY, SAVED_AT, SAVED_OF_SYNC
from ringside.monitor.links.sampler import LinkTotals
from ringside.monitor.run.records import RunInfo
from ringside.monitor.run.table import StepTable, job_exposed_seconds, job_step_seconds, least_of_ranks, of_whole_steps
from ringside.monitor.stats import excess_ratios, known_median, rank_medians
from ringside.monitor.verdict import OWN_TIME_KINDS, Verdict, headline
from ringside.text import counted, duration, percent, rate, size

QUESTIONS = {
    "communication_dominates": "Is the step dominated by exposed communication?",
    "similar_step_times": "Do all ranks have similar step times?",
    "network_between_hosts": "Is the network between hosts the bottleneck?",
    "small_collectives": "Are too many small collectives launched?",
}
"""The four questions, by their names in `questions`."""

Number = float | int | str

DOMINATES = 0.5
"""Communication dominates after backward if it takes more than this share of what follows the last gradient ..."""
COUNTS = 0.1
"""... and more than this share of the step."""
NETWORK = 0.2
"""The network holds a job up if transfers that nobody was late for are exposed for this share of the step ..."""
ON_THE_WIRE = 0.5
"""... and, where wires were watched, some link is busy for at least this share of that time."""
SIMILAR = 0.1
"""Without a verdict, own times are similar while no rank's is more than this above the others' in the median step."""
FEWEST_STEPS = 3
"""Fewer steps, all of which allocate and build buckets, answer nothing."""

ONE_RANK = "There is one rank: nobody waits for anybody."


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one of `QUESTIONS`.

    Args:
        answer: Yes or no; None where it is not known.
        numbers: What it rests on; durations in seconds, shares as ratios.
        words: The answer in a sentence, or why there is none.
    """

    answer: bool | None
    numbers: dict[str, Number] = {}
    words: str = ""


def to_plain(answers: Mapping[str, Question]) -> dict[str, dict[str, Any]]:
    """Return all four questions with their answers as plain data, as they stand in `summary.json`."""
    nothing = Question(answer=None)
    return {
        name: {"question": text, **msgspec.to_builtins(answers.get(name, nothing))} for name, text in QUESTIONS.items()
    }


def read_answers(content: Any) -> dict[str, Question]:
    """Return the answers in a summary's `questions`; what is none is left out."""
    found = {}
    for name in QUESTIONS:
        try:
            numbers = content[name]["numbers"].items()
            # A figure that was not finite is null in a summary, and is left out here.
            given = {**content[name], "numbers": {key: value for key, value in numbers if value is not None}}
            found[name] = msgspec.convert(given, Question)
        except (KeyError, TypeError, AttributeError, *UNDECODABLE):
            continue
    return found


def answer_questions(
    info: RunInfo, table: StepTable, verdicts: Sequence[Verdict], links: Sequence[LinkTotals] = ()
) -> dict[str, Question]:
    """Return the answers of a run, all four, by their names in `QUESTIONS`.

    Args:
        info: What was known at its start.
        table: Its step records.
        verdicts: What was found.
        links: What its links carried, where wires were watched.
    """
    if len(table) < FEWEST_STEPS:
        few = f"{counted(len(table), 'step')} recorded: too few to judge." if len(table) else "No step was recorded."
        return dict.fromkeys(QUESTIONS, Question(answer=None, words=few))
    if info.world_size < 2:
        return dict.fromkeys(QUESTIONS, Question(answer=False, words=ONE_RANK))
    return {
        "communication_dominates": _dominates(table),
        "similar_step_times": _similar(table, verdicts),
        "network_between_hosts": _network(info, table, verdicts, links),
        "small_collectives": _small(table),
    }


def _dominates(table: StepTable) -> Question:
    exposed, step = known_median(job_exposed_seconds(table)), known_median(job_step_seconds(table))
    optimizer = known_median(table["optimizer_seconds"])
    # After the last gradient there is the rest of the synchronisation, and then the optimizer.
    share, after = exposed / max(step, 1e-12), exposed / max(exposed + optimizer, 1e-12)
    return Question(
        answer=after > DOMINATES and share > COUNTS,
        numbers={
            "step_seconds": step,
            "exposed_seconds": exposed,
            "exposed_ratio": share,
            "optimizer_seconds": optimizer,
            "communication_after_backward_ratio": after,
        },
        words=f"Exposed communication is {percent(share)} of a step, and {percent(after)} of what follows backward.",
    )


def _similar(table: StepTable, verdicts: Sequence[Verdict]) -> Question:
    own = rank_medians(table["own_seconds"])
    known = own > 0
    if known.sum() < 2:
        return Question(answer=None, words="Own times of fewer than two ranks are known.")
    excess = excess_ratios(np.where(known, own, np.nan))
    worst = int(np.argmax(np.where(known, excess, -np.inf)))
    numbers: dict[str, Number] = {
        "step_seconds": known_median(job_step_seconds(table)),
        "own_seconds_least": float(own[known].min()),
        "own_seconds_most": float(own[known].max()),
        "worst_rank": worst,
        "worst_excess_ratio": float(excess[worst]),
    }
    # A verdict on a rank's own time leads, whatever the median over the whole run is.
    slow = [verdict for verdict in verdicts if verdict.kind in OWN_TIME_KINDS and verdict.ranks]
    apart = f"differ by {percent(float(own[known].max() / own[known].min() - 1.0))} at most, in the median step"
    if slow:
        named = ", and ".join(map(headline, slow))
        words = f"{named[:1].upper()}{named[1:]}; over the whole run own times {apart}."
        return Question(answer=False, numbers=numbers, words=words)
    similar = bool(excess[worst] <= SIMILAR)
    who = "" if similar else f"; rank {worst} needs longest, too unsteadily or too briefly for a verdict"
    return Question(answer=similar, numbers=numbers, words=f"Own times (without waiting) {apart}{who}.")


def _network(info: RunInfo, table: StepTable, verdicts: Sequence[Verdict], links: Sequence[LinkTotals]) -> Question:
    hosts = {host for host in info.hosts if host}
    share = known_median(job_exposed_seconds(table)) / max(known_median(job_step_seconds(table)), 1e-12)
    numbers: dict[str, Number] = {"hosts": len(hosts), "exposed_ratio": share}
    if len(hosts) == 1 and all(info.hosts) and not links:
        return Question(answer=False, numbers=numbers, words="All ranks are on one host.")
    exposed = f"Exposed communication that waits for no rank: {percent(share)} of a step"
    slow = []
    for verdict in verdicts:
        if verdict.kind == "slow_link":
            until = verdict.evidence.get("until_step")
            steps = f"from step {verdict.since_step} on" + ("" if until is None else f" until step {until}")
            slow.append(f"{headline(verdict)} {steps}")
    if not links:  # no wire was watched: only exposure is known
        if not hosts:
            return Question(answer=None, numbers=numbers, words=f"The hosts of the ranks are not known. {exposed}.")
        words = f"{exposed}; no wire between the {len(hosts)} hosts could be watched"
        return Question(answer=share >= NETWORK, numbers=numbers, words=f"{words}.")
    worst, wire = links[0], max(link.wire_ratio for link in links)
    numbers |= {
        "wire_ratio": wire,
        "links": len(links),
        "slowest_src": worst.src,
        "slowest_dst": worst.dst,
        "slowest_bytes_per_second": worst.bytes_per_s,
        "median_bytes_per_second": float(np.median([link.bytes_per_s for link in links])),
    }
    words = (
        f"{exposed}; the busiest link carries data for {percent(wire)} of the time, the slowest ({worst.src} → "
        f"{worst.dst}) at {rate(worst.bytes_per_s)}"
    )
    bottleneck = share >= NETWORK and wire >= ON_THE_WIRE * share
    return Question(
        answer=bool(bottleneck or slow), numbers=numbers, words=f"{', and '.join([words, *dict.fromkeys(slow)])}."
    )


def _small(table: StepTable) -> Question:
    count, payload = known_median(table["collectives"]), known_median(table["payload_bytes"])
    busy, latency = (
        known_median(least_of_ranks(of_whole_steps(table[name]), positive=True))
        for name in ("busy_seconds", "latency_seconds")
    )
    if not count:
        return Question(answer=None, words="No collective was recorded.")
    numbers: dict[str, Number] = {"collectives_per_step": count, "bytes_each": payload / count}
    words = f"{counted(round(count), 'collective')} of {size(payload / count)} per step"
    if not busy:  # few collectives are no trouble, however long they take; of many nothing is known
        answer = None if count > MANY else False
        return Question(answer=answer, numbers=numbers, words=f"{words}; what they take was not measured.")
    best = best_buckets(count, payload, busy, latency)
    step = known_median(job_step_seconds(table))
    saved = min(best.saved_seconds, known_median(job_exposed_seconds(table)))
    numbers["busy_seconds"] = busy
    if latency:
        numbers |= {"latency_seconds": latency, "saved_seconds_per_step": saved, "saved_ratio": best.saved_ratio}
    many = bool(count > MANY and best.saved_ratio >= SAVED_OF_SYNC and saved >= SAVED_AT * step)
    if many:
        numbers["bucket_mb"] = bucket_mb(best.bucket_bytes)
        words += (
            f"; with buckets of {bucket_mb(best.bucket_bytes)} MiB there would be {best.collectives}, which saves "
            f"about {percent(saved / step)} of a step"
        )
    elif latency:
        words += (
            f"; each takes {duration(latency)} apart from its bytes, and larger buckets would save "
            f"{percent(saved / step)} of a step"
        )
    return Question(answer=many, numbers=numbers, words=f"{words}.")
