"""A launch whose ranks are forked: what torchrun does for a script, without its own start and its ranks' imports."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from tests.support.mains import launched_main
from tests.support.ranks import Team
from tests.support.waiting import free_port, until

from ringside.commands import demo, main
from ringside.commands import run as run_command
from ringside.launch.torchrun import parse_command_line
from ringside.processes import Death


class ForkedLaunch:
    """Stands for `ringside.launch.torchrun.Launch` where a command makes one, for one launch.

    Args:
        directory: Where to keep what ranks write.
        stopped: The signal that this process, the command's, gets as soon as `when` holds; 0: none.
        when: Asked whenever the command looks.

    Attributes:
        deaths: The ranks that ended, first to last.
        ended: The signals with which the command ended it.
    """

    def __init__(self, directory: Path, stopped: int = 0, when: Callable[[], object] = bool) -> None:
        self.deaths: list[Death] = []
        self.ended: list[int] = []
        self._files = [directory / "ranks.out", directory / "ranks.err"]
        self._stopped, self._when = stopped, when
        self._status: int | None = None
        self._team: Team | None = None
        self._sink: Callable[[str], None] | None = None
        self._told = 0

    def start(
        self, arguments: Sequence[str], environ: Mapping[str, str], sink: Callable[[str], None] | None = None
    ) -> ForkedLaunch:
        """Begin, with what torchrun would be given."""
        line = parse_command_line(arguments)
        flags = " ".join(line.flags).replace("_", "-").replace("=", " ").split()
        self._team = Team(int(flags[flags.index("--nproc-per-node") + 1]), {**environ, "MASTER_PORT": str(free_port())})
        self._sink = sink
        if sink is not None:
            self._files = self._files[:1] * 2
        self._team.start(launched_main, line.script, bool(line.names & {"-m", "--module"}), *map(str, self._files))
        return self

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status that torchrun would have, or None while ranks run."""
        if self._team is None:
            return self._status
        if self._stopped and self._when():
            signum, self._stopped = self._stopped, 0
            os.kill(os.getpid(), signum)
        processes = self._team.processes
        wait([processes[rank].sentinel for rank in self._team.alive], timeout_s)
        known = {death.rank for death in self.deaths}
        for rank, process in enumerate(processes):
            if rank not in known and (code := process.exitcode) is not None:
                self.deaths.append(Death(rank, process.pid, code if code >= 0 else None, max(-code, 0)))
        if any(death.status != 0 for death in self.deaths):  # as torchrun does
            self._signal(signal.SIGTERM)
        self._tell()
        if self._team.alive or len(self.deaths) < len(processes):
            return None
        self._status = int(any(death.status != 0 for death in self.deaths))
        self.close()
        return self._status

    def end(self, signum: int, hurry: Callable[[], bool] = bool) -> bool:
        """Have all ranks end."""
        self.ended.append(signum)
        self._signal(signum)
        until(lambda: self.wait(0.05) is not None, "the end of all ranks")
        return True

    def written(self) -> tuple[str, str]:
        """Return what ranks have written where the command writes."""
        if self._sink is not None:
            return "", ""
        out, err = (path.read_text() if path.exists() else "" for path in self._files)
        return out, err

    def close(self) -> None:
        """End the ranks that are left."""
        if self._team is not None:
            self._team.close()
        self._team = None

    def _signal(self, signum: int) -> None:
        for rank in self._team.alive if self._team is not None else ():
            self._team.kill(rank, signum)

    def _tell(self) -> None:
        if self._sink is None or not self._files[0].exists():
            return
        lines = self._files[0].read_text(errors="replace").split("\n")[:-1]
        for line in lines[self._told :]:
            self._sink(line)
        self._told = len(lines)


class Command:
    """`ringside demo` and `ringside run` in this process, around ranks that are forked.

    Args:
        directory: For what ranks write.
        capsys: Of the test.
    """

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._directory, self._capsys = directory, capsys
        self.launch = ForkedLaunch(directory)

    def __call__(
        self, *words: object, stopped: int = 0, when: Callable[[], object] = bool, **environ: str
    ) -> tuple[int, str, str]:
        """Call it; return its status, and what it and its ranks wrote.

        Args:
            words: Of its command line.
            stopped: See `ForkedLaunch`.
            when: See `ForkedLaunch`.
            environ: More of the environment.
        """
        self.launch = ForkedLaunch(self._directory, stopped, when)
        with pytest.MonkeyPatch.context() as patch:
            for module in (demo, run_command):
                patch.setattr(module, "Launch", self.launch.start)
            for name, value in {"OMP_NUM_THREADS": "1", **environ}.items():
                patch.setenv(name, value)
            status = main([str(word) for word in words])
        printed = self._capsys.readouterr()
        out, err = self.launch.written()
        return status, out + printed.out, err + printed.err
