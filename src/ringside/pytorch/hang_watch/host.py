"""The ranks of this host as one of them sees the others: their pages, their processes, their stacks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from threading import Event
from typing import NamedTuple

import msgspec

from ringside.monitor.hang.attribution import ProcessState, RankState
from ringside.processes import read_stat
from ringside.pytorch.hang_watch.board import ProgressPage, ProgressView
from ringside.pytorch.hang_watch.stacks import read_stacks, request_stacks

FRESH_S = 2.0
"""A watcher that has written nothing for so long leaves its part to the next rank."""
LOOK_S = 1.0
"""From this wait or silence on the kernel is asked about the processes, which costs a read of /proc for each."""
OWN_STACKS_S = 0.8  # for watchers to write the stacks of their process
ASKED_STACKS_S = 0.5  # for signals to be answered
POLL_S = 0.02

_LEAST_SPAN_S = 0.2

_HERE = ProcessState(state="S")
"""A process of this host that there is no reason to ask the kernel about."""

_log = logging.getLogger(__name__)


class RankHandle(msgspec.Struct, frozen=True, array_like=True):
    """How one rank can be seen.

    Args:
        rank: Global rank.
        host: Ranks with equal values see each other's processes.
        pid: Its process id.
        started: When its process started (`ProcessStat.started`).
        board: File descriptor of its page.
        stacks: File descriptor of its stacks.
        signal: The signal that makes it write its stacks; 0: none.
        path: On rank 0 the run directory, by `os.fsencode`: it may be no text.
    """

    rank: int
    host: str
    pid: int
    started: int
    board: int
    stacks: int
    signal: int
    path: bytes = b""


class Observer:
    """Reads the state of one process again and again.

    Args:
        pid: Its id.
        started: When it started (`ProcessStat.started`): a later process of the same id is another one.
        root: Where the proc file system is.
    """

    def __init__(self, pid: int, started: int, root: str = "/proc") -> None:
        self._pid, self._started, self._root = pid, started, root
        self._gone_since: float | None = None
        self._signal = 0
        self._cpu: tuple[float, float] | None = None
        self._share = math.nan

    def read(self, now: float) -> ProcessState:
        """Return what is known of the process.

        Args:
            now: Monotonic seconds.
        """
        stat = read_stat(self._pid, self._root)
        if stat is None or stat.started != self._started:
            return self._gone("gone", now)
        if stat.ended:
            self._signal = stat.exit_code & 0x7F or self._signal  # the low bits of a wait status
            return self._gone(stat.state, now)
        # The kernel counts in ticks: a share over less than a few of them means nothing.
        if self._cpu is None:
            self._cpu = (now, stat.cpu_s)
        elif now - self._cpu[0] >= _LEAST_SPAN_S:
            self._share = max(stat.cpu_s - self._cpu[1], 0.0) / (now - self._cpu[0])
            self._cpu = (now, stat.cpu_s)
        try:
            function = Path(self._root, str(self._pid), "wchan").read_text(errors="replace").strip("\0\n ")
        except OSError:
            function = ""
        function = "" if function == "0" else function  # it runs, or this kernel does not show it
        return ProcessState(state=stat.state, cpu_share=self._share, kernel_function=function)

    def _gone(self, state: str, now: float) -> ProcessState:
        if self._gone_since is None:
            self._gone_since = now
        return ProcessState(state=state, gone_s=now - self._gone_since, signal=self._signal)


class _Peer(NamedTuple):
    hello: RankHandle
    view: ProgressView
    observer: Observer


class Host:
    """What one rank sees of the ranks of its host, itself among them.

    Args:
        rank: This rank.
        board: Its page.
        hellos: The ranks of this host.
    """

    def __init__(self, rank: int, board: ProgressPage, hellos: Sequence[RankHandle]) -> None:
        self._rank = rank
        self._peers: dict[int, _Peer] = {}
        for hello in hellos:
            try:
                own = hello.rank == rank
                view = board.view(rank) if own else ProgressView.of_process(hello.rank, hello.pid, hello.board)
            except OSError as error:
                _log.info("the hang watch cannot see rank %d (%s)", hello.rank, error)
                continue
            self._peers[hello.rank] = _Peer(hello, view, Observer(hello.pid, hello.started))

    @property
    def spoken(self) -> int:
        """How many verdicts ranks of this host have reported."""
        return sum(int(peer.view.number("spoken")) for peer in self._peers.values())

    def leader(self, now: float, unable: Collection[int] = ()) -> int:
        """Return the lowest rank of the host whose watcher works: it speaks for the host.

        Args:
            now: Monotonic seconds.
            unable: Ranks that are known not to, whatever their page shows.
        """
        for rank in sorted(set(self._peers).difference(unable)):
            view = self._peers[rank].view
            if rank == self._rank or (not view.number("left") and now - view.number("beat_at") < FRESH_S):
                return rank
        return self._rank

    def episode_of(self, rank: int) -> int:
        """Return the number of the hang that goes on by a rank's page; 0: none."""
        return int(self._peers[rank].view.number("episode")) if rank in self._peers else 0

    def standings(self, now: float, *, ask_kernel: bool = False) -> list[RankState]:
        """Return where the ranks of this host stand."""
        seen = [(peer, peer.view.standing(now)) for peer in self._peers.values()]
        someone_waits = ask_kernel or any(standing.waiting_s > LOOK_S for _, standing in seen)
        standings = []
        for peer, standing in seen:
            is_asked = someone_waits or standing.silent_s > LOOK_S
            process = peer.observer.read(now) if is_asked else _HERE
            standings.append(msgspec.structs.replace(standing, process=process))
        return standings

    def stacks(self, episode: int, ended: Event) -> dict[int, str]:
        """Return the Python stacks of every rank of this host that can give them.

        The ranks' own watchers write them; those whose Python does not run are sent their signal.

        Args:
            episode: The number of the hang, as on this rank's page.
            ended: Stop waiting.
        """
        able = {}
        for rank, peer in self._peers.items():
            process = peer.observer.read(time.monotonic())
            if not (process.gone or process.stopped):
                able[rank] = peer

        # 1. Watchers see the episode on this rank's page, and write their own process's stacks.
        deadline = time.monotonic() + OWN_STACKS_S
        while any(peer.view.number("dumped") < episode for peer in able.values()):
            if time.monotonic() > deadline or ended.wait(POLL_S):
                break

        # 2. A rank whose watcher did not (it has no GIL) is sent its signal, which C answers.
        late = {rank: peer for rank, peer in able.items() if peer.view.number("dumped") < episode}
        before = {rank: read_stacks(peer.hello.pid, peer.hello.stacks) for rank, peer in late.items()}
        for peer in late.values():
            request_stacks(peer.hello.pid, peer.hello.started, peer.hello.signal)
        deadline = time.monotonic() + ASKED_STACKS_S
        while any(read_stacks(peer.hello.pid, peer.hello.stacks) == before[rank] for rank, peer in late.items()):
            if time.monotonic() > deadline or ended.wait(POLL_S):
                break
        else:
            ended.wait(POLL_S)  # the rest of what is being written

        texts = {rank: read_stacks(peer.hello.pid, peer.hello.stacks) for rank, peer in able.items()}
        return {rank: text for rank, text in texts.items() if text}

    def close(self) -> None:
        """Unmap the others' pages."""
        for rank, peer in self._peers.items():
            if rank != self._rank:
                peer.view.close()
        self._peers = {}
