"""Time the links between hosts before training; name the slow or broken one.

Run it as the ranks' program: it needs RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, as torchrun, Slurm or `ringside lab` set them. Every pair of hosts
is tried, then timed. Rank 0 prints the verdict, a better order for a ring where
there is one, and the links. A link is slow under half of the others' median.

exit status: 0 fine, 1 a link is slow or broken, 2 usage error.

examples:
  $ torchrun --nnodes 4 ... -m ringside probe -o topology.json
  $ ringside lab --hosts 4 --wiring mesh -- ringside probe
  4 hosts, 12 links: all fine, 119 MB/s and 92.0 µs (medians)
  ...
  $ ringside probe -n 2
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringside.commands.options import add_processes, add_verbosity, write_output
from ringside.engine.cost.network import TOPOLOGY_SCHEMA, Floats
from ringside.engine.probe.links import slowest_of_ring
from ringside.errors import RingsideError, UsageError
from ringside.processes import die_with_parent
from ringside.text import duration, name_ranks, percent, rate

if TYPE_CHECKING:
    from ringside.pytorch.job_probe import ProbeOutcome

HELP = "time the links between hosts; name the slow or broken one"

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MOST_SHOWN = 8


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    add = parser.add_argument
    add_processes(parser, "start N ranks on this machine and probe their links (default: be a rank)")
    add("--all-ranks", action="store_true", help="time the links of all ranks, not only one rank per host")
    add("--order", default="", metavar="LIST", help="also time a ring in this order, such as 0,2,1,3")
    add("--quick", action="store_true", help="take a fraction of a second, as at the start of training")
    add("--timeout", type=float, default=10.0, metavar="S", help="how long to wait for ranks (default: 10)")
    add("--json", action="store_true", help="print JSON (keys: docs/json.md)")
    add("-o", "--output", default="", metavar="FILE", help="write the topology there")
    add_verbosity(parser)


def run(args: argparse.Namespace) -> int:
    """Probe, print on rank 0, return 1 if a link is slow or broken."""
    try:
        order = tuple(int(part) for part in args.order.split(",")) if args.order else ()
    except ValueError:
        raise UsageError(f"--order takes numbers of hosts such as 0,2,1,3, not {args.order!r}") from None
    if args.timeout <= 0:
        raise UsageError(f"--timeout {args.timeout:g}: it is a number of seconds, more than 0")
    if args.nproc_per_node is not None:
        return _start_ranks(args)
    if any(name not in os.environ for name in _NEEDED):
        raise UsageError(
            "this process is no rank (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set): start it by "
            "`torchrun ... -m ringside probe` or `ringside lab ... -- ringside probe`, or try -n 2"
        )
    outcome = probe_job(every_rank=args.all_ranks, order=order, thorough=not args.quick, patience_s=args.timeout)
    if outcome.rank == 0:
        # Rank 0 writes and prints for all.
        data = to_json(outcome)
        if args.output:
            write_output(Path(args.output), json.dumps(data, indent=1) + "\n")
        if args.json:
            print(json.dumps(data, indent=1))
        else:
            print("\n".join(verdict_lines(outcome)))
            if outcome.probe is not None:
                print("\n".join(["", *table_lines(outcome)]))
    elif outcome.trouble and outcome.probe is None and not outcome.broken:
        print(f"ringside probe: {outcome.trouble}", file=sys.stderr)
    return 0 if outcome.fine else 1


def probe_job(**options: Any) -> ProbeOutcome:
    """Probe the job that this process is a rank of; `RingsideError` where there is no torch."""
    try:
        from ringside.pytorch import job_probe
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise RingsideError("ringside probe needs torch: pip install 'torch-ringside[torch]'") from None
    return job_probe.probe_job(**options)


def _start_ranks(args: argparse.Namespace) -> int:
    """Run this command once per rank on this machine; rank 0 writes where this process does."""
    if args.nproc_per_node < 2:
        raise UsageError(f"-n {args.nproc_per_node}: there are links from 2 ranks on")
    words = ["--timeout", str(args.timeout)]
    switches = {"--quick": args.quick, "--json": args.json, "--all-ranks": args.all_ranks, "--quiet": args.quiet}
    words += [flag for flag, given in switches.items() if given] + ["--verbose"] * args.verbose
    words += ["--order", args.order, "--output", args.output]
    # a port that was free a moment ago; rank 0 listens there
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    try:
        for rank in range(args.nproc_per_node):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.nproc_per_node)}
            master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "ringside", "probe", *words],
                    env={"OMP_NUM_THREADS": "1", **os.environ, **place, **master},
                    # no rank outlives this process
                    preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
                )
            )
        return max(rank.wait() for rank in ranks)
    finally:
        for child in ranks:
            child.kill()
            child.wait()


# ----------------------------------------------------------------------------------------------- what is printed


def to_json(outcome: ProbeOutcome) -> dict[str, Any]:
    """Return the outcome as plain data: a topology, and what is wrong with it."""
    probe = outcome.probe
    # A topology in any case: of a probe that failed it has hosts and no links.
    if probe is not None:
        source = "measured by ringside probe"
        topology = probe.network.to_topology(outcome.names, outcome.ranks, source)
    else:
        hosts = [{"name": name, "ranks": count} for name, count in zip(outcome.names, outcome.ranks, strict=True)]
        topology = {"schema": TOPOLOGY_SCHEMA, "kind": "ringside topology", "source": "none: the probe failed"}
        topology |= {"hosts": hosts, "links": []}
    return {
        **topology,
        "ok": outcome.fine,
        "verdict": verdict_lines(outcome),
        "broken": [list(pair) for pair in outcome.broken],
        "missing_ranks": list(outcome.missing),
        "slow": [
            {
                "src": link.src,
                "dst": link.dst if link.dst >= 0 else None,
                "bytes_per_s": link.bytes_per_s,
                "usual_bytes_per_s": link.usual,
            }
            for link in outcome.slow
        ],
        "better_order": list(probe.better_order) or None if probe is not None else None,
        "rings": [{"order": list(order), "seconds": seconds} for order, seconds in outcome.ring_s.items()],
    }


def verdict_lines(outcome: ProbeOutcome) -> list[str]:
    """Return what is to be known first, a line each."""
    names, probe = outcome.names, outcome.probe
    if outcome.missing:
        here = f"rank 0 on {socket.gethostname()}"
        return [f"{name_ranks(outcome.missing)} did not reach {here}: not started, or the link to it is broken"]
    if outcome.broken:
        return [f"broken link: {names[a]} and {names[b]} do not reach each other" for a, b in outcome.broken]
    if probe is None:
        return [f"the probe failed: {outcome.trouble or 'no rank knows why'}"]
    lines = []
    for link in outcome.slow:
        to = f"slow link: {names[link.src]} > {names[link.dst]}" if link.dst >= 0 else f"slow host: {names[link.src]}"
        lines.append(f"{to} carries {rate(link.bytes_per_s)}, others {rate(link.usual)}")
    if not lines:
        off = ~np.eye(len(names), dtype=np.bool_)
        typical, latency = np.median(probe.rates[off]), np.median(probe.network.latency_s[off])
        links = len(names) * (len(names) - 1)
        unit = "ranks" if outcome.size == len(names) and max(outcome.ranks) == 1 and "/rank" in names[0] else "hosts"
        lines = [f"{len(names)} {unit}, {links} links: all fine, {rate(typical)} and {duration(latency)} (medians)"]
    if order := probe.better_order:
        plain = tuple(range(len(order)))
        before, after = (slowest_of_ring(probe.rates, ring) for ring in (plain, order))
        ring = ",".join(map(str, order))
        lines.append(f"better ring: {ring}; its slowest link carries {rate(after)}, not {rate(before)}")
        if plain in outcome.ring_s and order in outcome.ring_s:
            lines.append(
                f"  4 MiB around it took {duration(outcome.ring_s[order])}, not {duration(outcome.ring_s[plain])}"
            )
    return lines


def table_lines(outcome: ProbeOutcome) -> list[str]:
    """Return the links, as a matrix where it fits into 80 columns, and the rings that were timed."""
    probe = outcome.probe
    assert probe is not None
    n = len(outcome.names)
    lines = [f"{v:>3}  {name}" for v, name in enumerate(outcome.names)]
    off = ~np.eye(n, dtype=np.bool_)
    spread = percent(float(np.median(probe.rate_spread[off])))
    if n <= _MOST_SHOWN:
        lines += ["", f"MB/s, from row to column (median spread {spread})", *_matrix(probe.rates / 1e6)]
        lines += ["", "latency in µs, one way", *_matrix(probe.network.latency_s * 1e6)]
    else:
        lines += ["", f"the slowest of {n * (n - 1)} links (median spread {spread}; --json lists all)"]
        pairs = sorted(np.argwhere(off).tolist(), key=lambda pair: probe.rates[pair[0], pair[1]])
        lines += [
            f"{a:>5} > {b:<5}{rate(probe.rates[a, b]):>14}{duration(probe.network.latency_s[a, b]):>12}"
            for a, b in pairs[:12]
        ]
    if probe.network.out is not None:
        most = np.median(1 / probe.network.out)
        lines += ["", f"all links of a host at once: {rate(most)} out (median)"]
    if outcome.ring_s:
        lines += ["", "all-reduce of 4 MiB around a ring"]
        lines += [f"  {','.join(map(str, order)):<24}{duration(took):>10}" for order, took in outcome.ring_s.items()]
    return lines


def _matrix(values: Floats) -> list[str]:
    n = len(values)
    head = "    " + "".join(f"{v:>9}" for v in range(n))
    rows = [
        f"{a:>4}" + "".join(f"{'-' if a == b else format(values[a, b], '.3g'):>9}" for b in range(n)) for a in range(n)
    ]
    return [head, *rows]
