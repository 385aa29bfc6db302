"""Real workers of a job, forked from a process that has imported everything: a case takes a second and no launcher.

`herd(run_id)` gives a store's address in a process of its own. `run_job` forks one worker per rank, starts the dead
ones anew as a keeper would, and returns what the workers left behind. All of it is bounded. It is to be called from a
process without threads, which `run_isolated` makes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringside.processes import Process, die_with_parent
from ringside.survive.peers import state_of
from ringside.survive.registers import NOBODY_WRITES

LIMIT_S = 60.0
WAKE_S = 3.5


@dataclass
class Report:
    """What became of a job.

    Args:
        ended: By rank what its last worker returned.
        deaths: Every worker that was ended by a signal, as (rank, signal), first to last.
        died_at: When that was noticed, seconds on the host's monotonic clock.
        errors: Tracebacks of workers that raised.
        timed_out: Whether time was up.
        seconds: How long it took.
    """

    ended: dict[int, Any] = field(default_factory=dict)
    deaths: list[tuple[int, int]] = field(default_factory=list)
    died_at: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    timed_out: bool = False
    seconds: float = 0.0


class Store:
    """A TCPStore in a process of its own."""

    def __init__(self) -> None:
        ours, theirs = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            _serve_store(theirs)
        os.close(theirs)
        with os.fdopen(ours) as told:
            self.port = int(told.readline())

    def registers(self, run_id: str) -> Registers:
        """Return what a job's workers wrote."""
        return Registers(self.port, run_id)

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class Registers:
    """A job's registers, for reading, without a thread."""

    def __init__(self, port: int, run_id: str) -> None:
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed import PrefixStore

        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._store = PrefixStore(f"ringside/survive/{run_id}/0", store)

    def read(self, key: str) -> bytes | None:
        """Return what stands; None: nothing."""
        stands = self._store.compare_set(key, NOBODY_WRITES, NOBODY_WRITES)
        return None if stands == NOBODY_WRITES else bytes(stands)


def _serve_store(told: int) -> None:
    from torch._C._distributed_c10d import TCPStore

    die_with_parent()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(told, f"{store.port}\n".encode())
    signal.pause()
    os._exit(1)


def run_job(
    store: Store,
    run_id: str,
    ranks: int,
    worker: Callable[[int, Path], Any],
    directory: Path,
    *,
    trap: str = "",
    respawn: bool = True,
    hosts: int = 1,
    limit_s: float = LIMIT_S,
) -> Report:
    """Run `worker(rank, directory)` in a process per rank until all have returned.

    Args:
        store: Where they meet.
        run_id: A name no other job has.
        ranks: How many.
        worker: Returns something that JSON can hold.
        directory: For what they write.
        trap: What happens to whom; see `ringside.survive.phases`.
        respawn: Whether a worker that a signal ended is started anew.
        hosts: On how many hosts the workers think they are, in turn.
        limit_s: Longest time, seconds.
    """
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": run_id,
        "RINGSIDE_SURVIVE_TRAP": trap,
    }
    report, began = Report(), time.monotonic()
    machines = [{"RINGSIDE_MACHINE": f"host-{rank % hosts}"} if hosts > 1 else {} for rank in range(ranks)]
    running = {rank: _fork(rank, worker, directory, environ | machines[rank]) for rank in range(ranks)}
    stopped: dict[int, float] = {}
    while running and not report.timed_out:
        for rank in _ended(running, 0.5):
            process, status = running.pop(rank), None
            status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
            process.close()
            if status < 0:
                report.deaths.append((rank, -status))
                report.died_at.append(time.monotonic())
                if respawn:
                    running[rank] = _fork(rank, worker, directory, environ | machines[rank])
            else:
                _collect(rank, directory, report)
        _wake(running, stopped)
        report.timed_out = time.monotonic() - began > limit_s
    for process in running.values():
        process.send(signal.SIGUSR2)
        time.sleep(0.2)  # for its stacks to be written
        process.send(signal.SIGKILL)
        os.waitpid(process.pid, 0)
        process.close()
    report.seconds = time.monotonic() - began
    return report


def _fork(rank: int, worker: Callable[[int, Path], Any], directory: Path, environ: Mapping[str, str]) -> Process:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Process(pid)
    try:
        die_with_parent(signal.SIGKILL, parent)
        os.environ.update(environ, RANK=str(rank))
        _answer(rank, worker, directory)
    except BaseException:
        (directory / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(0)


def _answer(rank: int, worker: Callable[[int, Path], Any], directory: Path) -> None:
    import faulthandler
    import logging

    log = (directory / f"{rank}.log").open("a")
    faulthandler.register(signal.SIGUSR2, file=log, all_threads=True)
    said = "%(asctime)s %(process)d %(levelname)s %(message)s"
    logging.basicConfig(stream=log, level=logging.INFO, format=said, force=True)
    (directory / f"{rank}.json").write_text(json.dumps(worker(rank, directory)))


def _ended(running: Mapping[int, Process], timeout_s: float) -> list[int]:
    poll = select.poll()
    ranks = {process.fileno(): rank for rank, process in running.items()}
    for fd in ranks:
        poll.register(fd, select.POLLIN)
    return [ranks[fd] for fd, _ in poll.poll(1e3 * timeout_s)]


def _wake(running: Mapping[int, Process], stopped: dict[int, float]) -> None:
    """Let workers that were stopped go on after a while, if nobody has killed them: as zombies."""
    for process in running.values():
        if (
            state_of(process.pid)[0] == "T"
            and time.monotonic() - stopped.setdefault(process.pid, time.monotonic()) > WAKE_S
        ):
            process.send(signal.SIGCONT)


def _collect(rank: int, directory: Path, report: Report) -> None:
    error = directory / f"{rank}.error"
    if error.exists():
        report.errors.append(error.read_text())
        error.unlink()
    elif (answer := directory / f"{rank}.json").exists():
        report.ended[rank] = json.loads(answer.read_text())


def run_isolated(script: str, *arguments: str, limit_s: float = LIMIT_S) -> str:
    """Run a Python script in a process without threads; return what it wrote to stdout."""
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=limit_s, env=environ, cwd=root
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
