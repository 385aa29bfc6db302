"""The laws of all-reduce between hosts, measured in the lab against the schedules: every floor, met or missed.

Hosts are network namespaces with links of a known rate (`ringside lab`), so it needs root and iproute2.

    python -m bench.lab bytes|star|moves|selection|selection-alone|as-a-job-apart|as-a-job-mixed|as-a-job-steps
                        |laws|two-tree|delay|long-links|mesh|ddp|ddp-slower|ddp-cpu|all
                        [--repeat N] [--json] [--write PAGE]

    bytes     kernel counters of every host's link against the schedule, every algorithm
    star      4 hosts x 2 ranks: ours, Gloo, Open MPI and the link's rate, 4 B to 64 MB
    moves     the other collectives, 4 hosts x 2 ranks: through the hosts' shared memory, without, and Gloo's
    selection what start-up takes, and the default choice against stock Gloo, 4 B to 64 MB, 4 hosts x 2 ranks
              (selection-alone: x 1 rank)
    as-a-job-apart, as-a-job-mixed, as-a-job-steps
              the default choice against stock Gloo from a job's first call on: calls apart from each other, sizes mixed
              with work in between, DDP steps; 4 hosts x 2 ranks
    laws      one rank per host, n = 2 to 8: time against the busiest link's bytes, every algorithm
    two-tree  its gain over the single tree; leaves use both directions at once
    delay     5 ms from host to host: time against rounds x delay
    long-links
              large tensors over links with a delay: the default choice against bytes and rounds x delay of the best
              algorithm, and stock Gloo
    mesh      a link is cut to a quarter mid-run: when it is answered, and the time after against every fixed choice
    ddp       a training step, 4 hosts x 2 ranks: ours (f32, bf16 wire) against stock DDP on Gloo; layers wait
    ddp-slower  the same at 500 Mbit/s, where those cores are not the bound
    ddp-cpu   the same (not in `all`); layers compute, on the cores that all hosts of the lab share
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.common import make_parser, report_progress
from bench.lab import as_a_job, collectives, ddp_step, long_links, one_rank_per_host, sections, slow_link, tuner
from bench.lab.report import Section, filled, verdict

from ringside.errors import RingsideError
from ringside.lab import Lab

# Name: (what measures it, turns of every contender unless told otherwise).
SECTIONS: dict[str, tuple[Callable[[int], Section], int]] = {
    "bytes": (sections.bytes_on_links, 3),
    "star": (sections.star, 5),
    "moves": (collectives.moves, 5),
    "selection": (tuner.selection, 15),
    "selection-alone": (tuner.alone, 15),
    "as-a-job-apart": (lambda repeat: as_a_job.as_a_job(repeat, "apart"), 2),
    "as-a-job-mixed": (lambda repeat: as_a_job.as_a_job(repeat, "mixed"), 1),
    "as-a-job-steps": (lambda repeat: as_a_job.as_a_job(repeat, "steps"), 1),
    "laws": (one_rank_per_host.laws, 2),
    "two-tree": (one_rank_per_host.two_tree, 5),
    "delay": (one_rank_per_host.delay, 3),
    "long-links": (long_links.long_links, 3),
    "mesh": (slow_link.mesh, 9),
    "ddp": (ddp_step.ddp, 6),
    "ddp-slower": (lambda repeat: ddp_step.ddp(repeat, rate=ddp_step.SLOWER, name="ddp-slower"), 6),
    "ddp-cpu": (lambda repeat: ddp_step.ddp(repeat, "cpu"), 6),
}


def main() -> int:
    """Measure, print every table, return 1 if a floor was missed and 2 if nothing could be measured."""
    parser = make_parser("bench.lab", __doc__)
    parser.add_argument("law", nargs="+", choices=[*SECTIONS, "all"])
    parser.add_argument("--repeat", type=int, default=0, metavar="N", help="turns of every contender")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="also put the tables into this page")
    args = parser.parse_args()
    if reason := Lab.unavailable():
        report_progress(f"not measured: {reason}")
        return 2
    names = [name for name in SECTIONS if name != "ddp-cpu"] if "all" in args.law else list(dict.fromkeys(args.law))
    sections: list[Section] = []
    failed = False
    for name in names:
        measure, turns = SECTIONS[name]
        report_progress(f"{name}: at work")
        since = time.monotonic()
        try:
            section = measure(args.repeat or turns)
        except RingsideError as error:
            report_progress(f"lab: {name}: {error}")
            failed = True
            continue
        report_progress(f"{name}: {time.monotonic() - since:.0f} s")
        sections.append(section)
        if args.write:
            args.write.write_text(filled(args.write.read_text(), [section]))
        if not args.json:
            print(section.text(), flush=True)
            print()
    if args.json:
        print(json.dumps([section.json() for section in sections], indent=2))
    print(verdict(sections), file=sys.stderr if args.json else sys.stdout)
    if failed:
        return 2
    return 0 if all(floor.met for section in sections for floor in section.floors) else 1


if __name__ == "__main__":
    sys.exit(main())
