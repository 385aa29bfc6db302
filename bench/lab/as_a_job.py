"""The default choice beside stock Gloo as a job calls it, not in a loop: 4 hosts x 2 ranks at 1 Gbit/s.

Three ways, each with a communicator that has kept nothing, the slowest rank's time of every call:

- *apart*: before each call a barrier and an all-reduce of the same size over stock Gloo, the median after 20 calls;
- *mixed*: sizes in random order with work in between, the mean of the first calls of each size, trials among them;
- *steps*: those of a transformer of 2.4 million parameters, attached by default, and one of stock DDP's after each.

`python -m bench.lab.as_a_job PLAN` is what a rank runs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.common import Floor, process_group, report_progress
from bench.lab.jobs import DEFAULT, KB, MB, run_ranks
from bench.lab.report import Row, Section, size_words

from ringside.lab import Lab

HOSTS, PER_HOST, RATE = 4, 2, "1gbit"
SIZES = (4, KB, 4 * KB, 16 * KB, 64 * KB, MB, 4 * MB, 16 * MB)
STOCK = "gloo"
WARM, COUNTED = 20, 24  # calls of a size, apart
FIRST = (5, 20, 100)  # calls of a size, mixed
BLOCKS = ((0, 15), (15, 45), (50, 150))  # steps
STEPS_A_TURN = 5
MOST_SLOWER, LEAST_FASTER, MOST_TRIED = 1.05, 3.0, 1.02
FASTER = (KB, 64 * KB)  # from and to which size the default must be that much faster
WIDTH, LAYERS, TOKENS, WORDS = 192, 5, 32, 1024  # of the transformer
_WORK = 64  # rows and columns of what is multiplied between calls


def as_a_job(repeat: int, way: str) -> Section:
    """Compare the default with stock Gloo.

    Args:
        repeat: Jobs; their times are put together.
        way: `apart`, `mixed` or `steps`.
    """
    jobs: list[list[dict[str, Any]]] = []
    for number in range(repeat):
        report_progress(f"  as-a-job, {way}: {HOSTS} hosts x {PER_HOST}, job {number + 1} of {repeat}")
        with Lab(hosts=HOSTS, ranks_per_host=PER_HOST, rate=RATE) as lab, tempfile.TemporaryDirectory() as runs:
            plan = {"way": way, "runs": runs, "sizes": SIZES, "seed": number}
            jobs.append(run_ranks(lab, "bench.lab.as_a_job", plan, {"RINGSIDE_SELECTION": "fresh"}))
    return _SECTIONS[way](jobs)


def slowest(reports: Sequence[dict[str, Any]], key: str, contender: str) -> list[float]:
    """Return what each call took the slowest rank, seconds."""
    calls = zip(*(report[key][contender] for report in reports), strict=True)
    return [max(end - start for start, end in call) for call in calls]


def from_last_start(reports: Sequence[dict[str, Any]], key: str, contender: str) -> list[float]:
    """Return what each call took from the last rank's start to the last rank's end, seconds."""
    calls = zip(*(report[key][contender] for report in reports), strict=True)
    return [max(end for _, end in call) - max(start for start, _ in call) for call in calls]


def _apart(jobs: Sequence[Sequence[dict[str, Any]]]) -> Section:
    section = Section(
        "as-a-job-apart",
        f"Calls apart from each other, {HOSTS} hosts x {PER_HOST} ranks, {RATE}, {len(jobs)} jobs: median of "
        f"{COUNTED} calls after {WARM}",
        [
            ("size", "size", "s"),
            ("Gloo, ms", "gloo_ms", ".3f"),
            ("default, ms", "default_ms", ".3f"),
            ("default/Gloo", "ratio", ".3f"),
            ("from last start", "last_ratio", ".3f"),
            ("chosen", "chosen", "s"),
        ],
    )
    for size in SIZES:
        stock_s, ours_s, stock_last_s, ours_last_s = (
            median(s for reports in jobs for s in times(reports, str(size), name)[WARM:])
            for times in (slowest, from_last_start)
            for name in (STOCK, DEFAULT)
        )
        chosen = ", ".join(dict.fromkeys(reports[0]["chosen"][str(size)] for reports in jobs))
        row: Row = {"size": size_words(size), "size_bytes": size, "chosen": chosen}
        row["last_ratio"] = ours_last_s / stock_last_s
        section.rows.append(row | {"gloo_ms": 1e3 * stock_s, "default_ms": 1e3 * ours_s, "ratio": ours_s / stock_s})
        most = 1 / LEAST_FASTER if FASTER[0] <= size <= FASTER[1] else MOST_SLOWER
        section.floors.append(
            Floor(f"apart, {size_words(size)}: default's time by Gloo's", ours_s / stock_s, most=most)
        )
    section.notes = [
        "The ranks leave the all-reduce before a call apart from each other, and the first one's time has the wait for "
        "the last one in it, whoever is called: `from last start` is without that."
    ]
    return section


def _mixed(jobs: Sequence[Sequence[dict[str, Any]]]) -> Section:
    section = Section(
        "as-a-job-mixed",
        f"Sizes mixed, with work in between, {HOSTS} hosts x {PER_HOST} ranks, {RATE}, {len(jobs)} jobs: default's "
        "time by Gloo's, means of the first calls of a size",
        [("size", "size", "s"), *((f"first {n}", f"first_{n}", ".3f") for n in FIRST), ("Gloo, ms", "gloo_ms", ".3f")],
    )
    for size in SIZES:
        row: Row = {"size": size_words(size), "size_bytes": size}
        for first in FIRST:
            took = {
                name: mean(s for reports in jobs for s in slowest(reports, str(size), name)[:first])
                for name in (STOCK, DEFAULT)
            }
            row |= {f"first_{first}": took[DEFAULT] / took[STOCK], "gloo_ms": 1e3 * took[STOCK]}
        section.rows.append(row)
        what = f"mixed, {size_words(size)}: default's time by Gloo's, mean of {FIRST[-1]}"
        section.floors.append(Floor(what, row[f"first_{FIRST[-1]}"], most=MOST_SLOWER))
    return section


def _steps(jobs: Sequence[Sequence[dict[str, Any]]]) -> Section:
    section = Section(
        "as-a-job-steps",
        f"DDP steps of a transformer, {jobs[0][0]['parameters'] / 1e6:.1f} million parameters, {HOSTS} hosts x "
        f"{PER_HOST} ranks, {RATE}, {len(jobs)} jobs: attached by default, and stock DDP, {STEPS_A_TURN} steps in turn",
        [
            ("steps", "steps", "s"),
            ("stock, ms", "gloo_ms", ".1f"),
            ("default, ms", "default_ms", ".1f"),
            ("default/stock", "ratio", ".3f"),
        ],
    )
    for first, last in BLOCKS:
        took = {
            name: mean(s for reports in jobs for s in slowest(reports, "steps", name)[first:last])
            for name in (STOCK, DEFAULT)
        }
        row: Row = {"steps": f"{first} to {last}", "gloo_ms": 1e3 * took[STOCK], "default_ms": 1e3 * took[DEFAULT]}
        section.rows.append(row | {"ratio": took[DEFAULT] / took[STOCK]})
        if first:
            what = f"steps {first} to {last}: default's time by stock's"
            section.floors.append(Floor(what, section.rows[-1]["ratio"], most=MOST_TRIED))
    return section


_SECTIONS = {"apart": _apart, "mixed": _mixed, "steps": _steps}

# ------------------------------------------------------------------------------------------------ what a rank runs


@process_group()
def main(plan: dict[str, Any]) -> None:
    """Call all-reduces or train, as one rank, and print what each call took here."""
    print(json.dumps(_train(plan) if plan["way"] == "steps" else _call(plan)), flush=True)


def _call(plan: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import ringside

    apart = plan["way"] == "apart"
    tensors = {size: torch.zeros(size // 4) for size in plan["sizes"]}
    order = [size for size in tensors for _ in range(WARM + COUNTED if apart else FIRST[-1])]
    if not apart:
        random.Random(plan["seed"]).shuffle(order)  # alike on all ranks
    report: dict[str, Any] = {str(size): {STOCK: [], DEFAULT: []} for size in tensors}
    work = torch.ones(_WORK, _WORK)
    with ringside.communicator() as comm:
        calls: dict[str, Callable[[Any], Any]] = {STOCK: dist.all_reduce, DEFAULT: comm.all_reduce}
        for tensor in tensors.values():
            dist.all_reduce(tensor)  # stock Gloo's first call of all connects
        for number, size in enumerate(order):
            for name in (STOCK, DEFAULT) if number % 2 else (DEFAULT, STOCK):
                if apart:
                    dist.barrier()
                    dist.all_reduce(tensors[size])
                else:
                    work @ work
                began = time.perf_counter()
                calls[name](tensors[size])
                report[str(size)][name].append((began, time.perf_counter()))
            if comm.rank == 0 and number % len(order[::8]) == 0:
                report_progress(f"call {number} of {len(order)}")
        words = {size: comm.explain(size) for size in tensors}
        report["chosen"] = {str(size): text.partition(": ")[2].partition(".")[0] for size, text in words.items()}
        if comm.rank == 0:
            report_progress("\n".join(words.values()))
    return report


def _train(plan: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ringside

    models = {}
    for name in (STOCK, DEFAULT):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        parts = torch.nn.Embedding(WORDS, WIDTH), torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        models[name] = DistributedDataParallel(torch.nn.Sequential(*parts))
    attachment = ringside.attach(models[DEFAULT], run_dir=Path(plan["runs"]) / "run")
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}
    torch.manual_seed(1 + dist.get_rank())
    words = torch.randint(WORDS, (1, TOKENS))
    steps: dict[str, list[tuple[float, float]]] = {STOCK: [], DEFAULT: []}
    for turn in range(BLOCKS[-1][1] // STEPS_A_TURN):
        for name in (STOCK, DEFAULT) if turn % 2 else (DEFAULT, STOCK):
            dist.barrier()
            for _ in range(STEPS_A_TURN):
                began = time.perf_counter()
                optimizers[name].zero_grad()
                models[name](words).square().mean().backward()
                optimizers[name].step()
                steps[name].append((began, time.perf_counter()))
    report = {"steps": steps, "parameters": sum(p.numel() for p in models[STOCK].parameters())}
    attachment.detach()
    return report


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
