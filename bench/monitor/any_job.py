"""Jobs of every parallelism with one slow rank, and healthy ones: who is named, how soon, and who is named wrongly.

Real processes train a small model here (`parallel_jobs.py`); what an accelerator would compute is slept. In one
start of the processes trials follow each other: a healthy stretch, then one rank, drawn at random, 20 to 30% slower
from a random step on. A trial is right where that rank is named within 40 steps and no other is; it is silent where
none is.

    python -m bench.monitor.any_job                                  # all kinds, over our process group
    python -m bench.monitor.any_job --kinds fsdp tp_dp --trials 4
    python -m bench.monitor.any_job --backend gloo                   # torch 2.14 or newer
    python -m bench.monitor.any_job --device cuda --ranks 4 --mps    # ranks that share one GPU, at the same time
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.common import make_parser, module_command, run_ranks_here
from bench.monitor.parallel_jobs import KINDS, Episode, sharing, train

WITHIN_STEPS = 40
SLOW_STEPS, HEALTHY_STEPS = 55, 45
"""Of every trial; the healthy stretch is up to as long again."""
OVER_STEPS = 25
"""After an episode, in which its end may be found out."""


@dataclass(frozen=True)
class Score:
    """What became of the trials of one kind of job.

    Args:
        kind: Of job.
        backend: Of its process group.
        ranks: How many.
        trials: How many.
        right: The slow rank was named in time, and no other.
        silent: Nobody was named in time.
        wrong: Verdicts on other ranks, or in healthy stretches, as `rank at step`.
        delay_steps: Median of the steps from the onset to the verdict.
        healthy_steps: Steps in which no rank was slow.
        step_seconds: What a step took.
    """

    kind: str
    backend: str
    ranks: int
    trials: int
    right: int
    silent: int
    wrong: list[str]
    delay_steps: float
    healthy_steps: int
    step_seconds: float


def drawn(trials: int, ranks: int, seed: int) -> tuple[list[Episode], int]:
    """Return who is slow when, and how many steps that takes."""
    draw, step, episodes = random.Random(seed), 0, []
    for _ in range(trials):
        first = step + HEALTHY_STEPS + draw.randrange(HEALTHY_STEPS)
        step = first + SLOW_STEPS
        episodes.append(Episode(draw.randrange(ranks), first, step, draw.uniform(1.2, 1.3)))
    return episodes, step + HEALTHY_STEPS


def judge(events: list[dict[str, Any]], episodes: list[Episode]) -> tuple[list[int], list[str]]:
    """Return the delays, in steps, of the verdicts that are right, and what was said wrongly."""
    delays: dict[int, int] = {}
    wrong = []
    for event in events:
        verdict = event.get("verdict", {})
        if event["kind"] != "verdict" or verdict["kind"] == "stage_imbalance" or not verdict["ranks"]:
            continue  # it names no rank
        rank, step = verdict["ranks"][0], verdict["detected_step"]
        number = next((n for n, one in enumerate(episodes) if one.first <= step < one.until + OVER_STEPS), None)
        if number is None or episodes[number].rank != rank:
            wrong.append(f"{verdict['kind']} of {rank} at {step}")
        elif number not in delays:
            delays[number] = step - episodes[number].first
    return [delay for delay in delays.values() if delay <= WITHIN_STEPS], wrong


def run_kind(kind: str, backend: str, trials: int, seed: int, folder: Path, ranks: int, device: str) -> Score:
    """Run the trials of one kind of job."""
    episodes, steps = drawn(trials, ranks, seed)
    run_dir = folder / f"{kind}-{backend}"
    words = json.dumps([kind, backend, str(run_dir), steps, [asdict(one) for one in episodes], device])
    result = run_ranks_here(module_command("bench.monitor.any_job", "--rank", words), ranks)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    delays, wrong = judge(events, episodes)
    delays.sort()
    return Score(
        kind, backend, ranks, trials, len(delays), trials - len(delays), wrong,
        float(delays[len(delays) // 2]) if delays else float("nan"),
        steps - SLOW_STEPS * trials, result["step_seconds"],
    )  # fmt: skip


def main() -> None:
    """Run what is asked for and print a table."""
    parser = make_parser("bench.monitor.any_job", __doc__)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--backend", default="ringside")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=0, help="in place of each kind's own number")
    parser.add_argument("--mps", action="store_true", help="ranks share the GPU by CUDA's MPS, where it is installed")
    parser.add_argument("--keep", type=Path, help="leave the recorded runs in this folder")
    parser.add_argument("--trials", type=int, default=20, help="per kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the scores as JSON lines")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        kind, backend, run_dir, steps, episodes, device = json.loads(options.rank)
        result = train(kind, backend, run_dir, steps, [Episode(**one) for one in episodes], device)
        if result is not None:
            print(json.dumps({"step_seconds": result["step_seconds"]}))
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if options.mps:
            stack.enter_context(sharing())
        for kind in options.kinds:
            began = time.monotonic()
            ranks = options.ranks or KINDS[kind].ranks
            kept = options.keep or Path(folder)
            score = run_kind(kind, options.backend, options.trials, options.seed, kept, ranks, options.device)
            if options.json:
                print(json.dumps(asdict(score)), flush=True)
                continue
            print(
                f"{kind:16} {score.ranks} ranks  {score.right} of {score.trials} right, {score.silent} silent, "
                f"{len(score.wrong)} wrong; {score.delay_steps:.0f} steps after the onset; "
                f"{score.step_seconds * 1e3:.0f} ms a step, {time.monotonic() - began:.0f} s in all",
                flush=True,
            )
            for said in score.wrong:
                print(f"                 wrong: {said}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
