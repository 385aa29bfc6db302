"""Who judges a run's steps: watchers of a job, which see every completed step and say which episodes began or ended."""

from __future__ import annotations

import logging
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.monitor.groups import JobGroups
from ringside.monitor.job.watcher import CommunicationBound, InputBound, JobWatcher, SmallCollectives
from ringside.monitor.links.watcher import LinkWatcher
from ringside.monitor.pipeline import StageWatcher
from ringside.monitor.run.records import Group, Row, StepRecord
from ringside.monitor.slow_rank.peers import PeersWatcher
from ringside.monitor.verdict import Verdict, VerdictEvent
from ringside.processes import die_with_parent

_log = logging.getLogger(__name__)


class Watcher(Protocol):
    """Judges some kinds of verdicts. Its memory does not grow with steps."""

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step, in order; return the episodes that began or ended at it, mostly none.

        A verdict that ended has its final price, and `until_step` in its evidence.
        """

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""


class Judge(Protocol):
    """Judges all that is judged of a run's steps."""

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step, in order; return what is known now of this step or of earlier ones."""

    def poll(self) -> list[VerdictEvent]:
        """Return what has become known since the last call."""

    def finish(self) -> list[VerdictEvent]:
        """No step follows; return what was not known yet."""

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""


class Watchers:
    """Judges at once; one of the watchers that raises is dropped, and that is logged.

    Args:
        watchers: In the order in which they are asked.
    """

    def __init__(self, watchers: Iterable[Watcher]) -> None:
        self._watchers = list(watchers)

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step; see `Judge`."""
        findings: list[VerdictEvent] = []
        for watcher in list(self._watchers):
            try:
                findings += watcher.update(step, row)
            except Exception:  # a job is worth more than a kind of verdict
                self._watchers.remove(watcher)
                _log.exception("A watcher of the monitor failed and was dropped; the run goes on.")
        return findings

    def poll(self) -> list[VerdictEvent]:
        """Return nothing: all is known at once."""
        return []

    def finish(self) -> list[VerdictEvent]:
        """Return nothing: all is known at once."""
        return []

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""
        return [verdict for watcher in self._watchers for verdict in watcher.open]


def standard_watchers(ranks: int, hosts: Sequence[str] = (), groups: JobGroups | None = None) -> list[Watcher]:
    """Return the watchers of every job: ranks' own times, links between hosts, the job as a whole, and its stages.

    A job is bound by communication only where neither a slow link nor small collectives explain it.

    Args:
        ranks: Number of ranks.
        hosts: Host of each rank, in rank order, where it is known.
        groups: What is known of the job's process groups.
    """
    groups = groups or JobGroups(ranks)
    links, small = LinkWatcher(ranks, hosts), SmallCollectives()
    bound = CommunicationBound(Explained(links, small, groups))
    return [PeersWatcher(groups), links, JobWatcher(ranks, [small, bound, InputBound()]), StageWatcher(groups)]


@dataclass(frozen=True)
class Explained:
    """Whether there is, or may be, a narrower reason for communication that takes long: a pipeline has bubbles."""

    links: LinkWatcher
    small: SmallCollectives
    groups: JobGroups

    def __call__(self) -> bool:
        """Return whether there is."""
        return self.links.suspects or self.small.suspects or self.groups.mesh.has_stages


# -------------------------------------------------------------------------------------------------
# In a process of its own, so that the one that trains does not pay for it.
#
# To judge a step of two ranks takes a millisecond of a processor, and of the interpreter lock for which training waits.
# A run's first steps are judged where they are collected, since most runs of tests and trials end with them. Then a
# process is started, which is given these steps again, and every one that follows; what it finds comes back with the
# next batch. Messages are msgpack behind four bytes of length. To the process: `_Opening`, a `_Step` for each step, and
# `_END`. From it: an `_Answer` whenever there is something new, and a last one that says that it has judged all.

YOUNG_STEPS = 24
"""Steps that are judged where they are collected."""

MOST_PENDING_BYTES = 64 << 20
"""A process that is so far behind has stopped: it is given up."""

PATIENCE_S = 10.0
"""How long the end of a run waits for the judgement of its last steps."""

NICENESS = 19
"""What trains comes first where processors are few; a run is judged in what is left."""

_PROGRAM = f"""
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those that train: it has to judge their last steps
os.setpriority(os.PRIO_PROCESS, 0, {NICENESS})  # not in a session of its own, where Linux gives it a share of its own
from ringside.monitor.judge import main
main()
"""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16
_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
"""Variables by which a rank is told from other processes."""


class _Opening(msgspec.Struct, array_like=True):
    """What the process is to know first.

    Args:
        parent: The process that starts it.
        ranks: Number of ranks.
        hosts: Host of each rank, where it is known.
        known_steps: The findings of so many steps are known already.
    """

    parent: int
    ranks: int
    hosts: list[str]
    known_steps: int


class _Step(msgspec.Struct, array_like=True):
    """A completed step.

    Args:
        step: Its number.
        records: Of the ranks that reported.
        groups: All process groups of the job that are known, where there are more than before.
    """

    step: int
    records: list[StepRecord]
    groups: list[Group]


class _Answer(msgspec.Struct, array_like=True):
    """What is known now.

    Args:
        findings: Verdicts whose episodes began or ended since the last answer, and whether they ended.
        open: Verdicts whose episodes are not over, with their prices so far.
        is_last: Whether all steps have been judged.
    """

    findings: list[tuple[Verdict, bool]]
    open: list[Verdict]
    is_last: bool


_END = b""
_encode = msgspec.msgpack.Encoder().encode


class ProcessJudge:
    """Judges a run's first steps here, the others in a process of its own that ends with the thread which started it.

    Nothing waits for that process but `finish`. If it fails, which is logged once, nothing more is found while the run
    goes on; whoever reads the run afterwards judges it again.

    Args:
        ranks: Number of ranks.
        hosts: Host of each rank, in rank order, where it is known.
        groups: What is known of the job's process groups.
        young_steps: Steps that are judged here.
        most_pending_bytes: The process is given up when it is so far behind.
        patience_s: How long `finish` waits for it.

    Attributes:
        process: The process, while there is one.
    """

    def __init__(
        self,
        ranks: int,
        hosts: Sequence[str],
        groups: JobGroups,
        *,
        young_steps: int = YOUNG_STEPS,
        most_pending_bytes: int = MOST_PENDING_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._ranks, self._hosts, self._groups = ranks, list(hosts), groups
        self._young_steps, self._most_pending_bytes, self._patience_s = young_steps, most_pending_bytes, patience_s
        self._here: Watchers | None = Watchers(standard_watchers(ranks, hosts, groups))
        self._mesh = JobGroups(ranks).mesh
        self._first: list[_Step] = []
        self._pending, self._arrived = bytearray(), bytearray()
        self._to_process = self._from_process = -1
        self._open: list[Verdict] = []
        self._has_all = False

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step; return what is known now of this step or of earlier ones."""
        more, self._mesh = self._groups.mesh is not self._mesh, self._groups.mesh
        message = _Step(step, list(row.values()), list(self._mesh.groups.values()) if more else [])
        if self._here is not None:
            findings = self._here.update(step, row)
            self._first.append(message)
            if len(self._first) == self._young_steps:
                self._start()
            return findings
        self._send(_encode(message))
        return []

    def poll(self) -> list[VerdictEvent]:
        """Return what has become known since the last call."""
        if self.process is None:
            return []
        self._write()
        return self._read()

    def finish(self) -> list[VerdictEvent]:
        """No step follows; wait for what was not known yet, and return it."""
        if self.process is None:
            return []
        self._send(_END)
        findings, deadline = [], time.monotonic() + self._patience_s
        while self.process is not None and not self._has_all and (left := deadline - time.monotonic()) > 0:
            select.select([self._from_process], [self._to_process] if self._pending else [], [], left)
            findings += self.poll()
        if not self._has_all:
            self._give_up(f"has not judged the last steps within {self._patience_s:g} s")
        self._end()
        return findings

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices as far as they are known."""
        return self._open if self._here is None else self._here.open

    def _start(self) -> None:
        """Start the process and give it the steps so far; where none can be started, all are judged here."""
        first, self._first = self._first, []
        # It is to find what this one has found, wherever it was started; and it is no rank.
        environ = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
        environ |= {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))), "RINGSIDE": "off"}
        environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                env=environ,
                bufsize=0,
            )
        except (OSError, ValueError) as error:
            _log.debug("steps are judged where they are collected: no process can be started (%s)", error)
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to_process, self._from_process = self.process.stdin.fileno(), self.process.stdout.fileno()
        for pipe in (self._to_process, self._from_process):
            os.set_blocking(pipe, False)
        self._open = self._here.open if self._here is not None else []
        self._here = None
        self._send(_encode(_Opening(os.getpid(), self._ranks, self._hosts, len(first))))
        for message in first:
            self._send(_encode(message))

    def _send(self, message: bytes) -> None:
        if self.process is None:
            return
        self._pending += _LENGTH.pack(len(message)) + message
        if len(self._pending) > self._most_pending_bytes:
            self._write()
            if len(self._pending) > self._most_pending_bytes:
                self._give_up("does not take them in any more")

    def _write(self) -> None:
        try:
            while self._pending and (count := os.write(self._to_process, self._pending)):
                del self._pending[:count]
        except BlockingIOError:
            pass
        except OSError:
            self._pending.clear()  # it has ended; what it has found is read first

    def _read(self) -> list[VerdictEvent]:
        findings: list[VerdictEvent] = []
        has_ended = False
        try:
            while block := os.read(self._from_process, _READ_BYTES):
                self._arrived += block
            has_ended = True
        except BlockingIOError:
            pass
        try:
            for message in _messages(self._arrived):
                answer = _decode_answer(message)
                findings += [VerdictEvent(verdict, ended) for verdict, ended in answer.findings]
                self._open, self._has_all = answer.open, answer.is_last
        except UNDECODABLE as error:
            self._give_up(f"answers what cannot be read ({error})")
        if has_ended and self.process is not None and not self._has_all:
            self._give_up("has ended")
        return findings

    def _give_up(self, why: str) -> None:
        if self.process is not None:
            _log.warning(
                "the process that judges this run's steps %s: nothing more is found while the run goes on; it is "
                "recorded as before, and ringside report judges it; training goes on",
                why,
            )
            self._end()

    def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


def _messages(arrived: bytearray) -> Iterator[bytes]:
    """Yield the messages that have arrived whole, and take them away."""
    while len(arrived) >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(arrived)
        if len(arrived) < _LENGTH.size + size:
            return
        message = bytes(arrived[_LENGTH.size : _LENGTH.size + size])
        del arrived[: _LENGTH.size + size]
        yield message


# ------------------------------------------------------------------------------------------------ in that process


def main() -> None:
    """Judge what comes by standard input, and answer on standard output, until all is judged."""
    decode_opening, decode_step = msgspec.msgpack.Decoder(_Opening).decode, msgspec.msgpack.Decoder(_Step).decode
    arrived = bytearray()
    opening = None
    judged, is_last, was_open = 0, False, False
    while not is_last and (block := os.read(sys.stdin.fileno(), _READ_BYTES)):
        arrived += block
        findings: list[VerdictEvent] = []
        for message in _messages(arrived):
            if opening is None:
                opening = decode_opening(message)
                die_with_parent(parent=opening.parent)
                groups = JobGroups(opening.ranks)
                watchers = Watchers(standard_watchers(opening.ranks, opening.hosts, groups))
            elif message == _END:
                is_last = True
            else:
                step = decode_step(message)
                groups.learn(step.groups)
                found = watchers.update(step.step, {record.rank: record for record in step.records})
                judged += 1
                findings += found if judged > opening.known_steps else []
        verdicts = [] if opening is None else watchers.open
        if findings or verdicts or was_open or is_last:
            was_open = bool(verdicts)
            answer = _encode(_Answer([(finding.verdict, finding.ended) for finding in findings], verdicts, is_last))
            sys.stdout.buffer.write(_LENGTH.pack(len(answer)) + answer)
            sys.stdout.buffer.flush()
