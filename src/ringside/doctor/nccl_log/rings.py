"""What is wrong with a communicator's rings: broken, across hosts more often than needed, over sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from ringside.doctor.findings import EvidenceHop, Rings, Unjudged, verdict_of_files
from ringside.doctor.nccl_log.communicators import NcclCommunicator
from ringside.doctor.nccl_log.settings import NcclNetwork
from ringside.monitor.verdict import Verdict
from ringside.text import counted, name_ranks, rank_list

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
    comm: NcclCommunicator, ranks: Sequence[int], fault: str, cause: str, advice: str, **evidence: object
) -> Verdict:
    plain = {key: value for key, value in evidence.items() if isinstance(value, int | float | str)}
    return verdict_of_files(
        kind="broken_ring",
        ranks=ranks,
        cause=cause,
        evidence={"communicator": comm.name, "nranks": comm.nranks, "what": fault, **plain},
        advice=advice,
    )


def _broken(comm: NcclCommunicator) -> list[Verdict]:
    if any(member.state == "Init START" for member in comm.members.values()):
        return []  # a rank that never became ready is the cause, its open hops are not
    faults: Counter[tuple[tuple[int, ...], str]] = Counter()
    first: dict[tuple[tuple[int, ...], str], int] = {}
    for channel in ring_channels(comm):
        for fault in _faults(comm, channel):
            faults[fault] += 1
            first.setdefault(fault, channel)
    advice = "Look at these ranks' logs for the NCCL WARN before this, and whether their process got this far at all."
    return [
        _verdict(
            comm,
            ranks,
            "broken",
            f"the ring of channel {first[ranks, why]} is broken: {why}",
            advice,
            channels=count,
            channel=first[ranks, why],
        )
        for (ranks, why), count in faults.items()
    ]


def _faults(comm: NcclCommunicator, channel: int) -> list[tuple[tuple[int, ...], str]]:
    """Breaks of one channel's ring, each with the ranks at it."""
    order = ring_order(comm, channel)
    if channel in comm.order and 2 * len(order) < comm.nranks:
        return [((), f"only {counted(len(order), 'rank')} of {comm.nranks} stand in it")]
    if channel in comm.order and sorted(order) != list(range(comm.nranks)):
        missing = sorted(set(range(comm.nranks)) - set(order))
        twice = sorted(rank for rank, count in Counter(order).items() if count > 1)
        wrong = [f"without {name_ranks(missing)}"] if missing else []
        wrong += [f"{name_ranks(twice)} stand in it twice"] if twice else []
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
        return [((order[-1],), f"it ends at rank {order[-1]}, which was connected to nobody")]
    hops = [*pairwise(order), (order[-1], order[0])]
    return [
        ((src, dst), f"rank {src} was never connected to rank {dst}")
        for src, dst in hops
        if (src, dst) not in made and src in comm.members
    ]


def _crossings(comm: NcclCommunicator) -> list[Verdict]:
    # The channel that crosses between hosts most often beyond the once per host that a ring needs.
    worst: tuple[int, int, int] | None = None
    for channel in ring_channels(comm):
        order = ring_order(comm, channel)
        hosts = [comm.host(rank) for rank in order]
        if len(order) != comm.nranks or not all(hosts):
            continue
        crossed = sum(a != b for a, b in [*pairwise(hosts), (hosts[-1], hosts[0])])
        needed = len(set(hosts)) if len(set(hosts)) > 1 else 0
        if crossed > needed and (worst is None or crossed - needed > worst[1] - worst[2]):
            worst = (channel, crossed, needed)
    if worst is None:
        return []
    channel, crossed, needed = worst
    order = ring_order(comm, channel)
    return [
        _verdict(
            comm,
            [],
            "crosses hosts",
            f"the ring of channel {channel} crosses between hosts {crossed} times where {needed} would do: each "
            "further crossing puts the whole payload on a network card once more",
            "Number ranks host by host (torchrun and Slurm's block distribution do), and look at NCCL_TOPO_FILE, "
            "NCCL_GRAPH_FILE and CUDA_VISIBLE_DEVICES: something made NCCL see the hosts otherwise.",
            crossings=crossed,
            needed=needed,
            channel=channel,
            order=" → ".join(map(str, order[:64])),
        )
    ]


def _sockets(comm: NcclCommunicator, network: NcclNetwork) -> list[Verdict]:
    over = {(link.src, link.dst) for link in comm.links.values() if link.via.startswith("NET/Socket")}
    other = {(link.src, link.dst): link.via for link in comm.links.values() if link.via.startswith("NET/")}
    better = {pair: via for pair, via in other.items() if pair not in over}
    if not over or not (better or network.tried):
        return []  # all that there is, as far as the logs show: `plain_sockets` explains what that means
    ranks = sorted({rank for pair in over for rank in pair} - {rank for pair in better for rank in pair})
    mixed = (
        f", though {counted(len(better), 'hop')} use {transport_name(next(iter(better.values())))}" if better else ""
    )
    reason = network.reason
    return [
        _verdict(
            comm,
            ranks if better else [],
            "sockets",
            f"{counted(len(over), 'hop')} between hosts fell back to TCP sockets{mixed}: {reason}",
            "Where there is InfiniBand or RoCE: check that the container sees /dev/infiniband and libibverbs, that "
            "NCCL_IB_DISABLE is unset and NCCL_IB_HCA right, and that the vendor's NCCL plugin loads. Where there is "
            "not, this is what the network can do: NCCL_NSOCKS_PERTHREAD and NCCL_SOCKET_NTHREADS help a little.",
            hops=", ".join(f"{src} → {dst}" for src, dst in sorted(over)[:8]),
            socket_ranks=rank_list({rank for pair in over for rank in pair}),
            reason=reason,
        )
    ]


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
    return [Unjudged(what="whether TCP sockets between hosts are a fallback", why=why)]


def draw_rings(comm: NcclCommunicator, verdicts: Sequence[Verdict], nvlink: bool | None) -> Rings | None:
    """Return the communicator's rings and trees for the page; None where the logs show none."""
    known = ring_channels(comm)
    trees = {
        channel: [
            _hop(comm, channel, rank, parent, nvlink, connected=False)
            for rank, parent in sorted(parents.items())
            if parent >= 0
        ]
        for channel, parents in sorted(comm.parents.items())[:MOST_DRAWN]
    }
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
