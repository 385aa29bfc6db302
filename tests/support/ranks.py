"""Functions run on real processes: one per rank, as a launcher would start them, without a launcher.

A `Team` is n processes with RANK, WORLD_SIZE and MASTER_* set. `team.run(function, *args)` calls a function of a module
on all of them and returns what each returned; `team.start` and `team.finish` do it in two parts, so that a rank can be
killed in between. Every team is new: its ranks are forked from one process that has imported torch and Ringside and
runs no test (`multiprocessing`'s fork server). So no rank inherits what another test left behind, and none imports
torch again. Everything is bounded: a rank that does not answer is made to print its stacks, killed, and named.

Inside such a function `place()` tells where it runs and `communicator()` opens one that is this call's own.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 60.0
PYTHON = (sys.executable, "-X", "faulthandler")


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
    from ringside.engine import HostCommunicator, Settings

    settings = {"timeout_s": 20.0, **settings}
    return HostCommunicator(f"{_here.job}/{name}", _here.rank, _here.size, Settings(**settings))


# ------------------------------------------------------------------------------------------------ the caller's side

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _environ(rank: int, size: int, run_id: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
        "TORCHELASTIC_RUN_ID": run_id,
        **_ONE_THREAD,
    }


def forking() -> Any:
    """Return the context of `multiprocessing` whose processes are forked from one that has imported torch and us."""
    context = multiprocessing.get_context("forkserver")
    if multiprocessing.forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
        context.set_forkserver_preload(["tests.support.preload"])
        before = dict(os.environ)
        os.environ.update(_ONE_THREAD, PYTHONPATH=str(ROOT))  # torch reads the first two when it is imported
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)
    return context


@dataclass
class Team:
    """`size` processes waiting for functions to run, which end with the `with` statement."""

    size: int
    environ: Mapping[str, str] = field(default_factory=dict)
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        run_id, context = uuid.uuid4().hex, forking()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            variables = {**os.environ, **_environ(rank, self.size, run_id), **self.environ}
            process = context.Process(target=_serve, args=(theirs, variables, os.getcwd()), name=f"rank {rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        _teams.append(self)

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
        for rank in self.alive:
            self.pipes[rank].send_bytes(message)

    @property
    def alive(self) -> list[int]:
        """The ranks whose process has not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.exitcode is None]

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
        with contextlib.suppress(ProcessLookupError):  # it ends this moment
            if self.processes[rank].exitcode is None:
                os.kill(self.processes[rank].pid, number)
        return time.monotonic()

    def close(self) -> None:
        """End the processes that are left."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self.processes:
            process.join(2.0)
            process.kill()
            process.join()
            process.close()
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
            self.processes[rank].join(10)
            return Outcome(exit_status=self.processes[rank].exitcode)

    def _abandon(self, rank: int) -> None:
        """Make every rank print its stacks, kill all, and fail."""
        for other in range(self.size):
            self.kill(other, signal.SIGCONT)
            self.kill(other, signal.SIGUSR2)
        self.processes[rank].join(1.0)  # time to print
        for process in self.processes:
            process.kill()
        raise RanksFailed(f"rank {rank} of {self.size} did not answer in time; the stacks are on stderr")


def _story(rank: int, outcome: Outcome) -> str:
    if outcome.ok:
        return f"rank {rank}: returned {outcome.value!r:.200}"
    if outcome.exit_status is not None:
        return f"rank {rank}: ended with status {outcome.exit_status}"
    return f"rank {rank}: {outcome.error}{outcome.ranks or ''}: {outcome.message}\n{outcome.trace}"


_teams: list[Team] = []


def on_ranks(size: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """Run a module-level function on `size` ranks and return what each returned."""
    with Team(size) as team:
        return team.run(function, *args, limit_s=limit_s)


def outcomes_of(size: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Outcome]:
    """Run a function that may fail on `size` ranks and return what became of each."""
    with Team(size) as team:
        team.start(function, *args)
        return team.finish(limit_s)


@dataclass(frozen=True)
class Ended:
    """A script's end: its exit status, and all it wrote."""

    status: int
    out: str
    err: str


def run_script(
    size: int, script: Path, *words: object, python: Sequence[str] = PYTHON, limit_s: float = LIMIT_S
) -> list[Ended]:
    """Run a Python script with some words on `size` ranks, each a process of its own that ends by itself.

    Args:
        size: How many ranks.
        script: Its path.
        words: What it is given.
        python: What runs it, such as `[zygote.python()]` where it is not its start that is tested.
        limit_s: How long all of them have.
    """
    run_id = uuid.uuid4().hex
    processes = [
        subprocess.Popen(
            [*python, str(script), *map(str, words)],
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
    """Return the ids of the processes that this module keeps: the fork server, and ranks of teams that are in use."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return {server, *(process.pid for team in _teams for process in team.processes)} - {None}


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


def _serve(pipe: Connection, variables: Mapping[str, str], directory: str) -> None:
    global _pipe
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    if "MUTATE_REACH" in os.environ:  # `make mutate` asks which test reaches what
        importlib.import_module("tests.mutate.recorder").follow()
    _pipe = pipe
    with contextlib.suppress(EOFError, ConnectionError):  # the caller has ended, or needs no more
        while message := pipe.recv_bytes():
            pipe.send_bytes(pickle.dumps(_answer(message)))
