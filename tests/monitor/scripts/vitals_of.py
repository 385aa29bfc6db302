"""What the kernel says of a process that does what is named, as JSON."""

from __future__ import annotations

import json
import mmap
import os
import resource
import sys
import time

from ringside.monitor.vitals.process import VitalSigns


def burn(cpu_seconds: float, longest: float = 20.0) -> None:
    until, late = time.thread_time() + cpu_seconds, time.monotonic() + longest
    while time.thread_time() < until and time.monotonic() < late:
        sum(range(1000))


def tell(signs: VitalSigns) -> None:
    vitals = signs.since()
    print(json.dumps({name: getattr(vitals, name) for name in vitals.__struct_fields__}))


def quota(members: str) -> None:
    with open(members, "w") as file:
        file.write(str(os.getpid()))
    signs = VitalSigns()
    burn(0.06)
    tell(signs)


def neighbour() -> None:
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    child = os.fork()
    if child == 0:
        burn(30.0)
        os._exit(0)
    try:
        signs = VitalSigns()
        burn(0.3)
        tell(signs)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def pages(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    signs = VitalSigns()
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    for place in range(0, len(mapped), 16 * mmap.PAGESIZE):
        _ = mapped[place]
    if resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before < 100:
        print("{}")  # a file system that lives in memory
    else:
        tell(signs)


DOES = {job.__name__: job for job in (quota, neighbour, pages)}
DOES[sys.argv[1]](*sys.argv[2:])
