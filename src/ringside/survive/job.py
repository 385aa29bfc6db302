"""What one worker trains, and what it is told of a step that is committed."""

from __future__ import annotations

from dataclasses import dataclass

from ringside.errors import StoreGoneError
from ringside.survive.cluster.failpoints import Failpoints
from ringside.survive.cluster.links import OpenTransport
from ringside.survive.cluster.rendezvous import Rendezvous
from ringside.survive.data.micro_batches import StepWork
from ringside.survive.data.rebalance import Stragglers
from ringside.survive.protocol.settings import ProtocolSettings
from ringside.survive.state.checkpoint import Checkpoints
from ringside.survive.state.final import Final
from ringside.survive.state.state import JobState


@dataclass
class SurviveJob:
    """What one worker trains.

    Args:
        rank: This rank.
        rendezvous: The job's names in the store.
        listening: The same over a connection of its own.
        settings: What the state machine is told.
        state: Model, optimizer and what moves along.
        work: Computes micro-batches.
        checkpoints: Where checkpoints go; None: none are written.
        per_micro_batch: Gradients are kept and added up per micro-batch, so that results do not depend on who
            computed what.
        silent_s: A member that lives and takes no part is given up after so long, seconds.
        failpoints: Where this process is.
        stragglers: What to do about a rank that takes longer.
        open_transport: Makes a group of members on several hosts; None: there is one host.
        final: Where the final state is kept.
    """

    rank: int
    rendezvous: Rendezvous
    listening: Rendezvous
    settings: ProtocolSettings
    state: JobState
    work: StepWork
    checkpoints: Checkpoints | None
    per_micro_batch: bool
    silent_s: float
    failpoints: Failpoints
    stragglers: Stragglers
    open_transport: OpenTransport | None
    final: Final


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


# -------------------------------------------------------------------------------------------------
# A worker that is started after its job was over: it has the final state, and nothing is left but its last lines.


class Afterwards:
    """Stands in for a driver where an earlier worker of this rank has kept the final state that all agreed on.

    It takes nobody else to go on from there, nor the store: the others may have ended long ago.

    Args:
        job: What was trained; its state is the final one.

    Attributes:
        joined, reason, is_over, digests: As of a driver.
    """

    joined = True
    reason = ""
    is_over = True
    digests = None

    def __init__(self, job: SurviveJob) -> None:
        self.job = job

    def next_step(self) -> None:
        """Return that there is none."""

    def end_job(self) -> None:
        """It has ended."""

    def has_elders(self) -> bool:
        """Return False: there is nobody to wait for."""
        return False

    def close(self) -> None:
        """There is nothing to let go of."""


class GoneRegisters:
    """Registers of a store that is gone: who wants to know what was committed hears why that cannot be.

    Args:
        why: What is wrong with the store.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def create(self, key: str, value: bytes) -> bytes:
        """Return the value: nobody else is there who could have been first."""
        return value

    def read(self, key: str) -> bytes | None:
        """Raise `StoreGoneError`."""
        raise StoreGoneError(self._why)

    def swap(self, key: str, expected: bytes | None, new: bytes) -> bytes | None:
        """Raise `StoreGoneError`."""
        raise StoreGoneError(self._why)
