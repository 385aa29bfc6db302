"""One rank's trace as plain values: its steps, its collectives, when it worked. Times in seconds since 1970.

(Where a trace has no `baseTimeNanoseconds`, its times are taken as they are.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ringside.monitor.intervals import Floats, union


@dataclass(frozen=True)
class TracedStep:
    """One training step, as `ProfilerStep#N` marks it; start and end in seconds."""

    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TracedCollective:
    """One rank's part of one collective.

    Args:
        kind: `all_reduce`, `all_gather`, ...
        start_s: When this rank had arrived (a device kernel began; a thread began to carry it out), seconds.
        end_s: When it was done, seconds.
        elements: Elements this rank put in; 0 where not known.
        nbytes: The same in bytes.
        group: The process group's name; empty where not known.
        ranks: Its ranks; empty where not known.
        seq: Its sequence number within the group; -1 where not known.
    """

    kind: str
    start_s: float
    end_s: float
    elements: int = 0
    nbytes: int = 0
    group: str = ""
    ranks: tuple[int, ...] = ()
    seq: int = -1

    @property
    def duration_s(self) -> float:
        """From arrival to the end, seconds."""
        return self.end_s - self.start_s


@dataclass
class RankTrace:
    """What one file holds of one rank.

    Args:
        file: Its name.
        rank: The rank; -1 where the file does not name it.
        world_size: Ranks of the job; 0 where not known.
        backend: `nccl`, `gloo`, ...; empty where not known.
        host: Name of its host; empty where not known.
        device: Whether it shows what a device did; otherwise only what threads did.
        steps: Training steps, ascending.
        collectives: In order of their start.
        work: Union of what was computed, float64 [n, 2], seconds.
        gradients: When gradients were accumulated (ends), float64 [n], seconds, ascending.
        backward: When pieces of backward began, float64 [n], seconds, ascending.
        events: Events read.
        losses: What of the file is lost, in a line; empty where it is whole.
        launched_only: Collectives are seen only where they were launched, not where they ran.
    """

    file: str
    rank: int = -1
    world_size: int = 0
    backend: str = ""
    host: str = ""
    device: bool = False
    steps: list[TracedStep] = field(default_factory=list)
    collectives: list[TracedCollective] = field(default_factory=list)
    work: Floats = field(default_factory=lambda: np.empty((0, 2)))
    gradients: Floats = field(default_factory=lambda: np.empty(0))
    backward: Floats = field(default_factory=lambda: np.empty(0))
    events: int = 0
    losses: str = ""
    launched_only: bool = False

    @property
    def span(self) -> tuple[float, float]:
        """Start and end of all that was recorded, seconds; (0, 0) where nothing was."""
        times = [*(step.start_s for step in self.steps), *(step.end_s for step in self.steps)]
        times += [self.work[0, 0], self.work[-1, 1]] if len(self.work) else []
        if self.collectives:
            times += [self.collectives[0].start_s, max(collective.end_s for collective in self.collectives)]
        return (min(times), max(times)) if times else (0.0, 0.0)


# -------------------------------------------------------------------------------------------------
# Which traces belong together: jobs separated, ranks found, two traces of one rank distinguished from two parts of one.

APART_S = 120.0
"""Traces of one job overlap in time; clocks of its hosts may be so many seconds apart."""
_IN_NAME = re.compile(r"(?:rank|worker|trace|_r|-r)[_\-.]?(\d+)", re.IGNORECASE)


@dataclass
class TracedJob:
    """Traces of one job.

    Args:
        traces: One per rank, ascending.
        world_size: Its ranks, as far as known; at least as many as there are traces.
        guessed: Ranks were taken from file names, or from the order of the files.
        remarks: One line per file that was not used, or whose rank was guessed.
    """

    traces: list[RankTrace]
    world_size: int
    guessed: bool = False
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Ranks without a trace."""
        return sorted(set(range(self.world_size)) - {trace.rank for trace in self.traces})


def jobs_of(traces: Sequence[RankTrace]) -> list[TracedJob]:
    """Return the jobs that traces belong to, those with most ranks first.

    Traces belong to one job where world size and backend agree (or are not given) and where they overlap in time.
    """
    groups: list[list[RankTrace]] = []
    for trace in sorted(traces, key=lambda trace: trace.span):
        for group in groups:
            agree = all(
                len({other.world_size, trace.world_size} - {0}) < 2 and len({other.backend, trace.backend} - {""}) < 2
                for other in group
            )
            begin, end = min(other.span[0] for other in group), max(other.span[1] for other in group)
            if agree and trace.span[0] <= end + APART_S and trace.span[1] >= begin - APART_S:
                group.append(trace)
                break
        else:
            groups.append([trace])
    jobs = []
    for group in groups:
        remarks: dict[str, str] = {}
        # Every trace gets a rank: its own, or that in its file's name, or the next free one.
        taken = {trace.rank for trace in group if trace.rank >= 0}
        named = [trace for trace in group if trace.rank >= 0]
        for trace in sorted((trace for trace in group if trace.rank < 0), key=lambda trace: trace.file):
            match = _IN_NAME.search(trace.file.rpartition("/")[2])
            rank = int(match[1]) if match and int(match[1]) < 1 << 20 else -1
            remark = f"has no rank; {rank} was taken from its name"
            if rank < 0 or rank in taken:
                rank = next(number for number in range(len(group) + len(taken) + 1) if number not in taken)
                remark = f"has no rank; it is called rank {rank} here"
            taken.add(rank)
            remarks[trace.file] = remark
            named.append(replace(trace, rank=rank))
        # One trace per rank: two parts of one are joined, of two that overlap the larger is used.
        by_rank: dict[int, RankTrace] = {}
        for trace in named:
            if trace.rank not in by_rank:
                by_rank[trace.rank] = trace
            elif joined := _joined(by_rank[trace.rank], trace):
                by_rank[trace.rank] = joined
            else:
                kept, left = sorted((by_rank[trace.rank], trace), key=lambda each: (-each.events, each.file))
                by_rank[trace.rank] = kept
                remarks[left.file] = f"is a second trace of rank {left.rank} and was left out; {kept.file} has more"
        ranks = sorted(by_rank)
        world = max([trace.world_size for trace in group] + [ranks[-1] + 1])
        guessed = any(trace.rank < 0 for trace in group)
        jobs.append(TracedJob([by_rank[rank] for rank in ranks], world, guessed, remarks))
    return sorted(jobs, key=lambda job: -len(job.traces))


def _joined(a: RankTrace, b: RankTrace) -> RankTrace | None:
    """Two recordings of one rank, one after the other (a profiler's schedule repeats), as one; None if they overlap."""
    first, second = sorted((a, b), key=lambda trace: trace.span)
    apart = first.span[1] <= second.span[0]
    if not apart or {step.number for step in a.steps} & {step.number for step in b.steps} or not (a.steps and b.steps):
        return None
    return replace(
        first,
        steps=[*first.steps, *second.steps],
        collectives=[*first.collectives, *second.collectives],
        work=union(np.concatenate([first.work, second.work])),
        gradients=np.concatenate([first.gradients, second.gradients]),
        backward=np.concatenate([first.backward, second.backward]),
        events=first.events + second.events,
        losses="; ".join(dict.fromkeys(filter(None, (first.losses, second.losses)))),
    )
