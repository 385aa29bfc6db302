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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ringside.errors import StoreGoneError, UsageError
from ringside.launch import StopRequest, stop_requests
from ringside.processes import Death, die_with_parent
from ringside.survive.store_host import is_needed

REFUSED = 77
"""Exit status of a worker that does not belong to the job: it is not started again, and the others go on."""
START = "RINGSIDE_SURVIVE_START"
"""Tells a worker how often it was started."""
QUICK_S = 20.0
QUICK_ENDS = 3
_LOOK_S = 0.1
_END_S = 10.0


@dataclass
class Keeper:
    """Keeps one worker running.

    Args:
        words: The script and its arguments, or `-m`, a module and its arguments.
        environ: The worker's environment.
        most: How often it is started anew at most.

    Attributes:
        starts: How often it was started.
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    most: int = 1000
    starts: int = 0

    def run(self, stop: StopRequest) -> int:
        """Keep the worker running until it ends by itself; return its exit status.

        A worker that lost the store is started once more: where the store answers again, it joins the others.
        """
        quick = status = 0
        while True:
            began, before = time.monotonic(), status
            status = self._run_once(stop)
            quick = quick + 1 if status > 0 and time.monotonic() - began < QUICK_S else 0
            if stop.signum:
                return stop.exit_status
            if status == REFUSED and before == StoreGoneError.exit_status:
                self._say(f"rank {self._rank} has lost the job's store: the others go on, or it is to be started again")
                return before
            if status in (0, REFUSED):
                return 0
            if quick >= QUICK_ENDS or self.starts > self.most:
                self._say(f"{self._how(status)}, time after time: it is not started again")
                return status if status > 0 else 128 - status
            self._say(f"{self._how(status)}; it is started again")

    def _run_once(self, stop: StopRequest) -> int:
        self.starts += 1
        worker = subprocess.Popen(
            [sys.executable, *self.words],
            env={**self.environ, START: str(self.starts)},
            preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
        )
        while not stop.signum:
            try:
                return worker.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        return _end(worker, stop.signum)

    @property
    def _rank(self) -> int:
        return int(self.environ.get("RANK", "0"))

    def _how(self, status: int) -> str:
        if status < 0:
            return f"rank {self._rank} was ended by {Death(self._rank, 0, None, -status).signal_name}"
        return f"rank {self._rank} ended with status {status}"

    def _say(self, words: str) -> None:
        print(f"ringside survive: {words}", file=sys.stderr, flush=True)


def _end(worker: subprocess.Popen[bytes], signum: int) -> int:
    """End a worker: it is asked, then killed."""
    worker.send_signal(signum)
    worker.send_signal(signal.SIGCONT)
    try:
        return worker.wait(_END_S)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()


def main(arguments: Sequence[str]) -> int:
    """Keep the worker that a command line names; return its exit status.

    Raises:
        UsageError: It names none.
    """
    if not arguments or arguments[0] in ("-h", "--help") or (arguments[0] == "-m" and len(arguments) < 2):
        raise UsageError("which script? torchrun --nproc-per-node 4 -m ringside.survive train.py --epochs 3")
    with stop_requests() as stop, _store(os.environ):
        return Keeper(arguments, os.environ).run(stop)


@contextlib.contextmanager
def _store(environ: Mapping[str, str]) -> Iterator[None]:
    """Within it the job has a store, also where its launcher gives none."""
    if not is_needed(environ):
        yield
        return
    command = [sys.executable, "-m", "ringside.survive.store_host", environ.get("MASTER_PORT", "")]
    host = subprocess.Popen(command, env=dict(environ))
    try:
        yield
    finally:
        host.kill()
        host.wait()
