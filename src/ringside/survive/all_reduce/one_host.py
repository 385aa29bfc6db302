"""All-reduce among the workers of one host by pulling: everybody reads everybody's arena, nobody writes another's.

An arena holds a few words, the gradients this rank computed (one per slot) and the slice of the sum that it made:

1.  Write the gradients into the own slots, then say READY.
2.  When all are READY, add up the own slice of all slots of all ranks, then say SUMMED.
3.  When all have SUMMED, copy everybody's slice into private memory and take its digest: that is what a rank
    acknowledges.

Slots are added up in the order of what they hold. With a slot per micro-batch the sum is ((g0 + g1) + g2) + ... in the
order of micro-batches, whoever computed them, so the bits do not depend on the number of ranks. What was written is
left alone until the step is decided: nobody overwrites what another may still read.

Words are 64 bits, aligned, written by one process; `_fence` orders them behind the data on machines that reorder
stores (Arm). Readers check a step's number, so what an earlier step left is never taken for an answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from ringside.engine.transports.base import Bytes
from ringside.errors import RingsideError
from ringside.survive.all_reduce.gradients import AttemptRun, add_up, slice_of
from ringside.survive.cluster.failpoints import Failpoints
from ringside.survive.cluster.peers import GaveUp, PeerWait
from ringside.survive.cluster.rendezvous import Rendezvous
from ringside.survive.cluster.shared_memory import Address, OwnArena, read_only
from ringside.survive.protocol.decision import MemberId, Tag
from ringside.survive.protocol.events import Acknowledgement
from ringside.survive.protocol.generation import Generation

HEADER_BYTES = 4096
_LINE_WORDS = 8  # a cache line each
_lock = threading.Lock()


class AttemptWord(IntEnum):
    """What a rank says in its arena; the value is a step's number plus one, a digest, or own time per micro-batch."""

    READY = 0
    SUMMED = 1
    DIGEST = 2
    STATE = 3
    ACKNOWLEDGED = 4
    DECIDED = 5
    OWN_NS = 6


@dataclass(frozen=True)
class HostLayout:
    """How the arenas of a generation are laid out.

    Args:
        size_bytes: Of one gradient.
        runs: What lies where in it.
        slots: For every rank, which gradients it holds, as numbers that give the order of addition.
    """

    size_bytes: int
    runs: Sequence[AttemptRun]
    slots: Mapping[int, tuple[int, ...]]

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return self.size_bytes + -self.size_bytes % HEADER_BYTES

    def in_order(self, gradients: Mapping[int, Iterable[Bytes]]) -> list[Bytes]:
        """Return what all slots hold, given by rank, in the order of addition."""
        placed = [each for rank, own in gradients.items() for each in zip(self.slots[rank], own, strict=True)]
        return [gradient for _, gradient in sorted(placed, key=itemgetter(0))]


@dataclass
class HostView:
    """An arena as its layout says: of this process, or of a peer for reading."""

    words: NDArray[np.uint64]
    slots: list[Bytes]
    sums: Bytes

    @classmethod
    def of(cls, memory: Bytes, slots: int, layout: HostLayout) -> HostView:
        """Cut an arena's bytes."""
        starts = [HEADER_BYTES + layout.stride * at for at in range(slots + 1)]
        pieces = [memory[start : start + layout.size_bytes] for start in starts]
        return cls(memory[:HEADER_BYTES].view(np.uint64)[::_LINE_WORDS], pieces[:-1], pieces[-1])


@dataclass
class HostSums:
    """The arenas of one generation.

    Args:
        rank: This rank.
        layout: How they are laid out; its keys are the members.
    """

    rank: int
    layout: HostLayout
    views: dict[int, HostView] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slots = len(self.layout.slots[self.rank])
        self._arena = OwnArena(HEADER_BYTES + self.layout.stride * (slots + 1))  # behind the slots lie the sums
        self._members = sorted(self.layout.slots)
        self.address = self._arena.address
        self.views[self.rank] = HostView.of(self._arena.bytes, slots, self.layout)

    def meet(self, rank: int, address: Address) -> None:
        """Map a peer's arena; errors as `read_only`."""
        self.views[rank] = HostView.of(read_only(address), len(self.layout.slots[rank]), self.layout)

    @property
    def slots(self) -> list[Bytes]:
        """This rank's gradients, uint8 [size_bytes] each, to be written until it says READY."""
        return self.views[self.rank].slots

    def write_word(self, word: AttemptWord, value: int) -> None:
        """Say something to the peers, after all that was written before."""
        _fence()
        self.views[self.rank].words[word] = value

    def read_word(self, rank: int, word: AttemptWord) -> int:
        """Return what a rank says."""
        value = int(self.views[rank].words[word])
        _fence()
        return value

    def silent(self, word: AttemptWord, value: int) -> list[int]:
        """Return the members that have not said `value` yet."""
        return [rank for rank in self._members if self.read_word(rank, word) != value]

    def add_up(self, halfway: Callable[[], object] = int) -> None:
        """Add up this rank's slice of all gradients; everybody is READY.

        Args:
            halfway: Called when half of it is done.
        """
        sources = self.layout.in_order({rank: view.slots for rank, view in self.views.items()})
        first, last = self._slice(self.rank)
        middle = first + slice_of(last - first, 0, 2)[1]
        add_up(self.layout.runs, sources, self.views[self.rank].sums, first, middle)
        halfway()
        add_up(self.layout.runs, sources, self.views[self.rank].sums, middle, last)

    def collect(self, into: Bytes) -> None:
        """Copy everybody's slice of the sum into private memory, uint8 [size_bytes]; everybody has SUMMED."""
        for rank in self._members:
            first, last = self._slice(rank)
            into[first:last] = self.views[rank].sums[first:last]

    def close(self) -> None:
        """Let go of all arenas."""
        self.views.clear()
        self._arena.close()

    def _slice(self, rank: int) -> tuple[int, int]:
        return slice_of(self.layout.size_bytes, self._members.index(rank), len(self._members))


def _fence() -> None:
    """Order stores and loads before it against those after it: two critical sections do not overlap."""
    with _lock:
        pass
    with _lock:
        pass


# -------------------------------------------------------------------------------------------------
# A generation's exchange on one host: sums in arenas, acknowledgements and the decision's bell in their words.


@dataclass(eq=False)
class AttemptExchange:
    """One member's end of a generation's exchange, on one host or between hosts.

    Args:
        seat: This member.
        generation: Whom with.
        layout: How sums are laid out.
        rendezvous: Where members say where their arenas lie, and show acknowledgements.
        peer_wait: Waits for the others.
        failpoints: Where this process is.
    """

    seat: MemberId
    generation: Generation
    layout: HostLayout
    rendezvous: Rendezvous
    peer_wait: PeerWait
    failpoints: Failpoints


@dataclass(eq=False)
class HostExchange(AttemptExchange):
    """The end on one host; arguments as of `AttemptExchange`."""

    def __post_init__(self) -> None:
        record = self.generation
        self._seats = {member.rank: member for member in record.members}
        self._sums = HostSums(self.seat.rank, self.layout)
        self.rendezvous.publish_arena(record.incarnation, record.number, self.seat, self._sums.address)

    @property
    def slots(self) -> list[Bytes]:
        """Where this member's gradients go, in the order of its layout."""
        return self._sums.slots

    def run(self, step: int, into: Bytes) -> None:
        """All-reduce what the slots hold into private memory, uint8 [size_bytes].

        Raises:
            GaveUp, Superseded: It cannot be finished.
        """
        for rank, seat in self._seats.items():
            if rank not in self._sums.views:
                self.peer_wait.wait(lambda seat=seat: self._unmet(seat))  # type: ignore[misc]
        self.failpoints.reached("before_send")
        self._sums.write_word(AttemptWord.READY, step + 1)
        self.failpoints.reached("after_send")
        self._await(AttemptWord.READY, step)
        self._sums.add_up(lambda: self.failpoints.reached("mid_chunk"))
        self._sums.write_word(AttemptWord.SUMMED, step + 1)
        self.failpoints.reached("after_sum")
        self._await(AttemptWord.SUMMED, step)
        self._sums.collect(into)

    def publish_own_time(self, seconds: float) -> None:
        """Say what a micro-batch took here, seconds."""
        self._sums.write_word(AttemptWord.OWN_NS, int(1e9 * seconds))

    def own_times(self) -> dict[int, float]:
        """Return what a micro-batch took every member that has said so, seconds."""
        said = {rank: 1e-9 * self._sums.read_word(rank, AttemptWord.OWN_NS) for rank in self._sums.views}
        return {rank: seconds for rank, seconds in said.items() if seconds > 0}

    def acknowledge(self, ack: Acknowledgement) -> None:
        """Show an acknowledgement to all members."""
        # ACKNOWLEDGED is written last: a reader that sees it sees the digests before it.
        self._sums.write_word(AttemptWord.DIGEST, int(ack.digest, 16))
        self._sums.write_word(AttemptWord.STATE, int(ack.state or "0", 16))
        self._sums.write_word(AttemptWord.ACKNOWLEDGED, ack.tag.step + 1)

    def acknowledgements(self, tag: Tag, checked: bool) -> list[Acknowledgement]:
        """Return the acknowledgements that the others show for an attempt.

        Args:
            tag: The attempt.
            checked: Whether digests of the state belong to them.
        """
        acks = []
        for rank, seat in self._seats.items():
            if rank == self.seat.rank:
                continue
            # After the last step nobody has waited for a member that joined: its memory may not be mapped yet.
            with contextlib.suppress(GaveUp):  # its death is noticed otherwise
                is_mapped = rank in self._sums.views or not self._unmet(seat)
                if is_mapped and self._has(rank, AttemptWord.ACKNOWLEDGED, tag.step):
                    digest = f"{self._sums.read_word(rank, AttemptWord.DIGEST):016x}"
                    state = f"{self._sums.read_word(rank, AttemptWord.STATE):016x}" if checked else ""
                    acks.append(Acknowledgement(tag, seat, digest, state))
        return acks

    def announce_decision(self, step: int) -> None:
        """Tell the members that a step is decided, so that they read how."""
        self._sums.write_word(AttemptWord.DECIDED, step + 1)

    def may_be_decided(self, step: int) -> bool:
        """Tell whether the leader says that a step is decided."""
        leader = self.generation.leader.rank
        return leader in self._sums.views and self._has(leader, AttemptWord.DECIDED, step)

    def close(self) -> None:
        """Let go of all memory."""
        self._sums.close()

    def _unmet(self, seat: MemberId) -> list[MemberId]:
        address = self.rendezvous.arena_of(self.generation.incarnation, self.generation.number, seat)
        if address is None:
            return [seat]
        try:
            self._sums.meet(seat.rank, address)
        except RingsideError:
            raise GaveUp(seat) from None
        return []

    def _await(self, word: AttemptWord, step: int) -> None:
        self.peer_wait.wait(lambda: [self._seats[rank] for rank in self._sums.silent(word, step + 1)])

    def _has(self, rank: int, word: AttemptWord, step: int) -> bool:
        return self._sums.read_word(rank, word) == step + 1


def own_slots(generation: Generation, rank: int, per_micro_batch: bool) -> tuple[int, ...]:
    """Return what a member's slots hold, as numbers in the order of addition: micro-batches, or all of a rank's."""
    own = generation.micro_batches_of(rank)
    return own if per_micro_batch else (rank,) if own else ()
