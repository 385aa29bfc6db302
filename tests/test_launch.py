"""A launcher as a child process; what stands for Python's torchrun here is a shell script, which starts at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ringside.launch.torchrun import GRACES_S, Launch, StopRequest, stop_requests
from ringside.processes import Process, descendants

PATIENCE_S = 60.0
Start = Callable[..., Launch]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a launcher that is this shell script."""

    def launch(script: str, *flags: str, **how: object) -> Launch:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return Launch([*flags, "train.py", "--flag"], {**os.environ, "OF_THE_CHILD": "yes"}, **how)  # type: ignore[arg-type]

    return launch


def test_the_child_has_its_words_its_environment_and_its_own_session(start: Start) -> None:
    lines: list[str] = []
    launched = start('echo "$@"; echo $OF_THE_CHILD >&2; read nothing; ps -o sid= -p $$; exit 3', sink=lines.append)
    assert launched.wait(PATIENCE_S) == 3
    assert lines[:2] == ["-m torch.distributed.run train.py --flag", "yes"]
    assert int(lines[2]) == launched.pid != os.getsid(0)
    assert launched.deaths == []


def test_without_a_sink_the_child_writes_where_we_do(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    assert start("echo out; echo err >&2").wait(PATIENCE_S) == 0
    assert capfd.readouterr() == ("out\n", "err\n")


def test_a_signal_is_an_exit_status_as_in_a_shell(start: Start) -> None:
    launched = start("kill -9 $$")
    assert launched.wait(PATIENCE_S) == 128 + signal.SIGKILL


def test_it_runs_until_it_is_ended_with_all_below(start: Start) -> None:
    ready: list[str] = []
    script = "sleep 1000 & trap 'kill $!; exit 5' TERM; echo ready; wait"
    launched = start(script, sink=ready.append)
    assert launched.wait(0.0) is None
    deadline = time.monotonic() + PATIENCE_S
    while not ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (below,) = map(Process, descendants(launched.pid))
    assert launched.end(signal.SIGTERM)
    assert launched.wait(PATIENCE_S) == 5
    assert not below.alive()
    below.close()


@pytest.mark.parametrize(("flags", "patience_s"), [((), 30.0), (("--shutdown-timeout=7",), 7.0)])
def test_ranks_may_save_until_torchrun_has_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], patience_s: float
) -> None:
    given: list[tuple[float, ...]] = []

    def ends_all(first: Process, signum: int, graces_s: tuple[float, ...], hurry: Callable[[], bool]) -> bool:
        given.append(graces_s)
        first.send(signum)
        return True

    monkeypatch.setattr("ringside.launch.torchrun.end_all", ends_all)
    launched = start("exec sleep 1000", *flags)
    assert launched.end(signal.SIGKILL)
    assert launched.wait(PATIENCE_S) == 128 + signal.SIGKILL
    assert given == [(patience_s + GRACES_S[0], *GRACES_S[1:])]


def test_who_asks_again_is_in_a_hurry_once() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
    with stop_requests({signal.SIGUSR1}) as request:
        assert (request.signum, request.times, request.hurry()) == (0, 0, False)
        for number, hurry in ((signal.SIGUSR1, False), (signal.SIGINT, True), (signal.SIGHUP, True)):
            signal.raise_signal(number)
            assert request.hurry() is hurry
            assert not request.hurry()
        assert request.signum == signal.SIGUSR1
        assert request.times == 3
        assert request.exit_status == 128 + signal.SIGUSR1
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
    assert after == before
    assert StopRequest().signum == 0
