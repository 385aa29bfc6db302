"""Who takes part: the record that stands in an incarnation's generation register, replaced by compare-and-set only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ringside.errors import UsageError
from ringside.survive.protocol.decision import Count, Digest, MemberId, Tag, decode
from ringside.survive.protocol.settings import equal_quotas

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
    members: tuple[MemberId, ...] = ()
    owners: tuple[Count, ...] = ()
    joining: tuple[Count, ...] = ()
    broken: tuple[Link, ...] = ()
    drained: tuple[Count, ...] = ()
    left: tuple[MemberId, ...] = ()
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
    def leader(self) -> MemberId:
        """The member that counts acknowledgements and writes COMMIT: the lowest rank."""
        return self.members[0]

    @property
    def holders(self) -> tuple[MemberId, ...]:
        """The members that brought state."""
        return tuple(seat for seat in self.members if seat.rank not in self.joining)

    def tag(self, step: int) -> Tag:
        """Return what messages about a step say in this generation."""
        return Tag(self.incarnation, self.number, step, self.attempt)

    def micro_batches_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the micro-batches that a member computes in every step, ascending."""
        return tuple(number for number, owner in enumerate(self.owners) if owner == rank)


def assign_micro_batches(owners: Sequence[int], quotas: Mapping[int, int]) -> tuple[int, ...]:
    """Return which rank computes which micro-batch: every rank keeps what it had, as far as the quotas go.

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
    kept: list[int | None] = []  # None: the owner has gone, or its quota is used up
    for owner in owners:
        stays = left.get(owner, 0) > 0
        if stays:
            left[owner] -= 1
        kept.append(owner if stays else None)
    # What nobody keeps goes to those with quota left, the lowest rank first.
    spare = (rank for rank in sorted(left) for _ in range(left[rank]))
    return tuple(next(spare) if owner is None else owner for owner in kept)


def decode_generation(data: bytes | None) -> Generation | None:
    """Return the generation that stands in a register; None: nothing stands there.

    Raises:
        RingsideError: The bytes are no generation.
    """
    return None if data is None else decode(data, Generation, "a generation")


def generation_key(incarnation: int) -> str:
    """Return the key of an incarnation's generation register."""
    return f"{incarnation}/generation"


# -------------------------------------------------------------------------------------------------
# Which generation should follow: a pure function of the one that stands and of what a member would change.


@dataclass(frozen=True)
class MembershipChange:
    """What a member would change in the membership.

    Args:
        suspects: Processes that are dead or silent.
        newcomers: Processes that asked to join; each stands for the death of older ones of its rank.
        drains: Ranks that are to leave for good.
        broken: Links to go around.
        quotas: (rank, micro-batches) of every member; (): as it comes.
        again: The same members shall try once more.
        ends: The job shall end with the step at hand, and whoever was drained come back for the final state.
    """

    suspects: frozenset[MemberId] = field(default_factory=frozenset)
    newcomers: frozenset[MemberId] = field(default_factory=frozenset)
    drains: frozenset[int] = field(default_factory=frozenset)
    broken: frozenset[Link] = field(default_factory=frozenset)
    quotas: tuple[tuple[int, int], ...] = ()
    again: bool = False
    ends: bool = False

    def lost(self, base: Generation) -> frozenset[MemberId]:
        """Return the members that are no more."""
        reborn = {new.rank: new.epoch for new in self.newcomers}
        replaced = {seat for seat in base.members if seat.epoch < reborn.get(seat.rank, 0)}
        return frozenset((self.suspects & set(base.members)) | replaced)

    def urgent(self, base: Generation) -> bool:
        """Tell whether the step at hand cannot be finished in this generation."""
        return self.again or bool(self.lost(base) or self.broken - set(base.broken))

    def patient(self, base: Generation) -> bool:
        """Tell whether something is to change that can wait until a step is done."""
        return bool(self.arriving(base) or self.drains & set(base.ranks) or self._wants_other_quotas(base))

    def arriving(self, base: Generation) -> frozenset[MemberId]:
        """Return the newcomers that are not members yet and were not asked to leave: the last process of each rank."""
        latest = {seat.rank: seat for seat in sorted(self.newcomers)}
        epochs = base.epochs
        return frozenset(
            seat
            for seat in latest.values()
            if seat.epoch > epochs.get(seat.rank, -1)
            and seat not in self.suspects
            and seat.rank not in self.drains.union(base.drained)
        )

    def left_after(self, base: Generation) -> MembershipChange:
        """Return what is still to be changed once a generation stands."""
        epochs = base.epochs
        waiting = frozenset(new for new in self.newcomers if new.epoch > epochs.get(new.rank, -1))
        quotas = self.quotas if self._wants_other_quotas(base) else ()
        suspects = self.suspects & (waiting | set(base.members))
        broken = frozenset(link for link in self.broken - set(base.broken) if set(base.ranks).issuperset(link))
        ends = self.ends and base.last is None
        return MembershipChange(suspects, waiting, self.drains - set(base.drained), broken, quotas, ends=ends)

    def _wants_other_quotas(self, base: Generation) -> bool:
        wanted = self.quotas_for(base.ranks)
        return any(base.owners.count(rank) != quota for rank, quota in wanted.items())

    def quotas_for(self, ranks: tuple[int, ...]) -> dict[int, int]:
        """Return how many micro-batches each of some ranks is to take; {}: that is not said of just these."""
        return dict(self.quotas) if tuple(sorted(rank for rank, _ in self.quotas)) == ranks else {}


def successor(base: Generation, change: MembershipChange, step: int | None, settled: bool) -> Generation:
    """Return the generation that follows `base`.

    Args:
        base: What stands; its successor has the next number.
        change: What is to change.
        step: The step that the maker is at; None: it has no state.
        settled: The maker has state and `base` is in force for it: in no generation before can a step be committed.
    """
    arriving = change.arriving(base)
    leaving = change.lost(base) | {seat for seat in base.members if seat.rank in change.drains}
    members = tuple(sorted((set(base.members) - leaving) | arriving))
    ranks = tuple(seat.rank for seat in members)

    # Ownership of micro-batches stays where it can: what survivors have computed of the step is used again.
    same = set(ranks) == set(base.ranks) and not change.quotas
    owners = base.owners
    if ranks and not same:
        equal = equal_quotas(ranks, len(base.owners))
        owners = assign_micro_batches(base.owners, change.quotas_for(ranks) or dict(zip(ranks, equal, strict=True)))

    # Who brings no state. Once a step was committed in `base`, all of its members had it: they acknowledged.
    begins = base.step if step is None else step
    committed_in_base = settled and begins > base.step + 1
    without_state = () if committed_in_base else base.joining
    joining = tuple(seat.rank for seat in members if seat in arriving or seat.rank in without_state)

    # A link is gone around while both of its processes stay; of a process that has gone it means nothing any more.
    staying = {seat.rank for seat in set(members) & set(base.members)}
    broken = tuple(link for link in sorted(set(base.broken) | change.broken) if staying.issuperset(link))

    last = step if change.ends and settled and base.last is None else base.last
    return Generation(
        incarnation=base.incarnation,
        number=base.number + 1,
        step=begins,
        attempt=base.attempt + 1 if begins == base.step else 0,
        members=members,
        owners=owners,
        joining=joining,
        broken=broken,
        drained=tuple(sorted(set(base.drained) | change.drains)) if last is None else (),
        left=tuple(MemberId(rank, epoch) for rank, epoch in sorted(base.epochs.items()) if rank not in ranks),
        unsettled=(*(() if settled else base.unsettled), (base.number, base.step)),
        last=last,
    )


def closing(base: Generation) -> Generation:
    """Return the record that gives an incarnation up after `base`: nobody takes part any more."""
    unsettled = (*base.unsettled, (base.number, base.step))
    return Generation(base.incarnation, base.number + 1, base.step, unsettled=unsettled)


def ending(base: Generation, last: int, final: str, without: tuple[int, ...]) -> Generation:
    """Return the record that ends the job after `base`: all of its members have kept the final state.

    Args:
        base: What stands.
        last: How many steps the job has.
        final: Digest of the final state.
        without: Ranks that have not got it.
    """
    return Generation(base.incarnation, base.number + 1, last, over=True, last=last, final=final, without=without)
