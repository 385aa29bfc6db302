"""Kineto traces (torch.profiler's) of one or many ranks: who worked, who waited, for whom, and what it cost."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np

from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note, Unjudged, merge
from ringside.doctor.kineto import straggler
from ringside.doctor.kineto.collector import read_trace
from ringside.doctor.kineto.match import Matched, match_collectives
from ringside.doctor.kineto.report import Evidence, answer_questions, job_facts, job_lanes, job_tables
from ringside.doctor.kineto.steps import Activity, RankSteps, rank_activity, steps_of
from ringside.doctor.kineto.trace import RankTrace, TracedJob, jobs_of
from ringside.doctor.pipeline.timeline import looks_like_timeline
from ringside.doctor.replay import DependencyGraph, Recording, answer_what_if, as_dict, lanes_recording, step_recording
from ringside.monitor.intervals import within
from ringside.text import counted, name_ranks, rank_list, size

KIND = "Kineto trace"
_SIGNS = re.compile(
    rb'"(?:traceEvents|schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds|displayTimeUnit)"\s*:'
)
_EVENT = re.compile(rb'^\s*\[\s*\{[^{}]*"(?:ph|cat)"\s*:')


def matches(source: Source) -> bool:
    """Return whether a source is a Chrome trace of a profiler (and no pipeline timeline)."""
    head = source.head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if head[:1] not in (b"{", b"[") or looks_like_timeline(head):
        return False
    return bool(_EVENT.match(head) if head[:1] == b"[" else _SIGNS.search(head))


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Read all traces and judge them together, job by job."""
    traces: list[RankTrace] = []
    notes: list[Note] = []
    for source in sources:
        progress.begin(f"reading {KIND} {source.name}")
        with source.open() as stream:
            trace = read_trace(stream, source.name)
        if trace.events:
            traces.append(trace)
        else:
            why = "; ".join([*source.problems, "has no complete event"])
            notes.append(Note(file=source.name, kind=KIND, text=why, used=False))
    jobs = jobs_of(traces)
    for job in jobs:
        kept = {trace.file: trace for trace in job.traces}
        for trace in traces:
            if trace not in job.traces and trace.file not in job.remarks:
                continue
            shown = kept.get(trace.file, trace)  # its rank may have been guessed
            nbytes = sum(collective.nbytes for collective in shown.collectives)
            collectives = counted(len(shown.collectives), "collective")
            who = f"rank {shown.rank} of {job.world_size}" if shown.rank >= 0 else "a rank it does not name"
            held = f"{who}: {counted(len(shown.steps), 'step')}, {collectives} ({size(nbytes)})"
            remark = job.remarks.get(trace.file, "")
            text = "; ".join(filter(None, (held, remark, trace.losses)))
            notes.append(Note(file=trace.file, kind=KIND, text=text, used="left out" not in remark))
    parts = [_diagnose(job, title=f"job {number + 1}" if len(jobs) > 1 else "") for number, job in enumerate(jobs)]
    # A trace that is in several jobs' remarks is noted once.
    unjudged = []
    if len(jobs) > 1:
        sizes = [f"job {number}: {len(job.traces)} of {job.world_size} ranks" for number, job in enumerate(jobs, 1)]
        why = f"world size, backend or time differ ({', '.join(sizes)}); each is judged by itself"
        unjudged = [Unjudged(what="all traces as one job", why=why, side=True)]
    return merge([Findings(notes=list({note.file: note for note in notes}.values()), unjudged=unjudged), *parts])


def _diagnose(job: TracedJob, *, title: str = "") -> Findings:
    """Judge the traces of one job; pure.

    Args:
        job: Its traces.
        title: What to call it where there are several.
    """
    steps = [steps_of(trace) for trace in job.traces]
    matched = match_collectives(job.traces)
    # Own times of the steps that all ranks recorded, in the order in which they ran.
    common = set.intersection(*(set(rank.numbers.tolist()) for rank in steps))
    numbers = [number for number in steps[0].numbers.tolist() if number in common]
    places = [[int(np.flatnonzero(rank.numbers == number)[0]) for number in numbers] for rank in steps]
    columns = []
    for name in ("own_s", "step_s", "exposed_s"):
        picked = [getattr(rank, name)[place] for rank, place in zip(steps, places, strict=True)]
        columns.append(np.stack(picked, axis=1) if numbers else np.empty((0, len(steps))))
    pace = straggler.RankPace([rank.rank for rank in steps], numbers, *columns)
    evidence = Evidence(job.traces, steps, pace, matched)
    late_s, waits_s = matched.mean_per_rank(matched.lateness), matched.mean_per_rank(matched.waits)
    slow = straggler.judge_stragglers(pace, late_s, waits_s)
    questions = answer_questions(evidence, slow)
    # how many collectives are small, and whether anybody waits for them
    small = questions["small_collectives"].numbers
    per_step = float(small.get("collectives_per_step") or 0.0)
    small_ratio = None if (known := small.get("small_ratio")) is None else float(known)
    verdicts = [
        *slow,
        *straggler.judge_mismatches(matched.conflicts),
        *straggler.bound_by_communication(pace),
        *straggler.too_many_collectives(pace.numbers, per_step, small_ratio, pace.exposed_ratio),
    ]
    culprits = [rank for verdict in verdicts for rank in verdict.ranks]
    # The job's steps replayed without stragglers, where there is anything to compare.
    gaps = _unjudged(job, pace, matched, culprits)
    replayed = None
    if len(job.traces) > 1 and pace.numbers and not any(trace.launched_only for trace in job.traces):
        seen = [rank_activity(trace) for trace in job.traces]
        recording = _collective_recording(matched, steps, seen, pace.numbers, job.world_size)
        if recording is None:
            recording = step_recording(pace.own_s, pace.exposed_s, pace.step_s, pace.ranks, world_size=job.world_size)
        count = counted(recording.seconds.shape[1], "step")
        replayed = as_dict(answer_what_if(recording), f"{count} of the Kineto traces of {len(job.traces)} ranks")
    prefix = f"{title}: " if title else ""
    return Findings(
        verdicts=verdicts,
        questions=questions,
        unjudged=[msgspec.structs.replace(gap, what=prefix + gap.what) for gap in gaps],
        what_if=replayed,
        lanes=job_lanes(job, title or "ranks"),
        sheets=job_tables(evidence, prefix, culprits),
        facts={f"{title} kineto".strip(): job_facts(evidence)},
    )


def _unjudged(job: TracedJob, pace: straggler.RankPace, matched: Matched, culprits: Sequence[int]) -> list[Unjudged]:
    """What these traces leave open, each with what to record for it."""
    found: list[Unjudged] = []
    if job.missing:
        given = name_ranks(trace.rank for trace in job.traces[:8])
        ranges = rank_list(job.missing).split(", ")
        missing = name_ranks(job.missing) if len(ranges) <= 8 else f"ranks {', '.join(ranges[:8])}, …"
        why = f"of {job.world_size} ranks only {given} {'is' if len(job.traces) == 1 else 'are'} here, not {missing}"
        what = "who is slow" if len(job.traces) == 1 else "whether a missing rank is slow"
        found.append(Unjudged(what=what, why=f"{why}: give the traces of all ranks"))
    elif len(job.traces) == 1:
        found.append(Unjudged(what="who is slow", why="there is one trace: give the traces of all ranks"))
    if any(not trace.steps for trace in job.traces):
        why = "no ProfilerStep# is recorded: call profiler.step() once per training step"
        found.append(Unjudged(what="single steps", why=why))
    if len(job.traces) > 1:
        # several ranks, but too few steps, or nothing that lasts
        steps = len(pace.numbers)
        if steps < straggler.LEAST_STEPS:
            recorded = f"{counted(steps, 'step')} recorded by all ranks"
            why = f"{recorded}: {straggler.LEAST_STEPS} or more are needed to tell a straggler from chance, "
            why += "and what-if figures from noise"
            found.append(Unjudged(what="a persistent straggler", why=why))
        elif not culprits and pace.excess.max(initial=0.0) > straggler.SIMILAR:
            most = max(pace.slowest)
            who = pace.ranks[pace.slowest.index(most)]
            why = f"rank {who} is the slowest in {most} of {steps} steps, which chance or noise may explain"
            if 2 * most < steps:
                why = f"the slowest rank moves: no rank is it in more than {most} of {steps} steps (rank {who})"
            found.append(Unjudged(what="a straggler", why=f"{why}; record more steps (30 are plenty)"))
        if not len(matched.parts) and any(trace.collectives for trace in job.traces):
            why = "no collective of one rank is found on another: the traces are of different steps or jobs"
            found.append(Unjudged(what="waits and lateness", why=why))
    if any(trace.launched_only for trace in job.traces):
        why = "only their launch is recorded: profile with ProfilerActivity.CUDA as well"
        found.append(Unjudged(what="how long collectives took", why=why))
    elif not any(trace.collectives for trace in job.traces):
        found.append(Unjudged(what="communication", why="the traces show no collective"))
    if job.guessed:
        why = "distributedInfo is missing from a trace: ranks were taken from file names, or counted"
        found.append(Unjudged(what="which rank recorded which trace", why=why, side=True))
    return found


# -------------------------------------------------------------------------------------------------
# What if no rank had been slow: a data-parallel step as work between collectives, replayed at its peers' pace.
#
# A step lasts from the end of one step's last collective to the end of the next one's (all ranks leave it together) and
# is cut at every rank's arrivals at the matched collectives. Work goes on while a collective runs, unless most ranks
# were seen waiting for it: then what follows depends on its end.

MOST_OPERATIONS = 4096
HELD_RATIO = 0.01
"""A rank waited for a collective if that took more than this share of the collective's duration."""


def _collective_recording(
    matched: Matched, steps: Sequence[RankSteps], seen: Sequence[Activity], numbers: Sequence[int], world_size: int
) -> Recording | None:
    """Return the recording of steps cut at their collectives; None where steps do not hold the same collectives.

    Args:
        matched: The collectives of all ranks.
        steps: What each rank did, in the ranks' order.
        seen: When each rank worked and waited, in the same order.
        numbers: The steps to take.
        world_size: Ranks of the job.
    """
    rows = [np.flatnonzero((matched.steps == number) & ~np.isnan(matched.starts).any(axis=1)) for number in numbers]
    rows = [found[np.argsort(matched.starts[found].min(axis=1), kind="stable")] for found in rows]
    kinds = {tuple((matched.parts[row].kind, matched.parts[row].elements) for row in found) for found in rows}
    if len(kinds) != 1 or not len(rows[0]) or 2 * len(rows[0]) > MOST_OPERATIONS:
        return None
    # The first step has no step before it to begin after; it is used only where there is no other.
    count, first = len(rows[0]), 1 if len(rows) > 1 else 0
    work = np.zeros((count, len(rows) - first, len(steps)))
    held = np.zeros((count - 1, len(rows) - first, len(steps)), dtype=bool)
    for lane, (rank, activity) in enumerate(zip(steps, seen, strict=True)):
        for place, found in enumerate(rows[first:]):
            begin = matched.ends[rows[place], lane].max() if first else _begin(rank, numbers[0])
            arrivals, ends = matched.starts[found, lane], matched.ends[found, lane]
            # Work before each arrival, without the waiting in it.
            edges = np.maximum.accumulate(np.concatenate([[begin], arrivals]))
            segments = np.stack([edges[:-1], edges[1:]], axis=1)
            busy = segments[:, 1] - segments[:, 0] - within(activity.exposed, segments)
            work[:, place, lane] = np.maximum(busy, 0.0)
            # Held: between an arrival and the next the rank waited for that collective.
            gaps = np.stack([edges[1:-1], np.clip(ends[:-1], edges[1:-1], edges[2:])], axis=1)
            waited = within(activity.exposed, gaps)
            held[:, place, lane] = waited > HELD_RATIO * np.maximum(ends - arrivals, 0.0)[:-1]
    # What each collective took once all had arrived and the one before was done.
    transfer = np.zeros((count, len(rows) - first))
    for place, found in enumerate(rows[first:]):
        begun = (matched.starts[found] - matched.clocks).max(axis=1)
        done = np.median(matched.ends[found] - matched.clocks, axis=1)
        before = np.concatenate([[-np.inf], np.maximum.accumulate(done)[:-1]])
        transfer[:, place] = np.maximum(done - np.maximum(begun, before), 0.0)
    # The measured length of each step: from the last end of the step before to its own.
    lasts = np.array([np.median(matched.ends[found] - matched.clocks, axis=1).max() for found in rows])
    begins = lasts[:-1] if first else np.array([np.mean([_begin(rank, numbers[0]) for rank in steps])])
    # Work 0, transfer 0, work 1, ...: each work after the one before, and after a transfer that most ranks waited for.
    blocks = held.mean(axis=(1, 2)) >= 0.5
    after: list[list[int]] = []
    for index in range(count):
        before_work = [2 * index - 2] if index else []
        after.append([*before_work, *([2 * index - 1] if index and blocks[index - 1] else [])])
        after.append([2 * index, *([2 * index - 1] if index else [])])
    names = [f"{kind} {index}" for index in range(count) for kind in ("work", "transfer")]
    spread = np.broadcast_to(transfer[:, :, None], work.shape)
    seconds = np.stack([work, spread], axis=1).reshape(2 * count, *work.shape[1:])
    groups = [[2 * index + 1] for index in range(count)]
    across = frozenset(op for group in groups for op in group)
    graph = DependencyGraph(names=names, after=after, groups=groups, across=across)
    ranks = [rank.rank for rank in steps]
    return lanes_recording(graph, seconds, names, ranks, world_size, lasts[first:] - begins)


def _begin(rank: RankSteps, number: int) -> float:
    return float(rank.windows[int(np.flatnonzero(rank.numbers == number)[0]), 0])
