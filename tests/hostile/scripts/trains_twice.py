"""Trains twice; the first time that it comes to step 3 of the second training, it is killed.

`trains_twice.py DIRECTORY`: where it notes that it has died.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from tests.survive.counting import Counting, consumed

from ringside.survive.train import training

model = Counting(24)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
died = Path(sys.argv[1]) / "died"
for number, steps in ((1, 2), (2, 6)):
    with training(
        model, optimizer, range(24), loss_fn=consumed, batch_size=24, micro_batches=1, mean=False, steps=steps
    ) as t:
        steps = 0
        for step in t:
            steps += 1
            if (number, step.number) == (2, 3) and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    print(number, t.step, steps, sorted(set(model.counts.tolist())), flush=True)
