"""Rebuild a run's report, and print the verdict.

Writes report.html and summary.json again from what is in the run directory,
even if the run was cut off. --json and --markdown print another form on stdout
instead of the verdict; --perfetto writes a trace instead of the report.

exit status: 0 fine, also where there is a verdict, 1 the run cannot be read,
2 usage error.

examples:
  $ ringside report runs/demo-1
  $ ringside report runs/demo-1 --json | jq .verdicts
  $ ringside report runs/demo-1 --markdown >> "$GITHUB_STEP_SUMMARY"
  $ ringside report runs/demo-1 --perfetto trace.json.gz --steps 40:80
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from ringside.commands.options import add_price, use_price
from ringside.doctor.calls.follow import judge_folder
from ringside.errors import UsageError
from ringside.monitor.nccl.report import read_log_folder
from ringside.monitor.run.directory import REPORT, RunReader
from ringside.monitor.summary import finish_run
from ringside.text import counted
from ringside.view.export.markdown import render_markdown
from ringside.view.export.perfetto import check_trace_name, steps_between, write_perfetto
from ringside.view.html.run_report import render_report
from ringside.view.mesh_text import blocked_line, chain_line, mesh_order, rank_cells, rank_place, read_blocked
from ringside.view.run.recorded import Run
from ringside.view.tui.console import SafeConsole, WithoutTrailingBlanks, printable_lines
from ringside.view.verdict_text import RANKS_CAPTION, as_sentence, describe_calm, slowest_first, verdict_text

HELP = "build a run's report.html and summary.json, and print the verdict"
SHOWN_RANKS = 10
ALL_STEPS = (None, None)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside report`."""
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="the directory a run printed on its last line")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print summary.json instead (keys: docs/json.md)")
    form.add_argument("--markdown", action="store_true", help="print the report as Markdown instead")
    form.add_argument(
        "--perfetto", metavar="FILE", type=Path, help="write a trace for ui.perfetto.dev (.json or .json.gz) instead"
    )
    add_price(parser)
    add("--steps", metavar="A:B", type=parse_range, default=ALL_STEPS, help="with --perfetto: steps A to before B")


def run(args: argparse.Namespace) -> int:
    """Rebuild the report; print the verdict, a table of ranks, and the report's path as the last line."""
    use_price(args.price)
    if args.perfetto is None and args.steps != ALL_STEPS:
        raise UsageError("--steps is for a trace: give --perfetto FILE too")
    if args.perfetto is not None:
        check_trace_name(args.perfetto)
        run = Run(args.run_dir)
        steps = steps_between(run.table, *args.steps)
        records = [record for record in RunReader(args.run_dir).iterate() if record.step in steps]
        count = write_perfetto(args.perfetto, run.info, records, run.verdicts)
        print(f"{count:,} events of {len(steps):,} steps; open the file at https://ui.perfetto.dev", file=sys.stderr)
        print(args.perfetto)
        return 0
    reader = RunReader(args.run_dir)
    logs = read_log_folder(reader.poll_events())
    said = judge_folder(Path(logs), reader.info.started_unix) if logs else ()
    extra = {"call_logs": {"folder": logs, "words": "; ".join(said)}} if said else None
    summary = finish_run(args.run_dir, render_report, extra=extra)
    if args.markdown:
        print(printable_lines(render_markdown(summary, RunReader(args.run_dir).info)), end="")
        return 0
    if args.json:
        print(json.dumps(summary, indent=2))
        return 0
    print_summary(summary, SafeConsole(file=sys.stdout, highlight=False))
    print(args.run_dir / REPORT)
    return 0


def parse_range(text: str) -> tuple[int | None, int | None]:
    """Return `A:B` as two steps; either may be left out.

    Raises:
        argparse.ArgumentTypeError: It is no such range.
    """
    first, colon, until = text.partition(":")
    try:
        steps = int(first) if first else None, int(until) if until else None
    except ValueError:
        colon = ""
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; give for example 40:80")
    return steps


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Print a summary: the verdict first, then the slowest ranks; it fits 80 × 24."""
    parts: list[RenderableType] = []
    verdicts = [verdict_text(verdict, summary) for verdict in summary["verdicts"]]
    if not verdicts:
        calm = describe_calm(summary)
        parts += [Text(calm.headline, style="bold"), Text(calm.text)]
    for text in verdicts:
        parts.append(Text(text.headline, style="bold red"))
        parts += [Text(line) for line in (text.when, text.why, f"Cost: {text.price}", f"Next: {text.next}")]
        if links := chain_line(text.verdict):
            parts.append(Text(f"Chain: {links}"))
    if blocked := read_blocked(summary):
        parts.append(Text(as_sentence(f"{blocked_line(blocked)} (median step, whole run)"), style="dim"))
    # The slowest ranks, culprits first; all of a small mesh beside those that do the same work.
    culprits = {rank for text in verdicts for rank in text.verdict.ranks}
    ranks = slowest_first(summary, culprits)
    if any(map(rank_place, ranks)) and len(ranks) <= SHOWN_RANKS:
        ranks = mesh_order(ranks)
    hidden = max(len(ranks) - SHOWN_RANKS, 0)
    caption = f"and {counted(hidden, 'rank')} with less excess" if hidden else None
    table = Table(box=None, pad_edge=False, caption=caption)
    columns, rows = rank_cells(ranks[:SHOWN_RANKS])
    for column in columns:
        justify: JustifyMethod = "left" if column in ("place", "host") else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis")
    for name, *cells in rows:
        is_culprit = int(name) in culprits
        marked = f"{name} {'◀' if is_culprit else ' '}"
        table.add_row(*map(Text, (marked, *cells)), style="bold" if is_culprit else "")
    console.print(WithoutTrailingBlanks(Group(*parts, Text(RANKS_CAPTION, style="dim"), table)))
