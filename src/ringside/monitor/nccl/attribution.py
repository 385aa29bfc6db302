"""What NCCL's own records say of a run's verdicts: the cause of those that the monitor has reached, and others; pure.

They count no steps, and what they say is of the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from ringside.monitor.nccl.causes import (
    LATE_RANK,
    LEAST_CALLS,
    LEAST_SEEN,
    SLOW_GPU,
    SLOW_LINK,
    Blame,
    Seen,
    cause_of_lateness,
)
from ringside.monitor.nccl.report import NcclReport
from ringside.monitor.verdict import OWN_TIME_KINDS, Evidence, Verdict
from ringside.text import duration, rate

BY = "NCCL's own records"
_OF_RANK = OWN_TIME_KINDS | {"changed"}
_NAMING = _OF_RANK | {"slow_link"}
HOST_ADVICE = (
    "Look at what this rank's process does between collectives: its data loader, garbage collection, logging, other "
    "work on its cores. Its GPU is not the reason."
)
GPU_ADVICE = (
    "Compare this GPU with a healthy one (nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE), and its work with the other "
    "ranks'; run the rank on another GPU."
)
RANK_ADVICE = "Look at this rank's clocks and power cap, its data loader, and other work on its host."
LINK_ADVICE = (
    "Look at this path: error counters and negotiated rate of both adapters (ibstat, ethtool -S), its cable and switch "
    "port, other traffic on the uplink."
)


def attribute(
    verdicts: Sequence[Verdict], reports: Sequence[NcclReport], ranks: int, steps: tuple[int, int]
) -> list[Verdict]:
    """Return verdicts with what NCCL's records say of their cause, and behind them verdicts on whom else they name.

    Args:
        verdicts: Those that the monitor has reached.
        reports: Of each host.
        ranks: Number of ranks of the job.
        steps: The first step that was recorded, and the newest.
    """
    if not reports:
        return list(verdicts)
    known = [_with_cause(verdict, reports) for verdict in verdicts]
    named = {(verdict.kind == "slow_link", *verdict.ranks) for verdict in verdicts if verdict.kind in _NAMING}
    for report in reports:
        seen = {one.id: one for one in report.communicators}
        for blame in report.blames:
            subject = _ranks_of(blame)
            key = (blame.cause == SLOW_LINK, *subject)
            if blame.in_communicator or key in named or not all(0 <= rank < ranks for rank in subject):
                continue
            verdict = _verdict_of(blame, seen.get(blame.communicator), steps)
            if verdict is not None:
                named.add(key)
                known.append(verdict)
    return known


def _ranks_of(blame: Blame) -> list[int]:
    return [blame.rank, blame.peer] if blame.cause == SLOW_LINK else [blame.rank]


def _with_cause(verdict: Verdict, reports: Sequence[NcclReport]) -> Verdict:
    """Return a verdict on a rank or link with NCCL's cause; others, and those of which it knows none, as they are.

    That the rank holds the job up is known already: no share of the time is asked for, and no half of the run.
    """
    if verdict.kind in _OF_RANK and len(verdict.ranks) == 1:
        late = max(_lateness(verdict.ranks[0], reports), key=lambda blame: blame.seconds, default=None)
        return verdict if late is None else _extended(verdict, late, _describe_lateness(late))
    if verdict.kind == "slow_link":
        blames = (blame for report in reports for blame in report.blames if not blame.in_communicator)
        for blame in blames:
            if blame.cause == SLOW_LINK and _ranks_of(blame) == verdict.ranks and math.isfinite(blame.seconds):
                words = f"messages took {duration(blame.seconds)} longer in the steps that {BY} have"
                return _extended(verdict, blame, words)
    return verdict


def _extended(verdict: Verdict, blame: Blame, words: str) -> Verdict:
    parts = {"nccl_host_seconds": blame.host_seconds, "nccl_gpu_seconds": blame.gpu_seconds}
    evidence = {
        **verdict.evidence,
        "nccl_cause": blame.cause,
        "nccl_seconds": blame.seconds,
        **({} if blame.cause == SLOW_LINK else parts),
        "nccl_communicator": blame.communicator,
    }
    cause = f"{verdict.cause}; {words}" if verdict.cause else words
    return msgspec.structs.replace(verdict, cause=cause, evidence=evidence)


def _lateness(rank: int, reports: Sequence[NcclReport]) -> Iterator[Blame]:
    """Yield what a rank was late with, for each communicator in which most of what the ranks cost is its."""
    for seen in (one for report in reports for one in report.communicators):
        if seen.in_communicator or seen.seen_ratio < LEAST_SEEN or seen.calls < LEAST_CALLS:
            continue
        seconds = seen.late_seconds.get(rank, 0.0)
        if math.isfinite(seconds) and seconds > 0 and seconds >= sum(seen.late_seconds.values()) / 2:
            host, gpu = (of.get(rank, 0.0) for of in (seen.late_host_seconds, seen.late_gpu_seconds))
            yield Blame(
                cause=cause_of_lateness(seconds, host, gpu),
                rank=rank,
                seconds=seconds,
                host_seconds=host,
                gpu_seconds=gpu,
                communicator=seen.id,
            )


def _describe_lateness(late: Blame) -> str:
    waited = f"the others waited {duration(late.seconds)} for it"
    if late.cause == LATE_RANK:
        who = "its host calls collectives late"
    elif late.cause == SLOW_GPU:
        who = "its GPU comes to collectives late, not its host"
    else:
        return f"by {BY} {waited} in collectives"
    return f"by {BY} {who}: {waited} (host {duration(late.host_seconds)}, GPU {duration(late.gpu_seconds)})"


def _verdict_of(blame: Blame, seen: Seen | None, steps: tuple[int, int]) -> Verdict | None:
    """Return a verdict on whom NCCL's records name; None where they do not say of how much time."""
    if seen is None or not 0 < blame.seconds < math.inf:
        return None
    evidence: Evidence = {
        "by": BY,
        "nccl_cause": blame.cause,
        "nccl_seconds": blame.seconds,
        "nccl_communicator": blame.communicator,
    }
    if blame.cause == SLOW_LINK:
        waits = next((one for one in seen.waits if one.sends and [one.rank, one.peer] == _ranks_of(blame)), None)
        # Reports of before there was `network_seconds` have the sum over steps in both.
        network = 0.0 if waits is None else waits.network_seconds or waits.send_seconds
        usual = network - blame.seconds
        if waits is None or not 0 < usual < math.inf:
            return None
        rates = [waits.size_bytes / seconds for seconds in (network, usual)]
        cause = f"by {BY} the network takes messages at {rate(rates[0])}, those of the usual link at {rate(rates[1])}"
        return Verdict(
            kind="slow_link",
            ranks=_ranks_of(blame),
            since_step=steps[0],
            detected_step=steps[1],
            excess_ratio=blame.seconds / usual,
            cause=cause,
            evidence={
                **evidence,
                "bytes_per_second": rates[0],
                "usual_bytes_per_second": rates[1],
                "against": "the communicator's other links",
            },
            advice=LINK_ADVICE,
        )
    numbers = {"nccl_host_seconds": blame.host_seconds, "nccl_gpu_seconds": blame.gpu_seconds, "calls": seen.calls}
    return Verdict(
        kind="slow_rank",
        ranks=[blame.rank],
        since_step=steps[0],
        detected_step=steps[1],
        excess_ratio=blame.seconds / max(seen.seconds - blame.seconds, 1e-9),
        cause=_describe_lateness(blame),
        evidence={**evidence, **numbers},
        cost_rank_seconds=blame.seconds * seen.ranks,
        advice={LATE_RANK: HOST_ADVICE, SLOW_GPU: GPU_ADVICE}.get(blame.cause, RANK_ADVICE),
    )
