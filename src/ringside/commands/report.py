"""Build a run's report again from what its directory holds, even if the run was cut off, and print the verdict.

Example:

    ringside report runs/demo-1
    ringside report runs/demo-1 --json | jq .verdicts
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringside.monitor.run_directory import REPORT
from ringside.monitor.summary import finish
from ringside.view.report_words import all_is_well, duration, no_verdict, share, tell

HELP = "build a run's report.html and summary.json, and print the verdict"
SHOWN_RANKS = 10


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside report`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the directory a run printed on its last line")
    parser.add_argument("--json", action="store_true", help="print summary.json on stdout instead")


def run(args: argparse.Namespace) -> int:
    """Rebuild the report; print the verdict, a table of ranks, and the report's path as the last line."""
    summary = finish(args.run_dir)
    if args.json:
        print(json.dumps(summary, indent=2))
        return 0
    print_summary(summary, Console(file=sys.stdout, highlight=False))
    print(args.run_dir / REPORT)
    return 0


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Print a summary: the verdict first, then the slowest ranks; it fits 80 × 24."""
    verdicts = [tell(verdict, summary) for verdict in summary["verdicts"]]
    if not verdicts:
        console.print(Text(no_verdict(summary), style="bold"))
        console.print(Text(all_is_well(summary)))
    for told in verdicts:
        console.print(Text(told.headline, style="bold red"))
        for line in (told.when, told.why, f"Price: {told.price}", f"Next: {told.next}"):
            console.print(Text(line))
    console.print(_ranks(summary, {rank for told in verdicts for rank in told.verdict.ranks}))


def _ranks(summary: dict[str, Any], culprits: set[int]) -> Table:
    ranks = sorted(summary["ranks"], key=lambda rank: (rank["rank"] not in culprits, -(rank["excess_ratio"] or 0.0)))
    hidden = len(ranks) - SHOWN_RANKS if len(ranks) > SHOWN_RANKS else 0
    table = Table(box=None, pad_edge=False, caption=f"and {hidden} ranks with less excess" if hidden else None)
    for name in ("rank", "host", "own", "wait", "excess"):
        table.add_column(name, justify="left" if name == "host" else "right", no_wrap=True, overflow="ellipsis")
    for rank in ranks[: len(ranks) - hidden]:
        name = f"{rank['rank']} ◀" if rank["rank"] in culprits else f"{rank['rank']}  "
        times = (duration(rank["own_seconds_median"]), duration(rank["wait_seconds_median"]))
        cells = (name, str(rank["host"]), *times, share(rank["excess_ratio"]))
        table.add_row(*(Text(cell) for cell in cells), style="bold" if rank["rank"] in culprits else "")
    return table
