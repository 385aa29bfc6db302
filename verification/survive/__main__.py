"""Prove that steps are exactly-once: `python -m verification.survive`, or `make prove`.

Runs the kill matrix (every kind of fault × phase × round × bucket × rank, on a simulated network with seeded delays),
breaks each rule in turn to see that the matrix notices, and looks at every state of small jobs. Exit status 1 if an
invariant was broken or a broken rule was not noticed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ringside.errors import UsageError
from verification.survive.faults import Kind, Phase
from verification.survive.kill_matrix import Result, matrix_cases, run_case
from verification.survive.model_checker import Bounds, Explored, explore
from verification.survive.mutants import Mutant, break_rule, rule_names

SCHEMA = 1
SHOWN = 10  # broken cases that are printed; JSON has them all
FAR = 2_000_000  # states
# Bounds that are explored to the end within a minute: two processes, and three with one crash.
SMALL_JOBS = (
    Bounds(ranks=2, steps=2, crashes=1),
    Bounds(ranks=2, steps=1, crashes=1, mistakes=1),
    Bounds(ranks=2, steps=2, crashes=1, returns=1),
    Bounds(ranks=2, steps=1, crashes=1, returns=1, foreign=True, gives_up=True),
    Bounds(ranks=3, steps=1, crashes=1),
    Bounds(ranks=2, steps=2, crashes=0, cuts=1),
    Bounds(ranks=2, steps=1, crashes=1, cuts=1),
    Bounds(ranks=2, steps=1, crashes=0, returns=1, cuts=1),
    Bounds(ranks=2, steps=2, crashes=0, returns=1, drains=1),
    Bounds(ranks=2, steps=2, crashes=1, quits=1),
    Bounds(ranks=2, steps=1, crashes=0, differences=2),
)
LARGER_JOBS = (
    Bounds(ranks=2, steps=1, crashes=1, returns=1, cuts=1, most_states=FAR),
    Bounds(ranks=3, steps=1, crashes=0, cuts=1, most_states=FAR),
)
# Phases as columns are headed.
_HEADINGS = {
    Phase.COMPUTING: "compute",
    Phase.BEFORE_SEND: "before",
    Phase.MID_CHUNK: "mid",
    Phase.AFTER_SEND: "after",
    Phase.AFTER_RECEIVE: "all",
    Phase.BEFORE_DECIDE: "decide",
    Phase.BEFORE_APPLY: "apply",
    Phase.CHECKPOINT: "save",
    Phase.ASKING: "ask",
    Phase.FETCHING: "fetch",
    Phase.SERVING: "serve",
    Phase.LAST_APPLIED: "last",
    Phase.KEPT: "kept",
    Phase.OVER: "over",
    Phase.SAVING: "file",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prove, print, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m verification.survive", description=__doc__)
    parser.add_argument("--cases", type=int, metavar="N", help="how many cases of the matrix (default: each once)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of delays and of the order (default: 0)")
    parser.add_argument("--far", action="store_true", help="look at larger jobs as well: minutes, and gigabytes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    args = parser.parse_args(argv)
    if args.cases is not None and args.cases < 1:
        print(f"prove: --cases {args.cases}: at least 1", file=sys.stderr)
        return UsageError.exit_status

    found = [run_case(case) for case in _shown(matrix_cases(args.seed, args.cases), "kill matrix", args.quiet)]
    mutants = [break_rule(rule, args.seed) for rule in _shown(rule_names(), "breaking rules", args.quiet)]
    jobs = (*SMALL_JOBS, *LARGER_JOBS) if args.far else SMALL_JOBS
    explored = [explore(bounds) for bounds in _shown(jobs, "looking at every state", args.quiet)]
    if args.json:
        print(json.dumps(to_json(args.seed, found, mutants, explored), indent=1))
    else:
        _print_report(found, mutants, explored)
    return 0 if _all_fine(found, mutants, explored) else 1


def _shown(items: Iterable[Any], name: str, quiet: bool) -> Iterable[Any]:
    hidden = quiet or not sys.stderr.isatty()
    return track(list(items), name, console=Console(stderr=True), transient=True, disable=hidden)


def _all_fine(found: Sequence[Result], mutants: Sequence[Mutant], explored: Sequence[Explored]) -> bool:
    proved = not any(result.broken for result in found) and not any(job.broken for job in explored)
    return proved and all(mutant.ok for mutant in mutants)


def to_json(
    seed: int, found: Sequence[Result], mutants: Sequence[Mutant], explored: Sequence[Explored]
) -> dict[str, Any]:
    """Return everything as plain data."""
    counts = sorted((kind.name, phase.name, count) for (kind, phase), count in _fault_counts(found).items())
    return {
        "schema": SCHEMA,
        "ok": _all_fine(found, mutants, explored),
        "seed": seed,
        "cases": len(found),
        "struck": sum(result.struck for result in found),
        "faults": sum(len(result.case.faults) for result in found),
        "commits": sum(result.commits for result in found),
        "broken": [
            {"seed": result.case.seed, "faults": [str(fault) for fault in result.case.faults], "broken": result.broken}
            for result in found
            if result.broken
        ],
        "counts": [{"fault": kind, "phase": phase, "cases": count} for kind, phase, count in counts],
        "controls": [{**asdict(mutant), "ok": mutant.ok} for mutant in mutants],
        "explored": [asdict(job) for job in explored],
    }


def _fault_counts(found: Sequence[Result]) -> Counter[tuple[Kind, Phase]]:
    """Return how many faults of every kind there were in every phase; those that rejoining begins with left out."""
    return Counter((fault.kind, fault.at.phase) for result in found for fault in result.case.faults[-1:])


def _print_report(found: Sequence[Result], mutants: Sequence[Mutant], explored: Sequence[Explored]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)

    # The verdict, and what was broken
    broken = [result for result in found if result.broken]
    struck, faults = sum(r.struck for r in found), sum(len(r.case.faults) for r in found)
    noticed = sum(mutant.ok for mutant in mutants)
    states = sum(job.states for job in explored)
    lines = [
        f"{len(found)} cases, {len(broken)} with a broken invariant; {struck} of {faults} faults found their moment",
        f"{noticed} of {len(mutants)} rules are noticed when they are broken",
        f"{states} states of {len(explored)} small jobs looked at, {sum(bool(j.broken) for j in explored)} jobs broken",
    ]
    for result in broken[:SHOWN]:
        broken_text = "; ".join(f"{name}: {how}" for name, how in result.broken.items())
        lines.append(f"  seed {result.case.seed}: {', '.join(map(str, result.case.faults))}: {broken_text}")
    lines += [f"  {job.bounds}: {' → '.join(job.broken)}" for job in explored if job.broken]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)

    # Cases by fault and phase
    counts = _fault_counts(found)
    table = _table("cases by fault and phase")
    table.add_column("fault", no_wrap=True)
    for phase in Phase:
        table.add_column(_HEADINGS[phase], justify="right")
    for kind in Kind:
        table.add_row(kind.value, *(str(counts[kind, phase]) for phase in Phase))
    console.print(table)

    # Each rule broken in turn
    table = _table("each rule broken in turn")
    for heading in ("rule", "cases", "noticed", "by"):
        table.add_column(heading, justify="right" if heading in ("cases", "noticed") else "left")
    for mutant in mutants:
        by = ", ".join(f"{name} ({count})" for name, count in mutant.by) or "NOT NOTICED"
        table.add_row(mutant.rule, str(mutant.tried), str(mutant.noticed), by)
    console.print(table)

    # Every state of small jobs
    table = _table("every state of small jobs")
    of_bounds = ("ranks", "steps", "crashes", "mistakes", "returns", "links", "gives up")
    for heading in (*of_bounds, "states", "transitions", "complete"):
        table.add_column(heading, justify="right")
    for job in explored:
        b = job.bounds
        bounds = (b.ranks, b.steps, b.crashes, b.mistakes, b.returns, b.cuts)
        given_up, complete = ("yes" if fact else "no" for fact in (b.gives_up, job.complete))
        table.add_row(*map(str, bounds), given_up, str(job.states), str(job.transitions), complete)
    console.print(table)


def _table(title: str) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", title=title)


if __name__ == "__main__":
    sys.exit(main())
