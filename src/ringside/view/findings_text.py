"""The doctor's findings in plain words, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringside.monitor.verdict import Verdict, headline
from ringside.text import label, name_ranks, percent, rank_time
from ringside.view.verdict_text import as_sentence

_MANY = 6


@dataclass(frozen=True)
class FindingText:
    """One verdict in words: each part a sentence, empty where there is nothing to say."""

    headline: str
    why: str
    price: str
    next: str


def finding_text(verdict: Verdict) -> FindingText:
    """Return a verdict in words; of kinds that the monitor has no sentence for, with one of its own."""
    cost = verdict.cost_rank_seconds
    return FindingText(
        headline=as_sentence(_headline(verdict)),
        why=as_sentence(verdict.cause),
        price=f"{rank_time(cost)} lost." if cost > 0 else "",
        next=as_sentence(verdict.advice),
    )


def _headline(verdict: Verdict) -> str:
    ranks = verdict.ranks
    who = everyone = name_ranks(ranks) or "the job"
    if len(ranks) > _MANY:
        who = f"ranks {', '.join(map(str, ranks[: _MANY - 1]))} and {len(ranks) - _MANY + 1} more"
    plural = len(verdict.ranks) != 1
    if verdict.kind == "hang" and verdict.evidence.get("stopped"):
        return f"{who} stopped: the job hangs"
    if verdict.kind == "hang" and not verdict.ranks:
        return "the job hangs"
    if verdict.kind == "mismatch":
        if "collective" in verdict.evidence:
            return f"{who} called something else than the others"
        return (
            f"{who} {'differ' if plural else 'differs'} from the others in {verdict.evidence.get('what', 'something')}"
        )
    if verdict.kind == "broken_ring":
        fault = verdict.evidence.get("what")
        if fault == "crosses hosts":
            return "the ring crosses between hosts more often than it needs to"
        if fault == "sockets":
            return f"{who if verdict.ranks else 'traffic between hosts'} fell back to TCP sockets"
        return f"the ring is broken at {who}"
    if verdict.kind == "dead_rank":
        return f"{who} died" if verdict.ranks else "a rank died"
    sentence = headline(verdict).replace(everyone, who)
    if plural and not sentence.startswith("the "):
        # The monitor names one rank at a time; several get, need and wait.
        for singular, several in (
            (" gets ", " get "),
            (" needs ", " need "),
            (" waits ", " wait "),
            (" is ", " are "),
            (" its ", " their "),
        ):
            sentence = sentence.replace(singular, several)
    return sentence


def what_if_line(content: Mapping[str, object]) -> str:
    """Return the figures of a replayed timeline in one line: shares as percentages, the rest as it is."""
    known = {key: value for key, value in content.items() if isinstance(value, float | int)}
    said = [f"slowdown {known['slowdown']:.3f}"] if "slowdown" in known else []
    said += [f"{label(key)} {percent(value)}" for key, value in known.items() if key.endswith("_share")]
    said += [f"cost {rank_time(3600 * known['cost_rank_hours'])}"] if "cost_rank_hours" in known else []
    return ", ".join(said)
