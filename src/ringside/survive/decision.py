"""What is decided about a step in a generation: COMMIT or ABORT, written once, and where it stands."""

from __future__ import annotations

import msgspec

from ringside.errors import UsageError
from ringside.survive.packing import Count, Digest
from ringside.survive.packing import decode as _decode
from ringside.survive.packing import encode as _encode


class Seat(msgspec.Struct, frozen=True, order=True, array_like=True):
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

    members: tuple[Seat, ...]
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
_decoder: msgspec.msgpack.Decoder[Decision] = msgspec.msgpack.Decoder(Decision)


def encode_decision(decision: Decision) -> bytes:
    """Return what is written into the register."""
    return _encode(decision)


def decode_decision(data: bytes) -> Decision:
    """Return the decision that stands in a register.

    Raises:
        RingsideError: The bytes are no decision.
    """
    return _decode(data, _decoder, "a decision")


def decision_key(tag: Tag) -> str:
    """Return the key of decide(incarnation, step, generation)."""
    return f"{tag.incarnation}/decide/{tag.step}/{tag.generation}"


__all__ = ["Abort", "Commit", "Decision", "Seat", "Tag", "decision_key", "decode_decision", "encode_decision"]
