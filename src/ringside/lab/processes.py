"""Running one process per rank: started, read from, waited for, and ended, all of it with an end in time."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from subprocess import DEVNULL, PIPE, Popen
from typing import IO

from ringside.errors import RingsideError, UsageError
from ringside.lab.wiring import INTERFACE, MOST_HOSTS, address_of
from ringside.processes import Process, descendants, hold, signal_name

# -------------------------------------------------------------------------------------------------
# Which rank runs on which host, and what it finds in its environment: as from torchrun, plus where to bind.


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank runs.

    Args:
        rank: Who.
        host: On which host, from 0.
        local_rank: Which one of that host's ranks, from 0.
    """

    rank: int
    host: int
    local_rank: int


def ranks_on(hosts: int, ranks_per_host: int | Sequence[int]) -> tuple[int, ...]:
    """Return how many ranks each host has.

    Args:
        hosts: How many hosts.
        ranks_per_host: A number for all of them, or one for each.

    Raises:
        UsageError: That cannot be.
    """
    if not 1 <= hosts <= MOST_HOSTS:
        raise UsageError(f"{hosts} hosts: a lab has 1 to {MOST_HOSTS}")
    sizes = (ranks_per_host,) * hosts if isinstance(ranks_per_host, int) else tuple(ranks_per_host)
    if len(sizes) != hosts:
        raise UsageError(
            f"ranks per host are given for {len(sizes)} hosts, and there are {hosts}: give one number or {hosts}"
        )
    if min(sizes) < 1:
        raise UsageError(f"{min(sizes)} ranks on a host: every host has at least 1")
    return sizes


def place_ranks(sizes: Sequence[int]) -> list[RankPlacement]:
    """Return where each rank runs: those of host 0 first, as torchrun numbers them."""
    spots = [(host, local) for host, size in enumerate(sizes) for local in range(size)]
    return [RankPlacement(rank, host, local) for rank, (host, local) in enumerate(spots)]


def rank_environment(place: RankPlacement, sizes: Sequence[int], port: int) -> dict[str, str]:
    """Return the variables that give a rank its place.

    Args:
        place: Where it runs.
        sizes: Ranks of each host.
        port: Where rank 0 listens, on host 0.
    """
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(sum(sizes)),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(sizes[place.host]),
        "GROUP_RANK": str(place.host),
        "GROUP_WORLD_SIZE": str(len(sizes)),
        "RINGSIDE_HOST": f"host{place.host}",
        "MASTER_ADDR": address_of(0),
        "MASTER_PORT": str(port),
    }


def default_environment(given: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return variables that every process in the lab gets unless `given` has them.

    Args:
        given: What was requested and what is inherited.
        ranks: How many ranks there are.
    """
    variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE)
    # The lab has no name server: without these a look-up of an address waits for one.
    variables["RES_OPTIONS"] = "timeout:1 attempts:1"
    if ranks > 1:
        variables["OMP_NUM_THREADS"] = "1"  # as torchrun
    return {name: value for name, value in variables.items() if name not in given}


GRACE_S = 3.0
"""How long a process has after the signal that asks it to end, and after SIGKILL."""

Sink = Callable[[RankPlacement, str, str], None]
"""Takes (place, "stdout" or "stderr", line without its end), as soon as a rank has written the line."""


@dataclass(frozen=True)
class RankResult:
    """What became of a rank.

    Args:
        place: Which rank, on which host.
        status: Its exit status; minus the signal's number if a signal ended it.
        stdout: What it wrote.
        stderr: What it wrote there.
        seconds: From the start of the run until it ended.
        ended: Whether it did not end by itself but was ended by the lab, because time was up.
    """

    place: RankPlacement
    status: int
    stdout: str
    stderr: str
    seconds: float
    ended: bool

    @property
    def rank(self) -> int:
        """Its number."""
        return self.place.rank

    @property
    def host(self) -> int:
        """The host it ran on."""
        return self.place.host

    def describe(self) -> str:
        """Return how it ended, in one line."""
        who = f"rank {self.rank} on host {self.host}"
        if self.ended:
            return f"{who} was ended by the lab after {self.seconds:.1f} s"
        if self.status >= 0:
            return f"{who} ended with status {self.status}"
        return f"{who} was ended by {signal_name(-self.status)}"


@dataclass(frozen=True)
class RunResult:
    """What became of a run.

    Args:
        ranks: One result per rank, ascending.
        seconds: From the first start to the last end.
        timed_out: Whether ranks had to be ended because time was up.
        bytes_per_host: For each host (received, sent) over its links during the run, as the kernel counted.
    """

    ranks: tuple[RankResult, ...]
    seconds: float
    timed_out: bool
    bytes_per_host: tuple[tuple[int, int], ...]

    @property
    def ok(self) -> bool:
        """Whether every rank ended with status 0."""
        return self.first_failure is None

    @property
    def first_failure(self) -> RankResult | None:
        """The rank that failed first by itself, else the first that had to be ended; None if all went well."""
        failed = [result for result in self.ranks if result.status != 0]
        return min(failed, key=lambda result: (result.ended, result.seconds), default=None)

    @property
    def exit_status(self) -> int:
        """The first failing rank's exit status, 128 plus the signal's number for a signal; 0 if all went well."""
        failed = self.first_failure
        if failed is None:
            return 0
        return 128 - failed.status if failed.status < 0 else failed.status

    def check(self) -> RunResult:
        """Return this result if every rank ended with status 0.

        Raises:
            RingsideError: One did not; the message names it, and ends with what it wrote last.
        """
        failed = self.first_failure
        if failed is not None:
            output = failed.stderr[-4000:] or failed.stdout[-4000:]
            raise RingsideError(f"{failed.describe()}; its last words:\n{output}")
        return self


class RankProcesses:
    """Processes that run together; to be used in a `with` statement, which ends those that are left.

    Args:
        sink: Takes every line at once.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self._since = time.monotonic()
        self._all: list[_Rank] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._selector.close()

    def start(self, place: RankPlacement, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a rank."""
        child = Popen(command, env=dict(environ), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True)
        rank = _Rank(place, child, Process(child.pid))
        self._all.append(rank)
        self._selector.register(rank.process, selectors.EVENT_READ, partial(self._ended, rank))
        for name, pipe in rank.pipes.items():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, rank, name))

    def wait(self, timeout_s: float, after_failure_s: float = float("inf")) -> bool:
        """Wait until all have ended.

        Args:
            timeout_s: For how long.
            after_failure_s: For how long once one has failed.

        Returns:
            Whether all have.
        """
        deadline = time.monotonic() + timeout_s
        while any(rank.alive for rank in self._all):
            failures = [rank.seconds for rank in self._all if rank.failed]
            stop = min([deadline, *(self._since + seconds + after_failure_s for seconds in failures)])
            if time.monotonic() >= stop:
                return False
            self._turn(stop)
        return True

    @property
    def any_failed(self) -> bool:
        """Whether one has ended with another status than 0."""
        return any(rank.failed for rank in self._all)

    def end(
        self, first: int = signal.SIGTERM, grace_s: float = GRACE_S, hurry: Callable[[], bool] = lambda: False
    ) -> bool:
        """End those that are left and everything below them: by a first signal, then SIGKILL for those that remain.

        Args:
            first: The first signal.
            grace_s: How long after it they may take.
            hurry: Tells to go on to SIGKILL at once.

        Returns:
            Whether all have ended.
        """
        for signum in (first, signal.SIGKILL):
            left = [rank for rank in self._all if rank.alive]
            for rank in left:
                rank.ended = True
                # All are held before the first is signalled: what it leaves behind would have another parent.
                below = [process for pid in descendants(rank.process.pid) if (process := hold(pid)) is not None]
                for process in (rank.process, *below):
                    process.send(signum)
                for process in below:
                    process.close()
            deadline = time.monotonic() + (grace_s if signum == first else GRACE_S)
            while any(rank.alive for rank in left) and time.monotonic() < deadline:
                if signum == first and hurry():
                    break
                self._turn(deadline)
        return not any(rank.alive for rank in self._all)

    def results(self) -> tuple[RankResult, ...]:
        """Return what became of each rank; all have ended."""
        return tuple(
            RankResult(
                rank.place, rank.child.returncode, rank.text("stdout"), rank.text("stderr"), rank.seconds, rank.ended
            )
            for rank in sorted(self._all, key=lambda rank: rank.place.rank)
        )

    def _turn(self, deadline: float) -> None:
        # Not longer than a second: a wait without an end could not be interrupted by a signal that came just before it.
        for key, _ in self._selector.select(min(max(deadline - time.monotonic(), 0.0), 1.0)):
            key.data()

    def _ended(self, rank: _Rank) -> None:
        rank.child.wait()
        rank.seconds = time.monotonic() - self._since
        self._selector.unregister(rank.process)
        rank.process.close()
        rank.alive = False
        for name, pipe in rank.pipes.items():
            self._read(rank, name)  # what is left; somebody below it may hold the other end open
            if not pipe.closed:
                self._selector.unregister(pipe)
                pipe.close()
            if self._sink is not None and (rest := rank.rest(name)):
                self._sink(rank.place, name, rest)

    def _read(self, rank: _Rank, name: str) -> None:
        pipe = rank.pipes[name]
        with contextlib.suppress(BlockingIOError):
            while not pipe.closed:
                data = os.read(pipe.fileno(), 1 << 16)
                if not data:
                    self._selector.unregister(pipe)
                    pipe.close()
                rank.written[name] += data
        if self._sink is not None:
            for line in rank.new_lines(name):
                self._sink(rank.place, name, line)


@dataclass
class _Rank:
    place: RankPlacement
    child: Popen[bytes]
    process: Process
    alive: bool = True
    ended: bool = False
    seconds: float = 0.0
    written: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    shown: dict[str, int] = field(default_factory=lambda: {"stdout": 0, "stderr": 0})

    @property
    def failed(self) -> bool:
        return not self.alive and self.child.returncode != 0

    @property
    def pipes(self) -> dict[str, IO[bytes]]:
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        return {"stdout": self.child.stdout, "stderr": self.child.stderr}

    def text(self, name: str) -> str:
        return self.written[name].decode(errors="replace")

    def new_lines(self, name: str) -> list[str]:
        """Return the whole lines that were not returned before."""
        end = self.written[name].rfind(b"\n") + 1
        fresh = self.written[name][self.shown[name] : end]
        self.shown[name] = max(end, self.shown[name])
        return fresh.decode(errors="replace").splitlines()

    def rest(self, name: str) -> str:
        """Return a last line that has no end."""
        return self.written[name][self.shown[name] :].decode(errors="replace")
