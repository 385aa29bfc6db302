"""Demos in a row, none dropped: did each name the right rank, after how many steps, and how far off was its size?

    python -m bench.detection.demos [--runs 30] [--healthy 30] [--plain 10] [--keep FILE] [--write]

Each is `ringside demo` as a user runs it (without the comparison at its end), on this machine as it is: first runs
whose fault is calibrated to +30%, then healthy ones, then some with a factor of 1.3 that nobody calibrated. Let the
machine do nothing else, and the commit stay as it is. FILE (runs/demos.json) keeps every run, and one that is there is
not made again; `--write` puts docs/demos.md together from it.

Goals: the right rank in all, none named before the fault, after 12 steps in the median and 30 in nine of ten; of 30 a
size that comes to 25 to 35% in 27, found within 5 points in 27, and held by the interval in 27; healthy ones silent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import DOCS, ROOT, RUNS, make_parser, page_table, read_results, report_progress

from ringside.text import name_ranks

LIMIT_S = 300.0  # of one demo
WORDS = {
    "calibrated": [],
    "healthy": ["--inject", "none"],
    "plain": ["--inject", "slow:rank=1,factor=1.3,from_step={}"],
}
TITLES = {"calibrated": "As it comes", "healthy": "Nothing injected", "plain": "A factor of 1.3, not calibrated"}


def demo(kind: str, index: int) -> dict[str, Any]:
    """Run a demo, and return what its end revealed, its exit status and how long it took, seconds."""
    # the demo draws its rank and step itself; where the fault is spelled out, the step is drawn here
    step = np.random.default_rng(index).integers(40, 90)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ringside", "demo", "--json", "--no-comparison", "--seed", str(index)]
        command += ["--run-dir", f"{folder}/run", *(word.format(step) for word in WORDS[kind])]
        begun_s = time.monotonic()
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        took_s = time.monotonic() - begun_s
    if not ended.stdout.strip():
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    summary = json.loads(ended.stdout)
    named = [
        {name: verdict[name] for name in ("kind", "ranks", "since_step", "cause")} for verdict in summary["verdicts"]
    ]
    return {**summary["reveal"], "verdicts": named, "status": ended.returncode, "seconds": took_s}


def table(kind: str, runs: list[dict[str, Any]]) -> str:
    """Return the runs of a kind one by one, and how many of them reach each goal, as Markdown."""
    if kind == "healthy":
        lines = [f"- {sum(not run['verdicts'] for run in runs)} of {len(runs)} named nobody.\n"]
        for number, run in enumerate(runs, 1):
            for verdict in run["verdicts"]:
                words = f"{verdict['kind']} of {name_ranks(verdict['ranks'])} since step {verdict['since_step']}"
                lines.append(f"- Run {number}: {words}; {verdict['cause'] or 'no cause is known'}.\n")
        return "".join(lines)
    rows, delays, sizes, misses = [], [], [], []
    for number, run in enumerate(runs, 1):
        came_to, found, errors = (run[name] or {} for name in ("came_to", "found", "errors"))
        delay = errors.get("delay_steps", inf) if run["status"] == 0 else inf
        delays.append(delay)
        size, miss, holds = came_to.get("relative"), errors.get("relative"), errors.get("interval_holds")
        sizes.append(inf if size is None else size)
        misses.append(inf if miss is None else abs(miss))
        rows.append(
            [
                str(number),
                f"{run['injected']['ranks'][0]}, {run['injected']['from_step']}",
                "" if size is None else f"{100 * size:+.1f}%",
                "nobody" if not found else f"{found['ranks']}, {found['since_step']}".replace("[", "").replace("]", ""),
                "" if delay == inf else str(delay),
                "" if miss is None else f"{100 * miss:+.1f}",
                {None: "", True: "yes", False: "no"}[holds],
            ]
        )
    median, late = np.quantile(delays, (0.5, 0.9), method="inverted_cdf")
    lines = [
        f"right rank and nobody else: {sum(run['status'] == 0 for run in runs)} of {len(runs)}",
        f"steps until it was named: median {median:g}, nine in ten {late:g}",
        f"came to 25 to 35%: {sum(0.25 <= size <= 0.35 for size in sizes)}",
        f"size within 5 points: {sum(miss <= 0.05 for miss in misses)}",
        f"size inside the interval of what it came to: {sum(row[-1] == 'yes' for row in rows)}",
    ]
    head = ["run", "rank, step", "came to", "named, since", "steps", "size off by, points", "interval holds it"]
    return page_table(head, rows) + "\n" + "".join(f"- {line}\n" for line in lines)


def page(kept: dict[str, Any]) -> str:
    """Return docs/demos.md."""
    text = (
        "# Demos in a row\n\n"
        f"Written by `python -m bench.detection.demos --write` at commit {kept['commit']}, on two cores: every run of "
        "`ringside demo`,\nin order, none dropped. The script's docstring has the goals. A run that was wrong has no "
        "number of steps, and counts as never.\n"
    )
    for kind, title in TITLES.items():
        if runs := kept.get(kind):
            text += f"\n## {title}\n\n{table(kind, runs)}"
            text += f"\nA run took {np.median([run['seconds'] for run in runs]):.0f} s (median).\n"
    return text


def main() -> int:
    """Run what is not there yet, and print the page."""
    parser = make_parser("bench.detection.demos", __doc__)
    parser.add_argument("--runs", type=int, default=30, metavar="N", help="with a calibrated fault (default: 30)")
    parser.add_argument("--healthy", type=int, default=30, metavar="N", help="with none (default: 30)")
    parser.add_argument("--plain", type=int, default=10, metavar="N", help="with a factor of 1.3 (default: 10)")
    parser.add_argument("--keep", type=Path, default=RUNS / "demos.json", metavar="FILE", help="of all runs")
    parser.add_argument("--write", action="store_true", help="docs/demos.md")
    args = parser.parse_args()
    kept = read_results(args.keep)
    if "commit" not in kept:
        described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        kept["commit"] = described.stdout.strip()
    args.keep.parent.mkdir(parents=True, exist_ok=True)
    for kind, wanted in (("calibrated", args.runs), ("healthy", args.healthy), ("plain", args.plain)):
        runs = kept.setdefault(kind, [])
        while len(runs) < wanted:
            runs.append(demo(kind, len(runs)))
            args.keep.write_text(json.dumps(kept, indent=1) + "\n")
            report_progress(f"  {kind} {len(runs)}/{wanted}: status {runs[-1]['status']}, {runs[-1]['seconds']:.0f} s")
    print(page(kept))
    if args.write:
        (DOCS / "demos.md").write_text(page(kept))
    return 0 if all(run["status"] == 0 for kind in TITLES for run in kept[kind]) else 1


if __name__ == "__main__":
    sys.exit(main())
