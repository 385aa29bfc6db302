"""How much slower a training step is after its rank has waited: that of `bench/monitor/price.py`, in one process.

Before each measured step the process sleeps, or counts the time away without touching memory, for some milliseconds;
one more step then warms it up again. Conditions come in random order. What a late rank's peers do while they wait is
the first, what a spinning engine would do the second.

    python -m bench.monitor.after_waiting [--seconds 20] [--beside] [--json]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from bench.common import make_parser, markdown_table
from bench.real_runs.rank import GPT, MODELS

from ringside.processes import die_with_parent

WAITS_MS = (2, 6, 12, 20)
WARM_STEPS = 20

Step = Callable[[], float]


def main() -> int:
    """Measure and print medians."""
    parser = make_parser("bench.monitor.after_waiting", __doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure (%(default)s)")
    parser.add_argument("--beside", action="store_true", help="a second process trains at the same time")
    parser.add_argument("--json", action="store_true", help="print the medians as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.beside:
        with training_beside(make_trainer(1)):
            found = measure_steps(make_trainer(0), args.seconds)
    else:
        found = measure_steps(make_trainer(0), args.seconds)
    print(json.dumps(found, indent=2) if args.json else medians_table(found))
    return 0


def make_trainer(seed: int) -> Step:
    """Return what trains one step of a model of its own and returns how long that took, seconds."""
    torch.manual_seed(seed)
    model = MODELS["gpt"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(0, 255, (GPT.batch, GPT.context + 1))

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(text).backward()
        optimizer.step()
        return time.perf_counter() - began

    return step


@contextmanager
def training_beside(step: Step) -> Iterator[None]:
    """Within it a child process trains without a pause."""
    child = os.fork()
    if child == 0:
        die_with_parent()
        while True:
            step()
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def measure_steps(step: Step, seconds: float) -> dict[str, float]:
    """Return medians of a step in milliseconds, by what went before it."""
    cases = [("nothing", 0), *((how, wait) for how in ("sleep", "spin") for wait in WAITS_MS)]
    took: dict[str, list[float]] = {f"{how} {wait}": [] for how, wait in cases}
    for _ in range(WARM_STEPS):
        step()
    generator, end = np.random.default_rng(0), time.monotonic() + seconds
    while time.monotonic() < end:
        for index in generator.permutation(len(cases)):
            how, wait = cases[index]
            pass_time(how, wait / 1e3)
            took[f"{how} {wait}"].append(step())
            step()
    return {case: 1e3 * float(np.median(times)) for case, times in took.items()}


def pass_time(how: str, seconds: float) -> None:
    """Let so many seconds go by."""
    until = time.perf_counter() + seconds
    if how == "sleep":
        time.sleep(seconds)
    while time.perf_counter() < until:
        pass


def medians_table(found: dict[str, float]) -> str:
    """Return the medians as a Markdown table."""
    usual = found["nothing 0"]
    lines = [[f"{case} ms", f"{took:.2f} ms", f"{100 * (took / usual - 1):.1f}%"] for case, took in found.items()]
    return markdown_table(["before the step", "the step", "more"], lines)


if __name__ == "__main__":
    sys.exit(main())
