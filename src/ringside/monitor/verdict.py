"""A verdict: who holds the job up, since when, why, what it costs and what to do about it."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from ringside.text import name_ranks, percent

KINDS = (
    "slow_rank",
    "slow_link",
    "input_bound",
    "uneven_work",
    "communication_bound",
    "small_collectives",
    "hang",
    "mismatch",
    "dead_rank",
    "diverged",
    "broken_ring",
    "changed",
    "stage_imbalance",
)

MOST_PEERS = 40
"""Letters of the names of a rank's peers up to which its headline has them; the evidence has all of them."""
OWN_TIME_KINDS = frozenset({"slow_rank", "uneven_work", "input_bound"})
"""What a verdict on a rank's own time is; of the whole job it names no rank."""

Evidence = dict[str, float | int | str]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One finding about a run; its fields are those of `summary.json`'s `verdicts`.

    Args:
        kind: One of `KINDS`.
        ranks: The culprits, ascending; for a link `[src, dst]`.
        since_step: Estimated first step of the episode.
        detected_step: Step at whose end the verdict was reached.
        excess_ratio: How much longer the culprit's own time is than the others' (0.12 means 12%).
        cause: Probable cause, in plain words.
        evidence: Numbers and short strings that carry the verdict; durations in seconds.
        cost_rank_seconds: Rank-seconds the whole job lost so far (see `ringside.monitor.price`).
        advice: What to do next, in plain words.
    """

    kind: str
    ranks: list[int]
    since_step: int
    detected_step: int
    excess_ratio: float
    cause: str = ""
    evidence: Evidence = {}
    cost_rank_seconds: float = 0.0
    advice: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no verdict is of the kind {self.kind!r}; the kinds are {', '.join(KINDS)}")


class VerdictEvent(NamedTuple):
    """An episode began or ended.

    Args:
        verdict: The verdict, as far as it is known now; of an episode that is over, with its final price.
        ended: Whether its episode is over; `evidence` then holds since when.
    """

    verdict: Verdict
    ended: bool

    @property
    def kind(self) -> str:
        """What it is called in `events.jsonl`."""
        return "repaired" if self.ended else "verdict"


def episode_end(verdict: Verdict, until_step: int) -> VerdictEvent:
    """Return that a verdict's episode is over, at its final price, and from which step on all was as before again."""
    evidence = {**verdict.evidence, "until_step": until_step}
    return VerdictEvent(msgspec.structs.replace(verdict, evidence=evidence), ended=True)


def headline(verdict: Verdict) -> str:
    """Return the verdict as one plain sentence without a full stop, e.g. `rank 3 is 12% slower than the others`."""
    who = name_ranks(verdict.ranks) or "the job"
    by = percent(verdict.excess_ratio) if math.isfinite(verdict.excess_ratio) else "an unknown amount"
    if verdict.kind == "input_bound" and not verdict.ranks:
        return "the whole job waits for its input"
    if verdict.kind == "hang":
        seconds = verdict.evidence.get("resumed_after_seconds")
        if seconds is not None:
            return f"{who} kept all others waiting for {float(seconds):.1f} s"
        return f"{who} did not arrive: the job hangs" if verdict.ranks else "the job hangs"
    if verdict.kind == "slow_rank" and "pause_bar_seconds" in verdict.evidence:
        return f"{who} pauses again and again: {by} slower than the others in all"
    if verdict.kind == "stage_imbalance":
        of = verdict.evidence
        stage = f"pipeline stage {of['stage']} ({of.get('stage_ranks')})" if "stage" in of else "one pipeline stage"
        return f"{stage} is {by} heavier than the others"
    # Of two replicas that differ neither is known to be the right one.
    if verdict.evidence.get("place"):
        who = f"{who} ({verdict.evidence['place']})"
    peers = str(verdict.evidence.get("peers", ""))
    than = "the others" if not peers else f"its peers ({peers})" if len(peers) <= MOST_PEERS else "its peers"
    others = " from the others" if verdict.evidence.get("decided", 1) else ""
    sentences = {
        "slow_rank": f"{who} is {by} slower than {than}",
        "changed": f"{who} needs {by} longer than before",
        "uneven_work": f"{who} gets more work than {than} and needs {by} longer",
        "input_bound": f"{who} waits for its input and needs {by} longer than {than}",
        "communication_bound": "the job is bound by communication",
        "small_collectives": "too many small collectives are launched",
        "slow_link": f"the link {' → '.join(map(str, verdict.ranks))} is slow",
        "dead_rank": f"{who} died",
        "mismatch": f"{who} called another collective than the others",
        "diverged": f"the replica{'' if len(verdict.ranks) == 1 else 's'} of {who} drifted apart{others}",
    }
    return sentences.get(verdict.kind, f"{who}: {verdict.kind.replace('_', ' ')}")


def onset(verdict: Verdict) -> str:
    """Return when it began: `since step 40`; `at step 40` of what happened once."""
    once = verdict.kind in ("dead_rank", "mismatch") or "resumed_after_seconds" in verdict.evidence
    return f"{'at' if once else 'since'} step {verdict.since_step}"
