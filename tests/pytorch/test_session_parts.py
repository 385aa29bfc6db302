"""A session's own decisions: whom it tells, when it says that the store is silent, what a fork leaves to its parent.

No model is trained here: the clock is told of steps, and time is what the tests say it is.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support.waiting import LIMIT_S, Clock, until  # noqa: E402

from ringside.monitor.run.directory import RunReader  # noqa: E402
from ringside.monitor.run.records import StepRecord  # noqa: E402
from ringside.monitor.step_clock import Draft  # noqa: E402
from ringside.pytorch.recording import session as sessions  # noqa: E402
from ringside.pytorch.recording.rank0 import run_info  # noqa: E402
from ringside.pytorch.recording.record_transport import READY, Rank0Presence, StoreSilence  # noqa: E402
from ringside.pytorch.recording.session import RecordingSettings, Session  # noqa: E402

from .training import Said, ddp_ranks, group  # noqa: E402


def quiet(patch: pytest.MonkeyPatch) -> None:
    """The monitor's thread sends nothing before the session ends."""
    patch.setattr(sessions, "batch_seconds", lambda size: 1e6)


def step(session: Session, **logged: Any) -> None:
    clock = session.clock
    clock.forward_begins(4)
    clock.forward_ends()
    clock.optimizer_begins()
    clock.optimizer_ends()
    session.log(**logged)


def begin(run: str, **settings: Any) -> Session:
    session = sessions.begin(run, "native", RecordingSettings(**settings))
    session.clock.always_synced = True
    dist.barrier()  # rank 0 has said that it takes records in
    return session


def tells(port: int, run: str) -> list[Any]:
    """Tell listeners, and take in what the script says."""
    seen: list[tuple[str, int]] = []

    def raises(record: Any) -> None:
        seen.append(("raises", record.step))
        raise ValueError("a listener of the script's")

    with pytest.MonkeyPatch.context() as patch, group(port), Said() as said:
        quiet(patch)
        session = begin(run)
        session.on_record(raises)
        session.on_record(lambda record: seen.append(("listens", record.step)))
        session.on_verdict(print)
        for number in range(3):
            step(session, loss=number / 2, samples=number + 1)
        with session.pause():
            step(session)
            step(session)
            aside = session.is_paused
        step(session)
        session.event("note", text="of the script")
        session.event("ended", text="not the script's to say")
        session.put_event("revised", {"step": session.clock.step, "after": "ring"})
        session.put_event("gradient_memory", {"model": 2, "shared": 8})
        found = [aside, session.is_paused, session.clock.step, session.verdicts, session.path is not None]
        same = sessions.begin(None, "ringside") is session
        session.end()
        return [*found, same, sessions.current() is None, seen, said.lines]


def test_what_a_script_tells_is_in_the_run_and_listeners_hear_every_step(tmp_path: Path) -> None:
    found = ddp_ranks(2, tells, str(tmp_path / "run"))
    for rank, (*values, seen, lines) in enumerate(found):
        assert values == [True, False, 4, [], rank == 0, True, True]
        assert seen == [("raises", 0)] + [("listens", number) for number in (0, 1, 2, 3, 4, 3)]
        assert [line.partition(" will not")[0] for line in lines] == [
            "a listener for step records raised and",
            "session.event('ended'): events of this kind are the monitor's own; choose another name",
        ]
    reader = RunReader(tmp_path / "run")
    records = sorted(reader.poll(), key=lambda record: (record.step, record.rank))
    assert [(record.step, record.rank, record.loss, record.samples) for record in records] == [
        (number, rank, loss, samples)
        for number, loss, samples in ((0, 0.0, 1), (1, 0.5, 2), (2, 1.0, 3), (3, None, 4))
        for rank in range(2)
    ]
    told = {event["kind"]: event for event in reader.poll_events()}
    assert list(told) == ["started", "note", "revised", "gradient_memory", "ended"]
    assert (told["note"]["text"], told["revised"]["step"], told["revised"]["after"]) == ("of the script", 4, "ring")
    assert (told["gradient_memory"]["model"], told["gradient_memory"]["shared"]) == (2, 8)
    assert "text" not in told["ended"]


def silence(rank: int, limit_s: float = 10.0) -> StoreSilence:
    return StoreSilence(rank, limit_s, records_kept=100)


@pytest.mark.parametrize(("rank", "counts"), [(0, [0, 0, 0, 1, 1]), (1, [0] * 5)])
def test_a_store_that_does_not_answer_is_said_once_by_rank_0_when_it_has_been_noticed_twice(
    caplog: pytest.LogCaptureFixture, rank: int, counts: list[int]
) -> None:
    store = silence(rank)
    store.since = 100.0
    said = []
    for waited_s in (9.9, 10.0, 11.0, 12.0, 30.0):
        store.check(100.0 + waited_s)
        said.append(len([line for line in caplog.records if line.levelname == "WARNING"]))
    assert said == counts
    assert store.is_reported
    assert rank or caplog.messages[0].startswith("the job's store has not answered for 12 s: ")


def test_a_process_that_was_stopped_blames_no_store() -> None:
    """It finds its own call old, which returns a moment later, and is stopped again."""
    store = silence(0)
    for began in (100.0, 200.0, 300.0):
        store.since = began
        store.check(began + 20.0)
    assert not store.is_reported


def test_the_store_is_called_for_as_long_as_the_call_takes() -> None:
    store = silence(0)
    with store.call():
        assert time.monotonic() - store.since < LIMIT_S
    assert store.since == math.inf


def steps_are_kept(port: int, run: str) -> list[Any]:
    """Steps while the store does not answer: the training thread notices it, and the end does not wait for it."""
    with pytest.MonkeyPatch.context() as patch, group(port), Said() as said:
        quiet(patch)
        session = begin(run, goodbye_s=0.02)
        answers = threading.Event()
        patch.setattr(session.outbox, "send", lambda records: answers.wait(60))
        patch.setattr(session.silence, "check", lambda now: said.lines.append("looked"))
        step(session)
        session.clock.flush()
        session.silence.since = time.monotonic()
        step(session)
        session.clock.flush()
        with session.pause():
            step(session)
        session.silence.since = math.inf
        for _ in range(3):
            step(session)
        session.clock.flush()
        kept = session.unsent
        session.end()
        (thread,) = (one for one in threading.enumerate() if one.name == "ringside-monitor")
        waits = thread.is_alive()
        step(session)
        session.clock.flush()
        left = session.unsent
        answers.set()
        thread.join(60)
        return [kept, waits, left, [line.partition(" for ")[0] for line in said.lines]]


def test_a_store_that_never_answers_is_noticed_by_the_training_and_does_not_hold_up_the_end(tmp_path: Path) -> None:
    ((kept, waits, left, lines),) = ddp_ranks(1, steps_are_kept, str(tmp_path / "run"))
    assert (kept, waits, left) == (5, True, 0)
    assert lines == ["looked", "the job's store has not answered"]
    assert RunReader(tmp_path / "run").summary() is not None


def the_end_waits(port: int, run: str, is_known: bool) -> float:
    """End a session whose store does not answer; return for how long its monitor is waited for."""
    waits: list[float] = []
    join = threading.Thread.join

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "ringside-monitor" and timeout is not None:
            waits.append(timeout)
        else:
            join(thread, timeout)

    with pytest.MonkeyPatch.context() as patch, group(port), Said():
        quiet(patch)
        session = begin(run, goodbye_s=0.02)
        answers = threading.Event()
        patch.setattr(session.outbox, "send", lambda records: answers.wait(60))
        session.silence.is_reported = is_known
        patch.setattr(threading.Thread, "join", noted)
        session.end()
        (thread,) = (one for one in threading.enumerate() if one.name == "ringside-monitor")
        answers.set()
        join(thread, 60)
    return waits[0]


@pytest.mark.parametrize(("is_known", "seconds"), [(True, 1.0), (False, 0.04)])
def test_a_store_that_is_known_not_to_answer_is_not_given_the_time_to_say_goodbye(
    tmp_path: Path, is_known: bool, seconds: float
) -> None:
    assert ddp_ranks(1, the_end_waits, str(tmp_path / "run"), is_known) == [seconds]


def the_newest_are_kept(port: int, run: str) -> list[Any]:
    """Steps that nobody fetches: few are kept whole, and in the end the oldest go."""
    with pytest.MonkeyPatch.context() as patch, group(port):
        quiet(patch)
        patch.setattr(sessions, "DRAFTS_KEPT", 3)
        session = begin(run, records_kept=5)
        worked_out: list[int] = []
        record = Draft.record

        def noted(draft: Draft) -> StepRecord:
            worked_out.append(draft.step)
            return record(draft)

        with pytest.MonkeyPatch.context() as while_training:
            while_training.setattr(Draft, "record", noted)
            for _ in range(7):
                step(session)
            session.clock.flush()
        session.end()
        return worked_out


def test_of_steps_that_nobody_fetches_the_newest_are_kept_and_worked_out(tmp_path: Path) -> None:
    (found,) = ddp_ranks(1, the_newest_are_kept, str(tmp_path / "run"))
    assert found == [3, 4, 5, 6]
    assert [record.step for record in RunReader(tmp_path / "run").poll()] == [2, 3, 4, 5, 6]


def forks(port: int, run: str) -> list[Any]:
    """Fork while a session goes on: what the child finds, and what it writes."""
    with pytest.MonkeyPatch.context() as patch, group(port):
        quiet(patch)
        session = begin(run)
        step(session)
        session.clock.flush()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                kept = session.unsent
                step(session)
                session.clock.flush()
                session.event("note", text="of a child")
                found = [
                    sessions.current() is None, session.unsent - kept, session.verdicts, session.is_recording,
                    session.watch is None or session.watch.board.fd == -1,
                ]  # fmt: skip
                session.end()
                os.write(write, json.dumps(found).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            told = json.loads(pipe.read())
        os.waitpid(child, 0)
        step(session)
        session.end()
        return [told, sessions.current() is None]


def test_a_forked_child_leaves_the_session_to_its_parent(tmp_path: Path) -> None:
    assert ddp_ranks(2, forks, str(tmp_path / "run")) == [[[True, 0, [], False, True], True]] * 2
    reader = RunReader(tmp_path / "run")
    assert sorted((record.step, record.rank) for record in reader.poll()) == [
        (s, r) for s in range(2) for r in range(2)
    ]
    assert "note" not in [event["kind"] for event in reader.poll_events()]


def test_ranks_send_only_while_rank_0_takes_records_in() -> None:
    store, clock = dist.HashStore(), Clock()
    presence = Rank0Presence(store, 10.0, lambda: clock.now)
    assert not presence.check()
    store.set(READY, "1")
    assert presence.check(), "while it is not there every check asks"
    presence.withdraw()
    assert presence.check(), "it is believed for a while"
    clock.now += 10.1
    assert not presence.check()
    assert not presence.is_present


def stops(port: int, run: str, error: type[Exception]) -> list[Any]:
    """The monitor's thread meets an error; return what is said and whether others are told to send no more."""
    with pytest.MonkeyPatch.context() as patch, group(port), Said() as said:
        patch.setattr(sessions, "batch_seconds", lambda size: 0.01)
        session = begin(run)
        said.setLevel("WARNING")

        def breaks(records: Any) -> None:
            raise error("it breaks")

        patch.setattr(session.outbox, "send", breaks)
        step(session)
        session.clock.flush()
        until(lambda: not session.is_recording)
        until(lambda: all(thread.name != "ringside-monitor" for thread in threading.enumerate()))
        dist.barrier()
        ready = session.store.check([READY])
        step(session)
        session.clock.flush()
        taken = session.unsent
        dist.barrier()
        session.end()
        return [ready, taken, [line.partition(":")[0] for line in said.lines]]


@pytest.mark.parametrize(
    ("error", "ready", "loud"), [(ValueError, False, [True, True]), (dist.DistError, True, [True, False])]
)
def test_a_monitor_that_stops_says_so_and_ends_what_others_send(
    tmp_path: Path, error: type[Exception], ready: bool, loud: list[bool]
) -> None:
    found = ddp_ranks(2, stops, str(tmp_path / "run"), error)
    words = f"the monitor stopped ({error.__name__}"
    assert [row[1] for row in found] == [0, 0]
    assert [row[2][:1] for row in found] == [[words] if one else [] for one in loud]
    assert found[0][0] is ready


def test_ranks_that_do_not_come_are_nowhere_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    store.set("who/2", json.dumps(["node-2", 17]))
    info = run_info(store, 4, "gloo", 0.05)
    assert (info.hosts[1:], info.pids[1:]) == (["", "node-2", ""], [0, 17, 0])
    assert "ranks 1 and 3 did not report to the monitor within 0.05 s" in caplog.text
    caplog.clear()
    store.set("who/1", json.dumps(["node-1", 16]))
    assert run_info(store, 3, "gloo", 0.05).hosts[1:] == ["node-1", "node-2"]
    assert caplog.text == ""


def test_without_a_session_nothing_is_logged() -> None:
    assert sessions.current() is None
    sessions.log_step(loss=1.0, samples=3)
