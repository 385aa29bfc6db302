"""Named moments of a step, at which a test may stop or kill a worker. Nothing happens at them otherwise.

A trap is written as `kill:rank=1,step=3,phase=mid_chunk` or `stop:...` in RINGSIDE_SURVIVE_TRAP; several are separated
by `;`. It springs in that step or the first one after it that comes there; with `epoch=2` in the second process of
that rank (without: in its first). A worker that is stopped goes on when somebody sends it SIGCONT.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ringside.errors import UsageError

TRAP = "RINGSIDE_SURVIVE_TRAP"
PHASES = (
    "compute",  # between two micro-batches
    "before_send",  # gradients are computed, nobody was told
    "after_send",  # the others may read them
    "mid_chunk",  # half of the own slice is added up
    "after_sum",  # the own slice is there for all
    "after_receive",  # the private copy is there, not acknowledged
    "after_ack",  # acknowledged, not decided
    "before_decide",  # the leader has all acknowledgements
    "after_decide",  # the leader has written COMMIT and told nobody
    "before_apply",  # COMMIT is read, not applied
    "after_apply",  # the step is applied
    "before_keep",  # the last step is applied, its state is not kept
    "after_keep",  # the final state is kept, nobody was told
    "after_end",  # the job is over, the loop has not ended
    "offer",  # state was offered to who joins
    "rejoin",  # state is being fetched
    "checkpoint",  # a checkpoint is being written
)
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Failpoint:
    """What happens to whom, and when.

    Args:
        signum: The signal that the process sends itself.
        rank: Who.
        phase: At which of `PHASES`.
        step: In which step, or the first one after it.
        epoch: In which process of that rank, from 1.
        incarnation: In which incarnation, from 1.
    """

    signum: int
    rank: int
    phase: str
    step: int = 0
    epoch: int = 1
    incarnation: int = 1

    @classmethod
    def parse(cls, spec: str) -> Failpoint:
        """Return the trap that words describe.

        Raises:
            UsageError: They describe none.
        """
        kind, _, rest = spec.partition(":")
        given = dict(part.split("=", 1) for part in rest.split(",") if "=" in part)
        try:
            phase = given.pop("phase")
            numbers = {name: int(value) for name, value in given.items()}
            if kind not in _SIGNALS or phase not in PHASES:
                raise ValueError
            return cls(_SIGNALS[kind], phase=phase, **numbers)
        except (KeyError, ValueError, TypeError):
            raise UsageError(
                f"no trap {spec!r}: write kill: or stop:, then rank=, phase= and step= (phase: one of "
                f"{', '.join(PHASES)})"
            ) from None


@dataclass
class Failpoints:
    """Where this process is.

    Args:
        rank: This rank.
        traps: What may happen.
        spring: Sends this process a signal.
    """

    rank: int
    traps: tuple[Failpoint, ...] = ()
    spring: Callable[[int], object] = field(default=lambda signum: os.kill(os.getpid(), signum))
    epoch: int = 1
    incarnation: int = 1
    step: int = 0

    @classmethod
    def of_environment(cls, rank: int, environ: Mapping[str, str]) -> Failpoints:
        """Return what RINGSIDE_SURVIVE_TRAP asks for."""
        return cls(rank, tuple(map(Failpoint.parse, filter(None, environ.get(TRAP, "").split(";")))))

    def reached(self, phase: str) -> None:
        """Let happen what is to happen to this process there."""
        for trap in self.traps:
            here, there = (self.rank, self.epoch, self.incarnation), (trap.rank, trap.epoch, trap.incarnation)
            if here == there and phase == trap.phase and self.step >= trap.step:
                self.traps = tuple(other for other in self.traps if other is not trap)
                self.spring(trap.signum)
