"""What a member of a job is to do: the instructions of the state machine in `__init__.py`, plain values.

A driver carries them out in order. It skips `Compute`, `RunExchange` and `FetchState` whose tag is no longer
`Member.tag`, and gives up one of them that is under way once the tag has moved on.
"""

from __future__ import annotations

import msgspec

from ringside.survive.protocol.decision import Commit, Digest, MemberId, Tag
from ringside.survive.protocol.events import Acknowledgement
from ringside.survive.protocol.generation import Generation


class Instruction(msgspec.Struct, frozen=True):
    """Something that a member says is to be done."""


class ReadGeneration(Instruction, frozen=True):
    """Read the generation register; answer with `GenerationRead`."""


class ProposeGeneration(Instruction, frozen=True):
    """Compare and set the generation register; answer with `GenerationRead` of what stands then.

    Args:
        expected: What must stand there; None: nothing.
        new: What is to stand there.
    """

    expected: Generation | None
    new: Generation


class Settle(Instruction, frozen=True):
    """A generation is in force for this process: fresh arenas, connections and link order for it, none of an old one.

    Args:
        generation: The record.
        gone: Members of the generation before that are not in this one. Those on this host are killed by pidfd and
            awaited before anything they have mapped writable is used again.
    """

    generation: Generation
    gone: tuple[MemberId, ...]


class AskToJoin(Instruction, frozen=True):
    """Tell all members that this process wants to be one; repeated until it is.

    Args:
        seat: Which process.
    """

    seat: MemberId


class OfferState(Instruction, frozen=True):
    """Make this member's state available to those who join: send them an `Offer` with its digest.

    Args:
        tag: Names the generation and the step that the state begins. It stays as it is until they have it.
        joining: The ranks to tell.
    """

    tag: Tag
    joining: tuple[int, ...]


class FetchState(Instruction, frozen=True):
    """Fetch parameters, optimizer, sampler and RNG as of `tag.step`; answer with `StateFetched` or `FetchFailed`.

    Args:
        source: From whom.
        tag: The offer's.
        digest: What its digest must be.
    """

    source: MemberId
    tag: Tag
    digest: Digest


class Compute(Instruction, frozen=True):
    """Compute gradients as sums, into memory that a failed attempt can be thrown away with; answer with `WorkDone`.

    What was computed of this very step by an earlier attempt may be used again: the state and the samples are the same.

    Args:
        tag: The attempt.
        micro_batches: Numbers of this member's own, ascending; perhaps none.
        check_state: Take the digest of the state as well, for `ResultReady.state`.
    """

    tag: Tag
    micro_batches: tuple[int, ...]
    check_state: bool


class RunExchange(Instruction, frozen=True):
    """All-reduce with the members into a private copy; answer with `ResultReady` or `AttemptFailed`.

    Args:
        tag: The attempt; every message says it, and a message that says another is dropped.
        generation: Whom with, and which links to go around.
    """

    tag: Tag
    generation: Generation


class PublishAck(Instruction, frozen=True):
    """Send an acknowledgement to a member; when it is repeated, by another way (the store): a link may be broken.

    Args:
        ack: The message.
        to: The leader.
    """

    ack: Acknowledgement
    to: MemberId


class TryCommit(Instruction, frozen=True):
    """Create the decision register with COMMIT; answer with `DecisionRead` of what stands then.

    Args:
        tag: Which register.
        decision: What to write.
    """

    tag: Tag
    decision: Commit


class TryAbort(Instruction, frozen=True):
    """Create the decision register with ABORT; answer with `DecisionRead` of what stands then.

    Args:
        tag: Which register.
        generation: Number of the later generation that stands.
    """

    tag: Tag
    generation: int


class EndGeneration(Instruction, frozen=True):
    """Have ABORT stand behind all that is decided in a generation; answer with `GenerationEnded`.

    Args:
        incarnation: Of which incarnation.
        number: Which.
        by: Number of the later generation that stands.
    """

    incarnation: int
    number: int
    by: int


class ReadDecision(Instruction, frozen=True):
    """Read the decision register; answer with `DecisionRead`. It may wait a little for something to stand there.

    Args:
        tag: Which register.
    """

    tag: Tag


class Apply(Instruction, frozen=True):
    """Take the private copy, divide it, and make the optimizer's step; then the state begins the next step.

    Args:
        tag: The attempt whose copy it is.
        decision: COMMIT as it was read.
    """

    tag: Tag
    decision: Commit


class Discard(Instruction, frozen=True):
    """Throw sums and private copy of an attempt away: ABORT stands. Gradients per micro-batch may be kept.

    Args:
        tag: The attempt.
    """

    tag: Tag


class Checkpoint(Instruction, frozen=True):
    """Save the state, all of whose steps are committed.

    Args:
        step: The next step it is good for.
    """

    step: int


class KeepState(Instruction, frozen=True):
    """Keep the state, which is the final one, where it outlives this process; answer with `StateKept`.

    Args:
        tag: The attempt at the step after the last one, which is never made.
    """

    tag: Tag


class OpenIncarnation(Instruction, frozen=True):
    """Everything that held state is dead and fenced off: resume from the newest checkpoint, in this incarnation.

    Args:
        incarnation: Its number; of several processes that are told this, all are right.
    """

    incarnation: int


class Leave(Instruction, frozen=True):
    """This process is no member any more: claim a new epoch, forget all state, begin again with `Started(step=None)`.

    Args:
        reason: Why, for the log.
    """

    reason: str


class Finish(Instruction, frozen=True):
    """The job is over: have the final state, or end the process; the end of the state machine.

    It is the state at hand, or what an earlier process of this rank has kept. Whoever has neither must not go on to
    what the script does after its last step.

    Args:
        final: Digest of the final state; "": it is that of this member.
        without: Ranks that have not got it.
    """

    final: Digest
    without: tuple[int, ...] = ()


class Halt(Instruction, frozen=True):
    """Going on is not safe or makes no sense: save the state (its steps are committed), and raise.

    Args:
        reason: One line that says what happened and what to do.
    """

    reason: str
