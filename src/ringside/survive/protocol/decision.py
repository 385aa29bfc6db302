"""What is decided about a step in a generation: COMMIT or ABORT, written once, and the register where it stands."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec.structs import replace

from ringside.decoding import UNDECODABLE
from ringside.errors import RingsideError, UsageError
from ringside.survive.cluster.registers import Registers

# -------------------------------------------------------------------------------------------------
# Records in registers: MessagePack, bounded, and refused with one clear line where they are anything else.

MOST_BYTES = 1 << 20
"""A generation of 24,576 members takes a quarter of it."""
T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Digest = Annotated[str, msgspec.Meta(max_length=128)]

encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes, kind: type[T], name: str) -> T:
    """Return the record of a kind that bytes stand for.

    Raises:
        RingsideError: They are too many, or no such record.
    """
    if len(data) > MOST_BYTES:
        raise RingsideError(f"{name} of {len(data)} bytes is not one of ours: is the store shared with another job?")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise RingsideError(
            f"{name} cannot be read ({error}): another job, or another version of ringside, uses this store"
        ) from None


class MemberId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One process in its time as a rank.

    Args:
        rank: The rank.
        epoch: Counts the processes that claimed this rank in the incarnation, and times they came back; never reused.
    """

    rank: Count
    epoch: Count

    def __str__(self) -> str:
        return f"rank {self.rank} (epoch {self.epoch})"


class Tag(msgspec.Struct, frozen=True, order=True, array_like=True):
    """What every message says it belongs to; two messages with one tag belong to one attempt at one step.

    Args:
        incarnation: Counts resumptions from a checkpoint.
        generation: Counts changes of the membership in an incarnation, from 1.
        step: The training step, from 0.
        attempt: How often the generations before this one began the same step in vain.
    """

    incarnation: Count
    generation: Count
    step: Count
    attempt: Count

    def __str__(self) -> str:
        return f"step {self.step} in generation {self.generation} of incarnation {self.incarnation}"


class Commit(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True):
    """The step counts: every member holds a private copy of this result.

    Args:
        members: All members of the generation, each of which acknowledged.
        first: Position of the step's first sample in the job's sequence of samples.
        samples: How many samples from there on.
        divisor: What the sums of gradients are divided by: the number of samples, or 1.
        digest: Digest of the result, equal on all members.
    """

    members: tuple[MemberId, ...]
    first: Count
    samples: Count
    divisor: Count
    digest: Digest

    def __post_init__(self) -> None:
        if not self.members or list(self.members) != sorted(set(self.members)):
            raise UsageError("a COMMIT names at least one member, each once and in order")


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """The step does not count in this generation; a later one runs it.

    Args:
        generation: Number of a later generation that stood when this was written.
    """

    generation: Count


Decision = Commit | Abort


class Decided(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is decided in one generation, in one register however many steps it lasts.

    Its steps are committed one after the other, up to one that is aborted at most: with that the generation ends. So
    the newest COMMIT stands for those before it, all of which every member has applied.

    Args:
        first: The step of the first COMMIT; 0 without one.
        position: Position of the first sample of that step. From there to the end of the newest COMMIT's samples
            nothing is left out: a COMMIT that did not begin where the one before it ended is not written.
        last: The step of the newest COMMIT; -1 without one.
        commit: The newest COMMIT; None: there is none.
        abort: What ended the generation; None: nothing has yet.
    """

    first: Count = 0
    position: Count = 0
    last: int = -1
    commit: Commit | None = None
    abort: Abort | None = None

    def __post_init__(self) -> None:
        if (self.commit is None) != (self.last < self.first):
            raise UsageError("what is decided in a generation names its newest COMMIT and the steps that it stands for")

    def answer(self, step: int) -> Decision | None:
        """Return what is decided about a step; None: nothing yet. A COMMIT of one before the newest has no digest."""
        if self.commit is not None and step <= self.last:
            return self.commit if step == self.last else replace(self.commit, digest="")
        return self.abort

    def after(self, step: int, decision: Decision) -> Decided:
        """Return what is decided once a step is that nothing was decided about."""
        if isinstance(decision, Abort):
            return replace(self, abort=decision)
        if self.commit is None:
            return replace(self, first=step, position=decision.first, last=step, commit=decision)
        if step != self.last + 1 or decision.first != self.commit.first + self.commit.samples:
            raise UsageError(
                f"step {step} from sample {decision.first} on cannot be committed after step {self.last}, "
                f"which ended before sample {self.commit.first + self.commit.samples}"
            )
        return replace(self, last=step, commit=decision)


class Decisions:
    """The decisions of a job: about each step of a generation one is written, and stays.

    Args:
        registers: The job's.
    """

    def __init__(self, registers: Registers) -> None:
        self._registers = registers
        self._seen: tuple[str, bytes | None] = ("", None)

    def decide(self, tag: Tag, decision: Decision) -> Decision:
        """Write a decision where nothing is decided; return what is decided then."""
        key = decisions_key(tag.incarnation, tag.generation)
        seen, stands = self._seen
        if seen != key or stands is None or decode_decided(stands).last != tag.step - 1:
            stands = self._registers.read(key)  # a leader knows what it wrote itself, and need not ask
        while True:
            decided = decode_decided(stands)
            answer = decided.answer(tag.step)
            if answer is not None:
                return answer
            new = encode(decided.after(tag.step, decision))
            stands = self._registers.swap(key, stands, new)
            self._seen = key, stands
            if stands == new:
                return decision

    def end(self, incarnation: int, generation: int, by: Abort) -> Decided:
        """Abort whatever step of a generation would be decided next, so that none is any more; return what stands."""
        key = decisions_key(incarnation, generation)
        stands = self._registers.read(key)
        while (decided := decode_decided(stands)).abort is None:
            stands = self._registers.swap(key, stands, encode(decided.after(decided.last + 1, by)))
        return decided

    def read(self, tag: Tag) -> Decision | None:
        """Return what is decided; None: nothing yet."""
        return decode_decided(self._registers.read(decisions_key(tag.incarnation, tag.generation))).answer(tag.step)


def decode_decided(data: bytes | None) -> Decided:
    """Return what a register says is decided; None: nothing stands there.

    Raises:
        RingsideError: The bytes are no decisions.
    """
    return Decided() if data is None else decode(data, Decided, "the decisions of a generation")


def decisions_key(incarnation: int, generation: int) -> str:
    """Return the key of a generation's decisions."""
    return f"{incarnation}/decided/{generation}"
