"""Real workers of a job, forked from a process that has imported everything: a case takes a second and no launcher.

`Store` is a store in a process of its own. `run_job` forks one worker per rank, starts the dead ones anew as a keeper
would, and returns what the workers left behind. All of it is bounded. It is to be called from a process without
threads, which `run_isolated` makes. In a lab the workers, and the store on host 0, live in its network namespaces.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import zygote

from ringside.lab import Lab
from ringside.lab.namespaces import enter
from ringside.lab.wiring import INTERFACE
from ringside.processes import Process, die_with_parent, read_stat
from ringside.survive.cluster.registers import NOBODY_WRITES
from ringside.survive.state.kept import KEPT, START, Kept, Stage

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
        unattended: Whether keepers would say that nobody ran the last lines of rank 0.
    """

    ended: dict[int, Any] = field(default_factory=dict)
    deaths: list[tuple[int, int]] = field(default_factory=list)
    died_at: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    timed_out: bool = False
    seconds: float = 0.0
    unattended: bool = False


class Store:
    """A TCPStore in a process of its own.

    Args:
        lab: Where it lives; None: here.
        host: On which host there.

    Attributes:
        pid: Its process.
    """

    def __init__(self, lab: Lab | None = None, host: int = 0) -> None:
        ours, theirs = os.pipe()
        self.lab, self.host, self.address = lab, host, "127.0.0.1" if lab is None else lab.address(host)
        self.pid = os.fork()
        if not self.pid:
            if lab is not None:
                enter(lab.namespace(host))
            _serve_store(theirs)
        os.close(theirs)
        with os.fdopen(ours) as told:
            self.port = int(told.readline())

    def registers(self, run_id: str) -> Registers:
        """Return what a job's workers wrote."""
        if self.lab is None:
            return Registers(self.port, run_id)
        return self.lab.inside(self.host, lambda: Registers(self.port, run_id))

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


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
    on_stop: Callable[[], object] | None = None,
) -> Report:
    """Run `worker(rank, directory)` in a process per rank until all have returned.

    Args:
        store: Where they meet.
        run_id: A name no other job has.
        ranks: How many.
        worker: Returns something that JSON can hold.
        directory: For what they write, a final state that no rank can use among it.
        trap: What happens to whom; see `ringside.survive.cluster.failpoints`.
        respawn: Whether a worker that a signal ended is started anew.
        hosts: On how many hosts the workers think they are, in turn; in a lab they are on its hosts, in turn.
        limit_s: Longest time, seconds.
        on_stop: Called when a trap has stopped a worker, which then goes on at once; default: after a while.
    """
    environ = {
        "MASTER_ADDR": store.address,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": run_id,
        "RINGSIDE_SURVIVE_TRAP": trap,
    }
    report, began = Report(), time.monotonic()
    spots = [_spot(store.lab, rank, hosts) for rank in range(ranks)]
    kept = [Kept() for _ in range(ranks)] if respawn else []
    starts = Counter[int]()
    environs = [environ | spot.environ for spot in spots]

    def start(rank: int) -> Process:
        starts[rank] += 1
        kept_by = {START: str(starts[rank]), KEPT: str(kept[rank].fd)} if respawn else {}
        return _fork(rank, worker, directory, environs[rank] | kept_by, spots[rank].namespace)

    running = {rank: start(rank) for rank in range(ranks)}
    stopped: dict[int, float] = {}
    while running and not report.timed_out:
        for rank in _ended(running, 0.5 if on_stop is None else 0.05):
            process, status = running.pop(rank), None
            status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
            process.close()
            if status < 0:
                report.deaths.append((rank, -status))
                report.died_at.append(time.monotonic())
                if respawn:
                    running[rank] = start(rank)
            else:
                _collect(rank, directory, report)
        _wake(running, stopped, on_stop)
        report.timed_out = time.monotonic() - began > limit_s
    for process in running.values():
        process.send(signal.SIGUSR2)
        time.sleep(0.2)  # for its stacks to be written
        process.send(signal.SIGKILL)
        os.waitpid(process.pid, 0)
        process.close()
    report.seconds = time.monotonic() - began
    report.unattended = any(memory.head.stage is Stage.UNATTENDED for memory in kept)
    for memory in kept:
        memory.close()
    return report


@dataclass(frozen=True)
class _Spot:
    """Where a worker runs: what it is told of that, and its network namespace."""

    environ: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""


def _spot(lab: Lab | None, rank: int, hosts: int) -> _Spot:
    if lab is not None:
        return _Spot(
            {"GLOO_SOCKET_IFNAME": INTERFACE, "RES_OPTIONS": "timeout:1 attempts:1"}, lab.namespace(rank % lab.hosts)
        )
    return _Spot({"RINGSIDE_MACHINE": f"host-{rank % hosts}"} if hosts > 1 else {})


def _fork(
    rank: int, worker: Callable[[int, Path], Any], directory: Path, environ: Mapping[str, str], namespace: str
) -> Process:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Process(pid)
    try:
        die_with_parent(signal.SIGKILL, parent)
        if namespace:
            enter(namespace)
        os.environ.update(environ, RANK=str(rank), TMPDIR=str(directory))
        tempfile.tempdir = str(directory)
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


def _wake(running: Mapping[int, Process], stopped: dict[int, float], on_stop: Callable[[], object] | None) -> None:
    """Let workers that were stopped go on after a while, if nobody has killed them: as zombies."""
    for process in running.values():
        stat = read_stat(process.pid)
        if stat is None or stat.state != "T":
            continue
        since = stopped.setdefault(process.pid, time.monotonic())
        if on_stop is not None:
            on_stop()
        if on_stop is not None or time.monotonic() - since > WAKE_S:
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
        [zygote.python(), script, *arguments], capture_output=True, text=True, timeout=limit_s, env=environ, cwd=root
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
