"""What if nobody had been slow: a recorded pipeline timeline, with its metadata beside it, replayed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath

import numpy as np

from ringside.doctor.files.chrome_trace import Scan
from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note, Unjudged, merge
from ringside.doctor.pipeline.timeline import (
    COMPUTE,
    P2P,
    Cell,
    Key,
    Meta,
    PipelineTimeline,
    TimelineEvent,
    build_timeline,
    looks_like_meta,
    looks_like_timeline,
    parse_meta,
)
from ringside.doctor.replay import (
    DependencyGraph,
    Floats,
    Recording,
    answer_what_if,
    as_dict,
    straggler_verdicts,
    what_if_table,
)
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


# -------------------------------------------------------------------------------------------------
# From a pipeline timeline to what waits for what: compute order, sends and receives, data-parallel collectives.
#
# The rules are those of Megatron-style training (interleaved) 1F1B, as section 3.2 of arXiv 2505.05713 gives them: on
# each worker one stream of compute, one per kind of send and receive, one of data-parallel collectives.

CLOCK_S = 5e-5
"""How far two clocks of one worker's events may disagree, seconds."""
ACROSS = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce", "optimizer-clip-main-grad")
"""Collectives that wait for all data-parallel replicas."""
PEERS = {
    "forward-send": ("forward-recv", 1),
    "forward-recv": ("forward-send", -1),
    "backward-send": ("backward-recv", -1),
    "backward-recv": ("backward-send", 1),
}
"""The other end of a send or receive: its type and how many stages further on it is."""


class _Builder:
    """Collects what each operation waits for (`after`), and which operations end together (`groups`, `pairs`).

    Args:
        cell: What one lane did in one step, all of its stages.
        chunks: Model chunks per stage.
        replicas: Ranks that reduce gradients together; with one, nothing is reduced.
    """

    def __init__(self, cell: Cell, chunks: int, replicas: int) -> None:
        self.cell, self.chunks, self.replicas = cell, chunks, replicas
        self.stages = 1 + max(key.stage for key in cell)
        self.after: dict[Key, list[Key]] = {key: [] for key in cell}
        self.pairs: dict[tuple[str, int, int], list[Key]] = {}
        self.groups: list[list[Key]] = []

    def build(self) -> tuple[DependencyGraph, list[Key]]:
        """Return the graph of one lane's step, and the key of each of its operations."""
        for stage in range(self.stages):
            # One stream of compute, in the order in which it started.
            compute = [key for key in self.cell if key.stage == stage and key.kind in COMPUTE]
            compute.sort(key=lambda key: (self.cell[key].start_s, key.seq, key.kind))
            self._chain(compute)
            for kind in P2P:
                self._transfers(stage, kind)
            # The first backward transfers are posted after the forward before the last one of the warm-up.
            first = next((place for place, key in enumerate(compute) if key.kind == "backward-compute"), 0)
            for kind in ("backward-recv", "backward-send"):
                key = Key(stage, kind, 0)
                if first >= 2 and key in self.cell:
                    self.after[key].append(compute[first - 2])
            self._reductions(stage, compute)
            # What follows the last compute: collection of garbage, the reductions, clipping, the optimizer.
            scatters = self._numbered(stage, "grads-reduce-scatter")
            last = [max(compute, key=lambda key: self.cell[key].end_s)] if compute else []
            pause = self._numbered(stage, "gc")
            self._chain(pause, last)
            last = pause[-1:] or last
            if self.replicas > 1 and self._overlaps():
                last, scatters = [*scatters[-1:], *last], []
            before = self._numbered(stage, "layernorm-grads-all-reduce", "embedding-grads-all-reduce")
            after = self._numbered(stage, "separate-grads-all-reduce", "optimizer-clip-main-grad", "optimizer")
            self._chain([*before, *scatters, *after], last)
        self.groups += self.pairs.values()
        # Which collectives wait for which stages: the embedding's for both ends of the pipeline, clipping for all.
        for key in self.cell:
            if key.kind in ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"):
                self.groups.append([key])
        for kind in ("embedding-grads-all-reduce", "optimizer-clip-main-grad"):
            for seq in sorted({key.seq for key in self.cell if key.kind == kind}):
                self.groups.append([key for key in self.cell if key.kind == kind and key.seq == seq])
        keys = list(self.cell)
        index = {key: number for number, key in enumerate(keys)}
        graph = DependencyGraph(
            names=[f"{key.kind} {key.seq} of stage {key.stage}" for key in keys],
            after=[[index[dep] for dep in self.after[key]] for key in keys],
            groups=[[index[key] for key in group] for group in self.groups],
            across=frozenset(index[key] for group in self.groups for key in group if key.kind in ACROSS),
        )
        return graph, keys

    def _numbered(self, stage: int, *kinds: str) -> list[Key]:
        """A stage's operations of some types, type by type, in the order of their numbers."""
        found = [key for key in self.cell if key.stage == stage and key.kind in kinds]
        return sorted(found, key=lambda key: (kinds.index(key.kind), key.seq))

    def _chain(self, keys: Iterable[Key], last: Iterable[Key] = ()) -> None:
        """Each after the one before; the first after all of `last`."""
        before = list(last)
        for key in keys:
            self.after[key] += before
            before = [key]

    def _transfers(self, stage: int, kind: str) -> None:
        """One stream of sends or receives: its order, the compute each belongs to, and its peer.

        Profilers also record calls that moved nothing: those outside the compute they could belong to, and those
        that would lead out of the model (before its first chunk, behind its last). They wait for no peer.
        """
        keys = self._numbered(stage, kind)
        self._chain(keys)
        direction, receives = kind.split("-")[0], kind.endswith("recv")
        computes = self._numbered(stage, f"{direction}-compute")
        # Those that can belong to a compute: received before the last one starts, sent after the first one's end.
        if not computes:
            moving = []
        elif receives:
            latest = max(self.cell[key].start_s for key in computes) + CLOCK_S
            moving = [key for key in keys if self.cell[key].start_s <= latest]
        else:
            earliest = min(self.cell[key].end_s for key in computes) - CLOCK_S
            moving = [key for key in keys if self.cell[key].end_s >= earliest]
        # the first receive of the first chunk may not have been recorded at all: there is nothing to receive
        skipped = 1 if receives and moving and len(moving) + 1 == len(computes) else 0
        mates: dict[Key, Key] = dict(zip(moving, computes[skipped:], strict=False))
        peer_kind, distance = PEERS[kind]
        peer_stage = (stage + distance) % self.stages
        send, sender = (peer_kind, peer_stage) if receives else (kind, stage)
        number = 0
        for key in keys:
            mate = mates.get(key)
            if mate is not None:
                # A send follows its compute; a receive precedes it, and is posted after the compute before that.
                if not receives:
                    self.after[key].append(mate)
                else:
                    self.after[mate].append(key)
                    if place := computes.index(mate):
                        self.after[key].append(computes[place - 1])
                # Joined with its peer's transfer of the same number, if the other end is a chunk of the model.
                chunk = max(self.cell[mate].chunk, 0) * self.stages + mate.stage
                if 0 <= chunk + distance < self.chunks * self.stages:
                    self.pairs.setdefault((send, sender, number), []).append(key)
                    number += 1
                    continue
            self.groups.append([key])

    def _reductions(self, stage: int, compute: Sequence[Key]) -> None:
        """Parameters are gathered before a chunk's first forward; with overlap, gradients after its last backward."""
        if self.replicas < 2:
            return
        gathers, scatters = self._numbered(stage, "params-all-gather"), self._numbered(stage, "grads-reduce-scatter")
        self._chain(sorted([*gathers, *scatters], key=lambda key: (self.cell[key].start_s, key.seq, key.kind)))
        for chunk, gather in {self.cell[key].chunk: key for key in gathers}.items():
            forwards = self._on_chunk(compute, "forward-compute", chunk)
            if forwards:
                self.after[forwards[0]].append(gather)
        if not self._overlaps():
            return
        for chunk, scatter in {self.cell[key].chunk: key for key in reversed(scatters)}.items():
            backwards = self._on_chunk(compute, "backward-compute", chunk)
            if backwards:
                self.after[scatter].append(max(backwards, key=lambda key: self.cell[key].end_s))

    def _on_chunk(self, compute: Sequence[Key], kind: str, chunk: int) -> list[Key]:
        return [key for key in compute if key.kind == kind and self.cell[key].chunk == chunk]

    def _overlaps(self) -> bool:
        """Whether gradients are reduced during backward: only then is there a separate all-reduce after it."""
        return any(key.kind == "separate-grads-all-reduce" for key in self.cell)


# -------------------------------------------------------------------------------------------------
# From a pipeline timeline to a recording that can be replayed: the same operations in all steps and lanes.

EARLY_S = 1e-2
"""A transfer that ends so much before its peer began was no transfer (clocks disagree, or it was buffered)."""


def prepare_recording(timeline: PipelineTimeline) -> tuple[Recording, list[int]]:
    """Return the recording of a timeline, and the numbers of the steps in it.

    Steps in which some worker's operations differ from the most common ones (a truncated trace, another number of
    micro-batches) are left out; durations of transfers count from the moment when the last of a group has started.

    Raises:
        UsageError: No step holds the same operations on all lanes.
    """
    lanes, meta = timeline.lanes, timeline.meta
    counts = Counter(frozenset(cell) for cell in timeline.cells.values())
    if not counts:
        raise UsageError("the timeline has no operation of a training step")
    most_common = max(counts, key=lambda keys: (counts[keys], len(keys)))
    whole = [
        step
        for step in timeline.steps
        if all(timeline.cells.get((step, lane), {}).keys() == most_common for lane in lanes)
    ]
    if not whole:
        raise UsageError("no step has the same operations on all data-parallel ranks; record whole steps of all ranks")
    # All steps hold the same operations: one of them gives the graph.
    template: Cell = timeline.cells[whole[0], lanes[0]]
    numbers = sorted({key.stage for key in template})
    if numbers != list(range(len(numbers))):
        raise UsageError("some stages of the pipeline are not in the timeline; record all ranks")
    chunks = max(meta.vpp_size, 1 + max(operation.chunk for operation in template.values()))
    graph, keys = _Builder(template, chunks, max(len(lanes), meta.dp_size * meta.dsp_size)).build()
    # Start and duration, float64 [ops, steps, lanes] each.
    cells = [[timeline.cells[step, lane] for lane in lanes] for step in whole]
    start = np.array([[[cell[key].start_s for cell in row] for row in cells] for key in keys])
    duration = np.array([[[cell[key].duration_s for cell in row] for row in cells] for key in keys])
    stages = np.array([key.stage for key in keys])
    # Durations, those of transfers counted from the last start of their group.
    seconds: Floats = duration.copy()
    for group in graph.groups:
        begun: Floats = start[list(group)].max(axis=0)
        if not graph.across.isdisjoint(group):
            begun = np.broadcast_to(begun.max(axis=-1, keepdims=True), begun.shape)
        for op in group:
            left = start[op] + duration[op] - begun
            seconds[op] = np.where(left <= -EARLY_S, 0.0, left)
    recording = Recording(
        graph=graph,
        seconds=seconds,
        stages=stages,
        kinds=[key.kind for key in keys],
        ranks=np.array([[timeline.ranks[stage, lane] for lane in lanes] for stage in numbers]),
        ranks_per_worker=meta.ranks_per_worker,
        recorded_s=(start + duration).max(axis=(0, 2)) - start.min(axis=(0, 2)),
    )
    return recording, whole
