"""A simulated schedule as a trace that Perfetto opens: what every rank sends and takes, and an arrow per message.

Chrome's trace events, as of `ringside.view.perfetto`; the critical path is a track of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from ringside.errors import UsageError
from ringside.predict.timeline import Timeline
from ringside.text import size
from ringside.view.perfetto import INSIDE_US, Trace, write_events

MOST_MESSAGES = 200_000
SENDS, TAKES, WORKS = 0, 1, 2


def write_timeline(path: Path, timeline: Timeline) -> int:
    """Write a trace and return how many events it holds.

    Args:
        path: The file; compressed where its name ends in `.gz`.
        timeline: What was simulated.

    Raises:
        UsageError: It holds more messages than a browser does.
        RingsideError: The file cannot be written.
    """
    messages = 0
    for sent in timeline.sent():
        messages += len(sent.src)
        if messages > MOST_MESSAGES:
            raise UsageError(
                f"more than {MOST_MESSAGES:,} messages are more than a trace viewer holds: take fewer ranks"
            )
    return write_events(path, timeline_events(timeline))


def timeline_events(timeline: Timeline) -> Iterator[Trace]:
    """Yield the events, times in microseconds."""
    yield from _names(timeline)
    for rank, seconds in timeline.late.items():
        if seconds > 0:
            yield _slice("late", rank, WORKS, 0.0, seconds)
    yield from _messages(timeline)
    yield from _path(timeline)


def _messages(timeline: Timeline) -> Iterator[Trace]:
    number = count()
    for sent in timeline.sent():
        rows = zip(sent.src.tolist(), sent.dst.tolist(), sent.size_bytes.tolist(), strict=True)
        times = zip(sent.begin_s.tolist(), sent.leave_s.tolist(), sent.arrive_s.tolist(), strict=True)
        for (src, dst, carried), (begin, leave, arrive) in zip(rows, times, strict=True):
            args = {"round": sent.round, "bytes": carried}
            yield _slice(f"to {dst}, {size(carried)}", src, SENDS, begin, leave, **args)
            yield _slice(f"from {src}, {size(carried)}", dst, TAKES, begin, arrive, **args)
            common = {"cat": "message", "name": "message", "id": next(number)}
            yield {"ph": "s", **common, "ts": _us(begin), "pid": src, "tid": SENDS}
            end = max(_us(arrive) - INSIDE_US, _us(begin))
            yield {"ph": "f", "bp": "e", **common, "ts": round(end, 3), "pid": dst, "tid": TAKES}


def _path(timeline: Timeline) -> Iterator[Trace]:
    track = timeline.schedule.vertices
    for hop in timeline.critical_path:
        where = f"rank {hop.src}" if hop.src == hop.dst else f"{hop.src} > {hop.dst}"
        args = {"round": hop.round, "wire_us": 1e6 * hop.wire_s, "alpha_us": 1e6 * hop.alpha_s}
        yield _slice(where, track, SENDS, hop.begin_s, hop.end_s, **args)


def _slice(name: str, vertex: int, track: int, begin: float, end: float, **args: float) -> Trace:
    place = {"ts": _us(begin), "dur": round(_us(end) - _us(begin), 3), "pid": vertex, "tid": track}
    return {"ph": "X", "name": name, **place, **({"args": args} if args else {})}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _names(timeline: Timeline) -> Iterator[Trace]:
    schedule = timeline.schedule
    for vertex in range(schedule.vertices + 1):
        name = f"rank {vertex}" if vertex < schedule.ranks else f"switch {vertex}"
        name = "critical path" if vertex == schedule.vertices else name
        order = -1 if vertex == schedule.vertices else vertex
        yield {"ph": "M", "name": "process_name", "pid": vertex, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": vertex, "args": {"sort_index": order}}
        for track, what in ((SENDS, "sends"), (TAKES, "is sent"), (WORKS, "works")) * (vertex < schedule.vertices):
            yield {"ph": "M", "name": "thread_name", "pid": vertex, "tid": track, "args": {"name": what}}
