"""The rules that exactly-once rests on, and the state machine with some of them broken.

The machine in the package keeps all rules and knows of none: a rule is broken by changing the text of its transitions.
An edit whose text does not stand there, as often as it says, is an error: the proof would break nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from ringside.survive import protocol
from ringside.survive.protocol import Member, transitions
from ringside.survive.protocol.decision import MemberId


@dataclass(frozen=True)
class Rules:
    """The rules that exactly-once rests on. The state machine keeps all; the proof breaks them one by one.

    Args:
        every_ack: COMMIT is written only after every member acknowledged a private copy.
        equal_digests: COMMIT is written, and applied, only for equal digests.
        tagged_acks: An acknowledgement counts only for the attempt that it names.
        abort_first: A later generation runs a step only after ABORT stands for the earlier one.
        take_commit: Where COMMIT stands for the earlier one, its result is taken.
        keep_copy: Nothing is discarded before a decision stands.
        read_first: Nobody applies without having read COMMIT.
        epochs: A process that comes back is not the one that went, though it has the same rank.
        verify_state: State that was fetched counts only with the digest that was offered.
        fence: An incarnation is given up only after ABORT was won in all its open generations.
        committed_only: Only committed steps get into a checkpoint.
        keep_final: The final state is kept where it outlives its process before that is acknowledged.
        all_come: The job is over only when every rank that can come has the final state.
        final_only: Whoever has not got the final state does not come to what a script does after its last step.
    """

    every_ack: bool = True
    equal_digests: bool = True
    tagged_acks: bool = True
    abort_first: bool = True
    take_commit: bool = True
    keep_copy: bool = True
    read_first: bool = True
    epochs: bool = True
    verify_state: bool = True
    fence: bool = True
    committed_only: bool = True
    keep_final: bool = True
    all_come: bool = True
    final_only: bool = True


@dataclass(frozen=True)
class Edit:
    """A change of the text of `transitions.py`.

    Args:
        before: What stands there.
        after: What is to stand there.
        times: How often.
    """

    before: str
    after: str
    times: int = 1


ABORTS = "member.enter_phase(MemberPhase.RESOLVING)\n"
ACKNOWLEDGES = """event.digest, event.state)
    member.acks = {**member.acks, member.seat: member.own}
    return """
EARLY = "[i.Checkpoint(event.tag.step + 1)] if member.settings.checkpoint_every else []"
EDITS: dict[str, tuple[Edit, ...]] = {
    "every_ack": (Edit("if _late(member):\n        return []\n    votes = {seat: (ack", "votes = {seat: (ack"),),
    "equal_digests": (
        Edit("if len(set(votes.values())) > 1:", "if False:", times=2),
        Edit(" or own.digest != decision.digest", ""),
    ),
    "tagged_acks": (Edit(" or acks[seat].tag != member.tag", ""),),
    "abort_first": (Edit("if member.generation is None or member.step is None:\n", "if True:\n"),),
    "take_commit": (
        Edit(
            "if isinstance(event.decision, Commit):",
            "if isinstance(event.decision, Commit) and member.phase is not MemberPhase.RESOLVING:",
        ),
    ),
    "keep_copy": (Edit(ABORTS, f"{ABORTS}    member.own = None\n"),),
    "read_first": (
        Edit(
            f"{ACKNOWLEDGES}_publish_ack(member)",
            f"{ACKNOWLEDGES}_apply_commit(member, _commit_of(member, event.tag, event.digest))",
        ),
    ),
    "verify_state": (Edit("if event.digest != member.offer.digest:", "if False:"),),
    "fence": (Edit("if not member.fence:", "if True:"),),
    "committed_only": (
        Edit(f"{ACKNOWLEDGES}_publish_ack(member)", f"{ACKNOWLEDGES}[*({EARLY}), *_publish_ack(member)]"),
        Edit("if every and member.step % every == 0 else []", "if False else []"),
    ),
    "all_come": (Edit("if patient and not set(member.absent_ranks) <= member.gone:", "if False:"),),
}
"""How rules are broken in the transitions. Others are of who a process is, or of what is done beside the machine."""


def machine(rules: Rules, sound: type[Member] = Member) -> type[Member]:
    """Return the state machine that keeps these rules.

    Args:
        rules: Which are kept.
        sound: The machine that keeps all.
    """
    return sound if rules == Rules() else _broken(rules)


@cache
def _broken(rules: Rules) -> type[Member]:
    broken = [name for name, kept in asdict(rules).items() if not kept]
    text = Path(transitions.__file__).read_text()
    for edit in (edit for rule in broken for edit in EDITS.get(rule, ())):
        assert text.count(edit.before) == edit.times, f"no longer in the transitions: {edit.before}"
        text = text.replace(edit.before, edit.after)
    changed = _module(transitions, text)
    # The machine's tables name the transitions: it is made anew over those that were changed.
    with patch.object(protocol, "transitions", changed):
        anew: type[Member] = _module(protocol, Path(protocol.__file__).read_text()).Member
    return anew if rules.epochs else type("Member", (anew,), {"is_own": _has_its_rank})


def _has_its_rank(own: Member, seat: MemberId) -> bool:
    return seat.rank == own.seat.rank


def _module(like: ModuleType, text: str) -> Any:
    made = ModuleType(like.__name__)
    assert like.__file__ is not None
    exec(compile(text, like.__file__, "exec"), made.__dict__)
    return made
