"""What the survivors of the zoo share: a model that counts its samples, a log, and a kill where KILL says so."""

import glob
import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import Dataset

SAMPLES, BATCH = 64, 16
next_step = 0


class Noisy(Dataset):
    """Samples whose noise is drawn anew whenever they are asked for, each with its number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.randn(8) + index % 4, index % 4, index


class Counted(nn.Module):
    """A classifier; `seen` counts how often each sample is in the parameters."""

    def __init__(self, *more):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), *more, nn.ReLU(), nn.Linear(32, 4))
        self.seen = nn.Parameter(torch.zeros(SAMPLES))

    def groups(self, lr):
        """Return what an SGD optimizer takes: the mean over a batch, times its size, is one per sample."""
        counter = {"params": [self.seen], "lr": BATCH, "momentum": 0.0, "weight_decay": 0.0}
        return [{"params": self.body.parameters(), "lr": lr}, counter]


def loss(model, batch):
    """Return the sum over a batch's samples; somewhere in a step is where a worker dies."""
    strike("step")
    x, y, index = batch
    return nn.functional.cross_entropy(model.body(x), y, reduction="sum") - model.seen[index].sum()


def strike(place):
    """End this process by SIGKILL where KILL names it (`place:rank:step`, with commas between), once."""
    here = f"{place}:{os.environ['RANK']}:{next_step}"
    if here in os.environ.get("KILL", "").split(",") and not is_again():
        with open(f"struck.{here}", "w"):
            os.kill(os.getpid(), signal.SIGKILL)


def note(t, step, model, wait=True):
    """Write down which samples a step took, and after an epoch how often each has counted so far.

    With `wait`, the others give a rank that died the time to come back, before the job is over.
    """
    global next_step
    next_step = step.number + 1
    steps_per_epoch = SAMPLES // BATCH
    with open(f"orders.{t.rank}.txt", "a") as file:
        file.write(f"{step.number} {' '.join(map(str, t.samples.of_step(step.number)))}\n")
    if next_step % steps_per_epoch == 0:
        with open(f"epochs.{t.rank}.txt", "a") as file:
            seen = model.seen.detach()
            file.write(f"{next_step // steps_per_epoch} {seen.min():g} {seen.max():g}\n")
    if is_again():
        open(f"back.{t.rank}", "w").close()
    for struck in glob.glob("struck.*") if wait else []:
        rank = struck.split(":")[1]
        await_file(f"up.{rank}", 50.0)
        await_file(f"back.{rank}", 1.0)  # it joins between two steps, so there have to be some
    time.sleep(0.02)
    strike("loop")


def await_file(name, seconds):
    deadline = time.monotonic() + seconds
    while not os.path.exists(name) and time.monotonic() < deadline:
        time.sleep(0.05)


def is_again():
    """Tell whether this process has taken the place of one that died."""
    return os.environ["RINGSIDE_SURVIVE_START"] != "1"


if is_again():
    open(f"up.{os.environ['RANK']}", "w").close()
