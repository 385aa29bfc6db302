"""`ringside run --survive`: torchrun with a keeper per rank, so that a worker that dies is started again."""

from __future__ import annotations

import os

from ringside.errors import UsageError
from ringside.launch.torchrun import CommandLine, Launch, stop_requests, with_defaults

FLAG = "--survive"
_LOOK_S = 0.2


def run(line: CommandLine, processes: str) -> int:
    """Run a script that trains with `ringside.survive.training`; return torchrun's exit status.

    Args:
        line: The command line.
        processes: How many ranks to start where nobody says.

    Raises:
        UsageError: It asks for what is not done here.
    """
    others = sorted(line.ours.keys() - {FLAG})
    if others:
        raise UsageError(f"{FLAG} records nothing yet: leave out {', '.join(others)}")
    line = kept(line)
    status: int | None = None
    with stop_requests() as stop:
        launch = Launch(with_defaults(line, processes), os.environ)
        while status is None:
            status = launch.wait(_LOOK_S)
            if status is None and stop.signum:
                launch.end(stop.signum, stop.hurry)
                status = stop.exit_status
    return status


def kept(line: CommandLine) -> CommandLine:
    """Return a command line in which keepers run what it says."""
    module = [] if not line.names & {"-m", "--module"} else ["-m"]
    flags = tuple(flag for flag in line.flags if flag not in ("-m", "--module"))
    return CommandLine((*flags, "-m"), line.names | {"-m"}, ("ringside.survive", *module, *line.script), line.ours)


__all__ = ["FLAG", "kept", "run"]
