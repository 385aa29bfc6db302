"""All-reduce of two installed versions of Ringside in turn: is the newer one slower anywhere?

Both have their ranks alive at the same time, and while one measures the other one waits for its line: so both meet the
same weather. Two runs of `ringside bench` do not, and differ by factors of 0.6 to 2.0 on a shared machine.

    python -m bench.allreduce.two_trees OLD/.venv/bin/python NEW/.venv/bin/python [--between-hosts] [--ranks 2,4,8]
        [--sizes 4,1048576]

Prints, for each size and kind of memory, the time of the old one and new over old: the median over the restarts of the
ratio of medians of a restart's blocks, and the least and largest of it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import uuid

from bench.common import make_parser, numbers

SIZES = (4, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
BLOCK_BYTES = 400 << 20  # that one block moves, roughly
MOST, LEAST = 3000, 3  # calls in a block
# Private arrays from 64 KiB on begin at a page in both versions. Otherwise the heap decides, by what a version has
# imported: 128 KiB then took 4% more or less, of the same code.
SAME_PLACE = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}

# Both versions run this. What it needs of them is what every version has: a communicator, empty() and all_reduce().
RANK = """
import sys, time
import numpy as np
from ringside import engine
from ringside.engine import Settings
make = engine.HostCommunicator if hasattr(engine, "HostCommunicator") else engine.Communicator  # its name until 2026
comm = make(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Settings(timeout_s=60.0))
tensors = {}
for line in sys.stdin:
    size, kind, count = line.split()
    if (size, kind) not in tensors:
        elements = int(size) // 4
        tensor = comm.empty(elements, "float32") if kind == "symmetric" else np.zeros(elements, np.float32)
        tensor[:] = 0
        tensors = {(size, kind): tensor}
        for _ in range(5):
            comm.all_reduce(tensor)
    tensor = tensors[size, kind]
    comm.all_reduce(tensor)
    began = time.perf_counter()
    for _ in range(int(count)):
        comm.all_reduce(tensor)
    print((time.perf_counter() - began) / int(count), flush=True)
"""


# The same between hosts: every rank says that it is on a host of its own, and messages go over loopback.
RANK_BETWEEN_HOSTS = """
import datetime, sys, tempfile, time
import torch
import torch.distributed as dist
import ringside
torch.set_num_threads(1)
rank, ranks = int(sys.argv[2]), int(sys.argv[3])
store = dist.FileStore(f"{tempfile.gettempdir()}/{sys.argv[1]}", ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60))
make = ringside.communicator if hasattr(ringside, "communicator") else ringside.Communicator  # its name until 2026
comm = make(machine=f"host {rank}", algorithm="ring")
tensors = {}
for line in sys.stdin:
    size, kind, count = line.split()
    if size not in tensors:
        tensors = {size: torch.zeros(int(size) // 4)}
        for _ in range(5):
            comm.all_reduce(tensors[size])
    tensor = tensors[size]
    comm.all_reduce(tensor)
    began = time.perf_counter()
    for _ in range(int(count)):
        comm.all_reduce(tensor)
    print((time.perf_counter() - began) / int(count), flush=True)
comm.close()
dist.destroy_process_group()
"""


class Version:
    """The ranks of one version, which measure a block when they are told to."""

    def __init__(self, python: str, ranks: int, script: str) -> None:
        key = uuid.uuid4().hex
        self.ranks = [
            subprocess.Popen(
                [python, "-c", script, key, str(rank), str(ranks)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | SAME_PLACE,
            )
            for rank in range(ranks)
        ]

    def block_s(self, size: int, kind: str, count: int) -> float:
        """Return the seconds per all-reduce of the slowest rank."""
        for rank in self.ranks:
            print(size, kind, count, file=rank.stdin, flush=True)
        return max(float(rank.stdout.readline()) for rank in self.ranks if rank.stdout)

    def close(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.communicate(timeout=30)


def compare_versions(
    old: str, new: str, ranks: int, sizes: list[int], restarts: int, blocks: int, *, between_hosts: bool
) -> list[dict[str, float | str]]:
    """Return a row per size and kind of memory."""
    script, kinds = (RANK_BETWEEN_HOSTS, ("hosts",)) if between_hosts else (RANK, ("symmetric", "private"))
    slower = 50 if between_hosts else 1 if ranks == 2 else ranks
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for restart in range(restarts):
        first = restart % 2  # whose ranks are started first, and get the better memory
        versions = [Version(python, ranks, script) for python in ((old, new), (new, old))[first]]
        for kind in kinds:
            for size in sizes:
                count = max(LEAST, min(MOST, BLOCK_BYTES // max(size, 1 << 17)) // slower)
                seconds: tuple[list[float], list[float]] = ([], [])
                for block in range(blocks + 1):  # the first one warms up
                    for which in (0, 1) if block % 2 == 0 else (1, 0):
                        took = versions[which].block_s(size, kind, count)
                        if block:
                            seconds[which ^ first].append(took)
                medians = statistics.median(seconds[0]), statistics.median(seconds[1])
                found.setdefault((kind, size), []).append(medians)
        for version in versions:
            version.close()
    rows: list[dict[str, float | str]] = []
    for (kind, size), pairs in found.items():
        ratios = sorted(after / before for before, after in pairs)
        old_s = statistics.median(before for before, _ in pairs)
        rows.append(
            {
                "ranks": ranks,
                "tensor": kind,
                "size_bytes": size,
                "old_seconds": old_s,
                "ratio": statistics.median(ratios),
                "least": ratios[0],
                "largest": ratios[-1],
            }
        )
    return rows


def main() -> None:
    parser = make_parser("bench.allreduce.two_trees", __doc__)
    parser.add_argument("old", help="the Python of the older version's environment")
    parser.add_argument("new", help="that of the newer one")
    parser.add_argument("--ranks", default="2,4,8", help="rank counts (default: 2,4,8)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes (default: 4 B to 64 MiB)")
    parser.add_argument("--between-hosts", action="store_true", help="every rank on a host of its own, by a ring")
    parser.add_argument("--restarts", type=int, default=4, help="new processes, so many times (default: 4)")
    parser.add_argument("--blocks", type=int, default=15, help="blocks of each version, per size (default: 15)")
    parser.add_argument("--json", action="store_true", help="print a list of rows, times in seconds")
    asked = parser.parse_args()
    rows, sizes = [], numbers(asked.sizes)
    for ranks in numbers(asked.ranks):
        print(f"{ranks} ranks", file=sys.stderr)
        options = asked.restarts, asked.blocks
        for row in compare_versions(asked.old, asked.new, ranks, sizes, *options, between_hosts=asked.between_hosts):
            rows.append(row)
            if not asked.json:
                line = "{ranks} ranks {tensor:9} {size_bytes:9} B {us:9.2f} us  x {ratio:.3f} {least:.2f} {largest:.2f}"
                print(line.format(**row, us=float(row["old_seconds"]) * 1e6), flush=True)
    if asked.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
