"""Compare predictions with measured tables, and report the error.

Reads CSV (size_bytes, time_us, algbw_GBps, busbw_GBps, nodes, gpus, cluster in
any order), logs of nccl-tests, the JSON of its -J, and the output of
osu_allreduce; a folder stands for the tables in it. Every row is checked first:
rows that contradict themselves or the rows around them are reported and not
used. Where the number of ranks is not given, it follows from busbw/algbw. Then
rows 0, 2, 4, ... (by size) are fitted and rows 1, 3, 5, ... are scored, next to
one Hockney line, log-log interpolation and NCCL's tuning constants as seconds.

Tables of osu_latency and osu_bw among the files (or with --p2p) give what
messages cost in a CPU cluster.

exit status: 0 scored, 1 no table could be scored, 2 usage error.

examples:
  $ ringside predict score nccl.log
  $ ringside predict score tables/*.csv --fit-below 16M
  $ ringside predict score tables/*.csv --preset auto --json
  $ ringside predict score --fit 2nodes.csv --test 4nodes.csv 8nodes.csv
  $ ringside predict score osu_allreduce.csv osu_latency.csv osu_bw.csv \\
        --preset auto
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from ringside.commands.predict.plan import write_page
from ringside.errors import UsageError
from ringside.predict import score as scoring
from ringside.predict.laws.knowledge import Knowledge
from ringside.predict.score import Score, summary
from ringside.predict.tables import read_tables
from ringside.predict.tables.table import Table
from ringside.text import counted, parse_size, percent, signed_percent, size
from ringside.view.predict_text import BASELINE_NAMES
from ringside.view.tui.console import SafeConsole

HELP = "compare predictions with measured tables: nccl-tests, OSU, CSV"
SCHEMA = 1
SUFFIXES = (".csv", ".txt", ".log", ".out", ".json")
SHOWN_FLAGS = 30


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside predict score`."""
    add = parser.add_argument
    add("paths", metavar="TABLE", nargs="*", help="CSV, nccl-tests log or JSON, OSU output, or a folder of them")
    add("--fit-below", metavar="SIZE", help="fit the sizes up to this one, score the larger: 16M")
    add("--fit", metavar="TABLE", nargs="+", default=[], help="fit these tables of a cluster ...")
    add("--test", metavar="TABLE", nargs="+", default=[], help="... and score these of another scale of it")
    add("--preset", metavar="NAME", help="score without a fit: auto (from the table's words), a preset or a topology")
    add("--p2p", metavar="TABLE", nargs="+", default=[], help="osu_latency and osu_bw of the CPU clusters")
    add("-n", "--ranks", type=int, default=0, metavar="N", help="ranks, for tables that do not give them")
    add("--hosts", type=int, default=0, metavar="N", help="hosts, for tables that do not give them")
    add("--points", action="store_true", help="with --json: every scored row with its prediction and band")
    add("--html", type=Path, metavar="FILE", help="write a page: measured and predicted times, and residuals")
    add("--json", action="store_true", help="print JSON (keys: docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Read, check and score the tables; print the verdict first."""
    if bool(args.fit) != bool(args.test) or (args.fit and (args.paths or args.fit_below)):
        raise UsageError("--fit A.csv ... needs --test B.csv ..., and neither TABLE nor --fit-below beside them")
    if not args.fit and not args.paths:
        raise UsageError("name a table: a CSV, a log of nccl-tests, its JSON, OSU's output, or a folder of them")
    limit = parse_size(args.fit_below, binary=True) if args.fit_below is not None else None
    if args.fit_below is not None and not limit:
        raise UsageError(f"--fit-below {args.fit_below}: a size such as 16M or 1G")
    paths = [*args.paths, *args.fit, *args.test, *args.p2p]
    tables, known, scores = read_checked_tables(paths, args.preset or "auto", args.ranks, args.hosts)
    if args.fit:
        # a table belongs to the side on which its file, or its folder, was named
        sides = ({str(path) for path, _ in _files(names)} for names in (args.fit, args.test))
        fit, test = ([table for table in tables if table.path in side] for side in sides)
        scores += [scoring.other_scale(scoring.same_cluster(fit, table), table, known) for table in test]
    elif limit is not None:
        scores += [scoring.larger_sizes(table, known, limit) for table in tables]
    elif args.preset:
        scores += [scoring.preset_only(table, known) for table in tables]
    else:
        scores += [scoring.hold_out(table, known) for table in tables]
    # The verdict first.
    if args.json:
        print(json.dumps(to_json(scores, points=args.points), indent=1))
    else:
        wide = None if sys.stdout.isatty() else 160  # a file or a pipe has no width of its own
        _print_scores(scores, SafeConsole(file=sys.stdout, highlight=False, width=wide))
    if args.html is not None:
        from ringside.view.html.predictions import score_page

        write_page(args.html, score_page(scores))
    return 0 if any(not score.refused for score in scores) else 1


def read_checked_tables(
    paths: Sequence[str], preset: str, ranks: int, hosts: int
) -> tuple[list[Table], Knowledge, list[Score]]:
    """Read tables and check their rows; a named file that is none is refused with its reason, in a folder passed over.

    Args:
        paths: Files and folders.
        preset: What the hardware is; "auto": the tables' words say it.
        ranks: For tables that do not say; 0: none is given.
        hosts: Likewise.

    Returns:
        The collectives, what is known of their hardware, and what was refused.

    Raises:
        UsageError: There is no table at all; the last reason, if there was one.
    """
    read: list[Table] = []
    refused: list[Score] = []
    for path, in_folder in _files(paths):
        try:
            read += [scoring.with_ranks(table, ranks, hosts) for table in read_tables(path)]
        except UsageError as error:
            if not in_folder:
                refused.append(Score(Table(path.stem, (), path=str(path)), "unreadable", refused=str(error)))
    if not read:
        raise UsageError(refused[-1].refused if refused else f"no table in {', '.join(paths)}")
    tables, pairs = scoring.check_tables(read)
    return tables, Knowledge(preset, pairs), refused


def _files(paths: Iterable[str]) -> list[tuple[Path, bool]]:
    files: dict[Path, bool] = {}
    for name in paths:
        path = Path(name)
        if path.is_dir():
            for inside in sorted(path.iterdir()):
                if inside.suffix.lower() in SUFFIXES:
                    files.setdefault(inside, True)
        else:
            files[path] = False
    return list(files.items())


# ----------------------------------------------------------------------------------------------- what is printed


def to_json(scores: Sequence[Score], *, points: bool = False) -> dict[str, Any]:
    """Return scores as plain data; the keys are those of docs/json.md."""
    tables = []
    for score in scores:
        errors, table, flags = score.errors, score.table, scoring.line_flags(score.table)
        data: dict[str, Any] = {
            "name": table.name,
            "rows": table.count,
            "flagged": len(flags),
            "mape": errors.mape if errors else None,
            "median": errors.median if errors else None,
            "bias": errors.bias if errors else None,
            "worst_size_bytes": errors.worst_size_bytes if errors else None,
            "band_coverage": score.band_coverage,
            "baselines": {name: found.mape if found else None for name, found in score.baselines.items()},
            "mape_large": errors.mape_large if errors else None,
            "full_sweep": score.full_sweep,
            "ranks": table.ranks,
            "hosts": table.hosts,
            "collective": table.collective,
            "law": score.words,
            "fitted_rows": score.fitted,
            "scored_rows": len(score.scored),
            "path": table.path,
            "refused": score.refused,
            "flags": [{"line": flag.line, "size_bytes": flag.size_bytes, "reason": flag.reason} for flag in flags],
        }
        if points:
            found = score.prediction
            predicted = () if found is None else zip(score.scored, found.bands, found.extrapolated, strict=True)
            data["points"] = [
                {
                    "size_bytes": int(row.size_bytes),
                    "measured_s": row.time_s,
                    "predicted_s": band.value,
                    "low_s": band.low,
                    "high_s": band.high,
                    "extrapolated": bool(extrapolated),
                }
                for row, band, extrapolated in predicted
            ]
        tables.append(data)
    mode = next((score.mode for score in scores if score.mode != "unreadable"), "")
    return {"schema": SCHEMA, "mode": mode, "tables": tables, "summary": asdict(summary(scores))}


def _print_scores(scores: Sequence[Score], console: Console) -> None:
    """Print the verdict, the tables, and the rows that were not used."""
    for line in verdict_lines(scores):
        console.print(line, markup=False, soft_wrap=True)
    for score in scores:
        if wrong := score.table.wrong_sums:
            console.print(
                f"{score.table.name}: {counted(wrong, 'row')} returned wrong sums", markup=False, soft_wrap=True
            )
    grid = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    grid.add_column("table", overflow="fold")
    for heading in ("ranks", "rows", "flagged", "error", "≥ 1 MiB", "bias", "worst at", "in band"):
        grid.add_column(heading, justify="right")
    for heading in ("Hockney", "interp.", "NCCL"):
        grid.add_column(heading, justify="right", style="dim")
    for score in scores:
        errors = score.errors
        if errors is None:
            continue
        others = [score.baselines.get(name) for name in ("hockney", "interpolation", "nccl_constants")]
        grid.add_row(
            score.table.name,
            str(score.table.ranks or "?"),
            str(score.table.count),
            str(len(scoring.line_flags(score.table))),
            percent(errors.mape, 1),
            percent(errors.mape_large, 1),
            signed_percent(errors.bias),
            size(errors.worst_size_bytes),
            percent(score.band_coverage, 1),
            *(percent(other.mape if other else None, 1) for other in others),
        )
    console.print(grid)
    for score in scores:
        if score.refused:
            console.print(f"not scored: {score.table.name}: {score.refused}", markup=False, soft_wrap=True)
    flags = [(score.table.name, flag) for score in scores for flag in scoring.line_flags(score.table)]
    if flags:
        console.print(f"rows not used ({len(flags)}):", markup=False)
    for name, flag in flags[:SHOWN_FLAGS]:
        console.print(f"  {name}, line {flag.line}: {flag.reason}", markup=False, soft_wrap=True)
    if len(flags) > SHOWN_FLAGS:
        console.print(f"  and {len(flags) - SHOWN_FLAGS} more (--json lists all)", markup=False)


def verdict_lines(scores: Sequence[Score]) -> list[str]:
    """Return what is to be known first, a line each."""
    from ringside.view.html.predictions import MODES

    total = summary(scores)
    if total.mape is None:
        return ["no table could be scored"]
    mode = next(score.mode for score in scores if score.errors)
    count = f"{total.tables} tables, median error" if total.tables > 1 else "error"
    others = ", ".join(
        f"{BASELINE_NAMES[name]} {percent(value, 1)}" for name, value in total.baselines.items() if value
    )
    covered = f"the 95% band holds {percent(total.band_coverage, 1)} of {total.rows} rows"
    lines = [f"{count} {percent(total.mape, 1)} ({MODES.get(mode, mode)}); {covered}"]
    return lines + ([f"baselines: {others}"] if others else [])
