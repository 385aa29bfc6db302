"""What the scripts of the zoo share, as a user's `utils.py` does: the start, a model, data, and what is kept."""

import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

FEATURES, CLASSES = 32, 5


def begin(seed=0):
    """Join the others; return (rank, number of ranks)."""
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    """A small classifier of two layers."""

    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def batches(steps, rank, size=8):
    """Yield other samples on every rank, the same in every run."""
    for step in range(steps):
        g = torch.Generator().manual_seed(1000 * step + rank)
        yield torch.randn(size, FEATURES, generator=g), torch.randint(CLASSES, (size,), generator=g)


def train(model, optimizer, steps, rank, after=lambda step: None):
    """Train as the tutorial does."""
    for step, (x, y) in enumerate(batches(steps, rank)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after(step)


def keep(name, model):
    """Every rank writes parameters, buffers and gradients."""
    gradients = {key: value.grad for key, value in model.named_parameters()}
    torch.save({"state": model.state_dict(), "gradients": gradients}, f"{name}.{dist.get_rank()}.pt")


def say(words):
    """Print a line in one piece: torchrun's workers write unbuffered, and print() writes the line's end by itself."""
    sys.stdout.write(f"{words}\n")
