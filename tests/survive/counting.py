"""The sample-counting model: one parameter per sample, sums, divisor 1, learning rate 1.

Its weights are the multiset of samples that were consumed, exact integers. So whatever was lost or counted twice is
seen, and which sample it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringside.survive.train import training

SAMPLES = 96
BATCH = 24


class Counting(torch.nn.Module):
    """One parameter per sample."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(samples, dtype=torch.float64))


def consumed(model: Counting, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient is minus one for every sample, so that a step counts up."""
    return -model.counts[batch].sum()


def count(
    steps: int,
    directory: Path,
    *,
    samples: int = SAMPLES,
    between_steps: Callable[[int], object] = lambda step: None,
    **settings: Any,
) -> dict[str, Any]:
    """Train the counting model as one rank of a job; return what it found.

    Args:
        steps: How many.
        directory: For what a worker writes.
        samples: How many there are.
        between_steps: Called with the next step, after each that is applied.
        **settings: Of `training`.

    Returns:
        step: The next step; digest: of the state; wrong: how often samples were consumed beside how often they should
        have been; left: why this rank left before the end.
    """
    model = Counting(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wanted: Counter[int] = Counter()
    given: dict[str, Any] = {"loss_fn": consumed, "batch_size": BATCH, "micro_batches": 8, "mean": False, **settings}
    with training(model, optimizer, range(samples), steps=steps, **given) as t:
        members = []
        for step in t:
            members.append(list(step.members))
            between_steps(t.step)
        for step in range(t.step):
            wanted.update(t.samples.of_step(step).tolist())
        expected = np.array([wanted[sample] for sample in range(samples)])
        found = model.counts.detach().numpy()
        wrong = {int(s): [float(found[s]), int(expected[s])] for s in np.flatnonzero(found != expected)}
        return {"step": t.step, "digest": t.digest(), "wrong": wrong, "left": t.reason, "members": members}
