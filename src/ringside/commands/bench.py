"""Benchmark Ringside's all-reduce, or another collective, on this machine.

Each peer takes turns with ours in the same processes: gloo; mpi, the Open MPI
that is installed; and what bench/peers.sh makes environments for. One that is
absent, hangs or crashes is skipped in a line. Results are checked against sums
computed without any engine. The first lines are a summary; then come the
ratios (peer's time over ours) and nccl-tests' columns.

exit status: 0 fine, 1 an element is wrong or a rank died, 2 usage error.

examples:
  $ ringside bench -n 2 --peers gloo,mpi
  2 ranks on 2 cores, float32 sum, in place
       1 KiB: 1.10 µs, 260x Gloo, 1.40x Open MPI
      ...
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import uuid

from ringside import _core
from ringside._core.enums import DType
from ringside.bench import launch, peers, plan
from ringside.bench import result as table
from ringside.bench.messages import Begin, Message, Skipped
from ringside.bench.plan import BenchPlan
from ringside.commands.options import add_processes, add_verbosity
from ringside.engine.dtypes import OP_CODES, OPS, dtype_code, is_allowed, op_name
from ringside.engine.topology import cache_bytes, usable_cores
from ringside.errors import UnsupportedError, UsageError
from ringside.schedule import ALGORITHMS
from ringside.text import counted, did_you_mean, percent, size
from ringside.view.terminal import LiveDisplay

HELP = "measure all-reduce, in turn with Gloo and Open MPI"

_ALGORITHMS = ("auto", *sorted(ALGORITHMS))
_QUICK_SIZES = (4, 1 << 10, 1 << 16, 1 << 20, 16 << 20, 64 << 20)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    add = parser.add_argument
    add_processes(parser, "ranks to start (default: cores, at least 2)")
    add("--sizes", metavar="SIZES", help="such as 4,1K,1M (instead of a range)")
    add("-b", "--min-bytes", default="4", metavar="SIZE", help="first size (default: 4)")
    add("-e", "--max-bytes", default="256M", metavar="SIZE", help="last size (default: 256M)")
    add("-f", "--step-factor", type=int, default=4, metavar="F", help="each size F times the last (default: 4)")
    add("--peers", default="", metavar="LIST", help=f"of {', '.join(plan.PEERS)}, or MODULE:FUNCTION of one's own")
    add("--environments", default="build/peers", metavar="DIR", help="made by bench/peers.sh (default: build/peers)")
    known = ", ".join((*plan.COLLECTIVES, *plan.STEPS))
    add("--collective", default="all_reduce", metavar="NAME", help=f"of {known} (default: all_reduce)")
    add("--arrays", default="numpy", metavar="LIST", help="what ours is given: numpy, torch or both (default: numpy)")
    add("--pin", action="store_true", help="rank r stays on core r, where there are as many cores")
    add("--algorithm", default="auto", metavar="LIST", help=f"ours: {', '.join(_ALGORITHMS)} (default: auto)")
    add("-d", "--dtype", default="float32", help=f"of {', '.join(plan.ITEM_BYTES)} (default: float32)")
    add("-o", "--op", default="sum", help=f"of {', '.join(OPS)} (default: sum)")
    add("--iterations", type=int, default=0, metavar="N", help="all-reduces per round (default: by time)")
    add("--rounds", type=int, default=0, metavar="N", help="turns of each engine (default: 5, quick 3)")
    add("--quick", action="store_true", help="fewer sizes and shorter turns: under 30 s")
    add("--json", action="store_true", help="print JSON (keys: docs/json.md)")
    add_verbosity(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 if a result was wrong."""
    bench_plan, skipped = make_plan(args)
    display, began = LiveDisplay(quiet=args.quiet), time.monotonic()
    if not args.quiet:
        alone = "; nothing is exchanged: what is timed is the cost of a call" if bench_plan.ranks == 1 else ""
        engines = " against ".join(["ours", *bench_plan.peers])
        display.print(f"starting {counted(bench_plan.ranks, 'rank')}, {engines}{alone}")
        for skip in skipped:
            display.print(f"{table.name_of(skip.peer)} skipped: {skip.reason}")

    def observe(rank: int, message: Message) -> None:
        if rank == 0 and isinstance(message, Begin):  # all ranks do the same: one is enough to show
            where = f"{percent(message.share):>5} {message.what}"
            display.show(lambda: f"{where} ({time.monotonic() - began:.0f} s)")

    with display:
        launches, failed = launch.run_launches(bench_plan, observe)
    result = table.merge(bench_plan, usable_cores(), launches, [*skipped, *failed])
    if args.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        print(table.render(result, shutil.get_terminal_size((80, 24)).columns))
    return 1 if result.wrong else 0


def make_plan(args: argparse.Namespace) -> tuple[BenchPlan, list[Skipped]]:
    """Return what the arguments ask for and the peers that cannot run here; `UsageError` for what cannot be."""
    dtype, op = plan.dtype_named(args.dtype), args.op
    # bfloat16 is asked for itself: its storage, int16, would be allowed bitwise reductions
    code = dtype_code(plan.storage_dtype(dtype)) if dtype != "bfloat16" else DType.bfloat16
    if not is_allowed(code, OP_CODES[op_name(op)]):
        raise UnsupportedError(f"{op} of {dtype} is not defined: bitwise reductions need integers")
    # A peer that cannot run here is skipped with its reason; a peer that does not exist is an error.
    own = tuple(name for name in args.peers.split(",") if ":" in name)
    named = _listed(args.peers, (*plan.PEERS, *own), "peer")
    reasons = {peer: peers.why_not(peer, args.environments) for peer in named}
    collectives = _some(args.collective, (*plan.COLLECTIVES, *plan.STEPS), "collective")
    if len(collectives) > 1:
        raise UsageError(f"--collective {args.collective}: one at a time")
    (collective,) = collectives
    most = int(_core.native().MAX_RANKS)
    ranks = max(2, usable_cores()) if args.nproc_per_node is None else args.nproc_per_node
    if not 1 <= ranks <= most:
        raise UsageError(f"-n {ranks}: there can be 1 to {most} ranks")
    if args.sizes is not None:
        sizes = [plan.parse_size(text) for text in args.sizes.split(",")]
    else:
        first, last = plan.parse_size(args.min_bytes), plan.parse_size(args.max_bytes)
        if args.quick:  # at least one size, however narrow the range is
            sizes = [size for size in _QUICK_SIZES if first <= size <= last] or [first]
        else:
            sizes = plan.sizes_between(first, last, args.step_factor)
    bench_plan = BenchPlan(
        key=f"bench/{uuid.uuid4()}",
        ranks=ranks,
        sizes_bytes=plan.whole_items(sizes, dtype, collective, ranks),
        dtype=dtype,
        op=op,
        algorithms=_some(args.algorithm, _ALGORITHMS, "algorithm"),
        peers=tuple(peer for peer in named if not reasons[peer]),
        rounds=_at_least(args.rounds, "--rounds") or (3 if args.quick else 5),
        iterations=_at_least(args.iterations, "--iterations"),
        round_seconds=0.015 if args.quick else 0.05,
        cache_bytes=cache_bytes(),
        collective=collective,
        arrays=_some(args.arrays, ("numpy", "torch"), "kind of array"),
        pin=args.pin,
        environments=args.environments,
    )
    without = sorted({part for part, _, _ in bench_plan.parts(bench_plan.sizes_bytes[0])} - {"all_reduce"})
    if without and bench_plan.algorithms != ("auto",):
        raise UsageError(f"--algorithm {args.algorithm}: {', '.join(without)} has none to choose, all_reduce alone has")
    free = plan.free_memory_bytes()
    if bench_plan.needed_bytes > free:
        need, have = size(bench_plan.needed_bytes, binary=True), size(free, binary=True)
        raise UsageError(
            f"these sizes on {bench_plan.ranks} ranks take {need}, and {have} are free: lower -e or --sizes"
        )
    return bench_plan, [Skipped(peer, reason) for peer, reason in reasons.items() if reason]


def _listed(text: str, known: tuple[str, ...], kind: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for name in text.split(",") if name))
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {kind} {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return names


def _some(text: str, known: tuple[str, ...], kind: str) -> tuple[str, ...]:
    names = _listed(text, known, kind)
    if not names:
        raise UsageError(f"{text!r} names no {kind}; there are {', '.join(known)}")
    return names


def _at_least(number: int, option: str) -> int:
    if number < 0:
        raise UsageError(f"{option} {number}: it is a count")
    return number
