"""A run judged in a process of its own: what it finds is what is found in this one, and nothing of it is left."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.support.waiting import until

from ringside.monitor import StepRecord
from ringside.monitor.collector import StepCollector
from ringside.monitor.groups import JobGroups
from ringside.monitor.judge import YOUNG_STEPS, ProcessJudge
from ringside.monitor.run.directory import Event
from ringside.monitor.run.records import Group, GroupUse
from ringside.processes import hold, signal_mask

STEPS, SLOW = 240, range(60, 150)


def records(step: int, noise: np.random.Generator, *, stages: bool = False) -> list[StepRecord]:
    """One step of four ranks; rank 2 is 30% slower for a while. Two stages, of two replicas each, if that is wanted."""
    made = []
    for rank in range(4):
        own = 0.05 * float(noise.normal(1.0, 0.02)) * (1.3 if rank == 2 and step in SLOW else 1.0)
        uses: tuple[GroupUse, ...] = ()
        new: tuple[Group, ...] = ()
        if stages:
            own *= 1.4 if rank >= 2 else 1.0
            uses = (GroupUse(f"dp{rank // 2}", -1, 1, 8, 0.0),)
            if step == 0:
                dp, pp = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
                new = (Group(name=f"dp{rank // 2}", description="mesh_dp", ranks=dp),
                       Group(name=f"pp{rank % 2}", description="mesh_pp", ranks=pp))  # fmt: skip
        made.append(
            StepRecord(
                step=step,
                rank=rank,
                ended_unix=0.0,
                step_seconds=0.1,
                own_seconds=own,
                exposed_seconds=0.1 - own,
                forward_seconds=own / 3,
                backward_seconds=own / 1.5,
                groups=uses,
                new_groups=new,
            )
        )
    return made


def judged(judge: ProcessJudge | None, groups: JobGroups | None = None, **how: bool) -> tuple[list[Event], list[bytes]]:
    """The events of a whole run, but for when they were written, and its verdicts."""
    collector = StepCollector(4, watchers=judge, groups=groups, clock=lambda: 0.0)
    noise = np.random.default_rng(3)
    events = [event for step in range(STEPS) for event in collector.add(records(step, noise, **how))]
    events += collector.close()
    said = [{key: value for key, value in event.items() if key != "step"} for event in events]
    return said, [msgspec.json.encode(verdict) for verdict in collector.verdicts]


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("young_steps", [YOUNG_STEPS, 1, 100, 1_000])
def test_it_finds_what_is_found_here_and_says_it_once(young_steps: int, stages: bool) -> None:
    groups = JobGroups(4)
    judge = ProcessJudge(4, ["a"] * 4, groups, young_steps=young_steps)
    found = judged(judge, groups, stages=stages)
    assert found == judged(None, stages=stages)
    kinds = [event["kind"] for event in found[0]]
    assert kinds.count("verdict") >= 1
    assert kinds.count("repaired") == 1
    assert judge.process is None


def test_a_short_run_is_judged_here() -> None:
    judge = ProcessJudge(4, [], JobGroups(4))
    noise = np.random.default_rng(3)
    for step in range(YOUNG_STEPS - 1):
        judge.update(step, {record.rank: record for record in records(step, noise)})
    assert judge.process is None
    assert judge.poll() == judge.finish() == []
    judge.update(YOUNG_STEPS - 1, {record.rank: record for record in records(YOUNG_STEPS - 1, noise)})
    assert judge.process is not None
    assert judge.finish() == []
    assert judge.process is None


def test_what_is_open_has_its_price_while_the_run_goes_on() -> None:
    judge = ProcessJudge(4, [], JobGroups(4))
    here = StepCollector(4)
    collector = StepCollector(4, watchers=judge)
    noise, same = np.random.default_rng(3), np.random.default_rng(3)
    for step in range(120):
        collector.add(records(step, noise))
        here.add(records(step, same))

    def agrees() -> bool:
        collector.add([])
        return collector.verdicts == here.verdicts != []

    until(agrees)
    judge.finish()


def test_without_a_process_all_is_judged_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/program")
    judge = ProcessJudge(4, [], JobGroups(4))
    assert judged(judge) == judged(None)
    assert judge.process is None


@pytest.mark.parametrize("at", [30, 200])
def test_one_that_dies_is_said_once_and_the_run_goes_on(at: int, caplog: pytest.LogCaptureFixture) -> None:
    judge = ProcessJudge(4, [], JobGroups(4))
    collector, noise = StepCollector(4, watchers=judge), np.random.default_rng(3)
    events: list[Event] = []
    with caplog.at_level(logging.WARNING):
        for step in range(STEPS):
            events += collector.add(records(step, noise))
            if step == at:
                assert judge.process is not None
                judge.process.kill()
                judge.process.wait()
        events += collector.close()
    (said,) = caplog.messages
    assert "the process that judges this run's steps has ended" in said
    assert collector.steps == STEPS
    assert events[-1]["kind"] == "ended"
    assert judge.process is None


def test_one_that_stands_still_is_given_up_and_nobody_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    for how, words in (({"most_pending_bytes": 100_000}, "does not take them in"), ({"patience_s": 0.0}, "last steps")):
        caplog.clear()
        judge = ProcessJudge(4, [], JobGroups(4), **how)  # type: ignore[arg-type]
        collector, noise = StepCollector(4, watchers=judge), np.random.default_rng(3)
        with caplog.at_level(logging.WARNING):
            for step in range(400):
                collector.add(records(step, noise))
                if step == YOUNG_STEPS and judge.process is not None:
                    judge.process.send_signal(signal.SIGSTOP)
            collector.close()
        (said,) = caplog.messages
        assert words in said
        assert judge.process is None


def test_answers_that_cannot_be_read_are_no_answers(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nprintf '\\002\\000\\000\\000ab'\ncat > /dev/null\n")
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("sys.executable", str(program))
        judged(ProcessJudge(4, [], JobGroups(4), patience_s=5.0))
    (said,) = caplog.messages
    assert "answers what cannot be read" in said


def test_it_ends_with_who_has_started_it() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        judge, noise = ProcessJudge(4, [], JobGroups(4)), np.random.default_rng(3)
        for step in range(YOUNG_STEPS + 5):
            judge.update(step, {record.rank: record for record in records(step, noise)})
        judge.poll()
        assert judge.process is not None
        os.write(writer, str(judge.process.pid).encode())
        signal.pause()
    try:
        process = hold(int(os.read(reader, 20)))
        assert process is not None
        assert process.alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    assert process.wait(10.0)
    process.close()


def test_it_is_no_rank_and_makes_way_for_those_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    judge, noise = ProcessJudge(4, [], JobGroups(4), young_steps=1), np.random.default_rng(3)
    judge.update(0, {record.rank: record for record in records(0, noise)})
    judge.poll()
    assert judge.process is not None
    pid = judge.process.pid
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert not [item for item in environ if item.startswith((b"RANK=", b"MASTER_PORT="))]
    until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19)
    assert signal_mask(pid, "SigIgn") & 1 << (signal.SIGINT - 1)
    assert os.getsid(pid) == os.getsid(0)  # else it would have as large a share of the processors as all that trains
    judge.finish()
