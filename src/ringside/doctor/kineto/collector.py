"""From the events of a trace to plain values: what is decoded of them, batches in, collectives and steps at the end."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import msgspec
import numpy as np

from ringside.decoding import UNDECODABLE, plain_count, plain_ranks
from ringside.doctor.files.chrome_trace import Scan
from ringside.doctor.kineto.trace import RankTrace, TracedCollective, TracedStep
from ringside.monitor.intervals import Floats, union

# -------------------------------------------------------------------------------------------------
# What is decoded of a Kineto event, and nothing else: the rest of its bytes is skipped without becoming objects.


class TraceEvent(msgspec.Struct, gc=False):
    """One event of a trace; `ts` and `dur` in microseconds, as integers or with a fraction."""

    ph: str
    cat: str | None = None
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"")


class CollectiveArguments(msgspec.Struct, gc=False):
    """What profilers record of a collective: since 2.3 on the device kernel as well, before only shapes and types."""

    name: Any = msgspec.field(name="Collective name", default=None)
    elements_in: Any = msgspec.field(name="In msg nelems", default=None)
    dtype: Any = msgspec.field(name="dtype", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    seq: Any = msgspec.field(name="Seq", default=None)
    rank: Any = msgspec.field(name="Rank", default=None)
    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)


class Correlation(msgspec.Struct, gc=False):
    """What ties a device's activity to the call that launched it."""

    correlation: int = -1


decode_collective = msgspec.json.Decoder(CollectiveArguments).decode
decode_correlations = msgspec.json.Decoder(list[Correlation], strict=False).decode


def collective_arguments(raw: msgspec.Raw) -> CollectiveArguments:
    """Return the arguments of a collective; empty ones where they are not what they should be."""
    try:
        return decode_collective(raw)
    except UNDECODABLE:
        return CollectiveArguments()


def correlations(raws: Sequence[msgspec.Raw]) -> list[int]:
    """Return the correlations of many events, decoded at one go; -1 for those without one."""
    try:
        joined = b",".join(bytes(raw) or b"{}" for raw in raws)
        return [each.correlation for each in decode_correlations(b"[" + joined + b"]")]
    except UNDECODABLE:
        half = len(raws) // 2
        return [*correlations(raws[:half]), *correlations(raws[half:])] if half else [-1] * len(raws)


# -------------------------------------------------------------------------------------------------
# What an event of a trace is, from its name: a collective on a device or in a thread, a launch, work, bookkeeping.
#
# NCCL's kernels were called `ncclKernel_AllReduce_RING_LL_Sum_float(...)` up to 2.18 and are called
# `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)` since; RCCL calls most of its own `ncclDevKernel_Generic_4(...)`, from
# which the collective cannot be known.

_SPELLINGS = {
    "all_reduce": r"allreduce(coalesced)?",
    "all_gather": r"allgather(base|v|single|intotensor(coalesced)?)?",
    "reduce_scatter": r"reducescatter(base|single|tensor(coalesced)?)?",
    "broadcast": r"broadcast(oop)?",
    "all_to_all": r"alltoall(base|v|single)?",
    "send_recv": r"sendrecv",
    "collective": r"generic",
}
"""Collectives by how their names are spelled, without underscores."""
GRADIENT = ("all_reduce", "reduce_scatter", "collective")
_KERNEL = re.compile(r"(?:nccl|rccl|mscclpp?|ucc|msccl)[A-Za-z]{0,64}Kernel_?([A-Za-z]+)?", re.IGNORECASE)
_ANNOTATION = re.compile(r"(?:nccl|gloo|mpi|ucc|xccl|ringside|rccl):([A-Za-z_]+)")
_SIZES = {
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4, "double": 8, "float64": 8, "long": 8, "int64": 8,
    "long int": 8, "uint64": 8, "c10::half": 2, "half": 2, "float16": 2, "c10::bfloat16": 2, "bfloat16": 2,
    "short": 2, "int16": 2, "char": 1, "int8": 1, "uint8": 1, "byte": 1, "signed char": 1, "unsigned char": 1,
    "bool": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip


@lru_cache(1024)
def collective_name(name: str) -> str:
    """Return the plain name of a collective (`all_reduce`, ...) from any spelling; lower case of it where unknown."""
    plain = name.lower().strip("_")
    joined = plain.replace("_", "")
    return next((kind for kind, spelling in _SPELLINGS.items() if re.fullmatch(spelling, joined)), plain)


def count_elements(dims: object) -> int:
    """Return how many elements the shapes in an event's `Input Dims` have in all.

    Args:
        dims: Nested lists of sizes, as recorded; anything else counts as nothing.
    """
    if not isinstance(dims, Sequence) or isinstance(dims, str | bytes) or not dims:
        return 0
    if all(isinstance(size, int) for size in dims):
        return math.prod(max(int(size), 0) for size in dims)
    return sum(count_elements(inner) for inner in dims)


# -------------------------------------------------------------------------------------------------
# From the events of a trace to plain values: batches in, columns kept, collectives and steps at the end.

LAUNCHES = ("MemcpyAsync", "MemsetAsync")
RUNTIMES = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver")
SPECIAL = ("c10d::", "record_param_comms", "autograd::engine", "torch::autograd::AccumulateGrad")
"""Operations of threads that are more than work, or none: calls of collectives, backward, gradients."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHED = ("nccl:", "rccl:", "xccl:", "ucc:")
"""Annotations of threads that last as long as the launch; Gloo's and MPI's last as long as the collective."""
ANNOTATED = ("device", "thread", "launch")
"""Where an annotation can stand, the one that shows best how long its collective took first."""
STEP = "ProfilerStep#"
MOST_ELEMENTS = 1 << 50


class TraceCollector:
    """Adds up batches of events; keeps only the columns that a verdict needs.

    Attributes:
        rank: The rank that calls of collectives name; -1 where none does.
    """

    def __init__(self) -> None:
        self.rank = -1
        self._base_s = 0.0
        self._steps: dict[int, tuple[float, float]] = {}
        self._device_steps: dict[int, tuple[float, float]] = {}
        self._device: list[Floats] = []
        self._threads: list[Floats] = []
        self._gradients: list[float] = []
        self._backward: list[float] = []
        self._kernels: list[tuple[float, float, str, CollectiveArguments]] = []
        self._annotated: list[tuple[float, float, str, CollectiveArguments, str]] = []
        self._calls: list[tuple[float, CollectiveArguments]] = []
        self._launched: list[Floats] = []
        self._ran: list[Floats] = []

    def add_batch(self, batch: list[TraceEvent]) -> None:
        """Add a batch of events, grouped by category first: most are handled as arrays and not one by one."""
        groups: dict[str | None, list[TraceEvent]] = defaultdict(list)
        for event in batch:
            groups[event.cat].append(event)
        for category, events in groups.items():
            if category is None:
                continue
            complete = [event for event in events if event.ph == "X"]
            if category == "cpu_op":
                special = {name for name in {operation.name for operation in complete} if name.startswith(SPECIAL)}
                work = [operation for operation in complete if operation.name not in special]
                for operation in complete:
                    if operation.name not in special:
                        continue
                    if operation.name.startswith("autograd::engine"):
                        work.append(operation)
                        self._backward.append(operation.ts)
                    elif operation.name == "torch::autograd::AccumulateGrad":
                        self._gradients.append(operation.ts + operation.dur)
                    elif operation.name == "record_param_comms":
                        # the call as Python made it; device kernels of old profilers do not name their sizes
                        arguments = collective_arguments(operation.args)
                        if arguments.name is not None:
                            self._calls.append((operation.ts, arguments))
                        if self.rank < 0:
                            self.rank = plain_count(arguments.rank)
                self._threads.append(_intervals(work))
            elif category in DEVICE_WORK:
                # Which kernels carry out a collective, and which one; all others are work.
                matches = {name: _KERNEL.search(name) for name in {activity.name for activity in complete}}
                kinds = {name: collective_name(match[1] or "generic") for name, match in matches.items() if match}
                work = []
                for activity in complete:
                    if activity.name in kinds and activity.cat == "kernel":
                        of_kernel = collective_arguments(activity.args)
                        self._kernels.append((activity.ts, activity.ts + activity.dur, kinds[activity.name], of_kernel))
                    else:
                        work.append(activity)
                self._device.append(_intervals(work))
                correlated = correlations([activity.args for activity in complete])
                starts = [activity.ts for activity in complete]
                ends = [activity.ts + activity.dur for activity in complete]
                self._ran.append(np.array([correlated, starts, ends], dtype=np.float64).T)
            elif category in RUNTIMES:
                # Launches, by the number that ties each to its activity on the device.
                launches = [event for event in complete if "Launch" in event.name or event.name.endswith(LAUNCHES)]
                if launches:
                    numbers = correlations([event.args for event in launches])
                    self._launched.append(np.array([numbers, [event.ts for event in launches]], dtype=np.float64).T)
            elif category in ("user_annotation", "gpu_user_annotation"):
                for event in complete:
                    start, end = event.ts, event.ts + event.dur
                    on_device = category == "gpu_user_annotation"
                    if event.name.startswith(STEP) and event.name[len(STEP) :].isdecimal() and len(event.name) < 25:
                        steps = self._device_steps if on_device else self._steps
                        number = int(event.name[len(STEP) :])
                        known = steps.get(number, (start, end))
                        steps[number] = (min(known[0], start), max(known[1], end))
                    elif match := _ANNOTATION.match(event.name):
                        kind = collective_name(match[1])
                        where = "device" if on_device else "launch" if event.name.startswith(LAUNCHED) else "thread"
                        self._annotated.append((start, end, kind, collective_arguments(event.args), where))

    def trace(self, file: str, base_s: float) -> RankTrace:
        """All that was taken in, as a trace; times in seconds after `base_s`."""
        self._base_s = base_s
        device = bool(self._device or self._kernels)
        work = union(np.concatenate([np.empty((0, 2)), *(self._device if device else self._threads)]))
        # The collectives as they ran: device kernels, else annotations, the surest first.
        launched_only = False
        if self._kernels:
            collectives = self._from_kernels()
        else:
            where = min((item[4] for item in self._annotated), key=ANNOTATED.index, default="none")
            collectives = [self._collective(*item[:4]) for item in self._annotated if item[4] == where]
            launched_only = where == "launch"
        # Steps; on a device they begin with the first activity that a step launched and last until the next's.
        marked = self._steps or self._device_steps
        numbers = sorted(marked, key=lambda number: marked[number])
        starts = [marked[number][0] for number in numbers]
        ends = [*starts[1:], marked[numbers[-1]][1]] if numbers else []
        if device and self._steps and self._ran:
            ran = np.concatenate(self._ran)
            # An activity belongs to the step that launched it, however late it ran; where the launch was not recorded,
            # to the step that it ran in.
            launch_s = ran[:, 1]
            if self._launched:
                launched = np.concatenate(self._launched)
                launched = launched[np.argsort(launched[:, 0], kind="stable")]
                place = np.minimum(np.searchsorted(launched[:, 0], ran[:, 0]), len(launched) - 1)
                launch_s = np.where(launched[place, 0] == ran[:, 0], launched[place, 1], launch_s)
            home = np.searchsorted(np.array(starts), launch_s, side="right") - 1
            first = np.full(len(starts), np.inf)
            np.minimum.at(first, home[home >= 0], ran[home >= 0, 1])
            begins = np.maximum.accumulate(np.where(np.isfinite(first), first, starts)).tolist()
            last = float(ran[home == len(starts) - 1, 2].max(initial=-np.inf))
            starts, ends = begins, [*begins[1:], last if np.isfinite(last) else ends[-1]]
        return RankTrace(
            file=file,
            device=device,
            steps=[
                TracedStep(number, start / 1e6 + base_s, end / 1e6 + base_s)
                for number, start, end in zip(numbers, starts, ends, strict=True)
                if end > start
            ],
            collectives=sorted(collectives, key=lambda collective: collective.start_s),
            work=work / 1e6 + base_s,
            gradients=np.sort(np.array(self._gradients)) / 1e6 + base_s,
            backward=np.sort(np.array(self._backward)) / 1e6 + base_s,
            launched_only=launched_only,
        )

    def _from_kernels(self) -> list[TracedCollective]:
        """Kernels with the arguments recorded on them, or else with those of the calls, in the same order per kind."""
        kernels = sorted(self._kernels, key=lambda item: item[0])
        # What threads recorded of their collectives, by the kind of kernel that runs them.
        calls = [(start, collective_name(str(args.name)), args) for start, args in self._calls]
        if not calls:
            calls = [(start, kind, args) for start, _, kind, args, where in self._annotated if where != "device"]
        by_kernel: dict[str, list[tuple[str, CollectiveArguments]]] = defaultdict(list)
        for _, kind, args in sorted(calls, key=lambda item: item[0]):
            kernel = "send_recv" if kind in ("all_to_all", "send", "recv") else kind
            by_kernel[kernel].append((kind, args))
            # RCCL's generic kernels may run any of them
            by_kernel["collective"].append((kind, args))
        found = []
        left = Counter(kind for _, _, kind, _ in kernels)
        short = {kind for kind, count in left.items() if count > len(by_kernel[kind])}
        for start, end, kind, arguments in kernels:
            place = -left[kind]
            left[kind] -= 1
            if arguments.name is None and kind not in short:
                # from the end: calls whose kernels ran before the recording began are the first ones
                kind, arguments = by_kernel[kind][place]
            found.append(self._collective(start, end, kind, arguments))
        return found

    def _collective(self, start: float, end: float, kind: str, args: CollectiveArguments) -> TracedCollective:
        nelems = args.elements_in
        # the file is not to be trusted: huge sizes are cut off, other types count as nothing
        elements = min(max(nelems, 0) if isinstance(nelems, int) else count_elements(args.dims), MOST_ELEMENTS)
        types = args.types if isinstance(args.types, list) and args.types else [""]
        dtype = str(args.dtype or types[0])
        return TracedCollective(
            kind=collective_name(str(args.name)) if args.name else kind,
            start_s=start / 1e6 + self._base_s,
            end_s=end / 1e6 + self._base_s,
            elements=elements,
            nbytes=elements * _SIZES.get(dtype.lower(), 4),
            group=str(args.group) if args.group is not None else "",
            ranks=plain_ranks(args.ranks),
            seq=args.seq if isinstance(args.seq, int) and args.seq < MOST_ELEMENTS else -1,
        )


def _intervals(events: list[TraceEvent]) -> Floats:
    """The union of the events' times, microseconds, float64 [n, 2]."""
    if not events:
        return np.empty((0, 2))
    starts = np.array([event.ts for event in events])
    return union(np.stack([starts, starts + np.array([event.dur for event in events])], axis=1))


# -------------------------------------------------------------------------------------------------
# Reading one trace: its events through a collector, who recorded it from its header.


def read_trace(stream: BinaryIO, file: str) -> RankTrace:
    """Read one rank's trace; of a damaged one, whatever is whole.

    Args:
        stream: Its bytes, unpacked.
        file: What to call it.
    """
    scan = Scan(stream, TraceEvent)
    collector = TraceCollector()
    for batch in scan.batches():
        collector.add_batch(batch)
    base_s = scan.header.get("baseTimeNanoseconds", 0)
    trace = collector.trace(file, float(base_s) / 1e9 if isinstance(base_s, int | float) else 0.0)
    trace.events, trace.losses = scan.events, scan.losses()
    # Who recorded it, from `distributedInfo`; else from what its collectives name.
    info = scan.header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = plain_count(info.get("rank")), plain_count(info.get("world_size"))
    trace.rank = rank if rank >= 0 else collector.rank
    largest = max((len(collective.ranks) for collective in trace.collectives), default=0)
    trace.world_size = world if world >= 0 else largest
    trace.backend = str(info.get("backend") or "")
    trace.host = str(scan.header.get("host_name") or info.get("host_name") or "")
    return trace
