"""What a rank of `bench/real_runs/` runs: a small model, a number of steps, one fault.

    torchrun ... -m bench.real_runs.rank --steps 200 --inject slow:rank=1,factor=1.3,from_step=60 --model gpt

The engine and the run directory come from the environment (RINGSIDE_ENGINE, RINGSIDE_RUN_DIR). Rank 0 writes when each
step ended into `ends.json` in the run directory, seconds on its own clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from bench.common import make_parser
from torch import nn
from torch.distributed import PrefixStore
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.demo.corpus import Corpus
from ringside.demo.model import ByteGPT, Size
from ringside.demo.train import Agreement
from ringside.faults.inject import inject, parse_fault
from ringside.monitor.verdict import Verdict
from ringside.processes import die_with_parent

# So small that a run has hundreds of steps, and so large that computing fills most of one.
GPT = Size(width=128, layers=3, heads=4, context=128, batch=3)
TINY_PARAMETERS, TINY_WIDTH, TINY_BUCKET_MB = 300, 16, 1e-5
# `Waiting`: seconds of a sample, forward and backward together.
SAMPLE_SECONDS, WAITING_WIDTH = 0.004, 2048


class Waiting(nn.Module):
    """Takes its time without a processor, as a model on an accelerator does: a third forward, two thirds backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(GPT.context, WAITING_WIDTH)  # a megabyte of gradients

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return a number to minimise, float32 [], of int64 [batch, context + 1] bytes."""
        seconds = SAMPLE_SECONDS * len(text) / 3
        time.sleep(seconds)
        y: torch.Tensor = self.layer(text[:, : GPT.context].float() / 256)
        y.register_hook(lambda gradient: time.sleep(2 * seconds))
        return y.square().mean()


class Tiny(nn.Module):
    """Hundreds of tiny parameters whose gradients come all at once, each in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(0.1 * torch.randn(TINY_WIDTH)) for _ in range(TINY_PARAMETERS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return a number to minimise, float32 [], of int64 [batch, length] bytes."""
        x = (text[:, :TINY_WIDTH].float() - 64.0) / 64.0
        return ((x @ torch.stack(list(self.rows)).T).tanh() - 1.0).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": lambda: ByteGPT(GPT), "waiting": Waiting, "tiny": Tiny}


def main() -> None:
    """Train on this rank."""
    die_with_parent()
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    until = time.monotonic() + options.seconds
    ends = train(options.model, options.steps, options.inject, enough=lambda verdicts: time.monotonic() > until)
    if dist.get_rank() == 0:
        Path(os.environ["RINGSIDE_RUN_DIR"], "ends.json").write_text(json.dumps(ends))
    dist.destroy_process_group()


def train(
    name: str,
    steps: int,
    fault: str,
    *,
    engine: str | None = None,
    run_dir: str | None = None,
    enough: Callable[[list[Verdict]], bool] = lambda verdicts: False,
) -> list[float]:
    """Train a model in the process group there is, watched; return when each step ended, seconds.

    Args:
        name: One of `MODELS`.
        steps: How many.
        fault: What to inject, in words.
        engine, run_dir: As `attach()` takes them.
        enough: On rank 0, tells by the verdicts so far whether to stop a few steps from now.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        MODELS[name](), gradient_as_bucket_view=True, bucket_cap_mb=TINY_BUCKET_MB if name == "tiny" else None
    )
    session = ringside.attach(model, engine=engine, run_dir=run_dir).session
    assert session is not None
    corpus, generator = Corpus(None, rank, ranks, GPT.context), np.random.default_rng(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    injector = inject(parse_fault(fault, ranks), model, rank, burn=burn_of(name))
    store = PrefixStore("real", dist.distributed_c10d._get_default_store())
    agreement = Agreement(store, rank, steps, lambda: 0 if enough(session.verdicts) else steps)
    ends: list[float] = []
    while agreement.goes_on(step := len(ends)):
        injector.step(step)
        text = torch.from_numpy(corpus.batch(generator, injector.batch(GPT.batch)))
        optimizer.zero_grad()
        model(text).backward()
        optimizer.step()
        ends.append(time.perf_counter())
    session.end()
    return ends


def burn_of(name: str) -> Callable[[float], float] | None:
    """Return how a slow rank of a model does more work, for `inject`."""
    return sleep if name == "waiting" else None


def sleep(seconds: float) -> float:
    """Sleep; return for how long."""
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began


def parse() -> argparse.Namespace:
    parser = make_parser("bench.real_runs.rank", __doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so many, if that is earlier")
    parser.add_argument("--inject", default="none")
    parser.add_argument("--model", choices=MODELS, default="gpt")
    return parser.parse_args()


if __name__ == "__main__":
    main()
