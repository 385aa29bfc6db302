"""Reading one trace: its events through a collector, who recorded it from its header."""

from __future__ import annotations

from typing import Any, BinaryIO

from ringside.doctor.kineto_collector import Collector
from ringside.doctor.kineto_events import Event, plain_count
from ringside.doctor.kineto_stream import Scan
from ringside.doctor.kineto_trace import RankTrace


def read_trace(stream: BinaryIO, file: str) -> RankTrace:
    """Return what a trace says; a damaged one gives what is whole of it.

    Args:
        stream: Its bytes, unpacked.
        file: What to call it.
    """
    scan = Scan(stream, Event)
    collector = Collector()
    for batch in scan.batches():
        collector.take(batch)
    base_s = scan.header.get("baseTimeNanoseconds", 0)
    trace = collector.trace(file, float(base_s) / 1e9 if isinstance(base_s, int | float) else 0.0)
    trace.events, trace.losses = scan.events, scan.losses()
    _identify(trace, scan.header, collector.rank)
    return trace


def _identify(trace: RankTrace, header: dict[str, Any], told: int) -> None:
    """Who recorded it, from `distributedInfo`; else from what its collectives say."""
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = plain_count(info.get("rank")), plain_count(info.get("world_size"))
    trace.rank = rank if rank >= 0 else told
    trace.world_size = world if world >= 0 else max((len(one.ranks) for one in trace.collectives), default=0)
    trace.backend = str(info.get("backend") or "")
    trace.host = str(header.get("host_name") or info.get("host_name") or "")
