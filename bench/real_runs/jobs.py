"""Real jobs, started by torchrun or in the lab, followed and concluded; `bench/monitor/price.py` uses them too."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import module_command, processor_ticks

from ringside.errors import RingsideError
from ringside.faults.inject import Hang, Kill, Stop, parse_fault
from ringside.launch.follow import conclude_run, environment, follow_run
from ringside.launch.torchrun import Launch, StopRequest, stop_requests
from ringside.monitor.run.directory import RunReader
from ringside.monitor.verdict import Verdict
from ringside.view.run.follower import RunFollower, ShownFinding

# What a job's engine is called here, and what `attach()` calls it.
ENGINES = {"ringside": "ringside", "gloo": "native"}
RANK = "bench.real_runs.rank"
HEALTHY_STEPS = 60  # before a fault begins: what is usual has to be known
# What is usual for a link is learnt from some ten seconds, whatever a step takes.
LINK_STEPS = 520
RATE, SLOW_RATE = "1gbit", "100mbit"
LIMIT_S = 120.0  # for a whole run
STACKS_S = 1.5  # from the verdict of a hang until the job is ended: time for all ranks to write their stacks


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        engine: One of `ENGINES`.
        inject: The fault, in words.
        steps: How many.
        ranks: How many.
        model: `gpt`, `waiting` or `tiny`.
        seconds: When to end, if that is before `steps`.
        slow_link: Run each rank on a host of its own in the lab, and slow one of their links down at `LINK_STEPS`.
    """

    engine: str
    inject: str = "none"
    steps: int = 160
    ranks: int = 2
    model: str = "gpt"
    seconds: float = math.inf
    slow_link: bool = False


@dataclass
class Ended:
    """What became of a run.

    Args:
        path: Its directory.
        summary: The content of its `summary.json`.
        verdicts: Its verdicts.
        ends: When each step ended on rank 0, seconds; empty where the run was cut short.
        log: The last lines that its ranks wrote.
    """

    path: Path
    summary: dict[str, Any]
    verdicts: list[Verdict]
    ends: list[float] = field(default_factory=list)
    log: str = ""


def run_job(job: Job, path: Path) -> Ended:
    """Run a job into a new directory.

    Raises:
        RingsideError: It failed, though nothing was injected that could have made it.
    """
    path.mkdir(parents=True)
    log: deque[str] = deque(maxlen=30)
    variables = surroundings(job.engine, path)
    words = [
        RANK,
        f"--steps={job.steps}",
        f"--inject={job.inject}",
        f"--model={job.model}",
        f"--seconds={job.seconds}",
    ]
    began = time.monotonic()
    with stop_requests() as stop:
        if job.slow_link:
            status, deaths = _in_lab(path, job.ranks, words, variables, log), []
        else:
            launch = Launch([*launcher(job.ranks), "-m", *words], variables, sink=log.append)
            status = follow_run(launch, path, stop, lambda run, found: _watch(job, launch, stop, began, run, found))
            deaths = launch.deaths
    if stop.signum:
        raise KeyboardInterrupt
    concluded = conclude_run(path, deaths)
    fault = parse_fault(job.inject)
    ends = path / "ends.json"
    if concluded is None or (status and not isinstance(fault, Hang | Stop | Kill)):
        raise RingsideError(f"{job} failed with exit status {status}:\n" + "\n".join(log))
    return Ended(path, *concluded, ends=json.loads(ends.read_text()) if ends.exists() else [], log="\n".join(log))


def surroundings(engine: str, path: Path) -> dict[str, str]:
    """Return the environment of a job's ranks."""
    variables = {name: value for name, value in environment(path).items() if name != "RINGSIDE_SELECTION"}
    return variables | {"OMP_NUM_THREADS": "1", "RINGSIDE": "", "RINGSIDE_ENGINE": ENGINES[engine]}


def launcher(ranks: int) -> list[str]:
    """Return what torchrun is told for ranks on this host."""
    return ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]


# When a hang was named first, by the launcher: seconds on the monotonic clock.
_named: dict[int, float] = {}


def _watch(
    job: Job, launch: Launch, stop: StopRequest, began: float, run: RunFollower, found: list[ShownFinding]
) -> None:  # fmt: skip
    """End a job that hangs for good once it was named, and any that takes too long."""
    now = time.monotonic()
    lasting = isinstance(parse_fault(job.inject), Hang | Stop)
    if lasting and any(finding.verdict.kind == "hang" for finding in run.findings):
        _named.setdefault(launch.pid, now)
    if now - began > LIMIT_S or now - _named.get(launch.pid, now) > STACKS_S:
        _named.pop(launch.pid, None)
        launch.end(signal.SIGTERM)


def _in_lab(path: Path, hosts: int, words: list[str], variables: dict[str, str], log: deque[str]) -> int:
    """Run each rank on a host of its own, and slow one link down when the healthy steps are recorded."""
    from ringside.lab import Lab

    given = {name: value for name, value in variables.items() if name.startswith(("RINGSIDE", "OMP_"))}
    lab = Lab(hosts=hosts, rate=RATE, wiring="mesh")
    with lab, _at_step(path, LINK_STEPS, lambda: lab.set_rate(SLOW_RATE, link=(0, 1))):
        result = lab.run(
            module_command(*words), env=given, timeout_s=LIMIT_S, sink=lambda place, stream, line: log.append(line)
        )
    return result.exit_status


@contextlib.contextmanager
def _at_step(path: Path, step: int, act: Any) -> Iterator[None]:
    """Within it, `act()` is called once when a training step is recorded."""
    over = threading.Event()

    def follow_records() -> None:
        reader = None
        while not over.wait(0.02):
            with contextlib.suppress(RingsideError):
                reader = reader or RunReader(path)
                if any(record.step >= step for record in reader.poll()):
                    act()
                    return

    thread = threading.Thread(target=follow_records, name="bench-at-step", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def load() -> str:
    """Return in words how busy the machine is."""
    return f"load {os.getloadavg()[0]:.1f}"


class Others:
    """How many cores other processes of this machine kept busy since this was made."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def cores(self) -> float:
        """Return the mean; what is called ours are this process and the children it has waited for."""
        theirs = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return max(theirs / (time.monotonic() - self._began), 0.0)


def _busy_seconds() -> float:
    idle, every = processor_ticks()
    return (every - idle) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
