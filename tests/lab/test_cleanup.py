"""However a lab ends, nothing of it stays, and nothing of anybody else goes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringside.lab import Lab, remove_leftovers
from ringside.lab.namespaces import namespaces_there
from ringside.processes import Process, children

from .factory import LabFactory


def namespaces_of(name: str) -> list[str]:
    return [found for found in namespaces_there() if found.startswith(f"{name}-")]


def wait_for_end(process: Process) -> None:
    assert select.select([process], [], [], 30)[0], f"process {process.pid} did not end"


@contextlib.contextmanager
def owner(delay_s: float = 0.0) -> Iterator[tuple[subprocess.Popen[str], str, list[Process], Process]]:
    """Give another process that owns a lab: it, the lab's name, all processes below it, and the guard among them."""
    if reason := Lab.unavailable(delay=delay_s > 0):
        pytest.skip(reason)
    command = [sys.executable, str(Path(__file__).parent / "scripts" / "owner.py"), str(delay_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            name = child.stdout.readline().strip()
            assert [child.stdout.readline(), child.stdout.readline()] == ["rank\n", "rank\n"]
            below = [Process(pid) for pid in children(child.pid)]
            (guard,) = (process for process in below if b"ringside.lab.namespaces" in command_of(process))
            yield child, name, below, guard
            for process in below:
                wait_for_end(process)
                process.close()
        finally:
            child.kill()


def command_of(process: Process) -> bytes:
    with open(f"/proc/{process.pid}/cmdline", "rb") as file:
        return file.read()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_after_the_end_and_after_an_exception(error: type[BaseException] | None):
    if reason := Lab.unavailable(delay=True):
        pytest.skip(reason)
    with contextlib.suppress(error or ValueError), Lab(hosts=2, delay_s=0.001) as lab:
        process = lab.spawn(0, ["sh", "-c", "echo here; exec sleep 600"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        names = namespaces_of(lab.name)
        assert len(names) == 3
        inside = subprocess.run(["ip", "netns", "pids", names[0]], capture_output=True, text=True, check=True).stdout
        assert str(process.pid) in inside.split()
        if error is not None:
            raise error
    assert process.returncode == -signal.SIGKILL
    assert not set(names) & set(namespaces_there())


def test_a_lab_that_cannot_be_built_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    if reason := Lab.unavailable():
        pytest.skip(reason)
    from ringside.errors import RingsideError
    from ringside.lab import network as shaping

    monkeypatch.setattr(shaping, "limit", lambda device, *_: [f"qdisc replace dev {device} root no-such-filter"])
    with pytest.raises(RingsideError, match="tc refused a command"), Lab(hosts=2):
        pass
    assert namespaces_of(f"ringside-{os.getpid()}") == []


@pytest.mark.parametrize(("signum", "delay_s"), [(signal.SIGINT, 0.0), (signal.SIGTERM, 0.0), (signal.SIGKILL, 0.001)])
def test_after_a_signal_to_the_owner(signum: int, delay_s: float):
    with owner(delay_s) as (child, name, _, guard):
        assert namespaces_of(name)
        child.send_signal(signum)
        child.wait(30)
        wait_for_end(guard)
        assert namespaces_of(name) == []


def test_the_next_start_removes_what_a_dead_lab_left_and_no_living_one(lab_factory: LabFactory):
    living = lab_factory(hosts=2)
    with owner() as (child, name, below, guard):
        guard.send(signal.SIGKILL)
        wait_for_end(guard)
        child.kill()
        child.wait(30)
        # From here on any lab that starts on this machine may remove it, in another test process too.
        lab_factory(hosts=1)
        assert namespaces_of(name) == []
        assert len(below) == 4
    assert len(namespaces_of(living.name)) == 3
    assert living.run(["true"], timeout_s=60).ok
    assert living.name not in remove_leftovers()


def test_labs_beside_each_other_do_not_meet(lab_factory: LabFactory):
    one, other = lab_factory(hosts=2), lab_factory(hosts=2)
    assert one.name != other.name
    other.cut()
    before = other.interface_bytes(0)
    assert one.run(["ip", "route", "get", one.address(1)], timeout_s=60).ok
    assert other.interface_bytes(0) == before
