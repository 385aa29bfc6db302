"""Watch a running job from another shell: verdicts first, then a line per rank.

Without an argument it is the newest job of this machine, else the newest run
under runs/. --once (and any terminal that cannot be drawn on) prints it once,
as much as fits the screen; --json prints it as JSON. s sorts, / filters, Enter
shows one rank, ? explains the rest.

exit status: 0 fine, also where a verdict is open, 1 the run cannot be read,
2 usage error.

examples:
  $ ringside top
  $ ringside top runs/demo-1 --sort wait
  $ ringside top http://127.0.0.1:8777
  $ ringside top --once --filter 8-15
  $ ringside top --json | jq '.verdicts[0]'
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

from ringside.commands.options import add_price, use_price
from ringside.errors import RingsideError, UsageError
from ringside.monitor.run.directory import RUN, runs_under
from ringside.monitor.run.registry import running_runs
from ringside.text import counted
from ringside.view.tui.console import in_ascii, printable, speaks_utf8
from ringside.view.tui.rank_table import SORTS, SortOrder, arrange_ranks
from ringside.view.tui.source import AT_ONCE, Local, Remote, RunSource, take_snapshot
from ringside.view.tui.text import as_json, once_lines

HELP = "watch a running job from another shell, rank by rank"
RUNS = Path("runs")
KNOWN_WITHIN_S = 5.0
PIPE_WIDTH = 160
"""Cells of a line where there is no terminal."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside top`."""
    add = parser.add_argument
    run_help = "a run directory, or the address of `ringside serve` (default: the newest)"
    add("run", metavar="RUN_DIR", nargs="?", help=run_help)
    add("--once", action="store_true", help="print it once, as much as fits the screen, and end")
    add("--all", action="store_true", help="with --once: all ranks, however many")
    add("--json", action="store_true", help="print it once, as JSON (keys: docs/json.md)")
    add_price(parser)
    add("--sort", choices=SORTS, default="excess", help="what ranks are sorted by (default: excess)")
    add("--reverse", action="store_true", help="sort the other way round")
    add("--filter", metavar="TEXT", default="", help="only ranks like 3 or 8-15, part of a host or of a verdict's kind")


def run(args: argparse.Namespace) -> int:
    """Show a run until the user quits, or once."""
    use_price(args.price)
    source, remark = choose_run(args.run)
    order = SortOrder(sort=args.sort, reverse=args.reverse, filter=args.filter)
    # A screen needs a terminal at both ends, and one that knows where its cursor is.
    is_screen = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    if args.json or args.once or not is_screen:
        if remark:
            print(in_ascii(remark), file=sys.stderr)
        return print_once(source, order, sys.stdout, as_data=args.json, all_ranks=args.all)
    try:
        from ringside.view.tui.app import TopApp
    except ImportError:
        raise UsageError(
            "the live screen needs textual: pip install 'torch-ringside[tui]'; `ringside top --once` works without it"
        ) from None
    app = TopApp(source, order=order, remark=remark, utf8=speaks_utf8(sys.stdout.encoding))
    app.run()
    return app.return_code or 0


def choose_run(run: str | None) -> tuple[RunSource, str]:
    """Return the run to show, and a sentence on why this one where none was named.

    Raises:
        UsageError: There is none, or it is no address.
    """
    if run is not None and run.startswith(("http://", "https://")):
        return Remote(run, os.environ.get("RINGSIDE_SERVE_TOKEN", "")), ""
    if run is not None:
        path = Path(run)
        if not (path / RUN).exists():
            raise UsageError(f"{printable(run)} is no run: it has no {RUN}. Give the directory that a run writes to")
        return Local(path, at_once=AT_ONCE), ""
    # running jobs, the newest first; else the newest run that was written
    entries = [entry.directory for entry in running_runs()]
    if entries:
        others = ", ".join(printable(str(each)) for each in entries[1:])
        remark = f"the newest of {len(entries)} jobs; the others: {others}" if others else ""
        return Local(entries[0], at_once=AT_ONCE), remark
    found = runs_under(RUNS)
    if not found:
        raise UsageError(
            f"no job runs on this machine, and there is no run under {RUNS}/; start one with `ringside run`, or give "
            "a run directory"
        )
    return Local(found[0], at_once=AT_ONCE), f"no job runs on this machine; this is the newest under {RUNS}/"


def print_once(source: RunSource, order: SortOrder, stream: TextIO, *, as_data: bool, all_ranks: bool = False) -> int:
    """Print a run once, as many ranks as fit the screen; all of them into a pipe, which has none.

    Raises:
        RingsideError: It cannot be read.
    """
    # A server begins to read a run when it is asked for the first time.
    until = time.monotonic() + KNOWN_WITHIN_S
    snapshot = take_snapshot(source)
    if snapshot.reading and sys.stderr.isatty():
        print(in_ascii(snapshot.reading), file=sys.stderr)
    while not snapshot.trouble and (snapshot.reading or (snapshot.info is None and time.monotonic() <= until)):
        if not snapshot.reading:
            time.sleep(0.1)
        snapshot = take_snapshot(source)
    if snapshot.trouble and snapshot.info is None:
        raise RingsideError(printable(snapshot.trouble))
    if as_data:
        print(json.dumps(as_json(snapshot, order), indent=2), file=stream)
        return 0
    width = shutil.get_terminal_size().columns if stream.isatty() else PIPE_WIDTH
    utf8 = speaks_utf8(stream.encoding if isinstance(stream, io.TextIOWrapper) else "utf-8")
    lines = list(once_lines(snapshot, order, width))
    # LINES and COLUMNS stand for the screen where they are set, as `watch` does; 0: there is no screen
    height = shutil.get_terminal_size((PIPE_WIDTH, 0)).lines
    above = len(lines) - len(arrange_ranks(snapshot.ranks, order))
    shown = len(lines) if all_ranks or not height else max(height - 2, above)  # below: what is left out, the prompt
    if shown < len(lines) - 1:
        lines[shown:] = [f"… and {counted(len(lines) - shown, 'more rank')}: --all"]
    for line in lines:
        print(line if utf8 else in_ascii(line), file=stream)
    return 0
