import os
import signal
import subprocess
import sys
import time

import pytest
from tests.support.waiting import until

from ringside.processes import (
    Process,
    RankWatch,
    children,
    descendants,
    end_all,
    hold,
    is_running,
    rank_of,
    read_stat,
    start_time,
)

PATIENCE_S = 60.0


def start(code, **environ):
    """Start a process; what it reads with `input()` never comes."""
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env={**os.environ, **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture
def started():
    processes = []
    yield lambda *args, **environ: processes.append(start(*args, **environ)) or processes[-1]
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_process_is_held_until_it_ends(started):
    child = started("input()")
    held = Process(child.pid)
    assert held.alive()
    assert child.pid in children(os.getpid())
    held.send(signal.SIGKILL)
    child.wait()
    assert not held.alive()
    held.send(signal.SIGKILL)  # nothing happens
    held.close()
    assert not held.alive()
    assert hold(child.pid) is None


def test_a_process_is_named_by_its_number_and_its_start(started):
    child = started("input()")
    began = start_time(child.pid)
    assert began >= start_time(os.getpid()) > 0
    assert is_running(child.pid, began)
    assert not is_running(child.pid, began + 1)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read_stat(child.pid).exit_code == signal.SIGKILL
    assert not is_running(child.pid, began), "it has ended, and is not waited for yet"
    child.wait()
    assert (start_time(child.pid), is_running(child.pid, began)) == (0, False)


def test_ranks_are_known_by_their_environment(started):
    child = started("print(1, flush=True); input()", RANK="7")
    child.stdout.readline()
    assert rank_of(child.pid) == 7
    assert rank_of(2**30) is None


LAUNCHER = """
import os, signal, subprocess, sys
code = {ranks!r}
ranks = [subprocess.Popen([sys.executable, "-c", c], env={{**os.environ, "RANK": str(r)}}) for r, c in enumerate(code)]
print(flush=True)
input_is_never_given = signal.pause()
"""


def test_deaths_are_seen_in_order_with_what_they_died_of(started):
    ranks = [
        "import time, sys; time.sleep(1.5); sys.exit(3)",
        "import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)",
        "import time; time.sleep(3600)",
    ]
    launcher = started(LAUNCHER.format(ranks=ranks))
    launcher.stdout.readline()
    watch = RankWatch(launcher.pid)
    deadline = time.monotonic() + PATIENCE_S
    while len(watch.deaths) < 2 and time.monotonic() < deadline:
        watch.poll(0.1)
    assert [(death.rank, death.status, death.signum) for death in watch.deaths] == [(1, None, 9), (0, 3, 0)]
    assert watch.deaths[0].signal_name == "SIGKILL"
    assert end_all(Process(launcher.pid), signal.SIGKILL, (10, 10, 10), lambda: False)
    watch.close()


def test_the_stubborn_are_killed_with_all_that_they_started(started):
    stubborn = (
        "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; print(flush=True); time.sleep(3600)"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); {stubborn}"
    child = started(code)
    child.stdout.readline()
    child.stdout.readline()
    (below,) = map(Process, descendants(child.pid))
    assert end_all(Process(child.pid), signal.SIGINT, (0.1, 0.1, PATIENCE_S), lambda: False)
    until(lambda: not below.alive())
    below.close()


def test_a_child_dies_with_its_parent(started):
    child = "import signal; from ringside.processes import *; die_with_parent(); print(flush=True); signal.pause()"
    parent = started(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()")
    parent.stdout.readline()
    (below,) = descendants(parent.pid)
    held = Process(below)
    parent.kill()
    until(lambda: not held.alive())
    held.close()
