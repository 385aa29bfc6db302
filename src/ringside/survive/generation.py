"""Who takes part: the record that stands in an incarnation's generation register, replaced by compare-and-set only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ringside.errors import UsageError
from ringside.survive.decision import Seat, Tag
from ringside.survive.packing import Count, Digest
from ringside.survive.packing import decode as _decode
from ringside.survive.packing import encode as _encode

Link = tuple[Count, Count]


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One membership of the job.

    Args:
        incarnation: Counts resumptions from a checkpoint.
        number: Counts up by one with every change, from 1.
        step: The step that its maker was at; its first step is this one or the next.
        attempt: How many generations before this one began at the same step.
        members: The processes, by ascending rank; none: the incarnation is closed.
        owners: The rank that computes each micro-batch of every step, by number; as long as the incarnation lives.
        joining: Ranks of members that bring no state, ascending: they fetch it before they compute.
        broken: Links to go around, as (lower rank, higher rank), ascending.
        drained: Ranks that were asked to leave for good, ascending.
        left: The last process of every rank that has none now, by rank; none of them is ever a member again.
        unsettled: Generations before this one in which, for all its maker knows, a step could still be committed, as
            (number, step they were made at), ascending. Whoever gives an incarnation up has to fence them off.
        over: Closed because the job is at its end: every member has kept the final state.
        last: How many steps the job has, where a rank has ended it before the last one; None: as many as was said.
        final: Digest of the final state; "": it is not over.
        without: Ranks that have not got the final state and are not awaited, ascending.

    Raises:
        UsageError: Members are not in order, or somebody else owns a micro-batch.
    """

    incarnation: Count
    number: Count
    step: Count
    attempt: Count = 0
    members: tuple[Seat, ...] = ()
    owners: tuple[Count, ...] = ()
    joining: tuple[Count, ...] = ()
    broken: tuple[Link, ...] = ()
    drained: tuple[Count, ...] = ()
    left: tuple[Seat, ...] = ()
    unsettled: tuple[tuple[Count, Count], ...] = ()
    over: bool = False
    last: Count | None = None
    final: Digest = ""
    without: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        ranks = list(self.ranks)
        if ranks != sorted(set(ranks)) or not set(self.owners) <= set(ranks):
            raise UsageError("a generation needs members by ascending rank, who own all of its micro-batches")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks, ascending."""
        return tuple(seat.rank for seat in self.members)

    @property
    def epochs(self) -> dict[int, int]:
        """By rank, the epoch of the last process that was a member: who comes must have a later one."""
        return {seat.rank: seat.epoch for seat in (*self.left, *self.members)}

    @property
    def closed(self) -> bool:
        """Whether nobody takes part any more."""
        return not self.members

    @property
    def leader(self) -> Seat:
        """The member that counts acknowledgements and writes COMMIT: the lowest rank."""
        return self.members[0]

    @property
    def holders(self) -> tuple[Seat, ...]:
        """The members that brought state."""
        return tuple(seat for seat in self.members if seat.rank not in self.joining)

    def tag(self, step: int) -> Tag:
        """Return what messages about a step say in this generation."""
        return Tag(self.incarnation, self.number, step, self.attempt)

    def micro_batches_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the micro-batches that a member computes in every step, ascending."""
        return tuple(number for number, owner in enumerate(self.owners) if owner == rank)


def dealt(owners: Sequence[int], quotas: Mapping[int, int]) -> tuple[int, ...]:
    """Return who computes which micro-batch: everybody keeps what they had, as far as the quotas go.

    So survivors compute of a step only what the dead rank owed; what they have done already stays theirs.

    Args:
        owners: The rank of each micro-batch until now; ranks without a quota give all of theirs away.
        quotas: Whole numbers by rank; their sum is the number of micro-batches.

    Raises:
        UsageError: The quotas' sum is another.
    """
    if sum(quotas.values()) != len(owners):
        raise UsageError(f"quotas {dict(quotas)} do not add up to {len(owners)} micro-batches")
    left = dict(quotas)
    kept: list[int | None] = []
    for owner in owners:
        stays = left.get(owner, 0) > 0
        if stays:
            left[owner] -= 1
        kept.append(owner if stays else None)
    spare = (rank for rank in sorted(left) for _ in range(left[rank]))
    return tuple(next(spare) if owner is None else owner for owner in kept)


_decoder = msgspec.msgpack.Decoder(Generation)


def encode_generation(generation: Generation) -> bytes:
    """Return what is written into the register."""
    return _encode(generation)


def decode_generation(data: bytes) -> Generation:
    """Return the generation that stands in a register.

    Raises:
        RingsideError: The bytes are no generation.
    """
    return _decode(data, _decoder, "a generation")


def generation_key(incarnation: int) -> str:
    """Return the key of an incarnation's generation register."""
    return f"{incarnation}/generation"


__all__ = ["Generation", "dealt", "decode_generation", "encode_generation", "generation_key"]
