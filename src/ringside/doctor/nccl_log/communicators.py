"""Communicators rebuilt from the logs, and what is wrong with their rings."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ringside.doctor.findings import EvidenceHop, Number, Rings, Unjudged, verdict_of_files
from ringside.doctor.nccl_log.lines import Line
from ringside.doctor.nccl_log.settings import NcclNetwork
from ringside.monitor.verdict import Verdict
from ringside.text import counted, name_ranks, rank_list

# -------------------------------------------------------------------------------------------------
# Communicators rebuilt from the logs: who was which rank, every channel's rings and trees, what every hop uses.

_INIT = re.compile(
    r"comm (?P<comm>0x[0-9a-f]+) rank (?P<rank>\d{1,9}) n[rR]anks (?P<nranks>\d{1,9})(?!\d| nNodes \d)"
    r"(?: cudaDev \d{1,9})?(?: nvmlDev \d+)?(?: busId [0-9a-f]+)?"
)
_ID = re.compile(r"0x[0-9a-f]+")
_STATES = ("Init START", "Init COMPLETE", "Abort COMPLETE", "Destroy COMPLETE")
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
    state: str = ""


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
    """

    name: str
    nranks: int
    members: dict[int, NcclMember] = field(default_factory=dict)
    order: dict[int, list[int]] = field(default_factory=dict)
    neighbours: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    parents: dict[int, dict[int, int]] = field(default_factory=dict)
    links: dict[tuple[int, int, int], NcclLink] = field(default_factory=dict)

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
        if match := _INIT.search(text):
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
                _add_hop(*home, text, ring=thread not in self._rings_done)
        elif text.startswith(_CONNECTED_RINGS):
            self._rings_done.add((*line.process, line.tid))

    def finish(self) -> list[NcclCommunicator]:
        """Return the communicators, largest first; lines of threads that never named theirs count to the newest."""
        for (host, pid, _), texts in self._waiting.items():
            if home := self._latest.get((host, pid)):
                for text in texts:
                    _add_hop(*home, text, ring=True)
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
        member.host, member.pid, member.state = line.host, line.pid, state or member.state
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


# -------------------------------------------------------------------------------------------------
# What is wrong with a communicator's rings: broken, across hosts more often than needed, over sockets.

MOST_DRAWN = 4
"""Channels drawn of one communicator: they repeat each other."""


def transport_name(via: str, *, nvlink: bool | None = None) -> str:
    """Return what a hop travels over, in NCCL's terms: `NVLink P2P`, `P2P`, `SHM`, `NET/IB GDRDMA`, `NET/Socket`.

    Args:
        via: What stands after `via` in the log.
        nvlink: Whether the topology search found the GPUs of a host joined by NVLink; None where the log has none.
    """
    if via.startswith("NET/"):
        network = via.split("/")[1]
        return f"NET/{network} GDRDMA" if "GDRDMA" in via else f"NET/{network}"
    if via.startswith(("SHM", "direct shared memory")):
        return "SHM"
    if via.startswith("P2P"):
        return "P2P" if nvlink is None else "NVLink P2P" if nvlink else "PCIe P2P"
    return via.partition("/")[0]


def ring_order(comm: NcclCommunicator, channel: int) -> list[int]:
    """Return the ranks in a channel's ring, from the lowest; an incomplete list where the ring does not close."""
    if channel in comm.order:
        return comm.order[channel]
    following = {rank: after for rank, (_, after) in comm.neighbours.get(channel, {}).items()}
    if not following:
        hops = [link for link in comm.links.values() if link.channel == channel and link.ring]
        following = {link.src: link.dst for link in hops}
        if len(following) < len(hops):
            return []  # versions that do not mark where rings end and trees begin: some of these hops are a tree's
    if not following:
        return []
    order = [min(following)]
    while (after := following.get(order[-1], -1)) >= 0 and after not in order:
        order.append(after)
    return order


def ring_channels(comm: NcclCommunicator) -> list[int]:
    """Return the channels of which a ring is known, ascending."""
    from_links = {link.channel for link in comm.links.values() if link.ring}
    return sorted({*comm.order, *comm.neighbours, *from_links})


def judge_rings(comm: NcclCommunicator, network: NcclNetwork) -> list[Verdict]:
    """Return what is wrong with a communicator's rings, each fault once for all channels.

    Args:
        comm: The communicator.
        network: What the logs show of the network between hosts.
    """
    if comm.nranks < 2:
        return []
    return [*_broken(comm), *_crossings(comm), *_sockets(comm, network)]


def _verdict(
    comm: NcclCommunicator, ranks: Sequence[int], fault: str, cause: str, advice: str, **evidence: Number
) -> Verdict:
    about: dict[str, Number] = {"communicator": comm.name, "nranks": comm.nranks, "what": fault, **evidence}
    return verdict_of_files("broken_ring", ranks, cause, about, advice)


def _broken(comm: NcclCommunicator) -> list[Verdict]:
    if any(member.state == "Init START" for member in comm.members.values()):
        return []  # a rank that never became ready is the cause, its open hops are not
    faults: dict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
    for channel in ring_channels(comm):
        for fault in _faults(comm, channel):
            faults[fault].append(channel)
    advice = "Look at these ranks' logs for the NCCL WARN before this, and whether their process got this far at all."
    found = []
    for (ranks, why), channels in faults.items():
        cause = f"the ring of channel {channels[0]} is broken: {why}"
        found.append(_verdict(comm, ranks, "broken", cause, advice, channels=len(channels), channel=channels[0]))
    return found


def _faults(comm: NcclCommunicator, channel: int) -> list[tuple[tuple[int, ...], str]]:
    """Breaks of one channel's ring, each with the ranks at it."""
    order = ring_order(comm, channel)
    if channel in comm.order and 2 * len(order) < comm.nranks:
        return [((), f"only {counted(len(order), 'rank')} of {comm.nranks} are in it")]
    if channel in comm.order and sorted(order) != list(range(comm.nranks)):
        missing = sorted(set(range(comm.nranks)) - set(order))
        twice = sorted(rank for rank, count in Counter(order).items() if count > 1)
        wrong = [f"without {name_ranks(missing)}"] if missing else []
        wrong += [f"{name_ranks(twice)} {'is' if len(twice) == 1 else 'are'} in it twice"] if twice else []
        return [(tuple(missing or twice), " and ".join(wrong))]
    around = comm.neighbours.get(channel, {})
    torn: list[tuple[tuple[int, ...], str]] = [
        ((rank, after), f"rank {rank} sends to rank {after}, which receives from rank {around[after][0]}")
        for rank, (_, after) in sorted(around.items())
        if after in around and around[after][0] != rank
    ]
    if torn:
        return torn
    # Hops that a sender never connected, though its log is here and others connected theirs.
    made = {(link.src, link.dst) for link in comm.links.values() if link.channel == channel}
    if not made or len(order) < 2:
        return []
    if len(order) < comm.nranks and channel not in comm.order:
        if len(comm.members) < comm.nranks or order[-1] not in comm.members:
            return []  # not all logs are here: the ring may well close in the others
        return [((order[-1],), f"it ends at rank {order[-1]}, which has no next rank")]
    hops = [*pairwise(order), (order[-1], order[0])]
    return [
        ((src, dst), f"rank {src} was never connected to rank {dst}")
        for src, dst in hops
        if (src, dst) not in made and src in comm.members
    ]


def _crossings(comm: NcclCommunicator) -> list[Verdict]:
    crossings = []  # of channels that cross between hosts more often than the once per host that a ring needs
    for channel in ring_channels(comm):
        order = ring_order(comm, channel)
        hosts = [comm.host(rank) for rank in order]
        if len(order) != comm.nranks or not all(hosts):
            continue
        crossed = sum(a != b for a, b in [*pairwise(hosts), (hosts[-1], hosts[0])])
        needed = len(set(hosts)) if len(set(hosts)) > 1 else 0
        if crossed > needed:
            crossings.append((channel, crossed, needed, order))
    if not crossings:
        return []
    channel, crossed, needed, order = max(crossings, key=lambda each: each[1] - each[2])
    cause = (
        f"the ring of channel {channel} crosses between hosts {crossed} times where {needed} would do: each "
        "further crossing puts the whole payload on a NIC once more"
    )
    advice = (
        "Number ranks host by host (torchrun and Slurm's block distribution do), and look at NCCL_TOPO_FILE, "
        "NCCL_GRAPH_FILE and CUDA_VISIBLE_DEVICES: something made NCCL see the hosts otherwise."
    )
    shown: dict[str, Number] = {"crossings": crossed, "needed": needed, "channel": channel}
    return [_verdict(comm, [], "crosses hosts", cause, advice, **shown, order=" → ".join(map(str, order[:64])))]


def _sockets(comm: NcclCommunicator, network: NcclNetwork) -> list[Verdict]:
    over = {(link.src, link.dst) for link in comm.links.values() if link.via.startswith("NET/Socket")}
    other = {(link.src, link.dst): link.via for link in comm.links.values() if link.via.startswith("NET/")}
    better = {pair: via for pair, via in other.items() if pair not in over}
    if not over or not (better or network.tried):
        return []  # all that there is, as far as the logs show: `plain_sockets` explains what that means
    ranks = sorted({rank for pair in over for rank in pair} - {rank for pair in better for rank in pair})
    via = transport_name(next(iter(better.values()))) if better else ""
    mixed = f", though {counted(len(better), 'hop')} use {via}" if better else ""
    cause = f"{counted(len(over), 'hop')} between hosts fell back to TCP sockets{mixed}: {network.reason}"
    advice = (
        "Where there is InfiniBand or RoCE: check that the container sees /dev/infiniband and libibverbs, that "
        "NCCL_IB_DISABLE is unset and NCCL_IB_HCA right, and that the vendor's NCCL plugin loads. Where there is "
        "not, this is what the network can do: NCCL_NSOCKS_PERTHREAD and NCCL_SOCKET_NTHREADS help a little."
    )
    shown: dict[str, Number] = {
        "hops": ", ".join(f"{src} → {dst}" for src, dst in sorted(over)[:8]),
        "socket_ranks": rank_list({rank for pair in over for rank in pair}),
        "reason": network.reason,
    }
    return [_verdict(comm, ranks if better else [], "sockets", cause, advice, **shown)]


def plain_sockets(comms: Sequence[NcclCommunicator], network: NcclNetwork) -> list[Unjudged]:
    """Return a line where hosts talk over sockets and nothing shows that they could do better."""
    links = [link for comm in comms for link in comm.links.values() if link.via.startswith("NET/")]
    if network.tried or not links or any(not link.via.startswith("NET/Socket") for link in links):
        return []
    why = (
        f"{network.reason}. Then it is what this network can do (1 to 10 GB/s, through the hosts' CPUs), and a ring "
        "waits for its slowest hop; where hosts do have InfiniBand or RoCE cards, make the container see "
        "/dev/infiniband and libibverbs"
    )
    return [Unjudged(what="whether TCP sockets between hosts are a fallback", why=why, side=True)]


def draw_rings(comm: NcclCommunicator, verdicts: Sequence[Verdict], nvlink: bool | None) -> Rings | None:
    """Return the communicator's rings and trees for the page; None where the logs show none."""
    known = ring_channels(comm)
    trees = {}
    for channel, parents in sorted(comm.parents.items())[:MOST_DRAWN]:
        up = [(rank, parent) for rank, parent in sorted(parents.items()) if parent >= 0]
        trees[channel] = [_hop(comm, channel, rank, parent, nvlink, connected=False) for rank, parent in up]
    if not known and not any(trees.values()):
        return None
    rings = {}
    connected = {link.channel for link in comm.links.values()}
    for channel in known[:MOST_DRAWN]:
        order = ring_order(comm, channel)
        hops = [*pairwise(order), (order[-1], order[0])] if len(order) > 1 else []
        if len(set(order)) < comm.nranks and channel not in comm.order:  # open: no hop from the last to the first
            hops = hops[:-1]
        rings[channel] = [_hop(comm, channel, src, dst, nvlink, connected=channel in connected) for src, dst in hops]
    more = f"; {len(known) - MOST_DRAWN} more channels" if len(known) > MOST_DRAWN else ""
    wrong = "; ".join(verdict.evidence["what"] for verdict in verdicts)  # type: ignore[misc]
    return Rings(
        title=f"communicator {comm.name}, {counted(comm.nranks, 'rank')}",
        nranks=comm.nranks,
        hosts=[comm.host(rank) for rank in range(comm.nranks)],
        rings=rings,
        trees=trees,
        note=wrong + more,
    )


def _hop(
    comm: NcclCommunicator, channel: int, src: int, dst: int, nvlink: bool | None, *, connected: bool
) -> EvidenceHop:
    link = comm.links.get((channel, src, dst)) or comm.links.get((channel, dst, src))
    between = bool(comm.host(src) and comm.host(dst) and comm.host(src) != comm.host(dst))
    wrong = "never connected" if link is None and connected and src in comm.members else ""
    wrong = "socket" if link is not None and link.via.startswith("NET/Socket") else wrong
    via = transport_name(link.via, nvlink=nvlink) if link is not None else ""
    return EvidenceHop(src=src, dst=dst, via=via, between_hosts=between, wrong=wrong)
