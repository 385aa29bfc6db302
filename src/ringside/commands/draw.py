"""Draw an algorithm: who sends which chunk to whom in every round.

Every chunk shows which ranks' contributions it contains. Writes one HTML file
that steps and plays through the rounds and needs nothing else (arrow keys,
space, #round=3). The layout follows the topology: trees, rings, hosts, switches
in the middle. The last line on stdout is the file's path.

exit status: 0 fine, 1 the file cannot be written, 2 usage error.

examples:
  $ ringside draw ring -n 4
  ring-4.html
  $ ringside draw two_tree -n 7 --segments 4
  two_tree-7.html
  $ ringside draw hierarchical --ranks-per-host 3,2,4 --svg
  hierarchical-9.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ringside.commands.options import host_count, write_output
from ringside.errors import UsageError
from ringside.schedule import ALGORITHMS, COLLECTIVES, by_name, hierarchical, pipelined, relabel
from ringside.text import counted, parse_ranks_per_host
from ringside.view.schedule.drawing import schedule_html, schedule_sheet
from ringside.view.schedule.text import schedule_text

HELP = "draw an algorithm as a picture that steps through its rounds"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    add = parser.add_argument
    known = f"of {', '.join(ALGORITHMS)}, and for other collectives {', '.join(COLLECTIVES)}"
    add("algorithm", metavar="ALGO", help=known)
    add("-n", "--ranks", type=int, metavar="N", help="number of ranks, at most 64")
    add("--segments", type=int, default=1, metavar="M", help="pipelined in M segments per chunk (default: 1)")
    add("--order", metavar="R,R,...", help="which rank plays rank 0, 1, ...: a ring order")
    add("--hosts", type=host_count, metavar="N", help="how many, for hierarchical (default: about √ranks)")
    add("--ranks-per-host", metavar="N", help="a number, or one per host, for hierarchical: 3,2,4")
    add("--root", type=int, metavar="R", help="of a broadcast, reduce, gather or scatter (default: 0)")
    add("-o", "--output", type=Path, metavar="FILE", help="the file to write (default: ALGO-N.html)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print it for the terminal instead, 80 columns wide")
    form.add_argument("--svg", action="store_true", help="one picture with the rounds side by side, the first 12")


def run(args: argparse.Namespace) -> int:
    """Write the picture and print its path, or print the terminal form."""
    # The schedule that the arguments describe.
    name, ranks = args.algorithm, args.ranks
    by_name(name, 1)  # a wrong name is told before a missing number
    if args.hosts is not None or args.ranks_per_host is not None:
        if name != "hierarchical":
            raise UsageError(f"--hosts and --ranks-per-host are for hierarchical; {name} does not know hosts")
        schedule = hierarchical(_host_sizes(args))
    elif ranks is None:
        example = ", or --ranks-per-host 3,2,4" if name == "hierarchical" else ""
        raise UsageError(f"missing -n/--ranks, such as -n 4{example}")
    elif args.root is None:
        schedule = by_name(name, ranks)
    else:
        # only a schedule knows whether its collective has a root: it is built again with it
        if not by_name(name, ranks).collective.rooted:
            raise UsageError(f"{name} has no root; leave --root out")
        schedule = COLLECTIVES[name](ranks, args.root)  # type: ignore[call-arg]
    if args.order is not None:
        try:
            order = [int(word) for word in args.order.split(",")]
        except ValueError:
            raise UsageError(f"--order takes numbers such as 0,2,1,3, not {args.order!r}") from None
        schedule = relabel(schedule, order)
    if args.segments != 1:
        schedule = pipelined(schedule, args.segments)
    # In the form that is requested.
    title = f"{name}, {counted(schedule.ranks, 'rank')}{_how(args)}"
    if args.text:
        _deliver(schedule_text(schedule, name + _how(args)), args.output)
    elif args.svg:
        _deliver(schedule_sheet(schedule, title), args.output or Path(f"{name}-{schedule.ranks}.svg"))
    else:
        _deliver(schedule_html(schedule, title), args.output or Path(f"{name}-{schedule.ranks}.html"))
    return 0


def _host_sizes(args: argparse.Namespace) -> list[int]:
    """Return the ranks of every host; raise `UsageError` where the arguments contradict each other."""
    hosts, ranks = args.hosts, args.ranks
    per = None if args.ranks_per_host is None else parse_ranks_per_host(args.ranks_per_host)
    if hosts is not None and hosts < 1:
        raise UsageError(f"--hosts {hosts}: at least 1")
    if per is None:
        if ranks is None or ranks % hosts:
            raise UsageError(f"--hosts {hosts}: give --ranks-per-host, or -n/--ranks that {hosts} hosts share evenly")
        return [ranks // hosts] * hosts
    if isinstance(per, int):
        if hosts is None and (ranks is None or ranks % per):
            raise UsageError(f"--ranks-per-host {per}: give --hosts too, or one number per host, such as 3,2,4")
        per = [per] * (ranks // per if hosts is None else hosts)
    if hosts not in (None, len(per)):
        raise UsageError(f"--ranks-per-host {args.ranks_per_host} is for {len(per)} hosts, not {hosts}")
    if ranks not in (None, sum(per)):
        raise UsageError(f"{len(per)} hosts of {', '.join(map(str, per))} have {sum(per)} ranks, not {ranks}; omit -n")
    return per


def _how(args: argparse.Namespace) -> str:
    asked = args.hosts is not None or args.ranks_per_host is not None
    hosts = f" on hosts of {', '.join(map(str, _host_sizes(args)))}" if asked else ""
    root = f", root {args.root}" if args.root is not None else ""
    order = f", in the order {args.order.replace(',', ', ')}" if args.order else ""
    return hosts + root + order + (f", {counted(args.segments, 'segment')} per chunk" if args.segments != 1 else "")


def _deliver(content: str, output: Path | None) -> None:
    if output is None:
        print(content, end="")
        return
    write_output(output, content)
    print(output)
