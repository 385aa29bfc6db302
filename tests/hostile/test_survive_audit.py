"""What `t.committed` and the audit count after all workers of a job died and a later incarnation did steps again."""

import pytest

from ringside.errors import MismatchError, UsageError
from ringside.survive.audit import committed
from ringside.survive.cluster.registers import MemoryRegisters
from ringside.survive.protocol.decision import Commit, Decisions, MemberId, Tag, encode
from ringside.survive.protocol.generation import Generation, generation_key
from ringside.survive.protocol.settings import ProtocolSettings
from verification.survive.audit import audit

ALONE = (MemberId(0, 1),)


SETTINGS = ProtocolSettings(micro_batches=1, samples=lambda step: (8 * step, 8))


def registers_of(*incarnations):
    """Return registers in which the first incarnation did some steps, the second others, and so on."""
    registers = MemoryRegisters()
    for number, steps in enumerate(incarnations, 1):
        registers.create(generation_key(number), encode(Generation(number, 1, 0, 0, ALONE, (0,))))
        for step in steps:
            Decisions(registers).decide(Tag(number, 1, step, 0), Commit(ALONE, 8 * step, 8, 8, "sum"))
    return registers


def test_steps_that_were_done_again_count_as_they_were_done_last():
    registers = registers_of(range(7), range(5, 6), range(5, 10))  # twice all died, and went on from step 5
    found = committed(registers, 10, SETTINGS)
    assert [tag.step for tag, _ in found] == list(range(10))
    assert [tag.incarnation for tag, _ in found] == [1] * 5 + [3] * 5
    assert sum(decision.samples for _, decision in found) == 80
    assert audit(registers, 10, resumed=True) == []


def test_a_step_that_was_committed_twice_in_one_incarnation_is_not_hidden():
    registers = registers_of(range(3))
    registers.swap(generation_key(1), registers.read(generation_key(1)), encode(Generation(1, 2, 0)))
    Decisions(registers).decide(Tag(1, 2, 1, 0), Commit(ALONE, 8, 8, 8, "sum"))
    assert [tag.step for tag, _ in committed(registers, 3, SETTINGS)] == [0, 1, 1, 2]
    assert audit(registers, 3) == ["step 1 is committed twice in incarnation 1", "step 1 is committed twice"]


def test_samples_that_were_left_out_are_not_counted():
    """Neither when a COMMIT is written, nor by an audit whose steps have other samples than were taken."""
    decisions = Decisions(registers := registers_of(range(3)))
    with pytest.raises(UsageError, match="step 3 from sample 32 on cannot be committed"):
        decisions.decide(Tag(1, 1, 3, 0), Commit(ALONE, 32, 8, 8, "sum"))
    others = ProtocolSettings(micro_batches=1, samples=lambda step: (4 * step, 4))
    with pytest.raises(MismatchError, match="not those of its step"):
        committed(registers, 3, others)
