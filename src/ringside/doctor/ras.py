"""Reader of what NCCL's RAS says of a living job: `ncclras -f json`, again and again, and the events of its monitor.

Counts are those of calls, by function, and every rank's are taken at another moment: a lag says nothing. One that stays
in two readings, with neither the rank nor those ahead of it counting anything meanwhile, is a rank that they wait for.
"""

from __future__ import annotations

import bisect
import re
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import msgspec

from ringside.decoding import MOST_RANKS, UNDECODABLE
from ringside.doctor.calls.record import Count, Rank
from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note, Number, Sheet, Unjudged, verdict_of_files
from ringside.monitor.verdict import Verdict
from ringside.text import counted, name_ranks, rank_list

KIND = "NCCL RAS output"
MOST_BYTES = 64 << 20
STILL_S = 5.0
"""A communicator whose counts do not move for so long stands still."""
MESSAGES = ("Send", "Recv", "SendRecv")
"""Not every rank calls these equally often."""
_SIGNS = re.compile(rb'"(?:nccl_version|communicators_count)"\s*:|"group"\s*:\s*"(?:LIFECYCLE|TRACE)"')
_FIRST = re.compile(rb"\s*(?:RAS Monitor Mode.*\n=+\s+)?\{")
"""The monitor's welcome goes to stderr, which may be in the same file."""
_NO_COMMA = re.compile(rb'("nvml_dev": -?\d+)(\s+"status")')
"""NCCL 2.28 forgets it, of each rank that is missing; its version stands at the beginning."""
MOST_ROWS = 64

Place = tuple[str, int, int]
"""Which device of which process a rank is: its host, process and GPU."""


class _MissingStatus(msgspec.Struct):
    unresponsive: bool = False
    considered_dead: bool = False


class _Member(msgspec.Struct):
    rank: Rank
    host: str = ""
    pid: int = -1
    nvml_dev: int = -1
    collective_counts: dict[str, Count] = {}

    @property
    def place(self) -> Place:
        """Where it runs."""
        return self.host, self.pid, self.nvml_dev


class _Missing(_Member):
    status: _MissingStatus = msgspec.field(default_factory=_MissingStatus)


class _Communicator(msgspec.Struct):
    hash: str
    secondary_hash: str = ""
    size: Rank = 0
    ranks: list[_Member] = []
    missing_ranks: list[_Missing] = []

    def counts(self) -> dict[int, dict[str, int]]:
        """What each rank has called, without messages."""
        return {
            member.rank: {name: n for name, n in member.collective_counts.items() if name not in MESSAGES}
            for member in self.ranks
        }


class _Peer(msgspec.Struct):
    host: str = ""
    pid: int = -1
    addr: str = ""


class Document(msgspec.Struct):
    """What one call of `ncclras -f json` says, as far as it is used."""

    timestamp: str = ""
    nccl_version: str = ""
    communicators: list[_Communicator] | None = None
    event: str = ""
    peer: _Peer | None = None

    def seconds(self) -> float:
        """Its time; RAS gives whole seconds of the host's local time."""
        try:
            return time.mktime(time.strptime(self.timestamp[:19], "%Y-%m-%d %H:%M:%S"))
        except (ValueError, OverflowError):
            return 0.0


class Readings:
    """What is needed of any number of readings.

    Attributes:
        recent: Ascending in time: the last of each moment within `STILL_S` before the newest, and one before those.
        ranks: The ranks of the job by where they run, as the newest reading that has them says.
        versions: Those of NCCL.
        number: How many there were.
    """

    def __init__(self) -> None:
        self.recent: list[Document] = []
        self.ranks: dict[Place, int] = {}
        self.versions: set[str] = set()
        self.number = 0
        self._known_s: dict[Place, float] = {}

    def add(self, reading: Document) -> None:
        """Take one; files may come in any order."""
        self.number += 1
        if reading.nccl_version and len(self.versions) < MOST_ROWS:
            self.versions.add(reading.nccl_version)
        moment_s = reading.seconds()
        for place, rank in _ranks_of_the_job(reading).items():
            known_s = self._known_s.get(place)
            if moment_s >= known_s if known_s is not None else len(self.ranks) < MOST_RANKS:
                self.ranks[place], self._known_s[place] = rank, moment_s
        self.recent = [other for other in self.recent if other.seconds() != moment_s]
        bisect.insort(self.recent, reading, key=Document.seconds)
        newest_s = self.recent[-1].seconds()
        old = sum(newest_s - other.seconds() >= STILL_S for other in self.recent)
        del self.recent[: max(old - 1, 0)]

    @property
    def last(self) -> Document | None:
        """The newest."""
        return self.recent[-1] if self.recent else None

    @property
    def before(self) -> Document | None:
        """The newest of those `STILL_S` and more before the last."""
        first = self.recent[0] if self.recent else None
        return first if first and self.recent[-1].seconds() - first.seconds() >= STILL_S else None


def matches(source: Source) -> bool:
    """Return whether a source begins with a reading of RAS or an event of its monitor."""
    head = source.head[:2048]
    return bool(_FIRST.match(head) and _SIGNS.search(head)) and b'"timestamp"' in head


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Judge the readings and events of one job together."""
    readings = Readings()
    dead: dict[tuple[str, int, str], str] = {}
    notes = []
    for source in sources:
        progress.begin(f"reading {source.name}")
        taken = events = damaged = 0
        with source.open() as stream:
            for text in _documents(stream):
                try:
                    whole = _NO_COMMA.sub(rb"\1,\2", text) if b'"2.28.' in text[:64] else text
                    document = msgspec.json.decode(whole, type=Document)
                except UNDECODABLE:
                    damaged += 1
                    continue
                if document.communicators is not None:
                    taken += 1
                    readings.add(document)
                elif document.event:
                    events += 1
                    if document.event == "PEER_DEAD" and (peer := document.peer) is not None:
                        dead[peer.host, peer.pid, peer.addr] = document.timestamp
        text_of = f"{counted(taken, 'reading')}, {counted(events, 'event')}"
        text_of += f"; {counted(damaged, 'damaged one')} left out" if damaged else ""
        notes.append(Note(file=source.name, kind=KIND, text=text_of, used=bool(taken or events)))
    verdicts, unjudged = _judge_dead(readings, dead)
    behind, more = _judge_counts(readings, [rank for verdict in verdicts for rank in verdict.ranks])
    return Findings(
        verdicts=[*verdicts, *behind],
        unjudged=[*unjudged, *more],
        notes=notes,
        sheets=_table(readings.last),
        facts={"ras": {"readings": readings.number, "versions": sorted(readings.versions)}},
    )


def _documents(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the documents that a file holds one after the other: as RAS indents them, or one a line."""
    held: list[bytes] = []
    nbytes = 0
    for line in iter(lambda: stream.readline(MOST_BYTES), b""):
        text = line.rstrip()
        if not held and not text.startswith(b"{"):
            continue
        held.append(line)
        nbytes += len(line)
        if text == b"}" or (len(held) == 1 and text.endswith(b"}")) or nbytes > MOST_BYTES:
            yield b"".join(held)
            held, nbytes = [], 0
    if held:
        yield b"".join(held)


def _ranks_of_the_job(reading: Document) -> dict[Place, int]:
    """The ranks of the largest communicator, by where they run."""
    world = max(reading.communicators or (), key=lambda each: each.size, default=None)
    return {member.place: member.rank for member in (*world.ranks, *world.missing_ranks)} if world else {}


def _judge_dead(readings: Readings, dead: dict[tuple[str, int, str], str]) -> tuple[list[Verdict], list[Unjudged]]:
    """Processes that RAS holds for dead, and ranks that do not answer."""
    ranks = readings.ranks
    last = readings.last.communicators or [] if readings.last else []
    missing = [member for communicator in last for member in communicator.missing_ranks]
    gone = {member.place: "is considered dead by RAS" for member in missing if member.status.considered_dead}
    nobodys = []
    for (host, pid, addr), moment in dead.items():
        places = [place for place in ranks if place[:2] == (host, pid)]
        for place in places:
            gone.setdefault(place, f"was declared dead by RAS at {moment}")
        if not places:
            nobodys.append((f"process {pid} on {host}" if host else f"the peer {addr}", moment))
    advice = "Look for the process on this host, and in dmesg and the log of its launcher for why it ended."
    verdicts = [
        verdict_of_files(
            "dead_rank",
            [ranks[place]] if place in ranks else [],
            f"process {place[1]} on {place[0]} {why}",
            {"host": place[0], "pid": place[1], "device": place[2]},
            advice,
        )
        for place, why in gone.items()
    ]
    verdicts += [
        verdict_of_files("dead_rank", [], f"{who} was declared dead by RAS at {moment}", {"peer": who}, advice)
        for who, moment in nobodys
    ]
    silent = sorted({ranks.get(m.place, m.rank) for m in missing if m.status.unresponsive and m.place not in gone})
    unjudged = []
    if silent:
        why = "it does not answer RAS" if len(silent) == 1 else "they do not answer RAS"
        unjudged.append(Unjudged(what=f"what {name_ranks(silent)} did", why=f"{why}; ask again after a minute"))
    return verdicts, unjudged


def _judge_counts(readings: Readings, gone: Sequence[int]) -> tuple[list[Verdict], list[Unjudged]]:
    """Who has called fewer collectives than the others of its communicator and calls nothing any more."""
    last = readings.last
    if last is None or gone:
        return [], []
    ranks = _ranks_of_the_job(last)
    moved, still_s = _movement(last, readings.before)
    behind: dict[Place, tuple[_Communicator, str, int, int]] = {}
    waiting: dict[str, set[Place]] = {}
    lagging = []
    for communicator in last.communicators or ():
        counts = communicator.counts()
        places = {member.rank: member.place for member in communicator.ranks}
        for function in sorted({name for own in counts.values() for name in own}):
            called = {rank: own.get(function, 0) for rank, own in counts.items()}
            most = max(called.values())
            late = [rank for rank, count in called.items() if count < most]
            ahead = [places[rank] for rank in called if called[rank] == most]
            # Where neither side counted anything, the lag of now is that of the earlier reading.
            if late and (moved is None or moved.intersection(ahead) or any(places[rank] in moved for rank in late)):
                lagging.append((communicator, function, late))
                continue
            for rank in late:
                behind.setdefault(places[rank], (communicator, function, called[rank], most))
            if late:
                waiting.setdefault(communicator.hash, set()).update(ahead)
    # Who is behind in one communicator because it waits in another one is a victim.
    victims = {
        place
        for place, found in behind.items()
        if any(name != found[0].hash and place in held for name, held in waiting.items())
    }
    first = {place: found for place, found in behind.items() if place not in victims} or behind
    by_call: dict[tuple[str, str, int], list[Place]] = {}
    for place, (communicator, function, _, most) in first.items():
        by_call.setdefault((communicator.hash, function, most), []).append(place)
    verdicts = [
        _hang_verdict(first[places[0]], places, ranks, waiting[communicator], still_s)
        for (communicator, _, _), places in by_call.items()
    ]
    unjudged = []
    if lagging and not verdicts:
        communicator, function, late = lagging[0]
        who = f"{name_ranks(late[:16])} of communicator {communicator.hash} called {function} less often than others"
        why = "the job moves on, and counts of a running job are taken at different moments"
        if moved is None:
            why = f"there are no two readings {STILL_S:.0f} s apart or more: only a lag that stays counts. Read again"
        unjudged.append(Unjudged(what="who is late", why=f"{who}; {why}"))
    return verdicts, unjudged


def _movement(last: Document, before: Document | None) -> tuple[set[Place] | None, float]:
    """Return who called anything since an earlier reading, and how long ago that is; None where there is none."""
    if before is None:
        return None, 0.0
    then: dict[tuple[str, str, int], dict[str, int]] = {}
    for communicator in before.communicators or ():
        for member in communicator.ranks:
            then[communicator.hash, communicator.secondary_hash, member.rank] = member.collective_counts
    return {
        member.place
        for communicator in last.communicators or ()
        for member in communicator.ranks
        if then.get((communicator.hash, communicator.secondary_hash, member.rank)) != member.collective_counts
    }, last.seconds() - before.seconds()


def _hang_verdict(
    found: tuple[_Communicator, str, int, int],
    places: Sequence[Place],
    ranks: dict[Place, int],
    waiting: set[Place],
    still_s: float,
) -> Verdict:
    communicator, function, called, most = found
    own = {member.place: member.rank for member in communicator.ranks}
    who = sorted(ranks.get(place, own[place]) for place in places)
    them = "it" if len(who) == 1 else "them"
    cause = (
        f"{name_ranks(who)} called {function} {called:,} times in communicator {communicator.hash}, others {most:,} "
        f"times, and nothing anywhere for {still_s:.0f} s: the others wait for {them}"
    )
    evidence: dict[str, Number] = {
        "group": communicator.hash,
        "group_size": communicator.size,
        "collective": function,
        "called": called,
        "others_called": most,
        "still_seconds": still_s,
        "victims": rank_list(ranks.get(place, own.get(place, -1)) for place in waiting),
        "host": places[0][0],
        "pid": places[0][1],
    }
    advice = "Look at what these ranks do instead: their stacks (py-spy dump), a data loader, a checkpoint, a branch."
    return verdict_of_files("hang", who, cause, evidence, advice)


def _table(last: Document | None) -> list[Sheet]:
    """What the last reading counted, by communicator and function: the fewest and the most of any rank."""
    rows: list[list[Number | None]] = []
    for communicator in (last.communicators or []) if last else []:
        counts = communicator.counts()
        missing = len(communicator.missing_ranks)
        for name in sorted({name for own in counts.values() for name in own}):
            called = [own.get(name, 0) for own in counts.values()]
            if any(called):
                rows.append([communicator.hash, communicator.size, missing, name, min(called), max(called)])
    columns = ["communicator", "ranks", "missing", "function", "fewest calls", "most calls"]
    return [Sheet(title="What RAS counted last", columns=columns, rows=rows[:MOST_ROWS])] if rows else []
