"""A million steps through the collector, the detectors and the run directory: memory and disk as they go.

    python -m bench.monitor.memory [--steps 1000000] [--ranks 2] [--full-bytes 1073741824] [--only-collect]

Prints resident memory, the size of `steps.jsonl` and the time per step at every tenth.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from bench.common import make_parser, resident_bytes

from ringside.monitor.alerts.book import AlertBook
from ringside.monitor.collector import StepCollector, standard_watchers
from ringside.monitor.run.directory import FULL_BYTES, RunWriter
from ringside.monitor.run.records import RunInfo, StepRecord

BLOCK = 500  # steps whose records reach the collector together


def main() -> None:
    """Feed generated steps and print."""
    parser = make_parser("bench.monitor.memory", __doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--full-bytes", type=int, default=FULL_BYTES)
    parser.add_argument(
        "--only-collect", action="store_true", help="leave out the detectors, which take most of the time"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        hosts = ["host"] * args.ranks
        info = RunInfo(
            schema=1, name="memory", started_unix=0.0, command=[], world_size=args.ranks, hosts=hosts,
            pids=[1] * args.ranks, engine="gloo",
        )  # fmt: skip
        writer = RunWriter(Path(directory) / "run", info, full_bytes=args.full_bytes)
        book = AlertBook("memory")
        watchers = [] if args.only_collect else standard_watchers(args.ranks, hosts)
        collector = StepCollector(args.ranks, writer, watchers=watchers, listeners=[book.record])
        began, first = time.perf_counter(), 0.0
        rng = np.random.default_rng(0)
        for step in range(0, args.steps, BLOCK):
            collector.add(healthy_records(rng, step, args.ranks))
            book.tick(collector.newest)
            done = step + BLOCK
            if done % max(args.steps // 10, BLOCK) == 0:
                first = first or resident_bytes() / 1e6
                report_line(done, first, writer, time.perf_counter() - began)
        print(f"verdicts {len(collector.verdicts)}; every {writer.stride}th step is written at the end")


def healthy_records(rng: np.random.Generator, begin: int, ranks: int) -> list[StepRecord]:
    """Return healthy records of some steps: 2% of jitter, now and then a pause."""
    own = 0.1 * np.exp(rng.normal(0.0, 0.02, (BLOCK, ranks))) + 0.05 * (rng.random((BLOCK, ranks)) < 0.002)
    slowest = own.max(axis=1)
    return [
        StepRecord(
            step=begin + row,
            rank=rank,
            ended_unix=1.8e9 + 0.1 * (begin + row),
            step_seconds=float(slowest[row]) + 0.01,
            own_seconds=float(own[row, rank]),
            wait_seconds=float(slowest[row] - own[row, rank]),
            exposed_seconds=float(slowest[row] - own[row, rank]) + 0.01,
            sync_seconds=0.02,
            data_seconds=0.002,
            forward_seconds=0.03,
            backward_seconds=0.06,
            optimizer_seconds=0.008,
            cpu_seconds=0.1,
            samples=32,
            payload_bytes=4_000_000,
            collectives=4,
            overhead_seconds=3e-5,
            loss=2.5,
        )
        for row in range(BLOCK)
        for rank in range(ranks)
    ]


def report_line(steps: int, first_mb: float, writer: RunWriter, seconds: float) -> None:
    """Print one line."""
    size = (writer.path / "steps.jsonl").stat().st_size
    now = resident_bytes() / 1e6
    print(
        f"{steps:>9,} steps: {now:6.1f} MB resident ({now - first_mb:+.1f}), steps.jsonl {size / 1e6:7.1f} MB, "
        f"{seconds / steps * 1e6:.0f} µs per step",
        flush=True,
    )


if __name__ == "__main__":
    main()
