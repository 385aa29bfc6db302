"""The lab's measured times beside the simulation of the lab's topology, every algorithm, 64 KB to 64 MB.

Hosts are network namespaces with links of a known rate (`ringside lab`), so it needs root and iproute2.

    python -m bench.lab.simulation_accuracy [--hosts N] [--rate R] [--repeat N] [--json]

The topology is what `ringside probe` measures in the same lab, before anything else runs; nothing is fitted. Our engine
sends in message order, not in rounds, so what is held against the measurement is
`ordered_simulation.py`; the rounds' simulation stands beside it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import Floor, make_parser, report_progress
from bench.lab.expected import messages_of
from bench.lab.jobs import KB, MB, Case, take_turns
from bench.lab.ordered_simulation import simulate_messages
from bench.lab.report import Row, Section, size_words
from bench.lab.sections import SWITCHED

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.net.exchange.message_size import LEAST_ORDERED_BYTES
from ringside.engine.net.exchange.ordering import MessageOrder, order_messages
from ringside.lab import Lab, payload_bytes_per_second
from ringside.predict import Switch, Topology, load_topology, price
from ringside.schedule import Schedule

SMALL, LARGE = (64 * KB, 512 * KB, 4 * MB, 16 * MB), (64 * MB,)
WAYS = (
    "parameter_server",
    "ring",
    "direct",
    "halving_doubling",
    "recursive_doubling",
    "tree",
    "two_tree",
    "two_tree*32",
    "chain*32",
    "chain",
    "one_shot",
    "hierarchical",
)


def main() -> int:
    """Measure, print the table, return 1 if the floor was missed and 2 if nothing could be measured."""
    parser = make_parser("bench.lab.simulation_accuracy", __doc__)
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="hosts of one rank each (default: 4)")
    parser.add_argument("--rate", default="125mbit", metavar="R", help="of every link (default: 125mbit)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="turns of every algorithm below 64 MB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if reason := Lab.unavailable():
        report_progress(f"not measured: {reason}")
        return 2
    section = compare(args.hosts, args.rate, args.repeat)
    print(json.dumps(section.json(), indent=2) if args.json else section.text())
    return 0 if all(floor.met for floor in section.floors) else 1


def compare(hosts: int, rate: str, repeat: int) -> Section:
    """Probe the lab, measure every algorithm, simulate it, and put both side by side."""
    section = Section(
        "predict",
        f"{hosts} hosts x 1 rank, star of {rate} links: measured, and simulated over the topology that the probe found",
        [
            ("algorithm", "algorithm", "s"),
            ("size", "size", "s"),
            ("measured, ms", "ms", ".2f"),
            ("in message order, ms", "messages_ms", ".2f"),
            ("error", "error", "+.3f"),
            ("in rounds, ms", "rounds_ms", ".2f"),
            ("its error", "rounds_error", "+.3f"),
        ],
    )
    with Lab(hosts=hosts, rate=rate) as lab:
        topology = probed(lab)
        report_progress(f"  {_links(topology, rate)}")
        parts = [(SMALL, WAYS, repeat), (LARGE, WAYS, 1), (SMALL, (SWITCHED,), repeat)]
        for sizes, names, turns in parts:  # the large size once; the reducer at the switch in jobs of its own
            switch = SWITCHED in names
            cases = [Case(hosts, size, names, 0 if size < MB and not switch else 1) for size in sizes]
            measured = take_turns(lab, cases, turns, turn_s=0.02, switch=switch)
            rows = [_row(name, size, measured.seconds(hosts, size, name), topology) for size in sizes for name in names]
            for row in rows:
                report_progress("    {algorithm} {size}: {ms:.2f} ms, simulated {messages_ms:.2f} ms".format(**row))
            section.rows += rows
    errors = [abs(row["error"]) for row in section.rows]
    section.floors = [Floor("median error of the simulation in message order", median(errors), None, 0.10)]
    by_size = ", ".join(
        f"{size_words(size)} {median(abs(r['error']) for r in section.rows if r['size'] == size_words(size)):.3f}"
        for size in (*SMALL, *LARGE)
    )
    by_name = ", ".join(
        f"{name} {median(abs(r['error']) for r in section.rows if r['algorithm'] == name):.3f}"
        for name in (*WAYS, SWITCHED)
    )
    section.notes = [
        f"median error by size: {by_size}",
        f"by algorithm: {by_name}",
        f"in rounds: median error {median(abs(row['rounds_error']) for row in section.rows):.3f}",
        _links(topology, rate),
    ]
    return section


def _links(topology: Topology, rate: str) -> str:
    """Return what the probe found, beside what the lab was told."""
    links, nics = topology.overrides, [rate for pair in topology.host_rates for rate in pair]
    return (
        f"probe: {median(link.bytes_per_s or 0 for link in links) / 1e6:.2f} MB/s and "
        f"{median(link.alpha_s or 0 for link in links) * 1e6:.0f} us (medians of {len(links)} links), "
        f"{min(nics, default=0) / 1e6:.2f} to {max(nics, default=0) / 1e6:.2f} MB/s per host, "
        f"{topology.overhead_s * 1e6:.0f} us per message; the link's payload rate: "
        f"{payload_bytes_per_second(rate) / 1e6:.2f} MB/s"
    )


def probed(lab: Lab) -> Topology:
    """Return the topology that `ringside probe` measures in a lab."""
    report_progress("  probe")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "ringside", "probe", "-o", file.name]
        lab.run(command, {"TORCH_CPP_LOG_LEVEL": "ERROR"}, timeout_s=60.0)
        found = load_topology(Path(file.name))
    links = found.overrides
    # The reducer at the switch is a process that is as far as a host is.
    switch = Switch(median(link.alpha_s or 0.0 for link in links), median(link.bytes_per_s or 0.0 for link in links))
    return replace(found, name="the lab", sharp=switch)


def _row(name: str, size: int, seconds: float, topology: Topology) -> Row:
    """Return what was measured beside both simulations: in message order, as the engine sends, and in rounds."""
    schedule = AlgorithmSpec.parse(name).schedule(topology.ranks)
    sent, order = messages_of(schedule, size), orders(schedule, size)
    messages = float(
        simulate_messages(
            schedule,
            topology,
            size,
            segment_bytes=sent.segment_bytes,
            window=sent.places(ordered=order is not None),
            orders=order,
            ahead=sent.ahead,
        ).max()
    )
    rounds = price(schedule, topology, size)
    row: dict[str, Any] = {"algorithm": name, "size": size_words(size), "size_bytes": size, "ms": seconds * 1e3}
    row |= {"messages_ms": messages * 1e3, "error": messages / seconds - 1}
    return row | {"rounds_ms": rounds * 1e3, "rounds_error": rounds / seconds - 1}


def orders(schedule: Schedule, size: int) -> Sequence[MessageOrder] | None:
    """Return the order in which the engine sends and takes, by vertex; None: that of the rounds."""
    chunk, sent = size / schedule.chunks, messages_of(schedule, size)
    if chunk < LEAST_ORDERED_BYTES or schedule.switches:
        return None
    segments = [max(-(-int(chunk) // sent.segment_bytes), 1)] * schedule.chunks
    found = [order_messages(schedule, vertex, segments, sent.window) for vertex in range(schedule.vertices)]
    return None if any(order is None for order in found) else [order for order in found if order is not None]


if __name__ == "__main__":
    sys.exit(main())
