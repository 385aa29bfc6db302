"""One training step of a DistributedDataParallel model: gradients over Gloo against Ringside, in turn.

Two equal models (6 x Linear(1024) + ReLU, batch 32, SGD) live in the same processes. Blocks of steps alternate between
them, so that both meet the same weather; the time of a block is that of its slowest rank. Prints the median ratio of
the pairs, the medians, and beside them forward and backward without synchronisation.

    python -m bench.allreduce.ddp_step [--ranks 2,4] [--blocks 12] [--steps 8] [--json]
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.common import make_parser, module_command, numbers, process_group, run_ranks_here, slowest_step_s

MODULE = "bench.allreduce.ddp_step"
LAYERS, WIDTH, BATCH = 6, 1024, 32  # 25 MB of gradients
SIDES = ("gloo", "ringside")


def main() -> int:
    """Start the ranks once for each rank count and print what rank 0 found."""
    parser = make_parser(MODULE, __doc__)
    parser.add_argument("--ranks", default="2,4", help="rank counts (default: 2,4)")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each model (default: 12)")
    parser.add_argument("--steps", type=int, default=8, help="steps in a block (default: 8)")
    parser.add_argument("--json", action="store_true", help="print a list of results, times in seconds")
    args = parser.parse_args()
    if "RANK" in os.environ:  # started by this very script, below
        train_rank(args.blocks, args.steps)
        return 0
    command = module_command(MODULE, "--blocks", str(args.blocks), "--steps", str(args.steps))
    results = [run_ranks_here(command, ranks) for ranks in numbers(args.ranks)]
    if args.json:
        print(json.dumps(results, indent=2))
        return 0
    for result in results:
        ms = {side: seconds * 1e3 for side, seconds in result["step_seconds"].items()}
        same = "bit-equal parameters" if result["same_parameters"] else "parameters differ in rounding"
        print(
            f"DDP step, {result['ranks']} ranks: {result['step_ratio']:.2f}x Gloo ({ms['gloo']:.1f} ms with Gloo, "
            f"{ms['ringside']:.1f} ms with Ringside, {result['step_seconds_no_sync'] * 1e3:.1f} ms for "
            f"forward and backward alone); {same}"
        )
    return 0


@process_group()
def train_rank(blocks: int, steps: int) -> None:
    """Run one rank; rank 0 prints the result as JSON on its last line."""
    import torch
    import torch.distributed as dist

    sides = {side: _step_of(side) for side in SIDES}
    times: dict[str, list[float]] = {key: [] for key in (*SIDES, "compute")}
    for step, _ in sides.values():
        slowest_step_s(step, steps)  # buckets are rebuilt after the first step
    # Who comes first changes from block to block: the second one finds warmer caches.
    for block in range(blocks):
        for side in SIDES if block % 2 else reversed(SIDES):
            times[side].append(slowest_step_s(sides[side][0], steps))
        times["compute"].append(slowest_step_s(lambda: sides["gloo"][0](False), steps))
    pairs = zip(*(model.parameters() for _, model in sides.values()), strict=True)
    medians = {key: median(values) for key, values in times.items()}
    result = {
        "ranks": dist.get_world_size(),
        "step_seconds": {side: medians[side] for side in SIDES},
        "step_seconds_no_sync": medians["compute"],
        "step_ratio": median(g / r for g, r in zip(times["gloo"], times["ringside"], strict=True)),
        "same_parameters": all(torch.equal(a, b) for a, b in pairs),
    }
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)


def _step_of(side: str) -> tuple[Callable[..., None], Any]:
    """Return a step of a model whose gradients travel by `side`, and the model."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import ringside

    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    if side == "ringside":
        ringside.attach(model, engine="ringside", monitor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + torch.distributed.get_rank())
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def step(synchronise: bool = True) -> None:
        with contextlib.nullcontext() if synchronise else model.no_sync():
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
        if synchronise:
            optimizer.step()

    return step, model


if __name__ == "__main__":
    sys.exit(main())
