"""The detector on recorded noise: a fault is put into stretches of healthy jobs, and healthy steps are watched whole.

    python -m bench.detection.recorded [--size 0.3] [--input] [--stretches 20] [--json] [FILE ...]

FILEs are sessions of `bench.detection.record` (default: those in tests/data/noise; which are for tuning and which for
scoring says `sessions.toml`). In each stretch, from a random step between 60 and 160 on,
one rank's own time is multiplied, all of its phases alike, or its input takes longer by that share of the own time.
Printed per job: how often that rank is named first and within 200 steps, the median and the 90th percentile of the
delay (a run that is not named so counts as never), the same of an oracle, verdicts on other ranks, the live price over
what was lost (which is known here: the fault was put in), and alarms in the healthy steps. Then the same by condition,
with intervals that hold 95% when sessions, and stretches within them, are drawn again (bootstrap), and alarms in 86,400
steps with Poisson's 95%.

The *oracle* knows which rank and which stream of it is hit (the whole without waits for a CPU, or the input), where
that usually lies, by how much it will rise, and the noise of this very recording, healthy steps after the stretch
included. It watches means of windows from the fault's first step on, of steps that are cut where it does best, at the
rise or at one of the detector's cuts. Its bar on each is as rare as the detector's: so many standard deviations of that
mean, as it varies in this recording. Where the detector is faster, one of its other streams or windows told sooner.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import msgspec
import numpy as np
from bench.common import ROOT, make_parser, markdown_table
from bench.detection.page import DAY
from bench.detection.record import PHASES, Job, decode
from numpy.typing import NDArray

from ringside.monitor.run.directory import finite
from ringside.monitor.slow_rank.detector import Detector, excess_of_streams, meter_of
from ringside.monitor.slow_rank.noise import CUTS
from ringside.monitor.slow_rank.window_test import FALSE_ALARM_STEPS, PARTS, REST, STREAMS, WARM_UP
from ringside.monitor.stats import deviation, usable
from ringside.monitor.verdict import VerdictEvent

Floats = NDArray[np.float64]
FIRST_ONSET, LAST_ONSET, AFTER = 60, 160, 200
DRAWS = 1000  # of the bootstrap


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


class Faulty(NamedTuple):
    """Stretches of a job with a fault in each.

    Args:
        times: Seconds, [1 + parts + 1, steps, stretches, ranks]; see `healthy_jobs`.
        onsets: First step of each fault.
        culprits: Whose it is.
        lost: Rank-seconds that each cost the job: the slowest own times, minus those without the fault.
    """

    times: Floats
    onsets: NDArray[Any]
    culprits: NDArray[Any]
    lost: Floats


def with_faults(times: Floats, size: float, count: int, seed: int, *, is_input: bool = False) -> Faulty:
    """Return stretches of a job with a fault in each.

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
    slowest = stretches[0].max(axis=2)
    for number, (onset, culprit) in enumerate(zip(onsets, culprits, strict=True)):
        if is_input:
            stretches[[0, 1 + PARTS.index("data")], onset:, number, culprit] += size * np.median(times[0])
        else:
            stretches[:, onset:, number, culprit] *= 1.0 + size
    return Faulty(stretches, onsets, culprits, ranks * (stretches[0].max(axis=2) - slowest).sum(axis=0))


def score(faulty: Faulty) -> dict[str, Any]:
    """Return what the detector makes of stretches: its delays, how many verdicts on others, and its prices.

    A price is that of a verdict which is open to the end, as it was told then, over what was lost.
    """
    named, wrong, prices = np.full(len(faulty.onsets), np.inf), 0, []
    for number, (onset, culprit) in enumerate(zip(faulty.onsets, faulty.culprits, strict=True)):
        is_first, meter = True, None
        for step, own, events in watch(faulty.times[:, :, number]):
            if meter is not None:
                meter.add(own[None])
            for event in events:
                is_culprit, delay = event.verdict.ranks[0] == culprit, step - onset + 1
                if event.ended:
                    meter = None if is_culprit else meter
                    continue
                wrong += not is_culprit
                if delay > 0 and is_first:
                    is_first = False
                    if is_culprit and delay <= AFTER:
                        named[number], meter = delay, meter_of(event.verdict)
        if meter is not None:
            prices.append(meter.rank_seconds / faulty.lost[number])
    price = float(np.median(prices)) if prices else None
    return {**figures(named), "wrong": int(wrong), "price": price, "delays": named, "prices": np.array(prices)}


def oracle(healthy: Floats, faulty: Faulty, size: float, *, is_input: bool) -> Floats:
    """Return the delay in steps after which one who knows noise and size would name each culprit; infinite: never.

    Args:
        healthy: The job without a fault, see `healthy_jobs`.
        faulty: With it; see `with_faults`, also for the others.
    """
    stream = 1 + PARTS.index("data") if is_input else REST
    ranks = healthy.shape[2]
    z = NormalDist().inv_cdf(1.0 - 1.0 / (FALSE_ALARM_STEPS * STREAMS * ranks))
    usual = excess_of(healthy, stream)
    middle = np.median(usual, axis=0)
    away = usual - middle
    lengths = np.arange(1, AFTER + 1)
    best = np.full(len(faulty.onsets), np.inf)
    for limit in (*(cut * deviation(away) for cut in CUTS), np.full(ranks, np.log1p(size))):
        delays = np.full(len(faulty.onsets), np.inf)
        spread = np.array([window_means(np.clip(away, -limit, limit), length).std(axis=0) for length in lengths])
        for number, (onset, culprit) in enumerate(zip(faulty.onsets, faulty.culprits, strict=True)):
            after = excess_of(faulty.times[:, onset : onset + AFTER, number], stream)[:, culprit] - middle[culprit]
            sums = np.cumsum(np.clip(after, -limit[culprit], limit[culprit]))
            found = np.flatnonzero(sums / lengths[: len(sums)] >= z * spread[: len(sums), culprit])
            delays[number] = found[0] + 1 if len(found) else np.inf
        best = min(best, delays, key=lambda some: float(np.mean(np.minimum(some, AFTER + 1))))
    return best


def excess_of(times: Floats, stream: int) -> Floats:
    """Return one stream of times [1 + parts + 1, steps, ranks], [steps, ranks]."""
    unknown = np.full(times.shape[2], np.nan)
    rows = times.swapaxes(0, 1)
    return np.array([excess_of_streams(row[0], unknown, row[1:-1], row[-1])[stream] for row in rows])


def window_means(values: Floats, length: int) -> Floats:
    """Return the means of all windows of `length` steps, over the first axis."""
    sums = np.vstack([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
    return (sums[length:] - sums[:-length]) / length


def figures(delays: Floats) -> dict[str, float]:
    """Return which share of delays is finite, their median and 90th percentile."""
    middle, late = percentiles(delays)
    return {"found": float(np.mean(np.isfinite(delays))), "median": middle, "p90": late}


def percentiles(delays: Floats) -> tuple[float, float]:
    """Return the median and the 90th percentile of delays, of which some may be infinite."""
    middle, late = np.percentile(delays, [50, 90], method="higher")
    return float(middle), float(late)


def conditions(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was reached in each condition, with intervals; see the module's docstring."""
    found = []
    for name in sorted({condition_of(row) for row in results}):
        rows = [row for row in results if condition_of(row) == name]
        sessions = sorted({row["name"].partition(".")[0] for row in rows})
        of_session = [[row["delays"] for row in rows if row["name"].partition(".")[0] == one] for one in sessions]
        pooled = [np.concatenate(delays) for delays in of_session]
        rng = np.random.default_rng(0)
        drawn = []
        for _ in range(DRAWS):
            again = [pooled[index] for index in rng.integers(len(pooled), size=len(pooled))]
            values = np.concatenate([rng.choice(delays, len(delays)) for delays in again])
            drawn.append([float(np.mean(np.isfinite(values))), *percentiles(values)])
        everything = np.concatenate(pooled)
        ends = np.percentile(drawn, [2.5, 97.5], axis=0, method="nearest").T
        alarmed, steps = sum(row["alarms"] for row in rows), sum(row["steps"] for row in rows)
        found.append({
            "condition": name,
            "sessions": len(sessions),
            "runs": len(everything),
            "found": (float(np.mean(np.isfinite(everything))), *map(float, ends[0])),
            "median": (percentiles(everything)[0], *map(float, ends[1])),
            "p90": (percentiles(everything)[1], *map(float, ends[2])),
            "oracle": percentiles(np.concatenate([row["oracle_delays"] for row in rows])),
            "wrong": sum(row["wrong"] for row in rows),
            "price": float(np.median(np.concatenate([row["prices"] for row in rows] or [[]]))),
            "alarms": alarmed,
            "steps": steps,
            "alarms_per_day": tuple(DAY * count / steps for count in (alarmed, *poisson_ends(alarmed))),
        })  # fmt: skip
    return found


def condition_of(row: dict[str, Any]) -> str:
    """Return the condition of a job: whether its ranks compute, and what runs beside them."""
    return f"{row['ranks']} ranks that {'wait' if row['model'] == 'waiting' else 'compute'}, {row['load']}"


def poisson_ends(count: int) -> tuple[float, float]:
    """Return the ends of the exact 95% interval of a Poisson mean of which so many were counted (Garwood 1936)."""

    def root(count: int, tail: float) -> float:
        """The mean at which so many or fewer come with this chance."""
        low, high = 0.0, 4.0 * count + 20.0
        for _ in range(60):
            mean = (low + high) / 2
            chance = sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))
            low, high = (mean, high) if chance > tail else (low, mean)
        return low

    return (root(count - 1, 0.975) if count else 0.0), root(count, 0.025)


def watch(times: Floats) -> Iterator[tuple[int, Floats, list[VerdictEvent]]]:
    """Yield step, own times and events of each step of times [1 + parts + 1, steps, ranks]."""
    detector = Detector(times.shape[2], has_parts=True)
    for step, (own, *parts, run_delay) in enumerate(times.swapaxes(0, 1)):
        yield step, own, detector.update(own, step=step, parts=np.array(parts), run_delay=run_delay)


def alarms(times: Floats) -> int:
    """Return how many verdicts a healthy job has."""
    return sum(not event.ended for _, _, events in watch(times) for event in events)


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
        faulty = with_faults(times, options.size, options.stretches, seed, is_input=options.input)
        known = oracle(times, faulty, options.size, is_input=options.input)
        row = {
            "name": name,
            **msgspec.to_builtins(job),
            **score(faulty),
            "oracle": percentiles(known),
            "oracle_delays": known,
            "alarms": alarms(times),
            "steps": times.shape[1],
        }
        results.append(row)
        if not options.json:
            print(
                f"{name} {job.ranks} ranks, {job.model:8}{job.engine:9}{job.load:7}: found {row['found']:4.0%}, delay "
                f"{row['median']:.0f} / {row['p90']:.0f} "
                f"(oracle {row['oracle'][0]:.0f} / {row['oracle'][1]:.0f}), wrong {row['wrong']}, "
                f"price / lost {row['price'] or math.nan:.2f}; alarms {row['alarms']} in {row['steps']} healthy steps",
                flush=True,
            )
    if options.json:
        # `finite` makes null of what is infinite: never
        listed = [{name: np.asarray(value).tolist() for name, value in row.items()} for row in results]
        print(json.dumps({"jobs": finite(listed), "conditions": finite(conditions(results))}))
        return
    rows = [
        [
            row["condition"],
            f"{row['runs']} of {row['sessions']}",
            "{:.0%} ({:.0%} to {:.0%})".format(*row["found"]),
            *("{:.0f} ({:.0f} to {:.0f})".format(*row[name]) for name in ("median", "p90")),
            "{:.0f} / {:.0f}".format(*row["oracle"]),
            f"{row['wrong']}",
            f"{row['price']:.2f}",
            "{} in {}: {:.1f} ({:.1f} to {:.1f})".format(row["alarms"], row["steps"], *row["alarms_per_day"]),
        ]
        for row in conditions(results)
    ]
    head = (
        "condition",
        "runs, sessions",
        "found",
        "median delay",
        "90%",
        "oracle",
        "wrong",
        "price / lost",
        "alarms in 86,400 steps",
    )
    print("\n" + markdown_table(head, rows))


if __name__ == "__main__":
    main()
