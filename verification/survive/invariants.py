"""The invariants, looked at whenever something happens that could break one."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringside.survive.protocol.decision import Abort, Commit, Decision, MemberId, Tag
from ringside.survive.protocol.generation import Generation
from verification.survive.sample_counting import Counting, Weights, digest_of

SAMPLES = "every sample exactly once"
DECISIONS = "one decision per step and generation"
ONCE = "a step is committed in one generation only"
STATES = "equal states at equal steps"
APPLIED = "no apply without COMMIT"
GENERATIONS = "generations only grow, one record each"
STORES = "no store of another attempt reaches live memory"
COPIES = "COMMIT only while every member holds its copy"
KEPT = "nothing is dropped before it is decided"
FENCED = "an incarnation that was given up commits nothing"
SAVED = "only committed steps are saved"
SEATS = "only those named take part"
ENDS = "the job ends, with all steps done"
LAST = "what the last lines save is the final state"
ATTENDED = "every rank that somebody starts again runs its last lines"

# Those that each step keeps, and those of the end of the job.
_STEPS = (SAMPLES, DECISIONS, ONCE, STATES, APPLIED, GENERATIONS, STORES, COPIES, KEPT, FENCED, SAVED, SEATS)
INVARIANTS = (*_STEPS, ENDS, LAST, ATTENDED)

Place = tuple[int, int, int]  # incarnation, step, generation


@dataclass
class Invariants:
    """What has happened in one run, and what must not have.

    Args:
        model: The job.

    Attributes:
        broken: By invariant, how it was broken first.
        decisions: What is decided about every step of a generation.
        commits: How many COMMITs were written.
        applies: How many times a step was applied.
    """

    model: Counting
    broken: dict[str, str] = field(default_factory=dict)
    decisions: dict[Place, Decision] = field(default_factory=dict)
    commits: int = 0
    applies: int = 0
    _generations: dict[tuple[int, int], Generation] = field(default_factory=dict)
    _newest: dict[int, int] = field(default_factory=dict)
    _gone: dict[int, set[MemberId]] = field(default_factory=dict)
    _committed: dict[tuple[int, int], int] = field(default_factory=dict)
    _states: dict[int, str] = field(default_factory=dict)
    _copies: dict[tuple[Place, MemberId], str] = field(default_factory=dict)
    _ended: dict[tuple[int, int], Abort] = field(default_factory=dict)
    _given_up: int = 0

    def holds(self, invariant: str, fine: bool, how: str) -> None:
        """Note how an invariant was broken, if it was; the first time counts."""
        if not fine:
            self.broken.setdefault(invariant, how)

    def decided(self, tag: Tag, decision: Decision) -> None:
        """Something is decided about a step; a COMMIT without a digest is of a step before the newest."""
        place = _place_of(tag)
        if isinstance(decision, Commit) and not decision.digest:
            # A register names the digest of its newest COMMIT only: this one or the next must have been seen.
            known = [self.decisions.get((tag.incarnation, step, tag.generation)) for step in (tag.step, tag.step + 1)]
            self.holds(DECISIONS, any(isinstance(each, Commit) for each in known), f"{tag}: a COMMIT that nobody wrote")
            return
        before = self.decisions.setdefault(place, decision)  # a register is read often, and written once
        self.holds(DECISIONS, before == decision, f"{tag}: {type(before).__name__}, then {type(decision).__name__}")
        if isinstance(decision, Commit) and before is decision:
            self.commits += 1
            elsewhere = self._committed.setdefault((tag.incarnation, tag.step), tag.generation)
            open_still = (tag.incarnation, tag.generation) not in self._ended
            self.holds(DECISIONS, open_still, f"{tag}: a COMMIT after the generation was ended")
            self.holds(ONCE, elsewhere == tag.generation, f"{tag} was committed in generation {elsewhere} already")
            self.holds(FENCED, tag.incarnation >= self._given_up, f"{tag} was committed after that")
            for seat in decision.members:
                same = self._copies.get((place, seat)) == decision.digest
                self.holds(COPIES, same, f"{tag} was committed, and {seat} does not hold that result")

    def ended(self, incarnation: int, generation: int, abort: Abort) -> None:
        """A generation was ended: what is not committed in it is aborted, whatever step that is."""
        self._ended.setdefault((incarnation, generation), abort)

    def copied(self, tag: Tag, seat: MemberId, copy: str) -> None:
        """A member has its private copy."""
        self._copies[_place_of(tag), seat] = copy

    def dropped(self, tag: Tag, seat: MemberId) -> None:
        """A member that lives has thrown an attempt away."""
        place = _place_of(tag)
        decision = self.decisions.get(place) or self._ended.get((tag.incarnation, tag.generation))
        # Wrong are both: to drop what is committed with one's copy, and to drop a copy while COMMIT may still come.
        lost = isinstance(decision, Commit) and seat in decision.members
        undecided = decision is None and (place, seat) in self._copies
        self.holds(KEPT, not lost and not undecided, f"{seat} threw {tag} away, {type(decision).__name__} stood")

    def applied(self, tag: Tag, seat: MemberId, weights: Weights) -> None:
        """A member has applied a step."""
        self.applies += 1
        committed = isinstance(self.decisions.get(_place_of(tag)), Commit)
        self.holds(APPLIED, committed, f"{seat} applied {tag}")
        self.state(tag.step + 1, seat, weights)

    def state(self, step: int, seat: MemberId, weights: Weights) -> None:
        """A member has a state that it takes for that of a step."""
        wrong = [
            n for n, (is_, must) in enumerate(zip(weights, self.model.weights_at(step), strict=True)) if is_ != must
        ]
        how = f"{seat} at step {step}: sample {wrong[0]} counts {weights[wrong[0]]} times" if wrong else ""
        self.holds(SAMPLES, not wrong, how)
        first = self._states.setdefault(step, digest_of(weights))
        self.holds(STATES, first == digest_of(weights), f"{seat} differs from others at step {step}")

    def generation(self, record: Generation) -> None:
        """A generation register holds something."""
        first = self._generations.setdefault((record.incarnation, record.number), record)
        self.holds(GENERATIONS, first == record, f"two records of generation {record.number}")
        newest = self._newest.get(record.incarnation, 0)
        self.holds(GENERATIONS, record.number >= newest, f"{record.number} after {newest}")
        # Who is not named any more stays out: it comes back with another epoch, which is another seat.
        again = self._gone.get(record.incarnation, set()).intersection(record.members)
        self.holds(SEATS, not again, f"{', '.join(map(str, again))} is a member again")
        before = self._generations.get((record.incarnation, record.number - 1))
        if before is not None:
            self._gone.setdefault(record.incarnation, set()).update(set(before.members) - set(record.members))
        self._newest[record.incarnation] = max(newest, record.number)

    def settled(self, record: Generation, seat: MemberId) -> None:
        """A process takes part in a generation."""
        self.holds(
            SEATS, seat in record.members, f"{seat} takes part in generation {record.number} without being named"
        )

    def stored(self, own: Tag, theirs: Tag) -> None:
        """A message was stored into the memory of an attempt."""
        self.holds(STORES, own == theirs, f"{theirs} into {own}")

    def given_up(self, incarnation: int) -> None:
        """An incarnation begins; those before it are over."""
        self._given_up = max(self._given_up, incarnation)

    def last_lines(self, seat: MemberId, weights: Weights) -> None:
        """A process comes to what its script does after the last step, with a state."""
        wrong = [n for n, count in enumerate(weights) if count != 1]
        self.holds(LAST, not wrong, f"{seat} saves weights that lack or repeat {len(wrong)} samples")

    def saved(self, incarnation: int, step: int, weights: Weights) -> None:
        """A checkpoint is complete."""
        # Step 0 is the state that training begins with: nothing has to be committed before it.
        known = any(place[1] == step - 1 and isinstance(d, Commit) for place, d in self.decisions.items())
        fine = step == 0 or (known and weights == self.model.weights_at(step))
        self.holds(SAVED, fine, f"step {step} of incarnation {incarnation}")


def _place_of(tag: Tag) -> Place:
    return tag.incarnation, tag.step, tag.generation


__all__ = ["INVARIANTS", "Invariants"]
