"""Communicators rebuilt from the logs: who was which rank, every channel's rings and trees, what every hop uses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ringside.doctor.nccl_log.lines import Line

_INIT = re.compile(
    r"comm (?P<comm>0x[0-9a-f]+) rank (?P<rank>\d{1,9}) n[rR]anks (?P<nranks>\d{1,9})(?!\d)"
    r"(?: cudaDev (?P<dev>\d{1,9}))?(?: nvmlDev \d+)?(?: busId (?P<bus>[0-9a-f]+))?"
)
_ID = re.compile(r"0x[0-9a-f]+")
_STATES = ("Init START", "Init COMPLETE", "Abort COMPLETE", "Destroy COMPLETE")
_NODES = re.compile(r"comm (0x[0-9a-f]+) rank (\d+) nRanks (\d+) nNodes (\d{1,9}) localRanks (\d+)")
_ORDER = re.compile(r"^Channel (\d{1,3})(?:/\d+)? :((?:\s+\d{1,9})+)$")
_RING = re.compile(r"^Ring (\d{1,3}) : (\d{1,9}) -> (\d{1,9}) -> (\d{1,9})$")
_HOP = re.compile(
    r"^(?:Channel|Ring) (?P<channel>\d{1,3})(?:/(?P<connection>\d+))? : "
    r"(?P<src>\d{1,9})(?:\[\w+\])? -> (?P<dst>\d{1,9})(?:\[\w+\])?"
    r"(?: \[(?P<way>send|receive)\])? via (?P<via>.+?)(?: comm (?P<comm>0x[0-9a-f]+).*)?$"
)
_TREE = re.compile(r"\[(\d{1,3})\] (-?\d{1,9}(?:/-?\d{1,9})*)->(-?\d{1,9})->(-?\d{1,9}(?:/-?\d{1,9})*)")
MOST_RANKS = 1 << 17
"""More are damage."""
_CONNECTED_RINGS = "Connected all rings"


@dataclass
class NcclMember:
    """One rank of a communicator, as far as the logs show it."""

    host: str
    pid: int
    device: int = -1
    state: str = ""
    bus: str = ""


@dataclass
class NcclLink:
    """One hop of a channel.

    Args:
        via: As NCCL prints it, such as `NET/IB/0/GDRDMA`.
        ring: Whether it was made before all rings were connected; later ones belong to trees.
    """

    channel: int
    src: int
    dst: int
    via: str
    ring: bool = True


@dataclass
class NcclCommunicator:
    """One communicator.

    Attributes:
        name: Its `commId`, or a count where the version prints none.
        nranks: Its size.
        members: Ranks whose logs are here.
        order: Order of the ranks in a channel's ring, as rank 0 prints it.
        neighbours: (previous, next) of a rank in a channel's ring.
        parents: Parent of a rank in a channel's tree; -1 for the root.
        links: Hops by channel, source and destination.
        nodes: Number of hosts, where NCCL prints it.
    """

    name: str
    nranks: int
    members: dict[int, NcclMember] = field(default_factory=dict)
    order: dict[int, list[int]] = field(default_factory=dict)
    neighbours: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    parents: dict[int, dict[int, int]] = field(default_factory=dict)
    links: dict[tuple[int, int, int], NcclLink] = field(default_factory=dict)
    nodes: int = 0

    def host(self, rank: int) -> str:
        """Return a rank's host; empty where its log is not here."""
        return self.members[rank].host if rank in self.members else ""


class Communicators:
    """Builds the communicators from the lines of any number of logs, in any order of files.

    A thread initialises one communicator at a time, so its lines belong to the one it began last. Versions that print
    no `Init START` name the communicator at the end: their lines wait until then.
    """

    def __init__(self) -> None:
        self._all: dict[str, NcclCommunicator] = {}
        self._of_pointer: dict[tuple[str, int, str], tuple[NcclCommunicator, int]] = {}
        self._current: dict[tuple[str, int, int], tuple[NcclCommunicator, int]] = {}
        self._latest: dict[tuple[str, int], tuple[NcclCommunicator, int]] = {}
        self._waiting: dict[tuple[str, int, int], list[str]] = {}
        self._made: dict[tuple[str, int, int], int] = {}
        self._rings_done: set[tuple[str, int, int]] = set()

    def rank_of(self, line: Line) -> int | None:
        """Return the rank that a line's process has in its newest communicator; None where it is in none."""
        found = self._current.get((*line.process, line.tid)) or self._latest.get(line.process)
        return found[1] if found else None

    def add(self, line: Line) -> None:
        """Read one line."""
        text = line.text
        if match := _NODES.search(text):
            if found := self._of_pointer.get((*line.process, match[1])):
                found[0].nodes = int(match[4])
        elif match := _INIT.search(text):
            self._add_rank(line, match)
        elif text.startswith(("Channel ", "Ring ", "Trees ")):
            # A hop names its communicator in newer versions; else the thread initialises one at a time.
            thread = (*line.process, line.tid)
            named = _HOP.match(text)
            home = self._of_pointer.get((*line.process, named["comm"])) if named and named["comm"] else None
            home = home or self._current.get(thread) or self._latest.get(line.process)
            if home is None:
                self._waiting.setdefault(thread, []).append(text)
            else:
                _add_hop(home[0], home[1], text, ring=thread not in self._rings_done)
        elif text.startswith(_CONNECTED_RINGS):
            self._rings_done.add((*line.process, line.tid))

    def finish(self) -> list[NcclCommunicator]:
        """Return the communicators, largest first; lines of threads that never named theirs count to the newest."""
        for (host, pid, _), texts in self._waiting.items():
            home = self._latest.get((host, pid))
            for text in texts if home else ():
                _add_hop(home[0], home[1], text, ring=True)  # type: ignore[index]
        self._waiting.clear()
        return sorted(self._all.values(), key=lambda comm: -comm.nranks)

    def _add_rank(self, line: Line, match: re.Match[str]) -> None:
        rank, nranks, pointer = int(match["rank"]), int(match["nranks"]), (*line.process, match["comm"])
        thread = (*line.process, line.tid)
        if not rank < nranks <= MOST_RANKS:
            return
        # Some versions end the line with the communicator's id and its state.
        ending = line.text[match.end() :]
        rest, _, state = ending.rpartition(" - ")
        rest, state = (rest, state) if state in _STATES else (ending, "")
        id_text = rest.rpartition("commId ")[2] if "commId " in rest else ""
        comm_id = id_text if _ID.fullmatch(id_text) else None
        # A pointer is used again after a communicator ends: then it stands for a new one.
        known = self._of_pointer.get(pointer)
        if known is None or known[1] != rank or known[0].nranks != nranks or state == "Init START":
            if comm_id is None:
                # the process's n-th communicator of this size: ranks make them in the same order
                key = (*line.process, nranks)
                count = self._made[key] = self._made.get(key, 0) + 1
                comm_id = f"{nranks} ranks, number {count}"
            known = (self._all.setdefault(comm_id, NcclCommunicator(comm_id, nranks)), rank)
            self._of_pointer[pointer] = known
        comm = known[0]
        member = comm.members.setdefault(rank, NcclMember(line.host, line.pid))
        member.host, member.pid, member.device = line.host, line.pid, int(match["dev"] or line.device)
        member.state, member.bus = state or member.state, match["bus"] or member.bus
        # lines of channels that came before the communicator had a name
        for text in self._waiting.pop(thread, []):
            _add_hop(comm, rank, text, ring=True)
        if state == "Init START":
            self._rings_done.discard(thread)
        if state.startswith("Init") or thread not in self._current:
            self._current[thread] = self._latest[line.process] = known


def _add_hop(comm: NcclCommunicator, rank: int, text: str, *, ring: bool) -> None:
    """Add what a line shows of a channel: the ring's order, a rank's neighbours, a hop, or parents in a tree."""
    if match := _ORDER.match(text):
        comm.order[int(match[1])] = [int(number) for number in match[2].split()]
    elif match := _RING.match(text):
        comm.neighbours.setdefault(int(match[1]), {})[int(match[3])] = (int(match[2]), int(match[4]))
    elif match := _HOP.match(text):
        if (match["connection"] or "0") == "0":
            key = (int(match["channel"]), int(match["src"]), int(match["dst"]))
            link = comm.links.setdefault(key, NcclLink(*key, match["via"], ring))
            link.ring = link.ring or ring
    elif text.startswith("Trees "):
        for channel, left, middle, right in _TREE.findall(text):
            comm.parents.setdefault(int(channel), {})[int(middle)] = int(left if "/" in right else right)
