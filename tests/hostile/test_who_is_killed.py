"""Whoever is left out is killed, but never on the word of the store: anybody may write any process's number there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ringside.processes import read_stat, start_time
from ringside.survive.cluster.known_workers import KnownWorkers
from ringside.survive.cluster.peers import PeerPlace, own_place
from ringside.survive.cluster.registers import MemoryRegisters
from ringside.survive.cluster.rendezvous import Rendezvous

WORKER = str(Path(__file__).parent / "scripts" / "marked_worker.py")


@pytest.fixture
def start():
    """Start a process that prints a line once it is ready; it is ended at the end."""
    started = []

    def begin(*words, **environ):
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
        started.append(process)
        return process, process.stdout.readline()

    yield begin
    for process in started:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


@pytest.fixture
def known():
    rendezvous = Rendezvous(MemoryRegisters(), 2)
    found = KnownWorkers(rendezvous, 1, lambda _: 0.0)
    yield rendezvous, found
    found.close()


def ensure_dead(known, pid):
    """Leave a rank out that the store says is a process; return whether that one lives on."""
    rendezvous, found = known
    seat = rendezvous.claim(1, 1, PeerPlace(own_place().machine, pid, start_time(pid)))
    found.ensure_dead(seat)
    found.close()
    stat = read_stat(pid)
    return stat is not None and not stat.ended


def test_a_process_that_is_no_worker_is_left_alone(start, known, caplog):
    process, _ = start("-c", "import sys; print(flush=True); sys.stdin.read()")
    assert ensure_dead(known, process.pid)
    assert "shows no sign of being one: it is not killed" in caplog.text


def test_a_worker_of_this_job_is_killed_and_nobody_else_of_its_kind(start, known):
    process, child = start(WORKER)
    assert ensure_dead(known, int(child))
    another_job, _ = start(WORKER, MASTER_PORT="1")
    assert ensure_dead(known, another_job.pid)
    who_left, _ = start(WORKER, "left")
    assert ensure_dead(known, who_left.pid)
    assert not ensure_dead(known, process.pid)


def test_a_name_alone_is_no_sign(start, known):
    worker, _ = start(WORKER)
    links = (os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{worker.pid}/fd"))
    (name,) = (link.removeprefix("/memfd:").removesuffix(" (deleted)") for link in links if link.startswith("/memfd:"))
    script = "import os, sys; fd = os.memfd_create(sys.argv[1]); print(flush=True); sys.stdin.read()"
    process, _ = start("-c", script, name)
    assert ensure_dead(known, process.pid)
