"""The faults there are, each a value with its words: `slow:rank=1,factor=1.3,from_step=40`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, get_type_hints

from ringside.errors import UsageError
from ringside.text import did_you_mean, duration, percent


class _Spec:
    """Writes a fault as it is read: its kind and its fields; a number of steps between two that is 0 is left out."""

    kind: ClassVar[str]

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        return f"{self.kind}:" + ",".join(f"{name}={value!r}" for name, value in values if name != "every" or value)


@dataclass(frozen=True)
class Slow(_Spec):
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

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        return f"rank {self.rank} was made {percent(self.factor - 1)} slower from step {self.from_step} on"


@dataclass(frozen=True)
class Pause(_Spec):
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

    def is_in(self, step: int) -> bool:
        """Tell whether the rank stands still in a step."""
        since = step - self.at_step
        return since == 0 or (since > 0 and self.every > 0 and since % self.every == 0)

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        when = f"every {self.every} steps from step {self.at_step} on" if self.every else f"in step {self.at_step}"
        return f"rank {self.rank} paused for {self.seconds:g} s {when}"


@dataclass(frozen=True)
class Kill(_Spec):
    """A rank that is gone from one moment to the next, in its backward pass (SIGKILL).

    Args:
        rank: Who.
        at_step: In which training step.
    """

    kind: ClassVar[str] = "kill"
    example: ClassVar[str] = "kill:rank=1,at_step=60"
    rank: int
    at_step: int

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        return f"rank {self.rank} was killed in step {self.at_step}"


@dataclass(frozen=True)
class Input(_Spec):
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

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        each = f"{duration(self.seconds)} longer per step"
        return f"rank {self.rank} waited {each} for its input from step {self.from_step} on"


@dataclass(frozen=True)
class Uneven(_Spec):
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

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        return f"rank {self.rank} was given {percent(self.factor - 1)} more samples from step {self.from_step} on"


@dataclass(frozen=True)
class Hang(_Spec):
    """A rank that stands in its backward pass for good: it never calls the collective that its peers are in.

    Args:
        rank: Who.
        at_step: In which training step.
    """

    kind: ClassVar[str] = "hang"
    example: ClassVar[str] = "hang:rank=1,at_step=60"
    rank: int
    at_step: int

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        return f"rank {self.rank} stopped for good in the backward pass of step {self.at_step}"


@dataclass(frozen=True)
class Stop(_Spec):
    """A rank whose process is stopped from outside, in its backward pass (SIGSTOP).

    Args:
        rank: Who.
        at_step: In which training step.
    """

    kind: ClassVar[str] = "stop"
    example: ClassVar[str] = "stop:rank=1,at_step=60"
    rank: int
    at_step: int

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        return f"rank {self.rank} was stopped (SIGSTOP) in step {self.at_step}"


@dataclass(frozen=True)
class Diverge(_Spec):
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

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        return f"one number of rank {self.rank}'s first parameter was changed by {self.by:g} before step {self.at_step}"


Fault = Slow | Input | Uneven | Pause | Hang | Stop | Diverge | Kill
LASTING = (Slow, Input, Uneven)
"""Faults that last from `from_step` on; the others happen once, in `at_step`."""
KINDS: Mapping[str, type[Fault]] = {kind.kind: kind for kind in (Slow, Input, Uneven, Pause, Hang, Stop, Diverge, Kill)}


def first_step(fault: Fault) -> int:
    """Return the first training step in which a fault makes a difference."""
    return fault.from_step if isinstance(fault, LASTING) else fault.at_step


# -------------------------------------------------------------------------------------------------
# Reading a fault from words, such as `slow:rank=1,factor=1.3,from_step=40`.

MOST_FACTOR = 1000.0


def parse_fault(spec: str, ranks: int | None = None) -> Fault | None:
    """Return the fault that `spec` describes; None for `none`.

    Args:
        spec: Such as `slow:rank=1,factor=1.3,from_step=40`.
        ranks: Size of the world, where it is known; the fault's rank must be inside.

    Raises:
        UsageError: There is no such fault, or it cannot be; the message lists what exists.
    """
    name, _, rest = spec.strip().partition(":")
    if name == "none" and not rest:
        return None
    if name not in KINDS:
        raise _refused(spec, f"there is no fault {name!r}{did_you_mean(name, KINDS)}")
    kind, values = KINDS[name], dict[str, Any]()
    types = {key: hint for key, hint in get_type_hints(kind).items() if hint in (int, float)}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in types or not equals:
            raise _refused(spec, f"{name} takes {', '.join(f'{key}=' for key in types)} not {part!r}")
        if key in values:
            raise _refused(spec, f"{key} is given twice")
        try:
            number = types[key](value)
        except ValueError:
            raise _refused(spec, f"{key}={value!r} is no {'whole ' if types[key] is int else ''}number") from None
        if number < 0 or not math.isfinite(number):
            raise _refused(spec, f"{key}={value}: 0 or more, and finite")
        values[key] = number
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in values]
    if missing:
        raise _refused(spec, f"{name} needs {' and '.join(f'{key}=' for key in missing)}")

    # What a number alone cannot say.
    fault = kind(**values)
    if ranks is not None and fault.rank >= ranks:
        raise _refused(spec, f"there is no rank {fault.rank} among {ranks} ranks (0 to {ranks - 1})")
    if isinstance(fault, Slow | Uneven) and not 1 < fault.factor <= MOST_FACTOR:
        raise _refused(spec, f"a factor is more than 1 and at most {MOST_FACTOR:g}, not {fault.factor:g}")
    if isinstance(fault, Pause | Input) and fault.seconds <= 0:
        raise _refused(spec, f"{'a pause' if isinstance(fault, Pause) else 'waiting'} takes more than 0 seconds")
    if isinstance(fault, Diverge) and not fault.by:
        raise _refused(spec, "a change by 0 changes nothing")
    return fault


def _refused(spec: str, why: str) -> UsageError:
    examples = "".join(f"\n  {kind.example}" for kind in KINDS.values())
    return UsageError(f"cannot inject {spec!r}: {why}. There are:{examples}\n  none")
