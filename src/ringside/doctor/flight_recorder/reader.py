"""Reader of flight-recorder dumps (`TORCH_FR_BUFFER_SIZE`, `torch._C._distributed_c10d._dump_*_trace`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Lane, Note, Number, Sheet, TimeSpan, merge
from ringside.doctor.flight_recorder.dump import Dump, NotADumpError, RecordedCall, is_pickle, load_dump, read_dump
from ringside.doctor.flight_recorder.groups import KIND as KIND
from ringside.doctor.flight_recorder.groups import GroupView, group_views, last_s, sort_into_jobs
from ringside.doctor.flight_recorder.verdicts import judge_dumps
from ringside.monitor.verdict import Verdict
from ringside.text import counted, rank_list

MOST_BYTES = 512 << 20
_MARKS = (b'"collective_seq_id"', b'"pg_config"', b'"pg_status"')
_MARKS_OF_TRACES = (b'"schemaVersion"', b'"distributedInfo"', b'"traceEvents"')
"""The header of a profiler's trace lists the process groups, too."""
_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|pt|bin|dump|gz|txt))*$")


def matches(source: Source) -> bool:
    """Return whether a source is a pickle of any kind, or a dump in JSON."""
    head = source.head
    if is_pickle(head):
        return True
    is_trace = any(mark in head for mark in _MARKS_OF_TRACES)
    return head[:1] == b"{" and not is_trace and any(mark in head for mark in _MARKS)


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Judge the dumps of one job together, or of several in folders of their own."""
    dumps, refused = [], []
    for number, source in enumerate(sources, 1):
        progress.begin(f"reading dump {number} of {len(sources)}")
        try:
            # The rank that the dump names, or else its file: PyTorch's own names end with it.
            content = load_dump(source.read(MOST_BYTES))
            rank = content.get("rank") if isinstance(content, dict) else None
            if not isinstance(rank, int):
                match = _RANK.search(PurePosixPath(source.name).name)
                if match is None:
                    raise NotADumpError("has no rank: name it after its rank, such as nccl_trace_rank_3")
                rank = int(match[1][-9:])
            dumps.append(read_dump(content, source.name, rank, source.path.stat().st_mtime))
        except NotADumpError as error:
            refused.append(Note(file=source.name, text=str(error), used=False))
    jobs, left_out = sort_into_jobs(dumps)
    progress.begin(f"matching the collectives of {counted(len(dumps), 'rank')}")
    found = []
    for job in jobs:
        which = f" of {job[0].file.rpartition('/')[0] if job else ''}" if len(jobs) > 1 else ""
        views = group_views(job)
        verdicts, unjudged = judge_dumps(job, views)
        culprits = {rank for verdict in verdicts for rank in verdict.ranks}
        notes = []
        for dump in job:
            completed = f", {sum(call.done for call in dump.calls) or 'none'} completed" if dump.calls else ""
            if any(call.endless for call in dump.calls):
                completed = ", ends not recorded"
            entries = counted(len(dump.calls), "entry", "entries") if dump.calls else "no entry"
            text = f"rank {dump.rank}: {entries}{completed}"
            damaged = f"; {counted(dump.skipped, 'damaged entry', 'damaged entries')} left out" if dump.skipped else ""
            text = "; ".join(filter(None, [text + damaged, dump.lost]))
            notes.append(Note(file=dump.file, kind=KIND, text=text))
        found.append(
            Findings(
                verdicts=verdicts,
                unjudged=unjudged,
                notes=notes,
                lanes=_dump_lanes(job, culprits, which),
                standings=_standings(views, verdicts),
                sheets=_open_groups(views, verdicts, which),
                facts={
                    f"flight_recorder{which}": {
                        "ranks": [dump.rank for dump in job],
                        "versions": sorted({dump.version for dump in job}),
                        "libraries": sorted({dump.library for dump in job if dump.library}),
                        "calls": sum(len(dump.calls) for dump in job),
                        "without_end": sum(not call.done for dump in job for call in dump.calls),
                    }
                },
            )
        )
    return merge([*found, Findings(notes=[*left_out, *refused])])


# -------------------------------------------------------------------------------------------------
# Dumps as lanes and tables for the page.

MOST_LANES = 64
MOST_SPANS = 200
TAIL_S = 10.0
"""How much of the time before the last call is drawn at most."""


def _dump_lanes(dumps: Sequence[Dump], culprits: set[int], which: str) -> list[Lane]:
    """Draw what ranks last did: calls that ended, and the wait in those that did not."""
    end = max((max(last_s(dump), *(call.ended_s for call in dump.calls)) for dump in dumps if dump.calls), default=0.0)
    if not end:
        return []
    # From the last seconds, or the first call without an end, to a little after the last event.
    pending = [call.created_s for dump in dumps for call in dump.calls if not call.done and call.created_s]
    start = max(min([call.created_s for dump in dumps for call in dump.calls if call.created_s]), end - TAIL_S)
    start = min(start, min(pending, default=start))
    horizon = end + max(0.25 * (end - start), 1e-3)
    # culprits first where there are more ranks than lanes
    shown = sorted(dumps, key=lambda dump: (dump.rank not in culprits, dump.rank))[:MOST_LANES]
    title = f"The last entries{which}: collectives that completed, and waits in those that never did"
    found = []
    for dump in sorted(shown, key=lambda dump: dump.rank):
        culprit = dump.rank in culprits
        ended = [call for call in dump.calls if call.done and call.ended_s > call.created_s >= start]
        spans = [
            TimeSpan(start_s=call.created_s - start, end_s=call.ended_s - start, kind="communication", name=_name(call))
            for call in ended[-MOST_SPANS:]
        ]
        waiting = [call for call in dump.calls if not call.done and call.created_s]
        if waiting:
            first = min(waiting, key=lambda call: call.created_s)
            more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
            begin = max(first.created_s, start) - start
            kind = "missing" if culprit else "wait"
            spans.append(TimeSpan(start_s=begin, end_s=horizon - start, kind=kind, name=_name(first) + more))
        elif culprit:
            begin = max((call.ended_s or call.created_s for call in ended), default=start) - start
            spans.append(TimeSpan(start_s=begin, end_s=horizon - start, kind="missing", name="never entered"))
        found.append(Lane(title=title, rank=dump.rank, spans=spans, note="culprit" if culprit else ""))
    return found


def _name(call: RecordedCall) -> str:
    return f"{call.op} {call.seq} of group {call.group}"


MOST_STANDINGS = 8


def _standings(views: list[GroupView], verdicts: Sequence[Verdict]) -> list[Sheet]:
    """Return where every rank stands in the groups that verdicts are about, in the verdicts' order."""
    about = {str(verdict.evidence.get("group")): verdict for verdict in verdicts}
    found = []
    for name, verdict in about.items():
        view = next((view for view in views if view.group.name == name), None)
        if view is None:
            continue
        seq = int(verdict.evidence.get("collective_seq_id", -1))
        rank_rows: list[list[Number | None]] = []
        culprits = []
        for rank in view.members:
            if rank not in view.dumps:
                rank_rows.append([rank, None, None, None, "no dump"])
                continue
            pending, last, completed = view.pending[rank], view.last[rank], view.completed[rank]
            if last < seq:
                state = "never entered"
            else:
                state = "entered, not completed" if any(call.seq <= seq for call in pending) else "completed"
            if rank in verdict.ranks:
                culprits.append(len(rank_rows))
                if state == "entered, not completed" and verdict.evidence.get("stopped"):
                    state = f"entered, but its GPU completed nothing after {completed}"
                state = f"culprit: {state}"
            rank_rows.append([rank, _known(last), _known(completed), len(pending), state])
        title = f"Last entered and completed, by rank, in {view.group.title}"
        columns = ["rank", "last entered", "last completed", "open", f"collective {seq}"]
        found.append(Sheet(title=title, columns=columns, rows=rank_rows, culprits=culprits))
    return found[:MOST_STANDINGS]


def _open_groups(views: list[GroupView], verdicts: Sequence[Verdict], which: str) -> list[Sheet]:
    """Return all groups with entries that never completed, those that verdicts are about first."""
    about = {str(verdict.evidence.get("group")) for verdict in verdicts}
    open_groups: list[list[Number | None]] = []
    for view in sorted(views, key=lambda view: view.group.name not in about):
        waiting = sorted(rank for rank, calls in view.pending.items() if calls)
        in_p2p = sorted(rank for rank, calls in view.open_p2p.items() if calls)
        if waiting or in_p2p:
            first = min(calls[0].seq for calls in view.pending.values() if calls) if waiting else None
            group: list[Number | None] = [view.group.name, view.group.desc, len(view.members)]
            open_groups.append([*group, rank_list(waiting), first, rank_list(in_p2p)])
    title = f"Process groups{which} with entries that never completed"
    columns = ["group", "description", "size", "ranks in a collective", "first", "ranks in a send or receive"]
    return [Sheet(title=title, columns=columns, rows=open_groups)] if open_groups else []


def _known(number: int) -> int | None:
    return number if number >= 0 else None
