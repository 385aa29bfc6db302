"""Reader of what Google's CoMMA writes (`NCCL_PROFILER_LATENCY_FILE`): a JSON list of collectives.

Its `ts` and `dur` are the enqueueing's; how long a collective ran is `child_dur`. It does not say when one began on its
device, so the shortest tells who came last. Its proxy operations mix all that a message waits for, and are not used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from ringside.doctor.calls.judge import judge_files
from ringside.doctor.calls.record import UNKNOWN, Calls, Count, Rank
from ringside.doctor.files.chrome_trace import Scan
from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note
from ringside.text import counted

KIND = "CoMMA trace"
_FIRST_EVENT = re.compile(rb"\A\s*\[\s*\{")
_COLLECTIVE = re.compile(rb'"cat"\s*:\s*"(?:COLL|PROXY)"')


class _Event(msgspec.Struct, gc=False):
    cat: str = ""
    name: str = ""
    comm_hash: str = ""
    rank: Rank | None = None
    seq_num: Count | None = None
    ts: Count = 0
    child_dur: Count | None = None


def matches(source: Source) -> bool:
    """Return whether a source is a list of CoMMA's events."""
    return bool(_FIRST_EVENT.match(source.head) and _COLLECTIVE.search(source.head)) and b'"comm_hash"' in source.head


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Judge the traces of one job together."""
    return judge_files(KIND, sources, progress, _read_trace)


def _read_trace(source: Source, calls: Calls) -> Note:
    collectives = enqueued = 0
    with source.open() as stream:
        scan = Scan(stream, _Event)
        for batch in scan.batches():
            for event in batch:
                if event.cat != "COLL" or event.rank is None or event.seq_num is None or not event.comm_hash:
                    continue
                collectives += 1
                calls.join(event.comm_hash, event.rank, 0, (source.name, source.name))
                calls.wrote(event.ts / 1e6)
                if event.child_dur is None:
                    enqueued += 1
                    continue
                stream_of = calls.stream(event.comm_hash, event.name, event.rank)
                stream_of.add(event.seq_num, UNKNOWN, event.child_dur / 1e6)
    text = counted(collectives, "collective")
    text += f", of {enqueued:,} only the enqueueing" if enqueued else ""
    losses = scan.losses() if collectives else ""
    return Note(file=source.name, kind=KIND, text="; ".join(filter(None, (text, losses))), used=bool(collectives))
