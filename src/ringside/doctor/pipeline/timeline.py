"""A pipeline timeline: what every worker did in every step, as recorded in a Chrome trace.

Each event is one operation (`forward-compute`, `backward-send`, `grads-reduce-scatter`, ...) with `step`,
`model_chunk`, `mb_id` and `seq_id` in its arguments; its process is the data-parallel rank, its thread's name says
`PP rank 2, TP rank 0, compute`. `seq_id` counts operations of one type on one worker in one step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ringside.errors import UsageError

# -------------------------------------------------------------------------------------------------
# The few lines of metadata beside a pipeline timeline: how many replicas, stages and model chunks there are.

_LINE = re.compile(r"""^\s*["']?(\w+)["']?\s*:\s*["']?([^"'#,}]*?)["']?\s*,?\s*(?:#.*)?$""")
LARGEST = 1 << 24
ALIASES = {
    "dp_size": ("dp", "data_parallel_size"),
    "pp_size": ("pp", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "tp_size": ("tp", "tensor_parallel_size", "tensor_model_parallel_size"),
    "dsp_size": ("dsp", "cp_size", "context_parallel_size"),
    "vpp_size": ("vpp", "virtual_pipeline_model_parallel_size"),
}
"""Other names of the sizes: Megatron's."""


@dataclass(frozen=True)
class Meta:
    """How a job was laid out.

    Args:
        trial_name: The job's name.
        dp_size: Data-parallel replicas.
        pp_size: Pipeline stages.
        tp_size: Ranks that share one worker's tensors.
        dsp_size: Ranks that share one sequence.
        vpp_size: Model chunks per stage (interleaving).
        world_size: Ranks; 0 where not given.
    """

    trial_name: str = ""
    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1
    dsp_size: int = 1
    vpp_size: int = 1
    world_size: int = 0

    @property
    def ranks_per_worker(self) -> float:
        """Ranks per worker of the timeline (a worker is one stage of one replica)."""
        workers = self.dp_size * self.pp_size
        return self.world_size / workers if self.world_size else float(self.tp_size * self.dsp_size)


def looks_like_meta(head: bytes) -> bool:
    """Return whether a file's first bytes are such metadata: `dp_size` and `pp_size` on lines of their own."""
    if head.lstrip()[:1] == b"[" or b"traceEvents" in head or b'"step_t_base"' in head:
        return False
    return {"dp_size", "pp_size"} <= _fields(head.decode("utf-8", "replace")).keys()


def parse_meta(text: str) -> Meta:
    """Return the metadata in a text of `name: value` lines (flat YAML).

    Raises:
        UsageError: A size is no positive whole number, or the sizes contradict each other.
    """
    found = _fields(text)
    sizes = {name: _size(name, found) for name in ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size")}
    world = _size("world_size", found) if "world_size" in found else 0
    expected = sizes["dp_size"] * sizes["pp_size"] * sizes["tp_size"] * sizes["dsp_size"]
    if world and world != expected:
        raise UsageError(
            f"world_size is {world}, but dp_size · pp_size · tp_size · dsp_size is {expected}: correct the metadata"
        )
    return Meta(trial_name=found.get("trial_name", ""), world_size=world, **sizes)


def _fields(text: str) -> dict[str, str]:
    """The `name: value` lines of a text, by our names; a mapping in braces (JSON, or YAML's flow) counts as lines."""
    if text.lstrip()[:1] == "{":
        text = text.replace("{", "\n").replace("}", "\n").replace(",", "\n")
    short = [line for line in text.splitlines() if len(line) < 200]
    found = {match[1]: match[2].strip() for match in map(_LINE.match, short) if match}
    for name, others in ALIASES.items():
        for other in others:
            if name not in found and found.get(other, "null") not in ("null", "None", "~", ""):
                found[name] = found[other]
    return found


def _size(name: str, found: Mapping[str, str]) -> int:
    text = found.get(name, "1")
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST:
        raise UsageError(f"{name} is {text!r} in the metadata; it is a whole number of at least 1")
    return int(text)


COMPUTE = ("forward-compute", "backward-compute")
P2P = ("forward-send", "forward-recv", "backward-send", "backward-recv")
KNOWN = (
    *COMPUTE, *P2P, "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce",
    "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad", "optimizer", "gc",
)  # fmt: skip
_THREAD = re.compile(r"PP rank (\d{1,9})(?!\d)(?:, TP rank (\d{1,9})(?!\d))?")
_PROCESS = re.compile(r"DP rank \[?(\d{1,9})(?!\d)")
LANES_PER_RANK = 5
"""Threads that such traces give each rank: compute, pp-comm, tp-comm, dp-comm, misc."""


class Arguments(msgspec.Struct, gc=False):
    """An event's `args`; what is not there or null is -1."""

    step: int | None = None
    model_chunk: int | None = None
    seq_id: int | None = None
    name: str | int | None = None


class TimelineEvent(msgspec.Struct, gc=False):
    """One Chrome trace event, as far as a timeline needs it; times in microseconds."""

    ph: str
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: Arguments = msgspec.field(default_factory=Arguments)


@dataclass(frozen=True, order=True)
class Key:
    """One operation of a step: the same on every lane and in every step.

    Args:
        stage: Pipeline stage.
        kind: Its type.
        seq: Its number among operations of its type on that worker in that step.
    """

    stage: int
    kind: str
    seq: int


@dataclass(frozen=True)
class TimelineOperation:
    """One recorded operation: seconds since the trace's origin, and the model chunk it works on (-1: none)."""

    start_s: float
    duration_s: float
    chunk: int

    @property
    def end_s(self) -> float:
        """Its end, seconds."""
        return self.start_s + self.duration_s


Cell = dict[Key, TimelineOperation]
"""What one lane did in one step."""


@dataclass
class PipelineTimeline:
    """What all lanes did.

    Args:
        cells: Operations by step and lane; a lane is (data-parallel rank, tensor-parallel rank).
        ranks: Rank of each worker, by stage and lane.
        meta: How the job was laid out.
        dropped: How many events of each unknown type were left out.
    """

    cells: dict[tuple[int, tuple[int, int]], Cell] = field(default_factory=dict)
    ranks: dict[tuple[int, tuple[int, int]], int] = field(default_factory=dict)
    meta: Meta = field(default_factory=Meta)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps, ascending."""
        return sorted({step for step, _ in self.cells})

    @property
    def lanes(self) -> list[tuple[int, int]]:
        """Lanes, ascending."""
        return sorted({lane for _, lane in self.cells})

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return 1 + max((stage for stage, _ in self.ranks), default=0)


def build_timeline(events: Sequence[TimelineEvent], meta: Meta | None = None) -> PipelineTimeline:
    """Return the timeline of a trace's events.

    Args:
        events: All events, the metadata events (`ph` = M) that name threads and processes among them.
        meta: How the job was laid out; where it is not given, it is taken from the names.

    Returns:
        Every operation under its step, lane and key. Operations whose `seq_id` is missing are numbered by start.
    """
    # (stage, lane, rank) of every thread, from its name, or else from its number and the metadata.
    threads: dict[tuple[int | str, int | str], str] = {}
    replicas: dict[int | str, int] = {}
    for event in events:
        name = str(event.args.name or "")
        if event.ph == "M" and event.name == "thread_name":
            threads[event.pid, event.tid] = name
        elif event.ph == "M" and event.name == "process_name" and (match := _PROCESS.search(name)):
            replicas[event.pid] = int(match[1])
    per_stage = max((meta.dp_size * meta.tp_size * meta.dsp_size) if meta else 1, 1)
    places = {}
    for event in events:
        spot = (event.pid, event.tid)
        if event.ph != "X" or spot in places:
            continue
        tid = event.tid if isinstance(event.tid, int) else 0
        rank = max(tid, 0) // LANES_PER_RANK
        replica = replicas.get(event.pid, event.pid if isinstance(event.pid, int) else 0)
        match = _THREAD.search(threads.get(spot, ""))
        stage = int(match[1]) if match else rank // per_stage
        tensor = int(match[2] or 0) if match else 0
        places[spot] = (stage, (replica, tensor), rank)
    timeline = PipelineTimeline()
    numbered: list[TimelineEvent] = []
    unnumbered: list[TimelineEvent] = []
    for event in events:
        if event.ph != "X" or event.args.step is None:
            continue
        if event.name not in KNOWN:
            timeline.dropped[event.name] += 1
        elif event.args.seq_id is None or event.args.seq_id < 0:
            unnumbered.append(event)
        else:
            numbered.append(event)
    # without a number the order of starting is the order of calls
    for event in [*numbered, *sorted(unnumbered, key=lambda event: event.ts)]:
        stage, lane, rank = places[event.pid, event.tid]
        timeline.ranks[stage, lane] = rank
        cell = timeline.cells.setdefault((event.args.step or 0, lane), {})
        seq, chunk = event.args.seq_id, event.args.model_chunk
        if seq is None or seq < 0:
            seq = sum(key.stage == stage and key.kind == event.name for key in cell)
        key = Key(stage, event.name, seq)
        cell[key] = TimelineOperation(event.ts / 1e6, event.dur / 1e6, -1 if chunk is None else chunk)
    if meta is None:
        # The layout that the recorded operations show.
        chunks = {operation.chunk for cell in timeline.cells.values() for operation in cell.values()}
        lanes_seen = len({replica for replica, _ in timeline.lanes})
        meta = Meta(
            dp_size=max(lanes_seen, 1),
            tp_size=max(len(timeline.lanes) // max(lanes_seen, 1), 1),
            pp_size=timeline.stages,
            vpp_size=max(chunks, default=0) + 1 or 1,
        )
    timeline.meta = meta
    return timeline


_SIGNS = re.compile(rb'"(?:seq_id|mb_id)"|"PP rank \d+')
_OPERATION = re.compile(rb'"(?:' + "|".join(KNOWN).encode() + rb'|process_name|thread_name)"')


def looks_like_timeline(head: bytes) -> bool:
    """Return whether a file's first bytes are those of a pipeline timeline."""
    return bool(_SIGNS.search(head) and _OPERATION.search(head) and head.lstrip()[:1] in (b"[", b"{"))
