"""A worker of bench/survive/lab.py: counts samples, and says on stdout how long it took to heal and what it counted."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from tests.survive.counting import SAMPLES, Counting, consumed

from ringside.survive import training

CUT_AT = 50  # the step at which the link is cut, in the cases for that


def report(**values: object) -> None:
    """Write a line of JSON for `lab.py` at once."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main(steps: int, reproducible: bool) -> None:
    torch.set_num_threads(1)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"batch_size": 24, "micro_batches": 8, "mean": False, "reproducible": reproducible}
    with training(model, optimizer, range(SAMPLES), loss_fn=consumed, steps=steps, **settings) as t:
        before, whole, expected, longest, step = time.monotonic(), 0, np.zeros(SAMPLES), 0.0, None
        for step in t:
            now = time.monotonic()
            longest = max(longest, now - before) if step.number > CUT_AT else 0.0
            if step.number == CUT_AT and t.rank == 0:
                report(event="cut", rank=t.rank)  # now bench/survive/lab.py does so, in the case for it
            if len(step.members) < whole:
                report(event="healed", rank=t.rank, step=step.number, seconds=now - before)
            time.sleep(0.02)  # a step long enough for a worker to come back before the end
            before, whole = time.monotonic(), len(step.members)
        for number in range(t.step):
            np.add.at(expected, t.samples.of_step(number), 1)
        wrong = int((model.counts.detach().numpy() != expected).sum())
        report(event="end", rank=t.rank, wrong=wrong, digest=f"{t.digest():016x}", left=t.reason,
            longest=longest, members=[] if step is None else step.members)  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), "reproducible" in sys.argv[2:])
