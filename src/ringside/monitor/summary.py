"""What a run was, in one JSON object: the verdicts with their prices, and the figures they rest on."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ringside.errors import RingsideError
from ringside.files import replace_file
from ringside.monitor.assessment import assess_stragglers
from ringside.monitor.causes import explain_verdict
from ringside.monitor.groups import Blocked, JobGroups, Mesh, mean_waits, read_groups, sum_blocked
from ringside.monitor.job.questions import answer_questions, to_plain
from ringside.monitor.job.watcher import reprice
from ringside.monitor.links.sampler import LinkLedger, LinkTotals
from ringside.monitor.nccl.attribution import attribute
from ringside.monitor.nccl.report import read_reports
from ringside.monitor.pipeline import BubbleLedger, Bubbles, reprice_stage
from ringside.monitor.price import MONEY, PER_RANK_HOUR, known_rate, money, repair_ranks, spared_rank_seconds
from ringside.monitor.run.directory import REPORT, SUMMARY, Event, RunReader, finite
from ringside.monitor.run.records import SCHEMA, Revised, Row, RunInfo, StepRecord, gradient_memory, revisions
from ringside.monitor.run.table import StepTable, fill_waits, job_exposed_seconds, job_step_seconds, tabulate
from ringside.monitor.slow_rank.detector import Detector, detect, rejudge
from ringside.monitor.slow_rank.pauses import is_of_pauses, without_pauses
from ringside.monitor.slow_rank.watcher import PeersWatcher, among_peers
from ringside.monitor.slow_rank.window_test import KEPT as REMEMBERED
from ringside.monitor.stats import excess_ratios, known_median, rank_medians
from ringside.monitor.undecided import NOTHING, Undecided, undecided_of_job
from ringside.monitor.verdict import OWN_TIME_KINDS, Verdict

Render = Callable[[dict[str, Any], RunInfo, StepTable], str]
"""Makes a run's page of its summary, what was known at its start, and its records."""

PASSED_THROUGH = ("injected", "comparison", "loss", "call_logs")
"""Parts of the summary that are given from outside (of these `loss` is computed where it is not given)."""

LOSS_STEPS = 5
JOB_KINDS = ("communication_bound", "small_collectives", "input_bound")
MOST_STRIDE = 1 << 32
SAMPLED = 1 << 16
"""Records of which it is kept what their ranks did in which group: 45 MB while a run is judged."""
MOST_WAITS = 32
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
    mesh: Mesh | None = None,
    bubbles: Bubbles | None = None,
    blocked: Sequence[Blocked] = (),
    undecided: Undecided | None = None,
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
        mesh: How its ranks are arranged; None: all do the same work.
        bubbles: How long the ranks of its pipeline wait for each other; None: it has none.
        blocked: How long they were blocked along each dimension of it.
        undecided: What the detector had not decided in the end; None: it looks at the newest records again.
        extra: Parts to pass through (see `PASSED_THROUGH`); other keys are left out.
    """
    table = records if isinstance(records, StepTable) else tabulate(records, run_info.world_size)
    mesh = mesh or Mesh(run_info.world_size)
    if undecided is None:
        undecided = NOTHING
        with contextlib.suppress(Exception):  # a detector that fails was told of by whoever watched with it
            undecided = _undecided(table, mesh)
    steps = int((table.steps[-1] - table.steps[0]) // table.stride + 1) * table.stride if len(table) else 0
    seconds = job_step_seconds(table)
    known = seconds[np.isfinite(seconds)]
    # The mean, not the median: comparing parameters takes its time in one step of a hundred.
    overhead = table["overhead_seconds"][np.isfinite(table["overhead_seconds"])]
    overhead_s, step_s = float(overhead.mean()) if overhead.size else 0.0, known_median(seconds)
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "world_size": run_info.world_size,
        "steps": steps,
        "step_seconds": {"median": step_s, "p95": float(np.quantile(known, 0.95)) if known.size else 0.0},
        "ranks": _ranks(run_info, table, mesh),
        "verdicts": [msgspec.to_builtins(verdict) for verdict in verdicts],
        "sync": {
            "engine": run_info.engine,
            "algorithm": run_info.algorithm,
            "payload_bytes_per_step": round(known_median(table["payload_bytes"])),
            "exposed_seconds_per_step": known_median(job_exposed_seconds(table)),
            "total_seconds_per_step": known_median(table["sync_seconds"], math.nan if len(table) else 0.0),
            **({"memory": dict(memory)} if memory else {}),
        },
        "overhead": {"seconds_per_step": overhead_s, "ratio": overhead_s / step_s if step_s > 0 else 0.0},
        "questions": to_plain(answer_questions(run_info, table, verdicts, links)),
        "assessment": msgspec.to_builtins(assess_stragglers(table, verdicts, undecided, mesh.peers)),
        "undecided": {**msgspec.to_builtins(undecided, str_keys=True), "words": undecided.describe()},
    }
    if blocked:
        summary["blocked"] = msgspec.to_builtins(list(blocked), builtin_types=(float,))
    if links:
        summary["links"] = msgspec.to_builtins(list(links))
    if revised:
        summary["revisions"] = [{**msgspec.to_builtins(change), "words": change.describe()} for change in revised]
    if bubbles is not None:
        summary["pipeline"] = msgspec.to_builtins(bubbles)
    rate = known_rate(extra)
    if rate is not None:
        summary[PER_RANK_HOUR] = rate
        for verdict in summary["verdicts"]:
            verdict[MONEY] = money(verdict["cost_rank_seconds"], rate)
    given = {key: value for key, value in (extra or {}).items() if key in PASSED_THROUGH and value is not None}
    content: dict[str, Any] = finite({**summary, **_loss(table), **given})
    return content


def finish_run(
    run_dir: str | os.PathLike[str], render: Render, *, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write `summary.json` and `report.html` from what a run directory holds, and return the summary.

    Works on a run that was cut off at any moment. Verdicts come from the recorded events and are judged and priced
    again on all records; where no event says that the collector saw the end, the detector also runs over the records.
    What an earlier summary passed through is kept unless `extra` gives it anew.

    Args:
        run_dir: The run directory.
        render: Makes the page.
        extra: Parts to pass through to the summary.

    Raises:
        UsageError: `run_dir` is no run.
        RingsideError: It cannot be read or written.
    """
    reader = RunReader(run_dir)
    summary, table = assess_run(reader, extra=extra)
    page = render(summary, reader.info, table)
    try:
        replace_file(Path(run_dir) / SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        replace_file(Path(run_dir) / REPORT, page.encode())
    except OSError as error:
        raise RingsideError(f"{run_dir} cannot be written: {error.strerror or error}") from error
    return summary


def assess_run(reader: RunReader, *, extra: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], StepTable]:
    """Return what `finish_run` writes as `summary.json`, and the records as a table; nothing is written.

    Args:
        reader: Of a run directory, from which nothing was read yet.
        extra: Parts to pass through to the summary.

    Raises:
        RingsideError: It cannot be read.
    """
    ledger = LinkLedger()
    events = reader.poll_events()
    # A directory that became full holds every step of the beginning and one of `stride` at the end: the table keeps
    # the coarsest of these.
    strides = [event.get("stride") for event in events]
    stride = max((one for one in strides if isinstance(one, int) and 1 <= one <= MOST_STRIDE), default=1)
    mesh = Mesh(reader.info.world_size, read_groups(events))
    sample, bubbles = GroupSample(reader.info.world_size, stride), BubbleLedger(mesh)
    records = bubbles.reading(sample.reading(ledger.reading(reader.iterate())))
    table = tabulate(records, reader.info.world_size, stride=stride)
    verdicts = _verdicts(events, table, mesh, reader.path)
    ends = (int(table.steps[0]), int(table.steps[-1])) if len(table) else (-1, -1)
    verdicts = attribute(verdicts, read_reports(reader.path), table.ranks, ends)
    given = {**(reader.summary() or {}), **_loss(table), **(extra or {})}
    revised = revisions(events)
    links, memory = ledger.totals(), gradient_memory(events)
    blocked = sum_blocked(sample.rows.values(), mesh, known_median(job_step_seconds(table)))
    summary = summarise(
        reader.info,
        table,
        verdicts,
        links=links,
        revised=revised,
        memory=memory,
        mesh=mesh,
        bubbles=bubbles.total(),
        blocked=blocked,
        undecided=reader.undecided(),
        extra=given,
    )
    if blocked:
        summary["waits"] = _waits(verdicts, sample.rows, mesh)
    return summary, table


class GroupSample:
    """Keeps records that say what their ranks did in which group: of a long run every second step, again and again.

    Args:
        ranks: Of the job.
        stride: Of the steps that the run has kept.

    Attributes:
        rows: The records, by step.
    """

    def __init__(self, ranks: int, stride: int) -> None:
        self.rows: dict[int, Row] = {}
        self._ranks, self._stride, self._most = ranks, stride, max(SAMPLED // max(ranks, 1), 16)

    def reading(self, records: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """Yield records as they come, and keep some."""
        for record in records:
            if record.groups and 0 <= record.rank < self._ranks and record.step % self._stride == 0:
                self.rows.setdefault(record.step, {}).setdefault(record.rank, record)
                if len(self.rows) > self._most:
                    self._stride *= 2
                    self.rows = {step: row for step, row in self.rows.items() if step % self._stride == 0}
            yield record


def _waits(verdicts: Sequence[Verdict], rows: Mapping[int, Row], mesh: Mesh) -> dict[str, Any]:
    """Who waited longest for whom, group by group: in the steps of the first verdict, or in the whole run."""
    since, until = (verdicts[0].since_step, _until(verdicts[0])) if verdicts else (0, None)
    steps = [step for step in sorted(rows) if since <= step and (until is None or step < until)] or sorted(rows)
    waits = mean_waits([rows[step] for step in steps], mesh, MOST_WAITS)
    longest = [{"rank": rank, "awaited": last, "seconds_per_step": seconds} for rank, last, seconds in waits]
    return {"first_step": steps[0], "last_step": steps[-1], "longest": longest}


def _verdicts(events: Sequence[Event], table: StepTable, mesh: Mesh, run_dir: Path) -> list[Verdict]:
    """Return the events' verdicts, each in its last version, or the detector's where the run was cut before any."""
    recorded: dict[tuple[str, tuple[int, ...], int], Verdict] = {}
    for event in events:
        if event["kind"] in ("verdict", "repaired") and (verdict := _read_verdict(event.get("verdict"))) is not None:
            recorded[verdict.kind, tuple(verdict.ranks), verdict.detected_step] = verdict
    ended = any(event["kind"] == "ended" for event in events)
    verdicts = list(recorded.values())
    if not verdicts and not ended and len(table):
        if mesh.groups:
            verdicts = _watch_again(RunReader(run_dir).iterate(), mesh, table.stride)
        else:
            verdicts = [_in_steps(verdict, table) for verdict in detect(table["own_seconds"], table["samples"])]
    elif any(map(_is_open_change, verdicts)):
        # What a rank costs that is beside its own past follows from all records since the first.
        again = _watch_again(RunReader(run_dir).iterate(), mesh, table.stride)
        prices = {tuple(verdict.ranks): verdict.cost_rank_seconds for verdict in again if _is_open_change(verdict)}
        verdicts = [
            msgspec.structs.replace(verdict, cost_rank_seconds=prices[tuple(verdict.ranks)])
            if _is_open_change(verdict) and tuple(verdict.ranks) in prices
            else verdict
            for verdict in verdicts
        ]
    verdicts = [_review_verdict(verdict, table, mesh) for verdict in verdicts]
    # Two slow ranks hide each other's price: both get what they cost together as well.
    slow = [v for v in verdicts if v.kind in OWN_TIME_KINDS and v.ranks and 0 <= v.ranks[0] < table.ranks]
    if len({verdict.ranks[0] for verdict in slow}) < 2:
        return verdicts
    together = {"cost_together_rank_seconds": _cost_together(slow, table)}
    return [
        msgspec.structs.replace(verdict, evidence={**verdict.evidence, **together}) if verdict in slow else verdict
        for verdict in verdicts
    ]


def _undecided(table: StepTable, mesh: Mesh) -> Undecided:
    """Return what the detector has not decided after the newest records, as many as it remembers."""
    table, states = table.between(int(table.steps[-REMEMBERED:][0])) if len(table) else table, []
    for ranks in mesh.peers:
        among, detector = table.of_ranks(ranks), Detector(len(ranks), has_parts=True)
        forward = np.nansum([among["forward_seconds"], among["compute_seconds"]], axis=0)
        parts = [among["data_seconds"], forward, among["backward_seconds"], among["optimizer_seconds"]]
        rows = zip(table.steps, among["own_seconds"], among["samples"], among["run_delay_seconds"], strict=True)
        for row, (step, own, samples, run_delay) in enumerate(rows):
            part = np.array([phase[row] for phase in parts])
            detector.update(own, samples, step=int(step), parts=part, run_delay=run_delay)
        states.append((ranks, detector.undecided()))
    return undecided_of_job(states)


def _watch_again(records: Iterable[StepRecord], mesh: Mesh, stride: int) -> list[Verdict]:
    """Return what is found where records are judged as while they came, beside peers, with whom each rank held up."""
    groups = JobGroups(mesh.ranks)
    groups.learn(mesh.groups.values())
    watcher = PeersWatcher(groups)
    ended = []
    for step, row in _rows(records, mesh.ranks, stride):
        ended += [event.verdict for event in watcher.update(step, row) if event.ended]
    return [
        msgspec.structs.replace(verdict, cost_rank_seconds=verdict.cost_rank_seconds * stride)
        for verdict in [*ended, *watcher.open]
    ]


def _rows(records: Iterable[StepRecord], ranks: int, stride: int) -> Iterator[tuple[int, Row]]:
    """Yield steps, ascending, each with its records, which are written together; late ones count for nothing."""
    newest = -1
    for step, written in groupby(records, key=lambda record: record.step):
        row = {record.rank: record for record in written if 0 <= record.rank < ranks}
        if step > newest and step % stride == 0 and row:
            newest = step
            yield step, row


def _read_verdict(content: object) -> Verdict | None:
    """Return the verdict of an event; None where it is damaged.

    JSON has no NaN: evidence that was none is left out, and any other null number of a verdict is NaN again.
    """
    if isinstance(content, dict) and isinstance(content.get("evidence", {}), dict):
        evidence = {name: value for name, value in content.get("evidence", {}).items() if value is not None}
        numbers = {name: math.nan for name in ("excess_ratio", "cost_rank_seconds") if content.get(name, 0) is None}
        content = {**content, **numbers, "evidence": evidence}
    try:
        verdict = msgspec.convert(content, Verdict)
    except (msgspec.ValidationError, ValueError):
        return None
    used = [verdict.evidence.get(name, 0) for name in RECKONED_WITH]
    return None if any(isinstance(number, str) or not math.isfinite(number) for number in used) else verdict


def _in_steps(verdict: Verdict, table: StepTable) -> Verdict:
    """Turn row numbers of a table into training steps."""
    last = len(table) - 1
    evidence = dict(verdict.evidence)
    if "until_step" in evidence:
        evidence["until_step"] = int(table.steps[min(int(evidence["until_step"]), last)])
    since, detected = (int(table.steps[min(row, last)]) for row in (verdict.since_step, verdict.detected_step))
    return msgspec.structs.replace(verdict, since_step=since, detected_step=detected, evidence=evidence)


def _review_verdict(verdict: Verdict, table: StepTable, mesh: Mesh) -> Verdict:
    """Return a verdict on a rank's own time judged, explained and priced again on all records of its episode.

    One on the whole job, a stage or a link is only priced again. Verdicts of other kinds, and on ranks without records,
    come back as they are.
    """
    if verdict.kind == "stage_imbalance":
        return reprice_stage(verdict, table.between(verdict.since_step, _until(verdict)), mesh)
    is_of_job = verdict.kind == "slow_link" or (verdict.kind in JOB_KINDS and not verdict.ranks)
    if is_of_job and len(table):
        return reprice(verdict, table.between(verdict.since_step, _until(verdict)))
    if verdict.kind not in OWN_TIME_KINDS or len(verdict.ranks) != 1 or not 0 <= verdict.ranks[0] < table.ranks:
        return verdict
    return among_peers(verdict, table, mesh, _review_beside)


def _review_beside(verdict: Verdict, table: StepTable) -> Verdict:
    episode = table.between(verdict.since_step, _until(verdict))
    if not np.isfinite(episode["own_seconds"][:, verdict.ranks[0]]).any():
        return verdict
    again = rejudge(verdict, episode["own_seconds"], episode["samples"], episode["routed_bytes"])
    again = msgspec.structs.replace(again, cost_rank_seconds=again.cost_rank_seconds * table.stride)
    return explain_verdict(again, episode, table.before(verdict.since_step))


def _is_open_change(verdict: Verdict) -> bool:
    return verdict.kind == "changed" and _until(verdict) is None


def _until(verdict: Verdict) -> int | None:
    until = verdict.evidence.get("until_step")
    return None if until is None else int(until)


def _cost_together(slow: Sequence[Verdict], table: StepTable) -> float:
    """Return what the slow ranks of a run cost together, in rank-seconds, over the steps since the first began.

    Each verdict's own price repairs that rank alone: of two equally slow ranks neither alone is worth much. A rank is
    repaired within its episodes only: over the whole run it may be no slower than the others.
    """
    own = table["own_seconds"]
    episodes = [table.rows(verdict.since_step, _until(verdict)) for verdict in slow]
    repaired = own.copy()
    for verdict, rows in zip(slow, episodes, strict=True):
        rank = verdict.ranks[0]
        if is_of_pauses(verdict):
            repaired[rows, rank] = without_pauses(verdict, own[rows])[:, rank]
            continue
        # Its measure are the ranks that are not slow at the same time.
        slow_too = {
            other.ranks[0]
            for other, its in zip(slow, episodes, strict=True)
            if max(its.start, rows.start) < min(its.stop, rows.stop)
        }
        others = [other for other in range(table.ranks) if other not in slow_too]
        usual = float(np.log1p(float(verdict.evidence.get("usual_excess_ratio", 0.0))))
        repaired[rows, rank] = repair_ranks(own[rows][:, [rank, *others]], [0], [usual])[:, 0]
    return spared_rank_seconds(own, repaired) * table.stride


def _ranks(run_info: RunInfo, table: StepTable, mesh: Mesh) -> list[dict[str, Any]]:
    own, waits = (rank_medians(values, math.nan) for values in (table["own_seconds"], fill_waits(table)))
    excess = excess_ratios(own, mesh.peers)
    return [
        {
            "rank": rank,
            "host": run_info.hosts[rank] if rank < len(run_info.hosts) else "",
            "own_seconds_median": float(own[rank]),
            "wait_seconds_median": float(waits[rank]),
            "excess_ratio": float(excess[rank]),
            **({"coordinates": mesh.coordinates[rank]} if mesh.coordinates[rank] else {}),
        }
        for rank in range(table.ranks)
    ]


def _loss(table: StepTable) -> dict[str, dict[str, float]]:
    """Return `loss`: its mean in the first and in the last few steps; nothing where the script gave none."""
    losses = table["loss"]
    known = np.flatnonzero(np.isfinite(losses).any(axis=1))
    if not known.size:
        return {}
    few = min(LOSS_STEPS, max(len(known) // 2, 1))
    first, last = (float(np.nanmean(losses[steps])) for steps in (known[:few], known[-few:]))
    return {"loss": {"first": first, "last": last}}
