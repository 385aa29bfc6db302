"""Logs of single collectives of a generated job, as each recorder writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

START_S = 1_790_000_000.0
WORLD = "0x58aecebabb9e37af"


@dataclass
class CallJob:
    """Ranks that compute and meet in all-reduces, again and again.

    Args:
        ranks: How many.
        calls: How often they meet.
        late: What a rank needs longer than the others, seconds.
        clocks: How far a rank's host is ahead of the true time, seconds.
        hosts: Name of each rank's host; one each where it is left out.
        lose: Share of the records that each rank loses.
        noise: Deviation of the own time, as a share.
    """

    ranks: int = 4
    calls: int = 60
    late: Mapping[int, float] = field(default_factory=dict)
    clocks: Mapping[int, float] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    lose: float = 0.0
    noise: float = 0.02
    own_s: float = 0.010
    wire_s: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        own = self.own_s * (1 + self.noise * random.standard_normal((self.calls, self.ranks)))
        own += [self.late.get(rank, 0.0) for rank in range(self.ranks)]
        self.starts, self.ends = np.empty_like(own), np.empty_like(own)
        end = np.full(self.ranks, START_S)
        for call in range(self.calls):
            self.starts[call] = end + own[call]
            # the ends are not at one time
            end = self.starts[call].max() + self.wire_s * (1 + 0.1 * random.random(self.ranks))
            self.ends[call] = end
        self.kept = random.random((self.calls, self.ranks)) >= self.lose

    def records(self, rank: int) -> list[tuple[int, float, float]]:
        """What a rank recorded: number, start and end by its own clock."""
        ahead = self.clocks.get(rank, 0.0)
        return [
            (call + 1, self.starts[call, rank] + ahead, self.ends[call, rank] + ahead)
            for call in range(self.calls)
            if self.kept[call, rank]
        ]

    def host(self, rank: int) -> str:
        """Where it runs."""
        return self.hosts.get(rank, f"node{rank}")


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def write_inspector(job: CallJob, folder: Path, *, version: str = "v4.0", verbose: bool = False) -> None:
    """Write a log per rank; from v4.3 on with the header in a marker of its own."""
    for rank in range(job.ranks):
        lines = []
        header = {"id": WORLD, "comm_name": "unknown", "rank": rank, "n_ranks": job.ranks, "nnodes": 1}
        for number, start, end in job.records(rank):
            metadata = {
                "inspector_output_format_version": version,
                "git_rev": "",
                "rec_mechanism": "nccl_profiler_interface",
                "dump_timestamp_us": _us(end),
                "hostname": job.host(rank),
                "pid": 1000 + rank,
            }
            perf: dict[str, Any] = {"coll": "AllReduce", "coll_sn": number, "coll_msg_size_bytes": 1 << 20}
            perf |= {"coll_exec_time_us": _us(end - start), "coll_timing_source": "kernel_gpu", "coll_busbw_gbs": "nan"}
            if version == "v5.0":
                perf["graphCaptured"] = False
            if verbose:
                kernels = [
                    {"channel_id": shift, "kernel_start_ts": _us(start) + shift, "kernel_stop_ts": _us(end) - shift}
                    for shift in (0, 1)
                ]
                perf["event_trace_ts"] = {"coll_start_ts": _us(start) - 900, "kernel_events": kernels}
            if version in ("v4.3", "v4.4"):
                stats = {"coll_records": 1, "coll_dropped_total": 7}
                lines += [{"header": header, "metadata": metadata, "dump_stats": stats}, {"coll_perf": perf}]
            else:
                lines.append({"header": header, "metadata": metadata, "coll_perf": perf})
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (folder / f"{job.host(rank)}-pid{1000 + rank}.log").write_text(text)


def write_comma(job: CallJob, folder: Path) -> None:
    """Write a list of events per rank."""
    for rank in range(job.ranks):
        events = [
            {
                "args": {"size": 1 << 20},
                "cat": "COLL",
                "child_dur": _us(end - start),
                "comm_hash": WORLD,
                "dur": 12,
                "name": "all_reduce",
                "ph": "X",
                "rank": rank,
                "seq_num": number,
                "ts": _us(start) - 900,
                "proxyops": [],
            }
            for number, start, end in job.records(rank)
        ]
        (folder / f"comma_{rank}.json").write_text(json.dumps(events, indent=1))


def write_clog(job: CallJob, folder: Path) -> None:
    """Write a log per rank, in milliseconds."""
    for rank in range(job.ranks):
        lines = [
            f"V|1|base_timestamp={START_S:.3f}",
            f"new_comm|comm=world|rank={rank}|world_size={job.ranks}",
            "C1|sig|all_reduce|in_count=1024|out_count=1024|dtype=f32|red_op=sum|async_op=f|comm=world",
        ]
        for number, start, end in job.records(rank):
            lines += [
                f"C1|Q|work_id={number}|+{start - START_S - 0.001:.3f}",
                f"C1|S|+{start - START_S:.3f}",
                f"C1|E|+{end - START_S:.3f}",
                f"C1|W|+{end - START_S:.3f}",
            ]
        (folder / f"clog_rank{rank}.log").write_text("\n".join(lines) + "\n")


def plain(job: CallJob, folder: Path) -> None:
    """As the Inspector does by default."""
    write_inspector(job, folder)


def verbose(job: CallJob, folder: Path) -> None:
    """With the start of each kernel."""
    write_inspector(job, folder, verbose=True)


def marked(job: CallJob, folder: Path) -> None:
    """v4.4."""
    write_inspector(job, folder, version="v4.4", verbose=True)


def rccl(job: CallJob, folder: Path) -> None:
    """As RCCL's does."""
    write_inspector(job, folder, version="v5.0")


WRITERS: dict[str, Callable[[CallJob, Path], None]] = {
    "plain": plain,
    "verbose": verbose,
    "marked": marked,
    "rccl": rccl,
    "comma": write_comma,
    "clog": write_clog,
}
