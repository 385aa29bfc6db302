"""What if nobody had been slow: a recorded pipeline timeline, with its metadata beside it, replayed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from ringside.doctor.files.chrome_trace import Scan
from ringside.doctor.files.progress import Progress
from ringside.doctor.files.source import Source
from ringside.doctor.findings import Findings, Note, Unjudged, merge
from ringside.doctor.pipeline.graph import prepare_recording
from ringside.doctor.pipeline.timeline import (
    Meta,
    TimelineEvent,
    build_timeline,
    looks_like_meta,
    looks_like_timeline,
    parse_meta,
)
from ringside.doctor.replay import answer_what_if, as_dict, straggler_verdicts, what_if_table
from ringside.errors import UsageError

KIND = "pipeline timeline"
MOST_META_BYTES = 1 << 20


def matches(source: Source) -> bool:
    """Return whether a source is a pipeline timeline, or the metadata of one."""
    return looks_like_timeline(source.head) or looks_like_meta(source.head)


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Judge every timeline by what-if answers, each with the metadata that lies beside it."""
    metas: dict[str, Meta] = {}
    notes: list[Note] = []
    timelines = [source for source in sources if looks_like_timeline(source.head)]
    for source in sources:
        if source in timelines:
            continue
        try:
            meta = parse_meta(source.read(MOST_META_BYTES).decode("utf-8", "replace"))
        except UsageError as error:
            notes.append(Note(file=source.name, kind="timeline metadata", text=str(error), used=False))
            continue
        metas[source.name] = meta
        text = f"{meta.dp_size} replicas of {meta.pp_size} stages, {meta.vpp_size} chunks each"
        notes.append(Note(file=source.name, kind="timeline metadata", text=text))
    parts = [_read_timeline(source, _meta_beside(source, metas), progress) for source in timelines]
    if not timelines:
        why = "there is metadata of a timeline, but no timeline: give the Chrome trace as well"
        return Findings(notes=notes, unjudged=[Unjudged(what="what if", why=why)])
    return merge([*parts, Findings(notes=notes)])


def _meta_beside(source: Source, metas: dict[str, Meta]) -> Meta | None:
    """The metadata whose name is most like the timeline's (`meta-ST.yaml` for `timeline-ST.json.gz`) in its folder."""
    parts = _name_parts(source.name)
    near = [name for name in metas if PurePath(name).parent == PurePath(source.name).parent] or list(metas)
    named = [name for name in near if parts and parts == _name_parts(name)]
    tried = [name for name in near if metas[name].trial_name.lower() in parts]
    chosen = named or tried or (near if len(near) == 1 else [])
    return metas[chosen[0]] if chosen else None


def _name_parts(name: str) -> set[str]:
    """What distinguishes a file's name from those of other jobs: `st` of `timeline-ST.json.gz`."""
    parts = re.split(r"[-_. ]", PurePath(name.rpartition("!")[2]).name.lower())
    return set(parts) - {"timeline", "trace", "traces", "meta", "metadata", "json", "gz", "yaml", "yml", "chrome", ""}


def _read_timeline(source: Source, meta: Meta | None, progress: Progress) -> Findings:
    progress.begin(f"replaying {source.name}")
    with source.open() as stream:
        scan = Scan(stream, TimelineEvent)
        events = [event for batch in scan.batches() for event in batch]
    timeline = build_timeline(events, meta)
    try:
        recording, steps = prepare_recording(timeline)
        found = answer_what_if(recording)
    except UsageError as error:
        text = "; ".join([str(error), *source.problems])
        return Findings(notes=[Note(file=source.name, kind=KIND, text=text, used=False)])
    # What the replay leaves out: steps, workers, operations; and what it had to guess.
    unjudged = []
    if left_out := [step for step in timeline.steps if step not in set(steps)]:
        why = f"their operations are not those of the other steps ({len(left_out)} of {len(timeline.steps)})"
        unjudged.append(Unjudged(what=f"steps {', '.join(map(str, left_out[:8]))}", why=why, side=True))
    workers = timeline.meta.dp_size * timeline.meta.pp_size
    missing = workers - len({(stage, lane[0]) for stage, lane in timeline.ranks})
    if missing > 0:
        why = f"{missing} of {workers} workers are not in the timeline; the others are replayed without them"
        unjudged.append(Unjudged(what="missing workers", why=why))
    if timeline.dropped:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in timeline.dropped.most_common(5))
        why = f"they were left out of the replay: {kinds}"
        unjudged.append(Unjudged(what="operations of unknown types", why=why, side=True))
    if meta is None:
        why = f"no metadata next to {source.name}: sizes were taken from the names of its threads"
        unjudged.append(Unjudged(what="tensor-parallel ranks and interleaving", why=why, side=True))
    note = f"{len(steps)} steps of {found.workers} workers ({timeline.stages} stages) replayed"
    text = "; ".join(filter(None, [note, scan.losses(), *source.problems]))
    return Findings(
        what_if=as_dict(found, f"timeline {source.name}"),
        sheets=[what_if_table(found)],
        verdicts=straggler_verdicts(found, steps, replicas=len(timeline.lanes)),
        notes=[Note(file=source.name, kind=KIND, text=text)],
        unjudged=unjudged,
    )
