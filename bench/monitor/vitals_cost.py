"""What it costs to ask the kernel how a rank does: per reading on the monitor's thread, per step where it trains.

    python -m bench.monitor.vitals_cost [--readings 400] [--threads 16]

A reading is taken while the caches are warm, and after 32 MB were written in between, as by a training step. CPU time
of the reading thread counts: on a machine that others use, too, elapsed time says nothing.
"""

from __future__ import annotations

import threading
import time
from statistics import median

import numpy as np
from bench.common import make_parser

from ringside.monitor.vitals.process import LARGEST_SHARE, VitalSigns
from ringside.pytorch.recording.record_transport import BATCH_SECONDS
from ringside.pytorch.recording.session import RankVitals

STEPS = 20_000  # over which the cost of one is the mean


def main() -> None:
    """Measure and print."""
    parser = make_parser("bench.monitor.vitals_cost", __doc__)
    parser.add_argument("--readings", type=int, default=400, help="readings (default: 400)")
    parser.add_argument("--threads", type=int, default=16, help="idle threads in the process (default: 16)")
    args = parser.parse_args()
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(args.threads)]
    for thread in threads:
        thread.start()
    cold = np.zeros(4 << 20)  # 32 MB: more than the caches hold
    warm_us, cold_us = (1e6 * reading_cost_s(args.readings, between) for between in (None, cold))
    print(f"a reading, {args.threads + 1} threads: {warm_us:.0f} µs of CPU time, {cold_us:.0f} µs with cold caches")
    every_s = max(BATCH_SECONDS, cold_us / 1e6 / LARGEST_SHARE)
    print(f"every {every_s:.2f} s at most: {share_of_core(cold_us):.3%} of one core")
    print(f"per step, on the thread that trains: {1e6 * per_step_s():.2f} µs")
    done.set()
    for thread in threads:
        thread.join()


def reading_cost_s(readings: int, between: np.ndarray | None) -> float:
    """Return the median CPU seconds of a reading."""
    signs, costs = VitalSigns(), []
    for _ in range(readings):
        if between is not None:
            between += 1.0
        began = time.thread_time()
        signs.restart()
        costs.append(time.thread_time() - began)
    signs.close()
    return median(costs)


def share_of_core(cost_us: float) -> float:
    """Return the share of a core that readings take."""
    return min(cost_us / 1e6 / BATCH_SECONDS, LARGEST_SHARE)


def per_step_s() -> float:
    """Return the seconds that a step's own part takes."""
    vitals = RankVitals()
    began = time.thread_time()
    for _ in range(STEPS):
        vitals.step_ended()
    took = (time.thread_time() - began) / STEPS
    vitals.close()
    return took


if __name__ == "__main__":
    main()
