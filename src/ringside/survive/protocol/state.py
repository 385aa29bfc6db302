"""What a member knows, and what it is about: plain attributes, and what can be read off them."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import MemberId, Tag
from ringside.survive.protocol.generation import Generation, MembershipChange
from ringside.survive.protocol.settings import ProtocolSettings

Instructions = list[i.Instruction]


class MemberPhase(Enum):
    """What a member is about."""

    OUTSIDE = "outside"  # no member (yet)
    FETCHING = "fetching"  # a member without state
    WORKING = "working"  # computes its micro-batches
    EXCHANGING = "exchanging"  # all-reduces
    VOTING = "voting"  # has a private copy, waits for the decision
    RESOLVING = "resolving"  # a later generation stands; settles its step in its own
    FENCING = "fencing"  # gives an incarnation up
    KEEPING = "keeping"  # has applied the last step, keeps the final state
    CLOSING = "closing"  # has kept it, waits until every rank has
    ENDED = "ended"


class MemberState:
    """Where one process of one incarnation stands.

    Its attributes are values that are replaced, never changed in place: `copy.copy` makes an independent one.

    Args:
        seat: Which process.
        incarnation: Which incarnation of the job.
        settings: Equal on all members.

    Attributes:
        phase: What it is about.
        generation: The generation in force for it; None: none yet.
        newest: The newest generation it has read of.
        step: The next step its state is good for; None: no state.
        own: Its acknowledgement of the private copy it holds; None: it holds none.
        acks: The newest acknowledgement of every member.
        change: What it would change in the membership.
        founders: All processes that begin the incarnation together; (): it joins what there is.
        entered_at: The step at which it entered the generation in force; -1: it has entered none.
        offer: The offer of state that it takes up; None: none.
        fence: Of a closed incarnation that it gives up, the generations still to be ended; None: it does not (yet).
        proposal: The generation it has proposed last, since it read of another or asked again; None: none.
        now: The time it was told last, seconds.
        since: When it came into its phase, where that matters, seconds.
        asked: When it last asked again, seconds.
        unanswered: Since when a register owes it an answer, seconds; None: none does.
        gone: Ranks that do not come any more.
    """

    def __init__(self, seat: MemberId, incarnation: int, settings: ProtocolSettings) -> None:
        self.seat, self.incarnation, self.settings = seat, incarnation, settings
        self.phase = MemberPhase.OUTSIDE
        self.generation: Generation | None = None
        self.newest: Generation | None = None
        self.step: int | None = None
        self.own: e.Acknowledgement | None = None
        self.acks: dict[MemberId, e.Acknowledgement] = {}
        self.change = MembershipChange()
        self.founders: tuple[MemberId, ...] = ()
        self.entered_at = -1
        self.offer: e.RankOffered | None = None
        self.fence: tuple[int, ...] | None = None
        self.proposal: Generation | None = None
        self.now = self.since = self.asked = 0.0
        self.unanswered: float | None = None
        self.gone: frozenset[int] = frozenset()

    @property
    def last(self) -> int | None:
        """How many steps the job has; None: it has no end."""
        record = self.generation
        return self.settings.steps if record is None or record.last is None else record.last

    @property
    def has_last(self) -> bool:
        """Whether its state is the final one."""
        return self.step is not None and self.last is not None and self.step >= self.last

    @property
    def tag(self) -> Tag | None:
        """The attempt it is at: what messages of its own say, and what messages of others must say."""
        if self.phase is MemberPhase.FETCHING:
            return None if self.offer is None else self.offer.tag
        return None if self.generation is None or self.step is None else self.generation.tag(self.step)

    @property
    def members(self) -> tuple[MemberId, ...]:
        """Whom it takes part with, itself among them."""
        return () if self.generation is None else self.generation.members

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """The job's ranks that no member has."""
        present = {seat.rank for seat in self.members}
        return tuple(rank for rank in range(self.settings.ranks) if rank not in present)

    @property
    def is_leader(self) -> bool:
        """Whether it counts acknowledgements in the generation in force."""
        return self.generation is not None and self.is_own(self.generation.leader)

    @property
    def is_settled(self) -> bool:
        """Whether it has state and the newest generation it knows is in force for it."""
        return self.step is not None and self.generation is not None and self.generation == self.newest

    def is_own(self, seat: MemberId) -> bool:
        """Tell whether a seat is this process's."""
        return seat == self.seat

    def is_among(self, seats: tuple[MemberId, ...]) -> bool:
        """Tell whether one of some seats is this process's."""
        return any(self.is_own(seat) for seat in seats)

    def suspect(self, *seats: MemberId) -> None:
        """Wish to go on without some processes; nobody suspects himself."""
        others = {seat for seat in seats if not self.is_own(seat)}
        self.change = replace(self.change, suspects=self.change.suspects | others)

    def enter_phase(self, phase: MemberPhase) -> None:
        """Come into a phase, now."""
        self.phase, self.since = phase, self.now

    def end(self, last: i.Instruction) -> Instructions:
        """Come to the end, with a last instruction."""
        self.phase = MemberPhase.ENDED
        return [last]
