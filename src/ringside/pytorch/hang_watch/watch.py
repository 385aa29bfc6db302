"""The hang watch of one process: shows where this rank stands, reads where the others do, reports who holds the job up.

Every rank has a watcher; the lowest one of a host that works speaks for the host, and the first host for the job. So a
stopped rank 0 is named by rank 1. Inside a host all is read from memory that the ranks share and from /proc: no store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.files import append_to_file, replace_file
from ringside.monitor.hang.attribution import LIMIT_S, RankState
from ringside.monitor.hang.detector import STACKS, HangDetector
from ringside.monitor.run.directory import EVENTS, RUN, finite
from ringside.monitor.verdict import Verdict, VerdictEvent, headline
from ringside.monitor.wait_meter import WaitMeter
from ringside.processes import host_key, start_time
from ringside.pytorch.hang_watch.board import ProgressPage
from ringside.pytorch.hang_watch.host import Host, RankHandle
from ringside.pytorch.hang_watch.stacks import Stacks, place_of
from ringside.pytorch.hang_watch.store_channel import StoreChannel
from ringside.text import name_ranks

TICK_S = 0.25
STILL_S = 0.8
"""From this standstill on a watcher reads the stack of its training thread."""
HELLO_S = 30.0  # for all ranks to show up at the start
LAST_LOOK_S = 1.0  # for a peer's death to show at the end, after a failure
OTHER_HOSTS_STACKS_S = 4.0
STORE_SILENT_S = 2.0  # from here on a verdict mentions that the store does not answer

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_hello = msgspec.msgpack.Decoder(RankHandle).decode
_hellos = msgspec.msgpack.Decoder(list[RankHandle]).decode
PutEvent = Callable[[str, dict[str, Any]], None]


class HangWatch:
    """The watcher of this process.

    Args:
        store: The session's part of the job's store.
        rank: This rank.
        size: Number of ranks.
        step: Returns this rank's training step.
        path: On rank 0 the run directory.
        put_event: On rank 0 puts an event into the run.
        hang_s: Least wait that is called a hang.

    Attributes:
        board: Told by the communication hook what this rank hands over and waits for.
        pending: Tells whether the gradient collectives handed over last are under way, where nobody waits for them.
        met: Set once it knows how the others can be seen.
        hellos: What those have said of themselves that it met.
        mail: What goes to and comes from other hosts; None while, or where, there are none.
        stacks: Those of this rank.
        training_thread: The thread that made it.
        group: Whose collectives this rank counts.
        groups: What this rank does in all groups, where they are watched; else only those of `group` are counted.
        path: The run's directory, where it is known.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        step: Callable[[], int],
        path: Path | None,
        put_event: PutEvent | None,
        hang_s: float = LIMIT_S,
    ) -> None:
        self.board = ProgressPage(hang_s=hang_s)
        self._hang_s = hang_s
        self.pending: Callable[[], bool] | None = None
        self._store = PrefixStore("watch", store)
        self._rank, self._size, self._step = rank, size, step
        self.path, self._put_event = path, put_event
        self.stacks = Stacks()
        self.training_thread = threading.get_ident()
        self.group = dist.group.WORLD
        self.groups: WaitMeter | None = None
        self._own = RankHandle(
            rank=rank,
            host=host_key(),
            pid=os.getpid(),
            started=start_time(os.getpid()),
            board=self.board.fd,
            stacks=self.stacks.fd,
            signal=self.stacks.signal,
            path=os.fsencode(path.absolute()) if path is not None else b"",
        )
        self._host = Host(rank, self.board, [self._own])  # until it has met the others
        self.met = threading.Event()
        self.mail: StoreChannel | None = None
        self.hellos: list[RankHandle] = []
        self._machine = HangDetector(limit_s=hang_s)
        self._known = 0
        self._pending_since = 0.0
        self._moves = 0
        self._dumped = 0
        self._shared: set[int] = set()
        self._awaited: set[tuple[tuple[int, ...], str]] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringside-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Check one last time, record that this rank has left in good order, and stop."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(3.0)
        if self._thread.is_alive():
            return  # it waits for a store that does not answer; what it holds goes with the process
        try:
            self._update_page(time.monotonic())
            self._check_last()
        except Exception as error:
            _log.info("the last look of the hang watch failed: %s", error)
        self.board.put("left", 1)
        for part in (self.mail, self._host, self.stacks, self.board):
            if part is not None:
                part.close()

    # -------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            if self._meet():
                while not self._ended.wait(TICK_S):
                    self.tick(time.monotonic())
        except Exception as error:
            if not self._ended.is_set():
                _log.warning("the hang watch stopped (%s: %s); training goes on", type(error).__name__, error)

    def _meet(self) -> bool:
        """Learn how the other ranks can be seen; return False where the session ends before."""
        # 1. Every rank writes how it can be seen, and rank 0 all that come in time: one without a model never does.
        self._store.set(str(self._rank), _encode(self._own))  # type: ignore[arg-type]  # bytes are taken as they are
        if self._rank == 0:
            handles, deadline = [self._own], time.monotonic() + HELLO_S
            for rank in range(1, self._size):
                if self._wait_for(str(rank), deadline):
                    handles.append(_hello(self._store.get(str(rank))))
            self._store.set("all", _encode(handles))  # type: ignore[arg-type]
        elif not self._wait_for("all", None):
            return False
        self.hellos = _hellos(self._store.get("all"))

        # 2. Inside the host by memory and /proc, between hosts by the store.
        hosts: dict[str, list[RankHandle]] = {}
        for hello in self.hellos:
            hosts.setdefault(hello.host, []).append(hello)
        # A rank that came too late for rank 0's list, and is alone on its host, knows of the others, not they of it.
        here = hosts.setdefault(self._own.host, [self._own])
        self._host = Host(self._rank, self.board, here)
        self.path = self.path or next((Path(os.fsdecode(hello.path)) for hello in self.hellos if hello.path), None)
        if len(hosts) > 1:
            ranks = [[hello.rank for hello in group] for group in hosts.values()]
            self.mail = StoreChannel(self._store, list(hosts).index(self._own.host), ranks)
        self._machine = self._new_machine()
        self.met.set()
        return not self._ended.is_set()

    def _wait_for(self, key: str, deadline: float | None) -> bool:
        pause = 0.01
        while not self._store.check([key]):
            if self._ended.wait(pause) or (deadline is not None and time.monotonic() > deadline):
                return False
            pause = min(pause * 1.5, 1.0)
        return True

    def _new_machine(self) -> HangDetector:
        pids = {hello.rank: hello.pid for hello in self.hellos}
        return HangDetector([pids.get(rank, 0) for rank in range(self._size)], self._hang_s)

    def tick(self, now: float) -> None:
        """Show where this rank stands, and check the others where this rank leads; the watch's thread calls it.

        Args:
            now: Monotonic seconds.
        """
        self._update_page(now)
        leader = self._host.leader(now)
        if leader == self._rank:
            self._lead(now)
        else:
            self._machine.stay_awake(now)
            self._follow(leader)

    # -------------------------------------------------------------------------------------------- about this rank

    def _update_page(self, now: float) -> None:
        """Bring this rank's page up to date."""
        board = self.board
        board.put("beat_at", now)
        board.put("step", self._step())
        view = board.view(self._rank)

        # How many collectives of any kind this rank has begun on the default group; 0 where its backend does not count.
        try:
            sequence = int(self.group._get_sequence_number_for_group())  # type: ignore[union-attr]
        except (RuntimeError, AttributeError, TypeError):
            sequence = 0
        groups = self.groups
        if groups is not None and groups.guard.tripped:
            groups = None
        moves = 0 if groups is None else groups.moves
        if sequence != view.number("group_seq") or moves != self._moves:
            board.put("group_seq", sequence)
            board.put("group_moved_at", now)
            self._moves = moves
        moved = max(view.number("moved_at"), view.number("group_moved_at"))

        # Where nobody waits for gradients on the host (CUDA), ask whether they are still under way.
        if self.pending is not None:
            if now - moved >= STILL_S and self.pending():
                self._pending_since = moved
                board.put("waiting_since", moved)
            elif self._pending_since:
                self._pending_since = 0.0
                board.put("waiting_since", 0.0)

        # In which collective of torch's the training thread is, and in which line of the script.
        if now - moved < STILL_S:
            if view.number("call_since"):
                board.put("call_since", 0.0)
            return
        place = place_of(self.training_thread)
        call = place.call
        board.write("where", place.where)
        board.put("call_bytes", place.size_bytes)
        if groups is not None:
            awaited = groups.awaited()
            if awaited is not None and not call:
                call = "a collective on the GPU"  # for which the thread waits elsewhere, or will
            if awaited is not None and len(awaited[2]) == self._size:
                awaited = (*awaited[:2], [])  # every rank: their list would be long
            board.show_groups(awaited, groups.counts)
        board.write("call", call)
        board.put("call_since", moved if call else 0.0)

    def _dump(self, episode: int) -> None:
        if episode > self._dumped:
            self._dumped = episode
            self.stacks.dump()
            self.board.put("dumped", episode)

    # -------------------------------------------------------------------------------------------- about the others

    def _follow(self, leader: int) -> None:
        """Give stacks when the leader asks for them, and be ready to take its place."""
        episode = self._host.episode_of(leader)
        if episode:
            self._dump(episode)
            return
        self.stacks.clear()
        self._known = self._host.spoken
        if self._machine.open is not None:
            self._machine = self._new_machine()
            self._machine.stay_awake(time.monotonic())

    def _lead(self, now: float) -> None:
        """Judge the job, or where another host speaks for it, tell that host how this one stands."""
        standings = self._host.standings(now)
        if self.mail is not None:
            self.mail.post(standings, int(self.board.view(self._rank).number("episode")))
            speaker = self.mail.speaker(now)
            if speaker != self.mail.host:
                self._machine.stay_awake(now)
                # Give the speaking host the stacks of this host's ranks, once per hang.
                episode = self.mail.episode(speaker)
                self.board.put("episode", episode)
                if episode and episode not in self._shared:
                    self._shared.add(episode)
                    self._dump(episode)
                    self.mail.post_stacks(episode, self._host.stacks(episode, self._ended))
                return
            standings = standings + self.mail.others(now)
        change = self._machine.check(standings, now)
        if change is not None:
            # Where the job's store does not answer, what is known of other hosts is as old as that.
            silence_s = self.mail.silence_s(now) if self.mail is not None else 0.0
            if silence_s >= STORE_SILENT_S:
                verdict = change.verdict
                cause = f"{verdict.cause}; the job's store has not answered for {silence_s:.1f} s"
                evidence = {**verdict.evidence, "store_silent_seconds": round(silence_s, 3)}
                verdict = msgspec.structs.replace(verdict, cause=cause, evidence=evidence)
                change = change._replace(verdict=verdict)
            self._report(change)
        elif self._machine.open is None:
            self._known = self._host.spoken
            self._tell_awaited(standings)

    def _tell_awaited(self, standings: list[RankState]) -> None:
        """Say whom the others wait for before it is called a hang, once for each place in the script."""
        found = self._machine.awaited
        if found is None:
            return
        where = next((state.where for state in standings if state.rank in found.ranks), "")
        if (found.ranks, where) in self._awaited:
            return
        self._awaited.add((found.ranks, where))
        fields = {
            "ranks": list(found.ranks),
            "waiting": list(found.waiting),
            "op": found.op,
            "waited_seconds": round(found.waited_s, 3),
            "where": where,
        }
        self._event("waited_for", fields)
        waiting = name_ranks(list(found.waiting))
        _log.warning(
            "%s is waited for: %s in %s for %.1f s%s; it may be at work, and no hang is called yet",
            name_ranks(list(found.ranks)),
            f"{waiting} wait{'s' if len(found.waiting) == 1 else ''}",
            found.op,
            found.waited_s,
            f", last seen in {where}" if where else "",
        )

    def _report(self, change: VerdictEvent) -> None:
        """Put a verdict into the run, once per host, and every rank's stacks; or that it is over."""
        if change.kind == "repaired":
            self.board.put("episode", 0)
            self.stacks.clear()
            self._put(change)
            return
        # The count of verdicts is shared by the host's pages: a rank that takes the lead over repeats none.
        spoken = self._host.spoken
        if spoken > self._known:  # another rank has reported it, and is gone or comes back
            self._known = spoken
            return
        self._known = spoken + 1
        self.board.put("spoken", self.board.view(self._rank).number("spoken") + 1)
        self.board.put("episode", self._known)
        self._put(change)
        self._collect_stacks(self._known)

    def _collect_stacks(self, episode: int) -> None:
        """Put every rank's stacks into the run."""
        self._dump(episode)
        texts = self._host.stacks(episode, self._ended)
        if self.mail is not None:
            self.mail.announce(episode)
            texts.update(self.mail.stacks(episode, OTHER_HOSTS_STACKS_S))
        if self.path is None or not (self.path / RUN).exists():
            return
        try:
            (self.path / STACKS).mkdir(exist_ok=True)
            names = [f"{STACKS}/hang-{episode}-rank-{rank}.txt" for rank in sorted(texts)]
            for name, rank in zip(names, sorted(texts), strict=True):
                replace_file(self.path / name, texts[rank].encode(errors="replace"), own_folder=True)
        except OSError as error:
            _log.warning("the stacks of the hung ranks cannot be written: %s", error.strerror or error)
            return
        if names:
            self._event("stacks", {"episode": episode, "ranks": sorted(texts), "files": names})

    # -------------------------------------------------------------------------------------------- events

    def _put(self, change: VerdictEvent) -> None:
        fields = {"step": change.verdict.detected_step, "verdict": msgspec.to_builtins(change.verdict)}
        self._event(change.kind, fields)
        if self._put_event is None and change.kind == "verdict" and "RINGSIDE_LAUNCHED" not in os.environ:
            _log.warning("%s", log_line(change.verdict))

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        """Put an event into the run: through rank 0's session, or where rank 0 cannot, straight into its directory."""
        if self._put_event is not None:
            self._put_event(kind, fields)
            return
        if self.path is None or not (self.path / RUN).exists():
            return
        line = msgspec.json.encode(finite({"unix": time.time(), "kind": kind, **fields})) + b"\n"
        with contextlib.suppress(OSError):
            append_to_file(self.path / EVENTS, line)

    def _check_last(self) -> None:
        """Report why this rank's training failed before its process ends, if no other rank is left to do it."""
        if not self.met.is_set() or self.mail is not None:
            return
        failed = self.board.view(self._rank).text("failure") != ""
        deadline = time.monotonic() + (LAST_LOOK_S if failed else 0.0)
        while True:
            now = time.monotonic()
            standings = self._host.standings(now, ask_kernel=True)
            if self._host.leader(now, {s.rank for s in standings if s.process.gone or s.process.stopped}) == self._rank:
                change = self._machine.check(standings, now, at_end=True)
                if change is not None:
                    self._report(change)
                    return
            others = [standing for standing in standings if standing.rank != self._rank]
            if now > deadline or all(standing.left or standing.process.gone for standing in others):
                return
            time.sleep(0.02)  # a process that ends gives no event that all its peers can wait for


def log_line(verdict: Verdict) -> str:
    """Return a verdict of the hang watch as a line of the log."""
    return f"{headline(verdict)} (step {verdict.since_step}): {verdict.cause}. {verdict.advice}"


def begin(store: Store, rank: int, size: int, **how: Any) -> HangWatch | None:
    """Return this process's watcher; None where it is turned off (RINGSIDE_WATCH=off), not needed or cannot be.

    Arguments as of `HangWatch`.
    """
    if size < 2 or os.environ.get("RINGSIDE_WATCH", "").lower() in ("off", "0"):
        return None
    try:
        return HangWatch(store, rank, size, **how)
    except Exception as error:
        _log.warning("hangs are not watched for here (%s: %s); training goes on", type(error).__name__, error)
        return None
