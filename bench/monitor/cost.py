"""What watching costs beside Ringside's engine: training steps watched and unwatched, in turn.

Both sides train in the same two processes, over the engine. While the unwatched side's turn lasts the monitor's hooks
are off, but its thread is there, as it would be in a job that trains two models. Models: one so small that microseconds
show, the demo's GPT, and one of 25 million parameters for what comparing parameters costs. Prints paired differences of
step times with intervals, and beside them what the monitor says of itself. What only watching costs a job over stock
Gloo is `bench.monitor.whole_step`.

    torchrun --nproc-per-node 2 -m bench.monitor.cost [--repeats 3] [--blocks 16] [--json FILE]
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from bench.common import make_parser, process_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.demo.model import SIZES, ByteGPT
from ringside.monitor import StepRecord
from ringside.monitor.run.directory import RunReader
from ringside.pytorch import Session
from ringside.pytorch.recording.parameter_digests import ParameterDigests

# What watching may add to a step: seconds, and share of a step that is no tiny one.
TARGET_S, TARGET_RATIO = 100e-6, 0.005
Step = Callable[[], None]


def main() -> None:
    """Run one rank; rank 0 prints."""
    parser = make_parser("bench.monitor.cost", __doc__)
    parser.add_argument("--repeats", type=int, default=3, help="fresh models per setting (default: 3)")
    parser.add_argument("--blocks", type=int, default=16, help="pairs of blocks per repeat (default: 16)")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args()
    with process_group():
        rows = []
        for model, steps in (("tiny", 100), ("gpt", 4)):
            rows.append(measure_watching(model, steps, args.repeats, args.blocks))
            print_row(rows[-1])
        rows.append(measure_comparing())
        print_row(rows[-1])
        if dist.get_rank() == 0 and args.json:
            args.json.write_text(json.dumps(rows, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------ measuring


def measure_watching(model: str, steps: int, repeats: int, blocks: int) -> dict[str, Any]:
    """Measure pairs of blocks of one setting."""
    pairs: list[tuple[float, float]] = []
    own: list[float] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as directory:
            watched, session = make_step(model, f"{directory}/run")
            unwatched, _ = make_step(model, None)
            assert session is not None
            for step in (watched, unwatched):
                time_block(step, max(steps // 4, 2))
            for number in range(blocks):
                pairs.append(time_pair(watched, unwatched, session, steps, first=bool(number % 2)))
            session.end()
            own += [record.overhead_seconds for record in records_of(session)]
            del watched, unwatched
    differences = [watched - unwatched for watched, unwatched in pairs]
    low, middle, high = quantiles(differences, n=4)
    step_s = median(unwatched for _, unwatched in pairs)
    return {
        "what": "watching",
        "model": model,
        "pairs": len(pairs),
        "step_seconds": step_s,
        "difference_seconds": middle,
        "quartiles_seconds": [low, high],
        "own_figure_seconds": median(own) if own else math.nan,
    }


def records_of(session: Session) -> list[StepRecord]:
    """Return what an ended session has recorded; only rank 0 has that."""
    return [] if session.path is None else list(RunReader(session.path).poll())


def time_pair(watched: Step, unwatched: Step, session: Session, steps: int, *, first: bool) -> tuple[float, float]:
    """Return the times of a block of each, watched and unwatched."""
    if first:
        one = time_block(watched, steps)
    with hooks_off(session):
        other = time_block(unwatched, steps)
    return (one if first else time_block(watched, steps)), other


@contextlib.contextmanager
def hooks_off(session: Session) -> Iterator[None]:
    """Inside, the hooks that the session has on all optimizers do nothing."""
    session.guard.tripped = True
    try:
        yield
    finally:
        session.guard.tripped = False
        session.clock.restart()


def time_block(step: Step, steps: int) -> float:
    """Return the median time of a step in a block, seconds, on the slowest rank."""
    dist.barrier()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    seconds = torch.tensor([median(times)], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measure_comparing() -> dict[str, Any]:
    """Measure what comparing the parameters of a larger model costs."""
    checks: list[float] = []
    take = ParameterDigests.digest_parameters

    def timed(self: ParameterDigests, number: int, step: int) -> None:
        began = time.perf_counter()
        take(self, number, step)
        checks.append(time.perf_counter() - began)

    ParameterDigests.digest_parameters = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as directory:
            step, session = make_step("large", f"{directory}/run", digest_every=1)
            assert session is not None
            time_block(step, 3)
            step_s = median(time_block(step, 1) for _ in range(25))
            session.end()
    finally:
        ParameterDigests.digest_parameters = take  # type: ignore[method-assign]
    low, middle, high = quantiles(checks, n=4)
    return {
        "what": "comparing",
        "parameters": count_parameters("large"),
        "checks": len(checks),
        "check_seconds": middle,
        "quartiles_seconds": [low, high],
        "step_seconds": step_s - middle,
    }


# ------------------------------------------------------------------------------------------------ models


def build_model(model: str) -> nn.Module:
    torch.manual_seed(0)
    if model == "gpt":
        return ByteGPT(SIZES["small"])
    width, layers = (8, 1) if model == "tiny" else (1024, 24)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def batch_for(model: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    if model == "gpt":
        size = SIZES["small"]
        return torch.randint(0, 256, (size.batch, size.context + 1), generator=generator)
    return torch.randn(*((2, 8) if model == "tiny" else (256, 1024)), generator=generator)


def count_parameters(model: str) -> int:
    return sum(parameter.numel() for parameter in build_model(model).parameters())


def make_step(model: str, run_dir: str | None, digest_every: int = 0) -> tuple[Step, ringside.pytorch.Session | None]:
    """Return a training step of a fresh model, watched where there is a run directory, and its session."""
    ddp = DistributedDataParallel(build_model(model))
    attachment = ringside.attach(
        ddp, engine="ringside", monitor=run_dir is not None, run_dir=run_dir, digest_every=digest_every
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    data = batch_for(model)

    def step() -> None:
        optimizer.zero_grad()
        output = ddp(data)
        (output if output.dim() == 0 else output.square().mean()).backward()
        optimizer.step()

    return step, attachment.session


# ------------------------------------------------------------------------------------------------ printing


def print_row(row: dict[str, Any]) -> None:
    """Print one setting's figures, on rank 0."""
    if dist.get_rank() != 0:
        return
    low, high = row["quartiles_seconds"]
    if row["what"] == "comparing":
        step, check = row["step_seconds"], row["check_seconds"]
        print(
            f"comparing {row['parameters'] / 1e6:.1f} M parameters: {check * 1e3:.2f} ms per check (half of "
            f"{row['checks']} between {low * 1e3:.2f} and {high * 1e3:.2f} ms), every 100 steps {check * 1e4:.0f} µs "
            f"per step of {step * 1e3:.0f} ms ({check / 100 / step:.3%})",
            flush=True,
        )
        return
    step, middle, own = row["step_seconds"], row["difference_seconds"], row["own_figure_seconds"]
    kept = "kept" if middle < TARGET_S and (row["model"] == "tiny" or middle < TARGET_RATIO * step) else "NOT KEPT"
    print(
        f"Ringside's engine, {row['model']}: a step takes {step * 1e3:.2f} ms; watched {middle * 1e6:+.0f} µs "
        f"({middle / step:+.2%}); half of {row['pairs']} pairs between {low * 1e6:+.0f} and {high * 1e6:+.0f} µs; "
        f"its own figure {own * 1e6:.0f} µs; target {kept}",
        flush=True,
    )


if __name__ == "__main__":
    main()
