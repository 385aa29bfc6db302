"""What the workers of bench/survive/ do: count samples, or train a small model, being killed now and then."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.survive.counting import Counting, consumed
from torch import Tensor, nn

from ringside.survive import Training, training
from ringside.survive.cluster.failpoints import Failpoint

PHASES = ("before_send", "after_send", "mid_chunk", "after_sum", "after_receive", "after_ack", "before_apply")
EVERY = 10  # steps from one kill to the next
# A step of the soak is so long at least, seconds, as one is that trains something: ten are time to come back.
PAUSE_S = 0.03


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Points and what is to be predicted of them, drawn with noise that is new every time."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.tensor([float(index % 7), float(index % 11), 1.0]) + 0.1 * torch.randn(3)
        return point, point.sum(0, keepdim=True).sin()


def small_model() -> nn.Module:
    """Return a model with dropout, running statistics and two layers, the same whenever it is made."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")


def arm(t: Training, step: Any, last: int) -> None:
    """Every EVERY steps have one of the members killed in the next step, in a phase by chance; one at least stays."""
    time.sleep(PAUSE_S)
    if step.number % EVERY == EVERY - 1 and len(step.members) > 1 and step.number < last - 1:
        chance = random.Random(step.number)
        victim, phase = chance.choice(step.members), chance.choice(PHASES)
        phase = "after_send" if phase == "after_ack" and victim == step.members[0] else phase
        if t.rank == victim:
            failpoints = t._driver.job.failpoints
            here = {"epoch": failpoints.epoch, "incarnation": failpoints.incarnation}
            failpoints.traps = (Failpoint(signal.SIGKILL, victim, phase, step.number + 1, **here),)


COUNTED: dict[str, Any] = {"loss_fn": consumed, "batch_size": 24, "micro_batches": 8, "mean": False}
"""How samples are counted: four steps to an epoch of 96, every sample once."""


def soak_counting(steps: int, rank: int, directory: Path) -> dict[str, Any]:
    """Count samples while ranks are killed; return what was counted wrongly."""
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with training(model, optimizer, range(96), steps=steps, **COUNTED) as t:
        for step in t:
            arm(t, step, steps)
        wanted = np.zeros(96)
        for number in range(t.step):
            np.add.at(wanted, t.samples.of_step(number), 1)
        wrong = int((model.counts.detach().numpy() != wanted).sum())
        commits = len(t.committed(steps))
        return {"step": t.step, "digest": t.digest(), "wrong": wrong, "commits": commits, "generation": _generation(t)}


def soak_training(steps: int, ranks: int, rank: int, directory: Path) -> dict[str, Any]:
    """Train while ranks are killed; return the digest of the state."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings: dict[str, Any] = {"loss_fn": squared, "batch_size": 64, "micro_batches": 8, "steps": steps}
    with training(model, optimizer, Noisy(), **settings) as t:
        losses = []
        for step in t:
            losses.append(step.loss)
            if ranks > 1:
                arm(t, step, steps)
        return {"step": t.step, "digest": t.digest(), "losses": [losses[0], losses[-1]], "generation": _generation(t)}


def healing(steps: int, rank: int, directory: Path) -> dict[str, Any]:
    """Count samples; return when each step was committed here, seconds on the host's clock."""
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with training(model, optimizer, range(96), steps=steps, **COUNTED) as t:
        return {"times": [(step.number, time.monotonic(), len(step.members)) for step in t]}


def uneven(steps: int, slow: float, mode: str, rank: int, directory: Path) -> dict[str, Any]:
    """Count samples, every micro-batch taking 10 ms, on rank 1 `slow` times as long; return steps and rebalances."""
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def slowly(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(0.01 * (slow if rank == 1 else 1.0))
        return consumed(model, batch)

    settings: dict[str, Any] = {"batch_size": 24, "micro_batches": 12, "mean": False, "steps": steps}
    with training(model, optimizer, range(96), loss_fn=slowly, on_straggler=mode, **settings) as t:
        seconds = [step.seconds for step in t]
        changes = [(change.after, change.predicted, measured) for change, measured in t.rebalances]
        return {"seconds": seconds, "rebalances": changes, "digest": t.digest()}


def gpt(steps: int, size: str, rank: int, directory: Path) -> dict[str, Any]:
    """Train the demo's GPT; return seconds per step and what they were spent on."""
    from ringside.demo.corpus import Corpus
    from ringside.demo.model import SIZES, ByteGPT
    from ringside.demo.survive import Windows, summed_loss
    from ringside.demo.train import make_optimizer

    shape = SIZES[size]
    torch.manual_seed(0)
    model = ByteGPT(shape)
    dataset = Windows(Corpus(None, 0, 1, shape.context), shape.context)
    settings: dict[str, Any] = {
        "loss_fn": summed_loss,
        "batch_size": 2 * shape.batch,
        "micro_batches": 2,
        "steps": steps,
    }
    with training(model, make_optimizer(model), dataset, **settings) as t:
        seconds = []
        for step in t:
            seconds.append(step.seconds)
            if step.number == steps // 3:
                t._driver.spent.clear()
        return {"seconds": seconds[steps // 3 + 1 :], "spent": dict(t._driver.spent)}


def _generation(t: Training) -> int:
    record = t._driver.member.newest
    return 0 if record is None else record.number
