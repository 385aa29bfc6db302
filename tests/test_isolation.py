"""An instrument or a listener that raises is dropped and told of once; what is no Exception passes."""

from __future__ import annotations

import pytest

from ringside.isolation import Guard, Listeners


def fail(*_: object) -> None:
    raise KeyError("broken")


def test_an_instrument_runs_until_it_breaks(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("the clock")
    assert guard.run(divmod, 7, 2, default=()) == (3, 1)
    assert guard.run(fail, default=-1) == -1
    assert guard.run(divmod, 7, 2, default=-2) == -2, "dropped"
    guard.guard(fail)()
    guard.trip(ValueError("another"))
    assert [record.getMessage() for record in caplog.records] == [
        "the clock failed inside Ringside and is dropped (KeyError: 'broken'); training goes on"
    ]
    assert caplog.records[0].exc_info, "with its traceback"


def test_a_guarded_block_ends_with_its_error_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(warning="nothing is timed any more")
    with guard:
        pass
    assert not guard.tripped
    with guard:
        fail()
    assert guard.tripped
    assert caplog.messages == ["nothing is timed any more (KeyError: 'broken'); training goes on"]
    with pytest.raises(KeyboardInterrupt), guard:
        raise KeyboardInterrupt
    with pytest.raises(SystemExit):
        Guard("the clock").run(exit)


def test_a_listener_that_raises_is_told_no_more(caplog: pytest.LogCaptureFixture) -> None:
    told: list[object] = []
    listeners: Listeners[int] = Listeners("verdicts", [lambda value: told.append(("first", value)), fail])

    def another(value: int) -> None:
        told.append(("second", value))
        if value == 1:
            listeners.add(lambda late: told.append(("late", late)))

    listeners.add(another)
    assert len(listeners) == 3
    listeners.notify(1)
    assert told == [("first", 1), ("second", 1)], "who comes meanwhile is told from the next on"
    listeners.notify(2)
    assert told[2:] == [("first", 2), ("second", 2), ("late", 2)]
    assert caplog.messages == ["a listener for verdicts raised and will not be called again"]
    assert len(listeners) == 3
