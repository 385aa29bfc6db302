"""Survivors between hosts: the counting job on network namespaces of the lab, a rank killed, a link cut.

    python -m bench.survive.lab [--hosts 4] [--cut] [--times 4] [--busy 2] [--json FILE]

Two hosts of two ranks (or three of one), every rank a keeper with its worker, sums over TCP between the namespaces. On
three or four hosts, every two of which have a link of their own, one link goes silent in mid run (nobody is told, both
ends live): sums have to go around it, with all ranks. `--times` repeats all cases; `--busy` has so many processes
beside them that do nothing but compute.
After every case each sample must have been counted exactly once, with equal states on all ranks that finished. Printed
besides: how long after the kill the next step was committed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, make_parser

from ringside.lab import Lab

# Steps of a job; and within how many seconds a survivor, and a way around a silent link, must be back.
STEPS, STEPS_CUT, HEALED_WITHIN_S, AROUND_WITHIN_S = 600, 300, 3.0, 15.0


@dataclass(frozen=True)
class Case:
    """What happens, on how many hosts of how many ranks."""

    trap: str
    hosts: int
    ranks_per_host: int
    cut: tuple[int, int] | None = None
    reproducible: bool = False


CASES = (
    Case("", 2, 2),
    *(Case(f"kill:rank={rank},step=20,phase={phase}", 2, 2) for rank, phase in
      ((1, "after_send"), (3, "mid_chunk"), (2, "after_receive"), (0, "before_decide"), (3, "before_apply"))),
    *(Case(f"kill:rank={rank},step=20,phase=after_send", 3, 1) for rank in range(3)),
    *(Case("", hosts, 1, (1, 2), reproducible) for hosts in (3, 4) for reproducible in (False, True)),
)  # fmt: skip


def run_case(case: Case) -> tuple[list[str], float | None]:
    """Run one case; return what is wrong, and the seconds from the kill to the next committed step."""
    script = str(Path(__file__).with_name("lab_rank.py"))
    environ = {"PYTHONPATH": str(ROOT), "RINGSIDE_SURVIVE_TRAP": case.trap, "OMP_NUM_THREADS": "1"}
    wiring = "mesh" if case.cut else "star"
    with Lab(hosts=case.hosts, ranks_per_host=case.ranks_per_host, wiring=wiring) as lab:

        def cut(_: object, __: str, line: str) -> None:
            if case.cut and '"event": "cut"' in line:
                lab.cut(link=case.cut)

        command = [
            sys.executable,
            "-m",
            "ringside.survive",
            script,
            str(STEPS_CUT if case.cut else STEPS),
            "reproducible" * case.reproducible,
        ]
        result = lab.run(command, {**os.environ, **environ}, timeout_s=120, sink=cut)
    wrong = [f"{rank.describe()}: {rank.stderr[-500:]}" for rank in result.ranks if rank.status]
    told = [json.loads(line) for rank in result.ranks for line in rank.stdout.splitlines() if line.startswith("{")]
    ends = [said for said in told if said["event"] == "end" and not said["left"]]
    wrong += [f"rank {end['rank']} counted {end['wrong']} samples wrongly" for end in ends if end["wrong"]]
    wrong += [] if len({end["digest"] for end in ends}) == 1 else ["states differ, or nobody finished"]
    if case.cut:
        wrong += [] if all(len(end["members"]) == case.hosts for end in ends) else ["a rank was lost with the link"]
        longest = max((end["longest"] for end in ends), default=0.0)
        wrong += ["the job was over before the link was cut"] if longest < 1.0 else []
        return wrong, longest
    return wrong, min((said["seconds"] for said in told if said["event"] == "healed"), default=None)


@contextlib.contextmanager
def cores_busy(processes: int) -> Iterator[None]:
    """Within it, so many processes keep a core busy each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    parser = make_parser("bench.survive.lab", __doc__)
    parser.add_argument("--hosts", type=int, choices=(2, 3, 4), help="only the cases on so many hosts")
    parser.add_argument("--cut", action="store_true", help="only the cases with a link that is cut")
    parser.add_argument("--times", type=int, default=1, help="how often each case is run")
    parser.add_argument("--busy", type=int, default=0, help="processes beside that keep a core busy each")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if reason := Lab.unavailable():
        raise SystemExit(f"no lab here: {reason}")
    rows = []
    cases = [case for case in CASES if args.hosts in (None, case.hosts) and (case.cut or not args.cut)]
    for case in cases * args.times:
        with cores_busy(args.busy):
            wrong, healed = run_case(case)
        late = healed is None if case.trap else False
        rows.append({"trap": case.trap, "hosts": case.hosts, "cut": case.cut, "wrong": wrong, "healed_s": healed})
        what = (
            "nobody dies"
            if case.cut is None
            else f"the link between hosts {case.cut} is cut" + ", reproducible" * case.reproducible
        )
        told = "  NOBODY DIED" * late if healed is None else f"  healed in {healed:.2f} s"
        told += f"  WRONG: {'; '.join(wrong)}" if wrong else ""
        print(f"{case.hosts} x {case.ranks_per_host}  {case.trap or what:45}{told}", flush=True)
    bad = sum(bool(row["wrong"]) for row in rows)
    print(f"{len(rows)} cases in the lab, {bad} wrong")
    worst, around = (
        max((row["healed_s"] or 0.0 for row in rows if bool(row["cut"]) == cut), default=0.0) for cut in (False, True)
    )
    print(f"at most {worst:.2f} s from SIGKILL to the next committed step; target {HEALED_WITHIN_S:g} s")
    print(f"at most {around:.2f} s without a step where a link went silent; target {AROUND_WITHIN_S:g} s")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 1 if bad or worst > HEALED_WITHIN_S or around > AROUND_WITHIN_S else 0


if __name__ == "__main__":
    sys.exit(main())
