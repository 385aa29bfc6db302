"""A keeper per rank: a small process that torchrun holds for the worker, and that starts the worker anew when it dies.

torchrun ends all workers as soon as one dies. What it starts is therefore the keeper, which only waits: it imports
neither torch nor the script, and costs some megabytes.

    torchrun --nproc-per-node 4 -m ringside.survive train.py --epochs 3
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ringside.errors import FinalStateError, StoreGoneError, UsageError
from ringside.launch.torchrun import StopRequest, parse_command_line, stop_requests
from ringside.processes import die_with_parent, signal_name
from ringside.survive.cluster.store_host import is_needed
from ringside.survive.state.kept import KEPT, START, Head, Kept, Stage

REFUSED = 77
"""Exit status of a worker that does not belong to the job: it is not started again, and the others go on."""
UNFINISHED = FinalStateError.exit_status
"""Exit status where the last step is committed, and nobody can run the script's last lines with the final state."""
MOST_FAILURES = 3
"""So often in a row a worker may fail by itself without the job having come further; then it is not started again."""
MOST_STARTS = 1000
"""In all: a worker that makes a step and dies each time does not go on for ever."""
MOST_ENDS = 10
"""The same for all its ends: what kills it from outside (a lack of memory, somebody) may go away."""
_OWN = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS)
"""Signals that a process brings upon itself."""
_LOOK_S = 0.1
_SHARE = 0.9
"""Of the time until torchrun kills this process: the rest is for writing the final state into a file."""


@dataclass
class Supervisor:
    """Keeps one worker running.

    Args:
        words: The script and its arguments, or `-m`, a module and its arguments.
        environ: The worker's environment.
        kept: What its workers leave behind.

    Attributes:
        starts: How often it was started.
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    kept: Kept = field(default_factory=Kept)
    starts: int = 0

    def run(self, stop: StopRequest) -> int:
        """Keep the worker running until it ends by itself; return its exit status, or 128 + the signal's number.

        A worker that lost the store is started once more: where the store answers again, it joins the others. One that
        ends time after time while the job comes no further is not started again, however long each start takes.
        """
        with contextlib.closing(self.kept):
            status = failures = ends = 0
            while True:
                before, part = status, self.kept.newest
                known = part.offset, part.head.progress
                status = self._run_once(stop)
                part = self.kept.newest
                head = part.head
                if stop.signum:
                    self._save(head, "was stopped before its last lines were done", status != 0 and self._rank == 0)
                    return stop.exit_status
                further = (part.offset, head.progress) > known
                ends, failures = (0, 0) if further else (ends + 1, failures + (status > 0 or -status in _OWN))
                if status == REFUSED and before == StoreGoneError.exit_status:
                    self._warn(
                        f"rank {self._rank} has lost the job's store: the others go on, or it is to be started again"
                    )
                    return before
                if status == StoreGoneError.exit_status == before or status == UNFINISHED:
                    self._save(head, "cannot go on")
                    return status
                if status == REFUSED and head.stage is not Stage.TRAINING:
                    self._save(head, "is refused, and its last lines were not done")
                    return UNFINISHED
                if status in (0, REFUSED):
                    return UNFINISHED if head.stage is Stage.UNATTENDED else 0
                if failures >= MOST_FAILURES or ends >= MOST_ENDS or self.starts > MOST_STARTS:
                    times = failures if failures >= MOST_FAILURES else ends
                    self._warn(
                        f"{self._how(status)}, {times} times in a row without the job having come further (see the "
                        "above): it is not started again"
                    )
                    self._save(head, "could not run its last lines")
                    return status if status > 0 else 128 - status
                self._warn(f"{self._how(status)}; it is started again")

    def _save(self, head: Head, why: str, wanted: bool = True) -> None:
        """Write the final state into a file where this rank has it and its last lines were not done."""
        if head.stage is Stage.TRAINING or not wanted:
            return
        try:
            path = self.kept.newest.save()
            where = f"the final state (step {head.step}) lies in {path}: ringside.survive.final_state reads it"
        except OSError as error:
            where = f"the final state is lost, it could not be written: {error}"
        self._warn(f"rank {self._rank} {why}; {where}")

    def _run_once(self, stop: StopRequest) -> int:
        self.starts += 1
        worker = subprocess.Popen(
            [sys.executable, *self.words],
            env={**self.environ, START: str(self.starts), KEPT: str(self.kept.fd)},
            pass_fds=(self.kept.fd,),
            preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
        )
        while not stop.signum:
            try:
                return worker.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        return end(worker, stop.signum, self.environ)

    @property
    def _rank(self) -> int:
        return int(self.environ.get("RANK", "0"))

    def _how(self, status: int) -> str:
        if status < 0:
            return f"rank {self._rank} was ended by {signal_name(-status)}"
        return f"rank {self._rank} ended with status {status}"

    def _warn(self, words: str) -> None:
        print(f"ringside survive: {words}", file=sys.stderr, flush=True)


def end(worker: subprocess.Popen[bytes], signum: int, environ: Mapping[str, str]) -> int:
    """End a worker: it is asked, then killed, when most of the time is over that torchrun gives this process for it."""
    worker.send_signal(signum)
    worker.send_signal(signal.SIGCONT)
    try:
        return worker.wait(_SHARE * parse_command_line(["train.py"], environ=environ).shutdown_timeout_s)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()


def main(arguments: Sequence[str]) -> int:
    """Keep the worker that a command line names; return its exit status.

    Raises:
        UsageError: It names none.
    """
    if tuple(arguments) in ((), ("-m",)) or arguments[0] in ("-h", "--help"):
        raise UsageError("which script? torchrun --nproc-per-node 4 -m ringside.survive train.py --epochs 3")
    with stop_requests() as stop, _store(os.environ):
        return Supervisor(arguments, os.environ).run(stop)


@contextlib.contextmanager
def _store(environ: Mapping[str, str]) -> Iterator[None]:
    """Within it the job has a store, also where its launcher gives none."""
    if not is_needed(environ):
        yield
        return
    command = [sys.executable, "-m", "ringside.survive.cluster.store_host", environ.get("MASTER_PORT", "")]
    host = subprocess.Popen(command, env=dict(environ))
    try:
        yield
    finally:
        host.kill()
        host.wait()
