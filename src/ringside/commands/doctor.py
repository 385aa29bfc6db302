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
import time
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ringside.doctor.examine import examine
from ringside.doctor.files.source import Progress
from ringside.doctor.findings import Findings, Sheet, as_json, is_enough_to_judge, overall_headline
from ringside.errors import UsageError
from ringside.files import write_user_file
from ringside.text import counted, figure, name_ranks, natural_key, rank_list, size
from ringside.view.mesh_text import chain_line
from ringside.view.tui.console import SafeConsole
from ringside.view.verdict_text import checks, finding_text, what_if_line

HELP = "explain a run that failed or crawled, from traces, dumps and logs"
HEALTHY, VERDICTS, NOTHING_READABLE, NOT_ENOUGH = 0, 1, 3, 4
SHOWN_NOTES = 12
MOST_STANDING_LINES = 16
EVERY_SECONDS = 0.5
EVERY_SECONDS_IN_A_LOG = 5.0


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


def files_line(findings: Findings) -> str:
    """Return in one line how many files of which kind were read, dumps with their ranks, and how many were not."""
    kinds = Counter(note.kind for note in findings.notes if note.used)
    dumps = [fact["ranks"] for name, fact in findings.facts.items() if name.startswith("flight_recorder")]
    read = []
    for kind, count in kinds.items():
        files = counted(count, kind if kind.endswith(("dump", "log", "trace")) else f"{kind} file".strip())
        ranks = f" ({name_ranks(dumps[0])})" if kind == "flight-recorder dump" and len(dumps) == 1 else ""
        read.append(files + ranks)
    ignored = sum(not note.used for note in findings.notes)
    parts = [f"Read: {', '.join(read) or 'nothing'}", f"ignored: {counted(ignored, 'file')}" if ignored else ""]
    return f"{'; '.join(filter(None, parts))} (-v lists them)."


def standing_lines(sheet: Sheet) -> list[str]:
    """Return a table of where ranks stand as lines of text; ranks that stand alike share a line, culprits first."""
    culprits = set(sheet.culprits)
    rows = sorted(enumerate(sheet.rows), key=lambda item: (item[0] not in culprits, str(item[1][1:])))
    cells = [["ranks", *sheet.columns[1:]]]
    for _, alike in groupby(rows, key=lambda item: (item[0] in culprits, item[1][1:])):
        same = [row for _, row in alike]
        ranks = rank_list(int(row[0]) for row in same if row[0] is not None)
        values = zip(sheet.columns[1:], same[0][1:], strict=True)
        cells.append([ranks, *(figure(name, value) for name, value in values)])
    left_out = len(cells) - 1 - MOST_STANDING_LINES
    cells = cells[: MOST_STANDING_LINES + 1]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [f"{sheet.title}:", *lines, *([f"… and {counted(left_out, 'more row')} in --json"] if left_out > 0 else [])]


class OnStream(Progress):
    """Writes progress to a stream: one line that is overwritten on a terminal, a line now and then in a log.

    Args:
        stream: Where to, normally stderr.
        terminal: Whether a line can be overwritten there.
    """

    def __init__(self, stream: TextIO, *, terminal: bool) -> None:
        self._stream, self._terminal = stream, terminal
        self._every_s = EVERY_SECONDS if terminal else EVERY_SECONDS_IN_A_LOG
        self._text, self._bytes, self._shown = "", 0, time.monotonic()
        self._width = 0

    def begin(self, text: str) -> None:
        """Note what begins now; show it where it can be overwritten."""
        self._text = text
        self._show()

    def advance(self, nbytes: int) -> None:
        """Count bytes; show the sum now and then."""
        self._bytes += nbytes
        self._show()

    def done(self) -> None:
        """Wipe the line."""
        if self._terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown < self._every_s:
            return
        self._shown = now
        line = f"{self._text} · {size(self._bytes)} read"[:110]
        self._stream.write(f"{line.ljust(self._width)}\r" if self._terminal else f"{line}\n")
        self._stream.flush()
        self._width = max(self._width, len(line))
