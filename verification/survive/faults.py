"""What is done to whom, and when: faults, the phases of a step they strike in, and the points a process passes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Where in a step a fault strikes."""

    COMPUTING = "computing"
    BEFORE_SEND = "before send"
    MID_CHUNK = "mid-chunk"
    AFTER_SEND = "after send"
    AFTER_RECEIVE = "after last receive"
    BEFORE_DECIDE = "after acks, before decide"
    BEFORE_APPLY = "between decide and apply"
    CHECKPOINT = "during checkpoint"
    ASKING = "rejoin: asking"
    FETCHING = "rejoin: state half fetched"
    SERVING = "rejoin: state half served"
    LAST_APPLIED = "end: last step applied, nothing kept"
    KEPT = "end: final state kept, nobody told"
    OVER = "end: over, before the last lines"
    SAVING = "end: final file half written"

    @property
    def moves_data(self) -> bool:
        """Whether it comes once per round and bucket."""
        return self in _DATA

    @property
    def rejoins(self) -> bool:
        """Whether it comes only while a process joins."""
        return self in (Phase.ASKING, Phase.FETCHING, Phase.SERVING)


_DATA = (Phase.BEFORE_SEND, Phase.MID_CHUNK, Phase.AFTER_SEND, Phase.AFTER_RECEIVE)


class Kind(Enum):
    """What happens to a process or its messages."""

    KILL = "SIGKILL, respawned"
    DEATH = "SIGKILL, for good"
    ZOMBIE = "SIGSTOP, back as a zombie"
    REPLACED = "SIGSTOP, replaced, then back"
    STALL = "stalls, wakes after the others went on"
    HALF_OPEN = "half-open connection"
    LOST = "lost message"
    DELAYED = "delayed message"
    LATE_STORE = "store answers late"
    SUSPECTED = "suspected by mistake"
    CORRUPT = "a wrong number"
    ALL_GONE = "all killed, all respawned"
    DRAINED = "drained"
    ALL_ASLEEP = "all stopped, it replaced; all wake"


@dataclass(frozen=True)
class Point:
    """Where a process is.

    Args:
        phase: In which phase.
        step: Of which step; -1: of none.
        bucket: Of which bucket, where data moves.
        round: In which round, where data moves.
    """

    phase: Phase
    step: int = -1
    bucket: int = -1
    round: int = -1


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once.

    Args:
        kind: What.
        rank: With the process of which rank.
        at: When it comes there first; of a rejoining phase any step.
    """

    kind: Kind
    rank: int
    at: Point

    def __str__(self) -> str:
        at = self.at
        where = f" of round {at.round}, bucket {at.bucket}" if at.phase.moves_data else ""
        step = f", step {at.step}" if at.step >= 0 else ""
        return f"rank {self.rank}: {self.kind.value}, {at.phase.value}{where}{step}"


__all__ = ["Fault", "Kind", "Phase", "Point"]
