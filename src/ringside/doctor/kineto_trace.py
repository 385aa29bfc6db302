"""One rank's trace as plain values: its steps, its collectives, when it worked. Times in seconds since 1970.

(Where a trace has no `baseTimeNanoseconds`, its times are taken as they are.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from ringside.doctor import kineto_names as names
from ringside.doctor.kineto_events import CollectiveArguments, Event, collective_arguments, correlation
from ringside.doctor.kineto_intervals import Floats, union
from ringside.doctor.kineto_stream import Scan

LAUNCHES = ("LaunchKernel", "LaunchCooperativeKernel", "MemcpyAsync", "MemsetAsync", "GraphLaunch")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = "ProfilerStep#"


@dataclass(frozen=True)
class Step:
    """One training step, as `ProfilerStep#N` marks it; start and end in seconds."""

    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Collective:
    """One rank's part of one collective.

    Args:
        kind: `all_reduce`, `all_gather`, ...
        start_s: When this rank had arrived (a device kernel began; a thread began to carry it out), seconds.
        end_s: When it was done, seconds.
        elements: Elements this rank put in; 0 where not known.
        nbytes: The same in bytes.
        group: The process group's name; empty where not known.
        ranks: Its ranks; empty where not known.
        seq: Its sequence number within the group; -1 where not known.
    """

    kind: str
    start_s: float
    end_s: float
    elements: int = 0
    nbytes: int = 0
    group: str = ""
    ranks: tuple[int, ...] = ()
    seq: int = -1

    @property
    def duration_s(self) -> float:
        """From arrival to the end, seconds."""
        return self.end_s - self.start_s


@dataclass
class RankTrace:
    """What one file says of one rank.

    Args:
        file: Its name.
        rank: The rank; -1 where the file does not say.
        world_size: Ranks of the job; 0 where not known.
        backend: `nccl`, `gloo`, ...; empty where not known.
        host: Name of its host; empty where not known.
        device: Whether it shows what a device did; otherwise only what threads did.
        steps: Training steps, ascending.
        collectives: In order of their start.
        work: Union of what was computed, float64 [n, 2], seconds.
        gradients: When gradients were accumulated (ends), float64 [n], seconds, ascending.
        backward: When pieces of backward began, float64 [n], seconds, ascending.
        events: Events read.
        losses: What of the file is lost, in a line; empty where it is whole.
        launched_only: Collectives are seen only where they were launched, not where they ran.
    """

    file: str
    rank: int = -1
    world_size: int = 0
    backend: str = ""
    host: str = ""
    device: bool = False
    steps: list[Step] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    work: Floats = field(default_factory=lambda: np.empty((0, 2)))
    gradients: Floats = field(default_factory=lambda: np.empty(0))
    backward: Floats = field(default_factory=lambda: np.empty(0))
    events: int = 0
    losses: str = ""
    launched_only: bool = False

    @property
    def span(self) -> tuple[float, float]:
        """Start and end of all that was recorded, seconds; (0, 0) where nothing was."""
        times = [*(step.start_s for step in self.steps), *(step.end_s for step in self.steps)]
        times += [self.work[0, 0], self.work[-1, 1]] if len(self.work) else []
        times += [self.collectives[0].start_s, max(one.end_s for one in self.collectives)] if self.collectives else []
        return (min(times), max(times)) if times else (0.0, 0.0)


def read_trace(stream: BinaryIO, file: str) -> RankTrace:
    """Return what a trace says; a damaged one gives what is whole of it.

    Args:
        stream: Its bytes, unpacked.
        file: What to call it.
    """
    scan = Scan(stream, Event)
    collector = _Collector()
    for batch in scan.batches():
        collector.take(batch)
    base_s = scan.header.get("baseTimeNanoseconds", 0)
    trace = collector.trace(file, float(base_s) / 1e9 if isinstance(base_s, int | float) else 0.0)
    trace.events, trace.losses = scan.events, scan.losses()
    _identify(trace, scan.header, collector.rank)
    return trace


def _identify(trace: RankTrace, header: dict[str, Any], told: int) -> None:
    """Who recorded it, from `distributedInfo`; else from what its collectives say."""
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = info.get("rank"), info.get("world_size")
    trace.rank = rank if isinstance(rank, int) else told
    trace.world_size = world if isinstance(world, int) else max((len(c.ranks) for c in trace.collectives), default=0)
    trace.backend = str(info.get("backend") or "")
    trace.host = str(header.get("host_name") or info.get("host_name") or "")


class _Collector:
    """Takes in batches of events; keeps columns of what is needed."""

    def __init__(self) -> None:
        self.rank = -1
        self._steps: dict[int, tuple[float, float]] = {}
        self._device_steps: dict[int, tuple[float, float]] = {}
        self._device: list[Floats] = []
        self._threads: list[Floats] = []
        self._gradients: list[float] = []
        self._backward: list[float] = []
        self._kernels: list[tuple[float, float, str, CollectiveArguments]] = []
        self._annotated: list[tuple[float, float, str, CollectiveArguments, bool]] = []
        self._calls: list[tuple[float, CollectiveArguments]] = []
        self._launched: list[tuple[int, float]] = []
        self._ran: list[tuple[int, float, float]] = []
        self._kernel_kinds: dict[str, str] = {}
        self._skipped: dict[str, bool] = {}

    def take(self, batch: list[Event]) -> None:
        device: list[tuple[float, float]] = []
        threads: list[tuple[float, float]] = []
        skipped = self._skipped
        for event in batch:
            cat = event.cat
            if cat is None or event.ph != "X":
                continue
            if cat == "cpu_op":
                name = event.name
                start, end = event.ts or 0.0, (event.ts or 0.0) + (event.dur or 0.0)
                if (skip := skipped.get(name)) is None:
                    skip = skipped[name] = self._is_call(name)
                if not skip:
                    threads.append((start, end))
                elif name.startswith("autograd::engine"):
                    self._backward.append(start)
                    threads.append((start, end))
                elif name == "torch::autograd::AccumulateGrad":
                    self._gradients.append(end)
                elif name == "record_param_comms":
                    self._take_call(start, event)
            elif cat in DEVICE_WORK:
                self._take_device(event, device)
            elif cat in ("cuda_runtime", "cuda_driver", "hip_runtime"):
                if event.name.endswith(LAUNCHES) or "Launch" in event.name:
                    self._launched.append((correlation(event.args), event.ts or 0.0))
            elif cat in ("user_annotation", "gpu_user_annotation"):
                self._take_annotation(event, cat)
        if device:
            self._device.append(union(np.array(device)))
        if threads:
            self._threads.append(union(np.array(threads)))

    @staticmethod
    def _is_call(name: str) -> bool:
        """Whether an operation of a thread needs more than being counted as work."""
        return name.startswith(("c10d::", "record_param_comms", "autograd::engine", "torch::autograd::AccumulateGrad"))

    def _take_call(self, start: float, event: Event) -> None:
        arguments = collective_arguments(event.args)
        if arguments.name is not None:
            self._calls.append((start, arguments))
        if self.rank < 0 and isinstance(arguments.rank, int):
            self.rank = arguments.rank

    def _take_device(self, event: Event, device: list[tuple[float, float]]) -> None:
        start = event.ts or 0.0
        end = start + (event.dur or 0.0)
        if (kind := self._kernel_kinds.get(event.name)) is None:
            kind = self._kernel_kinds[event.name] = names.kernel(event.name) if event.cat == "kernel" else ""
        if kind:
            arguments = collective_arguments(event.args)
            self._kernels.append((start, end, kind, arguments))
            self._ran.append((arguments.correlation if isinstance(arguments.correlation, int) else -1, start, end))
        else:
            device.append((start, end))
            self._ran.append((correlation(event.args), start, end))

    def _take_annotation(self, event: Event, cat: str) -> None:
        start = event.ts or 0.0
        end = start + (event.dur or 0.0)
        on_device = cat == "gpu_user_annotation"
        if event.name.startswith(STEP) and event.name[len(STEP) :].isdecimal():
            steps = self._device_steps if on_device else self._steps
            number = int(event.name[len(STEP) :])
            known = steps.get(number, (start, end))
            steps[number] = (min(known[0], start), max(known[1], end))
        elif kind := names.annotation(event.name):
            self._annotated.append((start, end, kind, collective_arguments(event.args), on_device))

    def trace(self, file: str, base_s: float) -> RankTrace:
        """All that was taken in, as a trace; times in seconds after `base_s`."""
        self._base_s = base_s
        device = bool(self._device or self._kernels)
        work = union(np.concatenate([np.empty((0, 2)), *(self._device if device else self._threads)]))
        collectives, launched_only = self._collectives(device)
        return RankTrace(
            file=file,
            device=device,
            steps=self._windows(device),
            collectives=sorted(collectives, key=lambda one: one.start_s),
            work=work / 1e6 + base_s,
            gradients=np.sort(np.array(self._gradients)) / 1e6 + base_s,
            backward=np.sort(np.array(self._backward)) / 1e6 + base_s,
            launched_only=launched_only,
        )

    def _collectives(self, device: bool) -> tuple[list[Collective], bool]:
        """The collectives as they ran: device kernels, or what threads carried out."""
        if self._kernels:
            return self._from_kernels(), False
        on_device = [one for one in self._annotated if one[4]]
        chosen = on_device or [one for one in self._annotated if not one[4]]
        launched_only = not on_device and any(self._is_launch(one, device) for one in chosen)
        return [self._collective(start, end, kind, args) for start, end, kind, args, _ in chosen], launched_only

    def _is_launch(self, annotated: tuple[float, float, str, CollectiveArguments, bool], device: bool) -> bool:
        """NCCL's annotations on threads last as long as the launch; Gloo's as long as the collective."""
        return device or (annotated[3].name is not None and annotated[1] - annotated[0] < 1.0)

    def _from_kernels(self) -> list[Collective]:
        """Kernels with what they say themselves, or else with what the calls say, in the same order per kind."""
        kernels = sorted(self._kernels, key=lambda one: one[0])
        calls = self._calls_by_kind()
        found = []
        seen: dict[str, int] = {}
        counts: dict[str, int] = {}
        for _, _, kind, _ in kernels:
            counts[kind] = counts.get(kind, 0) + 1
        for start, end, kind, arguments in kernels:
            place = seen[kind] = seen.get(kind, -1) + 1
            if arguments.name is None:
                matching = calls.get(kind, [])
                # calls whose kernels ran before the recording began are the first ones
                index = place + len(matching) - counts[kind]
                if 0 <= index < len(matching) and len(matching) >= counts[kind]:
                    kind, arguments = matching[index]
            found.append(self._collective(start, end, kind, arguments))
        return found

    def _calls_by_kind(self) -> dict[str, list[tuple[str, CollectiveArguments]]]:
        """What threads say of their collectives, by the kind of kernel that will carry them out."""
        calls = [(start, names.collective(str(args.name)), args) for start, args in self._calls]
        if not calls:
            calls = [(start, kind, args) for start, _, kind, args, on_device in self._annotated if not on_device]
        grouped: dict[str, list[tuple[str, CollectiveArguments]]] = {}
        for _, kind, args in sorted(calls, key=lambda one: one[0]):
            carried = "send_recv" if kind in ("all_to_all", "send", "recv") else kind
            grouped.setdefault(carried, []).append((kind, args))
            grouped.setdefault("collective", []).append((kind, args))
        return grouped

    def _collective(self, start: float, end: float, kind: str, args: CollectiveArguments) -> Collective:
        elements = args.elements_in if isinstance(args.elements_in, int) else names.elements(args.dims)
        types = args.types if isinstance(args.types, list) and args.types else [""]
        dtype = str(args.dtype or types[0])
        return Collective(
            kind=names.collective(str(args.name)) if args.name else kind,
            start_s=start / 1e6 + self._base_s,
            end_s=end / 1e6 + self._base_s,
            elements=elements,
            nbytes=elements * names.dtype_bytes(dtype),
            group=str(args.group) if args.group is not None else "",
            ranks=names.rank_list(args.ranks),
            seq=args.seq if isinstance(args.seq, int) else -1,
        )

    def _windows(self, device: bool) -> list[Step]:
        """Steps; on a device they begin with the first activity that a step launched and last until the next's."""
        marked = self._steps or self._device_steps
        numbers = sorted(marked, key=lambda number: marked[number])
        starts = [marked[number][0] for number in numbers]
        ends = [*starts[1:], marked[numbers[-1]][1]] if numbers else []
        if device and self._steps and self._ran:
            starts, ends = self._on_device(starts, ends)
        base = self._base_s
        return [
            Step(number, start / 1e6 + base, end / 1e6 + base)
            for number, start, end in zip(numbers, starts, ends, strict=True)
            if end > start
        ]

    def _on_device(self, starts: list[float], ends: list[float]) -> tuple[list[float], list[float]]:
        ran = np.array(sorted(self._ran))
        launched = dict(self._launched)
        when = np.array([launched.get(int(number), np.nan) for number in ran[:, 0]])
        when = np.where(np.isnan(when), ran[:, 1], when)
        home = np.searchsorted(np.array(starts), when, side="right") - 1
        first = [ran[home == index, 1].min(initial=np.inf) for index in range(len(starts))]
        last = float(ran[home == len(starts) - 1, 2].max(initial=-np.inf)) if starts else 0.0
        begins = [value if np.isfinite(value) else start for value, start in zip(first, starts, strict=True)]
        begins = np.maximum.accumulate(begins).tolist()
        final = last if np.isfinite(last) else ends[-1]
        return begins, [*begins[1:], final]
