"""Reader of Ringside's own run directories, whole or cut off: the monitor's verdicts, priced on all records."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.decoding import nan_for_null
from ringside.doctor.files.source import BUFFER_BYTES, Progress, Source
from ringside.doctor.findings import Findings, Lane, Note, Sheet, TimeSpan, Unjudged, merge
from ringside.doctor.kineto.straggler import LEAST_STEPS
from ringside.doctor.replay import answer_what_if, as_dict, step_recording
from ringside.errors import RingsideError
from ringside.monitor.assessment import Assessment, describe_assessment
from ringside.monitor.groups import describe_place
from ringside.monitor.job.questions import read_answers
from ringside.monitor.nccl.report import FILE as NCCL_FILE
from ringside.monitor.run.directory import EVENTS, RUN, STEPS, SUMMARY, RunReader
from ringside.monitor.run.table import StepTable, fill_waits
from ringside.monitor.summary import assess_run
from ringside.monitor.verdict import Verdict
from ringside.text import counted

# -------------------------------------------------------------------------------------------------
# What if no rank of a Ringside run had been slow: its own recorded times, replayed.

WARM_UP_STEPS = 3
"""First steps that are left out of long runs: they build buckets, caches and autotuned kernels ..."""
LONG_STEPS = 10 * WARM_UP_STEPS
"""... in runs with so many steps."""
TIMES = ("own_seconds", "exposed_seconds", "step_seconds")
"""What a replay needs of every rank."""


def whole_steps(table: StepTable) -> tuple[StepTable, NDArray[np.bool_]]:
    """Return a run's records without the warm-up of long runs, and which of its steps all ranks recorded.

    Args:
        table: Step records, at least one.

    Returns:
        The table, and bool [steps].
    """
    table = table.between(int(table.steps[WARM_UP_STEPS])) if len(table) >= LONG_STEPS else table
    whole: NDArray[np.bool_] = np.logical_and.reduce([np.isfinite(table[name]).all(axis=1) for name in TIMES])
    return table, whole


def what_if(folder: str, table: StepTable) -> tuple[dict[str, Any] | None, list[Unjudged]]:
    """Return what a run would have lost nothing of, and what of it could not be replayed.

    Args:
        folder: What to call the run.
        table: Its step records.

    Returns:
        The content of `what_if` (None where there is too little to replay), and lines on what is missing.
    """
    if table.ranks < 2 or not len(table):
        return None, []
    table, whole = whole_steps(table)
    lines = []
    if not whole.all():
        why = f"{counted(int((~whole).sum()), 'step')} of {len(whole)} lack the record of some rank and are left out"
        lines.append(Unjudged(what=f"what if, for all steps of the run {folder}", why=why, side=True))
    if whole.sum() < LEAST_STEPS:
        why = f"only {counted(int(whole.sum()), 'step')} of all ranks are recorded, {LEAST_STEPS} are needed"
        return None, [Unjudged(what=f"what if, for the run {folder}", why=why, side=True)]
    own, exposed, step = (table[name][whole] for name in TIMES)
    found = answer_what_if(step_recording(own, exposed, step, range(table.ranks), stride=table.stride))
    return as_dict(found, f"{counted(len(own), 'step')} of the Ringside run {folder}"), lines


KIND = "Ringside run"
RANK_FIELDS = ("rank", "host", "own_seconds_median", "wait_seconds_median", "excess_ratio")
"""What a summary says of every rank, as it is shown."""
SHOWN_STEPS = 12
MOST_LANES = 64
_KINDS = {
    RUN: re.compile(rb'\A\s*\{\s*"schema"\s*:\s*\d+\s*,\s*"name"\s*:'),
    SUMMARY: re.compile(rb'\A\s*\{\s*"schema"\s*:\s*\d+\s*,\s*"world_size"\s*:'),
    STEPS: re.compile(rb'\A\{"step":\d+,"rank":\d+,'),
    EVENTS: re.compile(
        rb'\A\{(?=[^\n]{0,400}"unix":)'
        rb'(?=[^\n]{0,400}"kind":"(?:started|groups|verdict|repaired|revised|rank_lost|note|ended))'
    ),
    NCCL_FILE: re.compile(rb'\A\{"processes":\d+,"interface":\d+,'),
}
_OF_NCCL = re.compile(r"nccl[\w.-]{0,200}\.json")


def matches(source: Source) -> bool:
    """Return whether a source is one of the files of a run directory, from its content (or empty, from its name)."""
    if not source.head:
        return _base(source) in (STEPS, EVENTS)
    # The page that a run writes of itself.
    return _role(source) is not None or (source.name.endswith("report.html") and b"Ringside</title>" in source.head)


def _role(source: Source) -> str | None:
    if not source.head:
        return _base(source)
    role = next((role for role, pattern in _KINDS.items() if pattern.match(source.head)), None)
    # each host has one of NCCL's own records
    return _base(source) if role == NCCL_FILE and _OF_NCCL.fullmatch(_base(source)) else role


def _base(source: Source) -> str:
    return re.split(r"[/!]", source.name)[-1]


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Judge the runs, each folder a run of its own."""
    folders: dict[str, dict[str, Source]] = defaultdict(dict)
    notes = []
    for source in sources:
        role = _role(source)
        if role is None:
            notes.append(Note(file=source.name, kind=KIND, text="the run's page; what it rests on is read instead"))
        else:
            folders[source.name.rpartition("/")[0]][role] = source
    found = []
    for folder, files in folders.items():
        progress.begin(f"reading the run {folder}")
        found.append(_read_run(folder, files))
    return merge([*found, Findings(notes=notes)])


def _read_run(folder: str, files: dict[str, Source]) -> Findings:
    with tempfile.TemporaryDirectory(prefix="ringside-doctor-") as copy:
        try:
            if RUN not in files:
                raise RingsideError(f"has no {RUN} beside it: give the whole run directory")
            # A copy, so that nothing is written beside what is examined, and members of archives work alike.
            for role, source in files.items():
                with source.open() as stream, (Path(copy) / role).open("wb") as target:
                    shutil.copyfileobj(stream, target, BUFFER_BYTES)
            summary, table = assess_run(RunReader(copy))
            ended = any(event["kind"] == "ended" for event in RunReader(copy).poll_events())
        except RingsideError as error:
            why = str(error).replace(copy, folder)
            return Findings(notes=[Note(file=file.name, kind=KIND, text=why, used=False) for file in files.values()])
    verdicts = []
    for content in summary["verdicts"]:
        # what was not a number in JSON is left out or unknown here
        evidence = {key: value for key, value in (content.get("evidence") or {}).items() if value is not None}
        verdicts.append(msgspec.convert({**nan_for_null(content), "evidence": evidence}, Verdict))
    steps, ranks = summary["steps"], summary["world_size"]
    cut = "" if ended else "; it was cut off (its events have no end), what had been written is whole"
    text = f"{counted(steps, 'step')} of {counted(ranks, 'rank')}{cut}"
    few = [] if steps else [Unjudged(what=f"the straggler of the run {folder}", why="no step was recorded")]
    assessment = msgspec.convert(summary["assessment"], Assessment)
    if steps and assessment.state == "undecided":
        why = describe_assessment(assessment).rstrip(".")
        few = [Unjudged(what=f"whether a rank of the run {folder} is a straggler", why=why)]
    replayed, left_out = what_if(folder, table)
    culprits = {rank for verdict in verdicts for rank in verdict.ranks}
    rank_rows = summary["ranks"]
    places = [describe_place(rank.get("coordinates") or {}) for rank in rank_rows]
    has_places = any(places)
    return Findings(
        verdicts=verdicts,
        questions=read_answers(summary["questions"]),
        unjudged=[*few, *left_out],
        what_if=replayed,
        notes=[Note(file=file.name, kind=KIND, text=text) for file in files.values()],
        lanes=_lanes(folder, table, culprits) if steps else [],
        sheets=[
            Sheet(
                title=f"Ranks of the run {folder} (medians over the run)",
                columns=[*(name.removesuffix("_median") for name in RANK_FIELDS), *(["place"] if has_places else [])],
                rows=[
                    [*(rank[name] for name in RANK_FIELDS), *([place] if has_places else [])]
                    for rank, place in zip(rank_rows, places, strict=True)
                ],
                culprits=[index for index, rank in enumerate(rank_rows) if rank["rank"] in culprits],
            )
        ],
        facts={f"run {folder}": {"steps": steps, "step_seconds": summary["step_seconds"], "ended": ended}},
    )


def _lanes(folder: str, table: StepTable, culprits: set[int]) -> list[Lane]:
    """The last steps of every rank: own work, then the wait and the rest of the exposed synchronisation."""
    last = table.between(int(table.steps[max(len(table) - SHOWN_STEPS, 0)]))
    own, step, wait = last["own_seconds"], last["step_seconds"], fill_waits(last)
    # a step begins for all when the longest one before has ended
    starts = np.concatenate([[0.0], np.cumsum(np.nanmax(np.where(np.isfinite(step), step, 0.0), axis=1))])
    shown = sorted(range(table.ranks), key=lambda rank: (rank not in culprits, rank))[:MOST_LANES]
    lanes = []
    for rank in sorted(shown):
        spans = []
        for row in range(len(last)):
            if np.isfinite(own[row, rank]):
                begin = float(starts[row])
                arrival = begin + float(own[row, rank])
                waited = arrival + float(np.nan_to_num(wait[row, rank]))
                end = max(begin + float(np.nan_to_num(step[row, rank])), waited)
                name = f"step {int(last.steps[row])}"
                spans.append(TimeSpan(start_s=begin, end_s=arrival, kind="compute", name=f"{name}: own work"))
                spans.append(TimeSpan(start_s=arrival, end_s=waited, kind="wait", name=f"{name}: wait"))
                spans.append(TimeSpan(start_s=waited, end_s=end, kind="communication", name=f"{name}: synchronisation"))
        note = "culprit" if rank in culprits else ""
        title = f"The last {counted(len(last), 'step')} of the run {folder}"
        lanes.append(Lane(title=title, rank=rank, spans=[s for s in spans if s.end_s > s.start_s], note=note))
    return lanes
