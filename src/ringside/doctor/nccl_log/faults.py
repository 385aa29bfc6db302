"""Failures in the words of NCCL, of PyTorch's watchdog and of torchrun: which rank failed first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringside.doctor.findings import Number, verdict_of_files
from ringside.doctor.nccl_log.communicators import NcclCommunicator
from ringside.doctor.nccl_log.lines import Line
from ringside.monitor.verdict import Verdict
from ringside.text import counted, first_line, name_ranks, rank_list

# -------------------------------------------------------------------------------------------------
# Failures in NCCL's own words: which rank failed first, which only lost its peer.

_COMM = re.compile(r"comm 0x[0-9a-f]+ rank \d+ ")
_PEER = re.compile(r"(?:remote peer|from peer|from|to|Connect to|peer)\s+([\w.\-:]+?)<\d+>")
_LOST = re.compile(
    r"Connection (?:closed|reset|refused)|onnection timed out|[Tt]imed out|status=\d+|with error 12"
    r"|remote process exited|Broken pipe|No route to host|unreachable"
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
        line: What it wrote, and where.
        own: Whether it is the rank's own failure, not the loss of somebody else.
        peer: Address or host of the peer it names; empty where it names none.
    """

    rank: int | None
    line: Line
    own: bool
    peer: str


def fault_of(line: Line, rank: int | None) -> NcclFault | None:
    """Return the failure that a line reports; None for all other lines."""
    own = bool(_OWN.search(line.text))
    if line.level not in ("WARN", "ERROR") or not (own or _LOST.search(line.text)):
        return None
    peer = _PEER.search(line.text)
    return NcclFault(rank, line, own, peer[1] if peer and not own else "")


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
        first = own[0].line
        who = f"device {first.device}" if own[0].rank is None else f"rank {own[0].rank}"
        ranks = sorted({fault.rank for fault in own if fault.rank is not None})
        victims = {fault.rank for fault in lost if fault.rank is not None} | set(aborted)
        cause = f"{who} on {first.host} failed by itself: {first_line(first.text)}"
        advice = "Look at this host's kernel log (dmesg: Xid, out of memory) and at the Python traceback of this rank."
        evidence: dict[str, Number] = {
            "host": first.host,
            "device": first.device,
            "line": first.number,
            "message": first_line(first.text),
            "hosts": ", ".join(sorted({fault.line.host for fault in own})),
            "victims": rank_list(victims - set(ranks)),
        }
        return [_verdict("dead_rank", ranks, cause, advice, evidence)]
    if lost:
        return [_lost(lost, aborted, comms, addresses)]
    # Nobody complains: ranks that never became ready, though others of their communicator did.
    unready = []
    for comm in comms:
        late = sorted(rank for rank, member in comm.members.items() if member.state == "Init START")
        if not 0 < len(late) < len(comm.members):
            continue
        cause = f"{name_ranks(late)} of communicator {comm.name} began to initialise it and never finished, others did"
        advice = (
            "Look at the last lines of these ranks' logs, and whether their hosts can be reached from the others "
            "(NCCL_SOCKET_IFNAME, firewalls)."
        )
        hosts = ", ".join(sorted({comm.members[rank].host for rank in late}))
        evidence = {"communicator": comm.name, "nranks": comm.nranks, "hosts": hosts}
        unready.append(_verdict("hang", late, cause, advice, evidence))
    # Ranks that aborted where most did not; at the end of many a good run all ranks abort.
    few = sorted(set(aborted))
    if unready or not few or not comms or 2 * len(few) >= len(comms[0].members):
        return unready
    largest = comms[0]
    cause = f"{name_ranks(few)} aborted communicator {largest.name} without saying why"
    advice = (
        "An abort follows a timeout or an exception: look at PyTorch's own lines before it; give the "
        "flight-recorder dumps."
    )
    hosts = ", ".join(sorted({largest.host(rank) for rank in few}))
    evidence = {"communicator": largest.name, "nranks": largest.nranks, "aborted": rank_list(few), "hosts": hosts}
    return [_verdict("hang", few, cause, advice, evidence)]


def _verdict(kind: str, ranks: Sequence[int], cause: str, advice: str, evidence: Mapping[str, Number]) -> Verdict:
    known = {key: value for key, value in evidence.items() if value != ""}
    return verdict_of_files(kind, ranks, cause, known, advice)


def _lost(
    lost: Sequence[NcclFault], aborted: Sequence[int], comms: Sequence[NcclCommunicator], addresses: Mapping[str, str]
) -> Verdict:
    """Nobody admits a failure of its own: the peer that most lost, and that lost nobody itself if possible."""
    peers = Counter(addresses.get(fault.peer, fault.peer) for fault in lost if fault.peer)
    speakers = {fault.line.host for fault in lost}
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
    timed_out = any("imed out" in fault.line.text or "status=12" in fault.line.text for fault in lost)
    first = lost[0].line
    where = f" on {named_peer}" if named_peer else ""
    culprits = name_ranks(on_host) + where if on_host else f"a peer{where}"
    cause = f"{counted(len(complaining) or len(lost), 'rank')} lost {culprits}: {first_line(first.text)}"
    advice = (
        f"Look at the log and the kernel log of {named_peer or 'the peer'}: its process ended first, or its link went "
        "down (ibstat, ethtool -S: errors, link flaps)."
    )
    evidence: dict[str, Number] = {
        "peer": named_peer,
        "host": first.host,
        "line": first.number,
        "message": first_line(first.text),
        "victims": rank_list((complaining | set(aborted)) - set(on_host)),
    }
    return _verdict("hang" if timed_out else "dead_rank", on_host, cause, advice, evidence)


# -------------------------------------------------------------------------------------------------
# PyTorch's own lines in a log: the NCCL watchdog's timeouts and torchrun's account of which worker failed first.

_TIMEOUT = re.compile(
    r"\[Rank (?P<rank>\d{1,9})\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d{1,18}), "
    r"OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d{1,18})(?!\d))?"
)
_RAN = re.compile(r"Timeout\(ms\)=\d+\) ran for (\d{1,18})(?!\d)")
_GROUP = re.compile(r"\[PG (?:ID )?\S+(?: PG GUID \S+?)? Rank (\d{1,9})\]")
_STANDING = re.compile(
    r"work: \d+, last enqueued NCCL work: (?P<enqueued>-?\d{1,18}), "
    r"last completed NCCL work: (?P<completed>-?\d{1,18})(?!\d)"
)
_FIRST = re.compile(r"Root Cause \(first observed failure\)")
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*:\s*(.*)$")
MARKS = (b"Watchdog caught collective operation timeout", b"Root Cause (first observed failure)", b"ProcessGroupNCCL")


@dataclass
class TorchLines:
    """What PyTorch printed in the logs of a job.

    Attributes:
        timeouts: The first timeout of each rank: sequence number, operation, elements, seconds it ran.
        standing: (last enqueued, last completed) of each rank, from the watchdog.
        roots: Workers that torchrun saw fail first: its fields in text.
    """

    timeouts: dict[int, tuple[int, str, int, float]] = field(default_factory=dict)
    standing: dict[int, tuple[int, int]] = field(default_factory=dict)
    roots: list[dict[str, str]] = field(default_factory=list)
    _in_root: bool = False

    def add(self, text: str) -> bool:
        """Read one line; return whether it was of any use."""
        if (match := _TIMEOUT.search(text)) and (ran := _RAN.search(text, match.end())):
            timeout = (int(match["seq"]), match["op"], int(match["numel"] or 0), int(ran[1]) / 1e3)
            known = self.timeouts.get(int(match["rank"]))
            self.timeouts[int(match["rank"])] = timeout if known is None or timeout[0] < known[0] else known
        elif (group := _GROUP.search(text)) and (match := _STANDING.search(text, group.end())):
            self.standing.setdefault(int(group[1]), (int(match["enqueued"]), int(match["completed"])))
        elif _FIRST.search(text):
            self._in_root = True
            self.roots.append({})
        elif self._in_root and (match := _FIELD.match(text)):
            self.roots[-1].setdefault(match[1], match[2].strip())
            self._in_root = match[1] != "traceback"
        else:
            return False
        return True


def judge_torch(lines: TorchLines) -> list[Verdict]:
    """Return what the watchdog and torchrun show: a failed worker before those that timed out waiting for it."""
    failed = []
    for root in lines.roots:
        if root.get("rank", "").split(" ")[0].isdigit():
            rank = int(root["rank"].split(" ")[0])
            status = root.get("exitcode", "").split(" ")[0]
            why = f"exit status {status}" if status else "it failed"
            reason = root.get("traceback", "")
            cause = f"torchrun saw it fail first ({why}){': ' + reason if reason else ''}"
            told = {key: value for key, value in root.items() if value and key != "rank"}
            victims = rank_list(set(lines.timeouts) - {rank})
            advice = (
                "Read this rank's traceback; exit status -9 is SIGKILL, mostly the kernel's out-of-memory killer "
                "(dmesg)."
            )
            failed.append(verdict_of_files("dead_rank", [rank], cause, {**told, "victims": victims}, advice))
    if failed or not lines.timeouts:
        return failed
    # The call in which most ranks wait, the earliest of several: what timed out later is a consequence.
    seqs = Counter((seq, op) for seq, op, _, _ in lines.timeouts.values())
    seq, op = max(seqs, key=lambda key: (seqs[key], -key[0]))
    waiting = {rank for rank, timeout in lines.timeouts.items() if timeout[:2] == (seq, op)}
    behind = {rank for rank, (enqueued, _) in lines.standing.items() if enqueued < seq}
    others = {rank: timeout for rank, timeout in lines.timeouts.items() if rank not in waiting and timeout[0] <= seq}
    numel, ran = next((timeout[2], timeout[3]) for rank, timeout in lines.timeouts.items() if rank in waiting)
    standing = sorted(lines.standing.items())
    evidence: dict[str, float | int | str] = {
        "collective_seq_id": seq,
        "collective": op,
        "elements": numel,
        "waited_seconds": ran,
        "standing": ", ".join(f"rank {rank} enqueued {number}" for rank, (number, _) in standing[:16]),
    }
    if others and not behind:
        elsewhere = ", ".join(f"rank {rank} was in {other[1]} {other[0]}" for rank, other in sorted(others.items())[:4])
        cause = f"most ranks timed out in {op} {seq}, but {elsewhere}"
        advice = (
            "Every rank must call the same collectives in the same order; look for branches on the rank or on data."
        )
        return [verdict_of_files("mismatch", list(others), cause, {**evidence, "victims": rank_list(waiting)}, advice)]
    silent = set(range(max(waiting) + 1)) - set(lines.timeouts) - set(lines.standing)
    culprits = sorted(behind or (silent if len(silent) == 1 and len(waiting) > 1 else set()))
    whose = f"{name_ranks(culprits)} never entered it" if culprits else "which rank never entered it is not in this log"
    cause = f"{counted(len(waiting - set(culprits)), 'rank')} timed out in {op} {seq}: {whose}"
    advice = "Give the flight-recorder dumps as well (TORCH_FR_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1)."
    evidence["victims"] = rank_list(waiting - set(culprits))
    return [verdict_of_files("hang", culprits, cause, evidence, advice)]
