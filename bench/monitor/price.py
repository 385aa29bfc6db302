"""The price of a verdict against what the fault did cost: the same training with and without it, in turn.

Two real ranks train a small GPT, watched, and a healthy twin of it. After a healthy stretch a fault begins, and blocks
of five steps of the two models alternate, so that both meet the same weather. What a run lost is measured as the time
of its blocks minus that of the twin's beside them, times the ranks; what the monitor says it lost is the verdict's
`cost_rank_seconds`. The replay is the same from the very first step of the fault, which the monitor has to estimate.
Prints the medians over runs, predicted over measured, and an interval that holds 95% of the ratios when runs, and
pairs of blocks within them, are drawn again (bootstrap). A replay knows own times only, and takes the other ranks' as
they are. So two columns say what it cannot see: how much of the loss lies in the slowest own times (the rest is the
synchronisation behind them), and how much slower the *other* ranks are than in the twin's steps.

    python -m bench.monitor.price [--faults slow,input] [--engines ringside,gloo] [--runs 4] [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import make_parser, markdown_table, names_among
from bench.monitor.price_rank import HEALTHY_STEPS
from bench.real_runs.jobs import ENGINES, launcher, load, surroundings

from ringside.errors import RingsideError
from ringside.launch.torchrun import Launch
from ringside.monitor.price import cost_rank_seconds
from ringside.monitor.run.directory import RunReader
from ringside.monitor.run.table import tabulate
from ringside.monitor.stats import Floats

RANK = "bench.monitor.price_rank"
RANKS = 2
FAULTS = {
    "slow12": ("slow:rank=1,factor=1.12", [1]),
    "slow": ("slow:rank=1,factor=1.3", [1]),
    "slow0": ("slow:rank=0,factor=1.6", [0]),
    "input": ("input:rank=1,seconds=0.015", [1]),
    "uneven": ("uneven:rank=1,factor=1.67", [1]),
}
# First step of the fault: after the healthy steps and the twin's first block.
WARM_FIRST = HEALTHY_STEPS + 5
RUN_LIMIT_S = 60.0  # for each run
DRAWS = 4000  # of the bootstrap
MOST_OFF = 0.1  # of the ratio of price to loss from 1
COLUMNS = (
    "fault", "engine", "step", "named", "lost, rank-seconds", "verdict / lost (95%)", "replay / lost (95%)",
    "lost in own times", "others slower by",
)  # fmt: skip


def main() -> int:
    """Measure what was asked for; return 0 if every fault was named and its verdict's price is within 10%."""
    args = parse_options()
    results = []
    for name in args.faults:
        for engine in args.engines:
            results.append(measure_fault(name, engine, args))
            print(json.dumps(results[-1]), load(), file=sys.stderr, flush=True)
    print(json.dumps(results, indent=2) if args.json else results_table(results))
    return 0 if all(is_right(result) for result in results) else 1


def parse_options() -> argparse.Namespace:
    parser = make_parser("bench.monitor.price", __doc__)
    parser.add_argument("--faults", type=names_among(tuple(FAULTS)), default=",".join(FAULTS), help="of: %(default)s")
    parser.add_argument("--engines", type=names_among(list(ENGINES)), default=",".join(ENGINES), help="of: %(default)s")
    parser.add_argument("--runs", type=int, default=4, help="runs of each (%(default)s)")
    parser.add_argument("--model", default="gpt", choices=("gpt", "waiting"), help="waiting: it needs no processor")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs here")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    return parser.parse_args()


def measure_fault(name: str, engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one fault several times over one engine."""
    base = Path(tempfile.mkdtemp(prefix=f"ringside-price-{name}-{engine}-", dir=args.keep))
    fault, ranks = FAULTS[name]
    run_in_turn([fault] * args.runs, engine, args.model, base)
    runs = [run_of(base / str(number), ranks) for number in range(args.runs)]
    if args.keep is None:
        shutil.rmtree(base)
    return {"fault": name, "engine": engine, **figures_of(runs), "runs": [without_pairs(run) for run in runs]}


def run_in_turn(faults: list[str], engine: str, model: str, base: Path) -> None:
    """Do one run for each fault, all in the same processes."""
    log: deque[str] = deque(maxlen=30)
    words = ["-m", RANK, f"--model={model}", "--inject", *faults]
    launch = Launch([*launcher(RANKS), *words], surroundings(engine, base), sink=log.append)
    status = launch.wait(RUN_LIMIT_S * len(faults))
    if status is None:
        launch.end(15)
    if status != 0:
        raise RingsideError(f"the runs failed with exit status {status}:\n" + "\n".join(log))


def run_of(path: Path, ranks: list[int]) -> dict[str, Any]:
    """Return what one run's verdicts say it lost, what it lost, and the replay from the fault's first step on."""
    summary = json.loads((path / "summary.json").read_text())
    reader = RunReader(path)
    own = tabulate(reader.iterate(), RANKS).between(WARM_FIRST)["own_seconds"]
    verdicts = summary["verdicts"]
    return {
        "differences": [
            RANKS * (faulty - healthy) for faulty, healthy in json.loads((path / "pairs.json").read_text())
        ],
        "predicted": sum(verdict["cost_rank_seconds"] for verdict in verdicts),
        "replay": cost_rank_seconds(own, ranks),
        "step_seconds": summary["step_seconds"]["median"],
        "verdicts": [(verdict["kind"], verdict["ranks"], verdict["since_step"]) for verdict in verdicts],
        "right": [verdict["ranks"] for verdict in verdicts] == [ranks],
        **unseen_by_replay(own, twin_of(path), ranks),
    }


def twin_of(path: Path) -> Floats:
    """Return the healthy twin's own times in seconds, float64 [steps, ranks]."""
    columns = [json.loads((path / f"twin-{rank}.json").read_text()) for rank in range(RANKS)]
    return np.array(columns).T


def unseen_by_replay(own: Floats, twin: Floats, ranks: list[int]) -> dict[str, float]:
    """Return what the slowest own times lost, in rank-seconds, and by what share the innocent are slower for the fault.

    Args:
        own: Own times of the steps with the fault, seconds, [steps, ranks].
        twin: Own times of as many steps without it.
        ranks: The culprits.
    """
    slowest = own.max(axis=1).sum() - twin.max(axis=1).sum()
    others = [float(np.median(np.delete(times, ranks, axis=1))) for times in (own, twin)]
    return {"lost_in_own": float(RANKS * slowest), "others_slower": others[0] / others[1] - 1.0}


def is_right(result: dict[str, Any]) -> bool:
    """Tell whether the price that verdicts told is within 10% of what was lost; no verdict is no price."""
    return result["named"] > 0 and abs(result["predicted"]["ratio"] - 1.0) <= MOST_OFF


def without_pairs(run: dict[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in run.items() if key != "differences"}, "measured": sum(run["differences"])}


def figures_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ratios of medians with their intervals.

    `predicted` is over the runs in which the right rank was named and nobody else, `replay` over all runs: what the
    price makes of a fault does not depend on when it was noticed.
    """
    return {
        "named": sum(run["right"] for run in runs),
        "step_seconds": float(np.median([run["step_seconds"] for run in runs])),
        "measured": float(np.median([sum(run["differences"]) for run in runs])),
        "predicted": ratio_of_medians("predicted", [run for run in runs if run["right"]]),
        "replay": ratio_of_medians("replay", runs),
        "lost_in_own": sum(run["lost_in_own"] for run in runs) / sum(sum(run["differences"]) for run in runs),
        "others_slower": float(np.median([run["others_slower"] for run in runs])),
    }


def ratio_of_medians(key: str, runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return one figure of some runs over what they lost: the ratio of medians, and its interval."""
    if not runs:
        return {"ratio": float("nan"), "low": float("nan"), "high": float("nan")}
    lost, priced = np.array([run["differences"] for run in runs]), np.array([run[key] for run in runs])
    low, high = np.quantile(bootstrap_ratios(priced, lost), (0.025, 0.975))
    middle = float(np.median(priced) / np.median(lost.sum(axis=1)))
    return {"ratio": middle, "low": float(low), "high": float(high)}


def bootstrap_ratios(priced: Floats, lost: Floats) -> Floats:
    """Return the ratios of medians of runs, and of pairs within them, that are drawn with replacement."""
    runs, pairs = lost.shape  # a bootstrap of two levels: runs, and in each of them its pairs
    generator = np.random.default_rng(0)
    who = generator.integers(0, runs, (DRAWS, runs))
    which = generator.integers(0, pairs, (DRAWS, runs, pairs))
    measured = lost[who[:, :, None], which].sum(axis=2)
    ratios: Floats = np.median(priced[who], axis=1) / np.median(measured, axis=1)
    return ratios


def results_table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table; costs are in rank-seconds."""
    lines = []
    for r in results:
        seen = [f"{1e3 * r['step_seconds']:.0f} ms", f"{r['named']} of {len(r['runs'])}", f"{r['measured']:.2f}"]
        ratios = [f"{x['ratio']:.2f} ({x['low']:.2f} to {x['high']:.2f})" for x in (r["predicted"], r["replay"])]
        shares = [f"{100 * r['lost_in_own']:.0f}%", f"{100 * r['others_slower']:.1f}%"]
        lines.append([r["fault"], r["engine"], *seen, *ratios, *shares])
    return markdown_table(COLUMNS, lines)


if __name__ == "__main__":
    sys.exit(main())
