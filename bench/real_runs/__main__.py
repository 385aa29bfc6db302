"""Real jobs with one thing wrong, over our engine and over Gloo: does each give exactly the right verdict?

Every line is a job of its own, started by torchrun (the slow link: in the network lab, which needs root), training a
small GPT with real compute for a fixed number of steps. Healthy jobs, where any verdict is a false one, and those
with a rank that needs 30% longer for its steps are repeated.
Directories of jobs that were judged wrongly are kept.

    python -m bench.real_runs [--only slow,input] [--engines ringside,gloo] [--repeat 10] [--json] [--write PAGE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common import make_parser, names_among
from bench.real_runs.jobs import ENGINES, HEALTHY_STEPS, LINK_STEPS, Ended, Job, Others, load, run_job
from bench.real_runs.page import page, table

from ringside.errors import RingsideError
from ringside.faults.inject import first_step, parse_fault
from ringside.monitor.verdict import Verdict

# Runs of the kinds that are repeated; steps of a healthy one.
TIMES, HEALTHY_RUN_STEPS = 10, 200
REPEATED = ("healthy", "slower")
AT = HEALTHY_STEPS  # the first step of every fault
LONGER = ("slow_rank", "input_bound", "uneven_work")  # kinds whose verdict says by how much own time is longer
# A run beside which others kept so many cores busy may have seen a slow rank that nobody injected.
DISTURBED_CORES = 0.2


@dataclass(frozen=True)
class Case:
    """One kind of job.

    Args:
        what: What is wrong with it, for people.
        kind: The kind of the one right verdict; empty where none is right.
        ranks: Whom it names, in any order.
        fault: What is injected.
        job: How the job differs from the usual one.
    """

    what: str
    kind: str
    ranks: tuple[int, ...] = (1,)
    fault: str = "none"
    job: tuple[tuple[str, Any], ...] = ()


TINY = (("model", "tiny"), ("steps", 10_000), ("seconds", 40.0))
LINK = (("slow_link", True), ("ranks", 3), ("model", "waiting"), ("steps", LINK_STEPS + 80))
CASES = {
    "healthy": Case("nothing", "", (), job=(("steps", HEALTHY_RUN_STEPS),)),
    "healthy4": Case("nothing, 4 ranks", "", (), job=(("ranks", 4), ("model", "waiting"))),
    "slower": Case(
        "rank 1's forward and backward take 40% longer", "slow_rank", fault=f"slow:rank=1,factor=1.4,from_step={AT}"
    ),
    "slow": Case(
        "rank 1's forward and backward take 30% longer", "slow_rank", fault=f"slow:rank=1,factor=1.3,from_step={AT}"
    ),
    "slow0": Case("the same, rank 0", "slow_rank", (0,), fault=f"slow:rank=0,factor=1.3,from_step={AT}"),
    "slow4": Case(
        "the same, rank 2 of 4",
        "slow_rank",
        (2,),
        fault=f"slow:rank=2,factor=1.3,from_step={AT}",
        job=(("ranks", 4), ("model", "waiting")),
    ),
    "pause": Case("rank 1 pauses for 8 s once", "hang", fault=f"pause:rank=1,at_step={AT},seconds=8"),
    "stall": Case("rank 1 pauses for 1 s once", "", (), fault=f"pause:rank=1,at_step={AT},seconds=1"),
    "pauses": Case(
        "rank 1 pauses for 0.1 s in every tenth step",
        "slow_rank",
        fault=f"pause:rank=1,at_step={AT},seconds=0.1,every=10",
        job=(("steps", 460),),
    ),
    "pauses4": Case(
        "the same, rank 2 of 4",
        "slow_rank",
        (2,),
        fault=f"pause:rank=2,at_step={AT},seconds=0.1,every=10",
        job=(("ranks", 4), ("model", "waiting"), ("steps", 300)),
    ),
    "input": Case(
        "rank 1 waits 15 ms per step for its data", "input_bound", fault=f"input:rank=1,seconds=0.015,from_step={AT}"
    ),
    "uneven": Case(
        "rank 1 gets two thirds more samples", "uneven_work", fault=f"uneven:rank=1,factor=1.67,from_step={AT}"
    ),
    "link": Case("the link between two of three hosts falls to a tenth", "slow_link", (0, 1), job=LINK),
    "tiny": Case(
        "300 tiny parameters, each in a bucket of its own",
        "small_collectives",
        (),
        job=TINY,
    ),
    "hang": Case("rank 1 never calls its all-reduce", "hang", fault=f"hang:rank=1,at_step={AT}"),
    "stop": Case("rank 1 is stopped (SIGSTOP)", "hang", fault=f"stop:rank=1,at_step={AT}"),
    "diverge": Case("one number of rank 1's model changes", "diverged", (0, 1), f"diverge:rank=1,at_step={AT},by=0.01"),
    "diverge3": Case(
        "the same, of 3 ranks",
        "diverged",
        fault=f"diverge:rank=1,at_step={AT},by=0.01",
        job=(("ranks", 3), ("model", "waiting")),
    ),
    "kill": Case("rank 1 is killed", "dead_rank", fault=f"kill:rank=1,at_step={AT}"),
}


def main() -> int:
    """Run what was asked for; return 0 if every verdict was right."""
    args = parse()
    if args.runs is not None:
        args.runs.mkdir(parents=True, exist_ok=True)
    runs = Path(tempfile.mkdtemp(prefix="ringside-real-", dir=args.runs))
    results: list[dict[str, Any]] = []
    with contextlib.suppress(KeyboardInterrupt):  # what is known by then is told
        for name, engine, number in plan(args):
            for again in range(args.again + 1):  # once more where it is wrong and others disturbed it
                path = runs / f"{name}-{engine}-{number}{'-again' * again}"
                result = measure(name, engine, path, args.model)
                print(line(result), file=sys.stderr, flush=True)
                if result["right"] and not args.keep:
                    shutil.rmtree(path)
                if result["right"] or result["others_cores"] < DISTURBED_CORES:
                    break
            results.append(result)
    if not any(runs.iterdir()):
        runs.rmdir()
    print(json.dumps(results, indent=2) if args.json else table(results))
    if args.write:
        args.write.write_text(page(results, {name: case.what for name, case in CASES.items()}))
    return 0 if all(result["right"] for result in results) else 1


def parse() -> argparse.Namespace:
    parser = make_parser("bench.real_runs", __doc__)
    parser.add_argument("--only", type=names_among(list(CASES)), default=",".join(CASES), help="cases, of: %(default)s")
    parser.add_argument("--engines", type=names_among(list(ENGINES)), default=",".join(ENGINES), help="of: %(default)s")
    parser.add_argument(
        "--repeat", type=int, default=TIMES, help=f"runs of {' and '.join(REPEATED)} per engine (%(default)s)"
    )
    parser.add_argument("--model", default="gpt", choices=("gpt", "waiting"), help="waiting: it needs no processor")
    parser.add_argument(
        "--runs", type=Path, help="where to keep runs that were judged wrongly (default: the temporary)"
    )
    parser.add_argument("--again", type=int, default=0, help="repeat wrong runs that others disturbed so often (0)")
    parser.add_argument("--keep", action="store_true", help="keep all of them")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the results as a page")
    return parser.parse_args()


def plan(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield case, engine and number of every run: engines in turn."""
    for name in args.only:
        for number in range(args.repeat if name in REPEATED else 1):
            for engine in args.engines:
                yield name, engine, number


def measure(name: str, engine: str, path: Path, model: str = "gpt") -> dict[str, Any]:
    """Run one case once; return what came of it."""
    case = CASES[name]
    if case.kind == "small_collectives" and engine == "gloo":  # what is only watched is not timed bucket by bucket
        case = replace(case, kind="communication_bound")
    result: dict[str, Any] = {"case": name, "engine": engine, "expected": case.kind, "found": []}
    job = Job(engine, case.fault, **{"model": model, **dict(case.job)})
    result["model"] = job.model
    others, began = Others(), time.monotonic()
    try:
        ended = run_job(job, path)
    except RingsideError as error:
        result |= {"right": False, "why": str(error)}
    else:
        result |= judge(case, ended)
    result |= {"load": load(), "seconds": time.monotonic() - began, "others_cores": others.cores()}
    return result if result["right"] else {**result, "path": str(path)}


def judge(case: Case, ended: Ended) -> dict[str, Any]:
    """Hold a run's verdicts against the one that is right.

    A slow link that our engine went around before it could be judged is right too, if the run notes which it was. A
    note or a verdict that names another, or the right one too early, is wrong.
    """
    fault = parse_fault(case.fault)
    since = first_step(fault) if fault is not None else dict(case.job).get("slow_link", 0) and LINK_STEPS
    expected = [(case.kind, sorted(case.ranks))] if case.kind else []
    found = [(verdict.kind, sorted(verdict.ranks)) for verdict in ended.verdicts]
    named = [v for v, got in zip(ended.verdicts, found, strict=True) if got in expected]
    if case.kind == "slow_link":  # both directions of a link are slow, and may be named apart
        found = found[:1] if found and len(found) <= 2 and all(got == found[0] for got in found) else found
    noted = gone_around(ended) if case.kind == "slow_link" else []
    right = [note for note in noted if sorted(note["ranks"]) == sorted(case.ranks) and note["detected_step"] >= since]
    step = named[0].detected_step if named else right[0]["detected_step"] if right else None
    by_the_clock = case.kind in ("dead_rank", "hang")  # at the last step that was told of, which may be earlier
    early = not by_the_clock and any(verdict.detected_step < since for verdict in named)
    return {
        "right": not early and len(right) == len(noted) and (found == expected or (not found and bool(right))),
        "delay": None if step is None else step - since + 1,
        "excess": named[0].excess_ratio if named and named[0].kind in LONGER else None,
        "step_seconds": ended.summary["step_seconds"]["median"],
        "found": [*(shown_parts(verdict) for verdict in ended.verdicts), *noted],
    }


def shown_parts(verdict: Verdict) -> dict[str, Any]:
    """Return the parts of a verdict that are shown."""
    names = ("kind", "ranks", "since_step", "detected_step", "excess_ratio", "cost_rank_seconds", "cause")
    return {name: getattr(verdict, name) for name in names}


def gone_around(ended: Ended) -> list[dict[str, Any]]:
    """Return the links that were slow when another way was chosen, in the form of verdicts."""
    return [
        {"kind": "revised", "ranks": link["ranks"], "detected_step": one["step"], "cause": one["words"]}
        for one in ended.summary.get("revisions", [])
        for link in one["links"][:1]
    ]


def line(result: dict[str, Any]) -> str:
    """Return a result in one line."""
    found = ", ".join(f"{v['kind']} {v['ranks']} at {v['detected_step']}" for v in result["found"]) or "nothing"
    mark = "right" if result["right"] else "WRONG"
    others = f"others on {result['others_cores']:.1f} cores"
    more = "; ".join(filter(None, [result.get("why", "")[-400:], result.get("path", ""), others]))
    return f"{result['case']:9} {result['engine']:9} {mark:6} {found} ({more})"


if __name__ == "__main__":
    sys.exit(main())
