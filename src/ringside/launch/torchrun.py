"""torchrun as a child process: started with its own launcher, watched, and ended with everything below it.

We write no launcher of our own: `python -m torch.distributed.run` does the launching. What is added is that nothing
outlives us: the launcher is sent SIGTERM when this process dies, even by SIGKILL, and passes it on to its ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from ringside.errors import UsageError
from ringside.processes import Death, Process, RankWatch, die_with_parent, end_all, handle_signals

# -------------------------------------------------------------------------------------------------
# Where torchrun's own flags end and the script begins, without importing torch to find out.

SWITCHES = frozenset(
    {"--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank", "-h", "--help"}
)
"""torchrun's flags that take no value; all others take one."""

PLACES = frozenset(
    {"--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}
)
"""Flags that say where the ranks meet; without any of them they meet on this host alone."""

RANKS = "--nproc-per-node"
_RANKS = re.compile(r"-n(?:=(.+)|(\d+))?")
"""How many ranks start on this node, and our short form of it: `-n 2`, `-n2`."""

COUNTED = frozenset({"auto", "cpu", "gpu", "xpu"})
"""What torchrun takes for a number of ranks besides a number."""

PREFIX = "PET_"
"""torchrun reads `PET_NNODES` as `--nnodes`, and so on; launchers such as Kubeflow's set them."""


@dataclass(frozen=True)
class CommandLine:
    """A `ringside run` command line, taken apart, and what torchrun would make of it.

    Args:
        flags: torchrun's flags, as they were given.
        names: Their names, with dashes instead of underscores.
        script: The script and its arguments, as they were given.
        ours: Values of our own flags by name; "" of those that take none.
        environ: Where torchrun finds flags that the command line does not give.
    """

    flags: tuple[str, ...]
    names: frozenset[str]
    script: tuple[str, ...]
    ours: dict[str, str]
    environ: Mapping[str, str]

    def check_script(self) -> None:
        """Raise `UsageError` where the script is no file, before anything is started."""
        script = self.script[0]
        if not self.names & {"-m", "--module", "--no-python"} and not Path(script).is_file():
            raise UsageError(f"there is no script {script!r} here; for a module: ringside run -m {script}")

    def check_ranks(self) -> None:
        """Raise `UsageError` where torchrun would end with a traceback for the number of ranks."""
        for requested in self._values(RANKS):
            if requested not in COUNTED and not (requested.isdecimal() and int(requested) > 0):
                words = ", ".join(sorted(COUNTED))
                raise UsageError(f"-n/{RANKS} takes a number from 1 on, or one of {words}, not {requested!r}")

    def value(self, requested: str) -> str:
        """Return what a flag is set to, here or in torchrun's variable of that name; "": nothing."""
        variable = PREFIX + requested.removeprefix("--").upper().replace("-", "_")
        return [self.environ.get(variable, ""), *self._values(requested)][-1]

    def with_defaults(self, processes: str) -> list[str]:
        """Return what to give torchrun: the flags as they were given, and what was left open.

        Args:
            processes: How many ranks to start where nobody says.
        """
        in_environment = (name.removeprefix(PREFIX) for name in self.environ if name.startswith(PREFIX))
        told = self.names | {"--" + name.lower().replace("_", "-") for name in in_environment}
        added = [] if RANKS in told else [f"{RANKS}={processes}"]
        if not told & (PLACES | {"--standalone"}):
            added.append("--standalone")
        return [*added, *self.flags, *self.script]

    @property
    def is_without_rank_0(self) -> bool:
        """Whether it says itself that rank 0 runs on another node; where ranks agree on places it does not."""
        backend = self.value("--rdzv-backend") or "static"
        return backend == "static" and self.value("--node-rank") not in ("", "0")

    @property
    def shutdown_timeout_s(self) -> float:
        """How long torchrun lets its ranks go on after a signal before it kills them, seconds."""
        requested = self.value("--shutdown-timeout") or self.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        return float(requested) if requested.isdecimal() else 30.0

    @property
    def signals_to_handle(self) -> frozenset[signal.Signals]:
        """The signals that torchrun passes on to its ranks."""
        requested = self.value("--signals-to-handle") or "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        names = {name.strip() for name in requested.split(",")}
        return frozenset(number for number in signal.Signals if number.name in names - {"SIGKILL", "SIGSTOP"})

    def _values(self, requested: str) -> list[str]:
        """Return what one of torchrun's flags is set to, each time that it is given."""
        return [
            value if equals else after
            for flag, after in itertools.pairwise((*self.flags, ""))
            for name, equals, value in [flag.partition("=")]
            if name.replace("_", "-") == requested
        ]


def parse_command_line(
    words: Sequence[str],
    ours: Sequence[str] = (),
    switches: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> CommandLine:
    """Split words into torchrun's flags, the script with its arguments, and our flags.

    Args:
        words: What followed `ringside run`.
        ours: Names of our own flags that take a value; all of ours stand before the script.
        switches: Names of those that take none.
        environ: torchrun's environment.

    Raises:
        UsageError: A flag lacks its value, or there is no script.
    """
    flags: list[str] = []
    names: set[str] = set()
    own_flags: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        if short := _RANKS.fullmatch(rest[0]):  # ours: torchrun knows the long name alone
            rest[:1] = [f"{RANKS}={value}" if (value := short[1] or short[2]) else RANKS]
        flag, equals, value = rest[0].partition("=")
        name = flag.replace("_", "-")
        takes = 1 if equals or name in SWITCHES or name in switches else 2
        if len(rest) < takes:
            raise UsageError(f"{flag} takes a value; then comes the script, such as: ringside run {flag} 2 train.py")
        if name in ours or name in switches:
            own_flags[name] = value if takes == 1 else rest[1]
        else:
            flags += rest[:takes]
            names.add(name)
        rest = rest[takes:]
    script = rest[1:] if rest[:1] == ["--"] else rest
    if not script:
        taken = f" ({flags[-1]!r} was taken for the value of {flags[-2]})" if len(flags) > 1 else ""
        raise UsageError(f"there is no script to run{taken}, such as: ringside run -n 2 train.py --epochs 3")
    return CommandLine(tuple(flags), frozenset(names), tuple(script), own_flags, environ)


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
        self._shutdown_timeout_s = parse_command_line(arguments, environ=environ).shutdown_timeout_s
        self._process = Process(self.pid)
        self._watch = RankWatch(self.pid)
        self._threads = [threading.Thread(target=self._watch_ranks, name="ringside-ranks", daemon=True)]
        if sink is not None:
            self._threads.append(threading.Thread(target=self._read_output, args=(sink,), daemon=True))
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
        # All is over: what the threads still read is the end of it.
        for thread in self._threads:
            thread.join(timeout=2.0)
        self._process.close()
        if self._child.stdout is not None and not any(thread.is_alive() for thread in self._threads):
            self._child.stdout.close()
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

    def _watch_ranks(self) -> None:
        while self._child.returncode is None:
            self._watch.poll(LOOK_S)
        self._watch.close()

    def _read_output(self, sink: Callable[[str], None]) -> None:
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

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Note a signal: a handler of Python's."""
        self.signum = self.signum or signum
        self.times += 1


def wait_or_stop(launch: Launch, timeout_s: float, stop: StopRequest) -> int | None:
    """Wait as `Launch.wait` does; end it where somebody asked this process to stop: the status is the signal's then."""
    status = launch.wait(timeout_s)
    if status is None and stop.signum:
        launch.end(stop.signum, stop.hurry)
        return stop.exit_status
    return status


@contextlib.contextmanager
def stop_requests(more: Collection[signal.Signals] = ()) -> Iterator[StopRequest]:
    """Within it, SIGINT, SIGTERM, SIGHUP and whatever more is named are noted instead of ending the process."""
    request = StopRequest()
    with handle_signals({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more}, request.handle):
        yield request
