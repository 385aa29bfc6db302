"""What only watching a DistributedDataParallel model costs: whole steps over stock Gloo, watched and not, in turn.

Blocks: two copies of a transformer of 2.4 million parameters train in the same processes, in turn; one is attached
with `engine="native"`, the other is plain DDP, and while that trains the session's hooks on optimizers do nothing.
Runs: one script that knows nothing of Ringside, started by `ringside run` in turn as it is and with RINGSIDE=off.
Printed are the median of the paired differences and its 95% interval (by order statistics), over the median plain step.

    python -m bench.monitor.whole_step                      # 60 pairs of blocks of 10 steps, 8 pairs of runs
    python -m bench.monitor.whole_step --runs 0 --pairs 200 --json /tmp/whole_step.json
    python -m bench.monitor.whole_step --lab 2x4                      # blocks alone, on 2 lab hosts of 4 ranks each
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import (
    RANKS_LIMIT_S,
    ROOT,
    last_json,
    make_parser,
    median_interval,
    module_command,
    process_group,
    run_ranks_here,
)

GOAL = 0.01
"""The interval's upper end lies below so much of a step."""
WIDTH, LAYERS, HEADS, BATCH, LENGTH = 192, 5, 4, 4, 64
SETTLE_STEPS = 8
RUN_STEPS = 60
"""Steps of a whole run."""
STEP_TAKES = "a median step takes, seconds:"


# ------------------------------------------------------------------------------------------------ on a rank


def plain_step() -> tuple[Any, Any]:
    """Return a DDP model and one training step of it, as a script would write them."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(256, WIDTH), nn.TransformerEncoder(layer, LAYERS), nn.Linear(WIDTH, 256))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 256, (BATCH, LENGTH + 1), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return ddp, step


@process_group()
def in_blocks(pairs: int, steps: int, run_dir: str) -> dict[str, Any] | None:
    """Train both in turn; on rank 0 return the pairs' seconds per step, watched and plain."""
    import torch.distributed as dist
    from bench.monitor.cost import records_of, time_block, time_pair

    import ringside

    _, plain = plain_step()
    ddp, watched = plain_step()
    session = ringside.attach(ddp, engine="native", run_dir=run_dir, digest_every=0).session
    assert session is not None
    for step in (watched, plain):
        time_block(step, SETTLE_STEPS)
    found = [time_pair(watched, plain, session, steps, first=bool(number % 2)) for number in range(pairs)]
    session.end()
    own = [record.overhead_seconds for record in records_of(session)]
    return {"pairs": found, "own_seconds": median(own)} if dist.get_rank() == 0 else None


@process_group()
def as_a_script() -> None:
    """Train as a script that knows nothing of Ringside; rank 0 prints its median step, seconds."""
    import torch.distributed as dist

    _, step = plain_step()
    taken = []
    for _ in range(SETTLE_STEPS + RUN_STEPS):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(f"{STEP_TAKES} {median(taken[SETTLE_STEPS:])}", flush=True)


# ------------------------------------------------------------------------------------------------ what it comes to


def run_seconds(ranks: int, run_dir: str, *, is_watched: bool) -> float:
    """Return the median step of one whole run."""
    words = [sys.executable, "-m", "ringside", "run", "-n", str(ranks), "--run-dir", run_dir]
    settings = {"RINGSIDE_ENGINE": "native", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not is_watched:
        settings["RINGSIDE"] = "off"
    done = subprocess.run(
        [*words, str(Path(__file__).resolve()), "--script"],
        cwd=ROOT,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout.partition(STEP_TAKES)[2].split()[0])


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower end of the median's 95% interval, the median, and the upper end; NaN for fewer than 6 values."""
    low, high = median_interval(values) if len(values) >= 6 else (math.nan, math.nan)
    return low, median(values), high


def summarize(name: str, pairs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what pairs of seconds per step, watched and plain, come to."""
    step_s = median(plain for _, plain in pairs)
    low, middle, high = (value / step_s for value in interval([watched - plain for watched, plain in pairs]))
    return {"what": name, "pairs": len(pairs), "step_seconds": step_s, "ratio": middle, "interval": [low, high]}


def print_row(row: dict[str, Any]) -> None:
    """Print it."""
    low, high = row["interval"]
    print(
        f"{row['what']}: a plain step takes {row['step_seconds'] * 1e3:.2f} ms; watched {row['ratio']:+.2%}, "
        f"95% interval {low:+.2%} to {high:+.2%} ({row['pairs']} pairs); goal (below {GOAL:+.0%}) "
        f"{'kept' if high < GOAL else 'NOT KEPT'}",
        flush=True,
    )


def main() -> None:
    """Run what is asked for and print what it comes to."""
    parser = make_parser("bench.monitor.whole_step", __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="on this host (default: 2)")
    parser.add_argument("--lab", metavar="HOSTSxRANKS", help="on hosts of the network lab, such as 2x4")
    parser.add_argument("--rate", default="1gbit", help="of a lab's links (default: 1gbit)")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks (default: 60)")
    parser.add_argument("--steps", type=int, default=10, help="steps in a block (default: 10)")
    parser.add_argument("--runs", type=int, default=8, help="pairs of whole runs (default: 8; 0: none)")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--rank", help="train in blocks as one rank, with this run directory")
    parser.add_argument("--script", action="store_true", help="train as a script that knows nothing of Ringside")
    options = parser.parse_args()
    if options.script:
        as_a_script()
        return
    if options.rank:
        found = in_blocks(options.pairs, options.steps, options.rank)
        if found is not None:
            print(json.dumps(found))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        words = ("--pairs", str(options.pairs), "--steps", str(options.steps), "--rank", f"{folder}/run")
        command = module_command("bench.monitor.whole_step", *words)
        if options.lab:
            from ringside.lab import Lab

            hosts, _, per_host = options.lab.partition("x")
            with Lab(hosts=int(hosts), ranks_per_host=int(per_host or 1), rate=options.rate) as lab:
                done = lab.run(command, {"OMP_NUM_THREADS": "1"}, timeout_s=RANKS_LIMIT_S, after_failure_s=5.0).check()
            found = last_json(done.ranks[0].stdout)
        else:
            found = run_ranks_here(command, options.ranks)
        rows.append({**summarize("blocks", found["pairs"]), "own_seconds": found["own_seconds"]})
        print_row(rows[-1])
        print(f"the monitor's own figure: {found['own_seconds'] * 1e6:.0f} µs per step", flush=True)
        pairs = []
        for number in range(0 if options.lab else options.runs):
            seconds = {}
            for is_watched in (bool(number % 2), not number % 2):
                run_dir = f"{folder}/{number}-{is_watched}"
                seconds[is_watched] = run_seconds(options.ranks, run_dir, is_watched=is_watched)
            pairs.append((seconds[True], seconds[False]))
        if pairs:
            rows.append(summarize("whole runs", pairs))
            print_row(rows[-1])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
