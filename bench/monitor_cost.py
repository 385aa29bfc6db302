"""What watching costs: the demo's training step watched against the same step unwatched, in turn.

Both sides carry gradients over Ringside's engine, in the same two processes. While the unwatched side's turn lasts the
monitor's hooks are off, but its thread is there, as it would be in a job that trains two models. Prints the paired
difference of step times with an interval, and beside it what the monitor says of itself.

    torchrun --nproc-per-node 2 bench/monitor_cost.py [--blocks 24] [--steps 5]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.demo.model import SIZES, ByteGPT
from ringside.monitor import StepRecord


def main() -> None:
    """Run one rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24, help="pairs of blocks (default: 24)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a block (default: 5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as directory:
        records: list[StepRecord] = []
        watched, session = make_step(f"{directory}/run")
        unwatched, _ = make_step(None)
        assert session is not None
        session.on_record(records.append)
        for step in (watched, unwatched):
            block(step, 5)
        pairs = []
        for number in range(args.blocks):
            sides = (watched, unwatched) if number % 2 else (unwatched, watched)
            times = {side: block(side, args.steps) for side in sides}
            pairs.append((times[watched], times[unwatched]))
        session.end()
        if dist.get_rank() == 0:
            report(pairs, records)
        dist.barrier()
    dist.destroy_process_group()


def make_step(run_dir: str | None) -> tuple[Callable[[], None], ringside.sync.Session | None]:
    """Return a training step of a fresh model, watched where there is a run directory, and its session."""
    torch.manual_seed(0)
    size = SIZES["small"]
    model = DistributedDataParallel(ByteGPT(size))
    attachment = ringside.attach(model, engine="ringside", monitor=run_dir is not None, run_dir=run_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(
        0, 256, (size.batch, size.context + 1), generator=torch.Generator().manual_seed(dist.get_rank())
    )

    def step() -> None:
        optimizer.zero_grad()
        model(text).backward()
        optimizer.step()

    return step, attachment.session


def block(step: Callable[[], None], steps: int) -> float:
    """Return the mean time of a step in a block, seconds, on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = torch.tensor([(time.perf_counter() - began) / steps], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def report(pairs: list[tuple[float, float]], records: list[StepRecord]) -> None:
    """Print the paired difference, its interquartile range, and the monitor's own figure."""
    differences = [watched - unwatched for watched, unwatched in pairs]
    low, middle, high = quantiles(differences, n=4)
    step = median(unwatched for _, unwatched in pairs)
    own = median(record.overhead_seconds for record in records)
    print(f"a step takes {step * 1e3:.1f} ms; watched it takes {middle * 1e6:+.0f} µs ({middle / step:+.2%})")
    print(f"half of the {len(pairs)} pairs lie between {low * 1e6:+.0f} and {high * 1e6:+.0f} µs")
    print(f"the monitor's own figure, on the training thread: {own * 1e6:.0f} µs per step ({own / step:.3%})")


if __name__ == "__main__":
    main()
