"""One rank's trace as plain values: its steps, its collectives, when it worked. Times in seconds since 1970.

(Where a trace has no `baseTimeNanoseconds`, its times are taken as they are.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ringside.doctor.kineto_intervals import Floats


@dataclass(frozen=True)
class Step:
    """One training step, as `ProfilerStep#N` marks it; start and end in seconds."""

    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Collective:
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
    """What one file says of one rank.

    Args:
        file: Its name.
        rank: The rank; -1 where the file does not say.
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
    steps: list[Step] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
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
        times += [self.collectives[0].start_s, max(one.end_s for one in self.collectives)] if self.collectives else []
        return (min(times), max(times)) if times else (0.0, 0.0)
