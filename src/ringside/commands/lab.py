"""Run a command on hosts that are network namespaces of this machine.

Each host gets a network of its own, and links with a rate and a delay join
them: to one switch (star), or every pair by a link of its own (mesh). Every
rank finds what torchrun would set: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
and so on; Gloo binds to the host's address. Lines of ranks are prefixed with
who wrote them. When a rank fails, the others have 10 s from then on. Nothing
stays behind, however it ends. Needs root and iproute2.

exit status: that of the rank that failed first, 2 usage error.

examples:
  $ ringside lab --hosts 4 --rate 1gbit -- python train.py --epochs 3
  [rank 0 host 0] epoch 1: loss 2.31
  ...
  ringside lab: 4 ranks on 4 hosts ended well after 12.4 s
    host 0: 61.2 MB received, 61.4 MB sent
  $ ringside lab --ranks-per-host 3,2,4 -- python train.py
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from functools import partial
from types import FrameType

from ringside.commands.options import add_verbosity, host_count
from ringside.errors import UsageError
from ringside.lab import Lab, RankPlacement, parse_delay
from ringside.lab.wiring import WIRINGS
from ringside.processes import handle_signals
from ringside.text import parse_ranks_per_host, size

HELP = "run a command on hosts that are network namespaces"

SCHEMA = 1
DEFAULT_HOSTS = 4
_AFTER_FAILURE_S = 10.0


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.usage = "ringside lab [options] -- command [arguments]"
    add = parser.add_argument
    add("--hosts", type=host_count, metavar="N", help="how many (default: 4, or as many as --ranks-per-host lists)")
    add("--ranks-per-host", default="1", metavar="N", help="a number, or one per host: 3,2,4 (default: 1)")
    add("--rate", default="1gbit", metavar="RATE", help="of every link, each way, or none (default: 1gbit)")
    add("--delay", default="0", metavar="TIME", help="host to host, one way, such as 5ms (default: 0)")
    add("--wiring", default="star", metavar="NAME", help=f"of {', '.join(WIRINGS)} (default: star)")
    timeout_help = "seconds after which the ranks are ended (default: none)"
    add("--timeout", type=float, default=math.inf, metavar="S", help=timeout_help)
    add("--json", action="store_true", help="print a summary as JSON (keys: docs/json.md)")
    add_verbosity(parser)
    add("command_line", nargs=argparse.REMAINDER, metavar="command", help="what every rank runs")


def run(args: argparse.Namespace) -> int:
    """Build the lab, run the ranks, remove the lab; return the first failing rank's exit status."""
    lab, argv = make_lab(args), args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not argv:
        raise UsageError("there is no command to run, such as: ringside lab --hosts 4 -- python train.py --epochs 3")
    if not args.timeout > 0:
        raise UsageError(f"--timeout {args.timeout:g}: it is a number of seconds, more than 0")
    # SIGTERM and SIGHUP end the program as Ctrl-C does: the lab's namespaces are removed.
    with handle_signals((signal.SIGTERM, signal.SIGHUP), _exit_on_signal), lab:
        name = lab.name
        sink = partial(_print_line, args.json)
        result = lab.run(argv, timeout_s=args.timeout, after_failure_s=_AFTER_FAILURE_S, sink=sink)
    if args.json:
        summary = {
            "name": name,
            "schema": SCHEMA,
            "wiring": lab.wiring,
            "rate_bits_per_second": lab.rate,
            "delay_seconds": lab.delay_s,
            "exit_status": result.exit_status,
            "seconds": result.seconds,
            "timed_out": result.timed_out,
            "ranks": [
                {"rank": r.rank, "host": r.host, "status": r.status, "seconds": r.seconds, "ended_by_lab": r.ended}
                for r in result.ranks
            ],
            "hosts": [
                {"host": host, "received_bytes": received, "sent_bytes": sent}
                for host, (received, sent) in enumerate(result.bytes_per_host)
            ],
        }
        print(json.dumps(summary, indent=2))
    failed = result.first_failure
    outcome = f"{len(result.ranks)} ranks on {lab.hosts} hosts ended well" if failed is None else failed.describe()
    after = f" after {result.seconds:.1f} s" if failed is None or not failed.ended else ""
    print(f"ringside lab: {outcome}{after}", file=sys.stderr)
    for host, (received, sent) in enumerate(() if args.json else result.bytes_per_host):
        print(f"  host {host}: {size(received)} received, {size(sent)} sent", file=sys.stderr)
    return result.exit_status


def make_lab(args: argparse.Namespace) -> Lab:
    """Return the lab that the arguments ask for, not yet built; `UsageError` for what cannot be."""
    ranks_per_host = parse_ranks_per_host(args.ranks_per_host)
    listed = DEFAULT_HOSTS if isinstance(ranks_per_host, int) else len(ranks_per_host)
    return Lab(
        hosts=listed if args.hosts is None else args.hosts,
        ranks_per_host=ranks_per_host,
        rate=None if args.rate == "none" else args.rate,
        delay_s=parse_delay(args.delay),
        wiring=args.wiring,
    )


def _print_line(all_to_stderr: bool, place: RankPlacement, stream: str, line: str) -> None:
    out = sys.stdout if stream == "stdout" and not all_to_stderr else sys.stderr
    print(f"[rank {place.rank} host {place.host}] {line}", file=out, flush=True)


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
