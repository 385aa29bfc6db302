"""Which generation should follow: a pure function of the one that stands and of what a member wishes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ringside.survive.decision import Seat
from ringside.survive.generation import Generation, Link, dealt
from ringside.survive.settings import Quotas


@dataclass(frozen=True)
class Wishes:
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

    suspects: frozenset[Seat] = field(default_factory=frozenset)
    newcomers: frozenset[Seat] = field(default_factory=frozenset)
    drains: frozenset[int] = field(default_factory=frozenset)
    broken: frozenset[Link] = field(default_factory=frozenset)
    quotas: tuple[tuple[int, int], ...] = ()
    again: bool = False
    ends: bool = False

    def lost(self, base: Generation) -> frozenset[Seat]:
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

    def arriving(self, base: Generation) -> frozenset[Seat]:
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

    def left_after(self, base: Generation) -> Wishes:
        """Return what is still wished for once a generation stands."""
        epochs = base.epochs
        waiting = frozenset(new for new in self.newcomers if new.epoch > epochs.get(new.rank, -1))
        quotas = self.quotas if self._wants_other_quotas(base) else ()
        suspects = self.suspects & (waiting | set(base.members))
        broken = frozenset(link for link in self.broken - set(base.broken) if set(base.ranks).issuperset(link))
        ends = self.ends and base.last is None
        return Wishes(suspects, waiting, self.drains - set(base.drained), broken, quotas, ends=ends)

    def quotas_of(self, ranks: tuple[int, ...], owners: tuple[int, ...], share_out: Quotas) -> dict[int, int]:
        """Return how many micro-batches each of some ranks takes."""
        return self._quotas_for(ranks) or dict(zip(ranks, share_out(ranks, len(owners)), strict=True))

    def _wants_other_quotas(self, base: Generation) -> bool:
        wanted = self._quotas_for(base.ranks)
        return any(base.owners.count(rank) != quota for rank, quota in wanted.items())

    def _quotas_for(self, ranks: tuple[int, ...]) -> dict[int, int]:
        return dict(self.quotas) if tuple(sorted(rank for rank, _ in self.quotas)) == ranks else {}


def successor(base: Generation, wishes: Wishes, step: int | None, settled: bool, share_out: Quotas) -> Generation:
    """Return the generation that follows `base`.

    Args:
        base: What stands; its successor has the next number.
        wishes: What is to change.
        step: The step that the maker is at; None: it has no state.
        settled: The maker has state and `base` is in force for it: in no generation before can a step be committed.
        share_out: Gives quotas where the wishes name none.
    """
    arriving = wishes.arriving(base)
    leaving = wishes.lost(base) | {seat for seat in base.members if seat.rank in wishes.drains}
    members = tuple(sorted((set(base.members) - leaving) | arriving))
    ranks = tuple(seat.rank for seat in members)
    same = set(ranks) == set(base.ranks) and not wishes.quotas
    at = base.step if step is None else step
    last = step if wishes.ends and settled and base.last is None else base.last
    quotas = wishes.quotas_of(ranks, base.owners, share_out)
    return Generation(
        incarnation=base.incarnation,
        number=base.number + 1,
        step=at,
        attempt=base.attempt + 1 if at == base.step else 0,
        members=members,
        owners=base.owners if same or not ranks else dealt(base.owners, quotas),
        joining=_joining(base, members, arriving, worked=settled and at > base.step + 1),
        broken=_broken(base, wishes, {seat.rank for seat in set(members) & set(base.members)}),
        drained=tuple(sorted(set(base.drained) | wishes.drains)) if last is None else (),
        left=tuple(Seat(rank, epoch) for rank, epoch in sorted(base.epochs.items()) if rank not in ranks),
        unsettled=unsettled_after(base, settled),
        last=last,
    )


def closing(base: Generation, settled: bool) -> Generation:
    """Return the record that gives an incarnation up after `base`: nobody takes part any more."""
    return Generation(base.incarnation, base.number + 1, base.step, unsettled=unsettled_after(base, settled))


def ending(base: Generation, last: int, final: str, ranks: int) -> Generation:
    """Return the record that ends the job after `base`: all of its members have kept the final state.

    Args:
        base: What stands.
        last: How many steps the job has.
        final: Digest of the final state.
        ranks: How many ranks the job was started with.
    """
    without = tuple(rank for rank in range(ranks) if rank not in base.ranks)
    return Generation(base.incarnation, base.number + 1, last, over=True, last=last, final=final, without=without)


def unsettled_after(base: Generation, settled: bool) -> tuple[tuple[int, int], ...]:
    """Return the generations up to `base` in which a step could still be committed."""
    return (*(() if settled else base.unsettled), (base.number, base.step))


def _broken(base: Generation, wishes: Wishes, staying: set[int]) -> tuple[Link, ...]:
    """Return the links to go around: those of a process that has gone say nothing of the one that comes."""
    return tuple(link for link in sorted(set(base.broken) | wishes.broken) if staying.issuperset(link))


def _joining(base: Generation, members: Iterable[Seat], arriving: frozenset[Seat], worked: bool) -> tuple[int, ...]:
    """Return who brings no state: once a step was committed in a generation, all of its members had it."""
    before = () if worked else base.joining
    return tuple(seat.rank for seat in members if seat in arriving or seat.rank in before)


__all__ = ["Wishes", "closing", "ending", "successor", "unsettled_after"]
