"""Functions run on real processes: one per rank, as a launcher would start them, without a launcher.

A `Team` is n spawned processes with RANK, WORLD_SIZE and MASTER_* set. `team.run(function, *args)` calls a
module-level function on all of them and returns what each returned; `team.start` and `team.finish` do it in two parts,
so that a rank can be killed in between. `on_ranks` keeps one team per size and uses it again; a team that lost a rank
or raised something odd is thrown away. Everything is bounded: a rank that does not answer is made to print its stacks,
killed, and named.

Inside such a function `place()` tells where it runs and `communicator()` opens one that is this call's own.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Args:
        value: What its function returned.
        error: Name of the exception's class, or "".
        ranks: The exception's `.ranks`, if it had one.
        message: Its text.
        trace: Its traceback.
        at: When it returned or raised, seconds on the host's monotonic clock.
        exit_status: Of a process that ended instead of answering (-9: killed); None while it lives.
    """

    value: Any = None
    error: str = ""
    ranks: tuple[int, ...] | None = None
    message: str = ""
    trace: str = ""
    at: float = 0.0
    exit_status: int | None = None

    @property
    def ok(self) -> bool:
        return not self.error and self.exit_status is None


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not answer."""


@dataclass(frozen=True)
class Place:
    """Where a function runs: its rank, the number of ranks, and a name no other call has."""

    rank: int
    size: int
    job: str


_here = Place(0, 1, "")


def place() -> Place:
    """Return where this process stands in the call under way."""
    return _here


def communicator(name: str = "", **settings: Any) -> Any:
    """Open a communicator over all ranks of the call under way; `name` tells several apart."""
    from ringside.engine import Communicator, Settings

    settings = {"timeout_s": 20.0, **settings}
    return Communicator(f"{_here.job}/{name}", _here.rank, _here.size, Settings(**settings))


# ------------------------------------------------------------------------------------------------ the caller's side


def _environ(rank: int, size: int, run_id: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
        "TORCHELASTIC_RUN_ID": run_id,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


@dataclass
class Team:
    """`size` processes waiting for functions to run."""

    size: int
    environ: Mapping[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    pipes: list[Any] = field(default_factory=list)
    newborn: set[int] = field(default_factory=set)
    run_id: str = ""

    def __post_init__(self) -> None:
        self.run_id = uuid.uuid4().hex
        for rank in range(self.size):
            process, pipe = self._spawn(rank)
            self.processes.append(process)
            self.pipes.append(pipe)
        _teams.append(self)

    def _spawn(self, rank: int) -> tuple[subprocess.Popen[bytes], Any]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_environ(rank, self.size, self.run_id), **self.environ},
                stdin=subprocess.DEVNULL,
            )
        self.newborn.add(rank)
        return process, multiprocessing.connection.Connection(ours.detach())

    def revive(self) -> None:
        """Start the ranks anew whose process has ended."""
        for rank in set(range(self.size)) - set(self.alive):
            self.pipes[rank].close()
            self.processes[rank], self.pipes[rank] = self._spawn(rank)

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Call `function` on every rank; return what each returned, or fail with every rank's story."""
        self.start(function, *args)
        outcomes = self.finish(limit_s)
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailed("\n".join(_story(rank, outcome) for rank, outcome in enumerate(outcomes)))
        return [outcome.value for outcome in outcomes]

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin to call `function` on every rank."""
        where = (sys.modules[function.__module__].__file__, function.__qualname__)
        message = pickle.dumps((*where, uuid.uuid4().hex, args))
        for rank in sorted(self.newborn):  # none is given less time than the others because it still imports
            assert self.hear(rank) == "up"
        self.newborn.clear()
        for rank in self.alive:
            self.pipes[rank].send_bytes(message)

    @property
    def alive(self) -> list[int]:
        """The ranks whose process has not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def hear(self, rank: int, limit_s: float = LIMIT_S) -> str:
        """Return what one rank says next (see `say`)."""
        if not self.pipes[rank].poll(limit_s):
            self._abandon(rank)
        word: str = pickle.loads(self.pipes[rank].recv_bytes())
        return word

    def await_word(self, word: str = "ready", limit_s: float = LIMIT_S) -> None:
        """Return when every rank has called `say(word)`."""
        for rank in self.alive:
            said = self.hear(rank, limit_s)
            assert said == word, f"rank {rank} said {said!r} instead of {word!r}"

    def tell(self, rank: int, word: str) -> None:
        """Let a rank that waits in `hear()` go on."""
        self.pipes[rank].send_bytes(pickle.dumps(word))

    def finish(self, limit_s: float = LIMIT_S) -> list[Outcome]:
        """Wait until every rank answered or ended, and return what became of each."""
        deadline = time.monotonic() + limit_s
        return [self._finish_one(rank, deadline) for rank in range(self.size)]

    def finish_one(self, rank: int, limit_s: float = LIMIT_S) -> Outcome:
        """Wait until one rank answered or ended."""
        return self._finish_one(rank, time.monotonic() + limit_s)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal to one rank; return the moment, on the clock of `Outcome.at`."""
        self.processes[rank].send_signal(number)
        return time.monotonic()

    def close(self) -> None:
        """End the processes that are left."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0 if process.poll() is None else 0)
            if process.poll() is None:
                process.kill()
                process.wait()
        if self in _teams:
            _teams.remove(self)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish_one(self, rank: int, deadline: float) -> Outcome:
        try:
            while True:
                if not self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                    self._abandon(rank)
                answer = pickle.loads(self.pipes[rank].recv_bytes())
                if isinstance(answer, dict):
                    return Outcome(**answer)
        except (EOFError, ConnectionResetError):
            return Outcome(exit_status=self.processes[rank].wait(10))

    def _abandon(self, rank: int) -> None:
        """Make every rank print its stacks, kill all, and fail."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGUSR2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(1.0)  # time to print
        for process in self.processes:
            process.kill()
        self.close()
        raise RanksFailed(f"rank {rank} of {self.size} did not answer in time; the stacks are on stderr")


def _story(rank: int, outcome: Outcome) -> str:
    if outcome.ok:
        return f"rank {rank}: returned {outcome.value!r:.200}"
    if outcome.exit_status is not None:
        return f"rank {rank}: ended with status {outcome.exit_status}"
    return f"rank {rank}: {outcome.error}{outcome.ranks or ''}: {outcome.message}\n{outcome.trace}"


_teams: list[Team] = []
_kept: dict[int, Team] = {}


@contextlib.contextmanager
def borrowed(size: int) -> Iterator[Team]:
    """Give a team that is kept for later, all its ranks alive; where the block raises it is thrown away."""
    team = _kept.get(size)
    if team is None or team not in _teams:
        team = _kept[size] = Team(size)
    team.revive()
    try:
        yield team
    except BaseException:
        team.close()
        raise


def on_ranks(size: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """Run a module-level function on `size` ranks and return what each returned."""
    with borrowed(size) as team:
        return team.run(function, *args, limit_s=limit_s)


def outcomes_of(size: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Outcome]:
    """Run a function that may fail on `size` ranks and return what became of each."""
    with borrowed(size) as team:
        team.start(function, *args)
        return team.finish(limit_s)


@dataclass(frozen=True)
class Ended:
    """A script's end: its exit status, and all it wrote."""

    status: int
    out: str
    err: str


def run_script(size: int, script: str, limit_s: float = LIMIT_S) -> list[Ended]:
    """Run a Python script on `size` ranks, each a process of its own that ends by itself."""
    run_id = uuid.uuid4().hex
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", script],
            env={**os.environ, **_environ(rank, size, run_id)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    deadline, ended = time.monotonic() + limit_s, []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            ended.append(Ended(process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return ended


def own_processes() -> set[int]:
    """Return the ids of the processes of teams that are kept for later."""
    return {process.pid for team in _teams for process in team.processes}


def own_descriptors() -> set[int]:
    """Return this process's file descriptors that belong to kept teams."""
    return {pipe.fileno() for team in _teams for pipe in team.pipes if not pipe.closed}


@atexit.register
def close_teams() -> None:
    """End every team."""
    for team in list(_teams):
        team.close()


# ------------------------------------------------------------------------------------------------ the ranks' side

_pipe: Any = None


def say(word: str) -> None:
    """Tell the caller how far this rank is (see `Team.await_word`)."""
    _pipe.send_bytes(pickle.dumps(word))


def hear() -> str:
    """Wait for the caller's word (see `Team.tell`)."""
    word: str = pickle.loads(_pipe.recv_bytes())
    return word


def _load(path: str) -> ModuleType:
    """Import a test module by its path, under the name that makes its relative imports work."""
    name = ".".join(Path(path).resolve().relative_to(ROOT).with_suffix("").parts)
    return importlib.import_module(name)


def _answer(message: bytes) -> dict[str, Any]:
    global _here
    path, name, job, args = pickle.loads(message)
    _here = Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), job)
    try:
        function: Any = _load(path)
        for part in name.split("."):
            function = getattr(function, part)
        return {"value": function(*args), "at": time.monotonic()}
    except BaseException as error:
        at = time.monotonic()
        return {
            "error": type(error).__name__,
            "ranks": getattr(error, "ranks", None),
            "message": str(error),
            "trace": traceback.format_exc(),
            "at": at,
        }


def _serve(fd: int) -> None:
    global _pipe
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
    _pipe = multiprocessing.connection.Connection(fd)
    for module in ("pytest", "ringside.engine"):
        importlib.import_module(module)
    say("up")
    for message in _messages(_pipe):
        _pipe.send_bytes(pickle.dumps(_answer(message)))


def _messages(pipe: Any) -> Iterator[bytes]:
    while True:
        try:
            yield pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return


def _main(arguments: Sequence[str]) -> None:
    sys.path.insert(0, str(ROOT))
    # This very module, under the name tests import it by, so that both see one `_here`.
    importlib.import_module("tests.processes")._serve(int(arguments[0]))


if __name__ == "__main__":
    _main(sys.argv[1:])
