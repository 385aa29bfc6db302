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
    catches,
    children,
    descendants,
    end_all,
    handle_signals,
    has_ended,
    hold,
    host_key,
    is_running,
    machine_id,
    namespace_id,
    rank_of,
    read_stat,
    signal_mask,
    signal_name,
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


def test_what_the_kernel_tells_is_read_by_its_place(tmp_path):
    """Fields 14 and 15 of stat are ticks in user and system mode, 22 is the start, 52 the exit code: proc(5)."""
    (tmp_path / "9").mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    told = {1: "9", 2: "(python) R (x)", 14: str(3 * ticks), 15: str(ticks), 16: "777", 22: "4242", 52: "9"}
    for state, ended, stopped in (("R", 0, 0), ("Z", 1, 0), ("X", 1, 0), ("T", 0, 1), ("t", 0, 1)):
        fields = {**told, 3: state}
        (tmp_path / "9" / "stat").write_text(" ".join(fields.get(n, "1") for n in range(1, 53)))
        stat = read_stat(9, str(tmp_path))
        assert stat == (state, 4.0, 4242, 9)
        assert (stat.ended, stat.stopped) == (ended, stopped)
    # bit 0 is signal 1, SIGHUP; bit 14 is signal 15, SIGTERM
    (tmp_path / "9" / "status").write_text("Name:\tx\nSigBlk:\t0000000000000001\nSigCgt:\t0000000000004001\n")
    assert signal_mask(9, "SigBlk", str(tmp_path)) == 1
    assert signal_mask(9, "SigIgn", str(tmp_path)) is None
    assert [n for n in range(1, 65) if catches(9, n, str(tmp_path))] == [signal.SIGHUP, signal.SIGTERM]


def test_a_signal_has_a_name_or_its_number():
    assert (signal_name(9), signal_name(999)) == ("SIGKILL", "signal 999")


def test_handlers_are_those_of_before_afterwards():
    seen = []
    before = signal.getsignal(signal.SIGUSR1)
    with handle_signals([signal.SIGUSR1], lambda number, frame: seen.append(number)):
        signal.raise_signal(signal.SIGUSR1)
    assert (seen, signal.getsignal(signal.SIGUSR1)) == ([signal.SIGUSR1], before)


def test_a_pidfd_that_stands_for_this_process_has_not_ended(started):
    child = started("input()")
    fd = os.pidfd_open(child.pid)
    assert (has_ended(-1), has_ended(fd)) == (False, False)
    child.kill()
    child.wait()
    assert has_ended(fd)
    os.close(fd)


def test_where_a_process_runs(monkeypatch):
    monkeypatch.delenv("RINGSIDE_MACHINE", raising=False)
    boot, net = machine_id().split("/")
    assert (len(boot), net) == (36, str(namespace_id("net")))
    assert host_key() == f"{boot}/{namespace_id('pid')}/{os.getuid()}"
    monkeypatch.setenv("RINGSIDE_MACHINE", "one of two")
    assert machine_id() == "one of two"


def test_what_is_let_go_of_has_ended_for_its_holder_and_is_left_alone(started):
    child = started("input()")
    held = Process(child.pid)
    assert not held.wait(0.0)
    held.close()
    held.close()  # once more does nothing
    assert (held.alive(), held.wait(0.0), child.poll()) == (False, True, None)


def test_who_is_in_a_hurry_waits_for_nobody(started):
    """Each grace is given up at once: the third signal, which nobody outlives, comes without any wait before it."""
    ignores = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]"
    child = started(f"{ignores}; print(flush=True); signal.pause()")
    child.stdout.readline()
    asked = []

    def hurry():
        asked.append(len(asked))
        return len(asked) <= 2

    assert end_all(Process(child.pid), signal.SIGINT, (600.0, 600.0, PATIENCE_S), hurry)
    assert asked[:3] == [0, 1, 2]


def test_the_first_signal_is_the_launchers_alone(started):
    """It hands that on itself: a rank that got it twice might end while it saves."""
    rank = "import signal; signal.signal(2, lambda *_: print('again', flush=True)); print(1, flush=True); input()"
    child = started(
        f"""
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", {rank!r}], stdin=subprocess.PIPE)
def end(*_):
    rank.communicate(b"\\n")
    sys.exit(rank.returncode)
signal.signal(2, end)
signal.pause()
"""
    )
    assert child.stdout.readline() == b"1\n"
    assert end_all(Process(child.pid), signal.SIGINT, (PATIENCE_S, 0.0, 0.0), lambda: False)
    assert child.wait() == 0
    assert child.stdout.read() == b""


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
