"""Injection benchmark of the slow-rank detector: recall, delay, wrong ranks and false alarms per day.

    python -m bench.detection [--quick] [--steps N] [--jobs N] [--minutes M] [--part K/N] [--results FILE] [--write]

Every setting's figures are kept in FILE (runs/detection.json), and a setting that is there is not measured again: the
whole benchmark takes about an hour and may be cut into pieces by `--minutes`. `--write` puts docs/detection.md together
from FILE. Every job is watched by a `Detector` of its own, as on line.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from bench.common import DOCS, RUNS, make_parser, read_results
from bench.detection.baselines import RULES, Alarm
from bench.detection.jobs import FAULTS, KINDS, Fault, Floats, Noise, culprits, own_times
from bench.detection.page import page

from ringside.monitor import Detector, StepRecord, detect
from ringside.monitor.collector import StepCollector

RANKS = (2, 4, 8, 128)
JITTERS = (0.02, 0.10)
BEFORE, AFTER = 120, 200
# Steps for which a culprit that has stopped may still be named.
GRACE = 30

# More jitter than this is that of a busy machine.
ROUGH = 0.05

# Faults that are given 500 steps.
LENGTHY = ("drift", "pauses")

# Ranks of jobs that run side by side.
CELLS = 3_500

Figures = dict[str, float | int | None]
Task = Callable[[np.random.Generator], Figures]


def healthy_task(noise: Noise, steps: int) -> Task:
    """Count the alarms of healthy jobs, none shorter than 5,000 steps where `steps` allow."""

    def task(rng: np.random.Generator) -> Figures:
        jobs = max(min(CELLS // noise.ranks, steps // 5_000, 52), 4)
        each, begin = -(-steps // jobs), time.perf_counter()
        alarms = sum(1 for _ in watch(own_times(rng, noise, Fault(), each, jobs), noise.ranks, jobs))
        return {"alarms": alarms, "steps": each * jobs, "seconds": time.perf_counter() - begin}

    return task


def fresh_task(noise: Noise, jobs: int) -> Task:
    """Count the alarms in the first 300 steps of healthy jobs, where little is known."""

    def task(rng: np.random.Generator) -> Figures:
        alarms = sum(1 for _ in watch(own_times(rng, noise, Fault(), 300, jobs), noise.ranks, jobs))
        return {"alarms": alarms, "jobs": jobs}

    return task


def watch(rows: Iterable[Floats], ranks: int, jobs: int) -> Iterator[Alarm]:
    """Yield the verdicts on jobs side by side, of which each row is the log own times [jobs, ranks] of one step."""
    detectors = [Detector(ranks, has_parts=True) for _ in range(jobs)]
    for step, row in enumerate(rows):
        for job, (detector, own) in enumerate(zip(detectors, np.exp(row), strict=True)):
            for event in detector.update(own):
                if not event.ended:
                    yield Alarm(step, job, event.verdict.ranks[0])


def injected_task(noise: Noise, fault: Fault, jobs: int) -> Task:
    """Let something go wrong in each of many jobs and score who is named when."""

    def task(rng: np.random.Generator) -> Figures:
        steps = fault.onset + (300 + AFTER if fault.kind in LENGTHY else AFTER)
        return score_alarms(
            watch(own_times(rng, noise, fault, steps, jobs), noise.ranks, jobs), fault, noise.ranks, jobs
        )

    return task


def rule_task(noise: Noise, fault: Fault, jobs: int, rule: str) -> Task:
    """The same with another tool's rule, and how often it fires on as many healthy steps as fit."""

    def task(rng: np.random.Generator) -> Figures:
        own = np.exp(np.array(list(own_times(rng, noise, fault, fault.onset + AFTER, jobs))))
        well = np.exp(np.array(list(own_times(rng, noise, Fault(), 1_000, 26))))
        false = sum(1 for _ in RULES[rule](well))
        return {**score_alarms(RULES[rule](own), fault, noise.ranks, jobs), "alarms": false, "steps": 26_000}

    return task


def score_alarms(alarms: Iterable[Alarm], fault: Fault, ranks: int, jobs: int) -> Figures:
    """Return recall (all culprits at the onset named), median delay in steps, and verdicts on wrong ranks per job."""
    first: dict[tuple[int, int], int] = {}
    wrong = 0
    for alarm in alarms:
        # Who was at fault a moment ago still counts: a verdict looks back.
        at_fault = set(culprits(fault, alarm.step, ranks)) | set(culprits(fault, alarm.step - GRACE, ranks))
        if alarm.rank in at_fault:
            first.setdefault((alarm.job, alarm.rank), alarm.step + 1 - fault.onset)
        else:
            wrong += alarm.rank >= 0
    expected = culprits(fault, fault.onset, ranks)
    complete = [job for job in range(jobs) if expected and all((job, rank) in first for rank in expected)]
    delays = [max(first[job, rank] for rank in expected) for job in complete]
    found = len(delays)
    return {"recall": found / jobs, "delay": float(np.median(delays)) if found else None, "wrong": wrong / jobs}


def uneven_task(ranks: int, jobs: int) -> Task:
    """Give one rank a quarter more samples: the verdict must say so, and without the counts call it slow."""

    def task(rng: np.random.Generator) -> Figures:
        kinds = []
        for _ in range(jobs):
            samples = np.full((BEFORE + AFTER, ranks), 32.0)
            samples[BEFORE:, 0] = 40
            own = samples / 320 * np.exp(rng.normal(0, 0.02, samples.shape))
            kinds.append([(verdict.kind, verdict.ranks) for verdict in detect(own, samples)])
        right = sum(named == [("uneven_work", [0])] for named in kinds)
        return {
            "recall": right / jobs,
            "delay": None,
            "wrong": sum(len(named) for named in kinds) / jobs - right / jobs,
        }

    return task


def cost_task(ranks: int, steps: int) -> Task:
    """What the detector, and the whole collector, take per step on this machine."""

    def task(rng: np.random.Generator) -> Figures:
        own = 0.1 * np.exp(rng.normal(0, 0.02, (steps, ranks)))
        detector, collector = Detector(ranks), StepCollector(ranks)
        batches = [
            [
                StepRecord(step=step, rank=rank, ended_unix=0.0, step_seconds=0.1, own_seconds=float(value))
                for rank, value in enumerate(row)
            ]
            for step, row in enumerate(own)
        ]
        times = [time.process_time()]
        for row in own:
            detector.update(row)
        times.append(time.process_time())
        for batch in batches:
            collector.add(batch)
        times.append(time.process_time())
        one, whole = 1e6 * np.diff(times) / steps
        return {"detector_us": float(one), "collector_us": float(whole), "record_us": float(whole / ranks)}

    return task


def plan_settings(steps: int, jobs: int) -> Iterator[tuple[str, Task]]:
    """Yield every setting with its name, the floors first."""
    slow, start, much = Fault("slow", 0.12, BEFORE), Fault("from_0", 0.12, 0), Fault("slow", 0.30, BEFORE)
    noises = [
        Noise(kind, jitter, ranks)
        for kind in KINDS
        for jitter in JITTERS
        for ranks in RANKS
        if kind != "states" or jitter > ROUGH  # in less jitter such a state is found, as a slow rank has to be
    ]
    for noise in sorted(noises, key=lambda noise: noise.ranks != 128 or noise.jitter > 0.02):
        at = f"{noise.kind}/{noise.jitter}/{noise.ranks}"
        for name, fault in (("slow", slow), ("start", start), ("much", much)):
            yield f"inject/{at}/{name}", injected_task(noise, fault, jobs)
        yield f"healthy/{at}", healthy_task(noise, steps)
    for rule in RULES:
        for kind, ranks in (("white", 2), ("white", 8), ("white", 128), ("spikes", 128), ("ar", 128)):
            for name, fault in (("slow", slow), ("much", much)):
                yield f"rule/{rule}/{kind}/{ranks}/{name}", rule_task(Noise(kind, 0.02, ranks), fault, jobs, rule)
    for size in (0.03, 0.05, 0.08, 0.12, 0.20, 0.30, 0.50):
        for ranks in (*RANKS, 1024):
            task = injected_task(
                Noise("white", 0.02, ranks), Fault("slow", size, BEFORE), jobs if ranks < 1000 else jobs // 4
            )
            yield f"size/{size}/{ranks}", task
    for jitter in (0.01, 0.02, 0.05, 0.10):
        for ranks in RANKS:
            yield f"jitter/{jitter}/{ranks}", injected_task(Noise("white", jitter, ranks), slow, jobs)
    for kind in FAULTS:
        for ranks in (2, 4, 8, 128):
            if kind not in ("none", "slow", "from_0") and (kind, ranks) != ("two", 2):
                yield (
                    f"fault/{kind}/{ranks}",
                    injected_task(Noise("white", 0.02, ranks), Fault(kind, 0.2, BEFORE), jobs),
                )
    for ranks in (4, 8, 128):
        yield f"fault/uneven/{ranks}", uneven_task(ranks, min(jobs, 20))
    for kind in ("white", "ar"):
        for jitter in (0.02, 0.10):
            for ranks in (2, 4, 8):
                yield f"fresh/{kind}/{jitter}/{ranks}", fresh_task(Noise(kind, jitter, ranks), 10 * jobs)
    for ranks in (*RANKS, 1024):
        yield f"cost/{ranks}", cost_task(ranks, max(steps // 400, 200))
    for kind in ("white", "spikes", "ar"):
        yield f"healthy/{kind}/0.02/1024", healthy_task(Noise(kind, 0.02, 1024), steps)


def measure_settings(path: Path, tasks: Iterable[tuple[str, Task]], until: float) -> int:
    """Measure what is missing until it is time to stop, keep it in `path`, and return how many settings are left."""
    left = 0
    for name, task in tasks:
        if name in read_results(path):
            continue
        if time.monotonic() >= until:
            left += 1
            continue
        figures = task(np.random.default_rng(zlib.crc32(name.encode())))
        print(name, json.dumps(figures), flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh_file = path.with_suffix(f".{os.getpid()}")
        fresh_file.write_text(json.dumps({**read_results(path), name: figures}, indent=0))
        fresh_file.replace(path)
    return left


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("bench.detection", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer jobs and healthy steps: a few minutes")
    parser.add_argument("--steps", type=int, default=260_000, help="healthy steps per line (default: 260000)")
    parser.add_argument("--jobs", type=int, default=100, help="jobs per cell (default: 100)")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no further setting after so many minutes")
    parser.add_argument("--results", type=Path, default=RUNS / "detection.json")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only every N-th setting, from the K-th on")
    parser.add_argument("--write", action="store_true", help="write docs/detection.md from the results")
    args = parser.parse_args()
    steps, jobs = (20_000, 20) if args.quick else (args.steps, args.jobs)
    part, parts = map(int, args.part.split("/"))
    tasks = [("about", lambda _: {"steps": steps, "jobs": jobs}), *plan_settings(steps, jobs)][part - 1 :: parts]
    left = measure_settings(args.results, tasks, time.monotonic() + 60 * args.minutes)
    print(f"{left} settings are left" if left else "every setting is measured", file=sys.stderr)
    if args.write:
        (DOCS / "detection.md").write_text(page(read_results(args.results), KINDS, FAULTS))


if __name__ == "__main__":
    main()
