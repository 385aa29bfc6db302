"""Explain a run that failed or crawled, from the files it left behind.

Reads profiler traces (Kineto, torch.profiler), flight-recorder dumps, NCCL
logs, logs of NCCL's Inspector, RAS, CoMMA and ClogHook, Ringside's own run
directories, torchelastic error files and recorded pipeline timelines: files,
folders and globs, packed (.gz, .tar.gz, .zip) or not. The format of each file
is detected from its content. Nothing found in a file is ever executed.

exit status: 0 nothing is wrong, 1 there are verdicts, 2 usage error, 3 none of
the files could be read, 4 not enough to judge: no verdict, but the files do not
show that nothing is wrong.

examples:
  $ ringside doctor /tmp/nccl_trace_rank_*
  $ ringside doctor traces/ nccl.log --html what-happened.html
  $ ringside doctor crash.tar.gz --json | jq '.verdicts[] | {kind, ranks}'
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ringside.doctor.examine import examine
from ringside.doctor.files.progress import OnStream
from ringside.doctor.findings import Findings, as_json, is_enough_to_judge
from ringside.errors import UsageError
from ringside.files import write_user_file
from ringside.text import counted, natural_key
from ringside.view.doctor_text import files_line, overall_headline, standing_lines
from ringside.view.mesh_text import chain_line
from ringside.view.tui.console import SafeConsole
from ringside.view.verdict_text import checks, finding_text, what_if_line

HELP = "explain a run that failed or crawled, from traces, dumps and logs"
HEALTHY, VERDICTS, NOTHING_READABLE, NOT_ENOUGH = 0, 1, 3, 4
SHOWN_NOTES = 12


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside doctor`."""
    add = parser.add_argument
    add("paths", metavar="PATH", nargs="+", help="files, folders or globs that the run left behind")
    add("--json", action="store_true", help="print JSON (keys: docs/json.md)")
    add("--html", type=Path, metavar="FILE", help="also write it as one HTML page that needs nothing else")
    add("-v", "--verbose", action="store_true", help="list every file that was given, and what it is")


def run(args: argparse.Namespace) -> int:
    """Examine the paths; print the verdicts first, then the answers, then what was read."""
    progress = OnStream(sys.stderr, terminal=sys.stderr.isatty())
    try:
        findings = examine(args.paths, progress)
    finally:
        progress.done()
    if args.html is not None:  # before anything is printed: whoever reads that may go away (`| head`)
        from ringside.view.html.doctor import doctor_page

        try:
            write_user_file(args.html, doctor_page(findings))
        except OSError as error:
            raise UsageError(
                f"cannot write {args.html}: {error.strerror or error}; give --html a file that can be written"
            ) from error
    if args.json:
        print(json.dumps(as_json(findings), indent=2))
    else:
        # lines are broken for a reader, never for a program
        console = SafeConsole(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())
        print_findings(findings, console, verbose=args.verbose)
        if args.html is not None:
            print(args.html)
    return exit_status(findings)


def exit_status(findings: Findings) -> int:
    """Return 3 where no file could be used, 1 where there are verdicts, 4 where none means nothing, else 0."""
    if not any(note.used for note in findings.notes):
        return NOTHING_READABLE
    if findings.verdicts:
        return VERDICTS
    return HEALTHY if is_enough_to_judge(findings) else NOT_ENOUGH


def print_findings(findings: Findings, console: Console, *, verbose: bool = False) -> None:
    """Print what was found, the verdicts first.

    Args:
        findings: All that was found.
        console: Where to.
        verbose: One line per file in place of one for all.
    """
    status = exit_status(findings)
    if status == NOTHING_READABLE and len(findings.notes) == 1:
        (note,) = findings.notes
        console.print(Text(f"{note.file} {note.text}", style="bold"))
        return
    if headline := overall_headline(findings):
        style = {VERDICTS: "bold red", NOT_ENOUGH: "bold yellow"}.get(status, "bold")
        console.print(Text(headline, style=style))
    advised = set()
    for verdict in findings.verdicts:
        text = finding_text(verdict)
        console.print(Text(text.headline, style="bold red"))
        # the same advice is given once
        advice = "" if text.next in advised else text.next
        advised.add(text.next)
        chain = chain_line(verdict)
        cost = text.price and f"Cost: {text.price}"
        for line in (text.why, cost, advice and f"Next: {advice}", chain and f"Chain: {chain}"):
            if line:
                # where the console breaks a line below a headline, all of it stays indented
                indented = Padding(Text(line), (0, 0, 0, 2), expand=False)
                console.print(Text(f"  {line}") if console.soft_wrap else indented)
    for sheet in findings.standings:
        for line in standing_lines(sheet):
            console.print(Text(line))
    for check in checks(findings.questions, findings.verdicts).values():
        console.print(Text(f"{check.mark} {check.heading}. {check.caption}".rstrip()))
    for replayed in filter(None, [findings.what_if, *findings.more_what_if]):
        source = f" ({replayed['source']})" if findings.more_what_if and "source" in replayed else ""
        console.print(Text(f"Without stragglers: {what_if_line(replayed)}{source}."))
    for unjudged in findings.unjudged:
        console.print(Text(f"Not judged: {unjudged.what}: {unjudged.why}."))
    if not verbose and status != NOTHING_READABLE:
        console.print(Text(files_line(findings)))
        return
    # One line per file, in the order of their numbers: those left out first. Where nothing could be read, why.
    notes = sorted(findings.notes, key=lambda note: (note.used, natural_key(note.file)))
    shown = notes if verbose else notes[:SHOWN_NOTES]
    for note in shown:
        kind = f"{note.kind}, " if note.kind else ""
        sign = "✓" if note.used else "✗"
        console.print(Text(f"{sign} {note.file}: {kind}{note.text}", style="" if note.used else "yellow"))
    if len(notes) > len(shown):
        console.print(Text(f"… and {counted(len(notes) - len(shown), 'more file')} (-v lists them)"))
