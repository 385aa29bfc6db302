"""What is read of the kernel's files, from trees as they are written on real machines."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ringside.monitor.vitals.process import LARGEST_SHARE, THREADS, RunDelay, Used, VitalSigns

from .machines import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def watch(machine: Machine, cpus: set[int] | None = None, used: list[Used] | None = None) -> VitalSigns:
    usages = iter(used or [])
    return VitalSigns(
        machine.root,
        now=lambda: machine.time,
        cost=lambda: machine.cost,
        usage=lambda: next(usages, Used(0.0, 0, 0)),
        cpus=lambda: cpus if cpus is not None else {0, 1},
    )


def test_a_machine_that_shows_nothing_gives_only_the_time_and_what_the_process_used(machine: Machine) -> None:
    signs = watch(machine, cpus=set())
    machine.time += 2.0
    vitals = signs.since()
    assert vitals is not None
    assert vitals.seconds == 2.0
    known = {name for name in vitals.__struct_fields__ if getattr(vitals, name) is not None}
    assert known == {"seconds", "reading_seconds", "cpu_seconds", "major_faults", "preemptions"}


@pytest.mark.parametrize(
    "text", ["", "nonsense\n", "cpu\n", "1 2", "some\n", "\udc80".encode(errors="surrogateescape")]
)
def test_damaged_files_count_as_missing(machine: Machine, text: str | bytes) -> None:
    machine.lives_in("/job")
    paths = ["proc/stat", "proc/pressure/memory", "sys/fs/cgroup/job/cpu.max", "sys/fs/cgroup/job/cpu.stat"]
    for path in [*paths, "proc/vmstat"]:
        machine.write(path, "")
        (machine.root / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    signs = watch(machine, used=[Used(0, 0, 0), Used(0, 3, 0)])
    machine.time += 1.0
    vitals = signs.since()
    assert vitals is not None
    assert (vitals.steal_ratio, vitals.throttled_seconds, vitals.memory_stalled_seconds) == (None, None, None)
    assert (vitals.waited_seconds, vitals.swapped_in_pages, vitals.major_faults) == (None, None, 3)


def test_the_thread_that_wanted_a_cpu_longest_counts(machine: Machine) -> None:
    for tid, ran, waited in ((7, 5.0, 1.0), (8, 2.0, 9.0), (9, 0.5, 0.0)):
        machine.thread(tid, ran, waited)
    signs = watch(machine)
    machine.thread(7, 5.6, 1.3)  # wanted 0.9 s
    machine.thread(8, 2.1, 9.5)  # wanted 0.6 s
    machine.thread(10, 40.0, 40.0)  # has only just come
    machine.time += 1.0
    vitals = signs.since()
    assert vitals is not None
    assert vitals.ran_seconds == pytest.approx(0.6)
    assert vitals.waited_seconds == pytest.approx(0.3)
    machine.thread(10, 40.7, 40.2)
    machine.time += 1.0
    vitals = signs.since()
    assert vitals is not None
    assert (vitals.ran_seconds, vitals.waited_seconds) == pytest.approx((0.7, 0.2))


def test_only_the_oldest_of_very_many_threads_are_read(machine: Machine) -> None:
    for tid in range(100, 100 + THREADS + 50):
        machine.thread(tid, 0.0, 0.0)
    before = len(os.listdir("/proc/self/fd"))
    signs = watch(machine)
    assert len(os.listdir("/proc/self/fd")) - before < THREADS + 10
    machine.thread(99 + THREADS, 0.0, 0.4)
    machine.thread(100 + THREADS, 0.0, 0.9)
    machine.time += 1.0
    vitals = signs.since()
    assert vitals is not None
    assert vitals.waited_seconds == pytest.approx(0.4)
    signs.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("cpus", "ratio"), [({0}, 0.25), ({1}, 0.0), ({0, 1}, 0.25), ({7}, 0.25)])
def test_steal_is_a_share_of_the_time_in_which_its_cpus_had_work(
    machine: Machine, cpus: set[int], ratio: float
) -> None:
    machine.cpu(busy=1000, stolen=10)
    signs = watch(machine, cpus)
    machine.cpu(busy=1075, stolen=35)
    machine.time += 1.0
    vitals = signs.since()
    assert vitals is not None
    assert vitals.steal_ratio == pytest.approx(ratio)
    assert vitals.cpus == len(cpus)


def test_what_the_process_used(machine: Machine) -> None:
    machine.write("proc/vmstat", "nr_free_pages 5\npswpin 100\npswpout 9\n")
    signs = watch(machine, used=[Used(1.0, 5, 50), Used(1.8, 5, 53), Used(2.0, 25, 53)])
    machine.time += 1.0
    first = signs.since()
    machine.write("proc/vmstat", "nr_free_pages 5\npswpin 164\npswpout 9\n")
    machine.time += 1.0
    second = signs.since()
    assert first is not None
    assert second is not None
    assert (first.cpu_seconds, first.major_faults, first.preemptions) == (pytest.approx(0.8), 0, 3)
    assert first.swapped_in_pages is None  # nothing was faulted in: not asked
    assert (second.major_faults, second.swapped_in_pages) == (20, 64)


def test_what_the_process_wrote_to_storage(machine: Machine) -> None:
    machine.write("proc/self/io", "wchar: 900\nwrite_bytes: 4096\ncancelled_write_bytes: 0\n")
    signs = watch(machine)
    machine.write("proc/self/io", "wchar: 9000\nwrite_bytes: 12288\ncancelled_write_bytes: 4096\n")
    machine.time += 1.0
    first = signs.since()
    machine.write("proc/self/io", "")  # as a kernel without it has it
    machine.time += 1.0
    second = signs.since()
    assert first is not None
    assert second is not None
    assert (first.written_bytes, second.written_bytes) == (8192, None)


def test_want_of_memory_is_that_of_its_own_cgroup_where_it_has_one(machine: Machine) -> None:
    def pressure(path: str, total_s: float) -> None:
        line = "{} avg10=0.00 avg60=0.27 avg300=1.02 total={}\n"
        machine.write(path, line.format("some", round(total_s * 1e6)) + line.format("full", 5))

    pressure("proc/pressure/memory", 5.0)
    signs = watch(machine)
    pressure("proc/pressure/memory", 5.25)
    machine.time += 1.0
    of_the_machine = signs.since()
    machine.lives_in("/job")
    pressure("sys/fs/cgroup/job/memory.pressure", 1.0)
    signs = watch(machine)
    pressure("sys/fs/cgroup/job/memory.pressure", 1.5)
    machine.time += 1.0
    of_its_own = signs.since()
    assert of_the_machine is not None
    assert of_its_own is not None
    assert of_the_machine.memory_stalled_seconds == pytest.approx(0.25)
    assert of_its_own.memory_stalled_seconds == pytest.approx(0.5)


# ------------------------------------------------------------------------------------------------ quotas


def throttled(machine: Machine, before: float, after: float, write: object, seconds: float = 1.0) -> tuple:
    assert callable(write)
    write(before)
    signs = watch(machine)
    write(after)
    machine.time += seconds
    vitals = signs.since()
    assert vitals is not None
    return vitals.throttled_seconds, vitals.quota_cpus


def test_a_quota_of_version_2(machine: Machine) -> None:
    machine.lives_in("/job/rank")
    found = throttled(machine, 4.0, 4.38, lambda s: machine.quota_v2("job/rank", "150000 100000", s))
    assert found == (pytest.approx(0.38), 1.5)


def test_a_quota_of_version_1(machine: Machine) -> None:
    machine.lives_in("/docker/77", version=1)
    found = throttled(machine, 4.0, 4.38, lambda s: machine.quota_v1("docker/77", 50_000, s))
    assert found == (pytest.approx(0.38), 0.5)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_that_sees_its_own_cgroup_as_the_top(machine: Machine, version: int) -> None:
    """Without a cgroup namespace the path is the host's, and the mount shows which part of it is seen."""
    machine.lives_in("/kubepods/pod7/box", version=version, mounted="/kubepods/pod7/box")
    write = machine.quota_v1 if version == 1 else machine.quota_v2
    bound = 200_000 if version == 1 else "200000 100000"
    assert throttled(machine, 1.0, 1.5, lambda s: write(".", bound, s)) == (pytest.approx(0.5), 2.0)


@pytest.mark.parametrize("cgroup", ["/../sibling", "/quite/elsewhere"])
def test_a_path_outside_of_what_is_mounted_leads_to_the_mounted_one(machine: Machine, cgroup: str) -> None:
    machine.lives_in(cgroup, mounted="/quite/here" if cgroup == "/quite/elsewhere" else "/")
    found = throttled(machine, 0.0, 0.2, lambda s: machine.quota_v2(".", "50000 100000", s))
    assert found == (pytest.approx(0.2), 0.5)


def test_the_quota_above_that_stopped_it_longest_counts(machine: Machine) -> None:
    machine.lives_in("/pod/box")
    machine.quota_v2("pod/box", "400000 100000", 0.0)
    found = throttled(machine, 2.0, 2.6, lambda s: machine.quota_v2("pod", "100000 100000", s))
    assert found == (pytest.approx(0.6), 1.0)


def test_without_a_quota_nothing_is_said(machine: Machine) -> None:
    machine.lives_in("/job")
    assert throttled(machine, 1.0, 2.0, lambda s: machine.quota_v2("job", "max 100000", s)) == (None, None)
    machine.lives_in("/job", version=1)
    assert throttled(machine, 1.0, 2.0, lambda s: machine.quota_v1("job", -1, s)) == (None, None)


def test_throttled_cpus_are_added_up_by_the_kernel_and_lost_once(machine: Machine) -> None:
    """Eight threads, that ran 0.4 s and stood still for 0.6 s: 3.2 s of CPU time and 4.8 s throttled."""
    machine.lives_in("/job")
    machine.quota_v2("job", "320000 100000", 0.0)
    signs = watch(machine, used=[Used(0.0, 0, 0), Used(3.2, 0, 0)])
    machine.quota_v2("job", "320000 100000", 4.8)
    machine.time += 1.0
    vitals = signs.since()
    assert vitals is not None
    assert vitals.throttled_seconds == pytest.approx(0.6)


def test_a_process_that_is_moved_is_followed(machine: Machine) -> None:
    machine.lives_in("/old")
    machine.quota_v2("old", "50000 100000", 30.0)
    signs = watch(machine)
    machine.lives_in("/new")
    machine.quota_v2("new", "20000 100000", 500.0)
    machine.time += 1.0
    first = signs.since()
    machine.quota_v2("new", "20000 100000", 500.8)
    machine.time += 1.0
    second = signs.since()
    assert first is not None
    assert second is not None
    assert (first.throttled_seconds, first.quota_cpus) == (0.0, 0.2)  # what happened there before was not ours
    assert second.throttled_seconds == pytest.approx(0.8)


# ------------------------------------------------------------------------------------------------ how often


def test_asking_takes_a_bounded_share_of_the_time(machine: Machine) -> None:
    class Expensive:
        def read(self) -> dict[str, float | int]:
            machine.cost += 0.005
            return {"gpu_clock_mhz": 1200.0}

        def close(self) -> None: ...

    signs = watch(machine)
    signs.gpu = Expensive()
    told = 0
    for _ in range(1000):
        machine.time += 0.25
        told += signs.since() is not None
    assert machine.cost <= 250.0 * LARGEST_SHARE * 1.1
    assert told == pytest.approx(250.0 / (0.005 / LARGEST_SHARE), rel=0.1)


def test_what_was_skipped_belongs_to_nobody(machine: Machine) -> None:
    machine.thread(1, 0.0, 0.0)
    signs = watch(machine)
    machine.thread(1, 50.0, 50.0)
    machine.time += 100.0
    signs.restart()
    machine.thread(1, 50.5, 50.25)
    machine.time += 1.0
    vitals = signs.since()
    assert vitals is not None
    assert (vitals.seconds, vitals.ran_seconds, vitals.waited_seconds) == pytest.approx((1.0, 0.5, 0.25))


def test_this_very_process() -> None:
    """On the machine that runs the tests: whatever it shows is of the right kind, and threads may come and go."""
    signs = VitalSigns()
    for _ in range(3):
        thread = threading.Thread(target=sum, args=([1.0] * 200_000,))
        thread.start()
        thread.join()
        vitals = None
        while vitals is None:
            sum(range(10_000))
            vitals = signs.since()
        assert vitals.seconds > 0
        assert vitals.cpu_seconds is None or vitals.cpu_seconds > 0
        assert vitals.ran_seconds is None or 0 < vitals.ran_seconds <= 1.1 * vitals.seconds + 0.02
        assert vitals.steal_ratio is None or 0 <= vitals.steal_ratio <= 1
    signs.close()


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel keeps no schedstat")
def test_the_calling_thread_is_known_to_have_wanted_a_cpu_that_another_process_had() -> None:
    """Beside a busy loop on the same CPU it waits about half of the time; asleep it wants none."""
    delay, cpus = RunDelay(), os.sched_getaffinity(0)
    cpu = min(cpus)
    os.sched_setaffinity(0, {cpu})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        ended = time.process_time() + 0.3
        assert math.isnan(delay())  # the first reading of a thread
        before, delay_before = time.perf_counter(), delay()
        while time.process_time() < ended:
            pass
        wanted, took = delay() - delay_before, time.perf_counter() - before
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, cpus)
    assert wanted == pytest.approx(took - 0.3, abs=0.2 * took)
    assert wanted > 0.1 * took
    delay.close()
    assert math.isnan(delay())


def test_what_two_threads_wanted_of_a_cpu_is_not_compared() -> None:
    delay, seen = RunDelay(), []
    delay()
    first = delay()
    thread = threading.Thread(target=lambda: seen.extend([delay(), delay()]))
    thread.start()
    thread.join()
    assert math.isnan(seen[0])
    assert seen[1] >= 0.0
    assert math.isnan(delay())
    assert delay() >= first
    delay.close()
