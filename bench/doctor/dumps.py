"""How long the doctor takes for the flight-recorder dumps of a large job: 1,024 ranks, one of which never came.

python -m bench.doctor.dumps [--ranks 1024] [--calls 20,300]
"""

from __future__ import annotations

import pickle
import resource
import tempfile
import time
from pathlib import Path

from bench.common import make_parser, numbers

from ringside.doctor import examine

START_NS = 1_758_610_505_000_000_000  # when the first collective was created, ns since 1970


def main() -> None:
    parser = make_parser("bench.doctor.dumps", __doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--calls", default="20,300", help="calls in each dump (the real ones at hand hold 8 to 43)")
    args = parser.parse_args()
    print(f"{'ranks':>6} {'calls':>6} {'MB':>7} {'wall s':>7} {'CPU s':>7} {'peak MB':>8}  verdict")
    for calls in numbers(args.calls):
        with tempfile.TemporaryDirectory() as folder:
            nbytes = write_dumps(Path(folder), args.ranks, calls)
            print(f"{args.ranks:6} {calls:6} {nbytes / 1e6:7.1f} {judged(folder)}")


def judged(folder: str) -> str:
    """Return what examining a folder takes, seconds of wall and CPU and this process's peak in MB, and the verdicts."""
    wall, cpu = time.monotonic(), time.process_time()
    found = examine([folder])
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    said = ", ".join(f"{verdict.kind} {verdict.ranks}" for verdict in found.verdicts)
    return f"{wall:7.2f} {cpu:7.2f} {peak:8.0f}  {said}"


def write_dumps(folder: Path, ranks: int, calls: int) -> int:
    """Write one dump per rank as PyTorch does; return their bytes. Rank 77 (or the last) misses the last five calls."""
    late = min(77, ranks - 1)
    total = 0
    for rank in range(ranks):
        data = pickle.dumps(one_dump(rank, ranks, calls - 5 if rank == late else calls, calls - 5), protocol=2)
        total += folder.joinpath(f"nccl_trace_rank_{rank}").write_bytes(data)
    return total


def one_dump(rank: int, ranks: int, entered: int, completed: int) -> dict[str, object]:
    pair = rank // 8 * 8
    groups = {"0": ("default_pg", list(range(ranks))), str(1 + rank // 8): ("tp", list(range(pair, pair + 8)))}
    return {
        "version": "2.9",
        "nccl_version": "2.27.3",
        "pg_config": {name: {"name": name, "desc": desc, "ranks": str(own)} for name, (desc, own) in groups.items()},
        "pg_status": {
            "0": {
                "last_enqueued_collective": entered,
                "last_started_collective": -1,
                "last_completed_collective": completed,
            }
        },
        "entries": [one_entry(seq, done=seq <= completed) for seq in range(1, entered + 1)],
    }


def one_entry(seq: int, *, done: bool) -> dict[str, object]:
    created = START_NS + seq * 1_000_000
    return {
        "record_id": seq,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": created + 500_000 if done else None,
        "input_sizes": [[1000, seq % 7 + 1]],
        "output_sizes": [[1000, seq % 7 + 1]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": "completed" if done else "scheduled",
        "retired": done,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "frames": [{"name": f"f{depth}", "filename": f"/job/file{depth}.py", "line": depth} for depth in range(8)],
    }


if __name__ == "__main__":
    main()
