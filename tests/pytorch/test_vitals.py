"""How vitals get into records: on the oldest of a batch, and not at all once they fail."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("torch")

from ringside.monitor.run.records import StepRecord, Vitals
from ringside.pytorch.recording.session import RankVitals


class Signs:
    """Stands for `VitalSigns`.

    Args:
        answers: What it says, one after the other; an exception is raised.
    """

    gpu = None

    def __init__(self, *answers: Vitals | Exception | None) -> None:
        self.answers = list(answers)
        self.restarts = self.closed = 0

    def since(self) -> Vitals | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def restart(self) -> None:
        self.restarts += 1
        if self.restarts > 1:
            raise OSError("no more")

    def close(self) -> None:
        self.closed += 1


def batch(first: int, count: int) -> list[StepRecord]:
    return [
        StepRecord(step=first + index, rank=0, ended_unix=0.0, step_seconds=1.0, own_seconds=1.0)
        for index in range(count)
    ]


def test_the_oldest_record_of_a_batch_carries_them() -> None:
    told = Vitals(seconds=0.5, waited_seconds=0.1)
    signs = Signs(told, None)
    vitals = RankVitals(signs)  # type: ignore[arg-type]
    assert vitals.add_to([]) == []
    assert [record.vitals for record in vitals.add_to(batch(0, 3))] == [told, None, None]
    assert vitals.add_to(batch(3, 2)) == batch(3, 2)  # asked too soon
    vitals.skip()
    vitals.close()
    assert (signs.restarts, signs.closed) == (1, 1)


def test_what_fails_is_said_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    signs = Signs(ValueError("a file of the future"))
    vitals = RankVitals(signs)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for first in range(3):
            assert vitals.add_to(batch(first, 1)) == batch(first, 1)
        vitals.step_ended()
        vitals.skip()
        vitals.close()
    assert len(caplog.records) == 1
    assert "not recorded any more" in caplog.text
    assert signs.closed == 1


def test_leaving_time_out_may_fail_as_well(caplog: pytest.LogCaptureFixture) -> None:
    signs = Signs(Vitals(seconds=0.5))
    vitals = RankVitals(signs)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            vitals.skip()
    assert len(caplog.records) == 1
    vitals.close()
    assert (signs.restarts, signs.closed) == (2, 1)
    assert vitals.add_to(batch(0, 2)) == batch(0, 2)
