"""What a member of a job is told: the events of the state machine in `__init__.py`, plain values.

Whoever carries messages between processes carries `Acknowledgement`, `RankOffered` and `MemberId` (of those who ask to
join); everything else is made by the driver that runs on the same process.
"""

from __future__ import annotations

import msgspec

from ringside.survive.protocol.decision import Decision, Digest, MemberId, Tag
from ringside.survive.protocol.generation import Generation, Link


class Acknowledgement(msgspec.Struct, frozen=True, array_like=True):
    """A message: this member holds a private copy of the result and keeps it until a decision stands.

    Args:
        tag: The attempt.
        seat: Who says so.
        digest: Digest of the copy.
        state: Digest of the state that the step began with; "" where it was not asked for.
    """

    tag: Tag
    seat: MemberId
    digest: Digest
    state: Digest = ""


class RankOffered(msgspec.Struct, frozen=True, array_like=True):
    """A message: a joining member may fetch the state from this one.

    Args:
        tag: Names the generation and the step that the state begins.
        seat: Who has it.
        digest: Digest of the state.
    """

    tag: Tag
    seat: MemberId
    digest: Digest


class Event(msgspec.Struct, frozen=True):
    """Something that a member is told."""


class Started(Event, frozen=True):
    """The process is up.

    Args:
        now: Time, seconds, on any clock that only goes forward.
        step: The next step that its state is good for; None: it has no state and asks to join.
        founders: All processes that begin the incarnation together, by ascending rank; (): join what there is.
    """

    now: float
    step: int | None = None
    founders: tuple[MemberId, ...] = ()


class Tick(Event, frozen=True):
    """Time has passed: send it a few times per `Settings.retry_s`, and while anything is waited for.

    Args:
        now: Time, seconds.
    """

    now: float


class GenerationRead(Event, frozen=True):
    """The answer to `ReadGeneration` and to `ProposeGeneration`.

    Args:
        generation: What stands in the register; None: nothing.
    """

    generation: Generation | None


class DecisionRead(Event, frozen=True):
    """The answer to `ReadDecision`, `TryCommit` and `TryAbort`.

    Args:
        tag: What was asked.
        decision: What stands in the register; None: nothing.
    """

    tag: Tag
    decision: Decision | None


class GenerationEnded(Event, frozen=True):
    """The answer to `EndGeneration`: nothing is decided in it any more.

    Args:
        number: Which.
    """

    number: int


class StoreLost(Event, frozen=True):
    """The registers cannot be reached any more."""


class WorkDone(Event, frozen=True):
    """The gradients of all of this member's micro-batches are summed.

    Args:
        tag: The attempt.
    """

    tag: Tag


class ResultReady(Event, frozen=True):
    """The exchange is done, and its result is copied to memory that nobody else can write.

    Args:
        tag: The attempt.
        digest: Digest of the copy.
        state: Digest of the state the step began with, where `Compute.check_state` asked for it.
    """

    tag: Tag
    digest: Digest
    state: Digest = ""


class AttemptFailed(Event, frozen=True):
    """The exchange cannot be finished.

    Args:
        tag: The attempt.
        suspects: Who is dead or does not answer; (): it is not known, and the same members try again.
        broken: Links that carry nothing though both ends live, (lower rank, higher rank).
    """

    tag: Tag
    suspects: tuple[MemberId, ...] = ()
    broken: tuple[Link, ...] = ()


class AckSeen(Event, frozen=True):
    """An acknowledgement came.

    Args:
        ack: The message.
    """

    ack: Acknowledgement


class PeerSuspected(Event, frozen=True):
    """A process is dead, or silent by every way there is (not only by one link: that is `AttemptFailed.broken`).

    Args:
        seat: Which.
    """

    seat: MemberId


class JoinRequested(Event, frozen=True):
    """A process without state wants to be a member.

    Args:
        seat: Which; an older epoch of the same rank is dead.
    """

    seat: MemberId


class StateOffered(Event, frozen=True):
    """An offer of state came.

    Args:
        offer: The message.
    """

    offer: RankOffered


class StateFetched(Event, frozen=True):
    """The state is here.

    Args:
        tag: The offer's.
        digest: Digest of what arrived, taken from it.
    """

    tag: Tag
    digest: Digest


class FetchFailed(Event, frozen=True):
    """The state could not be fetched from the one who offered it.

    Args:
        tag: The offer's.
    """

    tag: Tag


class NobodyLeft(Event, frozen=True):
    """No member that holds state lives any more, as far as this process can find out."""


class StateKept(Event, frozen=True):
    """The final state lies where it outlives this process.

    Args:
        tag: The attempt at the step after the last one, which is never made.
        digest: Digest of the state.
    """

    tag: Tag
    digest: Digest


class EndWanted(Event, frozen=True):
    """The job is to end before its last step, with the state that this member has."""


class RanksGone(Event, frozen=True):
    """Some ranks have no process any more, and nobody starts another one.

    Args:
        ranks: All of them, ascending.
    """

    ranks: tuple[int, ...]


class DrainWanted(Event, frozen=True):
    """A rank is alive but not worth waiting for.

    Args:
        rank: Which.
    """

    rank: int


class QuotasWanted(Event, frozen=True):
    """Micro-batches are to be shared out otherwise.

    Args:
        quotas: (rank, how many) of every member; ignored if the members are others by then.
    """

    quotas: tuple[tuple[int, int], ...]
