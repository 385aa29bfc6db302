"""Starts the ranks, follows what they report, and ends them all, whatever happens."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from ringside.bench.messages import Begin, Done, Failed, Message, MessageReader, Sample, Skipped, WorkerHello
from ringside.bench.peers import MPI_4_MEMORY, MPI_MEMORY, MPIS, mpi_command
from ringside.bench.plan import BenchPlan
from ringside.bench.worker import PLAN
from ringside.errors import RingsideError
from ringside.processes import die_with_parent, signal_name

POLL_S = 0.1
_GRACE_S = 3.0
_LOG = "log"

Observer = Callable[[int, Message], None]
Reports = list[list[Message]]


class RanksFailed(RingsideError):
    """A rank failed, died or hung; `reports` are the messages until then."""

    def __init__(self, message: str, reports: Reports) -> None:
        super().__init__(message)
        self.reports = reports


def run_launches(
    plan: BenchPlan, observe: Observer = lambda rank, message: None
) -> tuple[list[Reports], list[Skipped]]:
    """Run a plan once per peer, each beside ours in ranks of its own; return what came of it, and what failed.

    A peer that does not start, hangs or crashes stops no other, and what it gave until then counts. Where there is no
    peer that ours could be measured beside, ours is measured alone.

    Raises:
        RanksFailed: Ours alone failed.
    """
    launches: list[Reports] = []
    skipped: list[Skipped] = []
    for peer in plan.peers:
        try:
            launches.append(run_ranks(msgspec.structs.replace(plan, peers=(peer,)), observe))
        except RanksFailed as failure:
            skipped.append(Skipped(peer, str(failure)))
            if all(any(isinstance(message, Sample) for message in report) for report in failure.reports):
                launches.append(failure.reports)
    if not launches:
        launches.append(run_ranks(msgspec.structs.replace(plan, peers=()), observe))
    return launches, skipped


def run_ranks(plan: BenchPlan, observe: Observer = lambda rank, message: None) -> Reports:
    """Run a plan of one peer, or none, to its end and return the messages of each rank.

    Args:
        plan: What the ranks measure.
        observe: Called with (rank, message) for every message as it comes.

    Raises:
        RanksFailed: A rank failed, died or hung; all others have been ended.
    """
    with tempfile.TemporaryDirectory(prefix="ringside-bench-") as name:
        directory = Path(name)
        if set(plan.peers) & set(MPIS):
            _mpi_memory(directory).mkdir(mode=0o700)
        (directory / PLAN).write_bytes(msgspec.json.encode(plan))
        ranks = BenchRanks([MessageReader(directory, rank) for rank in range(plan.ranks)])
        try:
            with (directory / _LOG).open("wb") as log:
                for command, environment in rank_commands(plan, directory):
                    ranks.start(command, environment, log)
            if ranks.follow(observe, plan.hang_s):
                while_ = _during(max(ranks.reports, key=len))
                raise RanksFailed(f"hung {while_}: no rank reported for {plan.hang_s:g} s", ranks.reports)
            if not all(any(isinstance(m, Done) for m in report) for report in ranks.reports):
                raise RanksFailed(ranks.what_happened((directory / _LOG).read_text(errors="replace")), ranks.reports)
        finally:
            ranks.end()
            shutil.rmtree(_mpi_memory(directory), ignore_errors=True)
            for left in Path("/dev/shm").glob(f"*{directory.name}*"):  # vLLM's and DeepSpeed's
                left.unlink(missing_ok=True)
        return ranks.reports


def _mpi_memory(directory: Path) -> Path:
    """Where Open MPI's shared segments begin; its ranks unlink them once all have mapped them (`peers._open_mpi`)."""
    return Path("/dev/shm", directory.name)


def rank_commands(plan: BenchPlan, directory: Path) -> list[tuple[list[str], Mapping[str, str]]]:
    """Return the processes to start, as (command, variables): one mpirun if MPI takes part, else one per rank."""
    worker = ["-m", "ringside.bench.worker", str(directory)]
    peer = next(iter(plan.peers), "")
    if peer not in MPIS:
        return [([sys.executable, *worker], {"RANK": str(rank)}) for rank in range(plan.ranks)]
    command, settings = mpi_command(peer, plan.environments, plan.ranks)
    memory = dict.fromkeys((MPI_MEMORY, MPI_4_MEMORY), str(_mpi_memory(directory)))
    python = sys.executable if peer == "mpi" else str(Path(command[0]).with_name("python"))
    return [([*command, python, *worker], {**settings, **memory})]


@dataclass
class BenchRanks:
    """The processes of a run, and what their ranks have said.

    Attributes:
        readers: Of each rank's messages.
        processes: One per rank; with MPI the mpirun that starts them.
        reports: The messages of each rank so far.
    """

    readers: list[MessageReader]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    reports: Reports = field(init=False)

    def __post_init__(self) -> None:
        self.reports = [[] for _ in self.readers]

    def start(self, command: list[str], environment: Mapping[str, str], log: IO[bytes]) -> None:
        """Start a process; `log` takes what it writes."""
        # One compute thread per rank, as torchrun does; a session of its own, so that Ctrl-C reaches only the parent.
        env, null = {"OMP_NUM_THREADS": "1", **os.environ, **environment}, subprocess.DEVNULL
        process = subprocess.Popen(
            command, env=env, stdin=null, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
        )
        self.processes.append(process)

    def follow(self, observe: Observer, hang_s: float = float("inf")) -> bool:
        """Read messages until every process ended, or one failed and the others had time to say what they saw.

        Returns:
            Whether they hung: no rank reported anything for `hang_s`.
        """
        deadline, heard = float("inf"), time.monotonic()
        while True:
            ended = [process.poll() for process in self.processes]
            for rank, reader in enumerate(self.readers):
                for message in reader.read():
                    self.reports[rank].append(message)
                    observe(rank, message)
                    heard = time.monotonic()
            if all(status is not None for status in ended) or time.monotonic() > deadline:
                return False
            if time.monotonic() > heard + hang_s:
                return True
            if any(status not in (None, 0) for status in ended):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(POLL_S)

    def end(self) -> None:
        """End what still runs: politely, so that mpirun ends its ranks, then for good.

        A group is signalled, not a process: Intel's mpirun is a shell that waits for the program that starts the ranks.
        """
        running = [process for process in self.processes if process.poll() is None]
        there = [process for process in running if _signal_group(process, signal.SIGTERM)]
        deadline = time.monotonic() + _GRACE_S
        while there and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)
            for process in there:
                process.poll()
            there = [process for process in there if _signal_group(process, 0)]
        for process in there:  # its ranks, if they have groups of their own, follow: they die with their parent
            _signal_group(process, signal.SIGKILL)
        for process in running:
            process.wait()
        for reader in self.readers:
            reader.close()

    def what_happened(self, log: str) -> str:
        """Return in one line which rank failed, how, and during what."""
        # A rank that a signal ended before its time: mpirun writes which it was; without it, our children tell.
        killed, reports = None, self.reports
        by_mpirun = re.search(r"rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)", log)
        if by_mpirun is not None:
            killed = int(by_mpirun[1]), int(by_mpirun[2])
        elif len(self.processes) > 1:
            codes = [process.returncode for process in self.processes]
            killed = next(((rank, -code) for rank, code in enumerate(codes) if code is not None and code < 0), None)
        if killed is not None:
            rank, number = killed
            return f"rank {rank} died ({signal_name(number)}) {_during(reports[rank])}; the other ranks were ended"
        failures = [(rank, m) for rank, report in enumerate(reports) for m in report if isinstance(m, Failed)]
        # A rank that misses another tells of a consequence; prefer the cause.
        for rank, failure in sorted(failures, key=lambda item: bool(item[1].lost)):
            return f"rank {rank} failed {_during(reports[rank])}: {failure.error}: {failure.message}"
        words = [line for line in log.splitlines() if line.strip()]
        silent = [rank for rank, report in enumerate(reports) if not any(isinstance(m, Done) for m in report)]
        return f"rank {silent[0]} ended {_during(reports[silent[0]])}; its last words: {words[-1] if words else 'none'}"


def _signal_group(leader: subprocess.Popen[bytes], number: int) -> bool:
    """Signal all of a process's group, which it was started as the leader of; return whether there is any left."""
    try:
        os.killpg(leader.pid, number)
    except ProcessLookupError:
        return False
    return True


def _during(report: list[Message]) -> str:
    begun = [message.what for message in report if isinstance(message, Begin)]
    if begun:
        return f"while measuring {begun[-1]}"
    return "while joining the others" if any(isinstance(m, WorkerHello) for m in report) else "before it started"
