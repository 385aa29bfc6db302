"""Reader of logs with NCCL's lines (`NCCL_DEBUG=INFO`) or PyTorch's watchdog, of one rank or of many in one file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note, Question, Sheet, Unjudged
from ringside.doctor.nccl_log.communicators import (
    Communicators,
    NcclCommunicator,
    draw_rings,
    judge_rings,
    plain_sockets,
    transport_name,
)
from ringside.doctor.nccl_log.faults import MARKS, NcclFault, TorchLines, fault_of, is_abort, judge_faults, judge_torch
from ringside.doctor.nccl_log.lines import BARE_VERSION, nccl_lines, text_lines
from ringside.doctor.nccl_log.settings import NcclSettings, Process, judge_settings
from ringside.monitor.verdict import Verdict
from ringside.text import counted, rank_list

KIND = "NCCL log"
LOOKED_AT_BYTES = 4 << 20
_NCCL = re.compile(rb"NCCL (?:INFO|WARN) |NCCL version \d")
SHOWN_COMMUNICATORS = 8
MOST_RING_VERDICTS = 16


def matches(source: Source) -> bool:
    """Return whether a source is text with lines of NCCL or of PyTorch's watchdog near its beginning."""
    if b"\0" in source.head or source.head[:1] == b"{":
        return False
    if _marked(source.head):
        return True
    with source.open() as stream:
        return _marked(stream.read(LOOKED_AT_BYTES))


def _marked(text: bytes) -> bool:
    return bool(_NCCL.search(text)) or any(mark in text for mark in MARKS)


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Judge the logs of one job together."""
    log = _Log()
    notes = []
    for source in sources:
        progress.begin(f"reading {source.name}")
        notes.append(log.read(source))
    return log.findings(notes)


class _Log:
    """All lines of all logs of a job, read one after the other."""

    def __init__(self) -> None:
        self.comms, self.settings, self.torch = Communicators(), NcclSettings(), TorchLines()
        self.faults: list[NcclFault] = []
        self.aborted: list[int] = []
        self.hosts: set[str] = set()

    def read(self, source: Source) -> Note:
        """Read one file."""
        used = total = 0
        processes: set[Process] = set()
        with source.open() as stream:
            for number, text in text_lines(stream):
                total += 1
                found = list(nccl_lines(text, number, self.hosts)) if "NCCL" in text else []
                for line in found:
                    processes.add(line.process)
                    self.settings.add(line)
                    self.comms.add(line)
                    rank = self.comms.rank_of(line)
                    if (fault := fault_of(line, rank)) is not None:
                        self.faults.append(fault)
                    if rank is not None and is_abort(line):
                        self.aborted.append(rank)
                if not found and (version := BARE_VERSION.match(text)):
                    self.settings.versions[("", 0)] = version[1]
                used += bool(found) or self.torch.add(text)
        whose = f" of {counted(len(processes), 'process', 'processes')}" if processes else ""
        return Note(file=source.name, kind=KIND, text=f"{counted(used, 'line')} of {total:,} used{whose}")

    def findings(self, notes: list[Note]) -> Findings:
        """Judge what was read."""
        comms = self.comms.finish()
        # rank of each process in the largest communicator it is in
        ranks: dict[Process, int] = {}
        for comm in comms:
            for rank, member in comm.members.items():
                ranks.setdefault((member.host, member.pid), rank)
        rings = {comm.name: judge_rings(comm, self.settings.network) for comm in comms}
        drawn = [draw_rings(comm, rings[comm.name], self.settings.nvlink) for comm in comms[:SHOWN_COMMUNICATORS]]
        faults = judge_faults(self.faults, self.aborted, comms, self.settings.addresses)
        torch = judge_torch(self.torch)
        # A job has many communicators over the same hosts: what all of them share is reported once, of the largest.
        alike: dict[tuple[object, ...], list[Verdict]] = {}
        for verdict in (verdict for comm in comms for verdict in rings[comm.name]):
            fault = verdict.evidence["what"]
            key = (fault, verdict.evidence["communicator"], verdict.cause) if fault == "broken" else (fault,)
            alike.setdefault(key, []).append(verdict)
        broken_rings = [
            msgspec.structs.replace(same[0], evidence={**same[0].evidence, "communicators": len(same)})
            for same in list(alike.values())[:MOST_RING_VERDICTS]
        ]
        # A log shows what the network between hosts is, not how much of the time it takes.
        between = [link.via for comm in comms for link in comm.links.values() if link.via.startswith("NET/")]
        vias = Counter(map(transport_name, between))
        questions = {}
        if vias:
            words = f"the hops between hosts use {', '.join(vias)}; how much of a step they take needs a profile"
            questions["network_between_hosts"] = Question(answer=None, numbers=dict(vias), words=words)
        # Communicators of which some ranks' logs are not here.
        partial: list[Unjudged] = []
        for comm in comms:
            if comm.nranks > max(len(comm.members), 1) and len(partial) < SHOWN_COMMUNICATORS:
                absent = rank_list(set(range(comm.nranks)) - set(comm.members))
                seen = counted(len(comm.members), "rank")
                why = f"the logs cover {seen} of {comm.nranks}; {absent} are missing"
                partial.append(Unjudged(what=f"the whole of communicator {comm.name}", why=why))
        environments = list(self.settings.environment.values())
        facts: dict[str, object] = {}
        if comms or self.settings.versions:
            facts["nccl"] = {
                "versions": sorted(set(self.settings.versions.values())),
                "communicators": [
                    {"name": comm.name, "nranks": comm.nranks, "ranks_seen": sorted(comm.members)} for comm in comms
                ],
                "environment": {
                    name: sorted({variables[name] for variables in environments if name in variables})
                    for name in sorted({name for variables in environments for name in variables})
                },
            }
        return Findings(
            verdicts=[*torch, *faults, *judge_settings(self.settings, ranks), *broken_rings],
            questions=questions,
            unjudged=[*partial, *plain_sockets(comms, self.settings.network)],
            notes=notes,
            sheets=[_hops(comms, self.settings.nvlink)] if any(comm.links for comm in comms) else [],
            rings=[drawing for drawing in drawn if drawing is not None],
            facts=facts,
        )


def _hops(comms: Sequence[NcclCommunicator], nvlink: bool | None) -> Sheet:
    """How many hops of each communicator go over what."""
    counts: Counter[tuple[str, int, str, str]] = Counter()
    for comm in comms:
        for link in comm.links.values():
            where = "between hosts" if comm.host(link.src) != comm.host(link.dst) else "inside a host"
            where = where if comm.host(link.src) and comm.host(link.dst) else "unknown"
            counts[comm.name, comm.nranks, transport_name(link.via, nvlink=nvlink), where] += 1
    rows: list[list[float | int | str | None]] = [[*key, count] for key, count in sorted(counts.items())]
    columns = ["communicator", "ranks", "transport", "where", "hops"]
    return Sheet(title="What the hops travel over", columns=columns, rows=rows)
