"""What a job that survives leaves in its store does not grow with its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ringside
from ringside.survive.decision import Abort, Commit, Decision, Decisions, Seat, Tag
from ringside.survive.registers import MemoryRegisters

SEATS = (Seat(0, 1), Seat(1, 1))


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
        model, optimizer, Rows(), loss=lambda model, batch: model(batch).sum(), batch=4, micro_batches=1, steps=400
    ) as t:
        for step in t:
            (registers,) = made
            held[step.number] = sum(not key.startswith("order/") for key in registers.values)
        committed = t.committed(t.step)
    assert held[399] < held[1] + 5, "one per step would be 398 more; a sign of life and the like may come late"
    assert [decision.first for decision in committed] == [16 * (step // 4) + 4 * (step % 4) for step in range(400)]
    assert sum(decision.samples for decision in committed) == 1600


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
