"""Injection benchmark of the slow-rank detector: recall, delay, wrong ranks and false alarms per day.

    python bench/detection.py [--quick] [--seed N]

Prints Markdown tables; docs/design/0002-detector.md holds those of the published operating point. Jobs run side by
side through the detector's own arithmetic (`ringside.monitor.screen`), the code that runs on line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ringside.monitor import Detector, StepRecord
from ringside.monitor.excess import Floats, log_excess
from ringside.monitor.online import Collector
from ringside.monitor.screen import Screen

DAY = 86_400
RANKS = (2, 4, 8, 128)
JITTERS = (0.02, 0.10)
KINDS = {
    "white": "independent",
    "spikes": "1 % spikes, 1.2–4.5×",
    "busy": "busy machine: 15 % of steps 1.2–3.3×",
    "ar": "autocorrelation 0.9",
    "heavy": "Student t, 3 degrees",
    "static": "constant ±3 % spread",
    "pauses": "a 2× pause every 50 steps",
}
BEFORE, AFTER = 120, 200


class Outcome(NamedTuple):
    """Of one setting: share of jobs whose culprit was found, median delay and onset error, wrong verdicts per job."""

    recall: float
    delay: float
    onset: float
    wrong: float


def log_noise(
    rng: np.random.Generator, kind: str, steps: int, jobs: int, ranks: int, jitter: float
) -> Iterator[Floats]:
    """Yield log own times [jobs, ranks], one step at a time."""
    shape = (jobs, ranks)
    state = rng.normal(0, jitter, shape)
    spread = np.log(rng.uniform(0.97, 1.03, shape))
    phase = rng.integers(0, 50, shape)
    for step in range(steps):
        row = rng.normal(0, jitter, shape)
        if kind == "ar":
            state = 0.9 * state + np.sqrt(1 - 0.9**2) * row
            row = state
        elif kind == "heavy":
            row = np.clip(rng.standard_t(3, shape) * jitter / np.sqrt(3), -3, 3)
        elif kind == "spikes":
            row = row + (rng.random(shape) < 0.01) * rng.uniform(0.2, 1.5, shape)
        elif kind == "busy":
            row = row + (rng.random(shape) < 0.15) * rng.uniform(0.2, 1.2, shape)
        elif kind == "static":
            row = row + spread
        elif kind == "pauses":
            row = row + np.log(2) * ((step + phase) % 50 == 0)
        yield row


def false_alarms(rng: np.random.Generator, kind: str, ranks: int, jitter: float, steps: int) -> tuple[int, int]:
    """Return (alarms, job steps) of healthy jobs."""
    jobs = 16 if ranks >= 64 else 32
    screen, alarms = Screen(jobs, ranks), 0
    for row in log_noise(rng, kind, -(-steps // jobs), jobs, ranks, jitter):
        alarms += int(screen.update(log_excess(np.exp(row)))[0].sum())
    return alarms, screen.steps * jobs


def inject(
    rng: np.random.Generator, kind: str, ranks: int, jitter: float, slowdown: float, onset: int, jobs: int
) -> Outcome:
    """Slow one random rank of each of many jobs down from step `onset` on."""
    culprit = rng.integers(0, ranks, jobs)
    here = np.arange(jobs)
    screen = Screen(jobs, ranks)
    found, began, wrong = np.full(jobs, np.nan), np.full(jobs, np.nan), 0
    for step, noise in enumerate(log_noise(rng, kind, onset + AFTER, jobs, ranks, jitter)):
        row = noise.copy()
        row[here, culprit] += np.log1p(slowdown) if step >= onset else 0.0
        opened, _ = screen.update(log_excess(np.exp(row)))
        if not opened.any():
            continue
        right = opened[here, culprit] & (step >= onset) & np.isnan(found)
        found[right], began[right] = step + 1 - onset, screen.onset[here, culprit][right] - onset
        wrong += int(opened.sum() - (opened[here, culprit] & (step >= onset)).sum())
    return Outcome(float(np.mean(~np.isnan(found))), _median(found), _median(began), wrong / jobs)


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else float("nan")


def _cell(outcome: Outcome) -> str:
    delay = "–" if np.isnan(outcome.delay) else f"{outcome.delay:.0f}"
    return f"{outcome.recall:.0%} · {delay} · {outcome.wrong:.0%}"


def operating_point(rng: np.random.Generator, steps: int, seeds: int) -> None:
    """The main table: noise × ranks."""
    print(
        f"Of {seeds} jobs each: found within {AFTER} steps · median delay in steps · verdicts on a wrong rank per job."
    )
    print(f"False alarms per {DAY:,} job steps, over at least {steps:,} healthy steps per line.\n")
    print("| noise | jitter | ranks | false alarms | 12 % mid-run | 12 % from step 0 | 30 % mid-run |")
    print("|---|---|---|---|---|---|---|")
    for kind, words in KINDS.items():
        for jitter in JITTERS:
            for ranks in RANKS:
                alarms, over = false_alarms(rng, kind, ranks, jitter, steps)
                cells = [
                    _cell(inject(rng, kind, ranks, jitter, slowdown, onset, seeds))
                    for slowdown, onset in ((0.12, BEFORE), (0.12, 0), (0.30, BEFORE))
                ]
                rate = f"{alarms * DAY / over:.2f}"
                print(f"| {words} | {jitter:.0%} | {ranks} | {rate} | {' | '.join(cells)} |", flush=True)


def slowdowns(rng: np.random.Generator, seeds: int) -> None:
    """Recall and delay by size of the slowdown, 2 % jitter."""
    sizes = (0.03, 0.05, 0.08, 0.12, 0.20, 0.30, 0.50)
    print("\n| slowdown, mid-run, 2 % jitter | " + " | ".join(f"{ranks} ranks" for ranks in RANKS) + " |")
    print("|---" * (1 + len(RANKS)) + "|")
    for size in sizes:
        cells = [_cell(inject(rng, "white", ranks, 0.02, size, BEFORE, seeds)) for ranks in RANKS]
        print(f"| {size:.0%} | {' | '.join(cells)} |", flush=True)


def cost(rng: np.random.Generator, steps: int) -> None:
    """What the detector and the whole collector cost on this machine."""
    print("\n| ranks | detector, µs per step | collector (detector included), µs per step | µs per record |")
    print("|---|---|---|---|")
    for ranks in RANKS:
        own = 0.1 * np.exp(rng.normal(0, 0.02, (steps, ranks)))
        detector, collector = Detector(ranks), Collector(ranks)
        batches = [
            [
                StepRecord(step=step, rank=rank, ended_unix=0.0, step_seconds=0.1, own_seconds=float(value))
                for rank, value in enumerate(row)
            ]
            for step, row in enumerate(own)
        ]
        begin = time.perf_counter()
        for row in own:
            detector.update(row)
        middle = time.perf_counter()
        for batch in batches:
            collector.add(batch)
        one, all_ = 1e6 * (middle - begin) / steps, 1e6 * (time.perf_counter() - middle) / steps
        print(f"| {ranks} | {one:.0f} | {all_:.0f} | {all_ / ranks:.1f} |", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds and healthy steps: a few seconds")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    steps, seeds = (20_000, 20) if args.quick else (260_000, 100)
    operating_point(rng, steps, seeds)
    slowdowns(rng, seeds)
    cost(rng, 500 if args.quick else 2_000)


if __name__ == "__main__":
    main()
