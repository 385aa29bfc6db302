"""Fit your own tables, and write calibrated hardware.

Reads what `ringside predict score` reads: logs of nccl-tests, the JSON of its
-J, CSV; a folder stands for the tables in it. The hardware is taken from the
tables' words (the GPUs' names in a log), or from --preset. Tables of several
numbers of hosts of one cluster go into one file: the more, the surer is what
lies beyond them. The file has the hardware and the rows that were measured, and
`ringside predict --topology FILE` moves its laws by them.

The fit is checked on held-out rows: every second one of each table; with tables
of several scales also each table by the others.

exit status: 0 written, 2 usage error: no table can be fitted, or the file
cannot be written.

examples:
  $ ringside predict fit nccl.log -o fabric.toml
  $ ringside predict fit 1node.log 2nodes.log --preset dgx-h100 -o fabric.toml
  $ ringside predict --topology fabric.toml --hosts 64 --model 7B
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringside.commands.options import write_output
from ringside.commands.predict.score import read_checked_tables
from ringside.errors import UsageError
from ringside.predict import score as scoring
from ringside.predict.fit import TableFit, fit_tables, measured_topology
from ringside.predict.score import Score
from ringside.predict.topology.files import to_toml
from ringside.text import counted, duration, percent, rate
from ringside.view.predict_text import band_text

HELP = "fit your own tables, and write calibrated hardware"
SCHEMA = 1


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside predict fit`."""
    add = parser.add_argument
    add("paths", metavar="TABLE", nargs="+", help="nccl-tests log or JSON, CSV, or a folder of them")
    add("-o", "--output", type=Path, metavar="FILE", required=True, help="the hardware, as TOML")
    preset_help = "what it is: a preset or a topology (default: auto, by its words)"
    add("--preset", metavar="NAME", default="auto", help=preset_help)
    add("-n", "--ranks", type=int, default=0, metavar="N", help="ranks, for tables that do not give them")
    add("--hosts", type=int, default=0, metavar="N", help="hosts, for tables that do not give them")
    add("--json", action="store_true", help="print JSON (keys: docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Fit the tables, write the topology, print how well it meets them."""
    tables, known, refused = read_checked_tables(args.paths, args.preset, args.ranks, args.hosts)
    if refused:
        raise UsageError(refused[0].refused)
    topology = measured_topology(tables, known)
    found = fit_tables(tables, known)
    comment = f"What was measured is in the tables [[measured]].\nringside predict --topology {args.output} --hosts N"
    write_output(args.output, to_toml(topology, comment), UsageError)
    if args.json:
        told = {"schema": SCHEMA, "path": str(args.output), "topology": topology.describe()}
        print(json.dumps({**told, "tables": list(map(as_data, found))}, indent=1))
        return 0
    print(f"{args.output}: {topology.describe()}, fitted to {counted(len(found), 'table')}")
    for one in found:
        print("\n" + "\n".join(table_lines(one)))
    for table in tables:
        for flag in scoring.line_flags(table):
            print(f"not used: {table.name}, line {flag.line}: {flag.reason}")
    print(f"\nnext: ringside predict --topology {args.output} --hosts 64 --model 7B")
    return 0


def as_data(found: TableFit) -> dict[str, Any]:
    """Return what a table showed as plain data: the keys are those of the module's text."""
    table = found.table
    latency, algbw = found.expected

    def met(score: Score | None) -> dict[str, Any] | None:
        if score is None or score.errors is None:
            return None
        return {"mape": score.errors.mape, "band_coverage": score.band_coverage, "rows": len(score.scored)}

    return {
        "name": table.name,
        "ranks": table.ranks,
        "hosts": table.hosts,
        "collective": table.collective,
        "algorithm": table.algorithm or "auto",
        "rows": len(table.rows),
        "flagged": len(scoring.line_flags(table)),
        "latency_s": {"expected": latency, **asdict(found.latency_s)},
        "algbw_bytes_per_s": {"expected": algbw, **asdict(found.algbw)},
        "held_out": met(found.held_out),
        "other_scales": met(found.other_scales),
    }


def table_lines(found: TableFit) -> list[str]:
    """Return what a table showed, in lines."""
    table = found.table
    hosts = f" on {counted(table.hosts, 'host')}" if table.hosts else ""
    latency, algbw = found.expected
    lines = [
        f"{table.name}: {table.collective}, {counted(table.ranks, 'rank')}{hosts}, {len(table.rows)} rows",
        f"  latency       {band_text(found.latency_s, duration)}; expected of the hardware {duration(latency)}",
        f"  algbw, large  {band_text(found.algbw, rate)}; expected of the hardware {rate(algbw)}",
    ]
    for score, label, what in (
        (found.held_out, "check", "on held-out rows"),
        (found.other_scales, "other scales", "when only the tables of other scales are fitted"),
    ):
        if score is not None and score.errors is not None:
            held = f"the 95% band holds {percent(score.band_coverage, 1)} of {len(score.scored)} rows"
            lines.append(f"  {label:<13} error {percent(score.errors.mape, 1)} {what}; {held}")
    if found.held_out.errors is None:
        lines.append(f"  check         none: {len(table.rows)} usable rows are too few to leave some out")
    return lines
