"""A job whose modules replace their buffers; prints what became of it as JSON. test_buffers_of_survive.py runs it."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tests.survive.herd import Store, run_job
from tests.survive.real_cases import warm_up

from ringside.survive.train import training

STEPS = 24


class Average(torch.nn.Module):
    """Keeps running statistics, in place or by replacing its buffers; one of them is in no state_dict."""

    mean: torch.Tensor
    hidden: torch.Tensor
    calls: torch.Tensor
    begun: torch.Tensor

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))
        self.register_buffer("hidden", torch.zeros(4), persistent=False)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        hidden = 0.5 * self.hidden + y.detach().sum(0)
        if self.replaces:
            self.mean, self.calls, self.begun, self.hidden = mean, self.calls + 1, self.begun | True, hidden
            self.cache = torch.ones(len(x))
        else:
            self.mean.copy_(mean)
            self.calls.add_(1)
            self.begun.fill_(True)
            self.hidden.copy_(hidden)
        return y - self.mean - self.hidden.tanh() * self.begun


class Points:
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def train(replaces: bool, rank: int, directory: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Average(replaces)
    known = dict(model.named_buffers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, batch: model(batch).pow(2).sum()  # noqa: E731
    with training(model, optimizer, Points(), loss_fn=loss, batch_size=16, micro_batches=4, steps=STEPS) as t:
        for _ in t:
            time.sleep(0.05)  # so that whoever died is back before the last step
        same = all(dict(model.named_buffers())[name] is buffer for name, buffer in known.items())
        return {"digest": t.digest(), "calls": int(model.calls), "begun": bool(model.begun), "same": same}


def main(ranks: list[str]) -> None:
    warm_up()
    for replaces, count, trap in ((False, 1, ""), (True, 1, ""), (True, 2, "kill:rank=1,step=3,phase=after_send")):
        store = Store()
        with tempfile.TemporaryDirectory(prefix="ringside-survive-") as path:
            report = run_job(
                store,
                f"{replaces}{count}",
                count,
                functools.partial(train, replaces),
                Path(path),
                trap=trap,
                limit_s=30,
            )
        store.close()
        print(json.dumps({"ended": report.ended, "errors": report.errors, "deaths": len(report.deaths)}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
