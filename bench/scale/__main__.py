"""The monitor at scale, with real processes: 128, or 1,024, send what they measured to one collector.

    python -m bench.scale [--ranks 128,1024] [--rate 2] [--seeds 1] [--steps N] [--clock own|machine]
    python -m bench.scale --replay tests/data/kineto [--ranks 8]
    python -m bench.scale --alone [--ranks 128,1024]
    ... [--results runs/scale.json] [--json] [--write]

Compute is slept (`job.py`); processes, sessions, store, collector, detector and run directory are real. One
rank, drawn by the seed, becomes 12% slower at a drawn step, at 2% jitter. `--replay` runs recorded Kineto traces
through the same processes, `--alone` what one process takes without any store. Figures are kept in a file, and
`--write` puts docs/scale.md together from it. The exit status is 1 where a floor of the issue is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import DOCS, RUNS, make_parser, numbers, read_results
from bench.scale.collector import alone
from bench.scale.job import WARM_STEPS, Outcome, run
from bench.scale.page import page
from bench.scale.rank import Floats, Heard, Job
from bench.scale.replay import Turn, recorded, replay

from ringside.errors import RingsideError

# The slow rank's own time by a healthy one's; standard deviation of log own times.
SLOWER, JITTER = 1.12, 0.02
# Steps before the fault at least, how many more at most, and steps with it.
HEALTHY_STEPS, MOST_ONSET_LATER, AFTER_STEPS = 40, 20, 24
MOST_DELAY_STEPS = 10  # slow steps until rank 0 is told, at most
# Of a step at the asked rate, a healthy rank works for so much: with one 12% slower the job still keeps that rate.
WORK_SHARE = 0.88

REPLAY_STEPS, REPLAY_ONSET = 600, 300
ALONE_STEPS = {128: 600, 1024: 120}  # ranks: steps


@dataclass(frozen=True)
class Plan:
    """A job with one slow rank.

    Args:
        job: What the ranks do.
        culprit: The slow rank.
        onset: Its first slow step.
    """

    job: Job
    culprit: int
    onset: int


@dataclass(frozen=True)
class Judged:
    """What came of a job with one slow rank.

    Args:
        named: Whether that rank was named.
        wrong: Ranks that were named and are healthy, or for another reason; -1 stands for the whole job.
        detector_steps: Slow steps the detector needed, the first of them being 1.
        told_steps: Slow steps that the job had finished when rank 0 was told.
    """

    named: bool
    wrong: list[int]
    detector_steps: int | None = None
    told_steps: int | None = None


def slow_rank_job(ranks: int, rate: float, seed: int, *, steps: int | None = None, machine_clock: bool = False) -> Plan:
    """Return a job that makes at least `rate` steps per second, in which one rank becomes 12% slower.

    Args:
        ranks: Number of ranks.
        rate: Steps per second.
        seed: Draws jitter, culprit and onset.
        steps: Number of steps; by default 24 slow ones.
        machine_clock: See `Job.real_clock`.
    """
    rng = np.random.default_rng([seed, ranks])
    culprit, later = int(rng.integers(ranks)), int(rng.integers(MOST_ONSET_LATER))
    onset = HEALTHY_STEPS + later if steps is None else steps // 2
    total = onset + AFTER_STEPS if steps is None else steps
    own = WORK_SHARE / rate * np.exp(rng.normal(0.0, JITTER, (total, ranks)))
    own[onset:, culprit] *= SLOWER
    own[:WARM_STEPS] *= 1.0 + ranks / 60  # everybody's memory is copied when it is first written to
    return Plan(Job(own, 0.01 / rate, machine_clock), culprit, onset)


def judge(verdicts: Sequence[Heard], culprit: int, onset: int) -> Judged:
    """Return whether the culprit was named, and after how many steps."""
    right = [
        one for one in verdicts if (one.kind, one.ranks) == ("slow_rank", [culprit]) and one.detected_step >= onset
    ]
    wrong = sorted({rank for one in verdicts if one not in right for rank in one.ranks or [-1]})
    if not right:
        return Judged(False, wrong)
    return Judged(True, wrong, right[0].detected_step - onset + 1, right[0].sent_steps - onset)


def problems(plan: Plan, outcome: Outcome, rate: float) -> list[str]:
    """Return what a job shows that it should not, a line each."""
    found, judged = [], judge(outcome.verdicts, plan.culprit, plan.onset)
    if not judged.named or judged.wrong:
        found.append(f"rank {plan.culprit} is slow, named were {[(one.kind, one.ranks) for one in outcome.verdicts]}")
    if judged.told_steps is not None and judged.told_steps > MOST_DELAY_STEPS:
        found.append(f"rank 0 was told after {judged.told_steps} slow steps, not within {MOST_DELAY_STEPS}")
    if outcome.missing or outcome.late:
        found.append(f"{outcome.missing} records did not arrive and {outcome.late} came late")
    if outcome.steps_per_s < 0.98 * rate:
        found.append(f"the collector completed {outcome.steps_per_s:.2f} steps per second, not {rate:g}")
    return found


def jobs(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Run jobs with a slow rank; yield key, figures and problems of each."""
    for ranks in args.ranks:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            plan = slow_rank_job(ranks, args.rate, seed, steps=args.steps, machine_clock=args.clock == "machine")
            outcome = _run(plan.job)
            judged = asdict(judge(outcome.verdicts, plan.culprit, plan.onset))
            figures = {**_figures(outcome), **judged, "culprit": plan.culprit, "onset": plan.onset}
            key = f"job/{ranks}/{args.rate:g}/{args.clock}/{seed}"
            yield key, figures, problems(plan, outcome, args.rate) if args.clock == "own" else []


def replays(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Replay recorded traces in every way; yield key, figures and problems of each."""
    seen = recorded([args.replay])
    ranks, steps = seen.own_s.shape[1], args.steps or REPLAY_STEPS
    middle = int(np.argsort(seen.own_s.mean(axis=0))[ranks // 2 - 1])
    for way in ("repeated", "dealt"):
        for injected in (False, True):
            turn = Turn(way, injected, middle, min(REPLAY_ONSET, steps // 2))
            for seed in range(args.first_seed, args.first_seed + (args.seeds if way == "dealt" else 1)):
                outcome = _run(replay(seen, turn, steps, seed))
                judged = judge(outcome.verdicts, turn.culprit if injected else -1, turn.onset)
                figures = {**_figures(outcome), **asdict(judged), **asdict(turn), "backend": seen.backend}
                figures["own_s"] = seen.own_s.mean(axis=0).tolist()
                lost = [f"{outcome.missing} records did not arrive"] if outcome.missing else []
                yield f"replay/{way}/{'slow' if injected else 'healthy'}/{seed}", figures, lost


def limits(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Measure what one process takes without a store; yield key, figures and no problem."""
    for ranks in args.ranks:
        own: Floats = slow_rank_job(ranks, 2.0, 0, steps=args.steps or ALONE_STEPS.get(ranks, 120)).job.own_s
        with tempfile.TemporaryDirectory() as folder:
            yield f"alone/{ranks}", asdict(alone(own, Path(folder) / "run")), []


def _run(job: Job) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return run(job, Path(folder) / "run", tell=lambda line: print(line, file=sys.stderr))


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "missing": outcome.missing}


def main() -> int:
    """Measure what was asked for; return 1 where a floor is missed."""
    parser = make_parser("bench.scale", __doc__)
    parser.add_argument("--ranks", type=numbers, default=[128, 1024], help="how many, with commas (default: 128,1024)")
    parser.add_argument("--rate", type=float, default=2.0, help="steps per second (default: 2)")
    parser.add_argument("--seeds", type=int, default=1, help="jobs of each kind (default: 1)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first one's seed (default: 0)")
    parser.add_argument("--steps", type=int, help="steps of a job; half of them are slow (default: 64 to 83, 24 slow)")
    parser.add_argument("--clock", choices=("own", "machine"), default="own", help="what step clocks read")
    parser.add_argument("--replay", type=Path, metavar="PATH", help="replay the Kineto traces there")
    parser.add_argument("--alone", action="store_true", help="without processes and store")
    parser.add_argument("--results", type=Path, default=RUNS / "scale.json", help="where figures are kept")
    parser.add_argument("--json", action="store_true", help="print figures as JSON lines")
    parser.add_argument("--write", action="store_true", help="write docs/scale.md from the figures kept")
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="measure nothing")
    args = parser.parse_args()
    # Figures are kept as they come: a job of a thousand processes may be cut short.
    results: dict[str, Any] = read_results(args.results)
    bad = []
    if args.measure:
        measured = replays(args) if args.replay else limits(args) if args.alone else jobs(args)
        for key, figures, wrong in measured:
            results[key] = figures
            bad += [f"{key}: {line}" for line in wrong]
            shown = {name: value for name, value in figures.items() if name not in ("lag_steps", "own_s")}
            print(json.dumps({key: shown}) if args.json else f"{key}\n  {shown}")
            args.results.parent.mkdir(parents=True, exist_ok=True)
            args.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    for line in bad:
        print(line, file=sys.stderr)
    if args.write:
        (DOCS / "scale.md").write_text(page(results))
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RingsideError as error:
        sys.exit(f"bench.scale: {error}")
