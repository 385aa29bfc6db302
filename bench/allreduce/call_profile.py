"""What the 4 B path costs from `comm.all_reduce(tensor)` to the flag and back: ns per layer.

Layers are taken away one after the other, from the outside in, and what a call loses is what the layer costs. All but
the flag are measured in one process on a communicator of one rank, in CPU time, so other work on the machine hardly
shows; the flag by two ranks, each on a core of its own, in wall time: it needs a quiet machine.

A layer's cost is the median over blocks, taken in turn, of the difference of neighbours, with the quartiles.

    python -m bench.allreduce.call_profile [--blocks 200] [--calls 2000] [--no-flag] [--json]
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from bench.common import make_parser, module_command, page_table, run_ranks_here

MODULE = "bench.allreduce.call_profile"
LAYERS = {
    "torch": "a torch tensor in place of an array: its address, size and dtype are asked for",
    "array": "`OneHost.all_reduce`: which algorithm, and is it on a GPU",
    "host": "`HostCommunicator.all_reduce`: its arguments, what it returns",
    "core": "the core's entry: the array's header, checks, the log",
    "python": "the loop, and a call into C",
}
FLAG = "the flag and back: publish, wait for the other rank, add"
Times = dict[str, list[float]]


def main() -> int:
    """Measure and print the table."""
    parser = make_parser(MODULE, __doc__)
    parser.add_argument("--blocks", type=int, default=200, help="blocks of each layer (default: 200)")
    parser.add_argument("--calls", type=int, default=2000, help="calls of a block (default: 2000)")
    parser.add_argument("--no-flag", action="store_true", help="only what one process can measure")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure_flag(args.blocks, args.calls)
        return 0
    found = measure_layers(args.blocks, args.calls)
    if not args.no_flag:
        command = module_command(MODULE, "--blocks", str(args.blocks), "--calls", str(args.calls))
        found["flag"] = run_ranks_here(command, 2)
    if args.json:
        print(json.dumps(found))
    else:
        print(page_table(("called", "what goes with the layer", "ns (quartiles)", "a call, ns"), table(found)), end="")
    return 0


def table(found: Times) -> list[list[str]]:
    """Return a row per layer: what it costs beside the next one inside it, and what a call takes in all."""
    rows = []
    for layer, inner in pairwise([*LAYERS, ""]):
        beside = found[inner] if inner else [0.0] * len(found[layer])
        low, middle, high = quantiles((a - b for a, b in zip(found[layer], beside, strict=True)), n=4)
        cost = f"{middle:.0f} ({low:.0f} to {high:.0f})"
        rows.append([layer, LAYERS[layer], cost, f"{median(found[layer]):.0f}"])
    if "flag" in found:
        low, middle, high = quantiles(found["flag"], n=4)
        core = median(found["core"])
        rows.append(["flag", FLAG, f"{middle - core:.0f} ({low - core:.0f} to {high - core:.0f})", f"{middle:.0f}"])
    return rows


def measure_layers(blocks: int, calls: int) -> Times:
    """Return the CPU time of a call on one rank, ns, by block, for each layer."""
    import numpy as np
    import torch

    from ringside.engine import HostCommunicator
    from ringside.pytorch.communicator.one_host import OneHost
    from ringside.pytorch.communicator.options import Options

    host, array = HostCommunicator(f"alone/{uuid.uuid4()}", 0, 1), np.zeros(1, np.float32)
    users = OneHost(host, Options(None, None, None, None, False), None)
    ways: dict[str, Callable[[], Any]] = {
        "torch": partial(users.all_reduce, torch.from_numpy(array)),
        "array": partial(users.all_reduce, array),
        "host": partial(host.all_reduce, array),
        "core": entry_of(host, array),
        "python": partial(id, array),
    }
    took: Times = {layer: [] for layer in ways}
    for block in range(-5, blocks):  # the first ones warm up
        for layer, call in ways.items():
            began = time.thread_time_ns()
            for _ in range(calls):
                call()
            if block >= 0:
                took[layer].append((time.thread_time_ns() - began) / calls)
    host.close()
    return took


def entry_of(host: Any, array: Any) -> Callable[[], Any]:
    """Return the call into the core that `HostCommunicator.all_reduce` makes for an array."""
    from ringside._core.enums import Algorithm, ReduceOp

    return partial(host._core.all_reduce_array, array, int(ReduceOp.sum), int(Algorithm.automatic), -1)


def measure_flag(blocks: int, calls: int) -> None:
    """Print, as one of two ranks, the wall time of the core's entry, ns, by block."""
    from ringside.engine import HostCommunicator

    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    with HostCommunicator(f"flag/{os.environ['MASTER_PORT']}", rank, 2) as host:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        call, took = entry_of(host, host.empty(1)), []
        for _ in range(blocks):
            host.barrier()
            began = time.perf_counter_ns()
            for _ in range(calls):
                call()
            took.append((time.perf_counter_ns() - began) / calls)
    if rank == 0:
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
