"""A generation's exchange on one host: sums in arenas, acknowledgements and the decision's bell in their words."""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import NDArray

from ringside.errors import RingsideError
from ringside.survive.decision import Seat, Tag
from ringside.survive.events import Acknowledgement
from ringside.survive.generation import Generation
from ringside.survive.host_sums import HostSums, Layout, Word
from ringside.survive.meeting import Meeting
from ringside.survive.phases import Phases
from ringside.survive.waiting import GaveUp, Lookout

Bytes = NDArray[np.uint8]


class HostExchange:
    """One member's end.

    Args:
        seat: This member.
        generation: Whom with.
        layout: How arenas are laid out.
        meeting: Where members say where theirs lie.
        lookout: Waits for the others.
        phases: Where this process is.
    """

    def __init__(
        self, seat: Seat, generation: Generation, layout: Layout, meeting: Meeting, lookout: Lookout, phases: Phases
    ) -> None:
        self.seat, self.generation = seat, generation
        self._seats = {member.rank: member for member in generation.members}
        self._sums = HostSums(seat.rank, layout)
        self._meeting, self._lookout, self._phases = meeting, lookout, phases
        meeting.show(generation.incarnation, generation.number, seat, self._sums.address)

    @property
    def slots(self) -> list[Bytes]:
        """Where this member's gradients go, in the order of its layout."""
        return self._sums.slots

    def run(self, step: int, into: Bytes) -> None:
        """All-reduce what the slots hold into private memory, uint8 [size_bytes].

        Raises:
            GaveUp, Superseded: It cannot be finished.
        """
        self._meet_all()
        self._phases.reached("before_send")
        self._sums.say(Word.READY, step + 1)
        self._phases.reached("after_send")
        self._await(Word.READY, step)
        self._sums.add_up(lambda: self._phases.reached("mid_chunk"))
        self._sums.say(Word.SUMMED, step + 1)
        self._phases.reached("after_sum")
        self._await(Word.SUMMED, step)
        self._sums.collect(into)

    def tell_own(self, seconds: float) -> None:
        """Say what a micro-batch took here, seconds."""
        self._sums.say(Word.OWN_NS, int(1e9 * seconds))

    def own_times(self) -> dict[int, float]:
        """Return what a micro-batch took every member that has said so, seconds."""
        said = {rank: 1e-9 * self._sums.heard(rank, Word.OWN_NS) for rank in self._sums.views}
        return {rank: seconds for rank, seconds in said.items() if seconds > 0}

    def acknowledge(self, ack: Acknowledgement) -> None:
        """Show an acknowledgement to all members."""
        self._sums.say(Word.DIGEST, int(ack.digest, 16))
        self._sums.say(Word.STATE, int(ack.state or "0", 16))
        self._sums.say(Word.ACKNOWLEDGED, ack.tag.step + 1)

    def acknowledgements(self, tag: Tag, checked: bool) -> list[Acknowledgement]:
        """Return the acknowledgements that the others show for an attempt.

        Args:
            tag: The attempt.
            checked: Whether digests of the state belong to them.
        """
        met = [rank for rank in self._seats if rank != self.seat.rank and self._meets(rank)]
        return [self._shown(rank, tag, checked) for rank in met if self._has(rank, Word.ACKNOWLEDGED, tag.step)]

    def ring(self, step: int) -> None:
        """Tell the members that a step is decided, so that they read how."""
        self._sums.say(Word.DECIDED, step + 1)

    def rung(self, step: int) -> bool:
        """Tell whether the leader says that a step is decided."""
        leader = self.generation.leader.rank
        return leader in self._sums.views and self._has(leader, Word.DECIDED, step)

    def close(self) -> None:
        """Let go of all memory."""
        self._sums.close()

    def _meet_all(self) -> None:
        for rank, seat in self._seats.items():
            if rank not in self._sums.views:
                self._lookout.wait(lambda seat=seat: self._unmet(seat))  # type: ignore[misc]

    def _meets(self, rank: int) -> bool:
        """Tell whether a member's memory can be read; after the last step nobody has waited for that."""
        with contextlib.suppress(GaveUp):  # its death is noticed otherwise
            return rank in self._sums.views or not self._unmet(self._seats[rank])
        return False

    def _unmet(self, seat: Seat) -> list[Seat]:
        address = self._meeting.shown(self.generation.incarnation, self.generation.number, seat)
        if address is None:
            return [seat]
        try:
            self._sums.meet(seat.rank, address)
        except RingsideError:
            raise GaveUp(seat) from None
        return []

    def _await(self, word: Word, step: int) -> None:
        self._lookout.wait(lambda: [self._seats[rank] for rank in self._sums.silent(word, step + 1)])

    def _has(self, rank: int, word: Word, step: int) -> bool:
        return self._sums.heard(rank, word) == step + 1

    def _shown(self, rank: int, tag: Tag, checked: bool) -> Acknowledgement:
        digest, state = (f"{self._sums.heard(rank, word):016x}" for word in (Word.DIGEST, Word.STATE))
        return Acknowledgement(tag, self._seats[rank], digest, state if checked else "")


def own_slots(generation: Generation, rank: int, per_micro_batch: bool) -> tuple[int, ...]:
    """Return what a member's slots hold, as numbers in the order of addition: micro-batches, or all of a rank's."""
    mine = generation.micro_batches_of(rank)
    return mine if per_micro_batch else (rank,) if mine else ()


__all__ = ["HostExchange", "own_slots"]
