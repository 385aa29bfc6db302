"""The kill matrix with real processes: every rank × phase × {SIGKILL, SIGSTOP} on one host, and pairs drawn at random.

    python -m bench.survive.kill_matrix [--cases 320] [--seed 0] [--only mid_chunk] [--hosts 4 | --lab] [--json FILE]

Four workers train the sample-counting model over shared memory; one of them is hit at a named moment. After every case:
each sample counted exactly once, equal state digests on all ranks, one COMMIT per step in the decision registers, and
whoever was hit is really dead. Exit status 1 if any case is wrong.

With `--lab` each worker is on a host of its own, a network namespace; every two have a link of their own. There the
matrix has a third part: a link goes silent while a worker is in a phase, and all ranks must be there in the end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import make_parser
from tests.survive.herd import Store
from tests.survive.real_cases import RANKS, run_case, warm_up

from ringside.lab import Lab
from ringside.survive.cluster.failpoints import PHASES
from verification.survive.audit import audit

KINDS = ("kill", "stop")
LEADERS = ("before_decide", "after_decide")  # phases that only the leader comes into
# Phases that every step has.
STEADY = tuple(phase for phase in PHASES if phase not in ("rejoin", "offer", "checkpoint"))
STEPS = 24


@dataclass(frozen=True)
class Case:
    """One case: what happens to whom."""

    trap: str
    kind: str
    phase: str
    hits: int = 1
    cut: tuple[tuple[int, int], ...] = ()
    reproducible: bool = True


def every_case() -> Iterator[Case]:
    """Yield one case for every rank, phase and kind."""
    for kind, phase in itertools.product(KINDS, PHASES):
        ranks = [rank for rank in range(RANKS) if comes_there(rank, phase)]
        for rank in ranks:
            yield one_case(kind, phase, rank, 3 + rank)


def every_cut() -> Iterator[Case]:
    """Yield one case for every phase of a step, of either mode, in which a link between two hosts goes silent.

    The link is one that sums pass by, and none to the store's host: whoever is behind that counts as dead.
    """
    for number, (phase, reproducible) in enumerate(itertools.product(STEADY, (True, False))):
        rank, link = number % RANKS, ((1, 2), (2, 3))[number // 2 % 2]
        rank = rank if comes_there(rank, phase) else (rank + 1) % RANKS if phase == "after_ack" else 0
        yield Case(f"stop:rank={rank},step={3 + rank},phase={phase}", "cut", phase, 0, (link,), reproducible)


def comes_there(rank: int, phase: str) -> bool:
    """Tell whether a rank comes into a phase at all: the leader decides, the others acknowledge to it."""
    return rank > 0 if phase == "after_ack" else rank == 0 if phase in (*LEADERS, "offer", "checkpoint") else True


def one_case(kind: str, phase: str, rank: int, step: int) -> Case:
    """Return the case in which a rank is hit in a phase; what a phase needs to come about is done first."""
    if phase == "rejoin":
        first = f"kill:rank={rank},step={step},phase=after_send"
        return Case(f"{first};{kind}:rank={rank},epoch=2,phase=rejoin", kind, phase, 2)
    if phase == "offer":
        return Case(f"kill:rank=3,step={step},phase=after_send;{kind}:rank=0,phase=offer", kind, phase, 2)
    at = "" if phase == "checkpoint" else f",step={step}"
    return Case(f"{kind}:rank={rank}{at},phase={phase}", kind, phase)


def pairs(generator: random.Random) -> Iterator[Case]:
    """Yield cases in which two ranks are hit, in the same step or a step apart, without end."""
    while True:
        first, second = generator.sample(range(RANKS), 2)
        step = generator.randrange(2, STEPS - 6)
        hits = [
            (generator.choice(KINDS), generator.choice(STEADY), rank, at)
            for rank, at in ((first, step), (second, step + generator.randrange(2)))
        ]
        if all(comes_there(rank, phase) for _, phase, rank, _ in hits):
            yield Case(";".join(one_case(*hit).trap for hit in hits), "pair", hits[0][1], 0)


def run(cases: Sequence[Case], out: list[dict[str, object]], hosts: int, lab: Lab | None) -> int:
    """Run the cases; return how many were wrong."""
    store, wrong_cases = Store(lab), 0
    for number, case in enumerate(cases):
        given = {"trap": case.trap, "steps": STEPS, "hosts": hosts, "checkpoints": 5 * (case.phase == "checkpoint")}
        report, wrong = run_case(store, f"case{number}", {**given, "cut": case.cut, "reproducible": case.reproducible})
        lost = [rank for rank in range(RANKS) if case.cut and rank not in report.ended]
        wrong += [f"ranks {lost} were lost with a link"] if lost else []
        wrong += audit(store.registers(f"case{number}"), STEPS, resumed=case.phase == "checkpoint")
        hits = case.trap.count("kill:") if hosts > 1 else case.hits  # nobody can kill what is stopped elsewhere
        wrong += [f"{len(report.deaths)} deaths"] if len(report.deaths) < hits * (case.kind != "pair") else []
        wrong_cases += bool(wrong)
        out.append({"trap": case.trap, "wrong": wrong, "deaths": report.deaths, "seconds": report.seconds})
        silent = "".join(f"  link {a}-{b} silent" for a, b in case.cut) + "  a sum per rank" * (not case.reproducible)
        line = f"{number + 1:4}/{len(cases)}  {wrong_cases} wrong  {report.seconds:5.1f} s  {case.trap}{silent}"
        print(line + (f"\n      WRONG: {wrong}" if wrong else ""), file=sys.stderr, flush=True)
    store.close()
    return wrong_cases


def main() -> int:
    parser = make_parser("bench.survive.kill_matrix", __doc__)
    parser.add_argument("--cases", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=(*PHASES, *KINDS, "pair", "cut"))
    parser.add_argument("--first", type=int, default=0, help="cases to leave out")
    parser.add_argument("--lab", action="store_true", help="every worker on a host of the network lab")
    parser.add_argument("--hosts", type=int, default=1, help="workers take themselves to be on so many hosts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.lab and (reason := Lab.unavailable()):
        raise SystemExit(f"no lab here: {reason}")
    singles = (every_cut(), every_case()) if args.lab else (every_case(),)
    found = itertools.chain(*singles, pairs(random.Random(args.seed)))
    cases = list(itertools.islice(found, args.first, args.cases))
    if args.only:
        cases = [case for case in cases if args.only in (case.kind, case.phase)]
    rows: list[dict[str, object]] = []
    with Lab(hosts=RANKS, wiring="mesh") if args.lab else contextlib.nullcontext() as lab:
        warm_up()
        wrong = run(cases, rows, RANKS if args.lab else args.hosts, lab)
    counts = Counter((case.kind, case.phase) for case in cases)
    for (kind, phase), count in sorted(counts.items()):
        print(f"{kind:5} {phase:14} {count:4} cases")
    print(f"{len(cases)} cases with real processes, {wrong} wrong")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
