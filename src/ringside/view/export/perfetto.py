"""A run as a trace that Perfetto and chrome://tracing open: phases per rank, and arrows from whom all waited for.

The format is Chrome's trace events (JSON); arrows are its flow events, each bound to the slice that encloses it. Clocks
of different hosts are brought together by the ends of synchronisations, which all ranks leave at once.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ringside.errors import RingsideError, UsageError
from ringside.files import user_file
from ringside.monitor.run.records import RunInfo, StepRecord
from ringside.monitor.run.table import StepTable
from ringside.monitor.stats import Floats, row_medians
from ringside.monitor.verdict import Verdict, headline
from ringside.predict.simulation.timeline import Timeline
from ringside.text import name_vertices, size

Trace = dict[str, Any]

ARROWS = 16
"""Arrows per step at most, to those that waited longest."""

WORTH_AN_ARROW = 0.01
"""A wait is shown by an arrow from this share of the step on."""

MOST_RECORDS = 400_000
INSIDE_US = 0.25
"""How far inside a slice an arrow begins or ends."""


def check_trace_name(path: Path) -> None:
    """Raise `UsageError` unless ui.perfetto.dev knows a file of this name as a trace."""
    if not path.name.endswith((".json", ".json.gz")):
        raise UsageError(f"--perfetto {path}: the name ends in .json or .json.gz")


def write_perfetto(path: Path, info: RunInfo, records: list[StepRecord], verdicts: list[Verdict]) -> int:
    """Write a trace and return how many events it holds.

    Args:
        path: The file; compressed where its name ends in `.gz`.
        info: What is known of the run.
        records: The steps to show, of any ranks, in any order.
        verdicts: Shown at the step they were reached at.

    Raises:
        UsageError: There is nothing to show, or more than a browser holds.
        RingsideError: The file cannot be written.
    """
    records = [record for record in records if 0 <= record.rank < info.world_size]
    if not records:
        raise UsageError("no step was recorded in that range: choose --steps within the run")
    if len(records) > MOST_RECORDS:
        steps = max(MOST_RECORDS // info.world_size, 1)
        raise UsageError(
            f"{len(records):,} records are more than a trace viewer can show; choose about {steps:,} steps with --steps"
        )
    return write_events(path, trace_events(info, records, verdicts))


def write_events(path: Path, events: Iterable[Trace]) -> int:
    """Write trace events, compressed where the name ends in `.gz`; return how many, or raise `RingsideError`."""
    count = 0
    try:
        with (
            user_file(path) as file,
            gzip.GzipFile(fileobj=file, mode="wb") if path.suffix == ".gz" else nullcontext(file) as out,
        ):
            out.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
            for event in events:
                out.write(b",\n" * (count > 0) + json.dumps(event, separators=(",", ":")).encode())
                count += 1
            out.write(b"\n]}\n")
    except OSError as error:
        raise RingsideError(f"{path} cannot be written: {error.strerror or error}") from error
    return count


def trace_events(info: RunInfo, records: list[StepRecord], verdicts: list[Verdict]) -> Iterator[Trace]:
    """Yield the events of a trace, times in microseconds from the beginning of the first step."""
    shift = clock_shifts(records, info.world_size)
    begin = min(_begin(record, shift) for record in records)
    for rank in sorted({record.rank for record in records}):
        host = f" · {info.hosts[rank]}" if rank < len(info.hosts) and info.hosts[rank] else ""
        yield from _process(rank, f"rank {rank}{host}", rank)
    by_step: dict[int, list[_Laid]] = {}
    for record in sorted(records, key=lambda record: (record.step, record.rank)):
        laid = _Laid(record, 1e6 * (_begin(record, shift) - begin))
        by_step.setdefault(record.step, []).append(laid)
        yield from laid.slices()
    for row in by_step.values():
        yield from _arrows(row, info.world_size)
    for verdict in verdicts:
        if verdict.detected_step in by_step:
            ended = max(laid.end for laid in by_step[verdict.detected_step])
            args = {"cause": verdict.cause, "advice": verdict.advice}
            yield {"ph": "i", "s": "g", "name": headline(verdict), "ts": ended, "pid": 0, "tid": 0, "args": args}


def clock_shifts(records: list[StepRecord], ranks: int) -> Floats:
    """Return by how many seconds each rank's clock is ahead of the others' median, float64 [ranks].

    A synchronisation ends on all ranks at once, so what its recorded ends differ by is the clocks' difference; the
    median over steps leaves out what single steps say.
    """
    steps = sorted({record.step for record in records})
    rows = {step: row for row, step in enumerate(steps)}
    ends = np.full((len(steps), ranks), np.nan)
    for record in records:
        ends[rows[record.step], record.rank] = record.ended_unix - record.optimizer_seconds
    # Clocks are compared by the ends of synchronisations, step by step.
    apart = ends - row_medians(ends)[:, None]
    known = ~np.isnan(apart).all(axis=0)
    shifts = np.zeros(ranks)
    shifts[known] = np.nanmedian(apart[:, known], axis=0)
    return shifts


def steps_between(table: StepTable, first: int | None, until: int | None) -> range:
    """Return the training steps from `first` to before `until` that a table reaches over."""
    if not len(table):
        return range(0)
    low, high = int(table.steps[0]), int(table.steps[-1]) + table.stride
    return range(low if first is None else max(first, low), high if until is None else min(until, high))


class _Laid:
    """One record's phases laid out on the time line, microseconds."""

    def __init__(self, record: StepRecord, begin: float) -> None:
        self.record, self.begin = record, begin
        self.end = begin + 1e6 * record.step_seconds
        self.sync_end = max(self.end - 1e6 * record.optimizer_seconds, begin)
        self.arrived = max(self.sync_end - 1e6 * record.exposed_seconds, begin)
        self.forward = min(begin + 1e6 * record.data_seconds, self.arrived)
        self.backward = min(self.forward + 1e6 * record.forward_seconds, self.arrived)

    @property
    def waited(self) -> float:
        """How long it waited for the last rank, microseconds."""
        wait = 1e6 * self.record.wait_seconds
        return min(max(wait, 0.0), self.sync_end - self.arrived) if wait == wait else 0.0

    def slices(self) -> Iterator[Trace]:
        record, met = self.record, self.arrived + self.waited
        figures = {"own_ms": 1e3 * record.own_seconds, "samples": record.samples, "bytes": record.payload_bytes}
        yield _slice(f"step {record.step}", record.rank, 0, self.begin, self.end, **figures)
        places = (
            ("data", self.begin, self.forward),
            ("forward", self.forward, self.backward),
            ("backward", self.backward, self.arrived),
            ("wait", self.arrived, met),
            ("wire", met, self.sync_end),
            ("optimizer", self.sync_end, self.end),
        )
        yield from (_slice(name, record.rank, 0, first, last) for name, first, last in places if last > first)
        own = {"ms": round(1e3 * record.own_seconds, 4)}
        yield {"ph": "C", "name": "own time", "ts": self.begin, "pid": record.rank, "args": own}


def _arrows(row: list[_Laid], ranks: int) -> Iterator[Trace]:
    """Arrows from the rank that arrived last to those that waited for it."""
    last = min(row, key=lambda laid: laid.waited)
    # Nobody was waited for in this step.
    if last.arrived <= last.backward:
        return
    worth = [laid for laid in row if laid is not last and laid.waited > WORTH_AN_ARROW * (laid.end - laid.begin)]
    begin = last.arrived - INSIDE_US
    for laid in sorted(worth, key=lambda laid: -laid.waited)[:ARROWS]:
        end = max(laid.arrived + laid.waited - INSIDE_US, laid.arrived)
        # Both ends must lie inside a slice: a viewer binds them to the one around them.
        first = max(min(begin, end), last.backward)
        if first > end:
            continue
        common = {"cat": "waits for", "name": "waits for", "id": laid.record.step * ranks + laid.record.rank, "tid": 0}
        yield {"ph": "s", **common, "ts": round(first, 3), "pid": last.record.rank}
        yield {"ph": "f", "bp": "e", **common, "ts": round(end, 3), "pid": laid.record.rank}


def _process(number: int, name: str, order: int) -> Iterator[Trace]:
    """Name a process of the trace, and where it stands among the others."""
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": order}}


def _slice(name: str, process: int, track: int, begin: float, end: float, **args: float) -> Trace:
    """A slice from `begin` to `end`, microseconds."""
    place = {"ts": round(begin, 3), "dur": round(end - begin, 3), "pid": process, "tid": track}
    return {"ph": "X", "name": name, **place, **({"args": args} if args else {})}


def _begin(record: StepRecord, shift: Floats) -> float:
    return float(record.ended_unix - record.step_seconds - shift[record.rank])


# -------------------------------------------------------------------------------------------------
# A simulated schedule as a trace that Perfetto opens: what every rank sends and takes, and an arrow per message.
#
# Chrome's trace events as above; the critical path is a track of its own.

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
                f"more than {MOST_MESSAGES:,} messages are more than a trace viewer can show: take fewer ranks"
            )
    return write_events(path, _timeline_events(timeline))


def _timeline_events(timeline: Timeline) -> Iterator[Trace]:
    """Yield the events, times in microseconds."""
    schedule = timeline.schedule
    for vertex in range(schedule.vertices):
        yield from _process(vertex, name_vertices([vertex], schedule.ranks), vertex)
        for track, text in ((SENDS, "sends"), (TAKES, "is sent"), (WORKS, "works")):
            yield {"ph": "M", "name": "thread_name", "pid": vertex, "tid": track, "args": {"name": text}}
    yield from _process(schedule.vertices, "critical path", -1)
    for rank, seconds in timeline.late.items():
        if seconds > 0:
            yield _slice("late", rank, WORKS, 0.0, _us(seconds))
    # Every message is a slice at both ends and an arrow, which begins and ends inside of them.
    number = count()
    for sent in timeline.sent():
        rows = zip(sent.src.tolist(), sent.dst.tolist(), sent.size_bytes.tolist(), strict=True)
        times = (map(_us, moments.tolist()) for moments in (sent.begin_s, sent.leave_s, sent.arrive_s))
        for (src, dst, nbytes), begin, leave, arrive in zip(rows, *times, strict=True):
            args = {"round": sent.round + 1, "bytes": nbytes}
            yield _slice(f"to {dst}, {size(nbytes)}", src, SENDS, begin, leave, **args)
            yield _slice(f"from {src}, {size(nbytes)}", dst, TAKES, begin, arrive, **args)
            common = {"cat": "message", "name": "message", "id": next(number)}
            yield {"ph": "s", **common, "ts": begin, "pid": src, "tid": SENDS}
            end = max(arrive - INSIDE_US, begin)
            yield {"ph": "f", "bp": "e", **common, "ts": round(end, 3), "pid": dst, "tid": TAKES}
    # The critical path has a track of its own, below the vertices'.
    for hop in timeline.critical_path:
        where = f"rank {hop.src}" if hop.src == hop.dst else f"{hop.src} > {hop.dst}"
        args = {"round": hop.round + 1, "wire_us": 1e6 * hop.wire_s, "alpha_us": 1e6 * hop.alpha_s}
        yield _slice(where, schedule.vertices, SENDS, _us(hop.begin_s), _us(hop.end_s), **args)


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
