"""What it costs to read the rings of NCCL's plugin: CPU time of the reader, as a share of a core.

    python -m bench.monitor.nccl_rings [--rings 64] [--calls 20] [--channels 24] [--seconds 40]

Rings are written here as the plugin writes them, all-reduces of all ranks, and read as `ringside run --nccl` does. Time
is not waited for: so many seconds' records are read, in turns, and their times say that they were called in these.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
from bench.common import make_parser

from ringside.monitor.nccl.ring import (
    CALLED,
    COLLECTIVE,
    COMMUNICATOR,
    COMMUNICATORS,
    FOLDER,
    HEAD,
    HEADER,
    HEADER_BYTES,
    KERNEL,
    KIND_BITS,
    MAGIC,
    PREFIX,
    RECORD,
    STARTED,
    STOPPED,
)
from ringside.monitor.nccl.watch import READ_SECONDS, NcclWatch
from ringside.processes import start_time

RECORDS = 32 * 1024


class WrittenRing:
    """The ring of one rank, which this process writes in the plugin's place.

    Args:
        folder: Where.
        rank: Whose.
        ranks: Of how many.
        channels: Of each call.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, channels: int) -> None:
        path = folder / f"{PREFIX}{os.getpid()}-{rank}"
        at = HEADER_BYTES + COMMUNICATORS * COMMUNICATOR.itemsize
        memory = np.memmap(path, np.uint8, "w+", shape=at + RECORDS * RECORD.itemsize)
        self._words = memory[:HEADER_BYTES].view(np.uint64)
        self._records = memory[at:].view(RECORD)
        self._channels = channels
        (communicator,) = memory[HEADER_BYTES : HEADER_BYTES + COMMUNICATOR.itemsize].view(COMMUNICATOR)
        communicator["made"], communicator["id"], communicator["ranks"], communicator["rank"] = 1, 9, ranks, rank
        (header,) = memory[: HEADER.itemsize].view(HEADER)
        header["pid"], header["process_started"] = os.getpid(), start_time(os.getpid())
        header["global_rank"], header["interface"], header["communicators"] = rank, 6, 1
        header["records"], header["magic"] = RECORDS, MAGIC

    def add(self, number: int, now: int, late_ns: int) -> None:
        """Record a call that is over: its start, and start and end of each channel's kernel."""
        head, channels = int(self._words[HEAD]), self._channels
        made = np.zeros(1 + 2 * channels, RECORD)
        made["sequence"], made["host_ns"] = head + 1 + np.arange(len(made)), now
        made["kind"], made["what"][1 + channels :] = KERNEL, STOPPED
        made["handle"][1 : 1 + channels] = (head + 1) << KIND_BITS | COLLECTIVE
        made["handle"][1 + channels :] = (head + 2 + np.arange(channels)) << KIND_BITS | KERNEL
        made["gpu_ns"][1 : 1 + channels], made["gpu_ns"][1 + channels :] = now + late_ns, now + 2_000_000
        made["func"][0], made["datatype"][0], made["kind"][0], made["what"][0] = (
            b"AllReduce", b"ncclFloat32", COLLECTIVE, STARTED,
        )  # fmt: skip
        made["number"][0], made["channels"][0], made["flags"][0] = number, channels, CALLED
        self._records[(head + np.arange(len(made))) % RECORDS] = made
        self._words[HEAD] = head + len(made)


def main() -> None:
    """Measure and print."""
    parser = make_parser("bench.monitor.nccl_rings", __doc__)
    parser.add_argument("--rings", type=int, default=64, help="processes (default: 64)")
    parser.add_argument("--calls", type=float, default=20.0, help="collectives a second (default: 20)")
    parser.add_argument("--channels", type=int, default=24, help="channels of each (default: 24)")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long the ranks call (default: 40)")
    args = parser.parse_args()
    turns, calls = round(args.seconds / READ_SECONDS), round(args.calls * READ_SECONDS)
    with tempfile.TemporaryDirectory(dir=FOLDER if Path(FOLDER).is_dir() else None) as name:
        rings = [WrittenRing(Path(name), rank, args.rings, args.channels) for rank in range(args.rings)]
        watch, spent = NcclWatch(Path(name)), 0.0
        for turn in range(turns):
            for call in range(calls):
                now = time.monotonic_ns() - round((calls - call) / args.calls * 1e9)
                for rank, ring in enumerate(rings):
                    ring.add(turn * calls + call, now, 1_000_000 if rank == 1 else 0)
            began = time.process_time()
            watch.poll()
            spent += time.process_time() - began
        share = spent / (turns * READ_SECONDS)
        each = f", {spent / watch.records * 1e9:.0f} ns each" if watch.records else ""
        print(f"{args.rings} rings: {watch.records:,} events{each}; {share:.2%} of a core")


if __name__ == "__main__":
    main()
