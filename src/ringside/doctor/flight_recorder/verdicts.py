"""What the dumps of one job mean, as verdicts: the culprits named, the others counted as waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from ringside.doctor.findings import Unjudged, verdict_of_files
from ringside.doctor.flight_recorder.causes import LIVE_S, HangCause, Mismatch, find_causes, find_mismatches
from ringside.doctor.flight_recorder.dump import ANYONE, Dump, RecordedCall, StackFrame
from ringside.doctor.flight_recorder.groups import GroupView
from ringside.monitor.verdict import Verdict
from ringside.text import counted, name_ranks, rank_list

Evidence = dict[str, float | int | str]
Waiting = list[tuple[int, RecordedCall]]
"""Calls without an end, with their ranks."""
LIBRARY_PARTS = ("/torch/", "/c10d", "site-packages/torch")


def judge_dumps(dumps: Sequence[Dump], views: list[GroupView]) -> tuple[list[Verdict], list[Unjudged]]:
    """Judge the dumps of one job: verdicts, and what the dumps cannot show."""
    mismatches = sorted(find_mismatches(views), key=lambda found: not found.decided)
    # After a mismatch its group hangs as a consequence: that is no cause of its own.
    shown = {id(found.view) for found in mismatches}
    causes = [cause for cause in find_causes(views) if id(cause.view) not in shown]
    # ranks of the job that no dump is of
    world = max((dump.world for dump in dumps), key=len, default=())
    missing = sorted(set(world) - {dump.rank for dump in dumps})
    verdicts = [_mismatch_verdict(found) for found in mismatches]
    verdicts += [_hang_verdict(cause, causes, views, missing) for cause in causes]
    # Dumps older than the others' explain a wait by themselves; without them, calls that nobody is late for remain.
    older = sorted({rank for view in views for rank in view.stale})
    if older and not causes:
        noun, end, verb = ("dump", "breaks", "is") if len(older) == 1 else ("dumps", "break", "are")
        why = (
            f"the {noun} of {name_ranks(older)} {end} off, or {verb} "
            "older than the others': peers completed collectives that they have not recorded yet. Give complete "
            "dumps of one moment"
        )
        return verdicts, [*_unjudged(dumps, missing), Unjudged(what="the culprit, if there is one", why=why)]
    unjudged = _unjudged(dumps, missing)
    if not verdicts and (waiting := [(rank, call) for rank, call in _pending(views) if not call.endless]):
        verdicts, unjudged = _nobody_to_blame(dumps, waiting, missing)
    endless = sorted({call.backend for dump in dumps for call in dump.calls if call.endless})
    if not verdicts and endless:
        why = f"no ends are recorded of {', '.join(endless)}, and no rank is late for what others wait in"
        unjudged.append(Unjudged(what="whether collectives ended", why=f"{why}: look at the ranks' stacks"))
    return verdicts, unjudged


def _mismatch_verdict(found: Mismatch) -> Verdict:
    call = found.others[found.ranks[0]]
    if found.aspect == "operation":
        advice = (
            "Look for a branch that depends on the rank or on data around this call: every rank must make the same "
            "calls in the same order. TORCH_DISTRIBUTED_DEBUG=DETAIL stops at the first call that differs."
        )
    else:
        advice = (
            f"Make the {found.aspect} of this tensor the same on every rank: look at the last batch (drop_last), at "
            "unused parameters and at the autocast settings of the ranks that differ."
        )
    where = f"in collective {found.seq} of {found.view.group.title}"
    if found.decided:
        victims = rank_list(rank for rank in found.view.calls if rank not in found.others)
        called = f"{name_ranks(found.ranks)} called {_describe(call)} where the others called {_describe(found.common)}"
        order = ", which it also called, but in another order" if found.skipped else ""
        cause = f"{where}, {called}{order}"
    else:  # two opinions and no majority: the disagreement is certain, the culprit is not
        victims = ""
        calls = "; ".join(f"rank {rank} called {_describe(found.others[rank])}" for rank in found.ranks[:4])
        cause = f"{where} the ranks called different things: {calls}"
    evidence: Evidence = {
        **_about(found.view, found.common, found.seq),
        "differs_in": "order" if found.skipped else found.aspect,
        "called": _describe(call),
        "others_called": _describe(found.common),
        "victims": victims,
        **_stack("stack", call.frames),
        **_stack("others_stack", found.common.frames),
        **({} if found.decided else {"who_is_right": "unknown without a majority"}),
    }
    return verdict_of_files("mismatch", found.ranks, cause, evidence, advice)


def _hang_verdict(cause: HangCause, causes: Sequence[HangCause], views: list[GroupView], missing: list[int]) -> Verdict:
    culprits = {rank for each in causes for rank in each.ranks}
    victims = sorted({rank for rank, _ in _pending(views)} - culprits)
    seq = cause.call.seq
    behind = []
    for rank in sorted(cause.absent | cause.circle):
        last = cause.view.last.get(rank, -1)
        standing = f"at {last if last >= 0 else 'none'} of {seq}"
        behind.append(f"rank {rank} {'never posted its side' if cause.call.p2p else standing}")
    counts = sorted(cause.stopped.items())
    stopped = ", ".join(f"rank {rank} at {own}, peers at {peers}" for rank, (own, peers) in counts)
    evidence: Evidence = {
        **_about(cause.view, cause.call, seq),
        "arrived": rank_list(rank for rank in cause.view.dumps if cause.view.last[rank] >= seq),
        **({"behind": ", ".join(behind)} if behind else {}),
        **({"stopped": stopped} if cause.stopped else {}),
        "victims": rank_list(victims),
        **({"missing_dumps": rank_list(missing)} if missing else {}),
        **_stack("stack_of_the_waiting", cause.call.frames),
    }
    # Where a culprit itself was last, when its dump shows that.
    for rank in cause.ranks:
        calls = cause.view.dumps[rank].calls if rank in cause.view.dumps else []
        if calls and calls[-1].frames:
            evidence |= _stack("last_stack", calls[-1].frames)
            break
    if cause.stopped:
        advice = (
            "Look at these ranks' kernel log and GPU for that time (dmesg: Xid; nvidia-smi -q: ECC, page retirement), "
            "and take the node out if there is anything; otherwise at what stopped their process."
        )
    elif cause.circle:
        advice = "Call the collectives of these groups in the same order on every rank."
    else:
        advice = (
            "Look at what these ranks did instead: their stacks (py-spy dump), their log's last lines, a data loader, "
            "a checkpoint or a branch that only they took; a process that is gone has its reason in its log or in "
            "dmesg."
        )
    kind, why = "mismatch" if cause.circle else "hang", _why(cause, victims, several=len(causes) > 1)
    return verdict_of_files(kind, cause.ranks, why, evidence, advice)


def _why(cause: HangCause, victims: list[int], *, several: bool) -> str:
    where = cause.view.group.title
    parts = []
    if cause.circle:
        parts.append(f"{name_ranks(sorted(cause.circle))} wait for each other in different collectives: another order")
    if cause.absent:
        did = "posted the other side of" if cause.call.p2p else "entered"
        which = f"{_describe(cause.call)}, sequence number {cause.call.seq} of {where}"
        parts.append(f"{name_ranks(sorted(cause.absent))} never {did} {which}, which others wait in")
    for own, peers in sorted(set(cause.stopped.values())):
        ranks = sorted(rank for rank, counts in cause.stopped.items() if counts == (own, peers))
        it, its = ("the device", "its") if len(ranks) == 1 else ("the devices", "their")
        parts.append(
            f"{it} of {name_ranks(ranks)} completed nothing after sequence number {own} of {where}, "
            f"though {its} peers completed {peers}: {its} GPU or watchdog stopped"
        )
    if alone := sorted({rank for rank in cause.ranks if _receives_from_anyone(cause.view, rank)}):
        parts.append(f"{name_ranks(alone)} wait{'s' if len(alone) == 1 else ''} for a message from anyone")
    because = "of this and the other causes" if several else "of it" if len(cause.ranks) == 1 else "of them"
    waiting = f"; {counted(len(victims), 'rank')} only wait{'s' if len(victims) == 1 else ''} because {because}"
    return "; ".join(parts) + (waiting if victims else "")


def _receives_from_anyone(view: GroupView, rank: int) -> bool:
    dump = view.dumps.get(rank)
    return dump is not None and any(call.peer == ANYONE and not call.done for call in dump.calls)


def _about(view: GroupView, call: RecordedCall, seq: int) -> Evidence:
    group = view.group
    return {
        "group": group.name,
        "group_name": group.desc,
        "group_size": len(view.members),
        "group_ranks": rank_list(view.members),
        "collective": _operation(call),
        "collective_seq_id": seq,
        "input_sizes": call.shape[1],
        "output_sizes": call.shape[2],
        "dtype": call.shape[3],
        "size_bytes": call.nbytes,
        **({"timeout_seconds": call.timeout_s} if call.timeout_s else {}),
    }


def _operation(call: RecordedCall) -> str:
    return f"{call.backend}:{call.op}" if call.backend else call.op


def _describe(call: RecordedCall) -> str:
    sizes = call.shape[1].replace("], [", "] [").replace(", ", "×").strip("[]")
    where = f" {sizes}" if sizes else ""
    return f"{call.backend or 'c10d'}:{call.op}{where}{' ' + call.shape[3] if call.shape[3] else ''}"


def _stack(name: str, frames: Sequence[StackFrame]) -> Evidence:
    """The user's own frames, innermost first; PyTorch's only where there are no others."""
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARY_PARTS)] or list(frames)
    text = " < ".join(f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.line})" for frame in own[:4])
    return {name: text} if text else {}


def _pending(views: Iterable[GroupView]) -> Waiting:
    return [
        (rank, call)
        for view in views
        for rank, calls in chain(view.pending.items(), view.open_p2p.items())
        for call in calls
    ]


def _nobody_to_blame(
    dumps: Sequence[Dump], waiting: Waiting, missing: list[int]
) -> tuple[list[Verdict], list[Unjudged]]:
    """Calls have no end, and no rank with a dump is late for them."""
    rank, call = min(waiting, key=lambda item: item[1].created_s)
    which = f"{_describe(call)}, sequence number {call.seq} of group {call.group}"
    if len(missing) == 1 and len(dumps) > 1:
        cause = f"it left no dump, and all others wait in {which}"
        advice = "Look for this rank's process and its log: it died, or could not even write its dump."
        return [_missing_verdict(missing, cause, call, waiting, missing, advice)], []
    what = f"the culprit of {which}, in which rank {rank} waits"
    if missing:
        absent = f"the dumps of {name_ranks(missing)} are not here"
        why = f"{absent}, and no rank with a dump is late; give all dumps of the job"
        unjudged = [Unjudged(what=what, why=why)]
        # That it hangs is certain where calls were open for so long; who holds it up is not.
        written_s = {dump.rank: dump.written_s for dump in dumps}
        hung = [
            (each, open_call)
            for each, open_call in waiting
            if written_s[each] - open_call.created_s >= (open_call.timeout_s / 2 or LIVE_S) and open_call.created_s
        ]
        if not hung:
            return [], unjudged
        rank, call = min(hung, key=lambda item: (item[1].p2p, item[1].created_s))
        cause = (
            f"rank {rank} waits in {_describe(call)}, sequence number {call.seq} of group {call.group}, and no rank "
            "whose dump is here is late for it"
        )
        advice = (
            f"Give the dumps of {name_ranks(missing)} as well: the culprit is among them, or the network is "
            "at fault (look at the NCCL logs)."
        )
        return [_missing_verdict([], cause, call, hung, missing, advice)], _unjudged(dumps, missing)
    why = "every rank has entered it: it may just have been in flight, or the network may be at fault"
    why += " (look at the NCCL logs)"
    if call.peer == ANYONE:
        why = "it takes a message from anyone, so that nobody in particular is late: look at the ranks that should send"
    return [], [Unjudged(what=what, why=why)]


def _missing_verdict(
    ranks: list[int], cause: str, call: RecordedCall, waiting: Waiting, missing: list[int], advice: str
) -> Verdict:
    """The job hangs, and dumps that would show why are missing."""
    evidence: Evidence = {
        "collective_seq_id": call.seq,
        "group": call.group,
        "collective": _operation(call),
        "victims": rank_list({rank for rank, _ in waiting}),
        "missing_dumps": rank_list(missing),
        **_stack("stack_of_the_waiting", call.frames),
    }
    return verdict_of_files("hang", ranks, cause, evidence, advice)


def _unjudged(dumps: Sequence[Dump], missing: list[int]) -> list[Unjudged]:
    if not missing:
        return []
    shown = counted(len(dumps), "rank")
    what = f"what {name_ranks(missing)} did"
    return [Unjudged(what=what, why=f"dumps of {shown} were given, none of {name_ranks(missing)}")]
