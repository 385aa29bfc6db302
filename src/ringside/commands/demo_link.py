"""`ringside demo --inject link`: each rank on a host of its own in the lab, and a link that becomes slower."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ringside.faults.inject import Link
from ringside.lab import Lab
from ringside.launch.follow import Show
from ringside.launch.torchrun import Launch, parse_command_line
from ringside.processes import Death
from ringside.view.run.follower import RunFollower, ShownFinding

HOSTS = 3
RATE = 1e9
"""Of every link, bit/s; so much that a step does not wait for it long."""
GRACE_S = 8.0


class LabLaunch(Launch):
    """Ranks on hosts of the lab, started without torchrun, which knows one host alone.

    Args:
        lab: The lab, open.
        arguments: What torchrun would be given.
        environ: The ranks' environment.
        sink: Takes every line that they write.
    """

    def __init__(
        self, lab: Lab, arguments: Sequence[str], environ: Mapping[str, str], sink: Callable[[str], None]
    ) -> None:
        command = [sys.executable, "-m", *parse_command_line(arguments, ours=()).script]
        meeting = {"WORLD_SIZE": str(lab.hosts), "MASTER_ADDR": lab.address(0), "MASTER_PORT": "29500"}
        self._ranks = []
        for host in range(lab.hosts):
            place = {"RANK": str(host), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RINGSIDE_HOST": f"host{host}"}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            rank = lab.spawn(host, command, {**environ, **meeting, **place}, **pipes)
            threading.Thread(target=_read, args=(rank, sink), daemon=True).start()
            self._ranks.append(rank)

    @property
    def deaths(self) -> list[Death]:
        """Nobody watches them: no rank of a slow link dies."""
        return []

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status of the first rank that failed, 0 if none did, None while they run."""
        deadline = time.monotonic() + timeout_s
        codes: list[int | None] = []
        for rank in self._ranks:
            try:
                codes.append(rank.wait(max(deadline - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                codes.append(None)
        failed = [code for code in codes if code]
        if failed:
            self.end(signal.SIGTERM)
            return abs(failed[0])
        return None if None in codes else 0

    def end(self, signum: int, hurry: Callable[[], bool] = lambda: False) -> bool:
        """End all ranks, politely first."""
        for number, patience_s in ((signum, GRACE_S), (signal.SIGKILL, GRACE_S)):
            for rank in self._ranks:
                rank.send_signal(number)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline and not hurry():
                if all(rank.poll() is not None for rank in self._ranks):
                    return True
                time.sleep(0.05)
        return False


def slowing_link(lab: Lab, fault: Link, show: Show, began: list[int]) -> Show:
    """Return `show` that also slows the link down once all steps before are recorded, and notes which step was next.

    Ranks are some steps ahead of what was read of their records, so the first slow step is about that one.
    """

    def show_and_slow(run: RunFollower, found: list[ShownFinding]) -> None:
        show(run, found)
        if not began and run.step + 1 >= fault.from_step:
            lab.set_rate(RATE / fault.factor, link=(fault.rank, fault.to))
            began.append(run.step + 1)

    return show_and_slow


def _read(rank: subprocess.Popen[str], sink: Callable[[str], None]) -> None:
    assert rank.stdout is not None
    for line in rank.stdout:
        sink(line.rstrip("\n"))
