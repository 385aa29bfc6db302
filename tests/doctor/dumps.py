"""Flight-recorder dumps as PyTorch writes them, for any number of ranks and any fault."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

START_NS = 1_758_610_505_000_000_000
Entry = dict[str, Any]


def call(
    seq: int,
    op: str = "all_reduce",
    *,
    group: str = "0",
    desc: str = "default_pg",
    sizes: Sequence[Sequence[int]] = ((1000,),),
    dtype: str = "Float",
    done: bool = True,
    backend: str = "nccl",
    p2p: bool = False,
    at_ms: float | None = None,
) -> Entry:
    """Return one entry of format 2.9."""
    created = START_NS + int((seq if at_ms is None else at_ms) * 1e6)
    frames = [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 3245},
        {"name": "train", "filename": "/home/user/train.py", "line": 40 + seq % 10},
    ]
    return {
        "record_id": seq,
        "pg_id": int(group),
        "process_group": (group, desc),
        "collective_seq_id": 0 if p2p else seq,
        "p2p_seq_id": seq if p2p else 0,
        "op_id": seq,
        "profiling_name": f"{backend}:{op}",
        "time_created_ns": created,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": created + 400_000 if done else None,
        "input_sizes": [list(dims) for dims in sizes],
        "output_sizes": [list(dims) for dims in sizes],
        "input_dtypes": [dtype] * len(sizes),
        "output_dtypes": [dtype] * len(sizes),
        "state": "completed" if done else "scheduled",
        "retired": done,
        "timeout_ms": 600_000,
        "is_p2p": p2p,
        "frames": frames,
    }


def dump(entries: Iterable[Entry], groups: Mapping[str, Sequence[int]], version: str = "2.9") -> dict[str, Any]:
    """Return one rank's dump; `groups` are the names and global ranks of the groups it is in."""
    entries = list(entries)
    status = {}
    for name in groups:
        own = [entry for entry in entries if entry["process_group"][0] == name]
        last = max((entry["collective_seq_id"] for entry in own), default=0)
        ended = max((entry["collective_seq_id"] for entry in own if entry["retired"]), default=0)
        status[name] = {
            "last_enqueued_collective": last,
            "last_started_collective": -1,
            "last_completed_collective": ended,
        }
    config = {
        name: {"name": name, "desc": "default_pg" if name == "0" else "tp", "ranks": str(list(ranks))}
        for name, ranks in groups.items()
    }
    return {
        "version": version,
        "nccl_version": "2.27.3",
        "pg_config": config,
        "pg_status": status,
        "entries": entries,
    }


def write(folder: Path, dumps: Mapping[int, dict[str, Any]], *, as_json: bool = False) -> Path:
    """Write dumps as files named after their ranks; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, content in dumps.items():
        if as_json:
            (folder / f"trace_rank_{rank}.json").write_text(json.dumps(content))
        else:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return folder


def world(count: int, own: Mapping[int, Sequence[Entry]], others: Sequence[Entry]) -> dict[int, dict[str, Any]]:
    """Return dumps of a job with one group: `others` for all ranks that are not in `own`."""
    groups = {"0": range(count)}
    return {rank: dump(own.get(rank, others), groups) for rank in range(count)}
