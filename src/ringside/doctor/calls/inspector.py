"""Reader of the logs of NCCL's Inspector (v4.0 to v4.4: plain, verbose, proxy traces) and of RCCL's.

A line is a record. Up to v4.2 each has its header; from v4.3 on a `dump_stats` line has it for those that follow.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.doctor.calls.judge import judge_files
from ringside.doctor.calls.record import UNKNOWN, Calls, Count, Link, Rank, decoded, line_batches
from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note
from ringside.text import counted

KIND = "NCCL Inspector log"
_HEADER = re.compile(rb'\A\s*\{\s*"header"\s*:\s*\{\s*"id"\s*:')
_NONE = msgspec.Raw(b"")
_SIGNS = (b'"inspector_output_format_version"', b'"coll_perf"', b'"p2p_perf"', b'"dump_stats"')


class _Header(msgspec.Struct, gc=False):
    id: str
    rank: Rank
    n_ranks: Rank = 0


class _Metadata(msgspec.Struct, gc=False):
    inspector_output_format_version: str = ""
    dump_timestamp_us: Count = 0
    hostname: str = ""
    pid: Count = 0

    @property
    def process(self) -> tuple[str, str]:
        """Its clock and its name."""
        return self.hostname, str(self.pid)


class _Kernel(msgspec.Struct, gc=False):
    kernel_start_ts: Count = 0
    kernel_stop_ts: Count = 0


class _Times(msgspec.Struct, gc=False):
    kernel_events: list[_Kernel] = []


class _Perf(msgspec.Struct, gc=False):
    coll: str
    coll_sn: Count
    coll_exec_time_us: Annotated[float, msgspec.Meta(ge=0.0, lt=1e19)]  # a whole number, which some write as 5663.0
    event_trace_ts: _Times | None = None


class _P2p(msgspec.Struct, gc=False):
    p2p: str


class _Step(msgspec.Struct, gc=False):
    trans_size_bytes: Count = 0
    gpu_produce_us: Count = 0
    peer_credit_us: Count = 0
    wire_us: Count = 0


class _Proxy(_Step):
    record_type: str = ""
    peer: Rank = 0
    direction: str = ""
    steps: list[_Step] = []


class _Stats(msgspec.Struct, gc=False):
    coll_dropped_total: Count = 0


class _Line(msgspec.Struct, gc=False):
    header: msgspec.Raw = _NONE
    metadata: _Metadata | None = None
    coll_perf: _Perf | None = None
    p2p_perf: _P2p | None = None
    proxy_trace: _Proxy | None = None
    dump_stats: _Stats | None = None


_DECODER = msgspec.json.Decoder(_Line)
_HEADER_DECODER = msgspec.json.Decoder(_Header)


def matches(source: Source) -> bool:
    """Return whether a source begins like a log of the Inspector."""
    return bool(_HEADER.match(source.head)) and any(sign in source.head for sign in _SIGNS)


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Judge the logs of one job together."""
    return judge_files(KIND, sources, progress, _read_log)


def _read_log(source: Source, calls: Calls) -> Note:
    header: _Header | None = None
    recorded = _NONE
    metadata = _Metadata()
    entries = messages = proxies = damaged = 0
    with source.open() as stream:
        for batch in line_batches(stream):
            # Millions of lines come through this loop: they are noted many at a time, by rank and function.
            lines, broken = decoded(batch, _DECODER)
            damaged += broken
            perfs: dict[tuple[str, int], dict[str, list[_Perf]]] = defaultdict(dict)
            functions = perfs[header.id, header.rank] if header is not None else {}
            written: list[int] = []
            for line in lines:
                if line.header != recorded and line.header:
                    # the same one stands in thousands of lines: it is decoded where it changes
                    try:
                        header = _HEADER_DECODER.decode(line.header)
                    except UNDECODABLE:
                        damaged += 1
                        continue
                    recorded = line.header
                    functions = perfs[header.id, header.rank]
                if header is None:
                    damaged += 1
                    continue
                if line.metadata is not None:
                    metadata = line.metadata
                    written.append(metadata.dump_timestamp_us)
                if (perf := line.coll_perf) is not None:
                    alike = functions.get(perf.coll)
                    if alike is None:
                        alike = functions[perf.coll] = []
                        calls.join(header.id, header.rank, header.n_ranks, metadata.process)
                    alike.append(perf)
                elif (proxy := line.proxy_trace) is not None:
                    proxies += 1
                    if proxy.direction == "send" and proxy.record_type != "proxy_op_start":
                        link = calls.link(Link(header.id, header.rank, proxy.peer))
                        # an operation's own figures are the sums of its steps'
                        for step in [proxy] if proxy.record_type == "proxy_step" else proxy.steps:
                            link.nbytes += step.trans_size_bytes
                            link.gpu_s += step.gpu_produce_us / 1e6
                            link.peer_s += step.peer_credit_us / 1e6
                            link.wire_s += step.wire_us / 1e6
                elif line.p2p_perf is not None:
                    messages += 1
                elif line.dump_stats is not None:
                    calls.join(header.id, header.rank, header.n_ranks, metadata.process)
                    if (header.id, header.rank) in calls.members:
                        calls.dropped[header.id, header.rank] = line.dump_stats.coll_dropped_total
            for moment in filter(None, (min(filter(None, written), default=0), max(written, default=0))):
                calls.wrote(moment / 1e6)
            grouped = [(own, name, found) for own, by_name in perfs.items() for name, found in by_name.items()]
            for (communicator, rank), function, found in grouped:
                entries += len(found)
                starts: Sequence[float] = [UNKNOWN] * len(found)
                took: Sequence[float] = [perf.coll_exec_time_us / 1e6 for perf in found if perf.event_trace_ts is None]
                if len(took) < len(found):
                    starts, took = zip(*map(_times, found), strict=True)
                calls.stream(communicator, function, rank).extend([perf.coll_sn for perf in found], starts, took)
    parts = [counted(entries, "collective")]
    parts += [counted(messages, "message")] if messages else []
    parts += [counted(proxies, "proxy trace")] if proxies else []
    parts += [f"{counted(damaged, 'damaged line')} left out"] if damaged else []
    used = bool(entries or messages or proxies or calls.dropped)
    version = metadata.inspector_output_format_version or "no version"
    return Note(file=source.name, kind=KIND, text=f"{version}: {', '.join(parts)}", used=used)


def _times(perf: _Perf) -> tuple[float, float]:
    """Return when a collective began on its device, and how long it ran."""
    if perf.event_trace_ts is not None:
        kernels = perf.event_trace_ts.kernel_events
        begun = [kernel.kernel_start_ts for kernel in kernels if kernel.kernel_start_ts]
        ended = [kernel.kernel_stop_ts for kernel in kernels if kernel.kernel_stop_ts]
        if begun and ended and max(ended) >= min(begun):
            return min(begun) / 1e6, (max(ended) - min(begun)) / 1e6
    return UNKNOWN, perf.coll_exec_time_us / 1e6
