"""The detector on recorded noise: a fault is put into stretches of healthy jobs, and healthy steps are watched whole.

    python -m bench.detection.recorded [--size 0.3] [--input] [--stretches 20] [--json] [FILE ...]

FILEs are sessions of `bench.detection.record` (default: those in tests/data/noise; which are for tuning and which for
scoring says `sessions.toml`). In each stretch, from a random step between 60 and 160 on,
one rank's own time is multiplied, all of its phases alike, or its input takes longer by that share of the own time.
Printed per job: how often that rank is named first and within 200 steps, the median and the 90th percentile of the
delay (a run that is not named so counts as never), verdicts on other ranks, and alarms in the healthy steps.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from bench.common import ROOT, make_parser
from bench.detection.record import PHASES, Job, decode
from numpy.typing import NDArray

from ringside.monitor.slow_rank.detector import PARTS, Detector
from ringside.monitor.slow_rank.window_test import WARM_UP
from ringside.monitor.stats import usable

Floats = NDArray[np.float64]
FIRST_ONSET, LAST_ONSET, AFTER = 60, 160, 200


def healthy_jobs(paths: list[Path]) -> Iterator[tuple[str, Job, Floats]]:
    """Yield name, description and times of the jobs without a fault, none missing.

    Times are in seconds, [1 + parts + 1, steps, ranks]: the whole own time, each of `PARTS`, and the part of the whole
    in which the rank had no CPU (0 in sessions that do not have it).
    """
    for path in paths:
        with np.load(path) as session:
            for number in range(sum(name.endswith(".job") for name in session.files)):
                job = msgspec.json.decode(str(session[f"{number}.job"]), type=Job)
                codes = session[f"{number}.times"][:, WARM_UP:]
                codes = np.pad(codes, ((0, len(PHASES) - len(codes)), (0, 0), (0, 0)))
                times = decode(codes[[PHASES.index(name) for name in ("own", *PARTS, "run_delay")]])
                known = np.isfinite(usable(times[0]))
                if not job.fault:
                    typical = np.array([np.median(row[known]) for row in times])
                    yield f"{path.stem}.{number}", job, np.where(known, times, typical[:, None, None])


def with_faults(
    times: Floats, size: float, count: int, seed: int, *, is_input: bool = False
) -> tuple[Floats, NDArray[Any], NDArray[Any]]:
    """Return stretches of a job with a fault in each, [1 + parts + 1, steps, stretches, ranks], onsets and culprits.

    Who computes longer also waits longer for a CPU beside other programs.

    Args:
        times: A healthy job, see `healthy_jobs`.
        size: How much longer the culprit's own time is.
        count: How many stretches.
        seed: Draws them.
        is_input: Its input is what takes longer, by that share of the job's typical own time; else all phases do.
    """
    rng = np.random.default_rng(seed)
    _, length, ranks = times.shape
    onsets, culprits = rng.integers(FIRST_ONSET, LAST_ONSET, count), rng.integers(ranks, size=count)
    steps = min(LAST_ONSET + AFTER, length - 1)
    starts = rng.integers(0, length - steps, count)
    stretches = np.stack([times[:, start : start + steps] for start in starts], axis=2)
    for number, (onset, culprit) in enumerate(zip(onsets, culprits, strict=True)):
        if is_input:
            stretches[[0, 1 + PARTS.index("data")], onset:, number, culprit] += size * np.median(times[0])
        else:
            stretches[:, onset:, number, culprit] *= 1.0 + size
    return stretches, onsets, culprits


def score(stretches: Floats, onsets: NDArray[Any], culprits: NDArray[Any]) -> dict[str, float]:
    """Return what the detector makes of stretches; see `with_faults`."""
    named, wrong = np.full(len(onsets), np.inf), 0
    for number, (onset, culprit) in enumerate(zip(onsets, culprits, strict=True)):
        is_first = True
        for step, rank in alarms(stretches[:, :, number]):
            delay = step - onset + 1
            wrong += rank != culprit
            if delay > 0 and is_first:
                is_first = False
                if rank == culprit and delay <= AFTER:
                    named[number] = delay
    middle, late = np.percentile(named, [50, 90], method="higher")
    return {"found": float(np.mean(np.isfinite(named))), "median": middle, "p90": late, "wrong": int(wrong)}


def alarms(times: Floats) -> list[tuple[int, int]]:
    """Return step and rank of each verdict on times [1 + parts + 1, steps, ranks]."""
    detector = Detector(times.shape[2], has_parts=True)
    found = []
    for step, (own, *parts, run_delay) in enumerate(times.swapaxes(0, 1)):
        events = detector.update(own, step=step, parts=np.array(parts), run_delay=run_delay)
        found += [(step, event.verdict.ranks[0]) for event in events if not event.ended]
    return found


def main() -> None:
    """Score what is asked for."""
    parser = make_parser("bench.detection.recorded", __doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="sessions")
    parser.add_argument("--size", type=float, default=0.3, help="how much longer the culprit takes (default: 0.3)")
    parser.add_argument("--input", action="store_true", help="only its input takes longer")
    parser.add_argument("--stretches", type=int, default=20, help="of each job (default: 20)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    results = []
    try:
        jobs = list(healthy_jobs(options.files or sorted((ROOT / "tests/data/noise").glob("*.npz"))))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"not a session of bench.detection.record: {error}")
    for name, job, times in jobs:
        seed = zlib.crc32(f"{name}/{options.size}".encode())
        found = score(*with_faults(times, options.size, options.stretches, seed, is_input=options.input))
        healthy = {"alarms": len(alarms(times)), "steps": times.shape[1]}
        results.append({"name": name, **msgspec.to_builtins(job), **found, **healthy})
        if not options.json:
            delay = f"delay {found['median']:.0f} / {found['p90']:.0f}"
            print(
                f"{name} {job.ranks} ranks, {job.model:8}{job.engine:9}{job.load:7}: found {found['found']:4.0%}, "
                f"{delay}, wrong {found['wrong']}; alarms {healthy['alarms']} in {healthy['steps']} healthy steps",
                flush=True,
            )
    if options.json:
        print(json.dumps([{k: None if v == np.inf else v for k, v in row.items()} for row in results]))


if __name__ == "__main__":
    main()
