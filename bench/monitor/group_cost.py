"""What `ringside.watch()` costs: whole FSDP2 steps, watched and not, in turn in the same processes; and our code alone.

Two ranks train the same model in blocks, every second one watched. The difference is the median over pairs of blocks,
with its 95% interval. *Per collective* is what our code does for one that is waited for, without torch's part.

    python -m bench.monitor.group_cost
    python -m bench.monitor.group_cost --backend gloo                 # torch 2.14 or newer
    python -m bench.monitor.group_cost --batch 6000                   # longer steps
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from typing import Any

from bench.common import make_parser, module_command, run_ranks_here
from bench.monitor.whole_step import interval

BLOCKS, STEPS = 40, 12
"""Blocks, and steps in each; the first step of a block is not counted."""


def measure(backend: str, batch: int, run_dir: str) -> dict[str, Any] | None:
    """Train in blocks on this rank; on rank 0 return seconds per step of each block."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import ringside

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(backend)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.randn(batch, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(10):
        step()
    blocks: list[float] = []
    watch = ringside.watch(run_dir=run_dir)
    collectives = 0
    for block in range(BLOCKS):
        if block % 2:
            watch = ringside.watch(run_dir=run_dir)
        else:
            watch.off()  # the session stays: what is compared is the watching of groups
        dist.barrier()
        step()
        began = time.perf_counter()
        for _ in range(STEPS - 1):
            step()
        blocks.append((time.perf_counter() - began) / (STEPS - 1))
        if block % 2:
            collectives = watch.session.clock.groups.counts.total() // STEPS  # type: ignore[union-attr]
    rank = dist.get_rank()
    if watch.session is not None:
        watch.session.end()
    dist.destroy_process_group()
    return {"blocks": blocks, "collectives": collectives} if rank == 0 else None


def per_collective() -> float:
    """Return what our code takes for one collective that is issued and waited for, microseconds."""
    from ringside.monitor.wait_meter import WaitMeter, WatchedGroup

    meter = WaitMeter(0, lambda began, ended: None)
    meter.add(WatchedGroup("1", "mesh_dp", lambda: [0, 1]))
    taken = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(50):
            issued = meter.issue("1", -1, 8)
            assert issued is not None
            issued.timed(int)
        meter.end_step()()
        taken.append((time.perf_counter() - began) / 50)
    return statistics.median(taken) * 1e6


def main() -> None:
    """Run the blocks and print what they come to."""
    parser = make_parser("bench.monitor.group_cost", __doc__)
    parser.add_argument("--backend", default="ringside")
    parser.add_argument("--batch", type=int, default=256, help="samples per rank and step (default: 256)")
    parser.add_argument("--rank", help="run as one rank, with this run directory")
    options = parser.parse_args()
    if options.rank:
        result = measure(options.backend, options.batch, options.rank)
        if result is not None:
            print(json.dumps(result))
        return
    with tempfile.TemporaryDirectory() as folder:
        words = ("--backend", options.backend, "--batch", str(options.batch), "--rank", f"{folder}/run")
        result = run_ranks_here(module_command("bench.monitor.group_cost", *words), 2)
    blocks = result["blocks"]
    pairs = [watched - free for free, watched in zip(blocks[::2], blocks[1::2], strict=True)]
    low, middle, high = interval(pairs)
    step = statistics.median(blocks[::2])
    print(
        f"{options.backend}: step {step * 1e3:.2f} ms with {result['collectives']} collectives; watched "
        f"{middle * 1e6:+.0f} µs ({middle / step:+.2%}), 95% interval {low * 1e6:+.0f} to {high * 1e6:+.0f} µs; "
        f"our own code {per_collective():.2f} µs per collective"
    )


if __name__ == "__main__":
    main()
