"""What-if against the changed job: six questions to recorded runs, each beside what the job took once it was changed.

    python -m bench.predict.what_if [--turns 5] [--steps 40] [--only link,bucket] [--runs DIR]

Jobs run in the lab (root, `ip` and `tc`): a DDP model with `ringside.attach`, one rank per host, links of a known rate
that nobody tells the predictor. A turn runs every job once, base and changed ones alike, and asks the question of that
turn's base run by `ringside what-if DIR ... --json`. What a step took is the mean over steps of rank 0, by its own
clock. Of turns the median counts.

Two jobs, both with real computing: `wire`, where links decide, and `work`, where computing does. Targets: the step
within 10%, and the change within 25% of the measured one or 2% of the step, whichever is more. "Nothing changes" is the
error of who says that the step stays as it is. Figures of a machine that has other work besides are worth little.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import make_parser, markdown_table, names_among, report_progress
from bench.lab.jobs import run_ranks

from ringside.commands import main as ringside
from ringside.lab import Lab

STEP, CHANGE, OF_STEP = 0.10, 0.25, 0.02  # what is good enough


@dataclass(frozen=True)
class Job:
    """A job of the lab.

    Args:
        name: Of its run.
        hosts: One rank on each.
        mbit: Of every link, Mbit/s.
        layers, width, batch, bucket_mb: The model, its input and DDP's buckets.
        fault: As of `ringside.faults.inject.parse_fault`; empty: none.
        env: Variables of Ringside's.
    """

    name: str
    hosts: int = 2
    mbit: int = 100
    layers: int = 6
    width: int = 384
    batch: int = 64
    bucket_mb: float = 1.0
    fault: str = ""
    env: dict[str, str] = field(default_factory=dict)


RING = {"RINGSIDE_ALGORITHM": "hosts/ring"}
WIRE = Job("wire", hosts=3, env=RING)
WORK = Job("work", width=512, batch=1536, mbit=500, bucket_mb=2.0, env=RING)
SLOW = replace(WORK, name="slow", fault="slow:rank=1,factor=1.12,from_step=0")


@dataclass(frozen=True)
class Question:
    """A question, and the job that answers it.

    Args:
        words: To `ringside what-if DIR`.
        base: The job whose run is asked.
        changed: The job as it would be.
    """

    words: tuple[str, ...]
    base: Job
    changed: Job


def _wire(name: str, **others: Any) -> Job:
    return replace(WIRE, name=name, **others)


QUESTIONS = {
    "slow": Question(("--slow-rank", "1=12%"), WORK, SLOW),
    "repair": Question(("--repair", "1"), SLOW, WORK),
    "hosts": Question(("--to-hosts", "4"), WIRE, _wire("hosts", hosts=4)),
    "link": Question(("--link-rate", "2x"), WIRE, _wire("link", mbit=2 * WIRE.mbit)),
    **{
        name: Question(("--wire-dtype", name), WIRE, _wire(name, env={**RING, "RINGSIDE_WIRE_DTYPE": name}))
        for name in ("bfloat16", "int8")
    },
    "bucket": Question(("--bucket", "8MiB"), WIRE, _wire("bucket", bucket_mb=8.0)),
    "algorithm": Question(
        ("--to-algorithm", "one_shot"), WIRE, _wire("algorithm", env={"RINGSIDE_ALGORITHM": "hosts/one_shot"})
    ),
}


def run(job: Job, steps: int, folder: Path) -> float:
    """Run a job, which records itself into a folder; return what a step took, seconds. One that is there was run."""
    kept = folder.with_suffix(".json")
    if kept.exists():
        return float(json.loads(kept.read_text()))
    shape = {name: getattr(job, name) for name in ("layers", "width", "batch", "bucket_mb", "fault")}
    plan = {**shape, "steps": steps, "run": str(folder)}
    with Lab(hosts=job.hosts, ranks_per_host=1, rate=f"{job.mbit}mbit") as lab:
        env = {"OMP_NUM_THREADS": "1", "RINGSIDE_SELECTION": "fresh", **job.env}
        took = run_ranks(lab, "bench.predict.what_if_job", plan, env)[0]
    kept.write_text(json.dumps(mean := float(sum(took) / len(took))))
    return mean


def ask(folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
    """Return what `ringside what-if` answers to a run."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = ringside(["what-if", str(folder), *words, "--json"])
    if status:
        raise SystemExit(f"ringside what-if {folder} {' '.join(words)} ended with {status}")
    answer: dict[str, Any] = json.loads(printed.getvalue())
    return answer


@dataclass(frozen=True)
class Result:
    """What a turn said of a question: seconds."""

    base_s: float
    changed_s: float
    predicted_s: float
    delta_s: float
    low_s: float
    high_s: float


def turn(questions: dict[str, Question], steps: int, runs: Path) -> dict[str, Result]:
    """Run every job once, below a folder, and ask every question of its base run."""
    runs.mkdir(parents=True, exist_ok=True)
    jobs = {job.name: job for one in questions.values() for job in (one.base, one.changed)}
    took = {name: run(job, steps, runs / name) for name, job in jobs.items()}
    found = {}
    for name, one in questions.items():
        answer = ask(runs / one.base.name, one.words)
        after, delta = answer["step_seconds"]["after"]["value"], answer["delta_seconds"]
        ends = delta["value"], delta["low"], delta["high"]
        found[name] = Result(took[one.base.name], took[one.changed.name], after, *ends)
    return found


HEAD = "question", "base", "predicted", "measured", "off", "no change", "change", "measured", "band", "met"


def table(turns: list[dict[str, Result]]) -> str:
    """Return the medians over turns as a Markdown table; times in ms."""
    rows = []
    for name in turns[0]:
        results = [one[name] for one in turns]
        base, changed, predicted, delta, low, high = (
            median(getattr(one, key) for one in results) for key in Result.__annotations__
        )
        true = median(one.changed_s - one.base_s for one in results)
        off, room = predicted / changed - 1.0, max(CHANGE * abs(true), OF_STEP * changed)
        met = [abs(off) <= STEP, abs(delta - true) <= room]
        ms = [f"{1e3 * seconds:.1f}" for seconds in (base, predicted, changed)]
        band = f"{1e3 * low:+.1f} to {1e3 * high:+.1f}"
        missed = [what for what, kept in zip(("step", "change"), met, strict=True) if not kept]
        verdict = f"not the {' and '.join(missed)}" if missed else "yes"
        changes = f"{1e3 * delta:+.1f}", f"{1e3 * true:+.1f}"
        rows.append([name, *ms, f"{off:+.1%}", f"{base / changed - 1.0:+.1%}", *changes, band, verdict])
    return markdown_table(HEAD, rows)


def main() -> None:
    """Take turns and print the table after each."""
    parser = make_parser("bench.predict.what_if", __doc__)
    parser.add_argument("--turns", type=int, default=5, help="of all jobs (default: 5)")
    parser.add_argument(
        "--steps", type=int, default=40, help="of a job (default: 40; runs of fewer than 30 keep their warm-up)"
    )
    parser.add_argument("--only", type=names_among(list(QUESTIONS)), default=list(QUESTIONS), help="names of questions")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep all runs; those that are there are not repeated")
    args: argparse.Namespace = parser.parse_args()
    questions = {name: QUESTIONS[name] for name in args.only}
    turns = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(args.turns):
            report_progress(f"turn {number + 1} of {args.turns}")
            turns.append(turn(questions, args.steps, (args.runs or Path(temporary)) / str(number)))
            print(table(turns), flush=True)


if __name__ == "__main__":
    main()
