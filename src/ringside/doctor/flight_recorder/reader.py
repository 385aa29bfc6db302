"""Reader of flight-recorder dumps (`TORCH_FR_BUFFER_SIZE`, `torch._C._distributed_c10d._dump_*_trace`)."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath

from ringside.doctor.files.progress import Progress
from ringside.doctor.files.source import Source
from ringside.doctor.findings import Findings, Note, merge
from ringside.doctor.flight_recorder.dump import read_dump
from ringside.doctor.flight_recorder.groups import KIND, group_views, sort_into_jobs
from ringside.doctor.flight_recorder.load import NotADumpError, is_pickle, load_dump
from ringside.doctor.flight_recorder.tables import dump_lanes, dump_tables
from ringside.doctor.flight_recorder.verdicts import judge_dumps
from ringside.text import counted

MOST_BYTES = 512 << 20
_MARKS = (b'"collective_seq_id"', b'"pg_config"', b'"pg_status"')
_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|pt|bin|dump|gz|txt))*$")

__all__ = ["KIND", "matches", "read"]


def matches(source: Source) -> bool:
    """Return whether a source is a pickle of any kind, or a dump in JSON."""
    head = source.head
    return is_pickle(head) or (head[:1] == b"{" and any(mark in head for mark in _MARKS))


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Judge the dumps of one job together, or of several in folders of their own."""
    dumps, refused = [], []
    with _no_collection():
        for number, source in enumerate(sources):
            progress.begin(f"reading dump {number + 1} of {len(sources)}")
            try:
                # The rank that the dump names, or else its file: PyTorch's own names end with it.
                content = load_dump(source.read(MOST_BYTES))
                match = _RANK.search(PurePosixPath(source.name).name)
                recorded = content.get("rank") if isinstance(content, dict) else None
                if not isinstance(recorded, int) and match is None:
                    raise NotADumpError(
                        "does not say whose dump it is: name it after its rank, such as nccl_trace_rank_3"
                    )
                rank = recorded if isinstance(recorded, int) else int(match.group(1)[-9:] if match else -1)
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
            waiting = sum(not call.done for call in dump.calls)
            text = f"rank {dump.rank}: {counted(len(dump.calls), 'call')}, {waiting} of them without an end"
            damaged = f"; {counted(dump.skipped, 'damaged entry', 'damaged entries')} left out" if dump.skipped else ""
            text = "; ".join(filter(None, [text + damaged, dump.lost]))
            notes.append(Note(file=dump.file, kind=KIND, text=text))
        found.append(
            Findings(
                verdicts=verdicts,
                unjudged=unjudged,
                notes=notes,
                lanes=dump_lanes(job, culprits, which),
                sheets=dump_tables(job, views, verdicts, which),
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


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: hundreds of thousands of new values hold no circles."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
