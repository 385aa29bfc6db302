"""What a job that survives leaves in its store does not grow with its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ringside
from ringside.errors import MismatchError
from ringside.survive.audit import SampleDigests, committed
from ringside.survive.cluster.registers import MemoryRegisters
from ringside.survive.protocol.decision import Abort, Commit, Decision, Decisions, MemberId, Tag, encode
from ringside.survive.protocol.generation import Generation, generation_key
from ringside.survive.protocol.settings import ProtocolSettings

SEATS = (MemberId(0, 1), MemberId(1, 1))


def commit(step: int) -> Commit:
    return Commit(SEATS, 8 * step, 8, 8, f"digest {step}")


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


def test_a_job_holds_as_many_registers_after_many_steps_as_after_few(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], MemoryRegisters.__init__

    def noted(self: MemoryRegisters, *args: Any) -> None:
        made.append(self)
        make(self, *args)

    monkeypatch.setattr(MemoryRegisters, "__init__", noted)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    held = {}
    with ringside.survive.training(
        model,
        optimizer,
        Rows(),
        loss_fn=lambda model, batch: model(batch).sum(),
        batch_size=4,
        micro_batches=1,
        steps=400,
    ) as t:
        for step in t:
            (registers,) = made
            held[step.number] = sum(not key.startswith("order/") for key in registers.values)
        decided = t.committed(t.step)
    assert held[399] < held[1] + 5, "one per step would be 398 more; a sign of life and the like may come late"
    assert [decision.first for decision in decided] == [16 * (step // 4) + 4 * (step % 4) for step in range(400)]
    assert sum(decision.samples for decision in decided) == 1600
    assert all(len(decision.digest) == 16 for decision in decided), "of each, not of the newest alone"


def test_a_leader_that_slept_cannot_decide_again_what_is_long_decided() -> None:
    registers = MemoryRegisters()
    awake, slept = Decisions(registers), Decisions(registers)
    slept.decide(Tag(1, 1, 3, 0), commit(3))
    for step in range(4, 40):
        assert awake.decide(Tag(1, 1, step, 0), commit(step)) == commit(step)
    again = slept.decide(Tag(1, 1, 4, 0), Commit(SEATS, 32, 8, 8, "another"))
    assert isinstance(again, Commit)
    assert again.digest == "", "whoever holds another result leaves, and comes back with the state"
    assert isinstance(slept.decide(Tag(1, 1, 40, 0), Abort(2)), Abort)
    assert awake.decide(Tag(1, 1, 40, 0), commit(40)) == Abort(2)
    assert awake.read(Tag(1, 1, 39, 0)) == commit(39)
    assert len(registers.values) == 1


@given(
    begins=st.integers(0, 3),
    asked=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 1)), max_size=40),
)
def test_one_register_says_what_a_register_per_step_would(begins: int, asked: list[tuple[int, bool, int]]) -> None:
    """Of a generation: each step is decided once, in order, until one is aborted; asked are the last three."""
    registers, written = MemoryRegisters(), dict[int, Decision]()
    ranks = [Decisions(registers), Decisions(registers)]
    step = begins
    for back, aborts, rank in asked:
        at = max(begins, step - back)
        ended = next((decision for decision in written.values() if isinstance(decision, Abort)), None)
        wanted: Decision = Abort(2) if aborts else commit(at)
        found = ranks[rank].decide(Tag(1, 1, at, 0), wanted)
        expected = written.get(at) or ended or wanted
        if isinstance(expected, Commit) and at < step - 1:
            assert isinstance(found, Commit)
        else:
            assert found == expected
        if at not in written and ended is None:
            written[at] = wanted
            step += isinstance(wanted, Commit)
        assert ranks[1 - rank].read(Tag(1, 1, at, 0)) == found
    assert len(registers.values) <= 1


class Counted(MemoryRegisters):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def read(self, key: str) -> bytes | None:
        self.calls += 1
        return super().read(key)

    def swap(self, key: str, expected: bytes | None, new: bytes) -> bytes | None:
        self.calls += 1
        return super().swap(key, expected, new)


def test_a_generation_of_many_steps_is_ended_in_as_many_calls_as_one_of_few() -> None:
    registers = Counted()
    decisions = Decisions(registers)
    for step in range(500):
        decisions.decide(Tag(1, 1, step, 0), commit(step))
    before = registers.calls
    ended = Decisions(registers).end(1, 1, Abort(2))
    assert registers.calls - before == 2
    assert (ended.last, ended.abort) == (499, Abort(2))
    assert decisions.decide(Tag(1, 1, 500, 0), commit(500)) == Abort(2)
    assert decisions.end(1, 1, Abort(3)) == ended
    assert Decisions(registers).end(1, 2, Abort(3)).answer(0) == Abort(3), "one without a step"


def test_every_step_that_was_applied_here_has_the_digest_of_its_result() -> None:
    digests, registers = SampleDigests(), MemoryRegisters()
    decisions, record = Decisions(registers), Generation(1, 2, 0, 0, SEATS, (0, 1))
    registers.create(generation_key(1), encode(record))
    for step in range(6):
        tag = Tag(1, 1 + step // 4, step, 0)
        decision = Commit(SEATS, 8 * step, 8, 8, f"{step:016x}")
        decisions.decide(tag, decision)
        if step >= 2:  # as one that has joined
            digests.add(tag, decision.digest)
    settings = ProtocolSettings(2, lambda step: (8 * step, 8))
    found = [each.digest for _, each in committed(registers, 6, settings, digests)]
    assert found == ["", "", *(f"{step:016x}" for step in range(2, 6))]
    newest = [each.digest for _, each in committed(registers, 6, settings)]
    assert newest == ["", "", "", f"{3:016x}", "", f"{5:016x}"]
    other = SampleDigests()
    other.add(Tag(1, 2, 5, 0), "f" * 16)
    with pytest.raises(MismatchError, match="had the result 0000000000000005, not ffffffffffffffff"):
        committed(registers, 6, settings, other)
