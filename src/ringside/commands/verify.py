"""Prove schedules right and print what they cost beside the lower bounds.

Every algorithm is run on symbols: each result must contain every rank's contribution exactly once, all ranks must
compute it by the same expression, no round may deadlock and no two writes may be unordered. Exit status 1 if one fails.

example:
  $ ringside verify ring direct --ranks 4,8
  all 4 schedules proved: ring, direct
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.table import Table

from ringside.errors import UsageError
from ringside.schedule import ALGORITHMS, Audit, by_name, verify

HELP = "prove schedules right and audit rounds, bytes and ports"

SCHEMA = 1
SHOWN_PROBLEMS = 12


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("algorithms", nargs="*", metavar="ALGO", help=f"of {', '.join(ALGORITHMS)} (default: all)")
    parser.add_argument("--all", action="store_true", help="every algorithm there is")
    parser.add_argument("--ranks", default="1-64", metavar="N", help="such as 8, 2,4,8 or 1-64 (the default)")
    parser.add_argument("--buffers", type=int, default=1, metavar="B", help="messages a rank can hold (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON; bytes are fractions of the tensor")


def run(args: argparse.Namespace) -> int:
    """Verify, print verdict and table; return 1 if a schedule is wrong."""
    names = list(dict.fromkeys(args.algorithms))
    if args.all or not names:
        names = list(ALGORITHMS)
    counts = parse_counts(args.ranks)
    audits = [verify(by_name(name, n), buffers=args.buffers) for name in names for n in counts]
    if args.json:
        json.dump(to_json(audits), sys.stdout, indent=2)
        print()
    else:
        _print(audits)
    return 0 if all(audit.ok for audit in audits) else 1


def parse_counts(text: str) -> list[int]:
    """Return the counts that `1-4,8` stands for, ascending, each once; raise `UsageError` for anything else."""
    counts: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise UsageError(f"--ranks takes numbers and ranges such as 8, 2,4,8 or 1-64, not {text!r}") from None
        if not 1 <= low <= high:
            raise UsageError(f"--ranks takes numbers from 1 on, ranges ascending, not {part!r}")
        counts.update(range(low, high + 1))
    return sorted(counts)


def to_json(audits: Sequence[Audit]) -> dict[str, Any]:
    """Return the audits as plain data; bytes are in units of the tensor, as a float and exactly."""
    return {
        "schema": SCHEMA,
        "ok": all(audit.ok for audit in audits),
        "audits": [_audit_json(audit) for audit in audits],
    }


def _audit_json(audit: Audit) -> dict[str, Any]:
    return {
        "algorithm": audit.name,
        "ranks": audit.ranks,
        "chunks": audit.chunks,
        "ok": audit.ok,
        "rounds": audit.rounds,
        "lower_bound_rounds": audit.lower_bound_rounds,
        **_bytes_json("max_bytes_sent", audit.max_bytes_sent),
        **_bytes_json("max_bytes_received", audit.max_bytes_received),
        **_bytes_json("lower_bound_bytes", audit.lower_bound_bytes),
        "max_ports": audit.max_ports,
        "buffers": audit.buffers,
        "problems": [
            {"kind": p.kind, "message": p.message, "rank": p.rank, "chunk": p.chunk, "round": p.round}
            for p in audit.problems
        ],
    }


def _bytes_json(key: str, value: Fraction) -> dict[str, float | str]:
    return {key: float(value), f"{key}_exact": str(value)}


def _print(audits: Sequence[Audit]) -> None:
    console = Console(highlight=False)
    for line in _verdict(audits):
        console.print(line, soft_wrap=True, markup=False)
    console.print(_table(audits))
    if any(audit.rounds < audit.lower_bound_rounds for audit in audits):
        console.print("≥ is the lower bound for one port per rank; more ports may need fewer rounds.", style="dim")


def _verdict(audits: Sequence[Audit]) -> list[str]:
    wrong = [audit for audit in audits if not audit.ok]
    if not wrong:
        count = "1 schedule" if len(audits) == 1 else f"all {len(audits)} schedules"
        return [f"{count} proved: {', '.join(dict.fromkeys(audit.name for audit in audits))}"]
    lines = [f"{len(wrong)} of {len(audits)} schedules wrong:"]
    found = [f"  {a.name}, {a.ranks} ranks: {p.kind}: {p.message}" for a in wrong for p in a.problems]
    lines += found[:SHOWN_PROBLEMS]
    if len(found) > SHOWN_PROBLEMS:
        lines.append(f"  and {len(found) - SHOWN_PROBLEMS} more (--json lists all)")
    return lines


def _table(audits: Sequence[Audit]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("algorithm")
    for heading in ("ranks", "rounds", "≥", "sent", "received", "≥", "ports"):
        table.add_column(heading, justify="right", style="dim" if heading == "≥" else "")
    table.add_column("proof")
    for audit in audits:
        table.add_row(
            audit.name,
            str(audit.ranks),
            str(audit.rounds),
            str(audit.lower_bound_rounds),
            *(f"{float(x):.3f} S" for x in (audit.max_bytes_sent, audit.max_bytes_received, audit.lower_bound_bytes)),
            str(audit.max_ports),
            "ok" if audit.ok else ", ".join(dict.fromkeys(problem.kind for problem in audit.problems)),
        )
    table.caption = "S is the tensor's size; sent and received by the busiest rank"
    table.caption_justify = "left"
    return table
