"""The detector on recorded noise: a fault is put into stretches of healthy jobs, and healthy steps are watched whole.

    python -m bench.detection.recorded [--size 0.3] [--stretches 20] [--json] [FILE ...]

FILEs are sessions of `bench.detection.record` (default: those in tests/data/noise; which are for tuning and which for
scoring says `sessions.toml`). In each stretch one rank's own time is multiplied from a random step between 60 and 160
on. Printed per job: how often that rank is named first and within 200 steps, the median and the 90th percentile of the
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

from ringside.monitor.slow_rank.window_test import WARM_UP, WindowTest
from ringside.monitor.stats import log_excess, usable

Floats = NDArray[np.float64]
FIRST_ONSET, LAST_ONSET, AFTER = 60, 160, 200


def healthy_jobs(paths: list[Path]) -> Iterator[tuple[str, Job, Floats]]:
    """Yield name, description and own times in seconds, [steps, ranks], none missing, of the jobs without a fault."""
    for path in paths:
        with np.load(path) as session:
            for number in range(sum(name.endswith(".job") for name in session.files)):
                job = msgspec.json.decode(str(session[f"{number}.job"]), type=Job)
                own = usable(decode(session[f"{number}.times"][PHASES.index("own")]))[WARM_UP:]
                if not job.fault:
                    yield f"{path.stem}.{number}", job, np.where(np.isnan(own), np.nanmedian(own), own)


def with_faults(own: Floats, size: float, count: int, seed: int) -> tuple[Floats, NDArray[Any], NDArray[Any]]:
    """Return stretches of a job with a fault in each, [steps, stretches, ranks], and their onsets and culprits."""
    rng = np.random.default_rng(seed)
    onsets, culprits = rng.integers(FIRST_ONSET, LAST_ONSET, count), rng.integers(own.shape[1], size=count)
    steps = min(LAST_ONSET + AFTER, len(own) - 1)
    starts = rng.integers(0, len(own) - steps, count)
    stretches = np.stack([own[start : start + steps] for start in starts], axis=1)
    for number, (onset, culprit) in enumerate(zip(onsets, culprits, strict=True)):
        stretches[onset:, number, culprit] *= 1.0 + size
    return stretches, onsets, culprits


def score(stretches: Floats, onsets: NDArray[Any], culprits: NDArray[Any]) -> dict[str, float]:
    """Return what the detector makes of stretches; see `with_faults`."""
    steps, count, ranks = stretches.shape
    test, named, wrong = WindowTest(count, ranks), np.full(count, np.inf), 0
    is_first = np.ones(count, dtype=bool)
    for step in range(steps):
        opened, _ = test.update(log_excess(stretches[step]))
        for number, rank in np.argwhere(opened):
            delay = step - onsets[number] + 1
            wrong += rank != culprits[number]
            if delay > 0 and is_first[number]:
                is_first[number] = False
                if rank == culprits[number] and delay <= AFTER:
                    named[number] = delay
    middle, late = np.percentile(named, [50, 90], method="higher")
    return {"found": float(np.mean(np.isfinite(named))), "median": middle, "p90": late, "wrong": int(wrong)}


def alarms(own: Floats) -> int:
    """Return how many verdicts there are in healthy steps, [steps, ranks]."""
    test = WindowTest(1, own.shape[1])
    return sum(int(test.update(log_excess(row)[None])[0].sum()) for row in own)


def main() -> None:
    """Score what is asked for."""
    parser = make_parser("bench.detection.recorded", __doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="sessions")
    parser.add_argument("--size", type=float, default=0.3, help="how much longer the culprit takes (default: 0.3)")
    parser.add_argument("--stretches", type=int, default=20, help="of each job (default: 20)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    results = []
    try:
        jobs = list(healthy_jobs(options.files or sorted((ROOT / "tests/data/noise").glob("*.npz"))))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"not a session of bench.detection.record: {error}")
    for name, job, own in jobs:
        seed = zlib.crc32(f"{name}/{options.size}".encode())
        found = score(*with_faults(own, options.size, options.stretches, seed))
        results.append({"name": name, **msgspec.to_builtins(job), **found, "alarms": alarms(own), "steps": len(own)})
        if not options.json:
            delay = f"delay {found['median']:.0f} / {found['p90']:.0f}"
            healthy = f"alarms {results[-1]['alarms']} in {len(own)} healthy steps"
            print(
                f"{name} {job.ranks} ranks, {job.model:8}{job.engine:9}{job.load:7}: found {found['found']:4.0%}, "
                f"{delay}, wrong {found['wrong']}; {healthy}",
                flush=True,
            )
    if options.json:
        print(json.dumps([{k: None if v == np.inf else v for k, v in row.items()} for row in results]))


if __name__ == "__main__":
    main()
