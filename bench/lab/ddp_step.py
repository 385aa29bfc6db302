"""A training step of a DistributedDataParallel model on 4 hosts x 2 ranks: stock DDP on Gloo beside ours, in turn.

Equal models (8 x Linear(724) + ReLU: 16.8 MB of gradients in buckets of 4 MB) live in the same processes; blocks of
steps alternate between them. Forward and backward are made to take as long as Gloo's ring needs on a host's link.

At 1 Gbit/s the cores that all hosts of the lab share are the bound, so the same job also runs over links of half the
rate: what a host of its own would have, a core that is free when a message comes, it has there.

`python -m bench.lab.ddp_step PLAN` is what a rank runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.common import Floor, process_group, processor_ticks, report_progress, slowest_step_s
from bench.lab.expected import host_bytes, last_bucket_s
from bench.lab.jobs import run_ranks
from bench.lab.report import Row, Section

HOSTS, PER_HOST, RATE, SLOWER = 4, 2, "1gbit", "500mbit"
LAYERS, WIDTH, BUCKET_MB = 8, 724, 4
GRADIENT_BYTES = LAYERS * (WIDTH + 1) * WIDTH * 4
STOCK, WATCHED, OURS, CHOSEN, HALF = "stock", "stock, watched", "ours", "ours, default", "ours, bf16 wire"
COMPUTE = "compute"
ALGORITHM = "hosts/ring"
# Steps in a block; samples of the trial by which the work is sized, and the most samples.
_STEPS, _TRIAL_BATCH, _MOST_BATCH = 3, 64, 4096
_MOST_TO_SETTLE = 60  # steps until the choice for every size stands


def ddp(repeat: int, compute: str = "wait", rate: str = RATE, name: str = "ddp") -> Section:
    """Compare the time that a step saves over stock DDP with what the bytes on a host's link say.

    Args:
        repeat: Blocks of each model.
        compute: `wait`: layers take their time without a processor, as if every host had its own (an accelerator);
            `cpu`: they compute, on the cores that the lab's hosts and its network share.
        rate: Of the links.
        name: Of the section.
    """
    from ringside.lab import Lab, payload_bytes_per_second

    with Lab(hosts=HOSTS, ranks_per_host=PER_HOST, rate=rate) as lab, tempfile.TemporaryDirectory() as runs:
        report_progress(f"  {name}: {HOSTS} hosts x {PER_HOST}, {rate}")
        full = payload_bytes_per_second(rate)
        compute_s = busiest_bytes("gloo", GRADIENT_BYTES, [PER_HOST] * HOSTS) / full
        plan = {"blocks": repeat, "runs": runs, "compute": compute, "compute_s": compute_s}
        reports = run_ranks(lab, "bench.lab.ddp_step", plan)
    return section_of(reports, full, compute, rate, name)


def section_of(reports: Sequence[dict[str, Any]], full: float, compute: str, rate: str, name: str) -> Section:
    """Return the law's table from what the ranks report.

    Args:
        reports: By rank.
        full: Payload rate of a link, bytes/s.
        compute, rate, name: See `ddp`.
    """
    size, sizes = GRADIENT_BYTES, [PER_HOST] * HOSTS
    law = {STOCK: busiest_bytes("gloo", size, sizes), OURS: busiest_bytes(ALGORITHM, size, sizes)}
    law = {STOCK: law[STOCK], WATCHED: law[STOCK], OURS: law[OURS], CHOSEN: law[OURS], HALF: law[OURS] / 2}
    step = {name: slowest_blocks(reports, name) for name in law}
    compute_s = median(slowest_blocks(reports, COMPUTE))
    section = Section(name, "", _COLUMNS)
    buckets = reports[0]["buckets"]
    shares = {name: [law[name] * bucket / sum(buckets) for bucket in buckets] for name in law}
    through = {name: last_bucket_s(shares[name], compute_s, full) for name in law}
    for name in law:
        records = [r["records"][name] for r in reports if name in r["records"]]
        recorded = {key: median(r[key] for r in records) for key in ("exposed", "sync") if records}
        recorded = {key: value for key, value in recorded.items() if math.isfinite(value)}  # one that is only watched
        saved = median(s - t for s, t in zip(step[STOCK], step[name], strict=True))
        by_bytes, overlapped = (law[STOCK] - law[name]) / full, through[STOCK] - through[name]
        row: Row = {"by": name, "step_ms": 1e3 * median(step[name]), "link_bytes": law[name] / 1e6}
        row["cpu_ms"] = 1e3 * median(sum(times) for times in zip(*(r["cpu"][name] for r in reports), strict=True))
        row["idle"] = 100 * median(reports[0]["idle"][name])
        row |= {f"{key}_ms": 1e3 * value for key, value in recorded.items()}
        if name in (OURS, CHOSEN, HALF):
            speed = median(s / t for s, t in zip(step[STOCK], step[name], strict=True))
            row |= {"saved_ms": 1e3 * saved, "bytes_ms": 1e3 * by_bytes, "law_ms": 1e3 * overlapped}
            row |= {"ratio": saved / overlapped, "speed": speed}
        section.rows.append(row)
    stock_s = median(step[STOCK])
    exposed, wire = (stock_s - compute_s) / stock_s, law[STOCK] / full / stock_s
    section.title = (
        f"DDP step, {HOSTS} hosts x {PER_HOST} ranks, {rate}, {size / 1e6:.1f} MB of gradients, "
        f"{_COMPUTE_WORDS[compute]}: forward and backward alone {1e3 * compute_s:.0f} ms; of stock DDP's step "
        f"{100 * exposed:.0f}% is exposed communication, and {100 * wire:.0f}% is what its bytes need on the link"
    )
    ours = next(row for row in section.rows if row["by"] == OURS)
    half = next(row for row in section.rows if row["by"] == HALF)
    section.floors = [
        Floor(f"{section.name}, f32: saved time by what the bytes say", ours["ratio"], 0.9),
        Floor(f"{section.name}, bf16 wire: times stock DDP's speed", half["speed"], 1.0),
    ]
    section.notes = [
        f"by the bytes: (link bytes of Gloo's ring over {HOSTS * PER_HOST} ranks - link bytes of {ALGORITHM}) / "
        "payload rate: what there would be to save if communication never waited for backward.",
        "law: the same with what waits: buckets follow each other on the link at the payload rate, none before "
        "backward hands it over (layers of equal work).",
        "CPU: of all ranks together, per step, on the cores that all hosts of the lab share; idle: what the kernel "
        "counts of them as idle, during forward, too.",
        "exposed: backward had nothing left and waited; total: from each bucket's hand-over to its result, summed "
        "(buckets wait for those before them). Of stock DDP, by a separate watched model (attach(engine='native')).",
        f"a float32 gradient's sums with a bf16 wire differ by at most {reports[0]['half_error']:.1e} of the largest.",
    ]
    return section


_COMPUTE_WORDS = {"wait": "layers that wait", "cpu": "layers that compute on the cores that all hosts share"}
_COLUMNS = [
    ("by", "by", "s"),
    ("step, ms", "step_ms", ".1f"),
    ("CPU, ms", "cpu_ms", ".0f"),
    ("idle, %", "idle", ".0f"),
    ("link, MB", "link_bytes", ".1f"),
    ("exposed, ms", "exposed_ms", ".1f"),
    ("total, ms", "sync_ms", ".1f"),
    ("saved, ms", "saved_ms", ".1f"),
    ("by the bytes", "bytes_ms", ".1f"),
    ("law", "law_ms", ".1f"),
    ("saved/law", "ratio", ".3f"),
    ("x stock", "speed", ".3f"),
]


def slowest_blocks(reports: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return what a step took the slowest rank in each block of a model's, seconds."""
    return [max(times) for times in zip(*(report["blocks"][name] for report in reports), strict=True)]


def busiest_bytes(algorithm: str, size_bytes: int, ranks_per_host: Sequence[int]) -> float:
    """Return what the busiest direction of a host's link carries in an all-reduce, bytes."""
    return max(max(pair) for pair in host_bytes(algorithm, size_bytes, ranks_per_host))


# ------------------------------------------------------------------------------------------------ what a rank runs

Step = Callable[..., None]


@process_group()
def main(plan: dict[str, Any]) -> None:
    """Train, as one rank, and print the report."""
    import torch
    import torch.distributed as dist

    models = make_models((STOCK, WATCHED, OURS, CHOSEN, HALF))
    attachments = {name: _attach(model, name, plan["runs"]) for name, model in models.items() if name != STOCK}
    records = StepRecords(attachments[OURS].session)
    # How much gradients by a bf16 wire differ from stock DDP's, by the largest of them; those of f32 must be close.
    grads = {}
    for name in (STOCK, OURS, HALF):
        step_of(models[name], Work(8, 0.0))(True)
        grads[name] = torch.cat([p.grad.flatten() for p in models[name].parameters()])
    largest = float(grads[STOCK].abs().max())
    errors = {name: float((grads[name] - grads[STOCK]).abs().max()) / largest for name in (OURS, HALF)}
    if errors[OURS] > 1e-5 or errors[HALF] > 5e-2:
        raise SystemExit(f"gradients are wrong by {errors} of the largest")
    # Equal work on all ranks, and everything decided and warm before the first measured block.
    work = balance(models[STOCK], plan["compute"], plan["compute_s"])
    steps = {name: step_of(model, work) for name, model in models.items()}
    for step in steps.values():
        slowest_step_s(step, 2)  # DDP rebuilds its buckets after the first step
    settle(models[CHOSEN])
    records.clear()
    blocks: dict[str, list[float]] = {name: [] for name in (*steps, COMPUTE)}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    idle: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(plan["blocks"]):
        names = list(steps) if number % 2 else list(reversed(steps))
        for name in names:
            records.now, before, idle_before = name, time.process_time(), processor_ticks()
            blocks[name].append(slowest_step_s(steps[name], _STEPS))
            cpu[name].append((time.process_time() - before) / _STEPS)
            spent = [now - then for now, then in zip(processor_ticks(), idle_before, strict=True)]  # (idle, all)
            idle[name].append(spent[0] / max(spent[1], 1))
            records.flush()
        blocks[COMPUTE].append(slowest_step_s(lambda: steps[STOCK](False), _STEPS))
        if dist.get_rank() == 0:
            print(f"round {number + 1} of {plan['blocks']}", file=sys.stderr, flush=True)
    buckets = models[STOCK]._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    report = {"blocks": blocks, "cpu": cpu, "idle": idle, "records": records.medians()}
    report["buckets"] = [int(size) for size in buckets.split(",")]
    dist.barrier()
    for attachment in attachments.values():
        attachment.detach()
    print(json.dumps({**report, "half_error": errors[HALF]}), flush=True)


def make_models(names: Iterable[str]) -> dict[str, Any]:
    """Return equal DistributedDataParallel models by name."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    models = {}
    for name in names:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(*(_make_layer() for _ in range(LAYERS)))
        models[name] = DistributedDataParallel(layers, bucket_cap_mb=BUCKET_MB)
    return models


def _make_layer() -> Any:
    """Return a layer that computes and then waits as long as it is told."""
    import torch

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, seconds: float) -> Any:
            ctx.seconds = seconds
            time.sleep(seconds / 3)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(ctx.seconds * 2 / 3)
            return grad, None

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.wait_s = torch.nn.Linear(WIDTH, WIDTH), 0.0

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.linear(x))
            wait: Any = Wait.apply
            return wait(y, self.wait_s) if self.wait_s else y

    return Layer()


def _attach(model: Any, name: str, runs: str) -> Any:
    """Let a model's gradients travel by `name` and return the attachment."""
    algorithm, wire = "" if name == CHOSEN else ALGORITHM, "bfloat16" if name == HALF else ""
    engine = "native" if name == WATCHED else "ringside"
    return attach_by(model, algorithm, wire, engine=engine, run_dir=Path(runs) / "run")


def attach_by(model: Any, algorithm: str, wire: str, engine: str = "ringside", **how: Any) -> Any:
    """Let a model's gradients travel by an algorithm and a wire dtype, and return the attachment."""
    import ringside

    with environment(RINGSIDE_ALGORITHM=algorithm, RINGSIDE_WIRE_DTYPE=wire):
        return ringside.attach(model, engine=engine, **how)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Within it these variables, which nobody else has set, have these values."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


class StepRecords:
    """What the session says of each model's steps; stock DDP, which nobody watches, leaves none.

    Attributes:
        now: Whose steps are under way.
    """

    def __init__(self, session: Any) -> None:
        self.now = ""
        self._found: dict[str, list[tuple[float, float]]] = {}
        self._session = session
        session.on_record(self._record)

    def flush(self) -> None:
        """Take in the last step, which is complete."""
        self._session.clock.flush()

    def clear(self) -> None:
        """Forget the steps so far."""
        self.flush()
        self._found.clear()

    def medians(self) -> dict[str, dict[str, float]]:
        """Return exposed and total synchronisation of a step by model, seconds."""
        return {
            name: {"exposed": median(exposed for exposed, _ in rows), "sync": median(sync for _, sync in rows)}
            for name, rows in self._found.items()
        }

    def _record(self, record: Any) -> None:
        self._found.setdefault(self.now, []).append((record.exposed_seconds, record.sync_seconds))


class Work(NamedTuple):
    """What forward and backward are made of.

    Args:
        batch: Samples.
        wait_s: How long they take beside what they compute: a third of it in forward, as matrix products would.
    """

    batch: int
    wait_s: float


def step_of(model: Any, work: Work) -> Step:
    """Return what takes a training step of a model."""
    import torch

    batch = work.batch
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + torch.distributed.get_rank())
    x, y = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)

    def step(synchronise: bool = True) -> None:
        with contextlib.nullcontext() if synchronise else model.no_sync():
            for layer in model.module:
                layer.wait_s = work.wait_s / LAYERS
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
        if synchronise:
            optimizer.step()

    return step


def balance(model: Any, compute: str, target_s: float) -> Work:
    """Return the work with which forward and backward take so long, the same on all ranks."""
    if compute == "wait":
        idle = step_of(model, Work(1, 0.0))
        alone_s = min(slowest_step_s(lambda: idle(False), 2) for _ in range(5))
        return Work(1, max(target_s - alone_s, 0.0))
    trial = step_of(model, Work(_TRIAL_BATCH, 0.0))
    compute_s = min(slowest_step_s(lambda: trial(False), 2) for _ in range(5))
    return Work(max(1, min(_MOST_BATCH, round(_TRIAL_BATCH * target_s / compute_s))), 0.0)


def settle(model: Any) -> None:
    """Take steps that compute nothing until all buckets' sizes are decided: what is measured is what comes after."""
    from ringside.pytorch.ddp.attached_model import own_hook

    hook = own_hook(model)
    assert hook is not None
    comm: Any = hook.reducer.communicator  # type: ignore[attr-defined]  # attached to our engine
    step = step_of(model, Work(1, 0.0))
    sizes = {(WIDTH + 1) * WIDTH * 4 * layers for layers in range(1, BUCKET_MB)}
    for _ in range(_MOST_TO_SETTLE):
        if all(comm.settled(size) for size in sizes):
            return
        step()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
