"""The faults there are, each a value with its words: `slow:rank=1,factor=1.3,from_step=40`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Slow:
    """A rank whose forward and backward passes do more work than the others'.

    Args:
        rank: Who.
        factor: How many times as long the passes take, more than 1.
        from_step: First training step of it.
    """

    kind: ClassVar[str] = "slow"
    example: ClassVar[str] = "slow:rank=1,factor=1.3,from_step=40"
    rank: int
    factor: float = 1.3
    from_step: int = 0

    def __str__(self) -> str:
        return f"slow:rank={self.rank},factor={self.factor!r},from_step={self.from_step}"

    def words(self) -> str:
        """Say it as a sentence."""
        return f"rank {self.rank} was made {100 * (self.factor - 1):.0f} % slower from step {self.from_step} on"


@dataclass(frozen=True)
class Pause:
    """A rank that stands still in its forward pass, once or again and again.

    Args:
        rank: Who.
        at_step: In which training step.
        seconds: How long.
        every: After how many steps again; 0 for only once.
    """

    kind: ClassVar[str] = "pause"
    example: ClassVar[str] = "pause:rank=1,at_step=60,seconds=3"
    rank: int
    at_step: int
    seconds: float = 3.0
    every: int = 0

    def __str__(self) -> str:
        again = f",every={self.every}" if self.every else ""
        return f"pause:rank={self.rank},at_step={self.at_step},seconds={self.seconds!r}{again}"

    def is_in(self, step: int) -> bool:
        """Tell whether the rank stands still in a step."""
        since = step - self.at_step
        return since == 0 or (since > 0 and self.every > 0 and since % self.every == 0)

    def words(self) -> str:
        """Say it as a sentence."""
        when = f"every {self.every} steps from step {self.at_step} on" if self.every else f"in step {self.at_step}"
        return f"rank {self.rank} stood still for {self.seconds:g} s {when}"


@dataclass(frozen=True)
class Kill:
    """A rank that is gone from one moment to the next, in its backward pass (SIGKILL).

    Args:
        rank: Who.
        at_step: In which training step.
    """

    kind: ClassVar[str] = "kill"
    example: ClassVar[str] = "kill:rank=1,at_step=60"
    rank: int
    at_step: int

    def __str__(self) -> str:
        return f"kill:rank={self.rank},at_step={self.at_step}"

    def words(self) -> str:
        """Say it as a sentence."""
        return f"rank {self.rank} was killed in step {self.at_step}"


@dataclass(frozen=True)
class Input:
    """A rank whose data loader keeps it waiting at the beginning of every step.

    Args:
        rank: Who.
        seconds: How long, per step.
        from_step: First training step of it.
    """

    kind: ClassVar[str] = "input"
    example: ClassVar[str] = "input:rank=1,seconds=0.02,from_step=40"
    rank: int
    seconds: float = 0.02
    from_step: int = 0

    def __str__(self) -> str:
        return f"input:rank={self.rank},seconds={self.seconds!r},from_step={self.from_step}"

    def words(self) -> str:
        """Say it as a sentence."""
        each = f"{1e3 * self.seconds:g} ms longer per step"
        return f"rank {self.rank} waited {each} for its input from step {self.from_step} on"


@dataclass(frozen=True)
class Uneven:
    """A rank that is given larger batches than the others; the training script asks `Injector.batch` for its size.

    Args:
        rank: Who.
        factor: How many times as many samples, more than 1.
        from_step: First training step of it.
    """

    kind: ClassVar[str] = "uneven"
    example: ClassVar[str] = "uneven:rank=1,factor=1.5,from_step=40"
    rank: int
    factor: float = 1.5
    from_step: int = 0

    def __str__(self) -> str:
        return f"uneven:rank={self.rank},factor={self.factor!r},from_step={self.from_step}"

    def words(self) -> str:
        """Say it as a sentence."""
        return f"rank {self.rank} was given {100 * (self.factor - 1):.0f} % more samples from step {self.from_step} on"


@dataclass(frozen=True)
class Hang:
    """A rank that stands in its backward pass for good: it never calls the collective that its peers are in.

    Args:
        rank: Who.
        at_step: In which training step.
    """

    kind: ClassVar[str] = "hang"
    example: ClassVar[str] = "hang:rank=1,at_step=60"
    rank: int
    at_step: int

    def __str__(self) -> str:
        return f"hang:rank={self.rank},at_step={self.at_step}"

    def words(self) -> str:
        """Say it as a sentence."""
        return f"rank {self.rank} stood still for good in the backward pass of step {self.at_step}"


@dataclass(frozen=True)
class Stop:
    """A rank whose process is stopped from outside, in its backward pass (SIGSTOP).

    Args:
        rank: Who.
        at_step: In which training step.
    """

    kind: ClassVar[str] = "stop"
    example: ClassVar[str] = "stop:rank=1,at_step=60"
    rank: int
    at_step: int

    def __str__(self) -> str:
        return f"stop:rank={self.rank},at_step={self.at_step}"

    def words(self) -> str:
        """Say it as a sentence."""
        return f"rank {self.rank} was stopped (SIGSTOP) in step {self.at_step}"


@dataclass(frozen=True)
class Diverge:
    """A rank one number of whose first parameter is changed once: from then on its replica is another model.

    Args:
        rank: Who.
        at_step: Before which training step.
        by: What is added to the number.
    """

    kind: ClassVar[str] = "diverge"
    example: ClassVar[str] = "diverge:rank=1,at_step=60,by=0.01"
    rank: int
    at_step: int
    by: float = 0.01

    def __str__(self) -> str:
        return f"diverge:rank={self.rank},at_step={self.at_step},by={self.by!r}"

    def words(self) -> str:
        """Say it as a sentence."""
        return f"one number of rank {self.rank}'s first parameter was changed by {self.by:g} before step {self.at_step}"


Fault = Slow | Input | Uneven | Pause | Hang | Stop | Diverge | Kill
LASTING = (Slow, Input, Uneven)
"""Faults that last from `from_step` on; the others happen once, in `at_step`."""
KINDS: Mapping[str, type[Fault]] = {kind.kind: kind for kind in (Slow, Input, Uneven, Pause, Hang, Stop, Diverge, Kill)}


def first_step(fault: Fault) -> int:
    """Return the first training step in which a fault makes a difference."""
    return fault.from_step if isinstance(fault, LASTING) else fault.at_step
