"""Logs of single collectives are followed beside the views: these never wait for them."""

from __future__ import annotations

import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.doctor.call_logs import CallJob, write_inspector
from tests.recorded_runs import own_times, write_run
from tests.support.waiting import LIMIT_S, Clock, until

from ringside.doctor.calls.follow import log_files
from ringside.view.run import log_follower
from ringside.view.run.live import LiveRun
from ringside.view.run.log_follower import LEAST_SECONDS, MOMENT_S, SHARE, SLOW_S, LogFollower

LATE = CallJob(late={2: 0.008}, hosts=dict.fromkeys(range(4), "node0"))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are looked at again at once."""
    for name, value in (("LEAST_SECONDS", 0.0), ("SHARE", 1e9), ("STEP_S", 0.01), ("STEPS_PER_CHECK", 1)):
        monkeypatch.setattr(log_follower, name, value)


class HungFolder:
    """A folder that answers when it is told to: a disk of another host."""

    def __init__(self) -> None:
        self.is_asked, self.answers, self.times_asked = threading.Event(), threading.Event(), 0

    def __call__(self, folder: Path, since_unix: float) -> dict[Path, tuple[int, int]]:
        self.times_asked += 1
        self.is_asked.set()
        self.answers.wait()
        return {}


@pytest.mark.usefixtures("soon")
def test_files_are_judged_again_when_they_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    looks: list[Path] = []
    is_written = threading.Event()

    def begin(*args: Any, _popen: Any = subprocess.Popen, **options: Any) -> subprocess.Popen[bytes]:
        begun.append(_popen(*args, **options))
        return begun[-1]

    def list_files(folder: Path, since_unix: float) -> dict[Path, tuple[int, int]]:
        looks.append(folder)
        return log_files(folder, since_unix) if is_written.is_set() else {}

    def look_twice() -> None:
        seen = len(looks)
        until(lambda: follower.poll() or len(looks) > seen + 1)

    monkeypatch.setattr(subprocess, "Popen", begin)
    follower = LogFollower(tmp_path, list_files=list_files)
    look_twice()
    assert not begun
    write_inspector(CallJob(), tmp_path)
    is_written.set()
    until(follower.poll, "what the logs say")
    assert follower.lines == ("NCCL Inspector logs: 240 calls, nobody holds the others up",)
    look_twice()
    assert len(begun) == 1, "nothing has changed"
    is_written.clear()
    look_twice()
    write_inspector(LATE, tmp_path)
    is_written.set()
    until(follower.poll, "what they say now")
    assert "rank 2" in follower.lines[0]
    (tmp_path / "more").touch()
    until(lambda: (follower.poll(), len(begun) == 3)[1], "one more process")
    follower.close()
    until(lambda: begun[-1].returncode is not None, "the end of the process beside")


@pytest.mark.usefixtures("soon")
def test_nothing_of_the_working_directory_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, here = tmp_path / "logs", tmp_path / "here"
    logs.mkdir()
    here.mkdir()
    write_inspector(CallJob(), logs)
    (here / "msgspec.py").write_text("open('run', 'w')")
    monkeypatch.chdir(here)
    follower = LogFollower(logs)
    until(follower.poll, "what the logs say")
    follower.close()
    assert not (here / "run").exists()


def test_a_folder_that_does_not_answer_is_told_and_not_waited_for(tmp_path: Path) -> None:
    hung, clock = HungFolder(), Clock()
    follower = LogFollower(tmp_path, list_files=hung, clock=clock)
    assert not follower.poll()
    assert hung.is_asked.wait(LIMIT_S)
    told = []
    for _ in range(8):
        clock.now += 8.0
        if follower.poll():
            told.append(follower.lines)
    assert told == [(f"the folder of logs has not answered for {silent_s} s",) for silent_s in (30, 40, 50, 60)]
    assert hung.times_asked == 1, "there is one thread, however often it is polled"
    hung.answers.set()
    until(follower.poll, "an answer")
    assert follower.lines == ()
    clock.now += SLOW_S / SHARE + LEAST_SECONDS
    until(lambda: (follower.poll(), hung.times_asked == 2)[1], "the folder is asked again: its silence was no work")


def test_where_no_thread_can_be_had_the_view_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    follower = LogFollower(tmp_path, clock=Clock())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not follower.poll()
    follower.close()


def test_a_view_closes_while_the_folder_does_not_answer(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(20, 4))
    (path / "events.jsonl").write_bytes(msgspec.json.encode({"kind": "call_logs", "folder": str(tmp_path)}) + b"\n")
    hung, clock = HungFolder(), Clock()
    live = LiveRun(path, follow_logs=partial(LogFollower, list_files=hung, clock=clock))
    assert live.poll()
    assert hung.is_asked.wait(LIMIT_S)
    assert not live.poll(), "the records are read all the same"
    clock.now += 30.0
    assert live.poll()
    assert live.notes == ["the folder of logs has not answered for 30 s"]
    began = time.monotonic()
    live.close()
    assert time.monotonic() - began < MOMENT_S + 5.0
    assert live.notes == []
    hung.answers.set()
