"""Failures in NCCL's own words: which rank failed first, which only lost its peer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringside.doctor.findings import verdict_of_files
from ringside.doctor.nccl_log.communicators import NcclCommunicator
from ringside.doctor.nccl_log.lines import Line
from ringside.monitor.verdict import Verdict
from ringside.text import counted, first_line, name_ranks, rank_list

_COMM = re.compile(r"comm 0x[0-9a-f]+ rank \d+ ")
_PEER = re.compile(r"(?:remote peer|from peer|from|to|Connect to|peer)\s+([\w.\-:]+?)<\d+>")
_LOST = re.compile(
    r"Connection (?:closed|reset|refused)|onnection timed out|[Tt]imed out|status=\d+|with error 12"
    r"|remote process exited|Broken pipe|No route to host|unreachable",
)
_OWN = re.compile(
    r"Cuda failure|CUDA error|out of memory|illegal memory access|uncorrectable|\bECC\b|\bXid\b"
    r"|unhandled cuda|device-side assert|Segmentation|no socket interface|No space left|shared memory segment",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class NcclFault:
    """One warning of one rank.

    Args:
        rank: Who wrote it; None where its communicator is not known.
        host: Its host.
        device: Its CUDA device.
        own: Whether it is the rank's own failure, not the loss of somebody else.
        peer: Address or host of the peer it names; empty where it names none.
    """

    rank: int | None
    host: str
    device: int
    own: bool
    peer: str
    text: str
    number: int


def fault_of(line: Line, rank: int | None) -> NcclFault | None:
    """Return the failure that a line reports; None for all other lines."""
    own = bool(_OWN.search(line.text))
    if line.level not in ("WARN", "ERROR") or not (own or _LOST.search(line.text)):
        return None
    peer = _PEER.search(line.text)
    return NcclFault(rank, line.host, line.device, own, peer[1] if peer and not own else "", line.text, line.number)


def is_abort(line: Line) -> bool:
    """Return whether a line reports that a communicator was aborted."""
    found = _COMM.search(line.text)
    return found is not None and "Abort COMPLETE" in line.text[found.end() :]


def judge_faults(
    faults: Sequence[NcclFault], aborted: Sequence[int], comms: Sequence[NcclCommunicator], addresses: Mapping[str, str]
) -> list[Verdict]:
    """Return who failed first: ranks with a failure of their own, or else the peers that others lost.

    Args:
        faults: Warnings, in the order of the logs.
        aborted: Ranks that aborted their communicator.
        comms: Communicators, largest first.
        addresses: Host name by network address.
    """
    own = [fault for fault in faults if fault.own]
    lost = [fault for fault in faults if not fault.own]
    if own:
        first = own[0]
        who = f"rank {first.rank}" if first.rank is not None else f"device {first.device}"
        ranks = sorted({fault.rank for fault in own if fault.rank is not None})
        victims = {fault.rank for fault in lost if fault.rank is not None} | set(aborted)
        return [
            _verdict(
                "dead_rank",
                ranks,
                f"{who} on {first.host} failed by itself: {first_line(first.text)}",
                "Look at this host's kernel log (dmesg: Xid, out of memory) and at the Python traceback of this rank.",
                host=first.host,
                device=first.device,
                line=first.number,
                message=first_line(first.text),
                hosts=", ".join(sorted({fault.host for fault in own})),
                victims=rank_list(victims - set(ranks)),
            )
        ]
    if lost:
        return [_lost(lost, aborted, comms, addresses)]
    # Nobody complains: ranks that never became ready, though others of their communicator did.
    unready = []
    for comm in comms:
        late = sorted(rank for rank, member in comm.members.items() if member.state == "Init START")
        if not 0 < len(late) < len(comm.members):
            continue
        unready.append(
            _verdict(
                "hang",
                late,
                f"{name_ranks(late)} of communicator {comm.name} began to initialise it and never finished, others did",
                "Look at what these ranks' logs say last, and whether their hosts can be reached from the others "
                "(NCCL_SOCKET_IFNAME, firewalls).",
                communicator=comm.name,
                nranks=comm.nranks,
                hosts=", ".join(sorted({comm.members[rank].host for rank in late})),
            )
        )
    # Ranks that aborted where most did not; at the end of many a good run all ranks abort.
    few = sorted(set(aborted))
    if unready or not few or not comms or 2 * len(few) >= len(comms[0].members):
        return unready
    largest = comms[0]
    return [
        _verdict(
            "hang",
            few,
            f"{name_ranks(few)} aborted communicator {largest.name} without saying why",
            "An abort follows a timeout or an exception: look at PyTorch's own lines before it; give the "
            "flight-recorder dumps.",
            communicator=largest.name,
            nranks=largest.nranks,
            aborted=rank_list(few),
            hosts=", ".join(sorted({largest.host(rank) for rank in few})),
        )
    ]


def _verdict(kind: str, ranks: Sequence[int], cause: str, advice: str, **evidence: float | int | str) -> Verdict:
    return verdict_of_files(
        kind=kind,
        ranks=ranks,
        cause=cause,
        evidence={key: value for key, value in evidence.items() if value != ""},
        advice=advice,
    )


def _lost(
    lost: Sequence[NcclFault], aborted: Sequence[int], comms: Sequence[NcclCommunicator], addresses: Mapping[str, str]
) -> Verdict:
    """Nobody admits a failure of its own: the peer that most lost, and that lost nobody itself if possible."""
    peers = Counter(addresses.get(fault.peer, fault.peer) for fault in lost if fault.peer)
    speakers = {fault.host for fault in lost}
    # who complains is a victim itself, if there is anybody else
    silent = Counter({peer: count for peer, count in peers.items() if peer not in speakers}) or peers
    named_peer = silent.most_common(1)[0][0] if silent else ""
    members = {rank: member for comm in comms[:1] for rank, member in comm.members.items()}
    complaining = {fault.rank for fault in lost if fault.rank is not None}
    there = {rank for rank, member in members.items() if member.host == named_peer and rank not in complaining}
    # of that host's ranks those with a hop to a rank that complains
    links = comms[0].links.values() if comms else ()
    near = {
        link.dst if link.src in complaining else link.src
        for link in links
        if (link.src in complaining) != (link.dst in complaining)
    }
    on_host = sorted(there & near or there)
    timed_out = any("imed out" in fault.text or "status=12" in fault.text for fault in lost)
    first = lost[0]
    where = f" on {named_peer}" if named_peer else ""
    culprits = name_ranks(on_host) + where if on_host else f"a peer{where}"
    return _verdict(
        "hang" if timed_out else "dead_rank",
        on_host,
        f"{counted(len(complaining) or len(lost), 'rank')} lost {culprits}: {first_line(first.text)}",
        f"Look at the log and the kernel log of {named_peer or 'the peer'}: its process ended first, or its link went "
        "down (ibstat, ethtool -S: errors, link flaps).",
        peer=named_peer,
        host=first.host,
        line=first.number,
        message=first_line(first.text),
        victims=rank_list((complaining | set(aborted)) - set(on_host)),
    )
