"""Compare two runs: what became slower or faster, and whether beyond chance.

Every figure is a median over steps; the interval of its change comes from
drawing blocks of neighbouring steps again. With --fail-over the exit status
says whether a step became slower: by more than the limit, and beyond chance.

exit status: 0 not slower (or no limit was given), 1 slower than the limit,
2 usage error, or a run cannot be read or is too short.

examples:
  $ ringside compare runs/main runs/branch
  $ ringside compare runs/main runs/branch --fail-over 5% --json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringside.errors import UsageError
from ringside.monitor.assessment import describe_assessment
from ringside.monitor.run.directory import finite
from ringside.monitor.verdict import headline
from ringside.text import duration, signed_percent
from ringside.view.run.comparison import WARM_UP_STEPS, RunComparison, compare
from ringside.view.run.recorded import Run
from ringside.view.tui.console import SafeConsole

HELP = "compare two runs; for CI, fail where a step became slower"


HIDDEN = 0.10
"""Where a step may have become so much slower unseen, that is said."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside compare`."""
    add = parser.add_argument
    add("before", metavar="A", type=Path, help="the run to compare with")
    add("after", metavar="B", type=Path, help="the run in question")
    add("--fail-over", metavar="PERCENT", type=parse_share, help="exit with 1 where a step of B takes longer by more")
    warm_up_help = f"first steps left out (default: {WARM_UP_STEPS})"
    add("--warm-up", metavar="N", type=int, default=WARM_UP_STEPS, help=warm_up_help)
    add("--json", action="store_true", help="print JSON (keys: docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Compare; return 1 where a step became slower than allowed."""
    if args.warm_up < 0:
        raise UsageError(f"--warm-up {args.warm_up}: a number of steps, 0 or more")
    # the comparison decides by its interval, not by the median alone: noise does not fail a build
    found = compare(Run(args.before), Run(args.after), warm_up_steps=args.warm_up)
    failed = args.fail_over is not None and found.is_slower_than(args.fail_over)
    if args.json:
        content = finite(msgspec.to_builtins(found))
        print(json.dumps({**content, "fail_over": args.fail_over, "failed": failed}, indent=2))
    else:
        print_comparison(found, args.fail_over, failed, SafeConsole(file=sys.stdout, highlight=False))
    return int(failed)


def parse_share(text: str) -> float:
    """Return a percentage as a ratio: `5%` and `5` are 0.05.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage; give for example 5%")
    return value


def print_comparison(found: RunComparison, limit: float | None, failed: bool, console: Console) -> None:
    """Print what was found, the answer first; it fits 80 columns."""
    step = found.step
    answer = "No difference beyond chance"
    if step.is_certain:
        answer = f"B is {'slower' if step.ratio > 0 else 'faster'}"
    interval = f"95% interval {signed_percent(step.low)} to {signed_percent(step.high)}"
    answer = f"{answer}: step time {signed_percent(step.ratio)} ({interval})."
    if found.unlike:
        console.print(Text(f"Different jobs: {'; '.join(found.unlike)}.", style="bold yellow"))
    console.print(Text(answer, style="bold red" if failed else "bold"))
    if not step.is_certain and step.high >= HIDDEN:
        hidden = f"A change of up to {signed_percent(step.high)} would not be detected: step times vary too much."
        console.print(Text(hidden, style="yellow"))
    if limit is not None:
        console.print(Text(f"{'Failed' if failed else 'Passed'}: the limit is +{100 * limit:g}% of a step's time."))
    for title, verdicts, style, unsure in (
        ("New", found.new_verdicts, "red", "In B, and not certain in A"),
        ("Gone", found.gone_verdicts, "green", "In A, and not certain in B"),
    ):
        for verdict in verdicts:
            if verdict in found.uncertain_verdicts:
                console.print(Text(f"{unsure}: {headline(verdict)}.", style="yellow"))
            else:
                console.print(Text(f"{title}: {headline(verdict)}.", style=style))
    for name, assessment in zip("AB", found.assessment.values(), strict=True):
        if assessment.state == "undecided":
            console.print(Text(f"{name}: no verdict. {describe_assessment(assessment)}", style="yellow"))
    table = Table(box=None, pad_edge=False)
    table.add_column("median per step", no_wrap=True)
    for name in ("A", "B", "change", "95% interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for change in found.changes:
        label = change.name.replace("sync", "communication")  # in JSON the name is a key
        cells = (label, duration(change.before), duration(change.after), signed_percent(change.ratio))
        colour = "" if not change.is_certain else "red" if change.ratio > 0 else "green"
        table.add_row(
            *(Text(cell) for cell in cells),
            f"{signed_percent(change.low)} … {signed_percent(change.high)}",
            style=colour,
        )
    console.print(table)
    for remark in found.remarks[len(found.unlike) :]:  # those of different jobs come first, and are said above
        console.print(Text(f"Note: {remark}.", style="dim"))
