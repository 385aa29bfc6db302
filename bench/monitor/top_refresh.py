"""How long `ringside top` takes for a refresh with many ranks.

    python -m bench.monitor.top_refresh [--ranks 1024] [--steps 64] [--refreshes 20]

A step is appended to a recorded run between refreshes, as a job does; the time is that of reading it, sorting all ranks
and drawing an 80 × 24 screen. Nothing is asserted.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
from bench.common import make_parser
from tests.recorded_runs import own_times, write_run

from ringside.files import append_to_file
from ringside.monitor import StepRecord
from ringside.view.tui.app import TopApp
from ringside.view.tui.source import Local, take_snapshot


def append_step(path: Path, step: int, own: np.ndarray) -> None:
    """Append one step of all ranks."""
    records = (
        StepRecord(step=step, rank=rank, ended_unix=1.0, step_seconds=0.2, own_seconds=float(value), wait_seconds=0.01)
        for rank, value in enumerate(own)
    )
    append_to_file(path / "steps.jsonl", b"".join(msgspec.json.encode(record) + b"\n" for record in records))


async def measure_refreshes(path: Path, ranks: int, steps: int, refreshes: int) -> None:
    """Print what refreshes take."""
    source = Local(path)
    begun = time.perf_counter()
    take_snapshot(source)
    print(f"first look at {ranks} ranks x {steps} steps: {time.perf_counter() - begun:.2f} s")
    app = TopApp(source, refresh_s=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await app.workers.wait_for_complete()
        reading, drawing, keys = [], [], []
        own = own_times(refreshes, ranks, seed=1)
        for number in range(refreshes):
            append_step(path, steps + number, own[number])
            begun = time.perf_counter()
            snapshot = take_snapshot(source)
            reading.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            app.snapshot = snapshot
            app.show_snapshot()
            drawing.append(time.perf_counter() - begun)
            await pilot.pause()
            begun = time.perf_counter()
            app.action_sort(1)
            keys.append(time.perf_counter() - begun)
    for name, values in (("reading one step", reading), ("drawing it", drawing), ("a key (sort)", keys)):
        print(f"{name:<18} median {1e3 * statistics.median(values):7.1f} ms   longest {1e3 * max(values):7.1f} ms")


def main() -> None:
    """Measure."""
    parser = make_parser("bench.monitor.top_refresh", __doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--refreshes", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = write_run(Path(directory) / "run", own_times(args.steps, args.ranks))
        (path / "events.jsonl").write_text("")
        asyncio.run(measure_refreshes(path, args.ranks, args.steps, args.refreshes))


if __name__ == "__main__":
    main()
