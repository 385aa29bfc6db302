"""Traces as torch.profiler writes them, of jobs whose every time is known: NCCL on devices, Gloo in threads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

NEW, OLD, RCCL = (
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
)


@dataclass
class Job:
    """A data-parallel job: work, then a transfer once all have arrived, several times a step; times in microseconds.

    Args:
        slow: Factor of each rank's work.
        slow_steps: The steps in which it counts, from 0; None: all.
        sizes: Elements of each transfer of a step.
        noise: Spread of the work, as a ratio.
        kernel: Name of the collective's kernel; empty: Gloo in threads.
        details: Whether the kernel says what it carries (2.3 and later) or only the call does.
    """

    ranks: int = 4
    steps: int = 12
    work_us: float = 10_000.0
    transfer_us: float = 1_000.0
    slow: dict[int, float] = field(default_factory=dict)
    slow_steps: range | None = None
    sizes: Sequence[int] = (1 << 20, 1 << 20)
    noise: float = 0.01
    kernel: str = NEW
    details: bool = True
    integers: bool = False
    ranks_as_text: bool = False
    distributed_info: bool = True
    clock_us: dict[int, float] = field(default_factory=dict)
    hosts: Sequence[str] = ()
    seed: int = 0
    start_us: float = 1_700_000_000_000_000.0
    world: int = 0
    first_step: int = 3

    def traces(self) -> list[dict[str, Any]]:
        """One trace per rank, as `json.load` would give it."""
        random = np.random.default_rng(self.seed)
        factors = np.array([self.slow.get(rank, 1.0) for rank in range(self.ranks)])
        shape = (self.steps, len(self.sizes), self.ranks)
        work = self.work_us / len(self.sizes) * np.exp(random.normal(0, self.noise, shape))
        work[slice(None) if self.slow_steps is None else list(self.slow_steps)] *= factors
        events: list[list[dict[str, Any]]] = [[] for _ in range(self.ranks)]
        now = self.start_us
        for step in range(self.steps):
            begin = now
            for part in range(len(self.sizes)):
                arrivals = now + work[step, part]
                done = float(arrivals.max()) + self.transfer_us
                for rank in range(self.ranks):
                    self._part(events[rank], rank, now, float(arrivals[rank]), done, (step, part))
                now = done
            for rank in range(self.ranks):
                number = self.first_step + step
                self._add(events[rank], rank, "user_annotation", f"ProfilerStep#{number}", begin, now - begin, 1, {})
        return [self._trace(rank, events[rank]) for rank in range(self.ranks)]

    def _part(
        self, events: list[Any], rank: int, begin: float, arrival: float, done: float, which: tuple[int, int]
    ) -> None:
        step, part = which
        seq, elements = len(self.sizes) * step + part, self.sizes[part]
        call = {
            "Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements,
            "Group size": self.ranks, "dtype": "Float", "Process Group Name": "0", "Seq": seq, "Rank": rank,
            "Process Group Ranks": str(list(range(self.ranks))) if self.ranks_as_text else list(range(self.ranks)),
        }  # fmt: skip
        shapes = {"Input Dims": [[elements]], "Input type": ["float"]}
        if not self.kernel:
            self._add(events, rank, "cpu_op", "aten::addmm", begin, arrival - begin, 1, {})
            grad = arrival - 5
            self._add(events, rank, "cpu_op", "torch::autograd::AccumulateGrad", grad, 4, 1, {})
            self._add(events, rank, "user_annotation", "gloo:all_reduce", arrival, done - arrival, 2, shapes)
            return
        number = 10 * seq
        launched = {"correlation": number, "External id": number}
        self._add(events, rank, "cuda_runtime", "cudaLaunchKernel", begin, 3, 1, launched)
        self._add(events, rank, "kernel", "void gemm<float>(int)", begin, arrival - begin, 7, launched)
        said = "record_param_comms"
        self._add(events, rank, "cpu_op", said, begin + 4, 2, 1, call if self.details else {})
        self._add(events, rank, "user_annotation", "nccl:all_reduce", begin + 4, 2, 1, shapes)
        launched = {"correlation": number + 1, "External id": number + 1}
        self._add(events, rank, "cuda_runtime", "cudaLaunchKernelExC", begin + 5, 3, 1, launched)
        kernel = {**launched, **(call if self.details else {})}
        self._add(events, rank, "kernel", self.kernel, arrival, done - arrival, 20, kernel)

    def _add(
        self, events: list[Any], rank: int, cat: str, name: str, ts: float, dur: float, tid: int, args: dict[str, Any]
    ) -> None:
        ts += self.clock_us.get(rank, 0.0)
        start: float = round(ts) if self.integers else round(ts, 3)
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 100 + rank, "tid": tid, "ts": start,
             "dur": round(dur) if self.integers else round(dur, 3), "args": args}
        )  # fmt: skip

    def _trace(self, rank: int, events: list[dict[str, Any]]) -> dict[str, Any]:
        info = {"backend": "nccl" if self.kernel else "gloo", "rank": rank, "world_size": self.world or self.ranks}
        host = {"host_name": self.hosts[rank % len(self.hosts)]} if self.hosts else {}
        named = {"ph": "M", "name": "process_name", "pid": 100 + rank, "tid": 0, "ts": 0, "args": {"name": "python"}}
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "H100"}, {"id": 1, "name": "H100"}],
            **({"distributedInfo": info} if self.distributed_info else {}),
            **host,
            "traceEvents": [named, *events],
            "traceName": "x",
        }

    def write(
        self, folder: Path, *, packed: bool = False, only: Sequence[int] | None = None, name: str = "rank"
    ) -> Path:
        """Write one file per rank; return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank, trace in enumerate(self.traces()):
            if only is None or rank in only:
                text = json.dumps(trace, indent=1).encode()
                path = folder / f"{name}{rank}.pt.trace.json{'.gz' if packed else ''}"
                path.write_bytes(gzip.compress(text, 1) if packed else text)
        return folder
