"""Where torchrun's own flags end and the script begins, without importing torch to find out."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringside.errors import UsageError

SWITCHES = frozenset(
    {"--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank", "-h", "--help"}
)
"""torchrun's flags that take no value; all others take one."""

PLACES = frozenset(
    {"--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}
)
"""Flags that say where the ranks meet; without any of them they meet on this host alone."""

COUNTED = frozenset({"auto", "cpu", "gpu", "xpu"})
"""What torchrun takes for a number of ranks besides a number."""

PREFIX = "PET_"
"""torchrun reads `PET_NNODES` as `--nnodes`, and so on; launchers such as Kubeflow's set them."""


@dataclass(frozen=True)
class CommandLine:
    """A `ringside run` command line, taken apart.

    Args:
        flags: torchrun's flags, as they were given.
        names: Their names, with dashes instead of underscores.
        script: The script and its arguments, as they were given.
        ours: Values of our own flags by name; "" of those that take none.
    """

    flags: tuple[str, ...]
    names: frozenset[str]
    script: tuple[str, ...]
    ours: dict[str, str]

    def check_script(self) -> None:
        """Raise `UsageError` where the script is no file, before anything is started."""
        script = self.script[0]
        if not self.names & {"-m", "--module", "--no-python"} and not Path(script).is_file():
            raise UsageError(f"there is no script {script!r} here; for a module: ringside run -m {script}")

    def check_ranks(self) -> None:
        """Raise `UsageError` where torchrun would end with a traceback for the number of ranks."""
        for flag, after in itertools.pairwise((*self.flags, "")):
            name, equals, value = flag.partition("=")
            asked = value if equals else after
            if name.replace("_", "-") == "--nproc-per-node" and asked not in COUNTED and not _is_positive(asked):
                words = ", ".join(sorted(COUNTED))
                raise UsageError(f"--nproc-per-node takes a number from 1 on, or one of {words}, not {asked!r}")


def take_apart(words: Sequence[str], ours: Sequence[str], switches: Sequence[str] = ()) -> CommandLine:
    """Split words into torchrun's flags, the script with its arguments, and our flags.

    Args:
        words: What followed `ringside run`.
        ours: Names of our own flags that take a value; all of ours stand before the script.
        switches: Names of those that take none.

    Raises:
        UsageError: A flag lacks its value, or there is no script.
    """
    flags: list[str] = []
    names: set[str] = set()
    mine: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        flag, equals, value = rest[0].partition("=")
        name = flag.replace("_", "-")
        takes = 1 if equals or name in SWITCHES or name in switches else 2
        if len(rest) < takes:
            raise UsageError(f"{flag} takes a value; then comes the script, such as: ringside run {flag} 2 train.py")
        if name in ours or name in switches:
            mine[name] = value if takes == 1 else rest[1]
        else:
            flags += rest[:takes]
            names.add(name)
        rest = rest[takes:]
    script = rest[1:] if rest[:1] == ["--"] else rest
    if not script:
        taken = f" ({flags[-1]!r} was taken for the value of {flags[-2]})" if len(flags) > 1 else ""
        raise UsageError(
            f"there is no script to run{taken}, such as: ringside run --nproc-per-node 2 train.py --epochs 3"
        )
    return CommandLine(tuple(flags), frozenset(names), tuple(script), mine)


def with_defaults(line: CommandLine, processes: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what to give torchrun: the flags as they were given, and what was left open.

    Args:
        line: The command line.
        processes: How many ranks to start where nobody says.
        environ: Where torchrun finds flags that the command line does not give.
    """
    told = line.names | flags_in(environ)
    added = [] if "--nproc-per-node" in told else [f"--nproc-per-node={processes}"]
    if not told & (PLACES | {"--standalone"}):
        added.append("--standalone")
    return [*added, *line.flags, *line.script]


def flags_in(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the flags that torchrun finds in the environment."""
    names = (name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX))
    return frozenset("--" + name.lower().replace("_", "-") for name in names)


def shutdown_timeout_s(line: CommandLine, environ: Mapping[str, str]) -> float:
    """Return how long torchrun lets its ranks go on after a signal before it kills them, seconds.

    Args:
        line: The command line.
        environ: torchrun's environment.
    """
    asked = _value("--shutdown-timeout", line, environ) or environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return float(asked) if asked.isdecimal() else 30.0


def signals_to_handle(line: CommandLine, environ: Mapping[str, str]) -> frozenset[signal.Signals]:
    """Return the signals that torchrun passes on to its ranks.

    Args:
        line: The command line.
        environ: torchrun's environment.
    """
    asked = _value("--signals-to-handle", line, environ) or "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    names = {name.strip() for name in asked.split(",")}
    return frozenset(number for number in signal.Signals if number.name in names - {"SIGKILL", "SIGSTOP"})


def _value(asked: str, line: CommandLine, environ: Mapping[str, str]) -> str:
    """Return what a flag is set to, there or in torchrun's variable of that name; "": nothing."""
    told = [
        value if equals else after
        for flag, after in itertools.pairwise((*line.flags, ""))
        for name, equals, value in [flag.partition("=")]
        if name.replace("_", "-") == asked
    ]
    return told[-1] if told else environ.get(PREFIX + asked.removeprefix("--").upper().replace("-", "_"), "")


def _is_positive(text: str) -> bool:
    return text.isdecimal() and int(text) > 0
