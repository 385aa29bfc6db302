"""Verify schedules, and compare their cost with the lower bounds.

Every algorithm is run on symbols: each result must contain every rank's
contribution exactly once, all ranks must compute it by the same expression, no
round may deadlock and no two writes may be unordered. In the table, sent,
received and link are in units of the tensor's size; link is what the busiest
link carries.

exit status: 0 all are right, 1 a schedule is wrong, 2 usage error.

examples:
  $ ringside verify ring direct -n 4,8
  all 4 schedules verified: ring, direct
  $ ringside verify --all --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ringside.commands.options import add_verbosity
from ringside.errors import UsageError
from ringside.schedule import ALGORITHMS, COLLECTIVES, Audit, by_name, verify

HELP = "verify schedules, and audit rounds, bytes and ports"

SCHEMA = 1
SHOWN_PROBLEMS = 12
SHOWN_FIRST = ("ranks", "switches", "chunks", "ok", "canonical", "rounds", "lower_bound_rounds")
"""Fields of an audit at the beginning of its JSON."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    known = f"of {', '.join(ALGORITHMS)}, and for other collectives {', '.join(COLLECTIVES)} (default: all)"
    parser.add_argument("algorithms", nargs="*", metavar="ALGO", help=known)
    parser.add_argument("--all", action="store_true", help="every algorithm there is")
    parser.add_argument("-n", "--ranks", default="1-64", metavar="N", help="such as 8, 2,4,8 or 1-64 (default: 1-64)")
    parser.add_argument("--buffers", type=int, default=1, metavar="B", help="receive buffers of a rank (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON (keys: docs/json.md)")
    add_verbosity(parser)
    parser.add_argument("--links", action="store_true", help="with --json: the bytes of every link as well")


def run(args: argparse.Namespace) -> int:
    """Verify, print verdict and table; return 1 if a schedule is wrong."""
    names = list(dict.fromkeys(args.algorithms))
    if args.all or not names:
        names = [*ALGORITHMS, *COLLECTIVES]
    # One after the other; a terminal on stderr shows how far it is.
    counts = parse_counts(args.ranks)
    cases = [(name, ranks) for name in names for ranks in counts]
    progress, quiet = Console(stderr=True), args.quiet or not sys.stderr.isatty()
    audits = [
        verify(by_name(name, ranks), buffers=args.buffers)
        for name, ranks in track(cases, "verifying", console=progress, transient=True, disable=quiet)
    ]
    if args.json:
        print(json.dumps(to_json(audits, links=args.links), indent=2))
    else:
        console = Console(highlight=False)
        for line in _verdict(audits):
            console.print(line, soft_wrap=True, markup=False)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("algorithm")
        for heading in ("ranks", "rounds", "≥", "sent", "received", "≥", "link", "ports"):
            table.add_column(heading, justify="right", style="dim" if heading == "≥" else "")
        table.add_column("proof")
        for audit in audits:
            proof = "canonical" if audit.canonical else "ok"
            if not audit.ok:
                proof = ", ".join(dict.fromkeys(problem.kind for problem in audit.problems))
            # a barrier's chunk stands for "has arrived" and carries nothing
            barrier = audit.collective.name == "barrier"
            moved = (audit.max_bytes_sent, audit.max_bytes_received, audit.lower_bound_bytes)
            table.add_row(
                audit.name,
                str(audit.ranks),
                str(audit.rounds),
                str(audit.lower_bound_rounds),
                *(f"{0.0 if barrier else float(x):.3f}" for x in (*moved, audit.traffic.busiest_link_bytes)),
                str(audit.max_ports),
                proof,
            )
        console.print(table)
        for line in _notes(audits):
            console.print(line, style="dim", soft_wrap=True)
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


def to_json(audits: Sequence[Audit], *, links: bool = False) -> dict[str, Any]:
    """Return the audits as plain data; bytes are in units of the tensor, as a float and exactly."""
    plain = []
    for audit in audits:
        data = {
            "algorithm": audit.name,
            "collective": str(audit.collective),
            **{name: getattr(audit, name) for name in SHOWN_FIRST},
            **_bytes_json("max_bytes_sent", audit.max_bytes_sent),
            **_bytes_json("max_bytes_received", audit.max_bytes_received),
            **_bytes_json("max_bytes_reduced", audit.traffic.max_bytes_reduced),
            **_bytes_json("lower_bound_bytes", audit.lower_bound_bytes),
            "busiest_link": audit.busiest_link,
            **_bytes_json("busiest_link_bytes", audit.traffic.busiest_link_bytes),
            **{name: getattr(audit, name) for name in ("max_ports", "beats_bounds", "buffers", "by_symmetry")},
            **{f"chunks_{name}": getattr(audit.traffic, name).tolist() for name in ("sent", "received", "reduced")},
            "problems": list(map(asdict, audit.problems)),
        }
        if links:
            moved = audit.traffic.links()
            data["links"] = [{"src": src, "dst": dst, **_bytes_json("bytes", amount)} for src, dst, amount in moved]
        plain.append(data)
    return {"schema": SCHEMA, "ok": all(audit.ok for audit in audits), "audits": plain}


def _bytes_json(key: str, value: Fraction) -> dict[str, float | str]:
    return {key: float(value), f"{key}_exact": str(value)}


def _verdict(audits: Sequence[Audit]) -> list[str]:
    wrong = [audit for audit in audits if not audit.ok]
    if not wrong:
        count = "1 schedule" if len(audits) == 1 else f"all {len(audits)} schedules"
        return [f"{count} verified: {', '.join(dict.fromkeys(audit.name for audit in audits))}"]
    lines = [f"{len(wrong)} of {len(audits)} schedules wrong:"]
    found = [f"  {a.name}, {a.ranks} ranks: {p.kind}: {p.message}" for a in wrong for p in a.problems]
    lines += found[:SHOWN_PROBLEMS]
    if len(found) > SHOWN_PROBLEMS:
        lines.append(f"  and {len(found) - SHOWN_PROBLEMS} more (--json lists all)")
    return lines


def _notes(audits: Sequence[Audit]) -> Iterator[str]:
    yield "sent, received (by the busiest rank) and link (the busiest): in units of the tensor's size"
    if any(audit.canonical for audit in audits):
        yield "canonical: verified, and every sum is ((x0+x1)+x2)+..., wherever the tensor is cut"
    means: dict[str, list[str]] = {}
    for audit in audits:
        if audit.beats_bounds:
            mean = "a switch that reduces" if audit.switches else "more ports"
            if audit.name not in means.setdefault(mean, []):
                means[mean].append(audit.name)
    if means:
        who = "; ".join(f"{', '.join(names)} by {mean}" for mean, names in means.items())
        yield f"≥ is the lower bound for one port per rank and no switch that reduces; below it: {who}"
