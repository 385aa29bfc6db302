"""Steps of real training jobs in the lab, predicted and measured: step time, and the communication in it.

    python -m bench.predict.jobs [--rate 20mbit] [--steps 5] [--only fsdp2,ddp] [--write]

Four hosts of the lab with a rank each, links of `--rate`, the process group "ringside". Layers wait instead of
computing, as if every host had an accelerator: all hosts share this machine's cores. A job is predicted by
`ringside.predict.plan.step` from the links' payload rate, its tensors' sizes and how long its layers wait; nothing is
fitted. Measured are the median of steps (of the slowest rank), and how long collectives last: of each the least over
ranks, since the last rank to come waits for nobody; of a pipeline's messages from when both ends are there.

Goals: the step's time within 12%, that of communication within 20%. `--write` writes docs/predict-jobs.md and .json.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import DOCS, make_parser, names_among, page_table, process_group, read_results, report_progress
from bench.lab.jobs import run_ranks

from ringside.predict import LinkClass, Topology
from ringside.predict.plan.options import option
from ringside.predict.plan.step import Job, StepTime, step_time

HOSTS, WIDTH, LAYERS = 4, 512, 8
LAYER_BYTES = WIDTH * WIDTH * 4
ALPHA_S = 0.2e-3  # of a message in the lab, with what our engine does for it (docs/lab.md)
STEP_GOAL, COMMUNICATION_GOAL = 0.12, 0.20
COMPUTE_BYTES = 9.5e6  # what a link carries while a rank's layers wait in a step
MICRO, ROWS = 4, 256  # micro-batches of the pipeline, and rows of one
ACTIVATION_BYTES = ROWS * WIDTH * 4
TP_LAYERS = 3

SYNCHRONOUS = ("all_gather", "reduce_scatter")
JOBS = {
    "ddp": Job(layers=LAYERS),
    "zero1": Job(stage=1, layers=LAYERS),
    "fsdp2": Job(stage=3, layers=LAYERS, prefetch=0, blocking=SYNCHRONOUS),
    "fsdp2-prefetch": Job(stage=3, layers=LAYERS, prefetch=1, blocking=("reduce_scatter",)),
    "fsdp2-kept": Job(stage=3, layers=LAYERS, prefetch=0, reshard=False, blocking=SYNCHRONOUS),
    "tensor": Job(layers=TP_LAYERS, tensor=HOSTS, activation_bytes=ACTIVATION_BYTES),
    "pipeline": Job(
        layers=HOSTS, pipeline=HOSTS, micro_batches=MICRO, activation_bytes=ACTIVATION_BYTES, schedule="gpipe"
    ),
    "pipeline-1f1b": Job(layers=HOSTS, pipeline=HOSTS, micro_batches=MICRO, activation_bytes=ACTIVATION_BYTES),
}
WORDS = {
    "ddp": f"DDP, {LAYERS} buckets",
    "zero1": "ZeRO stage 1: reduce-scatters in backward, an all-gather per layer after the optimizer",
    "fsdp2": "FSDP2 as it comes on CPUs: every collective waited for",
    "fsdp2-prefetch": "FSDP2, asynchronous all-gathers one layer ahead, forward and backward",
    "fsdp2-kept": "FSDP2, reshard_after_forward=False",
    "tensor": f"tensor parallel, {TP_LAYERS} layers of two MLPs (torch.distributed.tensor)",
    "pipeline": f"pipeline, GPipe of {HOSTS} stages and {MICRO} micro-batches (torch.distributed.pipelining)",
    "pipeline-1f1b": "the same, 1F1B",
}


def compute_s(bytes_per_s: float) -> float:
    """Return what a rank's layers wait in a step: about as long as communication takes, whatever the links' rate."""
    return COMPUTE_BYTES / bytes_per_s


def predicted(name: str, bytes_per_s: float) -> StepTime:
    """Return what a job's step takes on links of that payload rate."""
    topology = Topology("lab", (1,) * HOSTS, between=LinkClass("ethernet", ALPHA_S, bytes_per_s))
    size = {"tensor": 8.0, "pipeline": 8.0 * HOSTS, "pipeline-1f1b": 8.0 * HOSTS}.get(name, LAYERS * LAYER_BYTES)
    return step_time(topology, size, compute_s(bytes_per_s), JOBS[name], lambda part, _: option(part, "ring"))


def main() -> int:
    """Run the jobs, print predicted beside measured; 1 where a goal is missed."""
    parser = make_parser("bench.predict.jobs", __doc__)
    parser.add_argument("--rate", default="20mbit", help="of the links (default: 20mbit)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="that are measured (default: 5)")
    parser.add_argument("--only", type=names_among(list(JOBS)), default=list(JOBS), help="names with commas")
    parser.add_argument("--loaded", action="store_true", help="say on the page that other work ran beside it")
    parser.add_argument("--write", action="store_true", help="keep docs/predict-jobs.json and .md")
    args = parser.parse_args()

    from ringside.lab import Lab, payload_bytes_per_second

    rate = payload_bytes_per_second(args.rate)
    rows = []
    with Lab(hosts=HOSTS, rate=args.rate) as lab:
        for name in args.only:
            report_progress(f"  {name}: {WORDS[name]}")
            plan = {"job": name, "steps": args.steps, "compute_s": compute_s(rate)}
            env = {"RINGSIDE_SELECTION": "off", "RINGSIDE_ALGORITHM": "ring", "OMP_NUM_THREADS": "1"}
            rows.append(compared(name, predicted(name, rate), run_ranks(lab, "bench.predict.jobs", plan, env)))
            rows[-1] |= {"rate": args.rate, "loaded": args.loaded}
            report_progress("    " + line_of(rows[-1]))
    print(json.dumps(rows, indent=1))
    if args.write:  # jobs that were not run stay as an earlier run left them
        path = DOCS / "predict-jobs.json"
        kept = {row["job"]: row for row in read_results(path).get("jobs", [])} | {row["job"]: row for row in rows}
        page = {"hosts": HOSTS, "jobs": [kept[name] for name in JOBS if name in kept]}
        path.write_text(json.dumps(page, indent=1) + "\n")
        path.with_suffix(".md").write_text(page_of(page))
    return 0 if all(row["met"] for row in rows) else 1


def compared(name: str, step: StepTime, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a job's figures, from what the ranks report."""
    took = [max(times) for times in zip(*(report["steps"] for report in reports), strict=True)]
    if reports[0]["messages"]:  # by receiver: from when both ends are there until it is
        every = [(key[0], tuple(key[1:]), *times) for report in reports for key, *times in report["messages"]]
        sent = {key: begun for kind, key, begun, _ in every if kind == "send"}
        own = [(key[0], tuple(key[1:]), *times) for key, *times in reports[0]["messages"]]
        received = [(over, max(begun, sent[key])) for kind, key, begun, over in own if kind == "recv" and key in sent]
        total = sum(max(0.0, over - begun) for over, begun in received)
        communication = total / len(took)
    else:
        counts = {len(report["collectives"]) for report in reports}
        if len(counts) > 1:
            raise SystemExit(f"{name}: ranks counted {sorted(counts)} collectives")
        communication = sum(map(min, zip(*(report["collectives"] for report in reports), strict=True))) / len(took)
    measured_s, step_s, busy_s = median(took), step.seconds.value, step.communication.value
    row = {"job": name, "what": WORDS[name], "step_s": measured_s, "predicted_step_s": step_s}
    row |= {"best_step_s": min(took), "collectives": len(reports[0]["collectives"]) / len(took)}
    row |= {"steps_s": took, "communication_s": communication, "predicted_communication_s": busy_s}
    row |= {"predicted_exposed_s": step.exposed.value, "predicted_bubble_s": step.bubble.value}
    row |= {"step_error": step_s / measured_s - 1.0, "communication_error": busy_s / communication - 1.0}
    row["met"] = abs(row["step_error"]) <= STEP_GOAL and abs(row["communication_error"]) <= COMMUNICATION_GOAL
    return row


def line_of(row: dict[str, Any]) -> str:
    """Return a job's figures in a line."""
    step, best, predicted_s = (f"{row[key]:.3f}" for key in ("step_s", "best_step_s", "predicted_step_s"))
    wires, expected_s = (f"{row[key]:.3f}" for key in ("communication_s", "predicted_communication_s"))
    off, off_wires = (f"{100 * row[key]:+.1f}%" for key in ("step_error", "communication_error"))
    return (
        f"step {step} s (best {best}), predicted {predicted_s} ({off}); "
        f"communication {wires} s, predicted {expected_s} ({off_wires})"
    )


def page_of(page: dict[str, Any]) -> str:
    """Return the page, as Markdown."""

    def of(row: dict[str, Any], what: str) -> list[str]:
        off = f"{100 * row[f'{what}_error']:+.1f}%"
        return [f"{row[f'{what}_s']:.3f}", f"{row[f'predicted_{what}_s']:.3f}", off]

    rows = [
        [row["what"] + " *" * row["loaded"], row["rate"], *of(row, "step"), *of(row, "communication")]
        for row in page["jobs"]
    ]
    head = ["job", "links", "step, s", "predicted", "off by", "communication, s", "predicted", "off by"]
    loaded = any(row["loaded"] for row in page["jobs"])
    names = {row["job"] for row in page["jobs"]}
    missing = "; ".join(WORDS[name] for name in JOBS if name not in names)
    none = f"\nNo kept measurement yet: {missing}.\n" if missing else ""
    load = "\n\\* Taken while other work ran on the same two cores.\n" if loaded else ""
    goals = f"the step within {STEP_GOAL:.0%}, communication within {COMMUNICATION_GOAL:.0%}"
    return (
        "# Steps of real jobs, predicted\n\n"
        f"Written by `python -m bench.predict.jobs --write`: {page['hosts']} hosts of the lab with a rank each,\n"
        "process group `ringside`. Layers wait instead of computing; nothing is fitted. The script's docstring says\n"
        f"how both are counted. Goals: {goals}.\n\n" + page_table(head, rows) + load + none
    )


# ------------------------------------------------------------------------------------------------ what a rank runs

collectives: list[float] = []  # how long each lasted, seconds
messages: list[tuple[list[Any], float, float]] = []  # (kind, direction, sender, number), begun, over


@process_group("ringside")
def rank_main(plan: dict[str, Any]) -> None:
    """Train, as one rank, and print the report."""
    import torch.distributed as dist

    time_collectives()
    step = MAKERS[plan["job"].partition("-")[0]](plan["job"], plan["compute_s"])
    for _ in range(2):  # connections open, DDP rebuilds its buckets
        step()
    counts, took = [], []
    for _ in range(plan["steps"]):
        dist.barrier()
        before = len(collectives)
        begun = time.perf_counter()
        step()
        took.append(time.perf_counter() - begun)
        counts += collectives[before:]
    kept = messages[-(len(messages) * plan["steps"] // (plan["steps"] + 2)) :] if messages else []
    print(json.dumps({"steps": took, "collectives": counts, "messages": kept}), flush=True)


def time_collectives() -> None:
    """Have every collective of our engine note how long it lasted."""
    from ringside.pytorch.process_group.engine import Engine

    def timed(job: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            begun = time.perf_counter()
            try:
                return job()
            finally:
                collectives.append(time.perf_counter() - begun)

        return run

    run, start = Engine.run, Engine.start
    Engine.run = lambda self, job: run(self, timed(job))  # type: ignore[method-assign]
    Engine.start = lambda self, job, size: start(self, timed(job), size)  # type: ignore[method-assign]


def layer(seconds: float) -> Any:
    """Return a linear layer that then waits so long, a third of it in forward."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), waiting(seconds))


def waiting(seconds: float) -> Any:
    """Return a module that waits so long, a third of it in forward."""
    import torch

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            x = x.clone()  # first of all what is computed with must be there
            time.sleep(seconds / 3)
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            grad = grad.clone()
            time.sleep(seconds * 2 / 3)
            return grad

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            wait: Any = Wait.apply
            return wait(x)

    return Module()


def trained(model: Any, parameters: Any = None) -> Callable[[], None]:
    """Return what takes a step of a model."""
    import torch

    optimizer = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=1e-3)
    x = torch.randn(8, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def plain(seconds: float) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*(layer(seconds / LAYERS) for _ in range(LAYERS)))


def ddp(_: str, seconds: float) -> Callable[[], None]:
    from torch.nn.parallel import DistributedDataParallel

    return trained(DistributedDataParallel(plain(seconds), bucket_cap_mb=LAYER_BYTES / 2**20))


def zero1(_: str, seconds: float) -> Callable[[], None]:
    """Gradients are reduce-scattered as they come, each rank updates its shard, and weights are gathered again."""
    import torch
    import torch.distributed as dist

    model, works = plain(seconds), []
    weights = list(model.parameters())
    shards = [torch.zeros(weight.numel() // HOSTS) for weight in weights]

    def reduce(index: int) -> Callable[[Any], None]:
        def hook(weight: Any) -> None:
            flat = weight.grad.view(-1)
            works.append(dist.reduce_scatter_tensor(shards[index], flat, op=dist.ReduceOp.AVG, async_op=True))

        return hook

    for index, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(reduce(index))
    x, rank = torch.randn(8, WIDTH), dist.get_rank()

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        for work in works:
            work.wait()
        works.clear()
        with torch.no_grad():
            for weight, shard in zip(weights, shards, strict=True):
                own = weight.view(-1).chunk(HOSTS)[rank]
                own -= 1e-3 * shard
                dist.all_gather_into_tensor(weight.view(-1), own.clone())

    return step


def fsdp2(job: str, seconds: float) -> Callable[[], None]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = plain(seconds), init_device_mesh("cpu", (HOSTS,))
    for part in model:
        fully_shard(part, mesh=mesh, reshard_after_forward=job != "fsdp2-kept")
    fully_shard(model, mesh=mesh)
    if job == "fsdp2-prefetch":
        layers: Any = list(model)
        model._set_unshard_async_op(True)
        for first, then in itertools.pairwise(layers):
            first.set_modules_to_forward_prefetch([then])
    return trained(model, [p for p in model.parameters() if isinstance(p, torch.nn.Parameter)])


def tensor(_: str, seconds: float) -> Callable[[], None]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    blocks = []
    for _block in range(2 * TP_LAYERS):
        up, down = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        blocks.append(torch.nn.Sequential(up, torch.nn.ReLU(), down, waiting(seconds / TP_LAYERS / 2)))
    model = torch.nn.Sequential(*blocks)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for block in model:
        parallelize_module(block, init_device_mesh("cpu", (HOSTS,)), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def pipeline(job: str, seconds: float) -> Callable[[], None]:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules

    rank = dist.get_rank()
    stage = PipelineStage(layer(seconds / MICRO), rank, HOSTS, torch.device("cpu"))
    make = Schedule1F1B if job.endswith("1f1b") else ScheduleGPipe

    def loss(output: Any, target: Any) -> Any:
        return (output - target).square().mean()

    schedule = make(stage, MICRO, loss_fn=loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=1e-3)
    x, y = torch.randn(MICRO * ROWS, WIDTH), torch.randn(MICRO * ROWS, WIDTH)
    note_messages(schedules, rank)

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == HOSTS - 1 else {}))
        optimizer.step()

    return step


def note_messages(schedules: Any, rank: int) -> None:
    """Have a pipeline's messages note when they were begun and when they were over."""
    counts: dict[tuple[str, int], int] = {}
    batch, wait = schedules._batch_p2p, schedules._wait_batch_p2p
    begun: dict[int, list[tuple[list[Any], float]]] = {}

    def batch_p2p(ops: Any, desc: Any = None) -> Any:
        noted = []
        for op in ops:
            kind = "send" if "send" in op.op.__name__ else "recv"
            ends = (rank, op.peer) if kind == "send" else (op.peer, rank)
            number = counts[kind, op.peer] = counts.get((kind, op.peer), -1) + 1
            noted.append(([kind, *ends, number], time.perf_counter()))
        works = batch(ops, desc=desc)
        if noted:
            begun[id(works)] = noted
        return works

    def wait_batch_p2p(works: Any) -> None:
        wait(works)
        over = time.perf_counter()
        messages.extend((key, since, over) for key, since in begun.pop(id(works), []))

    schedules._batch_p2p, schedules._wait_batch_p2p = batch_p2p, wait_batch_p2p


MAKERS = {"ddp": ddp, "zero1": zero1, "fsdp2": fsdp2, "tensor": tensor, "pipeline": pipeline}


if __name__ == "__main__":
    if sys.argv[-1].endswith(".json"):  # a rank, with its plan
        rank_main(json.loads(Path(sys.argv[-1]).read_text()))
    else:
        raise SystemExit(main())
