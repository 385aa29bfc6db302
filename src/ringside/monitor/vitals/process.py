"""What the kernel knows of this process: whether it had a CPU whenever it wanted one, and what kept it from working.

| asked | where | gone where |
|---|---|---|
| ready to run without a CPU | `/proc/self/task/*/schedstat` | kernels without CONFIG_SCHED_INFO |
| throttled by a CPU quota | `cpu.stat` of its cgroups, v1 and v2 | no quota, or no cgroup to be seen |
| steal | `/proc/stat`, of the CPUs it may run on | |
| page faults from disk, preemptions | `getrusage` | |
| want of memory | `memory.pressure` of its cgroup, else `/proc/pressure/memory` | kernels without PSI |
| clock, temperature and power of its GPU | NVML (`vitals_gpu`) | no GPU, no `nvidia-ml-py` |

What cannot be read is absent, without a word. Nothing here is on the path of a training step: the session's own thread
asks, and never more often than a thousandth of its time allows.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from ringside.monitor.run.records import Vitals
from ringside.monitor.vitals.cgroup import CpuCgroup, KeptFile, as_number, figures

if sys.platform != "win32":
    import resource

THREADS = 32
"""So many threads of the process are watched, the oldest ones: those that compute are made at the start."""

LARGEST_SHARE = 1e-3
"""Asking takes at most this share of the time: who asks sooner is told nothing."""

_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq: the columns of /proc/stat in which a CPU works for us
_STEAL = 7

Clock = Callable[[], float]


class Gpu(Protocol):
    """Says how a GPU does."""

    def ask(self) -> dict[str, float | int]:
        """Return fields of `Vitals` that begin with `gpu_`, as far as they are known."""

    def close(self) -> None:
        """Let go of the driver."""


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


def process_usage() -> Used | None:
    """Return what this process has used so far; None where the system does not say."""
    if sys.platform == "win32":
        return None
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Used(used.ru_utime + used.ru_stime, used.ru_majflt, used.ru_nivcsw)


def usable_cpus() -> set[int]:
    """Return the CPUs this process may run on; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


class VitalSigns:
    """Asks again and again how this process does, and says what happened in between. Not for several threads at once.

    Args:
        root: What `/` is (tests give a tree of their own).
        gpu: Says how its GPU does, if it has one.
        now: Monotonic seconds.
        cost: CPU seconds of the calling thread: what asking costs is measured with it.
        usage: What the process has used so far.
        cpus: Which CPUs it may run on.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        gpu: Gpu | None = None,
        now: Clock = time.monotonic,
        cost: Clock = time.thread_time,
        usage: Callable[[], Used | None] = process_usage,
        cpus: Callable[[], set[int]] = usable_cpus,
    ) -> None:
        self.gpu = gpu
        self._now, self._cost, self._usage, self._cpus = now, cost, usage, cpus
        self._cgroup = CpuCgroup(root)
        self._threads = _Threads(root / "proc/self/task")
        self._stat = KeptFile(root / "proc/stat")
        self._swap = KeptFile(root / "proc/vmstat")
        self._root = root
        self._pressure: KeptFile | None = None
        self._began = self._now()
        self._used: Used | None = None
        self._ticks: tuple[float, float] | None = None
        self._stalled: float | None = None
        self._swapped: float | None = None
        self._reading_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin anew: what happened until now belongs to nobody."""
        self._began = self._now()
        self._ask(0.0)

    def since(self) -> Vitals | None:
        """Return what happened since the last call that returned something; None where that is too short ago."""
        began, now = self._began, self._now()
        if now - began <= self._reading_s / LARGEST_SHARE:
            return None
        self._began, cost = now, self._cost()
        known = self._ask(now - began)
        self._reading_s = self._cost() - cost
        return Vitals(seconds=now - began, reading_seconds=self._reading_s, **known)  # type: ignore[arg-type]

    def close(self) -> None:
        """Give all descriptors back."""
        for part in (self._cgroup, self._threads, self._stat, self._swap, self._pressure, self.gpu):
            if part is not None:
                part.close()

    def _ask(self, seconds: float) -> dict[str, float | int | None]:
        cpus = self._cpus()
        known: dict[str, float | int | None] = {"cpus": len(cpus) or None, "steal_ratio": self._steal(cpus)}
        known |= self._use()
        known |= self._threads.ask()
        known |= self._throttled(seconds, float(known.get("cpu_seconds") or 0.0))
        known["memory_stalled_seconds"] = self._memory()
        return known | (self.gpu.ask() if self.gpu is not None else {})

    def _use(self) -> dict[str, float | int | None]:
        before, self._used = self._used, self._usage()
        if before is None or self._used is None:
            return {}
        faults = self._used.major_faults - before.major_faults
        return {
            "cpu_seconds": self._used.cpu_seconds - before.cpu_seconds,
            "major_faults": faults,
            "preemptions": self._used.preemptions - before.preemptions,
            "swapped_in_pages": self._swap_ins(faults),
        }

    def _swap_ins(self, faults: int) -> int | None:
        """Pages read back from swap; the file is long, so it is read only where there were faults, and once before."""
        if not faults and self._swapped is not None:
            return None
        before, self._swapped = self._swapped, figures(self._swap.read()).get("pswpin")
        return None if before is None or self._swapped is None else int(self._swapped - before)

    def _throttled(self, seconds: float, cpu_seconds: float) -> dict[str, float | int | None]:
        """Throttled time as the process feels it.

        The kernel adds it up over CPUs. Threads that always want a CPU run on cpu / running time of them and stand
        still on as many, so of the time the share throttled / (cpu + throttled) is lost, if that is more than all.
        """
        quota = self._cgroup.ask()
        if quota is None:
            return {}
        stood = quota.throttled_seconds
        felt = stood * seconds / max(seconds, cpu_seconds + stood) if stood else 0.0
        return {"throttled_seconds": felt, "quota_cpus": quota.cpus}

    def _steal(self, cpus: set[int]) -> float | None:
        ticks = _ticks(self._stat.read(), cpus)
        before, self._ticks = self._ticks, ticks
        if before is None or ticks is None:
            return None
        stolen, wanted = ticks[0] - before[0], ticks[1] - before[1]
        return min(max(stolen / wanted, 0.0), 1.0) if wanted > 0 else 0.0

    def _memory(self) -> float | None:
        if self._pressure is None:
            own = self._cgroup.memory_pressure()
            self._pressure = KeptFile(own or self._root / "proc/pressure/memory")
        before, self._stalled = self._stalled, _some_total(self._pressure.read())
        return None if before is None or self._stalled is None else max(self._stalled - before, 0.0)


class _Threads:
    """Run and wait times of the threads of a process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, KeptFile] = {}
        self._times: dict[str, tuple[float, float]] = {}

    def ask(self) -> dict[str, float | int | None]:
        """Return what the thread that wanted a CPU longest since the last call got of it."""
        before, self._times = self._times, self._read()
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

    def _read(self) -> dict[str, tuple[float, float]]:
        with contextlib.suppress(OSError):
            self._keep(sorted(os.listdir(self._directory), key=lambda name: (len(name), name))[:THREADS])
        times = {thread: _schedstat(file.read()) for thread, file in self._files.items()}
        return {thread: time for thread, time in times.items() if time is not None}

    def _keep(self, threads: list[str]) -> None:
        for gone in self._files.keys() - set(threads):
            self._files.pop(gone).close()
        for new in set(threads) - self._files.keys():
            self._files[new] = KeptFile(self._directory / new / "schedstat")


def _schedstat(text: str | None) -> tuple[float, float] | None:
    words = (text or "").split()
    times = [as_number(word) for word in words[:2]]
    if len(times) < 2 or times[0] is None or times[1] is None:
        return None
    return times[0] / 1e9, times[1] / 1e9


def _ticks(text: str | None, cpus: set[int]) -> tuple[float, float] | None:
    """Return (stolen, stolen + busy) ticks of some CPUs, of all where none is named in `/proc/stat`."""
    rows = {line.partition(" ")[0]: line for line in (text or "").splitlines() if line.startswith("cpu")}
    mine = [rows[name] for cpu in cpus if (name := f"cpu{cpu}") in rows]
    if not mine or len(mine) == len(rows) - 1:
        mine = [rows["cpu"]] if "cpu" in rows else []
    columns = [[as_number(word) or 0.0 for word in row.split()[1:]] for row in mine]
    whole = [column for column in columns if len(column) > _STEAL]
    if not whole:
        return None
    stolen = sum(column[_STEAL] for column in whole)
    return stolen, stolen + sum(column[index] for column in whole for index in _BUSY)


def _some_total(text: str | None) -> float | None:
    """Return the seconds of the line `some avg10=.. total=<µs>` of a pressure file."""
    for line in (text or "").splitlines():
        kind, _, total = line.partition("total=")
        if kind.startswith("some") and (micros := as_number(total)) is not None:
            return micros / 1e6
    return None
