"""torchrun as a child process: started with its own launcher, watched, and ended with everything below it.

We write no launcher of our own: `python -m torch.distributed.run` does the launching. What is added is that nothing
outlives us: the launcher is sent SIGTERM when this process dies, even by SIGKILL, and passes it on to its ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType

from ringside.processes import Death, Process, RankWatch, die_with_parent, end_all
from ringside.torchrun_flags import shutdown_timeout_s, take_apart

GRACES_S = (8.0, 4.0, 4.0)
"""How long ranks have to end after the first signal, after SIGTERM and after SIGKILL.

The first begins when torchrun has given up: until then a rank may still be saving what it has.
"""

LOOK_S = 0.1


class Launch:
    """A running torchrun.

    Args:
        arguments: What torchrun is given: its flags, the script, the script's arguments.
        environ: The child's environment.
        sink: Takes every line that torchrun and the ranks write; without it they write where we do.

    Attributes:
        pid: torchrun's process number.
        deaths: The ranks that ended, first to last.
    """

    def __init__(
        self, arguments: Sequence[str], environ: Mapping[str, str], sink: Callable[[str], None] | None = None
    ) -> None:
        pipe = None if sink is None else subprocess.PIPE
        # Its own session: Ctrl-C reaches us alone and we pass it on, once.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            env=dict(environ),
            stdin=None if sink is None else subprocess.DEVNULL,
            stdout=pipe,
            stderr=None if sink is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
        )
        self.pid = self._child.pid
        self._shutdown_timeout_s = shutdown_timeout_s(take_apart(arguments, ours=()), environ)
        self._process = Process(self.pid)
        self._watch = RankWatch(self.pid)
        self._threads = [threading.Thread(target=self._look, name="ringside-ranks", daemon=True)]
        if sink is not None:
            self._threads.append(threading.Thread(target=self._read, args=(sink,), daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def deaths(self) -> list[Death]:
        """The ranks that ended, first to last."""
        return list(self._watch.deaths)

    def wait(self, timeout_s: float) -> int | None:
        """Return torchrun's exit status, or None if it still runs after `timeout_s` seconds."""
        try:
            status = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._close()
        return status if status >= 0 else 128 - status

    def end(self, signum: int, hurry: Callable[[], bool] = lambda: False) -> bool:
        """End torchrun and all ranks, politely first; return whether all are gone.

        Args:
            signum: The first signal.
            hurry: Tells to go on to the next stronger signal at once.
        """
        first, *others = GRACES_S
        gone = end_all(self._process, signum, (self._shutdown_timeout_s + first, *others), hurry)
        self.wait(1.0)
        return gone

    def _close(self) -> None:
        for thread in self._threads:
            thread.join(timeout=2.0)
        self._process.close()
        if self._child.stdout is not None and not any(thread.is_alive() for thread in self._threads):
            self._child.stdout.close()

    def _look(self) -> None:
        while self._child.returncode is None:
            self._watch.look(LOOK_S)
        self._watch.close()

    def _read(self, sink: Callable[[str], None]) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            sink(line.decode(errors="replace").rstrip("\n"))


class StopRequest:
    """Somebody asked this process to stop: Ctrl-C, SIGTERM, or its terminal was closed.

    Attributes:
        signum: The first signal that came; 0 while none did.
        times: How many came.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.times = 0
        self._seen = 1

    def hurry(self) -> bool:
        """Tell whether they asked again since the last time this was called."""
        again = self.times > self._seen
        self._seen = max(self._seen, self.times)
        return again

    @property
    def exit_status(self) -> int:
        """What a program ended by that signal returns: 130 for Ctrl-C."""
        return 128 + self.signum

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        self.times += 1


@contextlib.contextmanager
def stop_requests(more: Collection[signal.Signals] = ()) -> Iterator[StopRequest]:
    """Within it, SIGINT, SIGTERM, SIGHUP and whatever more is named are noted instead of ending the process."""
    request = StopRequest()
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more}
    before = {number: signal.signal(number, request._handle) for number in signals}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
