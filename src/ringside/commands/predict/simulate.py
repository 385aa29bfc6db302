"""Play a schedule over a topology: what every rank waits for, with pictures.

The page plays the simulated time: chunks lie where the simulation says they
are, with the contributions they carry; below, a lane per rank with the critical
path through them. The trace is for Perfetto or chrome://tracing.

exit status: 0 fine, 1 a file cannot be written, 2 usage error.

examples:
  $ ringside predict simulate ring --preset dgx-h100 --hosts 2 --bytes 64MB \\
        --html ring.html
  $ ringside predict simulate hierarchical --preset p5 --hosts 4 --bytes 1GB \\
        --late 3=5ms
  $ ringside predict simulate ring --preset ethernet-10g --hosts 8 \\
        --slow-link 3:4=4 --perfetto trace.json --json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringside.commands.options import algorithm_name, link_of
from ringside.commands.predict.plan import DEFAULT_BYTES, add_hardware, hardware, write_page
from ringside.errors import UsageError
from ringside.predict.plan.options import UNSEEN, schedule_for, simulated_band
from ringside.predict.simulation.simulate import simulate
from ringside.predict.simulation.timeline import Timeline
from ringside.text import size_bytes
from ringside.view.predict_text import simulation_text
from ringside.view.tui.console import printable_lines

HELP = "play a schedule over a topology: times, critical path, an animation, a trace"
SCHEMA = 1


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside predict simulate`."""
    add = parser.add_argument
    add("schedule", type=algorithm_name, metavar="ALGO", help="ring, hierarchical, two_tree, in_network, nvls, ...")
    add_hardware(parser, algorithm=False)
    add("--bytes", metavar="SIZE", help="of the tensor: 1GB is 10^9, 1GiB and 1G are 2^30 (default: 1GB)")
    add("--segments", type=int, default=1, metavar="M", help="pipelined in M segments per chunk (default: 1)")
    add("--late", action="append", default=[], metavar="R=T", help="rank R begins later: 3=5ms")
    add("--slow-link", action="append", default=[], metavar="A:B=X", help="rank A to B is X times slower: 3:4=4")
    add("--html", type=Path, metavar="FILE", help="write a page that plays it")
    add("--perfetto", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev (.json or .json.gz)")
    add("--json", action="store_true", help="print JSON (keys: docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Print what it takes and why; write its pictures."""
    if args.perfetto is not None:
        from ringside.view.export.perfetto import check_trace_name, write_timeline

        check_trace_name(args.perfetto)
    topology = hardware(args)
    schedule = schedule_for(topology, args.schedule)
    for src, dst, times in map(link_of, args.slow_link):
        topology = topology.with_slow_link(src, dst, times)
    size = size_bytes(args.bytes, "--bytes") if args.bytes else DEFAULT_BYTES
    late = {}
    for text in args.late:
        rank, equals, delay = text.partition("=")
        if not equals or not rank.strip().isdecimal():
            raise UsageError(f"--late {text}: a rank and by how much it is late, such as 3=5ms")
        from ringside.lab.wiring import parse_delay

        late[int(rank)] = parse_delay(delay)
    timeline = simulate(schedule, topology, size, late=late, segments=args.segments)
    if args.json:
        print(json.dumps(to_json(timeline), indent=1))
    else:
        print(printable_lines(timeline.describe()))
        print(printable_lines(simulation_text(timeline)))
    if args.html is not None:
        from ringside.view.html.simulation import timeline_page

        write_page(args.html, timeline_page(timeline))
    if args.perfetto is not None:
        events = write_timeline(args.perfetto, timeline)
        print(f"written: {args.perfetto}, {events} events", file=sys.stderr)
    return 0


def to_json(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as plain data; the keys are those of docs/json.md."""
    return {
        "schema": SCHEMA,
        "algorithm": timeline.schedule.name,
        "topology": timeline.topology.describe(),
        "ranks": timeline.schedule.ranks,
        "size_bytes": timeline.size_bytes,
        "seconds": timeline.seconds,
        "band": asdict(simulated_band(timeline)),
        "extrapolated": UNSEEN,
        "busbw": timeline.busbw,
        "finish_seconds": timeline.finish_seconds.tolist(),
        "guilty": timeline.guilty._asdict(),
        "shares": timeline.shares,
        "critical_path": [hop._asdict() for hop in timeline.critical_path],
    }
