"""What a run was, in one JSON object: the verdicts with their prices, and the figures they rest on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ringside.errors import RingsideError
from ringside.files import replace_file
from ringside.monitor.causes.explain import explain
from ringside.monitor.job.gradient_memory import gradient_memory
from ringside.monitor.job.questions import answer_questions, asked
from ringside.monitor.job.watcher import reprice
from ringside.monitor.links.sampler import LinkLedger, LinkTotals
from ringside.monitor.price import repair, spared_rank_seconds
from ringside.monitor.run.algorithm_changes import Revised, revisions
from ringside.monitor.run.directory import REPORT, SUMMARY, Event, RunReader, finite
from ringside.monitor.run.records import SCHEMA, RunInfo, StepRecord
from ringside.monitor.run.table import StepTable, fill_waits, tabulate
from ringside.monitor.slow_rank.detector import detect, rejudge
from ringside.monitor.slow_rank.pauses import is_of_pauses, without_pauses
from ringside.monitor.slow_rank.verdict import middle
from ringside.monitor.stats import Floats, row_medians
from ringside.monitor.verdict import Verdict

PASSED_THROUGH = ("injected", "comparison", "loss")
"""Parts of the summary that are given from outside (of these `loss` is computed where it is not given)."""

LOSS_STEPS = 5
JUDGED_KINDS = ("slow_rank", "uneven_work", "input_bound")
JOB_KINDS = ("communication_bound", "small_collectives", "input_bound")
LINKS_SHOWN = 64
MOST_STRIDE = 1 << 32
RECKONED_WITH = (
    "until_step",
    "usual_excess_ratio",
    "saved_seconds_per_step",
    "usual_exposed_seconds",
    "pause_bar_seconds",
    "own_seconds",
)
"""Evidence that prices are computed from: a verdict in which it is no number is no verdict of ours."""


def summarise(
    run_info: RunInfo,
    records: Iterable[StepRecord] | StepTable,
    verdicts: Sequence[Verdict],
    *,
    links: Sequence[LinkTotals] = (),
    revised: Sequence[Revised] = (),
    memory: Mapping[str, int] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of `summary.json`; it holds no NaN and no infinity (null instead).

    Args:
        run_info: What was known at the start.
        records: All step records, in any order, or a table of them.
        verdicts: What was found, with prices.
        links: What links between hosts carried, where wires were watched.
        revised: When gradients went another way between hosts, and why.
        memory: How many gradient buckets were shared and copied, and their bytes.
        extra: Parts to pass through (see `PASSED_THROUGH`); other keys are left out.
    """
    table = records if isinstance(records, StepTable) else tabulate(records, run_info.world_size)
    summary = {
        "schema": SCHEMA,
        "world_size": run_info.world_size,
        "steps": _steps(table),
        "step_seconds": {"median": middle(_job(table)), "p95": _quantile(_job(table), 0.95)},
        "ranks": _ranks(run_info, table),
        "verdicts": [msgspec.to_builtins(verdict) for verdict in verdicts],
        "sync": {**_sync(run_info, table), **({"memory": dict(memory)} if memory else {})},
        "overhead": _overhead(table),
        "questions": asked(answer_questions(run_info, table, verdicts, links)),
        **({"links": msgspec.to_builtins(list(links[:LINKS_SHOWN]))} if links else {}),
        **({"revisions": [{**msgspec.to_builtins(one), "words": one.words} for one in revised]} if revised else {}),
    }
    loss = _loss(table)
    given = {key: value for key, value in (extra or {}).items() if key in PASSED_THROUGH and value is not None}
    content: dict[str, Any] = finite({**summary, **({"loss": loss} if loss else {}), **given})
    return content


def finish(run_dir: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write `summary.json` and `report.html` from what a run directory holds, and return the summary.

    Works on a run that was cut off at any moment. Verdicts come from the recorded events and are judged and priced
    again on all records; where no event says that the collector saw the end, the detector also runs over the records.
    What an earlier summary passed through is kept unless `extra` gives it anew.

    Args:
        run_dir: The run directory.
        extra: Parts to pass through to the summary.

    Raises:
        UsageError: `run_dir` is no run.
        RingsideError: It cannot be read or written.
    """
    # The one arrow that points from the monitor to a view, and only while it runs: a run ends with its report.
    from ringside.view.html.run_report import render_report

    reader = RunReader(run_dir)
    summary, table = assess(reader, extra=extra)
    page = render_report(summary, reader.info, table)
    try:
        replace_file(Path(run_dir) / SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        replace_file(Path(run_dir) / REPORT, page.encode())
    except OSError as error:
        raise RingsideError(f"{run_dir} cannot be written: {error.strerror or error}") from error
    return summary


def assess(reader: RunReader, *, extra: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], StepTable]:
    """Return what `finish` writes as `summary.json`, and the records as a table; nothing is written.

    Args:
        reader: Of a run directory, from which nothing was read yet.
        extra: Parts to pass through to the summary.

    Raises:
        RingsideError: It cannot be read.
    """
    ledger = LinkLedger()
    events = reader.poll_events()
    table = tabulate(ledger.reading(reader.iterate()), reader.info.world_size, stride=_written_stride(events))
    verdicts = _verdicts(events, table)
    given = {**(reader.summary() or {}), **_loss_anew(table), **(extra or {})}
    revised = revisions(events)
    links, memory = ledger.totals(), gradient_memory(events)
    return summarise(reader.info, table, verdicts, links=links, revised=revised, memory=memory, extra=given), table


def _written_stride(events: Sequence[Event]) -> int:
    """Of how many steps the run directory holds one in the end: a full one holds all of the first, few of the last."""
    told = [event.get("stride") for event in events]
    return max((stride for stride in told if isinstance(stride, int) and 1 <= stride <= MOST_STRIDE), default=1)


def _loss_anew(table: StepTable) -> dict[str, Any]:
    loss = _loss(table)
    return {"loss": loss} if loss else {}


def _verdicts(events: Sequence[Event], table: StepTable) -> list[Verdict]:
    """The verdicts of the events, each in its last version, or the detector's where the run was cut before any."""
    recorded: dict[tuple[str, tuple[int, ...], int], Verdict] = {}
    for event in events:
        if event["kind"] in ("verdict", "repaired") and (verdict := _read_verdict(event.get("verdict"))) is not None:
            recorded[verdict.kind, tuple(verdict.ranks), verdict.detected_step] = verdict
    ended = any(event["kind"] == "ended" for event in events)
    verdicts = list(recorded.values())
    if not verdicts and not ended and len(table):
        verdicts = [_in_steps(verdict, table) for verdict in detect(table["own_seconds"], table["samples"])]
    return _with_cost_together([review(verdict, table) for verdict in verdicts], table)


def _with_cost_together(verdicts: list[Verdict], table: StepTable) -> list[Verdict]:
    if len({verdict.ranks[0] for verdict in verdicts if verdict.kind in JUDGED_KINDS and verdict.ranks}) < 2:
        return verdicts
    together = cost_together(verdicts, table)
    return [
        msgspec.structs.replace(verdict, evidence={**verdict.evidence, "cost_together_rank_seconds": together})
        if verdict.kind in JUDGED_KINDS and verdict.ranks
        else verdict
        for verdict in verdicts
    ]


def _read_verdict(content: object) -> Verdict | None:
    try:
        verdict = msgspec.convert(_with_numbers(content), Verdict)
    except (msgspec.ValidationError, ValueError):
        return None
    numbers = [verdict.evidence.get(name, 0) for name in RECKONED_WITH]
    return None if any(isinstance(number, str) or not math.isfinite(number) for number in numbers) else verdict


def _with_numbers(content: object) -> object:
    """JSON has no NaN: evidence that was none is left out, and any other null number of a verdict is NaN again."""
    if not isinstance(content, dict) or not isinstance(content.get("evidence", {}), dict):
        return content
    evidence = {name: value for name, value in content.get("evidence", {}).items() if value is not None}
    numbers = {name: math.nan for name in ("excess_ratio", "cost_rank_seconds") if content.get(name, 0) is None}
    return {**content, **numbers, "evidence": evidence}


def _in_steps(verdict: Verdict, table: StepTable) -> Verdict:
    """Turn row numbers of a table into training steps."""
    last = len(table) - 1
    evidence = dict(verdict.evidence)
    if "until_step" in evidence:
        evidence["until_step"] = int(table.steps[min(int(evidence["until_step"]), last)])
    since, detected = (int(table.steps[min(row, last)]) for row in (verdict.since_step, verdict.detected_step))
    return msgspec.structs.replace(verdict, since_step=since, detected_step=detected, evidence=evidence)


def review(verdict: Verdict, table: StepTable) -> Verdict:
    """Return a verdict on a rank's own time judged, explained and priced again on all records of its episode.

    One on the whole job or on a link is only priced again. Verdicts of other kinds, and on ranks without records,
    come back as they are.
    """
    if is_of_job(verdict) and len(table):
        return reprice(verdict, table.between(verdict.since_step, _until(verdict)))
    if verdict.kind not in JUDGED_KINDS or len(verdict.ranks) != 1 or not 0 <= verdict.ranks[0] < table.ranks:
        return verdict
    episode = table.between(verdict.since_step, _until(verdict))
    if not np.isfinite(episode["own_seconds"][:, verdict.ranks[0]]).any():
        return verdict
    again = rejudge(verdict, episode["own_seconds"], episode["samples"])
    again = msgspec.structs.replace(again, cost_rank_seconds=again.cost_rank_seconds * table.stride)
    return again if is_of_pauses(again) else explain(again, episode, table.before(verdict.since_step))


def is_of_job(verdict: Verdict) -> bool:
    """Tell whether a verdict is on the whole job, or on a link, and not on a rank."""
    return verdict.kind == "slow_link" or (verdict.kind in JOB_KINDS and not verdict.ranks)


def _until(verdict: Verdict) -> int | None:
    until = verdict.evidence.get("until_step")
    return None if until is None else int(until)


def cost_together(verdicts: Sequence[Verdict], table: StepTable) -> float:
    """Return what all slow ranks of a run cost together, in rank-seconds, over the steps since the first began.

    Each verdict's own price repairs that rank alone: of two equally slow ranks neither alone is worth much. A rank is
    repaired within its episodes only: over the whole run it may be no slower than the others.
    """
    own = table["own_seconds"]
    slow = [one for one in verdicts if one.kind in JUDGED_KINDS and one.ranks and 0 <= one.ranks[0] < table.ranks]
    rows = [table.rows(verdict.since_step, _until(verdict)) for verdict in slow]
    repaired = own.copy()
    for verdict, mine in zip(slow, rows, strict=True):
        rank = verdict.ranks[0]
        if is_of_pauses(verdict):
            repaired[mine, rank] = without_pauses(verdict, own[mine])[:, rank]
            continue
        meanwhile = {one.ranks[0] for one, its in zip(slow, rows, strict=True) if _overlap(its, mine)}
        others = [one for one in range(table.ranks) if one not in meanwhile]
        usual = float(np.log1p(float(verdict.evidence.get("usual_excess_ratio", 0.0))))
        repaired[mine, rank] = repair(own[mine][:, [rank, *others]], [0], [usual])[:, 0]
    return spared_rank_seconds(own, repaired) * table.stride


def _overlap(one: slice, other: slice) -> bool:
    return bool(max(one.start, other.start) < min(one.stop, other.stop))


def _steps(table: StepTable) -> int:
    return 0 if not len(table) else int((table.steps[-1] - table.steps[0]) // table.stride + 1) * table.stride


def _job(table: StepTable) -> Floats:
    """Duration of each step of the job: the median over ranks (in synchronous training they agree)."""
    return row_medians(table["step_seconds"])


def _ranks(run_info: RunInfo, table: StepTable) -> list[dict[str, Any]]:
    own = [_middle_or_nan(table["own_seconds"][:, rank]) for rank in range(table.ranks)]
    excess = _excess(np.array(own)).tolist()
    waits = fill_waits(table)
    return [
        {
            "rank": rank,
            "host": run_info.hosts[rank] if rank < len(run_info.hosts) else "",
            "own_seconds_median": own[rank],
            "wait_seconds_median": _middle_or_nan(waits[:, rank]),
            "excess_ratio": excess[rank],
        }
        for rank in range(table.ranks)
    ]


def _excess(own: Floats) -> Floats:
    """How much longer each rank takes than the median of the others that are known; NaN where that cannot be said."""
    known = np.sort(own[np.isfinite(own)])
    others = len(known) - 1
    if others < 1:
        return np.full(len(own), math.nan)
    place = np.searchsorted(known, own)  # of the rank itself, which is left out
    low, high = ((known[np.minimum(at + (at >= place), others)]) for at in ((others - 1) // 2, others // 2))
    middles = (low + high) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        excess: Floats = np.where(np.isfinite(own) & (middles > 0), own / middles - 1.0, math.nan)
    return excess


def _sync(run_info: RunInfo, table: StepTable) -> dict[str, Any]:
    return {
        "engine": run_info.engine,
        "algorithm": run_info.algorithm,
        "payload_bytes_per_step": round(middle(table["payload_bytes"])),
        "exposed_seconds_per_step": middle(table["exposed_seconds"]),
        "total_seconds_per_step": middle(table["sync_seconds"]),
    }


def _overhead(table: StepTable) -> dict[str, float]:
    # The mean: comparing parameters takes its time in one step of a hundred.
    known = table["overhead_seconds"][np.isfinite(table["overhead_seconds"])]
    seconds, step = float(known.mean()) if known.size else 0.0, middle(table["step_seconds"])
    return {"seconds_per_step": seconds, "ratio": seconds / step if step > 0 else 0.0}


def _loss(table: StepTable) -> dict[str, float] | None:
    """Mean loss of the first and the last few steps; None where the script gave none."""
    losses = table["loss"]
    known = np.flatnonzero(np.isfinite(losses).any(axis=1))
    if not known.size:
        return None
    few = min(LOSS_STEPS, max(len(known) // 2, 1))
    return {"first": float(np.nanmean(losses[known[:few]])), "last": float(np.nanmean(losses[known[-few:]]))}


def _middle_or_nan(values: Floats) -> float:
    return middle(values) if np.isfinite(values).any() else math.nan


def _quantile(values: Floats, q: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, q)) if known.size else 0.0
