"""Dumps as lanes and tables for the page."""

from __future__ import annotations

from collections.abc import Sequence

from ringside.doctor.findings import Lane, Number, Sheet, TimeSpan
from ringside.doctor.flight_recorder.dump import Dump, RecordedCall
from ringside.doctor.flight_recorder.groups import GroupView, last_s
from ringside.monitor.verdict import Verdict
from ringside.text import rank_list

MOST_LANES = 64
MOST_SPANS = 200
TAIL_S = 10.0
"""How much of the time before the last call is drawn at most."""


def dump_lanes(dumps: Sequence[Dump], culprits: set[int], which: str) -> list[Lane]:
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
    title = f"The last calls{which}: collectives that ended, and waits without an end"
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
            spans.append(TimeSpan(start_s=begin, end_s=horizon - start, kind="missing", name="never came"))
        found.append(Lane(title=title, rank=dump.rank, spans=spans, note="culprit" if culprit else ""))
    return found


def _name(call: RecordedCall) -> str:
    return f"{call.op} {call.seq} of group {call.group}"


def dump_tables(dumps: Sequence[Dump], views: list[GroupView], verdicts: Sequence[Verdict], which: str) -> list[Sheet]:
    """Return where every rank stands in the groups that verdicts are about, and all groups with calls open."""
    about = {str(verdict.evidence.get("group")): verdict for verdict in verdicts}
    found = []
    for view in views:
        if view.group.name in about:
            verdict = about[view.group.name]
            seq = int(verdict.evidence.get("collective_seq_id", -1))
            rank_rows: list[list[Number | None]] = []
            culprits = []
            for rank in view.members:
                if rank not in view.dumps:
                    rank_rows.append([rank, None, None, None, "no dump"])
                    continue
                pending, last = view.pending[rank], view.last[rank]
                if last < seq:
                    state = "never came"
                else:
                    state = "is in it" if any(call.seq <= seq for call in pending) else "is through"
                if rank in verdict.ranks:
                    culprits.append(len(rank_rows))
                    state = f"culprit: {state}"
                rank_rows.append([rank, _known(last), _known(view.completed[rank]), len(pending), state])
            found.append(
                Sheet(
                    title=f"Where every rank of {view.group.title} stands",
                    columns=["rank", "entered", "completed", "without an end", f"collective {seq}"],
                    rows=rank_rows,
                    culprits=culprits,
                )
            )
    open_groups: list[list[Number | None]] = []
    for view in views:
        waiting = sorted(rank for rank, calls in view.pending.items() if calls)
        in_p2p = sorted(rank for rank, calls in view.p2p.items() if any(not call.done for call in calls))
        if waiting or in_p2p:
            first = min(calls[0].seq for calls in view.pending.values() if calls) if waiting else None
            group: list[Number | None] = [view.group.name, view.group.desc, len(view.members)]
            open_groups.append([*group, rank_list(waiting), first, rank_list(in_p2p)])
    overview = Sheet(
        title=f"Process groups with calls that have no end{which}",
        columns=["group", "description", "size", "ranks in a collective", "first", "ranks in a send or receive"],
        rows=open_groups,
    )
    return [*found[:8], *([overview] if overview.rows else [])]


def _known(number: int) -> int | None:
    return number if number >= 0 else None
