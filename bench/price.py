"""The price of a verdict against what the fault did cost: the same run with and without it, in turn.

For every fault, two real ranks train one small GPT after another: a run with the fault, a run without, and so on, who
comes first changing from pair to pair. What a run lost is measured as the time of its steps since the fault began,
minus that of the healthy run beside it, times the ranks; what the monitor says it lost is the verdict's
`cost_rank_seconds`. Prints the medians, their ratio, and an interval that holds 95 % of the ratios when pairs are drawn
again (bootstrap).

    python bench/price.py [--faults slow,input] [--engines ringside,gloo] [--pairs 6] [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from real_jobs import ENGINES, RANK, launcher, load, surroundings

from ringside.errors import RingsideError
from ringside.launch import Launch

RANKS, AT, STEPS = 2, 40, 160
FAULTS = {
    "slow12": f"slow:rank=1,factor=1.12,from_step={AT}",
    "slow": f"slow:rank=1,factor=1.3,from_step={AT}",
    "slow0": f"slow:rank=0,factor=1.6,from_step={AT}",
    "input": f"input:rank=1,seconds=0.015,from_step={AT}",
    "uneven": f"uneven:rank=1,factor=1.67,from_step={AT}",
}
PAIR_LIMIT_S = 120.0
DRAWS = 4000
COLUMNS = ("fault", "engine", "pairs", "named", "measured, rank-s", "predicted, rank-s", "predicted / measured", "95 %")


def main() -> int:
    """Measure what was asked for; return 0 if every ratio is within 10 % or its interval reaches there."""
    args = parse()
    results = []
    for name in args.faults:
        for engine in args.engines:
            results.append(measure(name, engine, args))
            print(json.dumps(results[-1]["pairs"]), load(), file=sys.stderr, flush=True)
    print(json.dumps(results, indent=2) if args.json else table(results))
    return 0 if all(result["low"] <= 1.1 and result["high"] >= 0.9 for result in results) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=",".join(FAULTS), help="of: %(default)s")
    parser.add_argument("--engines", default=",".join(ENGINES), help="of: %(default)s")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of runs (%(default)s)")
    parser.add_argument("--model", default="gpt", choices=("gpt", "waiting"), help="waiting: it needs no processor")
    parser.add_argument("--runs", type=Path, help="keep the runs here")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    args = parser.parse_args()
    args.faults, args.engines = args.faults.split(","), args.engines.split(",")
    for names, known in ((args.faults, FAULTS), (args.engines, ENGINES)):
        if unknown := set(names) - set(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return args


def measure(name: str, engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the pairs of one fault over one engine."""
    base = Path(tempfile.mkdtemp(prefix=f"ringside-price-{name}-{engine}-", dir=args.runs))
    orders = [("none", FAULTS[name]) if number % 2 else (FAULTS[name], "none") for number in range(args.pairs)]
    run_in_turn(["none", *(fault for order in orders for fault in order)], engine, args.model, base)  # warm first
    pairs = []
    for number in range(args.pairs):
        paths = [base / str(1 + 2 * number + half) for half in (0, 1)]
        faulty, healthy = reversed(paths) if number % 2 else paths
        pairs.append(pair_of(faulty, healthy))
    if args.runs is None:
        shutil.rmtree(base)
    return {"fault": name, "engine": engine, "pairs": pairs, **figures(pairs)}


def run_in_turn(faults: list[str], engine: str, model: str, base: Path) -> None:
    """Train one model for each fault, all in the same processes."""
    log: deque[str] = deque(maxlen=30)
    words = [str(RANK), f"--steps={STEPS}", f"--model={model}", "--inject", *faults]
    launch = Launch([*launcher(RANKS), *words], surroundings(engine, base), sink=log.append)
    status = launch.wait(PAIR_LIMIT_S * len(faults))
    if status is None:
        launch.end(15)
    if status != 0:
        raise RingsideError(f"the runs failed with exit status {status}:\n" + "\n".join(log))


def pair_of(faulty: Path, healthy: Path) -> dict[str, Any]:
    """Return what the verdicts of one run say it lost, and what it lost against the other, rank-seconds."""
    verdicts = json.loads((faulty / "summary.json").read_text())["verdicts"]
    return {
        "measured": RANKS * (wall(faulty) - wall(healthy)),
        "predicted": sum(verdict["cost_rank_seconds"] for verdict in verdicts),
        "verdicts": [(verdict["kind"], verdict["ranks"], verdict["since_step"]) for verdict in verdicts],
        "healthy_verdicts": len(json.loads((healthy / "summary.json").read_text())["verdicts"]),
    }


def wall(path: Path) -> float:
    """Return how long the steps took from `AT` on, seconds."""
    ends = json.loads((path / "ends.json").read_text())
    return float(ends[-1] - ends[AT - 1])


def figures(pairs: list[dict[str, Any]]) -> dict[str, float]:
    """Return medians, their ratio, and the ratio's interval, of the pairs in which somebody was named."""
    told = [pair for pair in pairs if pair["verdicts"]]
    if not told:
        return {"named": 0, "measured": float("nan"), "predicted": 0.0, "ratio": 0.0, "low": 0.0, "high": 0.0}
    measured, predicted = (np.array([pair[key] for pair in told]) for key in ("measured", "predicted"))
    drawn = np.random.default_rng(0).integers(0, len(told), (DRAWS, len(told)))
    ratios = np.median(predicted[drawn], axis=1) / np.median(measured[drawn], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    middles = {"measured": median(measured.tolist()), "predicted": median(predicted.tolist())}
    return {
        "named": len(told), **middles, "ratio": middles["predicted"] / middles["measured"], "low": low, "high": high
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for r in results:
        told = [
            f"{r['measured']:.2f}",
            f"{r['predicted']:.2f}",
            f"{r['ratio']:.3f}",
            f"{r['low']:.2f} to {r['high']:.2f}",
        ]
        lines.append([r["fault"], r["engine"], f"{len(r['pairs'])}", f"{r['named']}", *told])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
