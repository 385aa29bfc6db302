"""What the kernel knows of this process: whether it had a CPU whenever it wanted one, and what kept it from working.

| what | where | missing where |
|---|---|---|
| ready to run without a CPU | `/proc/self/task/*/schedstat` | kernels without CONFIG_SCHED_INFO |
| throttled by a CPU quota | `cpu.stat` of its cgroups, v1 and v2 | no quota, or no cgroup to be seen |
| steal | `/proc/stat`, of the CPUs it may run on | |
| page faults from disk, preemptions | `getrusage` | |
| bytes written to storage | `/proc/self/io` | kernels without CONFIG_TASK_IO_ACCOUNTING |
| want of memory | `memory.pressure` of its cgroup, else `/proc/pressure/memory` | kernels without PSI |
| clock, temperature and power of its GPU | NVML (`gpu.py`) | no GPU, no `nvidia-ml-py` |

What cannot be read is absent, without a word. Only `RunDelay` is on the path of a training step: for the rest the
session's own thread reads, and never more often than a thousandth of its time allows.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ringside.monitor.run.records import Vitals
from ringside.monitor.vitals.cgroup import CpuCgroup, KeptFile, as_number, parse_figures
from ringside.monitor.vitals.gpu import NvmlGpu

THREADS = 32
"""So many threads of the process are watched, the oldest ones: those that compute are made at the start."""

LARGEST_SHARE = 1e-3
"""Reading takes at most this share of the time: a call that comes sooner returns nothing."""

_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq: the columns of /proc/stat in which a CPU works for us
_STEAL = 7

Clock = Callable[[], float]


class Used(NamedTuple):
    """What the process has used so far.

    Args:
        cpu_seconds: CPU time of all its threads.
        major_faults: Page faults that read from a disk.
        preemptions: Involuntary context switches.
    """

    cpu_seconds: float
    major_faults: int
    preemptions: int


def _process_usage() -> Used:
    """Return what this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Used(used.ru_utime + used.ru_stime, used.ru_majflt, used.ru_nivcsw)


class VitalSigns:
    """Reads again and again how this process does; returns what happened in between. Not for several threads at once.

    Args:
        root: What `/` is (tests give a tree of their own).
        now: Monotonic seconds.
        cost: CPU seconds of the calling thread: what reading costs is measured with it.
        usage: What the process has used so far.
        cpus: Which CPUs it may run on.

    Attributes:
        gpu: Reads its GPU, if it has one that can be read.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        now: Clock = time.monotonic,
        cost: Clock = time.thread_time,
        usage: Callable[[], Used] = _process_usage,
        cpus: Callable[[], set[int]] = lambda: os.sched_getaffinity(0),
    ) -> None:
        self.gpu: NvmlGpu | None = None
        self._now, self._cost, self._usage, self._cpus = now, cost, usage, cpus
        self._cgroup = CpuCgroup(root)
        self._threads = _Threads(root / "proc/self/task")
        self._stat = KeptFile(root / "proc/stat")
        self._swap = KeptFile(root / "proc/vmstat")
        self._io = KeptFile(root / "proc/self/io")
        self._root = root
        self._pressure: KeptFile | None = None
        self._counted: dict[str, float | None] = {}
        self._reading_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin anew: what happened until now belongs to nobody."""
        self._began = self._now()
        self._read(0.0)

    def since(self) -> Vitals | None:
        """Return what happened since the last call that returned something; None where that is too short ago."""
        began, now = self._began, self._now()
        if now - began <= self._reading_s / LARGEST_SHARE:
            return None
        self._began, cost = now, self._cost()
        known = self._read(now - began)
        self._reading_s = self._cost() - cost
        return Vitals(seconds=now - began, reading_seconds=self._reading_s, **known)  # type: ignore[arg-type]

    def close(self) -> None:
        """Give all descriptors back."""
        for part in (self._cgroup, self._threads, self._stat, self._swap, self._io, self._pressure, self.gpu):
            if part is not None:
                part.close()

    def _growth(self, counter: str, count: float | None) -> float | None:
        """Return by how much a counter has grown since it was read last; None: it cannot be read, now or then."""
        before, self._counted[counter] = self._counted.get(counter), count
        return None if before is None or count is None else count - before

    def _read(self, seconds: float) -> dict[str, float | None]:
        """Return what happened in the last `seconds`, by fields of `Vitals`; what cannot be read is None or absent."""
        known: dict[str, float | None] = {}
        # Steal, of the CPUs it may run on.
        cpus = self._cpus()
        known["cpus"] = len(cpus) or None
        ticks = _ticks(self._stat.read(), cpus) or (None, None)
        stolen, wanted = self._growth("stolen", ticks[0]), self._growth("wanted", ticks[1])
        if stolen is not None and wanted is not None:
            known["steal_ratio"] = min(max(stolen / wanted, 0.0), 1.0) if wanted > 0 else 0.0

        # What it used, its faults, and pages read back from swap: that file is long, so it is read only where there
        # were faults, and once before.
        used = self._usage()
        known["cpu_seconds"] = self._growth("cpu_seconds", used.cpu_seconds)
        known["major_faults"] = faults = self._growth("major_faults", used.major_faults)
        known["preemptions"] = self._growth("preemptions", used.preemptions)
        if faults or (faults is not None and self._counted.get("swapped") is None):
            known["swapped_in_pages"] = self._growth("swapped", parse_figures(self._swap.read()).get("pswpin"))

        known |= self._threads.read()
        known["written_bytes"] = self._growth("written", parse_figures(self._io.read()).get("write_bytes:"))

        # Throttled time as the process feels it. The kernel adds it up over CPUs. Threads that always want a CPU run on
        # cpu / running time of them and stand still on as many, so of the time the share throttled / (cpu + throttled)
        # is lost, if that is more than all.
        quota = self._cgroup.read()
        if quota is not None:
            throttled, cpu_seconds = quota.throttled_seconds, float(known.get("cpu_seconds") or 0.0)
            felt = throttled * seconds / max(seconds, cpu_seconds + throttled) if throttled else 0.0
            known |= {"throttled_seconds": felt, "quota_cpus": quota.cpus}

        # Want of memory, in its own cgroup, or else on the machine: `some avg10=.. total=<µs>`.
        if self._pressure is None:
            self._pressure = KeptFile(self._cgroup.memory_pressure() or self._root / "proc/pressure/memory")
        lines = (line.partition("total=") for line in (self._pressure.read() or "").splitlines())
        micros = next((as_number(total) for kind, _, total in lines if kind.startswith("some")), None)
        stalled = self._growth("stalled", None if micros is None else micros / 1e6)
        known["memory_stalled_seconds"] = None if stalled is None else max(stalled, 0.0)
        return known | (self.gpu.read() if self.gpu is not None else {})


class RunDelay:
    """Tells how long the calling thread has been ready to run and had no CPU, in seconds, up to now.

    The second figure of its `schedstat`; about 1 µs a call. NaN where the kernel does not keep it, after `close`, and
    for the first call on another thread than the last: what the two say cannot be subtracted.
    """

    def __init__(self) -> None:
        self._thread, self._fd, self._is_closed = 0, -1, False

    def __call__(self) -> float:
        """Return the seconds."""
        thread = threading.get_native_id()
        try:
            if thread != self._thread:
                self._give_back()
                self._thread = thread
                if not self._is_closed:
                    self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                return math.nan
            return int(os.pread(self._fd, 64, 0).split()[1]) / 1e9 if self._fd >= 0 else math.nan
        except (OSError, ValueError, IndexError):
            self._give_back()
            return math.nan

    def close(self) -> None:
        """Give the descriptor back, for good; another thread may call it while the first one still asks."""
        self._is_closed = True
        self._give_back()

    def _give_back(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class _Threads:
    """Run and wait times of the threads of a process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, KeptFile] = {}
        self._times: dict[str, tuple[float, float]] = {}

    def read(self) -> dict[str, float | None]:
        """Return what the thread that wanted a CPU longest since the last call got of it."""
        with contextlib.suppress(OSError):
            # Thread ids grow: the shortest, then the least, are the oldest threads.
            names = sorted(os.listdir(self._directory), key=lambda name: (len(name), name))[:THREADS]
            for gone in self._files.keys() - set(names):
                self._files.pop(gone).close()
            for new in set(names) - self._files.keys():
                self._files[new] = KeptFile(self._directory / new / "schedstat")
        before, self._times = self._times, {}
        for thread, file in self._files.items():
            # Nanoseconds that it ran, and that it was ready to run.
            times = [as_number(word) for word in (file.read() or "").split()[:2]]
            if len(times) == 2 and times[0] is not None and times[1] is not None:
                self._times[thread] = (times[0] / 1e9, times[1] / 1e9)
        spent = [
            (ran - before[thread][0], waited - before[thread][1])
            for thread, (ran, waited) in self._times.items()
            if thread in before
        ]
        if not spent:
            return {}
        ran, waited = max(spent, key=sum)
        return {"ran_seconds": max(ran, 0.0), "waited_seconds": max(waited, 0.0)}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}


def _ticks(text: str | None, cpus: set[int]) -> tuple[float, float] | None:
    """Return (stolen, stolen + busy) ticks of some CPUs, of all where none is named in `/proc/stat`."""
    rows = {line.partition(" ")[0]: line for line in (text or "").splitlines() if line.startswith("cpu")}
    own = [rows[name] for cpu in cpus if (name := f"cpu{cpu}") in rows]
    if not own or len(own) == len(rows) - 1:  # all of them: the kernel's own sum
        own = [rows["cpu"]] if "cpu" in rows else []
    columns = [[as_number(word) or 0 for word in row.split()[1:]] for row in own]
    whole = [column for column in columns if len(column) > _STEAL]
    if not whole:
        return None
    stolen = sum(column[_STEAL] for column in whole)
    return stolen, stolen + sum(column[index] for column in whole for index in _BUSY)
