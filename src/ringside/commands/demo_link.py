"""`ringside demo --inject link`: each rank on a host of its own in the lab, and a link that becomes slower."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from ringside.faults.inject import Link
from ringside.lab import Lab, RunResult
from ringside.launch.follow import Show
from ringside.launch.torchrun import Launch, parse_command_line
from ringside.processes import Death
from ringside.view.run.follower import RunFollower, ShownFinding

HOSTS = 3
RATE = 1e9
"""Of every link, bit/s; so much that a step does not wait for it long."""
GRACE_S = 8.0
"""For ranks that are asked to end: rank 0 writes the end of the run."""


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
        command = [sys.executable, "-m", *parse_command_line(arguments).script]
        # Only what was added: of what is inherited the ranks' own places come first.
        added = {name: value for name, value in environ.items() if os.environ.get(name) != value}
        self._ranks = lab.start_ranks(command, added, lambda place, stream, line: sink(line))

    @property
    def deaths(self) -> list[Death]:
        """Nobody watches them: no rank of a slow link dies."""
        return []

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status of the first rank that failed, 0 if none did, None while they run."""
        if not self._ranks.wait(timeout_s, after_failure_s=0.0) and not self._ranks.any_failed:
            return None
        gone = self.end(signal.SIGTERM)
        return RunResult(self._ranks.results(), 0.0, False, ()).exit_status if gone else 1

    def end(self, signum: int, hurry: Callable[[], bool] = lambda: False) -> bool:
        """End all ranks, politely first; return whether all are gone."""
        return self._ranks.end(signum, GRACE_S, hurry)


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
