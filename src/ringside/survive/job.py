"""What one worker trains, and what it is told of a step that is committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ringside.survive.checkpoint import Checkpoints
from ringside.survive.final import Final
from ringside.survive.meeting import Meeting
from ringside.survive.neighbours import OpenTransport
from ringside.survive.phases import Phases
from ringside.survive.settings import Settings
from ringside.survive.state import State
from ringside.survive.stragglers import Stragglers
from ringside.survive.waiting import Patience
from ringside.survive.work import Work


@dataclass
class Job:
    """What one worker trains.

    Args:
        rank: This rank.
        meeting: The job's names in the store.
        listening: The same over a connection of its own.
        settings: What the state machine is told.
        state: Model, optimizer and what moves along.
        optimizer: The optimizer.
        work: Computes micro-batches.
        on_apply: Called after the optimizer's step, such as for a scheduler.
        checkpoints: Where checkpoints go; None: none are written.
        per_micro_batch: Gradients are kept and added up per micro-batch, so that results do not depend on who
            computed what.
        patience: When a member is given up.
        founding_s: How long the first ranks wait for each other, seconds.
        phases: Where this process is.
        stragglers: What to do about a rank that takes longer.
        open_transport: Makes a group of members on several hosts; None: there is one host.
        final: Where the final state is kept.
    """

    rank: int
    meeting: Meeting
    listening: Meeting
    settings: Settings
    state: State
    optimizer: torch.optim.Optimizer
    work: Work
    on_apply: Callable[[], object] = int
    checkpoints: Checkpoints | None = None
    per_micro_batch: bool = True
    patience: Patience = field(default_factory=Patience)
    founding_s: float = 60.0
    phases: Phases = field(default_factory=lambda: Phases(0))
    stragglers: Stragglers = field(default_factory=lambda: Stragglers("alert"))
    open_transport: OpenTransport | None = None
    final: Final = field(default_factory=lambda: Final(None))


@dataclass(frozen=True)
class Step:
    """A committed step.

    Args:
        number: Which, from 0.
        loss: Mean loss of its samples.
        samples: How many samples it took.
        members: The ranks that took part.
        generation: In which generation.
        seconds: From the step before until it was applied here.
    """

    number: int
    loss: float
    samples: int
    members: tuple[int, ...]
    generation: int
    seconds: float
