"""A lighter wire in the lab: what a DDP step takes by it, and what it does to a loss. Needs root and iproute2.

    python -m bench.lab.wire step [--rate 1gbit] [--compute 1.0] [--blocks 7] [--selection] [--json]
    python -m bench.lab.wire train [--seeds 5] [--steps 300] [--size small] [--json]

step    Equal models in the same processes, 4 hosts x 2 ranks, blocks of steps in turn: stock DDP on Gloo, ours by f32,
        bf16, int8 and fp8_e4m3. Layers wait, as long as Gloo's ring needs on a link (`--compute`: times that). Medians
        over blocks; the time that is exposed; the bytes that a host's interface sent; processor time of encoding.
train   The demo's GPT over 2 hosts x 2 ranks, by f32 and by int8 with error feedback and without, the same seeds: the
        mean difference of the final loss from f32's with its 95 % interval, beside the deviation over f32's seeds.

`python -m bench.lab.wire PLAN` is what a rank runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from bench.common import make_parser, process_group, report_progress, slowest_step_s
from bench.lab.ddp_step import (
    ALGORITHM,
    GRADIENT_BYTES,
    HOSTS,
    PER_HOST,
    StepRecords,
    attach_by,
    balance,
    busiest_bytes,
    environment,
    make_models,
    settle,
    slowest_blocks,
    step_of,
)
from bench.lab.jobs import run_ranks
from bench.lab.rank import counters

STOCK = "stock"
WIRES = {"f32": "", "bf16": "bfloat16", "int8": "int8", "fp8_e4m3": "fp8_e4m3"}
RUNS = {"f32": ("", "1"), "int8": ("int8", "1"), "int8, no feedback": ("int8", "0")}
"""By name: the wire, and whether errors are fed back."""
_STEPS = 3  # in a block
_LAST = 20  # steps whose mean loss is the final one


# ------------------------------------------------------------------------------------------------ a step's time


def measure_step(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a step takes by every wire, from the ranks of a lab."""
    from ringside.lab import Lab, payload_bytes_per_second

    with Lab(hosts=HOSTS, ranks_per_host=PER_HOST, rate=args.rate) as lab, tempfile.TemporaryDirectory() as runs:
        ring_s = busiest_bytes("gloo", GRADIENT_BYTES, [PER_HOST] * HOSTS) / payload_bytes_per_second(args.rate)
        plan = {"job": "step", "blocks": args.blocks, "runs": runs, "compute_s": args.compute * ring_s}
        plan["algorithm"] = "" if args.selection else ALGORITHM
        reports = run_ranks(lab, "bench.lab.wire", plan)
    step = {name: slowest_blocks(reports, name) for name in (STOCK, *WIRES)}
    first_ranks = reports[::PER_HOST]
    rows = []
    for name, times in step.items():
        speeds = sorted(stock / own for stock, own in zip(step[STOCK], times, strict=True))
        exposed = [r["exposed"][name] for r in reports if name in r["exposed"]]
        rows.append(
            {
                "by": name,
                "step_ms": 1e3 * median(times),
                "x_stock": median(speeds),
                "x_stock_range": [speeds[0], speeds[-1]],
                "exposed_ms": 1e3 * median(exposed) if exposed else None,
                "link_bytes": max(r["link_bytes"][name] for r in first_ranks),
                "encoding_cpu_ms": 1e3 * median(r["encoding_s"][name] for r in reports),
                "cpu_ms": 1e3 * sum(median(r["cpu_s"][name]) for r in reports),
            }
        )
    return {"rate": args.rate, "compute_ms": 1e3 * plan["compute_s"], "gradient_bytes": GRADIENT_BYTES, "rows": rows}


def tell_step(found: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"DDP step, {HOSTS} hosts x {PER_HOST} ranks, {found['rate']}, {found['gradient_bytes'] / 1e6:.1f} MB of "
        f"gradients, layers that wait {found['compute_ms']:.0f} ms; medians of blocks in turn"
    )
    head = f"{'by':10}{'step, ms':>10}{'x stock':>9}{'exposed, ms':>13}{'link, MB':>10}{'x f32':>7}"
    print(f"{head}{'encoding, ms CPU':>18}")
    whole = next(row for row in found["rows"] if row["by"] == "f32")["link_bytes"]
    for row in found["rows"]:
        exposed = "" if row["exposed_ms"] is None else f"{row['exposed_ms']:.1f}"
        print(
            f"{row['by']:10}{row['step_ms']:10.1f}{row['x_stock']:9.3f}{exposed:>13}{row['link_bytes'] / 1e6:10.2f}"
            f"{row['link_bytes'] / whole:7.3f}{row['encoding_cpu_ms']:18.2f}"
        )
    print("link: sent by a host's interface in a step, all headers; encoding: of one rank in a step, both ways")


def step_job(plan: dict[str, Any]) -> dict[str, Any]:
    """Train as one rank, every model in turn, and return the report."""
    import torch.distributed as dist

    encoding, run_dir = _count_encoding(), Path(plan["runs"]) / "run"
    models = make_models((STOCK, *WIRES))
    attachments = {
        name: attach_by(models[name], plan["algorithm"], wire, run_dir=run_dir) for name, wire in WIRES.items()
    }
    records = StepRecords(attachments["f32"].session)
    work = balance(models[STOCK], "wait", plan["compute_s"])
    steps = {name: step_of(model, work) for name, model in models.items()}
    for name, step in steps.items():
        slowest_step_s(step, 2)  # DDP rebuilds its buckets after the first step
        if name != STOCK and not plan["algorithm"]:
            settle(models[name])
    records.clear()
    report: dict[str, dict[str, Any]] = {key: {name: [] for name in steps} for key in ("blocks", "cpu_s")}
    report |= {"link_bytes": {}, "encoding_s": {}}
    for number in range(plan["blocks"]):
        for name in steps if number % 2 else reversed(steps):
            dist.barrier()
            records.now, cpu, sent, encoded = name, time.process_time(), counters()[2], encoding[0]
            report["blocks"][name].append(slowest_step_s(steps[name], _STEPS))
            report["cpu_s"][name].append((time.process_time() - cpu) / _STEPS)
            report["encoding_s"][name] = (encoding[0] - encoded) / _STEPS
            dist.barrier()
            report["link_bytes"][name] = (counters()[2] - sent) / _STEPS
            records.flush()
        if dist.get_rank() == 0:
            print(f"round {number + 1} of {plan['blocks']}", file=sys.stderr, flush=True)
    report["exposed"] = {name: found["exposed"] for name, found in records.medians().items() if name != STOCK}
    dist.barrier()
    for attachment in attachments.values():
        attachment.detach()
    return report


def _count_encoding() -> list[float]:
    """Have the processor time of encoding and decoding added up, and return where: seconds, the only element."""
    from ringside.engine.net.exchange.block_scaling import BlockScaling
    from ringside.engine.net.exchange.compression import WireCompression

    total = [0.0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **how: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **how)
            finally:
                total[0] += time.thread_time() - began

        return run

    for kind, names in ((BlockScaling, ("encode", "widen")), (WireCompression, ("narrow", "widen"))):
        for name in names:
            setattr(kind, name, counted(getattr(kind, name)))
    return total


# ------------------------------------------------------------------------------------------------ a model's loss


def measure_loss(args: argparse.Namespace) -> dict[str, Any]:
    """Return the final losses by every run and seed, from the ranks of a lab."""
    from ringside.lab import Lab

    losses: dict[str, list[float]] = {name: [] for name in RUNS}
    for seed in range(args.seeds):  # a job each: the time that a job may take is bounded
        plan = {"job": "train", "seed": seed, "steps": args.steps, "size": args.size}
        with Lab(hosts=2, ranks_per_host=2, rate=None) as lab:
            final = run_ranks(lab, "bench.lab.wire", plan, {"RINGSIDE_ALGORITHM": ALGORITHM})[0]
        for name, loss in final.items():
            losses[name].append(loss)
    found: dict[str, Any] = {"steps": args.steps, "size": args.size, "losses": losses, "differences": {}}
    found["deviation"] = stdev(losses["f32"])
    for name in RUNS:
        if name != "f32":
            found["differences"][name] = _interval([a - b for a, b in zip(losses[name], losses["f32"], strict=True)])
    return found


def _interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean and its 95 % interval by Student's t."""
    import numpy as np

    from ringside.monitor.stats import student

    half = float(student(1.959964, np.array(len(values) - 1.0))) * stdev(values) / len(values) ** 0.5
    return {"mean": mean(values), "interval": [mean(values) - half, mean(values) + half]}


def tell_loss(found: dict[str, Any]) -> None:
    """Print the losses and the verdict."""
    print(f"the demo's GPT ({found['size']}), {found['steps']} steps, final loss in nats per byte, by seed")
    for name, losses in found["losses"].items():
        print(f"{name:20}" + "".join(f"{loss:9.4f}" for loss in losses))
    deviation = found["deviation"]
    print(f"standard deviation over f32's seeds: {deviation:.4f}")
    for name, difference in found["differences"].items():
        low, high = difference["interval"]
        inside = "within" if -deviation <= low and high <= deviation else "NOT within"
        print(f"{name} - f32: {difference['mean']:+.4f}, 95 % {low:+.4f} to {high:+.4f}: {inside} that")


def train_job(plan: dict[str, Any]) -> dict[str, float]:
    """Train a seed by every run as one rank; return the final losses, means over ranks."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from ringside.demo.corpus import Corpus
    from ringside.demo.model import SIZES, ByteGPT
    from ringside.demo.train import make_optimizer

    rank, size, seed = dist.get_rank(), SIZES[plan["size"]], plan["seed"]
    corpus = Corpus(None, rank, dist.get_world_size(), size.context)
    losses: dict[str, float] = {}
    for name, (wire, feeds_back) in RUNS.items():
        torch.manual_seed(seed)
        model = DistributedDataParallel(ByteGPT(size), bucket_cap_mb=1)
        with environment(RINGSIDE_ERROR_FEEDBACK=feeds_back):
            attachment = attach_by(model, ALGORITHM, wire, monitor=False)
        optimizer, generator = make_optimizer(model), np.random.default_rng([seed, rank])
        last = []
        for step in range(plan["steps"]):
            optimizer.zero_grad()
            loss = model(torch.from_numpy(corpus.batch(generator, size.batch)))
            loss.backward()
            optimizer.step()
            if step >= plan["steps"] - _LAST:
                last.append(float(loss.detach()))
        final = torch.tensor([mean(last)], dtype=torch.float64)
        dist.all_reduce(final)
        losses[name] = float(final) / dist.get_world_size()
        attachment.detach()
        if rank == 0:
            print(f"seed {seed}, {name}: {losses[name]:.4f}", file=sys.stderr, flush=True)
    return losses


# ------------------------------------------------------------------------------------------------ both


@process_group()
def be_a_rank(plan: dict[str, Any]) -> None:
    """Do what the plan says, and print the report."""
    print(json.dumps({"step": step_job, "train": train_job}[plan["job"]](plan)), flush=True)


def main() -> int:
    """Measure and print; return 2 if there is no lab."""
    from ringside.lab import Lab

    parser = make_parser("bench.lab.wire", __doc__)
    parser.add_argument("what", choices=["step", "train"])
    parser.add_argument("--rate", default="1gbit", help="of the links (default: %(default)s)")
    parser.add_argument(
        "--compute", type=float, default=1.0, metavar="X", help="times what Gloo's ring needs on a link"
    )
    parser.add_argument("--blocks", type=int, default=7, metavar="N", help="of every model (default: %(default)s)")
    parser.add_argument("--selection", action="store_true", help=f"select algorithms, not {ALGORITHM} for all")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--size", default="small", help="of the demo's model (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args()
    if reason := Lab.unavailable():
        report_progress(f"not measured: {reason}")
        return 2
    found = measure_step(args) if args.what == "step" else measure_loss(args)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        (tell_step if args.what == "step" else tell_loss)(found)
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_file():
        be_a_rank(json.loads(Path(sys.argv[1]).read_text()))
    else:
        sys.exit(main())
